"""What Lightning Fabric and accelerate prepare, and `StatefulDataLoader`: as they come.

Each is tested where it is installed; none is needed to develop.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt as dc

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def prepared(library: str, seed: int) -> Any:
    """Return model, optimizer, scheduler, data and backward, as a library prepares them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    samples: Any = torch.randn(32, 4)
    data: Any = torch.utils.data.DataLoader(samples, batch_size=4)
    if library == "torch":
        return model, optimizer, scheduler, data, torch.Tensor.backward
    if library == "lightning_fabric":
        fabric: Any = importlib.import_module(library).Fabric(accelerator="cpu", devices=1)
        fabric_model, fabric_optimizer = fabric.setup(model, optimizer)
        return (
            fabric_model,
            fabric_optimizer,
            scheduler,
            fabric.setup_dataloaders(data),
            fabric.backward,
        )
    accelerator: Any = importlib.import_module(library).Accelerator(cpu=True)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    return model, optimizer, scheduler, data, accelerator.backward


def train(model: Any, optimizer: Any, scheduler: Any, data: Any, backward: Any) -> None:
    for batch in data:
        backward(model(batch).square().sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def flat(value: Any) -> Any:
    """Return what `==` can compare."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list) else value


LIBRARIES = ["torch", "lightning_fabric", "accelerate"]


@pytest.mark.parametrize("target", LIBRARIES)
@pytest.mark.parametrize("source", LIBRARIES)
def test_a_prepared_training_goes_on_in_any_other(source: str, target: str, tmp_path: Path) -> None:
    for library in {source, target} - {"torch"}:
        pytest.importorskip(library)
    model, optimizer, scheduler, *rest = first = prepared(source, 0)
    train(*first)
    dc.save({"model": model, "optim": optimizer, "sched": scheduler}, tmp_path / "step")
    other, other_optimizer, other_scheduler, *_ = second = prepared(target, 1)
    train(*second)
    state = {"model": other, "optim": other_optimizer, "sched": other_scheduler}
    dc.load(state, tmp_path / "step")
    assert flat(dict(other.state_dict())) == flat(dict(model.state_dict()))
    assert flat(other_optimizer.state_dict()) == flat(optimizer.state_dict())
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()
    # Both train on alike, on the data of the first.
    train(model, optimizer, scheduler, *rest)
    train(other, other_optimizer, other_scheduler, rest[0], second[-1])
    assert flat(dict(other.state_dict())) == flat(dict(model.state_dict()))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_data_loader_goes_on_as_the_how_to_says(
    num_workers: int, tmp_path: Path
) -> None:
    library: Any = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return library.StatefulDataLoader(
            list(range(20)), batch_size=2, shuffle=True, num_workers=num_workers
        )

    torch.manual_seed(0)
    data = loader()
    batches = iter(data)
    next(batches)
    dc.save({"data": dc.PerRank(data), "rng": dc.RNG()}, tmp_path / "step")
    expected = [flat(list(batches)), torch.rand(2).tolist(), flat(list(data))]
    data = loader()
    dc.load({"data": dc.PerRank(data), "rng": dc.RNG()}, tmp_path / "step")
    drawn = torch.get_rng_state()
    batches = iter(data)
    assert not torch.equal(torch.get_rng_state(), drawn)
    torch.set_rng_state(drawn)
    assert [flat(list(batches)), torch.rand(2).tolist(), flat(list(data))] == expected
