"""Rules from saved names to names of the state: a few wildcards, and what is wrong with them. Pure.

No rule can take long, whatever the names: each wildcard is as short as it can be, and what it has
matched is never taken back for the sake of a later one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from operator import eq

from dist_ckpt.core.planning.selection import names_above
from dist_ckpt.core.state.tree.containers import join

_WILDCARD = re.compile(r"(\*+|\{[^{}]*\}|[{}])")
# So many missing names are looked into: each costs a look at all saved names that are free.
_MAX_TRIES = 16


@dataclass(frozen=True, slots=True)
class _Rule:
    """One rule: `target` has texts, and groups of `regex` by number. One of None drops names.

    `pattern` is as given, and `start` the text that it begins with.
    """

    pattern: str
    start: str
    regex: re.Pattern[str]
    target: tuple[str | int, ...] | None

    def match(self, name: str) -> re.Match[str] | None:
        """Match a name, or else the nearest one above it that fits."""
        if not name.startswith(self.start):
            return None
        return next(filter(None, map(self.regex.fullmatch, names_above(name))), None)

    def filled(self, match: re.Match[str], name: str) -> str | None:
        """Return the new name of what has matched, with what is below it."""
        if self.target is None:
            return None
        texts = (token if isinstance(token, str) else match[token] for token in self.target)
        return "".join(texts) + name[match.end() :]


@dataclass(frozen=True, slots=True)
class Rename:
    """Rules from saved names to names of the state; a target of None drops what matches.

    Each `*` (or `**`) of a pattern stands for any text, also across dots, and its text goes to the
    `*` of the target in the same position. `{name}` stands for a text without dots, which goes to
    wherever the target has `{name}`. Where several texts would do, the first wildcards take the
    shorter ones. A rule also moves what is below a name that it matches. All rules look at the
    saved names, never at what another rule has made of them: two names can be swapped.
    """

    rules: tuple[_Rule, ...] = ()

    def of_all(
        self, names: Iterable[str], states: Mapping[str, tuple[str, str]] | None = None
    ) -> tuple[dict[str, str | None], tuple[str, ...]]:
        """Return the new name of each name, and what is wrong with the rules for these names.

        `states` are names of the state of a parameter: what holds it (`optim.state`), and the
        name of the parameter, which it follows. So does what is below them.
        """
        if not self.rules:
            return {name: name for name in names}, ()
        renamed: dict[str, str | None] = {}
        # By the rules that are to blame: each of them is said once.
        disagreeing: dict[tuple[str, ...], list[str]] = {}
        colliding: dict[object, list[tuple[str, str, str]]] = {}
        taken: dict[str, str] = {}
        ruled: dict[str, tuple[str, ...]] = {}
        for name in names:
            found = self._found(name)
            if states and (above := next(filter(states.__contains__, names_above(name)), "")):
                below = name[len(above) :]
                found = self._following(found, *states[above], below)
            ruled[name] = tuple(found)
            targets = set(found.values())
            if len(targets) > 1:
                disagreeing.setdefault(ruled[name], []).append(name)
                continue
            target = renamed[name] = targets.pop() if targets else name
            if target is not None and (first := taken.setdefault(target, name)) != name:
                pairs = colliding.setdefault((ruled[first], ruled[name]), [])
                pairs.append((first, name, target))
        used = {pattern for patterns in ruled.values() for pattern in patterns}
        unused = [rule.pattern for rule in self.rules if rule.pattern not in used]
        return renamed, tuple(_problems(disagreeing, colliding, unused))

    def _found(self, name: str) -> dict[str, str | None]:
        """Return the new name by each rule that matches."""
        return {
            rule.pattern: rule.filled(match, name)
            for rule in self.rules
            if (match := rule.match(name)) is not None
        }

    def _following(
        self, found: dict[str, str | None], holder: str, parameter: str, below: str
    ) -> dict[str, str | None]:
        """Let state follow its parameter, unless a rule is for the state and not for all of it.

        Where a parameter is dropped its state stays: another may have taken its name.
        """
        moved = {pattern: new for pattern, new in self._found(parameter).items() if new is not None}
        above = self._found(holder)
        holders = {*above.values()} or {holder}
        if not moved or found.keys() != above.keys() or len(holders) > 1 or None in holders:
            return found
        (new_holder,) = holders
        new = {pattern: f"{new_holder}.{name}{below}" for pattern, name in moved.items()}
        return {**dict.fromkeys(above, next(iter(new.values()))), **new}


def _problems(
    disagreeing: Mapping[tuple[str, ...], Sequence[str]],
    colliding: Mapping[object, Sequence[tuple[str, str, str]]],
    unused: Iterable[str],
) -> Iterator[str]:
    """Word what is wrong."""
    for patterns, names in disagreeing.items():
        more = f", as are {len(names) - 1} other names" if len(names) > 1 else ""
        yield (
            f"rename: {names[0]!r} is matched by {sorted(patterns)}, which disagree{more}: "
            "make the patterns such that one matches"
        )
    for pairs in colliding.values():
        first, second, target = pairs[0]
        more = f", and {len(pairs) - 1} other pairs would meet too" if len(pairs) > 1 else ""
        yield (
            f"rename: {first!r} and {second!r} would both be {target!r}{more}: change the "
            "rules, or drop one of the two with None"
        )
    for pattern in unused:
        yield f"rename: {pattern!r} matches no saved name: mend or remove the rule"


# --- patterns --------------------------------------------------------------------------------


def rename_of(rules: Mapping[str, str | None] | None) -> Rename:
    """Check a load's `rename`. Raises TypeError or ValueError."""
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(f"rename={rules!r}: give a mapping from saved names to names or None")
    return Rename(tuple(_rule(pattern, target) for pattern, target in (rules or {}).items()))


def _rule(pattern: object, target: object) -> _Rule:
    what = f"rename has {pattern!r}: {target!r}"
    if not isinstance(pattern, str) or not isinstance(target, str | None):
        raise TypeError(f"{what}: map a saved name to a name or None")
    if not pattern or target == "":
        raise ValueError(f"{what}: a name cannot be empty")
    if any(mark in pattern for mark in "?["):
        raise ValueError(f"{what}: `*` and `{{name}}` are the only wildcards here")
    texts, names = _parsed(pattern, what)
    if "" in texts[1:-1]:
        raise ValueError(f"{what}: put a text between two wildcards, or leave one of them out")
    if len(set(names)) < len(names):
        raise ValueError(f"{what}: give each {{name}} of the pattern a name of its own")
    new = None if target is None else _target(target, names, what)
    return _Rule(pattern, texts[0], re.compile(_regex(texts, names), re.DOTALL), new)


def _target(target: str, names: Sequence[str], what: str) -> tuple[str | int, ...]:
    """Return a target with the numbers of the pattern's wildcards in place of its own."""
    (first, *texts), asked = _parsed(target, what)
    if list(filter(_is_star, names)) != list(filter(_is_star, asked)):
        raise ValueError(f"{what}: give both sides the same number of `*`")
    if unknown := [name for name in asked if name not in names]:
        raise ValueError(f"{what}: the saved name has no {{{unknown[0]}}}: put it there as well")
    tokens: list[str | int] = [first]
    for name, text in zip(asked, texts, strict=True):
        tokens += [names.index(name) + 1, text]
    return tuple(tokens)


def _parsed(pattern: str, what: str) -> tuple[list[str], list[str]]:
    """Return the texts around the wildcards of a pattern, and their names: of `*`, its number."""
    tokens = _WILDCARD.split(pattern)
    names: list[str] = []
    stars = count()
    for mark in tokens[1::2]:
        if mark[0] != "*" and not mark[1:-1].isidentifier():
            raise ValueError(f"{what}: write a wildcard as {{name}}, with a word as its name")
        names.append(str(next(stars)) if mark[0] == "*" else mark[1:-1])
    return tokens[::2], names


def _is_star(name: str) -> bool:
    return name.isdigit()  # no word is


def _regex(texts: Sequence[str], names: Sequence[str]) -> str:
    """Return a regular expression that never goes back behind a wildcard: groups are atomic.

    What follows a wildcard up to the next `*` is looked for as a whole. The first place where it
    is will do: any later one would leave less for the rest.
    """
    first, *others = map(re.escape, texts)
    runs = [first]
    for number, (name, text) in enumerate(zip(names, others, strict=True), 1):
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


# --- the rule that a user wants --------------------------------------------------------------


def rules_for(
    missing: Iterable[str], free: Collection[str], taken: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the rules that find missing names which have more or less of a prefix where saved.

    So do the names of a module in a wrapper, such as `module.` of DDP, against those of the bare
    one, and those of a module in a list. `free` are the saved names that nobody asks for, `taken`
    the others. Also returns the saved name of each missing one that the rules find.
    """
    rules: dict[str, str] = {}
    found: dict[str, str] = {}
    left = dict.fromkeys(missing)
    all_free, free = frozenset(free), set(free)
    for _ in range(_MAX_TRIES):
        if not left:
            break
        name = next(iter(left))
        best: dict[str, str] = {}
        for old, new in _prefixes(name, free):
            if any(_is_below(other, old) for other in taken):
                continue
            pairs = {
                one: saved
                for one in left
                if _is_below(one, new) and (saved := _moved(one, new, old)) in free
            }
            if _is_of_several(old, new, pairs.values(), all_free):
                continue
            if len(pairs) > len(best):
                best, rule = pairs, (join(old, "*"), join(new, "*"))
        if not best:
            del left[name]
            continue
        rules[rule[0]] = rule[1]
        found.update(best)
        free.difference_update(best.values())
        left = {one: None for one in left if one not in best}
    return _proven(rules, found)


def _proven(rules: dict[str, str], found: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return both if the rules do what was found: a name may hold what is a wildcard in a rule."""
    try:
        renamed, problems = rename_of(rules).of_all(found.values())
    except ValueError:
        return {}, {}
    fits = not problems and all(renamed[saved] == name for name, saved in found.items())
    return (rules, found) if fits else ({}, {})


def _prefixes(name: str, free: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield prefixes, (saved, asked), of which one is the other and more, that fit the name."""
    asked = name.split(".")
    seen: set[tuple[str, str]] = set()
    for one in sorted(free):
        if one.rpartition(".")[2] != asked[-1]:
            continue
        saved = one.split(".")
        # What is alike at the end counts first: so the rule is for as many names as can be.
        below = _num_alike(saved[::-1], asked[::-1])
        above = _num_alike(saved, asked)
        pair = ".".join(saved[: len(saved) - below]), ".".join(asked[: len(asked) - below])
        shorter, longer = sorted((saved, asked), key=len)
        more = longer[len(shorter) - below : len(longer) - below]
        # A number is a place in a list.
        fits = above + below >= len(shorter) and (len(more) == 1 or not any(map(str.isdigit, more)))
        if more and fits and pair not in seen:
            seen.add(pair)
            yield pair


def _is_of_several(old: str, new: str, saved: Collection[str], names: Collection[str]) -> bool:
    """Say whether a rule would choose one of several models of a list, which is not ours to do.

    One model that gets a list around it is the first of that.
    """
    above, _, number = max(old, new, key=len).rpartition(".")
    if not number.isdigit():
        return False
    if len(new) > len(old):
        return number != "0"
    start = f"{above}." if above else ""
    tops = {name[len(start) :].partition(".")[0] for name in names if name.startswith(start)}
    others = [join(above, top) for top in tops if top.isdigit() and top != number]
    return any(_moved(name, old, other) in names for name in saved for other in others)


def _num_alike(one: Sequence[str], other: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))


def _is_below(name: str, above: str) -> bool:
    return not above or name.startswith(f"{above}.")


def _moved(name: str, above: str, new_above: str) -> str:
    return join(new_above, name[len(above) + 1 :] if above else name)
