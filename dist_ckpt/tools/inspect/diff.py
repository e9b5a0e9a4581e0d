"""`dc.diff` compares two checkpoints, `dc.compare` the runs of a sweep. No torch or ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, isnan, nan, prod
from typing import TYPE_CHECKING

from dist_ckpt.core.checkpoint.checkpoint import Checkpoint, open_at
from dist_ckpt.core.checkpoint.open_checkpoint import WINDOW_NBYTES, OpenCheckpoint, parts_in
from dist_ckpt.core.commit.attempts import entries_at
from dist_ckpt.core.commit.records.record_store import can_keep_records
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.filenames import NO_CHECKPOINTS
from dist_ckpt.core.format.index.index import TensorRecord
from dist_ckpt.core.format.index.model_description import KIND, differences, leaves_of
from dist_ckpt.core.planning.selection import Selection, parse_selection
from dist_ckpt.core.shard_io.memory.host_array import has_numbers, numbers, numpy_module
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import CheckpointError, NotFoundError, StorageError, listed
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import Progress
from dist_ckpt.runs.listing import list_run

if TYPE_CHECKING:
    import numpy as np

_log = logging.getLogger("dist_ckpt")

_AT_ONCE = 1 << 20

# The value of a name that a configuration does not have.
_LACKING = "nothing"


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A tensor whose values differ: in `num_differing` elements, by `max_difference` at most.

    `max_difference` is None for nan or an infinity compared with another value.
    """

    name: str
    num_differing: int
    numel: int
    max_difference: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of two checkpoints, `a` and `b`.

    `config` has dotted names of their configurations, and `kind`, with both texts. `removed` are
    tensors that only `a` has, `added` those that only `b` has. `changed` are tensors with another
    dtype or shape, with both texts. `objects` are the plain values and `values` the tensors that
    differ; None if values were not compared.
    """

    a: str
    b: str
    config: Mapping[str, tuple[str, str]]
    removed: tuple[str, ...]
    added: tuple[str, ...]
    changed: Mapping[str, tuple[str, str]]
    objects: Mapping[str, tuple[str, str]] | None = None
    values: tuple[ObjectDifference, ...] | None = None

    @property
    def same(self) -> bool:
        """Whether nothing differs in the compared parts."""
        parts = (self.config, self.removed, self.added, self.changed, self.objects, self.values)
        return not any(parts)


# The absolute and the relative tolerance between two values; None if the bits must be equal.
_Tolerance = tuple[float, float] | None


def diff(  # noqa: PLR0913 - the names, the parts, and the tolerances
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    values: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compare the checkpoints `a` and `b`: configurations, names, dtypes and shapes.

    With `values` all values are compared too, a window of each checkpoint at a time. They are
    compared bit for bit, so nan equals nan, and 0.0 differs from -0.0. With `rtol` or `atol`,
    numbers are equal if they differ by at most `atol + rtol * abs(b)`. Tensors are compared
    logically, so the number of ranks does not matter. Step, metadata and attached files do not
    matter. Plain values are compared exactly; per-rank values are not compared.

    `include` and `exclude` are as of `dc.save`. Values need numpy, but not torch. One process calls
    this, and nothing is changed. Raises ValueError for a tolerance without `values`, and for a
    pattern that matches no name in `a` and `b`; CorruptError for damaged blocks; otherwise as
    `dc.open`.
    """
    tolerance = _check_tolerance(rtol, atol, values=values)
    selection = parse_selection(include, exclude)
    with _open(a) as left, _open(b) as right:
        first, second = (Checkpoint(i.storage, i.path, i.attempt, i.index) for i in (left, right))
        names = _select(left, right, selection, {**first.objects, **second.objects})
        config = differences(first.config or {}, second.config or {})
        if first.kind != second.kind:
            config[KIND] = (repr(first.kind), repr(second.kind))
        objects = None
        if values:
            objects_of_each = (
                {name: value for name, value in each.objects.items() if name in selection}
                for each in (first, second)
            )
            objects = differences(*objects_of_each)
        pairs = {name: (names[0][name], names[1][name]) for name in names[0] if name in names[1]}
        changed = {}
        for name, pair in pairs.items():
            texts = _text(left.catalog.tensors[pair[0]]), _text(right.catalog.tensors[pair[1]])
            if texts[0] != texts[1]:
                changed[name] = texts
        differing = None
        if values:
            same = {name: pair for name, pair in pairs.items() if name not in changed}
            differing = tuple(_diff_values(left, right, same, tolerance, progress))
    return Difference(
        a=left.path,
        b=right.path,
        config=config,
        removed=tuple(name for name in names[0] if name not in pairs),
        added=tuple(name for name in names[1] if name not in pairs),
        changed=changed,
        objects=objects,
        values=differing,
    )


def _open(path: str | os.PathLike[str]) -> OpenCheckpoint:
    return OpenCheckpoint.open(path, opener=OPENER, direct_reads=True)


def _check_tolerance(rtol: float | None, atol: float | None, *, values: bool) -> _Tolerance:
    if type(values) is not bool:
        raise TypeError(f"values={values!r}: give True or False")
    if not values and (rtol is not None or atol is not None):
        raise ValueError("rtol and atol are for values: give values=True (--values) as well")
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is None:
            continue
        if isinstance(value, bool | str) or not (isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value!r}: give a number from 0 on")
    if values:
        numpy_module()  # before anything is read
    return None if rtol is None and atol is None else (atol or 0.0, rtol or 0.0)


def _select(
    left: OpenCheckpoint, right: OpenCheckpoint, selection: Selection, objects: Iterable[str]
) -> list[dict[str, str]]:
    """Return the selected tensors of both, each with the name that it is stored under.

    A pattern may match one of the `objects` instead.
    """
    names = [
        {**{fqn: fqn for fqn in each.catalog.tensors}, **each.catalog.aliases}
        for each in (left, right)
    ]
    if problems := selection.unmatched({**names[0], **names[1], **dict.fromkeys(objects)}):
        raise ValueError("; ".join(problems))
    return [{name: fqn for name, fqn in each.items() if name in selection} for each in names]


def _text(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"


def _diff_values(
    left: OpenCheckpoint,
    right: OpenCheckpoint,
    pairs: Mapping[str, tuple[str, str]],
    tolerance: _Tolerance,
    progress: Progress | None,
) -> Iterator[ObjectDifference]:
    """Yield the tensors that differ. Tied names share a pair, which is compared once."""
    results = {pair: _PairDifference() for pair in pairs.values()}
    partners: dict[str, list[str]] = {}
    for left_name, right_name in results:
        partners.setdefault(left_name, []).append(right_name)
    names = set(partners)
    total, done = left.tensor_nbytes(names), 0
    memory = memoryview(bytearray(min(total, WINDOW_NBYTES)))
    for window in left.stream(names, window_nbytes=WINDOW_NBYTES):
        parts = {want.fqn: (want, data) for want, data in window.parts}
        for group in _groups([(name, partner) for name in parts for partner in partners[name]]):
            wanted = [parts[name][0]._replace(fqn=partner) for name, partner in group]
            right.read(wanted, memory)
            for pair, (want, data) in zip(group, parts_in(wanted, memory), strict=True):
                results[pair].compare(want.dtype, parts[pair[0]][1], data, tolerance)
        done += window.nbytes
        if progress is not None:
            progress(done, total)
    for name, pair in pairs.items():
        if results[pair].num:
            numel = prod(left.catalog.tensors[pair[0]].shape)
            yield ObjectDifference(name, results[pair].num, numel, results[pair].distance)


def _groups(pairs: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield pairs in groups without a repeated name on a side; usually that is one group."""
    while pairs:
        lefts, rights = set[str](), set[str]()
        group, later = [], []
        for left, right in pairs:
            if left in lefts or right in rights:
                later.append((left, right))
            else:
                group.append((left, right))
                lefts.add(left)
                rights.add(right)
        yield group
        pairs = later


class _PairDifference:
    """The differences of a pair of tensors so far.

    `distance` is None if it is not a finite number, or the dtype has no numbers.
    """

    def __init__(self) -> None:
        self.num = 0
        self.distance: float | None = 0.0

    def compare(self, dtype: str, a: memoryview, b: memoryview, tolerance: _Tolerance) -> None:
        """Compare the same elements of both."""
        step = _AT_ONCE * DTYPES[dtype].itemsize
        for start in range(0, a.nbytes, step):
            left, right = a[start : start + step], b[start : start + step]
            if bytes(left) != bytes(right):  # much faster than a comparison of memoryviews
                self._compare(dtype, left, right, tolerance)

    def _compare(self, dtype: str, a: memoryview, b: memoryview, tolerance: _Tolerance) -> None:
        numpy = numpy_module()
        size = DTYPES[dtype].itemsize
        bits = [numpy.frombuffer(data, "u1").reshape(-1, size) for data in (a, b)]
        differ = (bits[0] != bits[1]).any(axis=1)
        if not has_numbers(dtype):
            self.num, self.distance = self.num + int(differ.sum()), None
            return
        left, right = (_wide(numbers(dtype, data)) for data in (a, b))
        if left.size != differ.size:  # two elements share a byte
            differ = left != right
        with numpy.errstate(all="ignore"):  # infinities, and nan
            distance = numpy.abs(left - right)
            if tolerance is not None:
                near = distance <= tolerance[0] + tolerance[1] * abs(right)
                # An infinity is near only to itself, but its distance is not a number.
                near &= numpy.isfinite(right)
                near |= (left == right) | (numpy.isnan(left) & numpy.isnan(right))
                differ &= ~near
        self.num += int(differ.sum())
        if differ.any() and self.distance is not None:
            most = float(distance[differ].max())
            self.distance = max(self.distance, most) if isfinite(most) else None


def _wide(values: np.ndarray) -> np.ndarray:
    """Convert numbers to floats that are wide enough for exact differences."""
    numpy = numpy_module()
    if values.dtype.kind == "c":
        return values.astype(numpy.clongdouble)
    return values.astype(numpy.longdouble if values.dtype.itemsize >= 8 else numpy.float64)


# --- compare runs ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of a comparison. Unknown fields are None.

    `newest` is the path of its newest checkpoint, with the fields `step`, `kind`, `config` and the
    counts of parameters. `metrics` are the last value of each name. `best` is the best value of the
    requested metric, of the checkpoint at `best_path`. `problems` are texts.
    """

    name: str
    path: str
    num_checkpoints: int = 0
    newest: str | None = None
    step: int | None = None
    kind: str | None = None
    num_parameters: int | None = None
    num_trainable: int | None = None
    config: Mapping[str, object] | None = None
    best: float | None = None
    best_step: int | None = None
    best_path: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs, sorted by the metric, the best first, or by name.

    `differing` has the dotted names of the configurations whose values differ, with the value of
    each run as text.
    """

    runs: tuple[RunSummary, ...]
    metric: str | None
    differing: Mapping[str, Mapping[str, str]]


def compare(
    *paths: str | os.PathLike[str],
    min: str | None = None,  # noqa: A002 - as of `dc.keep.best`
    max: str | None = None,  # noqa: A002
) -> Comparison:
    """Compare several runs: give their folders, or a folder of them.

    A folder without checkpoints and without records of a run is a folder of runs: each folder in it
    is a run. The path of a checkpoint is a run with this checkpoint. `min` or `max` names a metric:
    runs are sorted by their best value of it; runs without a value are last. A run without
    checkpoints, or with damaged ones, is included and has `problems`.

    Nothing is changed. Raises NotFoundError if a path is not a folder, or has no run in it, and
    ValueError without a path, or for both `min` and `max`.
    """
    if not paths:
        raise ValueError("give the folders of runs, or a folder of runs")
    if min is not None and max is not None:
        raise ValueError("min= and max= are given: give one of them")
    name = max if min is None else min
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f'{name!r} is not the name of a metric: give a text, such as "val/loss"')
    sign = 1 if max is None else -1
    # A run that is given twice is compared once.
    storages = {run: storage for path in paths for storage, run in _runs_at(*open_storage(path))}
    runs = [_summary(storage, run, name, sign) for run, storage in storages.items()]
    names = [run.name for run in runs]
    # Runs of one name have their paths instead.
    runs = [replace(run, name=run.path) if names.count(run.name) > 1 else run for run in runs]
    ordered = sorted(runs, key=lambda run: (run.best is None, sign * (run.best or 0.0), run.name))
    return Comparison(tuple(ordered), metric=name, differing=_differing(runs))


def _runs_at(storage: Storage, folder: str) -> Sequence[tuple[Storage, str]]:
    """Return the run in a folder, or those in the folders below it."""
    try:
        listing = list_run(storage, folder, now=time.time())
    except StorageError as error:  # one of the folders in it cannot be read
        _log.debug("%s", error)
    else:
        if listing.checkpoints or can_keep_records(storage, folder):
            return [(storage, folder)]
    entries = entries_at(storage, folder)
    names = [e.name for e in entries if e.kind == "folder" and e.name[0] != "."]
    names = sorted(name for name in names if name not in NO_CHECKPOINTS)
    if not names:
        raise NotFoundError(f"{folder} has no run in it. Check the path")
    return [(storage, f"{folder.rstrip('/')}/{name}") for name in names]


def _summary(storage: Storage, folder: str, metric: str | None, sign: int) -> RunSummary:
    """Summarize one run; errors become its problems. The lowest `sign * value` is the best."""
    summary = RunSummary(os.path.basename(folder.rstrip("/")) or folder, folder)
    try:
        listing = list_run(storage, folder, now=time.time())
    except CheckpointError as error:
        return replace(summary, problems=(str(error),))
    bad = [info for info in listing.checkpoints if info.state in ("damaged", "incompatible")]
    problems = [f"{info.name} is {info.state}: {info.problem}" for info in bad]
    # A run does not resume from a checkpoint without a step, but a variant may have only that.
    committed = [info for info in listing.checkpoints if info.state == "committed"]
    alive = listing.alive or [info for info in committed if info.step is None]
    if not alive:
        states = [f"{info.name} is {info.state}" for info in listing.checkpoints if info not in bad]
        problems.insert(0, f"no checkpoint{f': {listed(states)}' if states else ''}")
        return replace(summary, problems=tuple(problems))
    newest = alive[-1]
    values = [(info, info.metrics.get(metric or "", nan)) for info in alive]
    measured = [item for item in values if not isnan(item[1])]
    # The older one of equal values is the best.
    best, value = min(measured, key=lambda item: sign * item[1], default=(None, None))
    summary = replace(
        summary,
        num_checkpoints=len(committed),
        newest=newest.path,
        step=newest.step,
        kind=newest.kind,
        metrics={name: value for info in alive for name, value in info.metrics.items()},
        best=value,
        best_step=None if best is None else best.step,
        best_path=None if best is None else best.path,
    )
    try:
        with open_at(storage, newest.path) as checkpoint:
            summary = replace(
                summary,
                config=checkpoint.config,
                num_parameters=checkpoint.num_parameters,
                num_trainable=checkpoint.num_trainable,
            )
    except CheckpointError as error:
        problems.append(str(error))
    return replace(summary, problems=tuple(problems))


def _differing(runs: Sequence[RunSummary]) -> Mapping[str, Mapping[str, str]]:
    configs = {run.name: dict(leaves_of(run.config)) for run in runs if run.config is not None}
    names = sorted({name for leaves in configs.values() for name in leaves})
    values = {
        name: {run: leaves.get(name, _LACKING) for run, leaves in configs.items()} for name in names
    }
    return {name: by_run for name, by_run in values.items() if len(set(by_run.values())) > 1}
