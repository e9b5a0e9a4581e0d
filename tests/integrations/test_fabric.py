"""Lightning Fabric, which sets the epoch of a sampler itself, and counts anew in each process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc

lightning = pytest.importorskip("lightning")
pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore")

EPOCHS, LENGTH = 3, 12


def loader_of_fabric() -> tuple[Any, Any]:
    """Return the loader of a new process, and that inside it."""
    torchdata: Any = importlib.import_module("torchdata.stateful_dataloader")
    data = [*range(LENGTH)]
    sampler = dc.ElasticSampler(data, seed=3)
    loader = torchdata.StatefulDataLoader(data, batch_size=2, sampler=sampler)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    return fabric.setup_dataloaders(loader), loader


@pytest.mark.parametrize("until", [4, 6, 7, 11, 12, 15])
def test_a_loop_of_fabric_is_killed_and_continues_in_its_epoch(until: int, tmp_path: Path) -> None:
    loader, _ = loader_of_fabric()
    straight = [batch.tolist() for _ in range(EPOCHS) for batch in loader]

    def train(until: int) -> list[list[int]]:
        loader, inner = loader_of_fabric()
        state: dict[str, Any] = {"data": dc.DataPosition(loader), "had": []}
        with dc.Checkpointer(tmp_path, save=dc.at_end, background=False) as ck:
            first = ck.restore(state) or 0
            batches = (batch for _ in range(inner.sampler.epoch, EPOCHS) for batch in loader)
            for _ in ck.steps(state, until=until):
                state["had"].append(next(batches).tolist())
        assert len(state["had"]) == until > first
        return state["had"]  # type: ignore[no-any-return]

    assert train(until) == straight[:until]
    assert train(EPOCHS * LENGTH // 2) == straight


def test_a_position_of_the_inner_loader_is_refused_with_the_name_of_fabric() -> None:
    loader, inner = loader_of_fabric()
    position = dc.DataPosition(inner)
    for _ in range(2):
        list(loader)
    state = position.state_dict()
    loader, inner = loader_of_fabric()
    position = dc.DataPosition(inner)
    position.load_state_dict(state)
    with pytest.raises(ValueError, match=r"called by lightning.*DataPosition\(fabric\.setup_datal"):
        next(iter(loader))
