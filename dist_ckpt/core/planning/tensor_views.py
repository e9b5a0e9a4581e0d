"""Views of a tensor: how it is cut over the ranks of a mesh, and the cells that each rank holds.

Placements apply from left to right. Each placement cuts the indices of its dimension that remain
after the placements before. A rank holds the product of the remaining indices of all dimensions.
Indices are ascending ranges, so a strided shard is a few ranges.

torch defines `_StridedShard` in the same way, axis by axis. FSDP2 over TP, for which it was made,
cuts in the other order: TP first, then FSDP. Both orders give the same cells if sizes divide
evenly. If not, the placements describe the first order, but the memory has the second. Only the
shape of the local tensor shows which order was used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from operator import mul

from dist_ckpt.core.format.geometry import (
    Cell,
    ElementRange,
    Flat,
    Grid,
    Layout,
    Region,
    Shape,
    join_ranges,
    row_major_strides,
)
from dist_ckpt.core.runtime.typed_msgpack import Message


class Mesh(Message, frozen=True, cache_hash=True):
    """Ranks in a row-major array. `names` has the names of its axes, "" for an axis without one."""

    names: tuple[str, ...]
    shape: Shape
    ranks: tuple[int, ...]


class ReplicatedAxis(Message, frozen=True, tag="Replicate"):
    """Every rank along the mesh axis holds the same data."""


class ShardedAxis(Message, frozen=True, tag="Shard"):
    """The mesh axis cuts this dimension as `torch.chunk` does."""

    dim: int


class StridedAxis(Message, frozen=True, tag="StridedShard"):
    """The mesh axis cuts each of `split_factor` chunks of the dimension (FSDP2 over TP)."""

    dim: int
    split_factor: int


AxisPlacement = ReplicatedAxis | ShardedAxis | StridedAxis


class Whole(Message, frozen=True, tag=True):
    """A tensor of which each rank holds a whole replica."""


class MeshPlaced(Message, frozen=True, tag=True):
    """A tensor on a mesh, with one placement for each mesh axis (DTensor)."""

    mesh: Mesh
    placements: tuple[AxisPlacement, ...]


class Flattened(Message, frozen=True, tag=True):
    """A tensor cut into even, row-major element ranges, one for each rank (ZeRO)."""

    mesh: Mesh


class Parts(Message, frozen=True, tag=True):
    """Explicit cells that this rank holds (LocalShard, FlatShard, third-party shards)."""

    cells: tuple[Cell, ...]


class Piece(Message, frozen=True):
    """One of the matrices in a fused tensor: its size there, and the mesh axes that cut it."""

    size: int
    axes: tuple[int, ...]


class RuleSharded(Message, frozen=True, tag=True):
    """A local tensor under a ShardingConfig: mesh axes `axes[d]` cut dimension d, also unevenly.

    With `pieces`, dimension `dim` is fused: see `Fused`.
    """

    mesh: Mesh
    axes: tuple[tuple[int, ...], ...]
    dim: int = 0
    pieces: tuple[Piece, ...] = ()


class Fused(Message, frozen=True, tag=True):
    """A tensor of pieces along `dim`: sizes there, and placements. Each is cut as a `MeshPlaced`.

    A rank's memory has its part of each piece, one after another.
    """

    mesh: Mesh
    dim: int
    pieces: tuple[tuple[int, tuple[AxisPlacement, ...]], ...]


View = Whole | MeshPlaced | Flattened | Parts | RuleSharded | Fused

# Ascending, disjoint, not empty, and not adjacent.
IndexRanges = tuple[range, ...]


def compute_cells(view: View, rank: int, shape: Shape) -> tuple[Cell, ...]:
    """Return the cells of a tensor of global `shape` that a rank holds, in the order of its memory.

    A strided shard is several boxes in row-major order. The result is empty outside the mesh, and
    for an empty local shard. An empty tensor is one empty cell on every rank of its mesh. A
    `RuleSharded` view raises ValueError: only the plan has its cells.
    """
    match view:
        case Whole():
            return (Region.whole(shape),)
        case Parts():
            return view.cells
        case MeshPlaced():
            return _compute_mesh_cells(view, rank, shape)
        case Flattened():
            return _compute_flat_cells(view.mesh, rank, shape)
        case Fused():
            return _compute_fused_cells(view, rank, shape)
        case RuleSharded():
            raise ValueError("under a ShardingConfig, only the plan has the cells of a rank")


def chunked_view(view: RuleSharded, shape: Shape) -> MeshPlaced | Fused:
    """Return the view of a tensor of global `shape` with these cuts, as `torch.chunk` makes them.

    Raises ValueError if the pieces are not the fused dimension.
    """
    if not view.pieces:
        return MeshPlaced(view.mesh, _place(view.axes, view.mesh))
    if problem := find_pieces_problem(view, shape):
        raise ValueError(problem)
    before, after = view.axes[: view.dim], view.axes[view.dim + 1 :]
    placed = (
        (piece.size, _place((*before, piece.axes, *after), view.mesh)) for piece in view.pieces
    )
    return Fused(view.mesh, view.dim, tuple(placed))


def find_pieces_problem(view: RuleSharded, shape: Shape) -> str | None:
    """Return why the pieces of a rule are not those of a tensor of global `shape`, or None."""
    sizes = [piece.size for piece in view.pieces]
    if not sizes or sum(sizes) == shape[view.dim]:
        return None
    return (
        f"the pieces {sizes} in the rule are {sum(sizes)} together, but dimension {view.dim} of "
        f"the whole tensor is {shape[view.dim]}: correct the pieces in the ShardingConfig"
    )


def _place(axes: tuple[tuple[int, ...], ...], mesh: Mesh) -> tuple[AxisPlacement, ...]:
    dims = {axis: dim for dim, cutting in enumerate(axes) for axis in cutting}
    return tuple(
        ShardedAxis(dims[axis]) if axis in dims else ReplicatedAxis()
        for axis in range(len(mesh.shape))
    )


def compute_layout(view: MeshPlaced | Flattened | Fused, shape: Shape) -> Layout:
    """Return the layout of a tensor of global `shape` on a mesh, with the holders of each cell."""
    if 0 in shape:
        return whole_layout(shape, view.mesh.ranks)
    if isinstance(view, Fused):
        return _compute_fused_layout(view, shape)
    if isinstance(view, Flattened):
        numel, ranks = prod(shape), view.mesh.ranks
        bounds = (*range(0, numel, -(-numel // len(ranks))), numel)
        return Layout(Flat(bounds), tuple((rank,) for rank in ranks[: len(bounds) - 1]))
    cuts, positions = [], []
    strides = row_major_strides(view.mesh.shape)
    cutting = find_cutting_axes(view.placements, len(shape))
    for size, axes in zip(shape, cutting, strict=True):
        parts: list[IndexRanges] = [(range(size),)]
        for axis in axes:
            placement, count = view.placements[axis], view.mesh.shape[axis]
            parts = [part for ranges in parts for part in _split_ranges(ranges, placement, count)]
        starts = sorted((indices.start, n) for n, ranges in enumerate(parts) for indices in ranges)
        offsets = mesh_positions(axes, view.mesh.shape, strides)
        cuts.append((*(start for start, _ in starts), size))
        positions.append([offsets[n] for _, n in starts])
    used = {axis for axes in cutting for axis in axes}
    free = [axis for axis in range(len(view.mesh.shape)) if axis not in used]
    replicas = mesh_positions(free, view.mesh.shape, strides)
    return Layout(Grid(tuple(cuts)), cell_holders(view.mesh.ranks, positions, replicas))


def whole_layout(shape: Shape, ranks: Iterable[int]) -> Layout:
    """Return the layout of a tensor that each of these ranks holds whole."""
    return Layout(Grid(tuple((0, n) for n in shape)), (tuple(sorted(ranks)),))


def find_cutting_axes(
    placements: tuple[AxisPlacement, ...], ndim: int
) -> tuple[tuple[int, ...], ...]:
    """Return the mesh axes that cut each dimension, in the order of the cuts."""
    axes: list[list[int]] = [[] for _ in range(ndim)]
    for axis, placement in enumerate(placements):
        if not isinstance(placement, ReplicatedAxis):
            axes[placement.dim].append(axis)
    return tuple(map(tuple, axes))


# Many tensors have the same view and shape, and one cut costs time for each rank of the mesh.
@lru_cache(maxsize=4096)
def _compute_mesh_cells(view: MeshPlaced, rank: int, shape: Shape) -> tuple[Cell, ...]:
    mesh = view.mesh
    if rank not in mesh.ranks:
        return ()
    if 0 in shape:
        return (Region.whole(shape),)
    position, strides = mesh.ranks.index(rank), row_major_strides(mesh.shape)
    remaining: list[IndexRanges] = []
    for size, axes in zip(shape, find_cutting_axes(view.placements, len(shape)), strict=True):
        ranges: IndexRanges = (range(size),)
        for axis in axes:
            count = mesh.shape[axis]
            ranges = _split_ranges(ranges, view.placements[axis], count)[
                position // strides[axis] % count
            ]
        remaining.append(ranges)
    return tuple(
        Region(tuple(indices.start for indices in box), tuple(map(len, box)))
        for box in product(*remaining)
    )


def _split_ranges(ranges: IndexRanges, placement: AxisPlacement, count: int) -> list[IndexRanges]:
    """Return the indices that each of `count` ranks along a mesh axis has."""
    if isinstance(placement, ShardedAxis):
        return _chunk_ranges(ranges, count)
    assert isinstance(placement, StridedAxis), placement
    # Like torch, cut into `split_factor` chunks, as if another axis came first. Each rank gets its
    # part of every chunk.
    chunks = [
        _chunk_ranges(chunk, count)
        for chunk in _chunk_ranges(ranges, placement.split_factor)
        if chunk
    ]
    return [
        tuple(join_ranges(indices for chunk in chunks for indices in chunk[n]))
        for n in range(count)
    ]


def _chunk_ranges(ranges: IndexRanges, count: int) -> list[IndexRanges]:
    """Cut a list of indices into `count` parts as `torch.chunk` does; the last may be empty."""
    size = -(-sum(map(len, ranges)) // count)
    parts: list[list[range]] = [[] for _ in range(count)]
    done = 0
    for indices in ranges:
        rest = indices
        while rest:
            number, inside = divmod(done, size)
            part = rest[: size - inside]
            parts[number].append(part)
            done += len(part)
            rest = rest[len(part) :]
    return [tuple(part) for part in parts]


def _fused_pieces(view: Fused, shape: Shape) -> Iterator[tuple[int, MeshPlaced, Shape]]:
    """Yield the start of each piece, its view and its shape."""
    start = 0
    for size, placements in view.pieces:
        piece = (*shape[: view.dim], size, *shape[view.dim + 1 :])
        yield start, MeshPlaced(view.mesh, placements), piece
        start += size


@lru_cache(maxsize=4096)
def _compute_fused_cells(view: Fused, rank: int, shape: Shape) -> tuple[Cell, ...]:
    if 0 in shape:
        return (Region.whole(shape),) if rank in view.mesh.ranks else ()
    return tuple(
        _move(cell, view.dim, start)
        for start, placed, piece in _fused_pieces(view, shape)
        for cell in _compute_mesh_cells(placed, rank, piece)
    )


def _compute_fused_layout(view: Fused, shape: Shape) -> Layout:
    """Join the layouts of the pieces, which differ only along the fused dimension."""
    holders: dict[Region, tuple[int, ...]] = {}
    starts: list[set[int]] = [set() for _ in shape]
    for start, placed, piece in _fused_pieces(view, shape):
        layout = compute_layout(placed, piece)
        for number, ranks in enumerate(layout.holders):
            cell = _move(layout.cell(number), view.dim, start)
            holders[cell] = ranks
            for dim, offset in enumerate(cell.offset):
                starts[dim].add(offset)
    cuts = tuple((*sorted(dim), size) for dim, size in zip(starts, shape, strict=True))
    return Layout(Grid(cuts), tuple(holders[cell] for cell in sorted(holders)))


def fits_memory(cells: Sequence[Cell], dim: int, shape: Shape) -> bool:
    """Return True if boxes, one after another along `dim`, are a local tensor of this shape."""
    if not cells:
        return 0 in shape
    extent = [*_move(cells[0], dim, 0).shape]
    extent[dim] = sum(_move(cell, dim, 0).shape[dim] for cell in cells)
    return shape == tuple(extent)


@lru_cache(maxsize=4096)
def piece_sizes(view: RuleSharded, rank: int) -> Shape:
    """Return the size of each piece along the fused dimension of a rank's local tensor.

    A piece of which the rank has nothing is left out.
    """
    total = (sum(piece.size for piece in view.pieces),)
    line = RuleSharded(view.mesh, (view.axes[view.dim],), 0, view.pieces)
    return tuple(cell.numel for cell in compute_cells(chunked_view(line, total), rank, total))


def _move(cell: Cell, dim: int, distance: int) -> Region:
    assert isinstance(cell, Region)
    before, after = cell.offset[:dim], cell.offset[dim + 1 :]
    return Region((*before, cell.offset[dim] + distance, *after), cell.shape)


def mesh_positions(axes: Sequence[int], sizes: Shape, strides: Shape) -> list[int]:
    """Return the positions in `Mesh.ranks` of all coordinates on some axes, with 0 on others."""
    steps = [range(0, sizes[axis] * strides[axis], strides[axis]) for axis in axes]
    return [sum(step) for step in product(*steps)]


def cell_holders(
    ranks: Shape, positions: Sequence[Sequence[int]], replicas: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return the holders of each cell. `positions[d][i]` belongs to part i of dimension d."""
    cells = map(sum, product(*positions))
    if len(replicas) == 1:
        return tuple((ranks[cell],) for cell in cells)
    return tuple(tuple(sorted([ranks[cell + n] for n in replicas])) for cell in cells)


def _compute_flat_cells(mesh: Mesh, rank: int, shape: Shape) -> tuple[Cell, ...]:
    if rank not in mesh.ranks:
        return ()
    if (numel := prod(shape)) == 0:
        return (Region.whole(shape),)
    size = -(-numel // len(mesh.ranks))
    number = mesh.ranks.index(rank)
    start, stop = min(numel, size * number), min(numel, size * (number + 1))
    return (ElementRange(start, stop),) if start < stop else ()


@lru_cache(maxsize=4096)
def possible_views(
    view: MeshPlaced, shape: Shape, *, as_defined: bool = True
) -> tuple[MeshPlaced, ...]:
    """Return the views that these placements may mean: the view of FSDP2, then that of torch.

    With `as_defined=False`, uneven strided shards have only the view of FSDP2, or none.
    """
    if _is_even(view, shape) or not _is_strided(view):
        return (view,)
    reordered = reorder_axes(view)
    if not as_defined:
        return (reordered,) if reordered else ()
    if reordered is None:
        return (view,)
    if compute_layout(view, shape) == compute_layout(reordered, shape):
        return (view,)
    return reordered, view


def reorder_axes(view: MeshPlaced) -> MeshPlaced | None:
    """Return the view with its mesh axes in the order of their cuts, without strided shards.

    A `split_factor` is the product of the sizes of the axes that cut before. So each strided axis
    comes right after these axes. Return None if no axis is strided, or if no order fits.
    """
    orders: dict[int, list[int]] = {}
    for axis in reversed(range(len(view.placements))):
        placement = view.placements[axis]
        if isinstance(placement, ReplicatedAxis):
            continue
        order = orders.setdefault(placement.dim, [])
        index: int | None = 0
        if isinstance(placement, StridedAxis):
            cuts = accumulate((view.mesh.shape[a] for a in order), mul, initial=1)
            index = next((n for n, cut in enumerate(cuts) if cut == placement.split_factor), None)
        if index is None:
            return None
        order.insert(index, axis)
    if not _is_strided(view):
        return None
    cutting = [axis for order in orders.values() for axis in order]
    axes = cutting + [a for a in range(len(view.placements)) if a not in cutting]
    mesh, placements = view.mesh, (view.placements[axis] for axis in axes)
    positions = mesh_positions(axes, mesh.shape, row_major_strides(mesh.shape))
    return MeshPlaced(
        Mesh(
            tuple(mesh.names[axis] for axis in axes),
            tuple(mesh.shape[axis] for axis in axes),
            tuple(mesh.ranks[position] for position in positions),
        ),
        tuple(p if isinstance(p, ReplicatedAxis) else ShardedAxis(p.dim) for p in placements),
    )


def _is_strided(view: MeshPlaced) -> bool:
    return any(isinstance(placement, StridedAxis) for placement in view.placements)


def _is_even(view: MeshPlaced, shape: Shape) -> bool:
    cuts = [1] * len(shape)
    for placement, size in zip(view.placements, view.mesh.shape, strict=True):
        if not isinstance(placement, ReplicatedAxis):
            cuts[placement.dim] *= size
    return all(size % cut == 0 for size, cut in zip(shape, cuts, strict=True))
