"""One save in the arena of its writer: its files, which may still be staged, and its seal.

The writer waits for staged bytes, and writes blocks from the arena without a copy. The trainer does
not stage headers: the writer stores them in the arena when it writes them.
"""

# ruff: noqa: D102  # the protocols document the methods

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from dist_ckpt.async_save.snapshots.arena import FollowedArena
from dist_ckpt.async_save.snapshots.arena_layout import Seal, Snapshot, SnapshotMetadata
from dist_ckpt.async_save.writer.writer_messages import Hello
from dist_ckpt.core.comm.collectives.collective import DistinctPayloads
from dist_ckpt.core.commit.transaction import IndexFields
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index.index_json import EncodedCatalog
from dist_ckpt.core.planning.plan import FilePlan, FileReceipt, SavePlan
from dist_ckpt.core.planning.save.save_planner import plan_rank_files
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.host_memory import BufferPool, address_of
from dist_ckpt.core.runtime.processes import find_state, running_time
from dist_ckpt.core.shard_io.write.shard_writer import NullStorage, RankFiles, write_rank_files
from dist_ckpt.errors import CheckpointError, CorruptError, RankError

_log = logging.getLogger("dist_ckpt")

# The interval of a polling wait: this share of the time waited so far.
_SHARE = 0.05
_MIN_S = 0.0005
_MAX_S = 0.02

# At first the writer leaves the memory and the processors to the trainer: training waits for the
# copy, and nothing waits for the writer. During a longer copy the writer follows.
_HEAD_START_S = 0.25


class Staging:
    """The progress of staging. Threads may share it. `check` raises if no more will be staged.

    A wait also ends if the trainer that `hello` describes has staged nothing for `late_timeout_s`:
    it may be stopped, or wait for a device.
    """

    def __init__(
        self, followed: FollowedArena, check: Callable[[], None], hello: Hello | None = None
    ) -> None:
        self._followed = followed
        self._check = check
        self._hello = hello
        self._ready = 0
        self._progress, self._moved_at, self._has_warned = -1, 0.0, False

    def await_ready(self, stop: int) -> None:
        """Wait until all bytes before `stop` of the arena are staged.

        Raises the error of `check`. ConflictError if another snapshot has overwritten it.
        """
        if stop > self._ready:
            self._wait(lambda: self._read_ready() >= stop)

    def await_head_start(self) -> None:
        """Wait until all is staged or the head start is over. Raises like `await_ready`."""
        until = time.monotonic() + _HEAD_START_S
        self._wait(lambda: self._followed.is_complete or time.monotonic() > until)

    def await_complete(self) -> None:
        """Wait until all is staged. Raises like `await_ready`, even if it was complete before."""
        self._wait(lambda: self._followed.is_complete)

    def check(self) -> None:
        """Raise the error of `check` if the snapshot will never be complete."""
        try:
            self._check()
        except CheckpointError:
            # It may have become complete just before.
            if not self._followed.is_complete:
                raise

    def _read_ready(self) -> int:
        self._ready = self._followed.ready
        return self._ready

    def _check_progress(self, hello: Hello) -> None:
        """Log a trainer that stages nothing; raise RankError after `late_timeout_s`."""
        now, progress, settings = running_time(), self._followed.ready, hello.settings
        if progress != self._progress:
            self._progress, self._moved_at, self._has_warned = progress, now, False
        idle_s = now - self._moved_at
        if self._has_warned and idle_s < settings.late_timeout_s:
            return
        if idle_s < min(settings.join_warning_s, settings.late_timeout_s):
            return
        snapshot, trainer = self._followed.snapshot, hello.trainer
        state = "" if trainer is None else find_state(trainer.pid, trainer.started)
        process = f" (process {trainer.pid} is {state})" if trainer else ""
        fact = (
            f"the trainer of rank {snapshot.rank}{process} has staged nothing more of "
            f"{snapshot.path} for {idle_s:.3g} s"
        )
        if idle_s >= settings.late_timeout_s:
            raise RankError(
                f"{fact}: nothing is committed. Continue it if it is stopped, else look at its "
                f"stack (py-spy dump) and its devices; then save again",
                rank=snapshot.rank,
            )
        self._has_warned = True
        _log.warning("%s; the limit is %g s", fact, settings.late_timeout_s)

    def _wait(self, condition: Callable[[], bool]) -> None:
        began_at = time.monotonic()
        while not condition():
            self.check()
            if self._hello is not None:
                self._check_progress(self._hello)
            waited_s = time.monotonic() - began_at
            time.sleep(min(max(_MIN_S, _SHARE * waited_s), _MAX_S))


def open_staged_files(
    followed: FollowedArena, staging: Staging, plans: Sequence[FilePlan]
) -> RankFiles:
    """Return the planned files of a snapshot, read from the arena.

    CorruptError unless the images are the files of the plans, then objects files and attached
    files.
    """
    snapshot = followed.snapshot
    num = len(plans)
    planned = [(plan.name, plan.nbytes) for plan in plans]
    staged = [(image.name, image.nbytes) for image in snapshot.images[:num]]
    encoded = [image.name for image in snapshot.images[num:]]
    if staged != planned or any(
        filenames.parse_objects_file(name) is None and filenames.parse_attached_file(name) is None
        for name in encoded
    ):
        raise CorruptError(
            f"snapshot {snapshot.id} of {snapshot.path} has other files than its plan: use the "
            f"same version of dist_ckpt in trainer and writer"
        )
    mapped = [
        _MappedImage(image, span.start, staging)
        for image, span in zip(followed.images, followed.spans.images, strict=True)
    ]
    readers = tuple(
        partial(StagedReader, image, plan) for image, plan in zip(mapped, plans, strict=False)
    )
    headers = {
        plan.name: image[: plan.header.nbytes]
        for plan, image in zip(plans, followed.images, strict=False)
    }
    objects = _Objects(dict(zip(encoded, mapped[num:], strict=True)))
    return RankFiles(snapshot.step, tuple(plans), readers, objects, headers)


class _MappedImage:
    """The memory of one file, from byte `start` of the arena on."""

    def __init__(self, memory: memoryview, start: int, staging: Staging) -> None:
        self._memory = memory
        self._start = start
        self._staging = staging
        self._address = address_of(memory) if memory else 0

    def all_bytes(self) -> bytes:
        return bytes(self.view(0, len(self._memory)))

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes of the file when they are staged."""
        self._staging.await_ready(self._start + stop)
        return self._memory[start:stop]

    def address(self, start: int, stop: int) -> int:
        """Return the address of the first byte when all are staged."""
        self._staging.await_ready(self._start + stop)
        return self._address + start


class StagedReader:
    """One shard in the image of its file (`CellReader`). All calls but `nbytes` may wait."""

    __slots__ = ("_image", "_start", "_stop")

    def __init__(self, image: _MappedImage, plan: FilePlan, number: int) -> None:
        span = plan.items[number].span
        self._image = image
        self._start = plan.header.nbytes + span.start
        self._stop = plan.header.nbytes + span.stop

    @property
    def nbytes(self) -> int:
        return self._stop - self._start

    def address(self) -> int:
        return self._image.address(self._start, self._stop)

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        return self._image.view(self._start + start, self._start + stop)


class _Objects(Mapping[str, bytes]):
    """The objects files. They are read on access, after the shard files."""

    def __init__(self, images: Mapping[str, _MappedImage]) -> None:
        self._images = images

    def __getitem__(self, name: str) -> bytes:
        return self._images[name].all_bytes()

    def __iter__(self) -> Iterator[str]:
        return iter(self._images)

    def __len__(self) -> int:
        return len(self._images)


def index_fields(snapshot: Snapshot, details: SnapshotMetadata) -> IndexFields:
    """Return the fields of the index, from the trainer."""
    return IndexFields(
        step=snapshot.step,
        metadata=details.mirrored,
        saved_by=details.saved_by,
        # The time of the state, not of the commit. A restore compares the times of saves.
        saved_at=details.began_at,
        save_id=snapshot.id,
    )


class StagedSave:
    """A rank's part of one save. One thread writes it, and another may seal it meanwhile.

    Both write the same bytes into the arena, so their order does not matter.
    """

    def __init__(
        self,
        followed: FollowedArena,
        check: Callable[[], None],
        plan: Callable[[DistinctPayloads], tuple[SavePlan, EncodedCatalog]],
        hello: Hello | None = None,
    ) -> None:
        """Read its metadata from the arena. `plan` returns the plan of all ranks' inventories.

        `check` and `hello`: see `Staging`. CorruptError if the arena is invalid.
        """
        self.snapshot = snapshot = followed.snapshot
        try:
            self.details = typed_msgpack.decode(snapshot.details, SnapshotMetadata)
        except ValueError as error:
            raise CorruptError(f"snapshot {snapshot.id} of {snapshot.path}: {error}") from error
        self.plan, self.encoded_catalog = plan(self.details.inventories)
        self.staging = Staging(followed, check, hello)
        plans = plan_rank_files(self.plan, snapshot.rank)
        self.files = open_staged_files(followed, self.staging, plans)
        self.followed = followed
        self._is_sealed = False

    def seal(self, attempt: str, *, threads: int, buffers: BufferPool) -> None:
        """Compute the digests, and seal the snapshot when it is complete. Nothing is written.

        A later run may restore it from memory. Raises if no more will be staged.
        """
        if not self._is_sealed:
            self.staging.await_complete()
            files = write_rank_files(
                NullStorage(), "", self.files, threads=threads, buffers=buffers
            )
            self.seal_as(attempt, files)

    def seal_as(self, attempt: str, files: tuple[FileReceipt, ...]) -> None:
        """Seal the snapshot when it is complete. `files` are the receipts of its files."""
        self.staging.await_complete()
        self.followed.seal(Seal(attempt, files))
        self._is_sealed = True
