"""Loads from several checkpoints by real ranks: FSDP and its optimizer, in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import dist_ckpt as dc
from ranks import run_ranks

pytestmark = pytest.mark.multi_process


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.encoder(x))
        return result


def trained(value: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a sharded model and its optimizer, in which everything is made of one number."""
    model = Net().to(dtype)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    fully_shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=value, momentum=0.5)
    for parameter in model.parameters():
        optim.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return {"model": model, "optim": optim}


def numbers(value: torch.Tensor) -> set[float]:
    return {*(value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()}


def save_both(_: int, root: str) -> None:
    for value in (1, 2):
        dc.save(trained(value), f"{root}/{value}", step=value)


def load_from_both(rank: int, root: str) -> None:
    one, two = f"{root}/1", f"{root}/2"
    state = trained(9)
    with pytest.raises(dc.IncompatibleError, match="no source is given for 5 names"):
        dc.load(state, {"model": one})
    with pytest.raises(dc.NotFoundError, match="/3: no checkpoint is here"):
        dc.load(state, {"model": one, "optim": f"{root}/3"})
    with pytest.raises(ValueError, match="different path"):
        dc.load(state, [one, two] if rank else [two, one])
    parts = {"model.encoder": one, "model.head": two, "optim": f"{root}@latest"}
    report = dc.load(state, parts)
    assert [source.step for source in report.sources] == [1, 2, 2]
    found = {name: numbers(value) for name, value in state["model"].state_dict().items()}
    assert found == {
        **{f"encoder.{name}": {1.0} for name in ("weight", "bias")},
        **{f"head.{name}": {2.0} for name in ("weight", "bias")},
    }
    optim = state["optim"]
    assert optim.param_groups[0]["lr"] == 2
    for parameter in state["model"].parameters():
        assert numbers(optim.state[parameter]["momentum_buffer"]) == {2.0}
    low = trained(9, torch.bfloat16)
    dc.load(low, {"model": two, "optim": one}, cast=True)
    assert {v for p in low["model"].parameters() for v in numbers(p)} == {2.0}


def load_into_flat(_: int, root: str) -> None:
    """FSDP1 has one flat parameter, and one state for it, of which each source fills a part."""
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=False)
    optim = torch.optim.SGD(model.parameters(), lr=9, momentum=0.5)
    state = {"model": model, "optim": optim}
    encoder = dc.Source(f"{root}/1", include=["model.encoder", "optim.state.model.encoder"])
    dc.load(state, [encoder, f"{root}/2"])
    with FullyShardedDataParallel.summon_full_params(model):
        found = {name: numbers(value) for name, value in model.named_parameters()}
    assert {name.partition(".")[0]: value for name, value in found.items()} == {
        "encoder": {1.0},
        "head": {2.0},
    }
    assert optim.param_groups[0]["lr"] == 2
    told = FullyShardedDataParallel.optim_state_dict(model, optim)["state"]
    assert {
        name.partition(".")[0]: numbers(of["momentum_buffer"]) for name, of in told.items()
    } == {"encoder": {1.0}, "head": {2.0}}


def test_fsdp_takes_its_halves_and_its_optimizer_from_two_checkpoints(tmp_path: Path) -> None:
    run_ranks(save_both, str(tmp_path), world_size=2)
    run_ranks(load_from_both, str(tmp_path), world_size=3)
    run_ranks(load_into_flat, str(tmp_path), world_size=2)
