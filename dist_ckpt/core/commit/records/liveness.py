"""Signs of life of a start: they word messages, and nothing is decided by them.

    <root>/.starts/<number>.alive-<id>    an empty file, made anew every LIVENESS_INTERVAL_S seconds

Silence proves nothing: a process may stand still, or be cut off from the storage, and go on later.
"""

from __future__ import annotations

import time
from contextlib import suppress

from dist_ckpt.core.commit.attempts import entries_at, new_id, store
from dist_ckpt.core.format.filenames import STARTS, liveness_file, parse_liveness
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError

LIVENESS_INTERVAL_S = 30.0

NO_LIVENESS = "no sign of life: it has ended, or has only just begun"


class LivenessFile:
    """What a start shows while it lives. One thread makes and uses it."""

    def __init__(self, storage: Storage, root: str, start: int) -> None:
        self._storage = storage
        self._folder = f"{root}/{STARTS}"
        self._start = start

    def renew(self) -> None:
        """Show that the start is alive now; remove what it, and older ones, have shown before."""
        new = liveness_file(self._start, new_id())
        store(self._storage, f"{self._folder}/{new}", b"")
        self._remove(but=new)

    def end(self) -> None:
        """Show that the start has ended."""
        self._remove()

    def _remove(self, but: str = "") -> None:
        for entry in entries_at(self._storage, self._folder):
            number = parse_liveness(entry.name)
            if number is not None and number <= self._start and entry.name != but:
                with suppress(FileNotFoundError):
                    self._storage.remove(f"{self._folder}/{entry.name}")


def last_liveness(storage: Storage, root: str, start: int) -> float | None:
    """Return when a start was last alive, by the storage's clock, in seconds since 1970.

    None if it has ended by itself, has shown nothing yet, or the storage cannot say: what is asked
    for must not fail for want of a word.
    """
    with suppress(CheckpointError, OSError):
        entries = entries_at(storage, f"{root}/{STARTS}")
        return max(
            (e.modified_at for e in entries if parse_liveness(e.name) == start), default=None
        )
    return None


def describe_liveness(storage: Storage, root: str, start: int) -> str:
    """Return in words when a start was last alive; nothing if that is not known."""
    at = last_liveness(storage, root, start)
    return "" if at is None else f"; its last sign of life was at {utc(at)}"


def utc(at: float) -> str:
    """Return a time in seconds since 1970 as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
