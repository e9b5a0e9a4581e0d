"""Layouts: how a tensor is cut into cells, and which ranks hold each cell."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dist_ckpt.region import Cell, Elements, Region, Shape


@dataclass(frozen=True, slots=True)
class Grid:
    """Cuts along each dimension; the cells are the boxes between them, in row-major order.

    `cuts[d]` begins with 0 and ends with the size of dimension d. A dimension of size 0 is
    `(0, 0)`, so that an empty tensor has one (empty) cell.
    """

    cuts: tuple[Shape, ...]

    @property
    def num_cells(self) -> int:
        """How many cells there are."""
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
        """How many cells there are."""
        return len(self.cuts) - 1

    def cell(self, number: int) -> Elements:
        """Return the element range of a cell."""
        return Elements(self.cuts[number], self.cuts[number + 1])


@dataclass(frozen=True, slots=True)
class Regions:
    """A sorted list of boxes that tile the tensor, for layouts that no grid describes."""

    regions: tuple[Region, ...]

    @property
    def num_cells(self) -> int:
        """How many cells there are."""
        return len(self.regions)

    def cell(self, number: int) -> Region:
        """Return the box of a cell."""
        return self.regions[number]


Cut = Grid | Flat | Regions


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is cut, and for each cell the ranks that hold it, ascending.

    Tensors share layouts, so a checkpoint's layouts grow with its ranks, not with its tensors.
    Which of the holders stored a cell follows a rule instead of a list: see `holder`.
    """

    cut: Cut
    holders: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.holders) != self.cut.num_cells or not all(self.holders):
            raise ValueError(
                f"{self.cut.num_cells} cells need as many lists of holders, none of them empty"
            )

    def cell(self, number: int) -> Cell:
        """Return the part of the tensor that a cell is."""
        return self.cut.cell(number)

    def holder(self, number: int, rotation: int) -> int:
        """Return the rank that stores a cell of a tensor with this rotation."""
        holders = self.holders[number]
        return holders[(number + rotation) % len(holders)]
