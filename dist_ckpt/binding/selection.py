"""Which saved names a load is about, and what the state calls them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dist_ckpt.state.containers import names_above


@dataclass(frozen=True, slots=True)
class Selection:
    """Patterns (fnmatch) on names; `in` says whether a name is selected.

    A pattern selects a name if it matches it or a name above it: `model` and `model.*` are all of
    the model, `*.bias` is every bias and what an optimizer stores under it. `include=None` is
    everything.
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
    chosen = None if include is None else _patterns(include, "include")
    if chosen == ():
        raise ValueError("include=[] selects nothing: give patterns, or None for everything")
    return Selection(chosen, () if exclude is None else _patterns(exclude, "exclude"))


def _patterns(value: str | Sequence[str], option: str) -> tuple[str, ...]:
    if not isinstance(value, Iterable):
        raise TypeError(f"{option}={value!r}: give names or patterns as strings")
    patterns = (value,) if isinstance(value, str) else tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{option} has {pattern!r}: give names or patterns as strings")
        if not pattern:
            raise ValueError(f"{option} has an empty pattern: give a name or a pattern")
    return patterns


@dataclass(frozen=True, slots=True)
class Rename:
    """Rules from saved names to names of the state; a target of None drops what matches.

    Each `*` of a pattern stands for any text, also across dots, and its text goes to the `*` of
    the target in the same position. A rule also moves what is below a name that it matches.
    """

    rules: tuple[tuple[str, str | None], ...] = ()

    def __call__(self, name: str) -> str | None:
        """Return the name in the state, or None. Raises ValueError if two rules disagree."""
        return self._apply(name)[0]

    def of_all(self, names: Iterable[str]) -> tuple[dict[str, str | None], tuple[str, ...]]:
        """Return the new name of each name, and what is wrong with the rules for these names."""
        if not self.rules:
            return {name: name for name in names}, ()
        renamed: dict[str, str | None] = {}
        problems: list[str] = []
        taken: dict[str, str] = {}
        used: set[str] = set()
        for name in names:
            try:
                target, patterns = self._apply(name)
            except ValueError as error:
                problems.append(str(error))
                continue
            used.update(patterns)
            renamed[name] = target
            if target is not None and taken.setdefault(target, name) != name:
                problems.append(
                    f"rename: {taken[target]!r} and {name!r} would both be {target!r}: change the "
                    "rules, or drop one of the two with None"
                )
        problems += [
            f"rename: {pattern!r} matches no saved name: mend or remove the rule"
            for pattern, _ in self.rules
            if pattern not in used
        ]
        return renamed, tuple(problems)

    def _apply(self, name: str) -> tuple[str | None, list[str]]:
        """Return the new name, and the patterns that said so."""
        found = {
            pattern: _substitute(pattern, target, name)
            for pattern, target in self.rules
            if _texts(pattern, name) is not None
        }
        if not found:
            return name, []
        if len(set(found.values())) > 1:
            raise ValueError(
                f"rename: {name!r} is matched by {sorted(found)}, which disagree: make the "
                "patterns such that one matches"
            )
        return next(iter(found.values())), list(found)


def rename_of(rules: Mapping[str, str | None] | None) -> Rename:
    """Check a load's `rename`. Raises TypeError or ValueError."""
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(f"rename={rules!r}: give a mapping from saved names to names or None")
    for pattern, target in (rules or {}).items():
        if not isinstance(pattern, str) or not isinstance(target, str | None):
            raise TypeError(
                f"rename has {pattern!r}: {target!r}: map a saved name to a name or None"
            )
        if not pattern or target == "":
            raise ValueError(f"rename has {pattern!r}: {target!r}: a name cannot be empty")
        if any(mark in pattern for mark in "?["):
            raise ValueError(f"rename has {pattern!r}: `*` is the only wildcard here")
        if target is not None and pattern.count("*") != target.count("*"):
            raise ValueError(
                f"rename has {pattern!r}: {target!r}: give both sides the same number of `*`"
            )
    return Rename(tuple((rules or {}).items()))


def _texts(pattern: str, name: str) -> tuple[tuple[str, ...], str] | None:
    """Return the texts of the stars and what is below the matched name, or None."""
    regex = re.compile("(.*)".join(map(re.escape, pattern.split("*"))), re.DOTALL)
    for part in names_above(name):
        if (match := regex.fullmatch(part)) is not None:
            return match.groups(), name[len(part) :]
    return None


def _substitute(pattern: str, target: str | None, name: str) -> str | None:
    found = _texts(pattern, name)
    assert found is not None
    if target is None:
        return None
    texts, below = found
    first, *rest = target.split("*")
    return first + "".join(map("".join, zip(texts, rest, strict=True))) + below
