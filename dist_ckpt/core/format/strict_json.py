"""JSON that nobody can read in two ways, and the fields that documents have in common.

The standard library's parser, fenced: it alone would take UTF-16, keep the last of two equal keys,
and hand on NaN, 1e999, lone surrogates and integers of any length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from math import isfinite
from typing import cast

import msgspec

from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.dtypes import DTYPES, DType
from dist_ckpt.core.format.geometry import Region, Shape
from dist_ckpt.core.format.layout import check_shape
from dist_ckpt.errors import CorruptError, IncompatibleError

Scalar = None | bool | int | float | str
Json = Scalar | list["Json"] | dict[str, "Json"]

MAX_DEPTH = 64

# The index of 16,384 ranks and 3,000 tensors has about a million values.
MAX_VALUES = 1 << 24

# What Python makes of a document takes several times its bytes: of `{},`, three bytes, 140. What we
# write takes some ten times, and a short document may take what it likes. `docs/format.md` has it.
_MAX_RATIO = 16
FREE_NBYTES = 128 << 20

# About how many bytes Python takes for what ends with, or begins with, each of these in a text:
# half of a string; a number and its place; a list; a dict, and what it is made from; a key's place
# in both.
_COSTS = {b'"': 32, b",": 40, b"[": 64, b"{": 104, b":": 160}

# One version for index, shard files and objects files. Fields are exact, but for names with `x-`: a
# document with one more, or one less, is damaged to who does not know that. So a new field means a
# new version, or one that older readers must not miss a word in `requires`.
VERSION = 1

_REMEDY = "upgrade dist_ckpt to read it"

MIN_INTEGER, MAX_INTEGER = -(1 << 63), (1 << 64) - 1

_LONG = b"0" * 19
_BEFORE_HEX = frozenset({b'"', b"0", *(b"%c" % letter for letter in b"abcdef")})
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_CONTAINERS = frozenset({list, dict})
_INTEGERS = frozenset({int})
_MEMBERS = dict[str, msgspec.Raw]
_SPACE = b" \t\n\r"  # an index ends with a line feed
_HEX = re.compile(r"[0-9a-f]*")
_END = re.compile(rb',"digest":"([0-9a-f]{32})"}\n')
_END_NBYTES = 46
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


# What is to be done about a damaged document; of one that is no checkpoint's, something else.
REMEDY = "; restore it from a copy, or load another checkpoint"


def corrupt_error(what: str, fact: str) -> CorruptError:
    """Return the error for a damaged document."""
    return CorruptError(f"{what}: {fact}{REMEDY}")


def parse(data: bytes, what: str) -> Json:
    """Parse a document strictly; `what` names it in the CorruptError."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise corrupt_error(what, f"not UTF-8 at byte {error.start}") from None
    check_size(data, what)
    try:
        doc: Json = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=_float,
            parse_int=_integer if _may_have_long_number(data) else None,
            parse_constant=_constant,
        )
    except RecursionError:
        raise corrupt_error(what, f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # JSONDecodeError is one
        raise corrupt_error(what, f"not JSON: {error}") from None
    _check_depth(doc, what)
    if "\\u" in text and _SURROGATE_ESCAPE.search(text):
        _check_surrogates(doc, what)
    return doc


def parse_apart(data: bytes, field: str, what: str) -> tuple[dict[str, Json], bytes]:
    """Parse an object, but for one field, which is None; return its text, b"" if there is none."""
    found = members(data, what)
    text = found.get(field, b"")
    if field in found:
        found[field] = b"null"
    joined = b",".join(_ENCODER.encode(name).encode() + b":" + found[name] for name in found)
    return mapping(parse(b"{%s}" % joined, what), what), text


def members(data: bytes, what: str) -> dict[str, bytes]:
    """Return the members of an object, each as text which is yet to be parsed.

    An index and a header are mostly rows that are alike: `parse_each` parses one of each.
    """
    check_size(data, what)
    found = None
    with suppress(ValueError, RecursionError):
        found = _members(data)
    if found is None:  # it is written otherwise than we write, or wrong
        found = _members(_ENCODER.encode(mapping(parse(data, what), what)).encode())
        assert found is not None
    return found


def _members(data: bytes) -> dict[str, bytes] | None:
    """Return an object's members; None if its text has more than they, such as a key twice."""
    text = data.decode("utf-8")  # msgspec does not look into what it leaves as it is
    found = {name: bytes(raw) for name, raw in msgspec.json.decode(text, type=_MEMBERS).items()}
    names = _ENCODER.encode(list(found)).encode()
    nbytes = len(names) + len(found) + sum(map(len, found.values()))
    return found if len(data.strip(_SPACE)) == nbytes else None


def parse_each(texts: Iterable[bytes], what: str) -> dict[bytes, Json]:
    """Parse texts, each of which is one value: those that are alike once."""
    distinct = list(dict.fromkeys(texts))
    values = array(parse(b"[%s]" % b",".join(distinct), what), what)
    return dict(zip(distinct, values, strict=True))


def dump(doc: Json) -> bytes:
    """Encode a document compactly; ValueError if it is not one that `parse` takes."""
    return checked(_ENCODER.encode(doc).encode())


def checked(data: bytes) -> bytes:
    """Return an encoded document; ValueError if `parse` would find it too large."""
    if (problem := _size_problem(data)) is not None:
        raise ValueError(problem)
    return data


def sealed(body: bytes) -> bytes:
    """Return an object that is a document of its own; it has all but its last brace."""
    return body + b',"digest":"%s"}\n' % document_digest(body).encode("ascii")


def check_seal(data: bytes, what: str) -> bool:
    """Say whether a document ends as `sealed` has it; CorruptError if the digest is another's."""
    end = _END.fullmatch(data, max(0, len(data) - _END_NBYTES))
    if end and document_digest(memoryview(data)[:-_END_NBYTES]) != end[1].decode("ascii"):
        raise corrupt_error(what, "its digest is wrong, so it is damaged")
    return end is not None


def check_size(data: bytes, what: str) -> None:
    """Raise CorruptError if a document may have too many values, or take too much memory."""
    if (problem := _size_problem(data)) is not None:
        raise corrupt_error(what, problem)


def max_memory(nbytes: int) -> int:
    """Return how many bytes of memory we let a document of so many bytes take."""
    return FREE_NBYTES + _MAX_RATIO * nbytes


def memory_problem(nbytes: int, memory: int) -> str | None:
    """Say that a document of `nbytes` would take more memory than it may, or None."""
    if memory <= (most := max_memory(nbytes)):
        return None
    return f"its {nbytes} bytes would take more than {most} bytes of memory, the limit for so many"


def _size_problem(data: bytes) -> str | None:
    """Say what is too much about a document, from an upper bound; None if nothing is."""
    # Each costs at most 80 a byte: so nothing is wrong with a short one, and few are longer.
    if len(data) * 80 <= FREE_NBYTES:
        return None
    # A pair of an object is one value.
    if (count := 1 + sum(map(data.count, b",[{"))) > MAX_VALUES:
        return f"up to {count} values, where {MAX_VALUES} is the limit"
    return memory_problem(len(data), cost_of(data))


def cost_of(data: bytes) -> int:
    """Return about how much memory a document takes, if it is one, while it is parsed."""
    text = len(data) if data.isascii() else 4 * len(data)
    return text + sum(cost * data.count(mark) for mark, cost in _COSTS.items())


def is_text(text: str) -> bool:
    """Say whether a document can hold a string: not half a surrogate pair, as in odd file names."""
    return text.encode("utf-8", "ignore").decode("utf-8") == text


def fields(doc: Json, names: Sequence[str], what: str) -> list[Json]:
    """Return the values of an object that has exactly these fields, but for any "x-" ones."""
    if type(doc) is not dict:
        raise corrupt_error(what, "not an object")
    if len(doc) != len(names) or any(name not in doc for name in names):
        missing = [name for name in names if name not in doc]
        # msgpack, unlike JSON, has keys that are no strings.
        others = [str(name) for name in doc if name not in names]
        unknown = [name for name in others if not name.startswith("x-")]
        if missing:
            raise corrupt_error(what, f"no field {missing[0]!r}")
        if unknown:
            raise corrupt_error(what, f"unknown field {unknown[0][:100]!r}")
    return [doc[name] for name in names]


def integer(value: Json, low: int, high: int, what: str) -> int:
    """Return an integer of a range, both ends included."""
    if type(value) is not int or not low <= value <= high:
        raise corrupt_error(what, f"{quoted(value)} is not an integer from {low} to {high}")
    return value


def number(value: Json, what: str) -> float:
    """Return a number, which may be an integer."""
    if type(value) is not float and type(value) is not int:
        raise corrupt_error(what, f"{quoted(value)} is not a number")
    return float(value)


def string(value: Json, what: str) -> str:
    """Return a string."""
    if type(value) is not str:
        raise corrupt_error(what, f"{quoted(value)} is not a string")
    return value


def hex_digits(value: Json, count: int, what: str) -> str:
    """Return a string of so many hexadecimal digits, lower-case."""
    text = string(value, what)
    if len(text) != count or not _HEX.fullmatch(text):
        raise corrupt_error(what, f"{quoted(value)} is not {count} hex digits")
    return text


def array(value: Json, what: str) -> list[Json]:
    """Return an array."""
    if type(value) is not list:
        raise corrupt_error(what, f"{quoted(value)} is not an array")
    return value


def mapping(value: Json, what: str) -> dict[str, Json]:
    """Return an object."""
    if type(value) is not dict:
        raise corrupt_error(what, f"{quoted(value)} is not an object")
    return value


def row(value: Json, length: int, what: str) -> list[Json]:
    """Return an array of a certain length."""
    if type(value) is not list or len(value) != length:
        raise corrupt_error(what, f"{quoted(value)} is not an array of {length}")
    return value


def quoted(value: Json) -> str:
    """Return a value as a message shows it: short, on one line."""
    short = repr(value)
    return short if len(short) <= 60 else f"{short[:57]}..."


# --- fields that documents have in common ----------------------------------------------------


def check_version(doc: Json, what: str) -> None:
    """Raise IncompatibleError if a document is of a newer version, CorruptError if of none."""
    format_ = doc.get("format") if type(doc) is dict else None
    if type(format_) is not dict or "version" not in format_:
        raise corrupt_error(what, "no format version, so it is not of dist_ckpt")
    version = integer(format_["version"], 1, MAX_INTEGER, f"{what}, version")
    if version > VERSION:
        raise IncompatibleError(
            f"{what}: format version {version}, this dist_ckpt reads {VERSION}; {_REMEDY}"
        )
    _, requires = fields(format_, ("version", "requires"), f"{what}, format")
    if needs := array(requires, f"{what}, requires"):
        raise IncompatibleError(
            f"{what}: it requires {quoted(needs)}, which this dist_ckpt lacks; {_REMEDY}"
        )


def decode_dtype(code: Json, what: str) -> DType:
    """Return the dtype of a code; one that we do not know is a newer version's."""
    dtype = DTYPES.get(string(code, f"{what}, dtype"))
    if dtype is None:
        raise IncompatibleError(f"{what}: dtype {quoted(code)} is not known; {_REMEDY}")
    return dtype


def decode_shape(value: Json, dtype: DType, what: str) -> Shape:
    """Return the shape of a tensor of this dtype."""
    shape = integers(value, f"{what}, shape")
    try:
        check_shape(shape, dtype.itemsize)
    except ValueError as error:
        raise corrupt_error(what, str(error)) from None
    return shape


def integers(value: Json, what: str) -> Shape:
    """Return an array of integers that are not negative."""
    numbers = array(value, what)
    integers = cast("list[int]", numbers)
    # Not number by number in Python: cuts are as many as ranks.
    if not _INTEGERS.issuperset(map(type, numbers)) or min(integers, default=0) < 0:
        raise corrupt_error(what, f"{quoted(value)} is not a list of integers from 0 on")
    return tuple(integers)


def decode_region(value: Json, what: str) -> Region:
    """Return the region of an [offset, shape] pair."""
    offset, shape = row(value, 2, what)
    try:
        return Region(integers(offset, what), integers(shape, what))
    except ValueError as error:
        raise corrupt_error(what, str(error)) from None


# --- parsing ---------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    doc = dict(pairs)
    if len(doc) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:100]!r}")
            seen.add(key)
    return doc


def _may_have_long_number(data: bytes) -> bool:
    # A Python call for every integer costs twice the parsing; translating 1 MB takes 1 ms.
    digits = data.translate(_DIGITS_TO_ZERO)
    at = digits.find(_LONG)
    while at >= 0:
        # Digits of a hex digest come after a quote or a letter, those of a number do not.
        if digits[at - 1 : at] not in _BEFORE_HEX:
            return True
        at = digits.find(_LONG, at + len(_LONG))
    return False


def _integer(digits: str) -> int:
    if len(digits) <= 20 and MIN_INTEGER <= (value := int(digits)) <= MAX_INTEGER:
        return value
    raise ValueError(f"integer out of range: {digits[:30]}")


def _float(digits: str) -> float:
    if isfinite(value := float(digits)):
        return value
    raise ValueError(f"number out of range: {digits[:30]}")


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(doc: Json, what: str) -> None:
    level: list[Json] = [doc]
    for _ in range(MAX_DEPTH):
        lists = [item for item in level if type(item) is list]
        objects = [item.values() for item in level if type(item) is dict]
        below = chain(chain.from_iterable(lists), chain.from_iterable(objects))
        level = [item for item in below if type(item) in _CONTAINERS]
        if not level:
            return
    raise corrupt_error(what, f"nested deeper than {MAX_DEPTH} levels")


def _check_surrogates(doc: Json, what: str) -> None:
    try:
        json.dumps(doc, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise corrupt_error(what, "a string with half a surrogate pair") from None
