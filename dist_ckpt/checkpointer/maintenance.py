"""Rank 0's work after a save: metrics, hooks and pruning.

A separate thread does it, so that it never stops the training. Its errors are logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from dist_ckpt.async_save.trainer.writer_handle import SaveHandle
from dist_ckpt.checkpointer.barrier_rounds import BarrierProposal
from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.checkpoint.checkpoint import open as open_checkpoint
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.messages import failure_of
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, ConflictError, StorageError
from dist_ckpt.reports import SaveReport
from dist_ckpt.runs.annotations import put_metrics, put_saved
from dist_ckpt.runs.listing import RunCheckpoint, list_run
from dist_ckpt.runs.prune import metrics_of, prune
from dist_ckpt.runs.retention_policy import RetentionPolicy
from dist_ckpt.runs.run import is_complete

_log = logging.getLogger("dist_ckpt")

# The interval at which a running save is polled.
LOOK_S = 0.5

# The number of steps whose metrics wait for a save.
MAX_UNSAVED = 10_000

# A run ends after more failed saves in a row, by default.
MAX_FAILURES = 3

OnFailure = Literal["warn", "raise"] | Callable[[Exception], object]


@dataclass(frozen=True)
class Hooks:
    """The callbacks of the user for saves. They run in the maintenance thread."""

    on_commit: Callable[[Checkpoint], object] | None = None
    on_failure: OnFailure = "warn"
    max_failures: int = MAX_FAILURES


@dataclass
class SaveCounts:
    """The saves of this run: the newest durable one, as text, and the failures in a row.

    `failed` is the last step whose save has finally failed, and the reason.
    """

    durable: str = "none yet"
    num_failures: int = 0
    failed: tuple[int, str] | None = None


@dataclass
class _MaintenanceQueue:
    """The open work of the thread, under its lock."""

    handles: list[SaveHandle] = field(default_factory=list)
    committed: list[SaveReport] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    may_lack_space: bool = False
    is_closed: bool = False


class MaintenanceThread:
    """Rank 0's thread of a run. It runs until `close`. Threads may share it."""

    def __init__(
        self,
        storage: Storage,
        run: Incarnation,
        restored: int | None,
        keep: RetentionPolicy | None,
        hooks: Hooks,
    ) -> None:
        self.counts = SaveCounts()
        self._storage = storage
        self._root = run.root
        self._run = run
        self._keep = keep
        self._hooks = hooks
        self._proposals: list[BarrierProposal] = []
        self._queue = _MaintenanceQueue()
        self._changed = threading.Condition()
        self._saved: dict[int, CheckpointKey] = {}
        # Metrics of steps of earlier incarnations may be added too.
        self._restored = self._newest_saved = -1 if restored is None else restored
        self._has_warned: set[str] = set()
        name = "dist_ckpt maintenance"
        self._thread = threading.Thread(target=self._run_thread, name=name, daemon=True)
        self._thread.start()

    def follow(self, handle: SaveHandle) -> None:
        """Follow a background save until it is settled."""
        with self._changed:
            self._queue.handles.append(handle)
            self._changed.notify()

    def add_committed(self, report: SaveReport) -> None:
        """Add a save that is durable."""
        self._set_durable(report)
        with self._changed:
            self._queue.committed.append(report)
            self._changed.notify()

    def add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics of a step. They are written when it is saved, or now."""
        with self._changed:
            unsaved = self._queue.metrics
            unsaved.setdefault(step, {}).update(values)
            while len(unsaved) > MAX_UNSAVED:
                del unsaved[min(unsaved)]
            self._changed.notify()

    def proposal(self) -> BarrierProposal | None:
        """Return the proposal to all ranks, if any: to save again, or to raise."""
        return self._proposals[0] if self._proposals else None

    def finish(self, proposal: BarrierProposal) -> None:
        """Remove a proposal that is done."""
        if proposal in self._proposals:
            self._proposals.remove(proposal)

    def outcome(self, step: int) -> CheckpointKey | str | None:
        """Return the durable checkpoint of this step or a newer one, or the reason for none.

        None if it is open. For a restored step it reads the storage, with its errors.
        """
        newest = self._newest_saved if self._newest_saved >= step else step
        if (where := self._saved.get(step) or self._saved.get(newest)) is not None:
            return where
        if (failed := self.counts.failed) is not None and failed[0] >= step:
            return failed[1]
        # A step that was restored from memory may be saved now.
        if step > max(self._restored, 0) or any(save.step == step for save in self._queue.handles):
            return None
        return self._find_earlier(step) or (
            f"the run began with step {step}, which is not durable, and has done no step since"
        )

    def close(self, timeout_s: float | None) -> None:
        """Finish the open work within `timeout_s`, and end. Idempotent."""
        with self._changed:
            self._queue.is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("%s: metrics and pruning are not finished in time", self._root)

    # --- the thread ------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        queue, was_closed = self._queue, False
        while not (was_closed and not (queue.handles or queue.committed)):
            with self._changed:
                is_due = queue.committed or queue.may_lack_space
                if not (queue.is_closed or is_due or queue.handles or self._has_late_metrics()):
                    self._changed.wait()
                elif queue.handles and not is_due and was_closed == queue.is_closed:
                    self._changed.wait(LOOK_S)
                was_closed = queue.is_closed
            try:
                self._work()
            except Exception:  # noqa: BLE001 - a thread's outer edge: the training continues
                _log.exception("%s: metrics, hooks or pruning have failed", self._root)

    def _work(self) -> None:
        queue = self._queue
        for handle in [*queue.handles]:
            if handle.done():
                self._settle(handle)
        with self._changed:
            committed, queue.committed = queue.committed, []
            may_lack_space, queue.may_lack_space = queue.may_lack_space, False
        for report in committed:
            self._after_commit(report)
        self._write_metrics()
        if committed or may_lack_space:
            self._prune()

    def _settle(self, handle: SaveHandle) -> None:
        error = handle.exception()
        with self._changed:
            self._queue.handles.remove(handle)
            if error is None and (report := handle.result()) is not None:
                _log.info("%s", report)
                self._set_durable(report)
                self._queue.committed.append(report)
        if error is not None:
            self._propose_after(handle.step, error)

    def _propose_after(self, step: int | None, error: Exception) -> None:
        """Report a failed save, and propose another one, or an error on all ranks."""
        self.counts.num_failures += 1
        text = self.report_failure(step, error)
        hooks = self._hooks
        is_enough = self.counts.num_failures > hooks.max_failures
        # Another try is useless if a newer incarnation has taken over.
        if hooks.on_failure == "raise" or is_enough or isinstance(error, ConflictError):
            kind = failure_of(error, "background save").kind
            self._proposals.append(BarrierProposal(COORDINATOR, text, raises=kind))
        else:
            self._proposals.append(BarrierProposal(COORDINATOR, text, again=True))

    def report_failure(self, step: int | None, error: Exception) -> str:
        """Log a failed save and the newest durable one, and call `on_failure`. Return the text."""
        text = f"step {step} is not saved: {error} Newest durable save: {self.counts.durable}"
        _log.warning("%s", text)
        if step is not None:
            self.counts.failed = step, text
        if isinstance(error, StorageError):  # a prune by a new policy may free a full disk
            with self._changed:
                self._queue.may_lack_space = True
                self._changed.notify()
        if callable(hook := self._hooks.on_failure):
            self._call_hook("on_failure", partial(hook, error))
        return text

    def _set_durable(self, report: SaveReport) -> None:
        # At once: the next failure reports it.
        self.counts.durable = f"step {report.step}, at {report.path}"
        self.counts.num_failures = 0

    def _after_commit(self, report: SaveReport) -> None:
        assert report.step is not None
        attempt = Attempt.named(report.attempt)
        self._saved[report.step] = (report.step, attempt)
        self._newest_saved = max(self._newest_saved, report.step)
        try:
            put_saved(self._storage, self._root, (report.step, attempt), report)
        except CheckpointError as error:
            _log.info("the duration of the save of step %d is not stored: %s", report.step, error)
        if (hook := self._hooks.on_commit) is not None:

            def call() -> None:
                with open_checkpoint(report.path) as checkpoint:
                    hook(checkpoint)

            self._call_hook("on_commit", call)

    def _call_hook(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (Exception, SystemExit):  # noqa: BLE001 - the user's code must not harm a save
            # SystemExit too: it would end this thread silently.
            _log.exception("%s of the run in %s has failed", name, self._root)

    def _has_late_metrics(self) -> bool:
        return any(step <= self._newest_saved for step in self._queue.metrics)

    def _write_metrics(self) -> None:
        """Write the metrics of saved steps. Drop those of steps that were not saved."""
        with self._changed:
            unsaved, waiting = self._queue.metrics, {save.step for save in self._queue.handles}
            settled = [step for step in unsaved if step <= self._newest_saved]
            due = {step: unsaved.pop(step) for step in settled if step not in waiting}
        for step, values in due.items():
            try:
                if (where := self._saved.get(step) or self._find_earlier(step)) is not None:
                    put_metrics(self._storage, self._root, where, values)
            except CheckpointError as error:
                _log.warning("the metrics of step %d are lost: %s", step, error)

    def _find_earlier(self, step: int) -> CheckpointKey | None:
        """Return the checkpoint of a step of an earlier incarnation, if it exists."""
        if step > self._restored:
            return None
        alive = list_run(self._storage, self._root, now=time.time()).alive
        return next((entry.where for entry in reversed(alive) if entry.step == step), None)

    def _prune(self) -> None:
        if self._keep is None:
            return
        try:
            decisions = prune(
                self._storage, self._root, self._keep, is_whole=is_complete, run=self._run
            )
        except ConflictError as error:
            self._warn_once("a newer incarnation", str(error))
        except CheckpointError as error:
            _log.warning("%s is not pruned now: %s", self._root, error)
        else:
            self._check_metrics([checkpoint for checkpoint, _ in decisions])

    def _check_metrics(self, checkpoints: list[RunCheckpoint]) -> None:
        """Warn of a metric of the policy that no checkpoint has."""
        assert self._keep is not None
        for name in metrics_of(self._keep):
            has_metric = any(name in checkpoint.metrics for checkpoint in checkpoints)
            if not has_metric and len(self._saved) > MAX_FAILURES:
                self._warn_once(
                    name,
                    f"{self._root}: keep= uses the metric {name!r}, which no checkpoint has: give "
                    f"it for a step that is saved, by `metrics(step, {{{name!r}: ...}})`",
                )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._has_warned:
            self._has_warned.add(key)
            _log.warning("%s", text)
