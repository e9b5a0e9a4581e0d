"""What older versions of torch cannot do: the tests that need it skip there, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# What torch says, in any of its versions, of a size that a strided shard does not divide.
_UNEVEN = ("only allows even sharding", "does not support uneven sharding")


def refuses_to_cut(error: BaseException) -> bool:
    """Say whether torch refused only because a size does not divide evenly."""
    return any(words in str(error) for words in _UNEVEN)


@contextmanager
def cut_unevenly() -> Iterator[None]:
    """Skip the test where this torch cannot cut unevenly with strided shards, as 2.7 cannot."""
    try:
        yield
    except (AssertionError, NotImplementedError) as error:
        if not refuses_to_cut(error):
            raise
        pytest.skip(f"this torch cannot cut strided shards unevenly: {error}")


@contextmanager
def wrap_several_boxes() -> Iterator[None]:
    """Skip the test where this torch cannot make a DTensor of several local boxes, as 2.7."""
    try:
        yield
    except RuntimeError as error:
        if "is invalid for input of size" not in str(error):
            raise
        pytest.skip(f"this torch makes no DTensor of a LocalShardsWrapper with two boxes: {error}")
