"""Write one rank's shard files and objects files into an attempt.

Shards are read, digested and written block by block, in one pass over the data. Some threads
prepare blocks while other threads write. The header contains the digests, so it is written last.
Each file is synced as soon as it is complete. Nothing is committed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from threading import Lock
from typing import Protocol

from dist_ckpt.core.format import checksums
from dist_ckpt.core.planning.plan import Batch, BatchPart, FilePlan, FileReceipt
from dist_ckpt.core.runtime.host_memory import BufferPool, address_of, copy, move
from dist_ckpt.core.runtime.threads import WORK_STALL_S, parallel_for, stream_results
from dist_ckpt.core.shard_io.memory.cell_memory import CellReader
from dist_ckpt.core.storage import WritableFile
from dist_ckpt.errors import ConflictError, StorageError
from dist_ckpt.settings import stall_timeout_s

# How many prepared batches wait for a writing thread, so that the disk is always busy.
NUM_WAITING = 2

# To prepare a block takes half as long as to write it, so more threads gain nothing.
MAX_PREPARING = 3

# Returns the memory of an item, given its number in the file's plan.
ReaderOf = Callable[[int], CellReader]


class WritableStorage(Protocol):
    """The part of `Storage` that writes."""

    def create(self, path: str, nbytes: int) -> WritableFile:
        """See `Storage.create`."""

    def sync(self, folder: str) -> None:
        """See `Storage.sync`."""


class NullStorage:
    """A `WritableStorage` that drops all data, to compute headers and digests only."""

    def create(self, path: str, nbytes: int) -> WritableFile:
        """Return a file that drops its data."""
        return _NoFile(nbytes)

    def sync(self, folder: str) -> None:
        """Do nothing."""


class _NoFile:
    alignment = 1

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def write_at(self, offset: int, data: checksums.Buffer) -> None: ...

    def finish(self) -> int:
        return self._nbytes

    def discard(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files that one rank writes. For each plan, `readers` has the memory of its items.

    `objects` has encoded objects files by name. `headers` has memory by file name: the header of
    such a file is copied there too.
    """

    step: int | None
    plans: tuple[FilePlan, ...]
    readers: tuple[ReaderOf, ...]
    objects: Mapping[str, bytes]
    headers: Mapping[str, memoryview] = field(default_factory=dict)


def write_rank_files(
    storage: WritableStorage,
    folder: str,
    files: RankFiles,
    *,
    threads: int,
    buffers: BufferPool | None = None,
) -> tuple[FileReceipt, ...]:
    """Write a rank's files into an attempt folder; return the `Receipt.files`.

    Up to `threads` threads write together. Half as many, at most `MAX_PREPARING`, prepare the next
    blocks. A single thread does both in turn. Reused `buffers` are faster than new memory. On
    return every file and its name are durable, and have the planned size. After an error incomplete
    files may remain: the caller abandons the attempt. ConflictError if the folder is gone or a file
    exists, StorageError otherwise.
    """
    receipts = _write_shard_files(storage, folder, files, threads, buffers or BufferPool())
    receipts += tuple(
        write_document(storage, folder, name, data) for name, data in sorted(files.objects.items())
    )
    if receipts:
        sync_names(storage, folder)
    return receipts


def write_document(storage: WritableStorage, folder: str, name: str, data: bytes) -> FileReceipt:
    """Write a small file. Its bytes are durable on return; its name needs `sync_names`."""
    with ExitStack() as stack:
        file = create_file(storage, f"{folder}/{name}", len(data), stack)
        file.write_at(0, data)
        finish_file(file, f"{folder}/{name}", len(data))
        stack.pop_all()  # it is closed
    return FileReceipt(name, len(data), 0, checksums.document_digest(data))


def _write_shard_files(
    storage: WritableStorage, folder: str, files: RankFiles, threads: int, buffers: BufferPool
) -> tuple[FileReceipt, ...]:
    with ExitStack() as stack:
        # Create all files, and reserve their space, before the first byte is written.
        file_writes = []
        for plan, reader_of in zip(files.plans, files.readers, strict=True):
            path = f"{folder}/{plan.name}"
            file = create_file(storage, path, plan.nbytes, stack)
            file_writes.append(_FileWrite(path, plan, file, reader_of, files))
        buffers = buffers.fitting(max((write.buffer_nbytes for write in file_writes), default=0))
        work = [(write, batch) for write in file_writes for batch in write.plan.batches]
        # The sync of one file may wait for the data of all files.
        nbytes = sum(plan.nbytes for plan in files.plans)
        stall_s = stall_timeout_s(nbytes, stall_s=WORK_STALL_S)

        def prepare(item: tuple[_FileWrite, Batch]) -> Callable[[], FileReceipt | None]:
            file_write, batch = item
            return file_write.prepare(batch, buffers)

        if min(threads, len(work)) <= 1:
            results = parallel_for(lambda item: prepare(item)(), work, threads=1, stall_s=stall_s)
        else:
            preparing = min(threads // 2, MAX_PREPARING)
            ready = stream_results(prepare, work, threads=preparing, waiting=0, stall_s=stall_s)
            with closing(ready):
                results = parallel_for(
                    lambda write: write(),
                    ready,
                    threads=threads,
                    waiting=NUM_WAITING,
                    stall_s=stall_s,
                )
        stack.pop_all()  # all are closed
        return tuple(receipt for receipt in results if receipt is not None)


class _FileWrite:
    """One shard file in progress; threads write different batches of it."""

    def __init__(
        self, path: str, plan: FilePlan, file: WritableFile, reader_of: ReaderOf, files: RankFiles
    ) -> None:
        self.path = path
        self.plan = plan
        self._file = file
        self._reader_of = reader_of
        self._step = files.step
        self._header = files.headers.get(plan.name)
        self._lock = Lock()
        # Python makes the many copies of small parts. Several threads would hand the GIL to each
        # other at each call, which doubled the cost of a save. So only one thread copies.
        self._python_lock = Lock()
        self._num_left = len(plan.batches)
        self._digests = [""] * plan.header.num_digests

    @property
    def buffer_nbytes(self) -> int:
        """The size of a buffer in which each batch can be aligned as the file needs it."""
        return self.plan.block_nbytes + self._file.alignment - 1

    def prepare(self, batch: Batch, buffers: BufferPool) -> Callable[[], FileReceipt | None]:
        """Gather and digest the blocks of a batch. Return a function that writes them."""
        borrowed = ExitStack()
        if not batch.parts:
            return partial(self._write, 0, memoryview(b""), borrowed)
        buffer = borrowed.enter_context(buffers.borrow())
        offset = self.plan.header.nbytes + batch.start
        with self._python_lock if len(batch.parts) > 1 else nullcontext():
            data = self._gather(batch.parts, buffer, offset)
            bounds = accumulate((part.stop - part.start for part in batch.parts), initial=0)
            for block, (start, stop) in enumerate(pairwise(bounds), batch.first_block):
                self._digests[block] = checksums.block_digest(data[start:stop])
        return partial(self._write, offset, data, borrowed)

    def _write(self, offset: int, data: memoryview, borrowed: ExitStack) -> FileReceipt | None:
        """Write a batch, and free its buffer. After the last batch, finish the file.

        Returns the receipt after the last batch, None before.
        """
        with borrowed:
            if data:
                self._file.write_at(offset, data)
        with self._lock:
            self._num_left -= 1
            if self._num_left:
                return None
        plan = self.plan
        step = None if plan.is_linkable else self._step
        header = plan.header.fill(step, "".join(self._digests))
        if self._header is not None:
            self._header[:] = header
        self._file.write_at(0, header)
        finish_file(self._file, self.path, plan.nbytes)
        digest = checksums.document_digest(header)
        return FileReceipt(plan.name, plan.nbytes, plan.header.nbytes, digest)

    def _gather(self, parts: Sequence[BatchPart], buffer: memoryview, offset: int) -> memoryview:
        """Return the bytes of a batch in one buffer, aligned for the file."""
        alignment = self._file.alignment
        room = buffer[offset % alignment :]
        first = address_of(room)
        filled = 0
        for item, nbytes, start, stop in parts:
            reader = self._reader_of(item)
            if reader.nbytes != nbytes:
                raise ValueError(
                    f"{self.plan.items[item].fqn}: {nbytes} bytes when the save began, and "
                    f"{reader.nbytes} now: change no tensor while it is saved"
                )
            size = stop - start
            # A single large block is written from its own memory if that is aligned.
            if len(parts) > 1 and (address := reader.address()) is not None:
                move(first + filled, address + start, size)
            else:
                data = reader.read(start, stop, room[filled : filled + size])
                if data.obj is not buffer.obj:
                    if len(parts) == 1 and _is_aligned(data, offset, alignment):
                        return data
                    copy(room[filled : filled + size], data)
            filled += size
        return room[:filled]


def _is_aligned(data: memoryview, offset: int, alignment: int) -> bool:
    """Return True if memory has the alignment for this file offset."""
    if alignment == 1:
        return True
    return not data.readonly and (address_of(data) - offset) % alignment == 0


# --- files of an attempt ---------------------------------------------------------------------


def create_file(storage: WritableStorage, path: str, nbytes: int, stack: ExitStack) -> WritableFile:
    """Create a file; the stack discards it. ConflictError if it exists or its folder is gone."""
    try:
        file = storage.create(path, nbytes)
    except FileExistsError as error:
        raise exists_error(path) from error
    except FileNotFoundError as error:
        raise _gone_error(path) from error
    stack.callback(file.discard)
    return file


def finish_file(file: WritableFile, path: str, nbytes: int) -> None:
    """Make a file durable. StorageError if it has another size."""
    if (actual := file.finish()) != nbytes:
        raise StorageError(
            f"{path} has {actual} bytes after writing {nbytes}: check the storage, then try again"
        )


def sync_names(storage: WritableStorage, folder: str) -> None:
    """Sync a folder, so that its file names survive a power cut. ConflictError if it is gone."""
    try:
        storage.sync(folder)
    except FileNotFoundError as error:
        raise _gone_error(folder) from error


def exists_error(path: str) -> ConflictError:
    """Return the error for a file that another process has created in the attempt."""
    return ConflictError(
        f"{path} exists already: is this rank running twice? Stop the other, then try again"
    )


def _gone_error(path: str) -> ConflictError:
    return ConflictError(
        f"{path}: the folder is gone, as this attempt was abandoned and removed; try again"
    )
