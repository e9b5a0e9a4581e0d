"""Send references of checkpoints to a tracker, in a thread that never delays or fails a run."""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.runtime.public_names import refuse_old_names

if not TYPE_CHECKING:
    __getattr__ = refuse_old_names(__name__, {"ReferenceLog": "TrackerThread"})

_log = logging.getLogger("dist_ckpt")

# The most references that wait for a slow tracker: then the oldest is dropped.
MAX_WAITING = 100

# The most seconds that the end of a run waits for the tracker.
CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a checkpoint: `path` for `dc.load`, `nbytes` is the size of its data files.

    `index` is the URI of its index, which has the digest of every file; the committed attempt is
    part of it. `digest` is that of the index, "sha256:" and 64 hex digits.
    """

    path: str
    step: int | None
    world_size: int
    nbytes: int
    index: str
    digest: str


def reference_of(checkpoint: Checkpoint) -> Reference:
    """Return a reference to a checkpoint. Only its index is read."""
    file = Path(checkpoint.path).absolute() / checkpoint.index.attempt / "index.json"
    return Reference(
        path=str(file.parents[1]),
        step=checkpoint.step,
        world_size=checkpoint.world_size,
        nbytes=checkpoint.nbytes,
        index=file.as_uri(),
        digest=f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}",
    )


class Tracker(Protocol):
    """A service that records references."""

    name: str

    def put(self, reference: Reference) -> None:
        """Record a reference; may raise, and may be slow."""
        ...


class TrackerThread:
    """An `on_commit` of `dc.Checkpointer` that sends a reference of each checkpoint to a tracker.

    It runs on rank 0, as `on_commit` does, and only queues the reference: a daemon thread sends it.
    If the tracker raises, a warning is logged, once in a row, and the next checkpoint is sent
    again. If it hangs, up to 100 references wait. `close`, or the end of the `with`, waits at most
    10 seconds for the rest, and logs the steps that were not sent.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._waiting: deque[Reference] = deque()
        self._changed = threading.Condition()
        self._is_closed = self._has_failed = False
        self._thread: threading.Thread | None = None

    def __call__(self, checkpoint: Checkpoint) -> None:
        """Queue a commit, and return immediately. The first call starts the thread."""
        reference = reference_of(checkpoint)
        with self._changed:
            if self._is_closed:
                raise ValueError("this TrackerThread is closed: close it after the run")
            if len(self._waiting) >= MAX_WAITING:
                dropped = self._waiting.popleft()
                _log.warning("step %s is not sent to %s", dropped.step, self._tracker.name)
            self._waiting.append(reference)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="dist_ckpt references", daemon=True
                )
                self._thread.start()
                atexit.register(self.close)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait at most `timeout_s` for the tracker. Never raises; may be called again."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            while self._waiting and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._waiting:
                steps = ", ".join(str(report.step) for report in self._waiting)
                _log.warning(
                    "step %s was not sent to %s within %g s: the checkpoints are safe",
                    *(steps, self._tracker.name, timeout_s),
                )
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                reference = self._waiting[0]
            self._put(reference)
            with self._changed:
                if self._waiting and self._waiting[0] is reference:
                    self._waiting.popleft()
                self._changed.notify_all()

    def _put(self, reference: Reference) -> None:
        try:
            self._tracker.put(reference)
            self._has_failed = False
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker must not fail a save
            if not self._has_failed:
                _log.warning(
                    "step %s was not sent to %s, and the next one is tried again: %s",
                    *(reference.step, self._tracker.name, error),
                )
            self._has_failed = True
