"""What lies in a root beside its checkpoints: facts about them that come later, and starts.

Each is one line of JSON that ends with its digest, as an index does, in a file that is created once
and never changes. `docs/format.md` has the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dist_ckpt.format import strict_json
from dist_ckpt.format.filenames import ID_LENGTH, MAX_START, Attempt, parse_attempt
from dist_ckpt.format.index import MAX_STEP
from dist_ckpt.format.strict_json import (
    VERSION,
    Json,
    Scalar,
    check_version,
    corrupt,
    fields,
    hex_digits,
    integer,
    mapping,
    number,
    row,
    shown,
    string,
)

MAX_NBYTES_OF_RECORD = 1 << 20

_FACT_FIELDS = ("format", "step", "attempt", "kind", "values", "by", "at", "digest")
_START_FIELDS = ("format", "start", "id", "restored", "why", "by", "at", "digest")


@dataclass(frozen=True, slots=True)
class Fact:
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
class RunStart:
    """One start of a run that writes into a root; `restored`: the step and attempt it went on from.

    `id` is random: by it who made the record knows it again. `why` says why it was that checkpoint.
    """

    number: int
    id: str
    restored: tuple[int, Attempt] | None
    why: str
    by: str
    at: float


def encode_fact(fact: Fact) -> bytes:
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


def decode_fact(data: bytes, what: str) -> Fact:
    """Return what a document says. CorruptError; IncompatibleError if it is of a newer version."""
    doc = _decode(data, what)
    _, step, attempt, kind, values, by, at, _ = fields(doc, _FACT_FIELDS, what)
    return Fact(
        integer(step, 0, MAX_STEP, f"{what}, step"),
        _attempt(attempt, what),
        string(kind, f"{what}, kind"),
        {name: _scalar(value, f"{what}, values") for name, value in mapping(values, what).items()},
        string(by, f"{what}, by"),
        number(at, f"{what}, at"),
    )


def encode_start(start: RunStart) -> bytes:
    """Return the document. ValueError if it holds what JSON cannot."""
    restored: Json = None
    if start.restored is not None:
        step, attempt = start.restored
        restored = [step, attempt.name]
    return _encode(
        {
            "start": start.number,
            "id": start.id,
            "restored": restored,
            "why": start.why,
            "by": start.by,
            "at": start.at,
        }
    )


def decode_start(data: bytes, what: str) -> RunStart:
    """Return what a document says. CorruptError; IncompatibleError if it is of a newer version."""
    doc = _decode(data, what)
    _, start, own_id, restored, why, by, at, _ = fields(doc, _START_FIELDS, what)
    where = None
    if restored is not None:
        step, attempt = row(restored, 2, f"{what}, restored")
        where = integer(step, 0, MAX_STEP, f"{what}, restored"), _attempt(attempt, what)
    return RunStart(
        integer(start, 1, MAX_START, f"{what}, start"),
        hex_digits(own_id, ID_LENGTH, f"{what}, id"),
        where,
        string(why, f"{what}, why"),
        string(by, f"{what}, by"),
        number(at, f"{what}, at"),
    )


def _encode(doc: Mapping[str, Json]) -> bytes:
    body = strict_json.dump({"format": {"version": VERSION, "requires": []}, **doc})
    data = strict_json.sealed(body.removesuffix(b"}"))
    if len(data) > MAX_NBYTES_OF_RECORD:
        raise ValueError(f"{len(data)} bytes, the limit is {MAX_NBYTES_OF_RECORD}")
    return data


def _decode(data: bytes, what: str) -> dict[str, Json]:
    if len(data) > MAX_NBYTES_OF_RECORD:
        raise corrupt(what, f"{len(data)} bytes, the limit is {MAX_NBYTES_OF_RECORD}")
    is_sealed = strict_json.check_seal(data, what)
    doc = mapping(strict_json.parse(data, what), what)
    check_version(doc, what)
    if not is_sealed:
        raise corrupt(what, "it does not end with its digest")
    return doc


def _attempt(value: Json, what: str) -> Attempt:
    attempt = parse_attempt(string(value, f"{what}, attempt"))
    if attempt is None:
        raise corrupt(what, f"{shown(value)} is no name of an attempt")
    return attempt


def _scalar(value: Json, what: str) -> Scalar:
    if isinstance(value, dict | list):
        raise corrupt(what, f"{shown(value)} is neither a number nor a text")
    return value
