"""What a rank has of a job: what it removes of other ranks and of itself, and what it leaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dist_ckpt.async_save.snapshots import job_folder
from dist_ckpt.async_save.snapshots.arena import ArenaPool, ArenaReader
from dist_ckpt.async_save.snapshots.arena_layout import (
    Image,
    Seal,
    Snapshot,
    SnapshotMetadata,
    arena_nbytes,
)
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.async_save.trainer import writer_handle
from dist_ckpt.async_save.trainer.job import Job
from dist_ckpt.async_save.trainer.writer_handle import SaveHandle
from dist_ckpt.async_save.writer.writer_messages import Close, Hello
from dist_ckpt.core.comm.rank_messages import Failure
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.errors import ConflictError, StorageError
from dist_ckpt.settings import Settings
from fake_writers import SOON_S, FakeWriter, order

MakeJob = Callable[..., tuple[Job, FakeWriter]]

FULL = Failure("StorageError", "rank 0 (host a): the disk is full", 0, "write")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeJob]:
    """Return a function that makes a rank's part of a job."""
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(tmp_path))
    fakes: list[FakeWriter] = []
    made: list[Job] = []

    def start(*args: object) -> object:
        return fakes[-1].start(*args)  # type: ignore[arg-type]

    def make(rank: int, world_size: int = 2, is_dropped: bool = False) -> tuple[Job, FakeWriter]:
        fakes.append(FakeWriter())
        one = Job(Hello("job", rank, world_size, Settings(), None), drain_timeout_s=0)
        if not is_dropped:
            made.append(one)
        return one, fakes[-1]

    monkeypatch.setattr(writer_handle, "start_writer", start)
    yield make
    for one in made:
        one.close(keep=False)
    for fake in fakes:
        fake.end()


def commit(job: Job, fake: FakeWriter, name: str = "a", failure: Failure | None = None) -> None:
    """Have a save committed, or fail."""
    saved = order(job.writer, name)
    fake.settle(name, failure)
    assert job.writer.wait_for(lambda: saved.is_settled, SOON_S)


def leave(
    rank: int, step: int, *, arena: int = 0, is_sealed: bool = True, is_committed: bool = False
) -> None:
    """Leave a snapshot in memory, as an earlier run does."""
    folder = JobFolder("job").rank(rank)
    details = SnapshotMetadata(False, {}, {}, float(step), (), ())
    images = (Image("model.safetensors", 100),)
    told = typed_msgpack.encode(details)
    what = Snapshot(f"{step:032x}", f"/ck/{step}", step, rank, 2, images, told)
    arenas = ArenaPool(folder)
    memory = arenas.open_fitting(arena, arena_nbytes(what))
    memory.begin(what)
    memory.complete()
    if is_sealed:
        follower = ArenaReader(memory.path, folder.job)
        followed = follower.follow(what.id)
        followed.seal(
            Seal("a1-0123456789abcdef", (FileReceipt("model.safetensors", 100, 50, "f" * 32),))
        )
        if is_committed:
            followed.mark_committed()
        follower.close()
    arenas.close()


def ranks() -> list[int]:
    found = JobFolder.find("job")
    return [one.rank for one in found.rank_folders()] if found is not None else []


def test_a_job_gives_its_memory_back(job):
    first, fake = job(0)
    first.arenas.open_fitting(0, 4096)
    commit(first, fake)
    first.close(keep=False)
    assert ranks() == []


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_needed_after_an_error_is_kept(job, keep):
    first, fake = job(0)
    first.arenas.open_fitting(0, 4096)
    commit(first, fake, failure=None if keep else FULL)
    if keep:
        first.close(keep=True)
    else:
        with pytest.raises(StorageError, match="the disk is full"):
            first.close(keep=False)
    assert ranks() == [0]
    assert os.path.exists(JobFolder("job").rank(0).arena_path(0))


def test_who_closes_last_leaves_what_the_others_have_kept(job):
    (first, its), (last, fake) = job(0), job(1)
    commit(first, its)
    commit(last, fake)
    first.close(keep=True)
    last.close(keep=True)
    assert ranks() == [0, 1]


def test_what_ranks_left_that_are_no_more_is_removed_once_a_checkpoint_is_durable(job):
    for rank in (1, 5):
        gone, _ = job(rank, 6)
        gone.close(keep=True)
    first, fake = job(0)
    first.remove_stale_folders(has_all_ranks=True)
    assert ranks() == [0, 1, 5]
    commit(first, fake)
    # Rank 1 of this run is on another host.
    first.remove_stale_folders(has_all_ranks=True)
    assert ranks() == [0]


def test_at_the_end_only_what_is_of_no_rank_of_this_run_is_removed(job):
    for rank in (1, 5):
        gone, _ = job(rank, 6)
        gone.close(keep=True)
    first, fake = job(0)
    commit(first, fake)
    first.close(keep=True)
    assert ranks() == [0, 1]


def test_all_failures_that_nobody_was_told_of_are_told_at_the_end(job):
    first, fake = job(0)
    commit(first, fake, "a", FULL)
    commit(first, fake, "b", Failure("StorageError", "the disk is gone", 0, "write"))
    with pytest.raises(StorageError, match="the disk is full") as told:
        first.close(keep=False)
    assert any("the disk is gone" in note for note in told.value.__notes__)


def test_a_rank_has_one_living_trainer_and_another_after_it(job):
    first, _ = job(0)
    with pytest.raises(
        ConflictError, match="another AsyncSaver of job 'job' is open in this process: close it"
    ):
        job(0)
    first.close(keep=False)
    job(0)


# --- a run that saves nothing ----------------------------------------------------------------


@pytest.mark.parametrize(
    "older",
    [
        {},
        {"is_committed": True},
        {"step": 7, "is_committed": True},
        {"step": 9, "is_sealed": False},  # nobody can restore that
    ],
)
def test_a_run_that_saves_nothing_gives_back_what_is_on_the_storage(job, older):
    for rank in range(2):
        leave(rank, 8, is_committed=True)
        leave(rank, **{"step": 6, "arena": 1, **older})
    only, _ = job(0, 1)
    only.close(keep=False)
    assert ranks() == []


def test_a_run_that_saves_nothing_keeps_what_is_nowhere_else_and_says_where(job, caplog):
    leave(0, 7, is_committed=True)
    leave(0, 8, arena=1)
    leave(1, 8)
    only, _ = job(0, 1)
    only.close(keep=False)
    assert ranks() == [0, 1]
    for rank in range(2):
        assert (
            f"rank-{rank:05d}: a snapshot stays in memory, as it may be the only copy: step 8"
            in caplog.text
        )


def test_a_run_that_saves_nothing_keeps_what_another_version_has_left(job):
    leave(0, 8, is_committed=True)
    arena = Path(JobFolder("job").rank(0).arena_path(0))
    data = bytearray(arena.read_bytes())
    data[16] += 1  # the version
    arena.write_bytes(data)
    only, _ = job(0, 1)
    only.close(keep=False)
    assert ranks() == [0]


def test_what_is_on_the_storage_is_kept_for_who_asks(job):
    for rank in range(2):
        leave(rank, 8, is_committed=True)
    only, _ = job(0, 1)
    only.close(keep=True)
    assert ranks() == [0, 1]


# --- dropped, not closed ---------------------------------------------------------------------


def test_who_drops_a_job_lets_go_of_it_and_its_writer_goes_on(job, caplog):
    dropped, fake = job(0, is_dropped=True)
    memory = dropped.arenas.open_fitting(0, 4096).memory
    waited, failed = order(dropped.writer, "a"), order(dropped.writer, "b")
    fake.settle("b", FULL)
    assert dropped.writer.wait_for(lambda: failed.is_settled, SOON_S)
    handle = SaveHandle("/ck/a", 1, dropped.writer, waited)
    cycle: list[Any] = [dropped]
    cycle.append(cycle)  # as an exception makes one
    with pytest.warns(ResourceWarning, match="unclosed AsyncSaver of job"):  # noqa: PT031 - either
        del dropped, cycle
        job(0)
    fake.process.wait(SOON_S)  # it has heard that
    assert isinstance(fake.heard[-1], Close)
    assert "continues with 1 unsettled saves" in caplog.text
    assert "rank 0 (host a): the disk is full" in caplog.text
    memory.release()
    # The writer settles it, and who has the handle is told.
    fake.settle("a")
    assert handle.exception(SOON_S) is None


def test_a_job_that_is_dropped_while_devices_are_copied_ends_with_the_copy(job):
    dropped, fake = job(0, is_dropped=True)
    may = threading.Event()
    end: Any = SimpleNamespace(hold=lambda: None)
    dropped.fence.run(end, lambda kept=dropped: may.wait(SOON_S))
    copying = dropped.fence._thread
    del dropped
    with pytest.raises(ConflictError, match="is open in this process"):
        job(0)
    with pytest.warns(ResourceWarning, match="unclosed AsyncSaver of job"):  # noqa: PT031 - either
        may.set()
        copying.join(SOON_S)
    job(0)
    fake.process.wait(SOON_S)  # it has heard that
    assert isinstance(fake.heard[-1], Close)


def test_a_job_may_be_dropped_while_a_step_goes_through_what_is_to_be_done_before_it(job):
    dropped, _ = job(0, is_dropped=True)
    end: Any = SimpleNamespace(hold=lambda: None)
    dropped.fence.run(end, lambda: None)
    kept = [dropped]
    del dropped
    first = register_optimizer_step_pre_hook(lambda *_: kept.clear())
    second = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
        with pytest.warns(ResourceWarning, match="unclosed AsyncSaver of job"):
            optimizer.step()
        job(0)
    finally:
        first.remove()
        second.remove()


def test_a_forked_child_that_drops_a_job_leaves_it_to_its_parent(job):
    first, fake = job(0)
    waited = order(first.writer, "a")
    if (child := os.fork()) == 0:
        try:
            first._finalizer()  # what the end of the last reference does; a warning is an error
        except ResourceWarning:
            os._exit(1)
        os._exit(0)
    ended = os.waitpid(child, 0)
    fake.settle("a")
    assert first.writer.wait_for(lambda: waited.is_settled, SOON_S)
    assert ended == (child, 0)
    assert not any(isinstance(one, Close) for one in fake.heard)
    with pytest.raises(ConflictError, match="is open in this process"):
        job(0)
