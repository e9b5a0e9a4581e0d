"""Replicas are stored once, by all of their holders together, and evenly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.geometry import Cut, Flat, Grid, Region, Regions, Shape
from dist_ckpt.core.planning.plan import SavePlan
from dist_ckpt.core.planning.save.balance import cell_numels
from dist_ckpt.core.planning.save.save_planner import find_replica_groups, plan_save, stored_nbytes
from dist_ckpt.core.planning.tensor_views import (
    Mesh,
    MeshPlaced,
    ReplicatedAxis,
    ShardedAxis,
    Whole,
)
from long_mode import examples
from tilings import Tiling, bodies, inventory_of, of_view


def replicated(shape: Shape, world_size: int) -> Tiling:
    return of_view(Whole(), range(world_size), shape)


def written(plan: SavePlan) -> Counter[int]:
    """Return the bytes of shards that each rank writes."""
    nbytes: Counter[int] = Counter()
    for (_, rank), size in stored_nbytes(plan.catalog).items():
        nbytes[rank] += size
    return nbytes


@examples()
@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=60), world=st.integers(1, 9))
def test_replicas_are_stored_evenly_by_bytes(sizes: list[int], world: int) -> None:
    tilings = {f"model.{n}": replicated((size,), world) for n, size in enumerate(sizes)}
    plan = plan_save(bodies([inventory_of(tilings, rank) for rank in range(world)]), world)
    nbytes = written(plan)
    assert max(nbytes.values()) - min(nbytes[rank] for rank in range(world)) <= 4 * max(sizes)


def test_small_replicas_fill_up_what_a_few_large_ones_leave_uneven() -> None:
    sizes = [9000, 8000, 8000, 7000, *[100] * 160]
    tilings = {f"model.{n}": replicated((size,), 4) for n, size in enumerate(sizes)}
    plan = plan_save(bodies([inventory_of(tilings, rank) for rank in range(4)]), 4)
    assert written(plan) == dict.fromkeys(range(4), sum(sizes))


def test_small_replicas_beside_large_shards_lie_in_a_few_files() -> None:
    mesh = Mesh(("fsdp",), (8,), tuple(range(8)))
    tilings = {"model.w": of_view(MeshPlaced(mesh, (ShardedAxis(0),)), mesh.ranks, (8 * 1024, 10))}
    tilings |= {f"model.{n}": replicated((1,), 8) for n in range(20)}
    plan = plan_save(bodies([inventory_of(tilings, rank) for rank in range(8)]), 8)
    nbytes = written(plan)
    assert sum(size > 1024 * 10 * 4 for size in nbytes.values()) == 2
    assert max(nbytes.values()) - min(nbytes.values()) == 40


def test_ranks_that_store_much_of_their_own_store_fewer_replicas() -> None:
    own = Tiling((100,), {0: (Whole(), (100,))}, {0: (Region.whole((100,)),)})
    tilings = {"model.own": own, **{f"model.{n}": replicated((10,), 3) for n in range(20)}}
    plan = plan_save(bodies([inventory_of(tilings, rank) for rank in range(3)]), 3)
    assert written(plan) == {0: 400, 1: 400, 2: 400}


def test_replicated_shards_are_stored_evenly_whatever_the_number_of_cells() -> None:
    mesh = Mesh(("dp", "tp"), (4, 2), tuple(range(8)))
    tiling = of_view(MeshPlaced(mesh, (ReplicatedAxis(), ShardedAxis(0))), mesh.ranks, (16, 5))
    tilings = {f"model.{n}": tiling for n in range(40)}
    plan = plan_save(bodies([inventory_of(tilings, rank) for rank in range(8)]), 8)
    assert set(written(plan).values()) == {40 * 16 * 5 * 4 // 8}
    assert len(plan.catalog.layouts) == 1


def large(shape: Shape, world_size: int) -> SavePlan:
    tilings = {"model.w": replicated(shape, world_size)}
    return plan_save(bodies([inventory_of(tilings, r) for r in range(world_size)]), world_size)


def test_a_large_replica_is_split_evenly_among_its_holders() -> None:
    plan = large((20000, 1000), 4)
    assert written(plan) == dict.fromkeys(range(4), 20_000_000)
    record = plan.catalog.tensors["model.w"]
    assert plan.catalog.layouts[record.layout].holders == ((0,), (1,), (2,), (3,))
    assert plan.unsplit_layouts["model.w"].holders == ((0, 1, 2, 3),)
    (group,) = find_replica_groups(plan, 2)
    assert group.cells == (("model.w", Region.whole((20000, 1000))),)


def test_a_replica_of_64_mib_is_not_split() -> None:
    plan = large((16, 1 << 20), 4)
    assert plan.unsplit_layouts == {}
    assert list(written(plan).values()) == [64 << 20]


def test_parts_of_a_split_replica_are_not_small() -> None:
    plan = large((20000, 1000), 64)
    assert sorted(written(plan).values()) == [16_000_000] * 5


def test_the_next_split_replica_goes_on_with_the_next_holders() -> None:
    tilings = {f"model.{n}": replicated((20000, 1000), 20) for n in range(4)}
    plan = plan_save(bodies([inventory_of(tilings, rank) for rank in range(20)]), 20)
    assert written(plan) == dict.fromkeys(range(20), 16_000_000)


def test_a_replica_with_few_rows_is_split_along_another_dimension() -> None:
    plan = large((3, 10_000_000), 4)
    (layout,) = plan.catalog.layouts
    assert isinstance(layout.cut, Grid)
    assert layout.cut.cuts[0] == (0, 3)
    assert written(plan) == dict.fromkeys(range(4), 30_000_000)


@pytest.mark.parametrize(
    "cut",
    [
        Grid(((0, 1, 5), (0, 2), (0, 3, 4))),
        Grid(()),
        Grid(((0, 0), (0, 3))),
        Flat((0, 3, 9)),
        Regions((Region((0, 0), (2, 2)), Region((2, 0), (1, 2)))),
    ],
)
def test_the_sizes_of_cells_are_those_of_the_cells(cut: Cut) -> None:
    assert cell_numels(cut) == [cut.cell(number).numel for number in range(cut.num_cells)]
