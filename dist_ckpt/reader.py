"""A load plan, carried out: checked blocks of shard files, into the targets' memory.

Blocks come some at a time: straight into a target where a run of whole blocks maps to its
memory, through a scratch slot elsewhere. What went through a slot is checked before it is
placed; what went straight is checked when it is there, and `CorruptError.touched` says where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dist_ckpt.block_reads import READ_NBYTES, BlockRead, Need, Wish, needed_blocks, reads_of
from dist_ckpt.dtypes import DTYPES
from dist_ckpt.errors import CorruptError, StorageError, listed
from dist_ckpt.memory import Target
from dist_ckpt.open_files import OpenFile, OpenFiles, block_problem, damage
from dist_ckpt.parallel import Slots, each
from dist_ckpt.plan import LoadPlan, ReadItem
from dist_ckpt.region import (
    Cell,
    Elements,
    Piece,
    Region,
    Shape,
    boxes_of,
    row_major_strides,
)


class Nowhere:
    """A target that keeps nothing: what is read for it is only verified."""

    def memory(self) -> memoryview | None:
        """See `Target.memory`."""
        return None

    def place(self, piece: Piece, box: Region, data: memoryview, strides: Shape) -> None:
        """See `Target.place`."""


# The memory of each wanted cell, by tensor and number of the cell.
Targets = Mapping[tuple[str, int], Target]


@dataclass(frozen=True, slots=True)
class ReadTotals:
    """What a load cost at the storage, and what it filled; headers are not counted."""

    nbytes_read: int
    nbytes_placed: int
    num_reads: int


def read(
    open_files: OpenFiles, plan: LoadPlan, targets: Targets, *, verify: bool, threads: int
) -> ReadTotals:
    """Fill the targets, keyed by tensor and number of the wanted cell, as the plan says.

    Every block is read once; with `verify` its digest is checked. CorruptError names what is
    damaged by tensor, rows, rank, file and bytes, and in `touched` the tensors that may hold
    partial data; a StorageError says the same in its message.
    """
    reading = _Reading(targets, verify=verify, slot_nbytes=_slot_nbytes(open_files, plan))
    work = (
        (file, one)
        for reads in plan.files
        for file in (open_files.files[reads.file],)
        for one in _reads_of_file(file, reads.items, targets)
    )
    try:
        counts = each(lambda one: reading.read(*one), work, threads=threads)
    except CorruptError as error:
        raise CorruptError(
            f"{error}; load an older checkpoint", touched=tuple(sorted(reading.touched))
        ) from error
    except StorageError as error:
        touched = sorted(reading.touched)
        partial = f"; partial data may be in {listed(touched)}" if touched else ""
        raise StorageError(f"{error}{partial}") from error
    nbytes_placed = sum(
        item.common.numel * DTYPES[item.dtype].itemsize
        for reads in plan.files
        for item in reads.items
    )
    return ReadTotals(sum(counts), nbytes_placed, len(counts))


def _slot_nbytes(open_files: OpenFiles, plan: LoadPlan) -> int:
    blocks = (open_files.files[reads.file].header.block_nbytes for reads in plan.files)
    return max(READ_NBYTES, *blocks, 0)


def _reads_of_file(
    file: OpenFile, items: Iterable[ReadItem], targets: Targets
) -> Iterator[BlockRead]:
    by_shard: dict[tuple[str, Cell], list[ReadItem]] = {}
    for item in items:
        by_shard.setdefault((item.tensor, item.stored), []).append(item)

    def has_memory(item: ReadItem) -> bool:
        return targets[item.fqn, item.part].memory() is not None

    wanted = sorted(((file.shards[key], key) for key in by_shard), key=lambda one: one[0].span)
    return reads_of(
        need
        for shard, key in wanted
        for need in needed_blocks(shard, by_shard[key], file.header.block_nbytes, has_memory)
    )


class _Reading:
    """One `read`: threads bring different blocks of it."""

    def __init__(self, targets: Targets, *, verify: bool, slot_nbytes: int) -> None:
        self.touched: set[str] = set()
        self._targets = targets
        self._verify = verify
        self._slots = Slots(slot_nbytes)

    def read(self, file: OpenFile, one: BlockRead) -> int:
        """Bring the blocks of one read to their targets; return how many bytes were read."""
        if one.direct:
            self._straight(file, one)
        else:
            with self._slots.one() as slot:
                data = slot[: one.span.nbytes]
                self._fetch(file, one, data)
                self._place(one, data)
        return one.span.nbytes

    def _straight(self, file: OpenFile, one: BlockRead) -> None:
        first = one.needs[0]
        (wish,) = first.wishes
        assert wish.source is not None
        assert wish.target is not None
        itemsize = DTYPES[first.shard.dtype].itemsize
        memory = self._targets[wish.item.fqn, wish.item.part].memory()
        assert memory is not None
        start = first.span.start + (wish.target - wish.source.start) * itemsize
        self.touched.add(wish.item.fqn)
        self._fetch(file, one, memory[start : start + one.span.nbytes])

    def _fetch(self, file: OpenFile, one: BlockRead, data: memoryview) -> None:
        """Read and check; CorruptError names the first block that is damaged or cut off."""
        with file.reading() as readable:
            count = readable.read_into(file.header.header_nbytes + one.span.start, data)
        for need in one.needs:
            start, stop = need.start - one.span.start, need.stop - one.span.start
            if stop > count:
                raise CorruptError(damage(file, need, "the file ended while it was read"))
            if not self._verify:
                continue
            if (problem := block_problem(need, data[start:stop])) is not None:
                raise CorruptError(damage(file, need, problem))

    def _place(self, one: BlockRead, data: memoryview) -> None:
        for row in _rows(one.needs):
            itemsize = DTYPES[row[0].shard.dtype].itemsize
            start, stop = row[0].span.start, row[-1].span.stop
            stored = Elements(start // itemsize, stop // itemsize)
            offset = row[0].start - one.span.start
            for wish in row[0].wishes:
                target = self._targets[wish.item.fqn, wish.item.part]
                if not isinstance(target, Nowhere):
                    self.touched.add(wish.item.fqn)
                    _copy(wish, target, stored, data[offset : offset + stop - start])


def _rows(needs: Iterable[Need]) -> Iterator[list[Need]]:
    """Gather blocks of one shard that the same items want: they are placed at once."""
    row: list[Need] = []
    for need in needs:
        if row and (row[-1].shard is not need.shard or row[-1].wishes != need.wishes):
            yield row
            row = []
        row.append(need)
    yield row


def _copy(wish: Wish, target: Target, stored: Elements, data: memoryview) -> None:
    """Copy what a wish wants of some elements of a stored cell, which are `data`."""
    itemsize = DTYPES[wish.item.dtype].itemsize
    memory = target.memory()
    if memory is not None and wish.source is not None and wish.target is not None:
        start = max(stored.start, wish.source.start)
        stop = min(stored.stop, wish.source.stop)
        shift = wish.target - wish.source.start
        memory[(start + shift) * itemsize : (stop + shift) * itemsize] = data[
            (start - stored.start) * itemsize : (stop - stored.start) * itemsize
        ]
        return
    region = wish.item.source.region
    strides = row_major_strides(region.shape)
    for box, start in _boxes(wish, stored):
        stop = start + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True)) + 1
        view = data[(start - stored.start) * itemsize : (stop - stored.start) * itemsize]
        target.place(wish.item.target, box, view, strides)


def _boxes(wish: Wish, stored: Elements) -> Iterator[tuple[Region, int]]:
    """Return the wanted boxes among some elements of a stored cell, and where each begins."""
    piece = wish.item.source
    region = piece.region
    start = max(stored.start, piece.start) - piece.start
    stop = min(stored.stop, piece.start + region.numel) - piece.start
    strides = row_major_strides(region.shape)
    for box in boxes_of(Elements(start, stop), region.shape):
        corner = tuple(a + b for a, b in zip(box.offset, region.offset, strict=True))
        wanted = Region(corner, box.shape).intersect(wish.item.common)
        if wanted is not None:
            relative = wanted.relative_to(region.offset).offset
            first = sum(o * s for o, s in zip(relative, strides, strict=True))
            yield wanted, piece.start + first
