"""Openers: they turn the path of a user into a storage, and into the path of a checkpoint there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.virtual_files import ServedFile

UserPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Files that one rank has in memory, which a load reads from there instead of the storage.

    `committed` returns the files of a committed checkpoint (its path and index), by path. The stack
    closes them. `uncommitted` are files of a checkpoint that the storage does not have.
    """

    committed: Callable[[str, Index, ExitStack], Mapping[str, ServedFile]]
    uncommitted: Mapping[str, ServedFile] = field(default_factory=dict)

    @property
    def is_only_copy(self) -> bool:
        """True if the storage does not have the checkpoint."""
        return bool(self.uncommitted)


# A load with it reads everything from the storage.
NOTHING_IN_MEMORY = MemorySource(lambda path, index, stack: {})


class PathOpener(Protocol):
    """Opens a path without a selector: returns its storage, and its path there."""

    def __call__(self, path: UserPath, *, direct_reads: bool = False) -> tuple[Storage, str]:
        """Open the path. Raises the errors of `open_storage`."""


@dataclass(frozen=True, slots=True, repr=False)
class Opener:
    """Turns the path of a user into a checkpoint.

    `open` opens a path; the storage may be a view of another system's files. `resolve` returns the
    path of the checkpoint that a selector names, and any other path unchanged. If a stack is given
    and the run keeps records, `resolve` takes a lease, which ends when the stack closes. `memory`
    has files in memory.
    """

    name: str
    open: PathOpener
    resolve: Callable[[Storage, str, ExitStack | None], str]
    memory: MemorySource = NOTHING_IN_MEMORY

    def without_selector(self, path: UserPath) -> UserPath:
        """Return the path of the checkpoint that a selector names, or the unchanged path."""
        text = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(text, str) or "@" not in text:
            return path
        return self.resolve(*open_storage(text), None)

    def find(self, path: UserPath, *, direct_reads: bool = False) -> tuple[Storage, str]:
        """Return the storage and the path of the checkpoint that `path` names."""
        return self.open(self.without_selector(path), direct_reads=direct_reads)

    def __repr__(self) -> str:
        return f"<{self.name} opener>"


# Opens only our checkpoints, by their paths.
NATIVE = Opener("native", open_storage, lambda storage, path, stack: path)
