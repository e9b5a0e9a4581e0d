"""All ranks derive one plan from the same inventories, and it stores everything exactly once."""

from __future__ import annotations

from math import prod
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.geometry import ElementRange, Region, Shape, check_cut
from dist_ckpt.core.planning.plan import TensorEntry
from dist_ckpt.core.planning.save import balance
from dist_ckpt.core.planning.save.save_planner import (
    find_local_cells,
    find_origin,
    find_replica_groups,
    number_cells,
    plan_rank_files,
    plan_save,
    stored_nbytes,
)
from dist_ckpt.core.planning.tensor_views import (
    Mesh,
    MeshPlaced,
    Parts,
    ReplicatedAxis,
    ShardedAxis,
    Whole,
)
from long_mode import examples
from tilings import bodies, elements_of, inventory_of, of_view, random_tiling, randoms, save, shapes

WORLD = 8


@pytest.mark.slow
@examples()
@given(random=randoms, shapes=st.lists(shapes, min_size=1, max_size=4))
def test_every_element_is_stored_exactly_once(random: Random, shapes: list[Shape]) -> None:
    tilings = {f"model.{n}": random_tiling(random, s, WORLD) for n, s in enumerate(shapes)}
    split = random.choice([1, 8, 1 << 30])
    with patch.object(balance, "SPLIT_NBYTES", split), patch.object(balance, "MIN_PART_NBYTES", 8):
        plan, files = save(tilings, WORLD)
    for layout in (*plan.catalog.layouts, *plan.unsplit_layouts.values()):
        assert all(list(ranks) == sorted(set(ranks)) for ranks in layout.holders)
    for fqn, tiling in tilings.items():
        assert plan.catalog.tensors[fqn].shape == tiling.shape
        check_cut(plan.catalog.layouts[plan.catalog.tensors[fqn].layout].cut, tiling.shape)
        stored = [shard for shards in files.values() for shard in shards if shard[0] == fqn]
        elements = sorted(e for _, cell in stored for e in elements_of(cell, tiling.shape))
        assert elements == list(range(prod(tiling.shape)))
        assert stored, "an empty tensor is stored too"


@examples()
@given(random=randoms, shape=shapes)
def test_what_a_rank_holds_is_what_its_state_has(random: Random, shape: Shape) -> None:
    tiling = random_tiling(random, shape, WORLD)
    inventories = [inventory_of({"model.w": tiling}, rank) for rank in range(WORLD)]
    plan = plan_save(bodies(inventories), WORLD)
    for rank, inventory in enumerate(inventories):
        held = find_local_cells(inventory, rank, plan).get("model.w", ())
        expected = tiling.cells.get(rank, ())
        assert [cell.numel for cell in held] == [cell.numel for cell in expected]
        assert [cell for cell in held if cell.numel] == [cell for cell in expected if cell.numel]


@pytest.mark.slow
@examples()
@given(random=randoms, shapes=st.lists(shapes, min_size=1, max_size=4))
def test_a_plan_does_not_depend_on_the_order_of_inventories(
    random: Random, shapes: list[Shape]
) -> None:
    tilings = {f"model.{n}": random_tiling(random, s, WORLD) for n, s in enumerate(shapes)}
    inventories = [inventory_of(tilings, rank) for rank in range(WORLD)]
    plan = plan_save(bodies(inventories), WORLD)
    shuffled = [(i, tuple(random.sample(who, len(who)))) for i, who in bodies(inventories)]
    random.shuffle(shuffled)
    assert plan_save(shuffled, WORLD) == plan
    one_by_one = [(inventory, (rank,)) for rank, inventory in enumerate(inventories)]
    again = plan_save(one_by_one, WORLD)
    assert again == plan
    assert list(again.catalog.tensors) == list(plan.catalog.tensors)
    for rank in range(WORLD):
        assert plan_rank_files(again, rank) == plan_rank_files(plan, rank)


@examples()
@given(random=randoms, shapes=st.lists(shapes, min_size=1, max_size=4))
def test_every_rank_of_a_replica_group_gets_the_same_group(
    random: Random, shapes: list[Shape]
) -> None:
    tilings = {f"model.{n}": random_tiling(random, s, WORLD) for n, s in enumerate(shapes)}
    inventories = [inventory_of(tilings, rank) for rank in range(WORLD)]
    plan = plan_save(bodies(inventories), WORLD)
    groups = {rank: find_replica_groups(plan, rank) for rank in range(WORLD)}
    for rank, mine in groups.items():
        assert [group.ranks for group in mine] == sorted({group.ranks for group in mine})
        for group in mine:
            assert rank in group.ranks
            assert len(group.ranks) > 1
            assert all(group in groups[other] for other in group.ranks)
            held = find_local_cells(inventories[rank], rank, plan)
            for fqn, cell in group.cells:
                assert cell in held[fqn]


@pytest.mark.slow
@examples()
@given(random=randoms, shapes=st.lists(shapes, min_size=1, max_size=6))
def test_the_files_have_the_sizes_that_the_catalog_tells(
    random: Random, shapes: list[Shape]
) -> None:
    tilings = {f"model.{n}": random_tiling(random, s, WORLD) for n, s in enumerate(shapes)}
    plan = plan_save(bodies([inventory_of(tilings, rank) for rank in range(WORLD)]), WORLD)
    assert {
        filenames.shard_file(plan.catalog.components[component].stem, rank): nbytes
        for (component, rank), nbytes in stored_nbytes(plan.catalog).items()
    } == {
        file.name: file.nbytes - file.header.nbytes
        for rank in range(WORLD)
        for file in plan_rank_files(plan, rank)
    }


def test_flat_parts_of_one_tensor_on_all_ranks_are_one_layout() -> None:
    inventories = []
    for rank in range(3):
        part = Parts((ElementRange(4 * rank, 4 * rank + 4),))
        inventories.append(inventory_of({"model.w": of_view(part, [rank], (3, 4))}, rank))
    plan = plan_save(bodies(inventories), 3)
    assert [
        str(item.cell) for r in range(3) for f in plan_rank_files(plan, r) for item in f.items
    ] == ["flat 0:4", "flat 4:8", "flat 8:12"]


def test_a_plan_for_thousands_of_ranks_shares_its_layouts() -> None:
    world = 4096
    mesh = Mesh(("replica", "shard"), (16, 256), tuple(range(world)))
    views = (MeshPlaced(mesh, (ReplicatedAxis(), ShardedAxis(0))), Whole())
    sizes = [(4096, 128), (4096,), (11008, 128)]
    entries = tuple(
        TensorEntry(f"model.{n}.w", "bfloat16", sizes[n % 3], n % 7 == 0, 0) for n in range(900)
    )
    inventory = replace(inventory_of({}, 0), views=views, tensors=entries, per_rank=(("r", None),))
    plan = plan_save([(inventory, tuple(range(world)))], world)
    assert len(plan.catalog.layouts) == 6
    assert sum(stored_nbytes(plan.catalog).values()) == sum(
        2 * prod(entry.shape) for entry in entries
    )
    assert len(plan.catalog.per_rank["r"]) == world
    for rank in (0, 1000, 4095):
        for file in plan_rank_files(plan, rank):
            assert stored_nbytes(plan.catalog)[0, rank] == file.nbytes - file.header.nbytes


def test_what_a_rank_without_parts_says_of_the_dtype_does_not_count() -> None:
    full, none = Parts((Region((0,), (4,)),)), Parts(())
    holding = inventory_of({"model.w": of_view(full, [1], (4,))}, 1)
    lacking = inventory_of({"model.w": of_view(none, [0], (4,))}, 0)
    lacking = replace(lacking, tensors=(replace(lacking.tensors[0], dtype="float64"),))
    plan = plan_save(bodies([lacking, holding]), 2)
    assert plan.catalog.tensors["model.w"].dtype == "float32"
    assert not plan_rank_files(plan, 0)


def test_a_stored_cell_is_found_in_the_larger_cell_that_a_rank_holds() -> None:
    held = number_cells({"w": (Region((0, 0), (1, 1)), Region((1, 0), (5, 4)))})
    found = find_origin(held, "w", Region((2, 1), (3, 2)))
    assert found == ("w", 1, Region((1, 1), (3, 2)))
    assert find_origin(held, "w", Region((1, 0), (5, 4))) == ("w", 1, None)


def test_a_stored_range_is_found_in_the_larger_range_that_a_rank_holds() -> None:
    held = number_cells({"w": (ElementRange(0, 3), ElementRange(3, 20))})
    assert find_origin(held, "w", ElementRange(5, 9)) == ("w", 1, ElementRange(2, 6))


class Compared(Region, frozen=True):
    """A cell that counts how often it is held against another."""

    num = 0

    def __eq__(self, other: object) -> bool:
        Compared.num += 1
        return super().__eq__(other)

    __hash__ = Region.__hash__


def test_what_it_costs_to_find_a_cell_does_not_grow_with_the_cells_of_its_tensor() -> None:
    held = number_cells({"w": tuple(Compared((row, 0), (1, 4)) for row in range(1000))})
    Compared.num = 0
    for row in range(1000):
        assert find_origin(held, "w", Compared((row, 0), (1, 4))).number == row
    assert Compared.num <= 2 * 1000


def test_a_plan_for_a_cell_that_is_not_held_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="does not hold it"):
        find_origin({"w": {}}, "w", ElementRange(0, 1))
