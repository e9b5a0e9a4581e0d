"""A training whose state tells its step: every number in it is the step that was done last."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import JobFolder, find_root_id, make_job_name
from dist_ckpt.checkpointer.maintenance import MaintenanceThread
from dist_ckpt.core.format.filenames import ROOT_ID
from dist_ckpt.core.storage import open_storage

# Of all ranks together.
NUM_ROWS = 120


def fresh(rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Return the state of a rank before its first step: -1 everywhere."""
    num_rows = NUM_ROWS // world_size
    rows = torch.full((num_rows, 4), -1.0)
    shard = dc.LocalShard(rows, (NUM_ROWS, 4), (rank * num_rows, 0))
    return {"model": {"rows": shard, "small": torch.full((3,), -1.0)}, "progress": {"step": -1}}


def train(state: Mapping[str, Any], step: int) -> None:
    """Do an optimizer step."""
    state["model"]["rows"].tensor.fill_(step)
    state["model"]["small"].fill_(step)
    state["progress"]["step"] = step


def steps_in(state: Mapping[str, Any]) -> set[float]:
    """Return all numbers of a state: one, if nothing is mixed."""
    tensors = state["model"]["rows"].tensor, state["model"]["small"]
    found = {float(one) for tensor in tensors for one in tensor.aminmax()}
    return found | {float(state["progress"]["step"])}


def steps_at(root: str | Path) -> list[int | None]:
    """Return the steps of the checkpoints that a run may go on from; each holds its step."""
    found = [one for one in dc.checkpoints(root) if one.where and not one.is_orphaned]
    for one in found:
        with dc.open(one.path) as checkpoint:
            assert checkpoint.objects == {"progress": {"step": one.step}}, one
    return [one.step for one in found]


def damage(root: str | Path, step: int, name: str = "model-00000.safetensors") -> Path:
    """Flip the last byte of a file of a step; return the file."""
    (file,) = Path(root, f"step-{step:08}").glob(f"a*/{name}")
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(bytes(data))
    return file


def clear_memory(folder: Path) -> None:
    """Remove what the runs whose roots lie in a folder have left in memory; end their writers."""
    for marker in folder.rglob(ROOT_ID):
        root_id = find_root_id(*open_storage(marker.parent))
        job = JobFolder(make_job_name(str(marker.parent), root_id or ""))
        for one in job.rank_folders():
            if (owner := one.owner("writer")) is not None:
                os.kill(owner.pid, signal.SIGKILL)
            one.remove()
        job.remove_if_empty()


def keeper_of(checkpointer: dc.Checkpointer) -> MaintenanceThread:
    """Return rank 0's thread beside the training."""
    assert checkpointer._run is not None
    keeper = checkpointer._run.requests.maintenance
    assert keeper is not None
    return keeper


class Told(logging.Handler):
    """What `dist_ckpt` has told the log, from construction on."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logging.getLogger("dist_ckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())

    def of(self, part: str) -> list[str]:
        """Return the lines in which a text occurs."""
        return [line for line in self.lines if part in line]
