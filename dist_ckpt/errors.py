"""The errors of dist_ckpt: one class for each thing that the caller can do next.

Wrong arguments raise `ValueError` and `TypeError`. All errors about checkpoints are subclasses of
`CheckpointError`: the message gives the facts, and ends with the remedy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import inf
from numbers import Real
from typing import Any, TypeVar

_WithText = TypeVar("_WithText")

# A message lists at most this many problems or names, and counts the others.
MAX_LISTED = 20

# The least number above 0 that an argument may be.
LEAST_POSITIVE = sys.float_info.min


class CheckpointError(Exception):
    """Base of all errors about checkpoints.

    `rank` is the rank of the group on which the error happened, `phase` the phase of the save or
    load. Both are None with a single process, or outside of a phase.
    """

    def __init__(self, message: str, *, rank: int | None = None, phase: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase


class NotFoundError(CheckpointError):
    """The path has no committed checkpoint: choose another path or step."""


class ExistsError(CheckpointError):
    """The path is in use: choose another path, or overwrite."""


class ConflictError(CheckpointError):
    """Another process claimed or abandoned this attempt: find out which, then save again."""


class CorruptError(CheckpointError):
    """Stored data is damaged: fall back to an older checkpoint.

    `touched` names the live tensors that may contain partial data; it is empty if none do. `path`
    is the damaged file, or None if it is unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str | None = None,
        touched: tuple[str, ...] = (),
        path: str | None = None,
    ) -> None:
        super().__init__(message, rank=rank, phase=phase)
        self.touched = touched
        self.path = path


class IncompatibleError(CheckpointError):
    """The checkpoint and the state do not fit: change the state, or upgrade dist_ckpt."""


class StorageError(CheckpointError):
    """The storage failed: repair it, or try again later. Older checkpoints are unchanged."""


class RankError(CheckpointError):
    """Another rank failed, died, never arrived or made another call; `rank` is its number."""


class UnequalReplicasError(ValueError):
    """Ranks hold different values under one name: make the values equal, then save again."""


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


def listed(texts: Sequence[str], separator: str = ", ") -> str:
    """Join texts for a message: the first `MAX_LISTED`, and the number of the others."""
    more = len(texts) - MAX_LISTED
    return separator.join([*texts[:MAX_LISTED], *([f"and {more} more"] if more > 0 else [])])


# Messages about one cause differ in paths, numbers and digests, and in the tensors of a file.
_VARYING = re.compile(r"; it holds .*|\S*/\S*|[0-9a-f]{16,}|[0-9][0-9,]*")

# So many similar messages become one.
_MIN_SIMILAR = 4


def group_similar(
    items: Iterable[_WithText], text: Callable[[_WithText], str], least: int = _MIN_SIMILAR
) -> list[list[_WithText]]:
    """Group items whose texts differ only in paths, numbers and digests.

    Groups of fewer than `least` are split.
    """
    groups: dict[str, list[_WithText]] = {}
    for item in items:
        groups.setdefault(_VARYING.sub("#", text(item)), []).append(item)
    parts = (
        [group] if len(group) >= least else [[item] for item in group] for group in groups.values()
    )
    return [*chain.from_iterable(parts)]


def merge_similar(texts: Iterable[str], least: int = _MIN_SIMILAR) -> list[str]:
    """Return the first of similar messages, with the number of the others."""
    return [
        group[0] + f" (and {len(group) - 1} more like it)" * (len(group) > 1)
        for group in group_similar(texts, str, least)
    ]


def states_text(states: Sequence[str]) -> str:
    """Join short texts, such as "step-7 is damaged". If there are many, similar ones are one."""
    return listed(merge_similar(states, MAX_LISTED + 1))


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks for a message, such as "rank 3" or "ranks 0-3, 7". A long list is cut."""
    ordered = sorted(set(ranks))
    runs: list[tuple[int, int]] = []
    for rank in ordered:
        first = runs.pop()[0] if runs and runs[-1][1] == rank - 1 else rank
        runs.append((first, rank))
    text = listed([f"{a}" if a == b else f"{a}-{b}" for a, b in runs])
    return f"rank{'s' * (len(ordered) > 1)} {text}"


# `Optimizer.state_dict` names a parameter by a number, which may differ between ranks.
_BY_NUMBER = re.compile(r"(^|\.)state\.\d+\b")


def remedy_of_parts(names: Iterable[str], remedy: str) -> str:
    """Return the remedy for names that differ between ranks: `remedy` for most names.

    An optimizer that keeps parts of parameters does not describe them in its state dict.
    """
    if any(_BY_NUMBER.search(name) for name in names):
        return (
            "under FSDP1 or ZeRO, an optimizer's state_dict() has only this rank's parts: pass "
            "the optimizer itself in the state, next to its module"
        )
    return remedy
