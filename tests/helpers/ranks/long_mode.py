"""What `scripts/test.sh --long` adds: tests marked `long`, and more of what repeats."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

T = TypeVar("T")

# Set by tests/conftest.py, and inherited by what tests start.
VARIABLE = "TESTS_ARE_LONG"
IS_LONG = bool(os.environ.get(VARIABLE))
# The day, which says what a plain run samples: all has run after as many days as the largest step.
DAY_VARIABLE = "TESTS_DAY"
DAY = int(os.environ.get(DAY_VARIABLE) or date.today().toordinal())
MANY_EXAMPLES = 10_000


def examples(most: int = 100) -> settings:
    """Have a property tried with so many examples, and a hundred times as many where it is long.

    An example of loads by threads takes a fifth of a second: give few.
    """
    return settings(max_examples=most * MANY_EXAMPLES // 100 if IS_LONG else most)


def sample(values: Sequence[T], step: int) -> Sequence[T]:
    """Return each `step`-th of the values, other ones each day, and all where it may be long."""
    return values if IS_LONG else values[first(values, step) :: step]


def sampled_calls(step: int) -> Iterator[int]:
    """Return numbers of calls, without an end: each `step`-th, or each where it may be long."""
    return count(1) if IS_LONG else count(1 + DAY % step, step)


def sampled_params(values: Sequence[object], step: int) -> list[ParameterSet]:
    """Return parameters of a test: each `step`-th runs, other ones each day; the rest is `long`."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=pytest.mark.long if (number - first(values, step)) % step else (),
        )
        for number, value in enumerate(values)
    ]


def items_of_other_days(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield what the mark `sampled(step)` leaves to other days: of a file each `step`-th test runs.

    Tests that belong together, as one needs the other, have a second argument in common.
    """
    files: dict[Path, dict[object, int]] = {}
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            step, group = (*mark.args, item)[:2]
            numbers = files.setdefault(item.path, {})
            if (numbers.setdefault(group, len(numbers)) - DAY) % step:
                yield item


def first(values: Sequence[object], step: int) -> int:
    """Return the number of the first value that is sampled today."""
    return DAY % min(step, len(values))
