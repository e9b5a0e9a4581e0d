"""Loads into other dtypes than the saved ones, when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("numpy")

import numpy as np
import torch
from torch import nn

import dist_ckpt as dc
from subclass_tensors import Pair


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a checkpoint whose tensors are of several blocks, and cut, and of other classes."""
    state = {
        "w": torch.randn(700, 900),
        "small": torch.randn(3),
        "count": torch.arange(5, dtype=torch.int32),
        "array": np.arange(4.0),
    }
    dc.save(state, tmp_path / "ck")
    return tmp_path / "ck"


def asking(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {
        "w": torch.zeros(700, 900, dtype=dtype),
        "small": torch.zeros(3, dtype=dtype),
        "count": torch.zeros(5, dtype=torch.int64),
        "array": np.zeros(4, np.float32),
    }


def test_what_is_asked_for_is_cast_and_nothing_else(place: Path) -> None:
    saved: dict[str, Any] = {}
    dc.load(saved, place)
    state = asking()
    dc.load(state, place, cast=True)
    for name in ("w", "small", "count"):
        assert torch.equal(state[name], saved[name].to(state[name].dtype))
    assert np.array_equal(state["array"], saved["array"].astype(np.float32))
    for cast in (None, False, "small", ["small", "array"]):
        state = asking()
        with pytest.raises(dc.IncompatibleError) as caught:
            dc.load(state, place, cast=cast)
        assert "w: saved as float32, the state has bfloat16: values are converted" in str(
            caught.value
        )
        assert ("small: saved" in str(caught.value)) == (not cast)
        assert not state["small"].any()


def test_parts_and_other_layouts_are_cast_as_well(place: Path) -> None:
    """Read past the memory of a tensor, through it, and with others that share it."""
    saved: dict[str, Any] = {}
    dc.load(saved, place)
    half = saved["w"].half()
    apart = torch.zeros(900, 700, dtype=torch.float16).t()
    dc.load({"w": apart}, place, cast="w", include="w")
    assert torch.equal(apart, half)
    part = dc.LocalShard(torch.zeros(100, 450, dtype=torch.float16), (700, 900), (300, 450))
    dc.load({"w": part}, place, cast="w", include="w", check_first=True)
    assert torch.equal(part.tensor, half[300:400, 450:])
    flat = dc.FlatShard(torch.zeros(1000, dtype=torch.float16), (700, 900), 12_345)
    dc.load({"w": flat}, place, cast="w", include="w", verify=False)
    assert torch.equal(flat.tensor, half.flatten()[12_345:13_345])


def test_tensors_that_share_memory_are_cast_into_it(tmp_path: Path) -> None:
    dc.save({"a": torch.arange(4.0), "b": torch.arange(1.0, 4.0)}, tmp_path / "ck")
    base = torch.zeros(4, dtype=torch.float64)
    dc.load({"a": base, "b": base[1:]}, tmp_path / "ck", cast=True)
    assert base.tolist() == [0, 1, 2, 3]


def test_a_meta_module_is_made_in_its_own_dtype(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    dc.save({"model": module}, tmp_path / "ck")
    with torch.device("meta"):
        made = nn.Linear(3, 2).bfloat16()
    dc.load({"model": made}, tmp_path / "ck", cast="model")
    assert torch.equal(made.weight, module.weight.bfloat16())


def test_optimizer_state_is_cast_where_it_is_and_made_as_it_was_saved(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    optim = torch.optim.Adam(module.parameters())
    module(torch.ones(3)).sum().backward()
    optim.step()
    dc.save({"model": module, "optim": optim}, tmp_path / "ck")
    moments = optim.state[module.weight]["exp_avg"]

    fresh = nn.Linear(3, 2).bfloat16()
    new = torch.optim.Adam(fresh.parameters())
    dc.load({"model": fresh, "optim": new}, tmp_path / "ck", cast=True)
    assert torch.equal(new.state[fresh.weight]["exp_avg"], moments)

    fresh(torch.ones(3).bfloat16()).sum().backward()
    new.state.clear()
    new.step()
    with pytest.raises(dc.IncompatibleError, match=r"exp_avg: saved as float32, the state has bfl"):
        dc.load({"model": fresh, "optim": new}, tmp_path / "ck", cast="model")
    dc.load({"model": fresh, "optim": new}, tmp_path / "ck", cast=True)
    assert torch.equal(new.state[fresh.weight]["exp_avg"], moments.bfloat16())


@pytest.mark.parametrize(
    ("saved", "live", "fact"),
    [
        (torch.ones(2, dtype=torch.int64), torch.zeros(2), "only between floating dtypes"),
        (torch.ones(2), torch.zeros(2, dtype=torch.int32), "only between floating dtypes"),
        (torch.ones(2), torch.zeros(2, dtype=torch.float8_e5m2), "only between floating dtypes"),
        (torch.ones(2), torch.zeros(3, dtype=torch.float64), "saved with shape (2,)"),
        (torch.ones(2), 5, "saved as a tensor, the state has a value"),
    ],
)
def test_what_would_lose_something_is_refused_by_name(
    saved: torch.Tensor, live: Any, fact: str, tmp_path: Path
) -> None:
    dc.save({"x": saved}, tmp_path / "ck")
    with pytest.raises(dc.IncompatibleError, match="x: saved") as caught:
        dc.load({"x": live}, tmp_path / "ck", cast=True)
    assert fact in str(caught.value)


@pytest.mark.parametrize(
    ("cast", "error", "message"),
    [
        (3, TypeError, "cast=3: give True or patterns"),
        (torch.bfloat16, TypeError, "the dtype is that of the state"),
        ([3], TypeError, "cast has 3"),
        ("", ValueError, "cast has an empty pattern"),
        ("nothing", dc.IncompatibleError, "cast: 'nothing' matches no name"),
    ],
)
def test_a_cast_that_makes_no_sense_is_refused(
    cast: Any, error: type[Exception], message: str, place: Path
) -> None:
    with pytest.raises(error, match=message):
        dc.load({"w": torch.zeros(700, 900)}, place, include="w", cast=cast)


def test_numbers_that_would_be_infinite_are_said_once_all_is_read(tmp_path: Path) -> None:
    dc.save({"big": torch.tensor([1.0, 1e6]), "inf": torch.tensor([torch.inf])}, tmp_path / "ck")
    state = {name: torch.zeros(n, dtype=torch.float16) for name, n in (("big", 2), ("inf", 1))}
    with pytest.raises(dc.IncompatibleError, match=r"^big: saved values are too large"):
        dc.load(state, tmp_path / "ck", cast=True)
    assert state["inf"].isinf().all()
    dc.load(state, tmp_path / "ck", cast=True, include="inf")


def test_what_a_tensor_is_made_of_is_never_cast(tmp_path: Path) -> None:
    dc.save({"w": Pair(torch.ones(2, 2), torch.ones(2, 2))}, tmp_path / "ck")
    live = Pair(torch.zeros(2, 2).half(), torch.zeros(2, 2).half())
    with pytest.raises(
        dc.IncompatibleError, match="the inner tensors of a subclass are never cast"
    ):
        dc.load({"w": live}, tmp_path / "ck", cast=True)
