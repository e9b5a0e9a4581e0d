"""Ranks that are threads of one process: channels, collectives, and `run_ranks`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dist_ckpt.collective import Bodies, distinct, name_of
from dist_ckpt.config import Config
from dist_ckpt.errors import RankError
from dist_ckpt.store_channel import StoreChannel

T = TypeVar("T")

# Shorter than in a job, but no busy machine stops a rank for so long.
TEST_CONFIG = Config(silence_s=5.0, arrive_s=20.0, warn_s=10.0, appear_s=5.0)

# A TCPStore resets the connection of who sends more.
MAX_VALUE_NBYTES = 8 << 20


class ThreadStore:
    """A key-value store in memory, with the methods of torch's that the channel uses."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes, /) -> None:
        """Store a value."""
        if len(value) > MAX_VALUE_NBYTES:
            raise ConnectionResetError(f"a value of {len(value)} bytes")
        with self._lock:
            self._values[key] = value

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that exists."""
        with self._lock:
            return self._values[key]

    def check(self, keys: list[str], /) -> bool:
        """Say whether all of these keys exist."""
        with self._lock:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return its new value."""
        with self._lock:
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            return value

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; False if there was none."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def keys(self) -> tuple[str, ...]:
        """Return all keys, sorted."""
        with self._lock:
            return tuple(sorted(self._values))


class ThreadChannel(StoreChannel):
    """The channel of a rank that is a thread: the real one, over a store in memory."""

    def __init__(
        self, store: ThreadStore, rank: int, world_size: int, config: Config = TEST_CONFIG
    ) -> None:
        super().__init__(store, rank, world_size, host=f"thread-{rank}", config=config)


class Meeting:
    """Where the thread ranks of one group exchange bodies."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._barriers: dict[int, threading.Barrier] = {}
        self._given: dict[int, bytes] = {}

    def gather(self, epoch: int, rank: int, body: bytes) -> list[bytes]:
        """Return what all ranks give; RankError if one does not come in time."""
        with self._lock:
            barrier = self._barriers.setdefault(epoch, threading.Barrier(self.world_size))
            self._given[rank] = body
        try:
            barrier.wait(self._timeout_s)
            bodies = [self._given[rank] for rank in range(self.world_size)]
            barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise RankError("the thread ranks did not all meet; look for one that failed") from None
        return bodies


class ThreadCollective:
    """The collectives of a rank that is a thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.world_size = meeting.world_size
        self.epoch = 0
        self._meeting = meeting

    def renew(self, epoch: int) -> None:
        """See `Collective.renew`."""
        self.epoch = epoch

    def close(self) -> None:
        """See `Collective.close`."""

    def all_gather_distinct(self, body: bytes) -> Bodies:
        """See `Collective.all_gather_distinct`."""
        bodies = self._gather(body)
        ranks = distinct([name_of(body) for body in bodies])
        return tuple((bodies[who[0]], who) for who in ranks.values())

    def broadcast(self, data: bytes | None) -> bytes:
        """See `Collective.broadcast`."""
        return self._gather(data or b"")[0]

    def _gather(self, body: bytes) -> list[bytes]:
        try:
            return self._meeting.gather(self.epoch, self.rank, body)
        except RankError:
            self.epoch += 1
            raise


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What one rank's function came to: `error` is None if it returned."""

    value: T | None
    error: BaseException | None


def try_ranks(
    world_size: int,
    function: Callable[[int, ThreadChannel, ThreadCollective], T],
    *,
    config: Config = TEST_CONFIG,
    timeout_s: float = 60.0,
) -> list[Outcome[T]]:
    """Run a function on every rank, each in a thread, and return what each came to.

    A rank's channel is closed when its function ends, as at the end of a process. Raises
    TimeoutError, naming the ranks, if some have not ended after `timeout_s`.
    """
    store, meeting = ThreadStore(), Meeting(world_size, config.silence_s)
    outcomes: list[Outcome[T] | None] = [None] * world_size

    def run(rank: int) -> None:
        channel = ThreadChannel(store, rank, world_size, config)
        try:
            value = function(rank, channel, ThreadCollective(meeting, rank))
            outcomes[rank] = Outcome(value, None)
        except BaseException as error:  # noqa: BLE001 - a thread's outer edge
            outcomes[rank] = Outcome(None, error)
        finally:
            channel.close()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if late:
        raise TimeoutError(f"ranks {late} have not ended after {timeout_s:g} s")
    return [outcome for outcome in outcomes if outcome is not None]


def run_ranks(
    world_size: int,
    function: Callable[[int, ThreadChannel, ThreadCollective], T],
    *,
    config: Config = TEST_CONFIG,
    timeout_s: float = 60.0,
) -> Sequence[T | None]:
    """Run a function on every rank, each in a thread, and return its values in rank order.

    Raises the error of the lowest rank that raised one.
    """
    outcomes = try_ranks(world_size, function, config=config, timeout_s=timeout_s)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]
