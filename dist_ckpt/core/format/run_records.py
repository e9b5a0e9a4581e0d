"""The records in a root next to its checkpoints: annotations, incarnations, requests.

A record is a line of JSON with its digest, in a file that never changes: see `docs/format.md`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.filenames import ID_LENGTH, MAX_INCARNATION, Attempt, parse_attempt
from dist_ckpt.core.format.index.index import MAX_STEP
from dist_ckpt.core.format.strict_json import (
    Json,
    Scalar,
    boolean,
    check_version,
    corrupt_error,
    fields,
    hex_digits,
    integer,
    mapping,
    number,
    quote,
    row,
    string,
)

MAX_NBYTES_OF_RECORD = 1 << 20

# The year 10,000, in seconds since 1970: calendars end there.
_END_OF_TIME = 253_402_300_800

Outcome = Literal["saved", "failed", "ended"]


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


RootRecord = Annotation | IncarnationRecord | RequestRecord | AnswerRecord
R = TypeVar("R", Annotation, IncarnationRecord, RequestRecord, AnswerRecord)

# The name in the document of each field of a record, in order.
_NAMES: Mapping[type[RootRecord], Sequence[str]] = {
    Annotation: ("step", "attempt", "kind", "values", "by", "at"),
    IncarnationRecord: ("incarnation", "id", "restored_step", "why", "by", "at"),
    RequestRecord: ("request", "start", "stop", "by", "at"),
    AnswerRecord: ("request", "outcome", "saved", "why", "by", "at"),
}
_OLD_NAMES_OF_INCARNATION = ("start", "id", "restored", "why", "by", "at")


def encode_record(record: RootRecord) -> bytes:
    """Return the document. Raises ValueError for values that JSON lacks."""
    values = (_encode(getattr(record, field.name)) for field in dataclasses.fields(record))
    doc = dict(zip(_NAMES[type(record)], values, strict=True))
    body = strict_json.dump({"format": strict_json.FORMAT, **doc})
    data = strict_json.seal(body.removesuffix(b"}"))
    if len(data) > MAX_NBYTES_OF_RECORD:
        raise ValueError(f"{len(data)} bytes, the limit is {MAX_NBYTES_OF_RECORD}")
    return data


def _encode(value: Any) -> Json:
    if isinstance(value, Attempt):
        return value.name
    if isinstance(value, tuple):
        return [_encode(part) for part in value]
    encoded: Json = dict(value) if isinstance(value, Mapping) else value
    return encoded


def decode_record(data: bytes, cls: type[R], label: str, *, is_old: bool = False) -> R:
    """Decode a document. Raises CorruptError, or IncompatibleError for a newer version.

    `is_old` decodes an incarnation in `.starts`, which dist_ckpt 0.1.0 wrote.
    """
    record = cls(*_decode(data, _OLD_NAMES_OF_INCARNATION if is_old else _NAMES[cls], label))
    if isinstance(record, AnswerRecord) and (record.outcome == "saved") != bool(record.saved):
        saved = quote(_encode(record.saved))
        raise corrupt_error(label, f"the outcome is {record.outcome!r}, and saved is {saved}")
    return record


def _decode(data: bytes, names: Sequence[str], label: str) -> list[Any]:
    """Return the fields of a record, in the order of their names."""
    if len(data) > MAX_NBYTES_OF_RECORD:
        raise corrupt_error(label, f"{len(data)} bytes, the limit is {MAX_NBYTES_OF_RECORD}")
    is_sealed = strict_json.check_seal(data, label)
    doc = mapping(strict_json.parse(data, label), label)
    check_version(doc, label)
    if not is_sealed:
        raise corrupt_error(label, "it does not end with its digest")
    _, *values, _ = fields(doc, ("format", *names, "digest"), label)
    return [_DECODERS[n](v, f"{label}, {n}") for n, v in zip(names, values, strict=True)]


def _decode_step(value: Json, label: str) -> int:
    return integer(value, 0, MAX_STEP, label)


def _decode_attempt(value: Json, label: str) -> Attempt:
    attempt = parse_attempt(string(value, label))
    if attempt is None:
        raise corrupt_error(label, f"{quote(value)} is not an attempt's name")
    return attempt


def _decode_checkpoint(value: Json, label: str) -> tuple[int, Attempt] | None:
    if value is None:
        return None
    step, attempt = row(value, 2, label)
    return _decode_step(step, label), _decode_attempt(attempt, label)


def _decode_values(value: Json, label: str) -> dict[str, Scalar]:
    values: dict[str, Scalar] = {}
    for name, scalar in mapping(value, label).items():
        if isinstance(scalar, dict | list):
            raise corrupt_error(label, f"{quote(scalar)} is neither a number nor a text")
        values[name] = scalar
    return values


def _decode_outcome(value: Json, label: str) -> str:
    if value not in ("saved", "failed", "ended"):
        raise corrupt_error(label, f"{quote(value)} is not an outcome")
    return string(value, label)


def _decode_time(value: Json, label: str) -> float:
    at = number(value, label)
    if not 0 <= at < _END_OF_TIME:
        raise corrupt_error(label, f"{quote(value)} is not a time with a date")
    return at


_DECODERS: Mapping[str, Callable[[Json, str], Any]] = {
    "step": _decode_step,
    "attempt": _decode_attempt,
    "kind": string,
    "values": _decode_values,
    **dict.fromkeys(
        ("incarnation", "start"), lambda value, label: integer(value, 1, MAX_INCARNATION, label)
    ),
    **dict.fromkeys(("id", "request"), lambda value, label: hex_digits(value, ID_LENGTH, label)),
    **dict.fromkeys(("restored_step", "restored", "saved"), _decode_checkpoint),
    "stop": boolean,
    "outcome": _decode_outcome,
    "why": string,
    "by": string,
    "at": _decode_time,
}
