"""The files of an export are written: a window of the checkpoint at a time, or cloned from it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing

from dist_ckpt.config import Config
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.planning.load.load_planner import plan_load
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.runtime.buffers import BufferPool
from dist_ckpt.core.runtime.threads import results_of
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.open_files import open_file, open_files
from dist_ckpt.core.shard_io.read.read_windows import StoredTensors
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import IncompatibleError, StorageError
from dist_ckpt.interop.hf.export_plan import ExportContents, ExportedFile, ExportWindow, windows_of

# A multiple of a block; three of them are in memory at once, with what is read for them.
WINDOW_NBYTES = 16 << 20

# What a file system says that makes no clones, nor copies within itself, or not between these two.
_NO_CLONES = (
    *(errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP),
    *(errno.EBADF, errno.EPERM, errno.ETXTBSY),
)

# A window, its bytes as they are saved, and what gives the memory back.
_Filled = tuple[ExportWindow, memoryview, ExitStack]


class ExportReader:
    """Writes files of what one checkpoint holds; `tell` is told of each window. For one thread."""

    def __init__(
        self, storage: Storage, folder: str, index: Index, tell: Callable[[int], None]
    ) -> None:
        """`folder` is the attempt's."""
        self._storage = storage
        self._folder = folder
        self._index = index
        self._tell = tell
        self._threads = Config.from_environment().threads

    def write(self, target: Storage, folder: str, file: ExportedFile) -> None:
        """Write one file; on return it is durable. CorruptError if what is read is damaged."""
        path = f"{folder}/{file.name}"
        if file.clone_of is not None:
            self._check(file)
            record = self._index.files[file.clone_of]
            source = f"{self._folder}/{self._index.file_name(record)}"
            if clone(source, record.header_nbytes, path, file):
                self._tell(file.data_nbytes)
                return
        out = target.create(path, file.nbytes)
        try:
            out.write_at(0, file.header)
            for window, data in self.windows(file):
                start = len(file.header) + window.span.start
                for part in _as_written(window, data):
                    out.write_at(start, part)
                    start += part.nbytes
                self._tell(window.span.nbytes)
            if out.finish() != file.nbytes:
                raise StorageError(f"{path} has another size than was written: try again")
        finally:
            out.discard()

    def windows(self, file: ExportedFile) -> Iterator[tuple[ExportWindow, memoryview]]:
        """Yield the windows of a file; one is read while the one before it is written."""
        # What is converted may be larger where it is read, which is what has to fit.
        ratios = [_itemsize(one.saved) // _itemsize(one.dtype) for one, _ in file.tensors]
        nbytes, slots = WINDOW_NBYTES // max(1, *ratios), BufferPool(WINDOW_NBYTES)
        with closing(StoredTensors(self._storage, self._folder, self._index)) as tensors:

            def read(window: ExportWindow) -> _Filled:
                lent = ExitStack()
                memory = lent.enter_context(slots.one())
                tensors.fetch(window.wanted, memory)
                return window, memory, lent

            # One thread, which is several where it reads.
            windows = results_of(read, windows_of(file, nbytes), threads=1, waiting=1)
            with closing(windows) as ready:
                for window, memory, lent in ready:
                    with lent:
                        yield window, memory

    def _check(self, file: ExportedFile) -> None:
        """Check all blocks of a file's tensors."""
        wanted = [
            TensorRequest(one.fqn, one.saved, one.shape, (Region.whole(one.shape),))
            for one, _ in file.tensors
        ]
        plan = plan_load(self._index, wanted)
        opened = open_files(self._storage, self._folder, self._index, plan, threads=self._threads)
        with closing(opened):
            BlockReader(opened, None, verify=True).run(self._threads)

    def whole_files(
        self, tensors: Sequence[ExportContents]
    ) -> dict[int, tuple[ExportContents, ...]]:
        """Return the files that hold some of the tensors whole, and nothing else, by number."""
        by_fqn = {one.fqn: one for one in tensors if one.saved == one.dtype}
        components = {self._index.catalog.tensors[fqn].component for fqn in by_fqn}
        found = {}
        for number, record in enumerate(self._index.files if self._index.has_digests else ()):
            if record.component not in components:
                continue
            shards = open_file(self._storage, self._folder, self._index, number, keep=False).shards
            if len(shards) and all(
                shard.fqn in by_fqn and shard.cell == Region.whole(shard.shape) for shard in shards
            ):
                found[number] = tuple(by_fqn[shard.fqn] for shard in shards)
        return found


def _itemsize(dtype: str) -> int:
    return DTYPES[dtype].itemsize


def _as_written(window: ExportWindow, data: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a window as they are written, from parts that are read one by one."""
    if all(tensor.saved == tensor.dtype for tensor, _ in window.parts):
        yield data[: window.span.nbytes]
        return
    from dist_ckpt.core.shard_io.memory.casting import converted  # noqa: PLC0415  (only this needs torch)

    start = 0
    for tensor, numel in window.parts:
        stop = start + numel * _itemsize(tensor.saved)
        part: memoryview | None = data[start:stop]
        start = stop
        if part is not None and tensor.saved != tensor.dtype:
            part = converted(part, tensor.saved, tensor.dtype)
        if part is None:
            raise IncompatibleError(
                f"{tensor.fqn} has finite values that {tensor.dtype} has not, they would be "
                f"infinite: choose another dtype (bfloat16 has nearly the range of float32)"
            )
        yield part


def clone(source: str, start: int, path: str, file: ExportedFile) -> bool:
    """Write a file of its header and of what a file holds from `start` on, durably.

    The kernel shares the data where the file system can (XFS, btrfs: `copy_file_range` does so for
    whole pages, and both headers end at one), and copies it where not. False if it does neither
    here: then there is no file.
    """
    if not hasattr(os, "copy_file_range"):  # it is Linux's
        return False
    try:
        with open(source, "rb") as held, open(path, "xb") as out:
            out.write(file.header)
            out.flush()
            done, nbytes = 0, file.data_nbytes
            while done < nbytes:
                count = os.copy_file_range(
                    *(held.fileno(), out.fileno(), nbytes - done),
                    *(start + done, len(file.header) + done),
                )
                if not count:
                    raise OSError(errno.EIO, "the file ended while it was copied")
                done += count
            os.fsync(out.fileno())
    except OSError as error:
        if error.errno in _NO_CLONES:
            os.unlink(path)
            return False
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    return True
