"""What lies in a root beside its checkpoints: facts about them that come later, starts, requests.

Each is one line of JSON that ends with its digest, as an index does, in a file that is created once
and never changes. `docs/format.md` has the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.filenames import ID_LENGTH, MAX_INCARNATION, Attempt, parse_attempt
from dist_ckpt.core.format.index.index import MAX_STEP
from dist_ckpt.core.format.strict_json import (
    VERSION,
    Json,
    Scalar,
    check_version,
    corrupt_error,
    fields,
    hex_digits,
    integer,
    mapping,
    number,
    quoted,
    row,
    string,
)

MAX_NBYTES_OF_RECORD = 1 << 20

# The year 10,000, in seconds since 1970: no calendar goes on.
_END_OF_TIME = 253_402_300_800

_FACT_FIELDS = ("format", "step", "attempt", "kind", "values", "by", "at", "digest")
_INCARNATION_FIELDS = (
    *("format", "incarnation", "id", "restored_step", "why", "by", "at"),
    "digest",
)
_OLD_INCARNATION_FIELDS = ("format", "start", "id", "restored", "why", "by", "at", "digest")
_REQUEST_FIELDS = ("format", "request", "start", "stop", "by", "at", "digest")
_ANSWER_FIELDS = ("format", "request", "outcome", "saved", "why", "by", "at", "digest")

Outcome = Literal["saved", "failed", "ended"]
_OUTCOMES: dict[str, Outcome] = {"saved": "saved", "failed": "failed", "ended": "ended"}


@dataclass(frozen=True, slots=True)
class Annotation:
    """What became known of a checkpoint after its commit: values by name, of one kind.

    Of a kind, the fact with the highest number, then the highest id, tells what a name's value is.
    `by` says who wrote it, `at` when, by its clock, in seconds since 1970.
    """

    step: int
    attempt: Attempt
    kind: str
    values: Mapping[str, Scalar]
    by: str
    at: float


@dataclass(frozen=True, slots=True)
class IncarnationRecord:
    """One start of a run that writes into a root; `restored`: the step and attempt it went on from.

    `id` is random: by it who made the record knows it again. `why` says why it was that checkpoint.
    """

    number: int
    id: str
    restored: tuple[int, Attempt] | None
    why: str
    by: str
    at: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request to the incarnation of this number to save now, and to end the run if it `stops`.

    `id` is random, and in the names of both records.
    """

    id: str
    incarnation: int
    stops: bool
    by: str
    at: float


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """What became of a request: `saved` is the step and attempt that are durable, else None.

    "saved": all that was trained when it was asked for is durable. "failed": that save has failed.
    "ended": the run has ended, or was started again, without it. `why` says more, for people.
    """

    id: str
    outcome: Outcome
    saved: tuple[int, Attempt] | None
    why: str
    by: str
    at: float


def encode_annotation(fact: Annotation) -> bytes:
    """Return the document. ValueError if it holds what JSON cannot."""
    return _encode(
        {
            "step": fact.step,
            "attempt": fact.attempt.name,
            "kind": fact.kind,
            "values": dict(fact.values),
            "by": fact.by,
            "at": fact.at,
        }
    )


def decode_annotation(data: bytes, what: str) -> Annotation:
    """Return what a document says. CorruptError; IncompatibleError if it is of a newer version."""
    doc = _decode(data, what)
    _, step, attempt, kind, values, by, at, _ = fields(doc, _FACT_FIELDS, what)
    return Annotation(
        integer(step, 0, MAX_STEP, f"{what}, step"),
        _attempt(attempt, what),
        string(kind, f"{what}, kind"),
        {name: _scalar(value, f"{what}, values") for name, value in mapping(values, what).items()},
        string(by, f"{what}, by"),
        _time(at, f"{what}, at"),
    )


def encode_incarnation(start: IncarnationRecord) -> bytes:
    """Return the document. ValueError if it holds what JSON cannot."""
    return _encode(
        {
            "incarnation": start.number,
            "id": start.id,
            "restored_step": _where(start.restored),
            "why": start.why,
            "by": start.by,
            "at": start.at,
        }
    )


def decode_incarnation(data: bytes, what: str) -> IncarnationRecord:
    """Return what a document says. CorruptError; IncompatibleError if it is of a newer version."""
    doc = _decode(data, what)
    return _incarnation(doc, what, _INCARNATION_FIELDS)


def decode_old_incarnation(data: bytes, what: str) -> IncarnationRecord:
    """Return what a record in `.starts` of dist_ckpt 0.1.0 says. Raises as `decode_incarnation`."""
    return _incarnation(_decode(data, what), what, _OLD_INCARNATION_FIELDS)


def _incarnation(doc: dict[str, Json], what: str, names: tuple[str, ...]) -> IncarnationRecord:
    _, start, own_id, restored, why, by, at, _ = fields(doc, names, what)
    return IncarnationRecord(
        integer(start, 1, MAX_INCARNATION, f"{what}, {names[1]}"),
        hex_digits(own_id, ID_LENGTH, f"{what}, id"),
        _decoded_where(restored, f"{what}, {names[3]}"),
        string(why, f"{what}, why"),
        string(by, f"{what}, by"),
        _time(at, f"{what}, at"),
    )


def encode_request(request: RequestRecord) -> bytes:
    """Return the document. ValueError if it holds what JSON cannot."""
    return _encode(
        {
            "request": request.id,
            "start": request.incarnation,
            "stop": request.stops,
            "by": request.by,
            "at": request.at,
        }
    )


def decode_request(data: bytes, what: str) -> RequestRecord:
    """Return what a document says. CorruptError; IncompatibleError if it is of a newer version."""
    doc = _decode(data, what)
    _, own_id, start, stops, by, at, _ = fields(doc, _REQUEST_FIELDS, what)
    if not isinstance(stops, bool):
        raise corrupt_error(what, f"stop is {quoted(stops)}")
    return RequestRecord(
        hex_digits(own_id, ID_LENGTH, f"{what}, request"),
        integer(start, 1, MAX_INCARNATION, f"{what}, start"),
        stops,
        string(by, f"{what}, by"),
        _time(at, f"{what}, at"),
    )


def encode_answer(answer: AnswerRecord) -> bytes:
    """Return the document. ValueError if it holds what JSON cannot."""
    return _encode(
        {
            "request": answer.id,
            "outcome": answer.outcome,
            "saved": _where(answer.saved),
            "why": answer.why,
            "by": answer.by,
            "at": answer.at,
        }
    )


def decode_answer(data: bytes, what: str) -> AnswerRecord:
    """Return what a document says. CorruptError; IncompatibleError if it is of a newer version."""
    doc = _decode(data, what)
    _, own_id, outcome, saved, why, by, at, _ = fields(doc, _ANSWER_FIELDS, what)
    text = string(outcome, f"{what}, outcome")
    if text not in _OUTCOMES or (text == "saved") != (saved is not None):
        raise corrupt_error(what, f"the outcome is {quoted(outcome)}, and saved is {quoted(saved)}")
    return AnswerRecord(
        hex_digits(own_id, ID_LENGTH, f"{what}, request"),
        _OUTCOMES[text],
        _decoded_where(saved, f"{what}, saved"),
        string(why, f"{what}, why"),
        string(by, f"{what}, by"),
        _time(at, f"{what}, at"),
    )


def _where(where: tuple[int, Attempt] | None) -> Json:
    return None if where is None else [where[0], where[1].name]


def _decoded_where(value: Json, what: str) -> tuple[int, Attempt] | None:
    if value is None:
        return None
    step, attempt = row(value, 2, what)
    return integer(step, 0, MAX_STEP, what), _attempt(attempt, what)


def _time(value: Json, what: str) -> float:
    at = number(value, what)
    if not 0 <= at < _END_OF_TIME:
        raise corrupt_error(what, f"{quoted(value)} is no time that has a date")
    return at


def _encode(doc: Mapping[str, Json]) -> bytes:
    body = strict_json.dump({"format": {"version": VERSION, "requires": []}, **doc})
    data = strict_json.sealed(body.removesuffix(b"}"))
    if len(data) > MAX_NBYTES_OF_RECORD:
        raise ValueError(f"{len(data)} bytes, the limit is {MAX_NBYTES_OF_RECORD}")
    return data


def _decode(data: bytes, what: str) -> dict[str, Json]:
    if len(data) > MAX_NBYTES_OF_RECORD:
        raise corrupt_error(what, f"{len(data)} bytes, the limit is {MAX_NBYTES_OF_RECORD}")
    is_sealed = strict_json.check_seal(data, what)
    doc = mapping(strict_json.parse(data, what), what)
    check_version(doc, what)
    if not is_sealed:
        raise corrupt_error(what, "it does not end with its digest")
    return doc


def _attempt(value: Json, what: str) -> Attempt:
    attempt = parse_attempt(string(value, f"{what}, attempt"))
    if attempt is None:
        raise corrupt_error(what, f"{quoted(value)} is no name of an attempt")
    return attempt


def _scalar(value: Json, what: str) -> Scalar:
    if isinstance(value, dict | list):
        raise corrupt_error(what, f"{quoted(value)} is neither a number nor a text")
    return value
