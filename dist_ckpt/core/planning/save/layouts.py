"""Merge the views that the ranks have of one tensor into its layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise, product
from math import prod
from operator import eq

from dist_ckpt.core.format.geometry import (
    Cell,
    ElementRange,
    Flat,
    Grid,
    Layout,
    Region,
    Regions,
    Shape,
    check_cell,
    check_tiling,
    row_major_strides,
)
from dist_ckpt.core.planning.box_tree import BoxTree
from dist_ckpt.core.planning.mesh import cell_holders, compute_layout, mesh_positions, whole_layout
from dist_ckpt.core.planning.plan import Flattened, Mesh, MeshPlaced, Parts, RuleSharded, View
from dist_ckpt.errors import ranks_text

# The number of overlapping pairs of shards in an error.
_MAX_PAIRS = 3


@dataclass(frozen=True, slots=True)
class RankView:
    """The view of a tensor that `ranks` have. `shape` is the shape in their entries."""

    ranks: tuple[int, ...]
    view: View
    shape: Shape


def merge_views(rank_views: Sequence[RankView]) -> tuple[Shape, Layout]:
    """Return the global shape of a tensor, and the layout in which the ranks hold it.

    Raises ValueError, with the ranks, if the shapes differ or the cells do not tile the tensor.
    """
    # A rank outside the mesh of a tensor may report that it holds no part of it.
    holding = [rank_view for rank_view in rank_views if rank_view.view != Parts(())]
    if not holding:
        all_ranks = ranks_text(rank for rank_view in rank_views for rank in rank_view.ranks)
        raise ValueError(f"the states of {all_ranks} name it, but no rank holds a part of it")
    views: dict[View, list[int]] = {}
    for rank_view in holding:
        views.setdefault(rank_view.view, []).extend(rank_view.ranks)
    rules = [view for view in views if isinstance(view, RuleSharded)]
    if rules and len(views) > 1:
        ways = {True: "by a rule of the ShardingConfig", False: "in another way"}
        kinds = ((ways[isinstance(view, RuleSharded)], ranks) for view, ranks in views.items())
        raise ValueError("held " + difference_text(kinds))
    if rules:
        return _merge_rule_sharded(rules[0], holding)
    shape = rank_views[0].shape
    if any(rank_view.shape != shape for rank_view in rank_views):
        raise ValueError(
            "shape "
            + difference_text((rank_view.shape, rank_view.ranks) for rank_view in rank_views)
        )
    layouts = [
        _drop_absent_ranks(compute_layout(view, shape), view.mesh, ranks)
        if isinstance(view, MeshPlaced | Flattened)
        else whole_layout(shape, ranks)
        for view, ranks in views.items()
        if not isinstance(view, Parts)
    ]
    if len(layouts) == len(views) == 1:
        return shape, layouts[0]
    if len(layouts) == len(views) and all(layout.cut == layouts[0].cut for layout in layouts):
        columns = zip(*(layout.holders for layout in layouts), strict=True)
        holders = tuple(tuple(sorted({*chain.from_iterable(column)})) for column in columns)
        return shape, Layout(layouts[0].cut, holders)
    parts = {view: ranks for view, ranks in views.items() if isinstance(view, Parts)}
    return shape, _combine_cells(_find_cell_holders(layouts, parts), shape)


def difference_text(values: Iterable[tuple[object, Iterable[int]]]) -> str:
    """Return a text with the ranks of each value, for values that should be equal."""
    ranks: dict[object, list[int]] = {}
    for value, with_value in values:
        ranks.setdefault(value, []).extend(with_value)
    return ", ".join(f"{value} on {ranks_text(with_value)}" for value, with_value in ranks.items())


def _drop_absent_ranks(layout: Layout, mesh: Mesh, ranks: Sequence[int]) -> Layout:
    """Return the layout without the ranks whose state lacks the tensor."""
    present = frozenset(ranks)
    if present.issuperset(mesh.ranks):
        return layout
    holders = []
    for number, on_mesh in enumerate(layout.holders):
        remaining = tuple(rank for rank in on_mesh if rank in present)
        if not remaining:
            raise ValueError(
                f"in the mesh, [{layout.cell(number)}] is on {ranks_text(on_mesh)}. But only the "
                f"state of {ranks_text(present)} has the tensor"
            )
        holders.append(remaining)
    return Layout(layout.cut, tuple(holders))


# --- explicit cells (`Parts`) -----------------------------------------------------------------

_RanksByCell = Mapping[Cell, tuple[int, ...]]


def _find_cell_holders(layouts: Sequence[Layout], parts: Mapping[Parts, list[int]]) -> _RanksByCell:
    holders: dict[Cell, set[int]] = {}
    for layout in layouts:
        for number, cell_ranks in enumerate(layout.holders):
            holders.setdefault(layout.cell(number), set()).update(cell_ranks)
    for view, ranks in parts.items():
        for cell in view.cells:
            holders.setdefault(cell, set()).update(ranks)
    return {cell: tuple(sorted(cell_ranks)) for cell, cell_ranks in holders.items()}


def _combine_cells(cells: _RanksByCell, shape: Shape) -> Layout:
    for cell, ranks in cells.items():
        try:
            check_cell(cell, shape)
        except ValueError as error:
            raise ValueError(f"{error}, on {ranks_text(ranks)}") from error
    if prod(shape) == 0:
        return whole_layout(shape, {rank for ranks in cells.values() for rank in ranks})
    flat = sorted(cell for cell in cells if isinstance(cell, ElementRange) and cell.numel)
    boxes = sorted(cell for cell in cells if isinstance(cell, Region) and cell.numel)
    if flat and boxes:
        raise ValueError(
            f"ranges of elements on {_holders_text(flat, cells)} and boxes on "
            f"{_holders_text(boxes, cells)}; use one kind for one tensor"
        )
    if flat:
        _check_flat(flat, cells, prod(shape))
    elif boxes:
        _check_boxes(boxes, cells, shape)
    else:
        raise ValueError(f"its parts on {_holders_text(cells, cells)} are all empty")
    return build_layout({cell: cells[cell] for cell in flat or boxes})


def _holders_text(cells: Iterable[Cell], holders: _RanksByCell) -> str:
    return ranks_text(rank for cell in cells for rank in holders[cell])


def build_layout(holders: _RanksByCell) -> Layout:
    """Return the layout of cells that tile a tensor: flat, a grid, or a list of regions."""
    if flat := sorted(cell for cell in holders if isinstance(cell, ElementRange)):
        cuts = (*(cell.start for cell in flat), flat[-1].stop)
        return Layout(Flat(cuts), tuple(holders[cell] for cell in flat))
    boxes = sorted(cell for cell in holders if isinstance(cell, Region))
    cut = _find_grid(boxes) or Regions(tuple(boxes))
    return Layout(cut, tuple(holders[cell] for cell in boxes))


def _find_grid(ordered: Sequence[Region]) -> Grid | None:
    dims = range(len(ordered[0].shape))
    starts = [sorted({region.offset[d] for region in ordered}) for d in dims]
    if prod(map(len, starts)) != len(ordered):
        return None
    cuts = tuple((*starts[d], max(region.stop[d] for region in ordered)) for d in dims)
    corners = (tuple(zip(region.offset, region.stop, strict=True)) for region in ordered)
    is_grid = all(map(eq, corners, product(*map(pairwise, cuts))))
    return Grid(cuts) if is_grid else None


def _check_flat(ordered: Sequence[ElementRange], holders: _RanksByCell, numel: int) -> None:
    for before, after in pairwise([ElementRange(0, 0), *ordered, ElementRange(numel, numel)]):
        if before.stop > after.start:
            raise ValueError(_overlap_text(before, after, holders))
        if before.stop < after.start:
            raise ValueError(
                f"no rank holds the elements {before.stop}:{after.start} of {numel}; "
                f"parts of it are on {_holders_text(ordered, holders)}"
            )


def _check_boxes(ordered: Sequence[Region], holders: _RanksByCell, shape: Shape) -> None:
    try:
        check_tiling(ordered, shape)
    except ValueError as error:
        tree = BoxTree(ordered)
        overlaps = (
            _overlap_text(ordered[other], region, holders)
            for number, region in enumerate(ordered)
            for other in tree.find_overlapping(region)
            if other < number
        )
        raise ValueError(
            "; ".join(islice(overlaps, _MAX_PAIRS))
            or f"{error}; parts of it are on {_holders_text(ordered, holders)}"
        ) from error


def _overlap_text(cell: Cell, other: Cell, holders: _RanksByCell) -> str:
    ranks, other_ranks = ranks_text(holders[cell]), ranks_text(holders[other])
    return f"[{cell}] on {ranks} overlaps [{other}] on {other_ranks}"


# --- parts under a ShardingConfig ------------------------------------------------------------


def _merge_rule_sharded(view: RuleSharded, rank_views: Sequence[RankView]) -> tuple[Shape, Layout]:
    """Combine the local tensors along the mesh axes that cut each dimension.

    The size of a dimension is the sum of its parts.
    """
    mesh, strides = view.mesh, row_major_strides(view.mesh.shape)
    if {len(rank_view.shape) for rank_view in rank_views} != {len(view.axes)}:
        raise ValueError("local shape " + difference_text((s.shape, s.ranks) for s in rank_views))
    shapes = {rank: rank_view.shape for rank_view in rank_views for rank in rank_view.ranks}
    ranks_of_mesh = {rank: position for position, rank in enumerate(mesh.ranks)}
    if ranks_outside := shapes.keys() - ranks_of_mesh.keys():
        raise ValueError(f"{ranks_text(ranks_outside)} is outside the ShardingConfig's mesh")
    starts, positions, shape = [], [], []
    for dim, axes in enumerate(view.axes):
        offsets = mesh_positions(axes, mesh.shape, strides)
        sizes = _merge_sizes(dim, offsets, shapes, [(axis, strides[axis]) for axis in axes], view)
        ends = list(accumulate(sizes, initial=0))
        filled = [n for n, size in enumerate(sizes) if size]
        starts.append(tuple(ends[n] for n in filled))
        positions.append([offsets[n] for n in filled])
        shape.append(ends[-1])
    if 0 in shape:
        return tuple(shape), whole_layout(tuple(shape), shapes)
    cut = Grid(tuple((*start, size) for start, size in zip(starts, shape, strict=True)))
    used = {axis for axes in view.axes for axis in axes}
    free = [axis for axis in range(len(mesh.shape)) if axis not in used]
    holders = cell_holders(mesh.ranks, positions, mesh_positions(free, mesh.shape, strides))
    return tuple(shape), _drop_absent_ranks(Layout(cut, holders), mesh, list(shapes))


def _merge_sizes(
    dim: int,
    positions: Sequence[int],
    shapes: Mapping[int, Shape],
    strides: Sequence[tuple[int, int]],
    view: RuleSharded,
) -> list[int]:
    """Return the sizes of the parts of a dimension, in the order of the axes that cut it.

    Raises ValueError if ranks with the same part differ in size, or if no rank has a part.
    """
    mesh = view.mesh
    sizes: dict[int, tuple[int, int]] = {}
    for mesh_index, rank in enumerate(mesh.ranks):
        if rank not in shapes:
            continue
        position = sum(mesh_index // step % mesh.shape[axis] * step for axis, step in strides)
        size, first = sizes.setdefault(position, (shapes[rank][dim], rank))
        if size != shapes[rank][dim]:
            raise ValueError(
                f"dimension {dim} is {size} on rank {first} and {shapes[rank][dim]} on rank "
                f"{rank}, but in the ShardingConfig both hold the same part"
            )
    for position in positions:
        if position not in sizes:
            names = ", ".join(mesh.names[axis] for axis, _ in strides)
            raise ValueError(
                f"{names} cuts dimension {dim}, but the part of rank {mesh.ranks[position]} is on "
                f"no rank; the tensor is on {ranks_text(shapes)}"
            )
    return [sizes[position][0] for position in positions]
