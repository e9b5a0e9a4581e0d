"""All ranks derive one plan from the same inventories, and it stores everything exactly once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilings import (
    Tiling,
    bodies,
    elements_of,
    inventory_of,
    of_view,
    random_tiling,
    randoms,
    save,
    shapes,
)

from dist_ckpt import balance
from dist_ckpt.index import Component, Node
from dist_ckpt.layout import Grid, check_cut
from dist_ckpt.plan import (
    Inventory,
    Mesh,
    NameList,
    Parts,
    Placed,
    Replicate,
    ReplicaGroup,
    SavePlan,
    Shard,
    TensorEntry,
    Whole,
)
from dist_ckpt.region import Elements, Region, Shape
from dist_ckpt.save_planner import (
    held_cells,
    items_of,
    plan_save,
    replica_groups_of,
    stored_nbytes,
)

WORLD = 8
WHOLE = Tiling((2, 3), {0: (Whole(), (2, 3))}, {0: (Region.whole((2, 3)),)})


def line(world_size: int) -> Mesh:
    return Mesh(("dp",), (world_size,), tuple(range(world_size)))


def replicated(shape: Shape, world_size: int) -> Tiling:
    return of_view(Whole(), range(world_size), shape)


def written(plan: SavePlan) -> Counter[int]:
    """Return the bytes of shards that each rank writes."""
    nbytes: Counter[int] = Counter()
    for (_, rank), size in stored_nbytes(plan.catalog).items():
        nbytes[rank] += size
    return nbytes


@settings(max_examples=600, deadline=None)
@given(random=randoms, shapes=st.lists(shapes, min_size=1, max_size=4))
def test_every_element_is_stored_exactly_once(random: Random, shapes: list[Shape]) -> None:
    tilings = {f"model.{n}": random_tiling(random, s, WORLD) for n, s in enumerate(shapes)}
    split = random.choice([1, 8, 1 << 30])
    with (
        patch.object(balance, "SPLIT_NBYTES", split),
        patch.object(balance, "MIN_PART_NBYTES", 8),
    ):
        plan, files = save(tilings, WORLD)
    for layout in (*plan.catalog.layouts, *plan.held.values()):
        assert all(list(ranks) == sorted(set(ranks)) for ranks in layout.holders)
    for fqn, tiling in tilings.items():
        assert plan.catalog.tensors[fqn].shape == tiling.shape
        check_cut(plan.catalog.layouts[plan.catalog.tensors[fqn].layout].cut, tiling.shape)
        stored = [shard for shards in files.values() for shard in shards if shard[0] == fqn]
        elements = sorted(e for _, cell in stored for e in elements_of(cell, tiling.shape))
        assert elements == list(range(prod(tiling.shape)))
        assert stored, "an empty tensor is stored too"


@settings(max_examples=300, deadline=None)
@given(random=randoms, shape=shapes)
def test_what_a_rank_holds_is_what_its_state_has(random: Random, shape: Shape) -> None:
    tiling = random_tiling(random, shape, WORLD)
    inventories = [inventory_of({"model.w": tiling}, rank) for rank in range(WORLD)]
    plan = plan_save(bodies(inventories), WORLD)
    for rank, inventory in enumerate(inventories):
        held = held_cells(inventory, rank, plan).get("model.w", ())
        expected = tiling.cells.get(rank, ())
        assert [cell.numel for cell in held] == [cell.numel for cell in expected]
        assert [cell for cell in held if cell.numel] == [cell for cell in expected if cell.numel]


@settings(max_examples=200, deadline=None)
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
        assert items_of(again, rank) == items_of(plan, rank)


@settings(max_examples=200, deadline=None)
@given(random=randoms, shapes=st.lists(shapes, min_size=1, max_size=4))
def test_every_rank_of_a_replica_group_gets_the_same_group(
    random: Random, shapes: list[Shape]
) -> None:
    tilings = {f"model.{n}": random_tiling(random, s, WORLD) for n, s in enumerate(shapes)}
    inventories = [inventory_of(tilings, rank) for rank in range(WORLD)]
    plan = plan_save(bodies(inventories), WORLD)
    groups = {rank: replica_groups_of(plan, rank) for rank in range(WORLD)}
    for rank, mine in groups.items():
        assert [group.ranks for group in mine] == sorted({group.ranks for group in mine})
        for group in mine:
            assert rank in group.ranks
            assert len(group.ranks) > 1
            assert all(group in groups[other] for other in group.ranks)
            held = held_cells(inventories[rank], rank, plan)
            for fqn, cell in group.cells:
                assert cell in held[fqn]


@settings(max_examples=200, deadline=None)
@given(random=randoms, shapes=st.lists(shapes, min_size=1, max_size=6))
def test_the_files_have_the_sizes_that_the_catalog_tells(
    random: Random, shapes: list[Shape]
) -> None:
    tilings = {f"model.{n}": random_tiling(random, s, WORLD) for n, s in enumerate(shapes)}
    plan = plan_save(bodies([inventory_of(tilings, rank) for rank in range(WORLD)]), WORLD)
    files = [file for rank in range(WORLD) for file in items_of(plan, rank)]
    assert stored_nbytes(plan.catalog) == {
        (file.component, file.rank): file.nbytes - file.header_nbytes for file in files
    }


# --- balance ---------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=60), world=st.integers(1, 9))
def test_replicas_are_stored_evenly_by_bytes(sizes: list[int], world: int) -> None:
    tilings = {f"model.{n}": replicated((size,), world) for n, size in enumerate(sizes)}
    plan = plan_save(bodies([inventory_of(tilings, rank) for rank in range(world)]), world)
    nbytes = written(plan)
    assert max(nbytes.values()) - min(nbytes[rank] for rank in range(world)) <= 4 * max(sizes)


def test_ranks_that_store_much_of_their_own_store_fewer_replicas() -> None:
    own = Tiling((100,), {0: (Whole(), (100,))}, {0: (Region.whole((100,)),)})
    tilings = {"model.own": own, **{f"model.{n}": replicated((10,), 3) for n in range(20)}}
    plan = plan_save(bodies([inventory_of(tilings, rank) for rank in range(3)]), 3)
    assert written(plan) == {0: 400, 1: 400, 2: 400}


def test_replicated_shards_are_stored_evenly_whatever_the_number_of_cells() -> None:
    mesh = Mesh(("dp", "tp"), (4, 2), tuple(range(8)))
    tiling = of_view(Placed(mesh, (Replicate(), Shard(0))), mesh.ranks, (16, 5))
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
    assert plan.held["model.w"].holders == ((0, 1, 2, 3),)
    (group,) = replica_groups_of(plan, 2)
    assert group.cells == (("model.w", Region.whole((20000, 1000))),)


def test_a_replica_of_64_mib_is_not_split() -> None:
    plan = large((16, 1 << 20), 4)
    assert plan.held == {}
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


def test_a_plan_for_thousands_of_ranks_shares_its_layouts() -> None:
    world = 4096
    mesh = Mesh(("replica", "shard"), (16, 256), tuple(range(world)))
    views = (Placed(mesh, (Replicate(), Shard(0))), Whole())
    sizes = [(4096, 128), (4096,), (11008, 128)]
    entries = tuple(
        TensorEntry(f"model.{n}.w", "bfloat16", sizes[n % 3], n % 7 == 0, 0) for n in range(900)
    )
    inventory = replace(inventory_of({}, 0), views=views, tensors=entries, per_rank=(("r", None),))
    plan = plan_save([(inventory, tuple(range(world)))], world)
    assert len(plan.catalog.layouts) == 6
    assert sum(written(plan).values()) == sum(2 * prod(entry.shape) for entry in entries)
    assert len(plan.catalog.per_rank["r"]) == world
    for rank in (0, 1000, 4095):
        for file in items_of(plan, rank):
            assert stored_nbytes(plan.catalog)[0, rank] == file.nbytes - file.header_nbytes


# --- what is not a tensor --------------------------------------------------------------------


def test_the_lowest_rank_that_holds_a_value_stores_it() -> None:
    here = inventory_of({}, 0, values=("step", "only_on_some"))
    there = inventory_of({}, 0, values=("step",))
    plan = plan_save([(there, (0, 3)), (here, (1, 2))], 4)
    assert plan.catalog.values == {"step": 0, "only_on_some": 1}
    assert plan.value_holders == {"step": (0, 1, 2, 3), "only_on_some": (1, 2)}
    assert replica_groups_of(plan, 0) == (ReplicaGroup((0, 1, 2, 3), (), ("step",)),)
    assert [group.values for group in replica_groups_of(plan, 1)] == [("step",), ("only_on_some",)]


def test_each_key_of_a_value_per_rank_is_stored_by_its_lowest_rank() -> None:
    even = inventory_of({}, 0, per_rank=(("loader", ("dp", 0)), ("rng", None)))
    odd = inventory_of({}, 0, per_rank=(("loader", ("dp", 1)), ("rng", None)))
    plan = plan_save([(odd, (1, 3)), (even, (2, 0))], 4)
    assert plan.catalog.per_rank == {
        "loader": ((("dp", 0), 0), (("dp", 1), 1)),
        "rng": ((0, 0), (1, 1), (2, 2), (3, 3)),
    }
    assert replica_groups_of(plan, 3) == (ReplicaGroup((1, 3), (), ("loader",)),)


def test_containers_and_lists_of_names_get_what_all_ranks_have() -> None:
    def stage(layer: str, names: tuple[str, ...]) -> Inventory:
        return inventory_of(
            {},
            0,
            tree=(Node("", "dict", ("model", "optim")), Node("model", "dict", (layer,))),
            name_lists=(NameList("optim.param_groups.0.params", names),),
            numpy=(f"model.{layer}",),
        )

    plan = plan_save([(stage("b", ("b", "c")), (1,)), (stage("a", ("a", "b")), (0,))], 2)
    assert plan.tree == (Node("", "dict", ("model", "optim")), Node("model", "dict", ("a", "b")))
    assert plan.name_lists == (NameList("optim.param_groups.0.params", ("a", "b", "c")),)
    assert plan.numpy == ("model.a", "model.b")


def test_the_mesh_is_that_of_the_lowest_rank_that_has_one() -> None:
    none, some = inventory_of({}, 0), inventory_of({}, 0, mesh=(("dp", 2),))
    assert plan_save([(none, (0,)), (some, (1,))], 2).catalog.mesh == (("dp", 2),)


# --- ties ------------------------------------------------------------------------------------

TIED = (("model.tied", "model.w"),)


def test_tied_tensors_are_stored_once() -> None:
    inventory = inventory_of({"model.w": WHOLE}, 0, aliases=TIED)
    plan = plan_save([(inventory, (0,))], 1)
    assert dict(plan.catalog.aliases) == {"model.tied": "model.w"}
    assert list(plan.catalog.tensors) == ["model.w"]


def test_what_only_some_ranks_tie_is_stored_by_itself() -> None:
    tied = inventory_of({"model.w": WHOLE}, 0, aliases=TIED)
    untied = inventory_of({"model.w": WHOLE, "model.tied": WHOLE}, 0)
    plan = plan_save([(tied, (0, 1)), (untied, (2,))], 3)
    assert plan.catalog.aliases == {}
    assert list(plan.catalog.tensors) == ["model.w", "model.tied"]
    record = plan.catalog.tensors["model.tied"]
    assert plan.catalog.layouts[record.layout].holders == ((0, 1, 2),)
    assert held_cells(tied, 0, plan)["model.tied"] == (Region.whole((2, 3)),)


def test_ranks_that_tie_the_other_way_round_store_both() -> None:
    one = inventory_of({"model.w": WHOLE}, 0, aliases=TIED)
    other = inventory_of({"model.tied": WHOLE}, 0, aliases=(("model.w", "model.tied"),))
    plan = plan_save([(one, (0,)), (other, (1,))], 2)
    assert plan.catalog.aliases == {}
    assert sorted(plan.catalog.tensors) == ["model.tied", "model.w"]
    for record in plan.catalog.tensors.values():
        assert plan.catalog.layouts[record.layout].holders == ((0, 1),)


# --- components ------------------------------------------------------------------------------


def with_components(*names: str) -> SavePlan:
    entries = tuple(TensorEntry(f"{name}.w", "float32", (2,), 0, n) for n, name in enumerate(names))
    inventory = replace(inventory_of({}, 0), components=names, views=(Whole(),), tensors=entries)
    return plan_save([(inventory, (0,))], 1)


def test_files_are_called_after_components_where_the_name_allows_it() -> None:
    plan = with_components("model", "Ärger", "c00", "a/b")
    assert plan.catalog.components == (
        Component("model", "model"),
        Component("Ärger", "c02"),
        Component("c00", "c00"),
        Component("a/b", "c01"),
    )
    assert [file.name for file in items_of(plan, 0)] == [
        "model-00000.safetensors",
        "c02-00000.safetensors",
        "c00-00000.safetensors",
        "c01-00000.safetensors",
    ]


def test_too_many_components_are_one() -> None:
    assert len(with_components(*(f"part{n}" for n in range(16))).catalog.components) == 16
    plan = with_components(*(f"part{n}" for n in range(17)))
    assert plan.catalog.components == (Component("state", "state"),)
    assert len(items_of(plan, 0)[0].items) == 17


# --- disagreements ---------------------------------------------------------------------------


def test_every_problem_is_listed_with_its_ranks() -> None:
    half = Tiling((4,), {0: (Parts((Region((0,), (2,)),)), (4,))}, {})
    low = inventory_of(
        {"model.a": WHOLE, "model.b": WHOLE, "model.c": half},
        0,
        values=("model.d", "extra"),
        tree=(Node("", "dict", ("model",)), Node("model", "list", (0,))),
    )
    entries = {entry.fqn: entry for entry in low.tensors}
    high = replace(
        low,
        tensors=(
            replace(entries["model.a"], shape=(2, 4)),
            replace(entries["model.b"], dtype="bfloat16"),
            replace(entries["model.c"], fqn="model.d", view=0),
        ),
        values=(),
        per_rank=(("extra", None),),
        tree=(Node("", "dict", ("model",)), Node("model", "dict", ("0",))),
    )
    with pytest.raises(ValueError, match="do not make one checkpoint") as raised:
        plan_save([(high, (3, 1)), (low, (0, 2))], 4)
    text = str(raised.value)
    assert "model.a: shape (2, 3) on ranks 0, 2, (2, 4) on ranks 1, 3" in text
    assert "model.b: dtype float32 on ranks 0, 2, bfloat16 on ranks 1, 3" in text
    assert "model.c: regions leave a hole at [2]" in text
    assert "model.d: a tensor on ranks 1, 3, a value on ranks 0, 2" in text
    assert "extra: a value on ranks 0, 2, a value per rank on ranks 1, 3" in text
    assert "model: list on ranks 0, 2, dict on ranks 1, 3" in text
    assert "model: the key 0 is a number on some ranks and a text on others" in text
    assert "dc.PerRank" in text


def test_a_rank_without_an_inventory_is_an_error() -> None:
    with pytest.raises(ValueError, match="inventories of ranks 0, 2 for a world of 3"):
        plan_save([(inventory_of({}, 0), (0, 2))], 3)
    with pytest.raises(ValueError, match="inventories of ranks 0-1"):
        plan_save([(inventory_of({}, 0), (0, 1)), (inventory_of({}, 0), (1,))], 2)


def test_different_components_for_one_tensor_are_an_error() -> None:
    one = inventory_of({"model.w": WHOLE}, 0)
    other = replace(one, components=("state",))
    with pytest.raises(ValueError, match=r"component model on rank 0, state on rank 1"):
        plan_save([(one, (0,)), (other, (1,))], 2)


def test_flat_parts_of_one_tensor_on_all_ranks_are_one_layout() -> None:
    inventories = []
    for rank in range(3):
        part = Parts((Elements(4 * rank, 4 * rank + 4),))
        inventories.append(inventory_of({"model.w": of_view(part, [rank], (3, 4))}, rank))
    plan = plan_save(bodies(inventories), 3)
    assert [str(item.cell) for r in range(3) for f in items_of(plan, r) for item in f.items] == [
        "flat 0:4",
        "flat 4:8",
        "flat 8:12",
    ]
