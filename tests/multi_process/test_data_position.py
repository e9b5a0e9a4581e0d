"""Real ranks go on in the data of others."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_ckpt as dc
from ranks import run_ranks

pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.multi_process

StatefulDataLoader: Any = importlib.import_module(
    "torchdata.stateful_dataloader"
).StatefulDataLoader

LENGTH = 41


def loader_of(seed: int = 0) -> Any:
    data = [*range(LENGTH)]
    return StatefulDataLoader(data, batch_size=2, sampler=dc.ElasticSampler(data, seed=seed))


def train(rank: int, folder: str, steps: int) -> list[int]:
    """Take some batches from where the last job stopped; save; return the samples."""
    loader = loader_of()
    weights = torch.zeros(1)
    state = {"data": dc.DataPosition(loader), "weights": weights}
    path, before = Path(folder, f"on-{dist.get_world_size()}"), [*Path(folder).iterdir()]
    dist.barrier()
    if before:
        dc.load(state, max(before, key=lambda one: one.stat().st_mtime_ns))
    batches = iter(loader)
    samples = [int(sample) for _ in range(steps) for sample in next(batches)]
    total = torch.tensor([float(sum(samples))])
    dist.all_reduce(total)  # all have equally many batches
    weights += total
    dc.save(state, path)
    return [*samples, *(int(s) for batch in batches for s in batch)] if steps > 3 else samples


def test_two_ranks_then_three_then_one_see_each_sample_once(tmp_path: Path) -> None:
    seen: list[int] = []
    for ranks, steps in ((2, 3), (3, 2), (1, 4)):
        seen += [s for one in run_ranks(train, str(tmp_path), steps, world_size=ranks) for s in one]
    assert sorted(seen) == [*range(LENGTH)]
    with dc.open(tmp_path / "on-1") as checkpoint:
        position: Any = checkpoint.objects["data"]
        assert position["consumed"] == 2 * 2 * 3 + 3 * 2 * 2 + 4 * 2


def save_apart(rank: int, folder: str) -> list[str]:
    """Save what differs between the ranks; return the errors."""
    errors = []
    for name, seed, steps in (("seeds", rank, 0), ("positions", 0, rank)):
        loader = loader_of(seed)
        batches = iter(loader)
        for _ in range(steps):
            next(batches)
        try:
            dc.save({"data": dc.DataPosition(loader)}, Path(folder, name))
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_ranks_that_are_apart_cannot_save(tmp_path: Path) -> None:
    for errors in run_ranks(save_apart, str(tmp_path), world_size=2):
        assert len(errors) == 2
        for error in errors:
            assert "data (rank 0 differs from rank 1)" in error
