"""Choose the blocks of a shard file that a load needs, and the reads that fetch them.

A block is the smallest unit that can be checked. Each block is read once, even if several cells
need it. Adjacent blocks are read together, up to a limit. A load of thousands of small tensors
spends its time in Python, so adjacent small shards share one decision and one read
(`SmallShardsRead`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from dist_ckpt.core.format.checksums import block_digest, blocks, num_blocks
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange, ElementRange, find_ranges
from dist_ckpt.core.format.shard_file import ShardFile, StoredShard
from dist_ckpt.core.planning.plan import LoadPlan, ReadItem
from dist_ckpt.core.shard_io.memory.cell_memory import Target
from dist_ckpt.core.shard_io.read.open_files import OpenFile, OpenFiles, rows_of, rows_text
from dist_ckpt.errors import CorruptError

# The limit of one read, unless one block is larger. It is large enough for the full speed of the
# storage, and small enough for several threads to share a large shard.
READ_NBYTES = 8 << 20

# A read includes gaps up to this size between blocks, if it wastes at most this fraction.
MAX_GAP_NBYTES = 64 << 10
MAX_WASTE = 0.04

# Reads below this size use a scratch buffer, so that one read serves many small tensors.
ZERO_COPY_NBYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class NeededBlock:
    """A block that `items` need. If `is_zero_copy`, it is read into the memory of its one item."""

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
    """One read: a span of the data section, and its needed blocks in order."""

    span: ByteRange
    blocks: tuple[NeededBlock, ...]

    @property
    def is_zero_copy(self) -> bool:
        """True if the read goes into a target's memory."""
        return self.blocks[0].is_zero_copy


@dataclass(frozen=True, slots=True)
class SmallShardsRead:
    """Shards of one block each, from number `first`. One item requests each of them as a whole."""

    first: int
    items: tuple[ReadItem, ...]
    span: ByteRange

    def shard_data(self, file: OpenFile, data: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of each shard. `data` has the bytes of all of them."""
        starts = file.shards.starts[self.first : self.first + len(self.items) + 1]
        for start, stop in pairwise(starts):
            yield data[start - self.span.start : stop - self.span.start]


PlannedRead = SmallShardsRead | BlockRead

# The memory of each requested cell, by tensor and number of the cell.
CellTargets = Mapping[tuple[str, int], Target]


# --- the blocks that are needed --------------------------------------------------------------


def all_blocks(shards: Iterable[StoredShard], block_nbytes: int) -> Iterator[NeededBlock]:
    """Yield all blocks of all shards."""
    for shard in sorted(shards, key=lambda shard: shard.span):
        for number, span in enumerate(blocks(shard.span.nbytes, block_nbytes)):
            yield NeededBlock(shard, number, span, (), is_zero_copy=False)


def find_shard_blocks(
    shard: StoredShard,
    items: Sequence[ReadItem],
    block_nbytes: int,
    has_memory: Callable[[ReadItem], bool],
) -> Iterator[NeededBlock]:
    """Yield the blocks of a shard that items need, each once, in order."""
    itemsize = DTYPES[shard.dtype].itemsize
    if shard.span.nbytes <= min(block_nbytes, ZERO_COPY_NBYTES - 1):
        span = ByteRange(0, shard.span.nbytes)
        yield NeededBlock(shard, 0, span, tuple(items), is_zero_copy=False)
        return
    items_by_block: dict[int, list[ReadItem]] = {}
    block_numel = block_nbytes // itemsize
    for item in items:
        overlap = item.overlap
        ranges: Iterable[ElementRange] = (overlap.contiguous,) if overlap.contiguous else ()
        for part in ranges or find_ranges(overlap.common, overlap.stored_piece, block_numel):
            for number in range(part.start // block_numel, num_blocks(part.stop, block_numel)):
                items_by_block.setdefault(number, []).append(item)
    needed = []
    for number, block_items in sorted(items_by_block.items()):
        start = number * block_nbytes
        span = ByteRange(start, min(start + block_nbytes, shard.span.nbytes))
        is_zero_copy = len(block_items) == 1 and _contains_block(
            block_items[0].overlap.contiguous, span, itemsize
        )
        is_zero_copy = is_zero_copy and has_memory(block_items[0])
        needed.append(NeededBlock(shard, number, span, tuple(block_items), is_zero_copy))
    for group in group_successive(needed, lambda group, block: _can_share_read(group[-1], block)):
        if group[0].is_zero_copy and group[-1].stop - group[0].start < ZERO_COPY_NBYTES:
            yield from (replace(block, is_zero_copy=False) for block in group)
        else:
            yield from group


def _contains_block(elements: ElementRange | None, span: ByteRange, itemsize: int) -> bool:
    if elements is None:
        return False
    return elements.start * itemsize <= span.start and span.stop <= elements.stop * itemsize


def group_by_shard(file: OpenFile, items: Iterable[ReadItem]) -> list[tuple[int, list[ReadItem]]]:
    """Return the numbers of the shards that items read, ascending, with the items of each."""
    items_by_number: dict[int, list[ReadItem]] = {}
    for item in items:
        items_by_number.setdefault(file.shard_number(item), []).append(item)
    return sorted(items_by_number.items())


def find_needed_blocks(
    file: OpenFile, items: Iterable[ReadItem], targets: CellTargets | None
) -> Iterator[NeededBlock]:
    """Yield the blocks of a file that items need, in the order of the file."""

    def has_memory(item: ReadItem) -> bool:
        if targets is None:
            return False
        return targets[item.fqn, item.overlap.requested_number].memory() is not None

    for shard_number, wanted in group_by_shard(file, items):
        shard = file.shards[shard_number]
        yield from find_shard_blocks(shard, wanted, file.header.block_nbytes, has_memory)


# --- the reads that fetch them ---------------------------------------------------------------


def _can_share_read(a: NeededBlock, b: NeededBlock) -> bool:
    """Return True if one read into one target can fetch two successive blocks."""
    return a.is_zero_copy and b.is_zero_copy and a.items[0] is b.items[0]


def group_successive(
    needed: Iterable[NeededBlock], fits: Callable[[Sequence[NeededBlock], NeededBlock], bool]
) -> Iterator[list[NeededBlock]]:
    """Group successive blocks. A block joins the group before it if `fits` returns True."""
    group: list[NeededBlock] = []
    for block in needed:
        if group and not fits(group, block):
            yield group
            group = []
        group.append(block)
    if group:
        yield group


def group_into_reads(
    needed: Iterable[NeededBlock], max_nbytes: int | None = None
) -> Iterator[BlockRead]:
    """Yield the reads for needed blocks, which are sorted by offset."""
    limit = max_nbytes or READ_NBYTES
    group: list[NeededBlock] = []
    first = last = wasted = 0
    for block in needed:
        start, stop = block.start, block.stop
        gap = start - last
        uses_zero_copy = block.is_zero_copy or (group and group[-1].is_zero_copy)
        if group and not (
            stop - first <= limit
            and gap < MAX_GAP_NBYTES
            and wasted + gap <= MAX_WASTE * (stop - first)
            and (not uses_zero_copy or _can_share_read(group[-1], block))
        ):
            yield BlockRead(ByteRange(first, last), tuple(group))
            group = []
        if not group:
            first, gap, wasted = start, 0, 0
        group.append(block)
        last = stop
        wasted += gap
    if group:
        yield BlockRead(ByteRange(first, last), tuple(group))


# --- damaged blocks --------------------------------------------------------------------------


def rows_of_block(block: NeededBlock) -> ByteRange | None:
    """Return the rows of its tensor that a block contains."""
    shard = block.shard
    itemsize = DTYPES[shard.dtype].itemsize
    part = ElementRange(block.span.start // itemsize, block.span.stop // itemsize)
    return rows_of(shard.cell, shard.shape, part)


def damage_error(path: str, header: ShardFile, block: NeededBlock, problem: str) -> CorruptError:
    """Return the error with the tensor, rows, rank, file and bytes of a damaged block."""
    start = header.header_nbytes
    return CorruptError(
        f"{block.shard.fqn} {rows_text(rows_of_block(block))}: {problem} "
        f"({path} of rank {header.rank}, bytes {start + block.start}:{start + block.stop})",
        path=path,
    )


def digest_problem(block: NeededBlock, actual: str) -> str | None:
    """Return a message if a block's digest differs from the one in the header, or None."""
    expected = block.shard.digests[block.number]
    if actual == expected:
        return None
    return f"damaged, the block's digest is {actual}, the header says {expected}"


def check_digest(path: str, header: ShardFile, block: NeededBlock, actual: str) -> None:
    """Raise CorruptError if a block's digest differs from the one in the header."""
    if (problem := digest_problem(block, actual)) is not None:
        raise damage_error(path, header, block, problem)


def check_digests(
    path: str, header: ShardFile, needed: Sequence[NeededBlock], data: memoryview
) -> None:
    """Check the blocks of one read, whose bytes are `data`. CorruptError names a damaged one."""
    first = needed[0].start
    for block in needed:
        content = data[block.start - first : block.stop - first]
        check_digest(path, header, block, block_digest(content))


# --- the work of each thread -----------------------------------------------------------------

# A processor still has this much cached after it was read: see `IO_CHUNK_NBYTES`.
SMALL_READ_NBYTES = 2 << 20

# Fewer adjacent small shards are read like large ones, across gaps.
MIN_SHARDS = 16

# Work on small shards is all Python, and threads that take turns wait as long as they work. So a
# thread gets this many reads of small shards together. A larger number does not help reads from the
# page cache, and slows reads from the disk.
MAX_SMALL_READS = 16

# The bytes that one thread reads before it gets more work. To get work takes 0.1 ms of Python, and
# the other threads wait: with 8 MiB, loads from memory took 4 to 16 % longer.
WORK_NBYTES = 32 << 20


def split_off_small_shards(
    file: OpenFile, items: Sequence[ReadItem]
) -> tuple[list[SmallShardsRead], Sequence[ReadItem]]:
    """Return the reads of adjacent small shards that items of a file need, and other items."""
    numbers = list(map(file.shard_number, items))
    item_by_shard: dict[int, ReadItem | None] = {}
    for number, item in zip(numbers, items, strict=True):
        is_single = number not in item_by_shard and item.overlap.is_whole
        item_by_shard[number] = item if is_single else None
    starts = file.shards.starts
    max_nbytes = min(file.header.block_nbytes, ZERO_COPY_NBYTES - 1, SMALL_READ_NBYTES)
    small_items = {
        number: item
        for number, item in item_by_shard.items()
        if item is not None and starts[number + 1] - starts[number] <= max_nbytes
    }
    adjacent = [
        shards
        for shards in _group_adjacent(sorted(small_items), starts)
        if len(shards) >= MIN_SHARDS
    ]
    small_reads = []
    for shards in adjacent:
        span = ByteRange(starts[shards.start], starts[shards.stop])
        wanted = tuple(map(small_items.__getitem__, shards))
        small_reads.append(SmallShardsRead(shards.start, wanted, span))
    if sum(map(len, adjacent)) == len(items):
        return small_reads, ()
    in_small_reads = {number for shards in adjacent for number in shards}
    pairs = zip(numbers, items, strict=True)
    return small_reads, [item for number, item in pairs if number not in in_small_reads]


def _group_adjacent(numbers: Iterable[int], starts: Sequence[int]) -> Iterator[range]:
    """Group adjacent shard numbers, which are ascending, up to the limit of one read."""
    first = stop = 0
    for number in numbers:
        if number != stop or starts[number + 1] - starts[first] > SMALL_READ_NBYTES:
            if stop > first:
                yield range(first, stop)
            first = number
        stop = number + 1
    if stop > first:
        yield range(first, stop)


def count_placed_nbytes(plan: LoadPlan) -> int:
    """Return the number of target bytes that a plan fills."""
    all_items = chain.from_iterable(plan.values())
    return sum(item.overlap.common.numel * DTYPES[item.dtype].itemsize for item in all_items)


def split_into_work(
    files: OpenFiles, targets: CellTargets | None, threads: int, max_nbytes: int | None = None
) -> Iterator[list[tuple[OpenFile, PlannedRead]]]:
    """Yield groups of reads, each for one thread. The last groups are smaller, for balance.

    `max_nbytes` is the limit of a read of large shards, `READ_NBYTES` by default.
    """
    small_work: list[tuple[OpenFile, PlannedRead]] = []
    reads: list[tuple[OpenFile, PlannedRead]] = []
    nbytes, nbytes_left = 0, count_placed_nbytes(files.plan)
    for file, items in files:
        small_reads, remaining = split_off_small_shards(file, items)
        for small_read in small_reads:
            small_work.append((file, small_read))
            if len(small_work) == MAX_SMALL_READS:
                yield small_work
                small_work = []
        for read in group_into_reads(find_needed_blocks(file, remaining, targets), max_nbytes):
            reads.append((file, read))
            nbytes += read.span.nbytes
            if nbytes >= min(WORK_NBYTES, nbytes_left // (2 * threads)):
                yield reads
                nbytes_left -= nbytes
                reads, nbytes = [], 0
    yield from (work for work in (reads, small_work) if work)
