"""Training goes on from a checkpoint as if nothing had happened, to the last bit."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dist_ckpt as dc
from ranks import run_ranks

pytestmark = pytest.mark.multi_process

STEPS, RESUMED_AT = 6, 3


class Training:
    """FSDP2 with dropout, AdamW, a scheduler, and batches from python's and torch's generators."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(
            nn.Linear(5, 11), nn.Dropout(0.3), nn.GELU(), nn.Linear(11, 7), nn.Linear(7, 1)
        )
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fully_shard(self.model[3], mesh=mesh, mp_policy=low)
            fully_shard(self.model, mesh=mesh)
        torch.manual_seed(seed + 1 + dist.get_rank())
        random.seed(seed + dist.get_rank())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.03)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optimizer,
            "scheduler": self.scheduler,
            "seen": {"samples": 0},
            "rng": dc.RNG(),
        }

    def step(self) -> str:
        batch = torch.randn(4, 5) * random.random()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.state["seen"]["samples"] += 4
        value: float = loss.item()
        return value.hex()

    def end(self) -> tuple[str, ...]:
        """Return all that training has come to."""
        tensors = [p.to_local() for p in self.model.parameters()]
        for parameter in self.model.parameters():
            entries = self.optimizer.state[parameter]
            tensors += [entries[q].to_local() for q in ("exp_avg", "exp_avg_sq")]
            tensors.append(entries["step"])
        bits = [t.detach().reshape(-1).view(torch.uint8).numpy().tobytes().hex() for t in tensors]
        rng = dc.RNG().capture()
        return *bits, repr(self.scheduler.state_dict()), repr(self.state["seen"]), repr(rng)


def train(_rank: int) -> Any:
    training = Training(seed=1)
    return [training.step() for _ in range(STEPS)], training.end()


def train_and_save(_rank: int, root: str) -> Any:
    training = Training(seed=1)
    losses = []
    for step in range(STEPS):
        if step in (0, RESUMED_AT):
            dc.save(training.state, f"{root}/{step}", step=step)
        losses.append(training.step())
    return losses, training.end()


def resume(_rank: int, root: str, step: int, used: bool) -> Any:
    training = Training(seed=2)
    if used:
        # Then it has state and generators of another run, to be replaced.
        training.step()
    dc.load(training.state, f"{root}/{step}")
    return [training.step() for _ in range(step, STEPS)], training.end()


def test_saving_changes_nothing_and_a_resume_goes_on_to_the_last_bit(tmp_path: Path):
    root = str(tmp_path)
    alone = run_ranks(train, world_size=2)
    assert run_ranks(train_and_save, root, world_size=2) == alone
    for step, used in [(0, False), (RESUMED_AT, False), (RESUMED_AT, True)]:
        resumed = run_ranks(resume, root, step, used, world_size=2)
        for (losses, end), (all_losses, all_end) in zip(resumed, alone, strict=True):
            assert losses == all_losses[step:]
            assert end == all_end
