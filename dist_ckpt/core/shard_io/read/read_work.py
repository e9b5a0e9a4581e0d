"""Divide the reads of a load between threads.

With thousands of small tensors, Python's work for each is the cost of a load. So adjacent small
shards that are requested whole share one decision and one read (`SmallShardRun`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.planning.plan import LoadPlan, ReadItem
from dist_ckpt.core.shard_io.memory.protocol import Target
from dist_ckpt.core.shard_io.read.block_reads import (
    ZERO_COPY_NBYTES,
    BlockRead,
    NeededBlock,
    reads_of,
    requested_blocks,
)
from dist_ckpt.core.shard_io.read.open_files import OpenFile, OpenFiles

# The bytes to read at once and use while a processor has them cached: see `IO_CHUNK_NBYTES`.
ROW_NBYTES = 2 << 20

# Fewer shards are read together with their neighbours, across holes.
MIN_SHARDS = 16


@dataclass(frozen=True, slots=True)
class SmallShardRun:
    """Shards of one block each, from number `first`; one item requests each, as a whole."""

    first: int
    items: tuple[ReadItem, ...]
    span: ByteRange

    def parts(self, file: OpenFile, data: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of each shard, from those of all."""
        starts = file.shards.starts[self.first : self.first + len(self.items) + 1]
        for start, stop in pairwise(starts):
            yield data[start - self.span.start : stop - self.span.start]


def divide(
    file: OpenFile, items: Sequence[ReadItem]
) -> tuple[list[SmallShardRun], Sequence[ReadItem]]:
    """Return the runs of small shards among the items of a file, and the other items."""
    numbers = list(map(file.number_of, items))
    wanted: dict[int, ReadItem | None] = {}
    for number, item in zip(numbers, items, strict=True):
        is_single = number not in wanted and item.match.is_whole
        wanted[number] = item if is_single else None
    starts = file.shards.starts
    small = min(file.header.block_nbytes, ZERO_COPY_NBYTES - 1, ROW_NBYTES)
    fitting = {
        number: item
        for number, item in wanted.items()
        if item is not None and starts[number + 1] - starts[number] <= small
    }
    rows = [
        SmallShardRun(
            run[0],
            tuple(map(fitting.__getitem__, run)),
            ByteRange(starts[run[0]], starts[run[-1] + 1]),
        )
        for run in _runs(sorted(fitting), starts)
        if len(run) >= MIN_SHARDS
    ]
    if sum(len(row.items) for row in rows) == len(items):
        return rows, ()
    placed = {row.first + index for row in rows for index in range(len(row.items))}
    pairs = zip(numbers, items, strict=True)
    return rows, [item for number, item in pairs if number not in placed]


def _runs(numbers: Iterable[int], starts: Sequence[int]) -> Iterator[range]:
    """Group adjacent numbers of shards, ascending, up to the limit of one read."""
    first = stop = 0
    for number in numbers:
        if number != stop or starts[number + 1] - starts[first] > ROW_NBYTES:
            if stop > first:
                yield range(first, stop)
            first = number
        stop = number + 1
    if stop > first:
        yield range(first, stop)


# Work on small shards is all Python, and threads that alternate wait as long as they work. So a
# thread gets this many rows at once. A larger number does not help reads from the page cache,
# and slows reads from the disk.
MAX_ROWS = 16

# The bytes that one thread reads before it gets more work. That takes 0.1 ms of Python, for which
# all others wait: with 8 MiB, loads from memory took 4 to 16 % longer.
WORK_NBYTES = 32 << 20

# The memory of each requested cell, by tensor and number of the cell.
CellTargets = Mapping[tuple[str, int], Target]


def nbytes_placed_by(plan: LoadPlan) -> int:
    """Return the bytes of targets that a plan fills."""
    return sum(
        item.match.common.numel * DTYPES[item.dtype].itemsize
        for items in plan.values()
        for item in items
    )


def split_into_work(
    files: OpenFiles, targets: CellTargets | None, threads: int
) -> Iterator[list[tuple[OpenFile, SmallShardRun | BlockRead]]]:
    """Yield the reads of some files in groups, each for one thread, smaller ones at the end."""
    rows: list[tuple[OpenFile, SmallShardRun | BlockRead]] = []
    reads: list[tuple[OpenFile, SmallShardRun | BlockRead]] = []
    nbytes, num_left = 0, nbytes_placed_by(files.plan)
    for file, items in files:
        small_runs, remaining = divide(file, items)
        for row in small_runs:
            rows.append((file, row))
            if len(rows) == MAX_ROWS:
                yield rows
                rows = []
        for read in reads_of(needed_blocks(file, remaining, targets)):
            reads.append((file, read))
            nbytes += read.span.nbytes
            if nbytes >= min(WORK_NBYTES, num_left // (2 * threads)):
                yield reads
                num_left -= nbytes
                reads, nbytes = [], 0
    yield from (work for work in (reads, rows) if work)


def by_shard(file: OpenFile, items: Iterable[ReadItem]) -> list[tuple[int, list[ReadItem]]]:
    """Return the numbers of the shards of a file that items read, ascending, with the items."""
    items_by_number: dict[int, list[ReadItem]] = {}
    for item in items:
        items_by_number.setdefault(file.number_of(item), []).append(item)
    return sorted(items_by_number.items())


def needed_blocks(
    file: OpenFile, items: Iterable[ReadItem], targets: CellTargets | None
) -> Iterator[NeededBlock]:
    """Yield the blocks of a file that items need, in the file's order."""

    def has_memory(item: ReadItem) -> bool:
        return (
            targets is not None
            and targets[item.fqn, item.match.requested_number].memory() is not None
        )

    for number, wanted in by_shard(file, items):
        yield from requested_blocks(
            file.shards[number], wanted, file.header.block_nbytes, has_memory
        )
