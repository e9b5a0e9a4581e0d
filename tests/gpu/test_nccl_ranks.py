"""Jobs of ranks on a device, whose only process group is NCCL's or gloo's: ours go beside it.

With fewer GPUs than ranks NCCL cannot make a single connection: then any use of it would fail.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import dist_ckpt as dc
from ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multi_process]

NUM_RANKS = 2


@pytest.fixture(autouse=True)
def _needs_nccl() -> None:
    # Not when the module is imported: the parent of the ranks must not start CUDA.
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        pytest.skip("no GPU with NCCL here")


def state_of(rank: int, value: float) -> dict[str, Any]:
    part = torch.full((2, 3), value, device="cuda") + rank
    return {
        "part": dc.LocalShard(part, (2 * NUM_RANKS, 3), (2 * rank, 0)),
        "replica": torch.full((5,), value, device="cuda"),
    }


def fail_and_go_on(rank: int, folder: str) -> tuple[str, str]:
    num_devices = torch.cuda.device_count()
    torch.cuda.set_device(rank % num_devices)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=NUM_RANKS)
    path = f"{folder}/ck"
    dc.save(state_of(rank, 1.0), path)
    bad = {**state_of(rank, 2.0), "bad": object()}
    with pytest.raises(TypeError) as caught:
        dc.save(bad if rank == 1 else state_of(rank, 2.0), path, overwrite=True)
    loaded = state_of(rank, 0.0)
    dc.load(loaded, path)
    saved = state_of(rank, 1.0)
    assert torch.equal(loaded["part"].tensor, saved["part"].tensor)
    assert torch.equal(loaded["replica"], saved["replica"])
    with dc.AsyncSaver(folder) as saver:
        saver.save(state_of(rank, 3.0), f"{folder}/background", step=3).result(60)
        restored, saved = state_of(rank, 0.0), state_of(rank, 3.0)
        assert saver.restore(restored) == 3
        assert torch.equal(restored["part"].tensor, saved["part"].tensor)
        assert torch.equal(restored["replica"], saved["replica"])
    if num_devices >= NUM_RANKS:
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        assert total.item() == NUM_RANKS
    return type(caught.value).__name__, str(caught.value)


def test_beside_an_nccl_group_all_ranks_are_told_the_same_error_and_go_on(tmp_path):
    first, second = run_ranks(fail_and_go_on, str(tmp_path), world_size=NUM_RANKS, store=None)
    assert first == second
    assert "rank 1 (host" in first[1]


# --- what shards a model on a device --------------------------------------------------------------

WRAPS = ("fsdp2", "fsdp1", "fsdp1 flat", "ddp")


def wrapped(model: nn.Module, wrap: str) -> nn.Module:
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[0])
    if wrap == "fsdp2":
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        for part in (*model.children(), model):
            fully_shard(part, mesh=mesh)
        return model
    return FullyShardedDataParallel(model, use_orig_params=wrap == "fsdp1", device_id=0)


def train(
    rank: int, backend: str, world_size: int, wrap: str, save: str, loads: list[str]
) -> dict[str, list[Any]]:
    """Train a step and save in both ways; then load each of some; return all of them whole."""
    torch.cuda.set_device(0)
    store = dist.FileStore(f"{save}-store", world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    torch.manual_seed(len(save))
    model = wrapped(nn.Sequential(nn.Linear(15, 33), nn.Linear(33, 7)).cuda(), wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(4, 15, device="cuda")).square().sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer}
    dc.save(state, save)
    with dc.AsyncSaver() as saver:
        saver.save(state, f"{save}-background")
    found = {save: whole(model, optimizer), f"{save}-background": whole(model, optimizer)}
    for path in loads:
        dc.load(state, path)
        found[path] = whole(model, optimizer)
    dist.destroy_process_group()
    return found


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all values, put together without dist_ckpt."""
    # By torch where it can: to gather a DTensor on a device over gloo it dies (2.11).
    options = StateDictOptions(full_state_dict=isinstance(model, FullyShardedDataParallel))
    states: tuple[Any, Any] = get_state_dict(model, optimizer, options=options)
    weights, moments = states
    found = {**weights, **{name: one["exp_avg"] for name, one in moments["state"].items()}}
    return [[name, gathered(value).tolist()] for name, value in sorted(found.items())]


def gathered(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value.to_local().cpu())
    return torch.cat(parts)


@pytest.mark.filterwarnings("ignore")
def test_any_wrapper_on_a_device_loads_what_any_other_saved_there(tmp_path):
    saved: dict[str, Any] = {}
    jobs = [("nccl", 1, wrap) for wrap in WRAPS] + [("gloo", 2, "fsdp2"), ("gloo", 2, "ddp")]
    for backend, world_size, wrap in jobs:
        path = f"{tmp_path}/{backend}-{wrap}"
        args = (backend, world_size, wrap, path, list(saved))
        found = run_ranks(train, *args, world_size=world_size, store=None)[0]
        assert {name: found[name] for name in saved} == saved
        saved |= {name: found[name] for name in (path, f"{path}-background")}
    assert len(saved) == 2 * len(jobs)
