"""Send references of checkpoints to a tracker, in a thread that never delays or fails a run."""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.runtime.public_names import refuse_old_names

if not TYPE_CHECKING:
    __getattr__ = refuse_old_names(__name__, {"ReferenceLog": "TrackerThread"})

_log = logging.getLogger("dist_ckpt")

# So many wait for a tracker that does not answer; of more, the oldest are left out.
MAX_WAITING = 100

# How long the end of a run waits for it.
CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Reference:
    """Which checkpoint: `path` is what `dc.load` takes, `nbytes` the size of its data files.

    `index` is the URI of its index, which names every file with its digest; `digest` is the index's
    own, "sha256:" and 64 hex digits. The attempt that was committed is part of the URI.
    """

    path: str
    step: int | None
    world_size: int
    nbytes: int
    index: str
    digest: str


def reference_of(checkpoint: Checkpoint) -> Reference:
    """Return a reference to a checkpoint, having read its index, and nothing else."""
    file = Path(checkpoint.path).absolute() / checkpoint.index.attempt / "index.json"
    return Reference(
        path=str(file.parents[1]),
        step=checkpoint.step,
        world_size=checkpoint.world_size,
        nbytes=checkpoint.nbytes,
        index=file.as_uri(),
        digest=f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}",
    )


def as_record(reference: Reference) -> dict[str, str | int | None]:
    """Return a reference as a JSON object."""
    return asdict(reference)


class Tracker(Protocol):
    """Where references go."""

    name: str

    def put(self, reference: Reference) -> None:
        """Record a reference; may raise, and may be slow."""
        ...


class TrackerThread:
    """An `on_commit` of `dc.Checkpointer` that tells a tracker of each checkpoint.

    It runs on rank 0, as `on_commit` does, and only notes the reference: a daemon thread hands it
    on. A tracker that raises is named in the log, once in a row, and the next checkpoint is tried
    again. One that hangs keeps others waiting, 100 at most, and nothing else. `close`, or leaving
    the `with`, waits 10 seconds at most for what is left, and says which steps were not told.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._waiting: deque[Reference] = deque()
        self._changed = threading.Condition()
        self._is_closed = self._has_failed = False
        self._thread: threading.Thread | None = None

    def __call__(self, checkpoint: Checkpoint) -> None:
        """Note a commit. Returns at once; the thread begins with the first one."""
        reference = reference_of(checkpoint)
        with self._changed:
            if self._is_closed:
                raise ValueError("this log of references is closed: close it after the run")
            if len(self._waiting) >= MAX_WAITING:
                left_out = self._waiting.popleft()
                _log.warning("%s is not told of step %s", self._tracker.name, left_out.step)
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
                    "%s was not told of step %s within %g s: the checkpoints are safe",
                    *(self._tracker.name, steps, timeout_s),
                )
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the tracker's: no save is lost for it
            if not self._has_failed:
                _log.warning(
                    "%s was not told of step %s, and is tried again with the next: %s",
                    *(self._tracker.name, reference.step, error),
                )
            self._has_failed = True
