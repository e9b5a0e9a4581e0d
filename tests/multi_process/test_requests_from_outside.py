"""`dist-ckpt request-save` asks a real job of two ranks, which saves, or says why not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_ckpt as dc
from dist_ckpt.checkpointer import rank_requests
from fork_server import forked_python
from ranks import Options, run_ranks, try_ranks

NEVER = dc.every(minutes=600)


def train(rank: int, root: str, num_steps: int, how: str = "") -> tuple[int, str]:
    """Train; return the last step that was done, and why the run has stopped.

    `how`: "asked twice" waits in its first step until two have asked; "lingers" until something is
    asked for, between its last step and the end; "saves" then; "dies" at its last step; "cannot":
    no step can be saved.
    """
    rank_requests.REQUEST_CHECK_INTERVAL_S = 0.05
    path, done = Path(root), 0
    state = {"x": torch.zeros(8), "step": 0}
    save = NEVER | dc.at_end if how == "lingers and saves" else NEVER
    if how == "cannot" and rank == 0:
        path.mkdir()
        for step in range(1, num_steps + 1):
            (path / f"step-{step:08d}").write_text("in the way")
    with dc.Checkpointer(root, save=save, background=how != "cannot") as ck:
        for step in ck.steps(state, until=num_steps):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.01)
            done = state["step"] = step
            if how == "asked twice" and step == 1:
                wait_for(path / ".requests", num_requests=2)
            if how == "dies" and step == num_steps:
                os.kill(os.getpid(), signal.SIGKILL)
        if how.startswith("lingers"):
            wait_for(path / ".requests")
        return done, ck.stopped.why if ck.stopped else ""


def wait_for(path: Path, *, num_requests: int = 0) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or len([*path.glob("request-*.json")]) < num_requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask(root: Path, *options: str) -> tuple[int, str]:
    """Run the command once a start is recorded; return its exit code and what it printed."""
    wait_for(root / ".incarnations" / "1.json")
    command = [forked_python(), "-m", "dist_ckpt", "request-save", str(root), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def saved(answer: tuple[int, str]) -> int:
    code, out = answer
    assert code == 0, out
    assert out.splitlines()[1].startswith("saved: step ")
    return int(out.splitlines()[1].split()[2].rstrip(","))


@contextmanager
def beside(act: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Do something in a thread while a job runs here; what that fails of is told first."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(act)
        try:
            yield future
        finally:
            future.result(timeout=60)


def steps_of(root: Path) -> list[int | None]:
    return [one.step for one in dc.checkpoints(root)]


def test_a_job_saves_goes_on_saves_and_stops(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def requests() -> list[int]:
        found = [saved(ask(root, "--wait"))]
        assert steps_of(root) == found  # by now, not some time later
        return [*found, saved(ask(root, "--wait", "--stop"))]

    with beside(requests) as asked:
        ends = run_ranks(train, str(root), 10_000, world_size=2)
    first, last = asked.result(timeout=60)
    assert first < last == ends[0][0] == ends[1][0]
    assert steps_of(root) == [first, last]
    assert "a request of process" in ends[0][1]
    state: dict[str, Any] = {"x": torch.ones(8), "step": 0}
    dc.load(state, root / f"step-{last:08d}")
    assert state["step"] == last


def test_two_requests_at_once_stop_it_at_one_step(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def requests() -> list[int]:
        with ThreadPoolExecutor(2) as pool:
            return [*map(saved, pool.map(lambda _: ask(root, "--wait", "--stop"), range(2)))]

    with beside(requests) as asked:
        ends = run_ranks(train, str(root), 10_000, "asked twice", world_size=2)
    assert {*asked.result(timeout=60)} == {ends[0][0]} == {ends[1][0]}
    assert steps_of(root)[-1] == ends[0][0]


@pytest.mark.parametrize("how", ["lingers", "lingers and saves"])
def test_a_request_between_the_last_step_and_the_end_is_answered(tmp_path: Path, how: str) -> None:
    root = tmp_path / "run"
    with beside(lambda: ask(root, "--wait", "--timeout", "50")) as asked:
        run_ranks(train, str(root), 1, how, world_size=2)
    answer = asked.result(timeout=60)
    if how == "lingers and saves":
        assert saved(answer) == 1
        return
    assert answer[0] == 1
    assert "not saved, ended: the run has ended, and its last steps are not saved" in answer[1]
    assert "Newest durable save: none yet" in answer[1]


def test_a_save_that_fails_is_told(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def requests() -> tuple[int, str]:
        failed = ask(root, "--wait")
        ask(root, "--stop")
        return failed

    with beside(requests) as asked:
        run_ranks(train, str(root), 2_000, "cannot", world_size=2)
    code, out = asked.result(timeout=60)
    assert code == 1
    assert "not saved, failed: step " in out
    assert "Newest durable save: none yet" in out


def test_a_dead_job_answers_nothing_and_the_next_one_does_not_obey(tmp_path: Path) -> None:
    root = tmp_path / "run"
    died = try_ranks(train, str(root), 3, "dies", world_size=2, options=Options(timeout_s=30))
    assert {one.signal for one in died} == {signal.SIGKILL}
    code, out = ask(root, "--wait", "--timeout", "0.5")
    assert (code, "there was no answer in 0.5 s, and the request is withdrawn" in out) == (6, True)
    assert ask(root, "--stop")[0] == 0
    assert run_ranks(train, str(root), 20, world_size=2) == [(20, "")] * 2
    assert steps_of(root) == []
    (answer,) = (root / ".requests").glob("answer-*.json")
    assert '"outcome":"ended"' in answer.read_text()
    assert "incarnation 2 of the run has begun since" in answer.read_text()
