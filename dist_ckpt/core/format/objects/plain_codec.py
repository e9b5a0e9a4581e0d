"""Encode plain data as msgpack, and decode it. Object identity is lost. Data names no code."""

from __future__ import annotations

import enum
import os
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
    ValuesView,
)
from dataclasses import dataclass, field, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from itertools import chain
from math import prod
from typing import Any

import msgpack

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import check_shape
from dist_ckpt.core.format.objects.plain_types import (
    COMPLEX,
    FACTORIES,
    MAX_ALIKE,
    MAX_DEPTH,
    PATHS,
    ArrayValue,
    Device,
    DTypeValue,
    Ext,
    NumpyScalar,
    Placeholder,
    Size,
    check_hashes,
    cost_of,
    numpy_itemsize,
)
from dist_ckpt.core.format.strict_json import max_memory, memory_problem
from dist_ckpt.core.runtime.processes import paused_collector
from dist_ckpt.errors import IncompatibleError

_TYPES = (
    "dict, list, tuple, deque, set, str, bytes, int, float, bool, None, range, numpy scalars, "
    "datetime or Path"
)


def encode_value(value: object, fqn: str = "value", *, around: int = 0) -> bytes:
    """Return a value as msgpack; equal values give equal bytes on every rank.

    Raises TypeError for a value that is not plain data, with its path from `fqn` and a remedy.
    Raises ValueError if it is too deep or too large. `around` levels do not count as depth.
    """
    try:
        return _pack(_encode(value, -around))
    except _RefusedError as refused:
        path = fqn + "".join(f"[{key!r}]" for key in reversed(refused.keys))
        raise refused.kind(f"{path} {refused.fact}") from None


def check_plain(value: object, fqn: str) -> None:
    """Raise the error of `encode_value` if a value cannot be stored."""
    encode_value(value, fqn)


@dataclass(eq=False)
class _RefusedError(Exception):
    """A value that cannot be stored; `keys` grows on the way out, innermost first."""

    fact: str
    kind: type[TypeError | ValueError] = TypeError
    keys: list[object] = field(default_factory=list)


def _pack(encoded: object) -> bytes:
    try:
        packed: bytes = msgpack.packb(encoded, use_bin_type=True)
    except (ValueError, OverflowError) as error:
        fact = f"is too large for msgpack ({error}): store it as tensors"
        raise _RefusedError(fact, ValueError) from None
    return packed


def _encode(value: Any, depth: int) -> object:
    if depth > MAX_DEPTH:
        fact = f"is nested deeper than {MAX_DEPTH} levels, or contains itself: flatten it"
        raise _RefusedError(fact, ValueError)
    cls = type(value)
    encode = _ENCODERS.get(cls) or _ENCODERS_BY_NAME.get((cls.__module__, cls.__qualname__))
    if encode is not None:
        return encode(value, depth)
    if cls.__module__ == "numpy" and any(base.__name__ == "generic" for base in cls.__mro__):
        return _encode_numpy(value)
    raise _RefusedError(_refusal(value))


def _refusal(value: object) -> str:
    cls = type(value)
    name, base = cls.__name__, next((c for c in cls.__mro__[1:] if c in _ENCODERS), None)
    tensors = ("Tensor", "ndarray")
    if isinstance(value, enum.Enum):
        remedy = f"store value.value, and make it again with {name}(saved)"
    elif isinstance(value, tuple) and hasattr(cls, "_fields"):
        remedy = f"store value._asdict(), and make it again with {name}(**saved)"
    elif base is not None:
        remedy = f"store {base.__name__}(value), and make it again after the load"
    elif is_dataclass(value) and not isinstance(value, type):
        remedy = f"store dataclasses.asdict(value), and make it again with {name}(**saved)"
    elif any(c.__name__ in tensors for c in cls.__mro__):
        remedy = (
            "in the state, tensors and arrays must be in dicts, lists and tuples only; in a config "
            "or metadata store value.tolist()"
        )
    elif hasattr(cls, "getvalue"):
        remedy = "store value.getvalue(), and make a stream of the saved value after the load"
    elif line := next((line for c, line in _REMEDIES.items() if isinstance(value, c)), None):
        remedy = f"store {line}"
    else:
        remedy = (
            f"convert it to plain data ({_TYPES}), or in the state give it state_dict and "
            "load_state_dict"
        )
    return f"is a {cls.__module__}.{cls.__qualname__}, which cannot be stored: {remedy}"


def _ext(code: int, payload: object) -> object:
    return msgpack.ExtType(code, _pack(payload))


def _encode_int(value: int, depth: int) -> object:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return msgpack.ExtType(Ext.INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _encode_str(value: str, depth: int) -> object:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, as in file names that are not UTF-8
        return msgpack.ExtType(Ext.TEXT, value.encode("utf-8", "surrogatepass"))
    return value


def _encode_all(values: Iterable[object], depth: int) -> list[object]:
    encoded = []
    for number, value in enumerate(values):
        try:
            encoded.append(_encode(value, depth + 1))
        except _RefusedError as refused:
            refused.keys.append(number)
            raise
    return encoded


def _check_hashes(members: Collection[object]) -> None:
    try:
        check_hashes(members)
    except ValueError as error:
        fact = f"cannot be stored: {error}: store a list, or a tensor"
        raise _RefusedError(fact, ValueError) from None


def _encode_map(value: Mapping[object, object], depth: int) -> dict[object, object]:
    _check_hashes(value)
    encoded = {}
    for key, item in value.items():
        if type(key) is not str and type(key) is not int:
            fact = f"has the key {key!r} of class {type(key).__name__}: use str or int keys"
            raise _RefusedError(fact)
        try:
            encoded[_encode(key, depth)] = _encode(item, depth + 1)
        except _RefusedError as refused:
            refused.keys.append(key)
            raise
    return encoded


def _encode_defaultdict(value: defaultdict[object, object], depth: int) -> object:
    for name, factory in FACTORIES.items():
        if value.default_factory is factory:
            return _ext(Ext.DEFAULTDICT, [name, _encode_map(value, depth)])
    raise _RefusedError(
        f"is a defaultdict of {value.default_factory!r}, which cannot be stored: use one of "
        f"{', '.join(FACTORIES)}, or a dict"
    )


def _encode_set(value: set[object] | frozenset[object], depth: int) -> object:
    _check_hashes(value)
    members = []
    for member in value:
        try:
            members.append(_pack(_encode(member, depth + 1)))
        except _RefusedError as refused:
            refused.keys.append(member)
            raise
    # Sorted by their bytes: a set's own order differs between processes.
    header: bytes = msgpack.Packer().pack_array_header(len(members))
    kind = Ext.SET if type(value) is set else Ext.FROZENSET
    return msgpack.ExtType(kind, header + b"".join(sorted(members)))


def _encode_datetime(value: datetime) -> object:
    zone = value.tzinfo
    if zone is None:
        offset = None
    elif type(zone) is timezone:
        delta, name = zone.utcoffset(None), zone.tzname(None)
        named = name != timezone(delta).tzname(None)
        offset = [delta.days, delta.seconds, delta.microseconds, name if named else None]
    else:
        raise _RefusedError(
            f"has the time zone {zone!r}, which cannot be stored: use "
            "value.astimezone(datetime.timezone.utc)"
        )
    day = [value.year, value.month, value.day]
    time = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return _ext(Ext.DATETIME, [*day, *time, offset])


def _encode_numpy(value: Any) -> object:
    code = value.dtype.str
    # numpy drops the zeros at the end of a string.
    padded = value.dtype.kind in "SU" and value[-1:] in ("\0", b"\0")
    if padded or numpy_itemsize(code) is None:
        raise _RefusedError(
            f"is a numpy scalar of dtype {value.dtype}, which cannot be stored exactly: convert it "
            "with .item()"
        )
    return _ext(Ext.NUMPY_SCALAR, [code, value.tobytes()])


def _encode_array(value: ArrayValue) -> object:
    try:
        check_shape(value.shape, DTYPES[value.dtype].itemsize)
    except ValueError as error:
        fact = f"is an array that cannot be stored ({error}): store it in another shape"
        raise _RefusedError(fact, ValueError) from None
    return _ext(Ext.ARRAY, [value.dtype, list(value.shape), value.data, value.kind])


# Code that converts other containers to a value that can be stored, for the remedy of an error. The
# first match is used.
_REMEDIES: Mapping[type, str] = {
    **dict.fromkeys((bytearray, memoryview), "bytes(value)"),
    slice: "(value.start, value.stop, value.step)",
    time: "value.isoformat()",
    Mapping: "dict(value)",
    Set: "set(value)",
    **dict.fromkeys((Sequence, ValuesView, Iterator), "list(value)"),
}

_Encoder = Callable[[Any, int], object]

_ENCODERS: Mapping[type, _Encoder] = {
    **dict.fromkeys((type(None), bool, float, bytes), lambda value, _: value),
    int: _encode_int,
    str: _encode_str,
    list: _encode_all,
    dict: _encode_map,
    tuple: lambda value, depth: _ext(Ext.TUPLE, _encode_all(value, depth)),
    set: _encode_set,
    frozenset: _encode_set,
    complex: lambda value, _: msgpack.ExtType(Ext.COMPLEX, COMPLEX.pack(value.real, value.imag)),
    OrderedDict: lambda value, depth: _ext(Ext.ORDERED_DICT, _encode_map(value, depth)),
    Counter: lambda value, depth: _ext(Ext.COUNTER, _encode_map(value, depth)),
    defaultdict: _encode_defaultdict,
    deque: lambda value, depth: _ext(Ext.DEQUE, [value.maxlen, _encode_all(value, depth)]),
    range: lambda value, depth: _ext(
        Ext.RANGE, _encode_all((value.start, value.stop, value.step), depth)
    ),
    datetime: lambda value, _: _encode_datetime(value),
    date: lambda value, _: _ext(Ext.DATE, [value.year, value.month, value.day]),
    timedelta: lambda span, _: _ext(Ext.TIMEDELTA, [span.days, span.seconds, span.microseconds]),
    **dict.fromkeys(
        PATHS, lambda path, _: _ext(Ext.PATH, [type(path).__name__, _encode_str(str(path), 0)])
    ),
    Size: lambda value, _: _ext(Ext.SIZE, list(value.shape)),
    DTypeValue: lambda value, _: _ext(Ext.DTYPE, value.name),
    NumpyScalar: lambda value, _: _ext(Ext.NUMPY_SCALAR, [value.dtype, value.data]),
    Device: lambda value, _: _ext(Ext.DEVICE, value.name),
    ArrayValue: lambda value, _: _encode_array(value),
}

_ENCODERS_BY_NAME: Mapping[tuple[str, str], _Encoder] = {
    ("torch", "Size"): lambda value, _: _ext(Ext.SIZE, list(value)),
    ("torch", "dtype"): lambda value, _: _ext(Ext.DTYPE, str(value).removeprefix("torch.")),
    ("torch", "device"): lambda value, _: _ext(Ext.DEVICE, str(value)),
}


_KEYS = frozenset({str, int})
_LISTS = frozenset({list, tuple, set, frozenset, deque})
_DICTS = frozenset({dict, OrderedDict, Counter, defaultdict})
_CHECKED_TYPES = _LISTS | _DICTS | {msgpack.Timestamp}


def decode_value(
    data: bytes, *, make: Callable[[Placeholder], object] = lambda value: value, around: int = 0
) -> Any:
    """Decode the bytes of `encode_value`, with `make(placeholder)` for placeholders.

    Raises ValueError, also from `make`, and IncompatibleError for a type of a newer version.
    `around` levels do not count as depth.
    """
    cost = cost_of(data, max_memory(len(data)))
    if (problem := memory_problem(len(data), cost)) is not None:
        raise ValueError(problem)
    with paused_collector():
        value = _Decoder(make).unpack(data)
        _check_native(value, MAX_DEPTH + around)
    return value


def _check_native(value: Any, max_depth: int) -> None:
    """Refuse what msgpack accepts: deeper lists and dicts, and its times. Works at any depth."""
    level = [value]
    if type(value) is msgpack.Timestamp:
        raise _unknown_type(-1)
    for _ in range(max_depth):
        if not level:
            return
        lists = (item for item in level if type(item) in _LISTS)
        dicts = (item.values() for item in level if type(item) in _DICTS)
        below = chain.from_iterable(chain(lists, dicts))
        level = [item for item in below if type(item) in _CHECKED_TYPES]
        if any(type(item) is msgpack.Timestamp for item in level):
            raise _unknown_type(-1)
    if any(level):  # not empty
        raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"nested deeper than {MAX_DEPTH} levels")


def _unknown_type(code: int) -> IncompatibleError:
    return IncompatibleError(
        f"a value of type {code}, unknown to this dist_ckpt; upgrade dist_ckpt to read it"
    )


class _Decoder:
    def __init__(self, make: Callable[[Placeholder], object]) -> None:
        self._make = make
        self._depth = 0

    def unpack(self, data: bytes) -> Any:
        try:
            return msgpack.unpackb(
                data, strict_map_key=False, object_pairs_hook=_unpack_map, ext_hook=self._unpack_ext
            )
        except msgpack.UnpackException as error:
            raise ValueError(f"not msgpack: {error!r}") from None

    def _unpack_ext(self, code: int, data: bytes) -> object:
        if self._depth > MAX_DEPTH:
            raise _too_deep()
        if code in _RAW_DECODERS:
            return _RAW_DECODERS[code](data)
        if code not in _DECODERS:
            raise _unknown_type(code)
        self._depth += 1
        payload = self.unpack(data)
        self._depth -= 1
        try:
            value = _DECODERS[code](payload)
        except (TypeError, OverflowError) as error:  # a payload of the wrong form
            raise ValueError(f"a value of type {code} is malformed: {error}") from None
        return self._make(value) if isinstance(value, Placeholder) else value


def _unpack_map(pairs: list[tuple[Any, Any]]) -> dict[str | int, Any]:
    if not pairs:
        return {}
    # Types first: True is the key 1, and an unhashable key is a TypeError.
    if not _KEYS.issuperset([type(key) for key, _ in pairs]):
        raise ValueError("a key that is neither str nor int")
    if len(pairs) > MAX_ALIKE:
        check_hashes([key for key, _ in pairs])
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a dict with the same key twice")
    return value


def expect(value: Any, cls: type) -> Any:
    """Return the value if it has this class. Raises ValueError."""
    if type(value) is not cls:
        raise ValueError(f"{type(value).__name__} in place of {cls.__name__}")
    return value


def _check_integers(value: Any) -> tuple[int, ...]:
    return tuple(expect(number, int) for number in expect(value, list))


def _unpack_complex(data: bytes) -> complex:
    if len(data) != COMPLEX.size:
        raise ValueError(f"{len(data)} bytes for a complex number")
    return complex(*COMPLEX.unpack(data))


def _unpack_set(payload: Any) -> set[object]:
    check_hashes(expect(payload, list))
    members = set(payload)
    if len(members) != len(payload):
        raise ValueError("a set with the same member twice")
    return members


def _unpack_defaultdict(payload: Any) -> defaultdict[object, object]:
    name, items = expect(payload, list)
    if expect(name, str) not in FACTORIES:
        raise ValueError(f"a defaultdict of {name[:100]!r}")
    return defaultdict(FACTORIES[name], expect(items, dict))


def _unpack_deque(payload: Any) -> deque[object]:
    maxlen, items = expect(payload, list)
    if len(expect(items, list)) > expect(len(items) if maxlen is None else maxlen, int):
        raise ValueError(f"a deque of {len(items)} items, where {maxlen} is its limit")
    return deque(items, maxlen)


def _unpack_datetime(payload: Any) -> datetime:
    *numbers, fold, offset = expect(payload, list)
    zone = None
    if offset is not None:
        *delta, name = expect(offset, list)
        names = () if name is None else (expect(name, str),)
        zone = timezone(timedelta(*_check_integers(delta)), *names)
    year, month, day, hour, minute, second, microsecond = _check_integers(numbers)
    return datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)


def _unpack_path(payload: Any) -> pathlib.PurePath:
    name, text = expect(payload, list)
    classes = {cls.__name__: cls for cls in PATHS}
    # Paths of the other system cannot be built here, only pure ones.
    foreign = "PosixPath" if os.name == "nt" else "WindowsPath"
    return classes[f"Pure{name}" if name == foreign else _check_member(name, classes)](
        expect(text, str)
    )


def _unpack_numpy(payload: Any) -> NumpyScalar:
    code, data = expect(payload, list)
    if (itemsize := numpy_itemsize(expect(code, str))) is None:
        raise ValueError(f"a numpy scalar of dtype {code[:100]!r}")
    if len(expect(data, bytes)) != itemsize:
        raise ValueError(f"{len(data)} bytes for a numpy scalar of dtype {code}")
    return NumpyScalar(code, data)


def _unpack_array(payload: Any) -> ArrayValue:
    dtype, sizes, data, kind = expect(payload, list)
    shape = _check_integers(sizes)
    itemsize = DTYPES[_check_member(dtype, DTYPES)].itemsize
    if min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape}")
    check_shape(shape, itemsize)
    if len(expect(data, bytes)) != prod(shape) * itemsize:
        raise ValueError(f"{len(data)} bytes for an array of shape {shape} and dtype {dtype}")
    return ArrayValue(dtype, shape, data, _check_member(kind, ("tensor", "numpy")))


def _check_member(value: Any, names: Iterable[str]) -> Any:
    if expect(value, str) not in names:
        raise ValueError(f"{value[:100]!r} is unknown")
    return value


_RAW_DECODERS: Mapping[int, Callable[[bytes], object]] = {
    Ext.INT: lambda data: int.from_bytes(data, "big", signed=True),
    Ext.TEXT: lambda data: data.decode("utf-8", "surrogatepass"),
    Ext.COMPLEX: _unpack_complex,
}

_DECODERS: Mapping[int, Callable[[Any], object]] = {
    Ext.TUPLE: lambda payload: tuple(expect(payload, list)),
    Ext.SET: _unpack_set,
    Ext.FROZENSET: lambda payload: frozenset(_unpack_set(payload)),
    Ext.ORDERED_DICT: lambda payload: OrderedDict(expect(payload, dict)),
    Ext.COUNTER: lambda payload: Counter(expect(payload, dict)),
    Ext.DEFAULTDICT: _unpack_defaultdict,
    Ext.DEQUE: _unpack_deque,
    Ext.RANGE: lambda payload: range(*_check_integers(payload)),
    Ext.SIZE: lambda payload: Size(_check_integers(payload)),
    Ext.DTYPE: lambda payload: DTypeValue(expect(payload, str)),
    Ext.NUMPY_SCALAR: _unpack_numpy,
    Ext.DEVICE: lambda payload: Device(expect(payload, str)),
    Ext.DATETIME: _unpack_datetime,
    Ext.DATE: lambda payload: date(*_check_integers(payload)),
    Ext.TIMEDELTA: lambda payload: timedelta(*_check_integers(payload)),
    Ext.PATH: _unpack_path,
    Ext.ARRAY: _unpack_array,
}
