"""What one rank sends is what the others get, and nothing else is built from a message."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from random import Random

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilings import index_of, inventory_of, random_tiling, randoms, save, shapes

from dist_ckpt import index, layout, plan, region, wire
from dist_ckpt.index import Index, Node
from dist_ckpt.load_planner import plan_load
from dist_ckpt.plan import (
    FilePlan,
    Inventory,
    LoadPlan,
    Receipt,
    ReplicaGroup,
    SavePlan,
    Wanted,
    Whole,
)
from dist_ckpt.region import Region, Shape, Span
from dist_ckpt.save_planner import items_of, replica_groups_of


@settings(max_examples=200, deadline=None)
@given(random=randoms, shapes=st.lists(shapes, max_size=3))
def test_inventories_and_plans_survive_the_wire(random: Random, shapes: list[Shape]) -> None:
    tilings = {f"model.{n}": random_tiling(random, s, 6) for n, s in enumerate(shapes)}
    keys = random.choice([None, 3, "a", ("dp", 0, ("x",))])
    inventory = inventory_of(tilings, 0, per_rank=(("rng", keys),))
    assert wire.unpack(wire.pack(inventory), Inventory) == inventory
    save_plan, _ = save(tilings, 6)
    assert wire.unpack(wire.pack(save_plan), SavePlan) == save_plan
    found = index_of(save_plan)
    assert wire.unpack(wire.pack(found), Index) == found
    assert list(wire.unpack(wire.pack(found), Index).catalog.tensors) == list(found.catalog.tensors)
    for file in items_of(save_plan, 0):
        assert wire.unpack(wire.pack(file), FilePlan) == file
    for group in replica_groups_of(save_plan, 0):
        assert wire.unpack(wire.pack(group), ReplicaGroup) == group
    wanted = tuple(
        Wanted(fqn, "float32", t.shape, t.cells.get(0, ())) for fqn, t in tilings.items()
    )
    load_plan = plan_load(found, wanted)
    assert wire.unpack(wire.pack(wanted), tuple) == wanted
    assert wire.unpack(wire.pack(load_plan), LoadPlan) == load_plan


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
)


@given(value=plain)
def test_plain_values_survive_the_wire(value: object) -> None:
    assert wire.unpack(wire.pack(value), object) == value


def test_a_list_comes_back_as_a_tuple() -> None:
    assert wire.unpack(wire.pack([1, [2]]), tuple) == (1, (2,))


def test_every_class_of_plans_and_indexes_is_in_the_table() -> None:
    for module in (region, layout, index, plan):
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if is_dataclass(cls) and not cls.__name__.startswith("_"):
                assert cls in wire._CLASSES, cls


def test_another_class_than_expected_is_refused() -> None:
    with pytest.raises(ValueError, match="holds a Whole where a Receipt was expected"):
        wire.unpack(wire.pack(Whole()), Receipt)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        wire.pack(Span(1, 2))[:-1],
        wire.pack(Span(1, 2)) + b"\x00",
        msgpack.packb(msgpack.ExtType(120, b"\x90")),
        msgpack.packb(msgpack.ExtType(0, b"\x91\x01")),
        msgpack.packb(msgpack.ExtType(0, b"\x01")),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb([5, 3]))),
        b"\x91" * 5000 + b"\x01",
    ],
    ids=["empty", "unused", "short", "long", "code", "fields", "list", "range", "deep"],
)
def test_bytes_that_are_no_message_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (msgpack has its own words for some)
        wire.unpack(data, object)


@pytest.mark.parametrize("value", [{1, 2}, object(), 1j, Random(0)])
def test_other_values_do_not_go_over_the_wire(value: object) -> None:
    with pytest.raises(TypeError, match="does not go over the wire"):
        wire.pack(value)


def test_nested_values_keep_their_classes() -> None:
    value = {"nodes": (Node("a", "dict", ("x", 1)),), "regions": (Region((0,), (2,)),)}
    assert wire.unpack(wire.pack(value), dict) == value
