"""What is left in arenas when their trainers are gone: snapshots, and the saves that they make up.

They are read like files, not mapped: an arena that somebody cuts short meanwhile is then an error,
and not the end of this process.

Which files of a checkpoint a load reads from snapshots in memory, and not from the storage.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from dist_ckpt.async_save.snapshots import arena_layout as layout
from dist_ckpt.async_save.snapshots.arena_layout import (
    Seal,
    Snapshot,
    SnapshotMetadata,
    SnapshotSpans,
)
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS, JobFolder, RankFolder, has_jobs
from dist_ckpt.async_save.snapshots.root_id import find_root_id, job_id
from dist_ckpt.core.checkpoint.open_checkpoint import NOTHING_IN_MEMORY, MemorySource
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.filenames import INDEX
from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.shared_memory import open_existing
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.storage import open_storage
from dist_ckpt.core.storage.local.direct_io import Descriptor
from dist_ckpt.core.storage.virtual_files import ServedFile
from dist_ckpt.errors import CheckpointError, CorruptError

_WORD_NBYTES = 8


@dataclass(frozen=True, slots=True)
class RecoveredSnapshot:
    """A snapshot in an arena. Its bytes are to be checked by the digests in it.

    Not complete: it is being staged, or its trainer died over it. Not sealed: digests and headers
    are not all in. Committed: it became a checkpoint, whatever has become of that. `close` ends the
    use of it.
    """

    place: str
    snapshot: Snapshot
    placement: SnapshotSpans
    is_complete: bool
    is_committed: bool
    seal: Seal | None
    sequence: int
    descriptor: Descriptor

    def read_into(self, image: int, start: int, target: memoryview) -> None:
        """Fill memory with the bytes of a file from `start` on. Threads may call it at once.

        CorruptError if the arena has been cut short, StorageError after `close`.
        """
        span = self.placement.images[image]
        assert 0 <= start <= start + len(target) <= span.nbytes, "beyond the file"
        with self.descriptor.lend() as (fd,):
            _read(fd, span.start + start, target, self.place)

    def check(self) -> None:
        """Check that it is still there, so that what was read is of it. CorruptError if not."""
        with self.descriptor.lend() as (fd,):
            sequence = _word(fd, layout.SEQUENCE_WORD, self.place)
        if sequence != self.sequence - (not self.is_complete):
            raise CorruptError(f"{self.place}: the snapshot was overwritten while it was read")

    def close(self) -> None:
        """End the use of it. The arena stays."""
        self.descriptor.release()


def open_recovered(place: str, job: str) -> RecoveredSnapshot | None:
    """Open the snapshot in an arena; None if there never was one. Nothing in it is believed.

    FileNotFoundError if there is no arena; IncompatibleError if it is of another version,
    CorruptError if it is another job's, damaged, torn before it said what it holds, or nonsense.
    """
    fd = open_existing(place, writable=False)
    try:
        kept = _opened(fd, place, job)
    except BaseException:
        os.close(fd)
        raise
    if kept is None:
        os.close(fd)
    return kept


def open_first(
    folder: RankFolder, number: int
) -> tuple[RecoveredSnapshot | None, list[CheckpointError]]:
    """Open the snapshot in an arena of a rank, wherever that is, if there is one.

    Besides returns what is wrong with the places that were looked at before.
    """
    problems: list[CheckpointError] = []
    for place in folder.places(number):
        try:
            return open_recovered(place, folder.job), problems
        except OSError:
            continue  # it went with its process
        except CheckpointError as error:
            problems.append(error)
    return None, problems


def _opened(fd: int, place: str, job: str) -> RecoveredSnapshot | None:
    nbytes = os.fstat(fd).st_size
    header = os.pread(fd, layout.HEADER_NBYTES, 0)
    layout.check_identity(header, job, place)
    sequence = _word(fd, layout.SEQUENCE_WORD, place)
    if sequence == 0:
        return None
    record = layout.decode_record(header, layout.DOCUMENT_RECORD)
    if record is None or sequence not in (record.sequence - 1, record.sequence):
        raise CorruptError(f"{place} was left half staged: there is no snapshot in it")
    document = _bytes(fd, layout.document_span(record, place), place)
    snapshot, placement = layout.open_document(document, record, nbytes, place)
    is_complete = sequence == record.sequence
    seal = _seal(fd, header, placement, sequence, place) if is_complete else None
    is_committed = is_complete and _word(fd, layout.COMMITTED_WORD, place) == sequence
    if sequence != _word(fd, layout.SEQUENCE_WORD, place):
        raise CorruptError(f"{place} is being staged into: there is no snapshot in it")
    return RecoveredSnapshot(
        place=place,
        snapshot=snapshot,
        placement=placement,
        is_complete=is_complete,
        is_committed=is_committed,
        seal=seal,
        sequence=record.sequence,
        descriptor=Descriptor(place, fd),
    )


def _seal(
    fd: int, header: bytes, placement: SnapshotSpans, sequence: int, place: str
) -> Seal | None:
    record = layout.decode_record(header, layout.SEAL_RECORD)
    if record is None or record.sequence != sequence:
        return None  # not yet, or half of one, or that of an earlier snapshot
    room = placement.seal
    if record.nbytes > room.nbytes:
        raise CorruptError(f"{place}: a seal of {record.nbytes} bytes in {room.nbytes}")
    document = _bytes(fd, ByteRange(room.start, room.start + record.nbytes), place)
    layout.check_document(document, record, place)
    try:
        return typed_msgpack.decode(document, Seal)
    except ValueError as error:
        raise CorruptError(f"{place}: {error}") from error


def _word(fd: int, number: int, place: str) -> int:
    start = number * _WORD_NBYTES
    return int.from_bytes(_bytes(fd, ByteRange(start, start + _WORD_NBYTES), place), sys.byteorder)


def _bytes(fd: int, span: ByteRange, place: str) -> bytearray:
    data = bytearray(span.nbytes)
    _read(fd, span.start, memoryview(data), place)
    return data


def _read(fd: int, start: int, target: memoryview, place: str) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], start + done)
        if not count:
            raise CorruptError(f"{place} ends at byte {start + done}: it was cut short")
        done += count


class SaveIdentity(Message, frozen=True):
    """What all who have a part of a save tell of it alike.

    `overwrite`: it was to replace a checkpoint at its path. `start` is that of the run that saved
    it, 0 for none.
    """

    id: str
    path: str
    step: int | None
    world_size: int
    began_at: float
    overwrite: bool
    incarnation: int = 0

    @staticmethod
    def of(snapshot: Snapshot) -> SaveIdentity:
        """Return which save a snapshot is a part of. ValueError if its details make no sense."""
        details = typed_msgpack.decode(snapshot.details, SnapshotMetadata)
        told = snapshot.id, snapshot.path, snapshot.step, snapshot.world_size
        incarnation = 0 if details.run is None else details.run.number
        return SaveIdentity(*told, details.began_at, details.overwrite, incarnation)

    @property
    def name(self) -> str:
        """What users know it by."""
        return self.path if self.step is None else f"step {self.step} ({self.path})"


@dataclass(frozen=True, slots=True, eq=False)
class RecoveredSave:
    """One save of a job. `sealed` are the ranks whose part is here, with digests and headers.

    `attempt` is the one that they were written into, `UNCLAIMED` if the writers here knew of none;
    None if nothing of it is sealed here. `was_committed` says that it became a checkpoint, which
    may have been deleted since. The digests tell whether the bytes are still what was saved: nobody
    has looked yet.
    """

    identity: SaveIdentity
    attempt: str | None = None
    was_committed: bool = False
    sealed: Mapping[int, RecoveredSnapshot] = field(default_factory=dict)

    def details(self, rank: int) -> SnapshotMetadata:
        """Return what a rank's snapshot says of the save."""
        return typed_msgpack.decode(self.sealed[rank].snapshot.details, SnapshotMetadata)


@dataclass(frozen=True, slots=True)
class RecoveredSaves:
    """The saves that are kept on this host, by their ids, and what is wrong with other arenas.

    What is wrong is left as it is: it may be another's, or a newer version's.
    """

    saves: Mapping[str, RecoveredSave]
    problems: tuple[str, ...]


@contextmanager
def recovered_saves(folders: Iterable[RankFolder]) -> Iterator[RecoveredSaves]:
    """Give the saves that the arenas of some ranks hold; they can be read until the block ends."""
    saves: dict[str, RecoveredSave] = {}
    problems: list[str] = []
    with ExitStack() as stack:
        for folder in folders:
            for number in range(NUM_ARENAS):
                kept, wrong = open_first(folder, number)
                problems += map(str, wrong)
                if kept is None:
                    continue
                stack.callback(kept.close)
                try:
                    _add(saves, kept, folder.rank)
                except ValueError as error:
                    problems.append(f"{kept.place}: {error}")
        yield RecoveredSaves(saves, tuple(problems))


def _add(saves: dict[str, RecoveredSave], kept: RecoveredSnapshot, rank: int) -> None:
    """Add a rank's part to its save. ValueError if it does not belong there."""
    snapshot, seal = kept.snapshot, kept.seal
    if snapshot.rank != rank:
        raise ValueError(f"a snapshot of rank {snapshot.rank} lies where those of {rank} do")
    identity = SaveIdentity.of(snapshot)
    there = saves.get(snapshot.id, RecoveredSave(identity))
    if there.identity != identity:
        raise ValueError(f"snapshot {snapshot.id} is of another save on another rank")
    if seal is None:
        saves[snapshot.id] = there
        return
    sizes = {image.name: image.nbytes for image in snapshot.images}
    if {name: nbytes for name, nbytes, _, _ in seal.files} != sizes:
        raise ValueError(f"snapshot {snapshot.id} is sealed with other files than it has")
    if there.attempt and seal.attempt and there.attempt != seal.attempt:
        raise ValueError(f"snapshot {snapshot.id} is sealed as {seal.attempt}, and as another")
    saves[snapshot.id] = replace(
        there,
        attempt=there.attempt or seal.attempt,
        was_committed=there.was_committed or kept.is_committed,
        sealed={**there.sealed, rank: kept},
    )


_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True, eq=False)
class MemoryFile:
    """One file of a snapshot that is kept: the image with this number."""

    kept: RecoveredSnapshot
    image: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.kept.snapshot.images[self.image].nbytes

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill memory with bytes of the file, which has so many.

        CorruptError if the snapshot is not there any more: what is in the memory then is nothing.
        """
        try:
            self.kept.read_into(self.image, offset, target)
        except OSError as error:
            raise CorruptError(f"{self.kept.place} cannot be read: {error.strerror}") from error
        # After each read, and not once at the end: no byte that may be another snapshot's is
        # handed on, also where the digests are not checked. It is a read of 8 bytes.
        self.kept.check()


@dataclass(frozen=True, slots=True)
class MemoryDocument:
    """A file whose bytes are here: it was made of what some snapshots say."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.data)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill memory with bytes of the file, which has so many."""
        target[:] = self.data[offset : offset + len(target)]


def snapshots_on_host(path: str, index: Index, stack: ExitStack) -> Mapping[str, ServedFile]:
    """Return what the job that saves into the checkpoint's folder has left on this host.

    If it is dead, or alive in this very process: the arenas of other trainers are theirs. If there
    is no such job, to look costs a few calls of the system. Whatever is wrong with the memory,
    there is the storage.
    """
    try:
        job = _job_of(os.path.dirname(path))
        if job is None:
            return {}
        owners = ((folder, folder.owner("trainer")) for folder in job.present())
        mine = [folder for folder, owner in owners if owner is None or owner.is_this_process]
        kept = stack.enter_context(recovered_saves(mine))
    except (CheckpointError, OSError) as error:
        _log.warning("%s: what is left in memory cannot be looked at: %s", path, error)
        return {}
    for problem in kept.problems:
        _log.info("%s: not used: %s", path, problem)
    return {
        name: file
        for save in kept.saves.values()
        for name, file in files_of(save, path, index).items()
    }


def committed_in_memory(save: RecoveredSave | None) -> MemorySource:
    """Return what there is of a save that was committed; None where nothing is on this host."""
    if save is None:
        return NOTHING_IN_MEMORY
    return MemorySource(lambda path, index, stack: files_of(save, path, index))


def uncommitted_in_memory(save: RecoveredSave, attempt: str, index: bytes | None) -> MemorySource:
    """Return a save that is complete here, and was never committed: with the index of `attempt`.

    That is the one that it would have. Only the coordinator has it; all others are told. Nothing
    is found of the save if it was committed or superseded meanwhile.
    """
    folder = f"{save.identity.path}/{attempt}"
    files: dict[str, ServedFile] = {f"{folder}/{n}": file for n, file, _ in _sealed_files(save)}
    if index is not None:
        files[f"{folder}/{INDEX}"] = MemoryDocument(index)
    return MemorySource(
        lambda path, found, stack: files if found.attempt == attempt else {}, unfound=files
    )


def files_of(save: RecoveredSave, path: str, index: Index) -> dict[str, ServedFile]:
    """Return the files of a checkpoint that a save has in memory, byte for byte.

    An attempt's name is random, so that it is no other's; and every block of what is read is
    checked by the digests in the file's header, which is the one that the index means.
    """
    if save.attempt != index.attempt:
        return {}
    listed = set(records_of(index))
    found: dict[str, ServedFile] = {}
    for name, file, receipt in _sealed_files(save):
        if receipt not in listed:
            continue
        if (problem := _problem(file, receipt)) is None:
            found[f"{path}/{index.attempt}/{name}"] = file
        else:
            _log.warning("%s: %s is damaged in memory (%s)", path, name, problem)
    return found


def _job_of(root: str) -> JobFolder | None:
    """Return what the job that saves into a folder has on this host; None if there is no such."""
    if not has_jobs():  # the storage is not asked
        return None
    root_id = find_root_id(*open_storage(root))
    return None if root_id is None else JobFolder.find(job_id(root, root_id))


def _sealed_files(save: RecoveredSave) -> Iterator[tuple[str, MemoryFile, FileReceipt]]:
    for _, kept in sorted(save.sealed.items()):
        assert kept.seal is not None, "it is sealed"
        receipts = {receipt[0]: receipt for receipt in kept.seal.files}
        for number, image in enumerate(kept.snapshot.images):
            yield image.name, MemoryFile(kept, number), receipts[image.name]


def records_of(index: Index) -> Iterator[FileReceipt]:
    """Yield what the index says of each file, as its rank's receipt said it."""
    for file in index.files:
        yield index.file_name(file), file.nbytes, file.header_nbytes, file.digest
    for one in index.objects:
        yield one.name, one.nbytes, 0, one.digest
    for attached in index.attached:
        yield attached.file_name, attached.nbytes, 0, attached.digest


def _problem(file: MemoryFile, receipt: FileReceipt) -> str | None:
    """Say what is wrong with what is read before any block is: the header, or all of a small file.

    Were that found later, the load could not go back to the storage for this file alone.
    """
    _, nbytes, header_nbytes, digest = receipt
    head = bytearray(min(header_nbytes or nbytes, file.nbytes))
    try:
        file.read_into(0, memoryview(head))
    except CheckpointError as error:
        return str(error)
    actual = document_digest(head)
    return None if actual == digest else f"its digest is {actual}, the index says {digest}"
