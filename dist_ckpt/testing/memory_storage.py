"""A file system in memory that implements the whole `Storage` contract."""

# ruff: noqa: D102  # the protocol documents the methods

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.storage import Entry, ReadableFile, WritableFile
from dist_ckpt.errors import CorruptError, StorageError

# Path to content; None is a folder. The root "/" always exists and is not listed.
Tree = Mapping[str, bytes | None]


@dataclass(slots=True, eq=False)
class _FileNode:
    """A file, or a folder if `data` is None. A node outlives its name while it is open."""

    data: bytearray | None
    modified_at: float


class MemoryStorage:
    """A storage in memory that starts with `tree`. Threads may share it.

    `alignment` is the alignment that its files report. `clock` gives the times of changes.
    """

    def __init__(
        self,
        tree: Tree | None = None,
        *,
        clock: Callable[[], float] = time.time,
        alignment: int = 1,
    ) -> None:
        self.alignment = alignment
        self._clock = clock
        self._lock = threading.RLock()
        self._nodes = {"/": _FileNode(None, clock())}
        for path, data in sorted((tree or {}).items()):
            self._add(path, _FileNode(None if data is None else bytearray(data), clock()))

    def tree(self) -> dict[str, bytes | None]:
        """Return all files and folders, in the form that the constructor takes."""
        with self._lock:
            return {
                path: None if node.data is None else bytes(node.data)
                for path, node in sorted(self._nodes.items())
                if path != "/"
            }

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        with self._lock:
            self._check_folder(folder)
            prefix = folder.rstrip("/") + "/"
            entries = []
            for path, node in self._nodes.items():
                name = path.removeprefix(prefix)
                if path.startswith(prefix) and name and "/" not in name:
                    kind, data = ("folder", b"") if node.data is None else ("file", node.data)
                    entries.append(Entry(name, kind, len(data), node.modified_at))  # type: ignore[arg-type]  # one of the literals
            return sorted(entries)

    def make_folder(self, folder: str) -> None:
        with self._lock:
            self._add(folder, _FileNode(None, self._clock()))

    def create(self, path: str, nbytes: int) -> WritableFile:
        with self._lock:
            node = _FileNode(bytearray(), self._clock())
            self._add_file(path, node)
        return _MemoryWritableFile(self, path, node)

    def open(self, path: str) -> ReadableFile:
        with self._lock:
            node = self._find_node(path)
            if node.data is None:
                raise CorruptError(f"{path} is a folder where dist_ckpt writes a regular file")
            num_links = sum(other is node for other in self._nodes.values())
            return _MemoryReadableFile(path, node.data, num_links)

    def rename(self, old: str, new: str) -> None:
        assert _parent_of(old) == _parent_of(new), "a rename stays within its folder"
        with self._lock:
            self._find_node(old)
            if new in self._nodes:
                raise FileExistsError(new)
            for path in [p for p in self._nodes if p == old or p.startswith(old + "/")]:
                self._nodes[new + path[len(old) :]] = self._nodes.pop(path)
            self._touch(_parent_of(new))

    def link(self, old: str, new: str) -> None:
        with self._lock:
            node = self._find_node(old)
            if node.data is None:
                raise StorageError(f"{new}: {old} is a folder: link a file")
            self._add_file(new, node)

    def remove(self, path: str) -> None:
        with self._lock:
            self._find_node(path)
            if any(p.startswith(path + "/") for p in self._nodes):
                raise StorageError(f"{path}: the folder is not empty: list its contents")
            del self._nodes[path]
            self._touch(_parent_of(path))

    def sync(self, folder: str) -> None:
        with self._lock:
            self._check_folder(folder)

    def write(self, node: _FileNode, offset: int, data: Buffer) -> None:
        """Write into an open file, which may have lost its name."""
        view = memoryview(data).cast("B")
        with self._lock:
            content = node.data
            assert content is not None
            if len(content) < offset:
                content.extend(bytes(offset - len(content)))
            content[offset : offset + len(view)] = view
            node.modified_at = self._clock()

    def _find_node(self, path: str) -> _FileNode:
        try:
            return self._nodes[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _check_folder(self, path: str) -> None:
        above = path
        while above not in self._nodes:
            above = _parent_of(above)
        if self._nodes[above].data is not None:
            raise NotADirectoryError(path)
        self._find_node(path)

    def _add_file(self, path: str, node: _FileNode) -> None:
        try:
            self._add(path, node)
        except NotADirectoryError as error:
            raise StorageError(f"{path}: a part of the path is a file") from error

    def _add(self, path: str, node: _FileNode) -> None:
        self._check_folder(_parent_of(path))
        if path in self._nodes:
            raise FileExistsError(path)
        self._nodes[path] = node
        self._touch(_parent_of(path))

    def _touch(self, folder: str) -> None:
        self._nodes[folder].modified_at = self._clock()


@dataclass(eq=False)
class _MemoryWritableFile:
    _storage: MemoryStorage
    _path: str
    _node: _FileNode | None

    @property
    def alignment(self) -> int:
        return self._storage.alignment

    def write_at(self, offset: int, data: Buffer) -> None:
        if self._node is None:
            raise StorageError(f"{self._path}: the file is closed")
        self._storage.write(self._node, offset, data)

    def finish(self) -> int:
        node, self._node = self._node, None
        if node is None or node.data is None:
            raise StorageError(f"{self._path}: the file is closed")
        return len(node.data)

    def discard(self) -> None:
        self._node = None


class _MemoryReadableFile:
    def __init__(self, path: str, data: bytearray, num_links: int) -> None:
        self.num_links = num_links
        self._path = path
        self._data: bytearray | None = data
        self._nbytes = len(data)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read_into(self, offset: int, target: memoryview) -> int:
        if self._data is None:
            raise StorageError(f"{self._path}: the file is closed")
        view = target.cast("B")
        data = bytes(self._data[offset : offset + len(view)])
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._data = None


def _parent_of(path: str) -> str:
    # Not `posixpath.dirname`: of "//name" that is "//", which has itself as its folder.
    return path.rpartition("/")[0] or "/"
