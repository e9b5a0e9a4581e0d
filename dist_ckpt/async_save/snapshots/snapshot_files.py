"""The files of recovered snapshots, as input of a load.

A load reads them in the memory of this host, instead of reading the storage.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from dist_ckpt.async_save.snapshots.job_folder import (
    JobFolder,
    find_root_id,
    has_jobs,
    make_job_name,
)
from dist_ckpt.async_save.snapshots.recovered_snapshots import (
    RecoveredSave,
    RecoveredSnapshot,
    open_saves,
)
from dist_ckpt.core.checkpoint.opener import MemoryFiles
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.filenames import INDEX
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.storage import open_storage
from dist_ckpt.core.storage.overlay_storage import BytesFile, ServedFile
from dist_ckpt.errors import CheckpointError, CorruptError

_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True, eq=False)
class MemoryFile:
    """One file of a recovered snapshot: the image with this number."""

    recovered: RecoveredSnapshot
    image: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.recovered.snapshot.images[self.image].nbytes

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill memory with bytes of the file. CorruptError if the snapshot was overwritten."""
        try:
            self.recovered.read_into(self.image, offset, target)
        except OSError as error:
            raise CorruptError(f"{self.recovered.path} cannot be read: {error.strerror}") from error
        # After each read, not once at the end: bytes of another snapshot must never be used, even
        # if digests are not checked. It reads 8 bytes.
        self.recovered.check()


def find_files_on_host(path: str, index: Index, stack: ExitStack) -> Mapping[str, ServedFile]:
    """Return the files of a committed checkpoint that are in the memory of this host.

    Only snapshots of this process or of dead trainers are used. Without a job this costs a few
    system calls. Problems are logged: the storage has the files too.
    """
    try:
        if not has_jobs():  # saves a call of the storage
            return {}
        root = os.path.dirname(path)
        root_id = find_root_id(*open_storage(root))
        job = None if root_id is None else JobFolder.find(make_job_name(root, root_id))
        if job is None:
            return {}
        owners = ((folder, folder.owner("trainer")) for folder in job.rank_folders())
        usable = [folder for folder, owner in owners if owner is None or owner.is_this_process]
        saves, problems = stack.enter_context(open_saves(usable))
    except (CheckpointError, OSError) as error:
        _log.warning("%s: snapshots in memory cannot be read: %s", path, error)
        return {}
    for problem in problems:
        _log.info("%s: not used: %s", path, problem)
    return {
        name: file
        for save in saves.values()
        for name, file in find_checkpoint_files(save, path, index).items()
    }


def make_uncommitted_files(save: RecoveredSave, attempt: str, index: bytes | None) -> MemoryFiles:
    """Return the files of a save that is complete on this host and was never committed.

    They include `index`, which was rebuilt for `attempt`. Only the coordinator has the index, and
    sends it to the other ranks. If the save was committed or superseded meanwhile, the source is
    empty.
    """
    folder = f"{save.identity.path}/{attempt}"
    files: dict[str, ServedFile] = {f"{folder}/{n}": file for n, file, _ in _sealed_files(save)}
    if index is not None:
        files[f"{folder}/{INDEX}"] = BytesFile(index)
    return MemoryFiles(
        lambda path, stored, stack: files if stored.attempt == attempt else {}, uncommitted=files
    )


def find_checkpoint_files(save: RecoveredSave, path: str, index: Index) -> dict[str, ServedFile]:
    """Return the files of a checkpoint that are in the memory of a save, byte for byte.

    The random name of the attempt identifies the save. This function checks each file's header by
    the index. A load checks each block by the digests in that header.
    """
    if save.attempt != index.attempt:
        return {}
    listed = set(file_receipts(index))
    files: dict[str, ServedFile] = {}
    for name, file, receipt in _sealed_files(save):
        if receipt not in listed:
            continue
        if (problem := _check_header(file, receipt)) is None:
            files[f"{path}/{index.attempt}/{name}"] = file
        else:
            _log.warning("%s: %s is damaged in memory (%s)", path, name, problem)
    return files


def _sealed_files(save: RecoveredSave) -> Iterator[tuple[str, MemoryFile, FileReceipt]]:
    for _, recovered in sorted(save.sealed.items()):
        assert recovered.seal is not None, "it is sealed"
        receipts = {receipt.name: receipt for receipt in recovered.seal.files}
        for number, image in enumerate(recovered.snapshot.images):
            yield image.name, MemoryFile(recovered, number), receipts[image.name]


def file_receipts(index: Index) -> Iterator[FileReceipt]:
    """Yield the record of each file in an index, in the form of a receipt."""
    for file in index.files:
        yield FileReceipt(index.file_name(file), file.nbytes, file.header_nbytes, file.digest)
    for objects in index.objects:
        yield FileReceipt(objects.name, objects.nbytes, 0, objects.digest)
    for attached in index.attached:
        yield FileReceipt(attached.file_name, attached.nbytes, 0, attached.digest)


def _check_header(file: MemoryFile, receipt: FileReceipt) -> str | None:
    """Return the problem of a file's header, or of the whole file if it has no header.

    It is checked now, because a load cannot replace one file in memory by the file in storage.
    """
    _, nbytes, header_nbytes, digest = receipt
    head = bytearray(min(header_nbytes or nbytes, file.nbytes))
    try:
        file.read_into(0, memoryview(head))
    except CheckpointError as error:
        return str(error)
    actual = document_digest(head)
    return None if actual == digest else f"its digest is {actual}, the index says {digest}"
