"""Random ways in which ranks hold tensors, and plans carried out on lists instead of files.

The element of a tensor is its number in row-major order, so that what is moved can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from random import Random

from hypothesis import strategies as st

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.geometry import Cell, ElementRange, Region, Shape, row_major_strides
from dist_ckpt.core.format.index.index import Index, Node, ShardFileRecord
from dist_ckpt.core.planning.load.load_planner import plan_load
from dist_ckpt.core.planning.plan import Inventory, SavePlan, TensorEntry, TensorRequest
from dist_ckpt.core.planning.save.save_planner import (
    find_local_cells,
    plan_rank_files,
    plan_save,
    stored_nbytes,
)
from dist_ckpt.core.planning.tensor_views import (
    AxisPlacement,
    Flattened,
    Mesh,
    MeshPlaced,
    Parts,
    ReplicatedAxis,
    RuleSharded,
    ShardedAxis,
    StridedAxis,
    View,
    Whole,
    compute_cells,
)

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
randoms = st.randoms(use_true_random=False)


def line(*ranks: int) -> Mesh:
    """Return a mesh of one axis."""
    return Mesh(("x",), (len(ranks),), ranks)


@dataclass(frozen=True)
class Tiling:
    """How the ranks hold one tensor: each one's view, the shape of its entry, and its cells."""

    shape: Shape
    views: Mapping[int, tuple[View, Shape]]
    cells: Mapping[int, tuple[Cell, ...]]


def random_tiling(random: Random, shape: Shape, world_size: int) -> Tiling:
    kinds = [placed, placed, whole, flattened, flat_parts, boxes, ruled]
    return random.choice(kinds)(random, shape, world_size)


def some_ranks(random: Random, world_size: int) -> tuple[int, ...]:
    return tuple(random.sample(range(world_size), random.randint(1, world_size)))


def random_mesh(random: Random, world_size: int) -> Mesh:
    while True:
        sizes = tuple(random.randint(1, 4) for _ in range(random.randint(1, 3)))
        if prod(sizes) <= world_size:
            ranks = random.sample(range(world_size), prod(sizes))
            return Mesh(tuple("xyz"[: len(sizes)]), sizes, tuple(ranks))


def random_placement(random: Random, ndim: int) -> AxisPlacement:
    kind = random.randint(0, 3) if ndim else 0
    if kind == 0:
        return ReplicatedAxis()
    if kind == 3:
        return StridedAxis(random.randrange(ndim), random.randint(1, 5))
    return ShardedAxis(random.randrange(ndim))


def of_view(view: View, ranks: Iterable[int], shape: Shape) -> Tiling:
    ranks = tuple(ranks)
    return Tiling(
        shape,
        dict.fromkeys(ranks, (view, shape)),
        {rank: compute_cells(view, rank, shape) for rank in ranks},
    )


def placed(random: Random, shape: Shape, world_size: int) -> Tiling:
    mesh = random_mesh(random, world_size)
    placements = tuple(random_placement(random, len(shape)) for _ in mesh.shape)
    return of_view(MeshPlaced(mesh, placements), mesh.ranks, shape)


def whole(random: Random, shape: Shape, world_size: int) -> Tiling:
    return of_view(Whole(), some_ranks(random, world_size), shape)


def flattened(random: Random, shape: Shape, world_size: int) -> Tiling:
    ranks = some_ranks(random, world_size)
    return of_view(Flattened(Mesh(("dp",), (len(ranks),), ranks)), ranks, shape)


def of_parts(random: Random, shape: Shape, world_size: int, cells: Iterable[Cell]) -> Tiling:
    """Give each cell to some ranks."""
    held: dict[int, list[Cell]] = {}
    for cell in cells:
        for rank in some_ranks(random, world_size)[:3]:
            held.setdefault(rank, []).append(cell)
    for mine in held.values():
        random.shuffle(mine)
    views = {rank: (Parts(tuple(mine)), shape) for rank, mine in held.items()}
    return Tiling(shape, views, {rank: tuple(mine) for rank, mine in held.items()})


def flat_parts(random: Random, shape: Shape, world_size: int) -> Tiling:
    numel = prod(shape)
    inner = random.sample(range(1, numel), random.randint(0, min(6, numel - 1))) if numel else []
    cuts = pairwise([0, *sorted(inner), numel])
    return of_parts(random, shape, world_size, [ElementRange(a, b) for a, b in cuts])


def boxes(random: Random, shape: Shape, world_size: int) -> Tiling:
    regions = [Region.whole(shape)]
    for _ in range(random.randint(0, 6)):
        at = random.randrange(len(regions))
        regions[at : at + 1] = split(random, regions[at])
    return of_parts(random, shape, world_size, regions)


def split(random: Random, region: Region) -> list[Region]:
    dims = [dim for dim, size in enumerate(region.shape) if size > 1]
    if not dims or 0 in region.shape:
        return [region]
    dim = random.choice(dims)
    cut = random.randint(1, region.shape[dim] - 1)
    parts = []
    for start, stop in ((0, cut), (cut, region.shape[dim])):
        offset, shape = list(region.offset), list(region.shape)
        offset[dim] += start
        shape[dim] = stop - start
        parts.append(Region(tuple(offset), tuple(shape)))
    return parts


def ruled(random: Random, shape: Shape, world_size: int) -> Tiling:
    """Uneven local tensors, some of them empty, that line up along the axes of a mesh."""
    mesh = random_mesh(random, world_size)
    axes: list[list[int]] = [[] for _ in shape]
    for axis in range(len(mesh.shape)):
        if shape and random.random() < 0.7:
            axes[random.randrange(len(shape))].append(axis)
    starts = []
    for size, cutting in zip(shape, axes, strict=True):
        count = prod(mesh.shape[axis] for axis in cutting)
        starts.append([0, *sorted(random.randint(0, size) for _ in range(count - 1)), size])
    view = RuleSharded(mesh, tuple(map(tuple, axes)))
    views: dict[int, tuple[View, Shape]] = {}
    cells: dict[int, tuple[Cell, ...]] = {}
    for rank, place in zip(mesh.ranks, product(*map(range, mesh.shape)), strict=True):
        offset, local = [], []
        for cutting, start in zip(axes, starts, strict=True):
            number = 0
            for axis in cutting:
                number = number * mesh.shape[axis] + place[axis]
            offset.append(start[number])
            local.append(start[number + 1] - start[number])
        views[rank] = view, tuple(local)
        cells[rank] = (Region(tuple(offset), tuple(local)),)
    return Tiling(shape, views, cells)


def inventory_of(tilings: Mapping[str, Tiling], rank: int, **more: object) -> Inventory:
    """Return what one rank says of tensors that all are in the component `model`."""
    views: dict[View, int] = {}
    entries = []
    for fqn, tiling in tilings.items():
        if rank in tiling.views:
            view, shape = tiling.views[rank]
            entries.append(
                TensorEntry(fqn, "float32", shape, views.setdefault(view, len(views)), 0)
            )
    fields: dict[str, object] = {
        "mesh": (),
        "components": ("model",),
        "views": tuple(views),
        "tensors": tuple(entries),
        "aliases": (),
        "values": (),
        "per_rank": (),
        "tree": (Node("", "dict", ("model",)),),
        "name_lists": (),
        "numpy": (),
    }
    return Inventory(**{**fields, **more})  # type: ignore[arg-type]


def bodies(inventories: Sequence[Inventory]) -> list[tuple[Inventory, tuple[int, ...]]]:
    """Return each different inventory, one a rank, with the ranks that have it."""
    ranks: dict[Inventory, list[int]] = {}
    for rank, inventory in enumerate(inventories):
        ranks.setdefault(inventory, []).append(rank)
    return [(inventory, tuple(who)) for inventory, who in ranks.items()]


# --- plans carried out -----------------------------------------------------------------------

# What the files hold: by component and rank, then by name and cell, the elements.
Files = Mapping[tuple[int, int], Mapping[tuple[str, Cell], list[int]]]


def elements_of(cell: Cell, shape: Shape) -> list[int]:
    """Return the elements of a cell in the order of its own row-major memory."""
    if isinstance(cell, ElementRange):
        return list(range(cell.start, cell.stop))
    strides = row_major_strides(shape)
    ranges = (range(o, s) for o, s in zip(cell.offset, cell.stop, strict=True))
    return [sum(n * s for n, s in zip(place, strides, strict=True)) for place in product(*ranges)]


def save(tilings: Mapping[str, Tiling], world_size: int) -> tuple[SavePlan, Files]:
    """Plan a save and carry it out; every rank stores from what it holds, and only from that."""
    inventories = [inventory_of(tilings, rank) for rank in range(world_size)]
    plan = plan_save(bodies(inventories), world_size)
    files: dict[tuple[int, int], dict[tuple[str, Cell], list[int]]] = {}
    for rank, inventory in enumerate(inventories):
        held = find_local_cells(inventory, rank, plan)
        for file in plan_rank_files(plan, rank):
            parsed = filenames.parse_shard_file(file.name)
            assert parsed is not None
            assert parsed[1] == rank
            component = [one.stem for one in plan.catalog.components].index(parsed[0])
            stored = files.setdefault((component, rank), {})
            for item in file.items:
                wanted = elements_of(item.cell, item.shape)
                around = [
                    cell
                    for cell in held[item.fqn]
                    if set(wanted) <= set(elements_of(cell, item.shape))
                    and (wanted or cell == item.cell)
                ]
                assert len(around) == 1, (item, held[item.fqn])
                stored[item.fqn, item.cell] = wanted
    return plan, files


def index_of(plan: SavePlan) -> Index:
    """Return an index of a planned save, with the sizes that the plan says."""
    files = tuple(
        ShardFileRecord(component, rank, 4096 + nbytes, 4096, "0" * 32)
        for (component, rank), nbytes in sorted(stored_nbytes(plan.catalog).items())
    )
    return Index("a1-0123456789abcdef", None, plan.catalog, files, (), {}, {}, 0.0)


def load(
    index: Index, files: Files, wanted: Sequence[TensorRequest]
) -> dict[tuple[str, int], list[int]]:
    """Plan a load and carry it out; each element is filled exactly once."""
    shapes = {want.fqn: want.shape for want in wanted}
    targets = {
        (want.fqn, part): [-1] * cell.numel
        for want in wanted
        for part, cell in enumerate(want.cells)
    }
    for file, items in plan_load(index, wanted).items():
        record = index.files[file]
        for item in items:
            overlap = item.overlap
            stored = files[record.component, record.rank][item.tensor, overlap.stored]
            shape = shapes[item.fqn]
            memory = stored[
                overlap.stored_piece.start : overlap.stored_piece.start
                + overlap.stored_piece.region.numel
            ]
            sources = dict(
                zip(elements_of(overlap.stored_piece.region, shape), memory, strict=True)
            )
            target = targets[item.fqn, overlap.requested_number]
            places = {
                e: n for n, e in enumerate(elements_of(overlap.requested_piece.region, shape))
            }
            copied = elements_of(overlap.common, shape)
            if overlap.is_whole:
                assert len(copied) == len(stored) == len(target), f"{item} is not whole"
            for element in copied:
                place = overlap.requested_piece.start + places[element]
                assert target[place] == -1, f"{item} fills element {element} again"
                target[place] = sources[element]
    return targets
