"""Run a load plan: read blocks of shard files, check their digests, and fill the targets.

A block that a target needs as a whole is read into the target's memory and checked there. Other
blocks are checked in a scratch buffer and then copied. Devices copy from `DeviceBuffers`. After an
error, `touched` names the tensors that may have partial data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import mul
from threading import Lock

from dist_ckpt.core.format.checksums import block_digest, streamed_digest
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import (
    ByteRange,
    ElementRange,
    Region,
    row_major_strides,
    split_into_boxes,
)
from dist_ckpt.core.planning.plan import ReadItem
from dist_ckpt.core.runtime.host_memory import BufferPool, copy
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.shard_io.memory.cell_memory import UNIT_NBYTES, DeviceBuffers, Target
from dist_ckpt.core.shard_io.read.open_files import OpenFile, OpenFiles
from dist_ckpt.core.shard_io.read.read_grouping import (
    READ_NBYTES,
    BlockRead,
    CellTargets,
    NeededBlock,
    PlannedRead,
    SmallShardsRead,
    all_blocks,
    check_digest,
    check_digests,
    damage_error,
    group_successive,
    split_into_work,
)
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.errors import CorruptError, StorageError
from dist_ckpt.message_text import listed

# The bytes to read and digest together, while a processor has them cached. Measured with 1 GiB:
# from the page cache, 1 MiB is as fast as 2 MiB, and 8 MiB is somewhat slower. From the disk, 2 MiB
# is as fast as 8 MiB, and 1 MiB is half as fast: the kernel reads too little ahead.
IO_CHUNK_NBYTES = 2 << 20

_CUT_OFF = "the file ended while it was read"


def _cut_off_error(file: OpenFile, block: NeededBlock) -> CorruptError:
    problem = _CUT_OFF if file.has_digests else f"{_CUT_OFF}; fetch the file again"
    return damage_error(file.path, file.header, block, problem)


class BlockReader:
    """Reads the blocks of one load, and fills `targets`. Without targets it only checks blocks.

    With `verify` it checks digests. `touched` names the tensors that may have new data. Reused
    `buffers` are faster than new memory. A load into devices sets `device_buffers`, of at least
    `block_nbytes`. Then reads are larger, and copies to devices may not be complete on return.
    """

    def __init__(
        self,
        files: OpenFiles,
        targets: CellTargets | None,
        *,
        verify: bool,
        buffers: BufferPool | None = None,
    ) -> None:
        self.touched: set[str] = set()
        self.files = files
        self.targets = targets
        self._verify = verify
        self.device_buffers: DeviceBuffers | None = None
        self.block_nbytes = max((file.header.block_nbytes for file, _ in files), default=0)
        self._buffers = (buffers or BufferPool()).fitting(max(READ_NBYTES, self.block_nbytes))
        # Work on small shards is all Python: threads would only block each other, at twice the
        # cost. Other threads read the next blocks meanwhile.
        self._python_lock = Lock()

    def read_all(self, threads: int) -> int:
        """Read every block once, and fill the targets. Return the bytes read, without headers.

        Raises StorageError, or CorruptError whose `touched` names tensors with partial data.
        """

        def read_group(reads: Sequence[tuple[OpenFile, PlannedRead]]) -> int:
            return sum(self.read(file, read) for file, read in reads)

        with self.name_touched():
            max_nbytes = None if self.device_buffers is None else UNIT_NBYTES
            work = split_into_work(self.files, self.targets, threads, max_nbytes)
            return sum(parallel_for(read_group, work, threads=threads))

    @contextmanager
    def name_touched(self) -> Iterator[None]:
        """Add the tensors that may have partial data to the errors of reads."""
        try:
            yield
        except CorruptError as error:
            # Readers of other systems' files give their own remedy.
            is_ours = all(file.has_digests for file, _ in self.files)
            raise CorruptError(
                f"{error}; load an older checkpoint" if is_ours else str(error),
                touched=tuple(sorted(self.touched)),
                path=error.path,
            ) from error
        except StorageError as error:
            touched = sorted(self.touched)
            partial = f"; partial data may be in {listed(touched)}" if touched else ""
            raise StorageError(f"{error}{partial}") from error

    def read(self, file: OpenFile, read: PlannedRead) -> int:
        """Read blocks into their targets, and return the bytes read."""
        if isinstance(read, BlockRead) and read.is_zero_copy:
            first = read.blocks[0]
            (item,) = first.items
            memory = self._mark_touched(item).memory()
            assert memory is not None
            start = first.span.start + item.overlap.shift * DTYPES[item.dtype].itemsize
            self.fetch(file, read, memory[start : start + read.span.nbytes])
            return read.span.nbytes
        with (self.device_buffers or self._buffers).borrow() as buffer:
            data = buffer[: read.span.nbytes]
            self.fetch(file, read, data)
            if self.targets is not None:
                self.place(file, read, data, self.device_buffers)
        return read.span.nbytes

    def fetch(self, file: OpenFile, read: PlannedRead, data: memoryview) -> None:
        """Read blocks into `data` and check them. CorruptError names the first damaged block."""
        begin = read.span.start
        with file.reading() as readable:
            if isinstance(read, BlockRead):
                for needed in group_successive(
                    read.blocks,
                    lambda chunk, block: block.stop - chunk[0].start <= self._chunk_nbytes,
                ):
                    self._read_chunk(file, readable, needed, data[needed[0].start - begin :])
                return
            count = readable.read_into(file.header.header_nbytes + begin, data)
        if count < read.span.nbytes:
            cut_off = _get_single_block(file, bisect_right(file.shards.starts, begin + count) - 1)
            raise _cut_off_error(file, cut_off)
        self.check(file, read, data)

    @property
    def _chunk_nbytes(self) -> int:
        # Each call costs Python, for which other threads and the devices wait.
        return IO_CHUNK_NBYTES if self.device_buffers is None else UNIT_NBYTES

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
        for start in range(0, nbytes, self._chunk_nbytes):
            part = data[start : min(start + self._chunk_nbytes, nbytes)]
            count = readable.read_into(file.header.header_nbytes + first + start, part)
            if count < part.nbytes:
                cut_off = next(block for block in needed if block.stop > first + start + count)
                raise _cut_off_error(file, cut_off)
            if verifies and len(needed) == 1:
                digest.update(part)
        if verifies and len(needed) == 1:
            check_digest(file.path, file.header, needed[0], digest.hexdigest())
        elif verifies:
            check_digests(file.path, file.header, needed, data)

    def check(self, file: OpenFile, read: PlannedRead, data: memoryview) -> None:
        """Check the digests of blocks that this rank or another rank has read into `data`."""
        if not (self._verify and file.has_digests):
            return
        if isinstance(read, BlockRead):
            check_digests(file.path, file.header, read.blocks, data)
            return
        with self._python_lock:
            actual = [block_digest(part) for part in read.shard_data(file, data)]
            if "".join(actual) != file.shards.first_digests(read.first, len(actual)):
                for number, digest in enumerate(actual, read.first):
                    check_digest(file.path, file.header, _get_single_block(file, number), digest)

    def place(
        self,
        file: OpenFile,
        read: PlannedRead,
        data: memoryview,
        buffers: DeviceBuffers | None = None,
    ) -> None:
        """Copy the checked blocks of one read from `data` to their targets.

        `data` is in one of the `buffers`, if they are given.
        """
        if isinstance(read, SmallShardsRead):
            with self._python_lock:
                self._place_shards(read, read.shard_data(file, data), buffers)
            return
        # Successive blocks of the same shard for the same items are copied together.
        for blocks in group_successive(
            read.blocks, lambda group, b: group[-1].shard is b.shard and group[-1].items == b.items
        ):
            itemsize = DTYPES[blocks[0].shard.dtype].itemsize
            start, stop = blocks[0].span.start, blocks[-1].span.stop
            stored = ElementRange(start // itemsize, stop // itemsize)
            offset = blocks[0].start - read.span.start
            for item in blocks[0].items:
                target = self._mark_touched(item)
                part = data[offset : offset + stop - start]
                if buffers is None or not _queue_overlap(item, target, stored, part, buffers):
                    _copy_overlap(item, target, stored, part)

    def _place_shards(
        self, read: SmallShardsRead, shard_data: Iterable[memoryview], buffers: DeviceBuffers | None
    ) -> None:
        for item, data in zip(read.items, shard_data, strict=True):
            overlap, target = item.overlap, self._mark_touched(item)
            if (memory := target.memory()) is not None:
                if memory.nbytes != data.nbytes:
                    raise ValueError(f"{item.fqn}: change no tensor while it is loaded")
                memory[:] = data
            elif buffers is None or not buffers.copy(target, 0, data):
                box = overlap.common
                target.place(overlap.requested_piece, box, data, row_major_strides(box.shape))

    def _mark_touched(self, item: ReadItem) -> Target:
        """Return the target of an item, and record it as touched."""
        assert self.targets is not None, "without targets, blocks are only checked"
        self.touched.add(item.fqn)
        return self.targets[item.fqn, item.overlap.requested_number]


def _get_single_block(file: OpenFile, number: int) -> NeededBlock:
    (block,) = all_blocks((file.shards[number],), file.header.block_nbytes)
    return block


def _find_bytes(item: ReadItem, stored: ElementRange) -> tuple[ByteRange, int] | None:
    """Return the part of the elements `stored` that is requested, and its start in the target.

    None if its elements do not follow each other.
    """
    contiguous, itemsize = item.overlap.contiguous, DTYPES[item.dtype].itemsize
    if contiguous is None:
        return None
    start, stop = max(stored.start, contiguous.start), min(stored.stop, contiguous.stop)
    part = ByteRange((start - stored.start) * itemsize, (stop - stored.start) * itemsize)
    return part, (start + item.overlap.shift) * itemsize


def _queue_overlap(
    item: ReadItem, target: Target, stored: ElementRange, data: memoryview, buffers: DeviceBuffers
) -> bool:
    """Queue the copy of `_copy_overlap`. Return False if a device cannot make it."""
    if (found := _find_bytes(item, stored)) is None:
        return False
    part, start = found
    return buffers.copy(target, start, data[part.start : part.stop])


def _copy_overlap(item: ReadItem, target: Target, stored: ElementRange, data: memoryview) -> None:
    """Copy the requested part of the elements `stored` of a stored cell from `data`."""
    itemsize, overlap, memory = DTYPES[item.dtype].itemsize, item.overlap, target.memory()
    if memory is not None and (found := _find_bytes(item, stored)) is not None:
        part, begin = found
        copy(memory[begin : begin + part.nbytes], data[part.start : part.stop])
        return
    piece, region = overlap.stored_piece, overlap.stored_piece.region
    strides = row_major_strides(region.shape)
    start = max(stored.start - piece.start, 0)
    stop = min(stored.stop - piece.start, region.numel)
    for box in split_into_boxes(ElementRange(start, stop), region.shape):
        corner = tuple(a + b for a, b in zip(box.offset, region.offset, strict=True))
        if (wanted := Region(corner, box.shape).intersect(overlap.common)) is None:
            continue
        relative = wanted.relative_to(region.offset).offset
        begin = piece.start - stored.start + sum(map(mul, relative, strides))
        end = begin + sum((n - 1) * s for n, s in zip(wanted.shape, strides, strict=True)) + 1
        target.place(
            overlap.requested_piece, wanted, data[begin * itemsize : end * itemsize], strides
        )
