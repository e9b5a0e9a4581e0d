"""The option `rename`: rules from saved names to names of the state, with wildcards. Pure.

Each wildcard matches as little as possible, and a match is never tried again. So matching is fast
for any name.

The state of an optimizer moves with its parameter (`Rename._move_with_parameter`). For example, the
rule {"model.a": "model.b"} also renames the state of a weight of "model.a" in "optim.state". For a
class of optimizer whose state has other keys see `core/state/optimizer_state.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, starmap, takewhile
from operator import eq

from dist_ckpt.core.planning.name_selection import names_above
from dist_ckpt.core.state.tree.containers import child_name

_WILDCARD = re.compile(r"(\*+|\{[^{}]*\}|[{}])")
# Limit of the missing names to examine: each one is compared with all unrequested saved names.
_MAX_EXAMINED = 16


@dataclass(frozen=True, slots=True)
class _Rule:
    """One rule, from the user's `pattern`. `start` is its text before the first wildcard.

    `replacement` has texts and group numbers of `regex` in turn; None drops the matching names.
    """

    pattern: str
    start: str
    regex: re.Pattern[str]
    replacement: tuple[str | int, ...] | None

    def match(self, name: str) -> re.Match[str] | None:
        """Match a name; if it does not match, match the nearest name above it that does."""
        if not name.startswith(self.start):
            return None
        return next(filter(None, map(self.regex.fullmatch, names_above(name))), None)

    def new_name(self, match: re.Match[str], name: str) -> str | None:
        """Return the new name of a match, followed by the rest of the name; None to drop it."""
        if self.replacement is None:
            return None
        texts = (token if isinstance(token, str) else match[token] for token in self.replacement)
        return "".join(texts) + name[match.end() :]


@dataclass(frozen=True, slots=True)
class Rename:
    """Rules from saved names to names of the state; a replacement of None drops matching names.

    Each `*` (or `**`) of a pattern matches any text, also across dots. The text goes to the `*` of
    the replacement in the same position. `{name}` matches a text without dots, which goes to each
    `{name}` of the replacement. If several matches are possible, the first wildcards match the
    shorter texts. A rule also moves the names below a match. All rules apply to saved names, never
    to results of other rules: two names can be swapped.
    """

    rules: tuple[_Rule, ...] = ()

    def apply(
        self, names: Iterable[str], states: Mapping[str, tuple[str, str]] | None = None
    ) -> tuple[dict[str, str | None], tuple[str, ...]]:
        """Return the new name of each name, and the problems of the rules for these names.

        `states` maps the name of a parameter's state to the name above it (`optim.state`) and the
        parameter's name. The state, and all names below it, move with their parameter.
        """
        if not self.rules:
            return {name: name for name in names}, ()
        renamed: dict[str, str | None] = {}
        # Grouped by the rules that cause the problem, so that each problem is reported once.
        disagreeing: dict[tuple[str, ...], list[str]] = {}
        colliding: dict[object, list[tuple[str, str, str]]] = {}
        first_names: dict[str, str] = {}
        ruled: dict[str, tuple[str, ...]] = {}
        for name in names:
            by_rule = self._find_new_names(name)
            if states and (above := next(filter(states.__contains__, names_above(name)), "")):
                below = name[len(above) :]
                by_rule = self._move_with_parameter(by_rule, *states[above], below)
            ruled[name] = tuple(by_rule)
            new_names = set(by_rule.values())
            if len(new_names) > 1:
                disagreeing.setdefault(ruled[name], []).append(name)
                continue
            new = renamed[name] = new_names.pop() if new_names else name
            if new is not None and (first := first_names.setdefault(new, name)) != name:
                rules = ruled[first], ruled[name]
                colliding.setdefault(rules, []).append((first, name, new))
        used = {pattern for patterns in ruled.values() for pattern in patterns}
        unused = [rule.pattern for rule in self.rules if rule.pattern not in used]
        return renamed, tuple(_problems(disagreeing, colliding, unused))

    def _find_new_names(self, name: str) -> dict[str, str | None]:
        return {
            rule.pattern: rule.new_name(match, name)
            for rule in self.rules
            if (match := rule.match(name)) is not None
        }

    def _move_with_parameter(
        self, new_names: dict[str, str | None], holder: str, parameter: str, below: str
    ) -> dict[str, str | None]:
        """Move state with its parameter, unless a rule matches only this part of the state.

        The state of a dropped parameter stays, because another parameter may have its name now.
        """
        moved = {
            rule: new for rule, new in self._find_new_names(parameter).items() if new is not None
        }
        above = self._find_new_names(holder)
        holders = {*above.values()} or {holder}
        if not moved or new_names.keys() != above.keys() or len(holders) > 1 or None in holders:
            return new_names
        (new_holder,) = holders
        new = {rule: f"{new_holder}.{name}{below}" for rule, name in moved.items()}
        return {**dict.fromkeys(above, next(iter(new.values()))), **new}


def _problems(
    disagreeing: Mapping[tuple[str, ...], Sequence[str]],
    colliding: Mapping[object, Sequence[tuple[str, str, str]]],
    unused: Iterable[str],
) -> Iterator[str]:
    for patterns, names in disagreeing.items():
        more = f", as are {len(names) - 1} other names" if len(names) > 1 else ""
        yield (
            f"rename: {names[0]!r} is matched by {sorted(patterns)}, which disagree{more}: "
            "change the patterns so that only one matches"
        )
    for pairs in colliding.values():
        first, second, new = pairs[0]
        more = f", and {len(pairs) - 1} other pairs would meet too" if len(pairs) > 1 else ""
        yield (
            f"rename: {first!r} and {second!r} would both be {new!r}{more}: change the "
            "rules, or drop one of the two with None"
        )
    for pattern in unused:
        yield f"rename: {pattern!r} matches no saved name: change or remove the rule"


# --- patterns --------------------------------------------------------------------------------


def parse_rename(rules: Mapping[str, str | None] | None) -> Rename:
    """Check a load's `rename`. Raises TypeError or ValueError."""
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(f"rename={rules!r}: give a mapping from saved names to names or None")
    return Rename(tuple(starmap(_parse_rule, (rules or {}).items())))


def _parse_rule(pattern: object, replacement: object) -> _Rule:
    label = f"rename has {pattern!r}: {replacement!r}"
    if not isinstance(pattern, str) or not isinstance(replacement, str | None):
        raise TypeError(f"{label}: map a saved name to a name or None")
    if not pattern or replacement == "":
        raise ValueError(f"{label}: a name cannot be empty")
    if any(mark in pattern for mark in "?["):
        raise ValueError(f"{label}: `*` and `{{name}}` are the only wildcards here")
    texts, names = _parse(pattern, label)
    if "" in texts[1:-1]:
        raise ValueError(f"{label}: write a text between two wildcards, or leave one of them out")
    if len(set(names)) < len(names):
        raise ValueError(f"{label}: give each {{name}} of the pattern a different name")
    new = None if replacement is None else _parse_replacement(replacement, names, label)
    return _Rule(pattern, texts[0], re.compile(_regex(texts, names), re.DOTALL), new)


def _parse_replacement(replacement: str, names: Sequence[str], label: str) -> tuple[str | int, ...]:
    (first, *texts), wildcards = _parse(replacement, label)
    if list(filter(_is_star, names)) != list(filter(_is_star, wildcards)):
        raise ValueError(f"{label}: give both sides the same number of `*`")
    if unknown := [name for name in wildcards if name not in names]:
        raise ValueError(f"{label}: the saved name has no {{{unknown[0]}}}: add it there")
    tokens: list[str | int] = [first]
    for name, text in zip(wildcards, texts, strict=True):
        tokens += [names.index(name) + 1, text]
    return tuple(tokens)


def _parse(pattern: str, label: str) -> tuple[list[str], list[str]]:
    """Split a pattern into texts and the names of its wildcards. The name of a `*` is a number."""
    tokens = _WILDCARD.split(pattern)
    names: list[str] = []
    stars = count()
    for mark in tokens[1::2]:
        if mark[0] != "*" and not mark[1:-1].isidentifier():
            raise ValueError(f"{label}: write a wildcard as {{name}}, with a word as its name")
        names.append(str(next(stars)) if mark[0] == "*" else mark[1:-1])
    return tokens[::2], names


def _is_star(name: str) -> bool:
    return name.isdigit()


def _regex(texts: Sequence[str], names: Sequence[str]) -> str:
    """Return a regular expression. Its groups are atomic, so that it never backtracks.

    The text after a wildcard, up to the next `*`, is searched as a whole. The first match is
    correct: a later match would leave less text for the other wildcards.
    """
    first, *further = map(re.escape, texts)
    runs = [first]
    for number, (name, text) in enumerate(zip(names, further, strict=True), 1):
        if _is_star(name):
            runs.append(text)
        elif number < len(names):
            runs[-1] += f"(?>([^.]+?){text})"
        else:
            runs[-1] += f"([^.]+?){text}"
    if len(runs) == 1:
        return runs[0]
    first, *inner, last = runs
    return first + "".join(f"(?>(.*?){run})" for run in inner) + f"(.*?){last}"


# --- suggested rules -------------------------------------------------------------------------


def suggest_rules(
    missing: Iterable[str], free: Collection[str], requested: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return rules for missing names that were saved with a longer or shorter prefix.

    A module inside a wrapper has such names (DDP adds `module.`), and so has a module in a list.
    `free` are the unrequested saved names, `requested` the others. The second result maps each
    missing name that the rules cover to its saved name.
    """
    rules: dict[str, str] = {}
    covered: dict[str, str] = {}
    remaining = dict.fromkeys(missing)
    all_free, free = frozenset(free), set(free)
    for _ in range(_MAX_EXAMINED):
        if (name := next(iter(remaining), None)) is None:
            break
        best: dict[str, str] = {}
        for old, new in _prefixes(name, free):
            if any(_is_below(other, old) for other in requested):
                continue
            pairs = {
                wanted: saved
                for wanted in remaining
                if _is_below(wanted, new) and (saved := _replace_prefix(wanted, new, old)) in free
            }
            if _is_ambiguous(old, new, pairs.values(), all_free):
                continue
            if len(pairs) > len(best):
                best, rule = pairs, (child_name(old, "*"), child_name(new, "*"))
        if best:
            rules[rule[0]] = rule[1]
            covered.update(best)
            free.difference_update(best.values())
        remaining = {other: None for other in remaining if other != name and other not in best}
    # A saved name may itself contain a wildcard. Check that the rules give the expected names.
    try:
        renamed, problems = parse_rename(rules).apply(covered.values())
    except ValueError:
        return {}, {}
    fits = not problems and all(renamed[saved] == name for name, saved in covered.items())
    return (rules, covered) if fits else ({}, {})


def _prefixes(name: str, free: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of prefixes (saved, wanted) for a missing name; one contains the other."""
    wanted = name.split(".")
    seen: set[tuple[str, str]] = set()
    for candidate in sorted(free):
        if candidate.rpartition(".")[2] != wanted[-1]:
            continue
        saved = candidate.split(".")
        # Compare the ends first: a long common end gives a rule that covers more names.
        below = _num_equal(saved[::-1], wanted[::-1])
        above = _num_equal(saved, wanted)
        pair = ".".join(saved[: len(saved) - below]), ".".join(wanted[: len(wanted) - below])
        shorter, longer = sorted((saved, wanted), key=len)
        more = longer[len(shorter) - below : len(longer) - below]
        # A number is an index in a list.
        fits = above + below >= len(shorter) and (len(more) == 1 or not any(map(str.isdigit, more)))
        if more and fits and pair not in seen:
            seen.add(pair)
            yield pair


def _is_ambiguous(old: str, new: str, saved: Collection[str], names: Collection[str]) -> bool:
    """Return True if a rule would choose one of several models in a list; the user must choose.

    A single model with a new list around it is not ambiguous: it is the first item.
    """
    above, _, number = max(old, new, key=len).rpartition(".")
    if not number.isdigit():
        return False
    if len(new) > len(old):
        return number != "0"
    start = f"{above}." if above else ""
    tops = {name[len(start) :].partition(".")[0] for name in names if name.startswith(start)}
    siblings = [child_name(above, top) for top in tops if top.isdigit() and top != number]
    return any(_replace_prefix(name, old, other) in names for name in saved for other in siblings)


def _num_equal(left: Sequence[str], right: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, left, right)))


def _is_below(name: str, above: str) -> bool:
    return not above or name.startswith(f"{above}.")


def _replace_prefix(name: str, above: str, new_above: str) -> str:
    return child_name(new_above, name[len(above) + 1 :] if above else name)
