"""Which files of a checkpoint a load reads from snapshots in memory, and not from the storage."""

# the protocols document the methods

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from dist_ckpt.async_save.snapshots.job_folder import JobFolder, has_jobs
from dist_ckpt.async_save.snapshots.recovered_snapshots import (
    RecoveredSave,
    RecoveredSnapshot,
    recovered_saves,
)
from dist_ckpt.async_save.snapshots.root_id import find_root_id, job_id
from dist_ckpt.core.checkpoint.open_checkpoint import NOTHING_IN_MEMORY, MemorySource
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.filenames import INDEX
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.storage import open_storage
from dist_ckpt.core.storage.wrappers.overlay_storage import ServedFile
from dist_ckpt.errors import CheckpointError, CorruptError

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
