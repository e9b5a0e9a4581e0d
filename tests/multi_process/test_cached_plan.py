"""The plan of a save serves the next one, for exactly as long as it is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dist_ckpt as dc
from dist_ckpt.core.comm.exchange.channel import Exchange
from dist_ckpt.core.comm.process_group import session_of
from ranks import run_ranks

pytestmark = pytest.mark.multi_process


class Counting:
    """Passes everything on, and notes the exchanges of a channel or the calls of a collective."""

    def __init__(self, inner: Any, phases: list[str]) -> None:
        self._inner = inner
        self._phases = phases

    def __getattr__(self, name: str) -> Any:
        if name in ("all_gather_distinct", "broadcast"):
            self._phases.append("collective")
        return getattr(self._inner, name)

    def exchange(self, phase: str) -> Exchange:
        self._phases.append(phase)
        exchange: Exchange = self._inner.exchange(phase)
        return exchange


@contextmanager
def counted() -> Iterator[list[str]]:
    session: Any = session_of()
    channel, bulk = session.channel, session.collective
    phases: list[str] = []
    session.channel, session.collective = Counting(channel, phases), Counting(bulk, phases)
    try:
        yield phases
    finally:
        session.channel, session.collective = channel, bulk


PLANNED, REUSED = ["agree", "plan", "collective", "write"], ["agree", "write"]


def save(state: dict[str, Any], path: str, **options: Any) -> list[str]:
    with counted() as phases:
        dc.save(state, path, **options)
    return phases


def save_as_it_changes(rank: int, root: str) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def cut(tensor: torch.Tensor, placement: Any) -> Any:
        # A copy: in older versions of torch rank 0's part would be the memory of the whole.
        return distribute_tensor(tensor.clone(), mesh, [placement], src_data_rank=None)

    weight = torch.arange(12.0).view(6, 2)
    state: dict[str, Any] = {
        "model": {"w": cut(weight, Shard(0)), "b": torch.ones(3)},
        "data": {"epoch": 0},
        "mine": dc.PerRank(rank),
    }
    numbers = iter(range(100))
    kept: list[tuple[str, Any]] = []

    def step(expected: list[str], **options: Any) -> None:
        path = f"{root}/{next(numbers)}"
        assert (phases := save(state, path, **options)) == expected, f"{path}: {phases}"
        model = {
            name: value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
            for name, value in state["model"].items()
        }
        kept.append((path, (model, dict(state["data"]))))

    step(PLANNED)
    step(REUSED, step=1)
    # The same names with other values, in the same memory: nothing of the first save is left.
    state["model"]["w"].to_local().mul_(-1)
    state["model"]["b"].add_(1)
    state["data"]["epoch"] = 5
    step(REUSED, metadata={"loss": 1.0})
    # Values are no part of a plan, but their names are.
    state["data"] = {"epoch": 6, "more": [1, 2]}
    step(REUSED)
    # Other tensors in place of these.
    state["model"]["b"] = torch.full((3,), 9.0)
    step(REUSED)
    for change in {
        "grown": lambda: state["model"].update(new=torch.zeros(2)),
        "shape": lambda: state["model"].update(b=torch.zeros(5)),
        "dtype": lambda: state["model"].update(b=torch.zeros(5, dtype=torch.bfloat16)),
        "layout": lambda: state["model"].update(w=cut(weight, Shard(1))),
        "replicated": lambda: state["model"].update(w=cut(weight, Replicate())),
        "local": lambda: state["model"].update(w=weight.clone()),
        "tied": lambda: state["model"].update(w2=state["model"]["w"]),
        "untied": lambda: state["model"].update(w2=weight + 1),
        "shrunk": lambda: state["model"].pop("w2"),
        "key": lambda: state.update(mine=dc.PerRank(rank, key=("dp", rank))),
    }.values():
        change()
        step(PLANNED)
        step(REUSED)
    # It is enough that one rank's state is another.
    if rank == 1:
        state["model"]["only here"] = torch.ones(1)
    step(PLANNED)
    step(REUSED)
    # A save that failed leaves a plan behind, or none, but no wrong one.
    state["model"]["b"] = object() if rank == 0 else torch.ones(7)
    with pytest.raises(TypeError, match="b"):
        dc.save(state, f"{root}/failed")
    state["model"]["b"] = torch.full((7,), 2.0)
    step(PLANNED)
    with pytest.raises(dc.ExistsError):
        dc.save(state, kept[-1][0])
    step(REUSED)
    # A load in between changes nothing.
    dc.load({"data": None}, kept[0][0], include=["data"])
    step(REUSED)
    for path, (model, data) in kept:
        loaded: dict[str, Any] = {"model": {}, "data": None}
        dc.load(loaded, path, include=["model", "data"])
        assert loaded["data"] == data
        for name, tensor in model.items():
            assert loaded["model"][name].dtype == tensor.dtype
            assert torch.equal(loaded["model"][name], tensor), (path, name)


def test_a_plan_is_reused_until_the_state_changes(tmp_path: Path):
    run_ranks(save_as_it_changes, str(tmp_path), world_size=2)


def reuse_the_buffer(_rank: int, root: str) -> None:
    """One staging buffer for every tensor of every save: what torch's async saves get wrong."""
    buffer = torch.empty(1 << 16)
    for number in range(3):
        buffer.fill_(number)
        dc.save({"w": buffer, "view": buffer[100:200]}, f"{root}/{number}")
        buffer.fill_(-1)
    for number in range(3):
        state: dict[str, Any] = {}
        dc.load(state, f"{root}/{number}")
        assert (state["w"] == number).all()
        assert (state["view"] == number).all()


def test_a_buffer_may_be_overwritten_once_a_save_has_returned(tmp_path: Path):
    run_ranks(reuse_the_buffer, str(tmp_path), world_size=2)
