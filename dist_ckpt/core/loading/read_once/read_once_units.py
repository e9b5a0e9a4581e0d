"""What one rank does in a shared reading: which reads are its own, and which units it shares."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dist_ckpt.core.format.geometry import ByteRange, joined
from dist_ckpt.core.planning.load.read_sharing import (
    SHARED_RANGE_NBYTES,
    BlockRuns,
    Name,
    SharedBlockRange,
)
from dist_ckpt.core.planning.plan import ReadItem
from dist_ckpt.core.shard_io.read.block_reads import (
    BlockRead,
    BlockRequest,
    gathered,
    reads_of,
    requested_blocks,
)
from dist_ckpt.core.shard_io.read.open_files import OpenFile, OpenFiles
from dist_ckpt.core.shard_io.read.read_work import CellTargets, by_shard, needs_of
from dist_ckpt.core.shard_io.read.small_shards import SmallShardRun, divide


def runs_of(files: OpenFiles) -> dict[int, BlockRuns]:
    """Return which blocks of each file a plan needs, by the file's number in the index."""
    found = {}
    for number, items in files.plan.items():
        file = files.files[number]
        runs = (run for shard in by_shard(file, items) for run in _runs_of(file, *shard))
        found[number] = tuple(joined(runs))
    return found


def _runs_of(file: OpenFile, number: int, items: Sequence[ReadItem]) -> Iterator[range]:
    """Return the blocks of one shard that items need, numbered within the file."""
    start, stop = file.shards.starts[number : number + 2]
    first = bisect_left(file.block_starts, start)
    if stop - start <= file.header.block_nbytes:
        yield range(first, first + 1)
        return
    for need in requested_blocks(
        file.shards[number], items, file.header.block_nbytes, lambda _: False
    ):
        yield range(first + need.number, first + need.number + 1)


def slot_nbytes(files: OpenFiles) -> int:
    """Return the size of a slot that holds any unit of some files."""
    return max(SHARED_RANGE_NBYTES, *(file.header.block_nbytes for file in files.files.values()), 0)


def num_slots(*, between_hosts: bool) -> int:
    """Return how many units a rank fetches before all have taken them, and receives ahead."""
    # On a host two made a load of replicas 15 % slower, from a cold cache no faster: the slots of
    # all its ranks then exceed a processor's cache. To send a unit takes as long as to fetch one.
    return 2 if between_hosts else 1


def common_nbytes(files: OpenFiles, *, between_hosts: bool) -> int:
    """Return the size of a rank's common memory for a shared reading of some files."""
    slots = num_slots(between_hosts=between_hosts)
    return slot_nbytes(files) * slots * (2 if between_hosts else 1)


@dataclass(frozen=True, slots=True)
class SharedRangePart:
    """A unit, and the reads that bring it; this rank needs all its blocks.

    `tags` number it among what its fetcher sends to each agent.
    """

    unit: SharedBlockRange
    file: OpenFile
    reads: tuple[SmallShardRun | BlockRead, ...]
    tags: Mapping[int, int]

    @property
    def span(self) -> ByteRange:
        """Its bytes in the data section; the reads fill it in order, without a hole."""
        return ByteRange(self.reads[0].span.start, self.reads[-1].span.stop)

    def places(self, data: memoryview) -> Iterator[tuple[SmallShardRun | BlockRead, memoryview]]:
        """Return each read, and where in the unit, which is `data`, it brings its bytes."""
        begin = self.span.start
        for read in self.reads:
            yield read, data[read.span.start - begin : read.span.stop - begin]


class SharedWork:
    """What a rank does to fill its targets, when all ranks share `units`, given by file."""

    def __init__(
        self,
        rank: int,
        files: OpenFiles,
        targets: CellTargets | None,
        units: Mapping[int, Sequence[SharedBlockRange]],
    ) -> None:
        self.rank = rank
        self.slot_nbytes = slot_nbytes(files)
        self._files = files
        self._targets = targets
        self._units = units
        self._tags = _tags_of(unit for file in sorted(units) for unit in units[file])
        self._known: dict[
            int, tuple[list[SmallShardRun | BlockRead], dict[int, SharedRangePart]]
        ] = {}

    def own_reads(self) -> Iterator[tuple[OpenFile, SmallShardRun | BlockRead]]:
        """Return the reads of what no other rank wants."""
        for number in self._files.plan:
            for read in self._of(number)[0]:
                yield self._files.files[number], read

    def fetched(self) -> Iterator[SharedRangePart]:
        """Return the units that this rank fetches, in the order of all ranks."""
        return (self.part(unit.name) for unit in self._all() if unit.fetcher == self.rank)

    def relayed(self) -> Iterator[SharedRangePart]:
        """Return those that it brings from other hosts, in the same order."""
        return (self.part(unit.name) for unit in self._all() if self.rank in unit.agents)

    def told_by(self) -> dict[int, set[Name]]:
        """Return the names of the units that others of this host hand on, by rank."""
        names: dict[int, set[Name]] = {}
        for unit in self._all():
            first = unit.host_of(self.rank)[0]
            if first != self.rank:
                names.setdefault(first, set()).add(unit.name)
        return names

    def part(self, name: Name) -> SharedRangePart:
        """Return what there is to do with a unit."""
        file, block = name
        return self._of(file)[1][block]

    def nbytes_moved(self) -> tuple[int, int]:
        """Return how many bytes come from storage, and from other ranks, when all of it is done."""
        own = sum(read.span.nbytes for _, read in self.own_reads())
        fetched = sum(part.span.nbytes for part in self.fetched())
        shared = sum(self.part(unit.name).span.nbytes for unit in self._all())
        return own + fetched, shared - fetched

    def _all(self) -> Iterator[SharedBlockRange]:
        return (unit for file in sorted(self._units) for unit in self._units[file])

    def _of(
        self, number: int
    ) -> tuple[list[SmallShardRun | BlockRead], dict[int, SharedRangePart]]:
        if number not in self._known:
            self._known[number] = self._divide(number)
        return self._known[number]

    def _divide(
        self, number: int
    ) -> tuple[list[SmallShardRun | BlockRead], dict[int, SharedRangePart]]:
        """Divide the needed blocks of a file into reads of this rank's own, and units."""
        file = self._files.files[number]
        starts = file.block_starts
        units = self._units.get(number, ())
        rows, others = divide(file, self._files.plan[number])
        bounds = [
            starts[block] for unit in units for block in (unit.blocks.start, unit.blocks.stop)
        ]
        pieces: defaultdict[int | None, _Pieces] = defaultdict(_Pieces)  # None: of no unit
        for row in rows:
            for part in _cut(row, file.shards.starts, bounds):
                pieces[_place(part.span.start, bounds)].rows.append(part)
        for need in needs_of(file, others, self._targets):
            pieces[_place(need.start, bounds)].needs.append(need)
        parts = {
            unit.blocks.start: SharedRangePart(
                unit, file, pieces[number].filling(), self._tags[unit.name]
            )
            for number, unit in enumerate(units)
        }
        own = pieces[None]
        return [*own.rows, *reads_of(own.needs)], parts


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What lies in a unit, or in none: rows of small shards, and other blocks, each in order."""

    rows: list[SmallShardRun] = field(default_factory=list)
    needs: list[BlockRequest] = field(default_factory=list)

    def filling(self) -> tuple[SmallShardRun | BlockRead, ...]:
        """Return the reads of all of it, which lies without a hole, in order."""
        runs = gathered(self.needs, lambda run, need: run[-1].stop == need.start)
        reads = [BlockRead(ByteRange(run[0].start, run[-1].stop), tuple(run)) for run in runs]
        return tuple(sorted([*self.rows, *reads], key=lambda read: read.span.start))


def _place(start: int, bounds: Sequence[int]) -> int | None:
    """Return the number of the unit in which a byte lies; `bounds` are start and stop of each."""
    before = bisect_right(bounds, start)
    # Where one unit ends and the next begins both bounds are before it.
    return before // 2 if before % 2 else None


def _cut(
    row: SmallShardRun, starts: Sequence[int], bounds: Sequence[int]
) -> Iterator[SmallShardRun]:
    """Cut a row of small shards where units begin and end."""
    inside = bounds[bisect_right(bounds, row.span.start) : bisect_left(bounds, row.span.stop)]
    cuts = [row.first, *(bisect_left(starts, bound) for bound in dict.fromkeys(inside))]
    for first, stop in pairwise([*cuts, row.first + len(row.items)]):
        items = row.items[first - row.first : stop - row.first]
        yield SmallShardRun(first, items, ByteRange(starts[first], starts[stop]))


def _tags_of(units: Iterable[SharedBlockRange]) -> dict[Name, dict[int, int]]:
    """Return the numbers of units among what each rank sends to each other: alike on both."""
    counts: dict[tuple[int, int], int] = {}
    tags: dict[Name, dict[int, int]] = {}
    for unit in units:
        ours = tags[unit.name] = {}
        for agent in unit.agents:
            ours[agent] = counts.get((unit.fetcher, agent), 0)
            counts[unit.fetcher, agent] = ours[agent] + 1
    return tags
