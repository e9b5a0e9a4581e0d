"""The saves of a run: in the background or not, and again where one has failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from dist_ckpt.async_save.async_saver import AsyncSaver
from dist_ckpt.async_save.save_handle import SaveHandle
from dist_ckpt.checkpointer.checkpointer_options import RunOptions
from dist_ckpt.checkpointer.maintenance import MaintenanceThread
from dist_ckpt.checkpointer.resume import FOLDER
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.saving.attachments import ReadAttachments
from dist_ckpt.core.saving.save import SaveOptions, save_together
from dist_ckpt.core.state.tree.containers import State
from dist_ckpt.errors import CheckpointError, ConflictError, RankError

_log = logging.getLogger("dist_ckpt")

# What ranks wait beyond the time to stop, for each other's word of how the last save stands.
WORD_S = 1.0

DURABLE, STAGED, FAILED, TOO_LATE = "durable", "staged", "failed", "failed in the end"


@dataclass
class RunSaves:
    """One rank's side. `last` is the step that was last begun to be saved, or restored.

    `in_memory_only`: it was restored from memory, and has not been begun to be saved since.
    `num_begun` counts the saves of this incarnation.
    All ranks call each method alike, and decide alike: what is told here is told to all.
    """

    ranks: Session
    run: Incarnation
    saver: AsyncSaver | None
    keeper: MaintenanceThread | None
    options: RunOptions
    last: int = 0
    in_memory_only: bool = False
    num_begun: int = 0
    _handle: SaveHandle | None = None
    _earlier: list[SaveHandle] = field(default_factory=list)
    # The last save has failed, as far as it was not left to a writer.
    _has_failed: bool = False
    _num_failures: int = 0
    _begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.in_memory_only:  # maybe it was to replace what is committed there
            self._begun = {self.last}

    def lacks(self, step: int) -> bool:
        """Say whether a step that is done is neither durable nor begun to be saved."""
        return step != self.last or self.in_memory_only

    def save(
        self, step: int, state: State, boundary: int, is_urgent: Callable[[], bool] = bool
    ) -> None:
        """Save a step. Collective.

        `is_urgent` says, also while it waits for an older save, whether there is no time for that:
        then it takes the place of one that no writer has begun.
        What fails is tried again at once; then it counts as failed, which is told as `on_failure`
        says. Raises what no other try can mend: a state that cannot be saved, a lost rank, a newer
        incarnation that has taken over.
        """
        self.last = step
        self.num_begun += 1
        try:
            self._try(step, state, boundary, is_urgent)
        except (RankError, ConflictError):
            raise
        except CheckpointError as error:
            # In the background: maybe of an earlier save, which rank 0's keeper tells as well.
            if self.ranks.channel.rank == COORDINATOR:
                _log.warning("step %d: %s. It is saved again", step, error)
            self._try_again(step, state, boundary, is_urgent)
        else:
            self._num_failures = 0

    def _try_again(
        self, step: int, state: State, boundary: int, is_urgent: Callable[[], bool]
    ) -> None:
        try:
            self._try(step, state, boundary, is_urgent)
            self._num_failures = 0
        except (RankError, ConflictError):
            raise
        except CheckpointError as error:
            self._num_failures += 1
            if self.keeper is not None:
                self.keeper.tell_failure(step, error)
            hooks = self.options.hooks
            if hooks.on_failure == "raise" or self._num_failures > hooks.max_failures:
                raise

    def _try(self, step: int, state: State, boundary: int, is_urgent: Callable[[], bool]) -> None:
        resume = self.options.resume
        options = SaveOptions(
            step=step,
            sharding=resume.sharding,
            overwrite=step in self._begun,
            include=resume.include,
            exclude=resume.exclude,
            include_frozen=resume.include_frozen,
            config=resume.config,
            kind=resume.kind,
            attach=self._attach_of(step),
            link_unchanged=self.options.link_unchanged,
            run=self.run,
            boundary=boundary,
            is_urgent=is_urgent,
        )
        path = f"{self.run.root.rstrip('/')}/{FOLDER.format(step)}"
        self._begun, self.in_memory_only = {step}, False
        if self._handle is not None:
            self._earlier = [one for one in (*self._earlier, self._handle) if not one.done()]
        self._handle, self._has_failed = None, True
        if self.saver is not None:
            self._handle = self.saver.save_with(state, path, options)
            self._has_failed = False
            if self.keeper is not None:
                self.keeper.follow(self._handle)
            return
        report = save_together(self.ranks, state, path, options)
        self._has_failed = False
        if self.keeper is not None:
            self.keeper.committed(report)

    def _attach_of(self, step: int) -> ReadAttachments | None:
        """Return what rank 0 asks, once the ranks agree on the save, for what is attached to it."""
        attach = self.options.attach
        if attach is None or self.ranks.channel.rank != COORDINATOR:
            return None
        return lambda: attach(step)

    def settle(self, until: float) -> str:
        """Wait, until a time of the monotonic clock, for the last save. Collective.

        Returns what all ranks then know of it: "durable", "staged" in memory, "failed", or failed
        when there was no time left, by rank 0's clock: ranks must not disagree on another try.
        """
        own = self._status(until)
        # Who is alone reads it: of a run that comes to its end nobody has asked for a stop.
        what = "end" if until == inf else "stop"
        with self.ranks.operation(f"{what} of the run"), self.ranks.channel.exchange(what) as word:
            gathered = word.gather(own)
            if gathered is not None:
                worst = next((one for one in (FAILED, STAGED) if one in gathered), DURABLE)
                is_late = worst == FAILED and time.monotonic() >= until
                word.decide(TOO_LATE if is_late else worst)
        return word.result(str)

    def _status(self, until: float) -> str:
        if self._handle is None:
            return FAILED if self._has_failed else DURABLE
        try:
            left_s = None if until == inf else max(0.0, until - WORD_S - time.monotonic())
            error = self._handle.exception(left_s)
        except TimeoutError:
            return STAGED
        for one in self._earlier:  # settled before this one, and told by rank 0's keeper
            one.exception()
        return DURABLE if error is None else FAILED
