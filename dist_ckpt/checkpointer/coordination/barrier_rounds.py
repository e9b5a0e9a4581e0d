"""How ranks agree on a boundary at which all save: notes that a thread writes during the training.

`SaveBarrier` has the rules, and what each note is for. The training takes a lock at a boundary, and
waits only where the rules say so; it makes no call of the store. All keys begin with the name
of this incarnation of the job, so that a restarted or resized world never reads notes of another.

The save barrier: ranks agree on a boundary at which all save, and wait only if a save is due.

A boundary is each `step()` or `poll()` of the training; all ranks make the same sequence of them.
A rank that needs a save outside the step policy opens a round, by one note that all can read:

1. A thread of each rank sees the note. It draws a line before a boundary that its rank has not
   passed, and only then answers with that boundary's number.
2. With all answers rank 0 writes the decision "go k"; k is the highest of them. So no rank has
   passed k, nor will before it has the decision.
3. A rank at its line waits for the decision, and saves at k. Any rank may write the decision "void"
   instead, at any time: the first decision counts. Then there is no line, and the rank that opened
   the round opens another.

So a rank at its line waits only for the threads of others, which answer whatever their training
does. Other orders split the ranks or stop them for ever: decision 15 has them, and
`tests/checkpointer/test_save_barrier_model.py` finds them.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from dist_ckpt.core.comm.exchange.channel import COORDINATOR, SharedNotes
from dist_ckpt.core.comm.messages import NoAnswerError
from dist_ckpt.errors import RankError

Arrival = Literal["pass", "wait", "save"]


@dataclass(slots=True)
class SaveBarrier:
    """One rank's side, to be used under a lock.

    Boundaries and rounds are counted from 1. `passed` is how many boundaries this rank has passed;
    `round` is the round that is open here, or will be next; `first` is the first boundary that it
    does not pass in this round, None while none is open. `is_go`: the decision is known, and all
    save at `first`.
    """

    passed: int = 0
    round: int = 1
    first: int | None = None
    is_go: bool = False

    def arrive(self) -> Arrival:
        """Come to the next boundary: pass it, wait (and ask again), or save there and be past it.

        Who saves is in the next round: it may be answered while the save is under way.
        """
        boundary = self.passed + 1
        if self.first is None or boundary < self.first:
            self.passed = boundary
            return "pass"
        if not self.is_go:
            return "wait"
        self.passed = boundary
        self._next_round()
        return "save"

    def draw(self, lookahead: int) -> int:
        """Draw the line of this round, so many boundaries ahead; return the boundary to answer.

        A line that lies further ahead is reached after the decision, mostly, and stops nobody.
        """
        if self.first is None:
            self.first = self.passed + 1 + lookahead
        return self.first

    def learn(self, decision: int | None) -> None:
        """Take a decision: the boundary at which all save, or None if the round is void."""
        if decision is None:
            self._next_round()
            return
        if self.first is None or decision < self.first:
            raise AssertionError(f"the decision is {decision}, and the answer was {self.first}")
        self.first, self.is_go = decision, True

    def _next_round(self) -> None:
        self.first, self.is_go = None, False
        self.round += 1


_log = logging.getLogger("dist_ckpt")

# How often the thread looks for a note: a request is seen so much later. With many ranks less
# often, as all of them ask one store.
POLL_S = 0.25
MAX_POLLS_PER_S = 2_000

# While a round is open ranks may be waiting for its decision.
OPEN_POLL_S = 0.01
MAX_OPEN_POLLS_PER_S = 20_000

# A rank that has not answered by then is dead, frozen, or in a call that lets no thread run: the
# request is put again later. When a rank dies torchrun sends SIGTERM to the others, which is such a
# request, and SIGKILL 30 s later: before that their training has to come to an error that tells.
ANSWER_S = 20.0

# A line drawn this far ahead is mostly reached after the decision: twice the time of a round, which
# is a pause and so many looks at the store.
AHEAD_ROUNDS = 2
LOOKS_OF_ROUND = 3
MAX_AHEAD = 10_000

# The pace of a job is one that it has kept for so long.
STEADY_S = 60.0

# After a round that came to nothing, and after a store that did not answer.
AGAIN_S = 1.0

_DECISION = re.compile(r"go ([1-9][0-9]{0,18})|(void|closed): .*", re.DOTALL)


class BarrierProposal(msgspec.Struct, frozen=True):
    """What a round is opened for: a save; `why` is for people.

    `stops`: then the run ends. `again`: also if this step was begun to be saved before. `raises`:
    instead of a save all ranks raise an error of this class. `waited_s` is how long it was wanted
    when the round was opened: a rank may have been in a save.
    """

    rank: int
    why: str
    stops: bool = False
    again: bool = False
    raises: str = ""
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Boundary:
    """A boundary at which all ranks are to do something; `ask` is what the round was for, if any.

    `number` counts the boundaries from 1. `asked_at` is since when it is wanted, by this rank's
    monotonic clock.
    """

    number: int
    ask: BarrierProposal | None
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class PollPolicy:
    """How often to look, how long to wait for an answer, and how many boundaries to draw ahead.

    `ahead`: None for as many as come in `AHEAD_ROUNDS` rounds.
    """

    poll_s: float = POLL_S
    answer_s: float = ANSWER_S
    ahead: int | None = None

    @staticmethod
    def of(world_size: int) -> PollPolicy:
        """Return what suits so many ranks."""
        return PollPolicy(poll_s=max(POLL_S, world_size / MAX_POLLS_PER_S))


@dataclass(frozen=True, slots=True)
class BarrierMember:
    """A rank of a job; `key_prefix` is unique to this group of ranks, and begins all its keys."""

    key_prefix: str
    rank: int
    world_size: int


class BarrierRounds:
    """One rank's part in the rounds of a job; its thread runs until `close`.

    `wants` says, without waiting for anything, what this rank asks for now, if anything: again and
    again, until that was done at a `Boundary`. `alone` is called, in the thread, if others have
    passed the boundary at which this rank is in a save, or have left: it says how.
    """

    def __init__(
        self,
        notes: SharedNotes,
        member: BarrierMember,
        wants: Callable[[], BarrierProposal | None],
        alone: Callable[[str], None],
        pacing: PollPolicy | None = None,
    ) -> None:
        self._notes = notes
        self._key_prefix, self._rank = member.key_prefix, member.rank
        self._world_size = member.world_size
        self._wants = wants
        self._alone = alone
        self._pacing = pacing or PollPolicy.of(member.world_size)
        self._changed = threading.Condition(threading.Lock())
        self._line = SaveBarrier()
        self._ask: BarrierProposal | None = None
        self._failure: Exception | None = None
        # How many turns this rank has taken, and the boundary of the one that it is in, with what
        # it does there.
        self._num_turns = 0
        self._inside: tuple[int, str] | None = None
        self._has_announced = False
        # Of the thread alone.
        self._seen_at = 0.0
        self._not_before = 0.0
        self._is_over = False
        self._paced_at, self._passed_then, self._pace = time.monotonic(), 0, 0.0
        self._look_s = 0.0
        self._thread = threading.Thread(target=self._run, name="dist_ckpt rounds", daemon=True)
        self._wake = threading.Event()
        self._thread.start()

    # --- the training's side ---------------------------------------------------------------------

    def arrive(self, what: str, step: int = 0, *, is_due: bool = False) -> Boundary | None:
        """Come to the next boundary. Returns a turn if all ranks do something here, else None.

        `is_due`: all ranks alike save here; `what` says what they do, after which step. After a
        turn call `leave`.
        Waits only for a decision, which takes the threads of the other ranks and no training.
        NoAnswerError if the job's store is gone meanwhile.
        """
        with self._changed:
            while self._failure is None and (arrival := self._line.arrive()) == "wait":
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            if arrival != "save" and not is_due:
                return None
            ask = self._ask if arrival == "save" else None
            self._num_turns += 1
            self._has_announced = False
            self._inside = self._line.passed, f"{what} (step {step})"
            asked_at = self._seen_at - (0.0 if ask is None else ask.waited_s)
            return Boundary(self._line.passed, ask, asked_at)

    def leave(self) -> None:
        """End a turn."""
        with self._changed:
            self._inside = None

    def close(self) -> None:
        """Take no part any more: rounds that are open, or that others open, come to nothing.

        May be called again.
        """
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._pacing.poll_s + AGAIN_S)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s, has_warned = 0.0, False
        while not self._wake.wait(pause_s):
            try:
                pause_s = self._look()
            except NoAnswerError as error:
                # Nobody may wait at a line of which no decision can come. Where none is drawn the
                # training goes on: if the store stays away the next save says so.
                if self._line.first is not None and not self._line.is_go:
                    self._fail(error)
                    return
                if not has_warned:
                    _log.warning("requests to save are not seen for now: %s", error)
                has_warned, pause_s = True, AGAIN_S
            except Exception as error:  # noqa: BLE001 - a thread's outer edge: the training raises it
                self._fail(error)
                return
        try:
            self._say_closed()
        except NoAnswerError as error:
            _log.debug("others do not learn that rank %d has ended: %s", self._rank, error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _look(self) -> float:
        """Do what is to be done now; return for how long nothing will be."""
        began = time.monotonic()
        with self._changed:
            line, inside, turn = self._line, self._inside, self._num_turns
            is_open, is_go = line.first is not None, line.is_go
        self._look_for_unmatched_turns(inside, turn)
        if is_go:  # until the training has come so far
            return self._pacing.poll_s
        if not is_open and not self._look_for_ask(asks=inside is None):
            self._look_s = time.monotonic() - began
            return self._pacing.poll_s
        if self._look_for_decision():
            return self._pacing.poll_s
        return max(OPEN_POLL_S, self._world_size / MAX_OPEN_POLLS_PER_S)

    def _look_for_ask(self, *, asks: bool) -> bool:
        """Look for this round's ask, or put one; answer it. Return whether there is one.

        It does not put one within a turn: what it asks for may be done just now.
        """
        self._see_pace()
        key, text = self._of_round("ask"), None
        now = time.monotonic()
        may_ask = asks and not self._is_over and now >= self._not_before
        if may_ask and (ask := self._wants()) is not None:
            text = self._notes.put_once(key, msgspec.json.encode(ask).decode())
        elif found := self._notes.read([key]):
            (text,) = found
        if text is None:
            return False
        ask = self._decoded(text)
        with self._changed:
            self._ask = ask
            boundary = self._line.draw(self._ahead(ask))
        self._seen_at = now
        # Only now: who has answered does not pass that boundary.
        self._notes.put(self._of_round(f"answer/{self._rank}"), str(boundary))
        return True

    def _look_for_decision(self) -> bool:
        """Look for this round's decision, or put one; obey it. Return whether there is one."""
        key, text = self._of_round("decision"), None
        if found := self._notes.read([key]):
            (text,) = found
        elif decided := self._decided():
            text = self._notes.put_once(key, decided)
        if text is None:
            return False
        match = _DECISION.fullmatch(text)
        if match is None:
            raise RankError(f"the decision of a round is {text[:200]!r}: no rank of ours puts that")
        if match[1]:
            self._forget_earlier()
        else:
            _log.info("a request to save came to nothing for now: %s", text)
            self._not_before = time.monotonic() + AGAIN_S
            self._is_over = match[2] == "closed"
            if self._is_over and self._ask is not None and self._ask.stops:
                raise RankError(  # else the signal would be swallowed, now and ever after
                    f"{self._ask.why} asks the run to save and stop, and it cannot: "
                    f"{text.removeprefix('closed: ')}. It has ended, by an error or by `break`; "
                    f"older checkpoints are as they were"
                )
        with self._changed:
            self._line.learn(int(match[1]) if match[1] else None)
            self._changed.notify_all()
        return True

    def _decided(self) -> str | None:
        """Return the decision that this rank would put, if it can tell one."""
        waited_s = time.monotonic() - self._seen_at
        if self._rank == COORDINATOR and (answers := self._answers()) is not None:
            return f"go {max(map(int, answers))}"
        looks = self._rank == COORDINATOR or waited_s > AGAIN_S  # the others leave it to rank 0
        if looks and (closed := self._notes.read([self._key("closed")])):
            return f"closed: rank {closed[0]} takes no part any more"
        if waited_s > self._pacing.answer_s:
            who = [rank for rank in range(self._world_size) if not self._has_answered(rank)]
            return f"void: no answer of ranks {who} in {self._pacing.answer_s:g} s"
        return None

    def _answers(self) -> list[str] | None:
        ranks = range(self._world_size)
        return self._notes.read([self._of_round(f"answer/{rank}") for rank in ranks])

    def _has_answered(self, rank: int) -> bool:
        return self._notes.read([self._of_round(f"answer/{rank}")]) is not None

    def _decoded(self, text: str) -> BarrierProposal:
        try:
            return msgspec.json.decode(text, type=BarrierProposal)
        except (msgspec.DecodeError, UnicodeError):
            raise RankError(f"a round has the ask {text[:200]!r}: none of ours") from None

    # --- a rank that saves alone -----------------------------------------------------------------

    def _look_for_unmatched_turns(self, inside: tuple[int, str] | None, turn: int) -> None:
        """Tell of this rank's turn, or see that another's is one that this rank has passed."""
        if self._world_size == 1:
            return
        if inside is not None:
            own = f"{self._rank} {inside[0]} {inside[1]}"
            if not self._has_announced:
                self._notes.put_once(self._key(f"turn/{turn}"), own)
                self._has_announced = True
            if why := self._why_alone(turn):
                with self._changed:  # not in what this rank does after the turn
                    if self._inside == inside:
                        self._alone(why)
        elif found := self._notes.read([self._key(f"turn/{turn + 1}")]):
            rank, boundary, what = found[0].split(" ", 2)
            if self._has_passed(int(boundary), turn):
                self._notes.put_once(
                    self._key(f"passed/{turn + 1}"),
                    f"rank {rank} is at its boundary {boundary} to {what}, and rank {self._rank} "
                    f"has passed that without a save: all ranks must make the same calls of step, "
                    f"poll and save, with the same steps. Look for a condition like "
                    f"`if rank == 0:` around one of these",
                )

    def _why_alone(self, turn: int) -> str:
        """Say why ranks that are not in this turn will not come; "" if they may."""
        if passed := self._notes.read([self._key(f"passed/{turn}")]):
            return passed[0]
        if closed := self._notes.read([self._key("closed")]):
            return (
                f"rank {closed[0]} has left the run, by an error or by `break`, while this rank is "
                f"to save: look into the log of that rank"
            )
        return ""

    def _has_passed(self, boundary: int, turn: int) -> bool:
        with self._changed:
            return self._line.passed >= boundary and self._num_turns == turn

    def _say_closed(self) -> None:
        self._notes.put_once(self._key("closed"), str(self._rank))
        if self._line.first is not None and not self._line.is_go:
            decision = f"closed: rank {self._rank} takes no part any more"
            self._notes.put_once(self._of_round("decision"), decision)

    # --- keys ------------------------------------------------------------------------------------

    def _see_pace(self) -> None:
        """See how many boundaries come in a second.

        The polls of an evaluation are many, and the steps after it few: what was drawn ahead at
        the pace of the polls would be reached after hours. So a slower pace counts at once, a
        faster one bit by bit; but the first one, of which nothing else is known.
        """
        now, passed = time.monotonic(), self._line.passed
        past_s = max(now - self._paced_at, 1e-3)
        pace = (passed - self._passed_then) / past_s
        known = self._pace + pace * past_s / STEADY_S if self._passed_then else pace
        self._pace = min(pace, known)
        self._paced_at, self._passed_then = now, passed

    def _ahead(self, ask: BarrierProposal) -> int:
        """Return how many boundaries ahead to draw the line: none to stop, as time is short."""
        if self._pacing.ahead is not None:
            return self._pacing.ahead
        round_s = self._pacing.poll_s + LOOKS_OF_ROUND * self._look_s
        return 0 if ask.stops else min(int(self._pace * AHEAD_ROUNDS * round_s), MAX_AHEAD)

    def _forget_earlier(self) -> None:
        """Remove the notes of the round before: who has answered this one reads them no more."""
        if self._rank == COORDINATOR and (last := self._line.round - 1):
            what = ["ask", "decision", *(f"answer/{rank}" for rank in range(self._world_size))]
            self._notes.remove([self._key(f"{last}/{name}") for name in what])

    def _of_round(self, what: str) -> str:
        return self._key(f"{self._line.round}/{what}")

    def _key(self, what: str) -> str:
        return f"{self._key_prefix}/{what}"
