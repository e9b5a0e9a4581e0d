"""One rank's end of the control channel: its position, and the ranks that it waits for.

Keys are `<start>/<number>/<turn>/<rank>` for envelopes and `<start>/<number>/<turn>/answer`. The
number counts the group's operations, the turn an operation's exchanges. The start counts how often
the ranks have begun to use the store. Keys do not contain the call, so that ranks in different
calls meet and detect it.

The store is never waited in: every wait is a loop of this rank, which watches heartbeats. The
failure detector decides from them which ranks are dead or silent.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from dist_ckpt.config import Config
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.key_value import client_thread
from dist_ckpt.core.comm.key_value.client_thread import Store, StoreClientThread, StoreErrorTexts
from dist_ckpt.core.comm.messages import Failure, Heartbeat, HeartbeatSender, NoAnswerError, unpack
from dist_ckpt.errors import RankError, listed, ranks_text

_log = logging.getLogger("dist_ckpt")

T = TypeVar("T")

# With more ranks each polls less often, since all of them use one store.
MAX_POLLS_PER_S = 20_000

STALE = (
    "the job's key-value store holds messages of another job or of an earlier start of this one. "
    "Give every start a store of its own (torchrun does), and restart the job"
)

# How much longer a wait may take than necessary: polls become rarer with the time waited.
OVERSHOOT = 0.15


class PollInterval:
    """The intervals of one wait: polls become rarer; looks at the heartbeats are regular."""

    def __init__(self, world_size: int, config: Config) -> None:
        self._max_pause_s = max(0.02, world_size / MAX_POLLS_PER_S)
        self._min_pause_s = max(0.0003, self._max_pause_s / 100)
        joining_s = min(config.join_warning_s / 2, config.join_timeout_s / 4)
        self._look_s = min(1.0, config.heartbeat_timeout_s / 10, joining_s)
        self._began_at = time.monotonic()
        self._look_at = self._began_at + self._look_s
        self.has_warned = False

    @property
    def waited_s(self) -> float:
        """How long the wait has lasted."""
        return time.monotonic() - self._began_at

    def pause(self) -> None:
        """Sleep until the next poll."""
        time.sleep(min(max(self._min_pause_s, OVERSHOOT * self.waited_s), self._max_pause_s))

    def is_time_to_look(self) -> bool:
        """Return True, at intervals, if it is time to look at the heartbeats."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + self._look_s
        return True


# How long a rank that missed an operation waits for the others to begin the next one. If they do,
# its own call belongs to that one.
GRACE_S = 1.0


@dataclass(slots=True)
class _LastSeen:
    """A rank's last heartbeat, None if it is not valid, and for how long it has not changed."""

    data: bytes
    beat: Heartbeat | None
    seen_at: float
    silent_s: float = 0.0


class FailureDetector:
    """The other ranks, as their heartbeats show them; `beat_key` returns the key of a rank's.

    Silence counts only while this rank watches, and each look counts a limited amount. So a rank is
    not dead because the observer, or the whole machine, was stopped for a while.
    """

    def __init__(
        self, client: StoreClientThread, beat_key: Callable[[int], str], config: Config
    ) -> None:
        self._client = client
        self._beat_key = beat_key
        self._heartbeat_timeout_s = config.heartbeat_timeout_s
        self._grace_s = min(GRACE_S, config.heartbeat_timeout_s / 4)
        self._max_counted_s = config.heartbeat_timeout_s / 4  # of silence that one look may count
        self._last_seen: dict[int, _LastSeen] = {}

    def look(self, ranks: Sequence[int]) -> None:
        """Read the heartbeats of some ranks once."""
        keys = [self._beat_key(rank) for rank in ranks]
        for rank, data in zip(ranks, self._client.call(client_thread.get_each, keys), strict=True):
            now, last = time.monotonic(), self._last_seen.get(rank)
            if data is not None and (last is None or last.data != data):
                beat = None
                with suppress(ValueError):  # it is not a heartbeat
                    beat = unpack(data, Heartbeat)
                self._last_seen[rank] = _LastSeen(data, beat, now)
            elif data is not None and last is not None:
                last.silent_s += min(now - last.seen_at, self._max_counted_s)
                last.seen_at = now

    def beat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of a rank; None if it was never seen, or is not valid."""
        last = self._last_seen.get(rank)
        return last.beat if last else None

    def has_invalid_heartbeat(self, rank: int) -> bool:
        """Return True if a rank's heartbeat is not a valid one."""
        return rank in self._last_seen and self.beat(rank) is None

    def is_waiting(self, rank: int, number: int, turn: int) -> bool:
        """Return True if a rank was last seen alive within this operation.

        A rank that received the failure of this turn's exchange does not wait any more.
        """
        beat = self.beat(rank)
        return (
            beat is not None
            and (beat.number, beat.inside, beat.gone) == (number, True, False)
            and beat.failed_turn < turn
            and self._last_seen[rank].silent_s < self._heartbeat_timeout_s
        )

    def loss(self, rank: int, number: int, *, was_in: bool) -> str | None:
        """Return why a rank is lost for this operation, or None; `was_in`: it had entered it."""
        beat = self.beat(rank)
        if beat is None:
            return None
        if beat.gone:
            return "has ended"
        if self._last_seen[rank].silent_s >= self._heartbeat_timeout_s:
            return f"is dead or frozen: no heartbeat for {self._heartbeat_timeout_s:g} s"
        if beat.number > number or (beat.number == number and not beat.inside):
            return "is no longer taking part: it raised an error or was interrupted"
        if was_in and beat.number < number:
            return "has restarted"
        return None

    def newer(self, ranks: Sequence[int], number: int) -> int | None:
        """Return a later operation that one of these ranks is in or soon enters; None if none."""
        until = time.monotonic() + self._grace_s
        while True:
            self.look(ranks)
            for rank in ranks:
                beat = self.beat(rank)
                if beat is not None and beat.number > number and beat.inside and not beat.gone:
                    return beat.number
            if time.monotonic() >= until:
                return None
            time.sleep(0.02)

    def name(self, ranks: Sequence[int]) -> str:
        """Return the names of ranks, a single one with its host if known: "rank 2 (host b)"."""
        beat = self.beat(ranks[0]) if len(ranks) == 1 else None
        return ranks_text(ranks) + (f" (host {beat.host})" if beat else "")


class ExchangeState:
    """The common state of both sides of an exchange, coordinator and participant.

    `token` identifies the operation from its first answer on; until then it is "". `turn` counts
    its exchanges; `phase` is the name of the current one.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        host: str,
        config: Config,
        texts: StoreErrorTexts,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = host
        self.config = config
        self.call = ""
        self.token = ""
        self.phase = ""
        self.turn = 0
        self.heartbeat = HeartbeatSender(host)
        self.client = StoreClientThread(
            store,
            self.heartbeat,
            period_s=config.heartbeat_timeout_s / 5,
            stall_timeout_s=config.heartbeat_timeout_s,
            texts=texts,
        )
        self._texts = texts
        self.detector = FailureDetector(self.client, self._beat_key, config)
        self.nbytes_put = 0
        # How long to wait for a rank that was never seen.
        self.unseen_s = config.join_timeout_s
        # Why ranks outside the operation will not enter it, "" if they may.
        self.absence_reason = ""
        self._start = 0

    @property
    def number(self) -> int:
        """The number of the current operation of this rank, or of its last one."""
        return self.heartbeat.number

    def begin(self, number: int) -> None:
        """Enter an operation, and show it to the other ranks."""
        if not self._start:
            # A store may outlive a process group, and still have messages of an earlier one.
            try:
                self._start = self.client.call(client_thread.increment, f"starts/{self.rank}")
            except ValueError as error:
                raise RankError(
                    f"the store's counter of the starts of rank {self.rank} has {error}. "
                    f"{self._texts.strange}",
                    rank=self.rank,
                ) from error
            self.heartbeat.key = self._beat_key(self.rank)
        # The number last: a heartbeat in between must not say that the operation was left.
        self.heartbeat.inside, self.heartbeat.failed_turn = True, 0
        self.heartbeat.number = number
        self.client.beat()

    def catch_up(self) -> None:
        """Count the operations that the coordinator has begun without this rank."""
        if (beat := self.detector.beat(COORDINATOR)) is not None:
            self.heartbeat.number = max(self.number, beat.number - beat.inside)

    def linger(self, most_s: float) -> None:
        """Wait until the other live ranks have read the last answer, at most for this time.

        The store may end with the coordinator's process. The other ranks need not wait.
        """
        until = time.monotonic() + most_s
        late = list(range(1, self.world_size)) if self.rank == COORDINATOR else []
        with suppress(NoAnswerError):
            while self.number and late and time.monotonic() < until:
                self.detector.look(late)
                late = [
                    rank for rank in late if self.detector.is_waiting(rank, self.number, self.turn)
                ]
                time.sleep(0.005 if late else 0)

    def key(self, sender: int | str) -> str:
        """Return the key of an envelope or answer of the current exchange."""
        return f"{self._start}/{self.number}/{self.turn}/{sender}"

    def _beat_key(self, rank: int) -> str:
        return f"{self._start}/beat/{rank}"

    def put(self, key: str, data: bytes) -> None:
        """Store a document."""
        self.nbytes_put += len(data)
        self.client.call(client_thread.put, key, data)

    def unpack(self, rank: int, data: bytes, expected: type[T]) -> T:
        """Decode a rank's message. RankError if it is invalid; on a participant NoAnswerError."""
        try:
            return unpack(data, expected)
        except ValueError as error:
            kind = RankError if self.rank == COORDINATOR else NoAnswerError
            message = (
                f"in place of a message of {self.detector.name([rank])} the store has {error} "
                f"({self._seen()}). {self._texts.strange}"
            )
            raise kind(message, rank=rank, phase=self.phase) from error

    def failed_ranks(self, ranks: Sequence[int]) -> dict[int, Failure]:
        """Return a failure for each of these ranks from which nothing more will come."""
        failures = {}
        for rank in ranks:
            loss = self.detector.loss(rank, self.number, was_in=bool(self.token))
            remedy = self._texts.lost
            if self.detector.has_invalid_heartbeat(rank):
                loss = "has an invalid heartbeat in the store"
                remedy = self._texts.strange
            if loss is not None:
                message = f"{self.detector.name([rank])} {loss} ({self._seen()}). {remedy}"
                failures[rank] = Failure("RankError", message, rank, self.phase)
        return failures

    def _seen(self) -> str:
        return f"seen by rank {self.rank} in phase {self.phase!r} of {self.call}"

    def mismatched_calls(self, calls: Mapping[int, tuple[str, str]]) -> dict[int, Failure]:
        """Return a failure with their names if ranks are in different calls or phases."""
        by_phase = defaultdict(list)
        for rank, (_, phase) in sorted(calls.items()):
            by_phase[phase].append(rank)
        if len(by_phase) == 1:
            return {}
        self.detector.look(range(self.world_size))  # for the names of hosts
        places = [
            f"{self.detector.name(ranks)}: {calls[ranks[0]][0]}, phase {name!r}"
            for name, ranks in by_phase.items()
        ]
        if absent := [rank for rank in range(self.world_size) if rank not in calls]:
            places.append(f"{self.detector.name(absent)}: nothing yet")
        message = (
            f"the ranks of the group are in different calls: {listed(places, '; ')}. "
            f"{self._texts.mixed}"
        )
        odd = next(rank for rank in sorted(calls) if calls[rank][1] != self.phase)
        return {odd: Failure("RankError", message, odd, self.phase)}

    def missing_ranks(self, ranks: Sequence[int], poll: PollInterval) -> dict[int, Failure]:
        """Return a failure if some of these ranks have not entered within `join_timeout_s`.

        After `join_warning_s` one warning with their names is logged.
        """
        beats = {rank: self.detector.beat(rank) for rank in ranks}
        absent = [rank for rank, beat in beats.items() if not beat or beat.number < self.number]
        if self.token or not absent:
            return {}
        if self.absence_reason:
            return {absent[0]: Failure("RankError", self.absence_reason, absent[0], self.phase)}
        message = (
            f"{self.detector.name(absent)} did not call {self.call}: rank {self.rank} (host "
            f"{self.host}) has waited for {poll.waited_s:.3g} s. {self._texts.absent}"
        )
        if poll.waited_s >= self.config.join_timeout_s:
            message = self._stale_ranks_text(absent) or message
            return {absent[0]: Failure("RankError", message, absent[0], self.phase)}
        if poll.waited_s >= self.unseen_s:
            for rank in absent:
                if beats[rank] is None:
                    return {rank: Failure("RankError", message, rank, self.phase)}
        if poll.waited_s >= self.config.join_warning_s and not poll.has_warned:
            poll.has_warned = True
            _log.warning("%s", message)
        return {}

    def _stale_ranks_text(self, ranks: Sequence[int]) -> str:
        keys = [f"starts/{rank}" for rank in ranks]
        counts = self.client.call(lambda store: [client_thread.counted(store, key) for key in keys])
        fresh = (b"", str(self._start).encode())
        stale_ranks = [rank for rank, num in zip(ranks, counts, strict=True) if num not in fresh]
        if not stale_ranks:
            return ""
        return f"{ranks_text(stale_ranks)} cannot be met by rank {self.rank}: {STALE}"
