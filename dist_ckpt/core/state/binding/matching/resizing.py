"""The option `resize` of a load: tensors whose padding along one dimension is another one.

`resize={"*.embed.weight": 50}` says that the first 50 rows count, and the others are padding. These
rows are loaded. The remaining rows of the state keep their values, and those of the checkpoint are
cut. Tied tensors, and the optimizer state of a parameter, follow it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod

import torch

from dist_ckpt.core.format.geometry import Cell, ElementRange, Region, Shape
from dist_ckpt.core.planning.name_selection import names_above
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree
from dist_ckpt.core.state.binding.template import Template
from dist_ckpt.core.state.tensors.locate_tensor import locate_for_load, tie_key
from dist_ckpt.core.state.tree.state_tree import TensorLeaf, walk


@dataclass(frozen=True, slots=True)
class Resized:
    """The first `rows` indices of a tensor along `dim`: `saved` are stored, the state has `live`.

    `live_cells` are those of the state's tensor, of shape `shape`.
    """

    dim: int
    rows: int
    saved: int
    live: int
    shape: Shape
    live_cells: tuple[Cell, ...]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The parts of the cells that are loaded, without empty ones."""
        clipped = (self._clip(cell) for cell in self.live_cells)
        return tuple(cell for cell in clipped if cell is not None)

    def clip_parts(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the memory of `cells` in the memory of `live_cells`."""
        clipped = []
        for cell, part in zip(self.live_cells, parts, strict=True):
            match self._clip(cell):
                case Region(shape=shape):
                    clipped.append(part.narrow(self.dim, 0, shape[self.dim]))
                case ElementRange() as elements:
                    clipped.append(part[: elements.numel])
        return tuple(clipped)

    def _clip(self, cell: Cell) -> Cell | None:
        if isinstance(cell, ElementRange):
            # Only the first dimension has its first indices in one range: `find_resized_dim`.
            stop = min(cell.stop, self.rows * prod(self.shape[1:]))
            return ElementRange(cell.start, stop) if cell.start < stop else None
        size = min(cell.shape[self.dim], self.rows - cell.offset[self.dim])
        before, after = cell.shape[: self.dim], cell.shape[self.dim + 1 :]
        return Region(cell.offset, (*before, size, *after)) if size > 0 else None


@dataclass(frozen=True, slots=True)
class ResizedTensor:
    """The rows that a load takes of one tensor. `is_new` if it creates the tensor."""

    name: str
    resized: Resized
    is_new: bool

    def text(self) -> str:
        """Return the rows that are loaded, cut and kept, for the report."""
        of = self.resized
        cut = f"; {of.rows}:{of.saved} are cut" if of.saved > of.rows else ""
        rest = "are zeros" if self.is_new else "keep the values of the state"
        kept = f"; {of.rows}:{of.live} {rest}" if of.live > of.rows else ""
        return f"{self.name}: 0:{of.rows} along dimension {of.dim} are loaded{cut}{kept}"


def find_resized_dim(live: Shape, saved: Shape) -> int | None:
    """Return the only dimension in which two shapes differ, or None."""
    if len(live) != len(saved):
        return None
    dims = [dim for dim, sizes in enumerate(zip(live, saved, strict=True)) if sizes[0] != sizes[1]]
    return dims[0] if len(dims) == 1 else None


def find_resized_shape(state: Shape, *, saved: Shape, live: Shape) -> Shape | None:
    """Return the live shape of optimizer state with a saved shape, as its parameter is resized.

    State without the resized dimension is unchanged. None if it is not clear which it is.
    """
    dim = find_resized_dim(live, saved)
    if dim is None or saved[dim] not in state:
        return state
    is_like = len(state) == len(saved)
    if is_like and all(size in (whole, 1) for size, whole in zip(state, saved, strict=True)):
        if state[dim] != saved[dim]:
            return state
        position = dim
    elif state.count(saved[dim]) == 1 == saved.count(saved[dim]):
        position = state.index(saved[dim])
    else:
        return None
    return (*state[:position], live[dim], *state[position + 1 :])


@dataclass(slots=True, eq=False)
class ResizedNames:
    """The names of a state that are resized, by patterns, by ties, and by parameters."""

    patterns: Mapping[str, int]
    template: Template
    saved: SavedTree
    problems: list[str]
    _rows: dict[str, int] = field(default_factory=dict)
    _rows_by_tie: dict[Hashable, int] = field(default_factory=dict)
    _saved_shapes: dict[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        leaves = [
            (name, leaf)
            for name, leaf in (walk(self.template.root) if self.patterns else ())
            if isinstance(leaf, TensorLeaf)
        ]
        for name, leaf in leaves:
            if (rows := self.find_rows(name)) is not None:
                for key in self._ties(name, leaf.value):
                    self._rows_by_tie.setdefault(key, rows)
        for name, leaf in leaves:
            self._follow(name, name, leaf.value)

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def find_rows(self, name: str) -> int | None:
        """Return the number of rows of a name that count, or None if it is not resized."""
        if not self.patterns:
            return None
        for above in names_above(name):
            if (rows := self._rows.get(above)) is not None:
                return rows
        found = {
            pattern: rows
            for pattern, rows in self.patterns.items()
            if any(fnmatchcase(above, pattern) for above in names_above(name))
        }
        if len({*found.values()}) > 1:
            problem = (
                f"{name}: the patterns {sorted(found)} of resize match and differ: make the "
                "patterns such that one matches"
            )
            if problem not in self.problems:
                self.problems.append(problem)
        return next(iter(found.values()), None)

    def follow_parameter(self, state: str, name: str, parameter: object) -> None:
        """Let the optimizer state at and below `state` follow a parameter, which has this name."""
        if not self.patterns:
            return
        self._follow(state, name, parameter)
        if (tensor := self.saved.tensor(name)) is not None:
            self._saved_shapes[state] = tensor[1].shape

    def find_parameter_shape(self, name: str) -> Shape | None:
        """Return the saved shape of the parameter that optimizer state follows, or None."""
        shapes = (self._saved_shapes.get(above) for above in names_above(name))
        return next((shape for shape in shapes if shape is not None), None)

    def _follow(self, target: str, name: str, value: object) -> None:
        if (rows := self.find_rows(name)) is None:
            tied = (self._rows_by_tie.get(key) for key in self._ties(name, value))
            rows = next((found for found in tied if found is not None), None)
        if rows is not None:
            self._rows[target] = rows

    def _ties(self, name: str, value: object) -> list[Hashable]:
        """Return keys that tied tensors share: in memory, and in the checkpoint."""
        template, keys = self.template, list[Hashable]([id(value)])
        if (tensor := self.saved.tensor(name)) is not None:
            keys.append(tensor[0])
        try:
            local = locate_for_load(
                value, name, rank=template.rank, group_ranks=template.group_ranks
            )
        except (TypeError, ValueError):
            return keys  # `request_fill` reports it
        tie = tie_key(local)
        return keys if tie is None else [*keys, tie]
