"""Which files of a checkpoint a load reads from snapshots in memory, and not from the storage.

A storage of which some files are read from snapshots in memory, and the others as always.
"""

# ruff: noqa: D102  # the protocols document the methods

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from dist_ckpt.async_save.snapshots.job_folder import JobFolder, has_jobs
from dist_ckpt.async_save.snapshots.recovered_snapshots import (
    RecoveredSave,
    RecoveredSnapshot,
    recovered_saves,
)
from dist_ckpt.async_save.snapshots.root_id import find_root_id, job_id
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.filenames import INDEX
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.storage import open_storage
from dist_ckpt.core.storage.protocol import Entry, ReadableFile, Storage
from dist_ckpt.core.storage.wrappers.forwarding import ForwardingStorage
from dist_ckpt.errors import CheckpointError, CorruptError, StorageError
from dist_ckpt.reports import IoCount


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


# A file that is served: of a snapshot, or a document that was made from some.
Served = MemoryFile | MemoryDocument


class OverlayStorage(ForwardingStorage):
    """Hands every call to `inner`, but for reading the files that it was told to `serve`.

    Those are listed, too, whether `inner` has them or not. One that is gone from memory meanwhile
    is read from `inner`. `from_memory` counts what was read of them otherwise: calls and bytes.
    Threads may share it.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.from_memory = IoCount()
        self._files: dict[str, Served] = {}
        self._lock = threading.Lock()

    def serve(self, files: Mapping[str, Served]) -> None:
        """Read these files, by their paths, from memory from now on, and no others."""
        self._files = dict(files)

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        served = {entry.name: entry for entry in self._served_in(folder)}
        try:
            found = self.inner.list(folder, follow=follow)
        except (FileNotFoundError, NotADirectoryError):
            if not served:
                raise
            found = ()
        return sorted({**served, **{entry.name: entry for entry in found}}.values())

    def open(self, path: str) -> ReadableFile:
        served = self._files.get(path)
        if served is None:
            return self.inner.open(path)
        return _File(served, lambda: self.inner.open(path), self._count)

    def _served_in(self, folder: str) -> Sequence[Entry]:
        entries = []
        for path, served in self._files.items():
            if not path.startswith(f"{folder}/"):
                continue
            name, _, below = path[len(folder) + 1 :].partition("/")
            nbytes = 0 if below else served.nbytes
            entries.append(Entry(name, "folder" if below else "file", nbytes, 0.0))
        return entries

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.from_memory = self.from_memory.plus(nbytes)


class _File:
    """A file of a snapshot; of the storage, from when on the snapshot is gone."""

    def __init__(
        self,
        served: Served,
        open_stored: Callable[[], ReadableFile],
        count: Callable[[int], None],
    ) -> None:
        self._served = served
        self._open_stored = open_stored
        self._count = count
        self._lock = threading.Lock()
        self._stored: ReadableFile | None = None
        self._is_closed = False

    num_links = 1  # of the file itself nothing is known

    @property
    def nbytes(self) -> int:
        return self._served.nbytes

    def read_into(self, offset: int, target: memoryview) -> int:
        start = min(offset, self.nbytes)
        count = min(target.nbytes, self.nbytes - start)
        if self._stored is None:
            try:
                self._served.read_into(start, target[:count])
            except CorruptError as error:
                self._open(instead_of=error)
            else:
                self._count(count)
                return count
        assert self._stored is not None
        return self._stored.read_into(offset, target)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            stored = self._stored
        if stored is not None:
            stored.close()

    def _open(self, *, instead_of: CorruptError) -> None:
        """Open the file in the storage. Raises what is wrong with the snapshot if there is none."""
        with self._lock:
            if self._is_closed:
                raise StorageError(f"{instead_of}, and is closed") from instead_of
            if self._stored is None:
                try:
                    self._stored = self._open_stored()
                except FileNotFoundError:
                    raise instead_of from None


_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True)
class MemorySource:
    """What a load finds in memory, instead of in the storage: on one rank, which decides by itself.

    `found` returns the files, by their paths, of the checkpoint that was found (its path, its
    index) which memory has just as they are; what it gives to the stack may be needed until that is
    closed. `unfound` are those that the load is to find, though the storage does not have them.
    """

    found: Callable[[str, Index, ExitStack], Mapping[str, Served]]
    unfound: Mapping[str, Served] = field(default_factory=dict)

    @property
    def is_only_copy(self) -> bool:
        """Whether the storage has no such checkpoint."""
        return bool(self.unfound)


# For a load that reads everything from the storage.
NOTHING_IN_MEMORY = MemorySource(lambda path, index, stack: {})


def snapshots_on_host(path: str, index: Index, stack: ExitStack) -> Mapping[str, Served]:
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
    files: dict[str, Served] = {f"{folder}/{name}": file for name, file, _ in _sealed_files(save)}
    if index is not None:
        files[f"{folder}/{INDEX}"] = MemoryDocument(index)
    return MemorySource(
        lambda path, found, stack: files if found.attempt == attempt else {}, unfound=files
    )


def files_of(save: RecoveredSave, path: str, index: Index) -> dict[str, Served]:
    """Return the files of a checkpoint that a save has in memory, byte for byte.

    An attempt's name is random, so that it is no other's; and every block of what is read is
    checked by the digests in the file's header, which is the one that the index means.
    """
    if save.attempt != index.attempt:
        return {}
    listed = set(records_of(index))
    found: dict[str, Served] = {}
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
