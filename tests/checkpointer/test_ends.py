"""An end that the training did not want, while a save is under way."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import JobFolder, find_root_id, make_job_name
from dist_ckpt.checkpointer.save_policy import SavePolicy
from dist_ckpt.core.storage import open_storage
from run_training import fresh, keeper_of, steps_at, train

pytestmark = pytest.mark.multi_process


def writer_of(root: Path) -> int:
    """Return the process that writes what this one has staged."""
    root_id = find_root_id(*open_storage(root))
    owner = JobFolder(make_job_name(str(root), root_id or "")).rank(0).owner("writer")
    assert owner is not None
    return owner.pid


def test_an_error_of_the_training_is_raised_and_that_of_a_save_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    state = fresh()

    def run() -> None:
        with dc.Checkpointer(tmp_path, save=dc.every(steps=1)) as ck:
            for step in ck.steps(state, until=3):
                if step == 2:
                    until = time.monotonic() + 30
                    while not keeper_of(ck).durable.startswith("step 1,"):
                        assert time.monotonic() < until
                        time.sleep(0.01)
                    os.kill(writer_of(tmp_path), signal.SIGSTOP)
                if step == 3:
                    os.kill(writer_of(tmp_path), signal.SIGKILL)
                    raise ArithmeticError("the loss is nan")
                train(state, step)

    caplog.set_level(logging.INFO, logger="dist_ckpt")
    with pytest.raises(ArithmeticError, match="the loss is nan"):
        run()
    # By whom it is told: by who waits for the save at the end, or before that by the keeper.
    assert "a save has failed as well: " in caplog.text or "step 2 is not saved: " in caplog.text
    assert "the run ends with ArithmeticError. Newest durable save: step 1, " in caplog.text
    assert steps_at(tmp_path) == [1]


def test_signals_are_taken_until_the_last_commit_is_put_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun sends SIGTERM to rank 0 once another rank has ended, which has less to do."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before, seen = signal.getsignal(signal.SIGUSR1), []

    def put_down(checkpoint: dc.Checkpoint) -> None:
        time.sleep(1.0)  # meanwhile the run is closed
        seen.append(signal.getsignal(signal.SIGUSR1))

    save = dc.at_end | dc.on_signal("USR1")
    state = fresh()
    with dc.Checkpointer(tmp_path, save=save, on_commit=put_down) as ck:
        for step in ck.steps(state, until=1):
            train(state, step)
    assert len(seen) == 1
    assert seen[0] != before
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    ("save", "until", "is_told"),
    [(dc.at(100), 3, True), (dc.at(2), 3, False), (dc.at_end, 3, False), (dc.at(100), 0, False)],
)
def test_a_run_that_has_saved_nothing_says_so(
    save: SavePolicy, until: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with dc.Checkpointer(tmp_path, save=save, background=False) as ck:
        for step in ck.steps({"step": 0}, until=until):
            assert step <= until
    assert ("none of steps 1 to 3 was saved: save=at(100)" in caplog.text) == is_told
