"""The error for copies of a name that differ between ranks: which, on which ranks, how far apart.

A rank sends digests first. Then the ranks in `requests` send a sample of their copies, if they
still have them. A background writer has only the copies that it stores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dist_ckpt.core.comm.exchange.channel import MAX_EXCHANGE_NBYTES
from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.planning.name_selection import escape_pattern
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.message_text import listed, ranks_text, remedy_of_parts

# So many copies are compared: of the first names that differ, those of the lowest ranks.
_MAX_NAMES = 4
_MAX_COPIES = 8

_BY_BACKGROUND = ". A background save cannot compare them: `dc.save` says how far apart they are"


class CopySample(Message, frozen=True):
    """Some blocks of bytes of one rank's copy of a cell, or the text of a value.

    `offset` is the first element of the cell, whose elements are in row-major order. All copies of
    a cell have the same blocks.
    """

    name: str
    dtype: str
    offset: Shape
    shape: Shape
    block_offsets: tuple[int, ...]
    block_nbytes: int
    data: bytes
    text: str = ""


class CopySamples(Message, frozen=True):
    """What one rank sends."""

    samples: tuple[CopySample, ...]


class CopyComparison(Protocol):
    """Reads this rank's copies of names that differ, and compares those of several ranks."""

    def read(self, names: Sequence[str], nbytes: int) -> tuple[CopySample, ...]:
        """Return samples of this rank's copies, each of at most `nbytes`."""

    def describe(self, samples: Mapping[int, CopySample]) -> str:
        """Return how far apart the copies of one name are, by rank; "" if it is unknown."""


class CopyRequest(Message, frozen=True):
    """The ranks that send a sample of at most `nbytes` of each name."""

    names: tuple[tuple[str, tuple[int, ...]], ...]
    nbytes: int

    def names_of(self, rank: int) -> list[str]:
        """Return the names of which a rank sends a sample."""
        return [name for name, ranks in self.names if rank in ranks]


@dataclass(frozen=True, slots=True)
class UnequalReplicas:
    """The ranks that have each copy of each name that differs, by the digest of the copy."""

    ranks_by_digest: Mapping[str, Mapping[str, Sequence[int]]]

    @staticmethod
    def of(groups_by_rank: Sequence[Mapping[str, Mapping[str, str]]]) -> UnequalReplicas:
        """Compare the digests of all ranks, which are by the groups' ids and names."""
        every: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, groups in enumerate(groups_by_rank):
            for members in groups.values():
                for name, digest in members.items():
                    every[name][digest].append(rank)
        return UnequalReplicas({name: by for name, by in every.items() if len(by) > 1})

    def request(self) -> CopyRequest:
        """Return which ranks send a sample: the lowest of each copy. It fits an exchange."""
        names = tuple(
            (name, tuple(ranks[0] for ranks in by_digest.values())[:_MAX_COPIES])
            for name, by_digest in [*self.ranks_by_digest.items()][:_MAX_NAMES]
        )
        num_copies = sum(len(ranks) for _, ranks in names)
        return CopyRequest(names, MAX_EXCHANGE_NBYTES // (num_copies + 1))

    def describe(
        self, samples_by_rank: Sequence[Sequence[CopySample]], comparison: CopyComparison
    ) -> dict[str, str]:
        """Return how far apart the copies are, by name."""
        by_name: dict[str, dict[int, CopySample]] = defaultdict(dict)
        for rank, samples in enumerate(samples_by_rank):
            for sample in samples:
                by_name[sample.name][rank] = sample
        return {name: comparison.describe(samples) for name, samples in by_name.items()}

    def error_text(self, distances: Mapping[str, str] | None) -> str:
        """Return the error text. `distances` is None if the copies cannot be compared."""
        unequal = [
            f"{name} ({' differs from '.join(map(ranks_text, by_digest.values()))}"
            f"{'; ' if (distance := (distances or {}).get(name)) else ''}{distance or ''})"
            for name, by_digest in self.ranks_by_digest.items()
        ]
        remedy = remedy_of_parts(
            self.ranks_by_digest, "wrap values that differ by design in dc.PerRank"
        )
        return (
            f"ranks hold different values under the same name: {listed(unequal, '; ')}. A name is "
            f"stored once, so its value must be equal on all ranks: broadcast the value first, or "
            f"{remedy}. To save in spite of this, choose which copy is stored: "
            f'{self._replicas_option()} for the copy of the lowest rank, or "mean" or '
            f'"per_rank"{_BY_BACKGROUND if distances is None else ""}'
        )

    def _replicas_option(self) -> str:
        """Return the option `replicas` for the first name. Cells have names with [...]."""
        name = next(iter(self.ranks_by_digest), "")
        return f'replicas={{{escape_pattern(name.rpartition("[")[0] or name)!r}: "rank0"}}'
