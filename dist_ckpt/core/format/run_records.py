"""The records in a root next to its checkpoints: annotations, incarnations, requests.

A record is a line of JSON with its digest, in a file that never changes: see `docs/format.md`.
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

# The year 10,000, in seconds since 1970: calendars end there.
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
    """Values by name, of one kind, that were added to a checkpoint after its commit.

    The annotation with the highest number of its kind, then the highest id, has a name's value.
    `by` is its author, `at` the author's clock, in seconds since 1970.
    """

    step: int
    attempt: Attempt
    kind: str
    values: Mapping[str, Scalar]
    by: str
    at: float


@dataclass(frozen=True, slots=True)
class IncarnationRecord:
    """An incarnation of a run, which continued the checkpoint `restored` for the reason `why`."""

    number: int
    id: str  # random, so that the author can recognise the record
    restored: tuple[int, Attempt] | None
    why: str
    by: str
    at: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request to an incarnation to save now, and to end the run if it `stops`. `id` is random."""

    id: str
    incarnation: int
    stops: bool
    by: str
    at: float


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """The answer to a request: `saved` is the step and attempt that are durable, else None.

    "saved": all training before the request is durable. "failed": that save has failed. "ended":
    the run has ended or restarted without it. `why` is for people.
    """

    id: str
    outcome: Outcome
    saved: tuple[int, Attempt] | None
    why: str
    by: str
    at: float


def encode_annotation(annotation: Annotation) -> bytes:
    """Return the document. Raises ValueError for values that JSON lacks."""
    return _encode(
        {
            "step": annotation.step,
            "attempt": annotation.attempt.name,
            "kind": annotation.kind,
            "values": dict(annotation.values),
            "by": annotation.by,
            "at": annotation.at,
        }
    )


def decode_annotation(data: bytes, label: str) -> Annotation:
    """Decode a document. Raises CorruptError, or IncompatibleError for a newer version."""
    doc = _decode(data, label)
    _, step, attempt, kind, values, by, at, _ = fields(doc, _FACT_FIELDS, label)
    return Annotation(
        integer(step, 0, MAX_STEP, f"{label}, step"),
        _attempt(attempt, label),
        string(kind, f"{label}, kind"),
        {
            name: _scalar(value, f"{label}, values")
            for name, value in mapping(values, label).items()
        },
        string(by, f"{label}, by"),
        _time(at, f"{label}, at"),
    )


def encode_incarnation(start: IncarnationRecord) -> bytes:
    """Return the document. Raises ValueError for values that JSON lacks."""
    return _encode(
        {
            "incarnation": start.number,
            "id": start.id,
            "restored_step": _encode_checkpoint(start.restored),
            "why": start.why,
            "by": start.by,
            "at": start.at,
        }
    )


def decode_incarnation(data: bytes, label: str) -> IncarnationRecord:
    """Decode a document. Raises CorruptError, or IncompatibleError for a newer version."""
    return _incarnation(_decode(data, label), label, _INCARNATION_FIELDS)


def decode_old_incarnation(data: bytes, label: str) -> IncarnationRecord:
    """Decode a record in `.starts` of dist_ckpt 0.1.0, as `decode_incarnation` does."""
    return _incarnation(_decode(data, label), label, _OLD_INCARNATION_FIELDS)


def _incarnation(doc: dict[str, Json], label: str, names: tuple[str, ...]) -> IncarnationRecord:
    _, start, record_id, restored, why, by, at, _ = fields(doc, names, label)
    return IncarnationRecord(
        integer(start, 1, MAX_INCARNATION, f"{label}, {names[1]}"),
        hex_digits(record_id, ID_LENGTH, f"{label}, id"),
        _decode_checkpoint(restored, f"{label}, {names[3]}"),
        string(why, f"{label}, why"),
        string(by, f"{label}, by"),
        _time(at, f"{label}, at"),
    )


def encode_request(request: RequestRecord) -> bytes:
    """Return the document. Raises ValueError for values that JSON lacks."""
    return _encode(
        {
            "request": request.id,
            "start": request.incarnation,
            "stop": request.stops,
            "by": request.by,
            "at": request.at,
        }
    )


def decode_request(data: bytes, label: str) -> RequestRecord:
    """Decode a document. Raises CorruptError, or IncompatibleError for a newer version."""
    doc = _decode(data, label)
    _, request_id, start, stops, by, at, _ = fields(doc, _REQUEST_FIELDS, label)
    if not isinstance(stops, bool):
        raise corrupt_error(label, f"stop is {quoted(stops)}")
    return RequestRecord(
        hex_digits(request_id, ID_LENGTH, f"{label}, request"),
        integer(start, 1, MAX_INCARNATION, f"{label}, start"),
        stops,
        string(by, f"{label}, by"),
        _time(at, f"{label}, at"),
    )


def encode_answer(answer: AnswerRecord) -> bytes:
    """Return the document. Raises ValueError for values that JSON lacks."""
    return _encode(
        {
            "request": answer.id,
            "outcome": answer.outcome,
            "saved": _encode_checkpoint(answer.saved),
            "why": answer.why,
            "by": answer.by,
            "at": answer.at,
        }
    )


def decode_answer(data: bytes, label: str) -> AnswerRecord:
    """Decode a document. Raises CorruptError, or IncompatibleError for a newer version."""
    doc = _decode(data, label)
    _, request_id, outcome, saved, why, by, at, _ = fields(doc, _ANSWER_FIELDS, label)
    text = string(outcome, f"{label}, outcome")
    if text not in _OUTCOMES or (text == "saved") != (saved is not None):
        raise corrupt_error(
            label, f"the outcome is {quoted(outcome)}, and saved is {quoted(saved)}"
        )
    return AnswerRecord(
        hex_digits(request_id, ID_LENGTH, f"{label}, request"),
        _OUTCOMES[text],
        _decode_checkpoint(saved, f"{label}, saved"),
        string(why, f"{label}, why"),
        string(by, f"{label}, by"),
        _time(at, f"{label}, at"),
    )


def _encode_checkpoint(checkpoint: tuple[int, Attempt] | None) -> Json:
    return None if checkpoint is None else [checkpoint[0], checkpoint[1].name]


def _decode_checkpoint(value: Json, label: str) -> tuple[int, Attempt] | None:
    if value is None:
        return None
    step, attempt = row(value, 2, label)
    return integer(step, 0, MAX_STEP, label), _attempt(attempt, label)


def _time(value: Json, label: str) -> float:
    at = number(value, label)
    if not 0 <= at < _END_OF_TIME:
        raise corrupt_error(label, f"{quoted(value)} is not a time with a date")
    return at


def _encode(doc: Mapping[str, Json]) -> bytes:
    body = strict_json.dump({"format": {"version": VERSION, "requires": []}, **doc})
    data = strict_json.sealed(body.removesuffix(b"}"))
    if len(data) > MAX_NBYTES_OF_RECORD:
        raise ValueError(f"{len(data)} bytes, the limit is {MAX_NBYTES_OF_RECORD}")
    return data


def _decode(data: bytes, label: str) -> dict[str, Json]:
    if len(data) > MAX_NBYTES_OF_RECORD:
        raise corrupt_error(label, f"{len(data)} bytes, the limit is {MAX_NBYTES_OF_RECORD}")
    is_sealed = strict_json.check_seal(data, label)
    doc = mapping(strict_json.parse(data, label), label)
    check_version(doc, label)
    if not is_sealed:
        raise corrupt_error(label, "it does not end with its digest")
    return doc


def _attempt(value: Json, label: str) -> Attempt:
    attempt = parse_attempt(string(value, f"{label}, attempt"))
    if attempt is None:
        raise corrupt_error(label, f"{quoted(value)} is not an attempt's name")
    return attempt


def _scalar(value: Json, label: str) -> Scalar:
    if isinstance(value, dict | list):
        raise corrupt_error(label, f"{quoted(value)} is neither a number nor a text")
    return value
