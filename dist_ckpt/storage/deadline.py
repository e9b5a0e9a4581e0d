"""A storage whose every call has a deadline, whatever hangs below it.

A call to a dead network mount never returns, and no signal ends it. So another thread makes it;
when the deadline passes the thread is left to it, and the caller is told. Where the caller is such
a thread itself, and somebody watches it, the call is made in place: a thread more is two switches
a call.
"""

# ruff: noqa: D102  # the protocol documents the methods

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from dist_ckpt.config import STALL_S, patience_s
from dist_ckpt.errors import StorageError
from dist_ckpt.format.checksums import Buffer
from dist_ckpt.runtime.threads import DaemonThreads, Watch
from dist_ckpt.storage.protocol import Entry, ReadableFile, Storage, WritableFile
from dist_ckpt.storage.wrapping import WrappedReadableFile, WrappedWritableFile

# So many calls are made at once. Those that hang count, so that they cannot pile up for ever.
MAX_CALLS = 256

# How long an interrupt waits for the call that it has met, so that what is done next finds the
# storage as the call has left it; and how long anybody waits for a file to close.
GRACE_S = 5.0

T = TypeVar("T")


class DeadlineStorage:
    """Hands calls to `inner`, with deadlines: StorageError that names the call and the path.

    `stall_s` is for a call that moves nothing; bytes get `patience_s`. A call that has missed its
    deadline may still take effect later.
    """

    def __init__(self, inner: Storage, stall_s: float = STALL_S) -> None:
        self.inner = inner
        self._calls = _Calls(stall_s)
        self._lock = threading.Lock()
        self._nbytes_created = 0

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        return self._calls.make(f"list {folder}", lambda: self.inner.list(folder, follow=follow))

    def make_folder(self, folder: str) -> None:
        self._calls.make(f"make_folder {folder}", lambda: self.inner.make_folder(folder))

    def create(self, path: str, nbytes: int) -> WritableFile:
        file = self._calls.make(
            f"create {path}",
            lambda: self.inner.create(path, nbytes),
            release=lambda late: late.discard(),
        )
        with self._lock:
            self._nbytes_created += nbytes
        return _DeadlineWritableFile(self._calls, path, file, lambda: self._nbytes_created)

    def open(self, path: str) -> ReadableFile:
        file = self._calls.make(
            f"open {path}", lambda: self.inner.open(path), release=lambda late: late.close()
        )
        return _DeadlineReadableFile(self._calls, path, file)

    def rename(self, old: str, new: str) -> None:
        self._calls.make(f"rename {old} to {new}", lambda: self.inner.rename(old, new))

    def remove(self, path: str) -> None:
        self._calls.make(f"remove {path}", lambda: self.inner.remove(path))

    def sync(self, folder: str) -> None:
        self._calls.make(f"sync {folder}", lambda: self.inner.sync(folder))


class _DeadlineWritableFile(WrappedWritableFile):
    def __init__(
        self, calls: _Calls, path: str, inner: WritableFile, nbytes_created: Callable[[], int]
    ) -> None:
        super().__init__(inner)
        self._calls = calls
        self._path = path
        self._nbytes_created = nbytes_created

    def write_at(self, offset: int, data: Buffer) -> None:
        act = lambda: self.inner.write_at(offset, data)  # noqa: E731
        self._calls.make(f"write_at {self._path}", act, nbytes=memoryview(data).nbytes)

    def finish(self) -> int:
        # The sync of one file may wait for the bytes of all others.
        nbytes = self._nbytes_created()
        return self._calls.make(f"finish {self._path}", self.inner.finish, nbytes=nbytes)

    def discard(self) -> None:
        self._calls.close(self.inner.discard)


class _DeadlineReadableFile(WrappedReadableFile):
    def __init__(self, calls: _Calls, path: str, inner: ReadableFile) -> None:
        super().__init__(inner)
        self._calls = calls
        self._path = path

    def read_into(self, offset: int, target: memoryview) -> int:
        act = lambda: self.inner.read_into(offset, target)  # noqa: E731
        return self._calls.make(f"read_into {self._path}", act, nbytes=target.nbytes)

    def close(self) -> None:
        self._calls.close(self.inner.close)


class _Calls:
    """The calls of a storage and of its files."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._threads = DaemonThreads(MAX_CALLS)

    def make(
        self,
        what: str,
        act: Callable[[], T],
        *,
        nbytes: int = 0,
        release: Callable[[T], None] = lambda _: None,
    ) -> T:
        """Return what `act` returns, if it does in time; else that is released once it comes."""
        timeout_s = patience_s(nbytes, stall_s=self._stall_s)
        fact = (
            f"{what}: the storage did not answer for {timeout_s:g} s; look at its health (a "
            "network mount may hang), then try again"
        )
        if (watch := Watch.here()) is not None:
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

    def close(self, act: Callable[[], None]) -> None:
        """Close a file, which on a network mount can hang as well. Never raises."""
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
