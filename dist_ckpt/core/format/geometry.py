"""Geometry: boxes of elements, ranges of elements, ranges of bytes.

A tensor is cut into cells. A cell is a `Region` (a box in global coordinates) or, for flattened
layouts such as ZeRO's, an `ElementRange` (a range of the row-major tensor). Intersections work on
boxes: `pieces` cuts a cell of either kind into boxes, each with its start in the cell's row-major
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod

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


def boxes_of(elements: ElementRange, shape: Shape) -> Iterator[Region]:
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
    for box in boxes_of(elements, shape[1:]):
        yield Region((row, *box.offset), (1, *box.shape))


def joined(runs: Iterable[range]) -> Iterator[range]:
    """Join adjacent runs, given in order."""
    last = range(0)
    for run in runs:
        if last and run.start == last.stop:
            last = range(last.start, run.stop)
            continue
        if last:
            yield last
        last = run
    if last:
        yield last


def pieces(cell: Cell, shape: Shape) -> Iterator[RegionPiece]:
    """Cut a cell of a tensor of `shape` into boxes that are contiguous in the cell's memory."""
    if isinstance(cell, Region):
        yield RegionPiece(cell, 0)
        return
    start = 0
    for box in boxes_of(cell, shape):
        yield RegionPiece(box, start)
        start += box.numel


def run_of(box: Region, piece: RegionPiece) -> ElementRange | None:
    """Return the range of a box in the memory of its cell, or None if that is not contiguous."""
    if box is piece.region or box == piece.region:
        return ElementRange(piece.start, piece.start + box.numel)
    ranges = tuple(islice(runs_of(box, piece, 1), 2))
    return ranges[0] if len(ranges) == 1 else None


def runs_of(box: Region, piece: RegionPiece, gap: int) -> Iterator[ElementRange]:
    """Yield the ranges that a box has in the memory of its cell.

    Holes of fewer than `gap` elements are included. So a block of `gap` elements overlaps a range
    if and only if it contains an element of the box. Holes only grow from the last dimension to the
    first, so each range is one inner box.
    """
    strides = row_major_strides(piece.region.shape)
    inner = 1
    outer = len(strides)
    while outer and (box.shape[outer - 1] == 1 or strides[outer - 1] - inner < gap):
        outer -= 1
        inner += (box.shape[outer] - 1) * strides[outer]
    corner = box.relative_to(piece.region.offset).offset
    start = piece.start + sum(o * s for o, s in zip(corner, strides, strict=True))
    yield from _outer_runs(box.shape[:outer], strides[:outer], start, inner)


def _outer_runs(shape: Shape, strides: Shape, start: int, numel: int) -> Iterator[ElementRange]:
    # Not `product`, which would first store all of what may be millions of rows.
    if not shape:
        yield ElementRange(start, start + numel)
        return
    for i in range(shape[0]):
        yield from _outer_runs(shape[1:], strides[1:], start + i * strides[0], numel)
