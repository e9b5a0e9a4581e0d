"""A run keeps a checkpoint where its rules do not reach."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import dist_ckpt as dc
from linking import inodes
from run_training import fresh, steps_at, train

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("background", [False, True])
def test_a_step_is_kept_out_of_reach_once_it_is_durable(tmp_path: Path, background: bool) -> None:
    root = tmp_path / "run"
    often, newest = dc.every(steps=1), dc.keep.last(1)
    with dc.Checkpointer(root, save=often, keep=newest, background=background) as ck:
        state = fresh()
        for step in ck.steps(state, until=4):
            train(state, step)
            ck.step(step)
            if step == 2:
                assert ck.backup(2) == f"{root}/backup/step-00000002"
                assert ck.backup() == f"{root}/backup/step-00000002"
    assert steps_at(root) == [4]
    assert steps_at(root / "backup") == [2]
    with dc.Checkpointer(root, background=background) as ck:  # what it goes on from is another
        assert ck.restore(fresh()) == 4
        ck.backup()
    assert steps_at(root / "backup") == [2, 4]
    assert inodes(root / "backup" / "step-00000004") == inodes(root / "step-00000004")


def test_what_cannot_be_kept_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with dc.Checkpointer(None) as ck:
        assert ck.backup() is None
    root = tmp_path / "run"
    with dc.Checkpointer(root, save=dc.at(2), background=False) as ck:
        with pytest.raises(dc.NotFoundError):
            ck.backup()
        state = fresh()
        for step in ck.steps(state, until=3):
            train(state, step)
        with pytest.raises(dc.NotFoundError, match="no checkpoint of step 3; the steps there are"):
            ck.backup(3)
        with pytest.raises(TypeError, match="step='2'"):
            ck.backup("2")  # type: ignore[arg-type]
    with (
        dc.Checkpointer(root, read_only=True) as ck,
        pytest.raises(ValueError, match="read_only=True changes nothing"),
    ):
        ck.backup(2)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
