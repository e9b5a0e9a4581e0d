"""What opens the path that a user gives: a checkpoint of ours or of a run, other systems' files.

This is the only module that knows runs, other systems and snapshots in memory together. The core
gets what is here as a value.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

from dist_ckpt.async_save.snapshots.memory_source import snapshots_on_host
from dist_ckpt.core.checkpoint.opener import MemorySource, Opener
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.interop.registry import foreign_at
from dist_ckpt.runs.selectors import resolve_at, resolve_with_lease

P = ParamSpec("P")
R = TypeVar("R")


def _open(path: str | os.PathLike[str], *, direct_reads: bool = False) -> tuple[Storage, str]:
    """Return what `open_storage` does, or a view of files of another system as a checkpoint."""
    storage, text = open_storage(path, direct_reads=direct_reads)
    return foreign_at(storage, text) or storage, text


def _resolve(storage: Storage, path: str, stack: ExitStack | None) -> str:
    if stack is not None:
        return resolve_with_lease(storage, path, stack)
    found = resolve_at(storage, path)
    return path if found is None else found.path


# Opens checkpoints of ours, those that a selector of a run names, and safetensors files; what
# background saves have left in the memory of this host is loaded from there.
OPENER = Opener("default", _open, _resolve, MemorySource(snapshots_on_host))


def with_opener(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function of the core whose `opener` is `OPENER` unless it is given another."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        return function(*args, **{"opener": OPENER, **options})  # type: ignore[arg-type]

    signature = inspect.signature(function)
    parameters = signature.parameters
    own = {**parameters, "opener": parameters["opener"].replace(default=OPENER)}
    call.__signature__ = signature.replace(parameters=[*own.values()])  # type: ignore[attr-defined]
    return call
