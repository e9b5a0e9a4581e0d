"""Virtual checkpoints: the index and the values are built, the tensors stay in foreign files.

So files of another system load into any layout, and can be inspected and resharded. They have no
digests (`Index.has_digests` is False): only sizes and names are checked.
"""

from __future__ import annotations

import json
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Literal

from dist_ckpt.core.commit.receipts import build_file_tables
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import BLOCK_DIGEST_CHARS, document_digest
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange, Cell, Region, Shape, row_major_strides
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import FOREIGN_ATTEMPT, Index, Key, ListedVersions, Node
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.name_selection import names_above
from dist_ckpt.core.planning.plan import FileReceipt, Inventory, Receipt, TensorEntry
from dist_ckpt.core.planning.save.save_planner import plan_rank_files, plan_save
from dist_ckpt.core.planning.tensor_views import Parts, View
from dist_ckpt.core.storage import ReadableFile, Storage, real_path
from dist_ckpt.core.storage.overlay_storage import BytesFile, ReadOnlyStorage
from dist_ckpt.errors import CorruptError

# One read covers strided elements and the gaps between them, up to this multiple of their size, or
# up to `_MAX_DENSE_READ_NBYTES`.
_MAX_SPARSENESS = 8
_MAX_DENSE_READ_NBYTES = 8 << 20

# The size of the reads of a check.
_MAX_CHECK_NBYTES = 8 << 20

# The format codes of `memoryview` for unsigned integers, by size.
_WORD_CODES: Mapping[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}

# The component of tensors that are themselves at the top of the state.
TOP_LEVEL_COMPONENT = "state"

# The component of a file with the tensors of a model and nothing else: `{"model": ...}`.
MODEL = "model"


@dataclass(frozen=True, slots=True)
class CheckedRange:
    """A range of a file, and its CRC-32: 0 if the file has none. `label` names it in errors."""

    label: str
    start: int
    nbytes: int
    crc32: int

    @property
    def has_checksum(self) -> bool:
        """True if its bytes can be checked."""
        return self.crc32 != 0 or not self.nbytes

    def check(self, file: ReadableFile) -> None:
        """Read the range. CorruptError if it has another CRC-32."""
        if not self.has_checksum:
            return
        crc32, done = 0, 0
        buffer = memoryview(bytearray(min(self.nbytes, _MAX_CHECK_NBYTES)))
        while done < self.nbytes:
            count = file.read_into(self.start + done, buffer[: self.nbytes - done])
            if not count:
                break
            crc32, done = zlib.crc32(buffer[:count], crc32), done + count
        if crc32 != self.crc32:
            raise CorruptError(
                f"{self.label} has the CRC-32 {crc32:08x}, but {self.crc32:08x} was written; fetch "
                f"the file again"
            )


# The polynomial of CRC-32, with the highest power of x in the lowest bit.
_CRC32_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def shift_crc32(crc32: int, nbytes: int) -> int:
    """Return the part of a CRC-32 that comes from bytes with `crc32`, if `nbytes` follow them.

    The CRC-32 of a file is the exclusive or of this for all its parts. As in zlib's crc32_combine,
    it is a product modulo the polynomial, with the power of x for `nbytes`.
    """
    power, square = _ONE, _multiply(_ONE >> 4, _ONE >> 4)  # x ** 8 is one byte
    while nbytes:
        if nbytes & 1:
            power = _multiply(square, power)
        square, nbytes = _multiply(square, square), nbytes >> 1
    return _multiply(power, crc32)


def _multiply(left: int, right: int) -> int:
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = left << 1 & 0xFFFFFFFF
        right = right >> 1 ^ (_CRC32_POLYNOMIAL if right & 1 else 0)
    return product


@dataclass(frozen=True, slots=True)
class ForeignChunk:
    """A cell of a tensor, little-endian in a file, from byte `start` on, within `record`.

    It is row-major, unless it has `strides`. Then a read copies the whole cell into row-major
    order, in memory. `data` has the bytes that are not in the file as they are; `start` counts in
    them. `multiply(first, data)` returns the float32 of elements of one byte each, from number
    `first` of the cell on; without it, a read returns the elements as they are.
    """

    cell: Cell
    file: str
    start: int
    strides: Shape | None = None
    record: CheckedRange | None = None
    data: bytes | None = None
    multiply: Callable[[int, memoryview], memoryview] | None = None


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor in the files of another system, with the location of each cell."""

    fqn: str
    dtype: str
    shape: Shape
    chunks: tuple[ForeignChunk, ...]

    @property
    def has_checksums(self) -> bool:
        """True unless a record of torch.save with its bytes has no checksum."""
        return all(chunk.record is None or chunk.record.has_checksum for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class ForeignState:
    """The state in the files of another system; `tree` has the containers, as in an objects file.

    `values` are plain data by name. `aliases` maps the other names of a tied tensor to the first.
    `per_rank` has values by name and rank. `metadata` and `step` are those in the files. `versions`
    are those of modules, as in `Catalog`: None if they are unknown. With `has_text_keys`, the files
    have all keys as text.
    """

    tensors: Sequence[ForeignTensor]
    tree: tuple[Node, ...]
    values: Mapping[str, object]
    metadata: Mapping[str, object]
    aliases: Mapping[str, str] = field(default_factory=dict)
    per_rank: Mapping[str, Mapping[int, object]] = field(default_factory=dict)
    step: int | None = None
    versions: Mapping[str, ListedVersions] | None = field(default_factory=dict)
    has_text_keys: bool = False


# Changes a state before it becomes a virtual checkpoint.
StateConversion = Callable[[ForeignState], ForeignState]


def build_virtual_checkpoint(
    storage: Storage, path: str, state: ForeignState, label: str, *, checks_records: bool = False
) -> ReadOnlyStorage:
    """Return a storage that presents the state as a checkpoint at `path`.

    `storage` has the files that the chunks name. A file is opened when it is read. With
    `checks_records`, the whole record of a chunk is checked before any part of it is used. `label`
    describes the format in messages. CorruptError if the chunks of a tensor overlap or leave gaps.
    """
    by_file = _group_by_file(state.tensors)
    last_rank = max((rank for values in state.per_rank.values() for rank in values), default=0)
    names = [*sorted(by_file), *(_NO_FILE for _ in range(len(by_file), last_rank + 1))]
    try:
        inventories = [
            _build_inventory(state, by_file.get(name, []), rank) for rank, name in enumerate(names)
        ]
        plan = plan_save([(entry, (rank,)) for rank, entry in enumerate(inventories)], len(names))
    except ValueError as error:
        raise CorruptError(f"{path}: the files do not form one state: {error}") from None
    chunks = {(entry.fqn, part.cell): part for entry in state.tensors for part in entry.chunks}
    checks = _RecordChecks(state.tensors) if checks_records else None
    documents: dict[str, bytes] = {}
    files: dict[str, Callable[[], ReadableFile]] = {}
    receipts = []
    for rank, name in enumerate(names):
        written: list[FileReceipt] = []
        for file in plan_rank_files(plan, rank):
            # The digests are zeros: they are never checked.
            header = file.header.fill(None, "0" * (file.header.num_digests * BLOCK_DIGEST_CHARS))
            segments = [(item.span, chunks[item.fqn, item.cell]) for item in file.items]
            files[file.name] = partial(_VirtualFile, storage, name, header, segments, checks)
            digest = document_digest(header)
            written.append(FileReceipt(file.name, file.nbytes, file.header.nbytes, digest))
        for document, data in _encode_objects(rank, state, plan.tree).items():
            documents[document] = data
            written.append(FileReceipt(document, len(data), 0, document_digest(data)))
        receipts.append(Receipt(tuple(written), (), 0.0))
    shard_files, objects = build_file_tables(plan.catalog, receipts)
    index = Index(
        attempt=FOREIGN_ATTEMPT,
        step=state.step,
        catalog=plan.catalog,
        files=shard_files,
        objects=objects,
        metadata={},
        saved_by={"foreign": label},
        saved_at=0.0,
    )
    documents[filenames.INDEX] = index_json.encode(index)
    files.update((name, partial(BytesFile, data)) for name, data in documents.items())
    remedy = f"these are {label}, which are read-only: save, reshard or import to another path"
    return ReadOnlyStorage(f"{path}/{FOREIGN_ATTEMPT}", files, remedy)


class _RecordChecks:
    """Checks the records of the tensors that are read. Thread-safe.

    A record that is exactly one chunk is checked while that is read, part by part, in any order.
    Any other record is read as a whole before the first part of it is used.
    """

    def __init__(self, tensors: Sequence[ForeignTensor]) -> None:
        sizes: dict[CheckedRange | None, list[int]] = {}
        for tensor in tensors:
            for chunk in tensor.chunks:
                nbytes = chunk.cell.numel * DTYPES[tensor.dtype].itemsize
                is_plain = chunk.strides is None and chunk.multiply is None
                sizes.setdefault(chunk.record, []).append(nbytes if is_plain else -1)
        self._by_parts = {record for record in sizes if record and sizes[record] == [record.nbytes]}
        # The CRC-32 of the parts so far, as a part of the record's, and the size of these parts.
        self._read: dict[CheckedRange, tuple[int, int]] = {}
        self._checked: set[CheckedRange] = set()
        self._lock = threading.Lock()

    def begin(self, chunk: ForeignChunk, file: ReadableFile) -> None:
        """Check the record of a chunk, unless its parts are. Call this before a read."""
        if chunk.record is not None and chunk.record not in self._by_parts:
            with self._lock:
                self._check_once(chunk.record, file)

    def add(self, chunk: ForeignChunk, offset: int, part: memoryview, file: ReadableFile) -> None:
        """Add a part of a chunk that was read. CorruptError after the last part if one is wrong."""
        record = chunk.record
        if record not in self._by_parts or not record.has_checksum:
            return
        crc32 = shift_crc32(zlib.crc32(part), record.nbytes - offset - len(part))
        with self._lock:
            crc32_before, nbytes = self._read.get(record, (0, 0))
            self._read[record] = crc32 ^ crc32_before, nbytes + len(part)
            # A part that was read twice also gives a wrong sum: then the record is read again.
            if nbytes + len(part) >= record.nbytes and crc32 ^ crc32_before != record.crc32:
                self._check_once(record, file)

    def _check_once(self, record: CheckedRange, file: ReadableFile) -> None:
        if record not in self._checked:
            record.check(file)
            self._checked.add(record)


# The file name of a rank that has values but no file.
_NO_FILE = ""

# The tensors in one file, each with its cells in that file.
_TensorsInFile = list[tuple[ForeignTensor, tuple[Cell, ...]]]


def _encode_objects(rank: int, state: ForeignState, tree: tuple[Node, ...]) -> dict[str, bytes]:
    """Return the objects files of a rank, by name."""
    documents = {}
    if not rank:
        main = ObjectsFile(
            tree,
            dict(state.values),
            metadata=dict(state.metadata),
            has_text_keys=state.has_text_keys,
        )
        documents[filenames.OBJECTS] = objects_file.encode(main)
    values: dict[str, dict[Key, object]] = {
        fqn: {rank: values[rank]} for fqn, values in state.per_rank.items() if rank in values
    }
    if values:
        data = objects_file.encode(ObjectsFile(per_rank=values))
        documents[filenames.objects_file(rank)] = data
    return documents


def _group_by_file(tensors: Sequence[ForeignTensor]) -> dict[str, _TensorsInFile]:
    by_file: dict[str, _TensorsInFile] = {}
    for tensor in tensors:
        cells: dict[str, list[Cell]] = {}
        for chunk in tensor.chunks:
            cells.setdefault(chunk.file, []).append(chunk.cell)
        for file, cells_in_file in cells.items():
            by_file.setdefault(file, []).append((tensor, tuple(cells_in_file)))
    return by_file or {_NO_FILE: []}


def _build_inventory(state: ForeignState, contents: _TensorsInFile, rank: int) -> Inventory:
    """Return the inventory of a rank that has exactly one of the files."""
    components: dict[str, int] = {}
    views: dict[View, int] = {}
    entries = []
    tops = {str(key) for key in state.tree[0].keys}
    names = {tensor.fqn for tensor, _ in contents}
    for tensor, cells in contents:
        _, *above = names_above(tensor.fqn)
        component = next((name for name in above if name in tops), TOP_LEVEL_COMPONENT)
        number = components.setdefault(component, len(components))
        view = views.setdefault(Parts(cells), len(views))
        entries.append(TensorEntry(tensor.fqn, tensor.dtype, tensor.shape, view, number))
    return Inventory(
        mesh=(),
        components=tuple(components),
        views=tuple(views),
        tensors=tuple(entries),
        aliases=tuple((fqn, to) for fqn, to in state.aliases.items() if to in names),
        values=() if rank else tuple(state.values),
        per_rank=tuple((fqn, rank) for fqn, values in state.per_rank.items() if rank in values),
        tree=state.tree,
        name_lists=(),
        numpy=(),
        versions=None
        if state.versions is None
        else tuple((model, json.dumps(of)) for model, of in state.versions.items()),
    )


# Bytes of a data section, and the chunk of another file that has them.
_Segment = tuple[ByteRange, ForeignChunk]


class _VirtualFile:
    """A shard file: its header in memory, its data in another file."""

    num_links = 1

    def __init__(
        self,
        storage: Storage,
        path: str,
        header: bytes,
        segments: Sequence[_Segment],
        checks: _RecordChecks | None,
    ) -> None:
        self._inner = storage.open(real_path(path))
        self._header = header
        self._segments = segments
        self._checks = checks
        self._starts = [span.start for span, _ in segments]
        # The last segment that was copied into row-major order: its parts are read one by one.
        self._in_order: tuple[int, memoryview] | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The planned size, even if the other file is shorter."""
        return len(self._header) + (self._segments[-1][0].stop if self._segments else 0)

    def read_into(self, offset: int, target: memoryview) -> int:
        """See `ReadableFile.read_into`."""
        head = self._header[offset:][: len(target)]
        target[: len(head)] = head
        done = len(head)
        while done < len(target):
            at = offset + done - len(self._header)
            number = bisect_right(self._starts, at) - 1
            # If segments have equal starts, only the last has bytes.
            span, _ = self._segments[number]
            within = at - span.start
            wanted = min(len(target) - done, span.nbytes - within)
            if wanted <= 0:
                break
            count = self._read(number, within, target[done : done + wanted])
            done += count
            if count < wanted:
                break
        return done

    def _read(self, number: int, within: int, target: memoryview) -> int:
        span, chunk = self._segments[number]
        inner = self._inner if chunk.data is None else BytesFile(chunk.data)
        if self._checks is not None:
            self._checks.begin(chunk, self._inner)
        if chunk.multiply is not None:
            return self._read_scaled(number, within, target)
        if chunk.strides is None:
            count = inner.read_into(chunk.start + within, target)
            if self._checks is not None:
                self._checks.add(chunk, within, target[:count], self._inner)
            return count
        data = self._read_in_order(number, span.nbytes // chunk.cell.numel)
        data = data[within : within + len(target)]
        target[: len(data)] = data
        return len(data)

    def _read_in_order(self, number: int, itemsize: int) -> memoryview:
        """Return the elements of a strided segment in row-major order."""
        chunk = self._segments[number][1]
        with self._lock:
            if self._in_order is None or self._in_order[0] != number:
                self._in_order = None
                self._in_order = number, _read_elements(self._inner, chunk, itemsize)
            return self._in_order[1]

    def _read_scaled(self, number: int, within: int, target: memoryview) -> int:
        """Read elements of one byte, and multiply them by their scale into float32."""
        span, chunk = self._segments[number]
        assert chunk.multiply is not None
        end = min(within + len(target), span.nbytes)
        first, stop = within // 4, -(-end // 4)
        if chunk.strides is not None:
            data = self._read_in_order(number, 1)[first:stop]
        else:
            inner = self._inner if chunk.data is None else BytesFile(chunk.data)
            data = memoryview(bytearray(stop - first))
            data = data[: inner.read_into(chunk.start + first, data)]
        products = chunk.multiply(first, data) if data else data
        part = products[within - 4 * first : end - 4 * first]
        target[: len(part)] = part
        return len(part)

    def close(self) -> None:
        """See `ReadableFile.close`."""
        self._in_order = None
        self._inner.close()


def read_chunk(storage: Storage, chunk: ForeignChunk, itemsize: int) -> memoryview:
    """Return the elements of a chunk in row-major order. CorruptError if its record is damaged."""
    with closing(storage.open(real_path(chunk.file))) as file:
        if chunk.record is not None:
            chunk.record.check(file)
        return _read_elements(file, chunk, itemsize)


def _read_elements(file: ReadableFile, chunk: ForeignChunk, itemsize: int) -> memoryview:
    inner = file if chunk.data is None else BytesFile(chunk.data)
    shape = chunk.cell.shape if isinstance(chunk.cell, Region) else (chunk.cell.numel,)
    strides = row_major_strides(shape) if chunk.strides is None else chunk.strides
    return _read_strided(inner, chunk.start, shape, strides, itemsize)


def _read_strided(
    file: ReadableFile, start: int, shape: Shape, strides: Shape, itemsize: int
) -> memoryview:
    """Return the elements in row-major order, and read few bytes between distant elements."""
    spanned = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if spanned * itemsize <= max(_MAX_SPARSENESS * prod(shape) * itemsize, _MAX_DENSE_READ_NBYTES):
        elements = memoryview(bytearray(spanned * itemsize))
        count = file.read_into(start, elements)
        return _in_row_major_order(elements[:count], shape, strides, itemsize)
    data = bytearray()
    for row in range(shape[0]):
        at = start + row * strides[0] * itemsize
        data += _read_strided(file, at, shape[1:], strides[1:], itemsize)
    return memoryview(data)


def _in_row_major_order(
    elements: memoryview, shape: Shape, strides: Shape, itemsize: int
) -> memoryview:
    """Copy strided elements, such as a transposed tensor's, into row-major order.

    `elements` begins with the first element; CorruptError if it is too short. One copy moves the
    longest dimension.
    """
    if itemsize == 16:  # a complex number is two of the widest words
        wide_strides = (*(2 * stride for stride in strides), 1)
        return _in_row_major_order(elements, (*shape, 2), wide_strides, 8)
    spanned = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if len(elements) < spanned * itemsize:
        raise CorruptError("the file ends before the tensor's elements; fetch it again")
    if not shape:
        return elements[:itemsize]
    code = _WORD_CODES[itemsize]
    source = elements[: spanned * itemsize].cast(code)
    data = memoryview(bytearray(prod(shape) * itemsize))
    target = data.cast(code)
    new_strides = row_major_strides(shape)
    inner = max(range(len(shape)), key=lambda dim: shape[dim])
    count, step, new_step = shape[inner], strides[inner], new_strides[inner]
    outer = [dim for dim in range(len(shape)) if dim != inner]
    for indices in product(*(range(shape[dim]) for dim in outer)):
        at = sum(i * strides[dim] for i, dim in zip(indices, outer, strict=True))
        to = sum(i * new_strides[dim] for i, dim in zip(indices, outer, strict=True))
        target[to : to + (count - 1) * new_step + 1 : new_step] = source[
            at : at + (count - 1) * step + 1 : step
        ]
    return data
