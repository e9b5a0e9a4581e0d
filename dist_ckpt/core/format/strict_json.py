"""JSON with exactly one reading, and the fields that documents share.

The standard library accepts more: duplicate keys, NaN, 1e999, lone surrogates, long integers.
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
from dist_ckpt.core.format.geometry import Region, Shape, check_shape
from dist_ckpt.errors import CorruptError, IncompatibleError

Scalar = None | bool | int | float | str
Json = Scalar | list["Json"] | dict[str, "Json"]

MAX_DEPTH = 64

# The index of 16,384 ranks and 3,000 tensors has about a million values.
MAX_VALUES = 1 << 24

# How much more memory decoded values may take than their document: the 3 bytes `{},` take 140. Our
# documents take about ten times their size. A document that takes `FREE_NBYTES` has no limit.
_MAX_RATIO = 16
FREE_NBYTES = 128 << 20

# About how many bytes Python takes for a value that ends or begins with this character.
_COSTS = {
    b'"': 32,  # half of a string
    b",": 40,  # a number and its slot
    b"[": 64,  # a list
    b"{": 104,  # a dict
    b":": 160,  # a pair of a dict
}

# One version for index, shard files and objects files. Fields are exact, except names with `x-`:
# any other field, or a missing one, is damage. So a new field needs a new version, or a word in
# `requires` if older readers must not ignore it.
VERSION = 1

# The field `format` of a new document.
FORMAT: Json = {"version": VERSION, "requires": []}

_UPGRADE_REMEDY = "upgrade dist_ckpt to read it"

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


# The remedy for a damaged document of a checkpoint.
RESTORE_REMEDY = "; restore it from a copy, or load another checkpoint"


def corrupt_error(label: str, fact: str) -> CorruptError:
    """Return the error for a damaged document."""
    return CorruptError(f"{label}: {fact}{RESTORE_REMEDY}")


def parse(data: bytes, label: str) -> Json:
    """Parse a document strictly; `label` names it in the CorruptError."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise corrupt_error(label, f"not UTF-8 at byte {error.start}") from None
    check_size(data, label)
    try:
        doc: Json = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=_float,
            parse_int=_integer if _may_have_long_number(data) else None,
            parse_constant=_constant,
        )
    except RecursionError:
        raise corrupt_error(label, f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # JSONDecodeError is one
        raise corrupt_error(label, f"not JSON: {error}") from None
    _check_depth(doc, label)
    if "\\u" in text and _SURROGATE_ESCAPE.search(text):
        try:
            json.dumps(doc, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise corrupt_error(label, "a string with half a surrogate pair") from None
    return doc


def parse_apart(data: bytes, field: str, label: str) -> tuple[dict[str, Json], bytes]:
    """Parse an object except one field. Return it with None there, and the field's text or b""."""
    texts = members(data, label)
    text = texts.get(field, b"")
    if field in texts:
        texts[field] = b"null"
    joined = b",".join(_ENCODER.encode(name).encode() + b":" + texts[name] for name in texts)
    return mapping(parse(b"{%s}" % joined, label), label), text


def members(data: bytes, label: str) -> dict[str, bytes]:
    """Return the members of an object as text. `parse_each` then parses equal texts once."""
    check_size(data, label)
    texts = None
    with suppress(ValueError, RecursionError):
        texts = _members(data)
    if texts is None:  # formatted differently from ours, or invalid
        texts = _members(_ENCODER.encode(mapping(parse(data, label), label)).encode())
        assert texts is not None
    return texts


def _members(data: bytes) -> dict[str, bytes] | None:
    """Return an object's members, or None if its text has more, such as a key twice."""
    text = data.decode("utf-8")  # to check UTF-8: msgspec does not check raw members
    texts = {name: bytes(raw) for name, raw in msgspec.json.decode(text, type=_MEMBERS).items()}
    names = _ENCODER.encode(list(texts)).encode()
    nbytes = len(names) + len(texts) + sum(map(len, texts.values()))
    return texts if len(data.strip(_SPACE)) == nbytes else None


def parse_each(texts: Iterable[bytes], label: str) -> dict[bytes, Json]:
    """Parse texts, each of which is one value. Equal texts are parsed once."""
    distinct = list(dict.fromkeys(texts))
    values = array(parse(b"[%s]" % b",".join(distinct), label), label)
    return dict(zip(distinct, values, strict=True))


def dump(doc: Json) -> bytes:
    """Encode a document compactly. Raises ValueError if `parse` would refuse it."""
    return check_encoded(_ENCODER.encode(doc).encode())


def check_encoded(data: bytes) -> bytes:
    """Return an encoded document. Raises ValueError if `parse` would refuse its size."""
    if (problem := _size_problem(data)) is not None:
        raise ValueError(problem)
    return data


def seal(body: bytes) -> bytes:
    """Return a complete document: an object without its last brace, then its digest."""
    return body + b',"digest":"%s"}\n' % document_digest(body).encode("ascii")


def check_seal(data: bytes, label: str) -> bool:
    """Return True if a document has the end of `seal`. Raises CorruptError for a wrong digest."""
    end = _END.fullmatch(data, max(0, len(data) - _END_NBYTES))
    if end and document_digest(memoryview(data)[:-_END_NBYTES]) != end[1].decode("ascii"):
        raise corrupt_error(label, "its digest is wrong, so it is damaged")
    return end is not None


def check_size(data: bytes, label: str) -> None:
    """Raise CorruptError if a document may have too many values, or take too much memory."""
    if (problem := _size_problem(data)) is not None:
        raise corrupt_error(label, problem)


def max_memory(nbytes: int) -> int:
    """Return the limit for the memory that a document of this size may take."""
    return FREE_NBYTES + _MAX_RATIO * nbytes


def memory_problem(nbytes: int, memory: int) -> str | None:
    """Return a message if a document would take more memory than its limit, else None."""
    if memory <= (most := max_memory(nbytes)):
        return None
    return f"its {nbytes} bytes would take more than {most} bytes of memory, which is the limit"


def _size_problem(data: bytes) -> str | None:
    """Return a message if an upper bound of a document's cost is too much, else None."""
    # A byte costs at most 80, so short documents pass, and few are longer.
    if len(data) * 80 <= FREE_NBYTES:
        return None
    # A pair of an object counts as one value.
    if (count := 1 + sum(map(data.count, b",[{"))) > MAX_VALUES:
        return f"up to {count} values, where {MAX_VALUES} is the limit"
    return memory_problem(len(data), memory_cost(data))


def memory_cost(data: bytes) -> int:
    """Return about how much memory a document takes while it is parsed."""
    text = len(data) if data.isascii() else 4 * len(data)
    return text + sum(cost * data.count(mark) for mark, cost in _COSTS.items())


def is_text(text: str) -> bool:
    """Return True if a document can contain this string: without half a surrogate pair."""
    return text.encode("utf-8", "ignore").decode("utf-8") == text


def fields(doc: Json, names: Sequence[str], label: str) -> list[Json]:
    """Return the values of an object with exactly these fields; "x-" fields are ignored."""
    if type(doc) is not dict:
        raise corrupt_error(label, "not an object")
    if len(doc) != len(names) or any(name not in doc for name in names):
        if missing := [name for name in names if name not in doc]:
            raise corrupt_error(label, f"no field {missing[0]!r}")
        # msgpack, unlike JSON, has keys that are not strings.
        extra = [str(name) for name in doc if name not in names]
        if unknown := [name for name in extra if not name.startswith("x-")]:
            raise corrupt_error(label, f"unknown field {unknown[0][:100]!r}")
    return [doc[name] for name in names]


def integer(value: Json, low: int, high: int, label: str) -> int:
    """Return an integer of a range, both ends included."""
    if type(value) is not int or not low <= value <= high:
        raise corrupt_error(label, f"{quote(value)} is not an integer from {low} to {high}")
    return value


def number(value: Json, label: str) -> float:
    """Return a number, which may be an integer."""
    if type(value) is not float and type(value) is not int:
        raise corrupt_error(label, f"{quote(value)} is not a number")
    return float(value)


def boolean(value: Json, label: str) -> bool:
    """Return true or false."""
    if type(value) is not bool:
        raise corrupt_error(label, f"{quote(value)} is not true or false")
    return value


def string(value: Json, label: str) -> str:
    """Return a string."""
    if type(value) is not str:
        raise corrupt_error(label, f"{quote(value)} is not a string")
    return value


def hex_digits(value: Json, count: int, label: str) -> str:
    """Return a string of `count` lower-case hexadecimal digits."""
    text = string(value, label)
    if len(text) != count or not _HEX.fullmatch(text):
        raise corrupt_error(label, f"{quote(value)} is not {count} hex digits")
    return text


def array(value: Json, label: str) -> list[Json]:
    """Return an array."""
    if type(value) is not list:
        raise corrupt_error(label, f"{quote(value)} is not an array")
    return value


def mapping(value: Json, label: str) -> dict[str, Json]:
    """Return an object."""
    if type(value) is not dict:
        raise corrupt_error(label, f"{quote(value)} is not an object")
    return value


def row(value: Json, length: int, label: str) -> list[Json]:
    """Return an array of this length."""
    if type(value) is not list or len(value) != length:
        raise corrupt_error(label, f"{quote(value)} is not an array of {length}")
    return value


def quote(value: Json) -> str:
    """Return a value for a message: short, on one line."""
    short = repr(value)
    return short if len(short) <= 60 else f"{short[:57]}..."


# --- fields that documents have in common ----------------------------------------------------


def check_version(doc: Json, label: str) -> None:
    """Raise IncompatibleError for a newer version, CorruptError for a document without one."""
    format_ = doc.get("format") if type(doc) is dict else None
    if type(format_) is not dict or "version" not in format_:
        raise corrupt_error(label, "no format version, so it is not of dist_ckpt")
    version = integer(format_["version"], 1, MAX_INTEGER, f"{label}, version")
    if version > VERSION:
        raise IncompatibleError(
            f"{label}: format version {version}, this dist_ckpt reads {VERSION}; {_UPGRADE_REMEDY}"
        )
    _, requires = fields(format_, ("version", "requires"), f"{label}, format")
    if needs := array(requires, f"{label}, requires"):
        raise IncompatibleError(
            f"{label}: it requires {quote(needs)}, which this dist_ckpt lacks; {_UPGRADE_REMEDY}"
        )


def decode_dtype(code: Json, label: str) -> DType:
    """Return the dtype of a code. Raises IncompatibleError for an unknown one."""
    dtype = DTYPES.get(string(code, f"{label}, dtype"))
    if dtype is None:
        raise IncompatibleError(f"{label}: dtype {quote(code)} is unknown; {_UPGRADE_REMEDY}")
    return dtype


def decode_shape(value: Json, dtype: DType, label: str) -> Shape:
    """Return the shape of a tensor of this dtype."""
    shape = integers(value, f"{label}, shape")
    try:
        check_shape(shape, dtype.itemsize)
    except ValueError as error:
        raise corrupt_error(label, str(error)) from None
    return shape


def integers(value: Json, label: str) -> Shape:
    """Return an array of integers, none of them negative."""
    numbers = array(value, label)
    integers = cast("list[int]", numbers)
    # Not number by number in Python: there are as many cuts as ranks.
    if not _INTEGERS.issuperset(map(type, numbers)) or min(integers, default=0) < 0:
        raise corrupt_error(label, f"{quote(value)} is not a list of integers from 0 on")
    return tuple(integers)


def decode_region(value: Json, label: str) -> Region:
    """Return the region of an [offset, shape] pair."""
    offset, shape = row(value, 2, label)
    try:
        return Region(integers(offset, label), integers(shape, label))
    except ValueError as error:
        raise corrupt_error(label, str(error)) from None


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
    # A Python call for every integer would double the time. To translate 1 MB takes 1 ms.
    digits = data.translate(_DIGITS_TO_ZERO)
    index = digits.find(_LONG)
    while index >= 0:
        # Hex digests follow a quote or a letter, numbers do not.
        if digits[index - 1 : index] not in _BEFORE_HEX:
            return True
        index = digits.find(_LONG, index + len(_LONG))
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


def _check_depth(doc: Json, label: str) -> None:
    level: list[Json] = [doc]
    for _ in range(MAX_DEPTH):
        lists = [item for item in level if type(item) is list]
        objects = [item.values() for item in level if type(item) is dict]
        below = chain(chain.from_iterable(lists), chain.from_iterable(objects))
        level = [item for item in below if type(item) in _CONTAINERS]
        if not level:
            return
    raise corrupt_error(label, f"nested deeper than {MAX_DEPTH} levels")
