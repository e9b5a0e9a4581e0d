"""Files that appear to be on a storage, and are created when they are opened. Read-only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.storage.protocol import Entry, ReadableFile, WritableFile
from dist_ckpt.errors import StorageError


class ReadOnlyFiles:
    """A `Storage` with the files of one attempt's folder; changes raise the `remedy`.

    `files` has a function that opens each file, by name.
    """

    def __init__(
        self, folder: str, files: Mapping[str, Callable[[], ReadableFile]], remedy: str
    ) -> None:
        self._folder = folder
        self._files = files
        self._remedy = remedy

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        """See `Storage.list`."""
        del follow
        parent, _, name = self._folder.rpartition("/")
        if folder == parent:
            return [Entry(name, "folder", 0, 0.0)]
        if folder != self._folder:
            raise FileNotFoundError(folder)
        return [Entry(name, "file", self._nbytes_of(name), 0.0) for name in sorted(self._files)]

    def open(self, path: str) -> ReadableFile:
        """See `Storage.open`."""
        folder, _, name = path.rpartition("/")
        if folder != self._folder or name not in self._files:
            raise FileNotFoundError(path)
        return self._files[name]()

    def make_folder(self, folder: str) -> None:
        """Refuse."""
        raise self._refusal(folder)

    def create(self, path: str, nbytes: int) -> WritableFile:
        """Refuse."""
        raise self._refusal(path)

    def link(self, old: str, new: str) -> None:
        """Refuse."""
        raise self._refusal(old)

    def rename(self, old: str, new: str) -> None:
        """Refuse."""
        raise self._refusal(old)

    def remove(self, path: str) -> None:
        """Refuse."""
        raise self._refusal(path)

    def sync(self, folder: str) -> None:
        """Refuse."""
        raise self._refusal(folder)

    def _nbytes_of(self, name: str) -> int:
        file = self._files[name]()
        try:
            return file.nbytes
        finally:
            file.close()

    def _refusal(self, path: str) -> StorageError:
        return StorageError(f"{path}: {self._remedy}")


class FileOfBytes:
    """An open file in memory: the bytes of two buffers, one after the other. Reads copy."""

    num_links = 1

    def __init__(self, first: Buffer, rest: Buffer = b"") -> None:
        self._parts = memoryview(first), memoryview(rest)

    @property
    def nbytes(self) -> int:
        """See `ReadableFile.nbytes`."""
        return sum(map(len, self._parts))

    def read_into(self, offset: int, target: memoryview) -> int:
        """See `ReadableFile.read_into`."""
        done = 0
        for part in self._parts:
            start = min(max(offset + done, 0), len(part))
            count = min(len(target) - done, len(part) - start)
            target[done : done + count] = part[start : start + count]
            done += count
            offset -= len(part)
        return done

    def close(self) -> None:
        """See `ReadableFile.close`."""
        for part in self._parts:
            part.release()
