"""State that only has its parameter's shape is not cut with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dist_ckpt as dc
from dist_ckpt.errors import IncompatibleError
from preconditioned import Preconditioned
from ranks import run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(3)]

SQUARE = [(4, 4)]
BOTH = [(4, 4), (6, 4), (4,)]


def make_model(shapes: Any) -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(*shape)) for shape in shapes])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    torch.manual_seed(seed)
    loss = sum((p * torch.randn(1)).pow(2).sum() for p in model.parameters())
    loss.backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def trained(shapes: Any, keys: tuple[str, str], *, seed: int | None, sharded: bool) -> Any:
    """Return a model and its optimizer, after a step unless `seed` is None."""
    model = make_model(shapes)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = Preconditioned(model.parameters(), keys=keys)
    if seed is not None:
        step(model, optimizer, seed)
    return model, optimizer


def whole(value: torch.Tensor) -> list[float]:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return [float(x) for x in full.flatten()]


def content(optimizer: torch.optim.Optimizer) -> Any:
    return [
        {key: (isinstance(value, DTensor), whole(value)) for key, value in entries.items()}
        for entries in optimizer.state.values()
    ]


def save_state(_: int, path: str, shapes: Any, keys: Any, sharded: bool) -> Any:
    model, optimizer = trained(shapes, keys, seed=1, sharded=sharded)
    dc.save({"model": model, "optim": optimizer}, path)
    return content(optimizer)


def load_state(_: int, path: str, shapes: Any, keys: Any) -> Any:
    """Return what a fresh optimizer and one after a step get, or their errors."""
    return [load_one(path, shapes, keys, seed) for seed in (None, 5)]


def load_one(path: str, shapes: Any, keys: Any, seed: int | None) -> Any:
    model, optimizer = trained(shapes, keys, seed=seed, sharded=True)
    try:
        dc.load({"model": model, "optim": optimizer}, path)
    except IncompatibleError as error:
        assert seed is not None or not optimizer.state
        return str(error)
    loaded = content(optimizer)
    if keys[0] == "L":
        step(model, optimizer, 2)
    return loaded


def values(loaded: Any) -> Any:
    return [{key: value for key, (_, value) in entries.items()} for entries in loaded]


@pytest.mark.parametrize("shapes", [SQUARE, BOTH], ids=["square", "both"])
def test_a_plain_matrix_under_fsdp2_stays_plain_and_whole(shapes: Any, tmp_path: Path) -> None:
    path, keys = str(tmp_path / "ck"), ("L", "exp_avg")
    saved, _ = run_ranks(save_state, path, shapes, keys, True, world_size=2)
    for world_size in (1, 2, 4):
        loaded = run_ranks(load_state, path, shapes, keys, world_size=world_size)
        assert loaded == [[saved, saved]] * world_size


def test_a_matrix_of_one_process_is_known_by_other_parameters(tmp_path: Path) -> None:
    """Of two keys that no list has, one has the shape of each parameter, and one has not."""
    path, keys = str(tmp_path / "ck"), ("left", "mean")
    (saved,) = run_ranks(save_state, path, BOTH, keys, False, world_size=1)
    for fresh, stepped in run_ranks(load_state, path, BOTH, keys, world_size=2):
        assert values(fresh) == values(stepped) == values(saved)
        assert all(entries["mean"][0] for entries in fresh)


@pytest.mark.parametrize("key", ["L", "mean"])
def test_state_that_only_square_parameters_have_is_refused_where_it_would_be_cut(
    key: str, tmp_path: Path
) -> None:
    path, keys = str(tmp_path / "ck"), ("", key)
    (saved,) = run_ranks(save_state, path, SQUARE, keys, False, world_size=1)
    for error, stepped in run_ranks(load_state, path, SQUARE, keys, world_size=2):
        assert f"optim.state.model.0.{key}: it has the shape of its parameter" in error
        assert f"{{'*.{key}': {{axis: dim}}}}" in error
        assert values(stepped) == values(saved)
    ((fresh, _),) = run_ranks(load_state, path, SQUARE, keys, world_size=1)
    assert values(fresh) == values(saved)


def test_moments_of_well_known_names_are_cut(tmp_path: Path) -> None:
    for key in ("momentum_buffer", "hessian", "s", "z"):
        path, keys = str(tmp_path / key), ("", key)
        (saved,) = run_ranks(save_state, path, SQUARE, keys, False, world_size=1)
        for fresh, _ in run_ranks(load_state, path, SQUARE, keys, world_size=2):
            assert fresh == [{key: (True, saved[0][key][1])}]
