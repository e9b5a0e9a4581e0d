"""What `scripts/test.sh --long` adds: tests marked `long`, and more of what repeats."""

from __future__ import annotations

import os

from hypothesis import settings

# Set by tests/conftest.py, and inherited by what tests start.
VARIABLE = "TESTS_ARE_LONG"
IS_LONG = bool(os.environ.get(VARIABLE))
MANY_EXAMPLES = 10_000


def examples(most: int = 100) -> settings:
    """Have a property tried with so many examples, and with ten thousand where it may be long."""
    return settings(max_examples=MANY_EXAMPLES if IS_LONG else most)
