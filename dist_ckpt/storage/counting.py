"""A storage that counts what is read and written through it: one rank's, in one operation."""

# ruff: noqa: D102  # the protocol documents the methods

from __future__ import annotations

import threading
from collections.abc import Callable

from dist_ckpt.format.checksums import Buffer
from dist_ckpt.reports import Tally
from dist_ckpt.storage.protocol import ReadableFile, Storage, WritableFile
from dist_ckpt.storage.wrapping import WrappedReadableFile, WrappedStorage, WrappedWritableFile


class CountingStorage(WrappedStorage):
    """Hands every call to `inner`; `reads` and `writes` are the calls and bytes of its files."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.reads = self.writes = Tally()
        self._lock = threading.Lock()

    def create(self, path: str, nbytes: int) -> WritableFile:
        return _CountingWritableFile(self.inner.create(path, nbytes), self._wrote)

    def open(self, path: str) -> ReadableFile:
        return _CountingReadableFile(self.inner.open(path), self._did_read)

    def _wrote(self, nbytes: int) -> None:
        with self._lock:
            self.writes = self.writes.plus(nbytes)

    def _did_read(self, nbytes: int) -> None:
        with self._lock:
            self.reads = self.reads.plus(nbytes)


class _CountingWritableFile(WrappedWritableFile):
    def __init__(self, inner: WritableFile, count: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._count = count

    def write_at(self, offset: int, data: Buffer) -> None:
        self.inner.write_at(offset, data)
        self._count(memoryview(data).nbytes)


class _CountingReadableFile(WrappedReadableFile):
    def __init__(self, inner: ReadableFile, count: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._count = count

    def read_into(self, offset: int, target: memoryview) -> int:
        nbytes = self.inner.read_into(offset, target)
        self._count(nbytes)
        return nbytes
