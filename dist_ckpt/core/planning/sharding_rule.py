"""One rule of a ShardingConfig: which mesh axes cut which dimension, and the pieces of a fusion.

A fused tensor is several matrices, one after another along a dimension. Each rank has its part of
each. So a plain cut of the whole tensor would mix the matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dist_ckpt.core.planning.tensor_views import Mesh, Piece, RuleSharded

# {mesh axis: dimension}, and "pieces" for a fused tensor. The values are checked when it is parsed.
RuleMapping = Mapping[str, object]

_PIECES = "pieces"


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """A rule: `dims` has the dimension that each axis cuts.

    `pieces` has the global sizes of the pieces, and the axes that cut each, or None for all.
    `fused_axis` is an axis that cuts the fused dimension. None if all axes cut it.
    """

    dims: Mapping[str, int]
    pieces: tuple[tuple[int, tuple[str, ...] | None], ...] = ()
    fused_axis: str | None = None

    def as_document(self) -> dict[str, object]:
        """Return the rule as plain data, from which `parse_rule` makes an equal rule."""
        sizes = [
            size if axes is None else {"size": size, "axes": [*axes]} for size, axes in self.pieces
        ]
        named: object = {self.fused_axis: sizes} if self.fused_axis is not None else sizes
        return {**self.dims, **({_PIECES: named} if sizes else {})}

    def view(self, mesh: Mesh, ndim: int, label: str) -> RuleSharded:
        """Return how the rule cuts a tensor of `ndim` dimensions; `label` names both in errors."""
        for dim in self.dims.values():
            if not -ndim <= dim < ndim:
                raise ValueError(f"{label} cuts dimension {dim} of a tensor that has {ndim}")
        dims = {axis: dim % ndim for axis, dim in self.dims.items()}
        axes = tuple(
            tuple(number for number, axis in enumerate(mesh.names) if dims.get(axis) == dim)
            for dim in range(ndim)
        )
        if not self.pieces:
            return RuleSharded(mesh, axes)
        if self.fused_axis is None and len(set(dims.values())) > 1:
            sizes = [size for size, _ in self.pieces]
            raise ValueError(
                f"{label} cuts two dimensions: name an axis that cuts the fused one, such as "
                f'"pieces": {{{next(iter(dims))!r}: {sizes}}}'
            )
        fused = dims[self.fused_axis or next(iter(dims))]
        pieces = (
            Piece(size, tuple(n for n in axes[fused] if only is None or mesh.names[n] in only))
            for size, only in self.pieces
        )
        return RuleSharded(mesh, axes, fused, tuple(pieces))


def parse_axes(label: str, value: object, mesh: Mapping[str, int]) -> dict[str, int]:
    """Return {axis: dimension}. Raises ValueError for an axis that the mesh lacks, or TypeError."""
    axes = check_numbers(label, value)
    if unknown := [axis for axis in axes if axis not in mesh]:
        raise ValueError(f"{label} names {unknown}: the mesh has {list(mesh)}")
    return axes


def parse_rule(pattern: object, value: object, mesh: Mapping[str, int]) -> ShardingRule:
    """Return the rule of a pattern. Raises ValueError or TypeError."""
    if type(pattern) is not str:
        raise TypeError(f"rules have {pattern!r}: give a pattern on names")
    label = f"the rule {pattern!r}"
    # A mesh axis may have the name "pieces": then the value is a number.
    if not isinstance(value, Mapping) or not isinstance(value.get(_PIECES), list | tuple | Mapping):
        return ShardingRule(parse_axes(label, value, mesh))
    dims = parse_axes(label, {key: n for key, n in value.items() if key != _PIECES}, mesh)
    named = value[_PIECES]
    if not isinstance(named, Mapping):
        return ShardingRule(dims, _parse_pieces(label, named, dims))
    if len(named) != 1 or not dims.keys() >= named.keys():
        raise ValueError(
            f"{label} has pieces for {list(named)}: name one of its axes {list(dims)}, "
            "which cuts the fused dimension"
        )
    ((axis, sizes),) = named.items()
    return ShardingRule(dims, _parse_pieces(label, sizes, dims), axis)


def check_numbers(label: str, value: object) -> dict[str, int]:
    """Return a mapping of names to whole numbers. Raises TypeError for anything else."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{label} is a {type(value).__name__}: map axis names to numbers")
    for axis, number in value.items():
        if type(axis) is not str or type(number) is not int:
            raise TypeError(f"{label} has {axis!r}: {number!r}: map axis names to whole numbers")
    return dict(value)


def _parse_pieces(
    label: str, value: object, dims: Mapping[str, int]
) -> tuple[tuple[int, tuple[str, ...] | None], ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{label} has pieces {value!r}: give a list of sizes, such as [64, 64]")
    if not dims or not value:
        raise ValueError(
            f"{label} has pieces {value!r}: give the size of each, and an axis that cuts them, "
            'such as {"tp": 0, "pieces": [64, 64]}'
        )
    return tuple(_parse_piece(f"{label}, pieces", piece, dims) for piece in value)


def _parse_piece(
    label: str, piece: object, dims: Mapping[str, int]
) -> tuple[int, tuple[str, ...] | None]:
    size, axes = piece, None
    if isinstance(piece, Mapping):
        size, axes = piece.get("size"), piece.get("axes")
        is_list = isinstance(axes, list | tuple) and all(axis in dims for axis in axes)
        if piece.keys() != {"size", "axes"} or not is_list:
            raise ValueError(
                f"{label}: {dict(piece)!r} is not a piece: give a size, or "
                f'{{"size": 64, "axes": [...]}} with some of the axes {list(dims)} of the rule'
            )
    if type(size) is not int or size < 1:
        raise ValueError(f"{label}: {size!r} is not the size of a piece: give a whole number")
    return size, None if axes is None else tuple(axes)
