"""How the reads of a load are divided: how much a thread does at a time.

Small shards that lie in a row and are wanted whole: one decision and one read for many.

Of a state of thousands of small tensors Python's work for each is what a load costs. So a shard
in a row is no more than its number in the file, and the item that wants it.
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
    BlockRequest,
    reads_of,
    requested_blocks,
)
from dist_ckpt.core.shard_io.read.open_files import OpenFile, OpenFiles

# So much is read at once, and used while a processor still has it cached: see `IO_CHUNK_NBYTES`.
ROW_NBYTES = 2 << 20

# Fewer are left to be read with what lies beside them, across holes.
MIN_SHARDS = 16


@dataclass(frozen=True, slots=True)
class SmallShardRun:
    """Shards of one block each, from number `first` of the file on; `span` is their bytes.

    Each is wanted whole, by one item.
    """

    first: int
    items: tuple[ReadItem, ...]
    span: ByteRange

    def parts(self, file: OpenFile, data: memoryview) -> Iterator[memoryview]:
        """Return the bytes of each shard, out of those of all."""
        starts = file.shards.starts[self.first : self.first + len(self.items) + 1]
        for start, stop in pairwise(starts):
            yield data[start - self.span.start : stop - self.span.start]


def divide(
    file: OpenFile, items: Sequence[ReadItem]
) -> tuple[list[SmallShardRun], Sequence[ReadItem]]:
    """Return the rows among the items of a file, and the other items."""
    numbers = list(map(file.number_of, items))
    wanted: dict[int, ReadItem | None] = {}
    for number, item in zip(numbers, items, strict=True):
        alone = number not in wanted and item.match.is_whole
        wanted[number] = item if alone else None
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
    placed = {row.first + place for row in rows for place in range(len(row.items))}
    pairs = zip(numbers, items, strict=True)
    return rows, [item for number, item in pairs if number not in placed]


def _runs(numbers: Iterable[int], starts: Sequence[int]) -> Iterator[range]:
    """Gather numbers of shards, ascending, that adjoin and are not too much for one read."""
    first = stop = 0
    for number in numbers:
        if number != stop or starts[number + 1] - starts[first] > ROW_NBYTES:
            if stop > first:
                yield range(first, stop)
            first = number
        stop = number + 1
    if stop > first:
        yield range(first, stop)


# What is done for small shards is all Python, and threads that take turns at it wait as long for
# each other as they work. So one takes so many rows: more gain nothing where all is in the page
# cache, and keep the disk waiting where it is not.
MAX_ROWS = 16

# So much one thread reads in a row. To hand it its next work takes 0.1 ms of Python, which all
# others wait for: with a read of 8 MiB at a time loads from memory took 4 to 16 % longer.
WORK_NBYTES = 32 << 20

# The memory of each wanted cell, by tensor and number of the cell.
CellTargets = Mapping[tuple[str, int], Target]


def nbytes_placed_by(plan: LoadPlan) -> int:
    """Return how many bytes of targets a plan fills."""
    return sum(
        item.match.common.numel * DTYPES[item.dtype].itemsize
        for items in plan.values()
        for item in items
    )


def split_into_work(
    files: OpenFiles, targets: CellTargets | None, threads: int
) -> Iterator[list[tuple[OpenFile, SmallShardRun | BlockRead]]]:
    """Return the reads of some files, those of one thread at a time together: many rows, or reads.

    Towards the end these are fewer and fewer, so that no thread is left with much to do.
    """
    rows: list[tuple[OpenFile, SmallShardRun | BlockRead]] = []
    some: list[tuple[OpenFile, SmallShardRun | BlockRead]] = []
    nbytes, left = 0, nbytes_placed_by(files.plan)
    for file, items in files:
        small, others = divide(file, items)
        for row in small:
            rows.append((file, row))
            if len(rows) == MAX_ROWS:
                yield rows
                rows = []
        for one in reads_of(needs_of(file, others, targets)):
            some.append((file, one))
            nbytes += one.span.nbytes
            if nbytes >= min(WORK_NBYTES, left // (2 * threads)):
                yield some
                left -= nbytes
                some, nbytes = [], 0
    yield from (work for work in (some, rows) if work)


def by_shard(file: OpenFile, items: Iterable[ReadItem]) -> list[tuple[int, list[ReadItem]]]:
    """Return the numbers of the shards of a file that items read, ascending, with those items."""
    found: dict[int, list[ReadItem]] = {}
    for item in items:
        found.setdefault(file.number_of(item), []).append(item)
    return sorted(found.items())


def needs_of(
    file: OpenFile, items: Iterable[ReadItem], targets: CellTargets | None
) -> Iterator[BlockRequest]:
    """Return the blocks of a file that items need, in the file's order."""

    def has_memory(item: ReadItem) -> bool:
        return targets is not None and targets[item.fqn, item.match.part].memory() is not None

    for number, wanted in by_shard(file, items):
        yield from requested_blocks(
            file.shards[number], wanted, file.header.block_nbytes, has_memory
        )
