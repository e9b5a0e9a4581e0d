"""Run a load plan: checked blocks of shard files into the targets' memory.

Whole blocks that map to a target's memory are checked there; after an error, `touched` names these
tensors. Other blocks are checked in a scratch buffer and then copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import mul
from threading import Lock

from dist_ckpt.core.format.checksums import block_digest, streamed_digest
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ElementRange, Region, boxes_of, row_major_strides
from dist_ckpt.core.planning.plan import ReadItem
from dist_ckpt.core.runtime.buffers import BufferPool, copy
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.shard_io.memory.protocol import Target
from dist_ckpt.core.shard_io.read.block_reads import (
    READ_NBYTES,
    BlockRead,
    CellTargets,
    NeededBlock,
    PlannedRead,
    SmallShardsRead,
    damage_error,
    digest_problem,
    every_block,
    group_successive,
    split_into_work,
)
from dist_ckpt.core.shard_io.read.open_files import OpenFile, OpenFiles
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.errors import CorruptError, StorageError, listed

# The bytes to read and digest before the next read, while a processor has them cached. Measured
# with 1 GiB: in the page cache, 1 MiB reads as fast as 2, and 8 somewhat slower. From the disk, 2
# MiB reads as fast as 8, and 1 half as fast: the kernel reads too little ahead.
IO_CHUNK_NBYTES = 2 << 20

_CUT_OFF = "the file ended while it was read"


class BlockReader:
    """Reads the blocks of one load in threads, and fills targets, if there are any.

    Targets are keyed by tensor and number of the requested cell. `verify` checks digests. `touched`
    names tensors that may contain data that was read. Reused `slots` are faster than new memory.
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
        # Work on small shards is all Python: threads would only block each other, at twice the
        # cost. Meanwhile the next reads are read.
        self._python_lock = Lock()

    def read_all(self, threads: int) -> int:
        """Fill the targets; every block is read once. Return the bytes read, without headers.

        CorruptError, with the tensors in `touched` that may have partial data, or StorageError.
        """

        def read_all(reads: Sequence[tuple[OpenFile, PlannedRead]]) -> int:
            return sum(self.read(file, read) for file, read in reads)

        with self.name_touched():
            work = split_into_work(self.files, self.targets, threads)
            return sum(parallel_for(read_all, work, threads=threads))

    @contextmanager
    def name_touched(self) -> Iterator[None]:
        """Add the tensors that may have partial data to errors of the storage."""
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

    def read(self, file: OpenFile, read: PlannedRead) -> int:
        """Read blocks into their targets; return the bytes read."""
        if isinstance(read, BlockRead) and read.is_zero_copy:
            first = read.blocks[0]
            (item,) = first.items
            memory = self._touch(item).memory()
            assert memory is not None
            start = first.span.start + item.match.shift * DTYPES[item.dtype].itemsize
            self.fetch(file, read, memory[start : start + read.span.nbytes])
            return read.span.nbytes
        with self._slots.borrow() as slot:
            data = slot[: read.span.nbytes]
            self.fetch(file, read, data)
            if self.targets is not None:
                self.place(file, read, data)
        return read.span.nbytes

    def fetch(self, file: OpenFile, read: PlannedRead, data: memoryview) -> None:
        """Read and check; CorruptError names the first block that is damaged or cut off."""
        begin = read.span.start
        with file.reading() as readable:
            if isinstance(read, BlockRead):
                for needed in group_successive(
                    read.blocks, lambda chunk, block: block.stop - chunk[0].start <= IO_CHUNK_NBYTES
                ):
                    self._read_chunk(file, readable, needed, data[needed[0].start - begin :])
                return
            count = readable.read_into(file.header.header_nbytes + begin, data)
        if count < read.span.nbytes:
            cut_off = _only_block(file, bisect_right(file.shards.starts, begin + count) - 1)
            raise CorruptError(damage_error(file.path, file.header, cut_off, _CUT_OFF))
        self.check(file, read, data)

    def _read_chunk(
        self,
        file: OpenFile,
        readable: ReadableFile,
        needed: Sequence[NeededBlock],
        data: memoryview,
    ) -> None:
        """Read and check one block in several steps, or several blocks in one step."""
        first = needed[0].start
        nbytes = needed[-1].stop - first
        digest, verifies = streamed_digest(), self._verify and file.has_digests
        for start in range(0, nbytes, IO_CHUNK_NBYTES):
            part = data[start : min(start + IO_CHUNK_NBYTES, nbytes)]
            count = readable.read_into(file.header.header_nbytes + first + start, part)
            if count < part.nbytes:
                cut_off = next(block for block in needed if block.stop > first + start + count)
                raise CorruptError(damage_error(file.path, file.header, cut_off, _CUT_OFF))
            if verifies and len(needed) == 1:
                digest.update(part)
        if verifies and len(needed) == 1:
            _check(file, needed[0], digest.hexdigest())
        elif verifies:
            _check_blocks(file, needed, data)

    def check(self, file: OpenFile, read: PlannedRead, data: memoryview) -> None:
        """Check bytes that this rank or another one has read. Raises CorruptError."""
        if not (self._verify and file.has_digests):
            return
        if isinstance(read, BlockRead):
            _check_blocks(file, read.blocks, data)
            return
        with self._python_lock:
            actual = [block_digest(part) for part in read.shard_data(file, data)]
            if "".join(actual) != file.shards.first_digests(read.first, len(actual)):
                for number, digest in enumerate(actual, read.first):
                    _check(file, _only_block(file, number), digest)

    def place(self, file: OpenFile, read: PlannedRead, data: memoryview) -> None:
        """Copy the checked blocks of one read, which are `data`, to their targets."""
        if isinstance(read, SmallShardsRead):
            with self._python_lock:
                self._place_shards(read, read.shard_data(file, data))
            return
        # Successive blocks of the same shard and the same items are placed at once.
        for blocks in group_successive(
            read.blocks, lambda group, b: group[-1].shard is b.shard and group[-1].items == b.items
        ):
            itemsize = DTYPES[blocks[0].shard.dtype].itemsize
            start, stop = blocks[0].span.start, blocks[-1].span.stop
            stored = ElementRange(start // itemsize, stop // itemsize)
            offset = blocks[0].start - read.span.start
            for item in blocks[0].items:
                target = self._touch(item)
                _copy(item, target, stored, data[offset : offset + stop - start])

    def _place_shards(self, read: SmallShardsRead, shard_data: Iterable[memoryview]) -> None:
        for item, data in zip(read.items, shard_data, strict=True):
            match, target = item.match, self._touch(item)
            if (memory := target.memory()) is not None:
                if memory.nbytes != data.nbytes:
                    raise ValueError(f"{item.fqn}: change no tensor while it is loaded")
                memory[:] = data
            else:
                box = match.common
                target.place(match.target, box, data, row_major_strides(box.shape))

    def _touch(self, item: ReadItem) -> Target:
        """Return the target of an item, and record it as touched."""
        assert self.targets is not None, "without targets, blocks are only checked"
        self.touched.add(item.fqn)
        return self.targets[item.fqn, item.match.requested_number]


def _only_block(file: OpenFile, number: int) -> NeededBlock:
    (block,) = every_block((file.shards[number],), file.header.block_nbytes)
    return block


def _check(file: OpenFile, block: NeededBlock, actual: str) -> None:
    if (problem := digest_problem(block, actual)) is not None:
        raise CorruptError(damage_error(file.path, file.header, block, problem))


def _check_blocks(file: OpenFile, needed: Sequence[NeededBlock], data: memoryview) -> None:
    first = needed[0].start
    for block in needed:
        _check(file, block, block_digest(data[block.start - first : block.stop - first]))


def _copy(item: ReadItem, target: Target, stored: ElementRange, data: memoryview) -> None:
    """Copy the requested part of some elements of a stored cell, which are `data`."""
    itemsize, match, memory = DTYPES[item.dtype].itemsize, item.match, target.memory()
    if memory is not None and match.contiguous is not None:
        start, stop = (
            max(stored.start, match.contiguous.start),
            min(stored.stop, match.contiguous.stop),
        )
        part = memory[(start + match.shift) * itemsize : (stop + match.shift) * itemsize]
        copy(part, data[(start - stored.start) * itemsize : (stop - stored.start) * itemsize])
        return
    piece, region = match.source, match.source.region
    strides = row_major_strides(region.shape)
    start = max(stored.start - piece.start, 0)
    stop = min(stored.stop - piece.start, region.numel)
    for box in boxes_of(ElementRange(start, stop), region.shape):
        corner = tuple(a + b for a, b in zip(box.offset, region.offset, strict=True))
        if (wanted := Region(corner, box.shape).intersect(match.common)) is None:
            continue
        relative = wanted.relative_to(region.offset).offset
        begin = piece.start - stored.start + sum(map(mul, relative, strides))
        end = begin + sum((n - 1) * s for n, s in zip(wanted.shape, strides, strict=True)) + 1
        target.place(match.target, wanted, data[begin * itemsize : end * itemsize], strides)
