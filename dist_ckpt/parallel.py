"""The one way in which writer, reader and verify do several things at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import TypeVar

from dist_ckpt.config import STALL_S
from dist_ckpt.daemon_threads import DaemonThreads, Watch
from dist_ckpt.errors import StorageError
from dist_ckpt.host_memory import scratch

# One call may need the storage more than once, and each time the storage has its own deadline,
# whose error says more.
WORK_STALL_S = 2 * STALL_S

# Room for a read of 8 MiB, or a block, wherever it has to begin; a multiple of a huge page.
SLOT_NBYTES = 10 << 20

# Memory that was never used is slow at first touch, so slots are kept, up to this.
MAX_KEPT_NBYTES = 128 << 20

T = TypeVar("T")
R = TypeVar("R")


def each(
    work: Callable[[T], R], items: Iterable[T], *, threads: int, stall_s: float = WORK_STALL_S
) -> list[R]:
    """Return what `work` returns for each item, in the order of the items.

    Up to `threads` calls run at once and as many wait, so a lazy `items` is never held whole.
    If a call raises, no more begin, those that run are waited for, and the error of the first
    item that failed is raised. StorageError if a call hangs for `stall_s`, or a storage's call in
    it for longer than that storage allows: the error names the call.
    """
    results: list[R] = []
    running: deque[tuple[Future[R], Watch]] = deque()
    pool = DaemonThreads(threads)
    try:
        for item in items:
            if len(running) >= 2 * threads:
                results.append(_next_result(running, stall_s))
            watch = Watch()
            running.append((pool.submit(partial(watch.over, partial(work, item))), watch))
        while running:
            results.append(_next_result(running, stall_s))
    finally:
        for future, _ in running:
            future.cancel()
        # After a stall this may return with calls still stuck in the kernel; nothing can end them.
        until = monotonic() + stall_s
        for future, watch in running:
            watch.wait_for(future, until)
        pool.close()
    return results


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


class Slots:
    """Scratch buffers of one size, made when first needed and kept for who needs one next.

    There are as many as threads that use one at once. Threads may share it.
    """

    def __init__(self, nbytes: int = SLOT_NBYTES) -> None:
        self._nbytes = nbytes
        self._most = max(1, MAX_KEPT_NBYTES // nbytes)
        self._free: list[memoryview] = []

    def fitting(self, nbytes: int) -> Slots:
        """Return slots of at least this size: these, or new ones."""
        return self if nbytes <= self._nbytes else Slots(nbytes)

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        """Lend a buffer that begins on a page; what it holds is whatever was there before."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = scratch(self._nbytes)
        yield slot
        # Not after an error: a call that hangs may still be at it.
        if len(self._free) < self._most:
            self._free.append(slot)

    def clear(self) -> None:
        """Free the memory that nobody uses."""
        self._free.clear()
