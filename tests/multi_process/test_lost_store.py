"""The job's store dies before anything of ours is connected to it: an error, and no hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

import dist_ckpt as dc
from ranks import run_ranks

pytestmark = pytest.mark.multi_process


def make_without_store(rank: int, number: int) -> str:
    """Stop the launcher, who has the store, then make a saver; return the error."""
    parent = os.getppid()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    launcher = min(map(int, children.split()))
    dist.barrier()
    if rank == 0:
        os.kill(launcher, number)
    dist.barrier()
    with pytest.raises(dc.RankError) as told:
        dc.AsyncSaver(job="test-never-made")
    return str(told.value)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_is_gone_is_an_error_in_time(number: int) -> None:
    environ = {"DIST_CKPT_HEARTBEAT_TIMEOUT_S": "1"}
    found = run_ranks(
        make_without_store,
        int(number),
        world_size=2,
        store="launcher",
        environ=environ,
        timeout_s=25,
    )
    for message in found:
        assert "the job's key-value store is gone or cut off (" in message
        assert "restart the job" in message
