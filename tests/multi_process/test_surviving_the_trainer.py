"""Trainers and writers are killed; what they had reported is there, and the next run goes on."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.async_save.trainer import background_save as save_module
from ranks import Options, run_ranks, try_ranks
from tests.multi_process.test_background_saves import (
    CALM,
    RESULT_S,
    assign,
    await_end,
    folder_of,
    left_of,
    state_of,
    steps_in,
    writer_of,
)

pytestmark = pytest.mark.multi_process

FRAIL = {**CALM, "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "3"}


@pytest.fixture
def job() -> Iterator[str]:
    """A job of its own; its writers are ended, and whatever is left of it is removed."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    folder = JobFolder(name)
    for one in folder.rank_folders():
        if (owner := one.owner("writer")) is not None:
            os.kill(owner.pid, signal.SIGKILL)
            await_end(name, one.rank)
        one.remove()
    folder.remove_if_empty()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- one death, at one place -------------------------------------------------------------------


def die_when_staged(rank: int, root: str, job: str, world_size: int) -> None:
    state = state_of(rank, world_size, 1)
    saver = dc.AsyncSaver(job=job, max_bytes_per_s=200_000)
    saver.save(state, folder_of(root, 1), step=1).result(RESULT_S)
    assign(state, 2)
    saver.save(state, folder_of(root, 2), step=2).wait_staged()
    die()


def resume(rank: int, root: str, job: str, world_size: int) -> tuple[int | None, set[float], int]:
    """Restore, and save once more."""
    state = state_of(rank, world_size, -1)
    with dc.AsyncSaver(job=job) as saver:
        step = saver.restore(state)
        from_memory = 0 if saver.restored is None else saver.restored.nbytes_from_memory
        found = steps_in(state)
        saver.save(state, f"{root}/next", step=1000).result(RESULT_S)
    return step, found, from_memory


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_that_is_staged_is_committed_without_its_trainer(
    world_size: int, tmp_path: Path, job: str
) -> None:
    root = str(tmp_path)
    options = Options(environ=CALM)
    args = (root, job, world_size)
    ended = try_ranks(die_when_staged, *args, world_size=world_size, options=options)
    assert [outcome.signal for outcome in ended] == [signal.SIGKILL] * world_size, ended
    for rank in range(world_size):
        await_end(job, rank)
    assert dc.verify(folder_of(root, 2), level="full").ok
    found = run_ranks(resume, *args, world_size=world_size, environ=CALM)
    for step, steps, from_memory in found:
        assert (step, steps) == (2, {2.0})
        assert from_memory > 0
    assert left_of(job) == []


def test_a_later_run_waits_for_the_writers_of_an_earlier_one(tmp_path: Path, job: str) -> None:
    root = str(tmp_path)
    try_ranks(die_when_staged, root, job, 2, world_size=2, options=Options(environ=CALM))
    # Their writers are at it still.
    found = run_ranks(resume, root, job, 2, world_size=2, environ=CALM)
    assert [step for step, _, _ in found] == [2, 2]
    assert dc.verify(folder_of(root, 2), level="full").ok


@pytest.mark.parametrize("world_size", [1, 4])
def test_another_number_of_ranks_restores_from_memory(
    world_size: int, tmp_path: Path, job: str
) -> None:
    root = str(tmp_path)
    try_ranks(die_when_staged, root, job, 2, world_size=2, options=Options(environ=CALM))
    found = run_ranks(restore_as, root, job, world_size, world_size=world_size, environ=CALM)
    assert found == [(2, {2.0}, True)] * world_size
    # Nothing was saved, but what was in memory is committed.
    assert left_of(job) == []


def restore_as(rank: int, root: str, job: str, world_size: int) -> tuple[int | None, Any, bool]:
    state = state_of(rank, world_size, -1)
    del state["model"]["rows"], state["mine"]
    rows = 2000 // world_size
    import torch

    whole = torch.zeros(rows, 8)
    state["model"]["rows"] = dc.LocalShard(whole, (2000, 8), (rank * rows, 0))
    with dc.AsyncSaver(job=job) as saver:
        step = saver.restore(state, exclude="mine")
        assert saver.restored is not None
        return step, steps_in(state), saver.restored.nbytes_from_memory > 0


def test_a_checkpoint_that_was_deleted_is_not_brought_back(tmp_path: Path, job: str) -> None:
    root = str(tmp_path)
    try_ranks(die_when_staged, root, job, 2, world_size=2, options=Options(environ=CALM))
    for rank in range(2):
        await_end(job, rank)
    dc.delete(folder_of(root, 2))
    found = run_ranks(resume, root, job, 2, world_size=2, environ=CALM)
    assert [(step, steps) for step, steps, _ in found] == [(1, {1.0})] * 2


def die_while_staging(rank: int, root: str, job: str) -> None:
    state = state_of(rank, 2, 1)
    saver = dc.AsyncSaver(job=job)
    saver.save(state, folder_of(root, 1), step=1).result(RESULT_S)
    assign(state, 2)
    if rank == 1:
        save: Any = save_module
        save.stage = lambda *_: die()
    handle = saver.save(state, folder_of(root, 2), step=2)
    try:
        handle.result(RESULT_S)
    finally:
        die()


def test_a_snapshot_that_is_half_copied_is_neither_committed_nor_restored(
    tmp_path: Path, job: str
) -> None:
    root = str(tmp_path)
    try_ranks(die_while_staging, root, job, world_size=2, options=Options(environ=FRAIL))
    found = run_ranks(resume, root, job, 2, world_size=2, environ=FRAIL)
    assert [(step, steps) for step, steps, _ in found] == [(1, {1.0})] * 2
    with pytest.raises(dc.NotFoundError):
        dc.open(folder_of(root, 2))


def lose_the_storage(rank: int, root: str, job: str) -> None:
    """Have both arenas hold what the storage has refused: to claim it, and to write it."""
    state = state_of(rank, 2, 1)
    saver = dc.AsyncSaver(job=job)
    saver.save(state, folder_of(root, 1), step=1).result(RESULT_S)
    if rank == 0:
        (Path(root) / "gone").write_text("a file where a folder should be")
    refused = saver.save(state, f"{root}/gone/2", step=2).exception(RESULT_S)
    assert isinstance(refused, dc.ExistsError), refused
    if rank == 1:
        resource.prlimit(writer_of(job, 1), resource.RLIMIT_FSIZE, (16 << 10, 16 << 10))
    assign(state, 3)
    refused = saver.save(state, folder_of(root, 3), step=3).exception(RESULT_S)
    assert isinstance(refused, dc.StorageError), refused
    assert refused.rank == 1
    die()


def test_what_the_storage_has_refused_is_restored_from_memory(tmp_path: Path, job: str) -> None:
    root = str(tmp_path)
    ended = try_ranks(lose_the_storage, root, job, world_size=2, options=Options(environ=CALM))
    assert [outcome.signal for outcome in ended] == [signal.SIGKILL] * 2, ended
    found = run_ranks(resume, root, job, 2, world_size=2, environ=CALM)
    assert [(step, steps) for step, steps, _ in found] == [(3, {3.0})] * 2
    with pytest.raises(dc.NotFoundError):
        dc.open(folder_of(root, 3))


# --- deaths at random moments ------------------------------------------------------------------


# 16 MiB of each rank: to copy that takes some milliseconds, and to write it many more.
NUM_ROWS = 1 << 19


def train_until_killed(
    rank: int, root: str, job: str, world_size: int, seed: int, first: int
) -> None:
    """Save without end; report what is durable; at some moment kill whom the seed says.

    Of an odd seed that is a moment of a copy, else any.
    """
    dice = random.Random(seed)
    victims = dice.choice(("trainers", "writers", "both", "one trainer", "one writer"))
    unlucky, moment = dice.randrange(world_size), dice.random()
    copies = dice.randrange(1, 4) if seed % 2 else 0
    state = state_of(rank, world_size, first, NUM_ROWS)
    saver = dc.AsyncSaver(job=job)
    save: Any = save_module
    real = save.stage
    took: list[float] = []

    def stage(*args: Any) -> None:
        began = time.monotonic()
        if copies and len(took) == copies:
            threading.Timer(moment * min(took), kill).start()
        real(*args)
        took.append(time.monotonic() - began)

    save.stage = stage
    saver.save(state, folder_of(root, first), step=first).result(RESULT_S)

    def kill() -> None:
        is_me = not victims.startswith("one") or rank == unlucky
        if is_me and ("writer" in victims or victims == "both"):
            os.kill(writer_of(job, rank), signal.SIGKILL)
        if is_me and ("trainer" in victims or victims == "both"):
            die()

    if not copies:
        threading.Timer(0.4 * moment, kill).start()
    handles = []
    for step in range(first + 1, first + 1000):
        assign(state, step)
        handles.append((step, saver.save(state, folder_of(root, step), step=step)))
        while handles and handles[0][1].done():
            done, handle = handles.pop(0)
            handle.result(0)
            if rank == 0:
                Path(root, "new").write_text(str(done))
                Path(root, "new").rename(Path(root, "reported"))


def go_on(rank: int, root: str, job: str, world_size: int) -> tuple[int | None, Any, bool]:
    state = state_of(rank, world_size, -1, NUM_ROWS)
    saver = dc.AsyncSaver(job=job)
    step = saver.restore(state)
    is_from_memory = saver.restored is not None and saver.restored.nbytes_from_memory > 0
    if step is None:  # what a user would do
        names = [int(name[5:]) for name in os.listdir(root) if name.startswith("step-")]
        for number in sorted(names, reverse=True):
            try:
                step = dc.load(state, folder_of(root, number)).step
            except dc.NotFoundError:
                continue
            break
    found = steps_in(state)
    saver.close(keep=True)
    return step, found, is_from_memory


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)],
)
def test_whoever_is_killed_whenever_the_newest_reported_checkpoint_is_there_and_whole(
    world_size: int, tmp_path: Path, job: str
) -> None:
    root = str(tmp_path)
    options = Options(environ=FRAIL)
    num_from_memory = 0
    for seed in range(5):
        first = 1000 * (seed + 1)
        args = (root, job, world_size)
        outcomes = try_ranks(
            train_until_killed,
            *args,
            11 * seed + world_size,
            first,
            world_size=world_size,
            options=options,
        )
        assert all(outcome.ended for outcome in outcomes), outcomes
        found = run_ranks(go_on, *args, world_size=world_size, environ=FRAIL)
        steps = {step for step, _, _ in found}
        assert len(steps) == 1, found
        (step,) = steps
        assert step is not None
        assert all(numbers == {float(step)} for _, numbers, _ in found), found
        reported = Path(root, "reported")
        assert step >= max(first, int(reported.read_text()) if reported.exists() else 0), found
        num_from_memory += all(is_from_memory for _, _, is_from_memory in found)
    assert num_from_memory > 0
