"""Read a stored checkpoint in windows, for the shards of another checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TypeVar

from dist_ckpt.core.format.checksums import blocks
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange, Cell, ElementRange, Region, split_into_boxes
from dist_ckpt.core.format.shard_file import StoredShard
from dist_ckpt.core.planning.plan import FilePlan, TensorRequest
from dist_ckpt.core.runtime.host_memory import BufferPool
from dist_ckpt.core.runtime.threads import stream_results
from dist_ckpt.core.shard_io.memory.cell_memory import CellReader

# A function that reads the requested cells into memory, one after another.
Fetch = Callable[[Sequence[TensorRequest], memoryview], None]

W = TypeVar("W")


def read_ahead(
    read: Callable[[W, memoryview], None],
    windows: Iterable[W],
    buffers: BufferPool,
    *,
    threads: int = 1,
    waiting: int = 1,
) -> Generator[tuple[W, memoryview, ExitStack], None, None]:
    """Yield each window with its buffer, while other threads read the next windows.

    Close the stack to return the buffer. Close the generator if you stop early.
    """

    def read_window(window: W) -> tuple[W, memoryview, ExitStack]:
        borrowed = ExitStack()
        memory = borrowed.enter_context(buffers.borrow())
        read(window, memory)
        return window, memory, borrowed

    with closing(stream_results(read_window, windows, threads=threads, waiting=waiting)) as ready:
        yield from ready


@dataclass(frozen=True, slots=True)
class Window:
    """Some bytes of shards, and their layout in memory: one requested tensor after another.

    The cells of a tensor are adjacent, in one request. `spans` has, for each shard, the offset in
    the shard at which its bytes begin, and their range in memory.
    """

    wanted: tuple[TensorRequest, ...]
    spans: Mapping[tuple[str, Cell], tuple[int, ByteRange]]
    nbytes: int


def cut_into_windows(
    files: Sequence[FilePlan],
    window_nbytes: int,
    order: Callable[[StoredShard], tuple[object, ...]] = lambda item: (item.fqn,),
) -> Iterator[Window]:
    """Cut files into windows of at most `window_nbytes`, a multiple of the block size.

    `order` is the sort key of shards in a window. The key must end with the name.
    """
    for parts in _cut_files(files, window_nbytes):
        items: dict[str, StoredShard] = {}
        cells: dict[str, list[Cell]] = {}
        spans: dict[tuple[str, Cell], tuple[int, ByteRange]] = {}
        offset = 0
        for item, span in sorted(parts, key=lambda part: order(part[0])):
            items.setdefault(item.fqn, item)
            cells.setdefault(item.fqn, []).extend(_find_cells(item, span))
            spans[item.fqn, item.cell] = span.start, ByteRange(offset, offset + span.nbytes)
            offset += span.nbytes
        wanted = (
            TensorRequest(fqn, item.dtype, item.shape, tuple(cells[fqn]))
            for fqn, item in items.items()
        )
        yield Window(tuple(wanted), spans, offset)


def read_windows(
    fetch: Fetch, files: Sequence[FilePlan], window_nbytes: int, report: Callable[[int], None]
) -> Iterator[tuple[Window, memoryview]]:
    """Yield the windows of files with their memory. Each is read from a checkpoint on demand."""
    nbytes = sum(item.span.nbytes for file in files for item in file.items)
    memory = memoryview(bytearray(min(nbytes, window_nbytes)))
    for window in cut_into_windows(files, window_nbytes):
        fetch(window.wanted, memory)
        report(window.nbytes)
        yield window, memory


class WindowReaders:
    """Readers of files: a window is read when the first of its bytes is requested.

    Use the readers in the order of the files. Only one window is in use at a time. `filled` yields
    the windows in this order, each with its memory.
    """

    def __init__(
        self, files: Sequence[FilePlan], filled: Iterator[tuple[Window, memoryview]]
    ) -> None:
        self._filled = filled
        # For each shard in the current window: the offset of its first byte here, and its memory.
        self._views: dict[tuple[str, Cell], tuple[int, memoryview]] = {}
        self._files = files

    @property
    def readers(self) -> tuple[Callable[[int], CellReader], ...]:
        """The readers of the shards of each file.

        This object has no reference to them: a reference cycle would keep the last window alive.
        """
        return tuple(
            lambda number, items=file.items: _ItemReader(self, items[number])
            for file in self._files
        )

    def view(self, item: StoredShard, start: int, stop: int) -> memoryview:
        """Return some bytes of a shard. They must be in one window: every block is."""
        while True:
            first, view = self._views.get((item.fqn, item.cell), (0, memoryview(b"")))
            if first <= start and stop <= first + len(view):
                return view[start - first : stop - first]
            self._views = {}
            filled = next(self._filled, None)
            assert filled is not None, "readers are used in the order of the files"
            window, memory = filled
            self._views = {
                key: (first, memory[span.start : span.stop])
                for key, (first, span) in window.spans.items()
            }


def _find_cells(item: StoredShard, span: ByteRange) -> Iterator[Cell]:
    itemsize = DTYPES[item.dtype].itemsize
    elements = ElementRange(span.start // itemsize, span.stop // itemsize)
    cell = item.cell
    if isinstance(cell, ElementRange):
        yield ElementRange(cell.start + elements.start, cell.start + elements.stop)
        return
    for box in split_into_boxes(elements, cell.shape):
        offset = tuple(a + b for a, b in zip(cell.offset, box.offset, strict=True))
        yield Region(offset, box.shape)


def _cut_files(
    files: Sequence[FilePlan], window_nbytes: int
) -> Iterator[Sequence[tuple[StoredShard, ByteRange]]]:
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


@dataclass(frozen=True, slots=True)
class _ItemReader:
    windows: WindowReaders
    item: StoredShard

    @property
    def nbytes(self) -> int:
        return self.item.span.nbytes

    def address(self) -> None:
        return None

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        del scratch
        return self.windows.view(self.item, start, stop)
