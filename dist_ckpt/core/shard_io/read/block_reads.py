"""Choose the blocks of a shard file that are needed, and the reads that fetch them.

A block is the smallest checked read. Adjacent blocks are read at once, up to a limit, and each
block once, however many cells need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dist_ckpt.core.format.checksums import blocks, num_blocks
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange, ElementRange, runs_of
from dist_ckpt.core.format.shard_file import StoredShard
from dist_ckpt.core.planning.plan import ReadItem

# The limit of one read, or one block if that is larger. Enough for the storage's full speed, and
# small enough for several threads to share a large shard.
READ_NBYTES = 8 << 20

# Smaller holes between blocks are read too, while a read wastes at most this fraction.
MAX_GAP_NBYTES = 64 << 10
MAX_WASTE = 0.04

# Smaller runs of whole blocks use a scratch buffer, so that one read serves many small tensors.
ZERO_COPY_NBYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class NeededBlock:
    """A block that `items` need. With `is_zero_copy` it is read into its one item's memory."""

    shard: StoredShard
    number: int
    span: ByteRange
    items: tuple[ReadItem, ...]
    is_zero_copy: bool

    @property
    def start(self) -> int:
        """The start of the block in the file's data section."""
        return self.shard.span.start + self.span.start

    @property
    def stop(self) -> int:
        """The end of the block in the file's data section."""
        return self.shard.span.start + self.span.stop


@dataclass(frozen=True, slots=True)
class BlockRead:
    """One read: a span of the data section, and the needed blocks in it, in order."""

    span: ByteRange
    blocks: tuple[NeededBlock, ...]

    @property
    def is_zero_copy(self) -> bool:
        """True if the read goes into a target's memory."""
        return self.blocks[0].is_zero_copy


def every_block(shards: Iterable[StoredShard], block_nbytes: int) -> Iterator[NeededBlock]:
    """Yield all blocks of all shards."""
    for shard in sorted(shards, key=lambda shard: shard.span):
        for number, span in enumerate(blocks(shard.span.nbytes, block_nbytes)):
            yield NeededBlock(shard, number, span, (), is_zero_copy=False)


def requested_blocks(
    shard: StoredShard,
    items: Sequence[ReadItem],
    block_nbytes: int,
    has_memory: Callable[[ReadItem], bool],
) -> Iterator[NeededBlock]:
    """Yield the blocks of a shard that contain elements of the items, each once, in order."""
    itemsize = DTYPES[shard.dtype].itemsize
    if shard.span.nbytes <= min(block_nbytes, ZERO_COPY_NBYTES - 1):
        span = ByteRange(0, shard.span.nbytes)
        yield NeededBlock(shard, 0, span, tuple(items), is_zero_copy=False)
        return
    wanted: dict[int, list[ReadItem]] = {}
    for item in items:
        for number in _block_numbers(item, block_nbytes // itemsize):
            wanted.setdefault(number, []).append(item)
    needed = []
    for number, wanting in sorted(wanted.items()):
        start = number * block_nbytes
        span = ByteRange(start, min(start + block_nbytes, shard.span.nbytes))
        is_zero_copy = len(wanting) == 1 and _maps_whole(wanting[0], span, itemsize)
        is_zero_copy = is_zero_copy and has_memory(wanting[0])
        needed.append(NeededBlock(shard, number, span, tuple(wanting), is_zero_copy))
    yield from _without_short_runs(needed)


def _without_short_runs(needed: Iterable[NeededBlock]) -> Iterator[NeededBlock]:
    """Use a scratch buffer for runs that are too short for zero copy."""
    for run in group_successive(needed, lambda run, block: _can_join_zero_copy(run[-1], block)):
        if run[0].is_zero_copy and run[-1].stop - run[0].start < ZERO_COPY_NBYTES:
            yield from (
                NeededBlock(n.shard, n.number, n.span, n.items, is_zero_copy=False) for n in run
            )
        else:
            yield from run


def _can_join_zero_copy(a: NeededBlock, b: NeededBlock) -> bool:
    """Return True if one read into one target can fetch two successive blocks."""
    return a.is_zero_copy and b.is_zero_copy and a.items[0] is b.items[0]


def group_successive(
    needed: Iterable[NeededBlock], fits: Callable[[Sequence[NeededBlock], NeededBlock], bool]
) -> Iterator[list[NeededBlock]]:
    """Group successive blocks: each joins the group before it if it fits."""
    row: list[NeededBlock] = []
    for block in needed:
        if row and not fits(row, block):
            yield row
            row = []
        row.append(block)
    if row:
        yield row


def reads_of(needed: Iterable[NeededBlock]) -> Iterator[BlockRead]:
    """Group needed blocks, sorted by offset, into reads."""
    row: list[NeededBlock] = []
    first = last = wasted = 0
    for block in needed:
        start, stop = block.start, block.stop
        gap = start - last
        uses_zero_copy = block.is_zero_copy or (row and row[-1].is_zero_copy)
        if row and not (
            stop - first <= READ_NBYTES
            and gap < MAX_GAP_NBYTES
            and wasted + gap <= MAX_WASTE * (stop - first)
            and (not uses_zero_copy or _can_join_zero_copy(row[-1], block))
        ):
            yield BlockRead(ByteRange(first, last), tuple(row))
            row = []
        if not row:
            first, gap, wasted = start, 0, 0
        row.append(block)
        last = stop
        wasted += gap
    if row:
        yield BlockRead(ByteRange(first, last), tuple(row))


def _maps_whole(item: ReadItem, span: ByteRange, itemsize: int) -> bool:
    run = item.match.run
    return (
        run is not None and run.start * itemsize <= span.start and span.stop <= run.stop * itemsize
    )


def _block_numbers(item: ReadItem, block_numel: int) -> Iterator[int]:
    match = item.match
    runs: Iterable[ElementRange] = (match.run,) if match.run else ()
    for run in runs or runs_of(match.common, match.source, block_numel):
        yield from range(run.start // block_numel, num_blocks(run.stop, block_numel))
