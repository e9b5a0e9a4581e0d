"""A run goes on with what an earlier run of its folder has left, and with nothing of another's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import JobFolder, find_root_id, make_job_name
from dist_ckpt.core.storage import open_storage
from ranks import Options, run_ranks, try_ranks
from tests.multi_process.test_background_saves import (
    CALM,
    RESULT_S,
    await_end,
    left_of,
    state_of,
    steps_in,
)

pytestmark = pytest.mark.multi_process

WORLD_SIZE = 2


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def fail(root: Path) -> Iterator[Callable[..., str]]:
    """Return a function that runs and kills a job whose one save fails, and returns its name."""
    jobs = []

    def run_and_kill(*, is_root_known: bool = True) -> str:
        args = (str(root), is_root_known)
        ended = try_ranks(fail_and_die, *args, world_size=WORLD_SIZE, options=Options(environ=CALM))
        assert [one.signal for one in ended] == [signal.SIGKILL] * WORLD_SIZE, ended
        root_id = find_root_id(*open_storage(root))
        assert root_id is not None
        jobs.append(make_job_name(str(root), root_id))
        for rank in range(WORLD_SIZE):
            await_end(jobs[-1], rank)
        return jobs[-1]

    yield run_and_kill
    for job in jobs:
        for one in JobFolder(job).rank_folders():
            one.remove()
        JobFolder(job).remove_if_empty()


def fail_and_die(rank: int, root: str, is_root_known: bool) -> None:
    """Have memory hold what the storage has refused."""
    saver = dc.AsyncSaver(root) if is_root_known else dc.AsyncSaver()
    if rank == 0:
        Path(root, "taken").write_text("a file where a folder should be")
    refused = saver.save(state_of(rank, WORLD_SIZE, 7), f"{root}/taken", step=7)
    assert isinstance(refused.exception(RESULT_S), dc.ExistsError)
    if rank == 0:
        os.unlink(f"{root}/taken")
    os.kill(os.getpid(), signal.SIGKILL)


def restore(rank: int, root: str) -> tuple[int | None, set[float]]:
    state = state_of(rank, WORLD_SIZE, -1)
    with dc.AsyncSaver(root) as saver:
        return saver.restore(state), steps_in(state)


def restored(root: Path) -> int | None:
    """Return the step that a new run finds in memory; all of it is there, or nothing is touched."""
    found = run_ranks(restore, str(root), world_size=WORLD_SIZE, environ=CALM)
    step: int | None = found[0][0]
    assert found == [(step, {-1.0 if step is None else float(step)})] * WORLD_SIZE
    return step


def test_a_run_that_was_killed_goes_on_with_its_state(root: Path, fail: Callable[..., str]) -> None:
    job = fail()
    assert restored(root) == 7
    assert left_of(job)  # it is nowhere else


def test_the_first_save_of_a_saver_without_a_root_is_found_by_one_with_it(
    root: Path, fail: Callable[..., str]
) -> None:
    fail(is_root_known=False)
    assert restored(root) == 7


def count_exchanges(rank: int, root: str) -> list[int]:
    state = state_of(rank, WORLD_SIZE, 1)
    with dc.AsyncSaver() as saver:
        reports = [saver.save(state, f"{root}/{name}").result(RESULT_S) for name in "ab"]
    return [report.exchanges.num for report in reports if report is not None]


def test_a_saver_without_a_root_looks_for_it_once(root: Path) -> None:
    again, another_layout, for_root = 4, 1, 1  # docs/architecture.md says so too
    found = run_ranks(count_exchanges, str(root), world_size=WORLD_SIZE, environ=CALM)
    assert found == [[again + another_layout + for_root, again]] * WORLD_SIZE


@pytest.mark.parametrize("command", ["rm -rf runs; mkdir runs", "rm -rf runs", "rm -rf runs/*"])
def test_a_folder_that_was_emptied_is_a_new_run_s(
    command: str, root: Path, fail: Callable[..., str]
) -> None:
    fail()
    subprocess.run(["sh", "-c", command], cwd=root.parent, timeout=60, check=True)
    assert restored(root) is None


def test_another_folder_at_the_same_path_is_another_run_s(
    root: Path, fail: Callable[..., str]
) -> None:
    """As in two containers, each with a volume of its own there, and one shared memory."""
    fail()
    other, mine = root.with_name("other"), root.with_name("mine")
    other.mkdir()
    root.rename(mine)
    other.rename(root)
    assert restored(root) is None
    root.rename(other)
    mine.rename(root)
    assert restored(root) == 7


# --- places that are taken -------------------------------------------------------------------

# A shared memory of its own, which ends with the program, and in it another user's folder.
CONTAINER = """
mount -t tmpfs tmpfs /dev/shm &&
mkdir -m 700 /dev/shm/dist_ckpt-$(id -u) &&
chown 12345 /dev/shm/dist_ckpt-$(id -u) || exit 77
exec "$@"
"""
SAVE = """
import logging, os, sys
import torch
import dist_ckpt as dc
logging.basicConfig(format="%(message)s")
root = sys.argv[1]
state = {"w": torch.full((1000,), 7.0)}
with dc.AsyncSaver(root) as saver:
    saver.save(state, f"{root}/ck", step=7).result(60)
    state["w"].zero_()
    assert saver.restore(state) == 7
    assert saver.restored.nbytes_from_memory > 4000
    assert state["w"].tolist() == [7.0] * 1000
assert os.listdir(f"/dev/shm/dist_ckpt-{os.geteuid()}") == []
"""


@pytest.mark.sampled(3)
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="only root can give a folder away, and mount",
)
def test_a_folder_of_another_user_in_shared_memory_stops_no_saves(tmp_path: Path) -> None:
    inside = ["unshare", "--mount", "sh", "-c", CONTAINER, "sh"]
    program = [sys.executable, "-c", SAVE, str(tmp_path / "runs")]
    done = subprocess.run(
        [*inside, *program],
        env={**os.environ, **CALM, "PYTHONPATH": str(Path(dc.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode in (1, 77) and "dist_ckpt" not in done.stderr:
        pytest.skip(f"no mount of its own: {done.stderr}")
    assert done.returncode == 0, done.stderr
    said = [
        line for line in done.stderr.splitlines() if "belongs to the user with id 12345" in line
    ]
    assert len(said) == 1, done.stderr
    assert "they are in memory without a name" in said[0]
