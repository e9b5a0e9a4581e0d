"""What a call would write: found without changing anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dist_ckpt.core.commit.preflight import attempts_to_replace
from dist_ckpt.core.storage import Storage


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a call would write at `path`, had it been made: nothing has changed.

    `files` are the names and sizes in bytes of what it would write or link, but for the index;
    `replaces` is what is there, and would go.
    """

    path: str
    files: Mapping[str, int]
    replaces: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(self.files.values())


def dry_run(storage: Storage, path: str, files: Mapping[str, int], *, overwrite: bool) -> DryRun:
    """Return what a new checkpoint of these files would be. Raises what a claim there does."""
    there = attempts_to_replace(storage, path, overwrite=overwrite)
    return DryRun(path, files, tuple(f"{path}/{attempt}" for attempt in there))
