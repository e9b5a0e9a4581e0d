"""A storage whose every call has a deadline, whatever hangs below it.

A call to a dead network mount never returns, and no signal ends it. So another thread makes it;
when the deadline passes the thread is left to it, and the caller is told. Where the caller is such
a thread itself, and somebody watches it, the call is made in place: a thread more is two switches
a call.
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

# So many calls are made at once. Those that hang count, so that they cannot pile up for ever.
MAX_CALLS = 256

# How long an interrupt waits for the call that it has met, so that what is done next finds the
# storage as the call has left it; and how long anybody waits for a file to close.
GRACE_S = 5.0


class DeadlineStorage(ForwardingStorage):
    """Hands calls to `inner`, with deadlines: StorageError that names the call and the path.

    `stall_s` is for a call that moves nothing; bytes get `stall_timeout_s`. A call that has missed
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
        if (watch := CallMonitor.here()) is not None:
            return watch.make(act, timeout_s, fact, release)
        future = self._submit(what, act)
        try:
            future.exception(timeout=timeout_s)  # a TimeoutError of the call's own is not raised
        except TimeoutError:
            _leave(future, release)
            raise StorageError(fact) from None
        except BaseException:
            wait((future,), timeout=GRACE_S)
            _leave(future, release)
            raise
        try:
            return future.result(timeout=0)
        finally:
            # The error in it refers to this frame: else both would keep alive what all callers
            # have, such as the state of a save, until cycles are looked for.
            del future

    def finish(self, path: str, act: Callable[[], int]) -> int:
        # The sync of one file may wait for the bytes of all others.
        return self.make_call(f"finish {path}", act, nbytes=self._nbytes_created)

    def close(self, act: Callable[[], None]) -> None:
        # On a network mount that can hang as well.
        with suppress(StorageError):
            wait((self._submit("close", act),), timeout=min(GRACE_S, self._stall_s))

    def _submit(self, what: str, act: Callable[[], T]) -> Future[T]:
        try:
            return self._threads.submit(act)
        except RuntimeError as error:
            raise StorageError(
                f"{what}: {error}; raise the limit of threads (ulimit -u), then try again"
            ) from error


def _leave(future: Future[T], release: Callable[[T], None]) -> None:
    """Wait no longer; what the call still returns is nobody's."""

    def let_go(done: Future[T]) -> None:
        if not done.cancelled() and done.exception(timeout=0) is None:
            release(done.result(timeout=0))

    future.cancel()
    future.add_done_callback(let_go)
