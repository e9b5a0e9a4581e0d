"""Background saves of two starts of a run: the older one's writers wake up beside the newer one."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.core.commit.attempts import find_checkpoint
from dist_ckpt.core.commit.records.incarnations import Incarnation, begin_incarnation
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.storage import open_storage
from ranks import Options, run_ranks, try_ranks
from tests.multi_process.test_background_saves import (
    CALM,
    RESULT_S,
    assign,
    await_end,
    folder_of,
    state_of,
    steps_in,
    writer_of,
)

pytestmark = pytest.mark.multi_process

WORLD_SIZE = 2


@pytest.fixture
def job() -> Iterator[str]:
    """A job of its own; whatever is left of it is removed."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    folder = JobFolder(name)
    for one in folder.rank_folders():
        one.remove()
    folder.remove_if_empty()


def started(root: str, restored: tuple[int, Attempt] | None = None) -> None:
    begin_incarnation(*open_storage(root), restored=restored, why="", by="a job")


def save(
    saver: dc.AsyncSaver, state: dict[str, Any], root: str, step: int, run: Incarnation
) -> Any:
    assign(state, step)
    options = SaveOptions(step=step, incarnation=run, boundary=step)
    return saver.save_with(state, folder_of(root, step), options)


def save_as_the_first_start(rank: int, root: str, job: str) -> None:
    """Save a step; then die while a writer stands still with the next one before it."""
    saver = dc.AsyncSaver(job=job)
    state, run = state_of(rank, WORLD_SIZE, 0), Incarnation(root, 1)
    report = save(saver, state, root, 1, run).result(RESULT_S)
    assert report.attempt.startswith("a1000-")
    if rank == 0:
        os.kill(writer_of(job, 0), signal.SIGSTOP)
    save(saver, state, root, 2, run).wait_staged(RESULT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(rank: int, root: str, job: str) -> tuple[int | None, set[float], str]:
    """Restore what memory has, and save."""
    state = state_of(rank, WORLD_SIZE, -1)
    with dc.AsyncSaver(job=job, drain_timeout_s=30) as saver:
        restored, found = saver.restore(state), steps_in(state)
        report = save(saver, state, root, 2, Incarnation(root, 2)).result(RESULT_S)
    return restored, found, report.attempt


def test_a_writer_of_an_older_start_that_wakes_up_late_commits_nothing(
    tmp_path: Path, job: str
) -> None:
    root = str(tmp_path)
    started(root)
    options = Options(environ=CALM)
    ended = try_ranks(save_as_the_first_start, root, job, world_size=WORLD_SIZE, options=options)
    assert [one.signal for one in ended] == [signal.SIGKILL] * WORLD_SIZE, ended
    where = 1, find_checkpoint(*open_storage(folder_of(root, 1)))[0]
    started(root, where)
    os.kill(writer_of(job, 0), signal.SIGCONT)
    for rank in range(WORLD_SIZE):
        await_end(job, rank)
    with pytest.raises(dc.NotFoundError):
        find_checkpoint(*open_storage(folder_of(root, 2)))
    # What it has staged is complete in memory, and newer; but it is orphaned.
    assert len(JobFolder(job).rank_folders()) == WORLD_SIZE
    for restored, found, attempt in run_ranks(
        go_on, root, job, world_size=WORLD_SIZE, environ=CALM
    ):
        assert (restored, found) == (1, {1.0})
        assert attempt.startswith("a2000-")


def refused(rank: int, root: str, job: str) -> tuple[str, str]:
    state = state_of(rank, WORLD_SIZE, 0)
    saver = dc.AsyncSaver(job=job)
    save(saver, state, root, 1, Incarnation(root, 1)).result(RESULT_S)
    if rank == 0:
        started(root, (1, find_checkpoint(*open_storage(folder_of(root, 1)))[0]))
    error = save(saver, state, root, 2, Incarnation(root, 1)).exception(RESULT_S)
    saver.close()
    return type(error).__name__, str(error)


def test_a_save_of_an_older_start_is_refused_and_says_who_has_taken_over(
    tmp_path: Path, job: str
) -> None:
    started(str(tmp_path))
    found = run_ranks(refused, str(tmp_path), job, world_size=WORLD_SIZE, environ=CALM)
    for kind, told in found:
        assert kind == "ConflictError"
        assert "incarnation 2 of this run, a job, has taken over" in told
    assert not Path(folder_of(str(tmp_path), 2)).exists()
