"""Classes with a `_version` on several ranks: new state stays as it is, and older is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard

import dist_ckpt as dc
from ranks import run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(3)]


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(64.0).reshape(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


class Second(First):
    """Its weight is stored transposed."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2 and f"{prefix}w" in state:
            state[f"{prefix}w"] = state[f"{prefix}w"].t().contiguous()
        super()._load_from_state_dict(state, prefix, metadata, *args)


def model(cls: type[First], value: float = 1.0) -> Any:
    made: Any = nn.Sequential(cls(), nn.BatchNorm1d(8), nn.Linear(8, 8))
    with torch.no_grad():
        made[0].w.mul_(value)
    return made


def sharded(made: nn.Module, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in made.children():
        if not isinstance(layer, nn.BatchNorm1d):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(made, mesh=mesh, **options)


def stepped(made: nn.Module) -> nn.Module:
    sharded(made)(torch.ones(4, 8)).sum().backward()
    return made


WRAPS: dict[str, Callable[[Any], Any]] = {
    "FSDP2": sharded,
    "FSDP2 after a step": stepped,
    "FSDP2 on meta": lambda made: sharded(made.to("meta")),
    "FSDP2 offloaded": lambda made: sharded(
        made, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "FSDP1": lambda made: FullyShardedDataParallel(made, device_id=torch.device("cpu")),
    "FSDP1 original": lambda made: FullyShardedDataParallel(
        made, device_id=torch.device("cpu"), use_orig_params=True
    ),
    "DDP": nn.parallel.DistributedDataParallel,
    "DDP with a hook": lambda made: nn.parallel.DistributedDataParallel(hooked(made)),
}


def hooked(made: nn.Module) -> nn.Module:
    made.register_load_state_dict_post_hook(lambda module, keys: None)
    return made


def weight(step: str) -> torch.Tensor:
    plain = model(Second, 0.0)
    dc.load({"model": plain}, step, group=dist.group.WORLD)
    weight: torch.Tensor = plain[0].w.detach()
    return weight


def round_trip(rank: int, folder: str, wrap: str, swaps: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    dc.save({"model": WRAPS[wrap.replace(" on meta", "")](model(Second))}, f"{folder}/a")
    target = WRAPS[wrap](model(Second, 0.0))
    report = dc.load({"model": target}, f"{folder}/a")
    assert report.assumed == ()
    dc.save({"model": target}, f"{folder}/b")
    expected = model(Second)[0].w
    assert torch.equal(weight(f"{folder}/b"), expected)
    if "meta" in wrap:  # FSDP2 uses what was assigned
        target(torch.ones(4, 8)).sum().backward()


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("wrap", WRAPS)
def test_new_state_is_not_converted(wrap: str, swaps: bool, tmp_path: Path) -> None:
    run_ranks(round_trip, str(tmp_path), wrap, swaps, world_size=2)


def load_older(rank: int, folder: str, wrap: str) -> str:
    if not rank:
        dc.save({"model": model(First)}, f"{folder}/a", group=dist.new_group([0]))
    else:
        dist.new_group([0])
    dist.barrier()
    target = WRAPS[wrap](model(Second, 0.0))
    try:
        dc.load({"model": target}, f"{folder}/a")
    except dc.IncompatibleError as error:
        dc.save({"model": target}, f"{folder}/b")
        assert torch.equal(weight(f"{folder}/b"), torch.zeros(8, 8))
        return str(error)
    dc.save({"model": target}, f"{folder}/b")
    assert torch.equal(weight(f"{folder}/b"), model(First)[0].w.t())
    return ""


@pytest.mark.parametrize("wrap", [name for name in WRAPS if "meta" not in name])
def test_older_state_is_converted_or_refused(wrap: str, tmp_path: Path) -> None:
    errors = run_ranks(load_older, str(tmp_path), wrap, world_size=2)
    for error in errors:
        assert ("model.0: saved by version 1 of" in error) == ("FSDP" in wrap)


def in_stages(rank: int, folder: str) -> None:
    """Each rank has other layers, and a placeholder where another rank has a layer."""
    stages = model(Second, 2.0), model(Second, 3.0)
    for number, stage in enumerate(stages):
        stage[0 if number else 2] = nn.Identity()
    dc.save({"model": stages[rank]}, f"{folder}/a")
    again = model(Second, 0.0)
    again[0 if rank else 2] = nn.Identity()
    dc.load({"model": hooked(again)}, f"{folder}/a")
    if not rank:
        assert torch.equal(again[0].w, stages[0][0].w)
    index = dc.open(f"{folder}/a").index
    assert index.catalog.versions == {"model": {"": 1, "0": 2, "1": 2, "2": 1}}


def test_stages_of_a_pipeline_have_the_versions_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(in_stages, str(tmp_path), world_size=2)
