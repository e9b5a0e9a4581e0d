"""One rank's position in the control channel, and the errors about ranks that it waits for.

An envelope has the key `<start>/<operation>/<exchange>/<rank>`, an answer has `answer` in place of
the rank. `start` counts how often the ranks have begun to use the store. `operation` counts the
operations of the group, and `exchange` the exchanges of an operation. Keys do not contain the call.
So ranks in different calls use the same keys, and detect the difference.

No wait is a blocking call of the store: each is a loop of this rank, which also reads heartbeats.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.exchange.failure_detector import (
    FailureDetector,
    PollInterval,
    ProcessWitness,
)
from dist_ckpt.core.comm.key_value import client_thread
from dist_ckpt.core.comm.key_value.client_thread import Store, StoreClientThread, StoreErrorTexts
from dist_ckpt.core.comm.rank_messages import (
    Failure,
    HeartbeatSender,
    NoAnswerError,
    RankLocation,
    unpack,
)
from dist_ckpt.core.runtime.processes import running_time
from dist_ckpt.errors import RankError
from dist_ckpt.message_text import listed, ranks_text
from dist_ckpt.settings import Settings

_log = logging.getLogger("dist_ckpt")

T = TypeVar("T")

# A rank sends this many heartbeats in one timeout.
HEARTBEATS_PER_TIMEOUT = 5

STALE = (
    "the job's key-value store holds messages of another job or of an earlier start of this one. "
    "Give every start a store of its own (torchrun does), and restart the job"
)


class ExchangeState:
    """The common state of both sides of an exchange, coordinator and participant.

    `token` identifies the operation from its first answer on; until then it is "".
    `exchange_number` counts the exchanges of the operation; `phase` names the current exchange.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        location: RankLocation,
        settings: Settings,
        texts: StoreErrorTexts,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = location.host
        self.settings = settings
        self.call = ""
        self.token = ""
        self.phase = ""
        self.exchange_number = 0
        self.heartbeat = HeartbeatSender(location.host, location.process)
        self._witness = ProcessWitness(location.process)
        self.client = StoreClientThread(
            store,
            self.heartbeat,
            period_s=settings.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT,
            stall_timeout_s=settings.heartbeat_timeout_s,
            texts=texts,
            after_beat=self._witness,
        )
        self._texts = texts
        self.detector = FailureDetector(self.client, self._beat_key, settings, self._witness)
        self.nbytes_put = 0
        # How long to wait for a rank that was never seen.
        self.unseen_timeout_s = settings.join_timeout_s
        # Why ranks outside the operation will not enter it, "" if they may.
        self.absence_reason = ""
        self._start = 0

    @property
    def operation_number(self) -> int:
        """The number of the current operation of this rank, or of its last one."""
        return self.heartbeat.number

    def enter_operation(self, number: int) -> None:
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
            self._witness.prefix = str(self._start)
            self.heartbeat.key = self._beat_key(self.rank)
        # Set the number last: a heartbeat in between must not show that the operation was left.
        self.heartbeat.inside, self.heartbeat.failed_turn = True, 0
        self.heartbeat.number = number
        self.client.send_heartbeat()

    def skip_missed_operations(self) -> None:
        """Count the operations that the coordinator has begun without this rank."""
        if (beat := self.detector.last_heartbeat(COORDINATOR)) is not None:
            self.heartbeat.number = max(self.operation_number, beat.number - beat.inside)

    def linger(self, timeout_s: float) -> None:
        """Wait until the other live ranks have read the last answer, at most for this time.

        The store may end with the coordinator's process. The other ranks need not wait.
        """
        until = running_time() + timeout_s
        late = list(range(1, self.world_size)) if self.rank == COORDINATOR else []
        with suppress(NoAnswerError):
            while self.operation_number and late and running_time() < until:
                self.detector.read_heartbeats(late)
                late = [
                    rank
                    for rank in late
                    if self.detector.is_waiting(rank, self.operation_number, self.exchange_number)
                ]
                time.sleep(0.005 if late else 0)

    def key(self, sender: int | str) -> str:
        """Return the key of an envelope or answer of the current exchange."""
        return f"{self._start}/{self.operation_number}/{self.exchange_number}/{sender}"

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
                f"in place of a message of {self.detector.describe_ranks([rank])} the store has "
                f"{error} ({self._location_text()}). {self._texts.strange}"
            )
            raise kind(message, rank=rank, phase=self.phase) from error

    def failed_ranks(self, ranks: Sequence[int]) -> dict[int, Failure]:
        """Return a failure for each of these ranks from which nothing more will come."""
        failures = {}
        for rank in ranks:
            loss = self.detector.find_loss(rank, self.operation_number, was_in=bool(self.token))
            remedy = self._texts.lost
            if self.detector.has_invalid_heartbeat(rank):
                loss = "has an invalid heartbeat in the store"
                remedy = self._texts.strange
            if loss is not None:
                name = self.detector.describe_ranks([rank])
                message = f"{name} {loss} ({self._location_text()}). {remedy}"
                failures[rank] = Failure("RankError", message, rank, self.phase)
            elif (lateness := self.detector.find_lateness(rank)) and self.detector.log_once(rank):
                name = self.detector.describe_ranks([rank])
                location, limit_s = self._location_text(), self.settings.late_timeout_s
                _log.warning("%s %s (%s); the limit is %g s", name, lateness, location, limit_s)
        return failures

    def _location_text(self) -> str:
        return f"seen by rank {self.rank} in phase {self.phase!r} of {self.call}"

    def mismatched_calls(
        self, calls: Mapping[int, tuple[str, str]], *, has_all: bool = True
    ) -> dict[int, Failure]:
        """Return a failure with their names if ranks are in different phases.

        With all ranks, the decision of the exchange compares the calls. Without `has_all` the
        coordinator cannot decide yet, so different calls are a failure here.
        """
        by_place = defaultdict(list)
        for rank, (call, phase) in sorted(calls.items()):
            by_place["" if has_all else call, phase].append(rank)
        if len(by_place) == 1:
            return {}
        self.detector.read_heartbeats(range(self.world_size))  # for the names of hosts
        places = [
            f"{self.detector.describe_ranks(ranks)}: {calls[ranks[0]][0]}, phase {name!r}"
            for (_, name), ranks in by_place.items()
        ]
        if absent := [rank for rank in range(self.world_size) if rank not in calls]:
            places.append(f"{self.detector.describe_ranks(absent)}: nothing yet")
        message = (
            f"the ranks of the group are in different calls: {listed(places, '; ')}. "
            f"{self._texts.mixed}"
        )
        odd = [*by_place.values()][1][0]
        return {odd: Failure("RankError", message, odd, self.phase)}

    def missing_ranks(self, ranks: Sequence[int], poll: PollInterval) -> dict[int, Failure]:
        """Return a failure if some of these ranks have not entered in time.

        For a rank that was never seen the limit is `join_timeout_s`, for a live one
        `late_timeout_s`. After `join_warning_s` one warning with their names is logged.
        """
        beats = {rank: self.detector.last_heartbeat(rank) for rank in ranks}
        absent = [
            rank for rank, beat in beats.items() if not beat or beat.number < self.operation_number
        ]
        if self.token or not absent:
            return {}
        message = f"{self.detector.describe_ranks(absent)} did not call {self.call}: "
        if self.absence_reason:
            message += self.absence_reason
            return {absent[0]: Failure("RankError", message, absent[0], self.phase)}
        message += (
            f"rank {self.rank} (host {self.host}) has waited for {poll.waited_s:.3g} s. "
            f"{self._texts.absent}"
        )
        if lateness := next(filter(None, map(self.detector.find_lateness, absent)), ""):
            message += f" It {lateness}."
        is_late = poll.waited_s >= self.settings.late_timeout_s
        overdue = absent if is_late else [rank for rank in absent if beats[rank] is None]
        if overdue and poll.waited_s >= self.unseen_timeout_s:
            if poll.waited_s >= self.settings.join_timeout_s:
                message = self._stale_ranks_text(absent) or message
            return {overdue[0]: Failure("RankError", message, overdue[0], self.phase)}
        if poll.waited_s >= self.settings.join_warning_s and not poll.has_warned:
            poll.has_warned = True
            limit_s = self.unseen_timeout_s if overdue else self.settings.late_timeout_s
            _log.warning("%s This rank waits up to %g s", message, limit_s)
        return {}

    def _stale_ranks_text(self, ranks: Sequence[int]) -> str:
        keys = [f"starts/{rank}" for rank in ranks]
        counts = self.client.call(
            lambda store: [client_thread.read_counter(store, key) for key in keys]
        )
        fresh = (b"", str(self._start).encode())
        stale_ranks = [rank for rank, num in zip(ranks, counts, strict=True) if num not in fresh]
        if not stale_ranks:
            return ""
        return f"rank {self.rank} cannot exchange with {ranks_text(stale_ranks)}: {STALE}"
