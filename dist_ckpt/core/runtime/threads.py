"""Daemon threads whose calls can be abandoned, and the one way to do several things together.

A call that hangs does not keep the process from exiting. See `CallMonitor` for deadlines.
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
from queue import Empty, SimpleQueue
from typing import TypeVar
from weakref import WeakMethod

from dist_ckpt.core.runtime.processes import running_time
from dist_ckpt.errors import StorageError
from dist_ckpt.settings import STALL_TIMEOUT_S

# How long an idle thread stays. Starting one takes about 0.1 ms.
IDLE_S = 0.1

# How often a monitor is polled: a missed deadline is noticed at most this much later.
POLL_S = 0.2

# One call may use the storage more than once. Each use has the storage's own deadline, whose error
# says more.
WORK_STALL_S = 2 * STALL_TIMEOUT_S

T = TypeVar("T")
R = TypeVar("R")


class DaemonThreads:
    """Daemon threads, started on demand, up to a limit. A forked child has its own.

    Not a ThreadPoolExecutor, which would join its threads at exit. Thread-safe.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._team = _ThreadTeam()

    def submit(self, call: Callable[[], T], into: Future[T] | None = None) -> Future[T]:
        """Run a call in a thread. Raises RuntimeError if no thread can start, as at exit.

        After an interrupt in this method the call may still run: `into`, if given, has its outcome.
        """
        if sys.is_finalizing():
            # Daemon threads have stopped by now, and starting one would never return (Python 3.11).
            raise RuntimeError("the interpreter is shutting down")
        if self._team.pid != os.getpid():
            self._team = _ThreadTeam()
        future: Future[T] = into or Future()
        # No lambda: its frame would keep the future alive as long as an error keeps the frame.
        work = partial(run_into, future, call)
        team = self._team
        with team.lock:
            if team.num_free <= 0 and team.num_threads < self._max_threads:
                threading.Thread(target=team.serve, name="dist_ckpt", daemon=True).start()
                team.num_threads += 1
            team.num_free -= 1
            team.calls.put(work)
        return future

    def close(self) -> None:
        """Let each thread end when no calls are left. Submit nothing after this."""
        for _ in range(self._team.num_threads):
            self._team.calls.put(None)


@dataclass(slots=True)
class _ThreadTeam:
    """The threads of one process, and their waiting calls; None ends one thread.

    `num_free` counts the idle threads, less the calls that wait for a thread.
    """

    pid: int = field(default_factory=os.getpid)
    calls: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue)
    # Reentrant: a finalizer may close a file while its thread has the lock.
    lock: threading.RLock = field(default_factory=threading.RLock)
    num_threads: int = 0
    num_free: int = 0

    def serve(self) -> None:
        """Make calls until none comes for `IDLE_S`."""
        while True:
            with self.lock:
                self.num_free += 1
            if (call := self._next_call()) is None:
                return
            call()
            del call  # it holds buffers

    def _next_call(self) -> Callable[[], None] | None:
        while True:
            try:
                return self.calls.get(timeout=IDLE_S)
            except Empty:
                with self.lock:
                    if self.num_free > 0:  # otherwise a call is coming
                        self.num_free -= 1
                        self.num_threads -= 1
                        return None


_monitored = threading.local()


class CallMonitor:
    """Lets a waiting thread abandon a daemon thread whose call hangs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: tuple[float, str] | None = None  # its deadline and fact
        self._is_abandoned = False

    @staticmethod
    def of_this_thread() -> CallMonitor | None:
        """Return the monitor of this thread, or None if no other thread watches it."""
        return getattr(_monitored, "monitor", None)

    def run(self, work: Callable[[], T]) -> T:
        """Run work in this thread, under the monitor."""
        _monitored.monitor = self
        try:
            return work()
        finally:
            _monitored.monitor = None

    def make_call(
        self, act: Callable[[], T], timeout_s: float, fact: str, release: Callable[[T], None]
    ) -> T:
        """Return the result of `act`.

        If it takes longer than `timeout_s`, the waiting thread raises `fact`. A late result is
        released here, and TimeoutError ends the work.
        """
        with self._lock:
            self._call = (running_time() + timeout_s, fact)
        try:
            value = act()
        finally:
            with self._lock:
                self._call = None
                is_abandoned = self._is_abandoned
        if is_abandoned:
            release(value)
            raise TimeoutError(fact)
        return value

    def wait_for(self, future: Future[T], deadline: float) -> str | None:
        """Wait for the work until `deadline`; return the `fact` of a call that hangs."""
        while not future.done() and (now := running_time()) < deadline:
            wait((future,), timeout=min(POLL_S, deadline - now))
            with self._lock:
                if self._call is not None and self._call[0] < running_time():
                    self._is_abandoned = True
                    return self._call[1]
        return None


def has_outcome(future: Future[T], timeout_s: float) -> bool:
    """Wait for a future. False after `timeout_s`, in which no stop of this process counts."""
    until, left_s = None, timeout_s
    while True:
        try:
            future.exception(timeout=min(POLL_S, left_s))
        except TimeoutError:
            now = running_time()  # a fast call never reads the clock
            if until is None:
                until = now + timeout_s - POLL_S
            left_s = until - now
            if left_s <= 0:
                return False
        else:
            return True


def run_into(future: Future[T], call: Callable[[], T]) -> None:
    """Make a call and store its outcome in the future, unless that is cancelled. Never raises."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised by the future
        future.set_exception(error)
        del future  # the error refers to this frame: avoid a reference cycle


def parallel_for(
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    threads: int,
    waiting: int | None = None,
    stall_s: float = WORK_STALL_S,
) -> list[R]:
    """Return the results of `work` for each item, in the order of the items.

    Up to `threads` calls run together. Up to `waiting`, by default as many, are queued: a lazy
    `items` is never stored whole. After an error no further call begins, running calls are awaited,
    and the error of the first failed item is raised. StorageError if a call hangs for `stall_s`, or
    if a storage call in it misses the storage's deadline; the error names the call.
    """
    return list(stream_results(work, items, threads=threads, waiting=waiting, stall_s=stall_s))


def stream_results(
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    threads: int,
    waiting: int | None = None,
    stall_s: float = WORK_STALL_S,
) -> Generator[R, None, None]:
    """Yield the results of `parallel_for` one by one. Close it if you stop early."""
    most = threads + (threads if waiting is None else waiting)
    running: deque[tuple[Future[R], CallMonitor]] = deque()
    pool = DaemonThreads(threads)
    try:
        for item in items:
            if len(running) >= most:
                yield _next_result(running, stall_s)
            monitor, future = CallMonitor(), Future[R]()
            running.append((future, monitor))  # before submit: an interrupt then waits for it
            pool.submit(partial(monitor.run, partial(work, item)), future)
        while running:
            yield _next_result(running, stall_s)
    finally:
        _drain(running, stall_s)
        pool.close()


class SerialExecutor:
    """Runs calls in another thread, one at a time, while the caller continues."""

    def __init__(self, stall_s: float = WORK_STALL_S) -> None:
        self._stall_s = stall_s
        self._pool = DaemonThreads(1)
        self._running: deque[tuple[Future[None], CallMonitor]] = deque()

    def start(self, call: Callable[[], None]) -> None:
        """Start the call after the previous one. Raises the error of the previous one."""
        self.wait()
        monitor, future = CallMonitor(), Future[None]()
        self._running.append((future, monitor))
        self._pool.submit(partial(monitor.run, call), future)

    def wait(self) -> None:
        """Wait for the last call and raise its error, or StorageError if it hangs."""
        if self._running:
            _next_result(self._running, self._stall_s)

    def close(self) -> None:
        """Wait for the last call, ignore its outcome, and let the thread end."""
        _drain(self._running, self._stall_s)
        self._pool.close()


def _drain(running: Iterable[tuple[Future[R], CallMonitor]], stall_s: float) -> None:
    """Cancel calls that have not begun, and wait for the others."""
    for future, _ in running:
        future.cancel()
    # After a stall, calls may still be stuck in the kernel; nothing can end them.
    until = running_time() + stall_s
    for future, monitor in running:
        monitor.wait_for(future, until)


def _next_result(running: deque[tuple[Future[R], CallMonitor]], stall_s: float) -> R:
    future, monitor = running[0]
    fact = monitor.wait_for(future, running_time() + stall_s)
    running.popleft()  # only now: an interrupt during the wait then waits for it again
    if fact is not None:
        raise StorageError(fact)
    if not future.done():
        raise StorageError(
            f"the storage or the device did not answer for {stall_s:g} s; look at their health, "
            "then try again"
        )
    return future.result(timeout=0)


def run_after_fork(method: Callable[[], None]) -> None:
    """Call a method in every forked child while its object is alive, without a reference to it."""
    weak = WeakMethod(method)

    def call() -> None:
        if (alive := weak()) is not None:
            alive()

    os.register_at_fork(after_in_child=call)
