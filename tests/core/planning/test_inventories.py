"""What several ranks say is merged where it can be, and refused by name where it cannot."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.index import Component, Node
from dist_ckpt.core.planning.plan import Inventory, NameList, ReplicaGroup, SavePlan, TensorEntry
from dist_ckpt.core.planning.save.save_planner import (
    find_local_cells,
    find_replica_groups,
    plan_rank_files,
    plan_save,
)
from dist_ckpt.core.planning.tensor_views import Parts, Whole
from tilings import Tiling, inventory_of

WHOLE = Tiling((2, 3), {0: (Whole(), (2, 3))}, {0: (Region.whole((2, 3)),)})


def test_the_lowest_rank_that_holds_a_value_stores_it() -> None:
    here = inventory_of({}, 0, values=("step", "only_on_some"))
    there = inventory_of({}, 0, values=("step",))
    plan = plan_save([(there, (0, 3)), (here, (1, 2))], 4)
    assert plan.catalog.values == {"step": 0, "only_on_some": 1}
    assert plan.value_holders == {"step": (0, 1, 2, 3), "only_on_some": (1, 2)}
    assert find_replica_groups(plan, 0) == (ReplicaGroup((0, 1, 2, 3), (), ("step",)),)
    assert [group.values for group in find_replica_groups(plan, 1)] == [
        ("step",),
        ("only_on_some",),
    ]


def test_each_key_of_a_value_per_rank_is_stored_by_its_lowest_rank() -> None:
    even = inventory_of({}, 0, per_rank=(("loader", ("dp", 0)), ("rng", None)))
    odd = inventory_of({}, 0, per_rank=(("loader", ("dp", 1)), ("rng", None)))
    plan = plan_save([(odd, (1, 3)), (even, (2, 0))], 4)
    assert plan.catalog.per_rank == {
        "loader": ((("dp", 0), 0), (("dp", 1), 1)),
        "rng": ((0, 0), (1, 1), (2, 2), (3, 3)),
    }
    assert find_replica_groups(plan, 3) == (ReplicaGroup((1, 3), (), ("loader",)),)


def test_what_is_a_parameter_on_one_rank_is_one_and_trained_if_it_is_on_any() -> None:
    tilings = dict.fromkeys(("a", "b", "c"), WHOLE)
    first = replace(inventory_of(tilings, 0), parameters=((0, 1, False), (1, 1, True)))
    second = replace(inventory_of(tilings, 0), parameters=((1, 1, False),))
    plan = plan_save([(first, (0,)), (second, (1,))], 2)
    assert plan.catalog.parameters == {"a": False, "b": True}


def test_a_parameter_that_is_tied_on_some_ranks_only_is_one_by_both_names() -> None:
    both = inventory_of({"a": WHOLE, "b": WHOLE}, 0)
    tied = replace(inventory_of({"a": WHOLE}, 0), parameters=((0, 1, True),))
    tied = replace(tied, aliases=(("b", "a"),))
    plan = plan_save([(both, (0,)), (tied, (1,))], 2)
    assert plan.catalog.parameters == {"a": True, "b": True}


def test_keys_are_in_the_order_of_the_ranks_that_store_them() -> None:
    first, second = (inventory_of({}, 0, per_rank=(("loader", key),)) for key in ("b", "a"))
    plan = plan_save([(second, (1,)), (first, (0,))], 2)
    assert plan.catalog.per_rank == {"loader": (("b", 0), ("a", 1))}


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
    merge_aliases = inventory_of({"model.w": WHOLE, "model.tied": WHOLE}, 0)
    plan = plan_save([(tied, (0, 1)), (merge_aliases, (2,))], 3)
    assert plan.catalog.aliases == {}
    assert list(plan.catalog.tensors) == ["model.w", "model.tied"]
    record = plan.catalog.tensors["model.tied"]
    assert plan.catalog.layouts[record.layout].holders == ((0, 1, 2),)
    assert find_local_cells(tied, 0, plan)["model.tied"] == (Region.whole((2, 3)),)


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
    assert [file.name for file in plan_rank_files(plan, 0)] == [
        "model-00000.safetensors",
        "c02-00000.safetensors",
        "c00-00000.safetensors",
        "c01-00000.safetensors",
    ]


def test_too_many_components_are_one() -> None:
    assert len(with_components(*(f"part{n}" for n in range(16))).catalog.components) == 16
    plan = with_components(*(f"part{n}" for n in range(17)))
    assert plan.catalog.components == (Component("state", "state"),)
    assert len(plan_rank_files(plan, 0)[0].items) == 17


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
    assert "model: the key 0 is a number on some ranks and a text on other ranks" in text
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
