"""The storage protocol: eight methods that a backend implements.

Paths are absolute and use "/". `commit/commit_protocol.py` implements the commit order with these
methods. A backend promises exactly what they document. An object store, such as S3, cannot
implement it: `open_storage` in `storage/__init__.py` refuses paths with a scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dist_ckpt.core.format.checksums import Buffer


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One name in a folder. `modified_at` is the storage's clock, in seconds."""

    name: str
    kind: Literal["file", "folder", "other"]
    nbytes: int
    modified_at: float


class WritableFile(Protocol):
    """A file that is being written. Threads may write different parts together."""

    @property
    def alignment(self) -> int:
        """Writes are faster if address and file offset are equal modulo this number."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of `data`, or raise StorageError."""

    def finish(self) -> int:
        """Make the bytes durable, close the file, and return the size that the storage sees.

        Raises StorageError if durability is not certain: never use or retry the file then.
        """

    def discard(self) -> None:
        """Close without any promise; does nothing after `finish`. Never raises."""


class ReadableFile(Protocol):
    """An open file: it can be read even if its name is removed. Thread-safe."""

    @property
    def nbytes(self) -> int:
        """The size when it was opened."""

    @property
    def num_links(self) -> int:
        """The number of names when it was opened: more than 1 after `link`."""

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill `target` from `offset`; return the number of bytes read (fewer at the end)."""

    def close(self) -> None:
        """Close it. Never raises."""


class Storage(Protocol):
    """A storage for checkpoints. Errors are StorageError unless a method documents others."""

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        """Return the entries of a folder, sorted by name.

        FileNotFoundError if it does not exist. NotADirectoryError if the path is a file, or below
        one; without `follow` also if it is a link, even to a folder.
        """

    def make_folder(self, folder: str) -> None:
        """Create one folder.

        FileExistsError if the name exists, ExistsError if it is a dangling link, FileNotFoundError
        if its parent does not exist, NotADirectoryError if that is a file.
        """

    def create(self, path: str, nbytes: int) -> WritableFile:
        """Create a file exclusively, with `nbytes` of space reserved if possible.

        FileExistsError if the name exists; FileNotFoundError if the folder does not.
        """

    def open(self, path: str) -> ReadableFile:
        """Open a regular file.

        FileNotFoundError if it does not exist. CorruptError if the name is a link (never followed),
        a folder or a device.
        """

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder within one parent, and never replace.

        If several callers have the same `new`, at most one returns; the others get FileExistsError.
        FileNotFoundError if `old` does not exist.
        """

    def link(self, old: str, new: str) -> None:
        """Give a file another name (a hard link), maybe in another folder, and never replace.

        Each name stays when another is removed, and is durable after a sync of its folder.
        FileExistsError if `new` exists; FileNotFoundError if `old` or a folder does not.
        StorageError if the storage cannot link, or not these files: the caller writes a file
        instead. StorageError also if `old` is not a regular file, or a folder is a symbolic link.
        """

    def remove(self, path: str) -> None:
        """Remove a file or an empty folder; of a link, the link.

        FileNotFoundError if it does not exist; StorageError if the folder is not empty.
        NotADirectoryError if a file's own folder is a link, even if it just became one: nothing is
        removed through links.
        """

    def sync(self, folder: str) -> None:
        """Make the names in a folder (created, renamed, removed) durable.

        FileNotFoundError if the folder does not exist. Never retried after an error.
        """
