"""What a writer writes of a snapshot that may still be staged: the files in its arena's images.

What is written is waited for; blocks go from the arena to the storage as they lie there. The
headers, which the trainer does not stage, are put into the arena as well when they are written.

One save as its writer finds it in an arena: what it is, what is written of it, its seal.
"""

# ruff: noqa: D102  # the protocols document the methods

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from dist_ckpt.async_save.snapshots.arena import FollowedArena
from dist_ckpt.async_save.snapshots.arena_layout import Seal, SnapshotMetadata
from dist_ckpt.core.comm.collectives.collective import Bodies
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index.catalog_json import EncodedCatalog
from dist_ckpt.core.planning.plan import FilePlan, FileReceipt, SavePlan
from dist_ckpt.core.planning.save.save_planner import items_of
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.buffers import BufferPool, address_of
from dist_ckpt.core.saving.transaction import IndexFields
from dist_ckpt.core.shard_io.write.link_unchanged import LinkableSaves, SavedPart, write_or_link
from dist_ckpt.core.shard_io.write.shard_writer import (
    NullStorage,
    RankFiles,
    WritableStorage,
    write_all,
)
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, CorruptError

# How rarely a wait looks whether more is staged: after this share of the time that it has waited.
_SHARE = 0.05
_LEAST_S = 0.0005
_MOST_S = 0.02

# So long the trainer has the memory and the processors for itself: it waits for its copy, and
# nobody waits for what is written. What takes longer to stage is followed as it comes.
_HEAD_START_S = 0.25


class Staging:
    """How far a snapshot is staged. Threads may share it.

    `check` raises a CheckpointError if no more will be staged than is now; it is called whenever
    something is waited for.
    """

    def __init__(self, followed: FollowedArena, check: Callable[[], None]) -> None:
        self._followed = followed
        self._check = check
        self._ready = 0

    def await_ready(self, stop: int) -> None:
        """Return when everything before this byte of the arena is staged.

        Raises what `check` raises; ConflictError if the arena holds another snapshot by now.
        """
        if stop > self._ready:
            self._wait(lambda: self._look() >= stop)

    def give_way(self) -> None:
        """Return when all is staged, or the trainer has had its head start. Raises as above."""
        until = time.monotonic() + _HEAD_START_S
        self._wait(lambda: self._followed.is_complete or time.monotonic() > until)

    def await_complete(self) -> None:
        """Return when all of it is staged. Raises as above, also if it has gone since."""
        self._wait(lambda: self._followed.is_complete)

    def check(self) -> None:
        """Raise if it will never be complete."""
        try:
            self._check()
        except CheckpointError:
            # It may have become complete just before.
            if not self._followed.is_complete:
                raise

    def _look(self) -> int:
        self._ready = self._followed.ready
        return self._ready

    def _wait(self, is_there: Callable[[], bool]) -> None:
        began_at = time.monotonic()
        while not is_there():
            self.check()
            waited_s = time.monotonic() - began_at
            time.sleep(min(max(_LEAST_S, _SHARE * waited_s), _MOST_S))


def files_of(followed: FollowedArena, staging: Staging, plans: Sequence[FilePlan]) -> RankFiles:
    """Return what the rank of a snapshot writes by its plans, out of the arena.

    CorruptError unless the images are the files of the plans, and objects files and attached ones
    after them.
    """
    snapshot = followed.snapshot
    num = len(plans)
    planned = [(plan.name, plan.nbytes) for plan in plans]
    named = [(image.name, image.nbytes) for image in snapshot.images[:num]]
    others = [image.name for image in snapshot.images[num:]]
    if named != planned or not all(_is_whole_file(name) for name in others):
        raise CorruptError(
            f"snapshot {snapshot.id} of {snapshot.path} has other files than its plan says: "
            "do trainer and writer run one version of dist_ckpt?"
        )
    mapped = [
        _MappedImage(image, span.start, staging)
        for image, span in zip(followed.images, followed.placement.images, strict=True)
    ]
    sources = tuple(
        partial(StagedSource, image, plan) for image, plan in zip(mapped, plans, strict=False)
    )
    headers = {
        plan.name: image[: plan.header.nbytes]
        for plan, image in zip(plans, followed.images, strict=False)
    }
    objects = _Objects(dict(zip(others, mapped[num:], strict=True)))
    return RankFiles(snapshot.step, tuple(plans), sources, objects, headers)


def _is_whole_file(name: str) -> bool:
    """Say whether a file is one that is encoded when the save begins: of objects, or attached."""
    is_attached = filenames.parse_attached_file(name) is not None
    return is_attached or filenames.parse_objects_file(name) is not None


class _MappedImage:
    """The memory of one file, which begins at byte `start` of the arena."""

    def __init__(self, memory: memoryview, start: int, staging: Staging) -> None:
        self._memory = memory
        self._start = start
        self._staging = staging
        self._address = address_of(memory) if memory else 0

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self._memory)

    def bytes(self, start: int, stop: int) -> memoryview:
        """Return bytes of the file, once they are staged."""
        self._staging.await_ready(self._start + stop)
        return self._memory[start:stop]

    def address(self, start: int, stop: int) -> int:
        """Return where bytes of the file begin, once they are staged."""
        self._staging.await_ready(self._start + stop)
        return self._address + start


class StagedSource:
    """One shard in the image of its file (`CellSource`). All calls but `nbytes` may wait."""

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
        return self._image.bytes(self._start + start, self._start + stop)


class _Objects(Mapping[str, bytes]):
    """The objects files: read when they are asked for, after the shard files."""

    def __init__(self, images: Mapping[str, _MappedImage]) -> None:
        self._images = images

    def __getitem__(self, name: str) -> bytes:
        image = self._images[name]
        return bytes(image.bytes(0, image.nbytes))

    def __iter__(self) -> Iterator[str]:
        return iter(self._images)

    def __len__(self) -> int:
        return len(self._images)


class StagedSave:
    """A rank's part of one save. One thread writes it, and another one may seal it meanwhile.

    Whatever is in the arena is the same then, whoever comes first: both put the same bytes there.
    """

    def __init__(
        self,
        followed: FollowedArena,
        check: Callable[[], None],
        plan: Callable[[Bodies], tuple[SavePlan, EncodedCatalog]],
    ) -> None:
        """Read what the arena says of it, by the `plan` of all ranks' inventories.

        `check` raises if it is not complete and never will be. CorruptError if the arena makes no
        sense.
        """
        self.snapshot = snapshot = followed.snapshot
        try:
            self.details = typed_msgpack.decode(snapshot.details, SnapshotMetadata)
        except ValueError as error:
            raise CorruptError(f"snapshot {snapshot.id} of {snapshot.path}: {error}") from error
        self.plan, self.text = plan(self.details.bodies)
        self.staging = Staging(followed, check)
        plans = items_of(self.plan, snapshot.rank)
        self._files = files_of(followed, self.staging, plans)
        self.followed = followed
        self._is_sealed = False

    def index_fields(self) -> IndexFields:
        """Return the fields of the index, as the trainer gave them."""
        return IndexFields(
            step=self.snapshot.step,
            metadata=self.details.mirrored,
            saved_by=self.details.saved_by,
            # The state is of then; and who restores compares the times of saves.
            saved_at=self.details.began_at,
            save=self.snapshot.id,
        )

    def write(
        self,
        storage: WritableStorage,
        folder: str,
        attempt: str,
        *,
        threads: int,
        slots: BufferPool,
    ) -> tuple[FileReceipt, ...]:
        """Write its files as they are staged, as `write_all` does; seal it as this attempt.

        So whoever is told that it is written finds the seal.
        """
        written = write_all(storage, folder, self._files, threads=threads, slots=slots)
        self._seal_as(attempt, written)
        return written

    def write_or_link(
        self,
        storage: Storage,
        folder: str,
        attempt: str,
        earlier: LinkableSaves,
        *,
        threads: int,
        slots: BufferPool,
    ) -> SavedPart:
        """Do so, but link what an earlier save has, as `write_or_link` does."""
        part = write_or_link(storage, folder, self._files, earlier, threads=threads, slots=slots)
        self._seal_as(attempt, part.receipts)
        return part

    def _seal_as(self, attempt: str, written: tuple[FileReceipt, ...]) -> None:
        self.staging.await_complete()
        self.followed.seal(Seal(attempt, written))
        self._is_sealed = True

    def seal(self, attempt: str, *, threads: int, slots: BufferPool) -> None:
        """Seal it once it is complete, though it was not written.

        Only its bytes are digested: what is in memory is as good as before, and who restores it
        asks whether anything else was committed. Raises if it is not complete and never will be.
        """
        if not self._is_sealed:
            self.staging.await_complete()
            self.write(NullStorage(), "", attempt, threads=threads, slots=slots)
