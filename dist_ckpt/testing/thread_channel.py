"""Ranks that are threads of one process: channels, collectives, and `run_ranks`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dist_ckpt.core.comm.collectives.collective import (
    NAME_NBYTES,
    DistinctPayloads,
    Transfer,
    payload_name,
    ranks_by_value,
)
from dist_ckpt.core.comm.exchange.store_channel import StoreChannel
from dist_ckpt.core.comm.key_value.client_thread import Store
from dist_ckpt.core.comm.rank_messages import RankLocation, SecondaryError
from dist_ckpt.errors import RankError
from dist_ckpt.reports import IoCount
from dist_ckpt.settings import Settings

T = TypeVar("T")

# Shorter than in a job, but longer than a busy machine delays a rank.
TEST_CONFIG = Settings(
    heartbeat_timeout_s=5.0, join_timeout_s=20.0, join_warning_s=10.0, visibility_timeout_s=5.0
)

# The longest time in which a live rank sends or receives bytes.
MAX_TRANSFER_S = 60.0

# A TCPStore resets the connection if a value is larger.
MAX_VALUE_NBYTES = 8 << 20


class ThreadStore:
    """A key-value store in memory, with the methods of a torch store that the channel uses."""

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
        """Return True if all of these keys exist."""
        with self._lock:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return its new value."""
        with self._lock:
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            return value

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it has the expected value, "" for none. Return its value now."""
        with self._lock:
            value = self._values.get(key, b"")
            if value == expected.encode():
                self._values[key] = desired.encode()
            return self._values.get(key, expected.encode())

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; False if there was none."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def keys(self) -> tuple[str, ...]:
        """Return all keys, sorted."""
        with self._lock:
            return tuple(sorted(self._values))


class ThreadChannel(StoreChannel):
    """The channel of a rank that is a thread: the real channel, with a store in memory."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        config: Settings = TEST_CONFIG,
        host: str | None = None,
    ) -> None:
        location = RankLocation(host or f"thread-{rank}")
        super().__init__(store, rank, world_size, location=location, settings=config)


# The route of bytes: generation, sender, receiver, tag.
_Route = tuple[int, int, int, int]


class Meeting:
    """The memory by which the ranks of one group of threads exchange bytes."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._barriers: dict[int, threading.Barrier] = {}
        self._payloads: dict[int, bytes] = {}
        self._changed = threading.Condition()
        self._sent: dict[_Route, bytes] = {}
        self._broken: set[int] = set()

    def gather(self, generation: int, rank: int, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks. SecondaryError if a rank does not arrive in time."""
        with self._lock:
            barrier = self._barriers.setdefault(generation, threading.Barrier(self.world_size))
            self._payloads[rank] = payload
        try:
            barrier.wait(self._timeout_s)
            payloads = [self._payloads[rank] for rank in range(self.world_size)]
            barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise SecondaryError("the thread ranks did not all meet: one has failed") from None
        return payloads

    def give(self, route: _Route, data: bytes) -> None:
        """Send bytes on a route."""
        with self._changed:
            self._sent[route] = data
            self._changed.notify_all()

    def take(self, route: _Route) -> bytes:
        """Receive the bytes of a route. SecondaryError if the generation is broken."""
        with self._changed:
            self._wait(route, lambda: route in self._sent)
            data = self._sent.pop(route)
            self._changed.notify_all()
            return data

    def wait_until_taken(self, route: _Route) -> None:
        """Wait until sent bytes are received. SecondaryError if the generation is broken."""
        with self._changed:
            self._wait(route, lambda: route not in self._sent)

    def break_off(self, generation: int) -> None:
        """Fail all sends and receives of a generation."""
        with self._changed:
            self._broken.add(generation)
            self._changed.notify_all()

    def _wait(self, route: _Route, condition: Callable[[], bool]) -> None:
        is_in_time = self._changed.wait_for(
            lambda: route[0] in self._broken or condition(), MAX_TRANSFER_S
        )
        if route[0] in self._broken or not is_in_time:
            raise SecondaryError("the thread ranks' connections were broken off")


@dataclass(frozen=True, slots=True)
class _ThreadTransfer:
    wait: Callable[[], None]


class ThreadCollective:
    """The collectives of a rank that is a thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.world_size = meeting.world_size
        self.generation = 0
        self.calls = IoCount()
        self._meeting = meeting

    def renew(self, generation: int) -> None:
        """See `Collective.renew`."""
        self.generation = generation

    def close(self) -> None:
        """See `Collective.close`."""

    def all_gather_distinct(self, payload: bytes) -> DistinctPayloads:
        """See `Collective.all_gather_distinct`."""
        payloads = self._gather(payload)
        ranks = ranks_by_value([payload_name(payload) for payload in payloads])
        is_sender = ranks[payload_name(payload)][0] == self.rank
        self.calls = self.calls.plus(NAME_NBYTES + (len(payload) if is_sender else 0))
        return tuple((payloads[senders[0]], senders) for senders in ranks.values())

    def broadcast(self, data: bytes | None) -> bytes:
        """See `Collective.broadcast`."""
        received = self._gather(data or b"")[0]
        self.calls = self.calls.plus(len(received) if self.rank == 0 else 0)
        return received

    def send(self, rank: int, data: memoryview, tag: int) -> Transfer:
        """See `Collective.send`."""
        route = (self.generation, self.rank, rank, tag)
        self._meeting.give(route, bytes(data))
        return _ThreadTransfer(lambda: self._meeting.wait_until_taken(route))

    def receive(self, rank: int, data: memoryview, tag: int) -> Transfer:
        """See `Collective.receive`."""
        route = (self.generation, rank, self.rank, tag)

        def take() -> None:
            data[:] = self._meeting.take(route)

        return _ThreadTransfer(take)

    def break_off(self) -> None:
        """See `Collective.break_off`."""
        self._meeting.break_off(self.generation)
        self.generation += 1

    def _gather(self, payload: bytes) -> list[bytes]:
        try:
            return self._meeting.gather(self.generation, self.rank, payload)
        except RankError:
            self.generation += 1
            raise


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The result of the function on one rank. `error` is None if it returned."""

    value: T | None
    error: BaseException | None


def try_ranks(
    world_size: int,
    function: Callable[[int, ThreadChannel, ThreadCollective], T],
    *,
    config: Settings = TEST_CONFIG,
    timeout_s: float = 60.0,
    hosts: Sequence[str] | None = None,
) -> list[Outcome[T]]:
    """Run a function on every rank, each in a thread, and return the outcome of each.

    `hosts` are the names of the ranks' hosts. By default each rank has a separate host. The channel
    of a rank is closed when its function ends, as at the end of a process. Raises TimeoutError,
    with the ranks, if some have not ended after `timeout_s`.
    """
    store, meeting = ThreadStore(), Meeting(world_size, config.heartbeat_timeout_s)
    outcomes: list[Outcome[T] | None] = [None] * world_size

    def run(rank: int) -> None:
        channel = ThreadChannel(store, rank, world_size, config, hosts[rank] if hosts else None)
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
    config: Settings = TEST_CONFIG,
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
