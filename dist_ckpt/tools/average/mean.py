"""The mean of windows of checkpoints, computed by torch on the CPU.

The order is defined: of each element, from the oldest checkpoint to the newest, `w * x` is rounded
to the dtype of the sum and added; the sum is divided by the sum of the weights, and rounded to the
dtype of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import fsum
from typing import NamedTuple

import torch

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.runtime.buffers import scratch
from dist_ckpt.tools.average.structure import SUMS

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
