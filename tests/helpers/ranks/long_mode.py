"""What `scripts/test.sh --long` adds: tests marked `long`, and more of what repeats."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

T = TypeVar("T")

# Set by tests/conftest.py, and inherited by what tests start.
VARIABLE = "TESTS_ARE_LONG"
IS_LONG = bool(os.environ.get(VARIABLE))
MANY_EXAMPLES = 10_000


def examples(most: int = 100) -> settings:
    """Have a property tried with so many examples, and with ten thousand where it may be long."""
    return settings(max_examples=MANY_EXAMPLES if IS_LONG else most)


def sample(values: Sequence[T], step: int) -> Sequence[T]:
    """Return each `step`-th of the values, and all of them where it may be long."""
    return values if IS_LONG else values[::step]


def sampled_params(values: Sequence[object], step: int) -> list[ParameterSet]:
    """Return parameters of a test: each `step`-th always runs, and the others are `long`."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=pytest.mark.long if number % step else (),
        )
        for number, value in enumerate(values)
    ]
