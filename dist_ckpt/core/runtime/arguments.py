"""Check the arguments of a call: flags, whole numbers, numbers in a range."""

from __future__ import annotations

import sys
from math import inf
from numbers import Real
from typing import Any

# The least number above 0 that an argument may be.
LEAST_POSITIVE = sys.float_info.min


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless an argument is True or False."""
    if type(value) is not bool:
        raise TypeError(f"{name}={value!r}: give True or False")


def check_whole(name: str, value: object, least: float = -inf) -> int:
    """Return a whole number from `least` to 2**63 - 1, the highest step. TypeError, ValueError."""
    if type(value) is not int:
        raise TypeError(f"{name}={value!r}: give a whole number")
    if value < least:
        raise ValueError(f"{name}={value}: give a number from {least} on")
    if value >= 1 << 63:
        raise ValueError(f"{name}={value}: give a number up to 2**63 - 1")
    return value


def check_number(
    name: str, value: Any, wanted: str, least: float, most: float = sys.float_info.max
) -> float:
    """Return a number from `least` to `most` as a float. TypeError or ValueError with `wanted`."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise TypeError(f"{name}={value!r}: give {wanted}")
    if not least <= value <= most:
        raise ValueError(f"{name}={value}: give {wanted}")
    return float(value)
