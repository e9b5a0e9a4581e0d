"""Inventories and receipts as messages between ranks: msgpack, and a fixed table of classes.

A value is None, a bool, a number, a str, bytes, a tuple, a dict, or one of the dataclasses of the
table, nested; a list comes back as a tuple. Nothing is looked up by a name from the message, and
every object is built by its class's constructor.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import TypeVar

import msgpack

from dist_ckpt.format import geometry, index
from dist_ckpt.planning import plan

T = TypeVar("T")

# The place in the table is the code on the wire. Ranks of one job run one version, and who reads
# what a snapshot has kept compares versions first: so the table may change between versions.
_CLASSES: tuple[type, ...] = (
    geometry.Region,
    geometry.Elements,
    index.Node,
    plan.Mesh,
    plan.Replicate,
    plan.Shard,
    plan.StridedShard,
    plan.Whole,
    plan.Placed,
    plan.Flattened,
    plan.Parts,
    plan.Ruled,
    plan.TensorEntry,
    plan.NameList,
    plan.Inventory,
)
_CODES = {cls: code for code, cls in enumerate(_CLASSES)}
# A tuple of many values of one class goes as one tuple a field: they are most of an inventory.
_COLUMNS = len(_CLASSES)
_MANY = 8

_FIELDS = {cls: tuple(field.name for field in fields(cls) if field.init) for cls in _CLASSES}


def pack(value: object) -> bytes:
    """Return a value as bytes. Raises TypeError for what the wire does not carry."""
    data = msgpack.packb(value, default=_to_extension)
    assert isinstance(data, bytes)
    return data


def unpack(data: bytes, expected: type[T]) -> T:
    """Return the value that `pack` made bytes of.

    Raises ValueError if the bytes are no message, or one of another class than `expected`.
    """
    try:
        value = _unpack(data)
    except (msgpack.UnpackException, TypeError, RecursionError) as error:
        raise ValueError(f"not a message between ranks: {error}") from error
    if not isinstance(value, expected):
        raise ValueError(
            f"a message holds a {type(value).__name__} where a {expected.__name__} was expected"
        )
    return value


def _unpack(data: bytes) -> object:
    return msgpack.unpackb(data, ext_hook=_from_extension, use_list=False, strict_map_key=False)


def _to_extension(value: object) -> msgpack.ExtType:
    cls = type(value)
    if cls not in _CODES:
        raise TypeError(f"a {cls.__name__} does not go over the wire")
    values = [getattr(value, name) for name in _FIELDS[cls]]
    return msgpack.ExtType(_CODES[cls], pack(list(map(_in_columns, values))))


def _in_columns(value: object) -> object:
    if not isinstance(value, tuple) or len(value) < _MANY:
        return value
    cls, *others = {*map(type, value)}
    if others or len(_FIELDS.get(cls, ())) < 2:
        return value
    columns = zip(*map(attrgetter(*_FIELDS[cls]), value), strict=True)
    return msgpack.ExtType(_COLUMNS, pack([_CODES[cls], *columns]))


def _from_extension(code: int, data: bytes) -> object:
    values = _unpack(data)
    if code == _COLUMNS:
        return _from_columns(values)
    if not 0 <= code < len(_CLASSES):
        raise ValueError(f"no class has the code {code}")
    if not isinstance(values, tuple):
        raise ValueError(f"{_CLASSES[code].__name__} from a {type(values).__name__}")
    return _CLASSES[code](*values)


def _from_columns(values: object) -> tuple[object, ...]:
    if not isinstance(values, tuple) or not values or values[0] not in range(len(_CLASSES)):
        raise ValueError("columns of no class")
    code, *columns = values
    return tuple(_CLASSES[code](*row) for row in zip(*columns, strict=True))
