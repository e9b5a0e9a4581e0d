"""Tests here run commands, on a checkpoint or a run."""

from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from commands import run

__all__ = ["run"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "step-00000007"
    state = {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4)},
        "step": 7,
        "loader": dc.PerRank({"position": 3}),
    }
    dc.save(state, path, step=7, metadata={"loss": 2.5, "note": "first"})
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a run of four steps, the first the best."""
    root = tmp_path / "run"
    for step in (1, 2, 3, 4):
        dc.save({"x": step}, root / f"s{step}", step=step)
        dc.Run(root).metrics(step, {"val/loss": float(step)})
    return root


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    """Return a run of two steps; a tensor of the second has a nan."""
    root = tmp_path / "run"
    for step in (1, 2):
        value = torch.tensor([1.0, float("nan") if step == 2 else 0.0, 3.0])
        state = {"model": {"w": value, "b": torch.ones(2, 2)}, "optim": {"m": torch.ones(3)}}
        dc.save({**state, "epoch": step}, root / f"s{step}", step=step, config={"lr": step})
        dc.Run(root).metrics(step, {"loss": float("nan") if step == 2 else 0.5})
    return root
