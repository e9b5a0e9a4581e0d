"""Arenas that are made beside the training: a save waits for the one that it needs, and no more."""

from __future__ import annotations

import logging
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots import arena as arena_module
from dist_ckpt.async_save.snapshots import job_folder
from dist_ckpt.async_save.snapshots.arena import ArenaPool
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.async_save.trainer.job import ArenaPreparation
from dist_ckpt.core.runtime import host_memory
from dist_ckpt.core.saving.save_options import SaveOptions
from fork_server import forked_python

DEADLINE_S = 30.0
CUDA = torch.device("cuda", 0)


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a folder in the place of shared memory, and forked writers."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(tmp_path / "shm"))
    monkeypatch.setattr(sys, "executable", forked_python())


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ArenaPool]:
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(tmp_path))
    folder = JobFolder(f"test-{uuid.uuid4().hex}").rank(0)
    lock, pool = folder.lock("trainer"), ArenaPool(folder)
    yield pool
    pool.close()
    lock.release()


class Pinned:
    """What stands for pinned arenas: a piece of number 1 is pinned only when a save hurries."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.may = threading.Event()

    def pin(self, number: int, _: memoryview, __: torch.device, hurry: threading.Event) -> None:
        if number == 1:
            assert hurry.wait(DEADLINE_S)
            assert self.may.wait(DEADLINE_S)
        self.numbers.append(number)


def test_a_save_waits_for_the_arena_that_it_needs_and_for_no_other(pool: ArenaPool) -> None:
    pinned = Pinned()
    preparation = ArenaPreparation(pool, cast(Any, pinned))
    preparation.begin((0, 1), 1 << 20, CUDA)
    preparation.begin((0, 1), 1 << 20, CUDA)  # once is enough
    preparation.finish(0)
    assert pinned.numbers == [0]
    first = pool.open_fitting(0, 1 << 19)
    assert first.nbytes == 1 << 20
    threading.Timer(0.01, pinned.may.set).start()
    preparation.finish(1)
    assert pinned.numbers == [0, 1]
    preparation.begin((0, 1), 1 << 21, CUDA)  # saves use them by now
    preparation.close()
    assert pool.open_fitting(0, 1) is first


def test_nothing_more_is_prepared_after_close(pool: ArenaPool) -> None:
    pinned = Pinned()
    preparation = ArenaPreparation(pool, cast(Any, pinned))
    preparation.begin((1, 0), 1 << 20, CUDA)
    pinned.may.set()
    preparation.close()
    assert pinned.numbers in ([], [1])  # the thread may not have begun
    assert pool.is_unused(0)


def test_without_memory_a_warning_says_so_and_a_save_raises_the_error(
    pool: ArenaPool, caplog: pytest.LogCaptureFixture
) -> None:
    preparation = ArenaPreparation(pool, cast(Any, Pinned()))
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        preparation.begin((0,), 1 << 50, CUDA)
        preparation.finish(0)
        preparation.close()
    assert "no memory for a snapshot of 1,125,899,906,842,624 bytes" in caplog.text
    with pytest.raises(dc.StorageError, match="no memory for a snapshot"):
        pool.open_fitting(0, 1 << 50)


@pytest.mark.usefixtures("shared_memory")
def test_a_prepared_saver_makes_no_more_memory_though_its_optimizer_had_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist_ckpt.async_save.trainer.background_save._EXTRA_NBYTES", 1 << 17)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}
    with dc.AsyncSaver(tmp_path) as saver:
        saver.prepare(state)
        model(torch.ones(300)).sum().backward()
        optimizer.step()
        for step in range(3):
            saver.save(state, tmp_path / str(step), step=step).result(DEADLINE_S)
            assert saver._job is not None
            if step == 0:
                made = dict(saver._job.arenas._arenas)
                sizes = [arena.nbytes for arena in made.values()]
        assert saver._job is not None
        assert saver._job.arenas._arenas == made
        assert [arena.nbytes for arena in made.values()] == sizes
        assert len(made) == 2
    with dc.AsyncSaver() as saver, pytest.raises(ValueError, match="create it with root="):
        saver.prepare(state)


@pytest.mark.usefixtures("shared_memory")
def test_a_snapshot_of_an_earlier_run_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(1000)}
    with dc.AsyncSaver(tmp_path) as saver:
        saver.save(state, tmp_path / "a", step=7).result(DEADLINE_S)
        saver.close(keep=True)
    opened: list[int] = []
    with dc.AsyncSaver(tmp_path) as saver, monkeypatch.context() as patch:
        patch.setattr(arena_module.ArenaPool, "open_fitting", lambda _, n, __: opened.append(n))
        assert saver._job is not None
        saver.prepare({"w": torch.ones(2000)})
        for number in (0, 1):
            saver._job.preparation.finish(number)
        assert opened == [1 - saver._job.arenas.newest]


def test_memory_touched_by_several_threads_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_MIN_PARALLEL_NBYTES", 1 << 16)
    monkeypatch.setattr(host_memory, "_TOUCH_NBYTES", 1 << 14)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    fd = host_memory.create_named(str(tmp_path / "a"), 100_000)
    memory = host_memory.map_writable(fd, touch=True)
    memory[:] = bytes(range(250)) * 400
    host_memory.reserve(fd, 300_001)
    grown = host_memory.map_writable(fd, touch=True)
    assert grown[:] == bytes(range(250)) * 400 + bytes(200_001)


@pytest.mark.usefixtures("shared_memory")
def test_the_first_save_uses_the_plan_that_was_made_and_compares_replicas_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, is_new = {"w": torch.ones(1000)}, []
    digests = SaveOptions.replica_digests

    def seen(options: SaveOptions, rank_save: Any, plan: Any) -> Any:
        is_new.append(plan.is_new)
        return digests(options, rank_save, plan)

    monkeypatch.setattr(SaveOptions, "replica_digests", seen)
    with dc.AsyncSaver(tmp_path) as saver:
        saver.prepare(state)
        exchanges = []
        for step in range(2):
            before = saver._session.exchanges.num
            saver.save(state, tmp_path / str(step), step=step).result(DEADLINE_S)
            exchanges.append(saver._session.exchanges.num - before)
    assert is_new == [True, False]
    assert exchanges[0] == exchanges[1]
