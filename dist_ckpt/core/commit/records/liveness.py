"""Liveness files: heartbeats of an incarnation on storage. For messages; no decision uses them.

    <root>/.incarnations/<number>.alive-<id>    empty, replaced every LIVENESS_INTERVAL_S seconds

A missing heartbeat proves nothing: a process may pause, or lose the storage, and continue later.
"""

from __future__ import annotations

import time
from contextlib import suppress

from dist_ckpt.core.commit.attempts import entries_at, new_id, store
from dist_ckpt.core.format.filenames import (
    INCARNATIONS,
    OLD_INCARNATIONS,
    liveness_file,
    parse_liveness,
)
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError

LIVENESS_INTERVAL_S = 30.0

NO_LIVENESS = "no heartbeat: it has ended, or has only just begun"


class LivenessFile:
    """The heartbeat of an incarnation on storage. One thread makes and uses it."""

    def __init__(self, storage: Storage, root: str, incarnation: int) -> None:
        self._storage = storage
        self._folder = f"{root}/{INCARNATIONS}"
        self._incarnation = incarnation

    def renew(self) -> None:
        """Write a heartbeat; remove the earlier ones, and those of older incarnations."""
        new = liveness_file(self._incarnation, new_id())
        store(self._storage, f"{self._folder}/{new}", b"")
        self._remove(but=new)

    def end(self) -> None:
        """Remove the heartbeat: the incarnation has ended."""
        self._remove()

    def _remove(self, but: str = "") -> None:
        for entry in entries_at(self._storage, self._folder):
            number = parse_liveness(entry.name)
            if number is not None and number <= self._incarnation and entry.name != but:
                with suppress(FileNotFoundError):
                    self._storage.remove(f"{self._folder}/{entry.name}")


def last_liveness(
    storage: Storage, root: str, incarnation: int, *, with_old: bool = False
) -> float | None:
    """Return when an incarnation was last seen, by the storage's clock, in seconds since 1970.

    None if it has ended by itself, has no heartbeat yet, or the storage fails: the caller's own
    work must not fail for a message. `with_old`: one of dist_ckpt 0.1.0 counts too.
    """
    with suppress(CheckpointError, OSError):
        folders = (OLD_INCARNATIONS, INCARNATIONS) if with_old else (INCARNATIONS,)
        entries = [e for name in folders for e in entries_at(storage, f"{root}/{name}")]
        return max(
            (e.modified_at for e in entries if parse_liveness(e.name) == incarnation),
            default=None,
        )
    return None


def describe_liveness(storage: Storage, root: str, incarnation: int) -> str:
    """Return as text when an incarnation was last seen; "" if that is not known."""
    at = last_liveness(storage, root, incarnation)
    return "" if at is None else f"; it was last seen at {utc(at)}"


def utc(at: float) -> str:
    """Return a time in seconds since 1970 as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
