"""Select the tensors of an average, and compute their mean, a window at a time.

The order of the arithmetic is defined. For each element, from the oldest checkpoint to the newest,
`w * x` is rounded to the dtype of the sum and added. The sum is divided by the sum of the weights
and rounded to the dtype of the tensor.
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
from dist_ckpt.core.planning.module_versions import module_entries, version_of_entry
from dist_ckpt.core.planning.name_selection import Selection
from dist_ckpt.core.planning.plan import FilePlan, TensorRequest
from dist_ckpt.core.runtime.host_memory import BufferPool, allocate_scratch
from dist_ckpt.core.shard_io.read.read_windows import Window, cut_into_windows, read_ahead
from dist_ckpt.core.state.tree.containers import find_enclosing_subclass
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.message_text import listed, names_around_remedy
from dist_ckpt.tools.average.checkpoint_selection import AverageSource

# --- choose the tensors, and check that all sources have them. Pure ----------------------------


# For each dtype that can be averaged: the dtype of an element, and of the sum. A complex number has
# two elements.
SUM_DTYPES: Mapping[str, tuple[str, str]] = {
    "float64": ("float64", "float64"),
    "float32": ("float32", "float32"),
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "complex128": ("float64", "float64"),
    "complex64": ("float32", "float32"),
    "complex32": ("float16", "float32"),
    "bcomplex32": ("bfloat16", "float32"),
    "float8_e4m3fn": ("float8_e4m3fn", "float32"),
    "float8_e5m2": ("float8_e5m2", "float32"),
    "float8_e4m3fnuz": ("float8_e4m3fnuz", "float32"),
    "float8_e5m2fnuz": ("float8_e5m2fnuz", "float32"),
}


def select_tensors(catalogs: Sequence[tuple[str, Catalog]], selection: Selection) -> frozenset[str]:
    """Return the names of the tensors to average: the trainable or the selected tensors.

    `catalogs` has the path and the catalog of each source, the newest last. The names are those in
    the newest source. Raises ValueError if no tensor can be averaged. Raises IncompatibleError with
    all differences between the sources.
    """
    path, newest = catalogs[-1]
    chosen = _select_from(path, newest, selection)
    _check_selection(path, newest, chosen, selection)
    problems = [
        f"{other}: {problem}"
        for other, catalog in catalogs[:-1]
        for problem in _find_differences(
            newest, chosen, catalog, _select_from(other, catalog, selection)
        )
    ]
    if problems:
        raise IncompatibleError(
            f"sources differ from the newest, {path}. Average checkpoints of one model, or choose "
            f"tensors with include= and exclude=: {listed(problems, '; ')}"
        )
    return frozenset(chosen)


def _select_from(path: str, catalog: Catalog, selection: Selection) -> set[str]:
    """Return the names of the tensors to average in one checkpoint."""
    floating = {name for name in catalog.tensors if _is_floating(catalog, name)}
    if floating and selection.include is None:
        if not catalog.parameters:
            raise ValueError(
                f"{path} does not record which tensors are trainable: it was saved from a plain "
                f'state_dict or by an older dist_ckpt. Choose tensors, such as include="model.*"'
            )
        # Inner tensors of tensor subclasses have no average: `_check_selection` refuses them.
        trainable = {name for name, is_trainable in catalog.parameters.items() if is_trainable}
        parts = {name for name in trainable if find_enclosing_subclass(name, catalog.values)}
        floating = floating & trainable | parts & catalog.tensors.keys()
    names = {name: [name] for name in floating}
    for alias, name in catalog.aliases.items():
        names.setdefault(name, []).append(alias)
    return {name for name in floating if any(alias in selection for alias in names[name])}


def _is_floating(catalog: Catalog, name: str) -> bool:
    return catalog.tensors[name].dtype in SUM_DTYPES


def _check_selection(path: str, catalog: Catalog, chosen: set[str], selection: Selection) -> None:
    names = [name for name in catalog.tensors if _is_floating(catalog, name)]
    is_floating = bool(names)
    names += [alias for alias, name in catalog.aliases.items() if _is_floating(catalog, name)]
    if problems := selection.pattern_problems(names):
        raise ValueError(
            f"among the floating-point tensors of {path}: {listed(problems, '; ')} "
            f"(`dist-ckpt tree` shows the names)"
        )
    wholes = {
        whole
        for name in chosen
        if (whole := find_enclosing_subclass(name, catalog.values)) is not None
    }
    if wholes:
        text, rest = names_around_remedy(sorted(wholes))
        raise ValueError(
            f"{path}: {text} "
            f"{'is a tensor' if len(wholes) == 1 else 'are tensors'} made of inner tensors, such "
            f"as quantized weights, and cannot be averaged: exclude={min(wholes)!r} copies the "
            f"newest one. Or average before quantizing{rest}"
        )
    if not chosen:
        reason = "is chosen: give other patterns" if is_floating else "exists: nothing to average"
        raise ValueError(f"{path}: no floating-point tensor that could be averaged {reason}")


def _find_differences(
    newest: Catalog, chosen: set[str], other: Catalog, other_chosen: set[str]
) -> Iterator[str]:
    """Yield the differences of another source from the newest, in the tensors to average."""
    for name in sorted(chosen):
        stored = other.aliases.get(name, name)
        record, expected = other.tensors.get(stored), newest.tensors[name]
        if record is None:
            yield f"it lacks {name}"
        elif (record.dtype, record.shape) != (expected.dtype, expected.shape):
            yield (
                f"{name} is {record.dtype} {list(record.shape)}, in the newest "
                f"{expected.dtype} {list(expected.shape)}"
            )
        elif stored not in other_chosen:
            yield f"{name} is not trainable"
    for alias, name in newest.aliases.items():
        tied = other.aliases.get(alias, alias) == other.aliases.get(name, name)
        if name in chosen and alias in {*other.tensors, *other.aliases} and not tied:
            yield f"{alias} is not tied to {name}"
    yield from _find_other_versions(newest, other, chosen)
    tied_to = {name: alias for alias, name in other.aliases.items()}
    for name in sorted(other_chosen):
        # The newest source may store a tied tensor under another of its names.
        if {name, newest.aliases.get(name), tied_to.get(name)}.isdisjoint(chosen):
            fact = "is not averaged" if name in newest.tensors else "does not exist"
            yield f"{name} {fact} in the newest"


def _find_other_versions(newest: Catalog, other: Catalog, chosen: set[str]) -> Iterator[str]:
    """Yield the modules of the tensors to average that another source has in another version."""
    ours, theirs = (module_entries(catalog.versions, chosen) for catalog in (newest, other))
    for key in sorted(ours.keys() & theirs.keys()):
        if ours[key] != theirs[key]:
            yield (
                f"{'.'.join(filter(None, key))} has version {version_of_entry(theirs[key])}, in "
                f"the newest {version_of_entry(ours[key])}: load it into the newer model and save "
                f"it again"
            )


# The elements that are added at a time. So the sum of several checkpoints stays in the processor's
# cache. Torch adds them in this thread: from 32768 elements on it uses its own threads. On a busy
# machine waiting for those took 20 times as long as the addition.
_NUMEL = (1 << 15) - 64

# A sum has at most this many bytes for each byte of an element: float32 for float8.
_MAX_GROWTH = 4


class AveragedRange(NamedTuple):
    """Consecutive elements of one dtype in a window."""

    dtype: str
    sum_dtype: str
    start: int  # in bytes
    numel: int


def build_ranges(wanted: Sequence[TensorRequest]) -> tuple[AveragedRange, ...]:
    """Return the ranges of the requested tensors. Neighbours with the same dtype share a range."""
    ranges: list[AveragedRange] = []
    start = 0
    for want in wanted:
        nbytes = _nbytes(want)
        dtype, sum_dtype = SUM_DTYPES[want.dtype]
        numel = nbytes // DTYPES[dtype].itemsize
        if ranges and ranges[-1].dtype == dtype:
            ranges[-1] = ranges[-1]._replace(numel=ranges[-1].numel + numel)
        elif numel:
            ranges.append(AveragedRange(dtype, sum_dtype, start, numel))
        start += nbytes
    return tuple(ranges)


class Mean:
    """The sums of one window of all checkpoints, oldest first. Not thread-safe."""

    def __init__(self, weights: Sequence[float], window_nbytes: int) -> None:
        self._weights = weights
        self._sum = fsum(weights)
        self._totals = allocate_scratch(window_nbytes * _MAX_GROWTH)
        self._term = allocate_scratch(_NUMEL * 8)

    def add(
        self, first: int, ranges: Sequence[AveragedRange], windows: Sequence[memoryview]
    ) -> None:
        """Add the windows of the checkpoints from number `first` on. Number 0 begins a new sum.

        When the newest checkpoint is added, the mean replaces the content of its window.
        """
        start = 0
        for part in ranges:
            values = [_tensor(window, part.dtype, part.start, part.numel) for window in windows]
            totals = _tensor(self._totals, part.sum_dtype, start, part.numel)
            start += totals.nbytes
            buffer = _tensor(self._term, part.sum_dtype, 0, min(part.numel, _NUMEL))
            pieces = zip(*(whole.split(_NUMEL) for whole in values), strict=True)
            for piece, sums in zip(pieces, totals.split(_NUMEL), strict=True):
                self._add(first, piece, sums, buffer[: len(sums)])

    def _add(
        self, first: int, piece: Sequence[torch.Tensor], totals: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        """Add the same elements of some checkpoints to their sums. `buffer` is used for a term."""
        for number, values in enumerate(piece, first):
            term = values if values.dtype == totals.dtype else buffer.copy_(values)
            if (weight := self._weights[number]) != 1:
                term = torch.mul(term, weight, out=buffer)
            if number:
                totals.add_(term)
            else:
                totals.copy_(term)
        if first + len(piece) == len(self._weights):
            piece[-1].copy_(totals.div_(self._sum))


def _tensor(memory: memoryview, dtype: str, start: int, numel: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=getattr(torch, dtype), offset=start, count=numel)


# A multiple of the size of a block. At most seven windows and the sums are in memory.
WINDOW_NBYTES = 16 << 20

# With more sources no file stays open between two windows: a process may open 1024 files.
_MAX_OPEN_SOURCES = 32

# The windows of this many sources are added together, while the next windows are read.
_GROUP_SIZE = 3


@dataclass(frozen=True, slots=True)
class _SourcePart:
    """The part of a window to read from one source. From the newest source it is all of it."""

    window: Window
    wanted: tuple[TensorRequest, ...]
    ranges: tuple[AveragedRange, ...]
    number: int
    is_last: bool


# A part, its bytes, and the stack that releases the memory.
_ReadPart = tuple[_SourcePart, memoryview, ExitStack]


class AveragedTensors:
    """The open sources of an average, the newest last. Call `close` when done."""

    def __init__(
        self, chosen: Sequence[AverageSource], averaged: Collection[str], buffers: BufferPool
    ) -> None:
        self._chosen = chosen
        self._averaged = averaged
        max_open_files = None if len(chosen) <= _MAX_OPEN_SOURCES else 0
        self._opened = [
            OpenCheckpoint(
                *(source.storage, source.path, source.attempt, source.index),
                buffers=buffers,
                max_open_files=max_open_files,
            )
            for source in chosen
        ]

    def nbytes_to_read(self, files: Sequence[FilePlan]) -> int:
        """Return the bytes to read from all sources for these files."""
        return sum(
            item.span.nbytes * (len(self._chosen) if item.fqn in self._averaged else 1)
            for file in files
            for item in file.items
        )

    def windows(
        self, files: Sequence[FilePlan], tell: Callable[[int], None]
    ) -> Generator[tuple[Window, memoryview], None, None]:
        """Yield the averaged windows of the files, and call `tell` with the bytes read.

        Raises CorruptError with the name of a damaged source.
        """
        nbytes = min(sum(file.nbytes for file in files), WINDOW_NBYTES)
        buffers = BufferPool(max(nbytes, 1))
        mean = Mean([source.weight for source in self._chosen], nbytes)

        def read(part: _SourcePart, memory: memoryview) -> None:
            self._opened[part.number].read(part.wanted, memory)

        parts = self._parts(cut_into_windows(files, nbytes, self._order))
        # Several threads read each part. With two parts at a time, one begins while another ends.
        reading = read_ahead(read, parts, buffers, threads=2, waiting=_GROUP_SIZE - 1)
        with closing(reading) as ready:
            for group in _group(ready):
                with ExitStack() as borrowed:
                    for _, _, buffer in group:
                        borrowed.enter_context(buffer)
                    last, memory, _ = group[-1]
                    first = group[0][0].number
                    mean.add(first, last.ranges, [window for _, window, _ in group])
                    tell(sum(_nbytes(want) for part, _, _ in group for want in part.wanted))
                    if last.is_last:
                        yield last.window, memory

    def _order(self, item: StoredShard) -> tuple[object, ...]:
        """Return a sort key: averaged tensors first, in aligned ranges of one dtype."""
        itemsize = DTYPES[item.dtype].itemsize
        return item.fqn not in self._averaged, -itemsize, item.dtype, item.fqn

    def _parts(self, windows: Iterator[Window]) -> Iterator[_SourcePart]:
        newest = len(self._chosen) - 1
        for window in windows:
            averaged = tuple(want for want in window.wanted if want.fqn in self._averaged)
            ranges = build_ranges(averaged)
            for number in range(newest if averaged else 0):
                yield _SourcePart(window, averaged, ranges, number, is_last=False)
            yield _SourcePart(window, window.wanted, ranges, newest, is_last=True)

    def close(self) -> None:
        """Close the files. Never raises."""
        for opened in self._opened:
            opened.close()


def _group(ready: Iterator[_ReadPart]) -> Iterator[list[_ReadPart]]:
    """Yield the parts of each window in groups of at most `_GROUP_SIZE` sources."""
    group: list[_ReadPart] = []
    for part in ready:
        group.append(part)
        if part[0].is_last or len(group) == _GROUP_SIZE:
            yield group
            group = []


def _nbytes(want: TensorRequest) -> int:
    return sum(cell.numel for cell in want.cells) * DTYPES[want.dtype].itemsize
