"""Training whose optimizer keeps compound tensors under FSDP2 goes on, on any number of ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dist_ckpt as dc
from ranks import run_ranks
from subclass_tensors import CodedSGD, Codes, GatheredLow
from torch_can import average_over_gloo

pytestmark = pytest.mark.multi_process


def make(world_size: int, optimizer_class: str, *, sharded: bool) -> Any:
    torch.manual_seed(world_size)
    model: Any = nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 48))
    if optimizer_class == "CodedSGD":
        model[0].weight = nn.Parameter(GatheredLow(model[0].weight.detach()))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    if optimizer_class == "CodedSGD":
        return model, CodedSGD(model.parameters(), lr=0.01)
    optim: Any = importlib.import_module("torchao.optim")
    return model, getattr(optim, optimizer_class)(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, steps: int) -> None:
    """Train on what every rank has, so that their number makes no difference."""
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 128, generator=generator)).pow(2).mean().backward()
        optimizer.step()


def save_and_go_on(rank: int, path: str, world_size: int, optimizer_class: str) -> list[float]:
    torch.compiler.set_stance("force_eager")
    model, optimizer = make(world_size, optimizer_class, sharded=True)
    train(model, optimizer, 3)
    dc.save({"model": model, "optim": optimizer}, path)
    train(model, optimizer, 1)
    return [p.full_tensor().abs().sum().item() for p in model.parameters()]


def load(rank: int, path: str, world_size: int, optimizer_class: str) -> list[float]:
    """Go on with an optimizer that never made a step; return what became of the weights."""
    torch.compiler.set_stance("force_eager")
    model, optimizer = make(world_size, optimizer_class, sharded=True)
    dc.load({"model": model, "optim": optimizer}, path)
    train(model, optimizer, 1)
    return [p.full_tensor().abs().sum().item() for p in model.parameters()]


@pytest.mark.parametrize("optimizer_class", ["CodedSGD", "AdamW8bit", "AdamW4bit"])
def test_a_run_under_fsdp_goes_on_with_other_ranks(tmp_path: Path, optimizer_class: str) -> None:
    if optimizer_class != "CodedSGD":
        pytest.importorskip("torchao")
    path = str(tmp_path / "ckpt")
    expected, *_ = run_ranks(save_and_go_on, path, 2, optimizer_class, world_size=2)
    other, *_ = run_ranks(load, path, 3, optimizer_class, world_size=3)
    if average_over_gloo():  # else steps depend on the number of ranks
        assert other == pytest.approx(expected, rel=1e-6)
    state: dict[str, Any] = {"optim": None}
    dc.load(state, path, include=["optim"])
    model, optimizer = make(1, optimizer_class, sharded=False)
    dc.load({"model": model, "optim": optimizer}, path)
    kept = optimizer.state[model[0].weight]
    momentum = kept["momentum" if optimizer_class == "CodedSGD" else "exp_avg"]
    saved = state["optim"]["state"]["model.0.weight"]
    saved = saved["momentum" if optimizer_class == "CodedSGD" else "exp_avg"]
    for name in ("codes", "scale"):
        assert torch.equal(getattr(momentum, name), saved[name])
    if optimizer_class == "CodedSGD":
        assert type(momentum) is Codes
        assert type(model[0].weight) is GatheredLow
