"""The one way in which writer, reader and verify do several things at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from mmap import mmap
from typing import TypeVar

from dist_ckpt.config import STALL_S
from dist_ckpt.daemon_threads import DaemonThreads
from dist_ckpt.errors import StorageError

# One call may need the storage more than once, and each time the storage has its own deadline,
# whose error says more.
WORK_STALL_S = 2 * STALL_S

T = TypeVar("T")
R = TypeVar("R")


def each(
    work: Callable[[T], R], items: Iterable[T], *, threads: int, stall_s: float = WORK_STALL_S
) -> list[R]:
    """Return what `work` returns for each item, in the order of the items.

    Up to `threads` calls run at once and as many wait, so a lazy `items` is never held whole.
    If a call raises, no more begin, those that run are waited for, and the error of the first
    item that failed is raised. StorageError if a call hangs for `stall_s`.
    """
    results: list[R] = []
    running: deque[Future[R]] = deque()
    pool = DaemonThreads(threads)
    try:
        for item in items:
            if len(running) >= 2 * threads:
                results.append(_result(running.popleft(), stall_s))
            running.append(pool.submit(partial(work, item)))
        while running:
            results.append(_result(running.popleft(), stall_s))
    finally:
        for future in running:
            future.cancel()
        # After a stall this may return with calls still stuck in the kernel; nothing can end them.
        wait(running, timeout=stall_s)
        pool.close()
    return results


def _result(future: Future[R], stall_s: float) -> R:
    wait((future,), timeout=stall_s)
    if not future.done():
        raise StorageError(
            f"the storage or the device did not answer for {stall_s:g} s; look at their health, "
            "then try again"
        )
    return future.result(timeout=0)


class Slots:
    """Scratch buffers of one size, one for each thread at most, made when first needed."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[memoryview] = []

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        """Lend a buffer; what it holds is whatever was there before."""
        try:
            slot = self._free.pop()
        except IndexError:
            # Unlike a bytearray it costs no memory before it is used, and begins on a page.
            slot = memoryview(mmap(-1, self._nbytes))
        yield slot
        # Not after an error: a call that hangs may still be at it.
        self._free.append(slot)
