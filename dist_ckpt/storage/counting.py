"""A storage that counts what is read and written through it: one rank's, in one operation."""

# ruff: noqa: D102  # the protocol documents the methods

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from dist_ckpt.format.checksums import Buffer
from dist_ckpt.reports import Tally
from dist_ckpt.storage.protocol import Entry, ReadableFile, Storage, WritableFile


class CountingStorage:
    """Hands every call to `inner`; `reads` and `writes` are the calls and bytes of its files."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.reads = self.writes = Tally()
        self._lock = threading.Lock()

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        return self.inner.list(folder, follow=follow)

    def make_folder(self, folder: str) -> None:
        self.inner.make_folder(folder)

    def create(self, path: str, nbytes: int) -> WritableFile:
        return _CountingWritableFile(self.inner.create(path, nbytes), self._wrote)

    def open(self, path: str) -> ReadableFile:
        return _CountingReadableFile(self.inner.open(path), self._did_read)

    def rename(self, old: str, new: str) -> None:
        self.inner.rename(old, new)

    def remove(self, path: str) -> None:
        self.inner.remove(path)

    def sync(self, folder: str) -> None:
        self.inner.sync(folder)

    def _wrote(self, nbytes: int) -> None:
        with self._lock:
            self.writes = self.writes.plus(nbytes)

    def _did_read(self, nbytes: int) -> None:
        with self._lock:
            self.reads = self.reads.plus(nbytes)


class _CountingWritableFile:
    def __init__(self, inner: WritableFile, count: Callable[[int], None]) -> None:
        self._inner = inner
        self._count = count

    @property
    def alignment(self) -> int:
        return self._inner.alignment

    def write_at(self, offset: int, data: Buffer) -> None:
        self._inner.write_at(offset, data)
        self._count(memoryview(data).nbytes)

    def finish(self) -> int:
        return self._inner.finish()

    def discard(self) -> None:
        self._inner.discard()


class _CountingReadableFile:
    def __init__(self, inner: ReadableFile, count: Callable[[int], None]) -> None:
        self._inner = inner
        self._count = count

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    def read_into(self, offset: int, target: memoryview) -> int:
        nbytes = self._inner.read_into(offset, target)
        self._count(nbytes)
        return nbytes

    def close(self) -> None:
        self._inner.close()
