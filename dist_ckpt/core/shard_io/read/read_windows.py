"""A stored checkpoint as the memory that another one is written from, a window at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dist_ckpt.config import Config
from dist_ckpt.core.format.checksums import blocks
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange, Cell, ElementRange, Region, boxes_of
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.shard_file import StoredShard
from dist_ckpt.core.planning.load.load_planner import plan_load
from dist_ckpt.core.planning.plan import FilePlan, TensorRequest
from dist_ckpt.core.runtime.buffers import BufferPool
from dist_ckpt.core.shard_io.memory.host_array import ArrayTarget
from dist_ckpt.core.shard_io.memory.protocol import CellSource
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.open_files import OpenFile, open_files
from dist_ckpt.core.storage import Storage


class StoredTensors:
    """The tensors of a checkpoint, by cells; close it when done. One thread uses it at a time.

    What was open for a fetch stays open for the next one if `keeps_open`. `slots` are scratch
    memory.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        index: Index,
        *,
        slots: BufferPool | None = None,
        keeps_open: bool = True,
    ) -> None:
        self.index = index
        self._storage = storage
        self._folder = folder
        self._slots = slots or BufferPool()
        self._keeps_open = keeps_open
        self._files: dict[int, OpenFile] = {}

    def fetch(self, wanted: Sequence[TensorRequest], memory: memoryview) -> None:
        """Read the wanted cells, one after another, into `memory`; each block is checked."""
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
        opened = open_files(
            self._storage, self._folder, self.index, plan, threads=threads, known=self._files
        )
        for number in self._files.keys() - plan.keys():
            self._files.pop(number).close()
        self._files.update((number, opened.files[number]) for number in plan)
        BlockReader(opened, targets, verify=True, slots=self._slots).run(threads)
        if not self._keeps_open:
            self.close()

    def close(self) -> None:
        """Close what is open. Never raises."""
        for file in self._files.values():
            file.close()
        self._files.clear()


@dataclass(frozen=True, slots=True)
class Window:
    """Some bytes of items, and how they lie in memory, one wanted tensor after another.

    The parts of one tensor lie together, since a rank's cells of it are fetched as one want.
    `places` say of each item's bytes where the first is in the item, and where all are in memory.
    """

    wanted: tuple[TensorRequest, ...]
    places: Mapping[tuple[str, Cell], tuple[int, ByteRange]]
    nbytes: int


# By what the tensors in a window are sorted; the last of it is the name.
SortKey = Callable[[StoredShard], tuple[object, ...]]


def by_name(item: StoredShard) -> tuple[object, ...]:
    """Sort tensors by their names."""
    return (item.fqn,)


def windows_of(
    files: Sequence[FilePlan], window_nbytes: int, order: SortKey = by_name
) -> Iterator[Window]:
    """Cut files into windows of at most `window_nbytes`, which is a multiple of a block."""
    for parts in _cut(files, window_nbytes):
        items: dict[str, StoredShard] = {}
        cells: dict[str, list[Cell]] = {}
        places: dict[tuple[str, Cell], tuple[int, ByteRange]] = {}
        offset = 0
        for item, span in sorted(parts, key=lambda part: order(part[0])):
            items.setdefault(item.fqn, item)
            cells.setdefault(item.fqn, []).extend(_cells_of(item, span))
            places[item.fqn, item.cell] = span.start, ByteRange(offset, offset + span.nbytes)
            offset += span.nbytes
        wanted = (
            TensorRequest(fqn, item.dtype, item.shape, tuple(cells[fqn]))
            for fqn, item in items.items()
        )
        yield Window(tuple(wanted), places, offset)


def read_windows(
    tensors: StoredTensors,
    files: Sequence[FilePlan],
    window_nbytes: int,
    tell: Callable[[int], None],
) -> Iterator[tuple[Window, memoryview]]:
    """Read the files' windows out of one checkpoint, each when it is asked for."""
    nbytes = sum(item.span.nbytes for file in files for item in file.items)
    memory = memoryview(bytearray(min(nbytes, window_nbytes)))
    for window in windows_of(files, window_nbytes):
        tensors.fetch(window.wanted, memory)
        tell(window.nbytes)
        yield window, memory


class Windows:
    """Files as sources: each window is taken when the first of its bytes is asked for.

    The sources ask in the order of the files, so one window is in use at a time. `filled` yields
    the windows of the files in this order, each with the memory that holds it.
    """

    def __init__(
        self, files: Sequence[FilePlan], filled: Iterator[tuple[Window, memoryview]]
    ) -> None:
        self._filled = filled
        # Of the window in memory: where each item's bytes begin, and where they are.
        self._views: dict[tuple[str, Cell], tuple[int, memoryview]] = {}
        self._files = files

    @property
    def sources(self) -> tuple[Callable[[int], CellSource], ...]:
        """The sources of each file's items. They refer to this, which refers to none of them.

        Otherwise the memory of the last window would be held until the collector comes.
        """
        return tuple(partial(self._source_of, file.items) for file in self._files)

    def _source_of(self, items: Sequence[StoredShard], number: int) -> CellSource:
        return _ItemSource(self, items[number])

    def view(self, item: StoredShard, start: int, stop: int) -> memoryview:
        """Return some bytes of an item; they lie in one window, as every block does."""
        while True:
            first, view = self._views.get((item.fqn, item.cell), (0, memoryview(b"")))
            if first <= start and stop <= first + len(view):
                return view[start - first : stop - first]
            self._views = {}
            filled = next(self._filled, None)
            assert filled is not None, "bytes are asked for in the order of the files"
            window, memory = filled
            self._views = {
                key: (first, memory[place.start : place.stop])
                for key, (first, place) in window.places.items()
            }


def _cells_of(item: StoredShard, span: ByteRange) -> Iterator[Cell]:
    """Yield some bytes of an item as cells of the tensor, in order."""
    itemsize = DTYPES[item.dtype].itemsize
    elements = ElementRange(span.start // itemsize, span.stop // itemsize)
    cell = item.cell
    if isinstance(cell, ElementRange):
        yield ElementRange(cell.start + elements.start, cell.start + elements.stop)
        return
    for box in boxes_of(elements, cell.shape):
        offset = tuple(a + b for a, b in zip(cell.offset, box.offset, strict=True))
        yield Region(offset, box.shape)


def _cut(
    files: Sequence[FilePlan], window_nbytes: int
) -> Iterator[Sequence[tuple[StoredShard, ByteRange]]]:
    """Cut items into windows' parts, in the order of the files."""
    window: list[tuple[StoredShard, ByteRange]] = []
    free = window_nbytes
    for item in (item for file in files for item in file.items):
        for span in blocks(item.span.nbytes, window_nbytes):
            if window and span.nbytes > free:
                yield window
                window, free = [], window_nbytes
            window.append((item, span))
            free -= span.nbytes
    if window:
        yield window


class _ItemSource:
    """A stored item as a `CellSource`: its bytes come out of the windows."""

    def __init__(self, windows: Windows, item: StoredShard) -> None:
        self._windows = windows
        self._item = item

    @property
    def nbytes(self) -> int:
        return self._item.span.nbytes

    def address(self) -> None:
        return None

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        del scratch
        return self._windows.view(self._item, start, stop)
