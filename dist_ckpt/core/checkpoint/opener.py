"""How the path that a user gives becomes a checkpoint: the `Opener`, a value for the core."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.wrappers.overlay_storage import ServedFile


@dataclass(frozen=True, slots=True)
class MemorySource:
    """What a load finds in memory, instead of in the storage: on one rank, which decides by itself.

    `found` returns the files, by their paths, of the checkpoint that was found (its path, its
    index) which memory has just as they are; what it gives to the stack may be needed until that is
    closed. `unfound` are those that the load is to find, though the storage does not have them.
    """

    found: Callable[[str, Index, ExitStack], Mapping[str, ServedFile]]
    unfound: Mapping[str, ServedFile] = field(default_factory=dict)

    @property
    def is_only_copy(self) -> bool:
        """Whether the storage has no such checkpoint."""
        return bool(self.unfound)


# For a load that reads everything from the storage.
NOTHING_IN_MEMORY = MemorySource(lambda path, index, stack: {})


class PathOpener(Protocol):
    """Returns the storage that a path without a selector is read on, and the path there."""

    def __call__(
        self, path: str | os.PathLike[str], *, direct_reads: bool = False
    ) -> tuple[Storage, str]:
        """Open the path. Raises what `open_storage` does."""


@dataclass(frozen=True, slots=True, repr=False)
class Opener:
    """Turns the path that a user gives into a checkpoint.

    `open` opens a path; the storage may be a view of the files of another system. `resolve` returns
    the path of the checkpoint that a selector names, and any other path as it is. Given a stack, it
    also takes a lease on that checkpoint until the stack is closed, where a run keeps records.
    `memory` is what a load may read from memory.
    """

    name: str
    open: PathOpener
    resolve: Callable[[Storage, str, ExitStack | None], str]
    memory: MemorySource = NOTHING_IN_MEMORY

    def without_selector(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return the path of the checkpoint that a selector names, or the path as it is."""
        text = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(text, str) or "@" not in text:
            return path
        return self.resolve(*open_storage(text), None)

    def find(
        self, path: str | os.PathLike[str], *, direct_reads: bool = False
    ) -> tuple[Storage, str]:
        """Return the storage and the path of the checkpoint that `path` names."""
        return self.open(self.without_selector(path), direct_reads=direct_reads)

    def __repr__(self) -> str:
        return f"<{self.name} opener>"


# Opens checkpoints of ours alone, by their paths.
NATIVE = Opener("native", open_storage, lambda storage, path, stack: path)
