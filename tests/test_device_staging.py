"""The fence: what is copied beside the training is what it was when `save` was called."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt import background_save
from dist_ckpt.device_staging import Fence
from dist_ckpt.held_state import HeldState
from dist_ckpt.job_folder import JobFolder


@pytest.fixture
def saver() -> Iterator[dc.AsyncSaver]:
    job = f"test-{uuid.uuid4().hex}"
    saver = dc.AsyncSaver(job=job)
    yield saver
    saver.close()
    folder = JobFolder(job)
    for rank in folder.ranks():
        folder.rank(rank).remove()
    folder.discard()


class NoStreams:
    """What stands for the streams of a device: this machine has none."""

    def __init__(self, devices: Any) -> None:
        self.current = nullcontext


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch, saver: dc.AsyncSaver) -> threading.Event:
    """Have states copied beside the training, as on CUDA devices, once the event is set."""
    may_copy = threading.Event()
    stage = background_save.stage

    def stage_when_it_may(*args: Any) -> None:
        assert may_copy.wait(30)
        stage(*args)

    monkeypatch.setattr(HeldState, "cuda_devices", frozenset({torch.device("cpu")}))
    monkeypatch.setattr(background_save, "SideStreams", NoStreams)
    monkeypatch.setattr(background_save, "stage", stage_when_it_may)
    monkeypatch.setattr("dist_ckpt.device_staging.PinnedArenas.pin", lambda *_: None)
    return may_copy


def a_training() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = torch.nn.Linear(200, 300, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.ones_like(model.weight)
    return model, optimizer, {"model": model, "optim": optimizer}


def test_an_optimizer_waits_before_a_step_for_what_is_copied(
    saver: dc.AsyncSaver, beside: threading.Event, tmp_path: Path
) -> None:
    model, optimizer, state = a_training()
    for step in range(1, 6):
        beside.clear()
        expected = model.weight.detach().clone()
        handle = saver.save(state, tmp_path / str(step), step=step)
        with pytest.raises(TimeoutError):
            handle.wait_staged(0)
        threading.Timer(0.02, beside.set).start()
        optimizer.step()
        handle.wait_staged(0)
        assert not torch.equal(model.weight, expected)
        handle.result(30)
        loaded: dict[str, Any] = {}
        dc.load(loaded, tmp_path / str(step))
        assert torch.equal(loaded["model"]["weight"], expected)


def test_the_next_save_and_the_fence_wait_for_what_is_copied(
    saver: dc.AsyncSaver, beside: threading.Event, tmp_path: Path
) -> None:
    tensor = torch.zeros(100_000)
    for step in range(4):
        beside.clear()
        threading.Timer(0.02, beside.set).start()
        handle = saver.save({"w": tensor}, tmp_path / str(step), step=step)
        saver.fence()
        handle.wait_staged(0)
        tensor += 1
    saver.save({"w": tensor}, tmp_path / "4", step=4).result(30)
    for step in range(5):
        loaded: dict[str, Any] = {}
        dc.load(loaded, tmp_path / str(step))
        assert loaded["w"].unique().tolist() == [float(step)]


def test_a_copy_that_fails_beside_the_training_fails_the_save(
    saver: dc.AsyncSaver, beside: threading.Event, tmp_path: Path
) -> None:
    tensor = torch.zeros(10)
    handle = saver.save({"v": torch.zeros(10), "w": tensor}, tmp_path / "a")
    tensor.resize_(20)
    beside.set()
    handle.wait_staged(30)
    with pytest.raises(dc.CheckpointError, match="w: 40 bytes when the save began, and 80 now"):
        handle.result(30)
    saver.save({"w": tensor}, tmp_path / "a").result(30)


def test_an_optimizer_is_let_go_of_when_the_saver_is_closed() -> None:
    _, optimizer, _ = a_training()
    fence = Fence()
    held = threading.Event()
    fence.run(lambda: None, [optimizer])
    fence.close()
    fence._copying = threading.Thread(target=held.wait, daemon=True)  # it would wait for this
    fence._copying.start()
    optimizer.step()
    held.set()
