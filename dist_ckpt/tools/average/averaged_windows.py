"""Windows of the average: each source's is read ahead while the one before is added."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from threading import Lock

from dist_ckpt.core.commit.attempts import not_found_if_removed
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.shard_file import StoredShard
from dist_ckpt.core.planning.plan import FilePlan, TensorRequest
from dist_ckpt.core.runtime.buffers import BufferPool
from dist_ckpt.core.runtime.threads import results_of
from dist_ckpt.core.shard_io.read.read_windows import StoredTensors, Window, windows_of
from dist_ckpt.tools.average.mean import AveragedRange, Mean, stretches_of
from dist_ckpt.tools.average.source_selection import AverageSources

# A multiple of a block. Seven of them and the sums are in memory at once, so that it is this which
# counts, and not the largest tensor.
WINDOW_NBYTES = 16 << 20

# Of more sources no file stays open between two windows: a process may have 1024.
_MOST_OPEN = 32


# Of so many sources a window is added at once, while the next are read.
_AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class _SourcePart:
    """One source's part of a window; the newest's, which is `last`, is all of it."""

    window: Window
    averaged: tuple[TensorRequest, ...]
    runs: tuple[AveragedRange, ...]
    number: int
    last: bool

    @property
    def wanted(self) -> tuple[TensorRequest, ...]:
        """What is read of the source."""
        return self.window.wanted if self.last else self.averaged


# A part, its bytes, and what gives the memory back.
_Read = tuple[_SourcePart, memoryview, ExitStack]


class AveragedTensors:
    """The sources, open, the newest last; close it when done."""

    def __init__(
        self, chosen: Sequence[AverageSources], averaged: Collection[str], slots: BufferPool
    ) -> None:
        self._chosen = chosen
        self._averaged = averaged
        keeps_open = len(chosen) <= _MOST_OPEN
        self._tensors = [
            StoredTensors(one.storage, one.folder, one.index, slots=slots, keeps_open=keeps_open)
            for one in chosen
        ]
        self._locks = [Lock() for _ in chosen]

    def nbytes_to_read(self, files: Sequence[FilePlan]) -> int:
        """Return how many bytes are read for some files."""
        return sum(
            item.span.nbytes * (len(self._chosen) if item.fqn in self._averaged else 1)
            for file in files
            for item in file.items
        )

    def windows(
        self, files: Sequence[FilePlan], tell: Callable[[int], None]
    ) -> Generator[tuple[Window, memoryview], None, None]:
        """Yield the files' windows, averaged. CorruptError names the source that is damaged."""
        nbytes = min(sum(file.nbytes for file in files), WINDOW_NBYTES)
        slots, mean = BufferPool(max(nbytes, 1)), Mean([one.weight for one in self._chosen], nbytes)

        def read(piece: _SourcePart) -> _Read:
            lent = ExitStack()
            memory = lent.enter_context(slots.one())
            self._fetch(piece, memory)
            return piece, memory, lent

        pieces = self._pieces(windows_of(files, nbytes, self._order))
        # Each is read by several threads as it is; of two at a time one begins as another ends.
        with closing(results_of(read, pieces, threads=2, waiting=_AT_ONCE - 1)) as ready:
            for several in _together(ready):
                with ExitStack() as all_lent:
                    for _, _, lent in several:
                        all_lent.enter_context(lent)
                    piece, memory, _ = several[-1]
                    first = several[0][0].number
                    mean.add(first, piece.runs, [window for _, window, _ in several])
                    tell(sum(_nbytes(want) for one, _, _ in several for want in one.wanted))
                    if piece.last:
                        yield piece.window, memory

    def _order(self, item: StoredShard) -> tuple[object, ...]:
        """Sort what is averaged before all else, in runs of one dtype that are aligned."""
        itemsize = DTYPES[item.dtype].itemsize
        return item.fqn not in self._averaged, -itemsize, item.dtype, item.fqn

    def _pieces(self, windows: Iterator[Window]) -> Iterator[_SourcePart]:
        newest = len(self._chosen) - 1
        for window in windows:
            averaged = tuple(want for want in window.wanted if want.fqn in self._averaged)
            runs = stretches_of(averaged)
            for number in range(newest if averaged else 0):
                yield _SourcePart(window, averaged, runs, number, last=False)
            yield _SourcePart(window, averaged, runs, newest, last=True)

    def _fetch(self, piece: _SourcePart, memory: memoryview) -> None:
        one = self._chosen[piece.number]
        with (
            self._locks[piece.number],
            not_found_if_removed(one.storage, one.path, one.attempt),
        ):
            self._tensors[piece.number].fetch(piece.wanted, memory)

    def close(self) -> None:
        """Close the files. Never raises."""
        for tensors in self._tensors:
            tensors.close()


def _together(ready: Iterator[_Read]) -> Iterator[list[_Read]]:
    """Yield what is read of one window, of some sources at a time."""
    several: list[_Read] = []
    for one in ready:
        several.append(one)
        if one[0].last or len(several) == _AT_ONCE:
            yield several
            several = []


def _nbytes(want: TensorRequest) -> int:
    return sum(cell.numel for cell in want.cells) * DTYPES[want.dtype].itemsize
