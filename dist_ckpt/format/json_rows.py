"""A fast way to parse rows of JSON that are mostly alike, as those of an index and of headers are.

An index and a header are mostly rows, one a tensor. To parse each and look at it costs more than
all the rest. So rows that are written as we write them are cut at what stands between them, and
of those that are alike one is parsed.

Nothing is guessed: what is not parsed has been put together again and compared. Whatever is written
otherwise is parsed as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt.errors import CorruptError
from dist_ckpt.format import strict_json
from dist_ckpt.format.strict_json import Json


@dataclass(frozen=True, slots=True)
class Table:
    """The field of a document that has the rows, and how we write it.

    It lies between `before` and the two parts of `after`, of which the first is its end. A row is
    `start`, names with `between` after each, and the rest of an array that begins with a string.
    In an object the first name is the key.
    """

    field: str
    before: str
    after: tuple[str, str]
    start: str
    between: str
    num_names: int

    @property
    def is_object(self) -> bool:
        """Say whether the field is an object, not an array."""
        return self.after[0].startswith("}")


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of `names`, and of each row its kind: a key of `facts`, which has the rest of it."""

    names: Sequence[Sequence[str]]
    kinds: Sequence[str]
    facts: Mapping[str, Json]


def parse(data: bytes, table: Table, what: str) -> tuple[Json, Rows | None]:
    """Parse a document as `strict_json.parse` does; the rows by columns if that can be.

    Then the field is None in the document.
    """
    return _parse_around(data, table, what) or (strict_json.parse(data, what), None)


def gather(names: Sequence[Sequence[str]], facts: Sequence[Json]) -> Rows:
    """Return rows that were parsed one by one."""
    # As text, for to Python 1 == True == 1.0.
    kinds = list(map(repr, facts))
    return Rows(names, kinds, dict(zip(kinds, facts, strict=True)))


def _parse_around(data: bytes, table: Table, what: str) -> tuple[Json, Rows] | None:
    strict_json.check_size(data, what)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    before, _, rest = text.partition(table.before)
    end, opening = table.after
    body, _, after = rest.rpartition(end + opening)
    rows = _take(body, table)
    if rows is None:
        return None
    try:
        # Two objects without the field: so it is a field of the document itself, of no part of it.
        first = strict_json.mapping(strict_json.parse(f"{before}}}".encode(), what), what)
        last = strict_json.mapping(strict_json.parse(f"{{{opening}{after}".encode(), what), what)
    except CorruptError:
        return None
    doc = {**first, table.field: None, **last}
    # `{,"tensors"` is no JSON, and a key that occurs twice is damage.
    return (doc, rows) if first and len(doc) == len(first) + 1 + len(last) else None


def _take(text: str, table: Table) -> Rows | None:
    """Return the rows of a text that is nothing else, or None if it must be parsed."""
    if not text.startswith(table.start) or not text.endswith("]"):
        return None
    lines = text[len(table.start) : -1].split(f"],{table.start}")
    parts = [line.split(table.between, table.num_names) for line in lines]
    try:
        *names, kinds = zip(*parts, strict=True)
    except ValueError:  # some have fewer names than others
        return None
    if len(names) != table.num_names or not all(map(_need_no_escapes, names)):
        return None
    if table.is_object and len(set(names[0])) < len(names[0]):
        return None
    facts = _parse_kinds(list(dict.fromkeys(kinds)))
    return None if facts is None else Rows(names, kinds, facts)


def _need_no_escapes(names: Sequence[str]) -> bool:
    joined = "".join(names)
    return strict_json.text_of(joined) == f'"{joined}"'


def _parse_kinds(kinds: Sequence[str]) -> dict[str, Json] | None:
    texts = [f'["{kind}]' for kind in kinds]
    try:
        parsed = strict_json.array(strict_json.parse(f"[{','.join(texts)}]".encode(), ""), "")
    except CorruptError:
        return None
    # Together they may be an array where each alone is no value.
    if list(map(strict_json.text_of, parsed)) != texts:
        return None
    return dict(zip(kinds, parsed, strict=True))
