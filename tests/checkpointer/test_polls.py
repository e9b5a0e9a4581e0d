"""Of which step the state is that a request saves, when the loop is in the middle of its body."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.checkpointer.save_policy import SavePolicy
from run_training import fresh, steps_at, steps_in, train

STOP = dc.on_signal("USR1")


pytestmark = pytest.mark.usefixtures("alone")


def body_of(root: Path, step: int, save: SavePolicy = STOP) -> Iterator[Any]:
    """Yield the checkpointer and the state in the body of a step, which is not done yet."""
    state = fresh()
    with dc.Checkpointer(root, save=save, background=False) as ck:
        for now in ck.steps(state, until=step):
            if now == step:
                yield ck, state
            else:
                train(state, now)


def poll_until_stopped(ck: dc.Checkpointer, step: int) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    until = time.monotonic() + 30
    while not ck.should_stop:
        assert time.monotonic() < until
        ck.poll(step)
        time.sleep(0.005)


def restored(root: Path) -> tuple[int | None, set[float]]:
    state = fresh()
    with dc.Checkpointer(root, save=STOP, background=False) as ck:
        return ck.restore(state), steps_in(state)


def test_an_evaluation_after_the_optimizer_step_saves_that_step(tmp_path: Path) -> None:
    for ck, state in body_of(tmp_path, 3):
        train(state, 3)
        poll_until_stopped(ck, 3)
        assert ck.stopped.step == 3
    assert steps_at(tmp_path) == [3]
    assert restored(tmp_path) == (3, {3.0})


def test_a_poll_between_the_parts_of_a_batch_saves_the_step_before(tmp_path: Path) -> None:
    for ck, state in body_of(tmp_path, 3):
        poll_until_stopped(ck, 2)
        train(state, 3)
        assert ck.stopped.step == 2
    assert steps_at(tmp_path) == [2]
    assert restored(tmp_path) == (2, {2.0})


def test_a_poll_in_a_body_that_does_not_say_its_step_is_refused(tmp_path: Path) -> None:
    for ck, state in body_of(tmp_path, 3):
        with pytest.raises(ValueError, match=r"poll\(step\) after the optimizer step"):
            ck.poll()
        train(state, 3)
        ck.step(3)
        ck.poll()  # now it is known


def test_a_poll_of_a_step_long_done_is_refused(tmp_path: Path) -> None:
    for ck, state in body_of(tmp_path, 3):
        with pytest.raises(ValueError, match="step 1 is not above the last step, 2"):
            ck.poll(1)
        train(state, 3)


def test_a_body_that_polls_or_saves_its_step_saves_it_once(tmp_path: Path) -> None:
    state = fresh()
    with dc.Checkpointer(tmp_path, save=dc.every(steps=2), background=False) as ck:
        for step in ck.steps(state, until=5):
            train(state, step)
            if step == 3:
                ck.save(step)
            if step == 4:
                ck.poll(step)  # which is a multiple of 2, so that it is saved here
                assert steps_at(tmp_path) == [2, 3, 4]
            if step == 5:
                ck.poll(step)
                break
    assert steps_at(tmp_path) == [2, 3, 4]
