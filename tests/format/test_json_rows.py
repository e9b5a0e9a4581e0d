"""Rows by columns: they say what the parser of all JSON says, of every text."""

from __future__ import annotations

import json
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.errors import CorruptError
from dist_ckpt.format import json_rows, strict_json
from dist_ckpt.format.json_rows import Table
from dist_ckpt.format.strict_json import Json

MEMBERS = Table("t", ',"t":{', ("},", '"z":'), start='"', between='":["', num_names=1)
ITEMS = Table("t", ',"t":[', ("]", "}"), start='["', between='","', num_names=2)

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


def outcome(data: bytes, table: Table) -> str:
    """Return what the document says with its rows put back, or that it is refused."""
    try:
        doc, rows = json_rows.parse(data, table, "doc")
    except CorruptError:
        return "refused"
    if rows is None:
        return repr(doc)
    *names, facts = *rows.names, [cast("list[Json]", rows.facts[kind]) for kind in rows.kinds]
    value: Json = [[*first, *rest] for *first, rest in zip(*names, facts, strict=True)]
    if table.is_object:
        value = dict(zip(names[0], facts, strict=True))
    assert isinstance(doc, dict)
    assert doc[table.field] is None
    return repr({**doc, table.field: value})


def expected(data: bytes) -> str:
    try:
        return repr(strict_json.parse(data, "doc"))
    except CorruptError:
        return "refused"


def is_taken(data: bytes, table: Table) -> bool:
    return json_rows.parse(data, table, "doc")[1] is not None


def test_rows_that_are_alike_are_parsed_once() -> None:
    _, rows = json_rows.parse(members(MEMBER_ROWS), MEMBERS, "doc")
    assert rows is not None
    assert list(rows.names[0]) == list(MEMBER_ROWS)
    assert list(rows.facts.values()) == [["x", [4], 0], ["y", [], 1.5], ["x"]]
    _, rows = json_rows.parse(items(ITEM_ROWS), ITEMS, "doc")
    assert rows is not None
    assert [list(names) for names in rows.names] == [["a", "c", "a"], ["b", "", "e"]]
    assert list(rows.facts.values()) == [["x", [4]], ["y", {"flat": [0, 2]}]]


def test_every_changed_byte_means_what_it_means_to_the_parser() -> None:
    for data, table in ((members(MEMBER_ROWS), MEMBERS), (items(ITEM_ROWS), ITEMS)):
        assert is_taken(data, table)
        for place in range(len(data)):
            changes = [bytes([byte]) for byte in b'"\\,:[]{}0 ax\n\x00\xff'] + [b"", b"[[", b'""']
            for change in changes:
                for width in (0, 1):
                    other = data[:place] + change + data[place + width :]
                    assert outcome(other, table) == expected(other), other


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
        assert outcome(text.encode(), MEMBERS) == expected(text.encode())
    for text in (
        f'{{"a":1{a},"t":[["n","m","x",1],{b}["m","n","x"]{c}]}}',
        f'{{"a":1,"t":[["n","m","x"]]{b}}}',
        f'{{{a},"t":[["n","m","x"]]}}',
    ):
        assert outcome(text.encode(), ITEMS) == expected(text.encode())


@given(st.dictionaries(st.text(), st.sampled_from([["x", 1], ["x", 1.0], ["x", True], ["y", "z"]])))
def test_any_names_come_back_and_numbers_keep_their_type(rows: dict[str, Json]) -> None:
    data = members(cast("Json", rows))
    assert outcome(data, MEMBERS) == expected(data)
    data = items([[name, name, *cast("list[Json]", facts)] for name, facts in rows.items()])
    assert outcome(data, ITEMS) == expected(data)


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
            json_rows.parse(text.encode(), MEMBERS, "doc")


def test_what_is_an_array_only_together_is_not_taken_for_rows() -> None:
    # `["x",[1]`, `["w"]]` and `["y"],["v"]` are three values if they are joined.
    text = '{"a":1,"t":{"n":["x",[1],"m":["w"]],"o":["y"],["v"]},"z":2}'
    with pytest.raises(CorruptError, match="not JSON"):
        json_rows.parse(text.encode(), MEMBERS, "doc")


def test_a_field_of_a_part_is_not_the_documents_own() -> None:
    text = '{"b":{"a":1,"t":{"n":["x"]},"z":2},"t":{},"z":3}'
    assert outcome(text.encode(), MEMBERS) == expected(text.encode())
    assert json_rows.parse(text.encode(), MEMBERS, "doc")[1] is None
    with pytest.raises(CorruptError, match="not JSON"):
        json_rows.parse(b'{,"t":{"n":["x"]},"z":2}', MEMBERS, "doc")


def test_json_that_is_written_otherwise_is_parsed_row_by_row() -> None:
    doc = {"a": 1, "t": MEMBER_ROWS, "z": 2}
    for text in (json.dumps(doc), json.dumps(dict(reversed(doc.items())), ensure_ascii=False)):
        assert not is_taken(text.encode(), MEMBERS)
        assert outcome(text.encode(), MEMBERS) == expected(text.encode())


def test_too_many_values_are_refused_before_anything_is_made_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = items(cast("Json", ITEM_ROWS * 20))
    monkeypatch.setattr(strict_json, "MAX_VALUES", 100)
    monkeypatch.setattr(strict_json, "FREE_NBYTES", 5000)
    with pytest.raises(CorruptError, match="values, where 100 is the limit"):
        json_rows.parse(data, ITEMS, "doc")


def test_rows_that_were_parsed_are_told_apart_by_type() -> None:
    rows = json_rows.gather((("a", "b", "c", "d"),), [[1], [1.0], [True], [1]])
    assert [rows.facts[kind] for kind in rows.kinds] == [[1], [1.0], [True], [1]]
    assert len(rows.facts) == 3
