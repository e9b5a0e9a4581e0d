"""The bytes of a state in a job: each rank's own, of what it holds whole, without a collective."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dist_ckpt as dc
from ranks import run_ranks

pytestmark = pytest.mark.multi_process

ROOT = Path(__file__).parents[2]


def each_for_itself(rank: int, root: str) -> Any:
    """Only rank 1 makes bytes at first: nothing waits for the other."""
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(6.0).view(3, 2)
    sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    replica = distribute_tensor(full, mesh, [Replicate()], src_data_rank=None)
    file = Path(root) / "bytes"
    if rank == 1:
        with pytest.raises(ValueError, match=r"^part: this rank has only a part of it"):
            dc.to_bytes({"part": sharded, "w": full})
        file.write_bytes(dc.to_bytes({"w": replica, "own": dc.PerRank(rank)}))
    torch.distributed.barrier()
    data = file.read_bytes()
    plain = dc.from_bytes(data)
    live = {"w": distribute_tensor(full * 0, mesh, [Shard(0)], src_data_rank=None), "own": None}
    if rank == 0:
        dc.load_bytes(live, data)
        assert torch.equal(live["w"].to_local(), full[:2])  # type: ignore[union-attr]
    return plain["w"].tolist(), plain["own"].value


@pytest.mark.sampled(3)
def test_another_process_makes_the_same_bytes() -> None:
    state = {"w": torch.arange(3.0), "tags": {"a", "b", "c"}, "own": dc.PerRank({"x": 1})}
    code = (
        "import sys, torch, dist_ckpt as dc\n"
        "s = {'w': torch.arange(3.), 'tags': {'c', 'b', 'a'}, 'own': dc.PerRank({'x': 1})}\n"
        "sys.stdout.buffer.write(dc.to_bytes(s))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, timeout=120, check=True, capture_output=True)
    assert done.stdout == dc.to_bytes(state)


def test_each_rank_makes_and_reads_bytes_for_itself(tmp_path: Path) -> None:
    told = run_ranks(each_for_itself, str(tmp_path), world_size=2)
    assert told == [([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], 1)] * 2
