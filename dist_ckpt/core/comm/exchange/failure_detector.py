"""The failure detector: decides from heartbeats which ranks are dead or silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dist_ckpt.config import Config
from dist_ckpt.core.comm.key_value import client_thread
from dist_ckpt.core.comm.key_value.client_thread import StoreClientThread
from dist_ckpt.core.comm.messages import Heartbeat, unpack
from dist_ckpt.errors import ranks_text

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
        self._silence_s = config.heartbeat_timeout_s
        self._grace_s = min(GRACE_S, config.heartbeat_timeout_s / 4)
        self._most_s = config.heartbeat_timeout_s / 4  # of silence that one look may count
        self._last_seen: dict[int, _LastSeen] = {}

    def look(self, ranks: Sequence[int]) -> None:
        """Read the heartbeats of some ranks once."""
        keys = [self._beat_key(rank) for rank in ranks]
        values = self._client.call(client_thread.get_each, keys)
        for rank, data in zip(ranks, values, strict=True):
            if data is not None:
                self._see(rank, data)

    def _see(self, rank: int, data: bytes) -> None:
        now = time.monotonic()
        last = self._last_seen.get(rank)
        if last is None or last.data != data:
            beat = None
            with suppress(ValueError):  # it is not a heartbeat
                beat = unpack(data, Heartbeat)
            self._last_seen[rank] = _LastSeen(data, beat, now)
            return
        last.silent_s += min(now - last.seen_at, self._most_s)
        last.seen_at = now

    def _beat(self, rank: int) -> Heartbeat | None:
        last = self._last_seen.get(rank)
        return last.beat if last else None

    def _is_silent(self, rank: int) -> bool:
        return self._last_seen[rank].silent_s >= self._silence_s

    def is_known(self, rank: int) -> bool:
        """Return True if a rank was ever seen."""
        return self._beat(rank) is not None

    def has_invalid_heartbeat(self, rank: int) -> bool:
        """Return True if a rank's heartbeat is not a valid one."""
        return rank in self._last_seen and self._beat(rank) is None

    def has_entered(self, rank: int, number: int) -> bool:
        """Return True if a rank was seen to have entered this operation."""
        beat = self._beat(rank)
        return beat is not None and beat.number >= number

    def is_waiting(self, rank: int, number: int, turn: int) -> bool:
        """Return True if a rank was last seen alive within this operation.

        A rank that received the failure of this turn's exchange does not wait any more.
        """
        beat = self._beat(rank)
        return (
            beat is not None
            and (beat.number, beat.inside, beat.gone) == (number, True, False)
            and beat.failed_turn < turn
            and not self._is_silent(rank)
        )

    def loss(self, rank: int, number: int, *, was_in: bool) -> str | None:
        """Return why a rank is lost for this operation, or None; `was_in`: it had entered it."""
        beat = self._beat(rank)
        if beat is None:
            return None
        if beat.gone:
            return "has ended"
        if self._is_silent(rank):
            return f"is dead or frozen: no heartbeat for {self._silence_s:g} s"
        if beat.number > number or (beat.number == number and not beat.inside):
            return "is no longer taking part: it raised an error or was interrupted"
        if was_in and beat.number < number:
            return "has restarted"
        return None

    def last_number(self, rank: int, default: int) -> int:
        """Return the operation before the one that a rank is in, or will enter next."""
        beat = self._beat(rank)
        return default if beat is None else max(default, beat.number - beat.inside)

    def newer(self, ranks: Sequence[int], number: int) -> int | None:
        """Return a later operation that one of these ranks is in or soon enters; None if none."""
        until = time.monotonic() + self._grace_s
        while True:
            self.look(ranks)
            for rank in ranks:
                beat = self._beat(rank)
                if beat is not None and beat.number > number and beat.inside and not beat.gone:
                    return beat.number
            if time.monotonic() >= until:
                return None
            time.sleep(0.02)

    def name(self, ranks: Sequence[int]) -> str:
        """Return the names of ranks, a single one with its host if known: "rank 2 (host b)"."""
        beat = self._beat(ranks[0]) if len(ranks) == 1 else None
        return ranks_text(ranks) + (f" (host {beat.host})" if beat else "")
