"""How a shard file is written: which blocks of its items go together, in one write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# Blocks below this are gathered and written together: copying costs less than a system call.
SMALL_NBYTES = 1 << 20


class BatchPart(NamedTuple):
    """One block: the bytes `start` to `stop` of item number `item`, which has `nbytes`."""

    item: int
    nbytes: int
    start: int
    stop: int


class Batch(NamedTuple):
    """Blocks that adjoin. The first is number `first_block` of the file, at `start` of its data."""

    first_block: int
    start: int
    parts: tuple[BatchPart, ...]


def batches_of(sizes: Iterable[int], block_nbytes: int) -> tuple[Batch, ...]:
    """Cut a file into what is written at once, given the sizes of its items in their order.

    That is one large block, or small ones, `block_nbytes` together at most. Empty items have no
    blocks; a file without any has one empty batch.
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
