"""Plan shared reads: which rank fetches blocks that several ranks need, and where it sends them.

Each rank sends the numbers of the blocks that it needs of each file, in the order of the header.
From these numbers every rank computes the same shared ranges of the files that it reads. It does
not need the headers of other files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap

from dist_ckpt.core.runtime.typed_msgpack import Message

# The size of one fetch. It is large enough for the full speed of the storage, and still in a
# processor's cache when other ranks copy it (docs/decisions/0008).
SHARED_RANGE_NBYTES = 4 << 20

# Ranges of block numbers, ascending and not adjacent.
BlockRanges = tuple[range, ...]

# Identifies a shared range: its file and its first block.
RangeKey = tuple[int, int]


class RankBlockRequests(Message, frozen=True):
    """The blocks that one rank needs of each file, by the number of the file in the index.

    `gaps_and_lengths` has the gap before each range and its length in turn: small numbers.
    """

    host: str
    gaps_and_lengths: dict[int, tuple[int, ...]]

    @staticmethod
    def of(host: str, ranges: Mapping[int, Iterable[range]]) -> RankBlockRequests:
        """Return the requests for these ranges of blocks of each file."""
        gaps_and_lengths = {}
        for file, file_ranges in sorted(ranges.items()):
            edges = [0, *(edge for blocks in file_ranges for edge in (blocks.start, blocks.stop))]
            gaps_and_lengths[file] = tuple(stop - start for start, stop in pairwise(edges))
        return RankBlockRequests(host, gaps_and_lengths)

    def block_ranges(self, file: int) -> BlockRanges:
        """Return the ranges of blocks of a file, or () if the rank needs none."""
        edges = list(accumulate(self.gaps_and_lengths.get(file, ())))
        return tuple(starmap(range, zip(edges[::2], edges[1::2], strict=True)))


@dataclass(frozen=True, slots=True)
class SharedBlockRange:
    """Adjacent blocks of one file that the same two or more ranks need.

    `ranks_by_host` has these ranks. The first rank of each host sends the range to the other ranks
    there. The first rank of the first host fetches the range, and sends it to the other hosts.
    """

    file: int
    blocks: range
    ranks_by_host: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> RangeKey:
        """The key of the range among all shared ranges of a load."""
        return self.file, self.blocks.start

    @property
    def fetcher(self) -> int:
        """The rank that reads the range from storage."""
        return self.ranks_by_host[0][0]

    @property
    def agents(self) -> tuple[int, ...]:
        """The ranks that receive the range from the fetcher, one for each other host."""
        return tuple(ranks[0] for ranks in self.ranks_by_host[1:])

    def ranks_on_host_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the host of a rank. The first sends the range to the others."""
        return next(ranks for ranks in self.ranks_by_host if rank in ranks)


def has_shared_blocks(requests: Iterable[RankBlockRequests], *, between_hosts: bool) -> bool:
    """Return True if several ranks of one host, or of any hosts, need the same block."""
    ranges = [
        ("" if between_hosts else rank_requests.host, file, blocks.start, blocks.stop)
        for rank_requests in requests
        for file in rank_requests.gaps_and_lengths
        for blocks in rank_requests.block_ranges(file)
    ]
    ranges.sort()
    return any(a[:2] == b[:2] and a[3] > b[2] for a, b in pairwise(ranges))


def find_shared_ranges(
    file: int, starts: Sequence[int], requests_by_rank: Mapping[int, RankBlockRequests]
) -> tuple[SharedBlockRange, ...]:
    """Return the shared ranges of a file, in order.

    `starts` has the start of each block, and the end of the last. Each file balances the bytes of
    its fetches. With equal bytes, the fetcher depends on the number of the file.
    """
    host_of = {
        rank: rank_requests.host
        for rank, rank_requests in requests_by_rank.items()
        if file in rank_requests.gaps_and_lengths
    }
    balance = _FetchBalance(file, host_of)
    segments = list(
        _cut_segments({rank: requests_by_rank[rank].block_ranges(file) for rank in balance.host_of})
    )
    for blocks, ranks in segments:
        if len(ranks) == 1:
            balance.fetched[ranks[0]] += starts[blocks.stop] - starts[blocks.start]
    shared_ranges = []
    for blocks, ranks in segments:
        if len(ranks) > 1:
            shared_ranges += [
                balance.assign(part, starts, ranks) for part in _cut_blocks(blocks, starts)
            ]
    return tuple(shared_ranges)


def find_partners(rank: int, shared_ranges: Iterable[SharedBlockRange]) -> list[int]:
    """Return the ranks of the same host with which a rank shares some of these ranges."""
    ranks = {
        other for shared_range in shared_ranges for other in shared_range.ranks_on_host_of(rank)
    }
    return sorted(ranks - {rank})


def _cut_segments(
    ranges_by_rank: Mapping[int, BlockRanges],
) -> Iterator[tuple[range, tuple[int, ...]]]:
    """Cut the blocks of a file where the set of ranks that need them changes."""
    changes: dict[int, list[int]] = {}
    for rank, ranges in ranges_by_rank.items():
        for blocks in ranges:
            changes.setdefault(blocks.start, []).append(rank)
            changes.setdefault(blocks.stop, []).append(rank)
    ranks: set[int] = set()
    start = 0
    for stop in sorted(changes):
        if ranks:
            yield range(start, stop), tuple(sorted(ranks))
        ranks.symmetric_difference_update(changes[stop])
        start = stop


def _cut_blocks(blocks: range, starts: Sequence[int]) -> Iterator[range]:
    """Cut a range of blocks into ranges of at most `SHARED_RANGE_NBYTES`, or of one block."""
    first = blocks.start
    while first < blocks.stop:
        fits = bisect_right(starts, starts[first] + SHARED_RANGE_NBYTES) - 1
        stop = min(max(fits, first + 1), blocks.stop)
        yield range(first, stop)
        first = stop


class _FetchBalance:
    """The bytes of a file that each rank fetches, and receives from other hosts, so far."""

    def __init__(self, file: int, host_of: Mapping[int, str]) -> None:
        self.host_of = host_of
        self.fetched = dict.fromkeys(host_of, 0)
        self._file = file
        self._received = dict.fromkeys(host_of, 0)

    def assign(
        self, blocks: range, starts: Sequence[int], ranks: tuple[int, ...]
    ) -> SharedBlockRange:
        """Assign a range to the ranks with the fewest bytes so far."""
        nbytes = starts[blocks.stop] - starts[blocks.start]
        fetcher = self._find_least(ranks, self.fetched)
        self.fetched[fetcher] += nbytes
        hosts: dict[str, list[int]] = {self.host_of[fetcher]: []}
        for rank in ranks:
            hosts.setdefault(self.host_of[rank], []).append(rank)
        ordered = []
        for here in hosts.values():
            first = fetcher if fetcher in here else self._find_least(here, self._received)
            self._received[first] += nbytes
            ordered.append((first, *(rank for rank in here if rank != first)))
        return SharedBlockRange(self._file, blocks, tuple(ordered))

    def _find_least(self, ranks: Sequence[int], nbytes: Mapping[int, int]) -> int:
        first = self._file % len(ranks)
        return min((*ranks[first:], *ranks[:first]), key=nbytes.__getitem__)
