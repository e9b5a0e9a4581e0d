"""One background save by real ranks: what it keeps alive, and what if it cannot be staged."""

from __future__ import annotations

import gc
import uuid
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.async_save.trainer import background_save as save_module
from ranks import run_ranks

pytestmark = pytest.mark.multi_process


def keep_handles(rank: int, root: str, job: str) -> list[bool]:
    with dc.AsyncSaver(job=job) as saver:
        handles, seen = [], []
        for step in range(3):
            state: dict[str, Any] = {"w": torch.full((100,), step), "log": {"x": step}}
            seen.append(weakref.ref(state["w"]))
            handles.append(saver.save(state, f"{root}/{step}", step=step))
        del state
        gc.collect()
        reports = [handle.result(60) for handle in handles]
    assert [report.step for report in reports if report is not None] == [0, 1, 2]
    return [tensor() is None for tensor in seen]


def test_a_handle_does_not_keep_the_state_alive(tmp_path: Path) -> None:
    (gone,) = run_ranks(keep_handles, str(tmp_path), f"test-{uuid.uuid4().hex}", world_size=1)
    assert gone == [True, True, True]


def fail_to_stage(rank: int, root: str, job: str, before: bool) -> list[str]:
    """Save; then rank 1 cannot stage, before or after a part of it; save again."""
    told = []
    save: Any = save_module
    real = save.stage

    def refuse(*args: Any) -> None:
        if not before:
            args[0].advance(args[0].spans.images[0].start + 4096)
        raise OSError("no such memory")

    state = {"w": dc.LocalShard(torch.full((50,), float(rank)), (100,), (50 * rank,))}
    with dc.AsyncSaver(job=job) as saver:
        saver.save(state, f"{root}/a", step=1).result(60)
        if rank == 1:
            save.stage = refuse
            with pytest.raises(OSError, match="no such memory"):
                saver.save(state, f"{root}/b", step=2)
            save.stage = real
        else:
            failure = saver.save(state, f"{root}/b", step=2).exception(60)
            told.append(f"{type(failure).__name__}: {failure}")
        for step in (3, 4, 5):
            saver.save(state, f"{root}/{step}", step=step).result(60)
    return told


@pytest.mark.parametrize("before", [True, False])
def test_what_one_rank_cannot_stage_fails_on_all_and_the_saver_goes_on(
    tmp_path: Path, before: bool
) -> None:
    job = f"test-{uuid.uuid4().hex}"
    told, _ = run_ranks(fail_to_stage, str(tmp_path), job, before, world_size=2)
    (message,) = told
    assert "rank 1" in message
    assert "could not be staged: OSError: no such memory" in message
    for name in "a345":
        assert dc.verify(tmp_path / name, level="full").ok
    with pytest.raises(dc.NotFoundError):
        dc.open(tmp_path / "b")
