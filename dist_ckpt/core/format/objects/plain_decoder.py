"""Plain data from msgpack. No code runs but that of the types in the table: data names no other."""

from __future__ import annotations

import os
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, timedelta, timezone
from itertools import chain
from math import prod
from typing import Any

import msgpack

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.layout import check_shape
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
from dist_ckpt.core.runtime.gc_pause import paused_collector
from dist_ckpt.errors import IncompatibleError

_KEYS = frozenset({str, int})
_LISTS = frozenset({list, tuple, set, frozenset, deque})
_DICTS = frozenset({dict, OrderedDict, Counter, defaultdict})
_LOOKED_AT = _LISTS | _DICTS | {msgpack.Timestamp}


def decode_value(
    data: bytes, *, make: Callable[[Placeholder], object] = lambda value: value, around: int = 0
) -> Any:
    """Return the value of `encode_value`'s bytes, with `make(stand_in)` in place of stand-ins.

    ValueError if they are not a value, IncompatibleError if they have a type of a newer version.
    `make` raises ValueError for what it cannot make. `around` levels do not count as depth.
    """
    cost = cost_of(data, max_memory(len(data)))
    if (problem := memory_problem(len(data), cost)) is not None:
        raise ValueError(problem)
    with paused_collector():
        value = _Decoder(make).unpack(data)
        _check_native(value, MAX_DEPTH + around)
    return value


def _check_native(value: Any, max_depth: int) -> None:
    """Refuse what msgpack lets pass by itself: deeper lists and dicts, and its own type of times.

    Level by level, so that no depth is too much for it.
    """
    level = [value]
    if type(value) is msgpack.Timestamp:
        raise _unknown_type(-1)
    for _ in range(max_depth):
        if not level:
            return
        lists = (one for one in level if type(one) in _LISTS)
        dicts = (one.values() for one in level if type(one) in _DICTS)
        below = chain.from_iterable(chain(lists, dicts))
        level = [one for one in below if type(one) in _LOOKED_AT]
        if any(type(one) is msgpack.Timestamp for one in level):
            raise _unknown_type(-1)
    if any(level):  # they hold something
        raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"nested deeper than {MAX_DEPTH} levels")


def _unknown_type(code: int) -> IncompatibleError:
    return IncompatibleError(
        f"a value of type {code}, which this dist_ckpt does not know; upgrade dist_ckpt to read it"
    )


class _Decoder:
    def __init__(self, make: Callable[[Placeholder], object]) -> None:
        self._make = make
        self._depth = 0

    def unpack(self, data: bytes) -> Any:
        try:
            return msgpack.unpackb(
                data,
                strict_map_key=False,
                object_pairs_hook=_unpack_map,
                ext_hook=self._unpack_ext,
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
        except (TypeError, OverflowError) as error:  # a payload of another form than ours
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


def _typed(value: Any, *classes: type) -> Any:
    if type(value) not in classes:
        raise ValueError(f"{type(value).__name__} in place of {classes[0].__name__}")
    return value


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(_typed(number, int) for number in _typed(value, list))


def _unpack_complex(data: bytes) -> complex:
    if len(data) != COMPLEX.size:
        raise ValueError(f"{len(data)} bytes for a complex number")
    return complex(*COMPLEX.unpack(data))


def _unpack_set(payload: Any) -> set[object]:
    check_hashes(_typed(payload, list))
    members = set(payload)
    if len(members) != len(payload):
        raise ValueError("a set with the same member twice")
    return members


def _unpack_defaultdict(payload: Any) -> defaultdict[object, object]:
    name, items = _typed(payload, list)
    if _typed(name, str) not in FACTORIES:
        raise ValueError(f"a defaultdict of {name[:100]!r}")
    return defaultdict(FACTORIES[name], _typed(items, dict))


def _unpack_deque(payload: Any) -> deque[object]:
    maxlen, items = _typed(payload, list)
    if len(_typed(items, list)) > _typed(len(items) if maxlen is None else maxlen, int):
        raise ValueError(f"a deque of {len(items)} items, where {maxlen} is its limit")
    return deque(items, maxlen)


def _unpack_datetime(payload: Any) -> datetime:
    *numbers, fold, offset = _typed(payload, list)
    zone = None
    if offset is not None:
        *delta, name = _typed(offset, list)
        names = () if name is None else (_typed(name, str),)
        zone = timezone(timedelta(*_integers(delta)), *names)
    year, month, day, hour, minute, second, microsecond = _integers(numbers)
    return datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)


def _unpack_path(payload: Any) -> pathlib.PurePath:
    name, text = _typed(payload, list)
    classes = {cls.__name__: cls for cls in PATHS}
    # The other system's paths cannot be made here, only named.
    foreign = "PosixPath" if os.name == "nt" else "WindowsPath"
    return classes[f"Pure{name}" if name == foreign else _member(name, classes)](_typed(text, str))


def _unpack_numpy(payload: Any) -> NumpyScalar:
    code, data = _typed(payload, list)
    if (itemsize := numpy_itemsize(_typed(code, str))) is None:
        raise ValueError(f"a numpy scalar of dtype {code[:100]!r}")
    if len(_typed(data, bytes)) != itemsize:
        raise ValueError(f"{len(data)} bytes for a numpy scalar of dtype {code}")
    return NumpyScalar(code, data)


def _unpack_array(payload: Any) -> ArrayValue:
    dtype, sizes, data, kind = _typed(payload, list)
    shape = _integers(sizes)
    itemsize = DTYPES[_member(dtype, DTYPES)].itemsize
    if min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape}")
    check_shape(shape, itemsize)
    if len(_typed(data, bytes)) != prod(shape) * itemsize:
        raise ValueError(f"{len(data)} bytes for an array of shape {shape} and dtype {dtype}")
    return ArrayValue(dtype, shape, data, _member(kind, ("tensor", "numpy")))


def _member(value: Any, names: Iterable[str]) -> Any:
    if _typed(value, str) not in names:
        raise ValueError(f"{value[:100]!r} is not known")
    return value


_RAW_DECODERS: Mapping[int, Callable[[bytes], object]] = {
    Ext.INT: lambda data: int.from_bytes(data, "big", signed=True),
    Ext.TEXT: lambda data: data.decode("utf-8", "surrogatepass"),
    Ext.COMPLEX: _unpack_complex,
}

_DECODERS: Mapping[int, Callable[[Any], object]] = {
    Ext.TUPLE: lambda payload: tuple(_typed(payload, list)),
    Ext.SET: _unpack_set,
    Ext.FROZENSET: lambda payload: frozenset(_unpack_set(payload)),
    Ext.ORDERED_DICT: lambda payload: OrderedDict(_typed(payload, dict)),
    Ext.COUNTER: lambda payload: Counter(_typed(payload, dict)),
    Ext.DEFAULTDICT: _unpack_defaultdict,
    Ext.DEQUE: _unpack_deque,
    Ext.RANGE: lambda payload: range(*_integers(payload)),
    Ext.SIZE: lambda payload: Size(_integers(payload)),
    Ext.DTYPE: lambda payload: DTypeValue(_typed(payload, str)),
    Ext.NUMPY_SCALAR: _unpack_numpy,
    Ext.DEVICE: lambda payload: Device(_typed(payload, str)),
    Ext.DATETIME: _unpack_datetime,
    Ext.DATE: lambda payload: date(*_integers(payload)),
    Ext.TIMEDELTA: lambda payload: timedelta(*_integers(payload)),
    Ext.PATH: _unpack_path,
    Ext.ARRAY: _unpack_array,
}
