"""An open run: its saves, and what all ranks do at a common boundary and at the end."""

from __future__ import annotations

import logging
import os
import secrets
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from torch.distributed import ProcessGroup

from dist_ckpt.async_save.async_saver import AsyncSaver, open_root
from dist_ckpt.async_save.trainer.writer_handle import SaveHandle
from dist_ckpt.checkpointer.barrier_rounds import (
    BarrierMember,
    BarrierProposal,
    BarrierRounds,
    Boundary,
    PollPolicy,
)
from dist_ckpt.checkpointer.checkpointer_options import RunOptions
from dist_ckpt.checkpointer.maintenance import MaintenanceThread
from dist_ckpt.checkpointer.rank_requests import ExternalRequests, RankRequests
from dist_ckpt.checkpointer.resume import FOLDER, Resume, Resumed
from dist_ckpt.checkpointer.save_policy import DEFAULT_SAVE
from dist_ckpt.checkpointer.signals import Signals
from dist_ckpt.core.comm.exchange.channel import COORDINATOR, check_equal_on_all_ranks
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.rank_messages import Failure, build_error, describe_error
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.state.tree.containers import MutableState, State
from dist_ckpt.core.storage import open_storage, real_path
from dist_ckpt.errors import CheckpointError, ConflictError, RankError, UnequalReplicasError
from dist_ckpt.runs.listing import list_run
from dist_ckpt.runs.selectors import select
from dist_ckpt.tools.rewrite.copying import plan_backup_at

_log = logging.getLogger("dist_ckpt")

# The time before the deadline that is left for the exchange about the last save.
EXCHANGE_S = 1.0

DURABLE, STAGED, FAILED, TOO_LATE = "durable", "staged", "failed", "failed in the end"


@dataclass
class RunSaves:
    """One rank's side of the saves. All ranks make the same calls and decisions.

    `last` is the last step that was restored, or whose save has begun. `in_memory_only`: the step
    was restored from memory, and no save has begun since. `num_begun` counts the saves of this
    incarnation.
    """

    session: Session
    incarnation: Incarnation
    saver: AsyncSaver | None
    maintenance: MaintenanceThread | None
    options: RunOptions
    last: int = 0
    in_memory_only: bool = False
    num_begun: int = 0
    _handle: SaveHandle | None = None
    _earlier: list[SaveHandle] = field(default_factory=list)
    # A save in the foreground has failed.
    _has_failed: bool = False
    # The error of this rank's last failed save.
    failure: Exception | None = None
    # A save of this incarnation has begun without an error: its state can be saved.
    _has_saved: bool = False
    _num_failures: int = 0
    _begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.in_memory_only:  # it may replace a committed checkpoint
            self._begun = {self.last}

    def needs_save(self, step: int) -> bool:
        """Return True if a completed step is not durable, and no save of it has begun."""
        return step != self.last or self.in_memory_only

    def save(self, step: int, state: State, boundary: int, is_urgent: Callable[[], bool]) -> None:
        """Save a step. Collective.

        An earlier save may still be in the queue, and no writer has begun it. If `is_urgent` is or
        becomes true, this save replaces the earlier save instead of waiting for it.

        A failed save is tried again immediately. After a second failure `on_failure` decides. Some
        errors are raised immediately: a lost rank, a newer incarnation, and an invalid state if
        this incarnation has not saved yet.
        """
        self.last = step
        self.num_begun += 1
        for can_retry in (True, False):
            try:
                self._start(step, state, boundary, is_urgent)
                self._num_failures, self._has_saved = 0, True
                return
            except (RankError, ConflictError):
                raise
            except (CheckpointError, ValueError, TypeError) as error:
                self.failure = error
                # It may be the error of an earlier background save, which rank 0 reports too.
                is_unequal = isinstance(error, UnequalReplicasError)
                is_transient = isinstance(error, CheckpointError) or (is_unequal and self.saver)
                if not (self._has_saved or is_unequal or isinstance(error, CheckpointError)):
                    raise
                if not (can_retry and is_transient):
                    self._count_failure(step, error)
                    return
                if self.session.channel.rank == COORDINATOR:
                    _log.warning("step %d: %s. It is saved again", step, str(error).rstrip("."))

    def _count_failure(self, step: int, error: Exception) -> None:
        """Report a failed save. Raise its error if there are too many, or `on_failure` says so."""
        self._num_failures += 1
        if self.maintenance is not None:
            self.maintenance.report_failure(step, error)
        if self.options.on_failure == "raise" or self._num_failures > self.options.max_failures:
            raise error

    def _start(self, step: int, state: State, boundary: int, is_urgent: Callable[[], bool]) -> None:
        attach = self.options.attach if self.session.channel.rank == COORDINATOR else None
        options = replace(
            self.options.save_options(),
            step=step,
            overwrite=step in self._begun,
            attach=None if attach is None else partial(attach, step),  # called during the save
            incarnation=self.incarnation,
            boundary=boundary,
            is_urgent=is_urgent,
            make_room=self.maintenance.make_room if self.maintenance else lambda nbytes: None,
        )
        path = f"{self.incarnation.root.rstrip('/')}/{FOLDER.format(step)}"
        self._begun, self.in_memory_only = {step}, False
        if self._handle is not None:
            self._earlier = [save for save in (*self._earlier, self._handle) if not save.done()]
        self._handle, self._has_failed = None, True
        if self.saver is not None:
            self._handle = self.saver.save_with(state, path, options)
            if self.maintenance is not None:
                self.maintenance.follow(self._handle)
        else:
            report = save_together(self.session, state, path, options)
            if self.maintenance is not None:
                self.maintenance.add_committed(report)
        self._has_failed = False

    def settle(self, until: float) -> str:
        """Wait for the last save until a time of the monotonic clock. Collective.

        Return the worst status of all ranks: `DURABLE`, `STAGED` in memory, `FAILED`, or `TOO_LATE`
        if the save failed and no time is left for another try, by rank 0's clock.
        """
        status = self.wait_until(until)
        # The label is in the error of a rank without partners.
        label, channel = "end" if until == inf else "stop", self.session.channel
        with self.session.operation(f"{label} of the run"), channel.exchange(label) as settling:
            gathered = settling.gather(status)
            if gathered is not None:
                worst = next((bad for bad in (FAILED, STAGED) if bad in gathered), DURABLE)
                is_late = worst == FAILED and time.monotonic() >= until
                settling.decide(TOO_LATE if is_late else worst)
        return settling.result(str)

    def wait_until(self, until: float) -> str:
        """Wait for the last save of this rank: `DURABLE`, `FAILED`, or `STAGED` after `until`."""
        if self._handle is None:
            return FAILED if self._has_failed else DURABLE
        try:
            timeout_s = None if until == inf else max(0.0, until - EXCHANGE_S - time.monotonic())
            error = self._handle.exception(timeout_s)
        except TimeoutError:
            return STAGED
        for handle in self._earlier:  # settled before this one, and reported by rank 0
            handle.exception()
        if error is None:
            return DURABLE
        self.failure = error
        return FAILED


# A scheduler can be configured to restart a job with this exit code (EX_TEMPFAIL).
REQUEUE_EXIT_CODE = 75

# The timeout of metrics, hooks and pruning at the end. The second is for a run with little time.
END_S, URGENT_END_S = 300.0, 1.0

# The timeout of answers to save requests. A requester without an answer waits much longer.
ANSWERS_END_S = 5.0

# The label of the last boundary, in errors of a rank without partners.
_END_LABEL = "end the run"

MakeState = Callable[[], MutableState]


@dataclass(frozen=True, slots=True)
class TrainingStopped:
    """The reason and the step at which a run stopped. `is_durable`: the step is durable.

    If `is_durable` is False, the step is staged in memory. The writers outlive the job and write
    the step. A later incarnation on these hosts resumes from it, unless the writers were killed
    before they digested it. A foreground save, or a save that failed before it was staged, leaves
    nothing in memory. Exit with `exit_code`: a scheduler can be configured to restart a job that
    exits with this code.
    """

    why: str
    step: int
    is_durable: bool
    exit_code: int = REQUEUE_EXIT_CODE


@dataclass
class RunSession:
    """One rank's side of a run. It has `saves` after its restore. All ranks make the same calls."""

    session: Session
    root: str
    options: RunOptions
    rounds: BarrierRounds
    requests: RankRequests
    saver: AsyncSaver | None
    saves: RunSaves | None = None
    stopped: TrainingStopped | None = None
    pid: int = field(default_factory=os.getpid)
    _is_state_checked: bool = False

    def resume(self, state: MutableState, at: str | None) -> Resumed:
        """Fill the state from the restore point, and begin to save. Collective."""
        if (maintenance := self.requests.maintenance) is not None:  # of an earlier restore
            maintenance.close(END_S)
        if (external := self.requests.external) is not None:
            external.close("the job has restored once more", ANSWERS_END_S)
        resumed = Resume(self.session, self.saver, self.root, self.options).restore(state, at)
        self.stopped, self._is_state_checked = None, False
        if not self.options.read_only:
            self._begin_saves(resumed)
        self.requests.finish(None)
        return resumed

    def _begin_saves(self, resumed: Resumed) -> None:
        requests, incarnation = self.requests, Incarnation(self.root, resumed.incarnation)
        if self.session.channel.rank == COORDINATOR:
            storage, _ = open_storage(self.root)
            maintenance = MaintenanceThread(storage, incarnation, resumed.step, self.options)
            maintenance.durable = resumed.description or maintenance.durable
            requests.maintenance = maintenance
            requests.external = ExternalRequests(storage, incarnation, maintenance)
        self.saves = RunSaves(
            self.session,
            incarnation,
            self.saver,
            requests.maintenance,
            self.options,
            last=resumed.step or 0,
            in_memory_only=resumed.in_memory_only,
        )

    def backup(self, step: int | None, *, overwrite: bool) -> str:
        """Back up a checkpoint, and return the path of the backup. Collective."""
        if self.options.read_only:
            raise ValueError("backup() makes a checkpoint, and read_only=True changes nothing")
        if self.saves is not None and step == self.saves.last:
            self.saves.settle(inf)  # a failure shows as a missing checkpoint
        operation, channel = f"backup in {self.root}", self.session.channel
        with self.session.operation(operation), channel.exchange("backup") as making:
            selector = "latest" if step is None else str(step)
            gathered = making.gather(selector)
            if gathered is not None:
                if set(gathered) != {selector}:
                    raise ValueError(f"backup(step) differs between ranks: {gathered}")
                storage, root = open_storage(real_path(self.root))
                checkpoint = select(list_run(storage, root, now=time.time()), selector)
                plan = plan_backup_at(storage, checkpoint.path, overwrite=overwrite)
                making.decide(plan.run(None))
        return making.result(str)

    def act(self, boundary: Boundary, step: int, make_state: MakeState) -> None:
        """Save, stop or raise at a boundary, after a completed step."""
        proposal, saves = boundary.proposal, self.saves
        try:
            if proposal is not None and proposal.raises:
                raise build_error(Failure(proposal.raises, proposal.why, None, None))
            is_again = proposal is not None and proposal.again
            if saves is not None and (is_again or saves.needs_save(step)):
                self._save(boundary, step, make_state)
            if proposal is not None and proposal.stops:
                self._stop(boundary, proposal, step, make_state)
            self.requests.begin_save(step, is_last=self.stopped is not None)
        finally:
            self.requests.finish(proposal)
            self.rounds.leave()

    def check_state(self, step: int, make_state: MakeState) -> None:
        """Check once, after the first step, that the state can be saved. All ranks raise its error.

        Only now the optimizers have state. A rank that cannot save proposes to raise.
        """
        if self.saves is None or self._is_state_checked:
            return
        self._is_state_checked = True
        if self.saves.num_begun:
            return
        with suppress(CheckpointError, RuntimeError):  # of code that may be ready at the save
            try:
                self.options.save_options().read_rank(self.session, make_state())
            except (TypeError, ValueError) as error:
                kind, rank = describe_error(error, "save").kind, self.session.channel.rank
                text = f"rank {rank}: the state of step {step} cannot be saved: {error}"
                self.requests.refusal = BarrierProposal(rank, text, raises=kind)

    def _save(self, boundary: Boundary, step: int, make_state: MakeState) -> None:
        assert self.saves is not None
        stops = boundary.proposal is not None and boundary.proposal.stops
        signals = self.requests.signals
        self.saves.save(
            step, make_state(), boundary.number, lambda: stops or signals.received is not None
        )

    def _stop(
        self, boundary: Boundary, proposal: BarrierProposal, step: int, make_state: MakeState
    ) -> None:
        """Make the last save durable in time."""
        status, until = DURABLE, boundary.requested_at + self.options.stop_within_s
        if (saves := self.saves) is not None:
            status = saves.settle(until)
            if status == FAILED:
                self._save(boundary, step, make_state)
                status = saves.settle(until)
        self.stopped = TrainingStopped(proposal.why, step, status == DURABLE)
        if self.session.channel.rank == COORDINATOR:
            rest = "it stays in memory" if self.saver else "older checkpoints are unchanged"
            outcome = "durable" if status == DURABLE else f"{status}: {rest}"
            _log.warning("stopped by %s after step %d, which is %s", proposal.why, step, outcome)

    def finish(self, step: int, make_state: MakeState) -> None:
        """Save the last step if the policy has `at_end`, and wait for it, if all ranks arrive."""
        saves = self.saves
        if saves is None or self.stopped is not None:
            return
        boundary = self.rounds.arrive(_END_LABEL, is_due=True)
        assert boundary is not None
        try:
            if self.options.save.at_end and saves.needs_save(step):
                self._save(boundary, step, make_state)
            if saves.settle(inf) == FAILED:
                self._save(boundary, step, make_state)
                if saves.settle(inf) == FAILED:
                    reason = str(saves.failure or "see the errors of other ranks").rstrip(".")
                    raise CheckpointError(
                        f"the last save, of step {step}, has failed twice: {reason}. Older "
                        f"checkpoints are unchanged"
                    ) from saves.failure
            if step == saves.last:
                self.requests.begin_save(step, is_last=True)
            elif saves.num_begun == 0 and self.session.channel.rank == COORDINATOR:
                _log.warning(
                    "the run ends, and none of steps %d to %d was saved: save=%s was not due. "
                    "Join dc.at_end to it with | to save the last one",
                    *(saves.last + 1, step, self.options.save),
                )
        except RankError as error:
            if f"to {_END_LABEL}" not in str(error):
                raise
            _log.warning("nothing was saved at the end: %s", error)
        finally:
            self.rounds.leave()

    def end(self, error: BaseException | None) -> None:
        """Release everything, even if some of it fails. After an error, keep snapshots in memory.

        Do not wait for the training of other ranks. Raise the error of a failed save that was not
        raised yet; after an `error`, log it instead.
        """
        maintenance = self.requests.maintenance
        try:
            self._release(error)
        except Exception as failure:
            if error is None:
                raise
            _log.error("a save has failed as well: %s", failure)
        if error is not None and maintenance is not None:
            _log.warning(
                "the run ends with %s. Newest durable save: %s",
                *(type(error).__name__, maintenance.durable),
            )

    def _release(self, error: BaseException | None) -> None:
        requests, stopped = self.requests, self.stopped
        is_late = stopped is not None and not stopped.is_durable
        end_reason = "the run has ended, and its last steps are not saved"
        if error is not None:
            end_reason = f"the run has ended with {type(error).__name__}"
        elif stopped is not None and is_late:
            end_reason = f"the run has stopped after step {stopped.step}, which is not durable yet"
        with ExitStack() as stack:
            # Last: torchrun sends SIGTERM to all ranks when the first of them has ended.
            stack.callback(requests.signals.close)
            if requests.external is not None:  # after all saves are settled
                stack.callback(requests.external.close, end_reason, ANSWERS_END_S)
            if requests.maintenance is not None:
                is_urgent = is_late or error is not None
                stack.callback(requests.maintenance.close, URGENT_END_S if is_urgent else END_S)
            if self.saver is not None:
                stack.callback(self._end_saver, self.saver, error)
            stack.callback(self.rounds.close)

    def _end_saver(self, saver: AsyncSaver, error: BaseException | None) -> None:
        """End the saver. If the run must stop, its writer finishes what is not durable in time."""
        status = DURABLE if self.stopped is None or self.stopped.is_durable else STAGED
        stop_at = inf if error is None else self.rounds.find_stop_time()
        if self.saves is not None and stop_at < inf:
            status = self.saves.wait_until(stop_at)
        if status == STAGED:
            saver.detach()
        else:
            saver.close(keep=error is not None)

    def drop(self) -> None:
        """Release a run that was not closed, with a warning. Waits for nothing."""
        if os.getpid() != self.pid:  # not in a forked child
            return
        self.requests.signals.drop()
        self.rounds.close()
        if self.requests.maintenance is not None:
            self.requests.maintenance.close(0.0)
        if self.requests.external is not None:
            self.requests.external.close("the run was dropped", 0.0)
        _log.warning(
            "a Checkpointer for %s was dropped without close(): at_end has saved nothing, and the "
            "newest metrics may be lost. Use it in a `with`",
            self.root,
        )
        warnings.warn(f"unclosed Checkpointer for {self.root}", ResourceWarning, stacklevel=2)


def open_run_session(
    options: RunOptions, group: ProcessGroup | None, check_only_one: Callable[[], None]
) -> RunSession:
    """Compare the options of all ranks, and take part in rounds. Collective."""
    session = session_of(group)
    channel = session.channel
    signals: Signals | None = None
    try:
        with session.operation("Checkpointer"), channel.exchange("run options") as opening:
            check_only_one()
            options.check()
            root = open_root(options.root)[1]
            names = () if options.read_only else options.save.signals
            signals = Signals(names, is_default=options.save is DEFAULT_SAVE)
            gathered = opening.gather(options.run_arguments())
            if gathered is not None:
                check_equal_on_all_ranks("Checkpointer", gathered)
                opening.decide(secrets.token_hex(8))
        is_async = options.background and not options.read_only
        saver = AsyncSaver(root, group=group) if is_async else None
        member = BarrierMember(opening.result(str), channel.rank, channel.world_size)
        requests = RankRequests(channel.rank, options.save, signals)
        policy = PollPolicy.of(channel.world_size, max(0.0, options.stop_within_s - EXCHANGE_S))
        rounds = BarrierRounds(channel.notes, member, requests, channel.fail_without_others, policy)
    except BaseException:
        if signals is not None:
            signals.close()
        raise
    return RunSession(session, root, options, rounds, requests, saver)
