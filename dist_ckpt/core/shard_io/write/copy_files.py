"""Link files of a checkpoint into another one, or make checked copies."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import compress

from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.index.index import FileRecord, Index, ShardFileRecord
from dist_ckpt.core.format.shard_file import ShardFile, decode_header
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.shard_io.read.open_files import (
    OpenFile,
    naming_damaged,
    open_file,
    read_checked_file,
)
from dist_ckpt.core.shard_io.read.read_grouping import (
    BlockRead,
    all_blocks,
    check_digests,
    group_into_reads,
)
from dist_ckpt.core.shard_io.write.shard_writer import (
    create_file,
    exists_error,
    finish_file,
    sync_names,
    write_document,
)
from dist_ckpt.core.storage import ReadableFile, Storage, is_linked_step
from dist_ckpt.core.storage.local.direct_io import drop_cached_file, renew_times
from dist_ckpt.errors import CorruptError, StorageError
from dist_ckpt.reports import IoCount


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
    check_room: Callable[[int], None] = lambda nbytes: None,
    report: Callable[[int], None] = lambda nbytes: None,
) -> IoCount:
    """Link or copy files of attempt `source` into folder `target`; return the count of linked ones.

    `files` has the records of `index`, the index of the source, by their names in the target. On
    return the files and their names are durable. Every byte of a copy is checked: CorruptError if
    the source is damaged. A linked shard file is checked only by its size and header. With
    `most_names`, a shard file that has this many names already is copied. Without `links`, all
    files are copied. `check_room` is called once with the bytes to copy, before the first copy: it
    may raise. `report` is called with the number of bytes of each copied part, from any thread.
    ConflictError if `target` is gone, or has a file of such a name.
    """

    def link(name: str) -> bool:
        record, old = files[name], f"{source}/{name}"
        if not isinstance(record, ShardFileRecord):
            read_checked_file(storage, old, record)
            return try_link(storage, old, f"{target}/{name}")
        with _open_checked(storage, source, index, record) as (file, readable):
            may_link = most_names is None or readable.num_links < most_names
            return may_link and try_link(storage, file.path, f"{target}/{name}")

    def copy(name: str) -> None:
        record = files[name]
        if isinstance(record, ShardFileRecord):
            with _open_checked(storage, source, index, record) as (file, readable):
                _copy_shards(storage, file, readable, f"{target}/{name}", report)
        else:
            data = read_checked_file(storage, f"{source}/{name}", record)
            write_document(storage, target, name, data)
            report(record.nbytes)

    are_linked = parallel_for(link, files if links else (), threads=threads)
    linked = {*compress(files, are_linked)}
    sizes = {name: record.nbytes for name, record in files.items() if name not in linked}
    check_room(sum(sizes.values()))
    parallel_for(copy, sizes, threads=threads)
    sync_names(storage, target)
    return IoCount(len(linked), sum(files[name].nbytes for name in linked))


def try_link(storage: Storage, old: str, new: str) -> bool:
    """Link a file into an attempt of this process. Return False if the caller must write it.

    No file of a linked step is linked.

    The file gets new times where possible, so that a purge by age does not take it first.
    ConflictError if the new name exists.
    """
    if is_linked_step(posixpath.dirname(posixpath.dirname(old))):
        return False
    try:
        storage.link(old, new)
    except FileExistsError as error:
        raise exists_error(new) from error
    except FileNotFoundError:  # a prune has removed the old file
        return False
    except StorageError:
        # The storage may have linked it and lost the reply.
        with suppress(StorageError, FileNotFoundError, NotADirectoryError):
            storage.remove(new)
        return False
    renew_times(new)
    return True


def _copy_shards(
    storage: Storage, file: OpenFile, source: ReadableFile, new: str, report: Callable[[int], None]
) -> None:
    record = file.record
    with ExitStack() as stack:
        target = create_file(storage, new, record.nbytes, stack)
        # Write the header last, as a save does: the file is invalid until then.
        for read in group_into_reads(all_blocks(file.shards, file.header.block_nbytes)):
            data = read_checked_blocks(source, file.path, file.header, read)
            target.write_at(record.header_nbytes + read.span.start, data)
            report(read.span.nbytes)
        target.write_at(0, read_at(source, file.path, 0, record.header_nbytes))
        finish_file(target, new, record.nbytes)


@contextmanager
def _open_checked(
    storage: Storage, folder: str, index: Index, record: ShardFileRecord
) -> Iterator[tuple[OpenFile, ReadableFile]]:
    """Open a shard file, and check its header. An error of damage gets a remedy."""
    try:
        with (
            closing(open_file(storage, folder, index, record, keep=True)) as file,
            file.reading() as source,
        ):
            yield file, source
    except CorruptError as error:
        raise CorruptError(f"{error}; use another checkpoint", path=error.path) from error


def check_file(
    file: ReadableFile, path: str, wanted: FileReceipt, *, read_back: bool, threads: int
) -> None:
    """Check the size and header of a file; with `read_back` also all blocks, from the disk.

    CorruptError if the header has changed, or a block differs from its digest.
    """
    header = read_at(file, path, 0, wanted.header_nbytes)
    if file.nbytes != wanted.nbytes or document_digest(header) != wanted.digest:
        raise CorruptError(f"{path} has changed since it was written", path=path)
    if not read_back:
        return
    drop_cached_file(path)
    with naming_damaged(path):
        decoded = decode_header(bytes(header), nbytes=wanted.nbytes, label=path)

    def check(read: BlockRead) -> None:  # returns nothing: `parallel_for` would keep the bytes
        read_checked_blocks(file, path, decoded, read)

    reads = group_into_reads(all_blocks(decoded.shards, decoded.block_nbytes))
    parallel_for(check, reads, threads=threads)


def read_checked_blocks(
    file: ReadableFile, path: str, header: ShardFile, read: BlockRead
) -> memoryview:
    """Read and check some blocks of a file. CorruptError if one is damaged."""
    data = read_at(file, path, header.header_nbytes + read.span.start, read.span.nbytes)
    check_digests(path, header, read.blocks, data)
    return data


def read_at(file: ReadableFile, path: str, start: int, nbytes: int) -> memoryview:
    """Read some bytes of a file. CorruptError if the file is too short."""
    data = memoryview(bytearray(nbytes))
    if file.read_into(start, data) != nbytes:
        raise CorruptError(f"{path} ends before byte {start + nbytes}", path=path)
    return data
