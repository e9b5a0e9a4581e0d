"""A storage that gives every call a deadline.

A call to a dead network mount never returns, and no signal ends it. So another thread makes the
call, and is abandoned after the deadline. A caller that is such a thread itself, with a monitor,
makes the call directly: that saves two thread switches.
"""

# ruff: noqa: D102  # `ForwardingStorage` documents the methods

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress

from dist_ckpt.config import STALL_TIMEOUT_S, stall_timeout_s
from dist_ckpt.core.runtime.threads import CallMonitor, DaemonThreads
from dist_ckpt.core.storage.protocol import Storage, WritableFile
from dist_ckpt.core.storage.wrappers.forwarding import ForwardingStorage, T
from dist_ckpt.errors import StorageError

# The limit of calls at once. Hanging calls count, so that they cannot accumulate for ever.
MAX_CALLS = 256

# How long an interrupt waits for the current call, so that later code sees the storage as the call
# left it. Also how long a file's close may take.
GRACE_S = 5.0


class DeadlineStorage(ForwardingStorage):
    """Forwards calls to `inner`, with deadlines: a StorageError names the call and the path.

    `stall_s` is for a call that moves no data; bytes get `stall_timeout_s`. A call that has missed
    its deadline may still take effect later.
    """

    def __init__(self, inner: Storage, stall_s: float = STALL_TIMEOUT_S) -> None:
        super().__init__(inner)
        self._stall_s = stall_s
        self._threads = DaemonThreads(MAX_CALLS)
        self._lock = threading.Lock()
        self._nbytes_created = 0

    def create(self, path: str, nbytes: int) -> WritableFile:
        file = super().create(path, nbytes)
        with self._lock:
            self._nbytes_created += nbytes
        return file

    def make_call(
        self,
        what: str,
        act: Callable[[], T],
        *,
        nbytes: int = 0,
        release: Callable[[T], None] = lambda _: None,
    ) -> T:
        timeout_s = stall_timeout_s(nbytes, stall_s=self._stall_s)
        fact = (
            f"{what}: the storage did not answer for {timeout_s:g} s; look at its health (a "
            "network mount may hang), then try again"
        )
        if (monitor := CallMonitor.here()) is not None:
            return monitor.make(act, timeout_s, fact, release)
        future = self._submit(what, act)
        try:
            future.exception(timeout=timeout_s)  # does not raise a TimeoutError of the call
        except TimeoutError:
            _abandon(future, release)
            raise StorageError(fact) from None
        except BaseException:
            wait((future,), timeout=GRACE_S)
            _abandon(future, release)
            raise
        try:
            return future.result(timeout=0)
        finally:
            # The error refers to this frame. A cycle would keep the callers' data alive, such as
            # the state of a save, until the next garbage collection.
            del future

    def finish(self, path: str, act: Callable[[], int]) -> int:
        # The sync of one file may wait for the bytes of all others.
        return self.make_call(f"finish {path}", act, nbytes=self._nbytes_created)

    def close(self, act: Callable[[], None]) -> None:
        # On a network mount a close can hang too.
        with suppress(StorageError):
            wait((self._submit("close", act),), timeout=min(GRACE_S, self._stall_s))

    def _submit(self, what: str, act: Callable[[], T]) -> Future[T]:
        try:
            return self._threads.submit(act)
        except RuntimeError as error:
            raise StorageError(
                f"{what}: {error}; raise the limit of threads (ulimit -u), then try again"
            ) from error


def _abandon(future: Future[T], release: Callable[[T], None]) -> None:
    """Abandon a call, and release a late result."""

    def release_result(done: Future[T]) -> None:
        if not done.cancelled() and done.exception(timeout=0) is None:
            release(done.result(timeout=0))

    future.cancel()
    future.add_done_callback(release_result)
