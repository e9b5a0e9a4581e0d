"""Group the blocks of a shard file into writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# Smaller blocks are gathered and written together: copying costs less than a system call.
SMALL_NBYTES = 1 << 20


class BatchPart(NamedTuple):
    """One block: the bytes `start` to `stop` of item number `item`, which has `nbytes`."""

    item: int
    nbytes: int
    start: int
    stop: int


class Batch(NamedTuple):
    """Adjacent blocks. The first is number `first_block` of the file, at `start` of its data."""

    first_block: int
    start: int
    parts: tuple[BatchPart, ...]


def batches_of(sizes: Iterable[int], block_nbytes: int) -> tuple[Batch, ...]:
    """Return the writes of a file with items of these sizes: a large block, or small ones together.

    A write has at most `block_nbytes`. A file without blocks has one empty batch.
    """
    batches = []
    first_block = start = 0
    for parts in _cut(sizes, block_nbytes):
        batches.append(Batch(first_block, start, tuple(parts)))
        first_block += len(parts)
        start += sum(part.stop - part.start for part in parts)
    return tuple(batches) or (Batch(0, 0, ()),)


def _cut(sizes: Iterable[int], block_nbytes: int) -> Iterator[Sequence[BatchPart]]:
    batch: list[BatchPart] = []
    nbytes = 0
    for item, item_nbytes in enumerate(sizes):
        for start in range(0, item_nbytes, block_nbytes):
            stop = min(start + block_nbytes, item_nbytes)
            if batch and nbytes + stop - start > block_nbytes:
                yield batch
                batch, nbytes = [], 0
            part = BatchPart(item, item_nbytes, start, stop)
            if stop - start < SMALL_NBYTES:
                batch.append(part)
                nbytes += stop - start
                continue
            if batch:
                yield batch
                batch, nbytes = [], 0
            yield (part,)
    if batch:
        yield batch
