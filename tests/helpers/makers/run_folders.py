"""Folders of runs for tests: small committed checkpoints of steps, by attempts of any number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from commit_cases import index_of, write_rank
from dist_ckpt.core.commit.attempts import make_folders
from dist_ckpt.core.commit.commit_protocol import Claim, commit
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.commit.records.record_store import new_annotation, put_annotation
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.storage import Storage

ROOT = "/runs"
_numbers = count(1)


def committed(
    storage: Storage,
    step: int | None,
    *,
    start: int = 0,
    name: str = "",
    root: str = ROOT,
    saved_at: float = 0.0,
) -> CheckpointKey:
    """Commit a checkpoint of one rank, as a start of the run would; return its step and attempt."""
    shown = step or 0
    path = f"{root}/{name or f'step-{shown}'}"
    attempt = Attempt(1000 * start + 1, f"{next(_numbers):016x}")
    folder = f"{path}/{attempt}"
    make_folders(storage, folder, [])
    write_rank(storage, folder, shown % 256, 0)
    index = replace(index_of(attempt, shown % 256, 1), step=step, saved_at=saved_at or 1.0 + shown)
    commit(storage, Claim(path, attempt, folder, "a test", ()), index)
    return shown, attempt


def put(
    storage: Storage,
    where: CheckpointKey,
    kind: str,
    values: Mapping[str, Scalar],
    *,
    above: int = 0,
) -> str:
    """Put a fact; return its file."""
    step, attempt = where
    name = put_annotation(storage, ROOT, new_annotation(step, attempt, kind, values), above=above)
    return f"{ROOT}/.annotations/{step}/{attempt}/{name}"
