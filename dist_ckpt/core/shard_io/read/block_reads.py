"""Which blocks of a shard file are needed, for what, and in which reads they come.

A block is what one checksum covers, so it is the least that can be read and checked. Blocks that
adjoin are read at once, up to a bound; a block is read once, however many cells want it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dist_ckpt.core.format.checksums import blocks, num_blocks
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange, ElementRange, runs_of
from dist_ckpt.core.format.shard_file import StoredShard
from dist_ckpt.core.planning.plan import ReadItem

# One read brings this much at most (or one block, where blocks are larger): enough for the
# storage's full speed, little enough that several threads share a large shard.
READ_NBYTES = 8 << 20

# Holes below this between needed blocks are read through, but only while all that a read
# brings in vain stays under this part of it.
MAX_GAP_NBYTES = 64 << 10
MAX_WASTE = 0.04

# Smaller runs of whole blocks go through scratch, so that one read serves many small tensors.
ZERO_COPY_NBYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """A block that is needed; `span` is in the shard's bytes.

    `items` want some of it. `straight`: it can be read into the memory of its one item, for it maps
    there as a whole.
    """

    shard: StoredShard
    number: int
    span: ByteRange
    items: tuple[ReadItem, ...]
    straight: bool

    @property
    def start(self) -> int:
        """Where the block begins in the file's data section."""
        return self.shard.span.start + self.span.start

    @property
    def stop(self) -> int:
        """Where the block ends in the file's data section."""
        return self.shard.span.start + self.span.stop


@dataclass(frozen=True, slots=True)
class BlockRead:
    """One read: a span of the data section, and the needed blocks in it, in order."""

    span: ByteRange
    needs: tuple[BlockRequest, ...]

    @property
    def straight(self) -> bool:
        """Say whether the read goes straight into a target's memory."""
        return self.needs[0].straight


def every_block(shards: Iterable[StoredShard], block_nbytes: int) -> Iterator[BlockRequest]:
    """Return all blocks of all shards."""
    for shard in sorted(shards, key=lambda shard: shard.span):
        for number, span in enumerate(blocks(shard.span.nbytes, block_nbytes)):
            yield BlockRequest(shard, number, span, (), straight=False)


def requested_blocks(
    shard: StoredShard,
    items: Sequence[ReadItem],
    block_nbytes: int,
    has_memory: Callable[[ReadItem], bool],
) -> Iterator[BlockRequest]:
    """Return the blocks of a shard that hold elements of the items, each once, in order."""
    itemsize = DTYPES[shard.dtype].itemsize
    if shard.span.nbytes <= min(block_nbytes, ZERO_COPY_NBYTES - 1):
        span = ByteRange(0, shard.span.nbytes)
        yield BlockRequest(shard, 0, span, tuple(items), straight=False)
        return
    wanted: dict[int, list[ReadItem]] = {}
    for item in items:
        for number in _block_numbers(item, block_nbytes // itemsize):
            wanted.setdefault(number, []).append(item)
    needs = []
    for number, wanting in sorted(wanted.items()):
        start = number * block_nbytes
        span = ByteRange(start, min(start + block_nbytes, shard.span.nbytes))
        straight = len(wanting) == 1 and _maps_whole(wanting[0], span, itemsize)
        straight = straight and has_memory(wanting[0])
        needs.append(BlockRequest(shard, number, span, tuple(wanting), straight))
    yield from _without_short_runs(needs)


def _without_short_runs(needs: Iterable[BlockRequest]) -> Iterator[BlockRequest]:
    """Take back `straight` where too few bytes in a row would gain from it."""
    for run in gathered(needs, lambda run, need: _adjoin_straight(run[-1], need)):
        if run[0].straight and run[-1].stop - run[0].start < ZERO_COPY_NBYTES:
            yield from (
                BlockRequest(n.shard, n.number, n.span, n.items, straight=False) for n in run
            )
        else:
            yield from run


def _adjoin_straight(a: BlockRequest, b: BlockRequest) -> bool:
    """Say whether two blocks in a row can come with one read straight into one target."""
    return a.straight and b.straight and a.items[0] is b.items[0]


def gathered(
    needs: Iterable[BlockRequest], fits: Callable[[Sequence[BlockRequest], BlockRequest], bool]
) -> Iterator[list[BlockRequest]]:
    """Gather blocks that follow each other: each joins those before it if it fits them."""
    row: list[BlockRequest] = []
    for need in needs:
        if row and not fits(row, need):
            yield row
            row = []
        row.append(need)
    if row:
        yield row


def reads_of(needs: Iterable[BlockRequest]) -> Iterator[BlockRead]:
    """Gather needed blocks, sorted by their place in the file, into reads."""
    row: list[BlockRequest] = []
    first = last = wasted = 0
    for need in needs:
        start, stop = need.start, need.stop
        gap = start - last
        if row and not (
            stop - first <= READ_NBYTES
            and gap < MAX_GAP_NBYTES
            and wasted + gap <= MAX_WASTE * (stop - first)
            and _can_join(row[-1], need)
        ):
            yield BlockRead(ByteRange(first, last), tuple(row))
            row = []
        if not row:
            first, gap, wasted = start, 0, 0
        row.append(need)
        last = stop
        wasted += gap
    if row:
        yield BlockRead(ByteRange(first, last), tuple(row))


def _can_join(last: BlockRequest, need: BlockRequest) -> bool:
    return _adjoin_straight(last, need) if last.straight or need.straight else True


def _maps_whole(item: ReadItem, span: ByteRange, itemsize: int) -> bool:
    run = item.match.run
    return (
        run is not None and run.start * itemsize <= span.start and span.stop <= run.stop * itemsize
    )


def _block_numbers(item: ReadItem, block_numel: int) -> Iterator[int]:
    """Return the numbers of the blocks that hold elements of an item, ascending."""
    match = item.match
    runs: Iterable[ElementRange] = (match.run,) if match.run else ()
    for run in runs or runs_of(match.common, match.source, block_numel):
        yield from range(run.start // block_numel, num_blocks(run.stop, block_numel))
