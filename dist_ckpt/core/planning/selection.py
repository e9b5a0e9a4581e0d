"""Which names of a state, or of a checkpoint, a save or a load is about. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile

# Of a longer name it is looked anew what matches: to keep that of all names above it takes its
# square.
_MOST_KEPT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Selection:
    """Patterns (fnmatch) on names; `in` says whether a name is selected.

    A pattern selects a name if it matches it or a name above it: `model` and `model.*` are all of
    the model, `*.bias` is every bias and what an optimizer stores under it. A `*` also crosses
    dots, and `**` is the same. `include=None` is everything. `without` are names, no patterns, that
    are left out with all that is below them: without `include_frozen`, who knows the state puts
    those there of parameters that require no gradient; `knows_parameters` is whether there are any
    parameters.
    """

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    include_frozen: bool = True
    without: frozenset[str] = frozenset()
    knows_parameters: bool = True
    # By name: a name above many is looked at once.
    _matches: dict[str, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_everything(self) -> bool:
        """Whether no name is left out."""
        return self.include is None and not self.exclude and self.include_frozen

    def __str__(self) -> str:
        """Say it as options of a call; "" if nothing is left out."""
        options = [f"include={[*self.include]}"] if self.include is not None else []
        options += [f"exclude={[*self.exclude]}"] if self.exclude else []
        return ", ".join(options + ["include_frozen=False"] * (not self.include_frozen))

    def __contains__(self, name: str) -> bool:
        if self.include is not None and self.matches(name).isdisjoint(self.include):
            return False
        if self.exclude and not self.matches(name).isdisjoint(self.exclude):
            return False
        return not self.without or self.without.isdisjoint(names_above(name))

    def may_reach(self, name: str) -> bool:
        """Say whether a pattern to include might select a name, or one below; if unsure, yes."""
        starts = (re.split(r"[*?[]", pattern)[0] for pattern in self.include or ())
        below = f"{name}."
        return any(below.startswith(one) or one.startswith(below) for one in starts)

    def matches(self, name: str) -> frozenset[str]:
        """Return the patterns that match a name, or a name above it."""
        if (found := self._matches.get(name)) is not None:
            return found
        unknown = [*takewhile(lambda one: one not in self._matches, names_above(name))]
        known = self._matches.get(unknown[-1].rpartition(".")[0], frozenset())
        for one in reversed(unknown):
            known = known.union(own for own in self._patterns if fnmatchcase(one, own))
            if len(one) <= _MOST_KEPT_CHARS:
                self._matches[one] = known
        return known

    def unmatched(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the problems of patterns, or of `include_frozen`, that are about no name."""
        left, names = dict.fromkeys(self._patterns), [*names]
        for name in names if left else ():
            for pattern in self.matches(name):
                left.pop(pattern, None)
            if not left:
                break
        problems = [
            f"{option}: {pattern!r} matches no name{_meant(pattern, names)}: mend or remove it"
            for option, patterns in (("include", self.include), ("exclude", self.exclude))
            for pattern in patterns or ()
            if pattern in left
        ]
        if not self.knows_parameters:
            problems.append(
                "include_frozen=False: the state has no parameters, of which alone it is known "
                "whether they require a gradient: put the module there, not its state_dict()"
            )
        return tuple(problems)

    @property
    def _patterns(self) -> tuple[str, ...]:
        return (*(self.include or ()), *self.exclude)


SELECT_ALL = Selection()


def _meant(pattern: str, names: Sequence[str]) -> str:
    """Say how a pattern would match that lacks the component of what it is about."""
    selection = Selection((pattern,))
    for name in names:
        top, _, below = name.partition(".")
        if below in selection:
            return f", but {f'{escaped(top)}.{pattern}'!r} does"
    return ""


def escaped(name: str) -> str:
    """Return the pattern that matches a name, in which nothing is taken for a wildcard."""
    return re.sub(r"[*?[]", r"[\g<0>]", name)


def excluded_names(name: str) -> str:
    """Word the option that leaves a name out, in which nothing of it is taken for a wildcard."""
    pattern = escaped(name)
    quoted = pattern.replace("'", "'\"'\"'")
    word = pattern if re.fullmatch(r"[\w./-]+", pattern) else f"'{quoted}'"
    return f"exclude={pattern!r}, on the command line --exclude {word}"


# Which names a load may convert into another dtype: all, or those that match patterns.
Cast = bool | str | Sequence[str] | None


def selection_of(
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
    include_frozen: bool = True,  # noqa: FBT001, FBT002 - what a caller of ours was given
) -> Selection:
    """Check the options of these names. Raises TypeError or ValueError."""
    chosen = None if include is None else patterns(include, "include")
    if chosen == ():
        raise ValueError("include=[] selects nothing: give patterns, or None for everything")
    if type(include_frozen) is not bool:
        raise TypeError(f"include_frozen={include_frozen!r}: give True or False")
    return Selection(
        chosen, () if exclude is None else patterns(exclude, "exclude"), include_frozen
    )


def cast_of(asked: Cast) -> Selection | None:
    """Check a load's `cast`: None for nothing. Raises TypeError or ValueError."""
    if asked is None or asked is False:
        return None
    if asked is True:
        return SELECT_ALL
    if not isinstance(asked, Iterable):
        raise TypeError(f"cast={asked!r}: give True or patterns; the dtype is that of the state")
    return Selection(patterns(asked, "cast"))


def unmatched_on_all(told: Iterable[Iterable[str]]) -> list[str]:
    """Return what `Selection.unmatched` says on every rank: each may hold other names."""
    first, *others = map(dict.fromkeys, told)
    return [problem for problem in first if all(problem in other for other in others)]


def names_above(name: str) -> Iterator[str]:
    """Yield a name, then the names above it: `a.b.c`, `a.b`, `a`."""
    while True:
        yield name
        cut = name.rfind(".")
        if cut < 0:
            return
        name = name[:cut]


def patterns(value: str | Sequence[str], option: str) -> tuple[str, ...]:
    """Return the patterns that an option gives, one or several. Raises TypeError or ValueError."""
    # An iterator is used up by who looks first.
    if not isinstance(value, Iterable) or isinstance(value, Iterator):
        raise TypeError(f"{option}={value!r}: give names or patterns as strings, or a list of them")
    given = (value,) if isinstance(value, str) else tuple(value)
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"{option} has {pattern!r}: give names or patterns as strings")
        if not pattern:
            raise ValueError(f"{option} has an empty pattern: give a name or a pattern")
    return given
