"""Plan a save: inventories of all ranks -> one plan for all, and each rank's part of it.

All functions are pure: ranks with the same inventories make the same plan without a message. Each
distinct layout costs work once, not once for each tensor on each rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import BLOCK_NBYTES
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Cell, ElementRange, Layout, Region, Shape, check_shape
from dist_ckpt.core.format.index.index import Catalog, TensorRecord
from dist_ckpt.core.format.index.index_json import MIN_TENSOR_VALUES
from dist_ckpt.core.format.shard_file import (
    FEWER_TENSORS_REMEDY,
    MAX_HEADER_NBYTES,
    MIN_TENSOR_NBYTES,
    arrange_shards,
    header_text,
)
from dist_ckpt.core.format.strict_json import MAX_VALUES
from dist_ckpt.core.planning.plan import (
    Batch,
    BatchPart,
    FilePlan,
    Inventory,
    ReplicaGroup,
    SavePlan,
    TensorEntry,
)
from dist_ckpt.core.planning.replica_rules import ReplicaRule
from dist_ckpt.core.planning.save import inventories
from dist_ckpt.core.planning.save.balance import TensorOwnership, balance, cell_numels
from dist_ckpt.core.planning.save.inventories import RankView, difference_text, merge_views
from dist_ckpt.core.planning.tensor_views import Parts, RuleSharded, View, compute_cells
from dist_ckpt.message_text import remedy_of_parts

# Blocks below this size are copied together for one write: a copy costs less than a system call.
SMALL_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of all ranks, and the layout in which they hold it."""

    dtype: str
    shape: Shape
    component: str
    layout: Layout


def plan_save(
    distinct_inventories: Iterable[tuple[Inventory, tuple[int, ...]]], world_size: int
) -> SavePlan:
    """Return the plan of a save from the distinct inventories, each with the ranks that sent it.

    Raises ValueError, with every problem, if the states of the ranks do not make one checkpoint.
    """
    distinct, aliases = inventories.merge_aliases(
        inventories.sort_inventories(distinct_inventories, world_size)
    )
    problems = inventories.find_kind_problems(distinct)
    tree = inventories.merge_trees(distinct, problems)
    tensors = _merge_tensors(distinct, problems)
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        remedy = remedy_of_parts(problems, "wrap values that differ by design in dc.PerRank")
        raise ValueError(
            f"the states of the ranks do not make one checkpoint:{listed}\n"
            f"Make the ranks agree, or {remedy}."
        )
    rules = inventories.merge_replica_rules(distinct)
    tensors, first_copies = _apply_replica_rules(tensors, rules)
    stored = balance(
        [TensorOwnership(fqn, DTYPES[t.dtype].itemsize, t.layout) for fqn, t in tensors.items()],
        world_size,
    )
    components = inventories.merge_components(distinct)
    component_numbers = {component.name: number for number, component in enumerate(components)}
    layouts: dict[int, tuple[int, Layout]] = {}
    records: dict[str, TensorRecord] = {}
    # Equal tensors share a record: most tensors have equals.
    equal_records: dict[TensorRecord, TensorRecord] = {}
    for fqn, tensor in tensors.items():
        layout, rotation = stored[fqn]
        layout_number, _ = layouts.setdefault(id(layout), (len(layouts), layout))
        component = component_numbers.get(tensor.component, 0)
        record = TensorRecord(tensor.dtype, tensor.shape, layout_number, rotation, component)
        records[fqn] = equal_records.setdefault(record, record)
    # A tensor that is linkable on any rank goes to a separate file, which later saves can link.
    fqns = frozenset(fqn for sent in distinct for fqn in sent.inventory.linkable)
    components, linkable = inventories.split_off_linkable(components, records, fqns)
    value_holders = inventories.find_value_holders(distinct)
    per_rank_holders = inventories.find_key_holders(distinct)
    first_values = frozenset(
        fqn for fqn, ranks in value_holders.items() if rules.get(fqn) == "rank0" and len(ranks) > 1
    )
    value_holders |= {fqn: value_holders[fqn][:1] for fqn in first_values}
    trained = inventories.merge_parameters(distinct)
    catalog = Catalog(
        world_size=world_size,
        mesh=next((sent.inventory.mesh for sent in distinct if sent.inventory.mesh), ()),
        components=components,
        layouts=tuple(layout for _, layout in layouts.values()),
        tensors=records,
        aliases=aliases,
        values={fqn: ranks[0] for fqn, ranks in value_holders.items()},
        per_rank={
            fqn: tuple((key, ranks[0]) for key, ranks in holders)
            for fqn, holders in per_rank_holders.items()
        },
        parameters={fqn: trained[fqn] for fqn in records if fqn in trained} if trained else {},
        fused=inventories.merge_fused(distinct),
        versions=inventories.merge_module_versions(distinct),
        replicas={
            fqn: rule
            for fqn, rule in rules.items()
            if fqn in first_copies or fqn in first_values or rule == "per_rank"
        },
    )
    unsplit = {fqn: t.layout for fqn, t in tensors.items() if stored[fqn][0] is not t.layout}
    return SavePlan(
        catalog=catalog,
        unsplit_layouts=unsplit,
        value_holders=value_holders,
        per_rank_holders=per_rank_holders,
        tree=tree,
        name_lists=inventories.merge_name_lists(distinct),
        numpy=tuple(dict.fromkeys(fqn for sent in distinct for fqn in sent.inventory.numpy)),
        linkable=linkable,
        objects=tuple(dict.fromkeys(fqn for sent in distinct for fqn in sent.inventory.objects)),
        has_text_keys=any(sent.inventory.has_text_keys for sent in distinct),
        uncut=tuple({fqn: how for sent in distinct for fqn, how in sent.inventory.uncut}.items()),
    )


def check_num_tensors(
    distinct_inventories: Sequence[tuple[Inventory, tuple[int, ...]]], world_size: int
) -> None:
    """Raise ValueError if no plan can name all tensors in the index and in the shard files.

    These are lower bounds, so they refuse no state that can be saved. `header_text` and the index
    check their sizes again.
    """
    linkable = {fqn for sent, _ in distinct_inventories for fqn in sent.linkable}
    files: dict[tuple[str, bool], set[str]] = {}
    for sent, _ in distinct_inventories:
        for entry in sent.tensors:
            if 0 not in entry.shape:
                file = sent.components[entry.component], entry.fqn in linkable
                files.setdefault(file, set()).add(entry.fqn)
    for (component, _), fqns in files.items():
        nbytes = (sum(map(len, fqns)) + len(fqns) * MIN_TENSOR_NBYTES) // world_size
        if nbytes > MAX_HEADER_NBYTES:
            most = MAX_HEADER_NBYTES * len(fqns) // nbytes
            raise _tensors_error(len(fqns), f" in {component!r}", most)
    if (num_tensors := sum(map(len, files.values()))) > (most := MAX_VALUES // MIN_TENSOR_VALUES):
        raise _tensors_error(num_tensors, "", most)


def _tensors_error(num_tensors: int, place: str, most: int) -> ValueError:
    return ValueError(
        f"the state has {num_tensors} tensors{place}, and a checkpoint of these ranks can name "
        f"fewer than {most}: {FEWER_TENSORS_REMEDY}"
    )


def plan_rank_files(plan: SavePlan, rank: int) -> tuple[FilePlan, ...]:
    """Return the shard files that a rank writes, by component; empty if it stores nothing."""
    catalog = plan.catalog
    local_cells = [_find_cells(layout, rank) for layout in catalog.layouts]
    cells: _StoredCells = {}
    for fqn, record in catalog.tensors.items():
        for cell_number, cell in local_cells[record.layout].items():
            if catalog.layouts[record.layout].holder(cell_number, record.rotation) == rank:
                entry = fqn, record.dtype, record.shape, cell
                cells.setdefault(record.component, []).append(entry)
    return tuple(
        _plan_file(
            catalog, component, rank, cells[component], is_linkable=component in plan.linkable
        )
        for component in sorted(cells)
    )


def plan_all_files(catalog: Catalog) -> Iterator[tuple[FilePlan, ...]]:
    """Yield `plan_rank_files` for each rank, without the quadratic cost of separate calls."""
    for rank, cells in enumerate(stored_cells_by_rank(catalog)):
        yield tuple(
            _plan_file(catalog, component, rank, cells[component]) for component in sorted(cells)
        )


# (fqn, dtype, shape of the tensor, cell) of each shard in some files, by component.
_StoredCells = dict[int, list[tuple[str, str, Shape, Cell]]]


class _FilesKey(NamedTuple):
    """The numbers of a tensor that determine the file of each of its cells."""

    component: int
    layout: int
    rotation: int


def stored_cells_by_rank(catalog: Catalog) -> Iterator[_StoredCells]:
    """Yield the cells that each rank stores, in the order of ranks."""
    tensors_by_key: dict[_FilesKey, list[tuple[str, TensorRecord]]] = {}
    for fqn, record in catalog.tensors.items():
        files_key = _FilesKey(record.component, record.layout, record.rotation)
        tensors_by_key.setdefault(files_key, []).append((fqn, record))
    stored: dict[int, list[tuple[_FilesKey, int]]] = {}
    for files_key in tensors_by_key:
        layout = catalog.layouts[files_key.layout]
        for cell_number in range(layout.cut.num_cells):
            holder = layout.holder(cell_number, files_key.rotation)
            stored.setdefault(holder, []).append((files_key, cell_number))
    for rank in range(catalog.world_size):
        cells: _StoredCells = {}
        for files_key, cell_number in stored.get(rank, ()):
            cell = catalog.layouts[files_key.layout].cell(cell_number)
            tensors = (
                (fqn, record.dtype, record.shape, cell) for fqn, record in tensors_by_key[files_key]
            )
            cells.setdefault(files_key.component, []).extend(tensors)
        yield cells


def stored_nbytes(catalog: Catalog) -> dict[tuple[int, int], int]:
    """Return the bytes of the shards in each file of a save, by component and rank."""
    numels = [cell_numels(layout.cut) for layout in catalog.layouts]
    itemsizes: dict[_FilesKey, int] = {}
    for record, count in catalog.counts():
        files_key = _FilesKey(record.component, record.layout, record.rotation)
        itemsizes[files_key] = itemsizes.get(files_key, 0) + count * DTYPES[record.dtype].itemsize
    nbytes: dict[tuple[int, int], int] = {}
    for (component, layout_number, rotation), itemsize in itemsizes.items():
        layout = catalog.layouts[layout_number]
        for cell_number, numel in enumerate(numels[layout_number]):
            file = component, layout.holder(cell_number, rotation)
            nbytes[file] = nbytes.get(file, 0) + numel * itemsize
    return nbytes


def nbytes_to_write(plan: SavePlan) -> int:
    """Return the bytes of the shards that a save writes, without files that may be linked."""
    sizes = stored_nbytes(plan.catalog).items()
    return sum(nbytes for (component, _), nbytes in sizes if component not in plan.linkable)


def find_replica_groups(plan: SavePlan, rank: int) -> tuple[ReplicaGroup, ...]:
    """Return the tensors and values that a rank shares, grouped by the ranks that hold them."""
    catalog = plan.catalog
    cells: dict[tuple[int, ...], list[tuple[str, Cell]]] = {}
    values: dict[tuple[int, ...], list[str]] = {}
    groups_by_layout: dict[int, list[tuple[Cell, list[tuple[str, Cell]]]]] = {}
    for fqn, record in catalog.tensors.items():
        layout = plan.unsplit_layouts.get(fqn) or catalog.layouts[record.layout]
        if id(layout) not in groups_by_layout:
            groups_by_layout[id(layout)] = [
                (cell, cells.setdefault(layout.holders[number], []))
                for number, cell in _find_cells(layout, rank).items()
                if len(layout.holders[number]) > 1
            ]
        for cell, group in groups_by_layout[id(layout)]:
            group.append((fqn, cell))
    for fqn, ranks in plan.value_holders.items():
        if len(ranks) > 1 and _contains(ranks, rank):
            values.setdefault(ranks, []).append(fqn)
    for fqn, keys in plan.per_rank_holders.items():
        for _, ranks in keys:
            if len(ranks) > 1 and _contains(ranks, rank):
                values.setdefault(ranks, []).append(fqn)
    return tuple(
        ReplicaGroup(ranks, tuple(cells.get(ranks, ())), tuple(values.get(ranks, ())))
        for ranks in sorted(cells.keys() | values.keys())
    )


def find_local_cells(
    inventory: Inventory, rank: int, plan: SavePlan
) -> dict[str, tuple[Cell, ...]]:
    """Return the cells of each tensor in a rank's inventory, in the order of its local parts.

    Each shard that the rank stores is in exactly one of these cells. A local tensor under a
    ShardingConfig has the cells of this rank in its layout, or one empty cell. An alias that the
    plan stores as a tensor has the cells of its target.
    """
    catalog = plan.catalog
    cells_by_view: dict[tuple[int, Shape], tuple[Cell, ...]] = {}
    cells_by_layout: dict[int, tuple[Cell, ...]] = {}
    local_cells = {}
    for entry in inventory.tensors:
        view = inventory.views[entry.view]
        if isinstance(view, RuleSharded):
            layout = (
                plan.unsplit_layouts.get(entry.fqn)
                or catalog.layouts[catalog.tensors[entry.fqn].layout]
            )
            if id(layout) not in cells_by_layout:
                cells_by_layout[id(layout)] = tuple(_find_cells(layout, rank).values())
            local_cells[entry.fqn] = cells_by_layout[id(layout)] or (Region.whole(entry.shape),)
            continue
        key = entry.view, entry.shape
        if key not in cells_by_view:
            cells = compute_cells(view, rank, entry.shape)
            # An empty tensor is stored as one empty cell, in every layout.
            empty = (Region.whole(entry.shape),) * len(cells)
            cells_by_view[key] = empty if 0 in entry.shape else cells
        local_cells[entry.fqn] = cells_by_view[key]
    for fqn, canonical in inventory.aliases:
        if fqn in catalog.tensors:
            local_cells[fqn] = local_cells[canonical]
    return local_cells


# The cells of each tensor that a rank holds, numbered in the order of its local parts.
CellNumbers = Mapping[str, Mapping[Cell, int]]


def number_cells(local_cells: Mapping[str, tuple[Cell, ...]]) -> CellNumbers:
    """Return the number of each cell of each tensor. Tensors with the same cells share a dict."""
    tables: dict[int, dict[Cell, int]] = {}
    for cells in local_cells.values():
        if id(cells) not in tables:
            tables[id(cells)] = {cell: number for number, cell in enumerate(cells)}
    return {fqn: tables[id(cells)] for fqn, cells in local_cells.items()}


class Origin(NamedTuple):
    """The source of a shard: cell `number` of the local tensor, or a `part` of that cell."""

    fqn: str
    number: int
    part: Cell | None


def find_origin(local_cells: CellNumbers, fqn: str, cell: Cell) -> Origin:
    """Return the local cell that contains the shard `cell` of a tensor."""
    cells = local_cells.get(fqn, {})
    if (whole := cells.get(cell)) is not None:
        return Origin(fqn, whole, None)
    for larger, number in cells.items():
        if isinstance(larger, Region) and isinstance(cell, Region) and larger.covers(cell):
            return Origin(fqn, number, cell.relative_to(larger.offset))
        if not (isinstance(larger, ElementRange) and isinstance(cell, ElementRange)):
            continue
        if larger.start <= cell.start and cell.stop <= larger.stop:
            part = ElementRange(cell.start - larger.start, cell.stop - larger.start)
            return Origin(fqn, number, part)
    raise AssertionError(f"the plan stores {fqn}[{cell}] here, but this rank does not hold it")


# --- the tensors of all ranks ----------------------------------------------------------------


def _merge_tensors(
    distinct: Sequence[inventories.DistinctInventory], problems: list[str]
) -> dict[str, _Tensor]:
    views: dict[View, int] = {}
    view_numbers = [
        [views.setdefault(view, len(views)) for view in sent.inventory.views] for sent in distinct
    ]
    entries_by_name: dict[str, list[tuple[int, TensorEntry]]] = {}
    for number, sent in enumerate(distinct):
        for entry in sent.inventory.tensors:
            entries_by_name.setdefault(entry.fqn, []).append((number, entry))
    distinct_views, empty_view = list(views), views.get(Parts(()))
    # There are few combinations of inventories, views and shapes: merge each once.
    merged: dict[tuple[tuple[int, int, Shape], ...], tuple[Shape, Layout] | ValueError] = {}
    layouts: dict[Layout, Layout] = {}
    tensors = {}
    for fqn, entries in entries_by_name.items():
        key = tuple((n, view_numbers[n][entry.view], entry.shape) for n, entry in entries)
        if key not in merged:
            rank_views = [
                RankView(distinct[n].ranks, distinct_views[view], shape) for n, view, shape in key
            ]
            try:
                shape, layout = merge_views(rank_views)
                merged[key] = shape, layouts.setdefault(layout, layout)
            except ValueError as error:
                merged[key] = error
        shape_and_layout = merged[key]
        # The dtype of a rank that holds no part of the tensor does not matter.
        holding = [e for e, (_, view, _) in zip(entries, key, strict=True) if view != empty_view]
        compared = [(distinct[n], entry) for n, entry in holding or entries]
        disagreements = _find_disagreements(compared) if len(entries) > 1 else []
        if isinstance(shape_and_layout, ValueError):
            disagreements.append(str(shape_and_layout))
        elif not disagreements:
            try:
                check_shape(shape_and_layout[0], DTYPES[compared[0][1].dtype].itemsize)
            except ValueError as error:
                disagreements.append(f"{error}: store it in another shape")
        problems += (f"{fqn}: {problem}" for problem in disagreements)
        if not disagreements and not isinstance(shape_and_layout, ValueError):
            sent, entry = compared[0]
            component = sent.inventory.components[entry.component]
            shape, layout = shape_and_layout
            tensors[fqn] = _Tensor(entry.dtype, shape, component, layout)
    return tensors


def _find_disagreements(
    compared: Sequence[tuple[inventories.DistinctInventory, TensorEntry]],
) -> list[str]:
    dtypes = [(entry.dtype, sent.ranks) for sent, entry in compared]
    components = [
        (sent.inventory.components[entry.component], sent.ranks) for sent, entry in compared
    ]
    return [
        f"{label} {difference_text(values)}"
        for label, values in (("dtype", dtypes), ("component", components))
        if len({value for value, _ in values}) > 1
    ]


def _apply_replica_rules(
    tensors: Mapping[str, _Tensor], rules: Mapping[str, ReplicaRule]
) -> tuple[dict[str, _Tensor], frozenset[str]]:
    """Give the lowest rank that has a copy all of it under the rule "rank0".

    Return the tensors, and the names of those with a rule and copies.
    """
    with_copies = frozenset(
        fqn
        for fqn in rules
        if fqn in tensors and any(len(ranks) > 1 for ranks in tensors[fqn].layout.holders)
    )
    layouts: dict[int, Layout] = {}
    ruled = dict(tensors)
    for fqn in sorted(with_copies):
        layout = tensors[fqn].layout
        if rules[fqn] == "rank0":
            if id(layout) not in layouts:
                layouts[id(layout)] = Layout(layout.cut, tuple(r[:1] for r in layout.holders))
            ruled[fqn] = replace(tensors[fqn], layout=layouts[id(layout)])
    return ruled, with_copies


# --- one rank's part -------------------------------------------------------------------------


def _find_cells(layout: Layout, rank: int) -> dict[int, Cell]:
    return {
        number: layout.cell(number)
        for number, ranks in enumerate(layout.holders)
        if ranks[0] <= rank <= ranks[-1] and _contains(ranks, rank)
    }


def _contains(ranks: tuple[int, ...], rank: int) -> bool:
    index = bisect_left(ranks, rank)
    return index < len(ranks) and ranks[index] == rank


def _plan_file(
    catalog: Catalog,
    component_number: int,
    rank: int,
    cells: Sequence[tuple[str, str, Shape, Cell]],
    *,
    is_linkable: bool = False,
) -> FilePlan:
    component = catalog.components[component_number]
    shards = arrange_shards(cells)
    header = header_text(
        shards,
        component=component.name,
        rank=rank,
        world_size=catalog.world_size,
        block_nbytes=BLOCK_NBYTES,
    )
    name, nbytes = filenames.shard_file(component.stem, rank), header.nbytes + shards[-1].span.stop
    batches = plan_batches((shard.span.nbytes for shard in shards), BLOCK_NBYTES)
    return FilePlan(name, header, nbytes, shards, BLOCK_NBYTES, batches, is_linkable)


def plan_batches(sizes: Iterable[int], block_nbytes: int) -> tuple[Batch, ...]:
    """Return the writes of a file with items of these sizes: one large block, or some small ones.

    A write has at most `block_nbytes`. A file without blocks has one empty batch.
    """
    batches = []
    first_block = start = 0
    for parts in _cut_writes(sizes, block_nbytes):
        batches.append(Batch(first_block, start, tuple(parts)))
        first_block += len(parts)
        start += sum(part.stop - part.start for part in parts)
    return tuple(batches) or (Batch(0, 0, ()),)


def _cut_writes(sizes: Iterable[int], block_nbytes: int) -> Iterator[Sequence[BatchPart]]:
    batch: list[BatchPart] = []
    nbytes = 0
    for item, item_nbytes in enumerate(sizes):
        for start in range(0, item_nbytes, block_nbytes):
            stop = min(start + block_nbytes, item_nbytes)
            if batch and nbytes + stop - start > block_nbytes:
                yield batch
                batch, nbytes = [], 0
            part = BatchPart(item, item_nbytes, start, stop)
            if stop - start < SMALL_NBYTES:
                batch.append(part)
                nbytes += stop - start
                continue
            if batch:
                yield batch
                batch, nbytes = [], 0
            yield (part,)
    if batch:
        yield batch
