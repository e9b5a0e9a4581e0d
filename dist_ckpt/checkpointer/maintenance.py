"""What rank 0 does beside the training once a save is settled: metrics, hooks, pruning.

One thread does it, so that nothing of it stops the training; what fails is logged, and told once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from dist_ckpt.async_save.save_handle import SaveHandle
from dist_ckpt.checkpointer.coordination.barrier_rounds import BarrierProposal
from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.checkpoint.checkpoint import open as open_checkpoint
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.messages import failure_of
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.commit.records.protections import Where
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, ConflictError, StorageError
from dist_ckpt.reports import SaveReport
from dist_ckpt.runs.annotations import put_metrics, put_saved
from dist_ckpt.runs.listing import RunCheckpoint, list_run
from dist_ckpt.runs.prune import metrics_of, prune
from dist_ckpt.runs.retention_policy import RetentionPolicy
from dist_ckpt.tools.inspect.run import is_complete

_log = logging.getLogger("dist_ckpt")

# How often a save under way is looked at.
LOOK_S = 0.5

# Of so many steps what was measured waits for the step to be saved.
MAX_UNSAVED = 10_000

# After so many saves in a row that failed a run is not worth going on, unless it says otherwise.
MAX_FAILURES = 3

OnFailure = Literal["warn", "raise"] | Callable[[Exception], object]


@dataclass(frozen=True)
class Hooks:
    """What becomes of saves, told to the user. `on_commit` and `on_failure` run in our thread."""

    on_commit: Callable[[Checkpoint], object] | None = None
    on_failure: OnFailure = "warn"
    max_failures: int = MAX_FAILURES


@dataclass
class SaveCounts:
    """What is known of this run's saves: the newest that is durable, and failures in a row.

    `given_up` is the last step whose save has failed for good, and how.
    """

    durable: str = "nothing is durable yet"
    num_failures: int = 0
    given_up: tuple[int, str] | None = None


@dataclass
class _MaintenanceQueue:
    """What the thread still has to do; under its lock."""

    handles: list[SaveHandle] = field(default_factory=list)
    committed: list[SaveReport] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    may_lack_room: bool = False
    is_closed: bool = False


class MaintenanceThread:
    """Rank 0's thread for a run; it runs until `close`. Threads may share it."""

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
        self._asks: list[BarrierProposal] = []
        self._todo = _MaintenanceQueue()
        self._changed = threading.Condition()
        self._saved: dict[int, Where] = {}
        # Metrics of steps of earlier incarnations may be added too.
        self._restored = self._newest_saved = -1 if restored is None else restored
        self._has_warned: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="dist_ckpt keeper", daemon=True)
        self._thread.start()

    def follow(self, handle: SaveHandle) -> None:
        """Look after a save in the background."""
        with self._changed:
            self._todo.handles.append(handle)
            self._changed.notify()

    def committed(self, report: SaveReport) -> None:
        """Look after a save that is durable."""
        self._note_durable(report)
        with self._changed:
            self._todo.committed.append(report)
            self._changed.notify()

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Take metrics of a step, to be put down when it is saved, or now if it was."""
        with self._changed:
            unsaved = self._todo.metrics
            unsaved.setdefault(step, {}).update(values)
            while len(unsaved) > MAX_UNSAVED:
                del unsaved[min(unsaved)]
            self._changed.notify()

    def wants(self) -> BarrierProposal | None:
        """Return what is to be asked of all ranks: to save again, or to raise."""
        return self._asks[0] if self._asks else None

    def served(self, ask: BarrierProposal) -> None:
        """Take an ask as done."""
        if ask in self._asks:
            self._asks.remove(ask)

    def became_of(self, step: int) -> Where | str | None:
        """Return which checkpoint of this step or a newer one is durable, or why none will be.

        None while that is open. Reads the storage for a step that was restored; its errors.
        """
        newest = self._newest_saved if self._newest_saved >= step else step
        if (where := self._saved.get(step) or self._saved.get(newest)) is not None:
            return where
        if (given_up := self.counts.given_up) is not None and given_up[0] >= step:
            return given_up[1]
        # What was restored from memory may be under way as well.
        if step > max(self._restored, 0) or any(one.step == step for one in self._todo.handles):
            return None
        return self._found(step) or (
            f"the run has begun with step {step}, which is not durable, and no step was done since"
        )

    def close(self, timeout_s: float | None) -> None:
        """Do what is left, for so long at most, and end. May be called again."""
        with self._changed:
            self._todo.is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("%s: metrics and pruning were not done within the time", self._root)

    # --- the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        todo, was_closed = self._todo, False
        while not (was_closed and not (todo.handles or todo.committed)):
            with self._changed:
                is_due = todo.committed or todo.may_lack_room
                if not (todo.is_closed or is_due or todo.handles or self._late_metrics()):
                    self._changed.wait()
                elif todo.handles and not is_due and was_closed == todo.is_closed:
                    self._changed.wait(LOOK_S)
                was_closed = todo.is_closed
            try:
                self._do()
            except Exception:  # noqa: BLE001 - a thread's outer edge: the training goes on
                _log.exception("%s: metrics, hooks or pruning have failed", self._root)

    def _do(self) -> None:
        """Do what there is to do now."""
        todo = self._todo
        for handle in [*todo.handles]:
            if handle.done():
                self._settle(handle)
        with self._changed:
            committed, todo.committed = todo.committed, []
            may_lack_room, todo.may_lack_room = todo.may_lack_room, False
        for report in committed:
            self._after_commit(report)
        self._put_metrics()
        if committed or may_lack_room:
            self._prune()

    def _settle(self, handle: SaveHandle) -> None:
        error = handle.exception()
        with self._changed:
            self._todo.handles.remove(handle)
            if error is None and (report := handle.result()) is not None:
                _log.info("%s", report)
                self._note_durable(report)
                self._todo.committed.append(report)
        if error is not None:
            self._failed(handle.step, error)

    def _failed(self, step: int | None, error: Exception) -> None:
        """Tell that a save has failed; ask all ranks for another, or to raise."""
        self.counts.num_failures += 1
        text = self.tell_failure(step, error)
        hooks = self._hooks
        is_enough = self.counts.num_failures > hooks.max_failures
        # Another try is useless if a newer incarnation has taken over.
        if hooks.on_failure == "raise" or is_enough or isinstance(error, ConflictError):
            kind = failure_of(error, "background save").kind
            self._asks.append(BarrierProposal(COORDINATOR, text, raises=kind))
        else:
            self._asks.append(BarrierProposal(COORDINATOR, text, again=True))

    def tell_failure(self, step: int | None, error: Exception, *, again: bool = False) -> str:
        """Tell that a save has failed, and what is safe; return it. `again`: another is coming."""
        text = f"step {step} is not saved: {error} Safe is: {self.counts.durable}"
        _log.warning("%s", text)
        if step is not None and not again:
            self.counts.given_up = step, text
        if isinstance(error, StorageError):  # rules that are new here may free a full disk
            with self._changed:
                self._todo.may_lack_room = True
                self._changed.notify()
        if callable(hook := self._hooks.on_failure):
            self._guarded("on_failure", partial(hook, error))
        return text

    def _note_durable(self, report: SaveReport) -> None:
        # At once, for what fails next is told with what is safe.
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
            _log.info("how long the save of step %d took is not put down: %s", report.step, error)
        if (hook := self._hooks.on_commit) is not None:

            def tell() -> None:
                with open_checkpoint(report.path) as checkpoint:
                    hook(checkpoint)

            self._guarded("on_commit", tell)

    def _guarded(self, what: str, act: Callable[[], object]) -> None:
        try:
            act()
        except (Exception, SystemExit):  # noqa: BLE001 - the user's code: no save is lost for it
            # SystemExit as well: it would end this thread without a word.
            _log.exception("%s of the run in %s has failed", what, self._root)

    def _late_metrics(self) -> bool:
        return any(step <= self._newest_saved for step in self._todo.metrics)

    def _put_metrics(self) -> None:
        """Put down what was measured of steps that are saved; forget what is of other steps."""
        with self._changed:
            unsaved, waiting = self._todo.metrics, {one.step for one in self._todo.handles}
            settled = [step for step in unsaved if step <= self._newest_saved]
            due = {step: unsaved.pop(step) for step in settled if step not in waiting}
        for step, values in due.items():
            try:
                if (where := self._saved.get(step) or self._found(step)) is not None:
                    put_metrics(self._storage, self._root, where, values)
            except CheckpointError as error:
                _log.warning("the metrics of step %d are lost: %s", step, error)

    def _found(self, step: int) -> Where | None:
        """Return the checkpoint of a step that an earlier incarnation saved, if there is one."""
        if step > self._restored:
            return None
        alive = list_run(self._storage, self._root, now=time.time()).alive
        return next((one.where for one in reversed(alive) if one.step == step), None)

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
            self._look_for_metrics([one for one, _ in decisions])

    def _look_for_metrics(self, there: list[RunCheckpoint]) -> None:
        """Warn of a rule whose metric nobody gives: it keeps what is unmeasured, and no more."""
        assert self._keep is not None
        for name in metrics_of(self._keep):
            measured = [one for one in there if name in one.metrics]
            if not measured and len(self._saved) > MAX_FAILURES:
                self._warn_once(
                    name,
                    f"{self._root}: keep= looks at the metric {name!r}, which no checkpoint has: "
                    f"give it of a step that is saved, by `metrics(step, {{{name!r}: ...}})`",
                )

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._has_warned:
            self._has_warned.add(what)
            _log.warning("%s", text)
