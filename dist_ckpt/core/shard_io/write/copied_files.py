"""Link files of a checkpoint into another one, or make checked copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress

from dist_ckpt.core.format.checksums import block_digest, document_digest
from dist_ckpt.core.format.index.index import (
    AttachedFileRecord,
    Index,
    ObjectsFileRecord,
    ShardFileRecord,
)
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.shard_io.read.block_reads import BlockRead, every_block, reads_of
from dist_ckpt.core.shard_io.read.open_files import (
    OpenFile,
    damage_error,
    digest_problem,
    open_readable,
    read_header,
    size_problem,
)
from dist_ckpt.core.shard_io.write.shard_writer import (
    create_file,
    exists_error,
    finish_file,
    sync_names,
)
from dist_ckpt.core.storage import ReadableFile, Storage
from dist_ckpt.errors import CorruptError, StorageError
from dist_ckpt.reports import IoCount

_Document = ObjectsFileRecord | AttachedFileRecord
FileRecord = ShardFileRecord | _Document


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
        record, old, new = files[name], f"{source}/{name}", f"{target}/{name}"
        if isinstance(record, ShardFileRecord):
            old = f"{source}/{index.file_name(record)}"
            may_link = links and _may_link(storage, index, record, old, most_names)
            if may_link and linked(storage, old, new):
                return record.nbytes
            _copy_shards(storage, index, record, (old, new), report)
        else:
            if links and linked(storage, old, new):
                return record.nbytes
            _copy_document(storage, record, old, new)
            report(record.nbytes)
        return -1

    done = [nbytes for nbytes in parallel_for(carry, files, threads=threads) if nbytes >= 0]
    sync_names(storage, target)
    return IoCount(len(done), sum(done))


def linked(storage: Storage, old: str, new: str) -> bool:
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


def _may_link(
    storage: Storage, index: Index, record: ShardFileRecord, path: str, most_names: int | None
) -> bool:
    """Return True if a shard file has few names; CorruptError if its size or header is damaged."""
    if most_names is None:
        return True
    with closing(open_readable(storage, path, record)) as file:
        if (problem := size_problem(file, path, record)) is not None:
            raise CorruptError(f"{problem}; use another checkpoint")
        read_header(file, path, record, index)
        return file.num_links < most_names


def _copy_shards(
    storage: Storage,
    index: Index,
    record: ShardFileRecord,
    names: tuple[str, str],
    report: Callable[[int], None],
) -> None:
    old, new = names
    with ExitStack() as stack:
        source = stack.enter_context(closing(open_readable(storage, old, record)))
        if (problem := size_problem(source, old, record)) is not None:
            raise CorruptError(f"{problem}; use another checkpoint")
        file = OpenFile(storage, old, record, read_header(source, old, record, index))
        target = create_file(storage, new, record.nbytes, stack)
        # The header is last, as in a save: without it the file is invalid.
        for read in reads_of(every_block(file.header.shards, file.header.block_nbytes)):
            target.write_at(record.header_nbytes + read.span.start, _checked(file, source, read))
            report(read.span.nbytes)
        target.write_at(0, _read(source, 0, record.header_nbytes, old))
        finish_file(target, new, record.nbytes)


def _checked(file: OpenFile, source: ReadableFile, read: BlockRead) -> memoryview:
    """Return the bytes of some blocks. CorruptError if one was changed."""
    start = file.record.header_nbytes + read.span.start
    data = _read(source, start, read.span.nbytes, file.path)
    for need in read.needs:
        block = data[need.start - read.span.start : need.stop - read.span.start]
        if (problem := digest_problem(need, block_digest(block))) is not None:
            raise CorruptError(f"{damage_error(file, need, problem)}; use another checkpoint")
    return data


def _copy_document(storage: Storage, record: _Document, old: str, new: str) -> None:
    try:
        source = storage.open(old)
    except FileNotFoundError as error:
        raise CorruptError(f"{old} is missing; use another checkpoint") from error
    with closing(source), ExitStack() as stack:
        data = _read(source, 0, record.nbytes, old)
        if (actual := document_digest(data)) != record.digest or source.nbytes != record.nbytes:
            raise CorruptError(
                f"{old} is damaged: its digest is {actual}, the index says {record.digest}; use "
                f"another checkpoint"
            )
        target = create_file(storage, new, record.nbytes, stack)
        target.write_at(0, data)
        finish_file(target, new, record.nbytes)


def _read(file: ReadableFile, start: int, nbytes: int, path: str) -> memoryview:
    data = memoryview(bytearray(nbytes))
    if file.read_into(start, data) != nbytes:
        raise CorruptError(f"{path} ends before byte {start + nbytes}; use another checkpoint")
    return data
