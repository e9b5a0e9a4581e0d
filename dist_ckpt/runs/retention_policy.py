"""Retention policies: `dc.keep.last(3) | dc.keep.best(2, min="val/loss")`.

A policy is a plain value without state: it decides only from the checkpoints that exist. A
checkpoint is kept if any rule keeps it, else it may be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, isnan
from typing import TYPE_CHECKING

from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.runtime.arguments import check_number, check_whole
from dist_ckpt.core.runtime.public_names import refuse_old_names
from dist_ckpt.runs.policy_text import parse_rules, text_of

if not TYPE_CHECKING:
    __getattr__ = refuse_old_names("dist_ckpt.keep", {"Keep": "RetentionPolicy"})

_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S

# The limits of a rule: beyond them, a time divided by an interval overflows.
_LEAST_TIME, _MOST_TIME = 1e-6, 1e9


@dataclass(frozen=True, slots=True)
class Candidate:
    """One committed checkpoint of a run, for the rules.

    `saved_at` is in seconds since 1970; `metrics` are the newest values, which may be nan.
    """

    step: int
    attempt: Attempt
    saved_at: float
    metrics: Mapping[str, float] = field(default_factory=dict)


# Returns the positions of the checkpoints that a rule keeps. They are sorted by step, at least one.
_Choose = Callable[[Sequence[Candidate]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """A retention policy: it keeps what any rule keeps. `rules` are by text. Join two with `|`."""

    rules: Mapping[str, _Choose]

    def __or__(self, other: object) -> RetentionPolicy:
        if not isinstance(other, RetentionPolicy):
            return NotImplemented
        return RetentionPolicy({**self.rules, **other.rules})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RetentionPolicy) and self.rules.keys() == other.rules.keys()

    def __hash__(self) -> int:
        return hash(frozenset(self.rules))

    def __str__(self) -> str:
        """Return the text for `parse`."""
        return " | ".join(self.rules)

    def reasons(self, candidates: Sequence[Candidate]) -> list[tuple[str, ...]]:
        """Return for each checkpoint the texts of the rules that keep it.

        Give only the highest attempt of each step.
        """
        order = sorted(range(len(candidates)), key=lambda index: candidates[index].step)
        reasons: list[list[str]] = [[] for _ in candidates]
        by_step = [candidates[index] for index in order]
        for text, choose in self.rules.items() if candidates else ():
            for position in choose(by_step):
                reasons[order[position]].append(text)
        return [tuple(texts) for texts in reasons]


def last(n: int) -> RetentionPolicy:
    """Keep the newest `n`."""
    count = check_whole("n", n, 1)
    text = text_of("last", count)
    return RetentionPolicy({text: lambda candidates: range(len(candidates))[-count:]})


def best(
    n: int,
    *,
    min: str | None = None,  # noqa: A002  (as one says it)
    max: str | None = None,  # noqa: A002
    unmeasured: int = 2,
) -> RetentionPolicy:
    """Keep the `n` with the lowest (`min=`) or highest (`max=`) value of a metric.

    The older of equal ones is better, and nan does not count. The newest `unmeasured` without a
    value are kept too: their evaluation may be in progress.
    """
    if (min is None) == (max is None):
        raise TypeError('best(): give min= or max=, such as min="val/loss" or max="accuracy"')
    name = max if min is None else min
    if type(name) is not str or not name:
        raise TypeError(f"best(): {name!r} is not the name of a metric")
    count, waiting = check_whole("n", n, 1), check_whole("unmeasured", unmeasured, 0)
    sign = -1 if min is None else 1

    def choose(candidates: Sequence[Candidate]) -> Sequence[int]:
        values = [candidate.metrics.get(name) for candidate in candidates]
        measured = [i for i, value in enumerate(values) if value is not None and not isnan(value)]
        ranked = sorted(measured, key=lambda i: (sign * (values[i] or 0.0), i))
        without = [i for i, value in enumerate(values) if value is None]
        return [*ranked[:count], *(without[-waiting:] if waiting else ())]

    given = None if unmeasured == 2 else waiting
    return RetentionPolicy({text_of("best", count, min=min, max=max, unmeasured=given): choose})


def every(*, steps: int | None = None, hours: float | None = None) -> RetentionPolicy:
    """Keep the nearest to each multiple of `steps` or `hours`: an exact multiple may not exist."""
    if (steps is None) == (hours is None):
        raise TypeError("every(): give steps= or hours=, and for both every(...) | every(...)")
    if steps is not None:
        interval = check_whole("steps", steps, 1)
        text = text_of("every", steps=steps)
        return RetentionPolicy({text: lambda cs: _nearest([c.step for c in cs], interval)})
    assert hours is not None
    seconds = _check_time("hours", hours) * _HOUR_S
    text = text_of("every", hours=hours)
    return RetentionPolicy({text: lambda cs: _nearest([c.saved_at for c in cs], seconds)})


def within(*, days: float) -> RetentionPolicy:
    """Keep those that were saved within `days` before the newest. No clock is read."""
    seconds = _check_time("days", days) * _DAY_S

    def choose(candidates: Sequence[Candidate]) -> Sequence[int]:
        since = candidates[-1].saved_at - seconds
        return [i for i, candidate in enumerate(candidates) if candidate.saved_at >= since]

    return RetentionPolicy({text_of("within", days=days): choose})


def parse(text: str) -> RetentionPolicy:
    """Return the policy of a text, such as `last(3) | best(2, min="val/loss")`.

    ValueError with the bad rule and the reason.
    """
    makers: dict[str, Callable[..., RetentionPolicy]]
    makers = {"last": last, "best": best, "every": every, "within": within}
    policy = RetentionPolicy({})
    for name, values, named in parse_rules(text):
        if name not in makers:
            raise ValueError(f"{name!r} is not a rule; there are {', '.join(sorted(makers))}")
        try:
            policy |= makers[name](*values, **named)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{text_of(name, *values, **named)}: {error}") from None
    return policy


def _nearest(positions: Sequence[float], interval: float) -> Sequence[int]:
    """Return the indices of the positions nearest to some multiple of the interval, above 0.

    A position is the nearest from halfway to the previous position until halfway to the next one.
    The last position is the nearest to all multiples after it.
    """
    order = sorted(range(len(positions)), key=lambda index: (positions[index], index))
    nearest = []
    before = 0.0
    for index, following in zip(order, [*order[1:], None], strict=True):
        if following is None:
            nearest.append(index)
            break
        until = (positions[index] + positions[following]) / 2
        # The first multiple after `before`. A multiple in the middle belongs to the earlier one.
        if (floor(before / interval) + 1) * interval <= until:
            nearest.append(index)
        before = until
    return nearest


def _check_time(name: str, value: float) -> float:
    wanted = f"a number above 0, from {_LEAST_TIME:g} to {_MOST_TIME:g}"
    return check_number(name, value, wanted, _LEAST_TIME, _MOST_TIME)
