"""Background saves from a device: copied beside the training, and never a later value."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.job_folder import JobFolder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture
def job() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    folder = JobFolder(name)
    for rank in folder.ranks():
        folder.rank(rank).remove()
    folder.discard()


def test_what_a_training_on_the_device_saves_is_what_it_was(tmp_path: Path, job: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state: dict[str, Any] = {"model": model, "optim": optimizer, "step": 0}
    expected = {}
    with dc.AsyncSaver(job=job) as saver:
        for step in range(1, 21):
            model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = step
            expected[step] = [p.detach().cpu().clone() for p in model.parameters()]
            saver.save(state, tmp_path / str(step), step=step)
    for step, weights in expected.items():
        loaded: dict[str, Any] = {}
        dc.load(loaded, tmp_path / str(step))
        found = [loaded["model"][name] for name, _ in model.named_parameters()]
        assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))
