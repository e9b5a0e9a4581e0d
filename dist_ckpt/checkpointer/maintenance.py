"""Rank 0's work after a save: metrics, hooks of the user, and pruning.

A separate thread does this work, so the training never waits for it. Errors are logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from dist_ckpt.async_save.trainer.writer_handle import SaveHandle
from dist_ckpt.checkpointer.barrier_rounds import BarrierProposal
from dist_ckpt.checkpointer.checkpointer_options import RunOptions
from dist_ckpt.core.checkpoint.checkpoint import open as open_checkpoint
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.rank_messages import describe_error
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.storage_wrappers import free_nbytes
from dist_ckpt.errors import CheckpointError, ConflictError, StorageError
from dist_ckpt.reports import SaveReport
from dist_ckpt.runs.listing import list_run
from dist_ckpt.runs.metrics import put_metrics, put_saved
from dist_ckpt.runs.prune import (
    find_metric_names,
    free_oldest,
    is_refused,
    prune,
    remove_dead_saves,
)
from dist_ckpt.runs.run import is_complete

_log = logging.getLogger("dist_ckpt")

# The interval at which a running save is polled.
RUNNING_SAVE_CHECK_INTERVAL_S = 0.5

# The number of steps whose metrics wait for a save.
MAX_UNSAVED = 10_000

# With more saves than this, a metric of `keep` that no checkpoint has is a mistake.
FEW_SAVES = 3


class MaintenanceThread:
    """Rank 0's thread of a run. It runs until `close`. Threads may share it.

    `durable` is the newest durable save, as text. The user's hooks run in the thread.
    """

    def __init__(
        self, storage: Storage, incarnation: Incarnation, restored: int | None, options: RunOptions
    ) -> None:
        self.durable = "none yet"
        self._storage = storage
        self._root = incarnation.root
        self._incarnation = incarnation
        self._options = options
        self._num_failures = 0  # in a row
        self._failed: tuple[int, str] | None = None  # the last step whose save has finally failed
        self._proposals: list[BarrierProposal] = []
        # The open work of the thread, under its lock.
        self._changed = threading.Condition()
        self._handles: list[SaveHandle] = []
        self._committed: list[SaveReport] = []
        self._metrics: dict[int, dict[str, float]] = {}
        self._may_lack_space = self._is_closed = False
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
            self._handles.append(handle)
            self._changed.notify()

    def add_committed(self, report: SaveReport) -> None:
        """Add a save that is durable."""
        self._set_durable(report)
        with self._changed:
            self._committed.append(report)
            self._changed.notify()

    def add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics of a step. The thread writes them once the step is durable."""
        with self._changed:
            self._metrics.setdefault(step, {}).update(values)
            while len(self._metrics) > MAX_UNSAVED:
                del self._metrics[min(self._metrics)]
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

        Return None while the save is in progress. For a restored step this reads the storage, and
        raises its errors.
        """
        newest = self._newest_saved if self._newest_saved >= step else step
        if (key := self._saved.get(step) or self._saved.get(newest)) is not None:
            return key
        if self._failed is not None and self._failed[0] >= step:
            return self._failed[1]
        # A step that was restored from memory may be saved now.
        if step > max(self._restored, 0) or any(save.step == step for save in self._handles):
            return None
        return self._find_restorable(step) or (
            f"the run began with step {step}, which is not durable, and has done no step since"
        )

    def make_room(self, nbytes: int) -> None:
        """Remove what no rule keeps, if a save of `nbytes` does not fit now.

        With `free_first`, remove the oldest checkpoints too. Errors are logged: the save shows
        whether it fits.
        """
        if self._count_missing(nbytes) <= 0:
            return
        try:
            remove_dead_saves(self._storage, self._root, self._incarnation)
            self._prune()
            missing = self._count_missing(nbytes)
            # A running save may be the newest soon, and then a rule may remove an older one.
            if missing > 0 and self._options.free_first and not self._handles:
                free_oldest(
                    self._storage,
                    self._root,
                    missing,
                    is_whole=is_complete,
                    incarnation=self._incarnation,
                )
        except CheckpointError as error:
            _log.warning("%s: space for the next save is not freed: %s", self._root, error)

    def _count_missing(self, nbytes: int) -> int:
        try:
            free = free_nbytes(self._storage, self._root)
        except CheckpointError:  # the save raises it
            free = None
        return 0 if free is None else nbytes - free

    def close(self, timeout_s: float | None) -> None:
        """Finish the open work within `timeout_s`, and end. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("%s: metrics and pruning are not finished in time", self._root)

    # --- the thread ------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        was_closed = False
        while not (was_closed and not (self._handles or self._committed)):
            with self._changed:
                is_due = self._committed or self._may_lack_space
                has_late_metrics = any(step <= self._newest_saved for step in self._metrics)
                if not (self._is_closed or is_due or self._handles or has_late_metrics):
                    self._changed.wait()
                elif self._handles and not is_due and was_closed == self._is_closed:
                    self._changed.wait(RUNNING_SAVE_CHECK_INTERVAL_S)
                was_closed = self._is_closed
            try:
                self._do_open_work()
            except Exception:  # noqa: BLE001 - a thread's outer edge: the training continues
                _log.exception("%s: metrics, hooks or pruning have failed", self._root)

    def _do_open_work(self) -> None:
        for handle in [*self._handles]:
            if handle.done():
                self._settle(handle)
        with self._changed:
            committed, self._committed = self._committed, []
            may_lack_space, self._may_lack_space = self._may_lack_space, False
        for report in committed:
            self._after_commit(report)
        self._write_metrics()
        if committed or may_lack_space:
            self._prune()

    def _settle(self, handle: SaveHandle) -> None:
        error = handle.exception()
        with self._changed:
            self._handles.remove(handle)
            if error is None and (report := handle.result()) is not None:
                _log.info("%s", report)
                self._set_durable(report)
                self._committed.append(report)
        if error is None:
            return
        self._num_failures += 1
        text = self.report_failure(handle.step, error)
        is_enough = self._num_failures > self._options.max_failures
        # Another try is useless if a newer incarnation has taken over.
        if self._options.on_failure == "raise" or is_enough or isinstance(error, ConflictError):
            kind = describe_error(error, "background save").kind
            self._proposals.append(BarrierProposal(COORDINATOR, text, raises=kind))
        else:
            self._proposals.append(BarrierProposal(COORDINATOR, text, again=True))

    def report_failure(self, step: int | None, error: Exception) -> str:
        """Log a failed save and the newest durable one, and call `on_failure`. Return the text."""
        reason = str(error).rstrip(".")
        text = f"step {step} is not saved: {reason}. Newest durable save: {self.durable}"
        _log.warning("%s", text)
        if step is not None:
            self._failed = step, text
        if isinstance(error, StorageError):  # a prune by a new policy may free a full disk
            with self._changed:
                self._may_lack_space = True
                self._changed.notify()
        if callable(hook := self._options.on_failure):
            self._call_hook("on_failure", partial(hook, error))
        return text

    def _set_durable(self, report: SaveReport) -> None:
        # Immediately: the next failure reports it.
        self.durable = f"step {report.step}, at {report.path}"
        self._num_failures = 0

    def _after_commit(self, report: SaveReport) -> None:
        assert report.step is not None
        attempt = Attempt.from_name(report.attempt)
        self._saved[report.step] = (report.step, attempt)
        self._newest_saved = max(self._newest_saved, report.step)
        try:
            put_saved(self._storage, self._root, (report.step, attempt), report)
        except CheckpointError as error:
            _log.info("the duration of the save of step %d is not stored: %s", report.step, error)
        if (hook := self._options.on_commit) is not None:

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

    def _write_metrics(self) -> None:
        """Write the metrics of saved steps. Drop those of steps that were not saved."""
        with self._changed:
            waiting = {save.step for save in self._handles}
            settled = [step for step in self._metrics if step <= self._newest_saved]
            due = {step: self._metrics.pop(step) for step in settled if step not in waiting}
        for step, values in due.items():
            try:
                if (key := self._saved.get(step) or self._find_restorable(step)) is not None:
                    put_metrics(self._storage, self._root, key, values)
            except CheckpointError as error:
                _log.warning("the metrics of step %d are lost: %s", step, error)

    def _find_restorable(self, step: int) -> CheckpointKey | None:
        """Return the checkpoint of a step of an earlier incarnation, if it exists."""
        if step > self._restored:
            return None
        checkpoints = list_run(self._storage, self._root, now=time.time()).not_orphaned
        return next((entry.where for entry in reversed(checkpoints) if entry.step == step), None)

    def _prune(self) -> None:
        if (keep := self._options.keep) is None:
            return
        try:
            decisions = prune(
                self._storage, self._root, keep, is_whole=is_complete, incarnation=self._incarnation
            )
        except ConflictError as error:
            self._warn_once("a newer incarnation", str(error))
        except CheckpointError as error:
            _log.warning("%s is not pruned now: %s", self._root, error)
        else:
            for checkpoint, reasons in decisions:
                path = checkpoint.path
                if checkpoint.damage:
                    why = f"remove it by `dist-ckpt prune --damaged`: {checkpoint.damage}"
                    self._warn_once(path, f"{path} is damaged, and is not pruned: {why}")
                elif is_refused(checkpoint, reasons):
                    self._warn_once(path, f"{path} is not pruned: {'; '.join(reasons)}")
            known = {name for checkpoint, _ in decisions for name in checkpoint.metrics}
            unknown = find_metric_names(keep) - known if len(self._saved) > FEW_SAVES else ()
            for name in unknown:
                self._warn_once(
                    name,
                    f"{self._root}: keep= uses the metric {name!r}, which no checkpoint has: give "
                    f"it for a step that is saved, by `metrics(step, {{{name!r}: ...}})`",
                )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._has_warned:
            self._has_warned.add(key)
            _log.warning("%s", text)
