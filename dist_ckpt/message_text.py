"""Parts of messages: lists that are cut, similar messages as one, ranks, sizes and counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar

_WithText = TypeVar("_WithText")


# A message lists at most this many problems or names, and counts the others.
MAX_LISTED = 20


def listed(texts: Sequence[str], separator: str = ", ") -> str:
    """Join texts for a message: the first `MAX_LISTED`, and the number of the others."""
    more = len(texts) - MAX_LISTED
    return separator.join([*texts[:MAX_LISTED], *([f"and {more} more"] if more > 0 else [])])


# A message has at most this many characters of names before its remedy.
_MAX_BEFORE_REMEDY = 120


def names_around_remedy(names: Sequence[str], text: str = "") -> tuple[str, str]:
    """Return the names of a message for its start, and all of them for its end, after the remedy.

    `text` lists them, by default `listed(names)`. If it is short, the second is "".
    """
    text = text or listed(names)
    if len(text) <= _MAX_BEFORE_REMEDY or len(names) == 1:
        return text, ""
    return f"{names[0]} and {len(names) - 1} more", f". The names are: {text}"


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


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_size(nbytes: float) -> str:
    """Return a size for people: three digits, decimal units."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    return f"{nbytes:.0f} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 rank" or "2 ranks"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_mesh(mesh: Sequence[tuple[str, int]]) -> str:
    """Return the text of a mesh, for messages."""
    return " x ".join(f"{name} {size}".strip() for name, size in mesh) or "unknown"
