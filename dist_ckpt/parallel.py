"""The one way in which writer, reader and verify do several things at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from mmap import mmap
from typing import TypeVar

from dist_ckpt.errors import StorageError

# A block that takes this long is not slow: storage under it hangs. Far above what the fullest
# disk needs for a few MiB, and what a network file system needs to fail over.
STALL_S = 600.0

T = TypeVar("T")
R = TypeVar("R")


def each(
    work: Callable[[T], R], items: Iterable[T], *, threads: int, stall_s: float = STALL_S
) -> list[R]:
    """Return what `work` returns for each item, in the order of the items.

    Up to `threads` calls run at once and as many wait, so a lazy `items` is never held whole.
    If a call raises, no more begin, those that run are waited for, and the error of the first
    item that failed is raised. StorageError if a call hangs for `stall_s`.
    """
    results: list[R] = []
    running: deque[Future[R]] = deque()
    executor = ThreadPoolExecutor(threads, thread_name_prefix="dist_ckpt")
    try:
        for item in items:
            if len(running) >= 2 * threads:
                results.append(_result(running.popleft(), stall_s))
            running.append(executor.submit(work, item))
        while running:
            results.append(_result(running.popleft(), stall_s))
    finally:
        for future in running:
            future.cancel()
        # After a stall this may return with calls still stuck in the kernel; nothing can end them.
        wait(running, timeout=stall_s)
        executor.shutdown(wait=False)
    return results


def _result(future: Future[R], stall_s: float) -> R:
    wait((future,), timeout=stall_s)
    if not future.done():
        raise StorageError(
            f"the storage did not answer for {stall_s:g} s; look at its health, then try again"
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
        try:
            yield slot
        finally:
            self._free.append(slot)
