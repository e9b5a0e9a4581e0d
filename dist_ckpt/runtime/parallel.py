"""The one way in which writer, reader and verify do several things at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import TypeVar

from dist_ckpt.config import STALL_S
from dist_ckpt.errors import StorageError
from dist_ckpt.runtime.threads import DaemonThreads, Watch

# One call may need the storage more than once, and each time the storage has its own deadline,
# whose error says more.
WORK_STALL_S = 2 * STALL_S

T = TypeVar("T")
R = TypeVar("R")


def each(
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
    running: deque[tuple[Future[R], Watch]] = deque()
    pool = DaemonThreads(threads)
    try:
        for item in items:
            if len(running) >= most:
                yield _next_result(running, stall_s)
            watch, future = Watch(), Future[R]()
            running.append((future, watch))  # first: what an interrupt meets is waited for too
            pool.submit(partial(watch.over, partial(work, item)), future)
        while running:
            yield _next_result(running, stall_s)
    finally:
        for future, _ in running:
            future.cancel()
        # After a stall this may return with calls still stuck in the kernel; nothing can end them.
        until = monotonic() + stall_s
        for future, watch in running:
            watch.wait_for(future, until)
        pool.close()


def _next_result(running: deque[tuple[Future[R], Watch]], stall_s: float) -> R:
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
