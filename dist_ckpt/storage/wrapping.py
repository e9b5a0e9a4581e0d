"""A storage and files that hand every call to others, for what changes some of the calls."""

# ruff: noqa: D102  # the protocol documents the methods

from __future__ import annotations

from collections.abc import Sequence

from dist_ckpt.format.checksums import Buffer
from dist_ckpt.storage.protocol import Entry, ReadableFile, Storage, WritableFile


class WrappedStorage:
    """Hands every call to `inner`."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        return self.inner.list(folder, follow=follow)

    def make_folder(self, folder: str) -> None:
        self.inner.make_folder(folder)

    def create(self, path: str, nbytes: int) -> WritableFile:
        return self.inner.create(path, nbytes)

    def open(self, path: str) -> ReadableFile:
        return self.inner.open(path)

    def rename(self, old: str, new: str) -> None:
        self.inner.rename(old, new)

    def remove(self, path: str) -> None:
        self.inner.remove(path)

    def sync(self, folder: str) -> None:
        self.inner.sync(folder)


class WrappedWritableFile:
    """Hands every call to `inner`."""

    def __init__(self, inner: WritableFile) -> None:
        self.inner = inner

    @property
    def alignment(self) -> int:
        return self.inner.alignment

    def write_at(self, offset: int, data: Buffer) -> None:
        self.inner.write_at(offset, data)

    def finish(self) -> int:
        return self.inner.finish()

    def discard(self) -> None:
        self.inner.discard()


class WrappedReadableFile:
    """Hands every call to `inner`."""

    def __init__(self, inner: ReadableFile) -> None:
        self.inner = inner

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def read_into(self, offset: int, target: memoryview) -> int:
        return self.inner.read_into(offset, target)

    def close(self) -> None:
        self.inner.close()
