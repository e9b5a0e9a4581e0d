"""What several ranks want from storage: who fetches it, and who hands it on to whom.

The blocks of a shard file are numbered in the order of its header. Each rank tells which of them
it needs, file by file, as runs of numbers. From that every rank derives the same units of the
files that it reads itself: it need not know the headers of the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap

from dist_ckpt.core.runtime.typed_msgpack import Message

# A unit is fetched at once, by one rank: enough for the storage's full speed, little enough to be
# still in a processor's cache when others copy it (docs/decisions/0008).
SHARED_RANGE_NBYTES = 4 << 20

# Runs of block numbers, ascending; between any two is a block that is not in them.
BlockRuns = tuple[range, ...]

# What names a unit: its file and its first block.
Name = tuple[int, int]


class BlockRequests(Message, frozen=True):
    """What one rank needs of each file, by the file's number in the index.

    That is kept as `steps`, by turns the gap before a run of blocks and its length: they are short
    where block numbers are not.
    """

    host: str
    steps: dict[int, tuple[int, ...]]

    @staticmethod
    def of(host: str, runs: Mapping[int, Iterable[range]]) -> BlockRequests:
        """Return what a rank needs that needs these runs of blocks of each file."""
        steps = {}
        for file, some in sorted(runs.items()):
            edges = [0, *(edge for run in some for edge in (run.start, run.stop))]
            steps[file] = tuple(stop - start for start, stop in pairwise(edges))
        return BlockRequests(host, steps)

    def runs(self, file: int) -> BlockRuns:
        """Return the runs of blocks that it needs of a file; none of a file that it does not."""
        edges = list(accumulate(self.steps.get(file, ())))
        return tuple(starmap(range, zip(edges[::2], edges[1::2], strict=True)))


@dataclass(frozen=True, slots=True)
class SharedBlockRange:
    """Adjoining blocks of one file that the same ranks want; several ranks.

    `hosts` are these ranks, host by host. The first of each host brings the unit there and hands
    it on to the others: the first of all from storage, the others from that one.
    """

    file: int
    blocks: range
    hosts: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> Name:
        """What names it among all units of a load."""
        return self.file, self.blocks.start

    @property
    def fetcher(self) -> int:
        """The rank that reads it from storage."""
        return self.hosts[0][0]

    @property
    def agents(self) -> tuple[int, ...]:
        """The ranks that bring it from the fetcher to the other hosts."""
        return tuple(ranks[0] for ranks in self.hosts[1:])

    def host_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the host of a rank that wants it, the one that brings it first."""
        return next(ranks for ranks in self.hosts if rank in ranks)


def have_equal_requests(wants: Iterable[BlockRequests], *, between_hosts: bool) -> bool:
    """Say whether some block is wanted by several ranks that share with each other.

    Those are the ranks of one host, or `between_hosts` all.
    """
    runs = [
        ("" if between_hosts else want.host, file, run.start, run.stop)
        for want in wants
        for file in want.steps
        for run in want.runs(file)
    ]
    runs.sort()
    return any(a[:2] == b[:2] and a[3] > b[2] for a, b in pairwise(runs))


def shared_block_ranges(
    file: int, starts: Sequence[int], wants: Mapping[int, BlockRequests]
) -> tuple[SharedBlockRange, ...]:
    """Return the units of a file that several ranks want, in its order.

    `wants` are those of the ranks that share with each other, by rank; `starts` is where each
    block of the file begins, and last where the file ends. What ranks fetch is balanced by bytes
    within the file, and what is over goes round with the file's number.
    """
    share = _Shares(file, {rank: want.host for rank, want in wants.items() if file in want.steps})
    segments = list(_segments({rank: wants[rank].runs(file) for rank in share.host_of}))
    for blocks, ranks in segments:
        if len(ranks) == 1:
            share.fetched[ranks[0]] += starts[blocks.stop] - starts[blocks.start]
    units = []
    for blocks, ranks in segments:
        if len(ranks) > 1:
            units += [share.out(part, starts, ranks) for part in _parts(blocks, starts)]
    return tuple(units)


def receivers_of(rank: int, units: Iterable[SharedBlockRange]) -> list[int]:
    """Return the ranks of its host with which a rank shares some of these units."""
    found = {other for unit in units for other in unit.host_of(rank)}
    return sorted(found - {rank})


def _segments(wants: Mapping[int, BlockRuns]) -> Iterator[tuple[range, tuple[int, ...]]]:
    """Cut the blocks of a file where the ranks that want them change; each part with its ranks."""
    changes: dict[int, list[int]] = {}
    for rank, runs in wants.items():
        for run in runs:
            changes.setdefault(run.start, []).append(rank)
            changes.setdefault(run.stop, []).append(rank)
    ranks: set[int] = set()
    start = 0
    for stop in sorted(changes):
        if ranks:
            yield range(start, stop), tuple(sorted(ranks))
        ranks.symmetric_difference_update(changes[stop])
        start = stop


def _parts(blocks: range, starts: Sequence[int]) -> Iterator[range]:
    """Cut a run of blocks into parts of `SHARED_RANGE_NBYTES` at most, or of one block."""
    first = blocks.start
    while first < blocks.stop:
        fits = bisect_right(starts, starts[first] + SHARED_RANGE_NBYTES) - 1
        stop = min(max(fits, first + 1), blocks.stop)
        yield range(first, stop)
        first = stop


class _Shares:
    """How many bytes of a file each rank fetches, and brings to its host, so far."""

    def __init__(self, file: int, host_of: Mapping[int, str]) -> None:
        self.host_of = host_of
        self.fetched = dict.fromkeys(host_of, 0)
        self._file = file
        self._brought = dict.fromkeys(host_of, 0)

    def out(self, blocks: range, starts: Sequence[int], ranks: tuple[int, ...]) -> SharedBlockRange:
        """Give a unit to the rank that fetches least, and on other hosts to who brings least."""
        nbytes = starts[blocks.stop] - starts[blocks.start]
        fetcher = self._least(ranks, self.fetched)
        self.fetched[fetcher] += nbytes
        hosts: dict[str, list[int]] = {self.host_of[fetcher]: []}
        for rank in ranks:
            hosts.setdefault(self.host_of[rank], []).append(rank)
        ordered = []
        for here in hosts.values():
            first = fetcher if fetcher in here else self._least(here, self._brought)
            self._brought[first] += nbytes
            ordered.append((first, *(rank for rank in here if rank != first)))
        return SharedBlockRange(self._file, blocks, tuple(ordered))

    def _least(self, ranks: Sequence[int], nbytes: Mapping[int, int]) -> int:
        turn = self._file % len(ranks)
        return min((*ranks[turn:], *ranks[:turn]), key=nbytes.__getitem__)
