"""Openers: turn the path of a user into a storage and the path of a checkpoint there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.overlay_storage import ServedFile

UserPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """Files in the memory of this host: a load reads them there, not from the storage.

    `committed` takes the path and the index of a committed checkpoint, and returns its files by
    path. The stack closes them. `uncommitted` has the files of a checkpoint that the storage does
    not have.
    """

    committed: Callable[[str, Index, ExitStack], Mapping[str, ServedFile]]
    uncommitted: Mapping[str, ServedFile] = field(default_factory=dict)

    @property
    def is_only_copy(self) -> bool:
        """True if only the memory has the checkpoint."""
        return bool(self.uncommitted)


# With this value a load reads everything from the storage.
NOTHING_IN_MEMORY = MemoryFiles(lambda path, index, stack: {})


class PathOpener(Protocol):
    """A function that opens a path without a selector. Returns the storage, and the path there."""

    def __call__(self, path: UserPath, *, direct_reads: bool = False) -> tuple[Storage, str]:
        """Open the path. Raises the errors of `open_storage`."""


@dataclass(frozen=True, slots=True, repr=False)
class Opener:
    """Turns the path of a user into a checkpoint.

    `open` opens a path; the storage may be a view of another system's files. `resolve` returns the
    path of the checkpoint that a selector names, and returns any other path unchanged. With a
    stack, `resolve` also leases the checkpoint until the stack closes, if the run keeps records.
    `memory` has files that need not be read from the storage.
    """

    name: str
    open: PathOpener
    resolve: Callable[[Storage, str, ExitStack | None], str]
    memory: MemoryFiles = NOTHING_IN_MEMORY

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
