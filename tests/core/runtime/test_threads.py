"""Several calls at once: in order, bounded, and nothing goes on after an error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import pytest

from dist_ckpt.core.runtime import threads
from dist_ckpt.core.runtime.threads import (
    DaemonThreads,
    SerialExecutor,
    parallel_for,
    stream_results,
)
from dist_ckpt.errors import StorageError

T = TypeVar("T")


def test_calls_that_wait_for_each_other_get_a_thread_each() -> None:
    pool, meeting = DaemonThreads(2), threading.Barrier(2)
    for _ in range(50):
        answers = [pool.submit(partial(meeting.wait, 10)) for _ in range(2)]
        assert sorted(answer.result(timeout=10) for answer in answers) == [0, 1]


def test_an_idle_thread_ends_and_the_next_call_gets_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.01)
    pool = DaemonThreads(1)
    first = pool.submit(threading.current_thread).result(timeout=10)
    first.join(10)
    assert not first.is_alive()
    assert pool.submit(threading.current_thread).result(timeout=10) is not first


def test_closed_threads_make_all_calls_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 300.0)
    pool = DaemonThreads(2)
    answers = [pool.submit(threading.current_thread) for _ in range(9)]
    pool.close()
    for thread in {answer.result(timeout=10) for answer in answers}:
        thread.join(10)
        assert not thread.is_alive()


def test_results_come_in_the_order_of_the_items() -> None:
    gates = [threading.Event() for _ in range(3)]

    def work(i: int) -> int:
        # Each waits for the next one: they end in the opposite order.
        if i + 1 < len(gates):
            assert gates[i + 1].wait(10)
        gates[i].set()
        return i * i

    assert parallel_for(work, range(3), threads=3) == [0, 1, 4]


@pytest.mark.parametrize("waiting", [None, 0, 2])
def test_no_more_run_or_wait_than_asked_for(waiting: int | None) -> None:
    lock = threading.Lock()
    counts = {"taken": 0, "done": 0, "running": 0, "most": 0, "ahead": 0}

    def items() -> Iterator[int]:
        for i in range(200):
            with lock:
                counts["taken"] += 1
                counts["ahead"] = max(counts["ahead"], counts["taken"] - counts["done"])
            yield i

    def work(_: int) -> None:
        with lock:
            counts["running"] += 1
            counts["most"] = max(counts["most"], counts["running"])
        with lock:
            counts["running"] -= 1
            counts["done"] += 1

    parallel_for(work, items(), threads=3, waiting=waiting)
    assert counts["done"] == 200
    assert counts["most"] <= 3
    assert counts["ahead"] <= 4 + (3 if waiting is None else waiting)


def test_who_closes_the_results_waits_for_what_runs_and_no_more_begins() -> None:
    begun: list[int] = []
    ended: list[int] = []
    gate = threading.Event()

    def work(i: int) -> int:
        begun.append(i)
        if i:
            gate.set()
            sum(range(1_000_000))  # long enough for the end to arrive
        ended.append(i)
        return i

    results = stream_results(work, range(100), threads=1, waiting=1)
    assert next(results) == 0
    assert gate.wait(10)
    results.close()
    assert begun == ended == [0, 1]


def test_the_first_error_is_raised_once_what_runs_has_ended_and_no_more_begins() -> None:
    begun: list[int] = []
    ended: list[int] = []
    failed = threading.Event()

    def work(i: int) -> None:
        begun.append(i)
        if i == 1:
            failed.set()
            raise StorageError("item 1 failed")
        if i == 2:
            assert failed.wait(10)
            sum(range(1_000_000))  # long enough for the error to arrive
        ended.append(i)

    with pytest.raises(StorageError, match="item 1 failed"):
        parallel_for(work, range(100), threads=2)
    assert len(begun) < 20
    assert sorted(begun) == sorted([*ended, 1])


def test_a_call_that_hangs_is_a_storage_error() -> None:
    gate = threading.Event()
    try:
        with pytest.raises(StorageError, match=r"did not answer for 0\.05 s"):
            parallel_for(lambda _: gate.wait(10), range(1), threads=1, stall_s=0.05)
    finally:
        gate.set()


def test_an_interrupt_waits_for_what_runs() -> None:
    interrupted = threading.Event()
    ended: list[int] = []

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def work(i: int) -> None:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.wait(10)
        sum(range(1_000_000))  # long enough for the interrupt to arrive
        ended.append(i)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            parallel_for(work, range(1), threads=1)
        assert ended == [0]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_call_that_an_interrupt_has_let_begin_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    ended: list[int] = []

    class Interrupted(DaemonThreads):
        def submit(self, call: Callable[[], T], into: Future[T] | None = None) -> Future[T]:
            super().submit(call, into)
            assert begun.wait(10)
            threading.Timer(0.1, may_end.set).start()
            raise KeyboardInterrupt

    def work(item: int) -> None:
        begun.set()
        assert may_end.wait(10)
        ended.append(item)

    monkeypatch.setattr(threads, "DaemonThreads", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        parallel_for(work, [7], threads=1)
    assert ended == [7]


def test_an_error_while_items_are_made_ends_what_runs() -> None:
    ended: list[int] = []

    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        parallel_for(ended.append, items(), threads=1)
    assert ended in ([], [1])


def test_calls_behind_are_made_in_order_and_the_next_raises_what_one_has_raised() -> None:
    made: list[int] = []

    def fail() -> None:
        made.append(2)
        raise StorageError("call 2 failed")

    behind = SerialExecutor()
    behind.start(lambda: made.append(1))
    behind.start(fail)
    with pytest.raises(StorageError, match="call 2 failed"):
        behind.start(lambda: made.append(3))
    behind.wait()  # the error has been raised
    behind.close()
    assert made == [1, 2]


def test_a_call_behind_that_hangs_is_a_storage_error() -> None:
    gate = threading.Event()
    behind = SerialExecutor(stall_s=0.05)
    try:
        behind.start(lambda: print(gate.wait(10)))
        with pytest.raises(StorageError, match=r"did not answer for 0\.05 s"):
            behind.wait()
    finally:
        gate.set()
        behind.close()


def test_who_closes_calls_behind_waits_for_the_one_that_runs() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        sum(range(1_000_000))  # long enough for the end to arrive
        ended.set()

    behind = SerialExecutor()
    behind.start(work)
    assert begun.wait(10)
    behind.close()
    assert ended.is_set()
