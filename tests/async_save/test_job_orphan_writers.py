"""Writers of an earlier run may finish; then they are told to stop, then killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from arena_processes import ROOT, Program, program
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.async_save.trainer import job
from dist_ckpt.async_save.trainer.job import end_orphan_writers
from dist_ckpt.async_save.trainer.writer_handle import PROGRAM
from dist_ckpt.errors import ConflictError, StorageError

pytestmark = pytest.mark.multi_process

# Its words are a writer's: `python -c CODE dist_ckpt.async_save.writer ...`.
WRITER = """
import signal, sys, threading
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
root, rank, role, until = sys.argv[2:]
if until == "killed":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = JobFolder("job", roots=[root]).rank(int(rank)).lock(role)
print("held", flush=True)
if until == "asked":
    # Once somebody has looked whether it lives it ends, as one that has finished.
    sys.stdin.readline()
else:
    signal.pause()
    signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder("job", roots=[str(tmp_path)])


@contextmanager
def writer(
    folder: JobFolder, rank: int, until: str, *, role: str = "writer", name: str = PROGRAM
) -> Iterator[Program]:
    """Run a process that holds a lock until it is asked to end, told to stop, or killed."""
    root = str(Path(folder.path).parent.parent)
    words = [sys.executable, "-c", WRITER, name, root, str(rank), role, until]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            one = Program(process)
            assert one.hear() == "held"
            yield one
        finally:
            process.kill()


def end_when_looked_at(monkeypatch: pytest.MonkeyPatch, one: Program) -> None:
    """Have a writer finish when it has been waited for a while."""
    real, looks = job._find_orphan_writer, [0]

    def left_writer(folder):
        looks[0] += 1
        if looks[0] == 4:
            one.tell()
        return real(folder)

    monkeypatch.setattr(job, "_find_orphan_writer", left_writer)


def settled(
    folder: JobFolder, drain_timeout_s: float, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """Settle with the writers; return what is said of them."""
    end_orphan_writers(folder, drain_timeout_s)
    words = [record.message.partition("job job: the writers of ")[2] for record in caplog.records]
    return [one for one in words if one]


def test_without_writers_nothing_is_waited_for(folder, caplog):
    folder.rank(3)
    assert settled(folder, 1e9, caplog) == []


def test_a_writer_may_finish_in_its_time(folder, monkeypatch, caplog):
    with writer(folder, 0, "asked") as one:
        end_when_looked_at(monkeypatch, one)
        assert settled(folder, 60, caplog) == ["rank 0 finished"]
        assert one.process.wait(60) == 0


def test_a_writer_that_takes_longer_is_told_to_stop(folder, caplog):
    with writer(folder, 0, "told") as one:
        assert settled(folder, 0, caplog) == ["rank 0 were stopped"]
        assert one.process.wait(60) == -signal.SIGTERM


def test_a_writer_of_an_older_version_is_recognised_by_its_name(folder, caplog):
    with writer(folder, 0, "told", name="dist_ckpt.writer") as former:
        assert settled(folder, 0, caplog) == ["rank 0 were stopped"]
        assert former.process.wait(60) == -signal.SIGTERM


def test_a_writer_that_does_not_stop_is_killed(folder, monkeypatch, caplog):
    monkeypatch.setattr(job, "_STOP_S", 0.1)
    with writer(folder, 0, "killed") as stubborn, writer(folder, 1, "told") as obedient:
        assert settled(folder, 0, caplog) == ["rank 1 were stopped", "rank 0 were killed"]
        assert stubborn.process.wait(60) == -signal.SIGKILL
        assert obedient.process.wait(60) == -signal.SIGTERM
    assert folder.rank(0).owner("writer") is None


def test_the_writer_of_a_living_trainer_is_left_alone(folder, caplog):
    with ExitStack() as stack:
        lone = stack.enter_context(writer(folder, 1, "told"))
        for role in ("trainer", "writer"):
            stack.enter_context(writer(folder, 0, "told", role=role))
        assert settled(folder, 0, caplog) == ["rank 1 were stopped"]
        assert lone.process.wait(60) == -signal.SIGTERM
        assert folder.rank(0).owner("writer") is not None


def test_a_trainer_settles_with_the_writer_that_its_predecessor_has_left(folder, caplog):
    with writer(folder, 0, "told"):
        lock = folder.rank(0).lock("trainer")
        assert settled(folder, 0, caplog) == ["rank 0 were stopped"]
        lock.release()


def test_a_process_that_is_no_writer_is_never_ended(folder):
    with writer(folder, 2, "told", name="something_else") as other:
        with pytest.raises(
            ConflictError, match=r"the writer of rank 2 belongs to process \d+ on .* Stop it"
        ):
            end_orphan_writers(folder, 0)
        assert other.process.poll() is None


def test_a_writer_that_only_has_the_number_of_the_owner_is_not_ended(folder):
    with writer(folder, 0, "told") as owner, program("say('here'); wait()", PROGRAM) as other:
        assert other.hear() == "here"
        lock = Path(folder.rank(0).path, "writer.lock")
        words = lock.read_text().replace(str(owner.process.pid), str(other.process.pid), 1)
        lock.write_text(words)
        with pytest.raises(ConflictError, match=f"belongs to process {other.process.pid} on"):
            end_orphan_writers(folder, 0)
        assert (owner.process.poll(), other.process.poll()) == (None, None)


def test_a_writer_that_outlives_its_kill_is_reported(folder, monkeypatch):
    monkeypatch.setattr(job, "_STOP_S", 0.1)
    monkeypatch.setattr(job, "_KILL_S", 0.1)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)  # as if it hung in a call
    with writer(folder, 4, "told"), pytest.raises(StorageError, match=r"rank 4 .*Repair"):
        end_orphan_writers(folder, 0)
