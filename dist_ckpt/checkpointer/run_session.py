"""A run while it is open: what ranks do at a boundary on which they agreed, and at the end.

The saves of a run: in the background or not, and again where one has failed.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf

from torch.distributed import ProcessGroup

from dist_ckpt.async_save.async_saver import AsyncSaver
from dist_ckpt.async_save.save_handle import SaveHandle
from dist_ckpt.checkpointer.checkpointer_options import RunArguments, RunOptions
from dist_ckpt.checkpointer.coordination.barrier_rounds import (
    BarrierMember,
    BarrierProposal,
    BarrierRounds,
    Boundary,
)
from dist_ckpt.checkpointer.coordination.save_requests import (
    ExternalRequests,
    RankRequests,
    Signals,
)
from dist_ckpt.checkpointer.maintenance import MaintenanceThread
from dist_ckpt.checkpointer.resume import FOLDER, Resume, Resumed
from dist_ckpt.core.comm.exchange.channel import COORDINATOR, check_equal_on_all_ranks
from dist_ckpt.core.comm.messages import Failure, error_of
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.saving.attachments import ReadAttachments
from dist_ckpt.core.saving.save import SaveOptions, save_together
from dist_ckpt.core.state.tree.containers import MutableState, State
from dist_ckpt.core.storage import open_storage, real_path
from dist_ckpt.errors import CheckpointError, ConflictError, RankError
from dist_ckpt.runs.listing import list_run
from dist_ckpt.runs.selectors import select
from dist_ckpt.tools.rewrite.copying import plan_backup_at

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


# What a scheduler can be told to take as "try again" (EX_TEMPFAIL).
REQUEUE = 75

# For metrics, hooks and pruning at the end: of a run that is not pressed for time, and else.
END_S, HURRIED_END_S = 300.0, 1.0

# For answers to who has asked for a save: whoever hears nothing waits much longer.
ANSWERS_END_S = 5.0

# What a lone rank is told that it is doing.
_THE_END = "end the run"

MakeState = Callable[[], MutableState]


@dataclass(frozen=True, slots=True)
class TrainingStopped:
    """Why a run is to stop, and the step at which it did; `is_durable`: that step is.

    If it is not, it is staged in memory, and the writers that outlive the job write it; a later
    incarnation on these hosts resumes from it, unless the writers were killed before they had it
    digested. Not so for saves that are not in the background, and what failed before it was staged.
    `exit_code` is what to exit with so that a scheduler starts the job again: it has to be told
    that code.
    """

    why: str
    step: int
    is_durable: bool
    exit_code: int = REQUEUE


@dataclass
class RunSession:
    """One rank's side of a run; `saves` from its restore on. All ranks call each method alike."""

    ranks: Session
    root: str
    options: RunOptions
    rounds: BarrierRounds
    requests: RankRequests
    saver: AsyncSaver | None
    saves: RunSaves | None = None
    stopped: TrainingStopped | None = None
    pid: int = field(default_factory=os.getpid)

    def resume(self, state: MutableState, at: str | None) -> Resumed:
        """Fill the state with what the run goes on from, and begin to save. Collective."""
        if (keeper := self.requests.keeper) is not None:  # of a restore before
            keeper.close(END_S)
        if (outside := self.requests.outside) is not None:
            outside.close("the job has restored once more", ANSWERS_END_S)
        how = self.options.resume
        resumed = Resume(self.ranks, self.saver, self.root, how).run(state, at)
        self.stopped = None
        if not how.read_only:
            self._begin_saves(resumed)
        self.requests.served(None)
        return resumed

    def _begin_saves(self, resumed: Resumed) -> None:
        options, requests = self.options, self.requests
        run = Incarnation(self.root, resumed.incarnation)
        if self.ranks.channel.rank == COORDINATOR:
            storage, _ = open_storage(self.root)
            keeper = MaintenanceThread(storage, run, resumed.step, options.keep, options.hooks)
            keeper.counts.durable = resumed.where or keeper.counts.durable
            requests.keeper = keeper
            requests.outside = ExternalRequests(storage, run, keeper)
        last, kept = resumed.step or 0, resumed.in_memory_only
        self.saves = RunSaves(self.ranks, run, self.saver, requests.keeper, options, last, kept)

    def backup(self, step: int | None, *, overwrite: bool) -> str:
        """Keep a checkpoint beside the others, and return where. Collective."""
        if self.options.resume.read_only:
            raise ValueError("backup() makes a checkpoint, and read_only=True changes nothing")
        if self.saves is not None and step == self.saves.last:
            self.saves.settle(inf)  # what it came to is told by what is there
        what, channel = f"backup in {self.root}", self.ranks.channel
        with self.ranks.operation(what), channel.exchange("backup") as making:
            asked = "latest" if step is None else str(step)
            gathered = making.gather(asked)
            if gathered is not None:
                if any(one != asked for one in gathered):
                    raise ValueError(f"backup(step) differs between ranks: {gathered}")
                storage, root = open_storage(real_path(self.root))
                one = select(list_run(storage, root, now=time.time()), asked)
                making.decide(plan_backup_at(storage, one.path, overwrite=overwrite).run())
        return making.result(str)

    def take(self, turn: Boundary, step: int, make: MakeState) -> None:
        """Do what all ranks do at a boundary, of a step that is done."""
        ask, saves = turn.ask, self.saves
        try:
            if ask is not None and ask.raises:
                raise error_of(Failure(ask.raises, ask.why, None, None))
            if saves is not None and (saves.lacks(step) or (ask is not None and ask.again)):
                self._save(turn, step, make)
            if ask is not None and ask.stops:
                self._stop(turn, ask, step, make)
            self.requests.taken(step, is_last=self.stopped is not None)
        finally:
            self.requests.served(ask)
            self.rounds.leave()

    def _save(self, turn: Boundary, step: int, make: MakeState) -> None:
        assert self.saves is not None
        stops = turn.ask is not None and turn.ask.stops
        signals = self.requests.signals
        self.saves.save(step, make(), turn.number, lambda: stops or signals.got is not None)

    def _stop(self, turn: Boundary, ask: BarrierProposal, step: int, make: MakeState) -> None:
        """Have what is saved made durable in time."""
        status, until = DURABLE, turn.asked_at + self.options.stop_within_s
        if (saves := self.saves) is not None:
            status = saves.settle(until)
            if status == FAILED:
                self._save(turn, step, make)
                status = saves.settle(until)
        self.stopped = TrainingStopped(ask.why, step, status == DURABLE)
        if self.ranks.channel.rank == COORDINATOR:
            kept = "it is left in memory" if self.saver else "older checkpoints are as they were"
            told = "durable" if status == DURABLE else f"{status}: {kept}"
            _log.warning("stopped by %s after step %d, which is %s", ask.why, step, told)

    def finish(self, step: int, make: MakeState) -> None:
        """Save the last step if that is wanted, and wait for it, if all ranks come to the end."""
        saves = self.saves
        if saves is None or self.stopped is not None:
            return
        turn = self.rounds.arrive(_THE_END, is_due=True)
        assert turn is not None
        try:
            if self.options.save.at_end and saves.lacks(step):
                self._save(turn, step, make)
            if saves.settle(inf) == FAILED:
                self._save(turn, step, make)
                if saves.settle(inf) == FAILED:
                    raise CheckpointError(
                        f"the last save, of step {step}, has failed twice: the log says of what. "
                        f"Older checkpoints are as they were"
                    )
            if step == saves.last:
                self.requests.taken(step, is_last=True)
            elif saves.num_begun == 0 and self.ranks.channel.rank == COORDINATOR:
                _log.warning(
                    "the run ends, and none of steps %d to %d was saved: save=%s did not come to "
                    "it. Join dc.at_end to it with | to save the last one",
                    saves.last + 1,
                    step,
                    self.options.save,
                )
        except RankError as error:
            if f"to {_THE_END}" not in str(error):
                raise
            _log.warning("nothing was saved at the end: %s", error)
        finally:
            self.rounds.leave()

    def end(self, error: BaseException | None) -> None:
        """Let go of everything, whatever fails; after an error keep what is in memory.

        Waits for no other rank's training. Raises what a save has failed of that nobody was told;
        after an error it is logged instead, as that error is what is raised.
        """
        keeper = self.requests.keeper
        try:
            self._let_go_of_all(error)
        except Exception as failure:
            if error is None:
                raise
            _log.error("a save has failed as well: %s", failure)
        if error is not None and keeper is not None:
            safe = keeper.counts.durable
            _log.warning("the run ends with %s. Safe is: %s", type(error).__name__, safe)

    def _let_go_of_all(self, error: BaseException | None) -> None:
        is_pressed = self.stopped is not None and not self.stopped.is_durable
        keeper = self.requests.keeper
        with ExitStack() as stack:
            # Last: torchrun sends SIGTERM to all ranks once the first of them has ended.
            stack.callback(self.requests.signals.close)
            if (outside := self.requests.outside) is not None:  # once all saves are settled
                stack.callback(outside.close, self._end_of(error), ANSWERS_END_S)
            if keeper is not None:
                is_urgent = is_pressed or error is not None
                stack.callback(keeper.close, HURRIED_END_S if is_urgent else END_S)
            if self.saver is not None:
                if is_pressed:
                    stack.callback(self.saver.detach)
                else:
                    stack.callback(self.saver.close, keep=error is not None)
            stack.callback(self.rounds.close)

    def _end_of(self, error: BaseException | None) -> str:
        """Return how the run has ended, for who has asked for a save."""
        if error is not None:
            return f"the run has ended with {type(error).__name__}"
        if self.stopped is not None and not self.stopped.is_durable:
            return f"the run has stopped after step {self.stopped.step}, which is not durable yet"
        return "the run has ended, and what it did last is not saved"

    def let_go(self) -> None:
        """Let go of a run that nobody has closed, and say so. Waits for nothing."""
        if os.getpid() != self.pid:  # a forked child has no part in it
            return
        self.requests.signals.let_go()
        self.rounds.close()
        if self.requests.keeper is not None:
            self.requests.keeper.close(0.0)
        if self.requests.outside is not None:
            self.requests.outside.close("the run was dropped", 0.0)
        _log.warning(
            "a Checkpointer for %s was dropped without close(): at_end has saved nothing, and the "
            "newest metrics may be lost. Use it in a `with`",
            self.root,
        )
        warnings.warn(f"unclosed Checkpointer for {self.root}", ResourceWarning, stacklevel=2)


def open_run_session(
    options: RunOptions, group: ProcessGroup | None, check_alone: Callable[[], None]
) -> RunSession:
    """Compare the options with the other ranks', and take part in rounds. Collective."""
    ranks = session_of(group)
    channel = ranks.channel
    signals: Signals | None = None
    try:
        with ranks.operation("Checkpointer"), channel.exchange("run options") as opening:
            check_alone()
            options.check()
            root = options.opened_root()
            signals = Signals(() if options.resume.read_only else options.save.signals)
            gathered = opening.gather(options.asked())
            if gathered is not None:
                check_equal_on_all_ranks("Checkpointer", gathered, RunArguments.__struct_fields__)
                opening.decide(secrets.token_hex(8))
        saves_beside = options.background and not options.resume.read_only
        saver = AsyncSaver(root, group=group) if saves_beside else None
        member = BarrierMember(opening.result(str), channel.rank, channel.world_size)
        requests = RankRequests(channel.rank, options.save, signals)
        rounds = BarrierRounds(channel.notes, member, requests, channel.fail_without_others)
    except BaseException:
        if signals is not None:
            signals.close()
        raise
    return RunSession(ranks, root, options, rounds, requests, saver)
