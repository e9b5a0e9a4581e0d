"""Storages that forward all calls to another one, and count, limit or time them.

A wrapper of a storage overrides one method of `ForwardingStorage`. A tier is not a wrapper: to copy
each checkpoint after its commit, see `_after_commit` in `checkpointer/maintenance.py`.

No wrapper repeats a call that failed: the call may have taken effect, and a second fsync proves
nothing. A run repeats the whole save in a new attempt: `RunSaves.save` in
`checkpointer/run_session.py`; a background save: `_settle` in `checkpointer/maintenance.py`.
"""

# ruff: noqa: D102  # the protocol, or `ForwardingStorage`, documents the methods

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, TypeVar

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.runtime.threads import CallMonitor, DaemonThreads, has_outcome
from dist_ckpt.core.storage.storage_protocol import Entry, ReadableFile, Storage, WritableFile
from dist_ckpt.errors import StorageError
from dist_ckpt.reports import IoCount
from dist_ckpt.settings import STALL_TIMEOUT_S, stall_timeout_s

T = TypeVar("T")


def free_nbytes(storage: Storage, path: str) -> int | None:
    """Return the free bytes for new files at `path`; None if the storage cannot tell."""
    ask: Callable[[str], int | None] | None = getattr(storage, "free_nbytes", None)
    return ask(path) if ask else None


class ForwardingStorage:
    """Forwards every call to `inner`. Override `make_call` to act at each call but `close`.

    A call of a file goes through `read`, `write`, `finish` or `close`, which can be overridden too.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    def make_call(
        self,
        label: str,
        act: Callable[[], T],
        *,
        nbytes: int = 0,
        release: Callable[[T], None] = lambda _: None,
    ) -> T:
        """Run `act`, which moves `nbytes`. After a deadline, `release` a late result."""
        del label, nbytes, release
        return act()

    def read(self, path: str, nbytes: int, act: Callable[[], int]) -> int:
        """Read up to `nbytes` of a file; return the number of bytes read."""
        return self.make_call(f"read_into {path}", act, nbytes=nbytes)

    def write(self, path: str, nbytes: int, act: Callable[[], None]) -> None:
        """Write `nbytes` to a file."""
        self.make_call(f"write_at {path}", act, nbytes=nbytes)

    def finish(self, path: str, act: Callable[[], int]) -> int:
        """Finish a file."""
        return self.make_call(f"finish {path}", act)

    def close(self, act: Callable[[], None]) -> None:
        """Close or discard a file; never raises."""
        act()

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        return self.make_call(f"list {folder}", lambda: self.inner.list(folder, follow=follow))

    def make_folder(self, folder: str) -> None:
        self.make_call(f"make_folder {folder}", lambda: self.inner.make_folder(folder))

    def create(self, path: str, nbytes: int) -> WritableFile:
        file = self.make_call(
            f"create {path}",
            lambda: self.inner.create(path, nbytes),
            release=lambda late: late.discard(),
        )
        return _WrappedWritableFile(self, path, file)

    def open(self, path: str) -> ReadableFile:
        file = self.make_call(
            f"open {path}", lambda: self.inner.open(path), release=lambda late: late.close()
        )
        return _WrappedReadableFile(self, path, file)

    def rename(self, old: str, new: str) -> None:
        self.make_call(f"rename {old} to {new}", lambda: self.inner.rename(old, new))

    def link(self, old: str, new: str) -> None:
        self.make_call(f"link {old} to {new}", lambda: self.inner.link(old, new))

    def remove(self, path: str) -> None:
        self.make_call(f"remove {path}", lambda: self.inner.remove(path))

    def sync(self, folder: str) -> None:
        self.make_call(f"sync {folder}", lambda: self.inner.sync(folder))

    def free_nbytes(self, path: str) -> int | None:
        """Return the free bytes of `inner`: see the function `free_nbytes`."""
        return free_nbytes(self.inner, path)


@dataclass(frozen=True, slots=True, eq=False)
class _WrappedWritableFile:
    storage: ForwardingStorage
    path: str
    inner: WritableFile

    @property
    def alignment(self) -> int:
        return self.inner.alignment

    def write_at(self, offset: int, data: Buffer) -> None:
        nbytes = memoryview(data).nbytes
        self.storage.write(self.path, nbytes, lambda: self.inner.write_at(offset, data))

    def finish(self) -> int:
        return self.storage.finish(self.path, self.inner.finish)

    def discard(self) -> None:
        self.storage.close(self.inner.discard)


@dataclass(frozen=True, slots=True, eq=False)
class _WrappedReadableFile:
    storage: ForwardingStorage
    path: str
    inner: ReadableFile

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def num_links(self) -> int:
        return self.inner.num_links

    def read_into(self, offset: int, target: memoryview) -> int:
        read = partial(self.inner.read_into, offset, target)
        return self.storage.read(self.path, target.nbytes, read)

    def close(self) -> None:
        self.storage.close(self.inner.close)


class CountingStorage(ForwardingStorage):
    """Forwards every call to `inner`; `reads` and `writes` count calls and bytes of files."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.reads = self.writes = IoCount()
        self._lock = threading.Lock()

    def read(self, path: str, nbytes: int, act: Callable[[], int]) -> int:
        count = super().read(path, nbytes, act)
        with self._lock:
            self.reads = self.reads.plus(count)
        return count

    def write(self, path: str, nbytes: int, act: Callable[[], None]) -> None:
        super().write(path, nbytes, act)
        with self._lock:
            self.writes = self.writes.plus(nbytes)


# The longest time between two calls of `check`.
STEP_S = 0.05


@dataclass(slots=True, eq=False)
class RateLimit:
    """Limits bytes per second over all users. Thread-safe. `check` may raise to end a wait."""

    max_bytes_per_s: float
    check: Callable[[], None] = lambda: None
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _free_at: float = field(init=False)

    def __post_init__(self) -> None:
        if not 0 < self.max_bytes_per_s < float("inf"):
            raise ValueError(
                f"max_bytes_per_s={self.max_bytes_per_s}: it must be a positive number"
            )
        self._free_at = self.clock()

    def take(self, nbytes: int) -> None:
        """Return when `nbytes` may be moved."""
        with self._lock:
            # Unused time is lost: later bursts do not get it.
            begin_at = max(self._free_at, self.clock())
            self._free_at = begin_at + nbytes / self.max_bytes_per_s
        while (remaining_s := begin_at - self.clock()) > 0:
            self.check()
            self.sleep(min(remaining_s, STEP_S))


class RateLimitedStorage(ForwardingStorage):
    """Forwards every call to `inner`, and delays writes before their deadline begins."""

    def __init__(self, inner: Storage, limit: RateLimit) -> None:
        super().__init__(inner)
        self._limit = limit

    def write(self, path: str, nbytes: int, act: Callable[[], None]) -> None:
        self._limit.take(nbytes)
        super().write(path, nbytes, act)


# The limit of calls under way. Hanging calls count, so that they cannot accumulate for ever.
MAX_CALLS = 256


class UnansweredError(StorageError):
    """A storage call missed its deadline; it may take effect until `call` is done."""

    def __init__(self, message: str, call: Future[T]) -> None:
        super().__init__(message)
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a StorageError for other processes, where the call does not exist."""
        return StorageError, self.args, {"rank": self.rank, "phase": self.phase}


# How long an interrupt waits for the current call, so that later code sees the storage as the call
# left it. Also how long a file's close may take.
GRACE_S = 5.0


class DeadlineStorage(ForwardingStorage):
    """Forwards calls to `inner`, with deadlines: a StorageError names the call and the path.

    `stall_s` is the deadline of a call that moves no data; `stall_timeout_s` adds time for data. A
    call that has missed its deadline may still take effect later.

    A call to a dead network mount never returns, and no signal ends it. So another thread makes the
    call, and is abandoned after the deadline. A caller that is such a thread itself, with a
    monitor, makes the call directly: that saves two thread switches.
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
        label: str,
        act: Callable[[], T],
        *,
        nbytes: int = 0,
        release: Callable[[T], None] = lambda _: None,
    ) -> T:
        timeout_s = stall_timeout_s(nbytes, stall_s=self._stall_s)
        fact = (
            f"{label}: the storage did not answer for {timeout_s:g} s; look at its health (a "
            "network mount may hang), then try again"
        )
        if (monitor := CallMonitor.of_this_thread()) is not None:
            return monitor.make_call(act, timeout_s, fact, release)
        future = Future[T]()
        try:
            self._submit(label, act, future)
            is_answered = has_outcome(future, timeout_s)
        except BaseException as interrupt:
            if not future.cancel():
                wait((future,), timeout=GRACE_S)
            _abandon(future, release)
            if future.done():
                raise
            raise interrupt from UnansweredError(fact, future)
        try:
            if not is_answered:
                _abandon(future, release)
                raise UnansweredError(fact, future)
            return future.result(timeout=0)
        finally:
            # The error refers to this frame. A cycle would keep the callers' data alive, such as
            # the state of a save, until the next garbage collection.
            del future

    def free_nbytes(self, path: str) -> int | None:
        return self.make_call(f"statvfs {path}", partial(free_nbytes, self.inner, path))

    def finish(self, path: str, act: Callable[[], int]) -> int:
        # The sync of one file may wait for the bytes of all others.
        return self.make_call(f"finish {path}", act, nbytes=self._nbytes_created)

    def close(self, act: Callable[[], None]) -> None:
        # On a network mount a close can hang too.
        with suppress(StorageError):
            self._submit("close", act, closed := Future[None]())
            wait((closed,), timeout=min(GRACE_S, self._stall_s))

    def _submit(self, label: str, act: Callable[[], T], future: Future[T]) -> None:
        try:
            self._threads.submit(act, future)
        except RuntimeError as error:
            raise StorageError(
                f"{label}: {error}; raise the limit of threads (ulimit -u), then try again"
            ) from error


def _abandon(future: Future[T], release: Callable[[T], None]) -> None:
    """Abandon a call, and release a late result."""

    def release_result(done: Future[T]) -> None:
        if not done.cancelled() and done.exception(timeout=0) is None:
            release(done.result(timeout=0))

    future.cancel()
    future.add_done_callback(release_result)
