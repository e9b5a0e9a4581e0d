"""Link files of a checkpoint into another one, or make checked copies.

`write_or_link` writes a rank's files, but links those that an earlier save has with the same
content. An unchanged tensor gives the same bytes in each save: one header, with one digest. A file
of an earlier committed save of this process is linked if the live tensors give its header, and the
file still has it.

Two successive saves never share a file: save n links to files of save n-2, never of n-1. A file has
at most `MAX_SHARED` names; then it is written again. So a bad sector damages only some of the
checkpoints, which the digests identify.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace

from dist_ckpt.core.format.checksums import block_digest, document_digest
from dist_ckpt.core.format.index.index import (
    AttachedFileRecord,
    Index,
    ObjectsFileRecord,
    ShardFileRecord,
)
from dist_ckpt.core.format.shard_file import ShardFile, decode_header
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.runtime.buffers import BufferPool
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.shard_io.read.block_reads import (
    BlockRead,
    damage_error,
    digest_problem,
    every_block,
    group_into_reads,
)
from dist_ckpt.core.shard_io.read.open_files import OpenFile, open_file, read_document
from dist_ckpt.core.shard_io.write.shard_writer import (
    NullStorage,
    RankFiles,
    create_file,
    exists_error,
    finish_file,
    sync_names,
    write_all,
    write_document,
)
from dist_ckpt.core.storage import ReadableFile, Storage
from dist_ckpt.core.storage.local.direct_io import drop_cached_file
from dist_ckpt.errors import CheckpointError, CorruptError, StorageError
from dist_ckpt.reports import IoCount

_log = logging.getLogger("dist_ckpt")

FileRecord = ShardFileRecord | ObjectsFileRecord | AttachedFileRecord


def files_of(index: Index) -> dict[str, FileRecord]:
    """Return all files that an index lists, by name."""
    shards = {index.file_name(record): record for record in index.files}
    attached = {record.file_name: record for record in index.attached}
    return {**shards, **{record.name: record for record in index.objects}, **attached}


def link_or_copy_files(  # noqa: PLR0913 - files, source, target and options
    storage: Storage,
    index: Index,
    source: str,
    target: str,
    files: Mapping[str, FileRecord],
    *,
    threads: int,
    most_names: int | None = None,
    links: bool = True,
    report: Callable[[int], None] = lambda nbytes: None,
) -> IoCount:
    """Link or copy files of attempt `source` into folder `target`; return the count of linked ones.

    `index` is the source's; shard files may get other names than they have there. On return the
    files and their names are durable. Every byte of a copy is checked: CorruptError if the source
    is damaged. Linked files are not read. But with `most_names` shard headers are, and files that
    have this many names are copied. Without `links`, all are copied. `report` is called with the
    bytes of each copied part, from any thread. ConflictError if `target` is gone, or has such a
    file.
    """

    def carry(name: str) -> int:
        record, old, may_link = files[name], f"{source}/{name}", links
        if isinstance(record, ShardFileRecord):
            old = f"{source}/{index.file_name(record)}"
            if links and most_names is not None:
                with _open_checked(storage, source, index, record) as (_, readable):
                    may_link = readable.num_links < most_names
        if may_link and try_link(storage, old, f"{target}/{name}"):
            return record.nbytes
        if isinstance(record, ShardFileRecord):
            _copy_shards(storage, source, index, record, f"{target}/{name}", report)
        else:
            write_document(storage, target, name, read_document(storage, old, record))
            report(record.nbytes)
        return -1

    done = [nbytes for nbytes in parallel_for(carry, files, threads=threads) if nbytes >= 0]
    sync_names(storage, target)
    return IoCount(len(done), sum(done))


def try_link(storage: Storage, old: str, new: str) -> bool:
    """Link a file into the caller's attempt, or return False: then the caller writes it instead.

    ConflictError if the new name exists.
    """
    try:
        storage.link(old, new)
    except FileExistsError as error:
        raise exists_error(new) from error
    except FileNotFoundError:  # pruned meanwhile
        return False
    except StorageError:
        # The storage may have linked it and lost the reply.
        with suppress(StorageError, FileNotFoundError, NotADirectoryError):
            storage.remove(new)
        return False
    return True


def _copy_shards(
    storage: Storage,
    folder: str,
    index: Index,
    record: ShardFileRecord,
    new: str,
    report: Callable[[int], None],
) -> None:
    with _open_checked(storage, folder, index, record) as (file, source), ExitStack() as stack:
        target = create_file(storage, new, record.nbytes, stack)
        # The header is last, as in a save: without it the file is invalid.
        for read in group_into_reads(every_block(file.shards, file.header.block_nbytes)):
            data = read_blocks(source, file.path, file.header, read)
            target.write_at(record.header_nbytes + read.span.start, data)
            report(read.span.nbytes)
        target.write_at(0, read_at(source, file.path, 0, record.header_nbytes))
        finish_file(target, new, record.nbytes)


@contextmanager
def _open_checked(
    storage: Storage, folder: str, index: Index, record: ShardFileRecord
) -> Iterator[tuple[OpenFile, ReadableFile]]:
    """Open and check a shard file. Errors of damage get a remedy."""
    try:
        with (
            closing(open_file(storage, folder, index, record, keep=True)) as file,
            file.reading() as source,
        ):
            yield file, source
    except CorruptError as error:
        raise CorruptError(f"{error}; use another checkpoint") from error


def read_blocks(file: ReadableFile, path: str, header: ShardFile, read: BlockRead) -> memoryview:
    """Return the bytes of some blocks. CorruptError if one was changed."""
    data = read_at(file, path, header.header_nbytes + read.span.start, read.span.nbytes)
    for block in read.blocks:
        content = data[block.start - read.span.start : block.stop - read.span.start]
        if (problem := digest_problem(block, block_digest(content))) is not None:
            raise CorruptError(damage_error(path, header, block, problem))
    return data


def read_at(file: ReadableFile, path: str, start: int, nbytes: int) -> memoryview:
    """Return some bytes of a file. CorruptError if it ends before."""
    data = memoryview(bytearray(nbytes))
    if file.read_into(start, data) != nbytes:
        raise CorruptError(f"{path} ends before byte {start + nbytes}")
    return data


# --- files of earlier saves ------------------------------------------------------------------

# The most checkpoints, backups too, that share a file.
MAX_SHARED = 8

# The number of saves to remember: a state that is saved in turns with seven others is linked like a
# single one.
_REMEMBERED = 16

# A linked file was read back from the disk, as a whole, within this many saves.
READ_BACK_EVERY = 8


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """A rank's files in a save's folder, by name; `checked` has the save that read a file back."""

    folder: str
    files: Mapping[str, FileReceipt]
    checked: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedPart:
    """The files that a rank has written or linked; `linked` counts the latter and their bytes."""

    receipts: tuple[FileReceipt, ...]
    linked: IoCount
    saved: SavedFiles


@dataclass(frozen=True, slots=True)
class LinkableSaves:
    """The last committed saves of a process, older ones first; `number` counts all saves."""

    saves: tuple[SavedFiles, ...] = ()
    number: int = 0

    def names(self) -> set[str]:
        """Return the files that two of them have, so that they may be linked."""
        seen = Counter(name for saved in self.saves for name in saved.files)
        return {name for name, count in seen.items() if count > 1}

    def plus(self, saved: SavedFiles) -> LinkableSaves:
        """Return the saves with one more that is committed."""
        saves = (*self.saves, saved)[-_REMEMBERED:] if saved.files else self.saves
        return LinkableSaves(saves, self.number + 1)


def write_or_link(
    storage: Storage,
    folder: str,
    files: RankFiles,
    earlier: LinkableSaves,
    *,
    threads: int,
    slots: BufferPool | None = None,
) -> SavedPart:
    """Write a rank's files as `write_all` does, but link those that an earlier save has."""
    linkable = earlier.names()
    tried = [n for n, plan in enumerate(files.plans) if plan.is_linkable and plan.name in linkable]
    wanted = write_all(NullStorage(), "", _only(files, tried), threads=threads, slots=slots)
    # One after another: all threads read each back.
    links = {receipt[0]: _link(storage, folder, receipt, earlier, threads) for receipt in wanted}
    checked = {name: number for name, number in links.items() if number is not None}
    rest = [n for n, plan in enumerate(files.plans) if plan.name not in checked]
    remaining = replace(_only(files, rest), objects=files.objects)
    written = write_all(storage, folder, remaining, threads=threads, slots=slots)
    if checked and not written:
        sync_names(storage, folder)
    unwritten = tuple(receipt for receipt in wanted if receipt[0] in checked)
    receipts = (*unwritten, *written)
    names = {plan.name for plan in files.plans if plan.is_linkable}
    saved = SavedFiles(folder, {r[0]: r for r in receipts if r[0] in names}, checked)
    return SavedPart(receipts, IoCount(len(unwritten), sum(r[1] for r in unwritten)), saved)


def _only(files: RankFiles, numbers: Sequence[int]) -> RankFiles:
    return replace(
        files,
        plans=tuple(files.plans[n] for n in numbers),
        sources=tuple(files.sources[n] for n in numbers),
        objects={},
    )


def _link(
    storage: Storage, folder: str, wanted: FileReceipt, earlier: LinkableSaves, threads: int
) -> int | None:
    """Link a file of an earlier save. Return the save that read it back, or None to write it."""
    name = wanted[0]
    candidates = [saved for saved in earlier.saves if saved.files.get(name) == wanted][-2:]
    for saved in candidates if len(candidates) > 1 else ():  # the first two write their files
        path = f"{saved.folder}/{name}"
        try:
            with closing(storage.open(path)) as file:
                if file.num_links >= MAX_SHARED:
                    return None
                checked = _check_file(file, path, saved, wanted, earlier.number, threads)
        except FileNotFoundError:  # pruned: try the newer save; with keep.last(1) write all
            continue
        except CheckpointError as error:
            _log.warning("%s is not linked but written again: %s", path, error)
            return None
        return checked if try_link(storage, path, f"{folder}/{name}") else None
    return None


def _check_file(
    file: ReadableFile, path: str, saved: SavedFiles, wanted: FileReceipt, save: int, threads: int
) -> int:
    """Check a file, as a whole if no recent save has. Return the save that last did, or this one.

    CorruptError if its header has changed, or a block differs from its digest.
    """
    name, nbytes, header_nbytes, digest = wanted
    header = read_at(file, path, 0, header_nbytes)
    if file.nbytes != nbytes or document_digest(header) != digest:
        raise CorruptError(f"{path} has changed since it was written")
    checked = saved.checked.get(name)
    if checked is not None and save - checked < READ_BACK_EVERY:
        return checked
    drop_cached_file(path)
    decoded = decode_header(bytes(header), nbytes=nbytes, label=path)

    def check(read: BlockRead) -> None:  # without a result, which `parallel_for` would store
        read_blocks(file, path, decoded, read)

    reads = group_into_reads(every_block(decoded.shards, decoded.block_nbytes))
    parallel_for(check, reads, threads=threads)
    return save
