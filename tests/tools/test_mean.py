"""Which tensors are averaged, and what is said of sources that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dist_ckpt.core.format.index.index import Catalog
from dist_ckpt.core.planning.name_selection import parse_selection
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.tools.average.mean import select_tensors
from written import catalog_of, one_cell, random_tensor


def catalog(*, of: Mapping[str, str] | None = None, **fields: Any) -> Catalog:
    """Return a catalog of tensors with these dtypes; but for `step` all are trainable."""
    dtypes = of or {"m.a": "float32", "m.b": "bfloat16", "m.step": "int64"}
    tensors = {
        name: random_tensor((2,), one_cell((2,)), dtype=dtype) for name, dtype in dtypes.items()
    }
    parameters = {name: True for name in dtypes if name != "m.step"}
    return replace(catalog_of(tensors, 1), **{"parameters": parameters, **fields})


def names(*catalogs: Catalog, include: str | None = None, exclude: str | None = None) -> set[str]:
    named = [(f"/{number}", one) for number, one in enumerate(catalogs)]
    return set(select_tensors(named, parse_selection(include, exclude)))


def test_of_the_floating_tensors_the_trainable_are_averaged_unless_others_are_chosen():
    frozen = catalog(parameters={"m.a": True, "m.b": False})
    assert names(frozen, frozen) == {"m.a"}
    assert names(frozen, frozen, include="m") == {"m.a", "m.b"}
    assert names(frozen, frozen, include="m", exclude="*.a") == {"m.b"}
    assert names(catalog(), catalog(), exclude="*.a") == {"m.b"}


def test_a_tied_tensor_is_chosen_by_any_of_its_names_and_must_be_tied_in_all():
    tied = catalog(of={"m.a": "float32"}, aliases={"m.head": "m.a"})
    turned = catalog(of={"m.head": "float32"}, aliases={"m.a": "m.head"})
    assert names(tied, tied, include="m.head") == {"m.a"}
    assert names(turned, tied) == {"m.a"}
    apart = catalog(of={"m.a": "float32", "m.head": "float32"})
    with pytest.raises(IncompatibleError, match=r"/0: m\.head is not tied to m\.a"):
        names(apart, tied)
    assert names(tied, apart) == {"m.a", "m.head"}


def test_all_that_differs_is_told_with_the_source():
    wider = random_tensor((3,), one_cell((3,)))
    first = catalog_of({"m.a": wider, "m.more": wider}, 1)
    first = replace(first, parameters={"m.a": True, "m.more": True})
    second = catalog(of={"m.a": "int32", "m.b": "bfloat16"}, parameters={"m.b": False, "m.a": True})
    with pytest.raises(IncompatibleError) as caught:
        names(first, second, catalog())
    text = str(caught.value)
    for told in (
        "sources differ from the newest, /2. Average",
        "/0: m.a is float32 [3], in the newest float32 [2]",
        "/0: it lacks m.b",
        "/0: m.more does not exist in the newest",
        "/1: m.a is int32 [2], in the newest float32 [2]",
        "/1: m.b is not trainable",
    ):
        assert told in text, text


def test_what_only_the_newest_has_frozen_is_told():
    frozen = catalog(parameters={"m.a": True, "m.b": False})
    with pytest.raises(IncompatibleError, match=r"/0: m\.b is not averaged in the newest"):
        names(catalog(), frozen)


def test_sources_that_do_not_say_what_is_trainable_need_patterns():
    with pytest.raises(ValueError, match=r'/0 does not record .*include="model\.\*"'):
        names(catalog(parameters={}), catalog())
    assert names(catalog(parameters={}), catalog(), include="m") == {"m.a", "m.b"}


def test_integers_alone_have_no_average():
    integers = catalog(of={"m.step": "int64"})
    with pytest.raises(ValueError, match=r"no floating-point tensor.* nothing to average"):
        names(integers, integers)
    packed = catalog(of={"m.w": "float4_e2m1fn_x2"})
    with pytest.raises(ValueError, match="nothing to average"):
        names(packed, packed)


def test_parts_of_compound_tensors_are_refused_by_the_name_of_the_whole():
    dtypes = {"m.a": "float32", "m.q.data": "int8", "m.q.scale": "float32"}
    trained = catalog(of=dtypes, values={"m.q.__class__": 0})
    for options in ({}, {"include": "m"}, {"include": "m.q.scale"}):
        with pytest.raises(
            ValueError, match=r"m\.q is a tensor made of inner tensors.*exclude='m\.q'"
        ):
            names(trained, trained, **options)
    assert names(trained, trained, exclude="m.q") == {"m.a"}
    frozen = replace(trained, parameters={"m.a": True, "m.q.data": False, "m.q.scale": False})
    assert names(frozen, frozen) == {"m.a"}
