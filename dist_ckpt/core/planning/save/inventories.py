"""Merge the inventories of all ranks, and their views of one tensor into its layout.

Equal inventories of several ranks are merged as one `DistinctInventory`. These are in the order of
their lowest ranks, so the lowest rank with a tensor decides its position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, islice, pairwise, product
from math import prod
from operator import eq

from msgspec import structs

from dist_ckpt.core.format.filenames import is_stem
from dist_ckpt.core.format.geometry import (
    BoxTree,
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
from dist_ckpt.core.format.index.index import (
    Component,
    Fusion,
    Key,
    ListedVersions,
    Node,
    TensorRecord,
)
from dist_ckpt.core.planning.module_versions import merge_versions
from dist_ckpt.core.planning.plan import Inventory, NameList
from dist_ckpt.core.planning.replica_rules import ReplicaRule
from dist_ckpt.core.planning.tensor_views import (
    Flattened,
    Fused,
    Mesh,
    MeshPlaced,
    Parts,
    RuleSharded,
    View,
    cell_holders,
    chunked_view,
    compute_cells,
    compute_layout,
    fits_memory,
    mesh_positions,
    piece_sizes,
    whole_layout,
)
from dist_ckpt.message_text import ranks_text

# With more components, all tensors are stored as one.
MAX_COMPONENTS = 16
ONLY_COMPONENT = "state"


@dataclass(frozen=True, slots=True)
class DistinctInventory:
    """An inventory, and the ranks, ascending, that sent it."""

    inventory: Inventory
    ranks: tuple[int, ...]


def sort_inventories(
    inventories: Iterable[tuple[Inventory, tuple[int, ...]]], world_size: int
) -> list[DistinctInventory]:
    """Return the distinct inventories in order. Every rank must have sent exactly one inventory."""
    distinct = (
        DistinctInventory(inventory, tuple(sorted(ranks))) for inventory, ranks in inventories
    )
    ordered = sorted(distinct, key=lambda sent: sent.ranks)
    ranks = sorted(rank for sent in ordered for rank in sent.ranks)
    if ranks != list(range(world_size)):
        raise ValueError(f"inventories of {ranks_text(ranks)} for a world of {world_size}")
    return ordered


def merge_aliases(
    distinct: Sequence[DistinctInventory],
) -> tuple[list[DistinctInventory], dict[str, str]]:
    """Return the inventories without aliases that differ between ranks, and the common aliases.

    An alias that is not common becomes a tensor.
    """
    tensors = {entry.fqn for sent in distinct for entry in sent.inventory.tensors}
    tied: dict[str, set[str]] = {}
    for sent in distinct:
        for fqn, canonical in sent.inventory.aliases:
            tied.setdefault(fqn, set()).add(canonical)
    common = {
        fqn: next(iter(targets))
        for fqn, targets in tied.items()
        if len(targets) == 1 and fqn not in tensors
    }
    if len(common) == len(tied):
        return list(distinct), common
    with_untied = []
    for sent in distinct:
        entries = {entry.fqn: entry for entry in sent.inventory.tensors}
        untied = (
            structs.replace(entries[canonical], fqn=fqn)
            for fqn, canonical in sent.inventory.aliases
            if fqn not in common
        )
        tensors_here = (*sent.inventory.tensors, *untied)
        inventory = structs.replace(sent.inventory, tensors=tensors_here)
        with_untied.append(DistinctInventory(inventory, sent.ranks))
    return with_untied, common


def find_kind_problems(distinct: Sequence[DistinctInventory]) -> list[str]:
    """Return a problem for each name that has different kinds on different ranks."""
    kinds: dict[str, str] = {}
    mixed: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for sent in distinct:
        for kind, names in _names_by_kind(sent.inventory).items():
            for fqn in names:
                if kinds.setdefault(fqn, kind) != kind:
                    mixed[fqn] = []
    for sent in distinct if mixed else ():
        for kind, names in _names_by_kind(sent.inventory).items():
            for fqn in mixed.keys() & set(names):
                mixed[fqn].append((kind, sent.ranks))
    return [f"{fqn or 'the state'}: {difference_text(sorted(mixed[fqn]))}" for fqn in sorted(mixed)]


def _names_by_kind(inventory: Inventory) -> dict[str, list[str]]:
    tensors = [entry.fqn for entry in inventory.tensors]
    return {
        "a tensor": tensors + [fqn for fqn, _ in inventory.aliases],
        "a container of tensors": [node.fqn for node in inventory.tree],
        "a value": list(inventory.values),
        "a value per rank": [fqn for fqn, _ in inventory.per_rank],
        "a list of names": [names.fqn for names in inventory.name_lists],
    }


def find_value_holders(distinct: Sequence[DistinctInventory]) -> dict[str, tuple[int, ...]]:
    """Return the ranks, ascending, that have each value."""
    distinct_by_value: dict[str, list[DistinctInventory]] = {}
    for sent in distinct:
        for fqn in sent.inventory.values:
            distinct_by_value.setdefault(fqn, []).append(sent)
    # One tuple for each set of inventories: they may have many values.
    cached_ranks: dict[tuple[int, ...], tuple[int, ...]] = {}
    value_ranks = {}
    for fqn, with_value in distinct_by_value.items():
        key = tuple(sent.ranks[0] for sent in with_value)
        if key not in cached_ranks:
            cached_ranks[key] = tuple(sorted(rank for sent in with_value for rank in sent.ranks))
        value_ranks[fqn] = cached_ranks[key]
    return value_ranks


def find_key_holders(
    distinct: Sequence[DistinctInventory],
) -> dict[str, tuple[tuple[Key, tuple[int, ...]], ...]]:
    """Return the keys of each per-rank value, and the ranks, ascending, that have each key."""
    holders: dict[str, dict[Key, list[int]]] = {}
    for sent in distinct:
        for fqn, key in sent.inventory.per_rank:
            keys = holders.setdefault(fqn, {})
            for rank in sent.ranks:
                keys.setdefault(rank if key is None else key, []).append(rank)
    return {
        fqn: tuple(
            sorted(((key, tuple(sorted(ranks))) for key, ranks in keys.items()), key=lambda k: k[1])
        )
        for fqn, keys in holders.items()
    }


def merge_trees(distinct: Sequence[DistinctInventory], problems: list[str]) -> tuple[Node, ...]:
    """Return the containers of all ranks, each with the keys of all ranks. Add problems."""
    kinds: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    keys: dict[str, dict[str, str | int]] = {}
    for sent in distinct:
        for node in sent.inventory.tree:
            kinds.setdefault(node.fqn, []).append((node.kind, sent.ranks))
            node_keys = keys.setdefault(node.fqn, {})
            for key in node.keys:
                if type(node_keys.setdefault(str(key), key)) is not type(key):
                    problems.append(
                        f"{node.fqn or 'the state'}: the key {key} is a number on some ranks and "
                        f"a text on other ranks, such as {ranks_text(sent.ranks)}"
                    )
    for fqn, node_kinds in kinds.items():
        if len({kind for kind, _ in node_kinds}) > 1:
            problems.append(
                f"{fqn or 'the state'}: {difference_text(node_kinds)}: use one class of container "
                "on all ranks (a list of modules counts as one dict where no two of them share a "
                "name)"
            )
    return tuple(
        Node(fqn, kinds[fqn][0][0], tuple(node_keys.values())) for fqn, node_keys in keys.items()
    )


def merge_name_lists(distinct: Sequence[DistinctInventory]) -> tuple[NameList, ...]:
    """Return the lists of names, each with the names of all ranks."""
    lists: dict[str, dict[str, None]] = {}
    for sent in distinct:
        for names in sent.inventory.name_lists:
            lists.setdefault(names.fqn, {}).update(dict.fromkeys(names.names))
    return tuple(NameList(fqn, tuple(names)) for fqn, names in lists.items())


def merge_parameters(distinct: Sequence[DistinctInventory]) -> dict[str, bool]:
    """Return True for each parameter that any rank trains, and False for other parameters."""
    trainable: dict[str, bool] = {}
    for sent in distinct:
        inventory = sent.inventory
        for first, length, is_trained in inventory.parameters:
            for entry in inventory.tensors[first : first + length]:
                trainable[entry.fqn] = is_trained or trainable.get(entry.fqn, False)
        for fqn, canonical in inventory.aliases if inventory.parameters else ():
            if canonical in trainable:  # other ranks may store the alias separately
                trainable[fqn] = trainable[canonical] or trainable.get(fqn, False)
    return trainable


def merge_replica_rules(distinct: Sequence[DistinctInventory]) -> dict[str, ReplicaRule]:
    """Return the rule of each name. All ranks have the same rules."""
    return {fqn: rule for sent in distinct for fqn, rule in sent.inventory.replicas}


def merge_fused(distinct: Sequence[DistinctInventory]) -> dict[str, Fusion]:
    """Return the pieces of each tensor for which a rule names several."""
    fused: dict[str, Fusion] = {}
    for sent in distinct:
        fusions = {
            number: Fusion(view.dim, tuple(piece.size for piece in view.pieces))
            for number, view in enumerate(sent.inventory.views)
            if isinstance(view, RuleSharded) and len(view.pieces) > 1
        }
        for entry in sent.inventory.tensors if fusions else ():
            if (fusion := fusions.get(entry.view)) is not None:
                fused[entry.fqn] = fusion
    return fused


def merge_module_versions(
    distinct: Sequence[DistinctInventory],
) -> Mapping[str, ListedVersions] | None:
    """Return the versions of the modules of all ranks; None if no rank has them."""
    known = [v for sent in distinct if (v := sent.inventory.versions) is not None]
    return merge_versions(chain.from_iterable(known)) if known else None


def merge_components(distinct: Sequence[DistinctInventory]) -> tuple[Component, ...]:
    """Return the components that have tensors, in order, with the stems of their files."""
    inventories = [sent.inventory for sent in distinct]
    used = dict.fromkeys(i.components[entry.component] for i in inventories for entry in i.tensors)
    if len(used) > MAX_COMPONENTS:
        return (Component(ONLY_COMPONENT, ONLY_COMPONENT),)
    plain = {name for name in used if is_stem(name)}
    free = (stem for n in count() if (stem := f"c{n:02d}") not in plain)
    stems = {name: next(free) for name in sorted(used) if name not in plain}
    return tuple(Component(name, stems.get(name, name)) for name in used)


def split_off_linkable(
    components: tuple[Component, ...], records: dict[str, TensorRecord], linkable: frozenset[str]
) -> tuple[tuple[Component, ...], frozenset[int]]:
    """Move linkable tensors to separate components, and change `records` accordingly.

    Return all components, and the numbers of the linkable components.
    """
    fqns = [fqn for fqn in records if fqn in linkable]
    fully_linkable = {records[fqn].component for fqn in fqns} - {
        record.component for fqn, record in records.items() if fqn not in linkable
    }
    partly_linkable = sorted({records[fqn].component for fqn in fqns} - fully_linkable)
    new_numbers = {old: len(components) + n for n, old in enumerate(partly_linkable)}
    equal_records: dict[TensorRecord, TensorRecord] = {}
    for fqn in fqns:
        if (number := new_numbers.get(records[fqn].component)) is not None:
            record = replace(records[fqn], component=number)
            records[fqn] = equal_records.setdefault(record, record)
    used = {component.stem for component in components}
    free = (stem for n in count() if (stem := f"r{n:02d}") not in used)
    added = (Component(components[old].name, next(free)) for old in partly_linkable)
    return (*components, *added), frozenset((*fully_linkable, *new_numbers.values()))


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
        if isinstance(view, MeshPlaced | Flattened | Fused)
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
        if view.pieces and dim == view.dim:
            shape.append(sum(piece.size for piece in view.pieces))
            continue
        offsets = mesh_positions(axes, mesh.shape, strides)
        sizes = _merge_sizes(dim, offsets, shapes, [(axis, strides[axis]) for axis in axes], view)
        ends = list(accumulate(sizes, initial=0))
        filled = [n for n, size in enumerate(sizes) if size]
        starts.append(tuple(ends[n] for n in filled))
        positions.append([offsets[n] for n in filled])
        shape.append(ends[-1])
    if 0 in shape:
        return tuple(shape), whole_layout(tuple(shape), shapes)
    if view.pieces:
        fused = _check_fused(view, tuple(shape), shapes)
        layout = compute_layout(fused, tuple(shape))
        return tuple(shape), _drop_absent_ranks(layout, mesh, list(shapes))
    cut = Grid(tuple((*start, size) for start, size in zip(starts, shape, strict=True)))
    used = {axis for axes in view.axes for axis in axes}
    free = [axis for axis in range(len(mesh.shape)) if axis not in used]
    holders = cell_holders(mesh.ranks, positions, mesh_positions(free, mesh.shape, strides))
    return tuple(shape), _drop_absent_ranks(Layout(cut, holders), mesh, list(shapes))


def _check_fused(view: RuleSharded, shape: Shape, shapes: Mapping[int, Shape]) -> Fused:
    """Return the view of a fused tensor. Raises ValueError if a rank has a part of another shape.

    The local shape does not say where a piece ends, so the pieces must explain it exactly.
    """
    fused = chunked_view(view, shape)
    assert isinstance(fused, Fused)
    wrong = [
        rank
        for rank, local in shapes.items()
        if not fits_memory(compute_cells(fused, rank, shape), view.dim, local)
    ]
    if wrong:
        sizes = [piece.size for piece in view.pieces]
        raise ValueError(
            f"local shape {shapes[wrong[0]]} on {ranks_text(wrong)}, but of the pieces {sizes} "
            f"along dimension {view.dim} rank {wrong[0]} has {[*piece_sizes(view, wrong[0])]}: "
            "give the rule the global sizes of the pieces. Each is cut as by torch.chunk"
        )
    return fused


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
