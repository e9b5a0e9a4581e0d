"""The bulk collectives: what is too large for the control channel, such as inventories.

Collective: every rank of the group makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import xxhash

# A body's name among all ranks' bodies: its xxh3-128 and its size, 8 bytes.
NAME_NBYTES = 24

# What every rank gets: the distinct bodies, each with the ranks that gave it.
Bodies = tuple[tuple[bytes, tuple[int, ...]], ...]


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

    def renew(self, epoch: int) -> None:
        """Use connections of this number from now on; does nothing if they are in use."""

    def all_gather_distinct(self, body: bytes) -> Bodies:
        """Return all distinct bodies with the ranks that gave them, lowest rank first."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Return the bytes that rank 0 gave; what the others give is ignored."""

    def close(self) -> None:
        """Close the connections. Never raises."""


def name_of(body: bytes) -> bytes:
    """Return the name by which ranks tell bodies apart."""
    return xxhash.xxh3_128_digest(body) + len(body).to_bytes(8, "little")


def nbytes_of(name: bytes) -> int:
    """Return the size of the body that has this name."""
    return int.from_bytes(name[16:], "little")


def distinct(names: Sequence[bytes]) -> dict[bytes, tuple[int, ...]]:
    """Return the ranks of each name, in the order of their lowest ranks."""
    ranks: dict[bytes, tuple[int, ...]] = {}
    for rank, name in enumerate(names):
        ranks[name] = (*ranks.get(name, ()), rank)
    return ranks


class AloneCollective:
    """The collectives of a world of one."""

    rank = 0
    world_size = 1
    epoch = 0

    def renew(self, epoch: int) -> None:
        """Do nothing: there are no connections."""

    def all_gather_distinct(self, body: bytes) -> Bodies:
        """Return the one body."""
        return ((body, (0,)),)

    def broadcast(self, data: bytes | None) -> bytes:
        """Return the bytes."""
        assert data is not None
        return data

    def close(self) -> None:
        """Do nothing."""
