import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format import strict_json
from dist_ckpt.errors import CorruptError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(strict_json.MIN_INTEGER, strict_json.MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(), below, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_what_is_dumped_parses_to_the_same(doc):
    assert repr(strict_json.parse(strict_json.dump(doc), "doc")) == repr(doc)


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (b"", "not JSON"),
        (b" ", "not JSON"),
        (b"{", "not JSON"),
        (b"{}{}", "not JSON"),
        (b"{} x", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        ("{}".encode("utf-16"), "not UTF-8 at byte 0"),
        ("{}".encode("utf-32"), "not UTF-8 at byte 0"),
        (b'{"\xff": 1}', "not UTF-8 at byte 2"),
        (b'"\xed\xa0\x80"', "not UTF-8 at byte 1"),
        (b'{"a": 1, "a": 1}', "duplicate key 'a'"),
        (b'[{"b": {"a": 1, "c": 2, "a": 3}}]', "duplicate key 'a'"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b"[Infinity]", "Infinity is not"),
        (b"[-Infinity]", "-Infinity is not"),
        (b"[1e999]", "number out of range"),
        (b"[-1e999]", "number out of range"),
        (b"[18446744073709551616]", "integer out of range"),
        (b"[-9223372036854775809]", "integer out of range"),
        (b"-9223372036854775809", "integer out of range"),
        (b"18446744073709551616", "integer out of range"),
        (b'{"a":\n18446744073709551616}', "integer out of range"),
        (b"[" + b"9" * 4000 + b"]", "integer out of range"),
        (b"[" + b"9" * 5000 + b"]", "integer out of range"),
        (b"[01]", "not JSON"),
        (b'"\\ud800"', "half a surrogate pair"),
        (b'{"\\uDC00": 1}', "half a surrogate pair"),
        (b"[" * 65 + b"]" * 65, "nested deeper than 64"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested deeper than 64"),
        (b"[" * 100_000 + b"]" * 100_000, "nested deeper than 64"),
        (b"[" * 100_000, "nested deeper than 64"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(data, fact):
    with pytest.raises(CorruptError, match=r"^doc: .*; restore it") as raised:
        strict_json.parse(data, "doc")
    assert fact in str(raised.value)


def test_what_would_become_too_many_values_is_not_parsed_nor_written(monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_VALUES", 100)
    monkeypatch.setattr(strict_json, "FREE_NBYTES", 5000)
    taken: strict_json.Json = [[]] * 49
    assert strict_json.parse(strict_json.dump(taken), "doc") == taken
    docs: list[Any] = [[[]] * 51, [{}] * 51, list(range(101)), {str(n): n for n in range(101)}]
    for doc in docs:
        data = json.dumps(doc).encode()
        with pytest.raises(CorruptError, match="values, where 100 is the limit"):
            strict_json.parse(data, "doc")
        with pytest.raises(ValueError, match="values, where 100 is the limit"):
            strict_json.dump(doc)


def test_the_limits_themselves_are_taken():
    assert strict_json.parse(b"[" * 64 + b"]" * 64, "doc")
    assert strict_json.parse(b"[18446744073709551615,-9223372036854775808]", "doc") == [
        strict_json.MAX_INTEGER,
        strict_json.MIN_INTEGER,
    ]
    assert strict_json.parse(b'"\\ud83d\\ude00"', "doc") == "\U0001f600"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {"\udfff": 1}])
def test_what_json_cannot_hold_is_not_dumped(value):
    with pytest.raises(ValueError):  # noqa: PT011  # two kinds of it, from the standard library
        strict_json.dump([value])


def test_fields_must_be_there_and_known_but_for_extensions():
    assert strict_json.fields({"b": 1, "a": 2, "x-c": 3}, ("a", "b"), "doc") == [2, 1]
    with pytest.raises(CorruptError, match="no field 'b'"):
        strict_json.fields({"a": 1}, ("a", "b"), "doc")
    with pytest.raises(CorruptError, match="no field 'b'"):
        strict_json.fields({"a": 1, "c": 1}, ("a", "b"), "doc")
    with pytest.raises(CorruptError, match="unknown field 'c'"):
        strict_json.fields({"a": 1, "c": 1}, ("a",), "doc")
    with pytest.raises(CorruptError, match="not an object"):
        strict_json.fields([], (), "doc")


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [1], -1, 11])
def test_an_integer_is_neither_a_bool_nor_a_float_nor_out_of_range(value):
    with pytest.raises(CorruptError, match="is not an integer from 0 to 10"):
        strict_json.integer(value, 0, 10, "doc")


@pytest.mark.parametrize(
    ("text", "count"),
    [("{}", 3000), ("[]", 3000), ("[" * 20 + "]" * 20, 150), ('{"":0}', 2000), ('{"a":{}}', 2000)],
    ids=["empty dicts", "empty lists", "nested", "dicts of one", "dicts of dicts"],
)
def test_a_document_that_would_take_far_more_than_its_bytes_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, text: str, count: int
) -> None:
    data = f"[{','.join([text] * count)}]".encode()
    assert strict_json.parse(data, "doc")
    monkeypatch.setattr(strict_json, "FREE_NBYTES", 1 << 15)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=r"bytes would take more than \d+ bytes of memory"):
            strict_json.parse(data, "doc")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(data)
    with pytest.raises(ValueError, match=r"bytes would take more than \d+ bytes of memory"):
        strict_json.dump(json.loads(data))


@pytest.mark.parametrize(
    "doc",
    [
        *([{}] * 3000, [[]] * 3000, [[[[]]]] * 1000, [{"": 0}] * 1000, [{"a": {"b": {}}}] * 1000),
        *(list(range(1000, 5000)), [0.5] * 3000, ["ab"] * 3000, ["ab\U0001f600" * 10] * 100),
        *({str(n): n for n in range(3000)}, {str(n): "abc" for n in range(3000)}),
        {f"model.layers.{n}.weight": ["float32", [4096, 4096], n, 0, 1] for n in range(1000)},
    ],
    ids=[
        *("empty dicts", "empty lists", "nested lists", "dicts of one", "nested dicts"),
        *("integers", "floats", "strings", "no ASCII", "numbers by name", "strings by name"),
        "tensors",
    ],
)
def test_what_a_document_costs_is_known_from_its_bytes(doc: strict_json.Json) -> None:
    data = strict_json.dump(doc)
    tracemalloc.start()
    try:
        parsed = strict_json.parse(data, "doc")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert parsed == doc
    assert peak <= 1.3 * strict_json.memory_cost(data)
    assert strict_json.memory_cost(data) <= 3 * peak
