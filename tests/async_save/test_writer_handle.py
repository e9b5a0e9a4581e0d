"""What a trainer makes of its writer: of what it says, of its end, and of a writer that is gone."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from dist_ckpt.async_save.snapshots.job_folder import JobFolder, RankFolder
from dist_ckpt.async_save.trainer import writer_handle
from dist_ckpt.async_save.trainer.writer_handle import BackgroundSave, SaveHandle, WriterHandle
from dist_ckpt.async_save.writer.writer_messages import (
    Done,
    Go,
    Hello,
    Link,
    Pause,
    Paused,
    Refused,
    Write,
    WriterMessage,
)
from dist_ckpt.core.comm.rank_messages import Failure
from dist_ckpt.errors import RankError, StorageError
from dist_ckpt.settings import Settings
from fake_writers import A_REPORT

SOON_S = 30.0
FAILURE = Failure("StorageError", "rank 2 (host a): the disk is full", 2, "write")


class FakeWriters:
    """Processes that do nothing, and the ends of the links at which writers would be."""

    def __init__(self) -> None:
        self.ends: list[Link] = []
        self.processes: list[Popen[bytes]] = []

    def start(self, folder: RankFolder, hello: Hello) -> tuple[Link, Popen[bytes]]:
        ours, theirs = socket.socketpair()
        self.ends.append(Link(theirs))
        self.processes.append(Popen(["sleep", "300"]))
        return Link(ours), self.processes[-1]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(SOON_S)
        for link in self.ends:
            link.close()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWriters]:
    found = FakeWriters()
    monkeypatch.setattr(writer_handle, "start_writer", found.start)
    yield found
    found.end()


@pytest.fixture
def writer(fakes: FakeWriters, tmp_path: Path) -> Iterator[WriterHandle]:
    folder = JobFolder("job", roots=[str(tmp_path)]).rank(1)
    made = WriterHandle(folder, Hello("job", 1, 3, Settings(), None))
    made.ensure_running()
    yield made
    made.kill()


def write(name: str, store: tuple[str, int, bytes] = ("a", 1, b"t")) -> Write:
    return Write(name, f"/ck/{name}", "/dev/shm/none", 0, *store)


def order(writer: WriterHandle, name: str, arena: int = 0) -> BackgroundSave:
    made = BackgroundSave(name, arena)
    writer.submit(made, write(name))
    return made


def done(name: str, failure: Failure | None = None) -> Done:
    return Done(name, A_REPORT if failure is None else None, failure)


def die(fakes: FakeWriters) -> None:
    """End the newest writer as a kill does: its process, and with it its end of the link."""
    fakes.processes[-1].kill()
    fakes.processes[-1].wait(SOON_S)
    fakes.ends[-1].close()


def test_what_the_writer_says_settles_a_save(writer, fakes):
    first, second = order(writer, "a"), order(writer, "b")
    assert writer.joined == ("a", 1, b"t")
    fakes.ends[0].send(done("a"))
    assert writer.wait_for(lambda: first.is_settled, SOON_S)
    assert (first.failure, writer.unsettled) == (None, [second])
    assert (writer.has_committed, writer.is_last_committed) == (True, True)
    fakes.ends[0].send(done("b", FAILURE))
    assert writer.wait_for(lambda: second.is_settled, SOON_S)
    assert isinstance(second.failure, StorageError)
    assert "the disk is full" in str(second.failure)
    assert writer.failed == [second]
    assert (writer.has_committed, writer.is_last_committed) == (True, False)
    # The writers may not be in step any more.
    assert writer.joined is None


def test_a_save_is_lost_with_its_writer_and_says_how_that_ended(writer, fakes):
    waited = order(writer, "a")
    die(fakes)
    assert writer.wait_for(lambda: waited.is_settled, SOON_S)
    assert isinstance(waited.failure, RankError)
    assert "rank 1" in str(waited.failure)
    assert "signal 9" in str(waited.failure)
    assert writer.joined is None
    writer.ensure_running()
    assert writer.num_restarts == 1


def test_a_save_that_is_ordered_of_a_writer_that_is_gone_is_lost_and_not_waited_for(writer, fakes):
    die(fakes)
    writer.receive_messages()  # as another thread may, which asks a handle
    late = order(writer, "a")
    assert late.is_settled
    assert isinstance(late.failure, RankError)
    assert writer.failed == [late]
    assert writer.joined is None
    writer.ensure_running()
    assert writer.unsettled == []


def test_a_save_whose_order_is_interrupted_is_lost_and_not_waited_for(writer, fakes, monkeypatch):
    def interrupted(link: Link, message: WriterMessage) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    order = BackgroundSave("a", 0)
    monkeypatch.setattr(Link, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.submit(order, Write("a", "/ck", "/dev/shm/a", 0, "h", 1, b"t"))
    assert "signal 9" in str(order.failure)
    assert writer.unsettled == []
    monkeypatch.setattr(writer_handle, "start_writer", fakes.start)
    writer.ensure_running()
    assert writer.num_restarts == 1


def test_a_failure_is_another_exception_each_time(writer, fakes):
    lost = order(writer, "a")
    die(fakes)
    assert writer.wait_for(lambda: lost.is_settled, SOON_S)
    # One exception would keep the frames of all who have raised it, and what they refer to.
    assert lost.failure is not lost.failure


def test_saves_of_which_nothing_is_left_to_say_are_forgotten(writer, fakes):
    failed = order(writer, "a")
    fakes.ends[0].send(done("a", FAILURE))
    for number in range(20):
        newest = order(writer, str(number))
        fakes.ends[0].send(done(str(number)))
        assert writer.wait_for(lambda one=newest: one.is_settled, SOON_S)
    assert writer.saves == [failed, newest]
    failed.is_reported = True
    order(writer, "last")
    assert [one.snapshot for one in writer.saves] == ["last"]


def test_a_writer_that_refuses_to_serve_says_why_and_lives_on(writer, fakes):
    waited = order(writer, "a")
    fakes.ends[0].send(Refused(FAILURE))
    with pytest.raises(StorageError, match="the disk is full"):
        writer.serve_store("")
    assert writer.num_restarts == 0
    assert not waited.is_settled
    assert fakes.processes[0].poll() is None


def test_a_save_is_dropped_only_if_it_has_not_begun(writer, fakes):
    queued = order(writer, "a")
    fakes.ends[0].send(Paused("a", is_paused=False))
    assert not writer.pause("a")
    fakes.ends[0].send(Paused("a", is_paused=True))
    assert writer.pause("a")
    writer.end_pause("a", drop=True)
    assert queued.is_settled
    assert queued.failure is None
    assert writer.num_dropped == 1
    said = [fakes.ends[0].receive(SOON_S) for _ in range(4)]
    assert said == [write("a"), Pause("a"), Pause("a"), Go("a", drop=True)]


def test_a_writer_that_is_frozen_is_ended(writer, fakes, monkeypatch):
    monkeypatch.setattr(writer_handle, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(writer_handle, "ANSWER_TIMEOUT_S", 0.1)
    waited = order(writer, "a")
    assert writer.wait_for(lambda: waited.is_settled, SOON_S)
    assert isinstance(waited.failure, RankError)
    assert fakes.processes[0].poll() == -9


def test_closing_kills_a_writer_that_does_not_end(writer, fakes):
    writer.close(0.1)
    assert fakes.processes[0].poll() == -9


def test_a_forked_child_lets_go_and_is_told_to_ask_its_parent(writer, fakes):
    handle = SaveHandle("/ck/a", 1, writer, order(writer, "a"))
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        try:
            handle.result()
        except ValueError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    until = time.monotonic() + SOON_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() < until, "the child hangs"
        time.sleep(0.005)
    assert b"use the handle there" in os.read(read_end, 1000)
    os.close(read_end)
    assert not handle.done()
    fakes.ends[0].send(done("a"))
    assert handle.exception(SOON_S) is None


def test_a_thread_that_waits_for_the_writer_lets_others_ask(
    writer: WriterHandle, fakes: FakeWriters
) -> None:
    late = order(writer, "late")
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        writer.receive_messages(SOON_S)

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait(SOON_S)
    for _ in range(1000):
        writer.receive_messages()
    assert thread.is_alive()  # the other one has not waited for its end
    fakes.ends[0].send(done("late"))
    thread.join(SOON_S)
    assert late.is_settled
