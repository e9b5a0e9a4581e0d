"""Geometry: how a tensor is cut into cells, which ranks hold each cell, and ranges of bytes.

A cell is a `Region` (a box in global coordinates) or, for flattened layouts such as ZeRO's, an
`ElementRange` (a range of the row-major tensor). Intersections work on boxes: `pieces` cuts a cell
of either kind into boxes, each with its start in the cell's row-major memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from operator import add, ge, gt, lt, sub, truediv

from dist_ckpt.core.runtime.typed_msgpack import Message

Shape = tuple[int, ...]


class Region(Message, frozen=True, order=True, tag="box"):
    """A box of elements: the first corner and the extent, one number for each dimension."""

    offset: Shape
    shape: Shape

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"offset {self.offset} and shape {self.shape} differ in dimensions")
        if any(n < 0 for n in self.offset) or any(n < 0 for n in self.shape):
            raise ValueError(f"negative offset {self.offset} or shape {self.shape}")

    @staticmethod
    def whole(shape: Shape) -> Region:
        """Return the region that covers a tensor of this shape."""
        return Region((0,) * len(shape), shape)

    @property
    def stop(self) -> Shape:
        """The corner after the last element."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def intersect(self, other: Region) -> Region | None:
        """Return the common box, or None if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.stop, other.stop, offset, strict=True))
        return Region(offset, shape) if all(n > 0 for n in shape) else None

    def relative_to(self, origin: Shape) -> Region:
        """Return the same box in coordinates that begin at `origin`."""
        return Region(tuple(a - b for a, b in zip(self.offset, origin, strict=True)), self.shape)

    def covers(self, other: Region) -> bool:
        """Return True if every element of `other` is in this box."""
        return all(a <= b for a, b in zip(self.offset, other.offset, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def __str__(self) -> str:
        return ",".join(f"{o}:{s}" for o, s in zip(self.offset, self.stop, strict=True))


class ElementRange(Message, frozen=True, order=True, tag="run"):
    """The elements `start` to `stop` of a tensor in row-major order."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"invalid range of elements: {self.start} to {self.stop}")

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"flat {self.start}:{self.stop}"


Cell = Region | ElementRange


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """The bytes `start` to `stop` of a file or a buffer."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, order=True)
class RegionPiece:
    """A box of a cell, contiguous in the cell's row-major memory, and its first element there."""

    region: Region
    start: int


def row_major_strides(shape: Shape) -> Shape:
    """Return the strides, in elements, of a contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def split_into_boxes(elements: ElementRange, shape: Shape) -> Iterator[Region]:
    """Cut a range of elements into at most 2 * dims - 1 boxes, in row-major order.

    For each dimension: a partial row, full rows, a partial row (ByteCheckpoint, section 3.2).
    """
    if elements.start >= elements.stop:
        return
    if len(shape) <= 1:
        yield Region((elements.start,), (elements.numel,)) if shape else Region((), ())
        return
    row_numel = prod(shape[1:])
    first, head = divmod(elements.start, row_numel)
    last, tail = divmod(elements.stop, row_numel)
    if first == last:
        yield from _in_row(first, ElementRange(head, tail), shape)
        return
    if head:
        yield from _in_row(first, ElementRange(head, row_numel), shape)
        first += 1
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        yield Region((first, *zeros), (last - first, *shape[1:]))
    if tail:
        yield from _in_row(last, ElementRange(0, tail), shape)


def _in_row(row: int, elements: ElementRange, shape: Shape) -> Iterator[Region]:
    for box in split_into_boxes(elements, shape[1:]):
        yield Region((row, *box.offset), (1, *box.shape))


def join_ranges(ranges: Iterable[range]) -> Iterator[range]:
    """Join adjacent ranges, given in order."""
    last = range(0)
    for following in ranges:
        if last and following.start == last.stop:
            last = range(last.start, following.stop)
            continue
        if last:
            yield last
        last = following
    if last:
        yield last


def pieces(cell: Cell, shape: Shape) -> Iterator[RegionPiece]:
    """Cut a cell of a tensor of `shape` into boxes that are contiguous in the cell's memory."""
    start = 0
    for box in (cell,) if isinstance(cell, Region) else split_into_boxes(cell, shape):
        yield RegionPiece(box, start)
        start += box.numel


def contiguous_range(box: Region, piece: RegionPiece) -> ElementRange | None:
    """Return the range of a box in the memory of its cell, or None if that is not contiguous."""
    if box is piece.region or box == piece.region:
        return ElementRange(piece.start, piece.start + box.numel)
    ranges = tuple(islice(find_ranges(box, piece, 1), 2))
    return ranges[0] if len(ranges) == 1 else None


def find_ranges(box: Region, piece: RegionPiece, gap: int) -> Iterator[ElementRange]:
    """Yield the ranges that a box has in the memory of its cell.

    Holes of fewer than `gap` elements are included. So a block of `gap` elements overlaps a range
    if and only if it contains an element of the box. A hole of an outer dimension is at least as
    large as one of an inner dimension, so each range is one inner box.
    """
    strides = row_major_strides(piece.region.shape)
    inner = 1
    outer = len(strides)
    while outer and (box.shape[outer - 1] == 1 or strides[outer - 1] - inner < gap):
        outer -= 1
        inner += (box.shape[outer] - 1) * strides[outer]
    corner = box.relative_to(piece.region.offset).offset
    start = piece.start + sum(o * s for o, s in zip(corner, strides, strict=True))
    yield from _outer_ranges(box.shape[:outer], strides[:outer], start, inner)


def _outer_ranges(shape: Shape, strides: Shape, start: int, numel: int) -> Iterator[ElementRange]:
    # `itertools.product` would first store its ranges, maybe of millions of rows.
    if not shape:
        yield ElementRange(start, start + numel)
        return
    for i in range(shape[0]):
        yield from _outer_ranges(shape[1:], strides[1:], start + i * strides[0], numel)


@dataclass(frozen=True, slots=True)
class Grid:
    """Cuts along each dimension; the cells are the boxes between them, in row-major order.

    `cuts[d]` goes from 0 to the size of dimension d. It is `(0, 0)` for size 0: an empty cell.
    """

    cuts: tuple[Shape, ...]

    @property
    def num_cells(self) -> int:
        """The number of cells."""
        return prod(len(cut) - 1 for cut in self.cuts)

    def cell(self, number: int) -> Region:
        """Return the box of a cell."""
        offset, shape = [], []
        for cut in reversed(self.cuts):
            number, i = divmod(number, len(cut) - 1)
            offset.append(cut[i])
            shape.append(cut[i + 1] - cut[i])
        return Region(tuple(reversed(offset)), tuple(reversed(shape)))


@dataclass(frozen=True, slots=True)
class Flat:
    """Cuts of the row-major element range, for ZeRO and Megatron's flat buffers."""

    cuts: Shape

    @property
    def num_cells(self) -> int:
        """The number of cells."""
        return len(self.cuts) - 1

    def cell(self, number: int) -> ElementRange:
        """Return the element range of a cell."""
        return ElementRange(self.cuts[number], self.cuts[number + 1])


@dataclass(frozen=True, slots=True)
class Regions:
    """A sorted list of boxes that tile the tensor, for layouts that are not a grid."""

    regions: tuple[Region, ...]

    @property
    def num_cells(self) -> int:
        """The number of cells."""
        return len(self.regions)

    def cell(self, number: int) -> Region:
        """Return the box of a cell."""
        return self.regions[number]


Cut = Grid | Flat | Regions


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is cut, and for each cell the ranks that hold it, ascending.

    Tensors share layouts, so layouts grow with the ranks, not with the tensors.
    """

    cut: Cut
    holders: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        num_cells = self.cut.num_cells
        if len(self.holders) != num_cells or not all(self.holders):
            raise ValueError(f"{num_cells} cells need as many lists of holders, none of them empty")

    def cell(self, number: int) -> Cell:
        """Return the region or element range of a cell."""
        return self.cut.cell(number)

    def holder(self, number: int, rotation: int) -> int:
        """Return the rank that stores a cell of a tensor with this rotation."""
        holders = self.holders[number]
        return holders[(number + rotation) % len(holders)]


# More than any tensor library allows, and few enough that loops over dimensions stay short.
MAX_DIMS = 64
MAX_NBYTES = (1 << 63) - 1

# Limit of comparisons for each region: in a hostile list, where nothing cancels, a region that is
# cut in d dimensions costs 2**d.
_MAX_CORNERS = 256


def check_shape(shape: Shape, itemsize: int) -> None:
    """Raise ValueError unless this can be the shape of a tensor."""
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{len(shape)} dimensions, more than {MAX_DIMS}")
    # A dimension of 0 does not excuse the others: [2**63, 0] overflows in other tools.
    if prod(max(n, 1) for n in shape) * itemsize > MAX_NBYTES:
        raise ValueError(f"shape {list(shape)} overflows")


def check_cell(cell: Cell, shape: Shape) -> None:
    """Raise ValueError unless a cell is inside a tensor of this shape."""
    if isinstance(cell, ElementRange):
        if cell.stop > prod(shape):
            raise ValueError(f"elements {cell.start}:{cell.stop} of {prod(shape)}")
    # This runs for every shard that is opened: avoid a Python call for each dimension.
    elif len(cell.shape) != len(shape) or any(map(gt, map(add, cell.offset, cell.shape), shape)):
        raise ValueError(f"region [{cell}] outside shape {list(shape)}")


def check_cut(cut: Cut, shape: Shape) -> None:
    """Raise ValueError unless the cells of a cut tile a tensor of this shape."""
    if isinstance(cut, Grid):
        if len(cut.cuts) != len(shape):
            raise ValueError(f"{len(cut.cuts)} dimensions are cut of a shape {list(shape)}")
        for dim, (cuts, size) in enumerate(zip(cut.cuts, shape, strict=True)):
            _check_cuts(cuts, size, f"dimension {dim}")
    elif isinstance(cut, Flat):
        _check_cuts(cut.cuts, prod(shape), "the elements")
    else:
        check_tiling(cut.regions, shape)


def _check_cuts(cuts: Shape, size: int, label: str) -> None:
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != size:
        raise ValueError(f"the cuts of {label} do not go from 0 to {size}")
    if any(map(ge, cuts, cuts[1:])) and cuts != (0, 0):
        raise ValueError(f"the cuts of {label} do not ascend")


def check_tiling(regions: Sequence[Region], shape: Shape) -> None:
    """Raise ValueError unless the regions, none of them empty, cover each element exactly once."""
    whole = Region.whole(shape)
    for region in regions:
        check_cell(region, shape)
        if region.numel == 0 < whole.numel:
            raise ValueError(f"region [{region}] is empty")
    if not regions:
        raise ValueError("no regions")
    if whole.numel == 0:
        if list(regions) != [whole]:
            raise ValueError(f"an empty tensor of shape {list(shape)} has one region, the whole")
        return
    # Ignore dimensions that no region cuts.
    cut = [d for d, size in enumerate(shape) if any(r.shape[d] != size for r in regions)]
    boxes = Counter(tuple((r.offset[d], r.offset[d] + r.shape[d]) for d in cut) for r in regions)
    boxes[tuple((0, shape[d]) for d in cut)] -= 1
    corner = _first_corner(boxes, _Budget(_MAX_CORNERS * (len(regions) + 1)))
    if corner is None:
        return
    count, position = corner
    point = [0] * len(shape)
    for d, n in zip(cut, position, strict=True):
        point[d] = n
    covered = sum(region.numel for region in regions)
    raise ValueError(
        f"regions {'overlap' if count > 0 else 'leave a hole'} at {point} of shape {list(shape)} "
        f"(they hold {covered} elements, the tensor has {whole.numel})"
    )


class _Budget:
    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def spend(self, count: int) -> None:
        self.num_left -= count
        if self.num_left < 0:
            raise ValueError("regions cut in too many dimensions together")


# Boxes, each with a (start, stop) for each dimension, and their counts: 1 for a region, -1 for the
# whole tensor. The regions tile the tensor if and only if the counts sum to zero at every point.
# `_first_corner` checks this by the derivative along the first dimension. At each coordinate it is
# the boxes that begin there minus the boxes that end there, with one dimension less. Neighbours
# cancel, so a grid costs no more than its faces. The first corner other than zero is the bad point.
_Boxes = Mapping[tuple[tuple[int, int], ...], int]


def _first_corner(boxes: _Boxes, budget: _Budget) -> tuple[int, list[int]] | None:
    budget.spend(len(boxes))
    if () in boxes:
        return (boxes[()], []) if boxes[()] else None
    faces: dict[int, dict[tuple[tuple[int, int], ...], int]] = {}
    for ((start, stop), *inner), count in boxes.items():
        for position, change in ((start, count), (stop, -count)):
            face = faces.setdefault(position, {})
            rest = tuple(inner)
            face[rest] = face.get(rest, 0) + change
    for position in sorted(faces):
        face = {box: count for box, count in faces[position].items() if count}
        if (corner := _first_corner(face, budget)) is not None:
            return corner[0], [position, *corner[1]]
    return None


# --- a search tree of boxes ------------------------------------------------------------------

# With fewer boxes, comparisons cost less than another level of the tree.
_LEAF_SIZE = 8


@dataclass(frozen=True, slots=True)
class _BoxNode:
    start: Shape
    stop: Shape
    numbers: tuple[int, ...]
    halves: tuple[_BoxNode, ...]


class BoxTree:
    """Finds the boxes that overlap a box, by their numbers. Empty boxes overlap nothing.

    Each node of the tree is halved along the dimension with the most boxes side by side. A search
    costs about the size of its result plus the logarithm of the number of boxes. A thin box across
    many boxes costs more.
    """

    def __init__(self, boxes: Sequence[Region]) -> None:
        self._corners = [(box.offset, box.stop) for box in boxes]
        numbers = [number for number, box in enumerate(boxes) if box.numel]
        self._root = self._build_node(numbers) if numbers else None

    def find_overlapping(self, box: Region) -> list[int]:
        """Return the numbers, ascending, of the boxes that overlap `box`."""
        start, stop = box.offset, box.stop
        if self._root is None or box.numel == 0:
            return []
        overlapping: list[int] = []
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            if all(map(lt, node.start, stop)) and all(map(lt, start, node.stop)):
                nodes += node.halves
                for number in node.numbers:
                    first, last = self._corners[number]
                    if all(map(lt, first, stop)) and all(map(lt, start, last)):
                        overlapping.append(number)
        return sorted(overlapping)

    def _build_node(self, numbers: list[int]) -> _BoxNode:
        starts, stops = zip(*(self._corners[number] for number in numbers), strict=True)
        start = tuple(map(min, zip(*starts, strict=True)))
        stop = tuple(map(max, zip(*stops, strict=True)))
        if len(numbers) <= _LEAF_SIZE or not start:
            return _BoxNode(start, stop, tuple(numbers), ())
        # The number of average boxes side by side, up to a factor that is equal in all dimensions.
        lengths = map(sub, map(sum, zip(*stops, strict=True)), map(sum, zip(*starts, strict=True)))
        side_by_side = list(map(truediv, map(sub, stop, start), lengths))
        dim = side_by_side.index(max(side_by_side))
        ordered = sorted(numbers, key=lambda number: self._corners[number][0][dim])
        middle = len(ordered) // 2
        halves = self._build_node(ordered[:middle]), self._build_node(ordered[middle:])
        return _BoxNode(start, stop, (), halves)
