"""The files that a load needs, opened and checked before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType

from dist_ckpt.core.format import checksums
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange, Cell, ElementRange, Region, Shape
from dist_ckpt.core.format.index.index import (
    AttachedFileRecord,
    Index,
    ObjectsFileRecord,
    ShardFileRecord,
)
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.format.objects.plain_types import Placeholder
from dist_ckpt.core.format.shard_file import MAX_HEADER_NBYTES, ShardFile, decode_header
from dist_ckpt.core.planning.plan import LoadPlan, ReadItem
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.shard_io.read.block_reads import BlockRequest
from dist_ckpt.core.storage import ReadableFile, Storage
from dist_ckpt.errors import CorruptError, listed

# Of what a load needs, so many files stay open from the check to the end, so that a checkpoint
# removed meanwhile still loads. Beyond it (the usual limit of a process is 1024) files are opened
# again when they are read.
MAX_OPEN = 512

# A reader holds some blocks in memory at once; they hold whole elements of every dtype.
MAX_BLOCK_NBYTES = 64 << 20
MAX_ITEMSIZE = max(dtype.itemsize for dtype in DTYPES.values())


class OpenFile:
    """One shard file and its checked header. Threads may share it."""

    def __init__(
        self,
        storage: Storage,
        path: str,
        record: ShardFileRecord,
        header: ShardFile,
        kept: ReadableFile | None = None,
        *,
        has_digests: bool = True,
    ) -> None:
        """`kept` is the file, if it stays open until `close`."""
        self.has_digests = has_digests
        self.path = path
        self.record = record
        self.header = header
        self.shards = header.shards
        self._storage = storage
        self._kept = kept

    def number_of(self, item: ReadItem) -> int:
        """Return the number of the shard that an item reads."""
        number = self.shards.number(item.tensor, item.match.stored)
        assert number is not None, "`open_files` has looked for it"
        return number

    @cached_property
    def block_starts(self) -> Sequence[int]:
        """Where each block begins in the data section, and last where that ends."""
        return self.shards.block_starts(self.header.block_nbytes)

    @contextmanager
    def reading(self) -> Iterator[ReadableFile]:
        """Lend the kept file, or open it for this once."""
        if self._kept is not None:
            yield self._kept
            return
        with closing(open_readable(self._storage, self.path, self.record)) as file:
            yield file

    def close(self) -> None:
        """Close the kept file. Never raises."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """The shard files that a plan reads, by their numbers in the index; close it when done."""

    plan: LoadPlan
    files: Mapping[int, OpenFile]

    def __iter__(self) -> Iterator[tuple[OpenFile, Sequence[ReadItem]]]:
        """Yield each file with the items that it serves."""
        return ((self.files[number], items) for number, items in self.plan.items())

    def close(self) -> None:
        """Close all files. Never raises."""
        for file in self.files.values():
            file.close()


def open_files(  # noqa: PLR0913 - both of the last are for who opens more than this
    storage: Storage,
    folder: str,
    index: Index,
    plan: LoadPlan,
    *,
    threads: int,
    most_open: int | None = None,
    known: Mapping[int, OpenFile] = MappingProxyType({}),
) -> OpenFiles:
    """Open the files that a plan reads, and check sizes, headers and every shard it needs.

    `folder` is the attempt's; `known` are files that are open already, and `most_open` is how many
    more stay open, None for the usual number. Raises CorruptError that names every file that is
    missing or damaged, the rank that wrote it and the tensors it is needed for; IncompatibleError
    if a newer dist_ckpt wrote it.
    """
    bound = MAX_OPEN if most_open is None else most_open
    opened: dict[int, OpenFile] = {}
    problems: list[str] = []

    def open_one(number: int) -> None:
        file = known.get(number)
        try:
            if file is None:
                file = open_file(storage, folder, index, number, keep=len(opened) < bound)
                opened[number] = file
        except CorruptError as error:
            problems.append(f"{error}; it holds {_names_of(plan[number])}")
        else:
            problems.extend(_mismatches(file, index, plan[number]))

    try:
        parallel_for(open_one, plan, threads=threads)
        if problems:
            raise CorruptError(f"{listed(sorted(problems), '; ')}; load an older checkpoint")
    except BaseException:
        OpenFiles(plan, opened).close()
        raise
    return OpenFiles(plan, {**known, **opened})


def open_file(storage: Storage, folder: str, index: Index, number: int, *, keep: bool) -> OpenFile:
    """Open one file of the index and check its size and header; it stays open if `keep`.

    The messages of its CorruptErrors are bare facts: the caller adds what to do.
    """
    record = index.files[number]
    path = f"{folder}/{index.file_name(record)}"
    file = open_readable(storage, path, record)
    try:
        if (problem := size_problem(file, path, record)) is not None:
            raise CorruptError(problem)
        header = read_header(file, path, record, index)
    except BaseException:
        file.close()
        raise
    if not keep:
        file.close()
    kept = file if keep else None
    return OpenFile(storage, path, record, header, kept, has_digests=index.has_digests)


def open_readable(storage: Storage, path: str, record: ShardFileRecord) -> ReadableFile:
    """Open a shard file that must be there."""
    try:
        return storage.open(path)
    except FileNotFoundError as error:
        raise CorruptError(f"{path} of rank {record.rank} is missing") from error


def size_problem(file: ReadableFile, path: str, record: ShardFileRecord) -> str | None:
    """Say how a file's size differs from the index, or None."""
    if file.nbytes == record.nbytes:
        return None
    return f"{path} of rank {record.rank} has {file.nbytes} bytes, the index says {record.nbytes}"


def read_header(file: ReadableFile, path: str, record: ShardFileRecord, index: Index) -> ShardFile:
    """Return a file's header, if it is the one that the index means."""
    if record.header_nbytes > 8 + MAX_HEADER_NBYTES:
        raise CorruptError(f"{path}: no header has {record.header_nbytes} bytes")
    here = f"{path} of rank {record.rank}"
    data = memoryview(bytearray(min(record.header_nbytes, file.nbytes)))
    count = file.read_into(0, data)
    actual = checksums.document_digest(data[:count])
    if actual != record.digest:
        raise CorruptError(
            f"{here}: the header (bytes 0:{record.header_nbytes}) is damaged, its digest is "
            f"{actual}, the index says {record.digest}"
        )
    header = decode_header(bytes(data), nbytes=record.nbytes, label=here)
    if header.block_nbytes % MAX_ITEMSIZE or header.block_nbytes > MAX_BLOCK_NBYTES:
        raise CorruptError(f"{here}: {header.block_nbytes} is no size of blocks")
    for what, found, expected in (
        ("component", header.component, index.catalog.components[record.component].name),
        ("rank", header.rank, record.rank),
        ("world_size", header.world_size, index.catalog.world_size),
    ):
        if found != expected:
            raise CorruptError(f"{here}: its {what} is {found!r}, the index says {expected!r}")
    return header


def _mismatches(file: OpenFile, index: Index, items: Sequence[ReadItem]) -> Iterator[str]:
    """Say which shards that the items read are not in a file as the index has them."""
    seen: set[str] = set()
    for item in items:
        fqn, stored = item.tensor, item.match.stored
        record = index.catalog.tensors[fqn]
        facts = file.shards.facts(fqn, stored)
        if facts == (record.dtype, record.shape):
            continue
        problem = (
            f"{file.path} lacks {fqn}[{stored}], which the index says it holds"
            if facts is None
            else f"{file.path} has {fqn} as {facts[0]} {list(facts[1])}, the index as "
            f"{record.dtype} {list(record.shape)}"
        )
        if problem not in seen:
            seen.add(problem)
            yield problem


# --- messages --------------------------------------------------------------------------------


def _names_of(items: Sequence[ReadItem]) -> str:
    names: dict[str, None] = {}
    for item in items:
        common = item.match.common
        rows = ByteRange(common.offset[0], common.stop[0]) if common.shape else None
        names[f"{item.fqn} {rows_text(rows)}"] = None
    return listed(list(names))


def rows_text(rows: ByteRange | None) -> str:
    """Return a tensor's rows for a message."""
    return "(a scalar)" if rows is None else f"rows {rows.start}:{rows.stop}"


def rows_of(cell: Cell, shape: Shape, part: ElementRange) -> ByteRange | None:
    """Return the rows (along dimension 0) of a tensor that some elements of a cell belong to.

    `part` counts in the cell's own memory. None if the tensor has no rows, being a scalar.
    """
    if not shape:
        return None
    first, inner, shift = 0, shape[1:], 0
    if isinstance(cell, Region):
        first, inner = cell.offset[0], cell.shape[1:]
    else:
        shift = cell.start
    row_numel = max(prod(inner), 1)
    start, stop = part.start + shift, part.stop + shift
    return ByteRange(first + start // row_numel, first - (-stop // row_numel))


def rows_of_block(need: BlockRequest) -> ByteRange | None:
    """Return the rows of the tensor that a block belongs to."""
    shard = need.shard
    itemsize = DTYPES[shard.dtype].itemsize
    part = ElementRange(need.span.start // itemsize, need.span.stop // itemsize)
    return rows_of(shard.cell, shard.shape, part)


def damage_error(file: OpenFile, need: BlockRequest, what: str) -> str:
    """Say where a damaged block is: tensor, rows, rank, file and bytes."""
    start = file.header.header_nbytes
    return (
        f"{need.shard.fqn} {rows_text(rows_of_block(need))}: {what} "
        f"({file.path} of rank {file.record.rank}, bytes {start + need.start}:{start + need.stop})"
    )


def digest_problem(need: BlockRequest, actual: str) -> str | None:
    """Say how the digest of what was read of a block differs from the one in the header."""
    expected = need.shard.digests[need.number]
    if actual == expected:
        return None
    return f"damaged, the block's digest is {actual}, the header says {expected}"


# --- objects files ---------------------------------------------------------------------------


def read_objects(
    storage: Storage,
    folder: str,
    record: ObjectsFileRecord,
    *,
    make: Callable[[Placeholder], object] = lambda value: value,
) -> ObjectsFile:
    """Return what an objects file says, with `make(stand_in)` for what needs torch or numpy.

    CorruptError if its bytes are not the ones that were written, or say nothing; IncompatibleError
    if it needs a newer dist_ckpt.
    """
    data = read_encoded_objects(storage, folder, record)
    return objects_file.decode(data, make=make, label=f"{folder}/{record.name}")


def read_encoded_objects(storage: Storage, folder: str, record: ObjectsFileRecord) -> bytes:
    """Return the bytes of an objects file. CorruptError if they are not those that were written."""
    path = f"{folder}/{record.name}"
    if record.nbytes > objects_file.MAX_NBYTES:
        raise CorruptError(f"{path}: no objects file has {record.nbytes} bytes")
    return _read_whole(storage, path, record)


def read_attached_file(storage: Storage, folder: str, record: AttachedFileRecord) -> bytes:
    """Return the bytes of a file that a user has attached. CorruptError if they are others."""
    return _read_whole(storage, f"{folder}/{record.file_name}", record)


def _read_whole(
    storage: Storage, path: str, record: ObjectsFileRecord | AttachedFileRecord
) -> bytes:
    """Return the bytes of a file that has one digest. CorruptError if they are others."""
    try:
        file = storage.open(path)
    except FileNotFoundError as error:
        raise CorruptError(f"{path} is missing; load an older checkpoint") from error
    with closing(file):
        if file.nbytes != record.nbytes:
            raise CorruptError(
                f"{path} has {file.nbytes} bytes, the index says {record.nbytes}; "
                "load an older checkpoint"
            )
        data = bytearray(record.nbytes)
        file.read_into(0, memoryview(data))
    if (actual := checksums.document_digest(data)) != record.digest:
        raise CorruptError(
            f"{path} (bytes 0:{record.nbytes}) is damaged, its digest is {actual}, the index "
            f"says {record.digest}; load an older checkpoint"
        )
    return bytes(data)
