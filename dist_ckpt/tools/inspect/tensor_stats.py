"""What the values of each tensor of a checkpoint are like, without torch or ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from dist_ckpt.core.checkpoint.open_checkpoint import WINDOW_NBYTES, OpenCheckpoint
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.planning.selection import selection_of
from dist_ckpt.core.shard_io.memory.host_array import has_numbers, numbers, numpy_module
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import Progress

if TYPE_CHECKING:
    import numpy as np

# Elements that are computed with at once: what numpy makes on the way stays small.
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What the values of one tensor are like; `alias_of` names the one that it is tied to.

    `min`, `max`, `mean` and `rms` (the root of the mean square) are of the finite values, of
    complex ones the magnitudes; None if there are none. `zeros`, `nan` and `inf` count elements, of
    complex numbers those with either part so. All are None where elements are no numbers.
    """

    name: str
    dtype: str
    shape: Shape
    numel: int
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    rms: float | None = None
    zeros: int | None = None
    nan: int | None = None
    inf: int | None = None
    alias_of: str | None = None

    @property
    def is_finite(self) -> bool:
        """Say whether there is no nan and no infinity in it."""
        return not self.nan and not self.inf


def stats(
    path: str | os.PathLike[str],
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    progress: Progress | None = None,
) -> tuple[TensorStats, ...]:
    """Return what the values of each tensor of a checkpoint are like, by name in its order.

    Every block is read once and checked; about 70 MB of memory are in use, however large it is.
    `include` and `exclude` are as of `dc.save`. `path` is what `dc.open` takes. One process, which
    needs numpy and not torch; nothing is changed. Raises ValueError for a pattern that matches
    nothing, otherwise as `dc.open` and CorruptError for damaged blocks.
    """
    selection = selection_of(include, exclude)
    numpy_module()  # before anything is read
    with OpenCheckpoint.open(path, opener=OPENER, direct_reads=True) as opened:
        catalog = opened.catalog
        names = opened.select(selection)
        counted = {fqn: _Counts() for fqn in names.values()}
        stored = {fqn for fqn in counted if has_numbers(catalog.tensors[fqn].dtype)}
        total, done = opened.tensor_nbytes(stored), 0
        for window in opened.stream(stored, window_nbytes=WINDOW_NBYTES):
            for want, data in window.parts:
                counted[want.fqn].add(want.dtype, data)
            done += window.nbytes
            if progress is not None:
                progress(done, total)
        found = {}
        for fqn, counts in counted.items():
            record = catalog.tensors[fqn]
            one = TensorStats(fqn, record.dtype, record.shape, prod(record.shape))
            found[fqn] = counts.finished(one) if fqn in stored else one
    return tuple(
        found[fqn] if name == fqn else replace(found[fqn], name=name, alias_of=fqn)
        for name, fqn in names.items()
    )


class _Counts:
    """What is known of one tensor's values so far; they come in any order."""

    def __init__(self) -> None:
        self.finite = self.zeros = self.nan = self.inf = 0
        self.lowest: float | None = None
        self.highest: float | None = None
        self.sum = self.squares = 0.0

    def add(self, dtype: str, data: memoryview) -> None:
        """Count some elements."""
        step = _AT_ONCE * DTYPES[dtype].itemsize
        for start in range(0, data.nbytes, step):
            self._add(numbers(dtype, data[start : start + step]))

    def _add(self, values: np.ndarray) -> None:
        numpy = numpy_module()
        self.zeros += values.size - int(numpy.count_nonzero(values))
        if values.dtype.kind in "fc":
            nan = int(numpy.isnan(values).sum())
            finite = numpy.isfinite(values)
            self.nan += nan
            self.inf += values.size - nan - int(finite.sum())
            values = values[finite]
        if not values.size:
            return
        # Squares of a float64 may be too large for one, and the magnitude of two complex parts is.
        wide = numpy.longdouble if values.dtype.itemsize >= 8 else numpy.float64
        if values.dtype.kind == "c":
            values = numpy.hypot(values.real.astype(wide), values.imag.astype(wide))
        self.finite += values.size
        # Not `item()`: of a long double it is one.
        number = float if values.dtype.kind == "f" else int
        low, high = number(values.min()), number(values.max())
        self.lowest = low if self.lowest is None else min(self.lowest, low)
        self.highest = high if self.highest is None else max(self.highest, high)
        exact = values.astype(wide)
        self.sum += exact.sum()
        self.squares += (exact * exact).sum()

    def finished(self, one: TensorStats) -> TensorStats:
        """Return what all of them are like."""
        numel = self.finite
        return replace(
            one,
            min=self.lowest,
            max=self.highest,
            mean=float(self.sum / numel) if numel else None,
            rms=float(numpy_module().sqrt(self.squares / numel)) if numel else None,
            zeros=self.zeros,
            nan=self.nan,
            inf=self.inf,
        )
