"""Which blocks of a shard file are needed, for what, and in which reads they come.

A block is what one checksum covers, so it is the least that can be read and checked. Blocks that
adjoin are read at once, up to a bound; a block is read once, however many cells want it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from dist_ckpt.format.checksums import blocks, num_blocks
from dist_ckpt.format.dtypes import DTYPES
from dist_ckpt.format.geometry import Elements, Piece, Region, Span, joined, row_major_strides
from dist_ckpt.format.shard_table import StoredShard
from dist_ckpt.planning.plan import ReadItem

# One read brings this much at most (or one block, where blocks are larger): enough for the
# storage's full speed, little enough that several threads share a large shard.
READ_NBYTES = 8 << 20

# Holes below this between needed blocks are read through, but only while all that a read
# brings in vain stays under this part of it.
GAP_NBYTES = 64 << 10
MAX_WASTE = 0.04

# Smaller runs of whole blocks go through scratch, so that one read serves many small tensors.
STRAIGHT_NBYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Wish:
    """A read item, and where its elements lie as one run, if they do.

    `source` is that run in the stored cell's memory, `target` where it begins in the wanted
    cell's. Both are None if the elements are scattered in either.
    """

    item: ReadItem
    source: Elements | None
    target: int | None


@dataclass(frozen=True, slots=True)
class Need:
    """A block that is needed; `span` is in the shard's bytes.

    `straight`: it can be read into the memory of its one wish, for it maps there as a whole.
    """

    shard: StoredShard
    number: int
    span: Span
    wishes: tuple[Wish, ...]
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

    span: Span
    needs: tuple[Need, ...]

    @property
    def straight(self) -> bool:
        """Say whether the read goes straight into a target's memory."""
        return self.needs[0].straight


def every_block(shards: Iterable[StoredShard], block_nbytes: int) -> Iterator[Need]:
    """Return all blocks of all shards."""
    for shard in sorted(shards, key=lambda shard: shard.span):
        for number, span in enumerate(blocks(shard.span.nbytes, block_nbytes)):
            yield Need(shard, number, span, (), straight=False)


def needed_blocks(
    shard: StoredShard,
    items: Sequence[ReadItem],
    block_nbytes: int,
    has_memory: Callable[[ReadItem], bool],
) -> Iterator[Need]:
    """Return the blocks of a shard that hold elements of the items, each once, in order."""
    itemsize = DTYPES[shard.dtype].itemsize
    if shard.span.nbytes <= min(block_nbytes, STRAIGHT_NBYTES - 1):
        span = Span(0, shard.span.nbytes)
        yield Need(shard, 0, span, tuple(map(_wish, items)), straight=False)
        return
    wishes: dict[int, list[Wish]] = {}
    for item in items:
        wish = _wish(item)
        for number in _block_numbers(wish, block_nbytes // itemsize):
            wishes.setdefault(number, []).append(wish)
    needs = []
    for number in sorted(wishes):
        start = number * block_nbytes
        span = Span(start, min(start + block_nbytes, shard.span.nbytes))
        wanted_by = tuple(wishes[number])
        straight = len(wanted_by) == 1 and _maps_whole(wanted_by[0], span, itemsize)
        straight = straight and has_memory(wanted_by[0].item)
        needs.append(Need(shard, number, span, wanted_by, straight))
    yield from _without_short_runs(needs)


def needed_runs(
    shard: StoredShard, items: Iterable[ReadItem], block_nbytes: int
) -> Iterator[range]:
    """Return the numbers of the blocks that `needed_blocks` returns, as runs."""
    block_numel = block_nbytes // DTYPES[shard.dtype].itemsize
    numbers = {number for item in items for number in _block_numbers(_wish(item), block_numel)}
    yield from joined(range(number, number + 1) for number in sorted(numbers))


def _without_short_runs(needs: Iterable[Need]) -> Iterator[Need]:
    """Take back `straight` where too few bytes in a row would gain from it."""
    for run in gathered(needs, lambda run, need: _adjoin_straight(run[-1], need)):
        if run[0].straight and run[-1].stop - run[0].start < STRAIGHT_NBYTES:
            yield from (Need(n.shard, n.number, n.span, n.wishes, straight=False) for n in run)
        else:
            yield from run


def _adjoin_straight(a: Need, b: Need) -> bool:
    """Say whether two blocks in a row can come with one read straight into one target."""
    return a.straight and b.straight and a.wishes[0] is b.wishes[0]


def gathered(
    needs: Iterable[Need], fits: Callable[[Sequence[Need], Need], bool]
) -> Iterator[list[Need]]:
    """Gather blocks that follow each other: each joins those before it if it fits them."""
    row: list[Need] = []
    for need in needs:
        if row and not fits(row, need):
            yield row
            row = []
        row.append(need)
    if row:
        yield row


def reads_of(needs: Iterable[Need]) -> Iterator[BlockRead]:
    """Gather needed blocks, sorted by their place in the file, into reads."""
    row: list[Need] = []
    first = last = wasted = 0
    for need in needs:
        start, stop = need.start, need.stop
        gap = start - last
        if row and not (
            stop - first <= READ_NBYTES
            and gap < GAP_NBYTES
            and wasted + gap <= MAX_WASTE * (stop - first)
            and _can_join(row[-1], need)
        ):
            yield BlockRead(Span(first, last), tuple(row))
            row = []
        if not row:
            first, gap, wasted = start, 0, 0
        row.append(need)
        last = stop
        wasted += gap
    if row:
        yield BlockRead(Span(first, last), tuple(row))


def _can_join(last: Need, need: Need) -> bool:
    return _adjoin_straight(last, need) if last.straight or need.straight else True


# --- where the elements of a box lie ---------------------------------------------------------


def _wish(item: ReadItem) -> Wish:
    match = item.match
    source = _one_run(match.common, match.source)
    if source is None:
        return Wish(item, None, None)
    if match.common == match.target.region:
        return Wish(item, source, match.target.start)
    target = _one_run(match.common, match.target)
    return Wish(item, None, None) if target is None else Wish(item, source, target.start)


def _one_run(box: Region, piece: Piece) -> Elements | None:
    """Return where a box lies in its cell's memory, if that is one run."""
    if box is piece.region or box == piece.region:
        return Elements(piece.start, piece.start + box.numel)
    found = tuple(islice(runs_of(box, piece, 1), 2))
    return found[0] if len(found) == 1 else None


def _maps_whole(wish: Wish, span: Span, itemsize: int) -> bool:
    run = wish.source
    return (
        run is not None and run.start * itemsize <= span.start and span.stop <= run.stop * itemsize
    )


def _block_numbers(wish: Wish, block_numel: int) -> Iterator[int]:
    """Return the numbers of the blocks that hold elements of an item, ascending."""
    if wish.source is not None:
        runs: Iterable[Elements] = (wish.source,)
    else:
        runs = runs_of(wish.item.match.common, wish.item.match.source, block_numel)
    for run in runs:
        yield from range(run.start // block_numel, num_blocks(run.stop, block_numel))


def runs_of(box: Region, piece: Piece, gap: int) -> Iterator[Elements]:
    """Return where the elements of a box lie in the memory of the cell it is a piece of.

    Holes of fewer than `gap` elements are taken in, so that the runs are as few as matter: a
    block of `gap` elements is touched by a run if and only if it holds an element of the box.
    Holes only grow from the last dimension to the first, so the runs are one inner box each.
    """
    strides = row_major_strides(piece.region.shape)
    inner = 1
    outer = len(strides)
    while outer and (box.shape[outer - 1] == 1 or strides[outer - 1] - inner < gap):
        outer -= 1
        inner += (box.shape[outer] - 1) * strides[outer]
    corner = box.relative_to(piece.region.offset).offset
    start = piece.start + sum(o * s for o, s in zip(corner, strides, strict=True))
    yield from _outer_runs(box.shape[:outer], strides[:outer], start, inner)


def _outer_runs(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int, numel: int
) -> Iterator[Elements]:
    if not shape:
        yield Elements(start, start + numel)
        return
    for i in range(shape[0]):
        yield from _outer_runs(shape[1:], strides[1:], start + i * strides[0], numel)
