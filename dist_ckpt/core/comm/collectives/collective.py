"""The bulk collectives, for data that is too large for the control channel, such as inventories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import xxhash

from dist_ckpt.reports import IoCount

T = TypeVar("T")

# Identifies a payload among all ranks' payloads: its xxh3-128, and its size in 8 bytes.
NAME_NBYTES = 24

# The distinct payloads, each with the ranks that sent it.
DistinctPayloads = tuple[tuple[bytes, tuple[int, ...]], ...]


class Transfer(Protocol):
    """Bytes on their way from one rank to another."""

    def wait(self) -> None:
        """Wait until the bytes have arrived or are sent. RankError if the connections fail.

        Another thread must watch the other rank: see `Channel.watch`.
        """


class Collective(Protocol):
    """A group's bulk collectives: every rank makes the same calls in the same order.

    A call that fails raises RankError, ends the connections, and adds 1 to this rank's
    `generation`, the number of its connections. Before the next call, all ranks must agree on the
    highest generation over the control channel, and call `renew` with it. Each call is in an
    exchange, where ranks that wait see the failure of another.

    `calls` counts the calls so far, and the bytes that this rank has sent in them.
    """

    rank: int
    world_size: int
    generation: int
    calls: IoCount

    def renew(self, generation: int) -> None:
        """Use connections of this number from now on; do nothing if they are in use."""

    def all_gather_distinct(self, payload: bytes) -> DistinctPayloads:
        """Return all distinct payloads with the ranks that sent them, lowest rank first."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Return the bytes of rank 0; the argument of other ranks is ignored."""

    def send(self, rank: int, data: memoryview, tag: int) -> Transfer:
        """Begin to send bytes to one rank, which calls `receive` with the same tag.

        Not a collective: only the two ranks call it, from any thread. An earlier collective must
        have made the connections. Do not change `data` until the transfer is over.
        """

    def receive(self, rank: int, data: memoryview, tag: int) -> Transfer:
        """Begin to fill `data` with bytes that a rank sends; see `send`."""

    def break_off(self) -> None:
        """End the connections: every transfer fails immediately, on every rank. Never raises."""

    def close(self) -> None:
        """Close the connections. Never raises."""


def payload_name(payload: bytes) -> bytes:
    """Return the name that identifies a payload."""
    return xxhash.xxh3_128_digest(payload) + len(payload).to_bytes(8, "little")


def payload_nbytes(name: bytes) -> int:
    """Return the size of the payload that has this name."""
    return int.from_bytes(name[16:], "little")


def ranks_by_value(values: Iterable[T]) -> dict[T, tuple[int, ...]]:
    """Return the distinct values, each with the ranks that sent it, by their lowest ranks."""
    ranks: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return {value: tuple(senders) for value, senders in ranks.items()}


class SingleProcessCollective:
    """The collectives of a single process."""

    rank = 0
    world_size = 1
    generation = 0

    def __init__(self) -> None:
        self.calls = IoCount()

    def renew(self, generation: int) -> None:
        """Do nothing: a single process has no connections."""

    def all_gather_distinct(self, payload: bytes) -> DistinctPayloads:
        """Return the one payload."""
        self.calls = self.calls.plus(0)
        return ((payload, (0,)),)

    def broadcast(self, data: bytes | None) -> bytes:
        """Return the bytes."""
        assert data is not None
        self.calls = self.calls.plus(0)
        return data

    def send(self, rank: int, data: memoryview, tag: int) -> Transfer:
        """Raise AssertionError."""
        raise AssertionError("a single process has no other rank")

    def receive(self, rank: int, data: memoryview, tag: int) -> Transfer:
        """Raise AssertionError."""
        raise AssertionError("a single process has no other rank")

    def break_off(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
