"""The bulk collectives: what is too large for the control channel, such as inventories.

Collective: every rank of the group makes the same calls in the same order. Besides, two ranks can
send bytes from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import xxhash

from dist_ckpt.reports import IoCount

T = TypeVar("T")

# A body's name among all ranks' bodies: its xxh3-128 and its size, 8 bytes.
NAME_NBYTES = 24

# What every rank gets: the distinct bodies, each with the ranks that gave it.
Bodies = tuple[tuple[bytes, tuple[int, ...]], ...]


class Transfer(Protocol):
    """Bytes on their way from one rank to another."""

    def wait(self) -> None:
        """Wait until the bytes are there, or gone; RankError if the connections fail."""


class Collective(Protocol):
    """A group's bulk collectives. A call that fails raises RankError and burns the connections.

    After that, and only then, this rank's `epoch` is one higher; all ranks must agree on the
    highest (over the control channel) and call `renew` with it before the next call.
    """

    @property
    def rank(self) -> int:
        """This rank, counted within the group."""

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""

    @property
    def epoch(self) -> int:
        """The number of the connections that the next call uses."""

    @property
    def calls(self) -> IoCount:
        """The calls so far, and the bytes that this rank has given to the others in them."""

    def renew(self, epoch: int) -> None:
        """Use connections of this number from now on; does nothing if they are in use."""

    def all_gather_distinct(self, body: bytes) -> Bodies:
        """Return all distinct bodies with the ranks that gave them, lowest rank first."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Return the bytes that rank 0 gave; what the others give is ignored."""

    def send(self, rank: int, data: memoryview, tag: int) -> Transfer:
        """Begin to send bytes to one rank, which calls `receive` with the same tag.

        No collective: only the two ranks call. Any thread may; the connections are there since an
        earlier call. `data` stays as it is until the transfer is over.
        """

    def receive(self, rank: int, data: memoryview, tag: int) -> Transfer:
        """Begin to fill `data` with as many bytes that a rank sends; see `send`."""

    def break_off(self) -> None:
        """Burn the connections, so that every transfer fails at once, on every rank. Never raises.

        For who has begun transfers, or is awaited in some, and cannot go on.
        """

    def close(self) -> None:
        """Close the connections. Never raises."""


def name_of(body: bytes) -> bytes:
    """Return the name by which ranks tell bodies apart."""
    return xxhash.xxh3_128_digest(body) + len(body).to_bytes(8, "little")


def nbytes_of(name: bytes) -> int:
    """Return the size of the body that has this name."""
    return int.from_bytes(name[16:], "little")


def distinct(told: Iterable[T]) -> dict[T, tuple[int, ...]]:
    """Return what ranks tell, each with those that tell it, in the order of their lowest ranks."""
    ranks: dict[T, list[int]] = {}
    for rank, one in enumerate(told):
        ranks.setdefault(one, []).append(rank)
    return {one: tuple(who) for one, who in ranks.items()}


class SingleProcessCollective:
    """The collectives of a world of one."""

    rank = 0
    world_size = 1
    epoch = 0

    def __init__(self) -> None:
        self.calls = IoCount()

    def renew(self, epoch: int) -> None:
        """Do nothing: there are no connections."""

    def all_gather_distinct(self, body: bytes) -> Bodies:
        """Return the one body."""
        self.calls = self.calls.plus(0)
        return ((body, (0,)),)

    def broadcast(self, data: bytes | None) -> bytes:
        """Return the bytes."""
        assert data is not None
        self.calls = self.calls.plus(0)
        return data

    def send(self, rank: int, data: memoryview, tag: int) -> Transfer:
        """Never called: there is no other rank."""
        raise AssertionError("there is no other rank")

    def receive(self, rank: int, data: memoryview, tag: int) -> Transfer:
        """Never called: there is no other rank."""
        raise AssertionError("there is no other rank")

    def break_off(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
