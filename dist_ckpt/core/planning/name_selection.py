"""Select names of a state or of a checkpoint (`include`, `exclude`), for a save or a load."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile

from dist_ckpt.core.runtime.arguments import check_flag

# The matches of longer names are not cached: with the names above, they would take memory that
# grows with the square of the length.
_MAX_CACHED_CHARS = 256


@dataclass(frozen=True, slots=True)
class Selection:
    """Patterns (fnmatch) on names; `name in selection` is True if the name is selected.

    A pattern selects a name if it matches the name or a name above it. `model` and `model.*` select
    all of the model, `*.bias` every bias and its optimizer state. A `*` also matches dots, and `**`
    is the same. `include=None` selects everything. Names in `frozen`, and all names below them, are
    excluded: without `include_frozen` these are the parameters that require no gradient.
    """

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    include_frozen: bool = True
    frozen: frozenset[str] = frozenset()
    has_parameters: bool = True
    # The patterns that match each name: a name above many names is matched once.
    _matches: dict[str, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_everything(self) -> bool:
        """True if no name is excluded."""
        return self.include is None and not self.exclude and self.include_frozen

    def __str__(self) -> str:
        """Return the selection as options of a call, or "" if nothing is excluded."""
        options = [f"include={[*self.include]}"] if self.include is not None else []
        options += [f"exclude={[*self.exclude]}"] if self.exclude else []
        return ", ".join(options + ["include_frozen=False"] * (not self.include_frozen))

    def __contains__(self, name: str) -> bool:
        if self.include is not None and self.matches(name).isdisjoint(self.include):
            return False
        if self.exclude and not self.matches(name).isdisjoint(self.exclude):
            return False
        return not self.frozen or self.frozen.isdisjoint(names_above(name))

    def can_reach(self, name: str) -> bool:
        """Return False if `include` certainly selects neither this name nor a name below it."""
        starts = (re.split(r"[*?[]", pattern)[0] for pattern in self.include or ())
        below = f"{name}."
        return any(below.startswith(start) or start.startswith(below) for start in starts)

    def matches(self, name: str) -> frozenset[str]:
        """Return the patterns that match a name, or a name above it."""
        if (cached := self._matches.get(name)) is not None:
            return cached
        uncached = [*takewhile(lambda above: above not in self._matches, names_above(name))]
        matches = self._matches.get(uncached[-1].rpartition(".")[0], frozenset())
        for above in reversed(uncached):
            matches = matches.union(p for p in self._patterns if fnmatchcase(above, p))
            if len(above) <= _MAX_CACHED_CHARS:
                self._matches[above] = matches
        return matches

    def pattern_problems(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return a problem for each pattern that matches no name, and for unknown frozen names."""
        unmatched, names = dict.fromkeys(self._patterns), [*names]
        for name in names if unmatched else ():
            for pattern in self.matches(name):
                unmatched.pop(pattern, None)
            if not unmatched:
                break
        problems = [
            f"{option}: {pattern!r} matches no name{_hint(pattern, names)}: correct or remove it"
            for option, patterns in (("include", self.include), ("exclude", self.exclude))
            for pattern in patterns or ()
            if pattern in unmatched
        ]
        if not self.has_parameters:
            problems.append(
                "include_frozen=False: the state has no parameters, so frozen tensors are "
                "unknown: put the module in the state, not its state_dict()"
            )
        return tuple(problems)

    @property
    def _patterns(self) -> tuple[str, ...]:
        return (*(self.include or ()), *self.exclude)


SELECT_ALL = Selection()


def _hint(pattern: str, names: Sequence[str]) -> str:
    """Return a hint if a pattern lacks only the name of the component."""
    selection = Selection((pattern,))
    for name in names:
        top, _, below = name.partition(".")
        if below in selection:
            return f", but {f'{escape_pattern(top)}.{pattern}'!r} does"
    return ""


def escape_pattern(name: str) -> str:
    """Return a pattern without wildcards, which matches only this name."""
    return re.sub(r"[*?[]", r"[\g<0>]", name)


def excluded_names(name: str) -> str:
    """Return the option that excludes only this name, for Python and for the command line."""
    pattern = escape_pattern(name)
    quoted = pattern.replace("'", "'\"'\"'")
    word = pattern if re.fullmatch(r"[\w./-]+", pattern) else f"'{quoted}'"
    return f"exclude={pattern!r}, on the command line --exclude {word}"


# The tensors that a load may convert into another dtype: all, or those that match patterns.
Cast = bool | str | Sequence[str] | None


def parse_selection(
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
    include_frozen: bool = True,  # noqa: FBT001, FBT002 - passed on from a front door
) -> Selection:
    """Check the options and return the selection. Raises TypeError or ValueError."""
    included = None if include is None else parse_patterns(include, "include")
    if included == ():
        raise ValueError("include=[] selects nothing: give patterns, or None for everything")
    check_flag("include_frozen", include_frozen)
    return Selection(
        included, () if exclude is None else parse_patterns(exclude, "exclude"), include_frozen
    )


def parse_cast(cast: Cast) -> Selection | None:
    """Check `cast` of a load, and return its selection. Raises TypeError or ValueError."""
    if cast is None or cast is False:
        return None
    if cast is True:
        return SELECT_ALL
    if not isinstance(cast, Iterable):
        raise TypeError(f"cast={cast!r}: give True or patterns; the dtype is that of the state")
    return Selection(parse_patterns(cast, "cast"))


def find_common_problems(problems_by_rank: Iterable[Iterable[str]]) -> list[str]:
    """Return the problems that all ranks have: a pattern may match a name on one rank only."""
    first, *other_ranks = map(dict.fromkeys, problems_by_rank)
    return [problem for problem in first if all(problem in other for other in other_ranks)]


def names_above(name: str) -> Iterator[str]:
    """Yield a name, then the names above it: `a.b.c`, `a.b`, `a`."""
    while True:
        yield name
        cut = name.rfind(".")
        if cut < 0:
            return
        name = name[:cut]


def parse_patterns(value: str | Sequence[str], option: str) -> tuple[str, ...]:
    """Return the patterns of an option, one or several. Raises TypeError or ValueError."""
    # An iterator is refused: it can be used only once.
    if not isinstance(value, Iterable) or isinstance(value, Iterator):
        raise TypeError(f"{option}={value!r}: give names or patterns as strings, or a list of them")
    result = (value,) if isinstance(value, str) else tuple(value)
    for pattern in result:
        if not isinstance(pattern, str):
            raise TypeError(f"{option} has {pattern!r}: give names or patterns as strings")
        if not pattern:
            raise ValueError(f"{option} has an empty pattern: give a name or a pattern")
    return result


# Patterns of names, and the number of rows that count: indices along the dimension that differs.
Resize = Mapping[str, int]


def parse_resize(value: object) -> dict[str, int]:
    """Check `resize` of a load, and return its patterns. Raises TypeError or ValueError."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"resize={value!r}: map patterns of names to the number of rows that count, such as "
            '{"*.embed.weight": 50000}'
        )
    for pattern, rows in value.items():
        if type(pattern) is not str or type(rows) is not int:
            raise TypeError(f"resize has {pattern!r}: {rows!r}: map patterns to whole numbers")
        if not pattern or rows < 0:
            raise ValueError(f"resize has {pattern!r}: {rows}: give a pattern, and at least 0 rows")
    return dict(value)
