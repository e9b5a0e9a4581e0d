"""`dc.compare`: the runs of a sweep side by side, without torch or ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan

from dist_ckpt.core.checkpoint.checkpoint import open_at
from dist_ckpt.core.commit.attempts import entries_at
from dist_ckpt.core.commit.records.record_store import can_keep_records
from dist_ckpt.core.format.filenames import NO_CHECKPOINTS
from dist_ckpt.core.format.index.model_description import leaves_of
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import CheckpointError, NotFoundError, StorageError, listed
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run

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
