"""Averages by real ranks of a job, and the memory that they take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
import dist_ckpt.tools.average.average
from ranks import Options, RemoteError, run_ranks, try_ranks

pytestmark = pytest.mark.multi_process


def save_part(rank: int, root: str, steps: tuple[int, ...]) -> None:
    for step in steps:
        whole = torch.arange(32.0).reshape(8, 4) * step
        rows = dc.LocalShard(whole[rank * 4 : rank * 4 + 4].clone(), (8, 4), (rank * 4, 0))
        state = {"model": {"w": rows}, "optim": {"m": whole}}
        dc.save(state, f"{root}/{step}", step=step)


def average(rank: int, root: str, include: str) -> tuple[int, int]:
    report = dc.average(root, to=f"{root}-mean", last=0, include=include)
    return report.world_size, report.storage_writes.nbytes


def test_the_ranks_of_a_job_write_an_average_together(tmp_path):
    root = str(tmp_path / "run")
    run_ranks(save_part, root, (1, 2, 6), world_size=2)
    done = run_ranks(average, root, "model", world_size=3)
    assert [world_size for world_size, _ in done] == [3] * 3
    assert all(nbytes > 0 for _, nbytes in done)
    with dc.open(f"{root}-mean") as mean:
        assert (mean.world_size, mean.step) == (2, 6)
        right = torch.arange(32.0).reshape(8, 4)
        assert torch.equal(mean["model.w"][...].torch(), right * 3)
        assert torch.equal(mean["optim.m"][...].torch(), right * 6)
    assert dc.verify(f"{root}-mean").ok


def average_apart(rank: int, root: str) -> None:
    average(rank, root, "model" if rank else "optim")


def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    root = str(tmp_path / "run")
    run_ranks(save_part, root, (1, 2), world_size=2)
    for outcome in try_ranks(average_apart, root, world_size=2):
        assert isinstance(outcome.error, RemoteError)
        assert outcome.error.kind == "ValueError"
        assert "different options" in str(outcome.error)
    (file,) = Path(root, "1").glob("a1-*/model-00001.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for outcome in try_ranks(average, root, "model", world_size=2, options=Options()):
        assert isinstance(outcome.error, RemoteError)
        assert outcome.error.kind == "CorruptError"
        assert str(file) in str(outcome.error)
    assert not any(Path(f"{root}-mean").glob("a*/index.json"))


NBYTES = 256 << 20


def average_and_count(rank: int, root: str) -> int:
    before = status_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    dc.average([f"{root}/{n}" for n in range(3)], to=f"{root}/mean", include="w")
    return status_nbytes("VmHWM") - before


def status_nbytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="it is Linux that counts")
def test_an_average_takes_less_memory_than_its_largest_tensor(tmp_path):
    whole = torch.ones(NBYTES // 2, dtype=torch.bfloat16)
    for step in range(3):
        dc.save({"w": whole * step}, tmp_path / f"{step}", step=step)
    del whole
    (nbytes,) = run_ranks(average_and_count, str(tmp_path), world_size=1)
    print(f"{nbytes / 2**20:.0f} MiB for a tensor of {NBYTES >> 20} MiB")
    assert nbytes < NBYTES
