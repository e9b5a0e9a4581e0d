"""What one rank writes into an attempt: its shard files and objects files.

Each shard is read, digested and written block by block, in one pass over the data. Some threads
get blocks ready while others write, so that as many writes as asked for are under way. A file's
header holds the digests, so it is written last, and the file made durable while others are still
written; its room is known before. Nothing here commits: what is written counts only once the
coordinator has put the index in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Protocol

from dist_ckpt.config import stall_timeout_s
from dist_ckpt.core.format import checksums
from dist_ckpt.core.planning.plan import FilePlan, FileReceipt
from dist_ckpt.core.planning.write_batches import Batch, BatchPart
from dist_ckpt.core.runtime.buffers import BufferPool, address_of, copy, move
from dist_ckpt.core.runtime.threads import WORK_STALL_S, parallel_for, results_of
from dist_ckpt.core.shard_io.memory.protocol import CellSource
from dist_ckpt.core.storage import WritableFile
from dist_ckpt.errors import ConflictError, StorageError

# So many batches are ready and wait for a thread that writes, so that the disk never waits.
NUM_WAITING = 2

# To copy and digest takes half as long as to write; more than these keep no disk waiting.
MAX_PREPARING = 3

# The memory of an item, by its number in the file's plan.
SourceOf = Callable[[int], CellSource]


class WritableStorage(Protocol):
    """What writing takes of a `Storage`."""

    def create(self, path: str, nbytes: int) -> WritableFile:
        """See `Storage.create`."""

    def sync(self, folder: str) -> None:
        """See `Storage.sync`."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What one rank writes: `sources` are of each plan the memory of its items.

    Threads ask for them when it is their turn. `objects` are its objects files by name, already
    encoded. `headers` is memory that gets the headers as well, by the names of their files.
    """

    step: int | None
    plans: tuple[FilePlan, ...]
    sources: tuple[SourceOf, ...]
    objects: Mapping[str, bytes]
    headers: Mapping[str, memoryview] = field(default_factory=dict)


def write_all(
    storage: WritableStorage,
    folder: str,
    files: RankFiles,
    *,
    threads: int,
    slots: BufferPool | None = None,
) -> tuple[FileReceipt, ...]:
    """Write a rank's files into an attempt folder; return what `Receipt.files` takes.

    Up to `threads` write at once, and half as many get ready what comes next; one thread alone
    asks for no block before it has written the former one. `slots` are scratch memory that has
    been used before, which is faster than new memory.
    On return every file is durable, under its name, with the planned size. After an error some
    of them may lie there unfinished; the attempt cannot be committed and is removed as a whole.
    ConflictError if the folder is gone or a file is there already, StorageError otherwise.
    """
    receipts = write_shard_files(
        storage, folder, files, threads=threads, slots=slots or BufferPool()
    )
    receipts += tuple(
        write_objects(storage, folder, name, data) for name, data in sorted(files.objects.items())
    )
    if receipts:
        # Without it a power cut can forget the names of durable files.
        try:
            storage.sync(folder)
        except FileNotFoundError as error:
            raise gone(folder) from error
    return receipts


def write_objects(storage: WritableStorage, folder: str, name: str, data: bytes) -> FileReceipt:
    """Write one objects file; durable on return, but for its name, which waits for a sync."""
    with ExitStack() as stack:
        file = _create(storage, f"{folder}/{name}", len(data))
        stack.callback(file.discard)
        file.write_at(0, data)
        _finish(file, f"{folder}/{name}", len(data))
    return name, len(data), 0, checksums.document_digest(data)


def write_shard_files(
    storage: WritableStorage, folder: str, files: RankFiles, *, threads: int, slots: BufferPool
) -> tuple[FileReceipt, ...]:
    """Write a rank's shard files; durable on return, but for their names."""
    with ExitStack() as stack:
        # All are created, and their space reserved, before the first byte is written.
        writings = []
        for plan, source_of in zip(files.plans, files.sources, strict=True):
            path = f"{folder}/{plan.name}"
            file = _create(storage, path, plan.nbytes)
            stack.callback(file.discard)
            writings.append(_Writing(path, plan, file, source_of, files))
        room = max((writing.slot_nbytes for writing in writings), default=0)
        slots = slots.fitting(room)
        work = ((writing, batch) for writing in writings for batch in writing.plan.batches)
        # To make one file durable may take as long as to write all of them.
        nbytes = sum(plan.nbytes for plan in files.plans)
        stall_s = stall_timeout_s(nbytes, stall_s=WORK_STALL_S)

        def prepare(one: tuple[_Writing, Batch]) -> Callable[[], FileReceipt | None]:
            return one[0].prepare(one[1], slots)

        if threads == 1:
            found = parallel_for(lambda one: prepare(one)(), work, threads=1, stall_s=stall_s)
        else:
            preparing = min(threads // 2, MAX_PREPARING)
            ready = results_of(prepare, work, threads=preparing, waiting=0, stall_s=stall_s)
            with closing(ready):
                found = parallel_for(
                    lambda write: write(),
                    ready,
                    threads=threads,
                    waiting=NUM_WAITING,
                    stall_s=stall_s,
                )
        return tuple(receipt for receipt in found if receipt is not None)


class _Writing:
    """One shard file on its way; threads write different batches of it."""

    def __init__(
        self, path: str, plan: FilePlan, file: WritableFile, source_of: SourceOf, files: RankFiles
    ) -> None:
        self.path = path
        self.plan = plan
        self._file = file
        self._source_of = source_of
        self._step = files.step
        self._header = files.headers.get(plan.name)
        self._lock = Lock()
        # Many small copies are Python's work: threads that do them at once take turns anyway, and
        # for each call that lets go of the interpreter's lock. That doubled what a save costs.
        self._turn = Lock()
        self._left = len(plan.batches)
        self._digests = [""] * plan.header.num_digests

    @property
    def slot_nbytes(self) -> int:
        """The size of a slot in which any batch can be placed as the file wants it."""
        return self.plan.block_nbytes + self._file.alignment - 1

    def prepare(self, batch: Batch, slots: BufferPool) -> Callable[[], FileReceipt | None]:
        """Gather and digest the blocks of a batch; return what writes them."""
        lent = ExitStack()
        if not batch.parts:
            return partial(self._write, 0, memoryview(b""), lent)
        slot = lent.enter_context(slots.borrow())
        offset = self.plan.header.nbytes + batch.start
        with self._turn if len(batch.parts) > 1 else nullcontext():
            data = self._gather(batch.parts, slot, offset)
            self._digest(batch, data)
        return partial(self._write, offset, data, lent)

    def _write(self, offset: int, data: memoryview, lent: ExitStack) -> FileReceipt | None:
        """Write a batch with one write and give its slot back; the last one finishes."""
        with lent:
            if data:
                self._file.write_at(offset, data)
        with self._lock:
            self._left -= 1
            is_last = not self._left
        return self._finish() if is_last else None

    def _gather(self, parts: Sequence[BatchPart], slot: memoryview, offset: int) -> memoryview:
        """Return the bytes of a batch in one piece, in memory that the file takes as it is."""
        alignment = self._file.alignment
        room = slot[offset % alignment :]
        first = address_of(room)
        filled = 0
        for item, nbytes, start, stop in parts:
            source = self._source_of(item)
            if source.nbytes != nbytes:
                raise ValueError(
                    f"{self.plan.items[item].fqn}: {nbytes} bytes when the save began, and "
                    f"{source.nbytes} now: change no tensor while it is saved"
                )
            size = stop - start
            # One large block goes to the file from where it lies, if that will do.
            if len(parts) > 1 and (address := source.address()) is not None:
                move(first + filled, address + start, size)
            else:
                data = source.read(start, stop, room[filled : filled + size])
                if data.obj is not slot.obj:
                    if len(parts) == 1 and _is_placed(data, offset, alignment):
                        return data
                    copy(room[filled : filled + size], data)
            filled += size
        return room[:filled]

    def _digest(self, batch: Batch, data: memoryview) -> None:
        done = 0
        for block, (_, _, start, stop) in enumerate(batch.parts, batch.first_block):
            following = done + stop - start
            self._digests[block] = checksums.block_digest(data[done:following])
            done = following

    def _finish(self) -> FileReceipt:
        """Write the header, make the file durable and check its size."""
        plan = self.plan
        step = None if plan.is_reused else self._step
        header = plan.header.fill(step, "".join(self._digests))
        if self._header is not None:
            self._header[:] = header
        self._file.write_at(0, header)
        _finish(self._file, self.path, plan.nbytes)
        return plan.name, plan.nbytes, plan.header.nbytes, checksums.document_digest(header)


def _is_placed(data: memoryview, offset: int, alignment: int) -> bool:
    """Say whether memory lies so that a file takes it at this offset without a copy."""
    if alignment == 1:
        return True
    return not data.readonly and (address_of(data) - offset) % alignment == 0


def _create(storage: WritableStorage, path: str, nbytes: int) -> WritableFile:
    try:
        return storage.create(path, nbytes)
    except FileExistsError as error:
        raise ConflictError(
            f"{path} exists already: is this rank running twice? Stop the other, then save again"
        ) from error
    except FileNotFoundError as error:
        raise gone(path) from error


def gone(path: str) -> ConflictError:
    """Return the error of an attempt whose folder is gone."""
    return ConflictError(
        f"{path}: its folder is gone, somebody gave this attempt up and removed it; save again"
    )


def _finish(file: WritableFile, path: str, nbytes: int) -> None:
    actual = file.finish()
    if actual != nbytes:
        raise StorageError(
            f"{path} has {actual} bytes after writing {nbytes}: look at the storage, save again"
        )
