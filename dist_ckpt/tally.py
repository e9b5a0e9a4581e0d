"""Calls and bytes, counted by the object that they pass through."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tally:
    """How many calls of one kind there were on this rank, and how many bytes went with them."""

    num: int = 0
    nbytes: int = 0

    def plus(self, nbytes: int) -> Tally:
        """Return this with one more call."""
        return Tally(self.num + 1, self.nbytes + nbytes)

    def plus_all(self, more: Tally) -> Tally:
        """Return this with more calls."""
        return Tally(self.num + more.num, self.nbytes + more.nbytes)

    def since(self, earlier: Tally) -> Tally:
        """Return what was added after `earlier`, when this was that."""
        return Tally(self.num - earlier.num, self.nbytes - earlier.nbytes)
