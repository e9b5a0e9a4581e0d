"""Small shards that lie in a row and are wanted whole: one decision and one read for many.

Of a state of thousands of small tensors Python's work for each is what a load costs. So a shard
in a row is no more than its number in the file, and the item that wants it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.planning.plan import ReadItem
from dist_ckpt.core.shard_io.read.block_reads import ZERO_COPY_NBYTES
from dist_ckpt.core.shard_io.read.open_files import OpenFile

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
