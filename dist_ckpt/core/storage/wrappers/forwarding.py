"""A storage that forwards all calls, its files' too: a wrapper overrides one method."""

# ruff: noqa: D102  # the protocol documents the methods

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.storage.protocol import Entry, ReadableFile, Storage, WritableFile

T = TypeVar("T")


class ForwardingStorage:
    """Forwards every call to `inner`, through `make_call` except `close`; `act` makes the call.

    Calls of files go through `read`, `write`, `finish` and `close` first, with the file's path.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    # --- for wrappers ---

    def make_call(
        self,
        what: str,
        act: Callable[[], T],
        *,
        nbytes: int = 0,
        release: Callable[[T], None] = lambda _: None,
    ) -> T:
        """Make a call that moves `nbytes`; `release` a result that is too late."""
        del what, nbytes, release
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

    # --- the protocol ---

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


class _WrappedWritableFile:
    def __init__(self, storage: ForwardingStorage, path: str, inner: WritableFile) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner

    @property
    def alignment(self) -> int:
        return self._inner.alignment

    def write_at(self, offset: int, data: Buffer) -> None:
        nbytes = memoryview(data).nbytes
        self._storage.write(self._path, nbytes, lambda: self._inner.write_at(offset, data))

    def finish(self) -> int:
        return self._storage.finish(self._path, self._inner.finish)

    def discard(self) -> None:
        self._storage.close(self._inner.discard)


class _WrappedReadableFile:
    def __init__(self, storage: ForwardingStorage, path: str, inner: ReadableFile) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    @property
    def num_links(self) -> int:
        return self._inner.num_links

    def read_into(self, offset: int, target: memoryview) -> int:
        act = lambda: self._inner.read_into(offset, target)  # noqa: E731
        return self._storage.read(self._path, target.nbytes, act)

    def close(self) -> None:
        self._storage.close(self._inner.close)
