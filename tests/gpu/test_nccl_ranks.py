"""A job whose only process group is NCCL's: saves, loads and errors go beside it.

With fewer GPUs than ranks NCCL cannot make a single connection: then any use of it would fail.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

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
    first, second = run_ranks(NUM_RANKS, fail_and_go_on, str(tmp_path), store=None)
    assert first == second
    assert "rank 1 (host" in first[1]
