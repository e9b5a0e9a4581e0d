"""The save barrier: ranks agree on a boundary at which all save, and wait only if a save is due.

A boundary is a call of `step()` or `poll()` in the training. All ranks make the same calls in the
same order. A rank that needs a save outside the step policy opens a round with a note to all ranks:

1. A thread of each rank reads the note. It sets a barrier at a boundary that its rank has not
   passed. Only then it answers with the number of that boundary.
2. When rank 0 has all answers, it writes the decision "go k"; k is the highest answer. No rank has
   passed k, and no rank passes k without the decision.
3. A rank at its barrier waits for the decision, and saves at k. Any rank may write the decision
   "void" at any time. The first decision counts. "void" removes the barriers, and the rank that
   opened the round opens another round.

A rank at its barrier waits only for the threads of other ranks, which answer while the training
computes. Another order of these steps can split the ranks or block them forever: decision 15 has
examples, and `tests/checkpointer/test_save_barrier_model.py` finds such orders.

`SaveBarrier` has these rules. `BarrierRounds` has the thread, which reads and writes the notes. The
training takes a lock at a boundary, but never calls the store. All keys begin with a prefix of this
session, so a restarted job never reads the notes of an earlier session.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal

import msgspec

from dist_ckpt.core.comm.exchange.channel import COORDINATOR, SharedNotes
from dist_ckpt.core.comm.rank_messages import NoAnswerError
from dist_ckpt.errors import RankError

Arrival = Literal["pass", "wait", "save"]


@dataclass(slots=True)
class SaveBarrier:
    """One rank's side of the rules. Use it under a lock.

    Boundaries and rounds are counted from 1. `passed` is the number of passed boundaries. `round`
    is the open round, or the next round. `at` is the boundary of the barrier, which this rank does
    not pass; None without an open round. `is_go`: the decision is that all ranks save at `at`.
    """

    passed: int = 0
    round: int = 1
    at: int | None = None
    is_go: bool = False

    @property
    def awaits_decision(self) -> bool:
        """True if a round is open."""
        return self.at is not None and not self.is_go

    def arrive(self) -> Arrival:
        """Move to the next boundary. Return "pass", "save", or "wait": then call again.

        "pass" and "save" pass the boundary. After "save", the next round has begun, and this rank
        may answer in it during the save.
        """
        boundary = self.passed + 1
        if self.at is None or boundary < self.at:
            self.passed = boundary
            return "pass"
        if not self.is_go:
            return "wait"
        self.passed = boundary
        self._begin_next_round()
        return "save"

    def set_ahead(self, lookahead: int) -> int:
        """Set the barrier of this round, `lookahead` boundaries ahead. Return the answer.

        With a larger lookahead, the decision usually exists before the rank reaches the barrier.
        """
        if self.at is None:
            self.at = self.passed + 1 + lookahead
        return self.at

    def learn(self, decision: int | None) -> None:
        """Set the decision: the boundary at which all save, or None for a void round."""
        if decision is None:
            self._begin_next_round()
            return
        if self.at is None or decision < self.at:
            raise AssertionError(f"the decision is {decision}, and the answer was {self.at}")
        self.at, self.is_go = decision, True

    def _begin_next_round(self) -> None:
        self.at, self.is_go = None, False
        self.round += 1


_log = logging.getLogger("dist_ckpt")

# The interval at which the thread polls for a note. It grows with the ranks, which share one store.
POLL_S = 0.25
MAX_POLLS_PER_S = 2_000

# The interval during an open round, when ranks may wait for its decision.
OPEN_POLL_S = 0.01
MAX_OPEN_POLLS_PER_S = 20_000

# A rank without an answer after this time is dead, frozen, or in a call that blocks all threads.
# The request is repeated later. When a rank dies, torchrun sends SIGTERM to the other ranks, which
# opens a round, and SIGKILL 30 s later. The training must get an error before the SIGKILL.
ANSWER_S = 20.0

# A barrier is set this many rounds ahead, so that the decision usually comes first. A round takes
# one poll interval and this number of calls of the store.
LOOKAHEAD_ROUNDS = 2
STORE_CALLS_PER_ROUND = 3
MAX_LOOKAHEAD = 10_000

# A faster pace of the training is used fully after this time.
STEADY_S = 60.0

# The pause after a void round, and after a call that the store did not answer.
RETRY_S = 1.0

_DECISION = re.compile(r"go ([1-9][0-9]{0,18})|(void|closed): .*", re.DOTALL)


class BarrierProposal(msgspec.Struct, frozen=True):
    """The purpose of a round: a save, with its reason.

    `stops`: the run ends after the save. `again`: save even if a save of this step has begun.
    `raises`: all ranks raise an error of this class instead. `waited_s` is the age of the request
    when the round was opened: the rank may have been in a save before.
    """

    rank: int
    why: str
    stops: bool = False
    again: bool = False
    raises: str = ""
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Boundary:
    """A boundary at which all ranks act, with the proposal of the round, if any.

    `number` counts the boundaries from 1. `requested_at` is the time of the request by this rank's
    monotonic clock.
    """

    number: int
    proposal: BarrierProposal | None
    requested_at: float = 0.0


@dataclass(frozen=True, slots=True)
class PollPolicy:
    """The poll interval, the deadline of answers, and the lookahead in boundaries.

    `ahead` is None for the number of boundaries in `LOOKAHEAD_ROUNDS` rounds. `stop_s`: how long an
    action may wait for a late rank after a request to stop.
    """

    poll_s: float = POLL_S
    answer_s: float = ANSWER_S
    ahead: int | None = None
    stop_s: float = inf

    @staticmethod
    def of(world_size: int, stop_s: float = inf) -> PollPolicy:
        """Return the default policy for a number of ranks."""
        return PollPolicy(poll_s=max(POLL_S, world_size / MAX_POLLS_PER_S), stop_s=stop_s)


@dataclass(frozen=True, slots=True)
class BarrierMember:
    """A rank of a job. `key_prefix` is unique to this session, and begins all its keys."""

    key_prefix: str
    rank: int
    world_size: int


class BarrierRounds:
    """One rank's part in the rounds of a job. Its thread runs until `close`.

    `propose` returns this rank's current proposal immediately. It returns the same proposal until a
    `Boundary` with it is done. The thread calls `report_alone` with the reason if other ranks have
    left, or have passed the boundary of this rank's action.
    """

    def __init__(
        self,
        notes: SharedNotes,
        member: BarrierMember,
        propose: Callable[[], BarrierProposal | None],
        report_alone: Callable[[str], None],
        policy: PollPolicy | None = None,
    ) -> None:
        self._notes = notes
        self._key_prefix, self._rank = member.key_prefix, member.rank
        self._world_size = member.world_size
        self._propose = propose
        self._report_alone = report_alone
        self._policy = policy or PollPolicy.of(member.world_size)
        self._changed = threading.Condition(threading.Lock())
        self._barrier = SaveBarrier()
        self._proposal: BarrierProposal | None = None
        self._failure: Exception | None = None
        # The number of this rank's actions; the boundary and label of the current one.
        self._num_actions = 0
        self._action: tuple[int, str] | None = None
        self._has_announced = False
        # The deadline of a request to stop, until its action is done.
        self._stop_at, self._is_stopping = inf, False
        # For the thread only.
        self._seen_at = 0.0
        self._may_propose_at = 0.0
        self._is_over = False
        self._pace_at, self._pace_passed, self._pace = time.monotonic(), 0, 0.0
        self._poll_duration_s = 0.0
        self._thread = threading.Thread(
            target=self._run_thread, name="dist_ckpt rounds", daemon=True
        )
        self._wake = threading.Event()
        self._thread.start()

    # --- the training's side ---------------------------------------------------------------------

    def arrive(self, label: str, step: int = 0, *, is_due: bool = False) -> Boundary | None:
        """Move to the next boundary. Return it if all ranks act there, else None.

        `is_due`: all ranks act here without a round. `label` and `step` name the action in errors.
        Call `leave` after the action. This call waits only for a decision, which needs the threads
        of the other ranks, but not their training. Raises NoAnswerError if the job's store fails.
        """
        with self._changed:
            while self._failure is None and (arrival := self._barrier.arrive()) == "wait":
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            if arrival != "save" and not is_due:
                return None
            proposal = self._proposal if arrival == "save" else None
            self._num_actions += 1
            self._has_announced = False
            self._is_stopping = proposal is not None and proposal.stops
            self._action = self._barrier.passed, f"{label} (step {step})"
            requested_at = self._seen_at - (0.0 if proposal is None else proposal.waited_s)
            return Boundary(self._barrier.passed, proposal, requested_at)

    def leave(self) -> None:
        """End the action at a boundary."""
        with self._changed:
            self._action = None
            if self._is_stopping:
                self._stop_at = inf

    def close(self) -> None:
        """Leave the rounds: the open round and all later rounds become void. Idempotent."""
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._policy.poll_s + RETRY_S)

    # --- the thread ------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        pause_s, has_warned = 0.0, False
        while not self._wake.wait(pause_s):
            try:
                pause_s = self._poll_notes()
            except NoAnswerError as error:
                # No rank may wait for a decision that cannot come. Without a barrier the training
                # continues: if the store does not return, the next save raises an error.
                if self._barrier.awaits_decision:
                    self._fail(error)
                    return
                if not has_warned:
                    _log.warning("requests to save are not seen for now: %s", error)
                has_warned, pause_s = True, RETRY_S
            except Exception as error:  # noqa: BLE001 - a thread's outer edge: the training raises it
                self._fail(error)
                return
        try:
            self._notes.put_once(self._key("closed"), str(self._rank))
            if self._barrier.awaits_decision:
                decision = f"closed: rank {self._rank} takes no part any more"
                self._notes.put_once(self._round_key("decision"), decision)
        except NoAnswerError as error:
            _log.debug("the end of rank %d is not announced: %s", self._rank, error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _poll_notes(self) -> float:
        """Read and write the notes that are due. Return the seconds until the next call."""
        began_at = time.monotonic()
        with self._changed:
            barrier, action, num_actions = self._barrier, self._action, self._num_actions
            is_open, is_go = barrier.at is not None, barrier.is_go
        self._check_actions(action, num_actions)
        if is_go:  # the training has not reached the boundary yet
            return self._policy.poll_s
        if not is_open and not self._join_round(may_propose=action is None):
            self._poll_duration_s = time.monotonic() - began_at
            return self._policy.poll_s
        if self._join_decision():
            return self._policy.poll_s
        return max(OPEN_POLL_S, self._world_size / MAX_OPEN_POLLS_PER_S)

    def _join_round(self, *, may_propose: bool) -> bool:
        """Read the proposal of this round, or write one, and answer. Return False without one.

        No proposal is written during an action: the action may already do what is proposed.
        """
        self._measure_pace()
        key, now = self._round_key("ask"), time.monotonic()
        may_propose = may_propose and not self._is_over and now >= self._may_propose_at
        if may_propose and (proposal := self._propose()) is not None:
            text = self._notes.put_once(key, msgspec.json.encode(proposal).decode())
        elif notes := self._notes.read([key]):
            text = notes[0]
        else:
            return False
        try:
            proposal = msgspec.json.decode(text, type=BarrierProposal)
        except (msgspec.DecodeError, UnicodeError):
            raise RankError(f"a round has the proposal {text[:200]!r}: invalid") from None
        with self._changed:
            self._proposal = proposal
            boundary = self._barrier.set_ahead(self._lookahead(proposal))
            if proposal.stops:
                self._stop_at = min(self._stop_at, now - proposal.waited_s + self._policy.stop_s)
        self._seen_at = now
        # After the barrier is set: a rank that has answered must not pass this boundary.
        self._notes.put(self._round_key(f"answer/{self._rank}"), str(boundary))
        return True

    def _join_decision(self) -> bool:
        """Read the decision of this round, or write one, and obey it. Return False without one."""
        key = self._round_key("decision")
        if notes := self._notes.read([key]):
            text = notes[0]
        elif decision := self._decide():
            text = self._notes.put_once(key, decision)
        else:
            return False
        match = _DECISION.fullmatch(text)
        if match is None:
            raise RankError(f"the decision of a round is {text[:200]!r}: invalid")
        if match[1]:
            self._remove_last_round()
        else:
            _log.info("a request to save is postponed: %s", text)
            self._may_propose_at = time.monotonic() + RETRY_S
            self._is_over = match[2] == "closed"
            if self._is_over and self._proposal is not None and self._proposal.stops:
                raise RankError(  # otherwise the signal would be lost forever
                    f"the run cannot save and stop, as {self._proposal.why} requests: "
                    f"{text.removeprefix('closed: ')}. The run has ended, by an error or by "
                    f"`break`; older checkpoints are unchanged"
                )
        with self._changed:
            self._barrier.learn(int(match[1]) if match[1] else None)
            self._changed.notify_all()
        return True

    def _decide(self) -> str | None:
        """Return the decision that this rank can write, if any."""
        waited_s = time.monotonic() - self._seen_at
        keys = [self._round_key(f"answer/{rank}") for rank in range(self._world_size)]
        if self._rank == COORDINATOR and (answers := self._notes.read(keys)) is not None:
            return f"go {max(map(int, answers))}"
        looks = self._rank == COORDINATOR or waited_s > RETRY_S  # others leave it to rank 0
        if looks and (closed := self._notes.read([self._key("closed")])):
            return f"closed: rank {closed[0]} takes no part any more"
        if waited_s > self._policy.answer_s:
            missing = [rank for rank, key in enumerate(keys) if self._notes.read([key]) is None]
            return f"void: no answer of ranks {missing} in {self._policy.answer_s:g} s"
        return None

    def _check_actions(self, action: tuple[int, str] | None, num_actions: int) -> None:
        """Announce this rank's action, or report that it has passed another rank's action."""
        if self._world_size == 1:
            return
        if action is not None:
            if not self._has_announced:
                text = f"{self._rank} {action[0]} {action[1]}"
                self._notes.put_once(self._key(f"turn/{num_actions}"), text)
                self._has_announced = True
            if why := self._find_divergence(num_actions):
                with self._changed:  # only during this action
                    if self._action == action:
                        self._report_alone(why)
        elif notes := self._notes.read([self._key(f"turn/{num_actions + 1}")]):
            rank, boundary, label = notes[0].split(" ", 2)
            with self._changed:
                is_same_action = self._num_actions == num_actions
                has_passed = is_same_action and self._barrier.passed >= int(boundary)
            if has_passed:
                self._notes.put_once(
                    self._key(f"passed/{num_actions + 1}"),
                    f"rank {rank} is at its boundary {boundary} to {label}, and rank {self._rank} "
                    f"has passed that without a save: all ranks must make the same calls of step, "
                    f"poll and save, with the same steps. Look for a condition like "
                    f"`if rank == 0:` around one of these",
                )

    def _find_divergence(self, num_actions: int) -> str:
        """Return why other ranks will not take this action, or "" if they may."""
        if passed := self._notes.read([self._key(f"passed/{num_actions}")]):
            return passed[0]
        if closed := self._notes.read([self._key("closed")]):
            return (
                f"rank {closed[0]} has left the run, by an error or by `break`, while this rank "
                f"saves: look into the log of that rank"
            )
        if time.monotonic() >= self.find_stop_time():
            return "the run must stop now, and saves nothing more. Older checkpoints are unchanged"
        return ""

    def find_stop_time(self) -> float:
        """Return when the run must stop, by the monotonic clock; inf if nothing requests that."""
        # This rank proposes nothing during an action, but its own signal counts.
        own, now = self._propose(), time.monotonic()
        own_at = now - own.waited_s + self._policy.stop_s if own and own.stops else inf
        return min(own_at, self._stop_at)

    def _measure_pace(self) -> None:
        """Update the number of boundaries per second.

        An evaluation has many polls, and the training after it has few steps. A barrier set at the
        pace of the polls would be reached hours later. So a slower pace counts immediately, and a
        faster pace counts gradually. The first measurement counts immediately.
        """
        now, passed = time.monotonic(), self._barrier.passed
        elapsed_s = max(now - self._pace_at, 1e-3)
        pace = (passed - self._pace_passed) / elapsed_s
        limit = self._pace + pace * elapsed_s / STEADY_S if self._pace_passed else pace
        self._pace = min(pace, limit)
        self._pace_at, self._pace_passed = now, passed

    def _lookahead(self, proposal: BarrierProposal) -> int:
        """Return the distance of the barrier in boundaries: 0 for a stop, which has little time."""
        if self._policy.ahead is not None:
            return self._policy.ahead
        round_s = self._policy.poll_s + STORE_CALLS_PER_ROUND * self._poll_duration_s
        lookahead = min(int(self._pace * LOOKAHEAD_ROUNDS * round_s), MAX_LOOKAHEAD)
        return 0 if proposal.stops else lookahead

    def _remove_last_round(self) -> None:
        """Remove the notes of the last round. No rank reads them after its next answer."""
        if self._rank == COORDINATOR and (last := self._barrier.round - 1):
            names = ["ask", "decision", *(f"answer/{rank}" for rank in range(self._world_size))]
            self._notes.remove([self._key(f"{last}/{name}") for name in names])

    def _round_key(self, name: str) -> str:
        return self._key(f"{self._barrier.round}/{name}")

    def _key(self, name: str) -> str:
        return f"{self._key_prefix}/{name}"
