"""What a rank has of a job: what it removes of other ranks and of itself, and what it leaves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from fake_writers import SOON_S, FakeWriter, order

from dist_ckpt import job_folder, own_writer
from dist_ckpt.background_job import Job
from dist_ckpt.channel import Failure
from dist_ckpt.config import Config
from dist_ckpt.errors import ConflictError, StorageError
from dist_ckpt.job_folder import JobFolder
from dist_ckpt.writer_link import Hello

FULL = Failure("StorageError", "rank 0 (host a): the disk is full", 0, "write")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Return a function that makes a rank's part of a job."""
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(tmp_path))
    fakes: list[FakeWriter] = []
    made: list[Job] = []

    def start(*args: object) -> object:
        return fakes[-1].start(*args)  # type: ignore[arg-type]

    def make(rank: int, world_size: int = 2) -> tuple[Job, FakeWriter]:
        fakes.append(FakeWriter())
        one = Job(Hello("job", rank, world_size, asdict(Config()), None), settle_s=0)
        one.arenas.fitting(0, 4096)
        made.append(one)
        return one, fakes[-1]

    monkeypatch.setattr(own_writer, "start", start)
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


def ranks() -> list[int]:
    found = JobFolder.find("job")
    return found.ranks() if found is not None else []


def test_a_job_gives_its_memory_back(job):
    first, fake = job(0)
    commit(first, fake)
    first.close(keep=False)
    assert ranks() == []


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_needed_after_an_error_is_kept(job, keep):
    first, fake = job(0)
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
    first.reclaim(all_are_here=True)
    assert ranks() == [0, 1, 5]
    commit(first, fake)
    # Rank 1 of this run is on another host.
    first.reclaim(all_are_here=True)
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
    with pytest.raises(ConflictError, match="living trainer of rank 0"):
        job(0)
    first.close(keep=False)
    job(0)
