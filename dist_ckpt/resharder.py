"""`dc.reshard`: rewrite a checkpoint for another layout, offline, in one process, without torch.

The target is planned like a save by as many ranks, and written like one; only the bytes come out
of the source checkpoint instead of memory, a window of them at a time.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dist_ckpt import __version__, commit, objects, paths
from dist_ckpt.array import ArrayTarget
from dist_ckpt.catalog_codec import MAX_WORLD_SIZE
from dist_ckpt.config import Config
from dist_ckpt.digest import BLOCK_NBYTES, blocks
from dist_ckpt.dtypes import DTYPES
from dist_ckpt.errors import CorruptError
from dist_ckpt.index import Index, Key, ObjectsFileRecord
from dist_ckpt.load_planner import plan_load
from dist_ckpt.memory import Source
from dist_ckpt.open_files import open_files, read_objects
from dist_ckpt.phases import Phases
from dist_ckpt.plan import (
    FilePlan,
    Inventory,
    Receipt,
    SavePlan,
    TensorEntry,
    View,
    Wanted,
    WriteItem,
)
from dist_ckpt.reader import read
from dist_ckpt.receipts import check_receipts, sizes_of
from dist_ckpt.region import Cell, Elements, Region, boxes_of
from dist_ckpt.reports import SaveReport
from dist_ckpt.save_planner import items_of, plan_save
from dist_ckpt.sharded_views import target_views
from dist_ckpt.sharding import ShardingConfig
from dist_ckpt.storage import Storage, open_storage
from dist_ckpt.writer import FileReceipt, RankFiles, write_all

# Called with (bytes written so far, bytes to write in all).
Progress = Callable[[int, int], None]

MIN_MEMORY = 64 << 20


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    sharding: ShardingConfig | None = None,
    world_size: int | None = None,
    max_memory: int = 1 << 30,
    progress: Progress | None = None,
) -> SaveReport:
    """Write the checkpoint at `source` again at `target`, laid out for other ranks.

    Give `sharding`, or `world_size` to cut every tensor evenly along dimension 0. One process
    does it with about `max_memory` bytes, without torch or a GPU. Every byte read is checked.
    Plain data and per-rank values, with the keys they were saved under, are carried over.

    On return the target is complete and durable. Raises ExistsError if something is there;
    otherwise as a load from `source` and a save to `target` would.
    """
    if (sharding is None) == (world_size is None):
        raise ValueError("give either sharding= or world_size=")
    if sharding is not None and not isinstance(sharding, ShardingConfig):
        raise TypeError(f"sharding is a {type(sharding).__name__}: give a ShardingConfig")
    if type(max_memory) is not int or max_memory < MIN_MEMORY:
        raise ValueError(f"max_memory={max_memory!r}: give {MIN_MEMORY} bytes or more")
    config = sharding if sharding is not None else ShardingConfig.even(_count(world_size))
    source_storage, source_path = open_storage(source)
    target_storage, target_path = open_storage(target)
    if source_path == target_path:
        raise ValueError(f"source and target are both {source_path}: give another target")
    if target_path.startswith(f"{source_path}/"):
        raise ValueError(f"the target {target_path} lies in the source: give another target")
    attempt, index = commit.find(source_storage, source_path)
    stored = Stored(source_storage, f"{source_path}/{attempt.name}", index)
    plan = plan_target(index, stored.main, config)
    run = _Reshard(stored, plan, target_storage, target_path, max_memory, progress)
    return run.run()


def _count(world_size: int | None) -> int:
    if type(world_size) is not int or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(
            f"world_size={world_size!r}: give the number of ranks, from 1 to {MAX_WORLD_SIZE}"
        )
    return world_size


class Stored:
    """The checkpoint to read from: its index, its objects files, and its tensors by cells."""

    def __init__(self, storage: Storage, folder: str, index: Index) -> None:
        self.index = index
        self._storage = storage
        self._folder = folder
        self.files = {record.name: self._read_objects(record) for record in index.objects}
        if paths.OBJECTS not in self.files:
            raise CorruptError(f"{folder}: the index lists no {paths.OBJECTS}")

    @property
    def main(self) -> objects.ObjectsFile:
        """The global objects file."""
        return self.files[paths.OBJECTS]

    def _read_objects(self, record: ObjectsFileRecord) -> objects.ObjectsFile:
        return objects.decode(read_objects(self._storage, self._folder, record), what=record.name)

    def fetch(self, wanted: Sequence[Wanted], memory: memoryview) -> None:
        """Read the wanted cells, one after another, into `memory`."""
        targets = {}
        start = 0
        for want in wanted:
            itemsize = DTYPES[want.dtype].itemsize
            for part, cell in enumerate(want.cells):
                stop = start + cell.numel * itemsize
                targets[want.fqn, part] = ArrayTarget(memory[start:stop], itemsize)
                start = stop
        plan = plan_load(self.index, wanted)
        threads = Config.from_environment().threads
        with open_files(self._storage, self._folder, self.index, plan, threads=threads) as files:
            read(files, plan, targets, verify=True, threads=threads)


def plan_target(index: Index, main: objects.ObjectsFile, config: ShardingConfig) -> SavePlan:
    """Return the plan of a save, by the ranks of `config`, of what a checkpoint holds. Pure."""
    catalog = index.catalog
    components = tuple(component.name for component in catalog.components)
    views: dict[View, int] = {}
    tensors = []
    for fqn, view in target_views(config, catalog).items():
        record = catalog.tensors[fqn]
        number = views.setdefault(view, len(views))
        tensors.append(TensorEntry(fqn, record.dtype, record.shape, number, record.component))
    inventory = Inventory(
        mesh=catalog.mesh,
        components=components,
        views=tuple(views),
        tensors=tuple(tensors),
        aliases=tuple(catalog.aliases.items()),
        values=tuple(catalog.values),
        per_rank=(),
        tree=main.tree,
        name_lists=(),
        numpy=main.numpy,
    )
    plan = plan_save([(inventory, tuple(range(config.world_size)))], config.world_size)
    # The keys mean what they meant to the ranks that saved, so the mesh stays theirs as well.
    per_rank = {fqn: tuple((key, 0) for key, _ in keys) for fqn, keys in catalog.per_rank.items()}
    return replace(plan, catalog=replace(plan.catalog, per_rank=per_rank))


class _Reshard:
    """One run: claim, write what each rank would, commit."""

    def __init__(
        self,
        stored: Stored,
        plan: SavePlan,
        storage: Storage,
        path: str,
        max_memory: int,
        progress: Progress | None,
    ) -> None:
        self._stored = stored
        self._plan = plan
        self._storage = storage
        self._path = path
        self._window_nbytes = max_memory // 2 // BLOCK_NBYTES * BLOCK_NBYTES
        self._progress = progress
        self._phases = Phases("reshard", path, quiet=False)

    def run(self) -> SaveReport:
        by = f"reshard on {socket.gethostname()}"
        claim = commit.claim(self._storage, self._path, overwrite=False, by=by)
        try:
            with self._phases.phase("write"):
                receipts = self._write(claim.folder)
            with self._phases.phase("commit"):
                commit.check_files(self._storage, claim.folder, sizes_of(receipts))
                commit.commit(self._storage, claim, self._index(claim.attempt.name, receipts))
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"[:500]
            if commit.abandon(self._storage, self._path, claim.attempt, by=by, reason=reason):
                commit.give_up(self._storage, claim)
            raise
        return self._report(claim.attempt.name, receipts)

    def _write(self, folder: str) -> list[Receipt]:
        world_size = self._plan.catalog.world_size
        plans = [items_of(self._plan, rank) for rank in range(world_size)]
        total = sum(file.nbytes for files in plans for file in files)
        receipts, written = [], 0
        for rank, files in enumerate(plans):
            start = time.monotonic()
            done = self._write_rank(folder, files, rank)
            receipts.append(Receipt(done, (), time.monotonic() - start))
            written += sum(file.nbytes for file in files)
            if self._progress is not None:
                self._progress(written, total)
        return receipts

    def _write_rank(
        self, folder: str, files: tuple[FilePlan, ...], rank: int
    ) -> tuple[FileReceipt, ...]:
        windows = _Windows(self._stored, files, self._window_nbytes)
        content = RankFiles(
            catalog=self._plan.catalog,
            step=self._stored.index.step,
            plans=files,
            sources=windows.sources,
            objects=self._objects() if rank == 0 else {},
        )
        # One thread: a window is read at a time, and its blocks are written in its order.
        return write_all(self._storage, folder, content, threads=1)

    def _objects(self) -> dict[str, bytes]:
        """Return the objects files: all values in the global one, all keys in rank 0's."""
        files = self._stored.files.values()
        values = {fqn: value for file in files for fqn, value in file.values.items()}
        per_rank: dict[str, dict[Key, object]] = {}
        for file in files:
            for fqn, by_key in file.per_rank.items():
                per_rank.setdefault(fqn, {}).update(by_key)
        main = replace(self._stored.main, values=values, per_rank={})
        encoded = {paths.OBJECTS: objects.encode(main)}
        if per_rank:
            encoded[paths.objects_file(0)] = objects.encode(objects.ObjectsFile(per_rank=per_rank))
        return encoded

    def _index(self, attempt: str, receipts: Sequence[Receipt]) -> Index:
        files, objects_files = check_receipts(self._plan.catalog, receipts)
        return replace(
            self._stored.index,
            attempt=attempt,
            catalog=self._plan.catalog,
            files=files,
            objects=objects_files,
            saved_by={**self._stored.index.saved_by, "resharded_by": f"dist_ckpt {__version__}"},
            saved_at=time.time(),
        )

    def _report(self, attempt: str, receipts: Sequence[Receipt]) -> SaveReport:
        slowest = max(range(len(receipts)), key=lambda rank: receipts[rank].seconds)
        sizes = sizes_of(receipts)
        return SaveReport(
            path=self._path,
            step=self._stored.index.step,
            attempt=attempt,
            nbytes=sum(sizes.values()),
            num_tensors=len(self._plan.catalog.tensors),
            num_files=len(sizes),
            seconds=self._phases.seconds,
            slowest_rank=slowest,
            slowest_s=receipts[slowest].seconds,
        )


# --- windows ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """The bytes `start` to `stop` of an item."""

    item: WriteItem
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def cells(self) -> Iterator[Cell]:
        """Yield them as cells of the tensor, in order."""
        itemsize = DTYPES[self.item.dtype].itemsize
        elements = Elements(self.start // itemsize, self.stop // itemsize)
        cell = self.item.cell
        if isinstance(cell, Elements):
            yield Elements(cell.start + elements.start, cell.start + elements.stop)
            return
        for box in boxes_of(elements, cell.shape):
            offset = tuple(a + b for a, b in zip(cell.offset, box.offset, strict=True))
            yield Region(offset, box.shape)


class _Windows:
    """The files of one rank in windows: each is read when the first of its bytes is asked for.

    The sources ask in the order of the files, so one window is in memory at a time.
    """

    def __init__(self, stored: Stored, files: Sequence[FilePlan], window_nbytes: int) -> None:
        self._stored = stored
        self._windows = [tuple(window) for window in _windows_of(files, window_nbytes)]
        largest = max((sum(part.nbytes for part in window) for window in self._windows), default=0)
        self._memory = memoryview(bytearray(largest))
        self._window_of = {
            (part.item.fqn, part.item.cell, part.start): number
            for number, window in enumerate(self._windows)
            for part in window
        }
        self._current = -1
        self._views: dict[tuple[str, Cell], tuple[int, memoryview]] = {}
        self._step = window_nbytes
        self.sources: dict[str, list[tuple[Cell, Source]]] = {}
        for item in (item for file in files for item in file.items):
            self.sources.setdefault(item.fqn, []).append((item.cell, _ItemSource(self, item)))

    def view(self, item: WriteItem, start: int, stop: int) -> memoryview:
        """Return some bytes of an item; they lie in one window, as every block does."""
        number = self._window_of[item.fqn, item.cell, start // self._step * self._step]
        if number != self._current:
            self._read(number)
        first, view = self._views[item.fqn, item.cell]
        return view[start - first : stop - first]

    def _read(self, number: int) -> None:
        self._current = -1
        wanted: dict[str, Wanted] = {}
        offset = 0
        self._views = {}
        # The parts of one tensor lie together, since a rank's cells of it are fetched as one want.
        for part in sorted(self._windows[number], key=lambda part: part.item.fqn):
            item = part.item
            known = wanted.get(item.fqn, Wanted(item.fqn, item.dtype, item.shape, ()))
            wanted[item.fqn] = replace(known, cells=(*known.cells, *part.cells()))
            view = self._memory[offset : offset + part.nbytes]
            self._views[item.fqn, item.cell] = part.start, view
            offset += part.nbytes
        self._stored.fetch(tuple(wanted.values()), self._memory)
        self._current = number


def _windows_of(files: Sequence[FilePlan], window_nbytes: int) -> Iterator[list[_Part]]:
    """Cut items into windows of at most `window_nbytes`, which is a multiple of a block."""
    window: list[_Part] = []
    free = window_nbytes
    for item in (item for file in files for item in file.items):
        for span in blocks(item.span.nbytes, window_nbytes):
            if window and span.nbytes > free:
                yield window
                window, free = [], window_nbytes
            window.append(_Part(item, span.start, span.stop))
            free -= span.nbytes
    if window:
        yield window


class _ItemSource:
    """A stored item as a `memory.Source`: its bytes come out of the windows."""

    def __init__(self, windows: _Windows, item: WriteItem) -> None:
        self._windows = windows
        self._item = item

    @property
    def nbytes(self) -> int:
        return self._item.span.nbytes

    def part(self, cell: Cell) -> Source:
        raise AssertionError("the plan of a reshard stores what it holds, cell by cell")

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        del scratch
        return self._windows.view(self._item, start, stop)
