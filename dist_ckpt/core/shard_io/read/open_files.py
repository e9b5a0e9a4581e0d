"""Open the files that a load needs, and check sizes and headers before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
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
from dist_ckpt.core.format.shard_file import (
    MAX_HEADER_NBYTES,
    DecodedShards,
    ShardFile,
    decode_header,
)
from dist_ckpt.core.planning.plan import LoadPlan, ReadItem
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.storage import ReadableFile, Storage
from dist_ckpt.errors import CorruptError
from dist_ckpt.message_text import listed, merge_similar

# This many files of a load stay open until its end, so that a checkpoint that is removed meanwhile
# still loads. Other files are opened again for each read: a process can usually open 1024.
MAX_OPEN = 512

# A reader has some blocks in memory together. A block contains whole elements of every dtype.
MAX_BLOCK_NBYTES = 64 << 20
MAX_ITEMSIZE = max(dtype.itemsize for dtype in DTYPES.values())


@dataclass(eq=False)
class OpenFile:
    """One shard file and its checked header. Thread-safe.

    If `_file` is None, each use opens the file. Otherwise `_file` stays open until `close`.
    """

    _storage: Storage
    path: str
    record: ShardFileRecord
    header: ShardFile
    _file: ReadableFile | None = None
    has_digests: bool = field(default=True, kw_only=True)
    shards: DecodedShards = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.shards = self.header.shards

    def shard_number(self, item: ReadItem) -> int:
        """Return the number of the shard that an item reads."""
        number = self.shards.find_number(item.tensor, item.overlap.stored)
        assert number is not None, "`open_files` has checked it"
        return number

    @cached_property
    def block_starts(self) -> Sequence[int]:
        """The start of each block in the data section, and the end of the last."""
        return self.shards.block_starts(self.header.block_nbytes)

    @contextmanager
    def reading(self) -> Iterator[ReadableFile]:
        """Yield the open file, or open it for this use."""
        if self._file is not None:
            yield self._file
            return
        with closing(open_readable(self._storage, self.path, self.record)) as file:
            yield file

    def close(self) -> None:
        """Close the file if it is open. Never raises."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """The shard files that a plan reads, by their numbers in the index. Close them after use."""

    plan: LoadPlan
    files: Mapping[int, OpenFile]

    def __iter__(self) -> Iterator[tuple[OpenFile, Sequence[ReadItem]]]:
        """Yield each file with the items that read it."""
        return ((self.files[number], items) for number, items in self.plan.items())

    def close(self) -> None:
        """Close all files. Never raises."""
        for file in self.files.values():
            file.close()


def open_files(  # noqa: PLR0913 - the last two are for callers with several plans
    storage: Storage,
    folder: str,
    index: Index,
    plan: LoadPlan,
    *,
    threads: int,
    max_open: int | None = None,
    opened: Mapping[int, OpenFile] = MappingProxyType({}),
) -> OpenFiles:
    """Open the files that a plan reads, and check sizes, headers and every needed shard.

    `opened` has files that are already open. At most `max_open` more stay open. Raises CorruptError
    with the rank and the tensors of every missing or damaged file, and IncompatibleError if a newer
    dist_ckpt wrote a file.
    """
    bound = MAX_OPEN if max_open is None else max_open
    new_files: dict[int, OpenFile] = {}
    problems: dict[str, str] = {}  # with the path of the file

    def open_number(number: int) -> None:
        file = opened.get(number)
        try:
            if file is None:
                record = index.files[number]
                file = open_file(storage, folder, index, record, keep=len(new_files) < bound)
                new_files[number] = file
        except CorruptError as error:
            path = error.path or folder
            problems[f"{error}; it holds {_list_rows(plan[number])}"] = path
        else:
            for problem in _find_mismatches(file, index, plan[number]):
                problems[problem] = file.path

    try:
        parallel_for(open_number, plan, threads=threads)
        if problems:
            first, *_ = ordered = sorted(problems)
            remedy = "load an older checkpoint" if index.has_digests else "fetch the files again"
            text = f"{listed(merge_similar(ordered), '; ')}; {remedy}"
            raise CorruptError(text, path=problems[first])
    except BaseException:
        OpenFiles(plan, new_files).close()
        raise
    return OpenFiles(plan, {**opened, **new_files})


def open_file(
    storage: Storage, folder: str, index: Index, record: ShardFileRecord, *, keep: bool
) -> OpenFile:
    """Open and check a file of the index. It stays open if `keep`. Errors have no remedy yet."""
    path = f"{folder}/{index.file_name(record)}"
    with naming_damaged(path):
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
    open_or_none = file if keep else None
    return OpenFile(storage, path, record, header, open_or_none, has_digests=index.has_digests)


@contextmanager
def naming_damaged(path: str) -> Iterator[None]:
    """Set the `path` of errors of damage in this block, unless it is known."""
    try:
        yield
    except CorruptError as error:
        error.path = error.path or path
        raise


def open_readable(storage: Storage, path: str, record: ShardFileRecord) -> ReadableFile:
    """Open a shard file. Raises CorruptError if it is missing."""
    with naming_damaged(path):
        try:
            return storage.open(path)
        except FileNotFoundError as error:
            raise CorruptError(f"{path} of rank {record.rank} is missing") from error


def size_problem(file: ReadableFile, path: str, record: ShardFileRecord) -> str | None:
    """Return a message if the size of a file differs from the index, else None."""
    if file.nbytes == record.nbytes:
        return None
    return _size_text(f"{path} of rank {record.rank}", file.nbytes, record.nbytes)


def _size_text(label: str, nbytes: int, expected: int) -> str:
    if nbytes < expected:
        return f"{label} is truncated: {nbytes:,} of {expected:,} bytes"
    return f"{label} has {nbytes:,} bytes, the index says {expected:,}"


def read_header(file: ReadableFile, path: str, record: ShardFileRecord, index: Index) -> ShardFile:
    """Return the header of a file. Raises CorruptError if it differs from the index."""
    if record.header_nbytes > 8 + MAX_HEADER_NBYTES:
        raise CorruptError(f"{path}: no header has {record.header_nbytes} bytes")
    here = f"{path} of rank {record.rank}"
    if file.nbytes < record.header_nbytes:
        raise CorruptError(_size_text(here, file.nbytes, record.nbytes))
    data = memoryview(bytearray(record.header_nbytes))
    count = file.read_into(0, data)
    actual = checksums.document_digest(data[:count])
    if actual != record.digest:
        raise CorruptError(
            f"{here}: the header (bytes 0:{record.header_nbytes}) is damaged, its digest is "
            f"{actual}, the index says {record.digest}"
        )
    header = decode_header(bytes(data), nbytes=record.nbytes, label=here)
    if header.block_nbytes % MAX_ITEMSIZE or header.block_nbytes > MAX_BLOCK_NBYTES:
        raise CorruptError(f"{here}: {header.block_nbytes} is not a valid block size")
    for label, stated, expected in (
        ("component", header.component, index.catalog.components[record.component].name),
        ("rank", header.rank, record.rank),
        ("world_size", header.world_size, index.catalog.world_size),
    ):
        if stated != expected:
            raise CorruptError(f"{here}: its {label} is {stated!r}, the index says {expected!r}")
    return header


def _find_mismatches(file: OpenFile, index: Index, items: Sequence[ReadItem]) -> Iterator[str]:
    for item in items:
        fqn, stored = item.tensor, item.overlap.stored
        record = index.catalog.tensors[fqn]
        facts = file.shards.dtype_and_shape(fqn, stored)
        if facts is None:
            yield f"{file.path} lacks {fqn}[{stored}], which the index says it holds"
        elif facts != (record.dtype, record.shape):
            yield (
                f"{file.path} has {fqn} as {facts[0]} {list(facts[1])}, the index as "
                f"{record.dtype} {list(record.shape)}"
            )


# --- messages --------------------------------------------------------------------------------


def _list_rows(items: Sequence[ReadItem]) -> str:
    names: dict[str, None] = {}
    for item in items:
        common = item.overlap.common
        rows = ByteRange(common.offset[0], common.stop[0]) if common.shape else None
        names[f"{item.fqn} {rows_text(rows)}"] = None
    return listed(list(names))


def rows_text(rows: ByteRange | None) -> str:
    """Return the text of a tensor's rows for a message."""
    return "(a scalar)" if rows is None else f"rows {rows.start}:{rows.stop}"


def rows_of(cell: Cell, shape: Shape, part: ElementRange) -> ByteRange | None:
    """Return the rows of the elements `part` of a cell's memory, or None for a scalar."""
    if not shape:
        return None
    if isinstance(cell, Region):
        row_numel, first = max(prod(cell.shape[1:]), 1), cell.offset[0]
        return ByteRange(first + part.start // row_numel, first - (-part.stop // row_numel))
    row_numel = max(prod(shape[1:]), 1)
    start, stop = cell.start + part.start, cell.start + part.stop
    return ByteRange(start // row_numel, -(-stop // row_numel))


# --- objects files ---------------------------------------------------------------------------


def read_objects(
    storage: Storage,
    folder: str,
    record: ObjectsFileRecord,
    *,
    make: Callable[[Placeholder], object] = lambda value: value,
) -> ObjectsFile:
    """Return the content of an objects file. `make` replaces values that need torch or numpy.

    Raises CorruptError if its bytes have changed, IncompatibleError if it needs a newer dist_ckpt.
    """
    data, path = read_encoded_objects(storage, folder, record), f"{folder}/{record.name}"
    with naming_damaged(path):
        return objects_file.decode(data, make=make, label=path)


def read_encoded_objects(storage: Storage, folder: str, record: ObjectsFileRecord) -> bytes:
    """Return the bytes of an objects file. Raises CorruptError if they have changed."""
    path = f"{folder}/{record.name}"
    if record.nbytes > objects_file.MAX_NBYTES:
        raise CorruptError(f"{path}: no objects file has {record.nbytes} bytes", path=path)
    return read_checked_file(storage, path, record)


def read_attached_file(storage: Storage, folder: str, record: AttachedFileRecord) -> bytes:
    """Return the bytes of an attached file. Raises CorruptError if they have changed."""
    return read_checked_file(storage, f"{folder}/{record.file_name}", record)


def read_checked_file(
    storage: Storage, path: str, record: ObjectsFileRecord | AttachedFileRecord
) -> bytes:
    """Return the bytes of a file that has one digest. Raises CorruptError if they have changed."""
    with naming_damaged(path):
        try:
            file = storage.open(path)
        except FileNotFoundError as error:
            raise CorruptError(f"{path} is missing; load an older checkpoint") from error
        with closing(file):
            if file.nbytes != record.nbytes:
                text = _size_text(path, file.nbytes, record.nbytes)
                raise CorruptError(f"{text}; load an older checkpoint")
            data = bytearray(record.nbytes)
            file.read_into(0, memoryview(data))
        if (actual := checksums.document_digest(data)) != record.digest:
            raise CorruptError(
                f"{path} (bytes 0:{record.nbytes}) is damaged, its digest is {actual}, the index "
                f"says {record.digest}; load an older checkpoint"
            )
    return bytes(data)
