"""One rank's end of the control channel: where it is, whom it waits for, and what is lost.

Keys are `<start>/<number>/<turn>/<rank>` for envelopes and `<start>/<number>/<turn>/answer`: the
number counts the group's operations, the turn an operation's exchanges, the start how often the
ranks have begun to use the store. None of it names what a rank does, so that ranks which do
different things meet, and find out.
Nothing waits in the store: every wait is a loop of this rank's, which watches the heartbeats of
those that it waits for.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from dist_ckpt.config import Config
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.key_value import client_thread
from dist_ckpt.core.comm.key_value.client_thread import (
    JOB_STORE_TEXTS,
    Store,
    StoreClientThread,
    StoreErrorTexts,
)
from dist_ckpt.core.comm.liveness.failure_detector import FailureDetector
from dist_ckpt.core.comm.liveness.heartbeat import HeartbeatSender
from dist_ckpt.core.comm.messages import Failure, NoAnswerError, unpack
from dist_ckpt.errors import RankError, listed, ranks_text

_log = logging.getLogger("dist_ckpt")

T = TypeVar("T")

# With more ranks each polls less often: all of them ask one store.
MAX_POLLS_PER_S = 20_000

STALE = (
    "the job's key-value store holds messages of another job or of an earlier start of this one. "
    "Give every start a store of its own (torchrun does), and restart the job"
)

# What a wait may take longer than what it waits for: polls grow rarer with the time waited.
OVERSHOOT = 0.15


class PollInterval:
    """The rhythm of one wait: polls that grow rarer, and now and then a look at the heartbeats."""

    def __init__(self, world_size: int, config: Config) -> None:
        self._rarest_s = max(0.02, world_size / MAX_POLLS_PER_S)
        self._least_s = max(0.0003, self._rarest_s / 100)
        self._look_s = min(
            1.0,
            config.heartbeat_timeout_s / 10,
            config.join_warning_s / 2,
            config.join_timeout_s / 4,
        )
        self._began_at = time.monotonic()
        self._look_at = self._began_at + self._look_s
        self.has_warned = False

    @property
    def waited_s(self) -> float:
        """How long the wait has lasted."""
        return time.monotonic() - self._began_at

    def pause(self) -> None:
        """Sleep until the next poll."""
        time.sleep(min(max(self._least_s, OVERSHOOT * self.waited_s), self._rarest_s))

    def is_time_to_look(self) -> bool:
        """Say, from time to time, that the heartbeats are due for a look."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + self._look_s
        return True


class ExchangeState:
    """What the coordinator's and the other ranks' sides of an exchange have in common.

    `token` identifies the operation from its first answer on; until then it is "". `turn` counts
    its exchanges, and `phase` is the name of the one that it is in.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        host: str,
        config: Config,
        wording: StoreErrorTexts = JOB_STORE_TEXTS,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = host
        self.config = config
        self.what = ""
        self.token = ""
        self.phase = ""
        self.turn = 0
        self.heart = HeartbeatSender(host)
        self.line = StoreClientThread(
            store,
            self.heart,
            period_s=config.heartbeat_timeout_s / 5,
            stall_timeout_s=config.heartbeat_timeout_s,
            wording=wording,
        )
        self._wording = wording
        self.peers = FailureDetector(self.line, self._beat_key, config)
        self.nbytes_put = 0
        # How long to wait for a rank that was never seen.
        self.unseen_s = config.join_timeout_s
        # Why those that have not entered the operation will not, "" if they may.
        self.absent = ""
        self._start = 0

    @property
    def number(self) -> int:
        """The number of the operation that this rank is in, or was in last."""
        return self.heart.number

    def begin(self, number: int) -> None:
        """Enter an operation, and let the others see it."""
        if not self._start:
            # A store may outlive a process group, and hold what an earlier one has left in it.
            self._start = self._count_start()
            self.heart.key = self._beat_key(self.rank)
        # The number last: a beat that comes in between must not say that it was left already.
        self.heart.inside, self.heart.told = True, 0
        self.heart.number = number
        self.line.beat()

    def catch_up(self) -> None:
        """Count the operations that the coordinator has begun since, without this rank."""
        self.heart.number = self.peers.last_number(COORDINATOR, self.number)

    def no_answer(self, message: str) -> NoAnswerError:
        """Return the error of a rank that cannot know what was decided."""
        return NoAnswerError(message, rank=COORDINATOR, phase=self.phase)

    def _count_start(self) -> int:
        key = f"starts/{self.rank}"
        try:
            return self.line.call(client_thread.increment, key)
        except ValueError as error:
            raise RankError(
                f"where the starts of rank {self.rank} are counted the store has {error}. "
                f"{self._wording.strange}",
                rank=self.rank,
            ) from error

    def linger(self, most_s: float) -> None:
        """Wait, at most for so long, until the others that live have read the last answer.

        The store may go with the coordinator's process. Nobody waits for the other ranks.
        """
        until = time.monotonic() + most_s
        late = list(range(1, self.world_size)) if self.rank == COORDINATOR else []
        with suppress(NoAnswerError):
            while self.number and late and time.monotonic() < until:
                self.peers.look(late)
                late = [
                    rank for rank in late if self.peers.is_waiting(rank, self.number, self.turn)
                ]
                time.sleep(0.005 if late else 0)

    def key(self, who: int | str) -> str:
        """Return the key of an envelope or answer of the exchange that this rank is in."""
        return f"{self._start}/{self.number}/{self.turn}/{who}"

    def _beat_key(self, rank: int) -> str:
        return f"{self._start}/beat/{rank}"

    def put(self, key: str, data: bytes) -> None:
        """Store a document."""
        self.nbytes_put += len(data)
        self.line.call(client_thread.put, key, data)

    def unpack(self, rank: int, data: bytes, expected: type[T]) -> T:
        """Decode a message of a rank's that the store had. RankError if it is none of this class.

        Who is told by it what was decided does not know that then: NoAnswerError.
        """
        try:
            return unpack(data, expected)
        except ValueError as error:
            kind = RankError if self.rank == COORDINATOR else NoAnswerError
            message = (
                f"in place of a message of {self.peers.name([rank])} the store has {error} "
                f"({self._seen()}). {self._wording.strange}"
            )
            raise kind(message, rank=rank, phase=self.phase) from error

    def failed_ranks(self, ranks: Sequence[int]) -> dict[int, Failure]:
        """Return a failure for each of these ranks of which nothing more will come."""
        found = {}
        for rank in ranks:
            loss = self.peers.loss(rank, self.number, was_in=bool(self.token))
            remedy = self._wording.lost
            if self.peers.is_strange(rank):
                loss = "has a heartbeat in the store that is none of ours"
                remedy = self._wording.strange
            if loss is not None:
                message = f"{self.peers.name([rank])} {loss} ({self._seen()}). {remedy}"
                found[rank] = Failure("RankError", message, rank, self.phase)
        return found

    def _seen(self) -> str:
        return f"seen by rank {self.rank} in phase {self.phase!r} of {self.what}"

    def mismatched_calls(self, calls: Mapping[int, tuple[str, str]]) -> Failure | None:
        """Return a failure if ranks are in different calls or phases, which it names.

        `calls` are for each rank its call and its phase.
        """
        who = defaultdict(list)
        for rank, call in sorted(calls.items()):
            who[call[1]].append(rank)
        if len(who) == 1:
            return None
        self.peers.look(range(self.world_size))  # for the names of hosts
        told = [
            f"{self.peers.name(ranks)}: {calls[ranks[0]][0]}, phase {name!r}"
            for name, ranks in who.items()
        ]
        if absent := [rank for rank in range(self.world_size) if rank not in calls]:
            told.append(f"{self.peers.name(absent)}: nothing yet")
        message = (
            f"the ranks of the group are in different calls: {listed(told, '; ')}. "
            f"{self._wording.mixed}"
        )
        odd = next(rank for rank in sorted(calls) if calls[rank][1] != self.phase)
        return Failure("RankError", message, odd, self.phase)

    def missing_ranks(self, ranks: Sequence[int], pace: PollInterval) -> dict[int, Failure]:
        """Return a failure if some of these ranks have not entered within `join_timeout_s`.

        Before that, after `join_warning_s`, one warning is logged that names them.
        """
        absent = [rank for rank in ranks if not self.peers.has_entered(rank, self.number)]
        if self.token or not absent:
            return {}
        if self.absent:
            return {absent[0]: Failure("RankError", self.absent, absent[0], self.phase)}
        message = (
            f"{self.peers.name(absent)} did not call {self.what}: rank {self.rank} (host "
            f"{self.host}) has waited for {pace.waited_s:.3g} s. {self._wording.absent}"
        )
        if pace.waited_s >= self.config.join_timeout_s:
            message = self._astray(absent) or message
            return {absent[0]: Failure("RankError", message, absent[0], self.phase)}
        if pace.waited_s >= self.unseen_s:
            for rank in absent:
                if not self.peers.is_known(rank):
                    return {rank: Failure("RankError", message, rank, self.phase)}
        if pace.waited_s >= self.config.join_warning_s and not pace.has_warned:
            pace.has_warned = True
            _log.warning("%s", message)
        return {}

    def _astray(self, ranks: Sequence[int]) -> str:
        """Say which of these ranks cannot be met, as they count another start; "" if none."""
        keys = [f"starts/{rank}" for rank in ranks]
        counts = self.line.call(lambda store: [client_thread.counted(store, key) for key in keys])
        stale_ranks = [
            rank
            for rank, count in zip(ranks, counts, strict=True)
            if count not in (b"", str(self._start).encode())
        ]
        if not stale_ranks:
            return ""
        return f"{ranks_text(stale_ranks)} cannot be met by rank {self.rank}: {STALE}"
