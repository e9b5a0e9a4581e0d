"""A storage that breaks its promises on cue."""

# ruff: noqa: D102  # the protocol documents the methods

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from dist_ckpt.errors import CheckpointError, StorageError
from dist_ckpt.format.checksums import Buffer
from dist_ckpt.storage import Entry, ReadableFile, Storage, WritableFile
from dist_ckpt.storage.wrapping import WrappedReadableFile, WrappedWritableFile

_T = TypeVar("_T")


class FaultyStorage:
    """Hands calls to `inner`, and fails the n-th (from 1): loop over n to fail everywhere.

    Every method of storage and files counts, but `discard` and `close`, which never fail; `calls`
    tells how many there were. `sticky`: all later calls fail as well. `done`: the call does its
    work before it fails, as when a server's reply is lost.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        fail_at_call: int | None = None,
        error: Exception | None = None,
        sticky: bool = False,
        done: bool = False,
    ) -> None:
        self.inner = inner
        self.calls = 0
        self.failed = ""
        self._fail_at = fail_at_call
        self._error = error
        self._sticky = sticky
        self._done = done
        self._lock = threading.Lock()

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        return self.call(f"list {folder}", lambda: self.inner.list(folder, follow=follow))

    def make_folder(self, folder: str) -> None:
        self.call(f"make_folder {folder}", lambda: self.inner.make_folder(folder))

    def create(self, path: str, nbytes: int) -> WritableFile:
        file = self.call(f"create {path}", lambda: self.inner.create(path, nbytes))
        return _FaultyWritableFile(self, path, file)

    def open(self, path: str) -> ReadableFile:
        file = self.call(f"open {path}", lambda: self.inner.open(path))
        return _FaultyReadableFile(self, path, file)

    def rename(self, old: str, new: str) -> None:
        self.call(f"rename {old} {new}", lambda: self.inner.rename(old, new))

    def remove(self, path: str) -> None:
        self.call(f"remove {path}", lambda: self.inner.remove(path))

    def sync(self, folder: str) -> None:
        self.call(f"sync {folder}", lambda: self.inner.sync(folder))

    def call(self, what: str, act: Callable[[], _T]) -> _T:
        """Count a call; do it, or fail it."""
        with self._lock:
            self.calls += 1
            at = self._fail_at
            fails = at is not None and (self.calls == at or (self._sticky and self.calls > at))
        if not fails:
            return act()
        self.failed = self.failed or what
        if self._done:
            with suppress(CheckpointError, OSError):
                act()
        raise self._error or StorageError(f"{what}: a planted fault")


class _FaultyWritableFile(WrappedWritableFile):
    def __init__(self, storage: FaultyStorage, path: str, inner: WritableFile) -> None:
        super().__init__(inner)
        self._storage = storage
        self._path = path

    def write_at(self, offset: int, data: Buffer) -> None:
        self._storage.call(f"write_at {self._path}", lambda: self.inner.write_at(offset, data))

    def finish(self) -> int:
        return self._storage.call(f"finish {self._path}", self.inner.finish)


class _FaultyReadableFile(WrappedReadableFile):
    def __init__(self, storage: FaultyStorage, path: str, inner: ReadableFile) -> None:
        super().__init__(inner)
        self._storage = storage
        self._path = path

    def read_into(self, offset: int, target: memoryview) -> int:
        what = f"read_into {self._path}"
        return self._storage.call(what, lambda: self.inner.read_into(offset, target))
