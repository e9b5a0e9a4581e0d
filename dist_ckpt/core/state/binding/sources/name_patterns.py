"""Names with wildcards: the patterns of `rename`, and the names that it writes. Pure.

Each wildcard matches as little as possible, and a match is never tried again. So matching is fast
for any name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

_WILDCARD = re.compile(r"(\*+|\{[^{}]*\}|[{}])")


@dataclass(frozen=True, slots=True)
class NameTemplate:
    """A name with wildcards: `texts[0]`, the first wildcard, `texts[1]`, and so on.

    The name of a `*` is its number among the stars.
    """

    texts: tuple[str, ...]
    wildcards: tuple[str, ...]

    @staticmethod
    def parse(text: str, label: str) -> NameTemplate:
        """Check a text. ValueError begins with `label`."""
        texts, wildcards = _parse_wildcards(text, label)
        return NameTemplate(tuple(texts), tuple(wildcards))

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the name with a text for each wildcard."""
        pairs = zip(self.wildcards, self.texts[1:], strict=True)
        return self.texts[0] + "".join(values[name] + text for name, text in pairs)


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern of saved names, from the user's `text`."""

    text: str
    template: NameTemplate
    regex: re.Pattern[str]

    @staticmethod
    def parse(text: str, label: str) -> NamePattern:
        """Check a pattern. ValueError begins with `label`."""
        if any(mark in text for mark in "?["):
            raise ValueError(f"{label}: `*` and `{{name}}` are the only wildcards here")
        template = NameTemplate.parse(text, label)
        if "" in template.texts[1:-1]:
            raise ValueError(
                f"{label}: write a text between two wildcards, or leave one of them out"
            )
        if len(set(template.wildcards)) < len(template.wildcards):
            raise ValueError(f"{label}: give each {{name}} of the pattern a different name")
        regex = re.compile(_regex(template.texts, template.wildcards), re.DOTALL)
        return NamePattern(text, template, regex)

    def match(self, name: str) -> dict[str, str] | None:
        """Return the text of each wildcard; None if the whole name does not match."""
        if not name.startswith(self.template.texts[0]):
            return None
        if (match := self.regex.fullmatch(name)) is None:
            return None
        return dict(zip(self.template.wildcards, match.groups(), strict=True))


def _parse_wildcards(pattern: str, label: str) -> tuple[list[str], list[str]]:
    """Split a pattern into texts and the names of its wildcards. The name of a `*` is a number."""
    tokens = _WILDCARD.split(pattern)
    names: list[str] = []
    stars = count()
    for mark in tokens[1::2]:
        if mark[0] != "*" and not mark[1:-1].isidentifier():
            raise ValueError(f"{label}: write a wildcard as {{name}}, with a word as its name")
        names.append(str(next(stars)) if mark[0] == "*" else mark[1:-1])
    return tokens[::2], names


def is_star(name: str) -> bool:
    """Return True if the name of a wildcard is that of a `*`."""
    return name.isdigit()


def _regex(texts: Sequence[str], names: Sequence[str]) -> str:
    """Return a regular expression. Its groups are atomic, so that it never backtracks.

    The text after a wildcard, up to the next `*`, is searched as a whole. The first match is
    correct: a later match would leave less text for the other wildcards.
    """
    first, *further = map(re.escape, texts)
    runs = [first]
    for number, (name, text) in enumerate(zip(names, further, strict=True), 1):
        if is_star(name):
            runs.append(text)
        elif number < len(names):
            runs[-1] += f"(?>([^.]+?){text})"
        else:
            runs[-1] += f"([^.]+?){text}"
    if len(runs) == 1:
        return runs[0]
    first, *inner, last = runs
    return first + "".join(f"(?>(.*?){run})" for run in inner) + f"(.*?){last}"
