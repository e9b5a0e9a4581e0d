"""Snapshots in the arenas of earlier trainers, and their saves.

Arenas are read like files, not mapped. If another process truncates an arena, the read fails, but
this process gets no SIGBUS.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from dist_ckpt.async_save.snapshots import arena_layout as layout
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS, RankFolder
from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.host_memory import open_existing
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.storage.local.direct_io import Descriptor
from dist_ckpt.errors import CheckpointError, CorruptError

_log = logging.getLogger("dist_ckpt")

_WORD_NBYTES = 8


@dataclass(frozen=True, slots=True)
class RecoveredSnapshot:
    """A snapshot in an arena, open until `close`. Its digests were not checked yet.

    If it is not complete, it is being staged, or its trainer died meanwhile. Without a seal, its
    headers and digests may be missing. If it is committed, it became a checkpoint, which may have
    been deleted since.
    """

    path: str
    snapshot: layout.Snapshot
    spans: layout.SnapshotSpans
    is_complete: bool
    is_committed: bool
    seal: layout.Seal | None
    sequence: int
    descriptor: Descriptor

    def read_into(self, image: int, start: int, target: memoryview) -> None:
        """Fill memory with the bytes of a file from `start` on. Thread-safe.

        CorruptError if the arena was truncated, StorageError after `close`.
        """
        span = self.spans.images[image]
        assert 0 <= start <= start + len(target) <= span.nbytes, "beyond the file"
        with self.descriptor.lend() as (fd,):
            _read(fd, span.start + start, target, self.path)

    def check(self) -> None:
        """Raise CorruptError if the snapshot was overwritten: then the bytes read are invalid."""
        with self.descriptor.lend() as (fd,):
            sequence = _read_word(fd, layout.SEQUENCE_WORD, self.path)
        if sequence != self.sequence - (not self.is_complete):
            raise CorruptError(f"{self.path}: the snapshot was overwritten while it was read")

    def close(self) -> None:
        """Close the file of the arena. The arena stays."""
        self.descriptor.release()


def open_recovered(path: str, job: str) -> RecoveredSnapshot | None:
    """Open the snapshot in an arena. None if it never had one. All content is checked.

    FileNotFoundError without an arena. IncompatibleError for another version. CorruptError for
    another job, damage, or a snapshot whose document is incomplete.
    """
    fd = open_existing(path, writable=False)
    recovered: RecoveredSnapshot | None = None
    try:
        recovered = _read_snapshot(fd, path, job)
    finally:
        if recovered is None:
            os.close(fd)
    return recovered


def open_first(
    folder: RankFolder, number: int
) -> tuple[RecoveredSnapshot | None, list[CheckpointError]]:
    """Open a rank's snapshot by its first valid path. Also return the problems before it."""
    problems: list[CheckpointError] = []
    for path in folder.open_paths(number):
        try:
            return open_recovered(path, folder.job), problems
        except OSError:
            continue  # the process that had it open has ended
        except CheckpointError as error:
            problems.append(error)
    return None, problems


def _read_snapshot(fd: int, path: str, job: str) -> RecoveredSnapshot | None:
    nbytes = os.fstat(fd).st_size
    header = os.pread(fd, layout.HEADER_NBYTES, 0)
    layout.check_identity(header, job, path)
    sequence = _read_word(fd, layout.SEQUENCE_WORD, path)
    if sequence == 0:
        return None
    record = layout.decode_record(header, layout.DOCUMENT_RECORD)
    if record is None or sequence not in (record.sequence - 1, record.sequence):
        raise CorruptError(f"{path} has no snapshot: its staging was not finished")
    document = _read_bytes(fd, layout.document_span(record, path), path)
    snapshot, spans = layout.decode_snapshot(document, record, nbytes, path)
    is_complete = sequence == record.sequence
    seal = _read_seal(fd, header, spans, sequence, path) if is_complete else None
    is_committed = is_complete and _read_word(fd, layout.COMMITTED_WORD, path) == sequence
    if sequence != _read_word(fd, layout.SEQUENCE_WORD, path):
        raise CorruptError(f"{path} has no snapshot: one is being staged")
    return RecoveredSnapshot(
        path=path,
        snapshot=snapshot,
        spans=spans,
        is_complete=is_complete,
        is_committed=is_committed,
        seal=seal,
        sequence=record.sequence,
        descriptor=Descriptor(path, fd),
    )


def _read_seal(
    fd: int, header: bytes, spans: layout.SnapshotSpans, sequence: int, path: str
) -> layout.Seal | None:
    record = layout.decode_record(header, layout.SEAL_RECORD)
    if record is None or record.sequence != sequence:
        return None  # absent, half written, or of an earlier snapshot
    span = spans.seal
    if record.nbytes > span.nbytes:
        raise CorruptError(f"{path}: a seal of {record.nbytes} bytes in {span.nbytes}")
    document = _read_bytes(fd, ByteRange(span.start, span.start + record.nbytes), path)
    return layout.decode_document(document, record, layout.Seal, path)


def _read_word(fd: int, number: int, path: str) -> int:
    start = number * _WORD_NBYTES
    return int.from_bytes(
        _read_bytes(fd, ByteRange(start, start + _WORD_NBYTES), path), sys.byteorder
    )


def _read_bytes(fd: int, span: ByteRange, path: str) -> bytearray:
    data = bytearray(span.nbytes)
    _read(fd, span.start, memoryview(data), path)
    return data


def _read(fd: int, start: int, target: memoryview, path: str) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], start + done)
        if not count:
            raise CorruptError(f"{path} ends at byte {start + done}: it was truncated")
        done += count


class SaveIdentity(Message, frozen=True):
    """The fields of a save that are equal on all ranks. `incarnation` is 0 without a run."""

    id: str
    path: str
    step: int | None
    world_size: int
    began_at: float
    overwrite: bool
    incarnation: int = 0

    @staticmethod
    def of(snapshot: layout.Snapshot) -> SaveIdentity:
        """Return the save of a snapshot. ValueError if its metadata is invalid."""
        details = typed_msgpack.decode(snapshot.details, layout.SnapshotMetadata)
        return SaveIdentity(
            snapshot.id,
            snapshot.path,
            snapshot.step,
            snapshot.world_size,
            details.began_at,
            details.overwrite,
            0 if details.incarnation is None else details.incarnation.number,
        )

    @property
    def name(self) -> str:
        """Its step and path, for messages."""
        return self.path if self.step is None else f"step {self.step} ({self.path})"


@dataclass(frozen=True, slots=True, eq=False)
class RecoveredSave:
    """One save of a job. `sealed` has the complete and sealed snapshots on this host, by rank.

    `attempt` is `UNCLAIMED` if the writers here received none, and None if no snapshot is sealed.
    `was_committed`: the save became a checkpoint, which may have been deleted since. The digests
    were not checked yet.
    """

    identity: SaveIdentity
    attempt: str | None = None
    was_committed: bool = False
    sealed: Mapping[int, RecoveredSnapshot] = field(default_factory=dict)


@contextmanager
def open_saves(
    folders: Iterable[RankFolder],
) -> Iterator[tuple[Mapping[str, RecoveredSave], Sequence[str]]]:
    """Yield the saves in the arenas of some ranks, by id, and the problems of unreadable arenas.

    The saves are open until the block ends. Unreadable arenas are left unchanged: they may belong
    to another job or a newer version.
    """
    saves: dict[str, RecoveredSave] = {}
    problems: list[str] = []
    with ExitStack() as stack:
        for folder in folders:
            for number in range(NUM_ARENAS):
                recovered, errors = open_first(folder, number)
                problems += map(str, errors)
                if recovered is None:
                    continue
                stack.callback(recovered.close)
                try:
                    _add_snapshot(saves, recovered, folder.rank)
                except ValueError as error:
                    problems.append(f"{recovered.path}: {error}")
        yield saves, problems


def _add_snapshot(saves: dict[str, RecoveredSave], recovered: RecoveredSnapshot, rank: int) -> None:
    """Add a rank's snapshot to its save. ValueError if they contradict each other."""
    snapshot, seal = recovered.snapshot, recovered.seal
    if snapshot.rank != rank:
        raise ValueError(f"a snapshot of rank {snapshot.rank} is in the folder of rank {rank}")
    identity = SaveIdentity.of(snapshot)
    save = saves.get(snapshot.id, RecoveredSave(identity))
    if save.identity != identity:
        raise ValueError(f"snapshot {snapshot.id} is of another save on another rank")
    if seal is None:
        saves[snapshot.id] = save
        return
    sizes = {image.name: image.nbytes for image in snapshot.images}
    if {file.name: file.nbytes for file in seal.files} != sizes:
        raise ValueError(f"snapshot {snapshot.id} is sealed with other files than it has")
    if save.attempt and seal.attempt and save.attempt != seal.attempt:
        raise ValueError(f"snapshot {snapshot.id} is sealed as {seal.attempt}, and as another")
    saves[snapshot.id] = replace(
        save,
        attempt=save.attempt or seal.attempt,
        was_committed=save.was_committed or recovered.is_committed,
        sealed={**save.sealed, rank: recovered},
    )
