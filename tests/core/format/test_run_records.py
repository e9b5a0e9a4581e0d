"""Facts, starts, requests and their answers as bytes: golden files, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.run_records import (
    Annotation,
    AnswerRecord,
    IncarnationRecord,
    RequestRecord,
    decode_record,
    encode_record,
)
from dist_ckpt.errors import CorruptError, IncompatibleError

GOLDEN = Path(__file__).parents[2] / "golden" / "root-of-version-1"
TEXT = (Path(__file__).parents[3] / "docs" / "format.md").read_text()
ATTEMPT = Attempt(2000, "0123456789abcdef")
FACT = Annotation(
    500, ATTEMPT, "metrics", {"val/loss": 0.25, "n": 3, "bad": "nan", "old": None}, "rank 0", 1.5
)
START = IncarnationRecord(2, "fedcba9876543210", (500, ATTEMPT), "the newest", "rank 0", 2.5)
FRESH = replace(START, number=1, restored=None, why="there was none")
ID = "00112233445566ff"
REQUEST = RequestRecord(ID, 2, True, "somebody", 3.5)
ANSWER = AnswerRecord(ID, "saved", (500, ATTEMPT), "it is durable", "rank 0", 4.5)
FAILED = replace(ANSWER, id="ff" * 8, outcome="failed", saved=None, why="the disk is full")
FACT_FILE = f".annotations/500/{ATTEMPT}/metrics-1-0123456789abcdef.json"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | finite | texts


def test_the_encoders_write_version_1_to_the_byte():
    assert encode_record(FACT) == (GOLDEN / FACT_FILE).read_bytes()
    assert encode_record(START) == (GOLDEN / ".incarnations/2.json").read_bytes()
    assert encode_record(FRESH) == (GOLDEN / ".incarnations/1.json").read_bytes()
    assert encode_record(REQUEST) == (GOLDEN / f".requests/request-{ID}.json").read_bytes()
    assert encode_record(ANSWER) == (GOLDEN / f".requests/answer-{ID}.json").read_bytes()
    assert encode_record(FAILED) == (GOLDEN / f".requests/answer-{FAILED.id}.json").read_bytes()


def test_the_golden_files_decode_for_ever():
    assert decode_record((GOLDEN / FACT_FILE).read_bytes(), Annotation, "f") == FACT
    assert (
        decode_record((GOLDEN / ".incarnations/2.json").read_bytes(), IncarnationRecord, "s")
        == START
    )
    assert (
        decode_record((GOLDEN / ".incarnations/1.json").read_bytes(), IncarnationRecord, "s")
        == FRESH
    )
    asked, *answers = [
        (GOLDEN / f".requests/{name}.json").read_bytes()
        for name in (f"request-{ID}", f"answer-{ID}", f"answer-{FAILED.id}")
    ]
    assert decode_record(asked, RequestRecord, "r") == REQUEST
    assert [decode_record(answer, AnswerRecord, "a") for answer in answers] == [ANSWER, FAILED]


@given(st.dictionaries(texts, scalars), texts, st.floats(0, 2e11))
def test_a_fact_decodes_to_what_was_encoded(values, by, at):
    fact = replace(FACT, values=values, by=by, at=at)
    assert decode_record(encode_record(fact), Annotation, "f") == fact


@pytest.mark.parametrize(
    ("encoded", "cls"),
    [
        (encode_record(FACT), Annotation),
        (encode_record(START), IncarnationRecord),
        (encode_record(REQUEST), RequestRecord),
        (encode_record(ANSWER), AnswerRecord),
    ],
)
def test_every_flipped_or_lost_byte_is_damage(encoded, cls):
    for place in range(len(encoded)):
        for changed in (
            encoded[:place] + bytes([encoded[place] ^ 1]) + encoded[place + 1 :],
            encoded[:place],
        ):
            with pytest.raises((CorruptError, IncompatibleError), match=r"^it: |^it, "):
                decode_record(changed, cls, "it")


def changed(encoded: bytes, **fields: Any) -> bytes:
    doc = strict_json.mapping(strict_json.parse(encoded, "it"), "it")
    del doc["digest"]
    body = strict_json.dump({**doc, **fields})
    return strict_json.seal(body.removesuffix(b"}"))


@pytest.mark.parametrize(
    "fields",
    [
        *({"step": step} for step in (-1, 1.0, True, None, 1 << 63)),
        *({"attempt": attempt} for attempt in ("a0-0123456789abcdef", "../x", None)),
        {"values": []},
        {"values": {"a": []}},
        {"values": {"a": {}}},
        {"values": None},
        {"kind": 1},
        {"by": None},
        {"at": "now"},
        {"more": 1},
    ],
)
def test_a_fact_that_makes_no_sense_is_damaged(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match=r"^it[:,]"):
        decode_record(changed(encode_record(FACT), **fields), Annotation, "it")


@pytest.mark.parametrize(
    "fields",
    [
        *({"incarnation": number} for number in (0, -1, 1_000_000, "1", None)),
        *(
            {"restored_step": where}
            for where in ([], [500], [500, "x"], ["500", ATTEMPT.name], 500)
        ),
        *({"id": own_id} for own_id in ("", "0" * 15, "A" * 16, 7)),
        {"why": None},
    ],
)
def test_a_start_that_makes_no_sense_is_damaged(fields):
    with pytest.raises(CorruptError, match=r"^it[:,]"):
        decode_record(changed(encode_record(START), **fields), IncarnationRecord, "it")


@pytest.mark.parametrize(
    "fields",
    [
        *({"request": own_id} for own_id in ("", "0" * 15, "A" * 16, 7)),
        *({"start": number} for number in (0, 1_000_000, "1", None)),
        *({"stop": stops} for stops in (0, None, "true")),
        {"by": 1},
        {"at": None},
    ],
)
def test_a_request_that_makes_no_sense_is_damaged(fields):
    with pytest.raises(CorruptError, match=r"^it[:,]"):
        decode_record(changed(encode_record(REQUEST), **fields), RequestRecord, "it")


@pytest.mark.parametrize(
    "fields",
    [
        {"request": "x"},
        *({"outcome": outcome} for outcome in ("", "done", "failed", None, ["saved"])),
        *({"saved": where} for where in (None, [500], ["500", ATTEMPT.name], [500, "x"], 500)),
        {"why": None},
    ],
)
def test_an_answer_that_makes_no_sense_is_damaged(fields):
    with pytest.raises(CorruptError, match=r"^it[:,]"):
        decode_record(changed(encode_record(ANSWER), **fields), AnswerRecord, "it")


def test_only_what_is_saved_names_a_checkpoint():
    with pytest.raises(CorruptError, match=r"the outcome is 'failed', and saved is \[500"):
        decode_record(encode_record(replace(FAILED, saved=(500, ATTEMPT))), AnswerRecord, "it")


def test_what_begins_with_x_is_free_for_others():
    assert decode_record(changed(encode_record(FACT), **{"x-mine": 1}), Annotation, "it") == FACT
    assert (
        decode_record(changed(encode_record(START), **{"x-mine": 1}), IncarnationRecord, "it")
        == START
    )


@pytest.mark.parametrize("newer", [{"version": 2, "requires": []}, {"version": 1, "requires": [1]}])
def test_a_newer_version_is_no_damage(newer):
    with pytest.raises((IncompatibleError, CorruptError), match="it"):
        decode_record(changed(encode_record(FACT), format=newer), Annotation, "it")
    with pytest.raises(IncompatibleError, match="upgrade dist_ckpt"):
        decode_record(b'{"format":{"version":2,"requires":[]}}', IncarnationRecord, "it")


def test_what_is_written_and_what_is_said_of_it_have_the_same_fields():
    section = TEXT[TEXT.index("## 8.") : TEXT.index("## 9.")]
    tables = re.split(
        r"^\| Field of an? (?:annotation|incarnation|request|answer) .*\n",
        section,
        flags=re.MULTILINE,
    )[1:]
    written = (
        encode_record(FACT),
        encode_record(START),
        encode_record(REQUEST),
        encode_record(ANSWER),
    )
    for table, encoded in zip(tables, written, strict=True):
        rows = re.findall(r"^\| (`.*?) \|", table.partition("\n\n")[0], re.MULTILINE)
        named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
        assert named == list(strict_json.mapping(strict_json.parse(encoded, "it"), "it"))
