"""The operations of `rename`: stack, unstack, transpose, split and concatenate. Pure.

An operation computes no values, it moves boxes of elements. So the result of any number of
operations is a list of boxes of saved tensors (`SourceBox`). A read of a part of the result reads
these boxes and places them directly, without a copy of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from dist_ckpt.core.format.geometry import Cell, Region, RegionPiece, Shape
from dist_ckpt.core.format.geometry import pieces as cut_into_pieces

T = TypeVar("T")

# --- the operations, as users write them ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stack:
    """Stack the tensors of all numbers that the wildcard `{over}` matches, along a new `dim`."""

    over: str
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Unstack:
    """Cut a tensor along `dim`, which is removed. The index is the `{over}` of the new name."""

    over: str
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Transpose:
    """Swap two dimensions, by default the last two."""

    dim0: int = -2
    dim1: int = -1


@dataclass(frozen=True, slots=True)
class Concatenate:
    """Join several tensors along `dim`, in the order of their names."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Split:
    """Cut a tensor along `dim`: into `sizes`, or by default into equal parts, one for each name."""

    dim: int = 0
    sizes: tuple[int, ...] | None = None


Operation = Stack | Unstack | Transpose | Concatenate | Split


# --- results ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceBox:
    """A box of a saved tensor, and its place in a result.

    `axes` has, for each dimension of the result, the dimension of `source`; None if it has none.
    The box begins at `offset` in the source. All other dimensions of the source have size 1.
    """

    source: str
    offset: Shape
    axes: tuple[int | None, ...]
    region: Region

    def to_source(self, box: Region) -> Region:
        """Return the box of the source for a box within `region`."""
        offset, shape = [*self.offset], [1] * len(self.offset)
        within = box.relative_to(self.region.offset)
        for axis, start, size in zip(self.axes, within.offset, within.shape, strict=True):
            if axis is not None:
                offset[axis] += start
                shape[axis] = size
        return Region(tuple(offset), tuple(shape))

    def to_result(self, box: Region, strides: Shape) -> tuple[Region, Shape]:
        """Return the box of the result for a box of the source, and its strides in that memory."""
        start = self.region.offset
        offset = (
            first if axis is None else first + box.offset[axis] - self.offset[axis]
            for axis, first in zip(self.axes, start, strict=True)
        )
        shape = (1 if axis is None else box.shape[axis] for axis in self.axes)
        steps = (0 if axis is None else strides[axis] for axis in self.axes)
        return Region(tuple(offset), tuple(shape)), tuple(steps)

    def cut(self, dim: int, start: int, size: int) -> SourceBox | None:
        """Return the part within a range of a dimension, which then begins at 0; None if empty."""
        offset, shape = [*self.region.offset], [*self.region.shape]
        first, stop = max(offset[dim], start), min(offset[dim] + shape[dim], start + size)
        if first >= stop:
            return None
        source = [*self.offset]
        if (axis := self.axes[dim]) is not None:
            source[axis] += first - offset[dim]
        offset[dim], shape[dim] = first - start, stop - first
        return replace(self, offset=tuple(source), region=Region(tuple(offset), tuple(shape)))


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A tensor made of boxes of saved tensors, which tile it."""

    dtype: str
    shape: Shape
    pieces: tuple[SourceBox, ...]

    @staticmethod
    def of(source: str, dtype: str, shape: Shape) -> DerivedTensor:
        """Return a saved tensor as it is."""
        whole, zeros = Region.whole(shape), (0,) * len(shape)
        return DerivedTensor(
            dtype, shape, (SourceBox(source, zeros, tuple(range(len(shape))), whole),)
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """The saved tensors that it has a part of, each once."""
        return tuple(dict.fromkeys(piece.source for piece in self.pieces))

    def requests(self, cell: Cell) -> Iterator[tuple[SourceBox, RegionPiece, Region]]:
        """Yield the reads that fill a cell: the piece, its part of the cell, the source's box."""
        for part in cut_into_pieces(cell, self.shape):
            for piece in self.pieces:
                if (common := piece.region.intersect(part.region)) is not None:
                    yield piece, part, piece.to_source(common)

    def map_sources(self, new_source: Callable[[str], str]) -> DerivedTensor:
        """Return the same tensor made of other saved tensors, which have the same shapes."""
        moved = (replace(piece, source=new_source(piece.source)) for piece in self.pieces)
        return replace(self, pieces=tuple(moved))

    def transpose(self, dim0: int, dim1: int) -> DerivedTensor:
        """Return it with two dimensions swapped. ValueError if it lacks one."""
        order = [*range(len(self.shape))]
        a, b = self._dim(dim0), self._dim(dim1)
        order[a], order[b] = b, a

        def permute(values: Sequence[int]) -> Shape:
            return tuple(values[dim] for dim in order)

        turned = (
            replace(
                piece,
                axes=tuple(piece.axes[dim] for dim in order),
                region=Region(permute(piece.region.offset), permute(piece.region.shape)),
            )
            for piece in self.pieces
        )
        return DerivedTensor(self.dtype, permute(self.shape), tuple(turned))

    def split(self, dim: int, sizes: Sequence[int]) -> list[DerivedTensor]:
        """Return its parts along a dimension. ValueError if the sizes do not fit."""
        dim = self._dim(dim)
        if sum(sizes) != self.shape[dim]:
            raise ValueError(
                f"dimension {dim} of shape {self.shape} cannot be split into sizes {[*sizes]}"
            )
        starts = accumulate(sizes, initial=0)
        return [self._part(dim, start, size) for start, size in zip(starts, sizes, strict=False)]

    def split_evenly(self, dim: int, count: int) -> list[DerivedTensor]:
        """Return equal parts along a dimension. ValueError if it does not divide evenly."""
        size, rest = divmod(self.shape[self._dim(dim)], count)
        if rest:
            raise ValueError(
                f"dimension {self._dim(dim)} of shape {self.shape} cannot be split into {count} "
                f"equal parts: give Split their sizes"
            )
        return self.split(dim, [size] * count)

    def unstack(self, dim: int) -> list[DerivedTensor]:
        """Return the slices along a dimension, which is removed."""
        dim = self._dim(dim)
        return [self._part(dim, index, 1)._without(dim) for index in range(self.shape[dim])]

    def _part(self, dim: int, start: int, size: int) -> DerivedTensor:
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        cut = (piece.cut(dim, start, size) for piece in self.pieces)
        return DerivedTensor(self.dtype, shape, tuple(piece for piece in cut if piece is not None))

    def _without(self, dim: int) -> DerivedTensor:
        """Remove a dimension of size 1."""

        def reduce(piece: SourceBox) -> SourceBox:
            offset, shape = piece.region.offset, piece.region.shape
            region = Region(_without(offset, dim), _without(shape, dim))
            return replace(piece, axes=_without(piece.axes, dim), region=region)

        pieces = tuple(map(reduce, self.pieces))
        return DerivedTensor(self.dtype, _without(self.shape, dim), pieces)

    def _dim(self, dim: int) -> int:
        if not -len(self.shape) <= dim < len(self.shape):
            raise ValueError(f"shape {self.shape} has no dimension {dim}")
        return dim % len(self.shape)


def concatenate(tensors: Sequence[DerivedTensor], dim: int) -> DerivedTensor:
    """Join tensors along a dimension. ValueError if their dtypes or other sizes differ."""
    first = tensors[0]
    dim = first._dim(dim)
    _check_alike(tensors, [_without(t.shape, dim) if len(t.shape) > dim else () for t in tensors])
    starts = [*accumulate((tensor.shape[dim] for tensor in tensors), initial=0)]
    moved = (
        replace(piece, region=_shifted(piece.region, dim, start))
        for tensor, start in zip(tensors, starts, strict=False)
        for piece in tensor.pieces
    )
    shape = (*first.shape[:dim], starts[-1], *first.shape[dim + 1 :])
    return DerivedTensor(first.dtype, shape, tuple(moved))


def stack(tensors: Sequence[DerivedTensor], dim: int) -> DerivedTensor:
    """Join tensors along a new dimension. ValueError if their dtypes or shapes differ."""
    first, ndim = tensors[0], len(tensors[0].shape) + 1
    if not -ndim <= dim < ndim:
        raise ValueError(f"tensors of shape {first.shape} cannot be stacked along dimension {dim}")
    dim %= ndim
    _check_alike(tensors, [tensor.shape for tensor in tensors])
    placed = (
        replace(
            piece,
            axes=_insert(piece.axes, dim, None),
            region=Region(
                _insert(piece.region.offset, dim, index), _insert(piece.region.shape, dim, 1)
            ),
        )
        for index, tensor in enumerate(tensors)
        for piece in tensor.pieces
    )
    return DerivedTensor(first.dtype, _insert(first.shape, dim, len(tensors)), tuple(placed))


def _check_alike(tensors: Sequence[DerivedTensor], shapes: Sequence[Shape]) -> None:
    first = tensors[0]
    for tensor, shape in zip(tensors, shapes, strict=True):
        other = f"{tensor.sources[0] if tensor.sources else 'another tensor'}"
        label = f"{first.sources[0] if first.sources else 'a tensor'}"
        if tensor.dtype != first.dtype:
            raise ValueError(f"{label} is {first.dtype}, and {other} is {tensor.dtype}")
        if shape != shapes[0] or len(tensor.shape) != len(first.shape):
            raise ValueError(
                f"{label} has shape {first.shape}, and {other} has shape {tensor.shape}"
            )


def _shifted(region: Region, dim: int, start: int) -> Region:
    offset = [*region.offset]
    offset[dim] += start
    return Region(tuple(offset), region.shape)


def _insert(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index:])


def _without(values: tuple[T, ...], index: int) -> tuple[T, ...]:
    return (*values[:index], *values[index + 1 :])
