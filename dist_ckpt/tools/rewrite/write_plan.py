"""The plan of a new checkpoint or an export. It is checked, but not written yet."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from dist_ckpt.core.commit.commit_protocol import attempts_to_replace
from dist_ckpt.core.storage import Storage
from dist_ckpt.reports import Progress

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WritePlan(Generic[Result]):
    """A write that passed its checks. Nothing is written until `run`. Call `run` once.

    `path` is the target, and `replaces` are the paths that the write removes there. `run` checks
    again that the source exists and the target may be written, then it writes. `list_files` returns
    the names and sizes of the files that are written or linked, without the index. `sources`
    describes the checkpoints that are read, if there are several.
    """

    path: str
    run: Callable[[Progress | None], Result]
    list_files: Callable[[], Mapping[str, int]]
    replaces: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


def paths_to_replace(storage: Storage, path: str, *, overwrite: bool) -> tuple[str, ...]:
    """Return the attempts that a new checkpoint replaces. Raises the errors of its claim."""
    there = attempts_to_replace(storage, path, overwrite=overwrite)
    return tuple(f"{path}/{attempt}" for attempt in there)


def plan_file_export(
    path: str, run: Callable[[Progress | None], int], nbytes: int
) -> WritePlan[int]:
    """Return the plan of an export to one file. It replaces a file at `path`."""
    replaces = (path,) * os.path.lexists(path)
    return WritePlan(path, run, lambda: {os.path.basename(path): nbytes}, replaces)
