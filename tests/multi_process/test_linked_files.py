"""Real ranks link what does not change, in the foreground and in the background, and back up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from linking import inodes
from ranks import run_ranks
from run_training import clear_memory

pytestmark = pytest.mark.multi_process


def state(rank: int, step: int) -> dict[str, object]:
    rows = torch.full((4, 8), 7.0 + rank)
    base = dc.LocalShard(rows, (8, 8), (4 * rank, 0))
    return {"model": {"base": {"w": base}, "lora": torch.full((3,), float(step))}, "step": step}


def save_all(rank: int, folder: str) -> None:
    root = Path(folder)
    for step in range(1, 5):
        report = dc.save(
            state(rank, step), root / "fg" / f"s{step}", step=step, link_unchanged="model.base"
        )
        assert report.num_linked == (0 if step < 3 else 2)
    with dc.AsyncSaver(root) as saver:
        for step in range(1, 5):
            handle = saver.save(
                state(rank, step),
                root / "bg" / f"s{step}",
                step=step,
                link_unchanged="model.base.*",
            )
            done = handle.result()
            assert done is not None
            assert done.num_linked == (0 if step < 3 else 2)
    with pytest.raises(ValueError, match="link_unchanged"):
        dc.save(state(rank, 9), root / "odd", link_unchanged=("model.base", "model.lora")[rank])
    with dc.Checkpointer(root / "run", save=dc.every(steps=1), link_unchanged="model.base") as ck:
        held = state(rank, 0)
        for step in ck.steps(held, until=4):
            held["step"] = step
            ck.step(step)
        assert ck.backup(4) == f"{root}/run/backup/step-00000004"


def test_two_ranks_link_files_of_their_own(tmp_path: Path) -> None:
    run_ranks(save_all, str(tmp_path), world_size=2)
    for how in ("fg", "bg"):
        for step in (3, 4):
            now, then = inodes(tmp_path / how / f"s{step}"), inodes(tmp_path / how / f"s{step - 2}")
            common = {name for name in now if now[name] == then[name]}
            assert common == {"r00-00000.safetensors", "r00-00001.safetensors"}
            assert dc.verify(tmp_path / how / f"s{step}").ok
    assert inodes(tmp_path / "run" / "step-00000004") == inodes(
        tmp_path / "run" / "backup" / "step-00000004"
    )
    assert dc.verify(tmp_path / "run" / "backup" / "step-00000004").ok
    clear_memory(tmp_path / "run")
