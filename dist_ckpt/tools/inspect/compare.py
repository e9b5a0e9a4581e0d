"""`dc.compare`: compare the runs of a sweep, without torch or ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan, nan

from dist_ckpt.core.checkpoint.checkpoint import open_at
from dist_ckpt.core.commit.attempts import list_entries
from dist_ckpt.core.commit.records.record_store import can_keep_records
from dist_ckpt.core.format.filenames import BACKUP, RESERVED_NAMES
from dist_ckpt.core.format.index.model_description import as_config, iterate_leaves
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import CheckpointError, NotFoundError, StorageError
from dist_ckpt.message_text import states_text
from dist_ckpt.runs.listing import is_run_folder, list_run

_log = logging.getLogger("dist_ckpt")

# The value of a name that a configuration does not have.
_LACKING = "nothing"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of a comparison. Unknown fields are None.

    `newest` is the path of the newest checkpoint. `step`, `kind`, `config` and the numbers of
    parameters are those of the newest checkpoint. `metrics` has the last value of each metric.
    `best` is the best value of the requested metric, at the checkpoint `best_path`.
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
    """Runs, sorted by the metric, the best first. Without a metric, sorted by name.

    `differing` has the configuration values that differ, by dotted name and by run, as texts.
    """

    runs: tuple[RunSummary, ...]
    metric: str | None
    differing: Mapping[str, Mapping[str, str]]


def compare(
    *paths: str | os.PathLike[str],
    min: str | None = None,  # noqa: A002 - as of `dc.keep.best`
    max: str | None = None,  # noqa: A002
) -> Comparison:
    """Compare several runs: give their folders, or one folder that contains them.

    Each folder in a folder of runs is a run; so is a checkpoint directly in it, such as an average.
    A folder with an incarnation is one run. The path of a checkpoint is a run with one checkpoint.
    `min` or `max` names a metric: runs are sorted by their best value, and runs without a value are
    last. A run without checkpoints, or with damaged ones, is included and has `problems`.

    Nothing is changed. Raises NotFoundError if a path is not a folder, or contains no run. Raises
    ValueError without a path, or if both `min` and `max` are given.
    """
    if not paths:
        raise ValueError("give the folders of runs, or a folder of runs")
    if min is not None and max is not None:
        raise ValueError("min= and max= exclude each other: give one of them")
    name = max if min is None else min
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f'{name!r} is not the name of a metric: give a text, such as "val/loss"')
    sign = 1 if max is None else -1
    # A run that is given twice is compared once.
    storages = {run: storage for path in paths for storage, run in _find_runs(*open_storage(path))}
    runs = [_summarize_run(storage, run, name, sign) for run, storage in storages.items()]
    names = [run.name for run in runs]
    # Runs of one name have their paths instead.
    runs = [replace(run, name=run.path) if names.count(run.name) > 1 else run for run in runs]
    ordered = sorted(runs, key=lambda run: (run.best is None, sign * (run.best or 0.0), run.name))
    return Comparison(tuple(ordered), metric=name, differing=_differing_values(runs))


def _find_runs(storage: Storage, folder: str) -> Sequence[tuple[Storage, str]]:
    """Return the run in a folder, or the runs in the folders below it."""
    entries = list_entries(storage, folder)
    names = [e.name for e in entries if e.kind == "folder" and e.name[0] != "."]
    names = sorted(name for name in names if name not in RESERVED_NAMES)
    paths = [f"{folder.rstrip('/')}/{name}" for name in names]
    try:
        listing = list_run(storage, folder, now=time.time())
    except StorageError as error:  # one of the folders in it cannot be read
        _log.debug("%s", error)
    else:
        is_run = bool(listing.checkpoints) or can_keep_records(storage, folder)
        others = (path for path in paths if not path.endswith(f"/{BACKUP}"))
        if is_run and (
            listing.newest_incarnation or not any(is_run_folder(storage, path) for path in others)
        ):
            return [(storage, folder)]
    if not paths:
        raise NotFoundError(f"{folder} has no run in it. Check the path")
    return [(storage, path) for path in paths]


def _summarize_run(storage: Storage, folder: str, metric: str | None, sign: int) -> RunSummary:
    """Summarize one run. Errors become its problems. The lowest `sign * value` is the best."""
    summary = RunSummary(os.path.basename(folder.rstrip("/")) or folder, folder)
    try:
        listing = list_run(storage, folder, now=time.time())
    except CheckpointError as error:
        return replace(summary, problems=(str(error),))
    bad = [info for info in listing.checkpoints if info.state in ("damaged", "incompatible")]
    problems = [f"{info.name} is {info.state}: {info.problem}" for info in bad]
    # A run does not resume from a checkpoint without a step, but a variant may have no other.
    committed = [info for info in listing.checkpoints if info.state == "committed"]
    problems += [f"{info.name} is damaged: {info.damage}" for info in committed if info.damage]
    alive = listing.usable or [info for info in committed if info.step is None]
    if not alive:
        states = [f"{info.name} is {info.state}" for info in listing.checkpoints if info not in bad]
        problems.insert(0, f"no checkpoint{f': {states_text(states)}' if states else ''}")
        return replace(summary, problems=tuple(problems))
    newest = alive[-1]
    values = [(info, info.metrics.get(metric or "", nan)) for info in alive]
    measured = [item for item in values if not isnan(item[1])]
    # The older of two equal values is the best.
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


def _differing_values(runs: Sequence[RunSummary]) -> Mapping[str, Mapping[str, str]]:
    configs = {
        run.name: dict(iterate_leaves(as_config(run.config)))
        for run in runs
        if run.config is not None
    }
    names = sorted({name for leaves in configs.values() for name in leaves})
    values = {
        name: {run: leaves.get(name, _LACKING) for run, leaves in configs.items()} for name in names
    }
    return {name: by_run for name, by_run in values.items() if len(set(by_run.values())) > 1}
