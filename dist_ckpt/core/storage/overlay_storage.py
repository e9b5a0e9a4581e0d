"""Files that are not on a storage: they are in memory, or are created when they are opened."""

# ruff: noqa: D102  # the protocols document the methods

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.storage.storage_protocol import Entry, ReadableFile, Storage
from dist_ckpt.core.storage.storage_wrappers import ForwardingStorage
from dist_ckpt.errors import CorruptError, StorageError
from dist_ckpt.reports import IoCount


class ServedFile(Protocol):
    """A file that is served from memory."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""

    def read_into(self, offset: int, target: memoryview) -> object:
        """Fill memory from `offset`, within the file. CorruptError if the file's memory is gone."""


class OverlayStorage(ForwardingStorage):
    """Forwards every call to `inner`, except reads of the files to `serve`, which it also lists.

    If a file's memory is gone, `inner` reads it. `from_memory` counts reads from memory.
    Thread-safe.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.from_memory = IoCount()
        self._files: dict[str, ServedFile] = {}
        self._lock = threading.Lock()

    def serve(self, files: Mapping[str, ServedFile]) -> None:
        """Read these files, given by path, from memory from now on, in place of earlier ones."""
        self._files = dict(files)

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        entries: dict[str, Entry] = {}
        for path, served in self._files.items():
            if path.startswith(f"{folder}/"):
                name, _, below = path[len(folder) + 1 :].partition("/")
                nbytes = 0 if below else served.nbytes
                entries[name] = Entry(name, "folder" if below else "file", nbytes, 0.0)
        try:
            entries.update((entry.name, entry) for entry in self.inner.list(folder, follow=follow))
        except (FileNotFoundError, NotADirectoryError):
            if not entries:
                raise
        return sorted(entries.values())

    def open(self, path: str) -> ReadableFile:
        served = self._files.get(path)
        if served is None:
            return self.inner.open(path)
        return _OverlayFile(served, lambda: self.inner.open(path), self._count)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.from_memory = self.from_memory.plus(nbytes)


@dataclass(slots=True, eq=False)
class _OverlayFile:
    served: ServedFile
    open_stored: Callable[[], ReadableFile]
    count: Callable[[int], None]
    num_links: int = 1  # unknown: the file itself is not opened
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stored: ReadableFile | None = None
    _is_closed: bool = False

    @property
    def nbytes(self) -> int:
        return self.served.nbytes

    def read_into(self, offset: int, target: memoryview) -> int:
        start = min(offset, self.nbytes)
        count = min(target.nbytes, self.nbytes - start)
        if self._stored is None:
            try:
                self.served.read_into(start, target[:count])
            except CorruptError as error:
                self._open(instead_of=error)
            else:
                self.count(count)
                return count
        assert self._stored is not None
        return self._stored.read_into(offset, target)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            stored = self._stored
        if stored is not None:
            stored.close()

    def _open(self, *, instead_of: CorruptError) -> None:
        """Open the file in the storage. Raises the snapshot's error if it does not exist."""
        with self._lock:
            if self._is_closed:
                raise StorageError(f"{instead_of}, and is closed") from instead_of
            if self._stored is None:
                try:
                    self._stored = self.open_stored()
                except FileNotFoundError:
                    raise instead_of from None


@dataclass(frozen=True, slots=True, eq=False)
class ReadOnlyStorage:
    """A `Storage` of one attempt's folder. A change raises StorageError with the `remedy`.

    `files` has for each file name a function that opens the file.
    """

    folder: str
    files: Mapping[str, Callable[[], ReadableFile]]
    remedy: str

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        del follow
        parent, _, name = self.folder.rpartition("/")
        if folder == parent:
            return [Entry(name, "folder", 0, 0.0)]
        if folder != self.folder:
            raise FileNotFoundError(folder)
        entries = []
        for name in sorted(self.files):
            with closing(self.files[name]()) as file:
                entries.append(Entry(name, "file", file.nbytes, 0.0))
        return entries

    def open(self, path: str) -> ReadableFile:
        folder, _, name = path.rpartition("/")
        if folder != self.folder or name not in self.files:
            raise FileNotFoundError(path)
        return self.files[name]()

    def _refuse(self, path: str, *_: object) -> NoReturn:
        raise StorageError(f"{path}: {self.remedy}")

    make_folder = create = link = rename = remove = sync = _refuse


class BytesFile:
    """An open file in memory: the bytes of two buffers, one after the other. Reads copy."""

    num_links = 1

    def __init__(self, first: Buffer, rest: Buffer = b"") -> None:
        self._parts = memoryview(first), memoryview(rest)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._parts))

    def read_into(self, offset: int, target: memoryview) -> int:
        done = 0
        for part in self._parts:
            start = min(max(offset + done, 0), len(part))
            count = min(len(target) - done, len(part) - start)
            target[done : done + count] = part[start : start + count]
            done += count
            offset -= len(part)
        return done

    def close(self) -> None:
        for part in self._parts:
            part.release()
