"""A process serves the newest checkpoint of a run, which another process saves and prunes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from fork_server import forked_python

pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(600)]

NUM_SERVED = 15

SERVER = f"""
import sys
import torch
import dist_ckpt as dc

run, step, model = dc.Run(sys.argv[1]), None, torch.nn.Linear(64, 64)
with run.lease_newer(timeout_s=0) as nothing:
    assert nothing is None
print("waiting", flush=True)
for _ in range({NUM_SERVED}):
    with run.lease_newer(step, timeout_s=500, poll_s=0.001) as checkpoint:
        assert checkpoint.step > (step or 0)
        step = checkpoint.step
        dc.load({{"model": model}}, checkpoint.path, include="model")
        assert (model.weight == step).all() and checkpoint["model.bias"][5].item() == step
print("served", flush=True)
"""


def test_a_server_reads_each_step_that_it_leases_whatever_is_pruned(tmp_path: Path) -> None:
    root, model = tmp_path / "run", torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    run, step = dc.Run(root), 0
    with subprocess.Popen(
        [forked_python(), "-c", SERVER, str(root)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "waiting\n"
        while server.poll() is None:
            step += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            dc.save({"model": model, "optim": optimizer}, root / f"step-{step}", step=step)
            run.prune(dc.keep.last(1))
        assert (server.returncode, server.stdout.read()) == (0, "served\n")
    assert step >= NUM_SERVED
    run.prune(dc.keep.last(1))
    assert [(info.step, info.leases) for info in run.checkpoints] == [(step, ())]
