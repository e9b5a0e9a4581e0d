"""Replicas that differ between real ranks, and experts that are stacked into DTensors."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dist_ckpt as dc
from ranks import run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(2)]

RULES = {"*.num_batches_tracked": "rank0", "*.running_*": "mean"}


def drifted_model(rank: int) -> Any:
    """Return a model whose weights are equal, and whose BatchNorm has seen other data."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        model(torch.randn(5, 3) + rank)
    return model


def numbers(tensor: Any) -> list[float]:
    """Return what a rank can return of a tensor: exact numbers."""
    flat: list[float] = tensor.detach().flatten().tolist()
    return flat


def expected_mean(world_size: int) -> torch.Tensor:
    models = [drifted_model(rank) for rank in range(world_size)]
    total = models[0][1].running_mean.double()
    for model in models[1:]:
        total = total + model[1].running_mean.double()
    mean: torch.Tensor = (total / world_size).float()
    return mean


def save_ddp(rank: int, path: str, rules: dict[str, Any]) -> Any:
    model = nn.parallel.DistributedDataParallel(drifted_model(0))
    model.module.load_state_dict(drifted_model(rank).state_dict())
    with pytest.raises(ValueError, match="ranks hold different values"):
        dc.save({"model": model}, path)
    report = dc.save({"model": model}, path, replicas=rules)
    return dict(report.replicas), report.exchanges.num, report.collectives.num


def test_ddp_saves_the_mean_of_batch_norm(tmp_path: Path) -> None:
    (first, exchanges, collectives), _ = run_ranks(
        save_ddp, str(tmp_path / "ck"), RULES, world_size=2
    )
    assert first == {
        "model.1.num_batches_tracked": "rank0",
        "model.1.running_mean": "mean",
        "model.1.running_var": "mean",
    }
    assert (exchanges, collectives) == (5, 2)
    live = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    dc.load({"model": live}, tmp_path / "ck")
    assert torch.equal(live[1].running_mean, expected_mean(2))  # type: ignore[arg-type]


def save_in_background(rank: int, root: str, job: str) -> Any:
    seen = []
    with dc.AsyncSaver(job=job) as saver:
        for step in range(2):
            state = {"model": drifted_model(rank + step)}
            rules: Any = {**RULES, "model.1.running_var": "per_rank"}
            report = saver.save(state, f"{root}/{step}", step=step, replicas=rules).result(60)
            assert report is not None
            seen.append(dict(report.replicas))
    own = {"model": drifted_model(7)}
    dc.load(own, f"{root}/1")
    expected = drifted_model(rank + 1)[1].running_var
    return seen, numbers(own["model"][1].running_var), numbers(expected)


def test_background_saves_take_the_rules(tmp_path: Path) -> None:
    job = f"test-{uuid.uuid4().hex}"
    for seen, own, expected in run_ranks(save_in_background, str(tmp_path), job, world_size=2):
        assert seen[0] == seen[1]
        assert seen[0]["model.1.running_mean"] == "mean"
        assert own == expected
    live = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    dc.load({"model": live}, tmp_path / "0", exclude="*.running_var")
    assert torch.equal(live[1].running_mean, expected_mean(2))  # type: ignore[arg-type]


def run_and_resume(rank: int, root: str) -> Any:
    rules: Any = {"*.num_batches_tracked": "rank0", "*.running_*": "per_rank"}
    found = []
    for _ in range(2):
        state = {"model": drifted_model(rank)}
        options: Any = {"save": dc.every(steps=1), "replicas": rules, "on_failure": "raise"}
        with dc.Checkpointer(root, **options) as ck:
            start = ck.restore(state) or 0
            found.append(numbers(state["model"][1].running_mean))
            with torch.no_grad():
                state["model"](torch.ones(4, 3) * rank)
            ck.step(start + 1, state)
        found.append(numbers(state["model"][1].running_mean))
    return found


def test_a_run_saves_and_each_rank_resumes_with_its_own_copy(tmp_path: Path) -> None:
    for before, saved, resumed, _ in run_ranks(run_and_resume, str(tmp_path / "run"), world_size=2):
        assert before != saved
        assert saved == resumed


def hsdp(rank: int, path: str, rule: str) -> Any:
    """Save weights whose two replicas differ, under HSDP; load them again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 6, bias=False)
    fully_shard(model, mesh=mesh)
    local = model.weight.to_local()
    with torch.no_grad():
        local += rank // 2
    saved = local.detach().clone()
    dc.save({"model": model}, path, replicas={"*": rule})  # type: ignore[dict-item]
    with torch.no_grad():
        local.zero_()
    dc.load({"model": model}, path)
    return numbers(saved), numbers(local)


@pytest.mark.parametrize("rule", ["rank0", "mean", "per_rank"])
def test_replicas_of_shards_under_hsdp_take_the_rules(tmp_path: Path, rule: str) -> None:
    pairs = run_ranks(hsdp, str(tmp_path / "ck"), rule, world_size=4)
    saved = [before for before, _ in pairs]
    for rank, (before, after) in enumerate(pairs):
        both = torch.tensor([saved[rank % 2], saved[rank % 2 + 2]])
        assert not torch.equal(both[0], both[1])
        mean = numbers(((both[0].double() + both[1].double()) / 2).float())
        assert after == {"rank0": saved[rank % 2], "mean": mean, "per_rank": before}[rule]


# --- `rename` with operations, into DTensors ------------------------------------------------------


def experts() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {f"e.{n}.{k}": torch.randn(6, 4) for n in range(4) for k in ("gate", "up")}


def stacked() -> torch.Tensor:
    both = experts()
    pairs = [torch.cat([both[f"e.{n}.gate"], both[f"e.{n}.up"]]).T for n in range(4)]
    return torch.stack(pairs)


PLACEMENTS: list[Any] = [[Shard(0)], [Shard(1)], [Shard(2)], [Replicate()]]


def load_sharded(rank: int, path: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for placements in PLACEMENTS:
        live = distribute_tensor(torch.zeros(4, 4, 12), mesh, placements)
        rule: Any = [dc.Concatenate(), dc.Transpose(), dc.Stack("e"), "all"]
        dc.load({"all": live}, path, rename={("e.{e}.gate", "e.{e}.up"): rule})
        found.append(torch.equal(live.full_tensor(), stacked()))
        dc.save({"all": live}, f"{path}-{placements[0]}", overwrite=True)
        back = {name: distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]) for name in experts()}
        cut = [dc.Unstack("e"), dc.Transpose(), dc.Split(), ("e.{e}.gate", "e.{e}.up")]
        dc.load(back, f"{path}-{placements[0]}", rename={"all": cut})
        whole = {name: tensor.full_tensor() for name, tensor in back.items()}
        found.append(all(torch.equal(whole[name], value) for name, value in experts().items()))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_experts_are_stacked_into_dtensors_and_back(tmp_path: Path, world_size: int) -> None:
    dc.save(experts(), tmp_path / "ck")
    for found in run_ranks(load_sharded, str(tmp_path / "ck"), world_size=world_size):
        assert found == [True] * 8


def load_fsdp(rank: int, path: str) -> Any:
    """Load stacked weights and moments into FSDP2, whose optimizer has made no step."""
    mesh = init_device_mesh("cpu", (2,))
    model: Any = nn.ParameterDict({"all": nn.Parameter(torch.zeros(4, 4, 12))})
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    rule: Any = [dc.Concatenate(), dc.Transpose(), dc.Stack("e"), "model.all"]
    rename = {("model.e.{e}.gate", "model.e.{e}.up"): rule}
    dc.load({"model": model, "optim": optimizer}, path, rename=rename)
    moments = optimizer.state[model["all"]]
    assert isinstance(moments["exp_avg"], DTensor)
    step = float(moments["step"])
    weight, moment = model["all"].full_tensor(), moments["exp_avg"].full_tensor()
    return numbers(weight), numbers(moment), step


class PerExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = experts()
        self.e = nn.ModuleList(
            nn.ParameterDict({k: nn.Parameter(both[f"e.{n}.{k}"]) for k in ("gate", "up")})
            for n in range(4)
        )


def test_moments_follow_their_parameters_into_fsdp2(tmp_path: Path) -> None:
    model: Any = PerExpert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    dc.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    first = {key: [optimizer.state[e[key]]["exp_avg"] for e in model.e] for key in ("gate", "up")}
    moments = torch.stack(
        [torch.cat([a, b]).T for a, b in zip(first["gate"], first["up"], strict=True)]
    )
    for weight, moment, step in run_ranks(load_fsdp, str(tmp_path / "ck"), world_size=2):
        assert weight == numbers(stacked())
        assert moment == numbers(moments)
        assert step == 1
