"""`dc.diff` compares two checkpoints, `dc.compare` the runs of a sweep. No torch or ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, isnan, prod
from typing import TYPE_CHECKING

from dist_ckpt.core.checkpoint.checkpoint import Checkpoint, open_at
from dist_ckpt.core.checkpoint.open_checkpoint import WINDOW_NBYTES, OpenCheckpoint, parts_in
from dist_ckpt.core.commit.attempts import entries_at
from dist_ckpt.core.commit.records.record_store import can_keep_records
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.filenames import NO_CHECKPOINTS
from dist_ckpt.core.format.index.index import TensorRecord
from dist_ckpt.core.format.index.model_description import KIND, differences, leaves_of
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.planning.selection import Selection, selection_of
from dist_ckpt.core.shard_io.memory.host_array import has_numbers, numbers, numpy_module
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import CheckpointError, NotFoundError, StorageError, listed
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import Progress
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run

if TYPE_CHECKING:
    import numpy as np

_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A tensor whose values differ: in how many elements, and by how much at most.

    `max_difference` is None where that is no number: nan or an infinity against another value.
    """

    name: str
    num_differing: int
    numel: int
    max_difference: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """What two checkpoints have otherwise: `a` is the first, `b` the second.

    `config` has the dotted names in their configurations, and `kind`, with both texts. `removed`
    are names of tensors that only `a` has, `added` those that only `b` has. `changed` are tensors
    of another dtype or shape, with both as text. `objects` and `values` are the values that are no
    tensors, and the tensors, that differ; None if values were not compared.
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
        """Say whether nothing that was compared differs."""
        found = (self.config, self.removed, self.added, self.changed, self.objects, self.values)
        return not any(found)


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """How far two values may be apart; None of both: they are the same bits."""

    rtol: float | None
    atol: float | None

    @property
    def is_exact(self) -> bool:
        return self.rtol is None and self.atol is None


def diff(  # noqa: PLR0913 - the names, what is compared, and how
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
    """Return what the checkpoint `b` has otherwise than `a`: configuration, names, dtypes, shapes.

    With `values` also every value, a window of each at a time: bit for bit, so that nan is like
    nan and 0.0 is not like -0.0; or, given `rtol` or `atol`, numbers that are not further apart
    than `atol + rtol * abs(b)` are the same. Tensors are compared as they are logically, so by how
    many ranks each was saved does not matter; neither do step, metadata and attached files. Values
    that are no tensors are compared exactly; per-rank values, which hang on the ranks, are not.

    `include` and `exclude` are as of `dc.save`. Needs numpy for values, and no torch; one process;
    nothing is changed. Raises ValueError for a tolerance without `values`, or a pattern that
    matches no name in either; otherwise as `dc.open`, and CorruptError for damaged blocks.
    """
    tolerance = _checked(rtol, atol, values=values)
    selection = selection_of(include, exclude)
    with _opened(a) as one, _opened(b) as other:
        first, second = (Checkpoint(i.storage, i.path, i.attempt, i.index) for i in (one, other))
        left, right = _names(one, other, selection, {**first.objects, **second.objects})
        config = _config(first, second)
        objects = _objects(first, second, selection) if values else None
        changed = dict(_changed(one, other, left, right))
        same = [name for name in left if name in right and name not in changed]
        found = None
        if values:
            pairs = {name: (left[name], right[name]) for name in same}
            found = tuple(_values(one, other, pairs, tolerance, progress))
    return Difference(
        a=one.path,
        b=other.path,
        config=config,
        removed=tuple(name for name in left if name not in right),
        added=tuple(name for name in right if name not in left),
        changed=changed,
        objects=objects,
        values=found,
    )


def _opened(path: str | os.PathLike[str]) -> OpenCheckpoint:
    return OpenCheckpoint.open(path, opener=OPENER, direct_reads=True)


def _checked(rtol: float | None, atol: float | None, *, values: bool) -> _Tolerance:
    if type(values) is not bool:
        raise TypeError(f"values={values!r}: give True or False")
    if not values and (rtol is not None or atol is not None):
        raise ValueError("rtol and atol are for values: give values=True (--values) as well")
    for name, given in (("rtol", rtol), ("atol", atol)):
        if given is None:
            continue
        if isinstance(given, bool | str) or not (isfinite(given) and given >= 0):
            raise ValueError(f"{name}={given!r}: give a number from 0 on")
    if values:
        numpy_module()  # before anything is read
    return _Tolerance(rtol, atol)


def _names(
    one: OpenCheckpoint, other: OpenCheckpoint, selection: Selection, objects: Iterable[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the selected tensors of both, each with the name that it is stored under.

    A pattern may match one of the `objects` instead.
    """
    every = [
        {**dict.fromkeys(each.catalog.tensors), **each.catalog.aliases} for each in (one, other)
    ]
    if problems := selection.unmatched({**every[0], **every[1], **dict.fromkeys(objects)}):
        raise ValueError("; ".join(problems))
    left, right = (
        {name: fqn or name for name, fqn in names.items() if name in selection} for names in every
    )
    return left, right


def _changed(
    one: OpenCheckpoint, other: OpenCheckpoint, left: Mapping[str, str], right: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, str]]]:
    for name in (name for name in left if name in right):
        texts = (
            _text(one.catalog.tensors[left[name]]),
            _text(other.catalog.tensors[right[name]]),
        )
        if texts[0] != texts[1]:
            yield name, texts


def _text(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"


def _config(first: Checkpoint, second: Checkpoint) -> dict[str, tuple[str, str]]:
    found = differences(first.config or {}, second.config or {})
    if first.kind != second.kind:
        found[KIND] = (repr(first.kind), repr(second.kind))
    return found


def _objects(
    first: Checkpoint, second: Checkpoint, selection: Selection
) -> dict[str, tuple[str, str]]:
    left, right = (
        {name: value for name, value in each.objects.items() if name in selection}
        for each in (first, second)
    )
    return differences(left, right)


def _values(
    one: OpenCheckpoint,
    other: OpenCheckpoint,
    pairs: Mapping[str, tuple[str, str]],
    tolerance: _Tolerance,
    progress: Progress | None,
) -> Iterator[ObjectDifference]:
    """Yield what differs. A pair that tied names share is compared once."""
    found = {pair: _PairDifference() for pair in pairs.values()}
    partners: dict[str, list[str]] = {}
    for left, right in found:
        partners.setdefault(left, []).append(right)
    names = set(partners)
    total, done = one.tensor_nbytes(names), 0
    there = memoryview(bytearray(min(total, WINDOW_NBYTES)))
    for window in one.stream(names, window_nbytes=WINDOW_NBYTES):
        mine = {want.fqn: (want, data) for want, data in window.parts}
        for turns in _turns([(left, right) for left in mine for right in partners[left]]):
            wanted = [_as_named(mine[left][0], right) for left, right in turns]
            other.read(wanted, there)
            for pair, (want, data) in zip(turns, parts_in(wanted, there), strict=True):
                found[pair].compare(want.dtype, mine[pair[0]][1], data, tolerance)
        done += window.nbytes
        if progress is not None:
            progress(done, total)
    for name, pair in pairs.items():
        if found[pair].num:
            numel = prod(one.catalog.tensors[pair[0]].shape)
            yield ObjectDifference(name, found[pair].num, numel, found[pair].distance)


def _turns(pairs: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield pairs in groups in which no name comes twice on a side: mostly that is one group."""
    while pairs:
        lefts, rights = set[str](), set[str]()
        turn, later = [], []
        for left, right in pairs:
            if left in lefts or right in rights:
                later.append((left, right))
            else:
                turn.append((left, right))
                lefts.add(left)
                rights.add(right)
        yield turn
        pairs = later


def _as_named(want: TensorRequest, fqn: str) -> TensorRequest:
    return TensorRequest(fqn, want.dtype, want.shape, want.cells)


class _PairDifference:
    """What was found to differ in a pair of tensors so far; `distance` is None if it is no number.

    Of what has no numbers too.
    """

    def __init__(self) -> None:
        self.num = 0
        self.distance: float | None = 0.0

    def compare(self, dtype: str, a: memoryview, b: memoryview, tolerance: _Tolerance) -> None:
        """Compare the same elements of both."""
        step = _AT_ONCE * DTYPES[dtype].itemsize
        for start in range(0, a.nbytes, step):
            left, right = a[start : start + step], b[start : start + step]
            if bytes(left) != bytes(right):  # much faster than memoryviews are compared
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
            if not tolerance.is_exact:
                near = distance <= (tolerance.atol or 0.0) + (tolerance.rtol or 0.0) * abs(right)
                # An infinity is near to itself only, though it is no number away from all.
                near &= numpy.isfinite(right)
                near |= (left == right) | (numpy.isnan(left) & numpy.isnan(right))
                differ &= ~near
        self.num += int(differ.sum())
        if differ.any() and self.distance is not None:
            most = float(distance[differ].max())
            self.distance = max(self.distance, most) if isfinite(most) else None


def _wide(values: np.ndarray) -> np.ndarray:
    """Return numbers as floats between which a difference can be told."""
    numpy = numpy_module()
    if values.dtype.kind == "c":
        return values.astype(numpy.clongdouble)
    return values.astype(numpy.longdouble if values.dtype.itemsize >= 8 else numpy.float64)


_log = logging.getLogger("dist_ckpt")

_LACKING = "nothing"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of a comparison; what is not known of it is None.

    `kind`, `config` and the counts of parameters are of its newest checkpoint, at `newest` and of
    `step`; `metrics` are what was last measured of each name. `best` is the best value of the
    metric that was asked for, of the checkpoint at `best_path`. `problems` say what is wrong with
    the run, in words.
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
    """Runs side by side, by the metric, the best first, or else by name.

    `differing` are the dotted names in the runs' configurations that are not the same in all runs
    that have one, and what each of these has, as text.
    """

    runs: tuple[RunSummary, ...]
    metric: str | None
    differing: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class _Goal:
    """The metric by which runs are compared, and whether a higher value is better."""

    metric: str
    is_max: bool

    def best_of(self, some: Iterable[RunCheckpoint]) -> RunCheckpoint | None:
        """Return the checkpoint with the best value, of two the older; nan is no value."""
        there = [one for one in some if not isnan(one.metrics.get(self.metric, float("nan")))]
        return min(there, key=lambda one: self.rank(one.metrics[self.metric]), default=None)

    def rank(self, value: float) -> float:
        """Return what sorts the better first."""
        return -value if self.is_max else value


def compare(
    *paths: str | os.PathLike[str],
    min: str | None = None,  # noqa: A002 - as of `dc.keep.best`
    max: str | None = None,  # noqa: A002
) -> Comparison:
    """Look at several runs side by side: give their folders, or a folder of them.

    A folder that holds no checkpoints and no records of a run is one of runs: each folder in it is
    one. A checkpoint stands for a run that has this one. `min` or `max` names a metric: the runs
    are sorted by their best value of it, and those without one come last. A run without
    checkpoints, or with damaged ones, is there as well, and says so.

    Nothing is changed. Raises NotFoundError if a path is no folder, or there is no run in it, and
    ValueError without a path, or for `min` and `max` at once.
    """
    if not paths:
        raise ValueError("give the folders of runs, or a folder of runs")
    if min is not None and max is not None:
        raise ValueError("min= and max= are given: give one of them")
    name = max if min is None else min
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f'{name!r} is no name of a metric: give a text, such as "val/loss"')
    goal = None if name is None else _Goal(name, max is not None)
    # A run that is named twice is one.
    found = {run: at for path in paths for at, run in _runs_at(*open_storage(path))}
    runs = _named_apart([_summary(storage, run, goal) for run, storage in found.items()])
    return Comparison(
        runs=tuple(sorted(runs, key=lambda run: _order(run, goal))),
        metric=name,
        differing=_differing(runs),
    )


def _order(run: RunSummary, goal: _Goal | None) -> tuple[bool, float, str]:
    if goal is None or run.best is None:
        return True, 0.0, run.name
    return False, goal.rank(run.best), run.name


def _runs_at(storage: Storage, folder: str) -> Sequence[tuple[Storage, str]]:
    """Return the run in a folder, or those in the folders below it."""
    try:
        listing = list_run(storage, folder, now=time.time())
    except StorageError as error:  # of one of the folders in it, unless what follows fails too
        _log.debug("%s", error)
    else:
        if listing.checkpoints or can_keep_records(storage, folder):
            return [(storage, folder)]
    entries = entries_at(storage, folder)
    names = [one.name for one in entries if one.kind == "folder" and one.name[0] != "."]
    names = sorted(name for name in names if name not in NO_CHECKPOINTS)
    if not names:
        raise NotFoundError(f"{folder}: there is no run in it. Check the path")
    return [(storage, f"{folder.rstrip('/')}/{name}") for name in names]


def _summary(storage: Storage, folder: str, goal: _Goal | None) -> RunSummary:
    """Look at one run; what is wrong with it stands in the summary."""
    summary = RunSummary(os.path.basename(folder.rstrip("/")) or folder, folder)
    try:
        listing = list_run(storage, folder, now=time.time())
        return _look(storage, listing, summary, goal)
    except CheckpointError as error:
        return replace(summary, problems=(str(error),))


def _look(
    storage: Storage, listing: Listing, summary: RunSummary, goal: _Goal | None
) -> RunSummary:
    bad = [one for one in listing.checkpoints if one.state in ("damaged", "incompatible")]
    problems = [f"{one.name} is {one.state}: {one.problem}" for one in bad]
    # What has no step is no run's, but may be what there is of a variant.
    committed = [one for one in listing.checkpoints if one.state == "committed"]
    alive = listing.alive or [one for one in committed if one.step is None]
    if not alive:
        states = [f"{one.name} is {one.state}" for one in listing.checkpoints if one not in bad]
        problems.insert(0, f"no checkpoint{f': {listed(states)}' if states else ''}")
        return replace(summary, problems=tuple(problems))
    newest, best = alive[-1], None if goal is None else goal.best_of(alive)
    summary = replace(
        summary,
        num_checkpoints=len(committed),
        newest=newest.path,
        step=newest.step,
        kind=newest.kind,
        metrics={name: of for one in alive for name, of in one.metrics.items()},
        best=best.metrics[goal.metric] if goal is not None and best is not None else None,
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


def _named_apart(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Call runs whose folders have one name by their paths."""
    names = [run.name for run in runs]
    return [replace(run, name=run.path) if names.count(run.name) > 1 else run for run in runs]


def _differing(runs: Sequence[RunSummary]) -> Mapping[str, Mapping[str, str]]:
    told = {run.name: dict(leaves_of(run.config)) for run in runs if run.config is not None}
    names = sorted({name for leaves in told.values() for name in leaves})
    values = {
        name: {run: leaves.get(name, _LACKING) for run, leaves in told.items()} for name in names
    }
    return {name: by_run for name, by_run in values.items() if len(set(by_run.values())) > 1}
