"""What one rank sends is what the others get, and nothing else is built from a message."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt.format.geometry import Elements, Region, Shape
from dist_ckpt.format.index import Node
from dist_ckpt.planning import plan_msgpack
from dist_ckpt.planning.plan import Inventory, Placement, Receipt, TensorEntry, View, Whole
from tilings import inventory_of, random_tiling, randoms, shapes


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(random=randoms, shapes=st.lists(shapes, max_size=3))
def test_inventories_survive_the_wire(random: Random, shapes: list[Shape]) -> None:
    tilings = {f"model.{n}": random_tiling(random, s, 6) for n, s in enumerate(shapes)}
    keys = random.choice([None, 3, "a", ("dp", 0, ("x",))])
    inventory = inventory_of(tilings, 0, per_rank=(("rng", keys),))
    assert plan_msgpack.unpack(plan_msgpack.pack(inventory), Inventory) == inventory


def test_many_tensors_survive_the_wire_in_columns() -> None:
    tensors = tuple(
        TensorEntry(f"model.{n}", "float32", (n, 2), n % 3, 0) for n in range(plan_msgpack._MANY)
    )
    inventory = replace(inventory_of({}, 0), tensors=tensors, values=("a",) * 20)
    data = plan_msgpack.pack(inventory)
    assert plan_msgpack.unpack(data, Inventory) == inventory
    apart = sum(len(plan_msgpack.pack(tensor)) for tensor in tensors)
    assert len(data) < len(plan_msgpack.pack(replace(inventory, tensors=()))) + apart


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@given(value=plain)
def test_plain_values_survive_the_wire(value: object) -> None:
    assert plan_msgpack.unpack(plan_msgpack.pack(value), object) == value


def test_a_list_comes_back_as_a_tuple() -> None:
    assert plan_msgpack.unpack(plan_msgpack.pack([1, [2]]), tuple) == (1, (2,))


def test_every_way_to_hold_a_tensor_is_in_the_table() -> None:
    assert {*get_args(View), *get_args(Placement)} <= set(plan_msgpack._CLASSES)


def test_another_class_than_expected_is_refused() -> None:
    with pytest.raises(ValueError, match="holds a Whole where a Receipt was expected"):
        plan_msgpack.unpack(plan_msgpack.pack(Whole()), Receipt)


def columns(*values: object) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(plan_msgpack._COLUMNS, msgpack.packb(values))))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        plan_msgpack.pack(Elements(1, 2))[:-1],
        plan_msgpack.pack(Elements(1, 2)) + b"\x00",
        msgpack.packb(msgpack.ExtType(120, b"\x90")),
        msgpack.packb(msgpack.ExtType(0, b"\x91\x01")),
        msgpack.packb(msgpack.ExtType(0, b"\x01")),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb([5, 3]))),
        b"\x91" * 5000 + b"\x01",
        columns(),
        columns(99, (1,)),
        columns((0,), (1,)),
        columns(1, (0, 1), (2,)),
        columns(1, 0, 1),
        columns(1, (5,), (3,)),
    ],
    ids=[
        *("empty", "unused", "short", "long", "code", "fields", "list", "range", "deep"),
        *("no class", "strange class", "odd class", "uneven", "scalars", "values"),
    ],
)
def test_bytes_that_are_no_message_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (msgpack has its own words for some)
        plan_msgpack.unpack(data, object)


@pytest.mark.parametrize("value", [{1, 2}, object(), 1j, Random(0)])
def test_other_values_do_not_go_over_the_wire(value: object) -> None:
    with pytest.raises(TypeError, match="does not go over the wire"):
        plan_msgpack.pack(value)


def test_nested_values_keep_their_classes() -> None:
    value = {"nodes": (Node("a", "dict", ("x", 1)),), "regions": (Region((0,), (2,)),)}
    assert plan_msgpack.unpack(plan_msgpack.pack(value), dict) == value
