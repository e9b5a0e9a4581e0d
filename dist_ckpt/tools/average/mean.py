"""The mean of checkpoints: which tensors it has, its arithmetic, and the windows that are read.

The order is defined: of each element, from the oldest checkpoint to the newest, `w * x` is rounded
to the dtype of the sum and added; the sum is divided by the sum of the weights, and rounded to the
dtype of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

import torch

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.index.index import Catalog
from dist_ckpt.core.format.shard_file import StoredShard
from dist_ckpt.core.planning.plan import FilePlan, TensorRequest
from dist_ckpt.core.planning.selection import Selection
from dist_ckpt.core.runtime.buffers import BufferPool, scratch
from dist_ckpt.core.shard_io.read.read_windows import Window, read_ahead, windows_of
from dist_ckpt.core.state.tree.containers import whole_of
from dist_ckpt.errors import IncompatibleError, listed
from dist_ckpt.tools.average.source_selection import AverageSources

# --- the tensors that are averaged, and whether all sources have them. Pure -------------------


# What is averaged: the dtype of its elements, and that of their sum. A complex number is two of
# them.
SUMS: Mapping[str, tuple[str, str]] = {
    "float64": ("float64", "float64"),
    "float32": ("float32", "float32"),
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "complex128": ("float64", "float64"),
    "complex64": ("float32", "float32"),
    "complex32": ("float16", "float32"),
    "float8_e4m3fn": ("float8_e4m3fn", "float32"),
    "float8_e5m2": ("float8_e5m2", "float32"),
    "float8_e4m3fnuz": ("float8_e4m3fnuz", "float32"),
    "float8_e5m2fnuz": ("float8_e5m2fnuz", "float32"),
}


def averaged_names(catalogs: Sequence[tuple[str, Catalog]], selection: Selection) -> frozenset[str]:
    """Return the tensors that are averaged: the trainable ones, or what is selected.

    `catalogs` are the sources' with their paths, the newest last; the names are its own. Raises
    ValueError if nothing can be chosen, IncompatibleError with all that differs between sources.
    """
    path, newest = catalogs[-1]
    chosen = _chosen(path, newest, selection)
    _check_matched(path, newest, selection)
    _check_parts(path, newest, chosen)
    if not chosen:
        floating = any(_is_floating(newest, name) for name in newest.tensors)
        what = "is chosen: give other patterns" if floating else "is there: nothing to average"
        raise ValueError(f"{path}: no floating-point tensor that could be averaged {what}")
    problems = [
        f"{other}: {problem}"
        for other, catalog in catalogs[:-1]
        for problem in _differences(newest, chosen, catalog, _chosen(other, catalog, selection))
    ]
    if problems:
        raise IncompatibleError(
            f"what is averaged differs from the newest, {path}: {listed(problems, '; ')}. Average "
            f"checkpoints of one model, or choose tensors with include= and exclude="
        )
    return frozenset(chosen)


def _chosen(path: str, catalog: Catalog, selection: Selection) -> set[str]:
    """Return what one checkpoint would have averaged, under the names of its tensors."""
    floating = {name for name in catalog.tensors if _is_floating(catalog, name)}
    if floating and selection.include is None:
        if not catalog.parameters:
            raise ValueError(
                f"{path} does not say which tensors are trainable, as it was saved from a plain "
                f'state_dict or by an older dist_ckpt: choose them, such as include="model.*"'
            )
        # Parts of compounds are none that could be averaged, whatever their dtype: to be refused.
        trainable = {name for name, is_trainable in catalog.parameters.items() if is_trainable}
        parts = {name for name in trainable if whole_of(name, catalog.values)}
        floating = floating & trainable | parts & catalog.tensors.keys()
    names = {name: [name] for name in floating}
    for alias, name in catalog.aliases.items():
        names.setdefault(name, []).append(alias)
    return {name for name in floating if any(one in selection for one in names[name])}


def _is_floating(catalog: Catalog, name: str) -> bool:
    return catalog.tensors[name].dtype in SUMS


def _check_matched(path: str, catalog: Catalog, selection: Selection) -> None:
    names = [name for name in catalog.tensors if _is_floating(catalog, name)]
    names += [alias for alias, name in catalog.aliases.items() if _is_floating(catalog, name)]
    if problems := selection.unmatched(names):
        raise ValueError(
            f"among the floating-point tensors of {path}: {listed(problems, '; ')} "
            f"(`dist-ckpt tree` shows the names)"
        )


def _check_parts(path: str, catalog: Catalog, chosen: set[str]) -> None:
    wholes = {whole for name in chosen if (whole := whole_of(name, catalog.values)) is not None}
    if wholes:
        raise ValueError(
            f"{path}: {listed(sorted(wholes))} "
            f"{'is a tensor' if len(wholes) == 1 else 'are tensors'} made of others (quantized), "
            f"whose parts have no average: take the newest's with exclude={min(wholes)!r}, or "
            f"average before quantizing"
        )


def _differences(
    newest: Catalog, chosen: set[str], other: Catalog, others: set[str]
) -> Iterator[str]:
    """Say what another source has otherwise of what is averaged."""
    for name in sorted(chosen):
        stored = other.aliases.get(name, name)
        record, expected = other.tensors.get(stored), newest.tensors[name]
        if record is None:
            yield f"it lacks {name}"
        elif (record.dtype, record.shape) != (expected.dtype, expected.shape):
            yield (
                f"{name} is {record.dtype} {list(record.shape)}, there "
                f"{expected.dtype} {list(expected.shape)}"
            )
        elif stored not in others:
            yield f"{name} is not trainable"
    for alias, name in newest.aliases.items():
        tied = other.aliases.get(alias, alias) == other.aliases.get(name, name)
        if name in chosen and alias in {*other.tensors, *other.aliases} and not tied:
            yield f"{alias} is not tied to {name}"
    tied_to = {name: alias for alias, name in other.aliases.items()}
    for name in sorted(others):
        # A tensor may have another of its names there.
        if {name, newest.aliases.get(name), tied_to.get(name)}.isdisjoint(chosen):
            where = "is averaged only there" if name in newest.tensors else "is only there"
            yield f"{name} {where}"


# --- the arithmetic, by torch on the CPU ------------------------------------------------------


# So many elements at a time: the sum of several checkpoints stays in a processor's cache, and torch
# does them in this thread. From 32768 on its threads share them, and where others are at work as
# well, to wait for each other took 20 times as long as to add.
_NUMEL = (1 << 15) - 64

# No sum has more bytes for one of an element: float32 for a float8.
_MOST_GROWTH = 4


class AveragedRange(NamedTuple):
    """Elements of one dtype that follow one another in a window."""

    dtype: str
    sum_dtype: str
    start: int  # in bytes
    numel: int


def stretches_of(wanted: Sequence[TensorRequest]) -> tuple[AveragedRange, ...]:
    """Return the elements of wanted tensors that lie one after another, by dtype."""
    runs: list[AveragedRange] = []
    start = 0
    for want in wanted:
        nbytes = sum(cell.numel for cell in want.cells) * DTYPES[want.dtype].itemsize
        dtype, sum_dtype = SUMS[want.dtype]
        numel = nbytes // DTYPES[dtype].itemsize
        if runs and runs[-1].dtype == dtype:
            runs[-1] = runs[-1]._replace(numel=runs[-1].numel + numel)
        elif numel:
            runs.append(AveragedRange(dtype, sum_dtype, start, numel))
        start += nbytes
    return tuple(runs)


class Mean:
    """Adds up a window of each checkpoint, oldest first. One thread uses it at a time."""

    def __init__(self, weights: Sequence[float], window_nbytes: int) -> None:
        self._weights = weights
        self._sum = fsum(weights)
        self._totals = scratch(window_nbytes * _MOST_GROWTH)
        self._term = scratch(_NUMEL * 8)

    def add(self, first: int, runs: Sequence[AveragedRange], windows: Sequence[memoryview]) -> None:
        """Add what checkpoints `first` and the next have in a window; 0 begins a new sum.

        With the newest the mean is put into its window, in the place of what it has.
        """
        for each, totals, own in self._parts(runs, windows):
            for number, values in enumerate(each, first):
                term = values if values.dtype == totals.dtype else own.copy_(values)
                if (weight := self._weights[number]) != 1:
                    term = torch.mul(term, weight, out=own)
                if number:
                    totals.add_(term)
                else:
                    totals.copy_(term)
            if first + len(each) == len(self._weights):
                each[-1].copy_(totals.div_(self._sum))

    def _parts(
        self, runs: Sequence[AveragedRange], windows: Sequence[memoryview]
    ) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]]:
        """Yield the elements in some windows, their sums and room for a term, some at a time."""
        start = 0
        for run in runs:
            values = [_tensor(window, run.dtype, run.start, run.numel) for window in windows]
            totals = _tensor(self._totals, run.sum_dtype, start, run.numel)
            start += totals.nbytes
            own = _tensor(self._term, run.sum_dtype, 0, min(run.numel, _NUMEL))
            cut = zip(*(whole.split(_NUMEL) for whole in values), strict=True)
            for each, part in zip(cut, totals.split(_NUMEL), strict=True):
                yield each, part, own[: len(part)]


def _tensor(memory: memoryview, dtype: str, start: int, numel: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=getattr(torch, dtype), offset=start, count=numel)


# --- the windows: each source's is read ahead while the one before is added -------------------


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
        most_kept = None if len(chosen) <= _MOST_OPEN else 0
        self._opened = [
            OpenCheckpoint(
                *(one.storage, one.path, one.attempt, one.index), slots=slots, most_kept=most_kept
            )
            for one in chosen
        ]

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

        def read(piece: _SourcePart, memory: memoryview) -> None:
            self._opened[piece.number].read(piece.wanted, memory)

        pieces = self._pieces(windows_of(files, nbytes, self._order))
        # Each is read by several threads as it is; of two at a time one begins as another ends.
        reading = read_ahead(read, pieces, slots, threads=2, waiting=_AT_ONCE - 1)
        with closing(reading) as ready:
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

    def close(self) -> None:
        """Close the files. Never raises."""
        for opened in self._opened:
            opened.close()


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
