"""Open a user's path: a checkpoint of dist_ckpt, a run's selector, or files of other systems.

The core must not import runs, other systems and snapshots in memory. This module does, and passes
`OPENER` to the core.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dist_ckpt.async_save.snapshots.snapshot_files import find_files_on_host
from dist_ckpt.core.checkpoint.opener import MemoryFiles, Opener
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.interop.registry import open_foreign
from dist_ckpt.runs.selectors import resolve_with_lease

P = ParamSpec("P")
R = TypeVar("R")


def _open(path: str | os.PathLike[str], *, direct_reads: bool = False) -> tuple[Storage, str]:
    """Open the storage of a path, or a view of another system's files as a checkpoint."""
    storage, text = open_storage(path, direct_reads=direct_reads)
    return open_foreign(storage, text) or storage, text


# Opens our checkpoints, selectors of runs, and safetensors files. Snapshots that background saves
# have left in this host's memory are loaded from there.
OPENER = Opener("default", _open, resolve_with_lease, MemoryFiles(find_files_on_host))


def with_opener(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function of the core with `OPENER` as the default of its `opener`."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        return function(*args, **{"opener": OPENER, **options})  # type: ignore[arg-type]

    signature = inspect.signature(function)
    parameters = signature.parameters
    replaced = {**parameters, "opener": parameters["opener"].replace(default=OPENER)}
    call.__signature__ = signature.replace(parameters=[*replaced.values()])  # type: ignore[attr-defined]
    return call
