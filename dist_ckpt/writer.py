"""What one rank writes into an attempt: its shard files and objects files.

Each shard is read, digested and written block by block, by a few threads, in one pass over the
data. A file's header holds the digests, so it is written last, and the file made durable while
others are still written; its room is known before. Nothing here commits: what is written counts
only once the coordinator has put the index in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import NamedTuple

from dist_ckpt import digest
from dist_ckpt.collector import paused_collector
from dist_ckpt.config import patience_s
from dist_ckpt.errors import ConflictError, StorageError
from dist_ckpt.host_memory import address_of, copy
from dist_ckpt.index import Catalog
from dist_ckpt.memory import Source
from dist_ckpt.parallel import WORK_STALL_S, Slots, each
from dist_ckpt.plan import FilePlan, WriteItem
from dist_ckpt.region import Cell, Elements, Region
from dist_ckpt.storage import Storage, WritableFile

# (name, nbytes, header_nbytes, digest), as in `plan.Receipt.files`.
FileReceipt = tuple[str, int, int, str]

# The cells of each tensor that a rank holds, with their memory.
Sources = Mapping[str, Mapping[Cell, Source]]

# Blocks below this are gathered and written together: copying costs less than a system call.
SMALL_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What one rank writes. `objects` are its objects files by name, already encoded.

    `block_nbytes` is what the plans' headers were measured with.
    """

    catalog: Catalog
    step: int | None
    plans: tuple[FilePlan, ...]
    sources: Sources
    objects: Mapping[str, bytes]
    block_nbytes: int = digest.BLOCK_NBYTES


def write_all(
    storage: Storage, folder: str, files: RankFiles, *, threads: int, slots: Slots | None = None
) -> tuple[FileReceipt, ...]:
    """Write a rank's files into an attempt folder; return what `Receipt.files` takes.

    `slots` are scratch memory that has been used before, which is faster than new memory.
    On return every file is durable, under its name, with the planned size. After an error some
    of them may lie there unfinished; the attempt cannot be committed and is removed as a whole.
    ConflictError if the folder is gone or a file is there already, StorageError otherwise.
    """
    receipts = write_shard_files(storage, folder, files, threads=threads, slots=slots or Slots())
    receipts += tuple(
        write_objects(storage, folder, name, data) for name, data in sorted(files.objects.items())
    )
    if receipts:
        # Without it a power cut can forget the names of durable files.
        try:
            storage.sync(folder)
        except FileNotFoundError as error:
            raise _gone(folder) from error
    return receipts


def write_objects(storage: Storage, folder: str, name: str, data: bytes) -> FileReceipt:
    """Write one objects file; durable on return, but for its name, which waits for a sync."""
    with ExitStack() as stack:
        file = _create(storage, f"{folder}/{name}", len(data))
        stack.callback(file.discard)
        file.write_at(0, data)
        _finish(file, f"{folder}/{name}", len(data))
    return name, len(data), 0, digest.document_digest(data)


def write_shard_files(
    storage: Storage, folder: str, files: RankFiles, *, threads: int, slots: Slots
) -> tuple[FileReceipt, ...]:
    """Write a rank's shard files; durable on return, but for their names."""
    with ExitStack() as stack:
        # All are created, and their space reserved, before the first byte is written.
        writings = []
        for plan in files.plans:
            file = _create(storage, f"{folder}/{plan.name}", plan.nbytes)
            stack.callback(file.discard)
            with paused_collector():
                writings.append(_Writing(f"{folder}/{plan.name}", plan, file, files))
        room = max((writing.slot_nbytes for writing in writings), default=0)
        slots = slots.fitting(room)
        work = ((writing, batch) for writing in writings for batch in writing.batches)
        # To make one file durable may take as long as to write all of them.
        nbytes = sum(plan.nbytes for plan in files.plans)
        stall_s = patience_s(nbytes, stall_s=WORK_STALL_S)
        found = each(
            lambda one: one[0].write(one[1], slots), work, threads=threads, stall_s=stall_s
        )
        return tuple(receipt for receipt in found if receipt is not None)


class Part(NamedTuple):
    """One block of an item: `number` counts its blocks, `start` and `stop` are in its bytes."""

    item: WriteItem
    number: int
    start: int
    stop: int


def batches_of(items: Iterable[WriteItem], block_nbytes: int) -> Iterator[tuple[Part, ...]]:
    """Cut items into what is written at once: one large block, or small ones that adjoin.

    A batch holds `block_nbytes` at most. Empty items have no blocks.
    """
    batch: list[Part] = []
    nbytes = 0
    for item in items:
        item_nbytes = item.span.nbytes
        for number, start in enumerate(range(0, item_nbytes, block_nbytes)):
            stop = min(start + block_nbytes, item_nbytes)
            if batch and nbytes + stop - start > block_nbytes:
                yield tuple(batch)
                batch, nbytes = [], 0
            part = Part(item, number, start, stop)
            if stop - start < SMALL_NBYTES:
                batch.append(part)
                nbytes += stop - start
                continue
            if batch:
                yield tuple(batch)
                batch, nbytes = [], 0
            yield (part,)
    if batch:
        yield tuple(batch)


def source_of(sources: Sources, fqn: str, cell: Cell) -> Source:
    """Return the memory of a cell that a rank holds, whole or as a part of a larger one."""
    cells = sources.get(fqn, {})
    if (own := cells.get(cell)) is not None:
        return own
    for held, source in cells.items():
        if isinstance(held, Region) and isinstance(cell, Region) and held.covers(cell):
            return source.part(cell.relative_to(held.offset))
        if not (isinstance(held, Elements) and isinstance(cell, Elements)):
            continue
        if held.start <= cell.start and cell.stop <= held.stop:
            return source.part(Elements(cell.start - held.start, cell.stop - held.start))
    raise AssertionError(f"the plan stores {fqn}[{cell}] here, but this rank does not hold it")


class _Writing:
    """One shard file on its way; threads write different batches of it."""

    def __init__(self, path: str, plan: FilePlan, file: WritableFile, files: RankFiles) -> None:
        self.path = path
        self.plan = plan
        # An empty batch, so that a file without a byte of data is finished too.
        self.batches = tuple(batches_of(plan.items, files.block_nbytes)) or ((),)
        self._left = len(self.batches)
        self._lock = Lock()
        self._file = file
        self._files = files
        self._sources = {
            item.name: source_of(files.sources, item.fqn, item.cell) for item in plan.items
        }
        self._digests = {
            item.name: [""] * digest.num_blocks(item.span.nbytes, files.block_nbytes)
            for item in plan.items
        }
        for item in plan.items:
            nbytes = self._sources[item.name].nbytes
            assert nbytes == item.span.nbytes, f"{item.name}: {nbytes} bytes, not {item.span}"

    @property
    def slot_nbytes(self) -> int:
        """The size of a slot in which any batch can be placed as the file wants it."""
        return self._files.block_nbytes + self._file.alignment - 1

    def write(self, batch: tuple[Part, ...], slots: Slots) -> FileReceipt | None:
        """Digest the blocks of a batch and write them with one write; the last one finishes."""
        if batch:
            first = batch[0]
            offset = self.plan.header_nbytes + first.item.span.start + first.start
            with slots.one() as slot:
                data = self._gather(batch, slot, offset)
                self._digest(batch, data)
                self._file.write_at(offset, data)
        with self._lock:
            self._left -= 1
            is_last = not self._left
        return self._finish() if is_last else None

    def _gather(self, batch: tuple[Part, ...], slot: memoryview, offset: int) -> memoryview:
        """Return the bytes of a batch in one piece, in memory that the file takes as it is."""
        alignment = self._file.alignment
        room = slot[offset % alignment :]
        filled = 0
        for item, _, start, stop in batch:
            place = room[filled : filled + stop - start]
            data = self._sources[item.name].read(start, stop, place)
            if data.obj is not slot.obj:
                if len(batch) == 1 and _is_placed(data, offset, alignment):
                    return data
                copy(place, data)
            filled += stop - start
        return room[:filled]

    def _digest(self, batch: tuple[Part, ...], data: memoryview) -> None:
        done = 0
        for item, number, start, stop in batch:
            block = data[done : done + stop - start]
            self._digests[item.name][number] = digest.block_digest(block)
            done += len(block)

    def _finish(self) -> FileReceipt:
        """Write the header, make the file durable and check its size."""
        plan, files = self.plan, self._files
        digests = "".join(chain.from_iterable(self._digests.values()))
        header = plan.header.fill(files.step, digests)
        self._file.write_at(0, header)
        _finish(self._file, self.path, plan.nbytes)
        return plan.name, plan.nbytes, plan.header_nbytes, digest.document_digest(header)


def _is_placed(data: memoryview, offset: int, alignment: int) -> bool:
    """Say whether memory lies so that a file takes it at this offset without a copy."""
    if alignment == 1:
        return True
    return not data.readonly and (address_of(data) - offset) % alignment == 0


def _create(storage: Storage, path: str, nbytes: int) -> WritableFile:
    try:
        return storage.create(path, nbytes)
    except FileExistsError as error:
        raise ConflictError(
            f"{path} exists already: is this rank running twice? Stop the other, then save again"
        ) from error
    except FileNotFoundError as error:
        raise _gone(path) from error


def _gone(path: str) -> ConflictError:
    return ConflictError(
        f"{path}: its folder is gone, somebody gave this attempt up and removed it; save again"
    )


def _finish(file: WritableFile, path: str, nbytes: int) -> None:
    actual = file.finish()
    if actual != nbytes:
        raise StorageError(
            f"{path} has {actual} bytes after writing {nbytes}: look at the storage, save again"
        )
