"""Members that are parsed apart: they say what the parser of all JSON says, of every text."""

from __future__ import annotations

import json
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.errors import CorruptError

MEMBER_ROWS: dict[str, Json] = {
    "a.w": ["x", [4], 0],
    "b.w": ["x", [4], 0],
    "ü c": ["y", [], 1.5],
    "": ["x"],
}
ITEM_ROWS: list[Json] = [
    ["a", "b", "x", [4]],
    ["c", "", "y", {"flat": [0, 2]}],
    ["a", "e", "x", [4]],
]


def members(rows: Json) -> bytes:
    return strict_json.dump({"a": 1, "t": rows, "z": {"b": [2]}})


def items(rows: Json) -> bytes:
    return strict_json.dump({"a": 1, "t": rows})


def outcome(data: bytes) -> str:
    """Return what the document says with its rows put back, or that it is refused."""
    try:
        doc, text = strict_json.parse_apart(data, "t", "doc")
        if text:
            doc["t"] = rows_of(text) if text.startswith(b"{") else strict_json.parse(text, "doc")
    except CorruptError:
        return "refused"
    return sorted_repr(doc)


def rows_of(text: bytes) -> Json:
    found = strict_json.members(text, "doc")
    values = strict_json.parse_each(found.values(), "doc")
    return {name: values[row] for name, row in found.items()}


def expected(data: bytes) -> str:
    try:
        doc = strict_json.parse(data, "doc")
    except CorruptError:
        return "refused"
    return sorted_repr(doc) if isinstance(doc, dict) else "refused"


def sorted_repr(doc: dict[str, Json]) -> str:
    return repr(sorted(doc.items(), key=lambda member: member[0]))


def test_rows_that_are_alike_are_parsed_once() -> None:
    found = strict_json.members(strict_json.dump(MEMBER_ROWS), "doc")
    assert list(found) == list(MEMBER_ROWS)
    values = strict_json.parse_each(found.values(), "doc")
    assert list(values.values()) == [["x", [4], 0], ["y", [], 1.5], ["x"]]
    _, text = strict_json.parse_apart(members(MEMBER_ROWS), "t", "doc")
    assert text == strict_json.dump(MEMBER_ROWS)


def test_what_stands_around_a_document_keeps_it_from_no_short_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An index ends with a line feed: parsed as a whole it takes three times as long."""
    whole: list[bytes] = []
    monkeypatch.setattr(strict_json, "parse", lambda data, _: whole.append(data))
    for data in (b'{"a":[1],"b":{}}', b'{"a":[1],"b":{}}\n', b' {"a":[1],"b":{}}\r\n\t'):
        assert strict_json.members(data, "doc") == {"a": b"[1]", "b": b"{}"}
    assert whole == []


def test_bytes_that_are_no_text_are_told_by_their_place_in_the_document() -> None:
    for data in (b'{"a":1,"b":["\xff"],"t":[]}\n', b'{"t":[1],"bb":["\xff"]}'):
        with pytest.raises(CorruptError, match=f"doc: not UTF-8 at byte {data.index(0xFF)};"):
            strict_json.parse_apart(data, "t", "doc")
    with pytest.raises(CorruptError, match="doc: not UTF-8 at byte 13;"):
        strict_json.parse_apart(b'{"a":1,"t":["\xff"]}\n', "t", "doc")


def test_every_changed_byte_means_what_it_means_to_the_parser() -> None:
    for data in (members(MEMBER_ROWS), items(ITEM_ROWS)):
        for place in range(len(data)):
            changes = [bytes([byte]) for byte in b'"\\,:[]{}0 ax\n\x00\xff'] + [b"", b"[[", b'""']
            for change in changes:
                for width in (0, 1):
                    other = data[:place] + change + data[place + width :]
                    assert outcome(other) == expected(other), other


# Texts made of what rows are made of, so that many are almost rows.
QUOTED = ['"', '["', '"a"', '"b"', '":["', '","', '"]']
TOKENS = st.lists(
    st.sampled_from([*QUOTED, "]", "[", "],", ",", "{", "}", "\\", "\n", "1"]), max_size=12
).map("".join)


@given(TOKENS, TOKENS, TOKENS)
def test_any_text_between_means_what_it_means_to_the_parser(a: str, b: str, c: str) -> None:
    for text in (
        f'{{"a":1{a},"t":{{"n":["x",1],{b}"m":["x"]{c}}},"z":2}}',
        f'{{"a":1,"t":{{{b}}},"z":2{a}}}',
        f'{{{a},"t":{{"n":["x"]}},"z":2}}',
    ):
        assert outcome(text.encode()) == expected(text.encode())
    for text in (
        f'{{"a":1{a},"t":[["n","m","x",1],{b}["m","n","x"]{c}]}}',
        f'{{"a":1,"t":[["n","m","x"]]{b}}}',
        f'{{{a},"t":[["n","m","x"]]}}',
    ):
        assert outcome(text.encode()) == expected(text.encode())


@given(st.dictionaries(st.text(), st.sampled_from([["x", 1], ["x", 1.0], ["x", True], ["y", "z"]])))
def test_any_names_come_back_and_numbers_keep_their_type(rows: dict[str, Json]) -> None:
    data = members(cast("Json", rows))
    assert outcome(data) == expected(data)
    data = items([[name, name, *cast("list[Json]", facts)] for name, facts in rows.items()])
    assert outcome(data) == expected(data)


def test_a_key_that_occurs_twice_is_refused_however_it_is_written() -> None:
    for text in (
        '{"a":1,"t":{"n":["x"],"n":["x"]},"z":2}',
        '{"a":1,"t":{"n":["x"],"\\u006e":["x"]},"z":2}',
        '{"a":1, "t": {"n": ["x"], "n": ["x"]}, "z":2}',
        '{"t":0,"t":{"n":["x"]},"z":2}',
        '{"a":1,"t":{"n":["x"]},"z":2,"t":0}',
        '{"a":1,"t":{"n":["x"]},"z":2,"a":0}',
        '{"a":1,"a":1,"t":{"n":["x"]},"z":2}',
    ):
        with pytest.raises(CorruptError, match="duplicate key"):
            rows_of(strict_json.parse_apart(text.encode(), "t", "doc")[1])


def test_what_is_an_array_only_together_is_not_taken_for_rows() -> None:
    # `["x",[1]`, `["w"]]` and `["y"],["v"]` are three values if they are joined.
    text = '{"a":1,"t":{"n":["x",[1],"m":["w"]],"o":["y"],["v"]},"z":2}'
    with pytest.raises(CorruptError, match="not JSON"):
        strict_json.parse_apart(text.encode(), "t", "doc")


def test_a_field_of_a_part_is_not_the_documents_own() -> None:
    text = '{"b":{"a":1,"t":{"n":["x"]},"z":2},"t":{},"z":3}'
    assert strict_json.parse_apart(text.encode(), "t", "doc")[1] == b"{}"


def test_json_that_is_written_otherwise_says_the_same() -> None:
    doc = {"a": 1, "t": MEMBER_ROWS, "z": 2}
    for text in (json.dumps(doc), json.dumps(dict(reversed(doc.items())), ensure_ascii=False)):
        assert outcome(text.encode()) == expected(text.encode())


def test_too_many_values_are_refused_before_anything_is_made_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = items(cast("Json", ITEM_ROWS * 20))
    monkeypatch.setattr(strict_json, "MAX_VALUES", 100)
    monkeypatch.setattr(strict_json, "FREE_NBYTES", 5000)
    with pytest.raises(CorruptError, match="values, where 100 is the limit"):
        strict_json.parse_apart(data, "t", "doc")


def test_rows_are_told_apart_by_type() -> None:
    values = strict_json.parse_each([b"[1]", b"[1.0]", b"[true]", b"[1]"], "doc")
    assert list(values.values()) == [[1], [1.0], [True]]
    assert list(map(repr, values.values())) == ["[1]", "[1.0]", "[True]"]


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_what_is_nested_too_deep_is_refused(opening: bytes) -> None:
    with pytest.raises(CorruptError, match="nested deeper"):
        strict_json.parse_apart(b'{"t":' + opening * 100_000, "t", "doc")
