"""ZeroRedundancyOptimizer on real ranks: each saves its partition, any partition loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import dist_ckpt as dc
from ranks import run_ranks
from wrapped_optimizers import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(3)]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 2, bias=False))


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:2], "lr": 0.2}, {"params": params[2:], "weight_decay": 0.5}]


def make(kind: str, model: nn.Module) -> Any:
    options: dict[str, Any] = {"lr": 0.1, "amsgrad": True}
    if kind == "plain":
        return torch.optim.AdamW(in_groups(model), **options)
    return ZeroRedundancyOptimizer(
        in_groups(model),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=kind == "buckets",
        **options,
    )


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    """Train on the same data on all ranks, so that it does not matter how many there are."""
    trained = DistributedDataParallel(model)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        trained(torch.randn(5, 4)).pow(2).sum().backward()
        optimizer.step()


def outcome(model: nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def save_trained(rank: int, kind: str, path: str) -> list[float]:
    model = make_model()
    optimizer = make(kind, model)
    train(model, optimizer, 3)
    optimizer.param_groups[1]["lr"] = 0.05
    dc.save({"model": model, "optim": optimizer}, path)
    train(model, optimizer, 2)
    return outcome(model)


def load_and_train(rank: int, kind: str, path: str, steps_before: int) -> list[float]:
    model = make_model()
    optimizer = make(kind, model)
    train(model, optimizer, steps_before)
    report = dc.load({"model": model, "optim": optimizer}, path)
    assert not report.missing
    assert not report.dropped
    train(model, optimizer, 2)
    return outcome(model)


@pytest.mark.parametrize(
    ("source", "target", "steps_before"),
    [
        (("zero", 2), ("zero", 3), 0),
        (("zero", 3), ("plain", 2), 1),
        (("plain", 2), ("buckets", 3), 0),
        (("buckets", 2), ("buckets", 2), 2),
    ],
)
def test_a_partition_loads_into_any_other(
    source: tuple[str, int], target: tuple[str, int], steps_before: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "c")
    expected = run_ranks(save_trained, source[0], path, world_size=source[1])
    found = run_ranks(load_and_train, target[0], path, steps_before, world_size=target[1])
    for values in (*expected, *found):
        assert values == pytest.approx(expected[0], abs=1e-6)
    with dc.open(path) as checkpoint:
        names = [name for name in checkpoint if name.endswith("max_exp_avg_sq")]
        assert len(names) == len(list(make_model().parameters()))


def before_the_first_step(rank: int, path: str) -> list[float]:
    model = make_model()
    optimizer = make("zero", model)
    dc.save({"model": model, "optim": optimizer}, path)
    train(model, optimizer, 2)
    report = dc.load({"model": model, "optim": optimizer}, path)
    owned = [name for name in report.dropped if name.endswith("exp_avg")]
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(owned))
    assert sum(counts) == len(list(model.parameters()))
    train(model, optimizer, 2)
    return outcome(model)


def test_a_partition_goes_back_to_before_its_first_step(tmp_path: Path) -> None:
    first, second = run_ranks(before_the_first_step, str(tmp_path / "c"), world_size=2)
    assert first == second


class Scheduled(torch.optim.SGD):
    """An optimizer with a state dict of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return torch's."""
        return super().state_dict()


def refusals(rank: int, path: str) -> list[str]:
    model = make_model()
    hooked = make("zero", model)
    hooked.register_state_dict_post_hook(lambda *_: None)
    optimizers = [
        ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, overlap_with_ddp=True
        ),
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Scheduled, lr=0.1),
        hooked,
    ]
    messages = []
    for optimizer in optimizers:
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # what it says is returned
            dc.save({"model": model, "optim": optimizer}, path)
        messages.append(str(caught.value))
    return messages


def test_what_a_partition_cannot_be_read_through_is_refused_by_name(tmp_path: Path) -> None:
    overlapping, inner, hooked = run_ranks(refusals, str(tmp_path / "c"), world_size=2)[1]
    assert "overlap_with_ddp=False" in overlapping
    assert "optim: Scheduled overrides state_dict" in inner
    assert "optim: ZeroRedundancyOptimizer overrides state_dict" in hooked


def wrapped(rank: int, path: str) -> list[Any]:
    found: list[Any] = []
    for loads in (False, True):
        model = make_model()
        optimizer = torch.optim.SGD(in_groups(model), lr=0.1, momentum=0.9)
        averager = PeriodicModelAverager(period=2)
        local: Any = PostLocalSGDOptimizer(optimizer, averager)
        if loads:
            dc.load({"model": model, "optim": local}, path)
        else:
            train(model, local, 3)
            dc.save({"model": model, "optim": local}, path)
        train(model, local, 2)
        found.append([averager.step, *outcome(model)])
    return found


def test_post_local_sgd_goes_on_where_it_was(tmp_path: Path) -> None:
    for before, after in run_ranks(wrapped, str(tmp_path / "c"), world_size=2):
        assert before == after
        assert before[0] == 5
