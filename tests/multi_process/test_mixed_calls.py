"""Ranks of one group that make different calls: all are told who called what, and go on."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from ranks import run_ranks

pytestmark = pytest.mark.multi_process

# Nothing here waits for these: a mixture is found when all ranks are in some call.
PATIENT = {"DIST_CKPT_HEARTBEAT_TIMEOUT_S": "1000", "DIST_CKPT_JOIN_TIMEOUT_S": "1000"}
HASTY = {
    "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "1000",
    "DIST_CKPT_JOIN_TIMEOUT_S": "1",
    "DIST_CKPT_JOIN_WARNING_S": "0.2",
}
SOON_S = 150.0
# A rank that is late by less comes in time, also on a busy machine.
ARRIVE_S = 8


@pytest.fixture
def jobs() -> Iterator[tuple[str, str]]:
    """Two jobs of their own; whatever is left of them is removed."""
    names = (f"test-{uuid.uuid4().hex}", f"test-{uuid.uuid4().hex}")
    yield names
    for name in names:
        folder = JobFolder(name)
        for one in folder.rank_folders():
            one.remove()
        folder.remove_if_empty()


class Told(NamedTuple):
    """The error that a rank was told."""

    kind: str
    message: str
    seconds: float


def state() -> dict[str, Any]:
    return {"w": torch.ones(1000), "mine": dc.PerRank(1)}


class Calls:
    """What a rank can call; those with a saver need `jobs`."""

    def __init__(self, root: str, jobs: Sequence[str], group: Any = None) -> None:
        self.root = root
        self.group = group
        self.savers = [dc.AsyncSaver(job=job, group=group) for job in jobs]

    def save(self) -> object:
        return dc.save(state(), f"{self.root}/new", group=self.group)

    def save_elsewhere(self) -> object:
        return dc.save(state(), f"{self.root}/other", group=self.group)

    def load(self) -> object:
        return dc.load(state(), f"{self.root}/old", group=self.group)

    def load_another(self) -> object:
        return dc.load(state(), f"{self.root}/other", group=self.group)

    def save_in_background(self) -> object:
        return self.savers[0].save(state(), f"{self.root}/new")

    def save_by_the_other(self) -> object:
        return self.savers[1].save(state(), f"{self.root}/new")

    def restore(self) -> object:
        return self.savers[0].restore(state())

    def restore_from_the_other(self) -> object:
        return self.savers[1].restore(state())

    def make_a_saver(self) -> object:
        return dc.AsyncSaver(job="test-never-made", group=self.group)


def told(call: Callable[[], object]) -> Told:
    start = time.monotonic()
    try:
        call()
    except (dc.CheckpointError, ValueError) as error:
        return Told(type(error).__name__, str(error), time.monotonic() - start)
    raise AssertionError("it should have failed")


def mix(rank: int, mixtures: Sequence[Sequence[str]], root: str, jobs: Sequence[str]) -> Any:
    """Make mixtures of calls one after the other; then all can save."""
    calls = Calls(root, jobs)
    dc.save(state(), f"{root}/old")
    found = [tuple(told(getattr(calls, names[rank]))) for names in mixtures]
    dc.save(state(), f"{root}/after")
    for saver in calls.savers:
        handle = saver.save(state(), f"{root}/background")
        assert handle.result(60) is not None
        dc.delete(f"{root}/background") if rank == 0 else None
        dist.barrier()
        saver.close()
    assert not os.path.exists(f"{root}/new")
    return found


WHAT = {
    "save": "save to {root}/new",
    "load": "load of {root}/old",
    "save_in_background": "background save to {root}/new",
    "restore": "restore of job {job}",
    "make_a_saver": "AsyncSaver",
}


def assert_told(names: Sequence[str], errors: Sequence[Told], root: str, job: str) -> None:
    """See that all were told the same, and by name who called what."""
    assert len({(error.kind, error.message) for error in errors}) == 1, errors
    assert errors[0].kind == "RankError", errors[0]
    for rank, name in enumerate(names):
        assert WHAT[name].format(root=root, job=job) in errors[0].message
        if names.count(name) == 1:
            assert f"rank {rank} (host " in errors[0].message
    assert "All ranks must make the same calls in the same order" in errors[0].message
    assert max(error.seconds for error in errors) < SOON_S


PAIRS = [
    ("save", "load"),
    ("load", "save"),
    ("save", "restore"),
    ("restore", "load"),
    ("save", "save_in_background"),
    ("save_in_background", "load"),
    ("restore", "save_in_background"),
    ("make_a_saver", "save"),
    ("load", "make_a_saver"),
    ("make_a_saver", "save_in_background"),
    ("restore", "make_a_saver"),
]


def test_every_mixture_of_two_calls_is_told_to_both_ranks(tmp_path: Path, jobs: tuple[str, str]):
    root = str(tmp_path)
    values = run_ranks(mix, PAIRS, root, jobs[:1], world_size=2, environ=PATIENT, timeout_s=250)
    for names, *errors in zip(PAIRS, *values, strict=True):
        assert_told(names, [Told(*error) for error in errors], root, jobs[0])


def test_two_paths_or_savers_are_a_mixture_as_well(tmp_path: Path, jobs: tuple[str, str]):
    cases = {
        ("save", "save_elsewhere"): "save with different path",
        ("load", "load_another"): "load with different path",
        ("save_in_background", "save_by_the_other"): "AsyncSaver.save with different job",
        ("restore_from_the_other", "restore"): "AsyncSaver.restore with different job",
    }
    root = str(tmp_path)
    values = run_ranks(mix, list(cases), root, jobs, world_size=2, environ=PATIENT, timeout_s=250)
    for text, *errors in zip(cases.values(), *values, strict=True):
        assert errors[0][:2] == errors[1][:2]
        assert errors[0][0] == "ValueError"
        assert f"the ranks call {text}: rank 0: " in errors[0][1]


OF_MORE: dict[int, list[tuple[str, ...]]] = {
    3: [("save", "save", "load"), ("save", "load", "load"), ("load", "save", "save_in_background")],
    4: [("save", "load", "restore", "make_a_saver"), ("load", "load", "save", "load")],
}


@pytest.mark.parametrize("world_size", OF_MORE)
def test_a_mixture_of_more_ranks_names_all_of_them(
    world_size: int, tmp_path: Path, jobs: tuple[str, str]
):
    root, mixtures = str(tmp_path), OF_MORE[world_size]
    values = run_ranks(
        mix, mixtures, root, jobs[:1], world_size=world_size, environ=PATIENT, timeout_s=250
    )
    for names, *errors in zip(mixtures, *values, strict=True):
        assert_told(names, [Told(*error) for error in errors], root, jobs[0])


def mix_in_parts(rank: int, root: str) -> Any:
    """In one half of the world the ranks mix calls, the other half saves."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    calls = Calls(f"{root}/{rank // 2}", (), halves[rank // 2])
    dc.save(state(), f"{calls.root}/old", group=calls.group)
    error = None
    if rank >= 2:
        error = tuple(told(calls.save if rank == 2 else calls.load))
    calls.save()
    dc.save(state(), f"{root}/all")
    return error


def test_a_mixture_in_a_part_of_the_world_is_told_there_only(tmp_path: Path):
    root = str(tmp_path)
    values = run_ranks(mix_in_parts, root, world_size=4, environ=PATIENT)
    assert values[:2] == [None, None]
    assert_told(("save", "load"), [Told(*value) for value in values[2:]], f"{root}/1", "")


def mix_groups(rank: int, root: str) -> Any:
    """One rank saves in the world, the other in another group of the same ranks."""
    other = dist.new_group([0, 1])
    dc.save(state(), f"{root}/old")
    error = told(lambda: dc.save(state(), f"{root}/new", group=other if rank else None))
    dist.barrier()
    dc.save(state(), f"{root}/after", group=other)
    return tuple(error)


def test_a_call_in_another_group_is_a_call_that_never_came(tmp_path: Path):
    for rank, error in enumerate(run_ranks(mix_groups, str(tmp_path), world_size=2, environ=HASTY)):
        assert error[1].startswith(f"rank {1 - rank} ")
        assert " did not call save to" in error[1]
        assert error[2] < SOON_S


def come_late(rank: int, root: str, late: int, names: Sequence[str]) -> Any:
    """One rank makes another call, when the others have given it up, or soon before."""
    calls = Calls(root, ())
    dc.save(state(), f"{root}/old")
    found = []
    for delay_s in (0.5, 1.5 * ARRIVE_S):
        dist.barrier()
        time.sleep(delay_s if rank == late else 0)
        found.append(tuple(told(getattr(calls, names[rank]))))
        dist.barrier()
        dc.save(state(), f"{root}/after-{delay_s}")
    return found


@pytest.mark.waits
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_to_another_call_hangs_nobody(late: int, tmp_path: Path):
    root, names = str(tmp_path), ("save", "load")
    environ = {**HASTY, "DIST_CKPT_JOIN_TIMEOUT_S": str(ARRIVE_S)}
    values = run_ranks(come_late, root, late, names, world_size=2, environ=environ, timeout_s=250)
    in_time, too_late = ([Told(*error) for error in errors] for errors in zip(*values, strict=True))
    assert_told(names, in_time, root, "")
    for rank, error in enumerate(too_late):
        assert error.kind in ("RankError", "NoAnswerError")
        assert f"rank {1 - rank} " in error.message
        assert error.seconds < SOON_S


def close_beside(rank: int, root: str, job: str) -> Any:
    """Closing is no collective: who waits for the one that closes is told that it never came."""
    calls = Calls(root, (job,))
    calls.save_in_background()
    error = None
    if rank == 0:
        error = tuple(told(calls.load))
    else:
        calls.savers[0].close()
    dist.barrier()
    dc.save(state(), f"{root}/after")
    calls.savers[0].close()
    return error


def test_a_rank_that_closes_its_saver_instead_is_named(tmp_path: Path, jobs: tuple[str, str]):
    values = run_ranks(close_beside, str(tmp_path), jobs[0], world_size=2, environ=HASTY)
    _, message, seconds = values[0]
    assert "rank 1 (host" in message
    assert f"did not call load of {tmp_path}/old" in message
    assert seconds < SOON_S


def save_and_load_beside(rank: int, root: str, job: str) -> Any:
    """Plain calls by all while a save of the saver is still written, and its result is awaited."""
    with dc.AsyncSaver(job=job, max_bytes_per_s=1 << 20) as saver:
        large = {"w": dc.PerRank(torch.ones(1 << 18))}  # 1 MiB: a second
        handle = saver.save(large, f"{root}/background")
        dc.save(state(), f"{root}/plain")
        assert not handle.done()
        dc.load(state(), f"{root}/plain")
        if rank == 0:
            assert handle.result(60) is not None
        again = saver.save(state(), f"{root}/again")
        assert again.result(60) is not None
    return True


def test_plain_calls_go_on_beside_a_background_save(tmp_path: Path, jobs: tuple[str, str]):
    assert run_ranks(save_and_load_beside, str(tmp_path), jobs[0], world_size=2, environ=PATIENT)
