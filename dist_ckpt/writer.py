"""What one rank writes into an attempt: its shard files and objects files.

Each shard is read, digested and written block by block, by a few threads, in one pass over the
data. A file's header holds the digests, so it is written last; its room is known before. Nothing
here commits: what is written counts only once the coordinator has put the index in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from dist_ckpt import digest
from dist_ckpt.config import patience_s
from dist_ckpt.errors import ConflictError, StorageError
from dist_ckpt.index import Catalog
from dist_ckpt.memory import Source
from dist_ckpt.parallel import WORK_STALL_S, Slots, each
from dist_ckpt.plan import FilePlan, WriteItem
from dist_ckpt.region import Cell, Elements, Region, Span
from dist_ckpt.shard_file import ShardFile, StoredShard, encode_header
from dist_ckpt.storage import Storage, WritableFile

# (name, nbytes, header_nbytes, digest), as in `plan.Receipt.files`.
FileReceipt = tuple[str, int, int, str]

# The cells of each tensor that a rank holds, with their memory.
Sources = Mapping[str, Sequence[tuple[Cell, Source]]]

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
    storage: Storage, folder: str, files: RankFiles, *, threads: int
) -> tuple[FileReceipt, ...]:
    """Write a rank's files into an attempt folder; return what `Receipt.files` takes.

    On return every file is durable, under its name, with the planned size. After an error some
    of them may lie there unfinished; the attempt cannot be committed and is removed as a whole.
    ConflictError if the folder is gone or a file is there already, StorageError otherwise.
    """
    receipts = write_shard_files(storage, folder, files, threads=threads)
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
    storage: Storage, folder: str, files: RankFiles, *, threads: int
) -> tuple[FileReceipt, ...]:
    """Write a rank's shard files; durable on return, but for their names."""
    with ExitStack() as stack:
        # All are created, and their space reserved, before the first byte is written.
        writings = []
        for plan in files.plans:
            file = _create(storage, f"{folder}/{plan.name}", plan.nbytes)
            stack.callback(file.discard)
            writings.append(_Writing(f"{folder}/{plan.name}", plan, file, files))
        slots = Slots(files.block_nbytes)
        work = (
            (writing, batch)
            for writing in writings
            for batch in batches_of(writing.plan.items, files.block_nbytes)
        )
        each(lambda one: one[0].write(one[1], slots), work, threads=threads)
        nbytes = sum(plan.nbytes for plan in files.plans)
        stall_s = patience_s(nbytes, stall_s=WORK_STALL_S)
        return tuple(each(_Writing.finish, writings, threads=threads, stall_s=stall_s))


@dataclass(frozen=True, slots=True)
class Part:
    """One block of an item: `number` counts the item's blocks, `span` is in the item's bytes."""

    item: WriteItem
    number: int
    span: Span


def batches_of(items: Iterable[WriteItem], block_nbytes: int) -> Iterator[tuple[Part, ...]]:
    """Cut items into what is written at once: one large block, or small ones that adjoin.

    A batch holds `block_nbytes` at most. Empty items have no blocks.
    """
    batch: list[Part] = []
    nbytes = 0
    for item in items:
        for number, span in enumerate(digest.blocks(item.span.nbytes, block_nbytes)):
            if batch and nbytes + span.nbytes > block_nbytes:
                yield tuple(batch)
                batch, nbytes = [], 0
            part = Part(item, number, span)
            if span.nbytes < SMALL_NBYTES:
                batch.append(part)
                nbytes += span.nbytes
                continue
            if batch:
                yield tuple(batch)
                batch, nbytes = [], 0
            yield (part,)
    if batch:
        yield tuple(batch)


def source_of(sources: Sources, fqn: str, cell: Cell) -> Source:
    """Return the memory of a cell that a rank holds, whole or as a part of a larger one."""
    for held, source in sources.get(fqn, ()):
        if held == cell:
            return source
    for held, source in sources.get(fqn, ()):
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

    def write(self, batch: tuple[Part, ...], slots: Slots) -> None:
        """Digest and write the blocks of a batch with one write."""
        with slots.one() as slot:
            data = self._gather(batch, slot)
            offset = 0
            for part in batch:
                block = data[offset : offset + part.span.nbytes]
                self._digests[part.item.name][part.number] = digest.block_digest(block)
                offset += part.span.nbytes
            first = batch[0]
            start = self.plan.header_nbytes + first.item.span.start + first.span.start
            self._file.write_at(start, data)

    def _gather(self, batch: tuple[Part, ...], slot: memoryview) -> memoryview:
        if len(batch) == 1:
            (part,) = batch
            place = slot[: part.span.nbytes]
            return self._sources[part.item.name].read(part.span.start, part.span.stop, place)
        filled = 0
        for part in batch:
            place = slot[filled : filled + part.span.nbytes]
            data = self._sources[part.item.name].read(part.span.start, part.span.stop, place)
            if data is not place:
                place[:] = data
            filled += part.span.nbytes
        return slot[:filled]

    def finish(self) -> FileReceipt:
        """Write the header, make the file durable and check its size."""
        plan, files = self.plan, self._files
        header = encode_header(
            ShardFile(
                component=files.catalog.components[plan.component].name,
                rank=plan.rank,
                world_size=files.catalog.world_size,
                step=files.step,
                block_nbytes=files.block_nbytes,
                header_nbytes=plan.header_nbytes,
                shards=tuple(self._stored(item) for item in plan.items),
            )
        )
        assert len(header) == plan.header_nbytes, f"{plan.name}: header of {len(header)} bytes"
        self._file.write_at(0, header)
        _finish(self._file, self.path, plan.nbytes)
        return plan.name, plan.nbytes, plan.header_nbytes, digest.document_digest(header)

    def _stored(self, item: WriteItem) -> StoredShard:
        digests = tuple(self._digests[item.name])
        return StoredShard(
            item.name, item.fqn, item.dtype, item.shape, item.cell, item.span, digests
        )


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
