"""Layouts: how a tensor is cut into cells, and which ranks hold each cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, ge, gt

from dist_ckpt.core.format.geometry import Cell, ElementRange, Region, Shape


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
        if len(self.holders) != self.cut.num_cells or not all(self.holders):
            raise ValueError(
                f"{self.cut.num_cells} cells need as many lists of holders, none of them empty"
            )

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
            raise ValueError("regions cut in too many dimensions at once")


# A box, with one (start, stop) for each dimension, and its count: 1 for a region, -1 for the whole
# tensor. All points sum to zero if and only if the derivative is zero. At a coordinate of the first
# dimension that is what begins there minus what ends there: boxes with one dimension less.
# Neighbours cancel, so a grid costs no more than its faces. The first corner other than zero is the
# first bad position.
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
