"""Metrics and save times of a run's checkpoints: annotations of them.

metrics   {"val/loss": 0.25}    numbers; "nan", "inf" and "-inf" as text
saved     {"write_s": 1.5}      the seconds of the save's phases, and more: see `put_saved`
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

from dist_ckpt.core.commit.records.protections import SAVED, CheckpointKey, newest_values
from dist_ckpt.core.commit.records.record_store import (
    StoredAnnotation,
    new_annotation,
    put_annotation,
)
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.storage import Storage
from dist_ckpt.reports import SaveReport

METRICS = "metrics"

# Trainers log the speed of an evaluation with its metrics: `eval_runtime` of Hugging Face.
_SPEED = re.compile(
    r"(.*[_/])?(runtime|\w+_per_second|total_flos|\w+_(preparation|compilation)_time)"
)
_STALLED, _SLOWEST, _SLOWEST_RANK = "stalled_s", "slowest_s", "slowest_rank"

# The phases of a background save during which the training waits.
_STALLING = frozenset({"ready", "agree", "stage"})


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """The duration of a save in seconds, by phases of rank 0.

    `stalled_s` is the time for which the training waited on rank 0. `slowest_s` is the time that
    rank `slowest_rank` took to write its files. Unknown fields are None.
    """

    seconds: Mapping[str, float]
    stalled_s: float | None
    slowest_rank: int | None
    slowest_s: float | None


def metrics_by_checkpoint(
    annotations: Iterable[StoredAnnotation],
) -> Mapping[CheckpointKey, Mapping[str, float]]:
    """Return the newest metrics of each checkpoint. Pure."""
    metrics: dict[CheckpointKey, dict[str, float]] = defaultdict(dict)
    for (key, name), (value, _) in newest_values(annotations, METRICS).items():
        if (number := _parse_number(value)) is not None:
            metrics[key][name] = number
    return metrics


def is_speed(metric: str) -> bool:
    """Return True for the name of a metric that a trainer adds, and that measures only speed."""
    return _SPEED.fullmatch(metric) is not None


def put_metrics(
    storage: Storage, root: str, key: CheckpointKey, values: Mapping[str, float]
) -> None:
    """Add metrics to a checkpoint; durable on return. The last value of a name counts.

    ValueError or TypeError for a bad name or number.
    """
    numbers = parse_metrics(values)
    as_json = {name: of if isfinite(of) else str(of) for name, of in numbers.items()}
    put_annotation(storage, root, new_annotation(*key, METRICS, as_json))


def put_saved(storage: Storage, root: str, key: CheckpointKey, report: SaveReport) -> None:
    """Record the duration of a save of a run; durable on return."""
    # The training waits for all phases of a foreground save.
    stalling = _STALLING if "stage" in report.seconds else report.seconds.keys()
    values: dict[str, Scalar] = {
        f"{phase.replace(' ', '_')}_s": round(took, 4) for phase, took in report.seconds.items()
    }
    stalled_s = sum(report.seconds[phase] for phase in stalling & report.seconds.keys())
    values |= {_STALLED: round(stalled_s, 4), _SLOWEST: round(report.slowest_s, 4)}
    values[_SLOWEST_RANK] = report.slowest_rank
    put_annotation(storage, root, new_annotation(*key, SAVED, values))


def save_times(annotations: Iterable[StoredAnnotation]) -> dict[CheckpointKey, SaveTimes]:
    """Return the durations of saves, for the checkpoints that have this annotation. Pure."""
    values: dict[CheckpointKey, dict[str, float]] = defaultdict(dict)
    for (key, name), (value, _) in newest_values(annotations, SAVED).items():
        number = _parse_number(value)
        if number is not None and isfinite(number) and number >= 0:
            values[key][name] = number
    times = {}
    for key, saved in values.items():
        stalled_s, slowest_s = saved.pop(_STALLED, None), saved.pop(_SLOWEST, None)
        rank = saved.get(_SLOWEST_RANK)
        phases = [name for name in saved if name.endswith("_s")]
        seconds = {name.removesuffix("_s").replace("_", " "): saved[name] for name in phases}
        times[key] = SaveTimes(seconds, stalled_s, None if rank is None else int(rank), slowest_s)
    return times


def parse_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as numbers. TypeError or ValueError for a bad name or number."""
    numbers = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"{name!r} is not the name of a metric: give a text")
        try:
            name.encode()
        except UnicodeError as error:
            raise ValueError(f"{name!r} is not the name of a metric: {error}") from None
        if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            raise TypeError(f"metric {name!r} is {value!r}: give a number")
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"metric {name!r}: {error}: give one number") from None
    return numbers


def _parse_number(value: Scalar) -> float | None:
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    return None if value is None else float(value)
