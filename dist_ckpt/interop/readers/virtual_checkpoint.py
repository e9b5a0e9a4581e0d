"""Virtual checkpoints: only the documents are built, the tensors stay in another system's files.

Such files load into any layout, and can be inspected and resharded. They have no digests
(`Index.has_digests` is False): only sizes and names are checked.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Literal

from dist_ckpt.core.commit.commit_protocol import check_receipts
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import BLOCK_DIGEST_CHARS, document_digest
from dist_ckpt.core.format.geometry import ByteRange, Cell, Region, Shape
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import EMPTY_DIGESTS, Index, Key, Node
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.planning.plan import (
    FilePlan,
    FileReceipt,
    Inventory,
    Parts,
    Receipt,
    TensorEntry,
    View,
)
from dist_ckpt.core.planning.save.save_planner import files_of_rank, plan_save
from dist_ckpt.core.planning.selection import names_above
from dist_ckpt.core.storage import ReadableFile, Storage, real_path
from dist_ckpt.core.storage.virtual_files import FileOfBytes, ReadOnlyFiles
from dist_ckpt.errors import CorruptError

# Strided elements are read together with the gaps between them, if the total is at most `_SPARSE`
# times the requested bytes, or at most `_READ_AT_ONCE` bytes.
_SPARSE = 8
_READ_AT_ONCE = 8 << 20

# Unsigned integers of each size, as a memoryview has them.
_WORDS: Mapping[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}

# The component of tensors that are themselves at the top of the state.
LOOSE = "state"


@dataclass(frozen=True, slots=True)
class ForeignChunk:
    """A cell of a tensor, little-endian in a file, from byte `start` on.

    It is stored row-major. With `strides`, a box is copied into row-major order when it is read,
    in memory as a whole.
    """

    cell: Cell
    file: str
    start: int
    strides: Shape | None = None


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor in the files of another system, with the location of each cell."""

    fqn: str
    dtype: str
    shape: Shape
    chunks: tuple[ForeignChunk, ...]


@dataclass(frozen=True, slots=True)
class ForeignState:
    """The state in the files of another system; `tree` has the containers, as in an objects file.

    `values` are plain data by name, and `metadata` is the files' own. `aliases` maps each further
    name of a tensor to its first. `per_rank` has values by name and rank; `step` is the files' own.
    """

    tensors: Sequence[ForeignTensor]
    tree: tuple[Node, ...]
    values: Mapping[str, object]
    metadata: Mapping[str, object]
    aliases: Mapping[str, str] = field(default_factory=dict)
    per_rank: Mapping[str, Mapping[int, object]] = field(default_factory=dict)
    step: int | None = None


def checkpoint_of(storage: Storage, path: str, state: ForeignState, label: str) -> ReadOnlyFiles:
    """Return a storage that presents the state as a checkpoint at `path`.

    `storage` has the files that the chunks name; each is opened when it is read. `label` describes
    the format in messages. CorruptError if the chunks of a tensor overlap or leave gaps.
    """
    by_file = _by_file(state.tensors)
    rank_values = _values_of_ranks(state)
    names = [*sorted(by_file), *(_NO_FILE for _ in range(len(by_file), len(rank_values)))]
    try:
        inventories = [_inventory(state, by_file.get(n, []), rank) for rank, n in enumerate(names)]
        plan = plan_save([(entry, (rank,)) for rank, entry in enumerate(inventories)], len(names))
    except ValueError as error:
        raise CorruptError(f"{path}: the files do not form one state: {error}") from None
    main = objects_file.ObjectsFile(
        tree=plan.tree, values=dict(state.values), metadata=dict(state.metadata)
    )
    chunks = {(entry.fqn, part.cell): part for entry in state.tensors for part in entry.chunks}
    documents: dict[str, bytes] = {}
    files: dict[str, Callable[[], ReadableFile]] = {}
    receipts = []
    for rank, name in enumerate(names):
        written: list[FileReceipt] = []
        for file in files_of_rank(plan, rank):
            header = _header_of(file)
            segments = [_segment(chunks[item.fqn, item.cell], item.span) for item in file.items]
            files[file.name] = partial(_open, storage, name, header, segments)
            digest = document_digest(header)
            written.append((file.name, file.nbytes, file.header.nbytes, digest))
        for document, data in _documents_of(rank, main, rank_values).items():
            documents[document] = data
            written.append((document, len(data), 0, document_digest(data)))
        receipts.append(Receipt(tuple(written), (), 0.0))
    shard_files, objects = check_receipts(plan.catalog, receipts)
    index = Index(
        attempt=EMPTY_DIGESTS,
        step=state.step,
        catalog=plan.catalog,
        files=shard_files,
        objects=objects,
        metadata={},
        saved_by={"foreign": label},
        saved_at=0.0,
    )
    documents[filenames.INDEX] = index_json.encode(index)
    files.update((name, partial(FileOfBytes, data)) for name, data in documents.items())
    remedy = f"these are {label}, which are read-only: save, reshard or import to another path"
    return ReadOnlyFiles(f"{path}/{EMPTY_DIGESTS}", files, remedy)


# The file name of a rank that has values but no file.
_NO_FILE = ""

# The tensors in one file, each with its cells in that file.
_TensorsInFile = list[tuple[ForeignTensor, tuple[Cell, ...]]]


def _values_of_ranks(state: ForeignState) -> list[dict[str, dict[Key, object]]]:
    """Return the values of each rank, by name and by the rank."""
    ranks = {rank for values in state.per_rank.values() for rank in values}
    return [
        {fqn: {rank: values[rank]} for fqn, values in state.per_rank.items() if rank in values}
        for rank in range(max(ranks, default=-1) + 1)
    ]


def _documents_of(
    rank: int, main: objects_file.ObjectsFile, rank_values: Sequence[dict[str, dict[Key, object]]]
) -> dict[str, bytes]:
    documents = {} if rank else {filenames.OBJECTS: objects_file.encode(main)}
    if rank < len(rank_values) and rank_values[rank]:
        data = objects_file.encode(objects_file.ObjectsFile(per_rank=rank_values[rank]))
        documents[filenames.objects_file(rank)] = data
    return documents


def _by_file(tensors: Sequence[ForeignTensor]) -> dict[str, _TensorsInFile]:
    by_file: dict[str, _TensorsInFile] = {}
    for tensor in tensors:
        cells: dict[str, list[Cell]] = {}
        for chunk in tensor.chunks:
            cells.setdefault(chunk.file, []).append(chunk.cell)
        for file, cells_in_file in cells.items():
            by_file.setdefault(file, []).append((tensor, tuple(cells_in_file)))
    return by_file or {_NO_FILE: []}


def _inventory(state: ForeignState, contents: _TensorsInFile, rank: int) -> Inventory:
    """Return the inventory of a rank that has exactly one of the files."""
    components: dict[str, int] = {}
    views: dict[View, int] = {}
    entries = []
    tops = {str(key) for key in state.tree[0].keys}
    names = {tensor.fqn for tensor, _ in contents}
    for tensor, cells in contents:
        component = components.setdefault(_component(tensor.fqn, tops), len(components))
        view = views.setdefault(Parts(cells), len(views))
        entries.append(TensorEntry(tensor.fqn, tensor.dtype, tensor.shape, view, component))
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
    )


def _component(fqn: str, tops: Collection[str]) -> str:
    """Return the top-level key above a tensor, or `LOOSE` if the tensor is at the top."""
    _, *above = names_above(fqn)
    return next((name for name in above if name in tops), LOOSE)


def _header_of(file: FilePlan) -> bytes:
    """Return a shard file's header. Its digests are zeros: they are never checked."""
    return file.header.fill(None, "0" * (file.header.num_digests * BLOCK_DIGEST_CHARS))


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of a data section, stored in another file from `file_offset` on.

    With `strides` they are the elements of a strided box of `shape`.
    """

    start: int
    file_offset: int
    nbytes: int
    shape: Shape
    strides: Shape | None


def _segment(chunk: ForeignChunk, span: ByteRange) -> Segment:
    shape = chunk.cell.shape if isinstance(chunk.cell, Region) else (chunk.cell.numel,)
    return Segment(span.start, chunk.start, span.nbytes, shape, chunk.strides)


def _open(storage: Storage, path: str, header: bytes, segments: Sequence[Segment]) -> ReadableFile:
    return _VirtualFile(storage.open(real_path(path)), header, segments)


class _VirtualFile:
    """A shard file: its header in memory, its data in another file."""

    num_links = 1

    def __init__(self, inner: ReadableFile, header: bytes, segments: Sequence[Segment]) -> None:
        self._inner = inner
        self._header = header
        self._segments = segments
        self._starts = [segment.start for segment in segments]
        # The last segment that was copied into row-major order: its parts are read one by one.
        self._in_order: tuple[int, memoryview] | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The planned size, even if the other file is shorter."""
        return (
            len(self._header)
            + sum(segment.nbytes for segment in self._segments[-1:])
            + (self._starts[-1] if self._starts else 0)
        )

    def read_into(self, offset: int, target: memoryview) -> int:
        """See `ReadableFile.read_into`."""
        head = self._header[offset:][: len(target)]
        target[: len(head)] = head
        done = len(head)
        while done < len(target):
            at = offset + done - len(self._header)
            number = bisect_right(self._starts, at) - 1
            # If segments have equal starts, only the last has bytes.
            segment = self._segments[number]
            within = at - segment.start
            wanted = min(len(target) - done, segment.nbytes - within)
            if wanted <= 0:
                break
            count = self._read(number, within, target[done : done + wanted])
            done += count
            if count < wanted:
                break
        return done

    def _read(self, number: int, within: int, target: memoryview) -> int:
        segment = self._segments[number]
        if segment.strides is None:
            return self._inner.read_into(segment.file_offset + within, target)
        with self._lock:
            if self._in_order is None or self._in_order[0] != number:
                self._in_order = None
                self._in_order = number, self._gathered(segment, segment.strides)
            data = self._in_order[1][within : within + len(target)]
        target[: len(data)] = data
        return len(data)

    def _gathered(self, segment: Segment, strides: Shape) -> memoryview:
        itemsize = segment.nbytes // prod(segment.shape)
        return self._read_strided(segment.file_offset, segment.shape, strides, itemsize)

    def _read_strided(self, start: int, shape: Shape, strides: Shape, itemsize: int) -> memoryview:
        """Return the elements in row-major order, and read few bytes between distant elements."""
        spanned = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if spanned * itemsize <= max(_SPARSE * prod(shape) * itemsize, _READ_AT_ONCE):
            elements = memoryview(bytearray(spanned * itemsize))
            count = self._inner.read_into(start, elements)
            return _in_row_major_order(elements[:count], shape, strides, itemsize)
        data = bytearray()
        for row in range(shape[0]):
            at = start + row * strides[0] * itemsize
            data += self._read_strided(at, shape[1:], strides[1:], itemsize)
        return memoryview(data)

    def close(self) -> None:
        """See `ReadableFile.close`."""
        self._in_order = None
        self._inner.close()


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
    code = _WORDS[itemsize]
    source = elements[: spanned * itemsize].cast(code)
    data = memoryview(bytearray(prod(shape) * itemsize))
    target = data.cast(code)
    new_strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
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
