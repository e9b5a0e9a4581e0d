"""Which saved names a load is about. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dist_ckpt.state.containers import names_above


@dataclass(frozen=True, slots=True)
class Selection:
    """Patterns (fnmatch) on names; `in` says whether a name is selected.

    A pattern selects a name if it matches it or a name above it: `model` and `model.*` are all of
    the model, `*.bias` is every bias and what an optimizer stores under it. A `*` also crosses
    dots, and `**` is the same. `include=None` is everything.
    """

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        if self.include is not None and not _matches(self.include, name):
            return False
        return not self.exclude or not _matches(self.exclude, name)


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(part, p) for p in patterns for part in names_above(name))


def selection_of(
    include: str | Sequence[str] | None, exclude: str | Sequence[str] | None
) -> Selection:
    """Check a load's `include` and `exclude`. Raises TypeError or ValueError."""
    chosen = None if include is None else patterns(include, "include")
    if chosen == ():
        raise ValueError("include=[] selects nothing: give patterns, or None for everything")
    return Selection(chosen, () if exclude is None else patterns(exclude, "exclude"))


def patterns(value: str | Sequence[str], option: str) -> tuple[str, ...]:
    """Return the patterns that an option gives, one or several. Raises TypeError or ValueError."""
    if not isinstance(value, Iterable):
        raise TypeError(f"{option}={value!r}: give names or patterns as strings")
    given = (value,) if isinstance(value, str) else tuple(value)
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"{option} has {pattern!r}: give names or patterns as strings")
        if not pattern:
            raise ValueError(f"{option} has an empty pattern: give a name or a pattern")
    return given
