"""The option `rename`: rules from saved names to names of the state, with wildcards. Pure.

A rule may have operations, such as a stack: `derived_tensors.py` applies these rules.

The state of an optimizer moves with its parameter (`Rename._move_with_parameter`). For example, the
rule {"model.a": "model.b"} also renames the state of a weight of "model.a" in "optim.state". For a
class of optimizer whose state has other keys see `core/state/optimizer_state.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Protocol

from dist_ckpt.core.format.index.index import ListedVersions
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.planning.name_selection import names_above
from dist_ckpt.core.state.binding.sources.derived_tensors import OperationRule, operation_from_json
from dist_ckpt.core.state.binding.sources.name_patterns import NamePattern, NameTemplate, is_star
from dist_ckpt.core.state.tree.containers import child_name

# Between the saved names of one rule, in a JSON file.
_AND = " + "

# Limit of the missing names to examine: each one is compared with all unrequested saved names.
_MAX_EXAMINED = 16


class RenameRules(Protocol):
    """The option `rename`: a mapping from saved names to new names.

    A rule with operations has one saved name, or a tuple of them. Its list ends with the new name,
    or with a tuple of new names. (A Mapping would not take all dicts of these: its keys are
    invariant for type checkers.)
    """

    def items(self) -> Iterable[tuple[Sequence[str], Sequence[object] | None]]:
        """Return the rules."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """One rule without operations. A `replacement` of None drops the matching names."""

    pattern: NamePattern
    replacement: NameTemplate | None

    def find_new_name(self, name: str) -> tuple[str | None] | None:
        """Return the new name of a name, or of the nearest name above it that matches.

        The rest of the name follows. The item is None to drop the name. Without a match, the
        result is None.
        """
        if not name.startswith(self.pattern.template.texts[0]):
            return None
        for above in names_above(name):
            if (values := self.pattern.match(above)) is not None:
                if self.replacement is None:
                    return (None,)
                return (self.replacement.fill(values) + name[len(above) :],)
        return None


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
    with_operations: tuple[OperationRule, ...] = ()

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
        unused = [rule.pattern.text for rule in self.rules if rule.pattern.text not in used]
        return renamed, tuple(_problems(disagreeing, colliding, unused))

    def drops(self, name: str) -> bool:
        """Return True if a rule drops a name."""
        return None in self._find_new_names(name).values()

    def find_stems(self, stems: Iterable[str]) -> dict[str, str]:
        """Return the new name of each name above the state of parameters, if a rule moves it."""
        found = {stem: self._find_new_names(stem) for stem in dict.fromkeys(stems)}
        return {
            stem: name
            for stem, new in found.items()
            if (name := next(iter(new.values()), None)) is not None
        }

    def shared_problems(self, used: Mapping[str, str]) -> Iterator[str]:
        """Yield a problem for each name that rules with and without operations match.

        `used` has the rule with operations of each name, or "" for the state of a parameter.
        """
        for name, label in used.items():
            if label and (others := self._find_new_names(name)):
                yield (
                    f"{label}: {name!r} is also matched by {sorted(others)}: change the patterns "
                    "so that only one matches"
                )

    def _find_new_names(self, name: str) -> dict[str, str | None]:
        return {
            rule.pattern.text: new[0]
            for rule in self.rules
            if (new := rule.find_new_name(name)) is not None
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


def parse_rename(rules: RenameRules | None) -> Rename:
    """Check a load's `rename`. Raises TypeError or ValueError."""
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(f"rename={rules!r}: give a mapping from saved names to names or None")
    plain: list[_Rule] = []
    with_operations: list[OperationRule] = []
    for names, new in (rules or {}).items():
        if isinstance(names, tuple) or isinstance(new, list | tuple):
            with_operations.append(OperationRule.parse(names, new))
        else:
            plain.append(_parse_rule(names, new))
    return Rename(tuple(plain), tuple(with_operations))


def rules_from_json(document: object) -> RenameRules:
    """Return the rules of a JSON file. Raises TypeError or ValueError.

    It is an object as for `dc.load`, with "a + b" for a tuple of saved names, and with operations
    as `operation_from_json` takes them.
    """
    if not isinstance(document, dict):
        raise TypeError("rename: give an object from saved names to new names")
    rules: dict[Sequence[str], Sequence[object] | None] = {}
    for key, value in document.items():
        names = tuple(key.split(_AND)) if _AND in key else key
        if isinstance(value, list) and value:
            *operations, last = value
            new = tuple(last) if isinstance(last, list) else last
            rules[names] = [*map(operation_from_json, operations), new]
        else:
            rules[names] = value
    parse_rename(rules)
    return rules


def _parse_rule(pattern: object, replacement: object) -> _Rule:
    label = f"rename has {pattern!r}: {replacement!r}"
    if not isinstance(pattern, str) or not isinstance(replacement, str | None):
        raise TypeError(f"{label}: map a saved name to a name, None, or operations and a name")
    if not pattern or replacement == "":
        raise ValueError(f"{label}: a name cannot be empty")
    parsed = NamePattern.parse(pattern, label)
    if replacement is None:
        return _Rule(parsed, None)
    new, names = NameTemplate.parse(replacement, label), parsed.template.wildcards
    if list(filter(is_star, names)) != list(filter(is_star, new.wildcards)):
        raise ValueError(f"{label}: give both sides the same number of `*`")
    if unknown := [name for name in new.wildcards if name not in names]:
        raise ValueError(f"{label}: the saved name has no {{{unknown[0]}}}: add it there")
    return _Rule(parsed, new)


# --- modules ---------------------------------------------------------------------------------


def rename_modules(
    versions: Mapping[str, ListedVersions], renamed: Iterable[tuple[str, str | None]]
) -> tuple[frozenset[str], dict[str, Json], frozenset[str]]:
    """Return the new names of models, the listed entries of modules by their new names, and these.

    `renamed` has saved names with their new names. A module moves with the names in it. Operations
    may make several modules of one.
    """
    moves: dict[str, dict[str, None]] = {}
    for module, new in _moved_modules(renamed):
        moves.setdefault(module, {})[new] = None
    entries = {
        child_name(model, path) if path else model: entry
        for model, listed in versions.items()
        for path, entry in listed.items()
    }
    entries = {new: entry for m, entry in entries.items() for new in moves.get(m, (m,))}
    models = frozenset(new for model in versions for new in moves.get(model, (model,)))
    return models, entries, frozenset(new for of in moves.values() for new in of)


def _moved_modules(renamed: Iterable[tuple[str, str | None]]) -> Iterator[tuple[str, str]]:
    """Yield each module and its new name: two names without their common end."""
    pairs: Iterable[tuple[str, str]] = ((name, new) for name, new in renamed if new)
    while parents := dict.fromkeys(_parents(pairs)):
        yield from parents
        pairs = parents


def _parents(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for name, new in pairs:
        (module, _, end), (new_module, _, new_end) = name.rpartition("."), new.rpartition(".")
        if end and end == new_end:
            yield module, new_module


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


def suggest_moves(
    free: Collection[str], moved: Mapping[str, str], saved: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return rules for parameters that have other names in a checkpoint, and for their state.

    `moved` has the saved names of parameters, and their names in the state. Those are used that are
    in `free`, the unrequested saved names, alone or in a name of optimizer state. `saved` are all
    saved names. The results are those of `suggest_rules`.
    """
    expected: dict[str, str] = {}
    used: dict[str, str] = {}
    unrequested = frozenset(free)
    for name in saved if moved else ():
        if (old := next(filter(moved.__contains__, _parts_of_names(name)), None)) is not None:
            expected[name] = f".{name}.".replace(f".{old}.", f".{moved[old]}.", 1).strip(".")
            used |= {old: moved[old]} if name in unrequested else {}
    if not used:
        return {}, {}
    covered = {expected[name]: name for name in free if name in expected}
    names = [*dict.fromkeys((*saved, *used))]
    for rules in (dict(_shorten(old, new) for old, new in used.items()), used):
        renamed, problems = parse_rename(rules).apply(names)
        fits = all(renamed.get(old) == new for old, new in used.items())
        if fits and not problems and all(renamed[n] in (n, expected.get(n)) for n in saved):
            return rules, covered
    return {}, {}


def _parts_of_names(name: str) -> Iterator[str]:
    """Yield all names in a name: those above it, also without the names above these."""
    parts = name.split(".")
    for start in range(len(parts)):
        for stop in range(len(parts), start, -1):
            yield ".".join(parts[start:stop])


def weight_norm_twins(missing: Iterable[str], free: Collection[str]) -> dict[str, str]:
    """Return free saved names of torch's two forms of `weight_norm`, and the missing names."""
    twins: dict[str, str] = {}
    for name in missing:
        above, _, key = name.rpartition(".")
        for suffix, number in (("_g", 0), ("_v", 1)):
            other = child_name(
                above, f"parametrizations.{key.removesuffix(suffix)}.original{number}"
            )
            if key.endswith(suffix) and other in free:
                twins[other] = name
    return twins


def _shorten(old: str, new: str) -> tuple[str, str]:
    """Return a rule without the equal starts and ends of two names, but for one part."""
    before, after = old.split("."), new.split(".")
    while min(len(before), len(after)) > 1 and before[-1] == after[-1]:
        before.pop(), after.pop()
    equal = len([*takewhile(lambda pair: eq(*pair), zip(before, after, strict=False))])
    start = max(min(equal, len(before) - 1, len(after) - 1) - 1, 0)
    star = "*." if start else ""
    return star + ".".join(before[start:]), star + ".".join(after[start:])


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
