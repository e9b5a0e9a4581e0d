"""A rank is killed in a save, and rank 0, which serves the store, leaves at once when told.

Once each way; DIST_CKPT_TEST_ROUNDS=24 is for more, by hand.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from ranks import Options, try_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.waits]

WORLD_SIZE = 4
VICTIM = 2
FRAIL = {"DIST_CKPT_HEARTBEAT_TIMEOUT_S": "3", "DIST_CKPT_JOIN_TIMEOUT_S": "30"}
NUM_ROUNDS = int(os.environ.get("DIST_CKPT_TEST_ROUNDS", "1"))


class Dies:
    """An object that ends its process when it is saved."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise AssertionError


def save_until_killed(rank: int, folder: str, how: str) -> None:
    """Write down what the save was told, then leave: rank 0 without a word, and the store goes."""
    state: dict[str, Any] = {"w": dc.PerRank(torch.ones(1000))}
    dc.save(state, f"{folder}/first")
    if rank == VICTIM:
        state["dies"] = Dies()
    try:
        dc.save(state, f"{folder}/second")
    except dc.CheckpointError as error:
        # What others told later comes to a rank that looked away for a moment.
        Path(f"{folder}/told-{rank}").write_text(f"{type(error).__name__} {error.rank}: {error}")
    if rank == 0 and how == "exit":
        os._exit(7)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)


def survivors_told(folder: str, how: str) -> list[str]:
    """Return what each survivor was told."""
    options = Options(store="rank 0", environ=FRAIL, timeout_s=40)
    try_ranks(save_until_killed, folder, how, world_size=WORLD_SIZE, options=options)
    files = [Path(f"{folder}/told-{rank}") for rank in range(WORLD_SIZE) if rank != VICTIM]
    return [file.read_text() if file.exists() else "nothing" for file in files]


def is_named(told: str) -> bool:
    return told.startswith(f"RankError {VICTIM}: rank {VICTIM} (host ")


@pytest.mark.parametrize("how", ["exit", "signal"])
@pytest.mark.parametrize("number", range(NUM_ROUNDS))
def test_every_survivor_names_the_dead_rank_though_rank_0_leaves_at_once(
    number: int, how: str, tmp_path: Path
):
    told = survivors_told(str(tmp_path), how)
    assert all(map(is_named, told)), told
