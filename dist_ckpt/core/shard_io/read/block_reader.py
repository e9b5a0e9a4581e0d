"""A load plan, carried out: checked blocks of shard files, into the targets' memory.

Blocks come some at a time: straight into a target where a run of whole blocks maps to its
memory, through a scratch slot elsewhere. What went through a slot is checked before it is
placed; what went straight is checked when it is there, and `CorruptError.touched` says where.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from dist_ckpt.core.format.checksums import block_digest, streamed_digest
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import (
    ElementRange,
    Region,
    boxes_of,
    row_major_strides,
)
from dist_ckpt.core.planning.plan import CellOverlap, ReadItem
from dist_ckpt.core.runtime.buffers import BufferPool, copy
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.shard_io.memory.protocol import Target
from dist_ckpt.core.shard_io.read.block_reads import (
    READ_NBYTES,
    BlockRead,
    BlockRequest,
    every_block,
    gathered,
)
from dist_ckpt.core.shard_io.read.open_files import (
    OpenFile,
    OpenFiles,
    damage_error,
    digest_problem,
)
from dist_ckpt.core.shard_io.read.read_work import CellTargets, SmallShardRun, split_into_work
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.errors import CorruptError, StorageError, listed

# So much is read at once and digested before the next, while a processor still has it cached.
# Measured with 1 GiB: in the page cache 1 MiB reads as fast as 2, and 8 somewhat slower; from the
# disk 2 MiB read as fast as 8, and 1 half as fast: the kernel reads too little ahead.
IO_CHUNK_NBYTES = 2 << 20

_CUT_OFF = "the file ended while it was read"


class BlockReader:
    """One load's reading: threads bring different blocks of it to their targets, if it has any.

    The targets are keyed by tensor and number of the wanted cell; without any, blocks are only
    checked. With `verify` each block's digest is. `touched` are the tensors that may hold
    something of what was read. `slots` are scratch memory that has been used before, which is
    faster than new memory.
    """

    def __init__(
        self,
        files: OpenFiles,
        targets: CellTargets | None,
        *,
        verify: bool,
        slots: BufferPool | None = None,
    ) -> None:
        self.touched: set[str] = set()
        self.files = files
        self.targets = targets
        self._verify = verify
        blocks = (file.header.block_nbytes for file, _ in files)
        self._slots = (slots or BufferPool()).fitting(max(READ_NBYTES, *blocks, 0))
        # What is done for small shards is all Python: threads at it would only be in each
        # other's way, at twice the cost, while the reads of the next rows run beside it.
        self._turn = Lock()

    def run(self, threads: int) -> int:
        """Fill the targets as the plan of the files says; every block is read once.

        Returns how many bytes were read; headers are not counted. CorruptError names what is
        damaged by tensor, rows, rank, file and bytes, and in `touched` the tensors that may hold
        partial data; a StorageError says the same in its message.
        """

        def read_some(some: Sequence[tuple[OpenFile, SmallShardRun | BlockRead]]) -> int:
            return sum(self.read(file, one) for file, one in some)

        with self.telling_touched():
            work = split_into_work(self.files, self.targets, threads)
            return sum(parallel_for(read_some, work, threads=threads))

    @contextmanager
    def telling_touched(self) -> Iterator[None]:
        """Add to the errors of the storage which tensors may hold partial data."""
        try:
            yield
        except CorruptError as error:
            raise CorruptError(
                f"{error}; load an older checkpoint", touched=tuple(sorted(self.touched))
            ) from error
        except StorageError as error:
            touched = sorted(self.touched)
            partial = f"; partial data may be in {listed(touched)}" if touched else ""
            raise StorageError(f"{error}{partial}") from error

    def read(self, file: OpenFile, one: SmallShardRun | BlockRead) -> int:
        """Bring the blocks of one read to their targets; return how many bytes were read."""
        if isinstance(one, BlockRead) and one.straight:
            self._straight(file, one)
        else:
            with self._slots.borrow() as slot:
                data = slot[: one.span.nbytes]
                self.fetch(file, one, data)
                if self.targets is not None:
                    self.place(file, one, data)
        return one.span.nbytes

    def _verifies(self, file: OpenFile) -> bool:
        return self._verify and file.has_digests

    def _fetch_row(self, file: OpenFile, row: SmallShardRun, data: memoryview) -> None:
        shards, begin = file.shards, row.span.start
        with file.reading() as readable:
            count = readable.read_into(file.header.header_nbytes + begin, data)
        if count < row.span.nbytes:
            cut_off = bisect_right(shards.starts, begin + count) - 1
            raise CorruptError(damage_error(file, _only_block(file, cut_off), _CUT_OFF))
        if self._verifies(file):
            self._check_row(file, row, data)

    def _check_row(self, file: OpenFile, row: SmallShardRun, data: memoryview) -> None:
        with self._turn:
            actual = [block_digest(part) for part in row.parts(file, data)]
            if "".join(actual) != file.shards.first_digests(row.first, len(actual)):
                for number, one in enumerate(actual, row.first):
                    _check(file, _only_block(file, number), one)

    def check(self, file: OpenFile, one: SmallShardRun | BlockRead, data: memoryview) -> None:
        """Check bytes that another rank has read as `fetch` does those that it reads."""
        if not self._verifies(file):
            return
        if isinstance(one, SmallShardRun):
            self._check_row(file, one, data)
            return
        _check_blocks(file, one.needs, data)

    def _place_row(self, row: SmallShardRun, parts: Iterable[memoryview]) -> None:
        for item, part in zip(row.items, parts, strict=True):
            match, target = item.match, self._touch(item)
            if (memory := target.memory()) is not None:
                if memory.nbytes != part.nbytes:
                    raise ValueError(f"{item.fqn}: change no tensor while it is loaded")
                memory[:] = part
            else:
                box = match.common
                target.place(match.target, box, part, row_major_strides(box.shape))

    def _straight(self, file: OpenFile, one: BlockRead) -> None:
        first = one.needs[0]
        (item,) = first.items
        memory = self._touch(item).memory()
        assert memory is not None
        start = first.span.start + item.match.shift * DTYPES[item.dtype].itemsize
        self.fetch(file, one, memory[start : start + one.span.nbytes])

    def fetch(self, file: OpenFile, one: SmallShardRun | BlockRead, data: memoryview) -> None:
        """Read and check; CorruptError names the first block that is damaged or cut off."""
        if isinstance(one, SmallShardRun):
            self._fetch_row(file, one, data)
            return
        with file.reading() as readable:
            for needs in gathered(one.needs, _is_one_bite):
                self._bite(file, readable, needs, data[needs[0].start - one.span.start :])

    def _bite(
        self,
        file: OpenFile,
        readable: ReadableFile,
        needs: Sequence[BlockRequest],
        data: memoryview,
    ) -> None:
        """Read and check blocks: one in several steps, or several that come in one."""
        first = needs[0].start
        nbytes = needs[-1].stop - first
        digest, verifies = streamed_digest(), self._verifies(file)
        for start in range(0, nbytes, IO_CHUNK_NBYTES):
            part = data[start : min(start + IO_CHUNK_NBYTES, nbytes)]
            count = readable.read_into(file.header.header_nbytes + first + start, part)
            if count < part.nbytes:
                cut_off = next(need for need in needs if need.stop > first + start + count)
                raise CorruptError(damage_error(file, cut_off, _CUT_OFF))
            if verifies and len(needs) == 1:
                digest.update(part)
        if verifies and len(needs) == 1:
            _check(file, needs[0], digest.hexdigest())
        elif verifies:
            _check_blocks(file, needs, data)

    def place(self, file: OpenFile, one: SmallShardRun | BlockRead, data: memoryview) -> None:
        """Copy the checked blocks of one read, which are `data`, to their targets."""
        if isinstance(one, SmallShardRun):
            with self._turn:
                self._place_row(one, one.parts(file, data))
            return
        for row in gathered(one.needs, _are_placed_at_once):
            itemsize = DTYPES[row[0].shard.dtype].itemsize
            start, stop = row[0].span.start, row[-1].span.stop
            stored = ElementRange(start // itemsize, stop // itemsize)
            offset = row[0].start - one.span.start
            for item in row[0].items:
                target = self._touch(item)
                _copy(item, target, stored, data[offset : offset + stop - start])

    def _touch(self, item: ReadItem) -> Target:
        """Return the target of an item, which is about to get something of what was read."""
        assert self.targets is not None, "nothing is placed where blocks are only checked"
        self.touched.add(item.fqn)
        return self.targets[item.fqn, item.match.part]


def _is_one_bite(needs: Sequence[BlockRequest], need: BlockRequest) -> bool:
    """Say whether a processor still has the first of some blocks cached when one more is read."""
    return need.stop - needs[0].start <= IO_CHUNK_NBYTES


def _only_block(file: OpenFile, number: int) -> BlockRequest:
    (need,) = every_block((file.shards[number],), file.header.block_nbytes)
    return need


def _check(file: OpenFile, need: BlockRequest, actual: str) -> None:
    if (problem := digest_problem(need, actual)) is not None:
        raise CorruptError(damage_error(file, need, problem))


def _check_blocks(file: OpenFile, needs: Sequence[BlockRequest], data: memoryview) -> None:
    """Check blocks whose bytes, from the first one's on, are `data`."""
    first = needs[0].start
    for need in needs:
        _check(file, need, block_digest(data[need.start - first : need.stop - first]))


def _are_placed_at_once(needs: Sequence[BlockRequest], need: BlockRequest) -> bool:
    """Say whether one more block is of the same shard, and wanted by the same items."""
    return needs[-1].shard is need.shard and needs[-1].items == need.items


def _copy(item: ReadItem, target: Target, stored: ElementRange, data: memoryview) -> None:
    """Copy what an item wants of some elements of a stored cell, which are `data`."""
    itemsize, match, memory = DTYPES[item.dtype].itemsize, item.match, target.memory()
    if memory is not None and match.run is not None:
        start, stop = max(stored.start, match.run.start), min(stored.stop, match.run.stop)
        place = memory[(start + match.shift) * itemsize : (stop + match.shift) * itemsize]
        copy(place, data[(start - stored.start) * itemsize : (stop - stored.start) * itemsize])
        return
    strides = row_major_strides(match.source.region.shape)
    for box, start in _boxes(match, stored):
        stop = start + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True)) + 1
        view = data[(start - stored.start) * itemsize : (stop - stored.start) * itemsize]
        target.place(match.target, box, view, strides)


def _boxes(match: CellOverlap, stored: ElementRange) -> Iterator[tuple[Region, int]]:
    """Return the wanted boxes among some elements of a stored cell, and where each begins."""
    piece = match.source
    region = piece.region
    start = max(stored.start, piece.start) - piece.start
    stop = min(stored.stop, piece.start + region.numel) - piece.start
    strides = row_major_strides(region.shape)
    for box in boxes_of(ElementRange(start, stop), region.shape):
        corner = tuple(a + b for a, b in zip(box.offset, region.offset, strict=True))
        wanted = Region(corner, box.shape).intersect(match.common)
        if wanted is not None:
            relative = wanted.relative_to(region.offset).offset
            first = sum(o * s for o, s in zip(relative, strides, strict=True))
            yield wanted, piece.start + first
