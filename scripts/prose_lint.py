"""Check the prose of the project: docs, docstrings, comments and error messages.

    python scripts/prose_lint.py            counts, and the hits of each kind that is over its limit
    python scripts/prose_lint.py --all      every hit

The rules are regular expressions for constructions that a reader of English as a third language
must read twice. They do not make a sentence good. Rewrite a hit as a plain sentence: a subject, a
verb, at most 25 words. A limit only goes down.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["docs", "help", "messages", "docstrings", "comments"]

ROOT = Path(__file__).parents[1]
LIMITS: dict[Kind, int] = {"docs": 0, "help": 0, "messages": 0, "docstrings": 51, "comments": 3}
MOST_WORDS = 25
VERBS_AFTER_WHO = (
    "reads? saves? loads? waits? writes? has is was asks? wants? uses? comes? fails? looks? tells? "
    "decides? breaks? calls? knows? removes? gives? holds? needs? starts? stands? may must"
).replace(" ", "|")
WORDS_AFTER_WHAT = (
    "is was has lies they it a the one comes cannot can needs others ranks stands no who such "
    "fails of"
).replace(" ", "|")
LONG = f"a sentence over {MOST_WORDS} words"
RULES = {
    '"who" as a noun': (
        r"(?:^|[.;:(] |, )(?:for |of |to |by |from )?[Ww]ho (?!is who)"
        rf"(?:{VERBS_AFTER_WHO})\b(?![^.]*\?)"
    ),
    '"what" as a noun': (
        r"(?:^|\. |; |: )(?:(?:Of|For|From|To|In|With) )?[Ww]hat "
        rf"(?:{WORDS_AFTER_WHAT})\b(?![^.]*\?)"
    ),
    'a leading "Of"': r"(?:^|[.;:] )Of (?!course)[a-z]",
    '"of ours", "its own" as nouns': r"\b(?:of|than|are|is) (?:ours|theirs|its own|their own)\b",
    '"is told", "tells what"': (
        r"\b(?:is|are|was|were|be|been|has|have|had|not|so) told\b"
        r"|\btells? (?:what|how|which|that|of|it|all|them)\b"
    ),
    '"beside"': r"\bbeside\b",
    '"otherwise than", "so many", "as well"': r"\botherwise than\b|\bso many\b|\bas well\b[.,;)]",
    '"it is so", "it is of use"': r"\bit is (?:so|fine|of use|of no)\b",
    '"nobody", "whoever"': r"\b(?:[Nn]obody|[Ss]omebody|Whoever|whoever)\b",
    '"Say whether", "Return what"': r"\bSays? (?:whether|what|which|how)\b|\bReturn what\b",
    '"is no <noun>"': r"\b(?:is|are|was|were) no (?!longer|more|less)[a-z]+",
    '"is to be done"': r"\b(?:is|are|was|were) to (?:be )?[a-z]+(?:d|[kvt]e)\b",
    '"what is there", "is left."': (
        r"\b(?:is|are|was|were) (?:there|left|gone)\b(?= (?:is|that|who|of|[.,;:)]))"
        r"|\b(?:is|are) there[.,;:)]"
    ),
    '"comes to"': r"\b(?:comes?|came) to\b(?! an? (?:end|stop))",
    '"goes on"': r"\b(?:go|goes|going|went|gone) on\b",
    '"lies in"': (
        r"\b(?:lies|lie|lay|lying) (?:in|at|on|beside|below|above|where|there|with|here)\b"
        r"|\bwhere (?:it|they|[a-z]+) lies?\b"
    ),
    '"stands in"': r"\b(?:stands?|stood) (?:in|for|on|there|at|under|as|still)\b",
    '"puts what"': r"\b(?:puts|put) (?:what|it|them|an?|the|one|into|no)\b",
    "a rank that knows or asks": (
        r"\b(?:[Rr]anks?|[Ww]riters?|[Tt]rainers?|[Cc]oordinator|[Tt]hreads?) "
        r"(?:knows?|asks?|wants?|wish(?:es)?|says?|tells?|looks?|sees?|hears?|thinks?)\b"
    ),
}


@dataclass(frozen=True)
class Text:
    """One docstring, comment, message or page, and the line where it begins."""

    kind: Kind
    path: Path
    line: int
    content: str


@dataclass(frozen=True)
class Hit:
    """One sentence that a rule is against."""

    text: Text
    rule: str
    excerpt: str

    def __str__(self) -> str:
        return f"{self.text.path}:{self.text.line}: {self.rule}: ...{self.excerpt}..."


def pages(root: Path) -> Iterator[Text]:
    """Yield the pages of the documentation, without code blocks and comments."""
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
    for path in (*(root / name for name in names), *sorted((root / "docs").rglob("*.md"))):
        content = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        content = re.sub(r"<!--.*?-->", "", content, flags=re.DOTALL)
        yield Text("docs", path.relative_to(root), 1, content)


def docstrings(path: Path, tree: ast.Module) -> Iterator[Text]:
    """Yield the docstrings of a module. Those of commands are their `--help`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            content = ast.get_docstring(node) or ""
            is_help = path.match("cli/**/*.py") and getattr(node, "decorator_list", [])
            yield Text("help" if is_help else "docstrings", path, node.body[0].lineno, content)


def strings(*nodes: ast.expr) -> str:
    """Return the string constants below some nodes, joined."""
    parts = [part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return " ".join(part.value for part in parts if isinstance(part.value, str))


def messages(path: Path, tree: ast.Module) -> Iterator[Text]:
    """Yield the texts of raised exceptions, and the `help=` texts of options."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield Text("messages", path, node.lineno, strings(*node.exc.args))
        elif isinstance(node, ast.keyword) and node.arg in {"help", "short_help", "epilog"}:
            yield Text("help", path, node.lineno, strings(node.value))


def comments(path: Path, source: str) -> Iterator[Text]:
    """Yield each block of comment lines."""
    block: list[str] = []
    for number, line in enumerate([*source.split("\n"), ""], 1):
        comment = re.match(r"\s*# (?!noqa|type:)(.*)", line)
        if comment:
            block.append(comment[1])
        elif block:
            yield Text("comments", path, number - len(block), " ".join(block))
            block = []


def texts(root: Path) -> Iterator[Text]:
    """Yield everything that is checked."""
    yield from pages(root)
    for path in sorted((root / "dist_ckpt").rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        name = path.relative_to(root)
        yield from docstrings(name, tree)
        yield from messages(name, tree)
        yield from comments(name, source)


def hits(text: Text) -> Iterator[Hit]:
    """Yield the hits of one text, paragraph by paragraph."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-|*#])", text.content):
        flat = re.sub(r"\s+", " ", paragraph).strip()
        for rule, pattern in RULES.items():
            for match in re.finditer(pattern, flat):
                yield Hit(text, rule, flat[max(0, match.start() - 30) : match.end() + 40])
        # Rows of a table, and what follows a backspace in a help, are no sentences.
        if not flat.startswith(("|", "\b")):
            for sentence in re.split(r"(?<=[.!?]) +", flat):
                if len(sentence.split()) > MOST_WORDS:
                    yield Hit(text, LONG, sentence[:70])


def main() -> int:
    """Print the hits and return 1 if a kind of text has more than its limit."""
    every = [hit for text in texts(ROOT) for hit in hits(text)]
    counts = Counter(hit.text.kind for hit in every)
    over = {kind for kind, limit in LIMITS.items() if counts[kind] > limit}
    for hit in every:
        if "--all" in sys.argv or hit.text.kind in over:
            print(hit)
    if over or "--all" in sys.argv:
        for kind, limit in LIMITS.items():
            print(f"{kind}: {counts[kind]} hits, at most {limit} allowed")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
