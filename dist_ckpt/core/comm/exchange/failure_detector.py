"""Detect dead and silent ranks by their heartbeats, and pace the polls of a wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dist_ckpt.config import Config
from dist_ckpt.core.comm.key_value import client_thread
from dist_ckpt.core.comm.key_value.client_thread import StoreClientThread
from dist_ckpt.core.comm.messages import Heartbeat, unpack
from dist_ckpt.core.runtime.process import running_time
from dist_ckpt.errors import ranks_text

# With more ranks, each rank polls less often, since all of them use one store.
MAX_POLLS_PER_S = 20_000

# A pause lasts this share of the time waited so far. So a wait is at most this share too long.
OVERSHOOT = 0.15


class PollInterval:
    """The intervals of one wait: polls become rarer; heartbeats are read at regular intervals."""

    def __init__(self, world_size: int, config: Config) -> None:
        self._max_pause_s = max(0.02, world_size / MAX_POLLS_PER_S)
        self._min_pause_s = max(0.0003, self._max_pause_s / 100)
        joining_s = min(config.join_warning_s / 2, config.join_timeout_s / 4)
        self._look_s = min(1.0, config.heartbeat_timeout_s / 10, joining_s)
        self._began_at = running_time()
        self._look_at = self._began_at + self._look_s
        self._compare_s, self._compare_at = config.join_warning_s, config.join_warning_s
        self.has_warned = False

    @property
    def waited_s(self) -> float:
        """How long the wait has lasted."""
        return running_time() - self._began_at

    def pause(self) -> None:
        """Sleep until the next poll."""
        time.sleep(min(max(self._min_pause_s, OVERSHOOT * self.waited_s), self._max_pause_s))

    def is_look_due(self) -> bool:
        """Return True, at intervals, if it is time to read the heartbeats."""
        now = running_time()
        if now < self._look_at:
            return False
        self._look_at = now + self._look_s
        return True

    def is_compare_due(self) -> bool:
        """Return True, each `join_warning_s`, if it is time to compare the calls of the ranks."""
        if self.waited_s < self._compare_at:
            return False
        self._compare_at = self.waited_s + self._compare_s
        return True


# How long a rank that missed an operation waits for the others to begin the next one. If they do,
# the rank's own call belongs to the next operation.
GRACE_S = 1.0


@dataclass(slots=True)
class _LastSeen:
    """A rank's last heartbeat, None if it is not valid, and for how long it has not changed."""

    data: bytes
    beat: Heartbeat | None
    seen_at: float
    silent_s: float = 0.0


class FailureDetector:
    """Detects lost ranks by their heartbeats; `beat_key` returns the key of a rank's heartbeat.

    Silence counts only while this rank watches, and each read adds a limited time. So a pause of
    this process, or of the whole machine, does not make other ranks look dead.
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

    def read_heartbeats(self, ranks: Sequence[int]) -> None:
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

    def last_heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of a rank; None if it was never seen, or is not valid."""
        last = self._last_seen.get(rank)
        return last.beat if last else None

    def has_invalid_heartbeat(self, rank: int) -> bool:
        """Return True if a rank's heartbeat is not a valid one."""
        return rank in self._last_seen and self.last_heartbeat(rank) is None

    def is_waiting(self, rank: int, number: int, turn: int) -> bool:
        """Return True if a rank was last seen alive within this operation.

        A rank that received the failure of this turn's exchange does not wait any more.
        """
        beat = self.last_heartbeat(rank)
        return (
            beat is not None
            and (beat.number, beat.inside, beat.gone) == (number, True, False)
            and beat.failed_turn < turn
            and self._last_seen[rank].silent_s < self._heartbeat_timeout_s
        )

    def find_loss(self, rank: int, number: int, *, was_in: bool) -> str | None:
        """Return why a rank is lost for this operation, or None; `was_in`: the rank had entered."""
        beat = self.last_heartbeat(rank)
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

    def find_newer_operation(self, ranks: Sequence[int], number: int) -> int | None:
        """Return a later operation that one of these ranks is in or soon enters; None if none."""
        until = running_time() + self._grace_s
        while True:
            self.read_heartbeats(ranks)
            for rank in ranks:
                beat = self.last_heartbeat(rank)
                if beat is not None and beat.number > number and beat.inside and not beat.gone:
                    return beat.number
            if running_time() >= until:
                return None
            time.sleep(0.02)

    def describe_ranks(self, ranks: Sequence[int]) -> str:
        """Return the names of ranks, a single one with its host if known: "rank 2 (host b)"."""
        beat = self.last_heartbeat(ranks[0]) if len(ranks) == 1 else None
        return ranks_text(ranks) + (f" (host {beat.host})" if beat else "")
