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
