"""A stored checkpoint as the memory that another one is written from, a window at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

from dist_ckpt.format.checksums import blocks
from dist_ckpt.format.dtypes import DTYPES
from dist_ckpt.format.geometry import Cell, Elements, Region, Span, boxes_of
from dist_ckpt.format.index import Index
from dist_ckpt.format.shard_table import StoredShard
from dist_ckpt.memory.host_array import ArrayTarget
from dist_ckpt.memory.protocol import Source
from dist_ckpt.planning.load_planner import plan_load
from dist_ckpt.planning.plan import FilePlan, Wanted
from dist_ckpt.shard_io.block_reader import Reading
from dist_ckpt.shard_io.open_files import open_files
from dist_ckpt.storage import Storage


class StoredTensors:
    """The checkpoint to read from: its tensors, by cells. `folder` is the attempt's."""

    def __init__(self, storage: Storage, folder: str, index: Index, *, threads: int) -> None:
        self.index = index
        self._storage = storage
        self._folder = folder
        self._threads = threads

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
        files = open_files(self._storage, self._folder, self.index, plan, threads=self._threads)
        with closing(files):
            Reading(files, targets, verify=True).run(self._threads)


# Some bytes of items, in the order of their files.
_Window = Sequence[tuple[StoredShard, Span]]


class Windows:
    """The files of one rank in windows, each read when the first of its bytes is asked for.

    The sources ask in the order of the files, so one window is in memory at a time.
    """

    def __init__(
        self,
        stored: StoredTensors,
        files: Sequence[FilePlan],
        window_nbytes: int,
        tell: Callable[[int], None],
    ) -> None:
        self._stored = stored
        self._tell = tell
        self._windows = _windows_of(files, window_nbytes)
        nbytes = sum(item.span.nbytes for file in files for item in file.items)
        self._memory = memoryview(bytearray(min(nbytes, window_nbytes)))
        # Of the window in memory: where each item's bytes begin, and where they are.
        self._views: dict[tuple[str, Cell], tuple[int, memoryview]] = {}
        self.sources = tuple(partial(self._source_of, file.items) for file in files)

    def _source_of(self, items: Sequence[StoredShard], number: int) -> Source:
        return _ItemSource(self, items[number])

    def view(self, item: StoredShard, start: int, stop: int) -> memoryview:
        """Return some bytes of an item; they lie in one window, as every block does."""
        while True:
            first, view = self._views.get((item.fqn, item.cell), (0, memoryview(b"")))
            if first <= start and stop <= first + len(view):
                return view[start - first : stop - first]
            window = next(self._windows, None)
            assert window is not None, "bytes are asked for in the order of the files"
            self._read(window)

    def _read(self, window: _Window) -> None:
        items: dict[str, StoredShard] = {}
        cells: dict[str, list[Cell]] = {}
        views: dict[tuple[str, Cell], tuple[int, memoryview]] = {}
        offset = 0
        self._views = {}
        # The parts of one tensor lie together, since a rank's cells of it are fetched as one want.
        for item, span in sorted(window, key=lambda part: part[0].fqn):
            items.setdefault(item.fqn, item)
            cells.setdefault(item.fqn, []).extend(_cells_of(item, span))
            view = self._memory[offset : offset + span.nbytes]
            views[item.fqn, item.cell] = span.start, view
            offset += span.nbytes
        wanted = (
            Wanted(fqn, item.dtype, item.shape, tuple(cells[fqn])) for fqn, item in items.items()
        )
        self._stored.fetch(tuple(wanted), self._memory)
        self._views = views
        self._tell(offset)


def _cells_of(item: StoredShard, span: Span) -> Iterator[Cell]:
    """Yield some bytes of an item as cells of the tensor, in order."""
    itemsize = DTYPES[item.dtype].itemsize
    elements = Elements(span.start // itemsize, span.stop // itemsize)
    cell = item.cell
    if isinstance(cell, Elements):
        yield Elements(cell.start + elements.start, cell.start + elements.stop)
        return
    for box in boxes_of(elements, cell.shape):
        offset = tuple(a + b for a, b in zip(cell.offset, box.offset, strict=True))
        yield Region(offset, box.shape)


def _windows_of(files: Sequence[FilePlan], window_nbytes: int) -> Iterator[_Window]:
    """Cut items into windows of at most `window_nbytes`, which is a multiple of a block."""
    window: list[tuple[StoredShard, Span]] = []
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
    """A stored item as a `Source`: its bytes come out of the windows."""

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
