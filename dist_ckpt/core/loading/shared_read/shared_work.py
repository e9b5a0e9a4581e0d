"""The reads of one rank: reads for this rank only, and shared ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.loading.shared_read.shared_read_group import SharedReadGroup, slot_nbytes
from dist_ckpt.core.planning.load.read_sharing import RangeKey, SharedBlockRange
from dist_ckpt.core.shard_io.read.block_reads import (
    BlockRead,
    CellTargets,
    NeededBlock,
    PlannedRead,
    SmallShardsRead,
    find_needed_blocks,
    group_into_reads,
    group_successive,
    split_off_small_shards,
)
from dist_ckpt.core.shard_io.read.open_files import OpenFile


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """A shared range, and the reads that fill it. This rank needs all its blocks.

    `tags` has the number of the range for each agent: the fetcher counts what it sends to an agent.
    """

    shared_range: SharedBlockRange
    file: OpenFile
    reads: tuple[PlannedRead, ...]
    tags: Mapping[int, int]

    @property
    def span(self) -> ByteRange:
        """The bytes of the range in the data section. The reads fill it in order, without gap."""
        return ByteRange(self.reads[0].span.start, self.reads[-1].span.stop)

    def for_each_read(
        self, work: Callable[[OpenFile, PlannedRead, memoryview], None], data: memoryview
    ) -> None:
        """Call `work` with each read and its slice of `data`, the memory of the range."""
        begin = self.span.start
        for read in self.reads:
            work(self.file, read, data[read.span.start - begin : read.span.stop - begin])


class SharedWork:
    """The reads that fill the targets of a rank: local reads, and the ranges that it shares."""

    def __init__(self, group: SharedReadGroup, targets: CellTargets | None) -> None:
        self.rank = group.session.channel.rank
        self.slot_nbytes = slot_nbytes(group.files)
        self._files = group.files
        self._targets = targets
        self._shared_ranges = group.shared_ranges
        self._by_file: defaultdict[int, list[SharedBlockRange]] = defaultdict(list)
        for shared_range in group.shared_ranges:
            self._by_file[shared_range.file].append(shared_range)
        # Number the ranges from each fetcher to each agent. Both ranks count the same.
        tags: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(count)
        self._tags = {
            r.key: {agent: next(tags[r.fetcher, agent]) for agent in r.agents}
            for r in group.shared_ranges
        }
        self._divided: dict[int, tuple[list[PlannedRead], dict[int, PlannedRange]]] = {}

    def local_reads(self) -> Iterator[tuple[OpenFile, PlannedRead]]:
        """Yield the reads of blocks that no other rank needs."""
        for number in self._files.plan:
            for read in self._divide(number)[0]:
                yield self._files.files[number], read

    def fetched_ranges(self) -> Iterator[PlannedRange]:
        """Yield the shared ranges that this rank reads, in the order that all ranks use."""
        return (self.planned_range(r.key) for r in self._shared_ranges if r.fetcher == self.rank)

    def received_ranges(self) -> Iterator[PlannedRange]:
        """Yield the shared ranges that this rank receives from other hosts, in the same order."""
        return (self.planned_range(r.key) for r in self._shared_ranges if self.rank in r.agents)

    def keys_by_sender(self) -> dict[int, set[RangeKey]]:
        """Return the keys of the ranges that this rank copies from its host, by sender."""
        keys: dict[int, set[RangeKey]] = {}
        for shared_range in self._shared_ranges:
            first = shared_range.host_of(self.rank)[0]
            if first != self.rank:
                keys.setdefault(first, set()).add(shared_range.key)
        return keys

    def planned_range(self, key: RangeKey) -> PlannedRange:
        """Return a shared range with its reads."""
        file, block = key
        return self._divide(file)[1][block]

    def nbytes_moved(self) -> tuple[int, int]:
        """Return the bytes that this rank gets from storage, and those from other ranks."""
        own = sum(read.span.nbytes for _, read in self.local_reads())
        fetched = sum(planned.span.nbytes for planned in self.fetched_ranges())
        shared = sum(self.planned_range(r.key).span.nbytes for r in self._shared_ranges)
        return own + fetched, shared - fetched

    def _divide(self, number: int) -> tuple[list[PlannedRead], dict[int, PlannedRange]]:
        """Divide the needed blocks of a file into local reads and shared ranges. Cached."""
        if number in self._divided:
            return self._divided[number]
        file = self._files.files[number]
        shared_ranges = self._by_file[number]
        bounds = [
            file.block_starts[block]
            for shared_range in shared_ranges
            for block in (shared_range.blocks.start, shared_range.blocks.stop)
        ]
        # The content of each range, in order. The key None has the blocks outside of all ranges.
        small_reads: defaultdict[int | None, list[SmallShardsRead]] = defaultdict(list)
        blocks: defaultdict[int | None, list[NeededBlock]] = defaultdict(list)
        whole_reads, items = split_off_small_shards(file, self._files.plan[number])
        for whole in whole_reads:
            for cut_read in _cut_read(whole, file.shards.starts, bounds):
                small_reads[_find_range(cut_read.span.start, bounds)].append(cut_read)
        for block in find_needed_blocks(file, items, self._targets):
            blocks[_find_range(block.start, bounds)].append(block)
        planned_ranges = {}
        for n, shared_range in enumerate(shared_ranges):
            # A range has no gap: all its adjacent blocks are read at once.
            groups = group_successive(blocks[n], lambda group, b: group[-1].stop == b.start)
            reads: list[PlannedRead] = [*small_reads[n]]
            reads += (BlockRead(ByteRange(g[0].start, g[-1].stop), tuple(g)) for g in groups)
            reads.sort(key=lambda read: read.span.start)
            planned_ranges[shared_range.blocks.start] = PlannedRange(
                shared_range, file, tuple(reads), self._tags[shared_range.key]
            )
        local_reads: list[PlannedRead] = [*small_reads[None], *group_into_reads(blocks[None])]
        self._divided[number] = local_reads, planned_ranges
        return local_reads, planned_ranges


def _find_range(start: int, bounds: Sequence[int]) -> int | None:
    """Return the number of the range with the byte `start`, or None.

    `bounds` are the start and stop of each range, in order.
    """
    before = bisect_right(bounds, start)
    # If the byte is at the end of one range and the start of the next, both bounds are before it.
    return before // 2 if before % 2 else None


def _cut_read(
    read: SmallShardsRead, starts: Sequence[int], bounds: Sequence[int]
) -> Iterator[SmallShardsRead]:
    """Cut a read of small shards where ranges begin and end."""
    inside = bounds[bisect_right(bounds, read.span.start) : bisect_left(bounds, read.span.stop)]
    cuts = [read.first, *(bisect_left(starts, bound) for bound in dict.fromkeys(inside))]
    for first, stop in pairwise([*cuts, read.first + len(read.items)]):
        items = read.items[first - read.first : stop - read.first]
        yield SmallShardsRead(first, items, ByteRange(starts[first], starts[stop]))
