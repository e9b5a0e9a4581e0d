"""`diff`: what two checkpoints have otherwise, whoever saved them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.planning.save import save_planner
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.tools.inspect.diff import diff


def state(**other: object) -> dict[str, object]:
    model = {"w": torch.arange(60.0).reshape(12, 5), "b": torch.ones(4)}
    return {"model": {**model, **other}, "epoch": 3}


@pytest.fixture
def first(tmp_path: Path) -> Path:
    dc.save(state(), tmp_path / "a", step=1, config={"lr": 1.0, "net": {"depth": 2}}, kind="small")
    return tmp_path / "a"


def test_the_same_for_other_ranks_is_the_same(first: Path, tmp_path: Path) -> None:
    dc.reshard(first, tmp_path / "wide", world_size=5)
    found = diff(first, tmp_path / "wide", values=True)
    assert found.same
    assert (found.values, found.objects) == ((), {})


def test_each_kind_of_difference_is_named(first: Path, tmp_path: Path) -> None:
    model = {"w": torch.ones(12, 5).half(), "new": torch.ones(1)}
    dc.save({"model": model, "epoch": 4}, tmp_path / "b", config={"lr": 2.0, "net": {"depth": 2}})
    found = diff(first, tmp_path / "b", values=True)
    assert not found.same
    assert found.config == {"lr": ("1.0", "2.0"), "kind": ("'small'", "None")}
    assert (found.removed, found.added) == (("model.b",), ("model.new",))
    assert found.changed == {"model.w": ("float32 [12, 5]", "float16 [12, 5]")}
    assert found.objects == {"epoch": ("3", "4")}
    assert diff(first, tmp_path / "b").values is None


def test_values_that_are_no_tensors_are_selected_by_name(first: Path, tmp_path: Path) -> None:
    dc.save({**state(w=torch.ones(12, 5)), "epoch": 4}, tmp_path / "b")
    found = diff(first, tmp_path / "b", values=True, include="epoch")
    assert (found.objects, found.values) == ({"epoch": ("3", "4")}, ())
    found = diff(first, tmp_path / "b", values=True, exclude="epoch")
    assert found.objects == {}
    with pytest.raises(ValueError, match="'epochs' matches no name"):
        diff(first, tmp_path / "b", values=True, include="epochs")


@pytest.mark.parametrize(
    ("a", "b", "differences"),
    [
        ([1, 2], (1, 2), {"x": ("[1, 2]", "(1, 2)")}),
        ([], (), {"x": ("[]", "()")}),
        ([[1], 2], [(1,), 2], {"x": ("[[1], 2]", "[(1,), 2]")}),
        ({1: 2}, {"1": 2}, {"x.1": ("nothing", "2"), "x[1]": ("2", "nothing")}),
        (True, 1, {"x": ("True", "1")}),
        (1, 1.0, {"x": ("1", "1.0")}),
        (0.0, -0.0, {"x": ("0.0", "-0.0")}),
        ({1}, frozenset({1}), {"x": ("{1}", "frozenset({1})")}),
        (math.nan, math.nan, {}),
        ([math.nan], [math.nan], {}),
        ({"a": 1, "b": {1, 9}}, {"b": {9, 1}, "a": 1}, {}),
    ],
)
def test_plain_values_differ_if_what_is_stored_differs(
    a: object, b: object, differences: object, tmp_path: Path
) -> None:
    dc.save({"x": a}, tmp_path / "a")
    dc.save({"x": b}, tmp_path / "b")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.objects == differences
    assert found.same == (not differences)


def test_what_changed_is_told_in_the_order_of_the_first(tmp_path: Path) -> None:
    names = [f"w{number}" for number in range(30)]
    dc.save({name: torch.ones(1) for name in names}, tmp_path / "a")
    dc.save({name: torch.ones(2) for name in reversed(names)}, tmp_path / "b")
    assert [*diff(tmp_path / "a", tmp_path / "b").changed] == names


def test_values_are_told_with_how_many_and_how_far(first: Path, tmp_path: Path) -> None:
    other = torch.arange(60.0).reshape(12, 5)
    other[3, 2] += 0.5
    other[11, 4] -= 2
    dc.save(state(w=other), tmp_path / "b", config={"lr": 1.0, "net": {"depth": 2}}, kind="small")
    dc.reshard(tmp_path / "b", tmp_path / "wide", world_size=3)
    assert diff(first, tmp_path / "wide").same
    found = diff(first, tmp_path / "wide", values=True)
    (one,) = found.values or ()
    assert (one.name, one.num_differing, one.numel, one.max_difference) == ("model.w", 2, 60, 2.0)
    (one,) = diff(first, tmp_path / "wide", values=True, atol=1.0).values or ()
    assert one.num_differing == 1
    assert diff(first, tmp_path / "wide", values=True, rtol=0.1).same
    assert diff(first, tmp_path / "wide", values=True, exclude="*.w").same


def test_digests_are_compared_by_default_and_nothing_is_read(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**state(w=torch.ones(12, 5)), "epoch": 4}
    dc.save(other, tmp_path / "b", step=1, config={"lr": 1.0, "net": {"depth": 2}}, kind="small")
    monkeypatch.setattr(BlockReader, "read", None)
    found = diff(first, tmp_path / "b")
    assert (found.digests, found.not_compared, found.num_tensors) == (("model.w",), (), 2)
    assert (found.objects, found.values, found.same) == ({"epoch": ("3", "4")}, None, False)
    assert diff(first, tmp_path / "b", exclude=["*.w", "epoch"]).same
    assert diff(first, first).same


@pytest.mark.parametrize("block_nbytes", [64, 1 << 20])
def test_what_digests_cannot_compare_is_counted(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_nbytes: int
) -> None:
    dc.reshard(first, tmp_path / "wide", world_size=3)
    found = diff(first, tmp_path / "wide")
    assert (found.not_compared, found.num_tensors) == (("model.w", "model.b"), 2)
    monkeypatch.setattr(save_planner, "BLOCK_NBYTES", block_nbytes)
    other = {**state(), "new": torch.ones(1)}  # the plan of the first save is cached
    dc.save(other, tmp_path / "b", config={"lr": 1.0, "net": {"depth": 2}}, kind="small")
    found = diff(first, tmp_path / "b", exclude="new")
    assert found.not_compared == (("model.w",) if block_nbytes == 64 else ())
    assert found.same
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    found = diff(tmp_path / "w.safetensors", tmp_path / "w.safetensors")
    assert (found.not_compared, found.digests) == (("model.w",), ())


def test_tied_names_and_empty_tensors_have_digests_too(tmp_path: Path) -> None:
    shared = torch.ones(3)
    dc.save({"m": {"a": shared, "b": shared, "e": torch.ones(0, 2)}}, tmp_path / "tied")
    loose = {"a": shared.clone(), "b": torch.zeros(3), "e": torch.ones(0, 2)}
    dc.save({"m": loose}, tmp_path / "loose")
    found = diff(tmp_path / "tied", tmp_path / "loose")
    assert (found.digests, found.not_compared, found.num_tensors) == (("m.b",), (), 3)


def test_nan_is_like_nan_and_infinity_like_itself_alone(tmp_path: Path) -> None:
    values = {"a": [math.nan, 1.0, math.inf, 0.0], "b": [math.nan, 1.0, 7.0, -0.0]}
    for name, each in values.items():
        dc.save({"w": torch.tensor(each)}, tmp_path / name)
    assert diff(tmp_path / "a", tmp_path / "a", values=True).same
    (one,) = diff(tmp_path / "a", tmp_path / "b", values=True).values or ()
    assert (one.num_differing, one.max_difference) == (2, None)  # bit for bit: -0.0 too
    for a, b in (("a", "b"), ("b", "a")):
        (one,) = diff(tmp_path / a, tmp_path / b, values=True, rtol=1.0, atol=1e9).values or ()
        assert one.num_differing == 1


def test_tied_names_are_compared_with_what_they_are_in_the_other(tmp_path: Path) -> None:
    shared = torch.ones(3)
    dc.save({"m": {"a": shared, "b": shared}}, tmp_path / "tied")
    dc.save({"m": {"a": shared.clone(), "b": torch.zeros(3)}}, tmp_path / "loose")
    for a, b in (("tied", "loose"), ("loose", "tied")):
        found = diff(tmp_path / a, tmp_path / b, values=True).values or ()
        assert [one.name for one in found] == ["m.b"]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
def test_every_dtype_is_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    dc.save({"w": torch.zeros(5).to(dtype)}, tmp_path / "a")
    dc.save({"w": torch.tensor([0, 0, 1, 0, 0]).to(dtype)}, tmp_path / "b")
    (one,) = diff(tmp_path / "a", tmp_path / "b", values=True).values or ()
    assert (one.num_differing, one.max_difference) == (1, 1.0)


def test_large_integers_that_are_one_apart_differ(tmp_path: Path) -> None:
    dc.save({"w": torch.tensor([2**62])}, tmp_path / "a")
    dc.save({"w": torch.tensor([2**62 + 1])}, tmp_path / "b")
    assert not diff(tmp_path / "a", tmp_path / "b", values=True).same


@pytest.mark.parametrize(
    "options",
    [
        {"rtol": 1.0},
        *({"values": True, "atol": given} for given in (-1.0, "1", True, float("nan"))),
        *({"values": given} for given in (1, "yes")),
    ],
)
def test_a_tolerance_that_makes_no_sense_is_refused(first: Path, options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match="give"):
        diff(first, first, **options)
