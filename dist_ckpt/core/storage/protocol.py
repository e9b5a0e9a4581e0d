"""The storage protocol: eight methods that a backend keeps.

Paths are absolute and use "/". The commit order stands in `commit/commit_protocol.py`, in these
methods; a backend promises what each one says and nothing more.
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
    """A file that is being written; threads may write different places at once."""

    @property
    def alignment(self) -> int:
        """How memory that is written fast lies: its address is the offset in the file, modulo this.

        1 where it does not matter, as everything is written that is given.
        """

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of `data`, or raise StorageError."""

    def finish(self) -> int:
        """Make the bytes durable, close the file, and return the size the storage sees.

        Raises StorageError if durability is not certain: the file is burnt, never retried.
        """

    def discard(self) -> None:
        """Close without any promise; does nothing after `finish`. Never raises."""


class ReadableFile(Protocol):
    """An open file: it can be read even if its name goes away. Threads may share it."""

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""

    @property
    def num_links(self) -> int:
        """How many names it had when it was opened: more than 1 once it was linked."""

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill `target` from `offset`; return how many bytes there were (fewer at the end)."""

    def close(self) -> None:
        """Close it. Never raises."""


class Storage(Protocol):
    """Where checkpoints lie. Errors are StorageError unless a method says otherwise."""

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        """Return the entries of a folder, sorted by name.

        FileNotFoundError if there is none; NotADirectoryError if the path is a file, or below one;
        without `follow` also if it is a link, whatever that leads to.
        """

    def make_folder(self, folder: str) -> None:
        """Create one folder.

        FileExistsError if the name exists; ExistsError if it is a link to what does not;
        FileNotFoundError if its parent does not exist; NotADirectoryError if that is a file.
        """

    def create(self, path: str, nbytes: int) -> WritableFile:
        """Create a file of this size exclusively, with its space reserved where possible.

        FileExistsError if the name exists; FileNotFoundError if the folder is gone.
        """

    def open(self, path: str) -> ReadableFile:
        """Open a regular file.

        FileNotFoundError if there is none. CorruptError if something else has the name: a link
        (never followed), a folder or a device.
        """

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder within one parent, and never replace.

        Of several callers with the same `new`, at most one returns; for the others it is
        FileExistsError. FileNotFoundError if `old` is gone.
        """

    def link(self, old: str, new: str) -> None:
        """Give a file one more name (a hard link), maybe in another folder, and never replace.

        Each name stays when another is removed. Like that of a new file it is durable once its
        folder is synced. FileExistsError if `new` exists; FileNotFoundError if `old` or a folder
        is gone; StorageError otherwise, as where files have one name only, or no more of them, or
        not there: the caller writes a file instead. What is no regular file, or lies in a folder
        that is a symbolic link, is not linked: StorageError.
        """

    def remove(self, path: str) -> None:
        """Remove a file or an empty folder; of a link, the link.

        FileNotFoundError if there is none; StorageError if the folder is not empty;
        NotADirectoryError if a file's own folder is a link: nothing is removed through it, also
        when the folder was a real one a moment before.
        """

    def sync(self, folder: str) -> None:
        """Make the names in a folder (created, renamed, removed) durable.

        FileNotFoundError if the folder is gone. Never retried after an error.
        """
