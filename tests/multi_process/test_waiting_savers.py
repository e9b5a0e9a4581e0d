"""An AsyncSaver waits for its saves, leaves them to its writer, or is dropped with them."""

from __future__ import annotations

import os
import signal
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from ranks import run_ranks
from run_training import Told
from tests.multi_process.test_background_saves import (
    CALM,
    await_end,
    folder_of,
    left_of,
    state_of,
    steps_in,
    writer_of,
)

pytestmark = pytest.mark.multi_process


@pytest.fixture
def job() -> Iterator[str]:
    """A job of its own; whatever is left of it is removed."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    folder = JobFolder(name)
    for one in folder.rank_folders():
        one.remove()
    folder.remove_if_empty()


def wait_for_saves(rank: int, root: str, job: str) -> str:
    with dc.AsyncSaver(job=job) as saver:
        saver.wait()  # for nothing
        handle = saver.save(state_of(rank, 2, 1), folder_of(root, 1), step=1)
        saver.wait(60)
        assert handle.done()
        assert dc.open(folder_of(root, 1)).step == 1
        dist.barrier()
        os.kill(writer_of(job, rank), signal.SIGSTOP)
        handle = saver.save(state_of(rank, 2, 2), folder_of(root, 2), step=2)
        began = time.monotonic()
        with pytest.raises(
            TimeoutError, match=r"not settled within 0\.2 s .*they continue, wait again"
        ):
            saver.wait(0.2)
        assert 0.2 <= time.monotonic() - began < 50
        dist.barrier()
        os.kill(writer_of(job, rank), signal.SIGCONT)
        saver.wait(60)
        assert handle.done()
        Path(root, f"taken-{rank}").write_text("a file where a folder should be")
        saver.save(state_of(rank, 2, 3), f"{root}/taken-0", step=3)
        with pytest.raises(dc.ExistsError) as told:
            saver.wait(60)
        saver.wait(60)  # it was told
        return str(told.value)


def test_wait_waits_for_all_saves_and_raises_what_failed_once(tmp_path: Path, job: str) -> None:
    found = run_ranks(wait_for_saves, str(tmp_path), job, world_size=2, environ=CALM)
    assert all("taken-0" in told for told in found)


def leave(rank: int, root: str, job: str) -> float:
    saver = dc.AsyncSaver(job=job)
    saver.save(state_of(rank, 2, 1), folder_of(root, 1), step=1).result(60)
    writer = writer_of(job, rank)
    dist.barrier()
    os.kill(writer, signal.SIGSTOP)
    saver.save(state_of(rank, 2, 2), folder_of(root, 2), step=2)
    began = time.monotonic()
    saver.detach()
    seconds = time.monotonic() - began
    saver.detach()
    saver.close()
    with pytest.raises(ValueError, match="is closed"):
        saver.wait()
    dist.barrier()
    os.kill(writer, signal.SIGCONT)
    await_end(job, rank)
    return seconds


def go_on(rank: int, root: str, job: str) -> tuple[int | None, set[float]]:
    state = state_of(rank, 2, -1)
    with dc.AsyncSaver(job=job) as saver:
        return saver.restore(state), steps_in(state)


def test_who_leaves_waits_for_nothing_and_the_writer_goes_on(tmp_path: Path, job: str) -> None:
    assert max(run_ranks(leave, str(tmp_path), job, world_size=2, environ=CALM)) < 5
    assert dc.verify(folder_of(str(tmp_path), 2), level="full").ok
    assert left_of(job)  # for the next run
    found = run_ranks(go_on, str(tmp_path), job, world_size=2, environ=CALM)
    assert found == [(2, {2.0})] * 2


def drop(rank: int, root: str, job: str) -> tuple[list[str], list[str]]:
    told = Told()
    saver: Any = dc.AsyncSaver(job=job)
    writer = writer_of(job, rank)
    os.kill(writer, signal.SIGSTOP)
    saver.save(state_of(rank, 1, 1), folder_of(root, 1), step=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del saver
    os.kill(writer, signal.SIGCONT)
    await_end(job, rank)
    return [str(one.message) for one in caught], told.of("was dropped without close()")


def test_who_is_dropped_says_what_becomes_of_its_saves(tmp_path: Path, job: str) -> None:
    ((caught, told),) = run_ranks(drop, str(tmp_path), job, world_size=1, environ=CALM)
    assert caught[0] == f"unclosed AsyncSaver of job {job}"
    assert "continues with 1 unsettled saves" in told[0]
    assert dc.verify(folder_of(str(tmp_path), 1), level="full").ok
