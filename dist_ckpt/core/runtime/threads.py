"""Threads that nobody has to wait for, and the one way to do several things at once.

A call that hangs keeps no process from exiting. Whoever waits for such a thread can watch what it
is at, and leave it when that takes too long. So a call with a deadline needs no thread of its own
there: see `CallMonitor`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TypeVar

from dist_ckpt.config import STALL_TIMEOUT_S
from dist_ckpt.errors import StorageError

# How long a thread without work stays. To start one takes about 0.1 ms.
IDLE_S = 0.1

# How often a watch is looked at: a call is told so much later than its deadline at most.
LOOK_S = 0.2

# One call may need the storage more than once, and each time the storage has its own deadline,
# whose error says more.
WORK_STALL_S = 2 * STALL_TIMEOUT_S

T = TypeVar("T")
R = TypeVar("R")


class DaemonThreads:
    """Daemon threads, made when a call needs one; up to `most` calls run at once, others wait.

    Not a ThreadPoolExecutor, for the interpreter joins its threads before it exits. Threads may
    share it, and a forked child has threads of its own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._closed = False
        self._team = _ThreadTeam()

    def submit(self, call: Callable[[], T], into: Future[T] | None = None) -> Future[T]:
        """Have a thread make the call. RuntimeError if no more threads start, as at the very end.

        Who gives a future `into` which the outcome goes has it also if an interrupt meets this:
        the call may run then.
        """
        if sys.is_finalizing():
            # Daemon threads stand still by now, and to start one would never return (Python 3.11).
            raise RuntimeError("the interpreter is at its end")
        if self._team.pid != os.getpid():
            self._team = _ThreadTeam()
        future: Future[T] = into or Future()
        team = self._team
        with team.changed:
            # No lambda: its frame would refer to the future as long as an error does to that.
            team.calls.append(partial(run_into, future, call))
            if len(team.calls) <= team.num_idle:
                team.changed.notify()
            elif team.num_threads < self._most:
                thread = threading.Thread(target=self._serve, name="dist_ckpt", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    team.calls.pop()
                    raise
                team.num_threads += 1
        return future

    def close(self) -> None:
        """Let the threads end as soon as they have nothing to do."""
        with self._team.changed:
            self._closed = True
            self._team.changed.notify_all()

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            call()
            del call  # it holds buffers

    def _next(self) -> Callable[[], None] | None:
        team = self._team
        with team.changed:
            team.num_idle += 1
            team.changed.wait_for(lambda: team.calls or self._closed, IDLE_S)
            team.num_idle -= 1
            if team.calls:
                return team.calls.popleft()
            team.num_threads -= 1
            return None


@dataclass(slots=True)
class _ThreadTeam:
    """The threads of one process, and the calls that wait for them."""

    pid: int = field(default_factory=os.getpid)
    changed: threading.Condition = field(default_factory=threading.Condition)
    calls: deque[Callable[[], None]] = field(default_factory=deque)
    num_threads: int = 0
    num_idle: int = 0


_watched = threading.local()


class CallMonitor:
    """Lets who waits for a daemon thread see the call that it is at, and leave both behind.

    The thread runs `over`, and in it `make`; who waits uses `wait_for`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: tuple[float, str] | None = None  # when it must have returned, and the fact
        self._left = False

    @staticmethod
    def here() -> CallMonitor | None:
        """Return the watch over this thread, or None if nobody would notice that it hangs."""
        return getattr(_watched, "watch", None)

    def over(self, work: Callable[[], T]) -> T:
        """Run work in this thread, under the watch."""
        _watched.watch = self
        try:
            return work()
        finally:
            _watched.watch = None

    def make(
        self, act: Callable[[], T], timeout_s: float, fact: str, release: Callable[[T], None]
    ) -> T:
        """Return what a call returns; `fact` is the error if it takes longer than `timeout_s`.

        Who waits raises that error. What the call returns too late is released here, and
        TimeoutError ends the work.
        """
        with self._lock:
            self._call = (monotonic() + timeout_s, fact)
        try:
            value = act()
        finally:
            with self._lock:
                self._call = None
                left = self._left
        if left:
            release(value)
            raise TimeoutError(fact)
        return value

    def wait_for(self, future: Future[T], until: float) -> str | None:
        """Wait for the end of what runs here, at most until a time of the monotonic clock.

        Returns the fact about a call that has missed its deadline: it is left then.
        """
        while not future.done() and (now := monotonic()) < until:
            wait((future,), timeout=min(LOOK_S, until - now))
            with self._lock:
                if self._call is not None and self._call[0] < monotonic():
                    self._left = True
                    return self._call[1]
        return None


def run_into(future: Future[T], call: Callable[[], T]) -> None:
    """Make a call, at a thread's outer edge: a future, unless it is cancelled, has the outcome."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised by the future
        future.set_exception(error)
        del future  # the error refers to this frame: no cycle of them


def parallel_for(
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    threads: int,
    waiting: int | None = None,
    stall_s: float = WORK_STALL_S,
) -> list[R]:
    """Return what `work` returns for each item, in the order of the items.

    Up to `threads` calls run at once and as many wait, or `waiting`, so a lazy `items` is never
    held whole. If a call raises, no more begin, those that run are waited for, and the error of
    the first item that failed is raised. StorageError if a call hangs for `stall_s`, or a
    storage's call in it for longer than that storage allows: the error names the call.
    """
    return list(results_of(work, items, threads=threads, waiting=waiting, stall_s=stall_s))


def results_of(
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    threads: int,
    waiting: int | None = None,
    stall_s: float = WORK_STALL_S,
) -> Generator[R, None, None]:
    """Yield what `each` returns, one by one: `items` of another `each`, done by other threads.

    Who does not take all of it closes it, which waits for the calls that run.
    """
    most = threads + (threads if waiting is None else waiting)
    running: deque[tuple[Future[R], CallMonitor]] = deque()
    pool = DaemonThreads(threads)
    try:
        for item in items:
            if len(running) >= most:
                yield _next_result(running, stall_s)
            watch, future = CallMonitor(), Future[R]()
            running.append((future, watch))  # first: what an interrupt meets is waited for too
            pool.submit(partial(watch.over, partial(work, item)), future)
        while running:
            yield _next_result(running, stall_s)
    finally:
        _left_behind(running, stall_s)
        pool.close()


class SerialExecutor:
    """Calls that another thread makes, one at a time, behind whoever asks for them."""

    def __init__(self, stall_s: float = WORK_STALL_S) -> None:
        self._stall_s = stall_s
        self._pool = DaemonThreads(1)
        self._running: deque[tuple[Future[None], CallMonitor]] = deque()

    def make(self, call: Callable[[], None]) -> None:
        """Have the call made, once the one before has ended well: raises what that has raised."""
        self.wait()
        watch, future = CallMonitor(), Future[None]()
        self._running.append((future, watch))
        self._pool.submit(partial(watch.over, call), future)

    def wait(self) -> None:
        """Wait for the last call. Raises what it has raised, StorageError if it hangs."""
        if self._running:
            _next_result(self._running, self._stall_s)

    def close(self) -> None:
        """Wait for the last call, however it ends, and let the thread go."""
        _left_behind(self._running, self._stall_s)
        self._pool.close()


def _left_behind(running: Iterable[tuple[Future[R], CallMonitor]], stall_s: float) -> None:
    """Wait for calls that nobody wants the results of; those that have not begun never do."""
    for future, _ in running:
        future.cancel()
    # After a stall this may return with calls still stuck in the kernel; nothing can end them.
    until = monotonic() + stall_s
    for future, watch in running:
        watch.wait_for(future, until)


def _next_result(running: deque[tuple[Future[R], CallMonitor]], stall_s: float) -> R:
    future, watch = running[0]
    fact = watch.wait_for(future, monotonic() + stall_s)
    running.popleft()  # only now: what an interrupt meets is waited for too
    if fact is not None:
        raise StorageError(fact)
    if not future.done():
        raise StorageError(
            f"the storage or the device did not answer for {stall_s:g} s; look at their health, "
            "then try again"
        )
    return future.result(timeout=0)
