"""Whatever layout a tensor was saved in, it loads into any other, element by element."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.geometry import Cell, ElementRange, Flat, Grid, Region, Regions, Shape
from dist_ckpt.core.planning.load.load_planner import find_request_problems, plan_load
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.planning.save import balance
from dist_ckpt.core.planning.save.save_planner import plan_save
from dist_ckpt.core.planning.tensor_views import (
    AxisPlacement,
    Flattened,
    Mesh,
    MeshPlaced,
    Parts,
    ReplicatedAxis,
    ShardedAxis,
    Whole,
    compute_layout,
)
from dist_ckpt.errors import CorruptError
from long_mode import examples
from tilings import (
    Tiling,
    boxes,
    elements_of,
    flat_parts,
    index_of,
    inventory_of,
    load,
    of_view,
    placed,
    random_tiling,
    randoms,
    ruled,
    save,
    shapes,
)

WORLD = 8


def wanted_of(fqn: str, tiling: Tiling, rank: int) -> TensorRequest:
    return TensorRequest(fqn, "float32", tiling.shape, tiling.cells.get(rank, ()))


def assert_loads(saved: Tiling, targets: Tiling) -> None:
    plan, files = save({"model.w": saved}, WORLD)
    index = index_of(plan)
    for rank in range(WORLD):
        want = wanted_of("model.w", targets, rank)
        assert find_request_problems(index.catalog, [want]) == ()
        loaded = load(index, files, [want])
        for part, cell in enumerate(want.cells):
            assert loaded["model.w", part] == elements_of(cell, saved.shape)


@pytest.mark.slow
@examples()
@given(random=randoms, shape=shapes)
def test_any_tiling_loads_into_any_other(random: Random, shape: Shape) -> None:
    assert_loads(random_tiling(random, shape, WORLD), random_tiling(random, shape, WORLD))


@pytest.mark.slow
@examples()
@given(random=randoms, shape=shapes, nbytes=st.integers(1, 64))
def test_replicas_that_are_split_among_their_holders_load_as_well(
    random: Random, shape: Shape, nbytes: int
) -> None:
    with (
        patch.object(balance, "SPLIT_NBYTES", nbytes),
        patch.object(balance, "MIN_PART_NBYTES", random.choice([4, 16])),
    ):
        assert_loads(random_tiling(random, shape, WORLD), random_tiling(random, shape, WORLD))


@pytest.mark.slow
@examples()
@given(random=randoms, shape=st.lists(st.integers(1, 4), min_size=4, max_size=4).map(tuple))
def test_tensors_of_four_dimensions_load_as_well(random: Random, shape: Shape) -> None:
    kinds = [placed, flat_parts, boxes, ruled]
    assert_loads(
        random.choice(kinds)(random, shape, WORLD), random.choice(kinds)(random, shape, WORLD)
    )


@pytest.mark.slow
@examples()
@given(random=randoms, shapes=st.lists(shapes, min_size=1, max_size=5))
def test_several_tensors_load_together(random: Random, shapes: list[Shape]) -> None:
    names = [f"model.{n}" for n in range(len(shapes))]
    saved = {fqn: random_tiling(random, s, WORLD) for fqn, s in zip(names, shapes, strict=True)}
    targets = {fqn: random_tiling(random, s, WORLD) for fqn, s in zip(names, shapes, strict=True)}
    plan, files = save(saved, WORLD)
    for rank in range(WORLD):
        wanted = [wanted_of(fqn, tiling, rank) for fqn, tiling in targets.items()]
        loaded = load(index_of(plan), files, wanted)
        for want in wanted:
            for part, cell in enumerate(want.cells):
                assert loaded[want.fqn, part] == elements_of(cell, want.shape)


def of_cells(shape: Shape, *cells: Cell) -> Tiling:
    """Give one cell to each rank."""
    views = {rank: (Parts((cell,)), shape) for rank, cell in enumerate(cells)}
    return Tiling(shape, views, {rank: (cell,) for rank, cell in enumerate(cells)})


def pinwheel() -> Tiling:
    """Return the tiling of a square that no straight cut goes through."""
    regions = [
        Region((0, 0), (1, 2)),
        Region((0, 2), (2, 1)),
        Region((1, 0), (2, 1)),
        Region((1, 1), (1, 1)),
        Region((2, 1), (1, 2)),
    ]
    return of_cells((3, 3), *regions)


def test_a_pinwheel_of_regions_loads_into_rows_and_columns() -> None:
    mesh = Mesh(("x",), (3,), (0, 1, 2))
    saved = pinwheel()
    plan, _ = save({"model.w": saved}, WORLD)
    assert isinstance(plan.catalog.layouts[0].cut, Regions)
    for dim in (0, 1):
        assert_loads(saved, of_view(MeshPlaced(mesh, (ShardedAxis(dim),)), mesh.ranks, (3, 3)))


def test_a_long_region_is_found_behind_short_ones() -> None:
    shape = (7, 2)
    column = [Region((n, 1), (1, 1)) for n in range(7)]
    saved = of_cells(shape, Region((0, 0), (7, 1)), *column)
    assert_loads(saved, of_cells(shape, Region((6, 0), (1, 2))))


def test_tensors_of_other_shapes_may_share_a_flat_layout() -> None:
    parts = (ElementRange(0, 5), ElementRange(5, 12))
    plan, files = save({f"model.{s[0]}": of_cells(s, *parts) for s in ((2, 6), (3, 4))}, WORLD)
    assert len(plan.catalog.layouts) == 1
    box = Region((0, 1), (2, 3))
    wanted = [TensorRequest(f"model.{s[0]}", "float32", s, (box,)) for s in ((2, 6), (3, 4))]
    loaded = load(index_of(plan), files, wanted)
    assert loaded["model.2", 0] == [1, 2, 3, 7, 8, 9]
    assert loaded["model.3", 0] == [1, 2, 3, 5, 6, 7]


def line(world_size: int) -> Mesh:
    return Mesh(("x",), (world_size,), tuple(range(world_size)))


def one_tensor(view: MeshPlaced | Flattened | Whole, shape: Shape, world_size: int) -> Tiling:
    return of_view(view, range(world_size), shape)


def test_only_the_shards_that_hold_wanted_rows_are_read() -> None:
    plan, _ = save({"model.w": one_tensor(MeshPlaced(line(8), (ShardedAxis(0),)), (64, 4), 8)}, 8)
    want = TensorRequest("model.w", "float32", (64, 4), (Region((20, 1), (5, 2)),))
    reads = plan_load(index_of(plan), [want])
    assert [*reads] == [2, 3]
    assert [str(item.overlap.common) for items in reads.values() for item in items] == [
        "20:24,1:3",
        "24:25,1:3",
    ]


def test_flat_shards_are_found_for_a_column_without_looking_at_all_of_them() -> None:
    plan, _ = save({"model.w": one_tensor(Flattened(line(8)), (16, 4), 8)}, 8)
    want = TensorRequest("model.w", "float32", (16, 4), (Region((4, 1), (3, 1)),))
    reads = plan_load(index_of(plan), [want])
    assert [*reads] == [2, 3]
    assert isinstance(plan.catalog.layouts[0].cut, Flat)


def test_an_alias_reads_the_tensor_that_it_is_tied_to() -> None:
    saved = one_tensor(Whole(), (3,), 2)
    inventory = inventory_of({"model.w": saved}, 0, aliases=(("model.tied", "model.w"),))
    index = index_of(plan_save([(inventory, (0, 1))], 2))
    want = TensorRequest("model.tied", "float32", (3,), (Region((1,), (2,)),))
    assert find_request_problems(index.catalog, [want]) == ()
    ((item,),) = plan_load(index, [want]).values()
    assert (item.fqn, item.tensor) == ("model.tied", "model.w")


def test_nothing_wanted_is_nothing_read() -> None:
    plan, _ = save({"model.w": one_tensor(Whole(), (3, 0), 2)}, 2)
    index = index_of(plan)
    assert plan_load(index, []) == {}
    assert plan_load(index, [TensorRequest("model.w", "float32", (3, 0), ())]) == {}
    empty = (Region((0, 0), (3, 0)), ElementRange(0, 0))
    assert plan_load(index, [TensorRequest("model.w", "float32", (3, 0), empty)]) == {}


def test_all_problems_are_listed_at_once() -> None:
    tilings = {f"model.{name}": one_tensor(Whole(), (4, 4), 1) for name in "abcd"}
    plan, _ = save(tilings, 1)
    wanted = [
        TensorRequest("model.a", "bfloat16", (4, 4), ()),
        TensorRequest("model.b", "float64", (4, 5), ()),
        TensorRequest("model.c", "float32", (4, 4), (Region((2, 0), (3, 4)), ElementRange(0, 17))),
        TensorRequest("model.d", "float32", (4, 4), (Region((2, 0), (2, 4)),)),
        TensorRequest("model.e", "float32", (4, 4), ()),
    ]
    problems = find_request_problems(plan.catalog, wanted)
    assert [problem.partition(":")[0] for problem in problems] == [
        *("model.a", "model.b", "model.b", "model.c", "model.c", "model.e")
    ]
    text = "\n".join(problems)
    assert "saved as float32, requested as bfloat16" in text
    assert "saved with shape [4, 4], requested with [4, 5]" in text
    assert "region [2:5,0:4] outside shape [4, 4]" in text
    assert "elements 0:17 of 16" in text
    assert "the checkpoint has no tensor of this name" in text


def test_an_index_that_lacks_a_needed_file_is_corrupt() -> None:
    plan, _ = save({"model.w": one_tensor(MeshPlaced(line(4), (ShardedAxis(0),)), (8,), 4)}, 4)
    index = index_of(plan)
    broken = replace(index, files=index.files[:2])
    want = TensorRequest("model.w", "float32", (8,), (Region((0,), (8,)),))
    with pytest.raises(CorruptError, match=r"model\.w\[4:6\].* no file of rank 2"):
        plan_load(broken, [want])
    whole = TensorRequest("model.w", "float32", (8,), (Region((0,), (4,)),))
    assert len(plan_load(broken, [whole])) == 2


def test_one_rank_of_many_plans_its_part_of_a_large_checkpoint() -> None:
    saving, loading = 4096, 1024
    view = MeshPlaced(line(saving), (ShardedAxis(0),))
    names = [f"model.{n}.w" for n in range(300)]
    tilings = dict.fromkeys(names, of_view(view, [0], (8192, 16)))
    inventory = inventory_of(tilings, 0)
    index = index_of(plan_save([(inventory, tuple(range(saving)))], saving))
    cells = (Region((8 * 77, 0), (8, 16)),)
    wanted = [TensorRequest(fqn, "float32", (8192, 16), cells) for fqn in names]
    reads = plan_load(index, wanted)
    assert [index.files[file].rank for file in reads] == [308, 309, 310, 311]
    assert all(len(items) == 300 for items in reads.values())
    assert (
        compute_layout(MeshPlaced(line(loading), (ShardedAxis(0),)), (8192, 16)).cell(77)
        == cells[0]
    )


@pytest.mark.parametrize("saving", [ShardedAxis(0), ReplicatedAxis()])
@pytest.mark.parametrize("loading", [ShardedAxis(0), ReplicatedAxis()])
def test_a_cell_that_is_stored_as_it_is_wanted_is_a_whole_match(
    saving: AxisPlacement, loading: AxisPlacement
) -> None:
    tilings = {"model.w": of_view(MeshPlaced(line(2), (saving,)), [0], (4, 2))}
    index = index_of(plan_save([(inventory_of(tilings, 0), (0, 1))], 2))
    cells = compute_layout(MeshPlaced(line(2), (loading,)), (4, 2)).cell(0)
    reads = plan_load(index, [TensorRequest("model.w", "float32", (4, 2), (cells,))])
    found = [item.overlap.is_whole for items in reads.values() for item in items]
    assert all(found) == any(found) == (saving == loading)


def test_cells_of_a_replicated_grid_are_read_from_the_rank_that_stored_them() -> None:
    mesh = Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3))
    view = MeshPlaced(mesh, (ReplicatedAxis(), ShardedAxis(0)))
    plan, files = save({f"model.{n}": one_tensor(view, (4, 2), 4) for n in range(5)}, 4)
    assert isinstance(plan.catalog.layouts[0].cut, Grid)
    index = index_of(plan)
    for n in range(5):
        want = TensorRequest(f"model.{n}", "float32", (4, 2), (Region.whole((4, 2)),))
        for file, items in plan_load(index, [want]).items():
            stored = files[0, index.files[file].rank]
            assert all((item.fqn, item.overlap.stored) in stored for item in items)
