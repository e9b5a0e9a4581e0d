"""Describe one checkpoint: its summary, its layout, and the statistics of its tensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.checkpoint.open_checkpoint import WINDOW_NBYTES, OpenCheckpoint
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Cell, Shape
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.planning.name_selection import parse_selection
from dist_ckpt.core.planning.save.save_planner import stored_cells_by_rank
from dist_ckpt.core.shard_io.memory.host_array import has_numbers, numbers, numpy_module
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import CheckpointError
from dist_ckpt.reports import CopyProgress, Progress

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """The contents of a checkpoint in numbers. Tied names count once, except in `num_aliases`.

    `mesh` lists the axes, whose names may be empty. `num_parameters` and `num_trainable` are None
    if they are unknown or cannot be read. `config_problem` is the reason why `config` cannot be
    read.
    """

    path: str
    step: int | None
    kind: str | None
    attempt: str
    saved_at: float
    saved_by: Mapping[str, str]
    world_size: int
    mesh: tuple[tuple[str, int], ...]
    nbytes: int
    num_files: int
    num_tensors: int
    num_aliases: int
    num_values: int
    num_parameters: int | None
    num_trainable: int | None
    nbytes_by_component: Mapping[str, int]
    nbytes_by_dtype: Mapping[str, int]
    per_rank: Mapping[str, int]
    replicas: Mapping[str, str]
    attached: Mapping[str, int]
    metadata: Mapping[str, Json]
    config: Mapping[str, object] | None
    config_problem: str | None


def summarize(ck: Checkpoint) -> CheckpointSummary:
    """Return the summary of an open checkpoint."""
    index, catalog = ck.index, ck.index.catalog
    tensors = [info for info in ck.tensors.values() if info.alias_of is None]
    components: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for info in tensors:
        components[info.component] += info.nbytes
        dtypes[info.dtype] += info.nbytes
    num_parameters = num_trainable = config = config_problem = None
    with suppress(CheckpointError):
        num_parameters, num_trainable = ck.num_parameters, ck.num_trainable
    try:
        config = ck.config
    except CheckpointError as error:
        config_problem = str(error)
    return CheckpointSummary(
        path=ck.path,
        step=ck.step,
        kind=ck.kind,
        attempt=index.attempt,
        saved_at=index.saved_at,
        saved_by=dict(index.saved_by),
        world_size=ck.world_size,
        mesh=tuple(catalog.mesh),
        nbytes=ck.nbytes,
        num_files=index.num_files,
        num_tensors=len(tensors),
        num_aliases=len(ck.tensors) - len(tensors),
        num_values=len(catalog.values),
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        nbytes_by_component=dict(components),
        nbytes_by_dtype=dict(dtypes),
        per_rank={fqn: len(keys) for fqn, keys in catalog.per_rank.items()},
        replicas=dict(catalog.replicas),
        attached=dict(ck.attached),
        metadata=dict(index.metadata),
        config=config,
        config_problem=config_problem,
    )


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """One shard of a tensor, with `nbytes` of data.

    `cell` is a box of the tensor, or a range of its elements in row-major order.
    """

    tensor: str
    cell: Cell
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileContents:
    """One shard file, with its shards of the selected tensors."""

    name: str
    rank: int
    component: str
    nbytes: int
    num_shards: int
    shards: tuple[ShardPlacement, ...]


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """All shard files, by rank, and the bytes that each rank stores."""

    path: str
    files: tuple[FileContents, ...]
    nbytes_by_rank: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The most bytes of a rank, divided by the mean of all ranks; 1.0 is even."""
        total = sum(self.nbytes_by_rank)
        return max(self.nbytes_by_rank) * len(self.nbytes_by_rank) / total if total else 1.0


def layout(
    path: str | os.PathLike[str],
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
) -> CheckpointLayout:
    """Return the file and rank of each shard of the selected tensors. Only the index is read.

    Without `include` and `exclude` no shards are listed, because there may be millions. Give
    `include="*"` to list all. `path` is as for `dc.open`. Raises ValueError for a pattern that
    matches nothing, and the errors of `dc.open`.
    """
    selection = parse_selection(include, exclude)
    with OpenCheckpoint.open(path, opener=OPENER) as checkpoint:
        index = checkpoint.index
    names = set() if selection.is_everything else {*checkpoint.select(selection).values()}
    records = {(record.rank, record.component): record for record in index.files}
    files = []
    nbytes_by_rank = [0] * index.catalog.world_size
    for rank, components in enumerate(stored_cells_by_rank(index.catalog)):
        for component, cells in sorted(components.items()):
            if (record := records.get((rank, component))) is None:
                continue  # files of another system are split differently
            nbytes_by_rank[rank] += record.nbytes
            files.append(
                FileContents(
                    name=index.file_name(record),
                    rank=rank,
                    component=index.catalog.components[component].name,
                    nbytes=record.nbytes,
                    num_shards=len(cells),
                    shards=tuple(
                        ShardPlacement(fqn, cell, cell.numel * DTYPES[dtype].itemsize)
                        for fqn, dtype, _, cell in cells
                        if fqn in names
                    ),
                )
            )
    return CheckpointLayout(checkpoint.path, tuple(files), tuple(nbytes_by_rank))


# At most this many elements at a time: numpy's temporary arrays stay small.
_CHUNK_NUMEL = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of the values of one tensor; a tied tensor has `alias_of`.

    `min`, `max`, `mean` and `rms` (the root of the mean square) describe the finite values, or the
    magnitudes of complex values. They are None if no value is finite. `zeros`, `nan` and `inf`
    count elements. A complex number counts as nan or inf if one of its parts is. All are None for
    a dtype without numbers.
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
        """True if the tensor has neither nan nor infinities."""
        return not self.nan and not self.inf


def stats(
    path: str | os.PathLike[str],
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    progress: Progress | None = None,
) -> tuple[TensorStats, ...]:
    """Return statistics of the values of each tensor of a checkpoint, in the order of the save.

    Every block is read once and checked. This takes about 70 MB of memory for any size. `include`
    and `exclude` are as for `dc.save`, and `path` is as for `dc.open`. One process calls this. It
    needs numpy, but not torch. It changes nothing. Raises ValueError for a pattern that matches
    nothing, CorruptError for damaged blocks, and the errors of `dc.open`.
    """
    selection = parse_selection(include, exclude)
    numpy_module()  # before anything is read
    with OpenCheckpoint.open(path, opener=OPENER, direct_reads=True) as opened:
        catalog = opened.catalog
        names = opened.select(selection)
        sums = {fqn: _Sums() for fqn in names.values()}
        numeric = {fqn for fqn in sums if has_numbers(catalog.tensors[fqn].dtype)}
        count_read = CopyProgress(opened.tensor_nbytes(numeric), progress)
        for window in opened.stream(numeric, window_nbytes=WINDOW_NBYTES):
            for want, data in window.parts:
                sums[want.fqn].add(want.dtype, data)
            count_read(window.nbytes)
        by_fqn = {}
        for fqn, sums_of_tensor in sums.items():
            record = catalog.tensors[fqn]
            tensor = TensorStats(fqn, record.dtype, record.shape, prod(record.shape))
            by_fqn[fqn] = sums_of_tensor.to_stats(tensor) if fqn in numeric else tensor
    return tuple(
        by_fqn[fqn] if name == fqn else replace(by_fqn[fqn], name=name, alias_of=fqn)
        for name, fqn in names.items()
    )


class _Sums:
    """Counts and sums of the values of one tensor, added in any order."""

    def __init__(self) -> None:
        self.finite = self.zeros = self.nan = self.inf = 0
        self.lowest: float | None = None
        self.highest: float | None = None
        self.sum = self.squares = 0.0

    def add(self, dtype: str, data: memoryview) -> None:
        """Add some elements."""
        step = _CHUNK_NUMEL * DTYPES[dtype].itemsize
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
        # The square of a float64 may overflow a float64, as may the magnitude of a complex128.
        wide = numpy.longdouble if values.dtype.itemsize >= 8 else numpy.float64
        if values.dtype.kind == "c":
            values = numpy.hypot(values.real.astype(wide), values.imag.astype(wide))
        self.finite += values.size
        # Not `item()`: for a long double it returns a long double.
        number = float if values.dtype.kind == "f" else int
        low, high = number(values.min()), number(values.max())
        self.lowest = low if self.lowest is None else min(self.lowest, low)
        self.highest = high if self.highest is None else max(self.highest, high)
        exact = values.astype(wide)
        self.sum += exact.sum()
        self.squares += (exact * exact).sum()

    def to_stats(self, tensor: TensorStats) -> TensorStats:
        """Return `tensor` with the statistics."""
        numel = self.finite
        return replace(
            tensor,
            min=self.lowest,
            max=self.highest,
            mean=float(self.sum / numel) if numel else None,
            rms=float(numpy_module().sqrt(self.squares / numel)) if numel else None,
            zeros=self.zeros,
            nan=self.nan,
            inf=self.inf,
        )
