"""The types of plain data: extension types of msgpack, and placeholders for torch and numpy.

msgpack's own types (None, bool, 64-bit int, float, str, bytes, list, dict) stay as they are. All
others are extensions: see `docs/format.md`. Torch and numpy are recognised without an import, and
decoded as placeholders for the caller to convert.
"""

from __future__ import annotations

import pathlib
import re
import struct
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from operator import eq
from typing import Literal

# Deeper data is refused, and so is data that contains itself.
MAX_DEPTH = 64


class Ext(IntEnum):
    """The codes of the extension types. A code never changes its meaning."""

    INT = 1  # outside of 64 bits
    TEXT = 2  # not valid Unicode
    TUPLE = 3
    SET = 4
    FROZENSET = 5
    COMPLEX = 6
    ORDERED_DICT = 7
    COUNTER = 8
    DEFAULTDICT = 9
    SIZE = 10
    DTYPE = 11
    NUMPY_SCALAR = 12
    DEVICE = 13
    DATETIME = 14
    DATE = 15
    TIMEDELTA = 16
    PATH = 17
    ARRAY = 18
    DEQUE = 19
    RANGE = 20


@dataclass(frozen=True, slots=True)
class DTypeValue:
    """A torch.dtype, such as "float32"."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """A torch.device, such as "cuda:0"."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """A torch.Size."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NumpyScalar:
    """A numpy scalar: numpy's code of its dtype, such as "<f4", and its bytes."""

    dtype: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """A tensor or numpy array inside a per-rank value: row-major bytes of a dtype."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    kind: Literal["tensor", "numpy"] = "tensor"


Placeholder = DTypeValue | Device | Size | NumpyScalar | ArrayValue

_NUMPY_CODE = re.compile(r"[<>|]([biufcmMSU])([1-9][0-9]{0,5})(\[[0-9A-Za-z]+\])?")

# Without long double: its bytes have another meaning on other machines.
_NUMPY_SIZES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys("iu", (1, 2, 4, 8)),
    **dict.fromkeys("mM", (8,)),
    "b": (1,),
    "f": (2, 4, 8),
    "c": (8, 16),
}

FACTORIES: Mapping[str, Callable[[], object] | None] = {
    **{cls.__name__: cls for cls in (bool, int, float, complex, str, bytes)},
    **{cls.__name__: cls for cls in (list, tuple, dict, set, frozenset)},
    "None": None,
}

PATHS: tuple[type[pathlib.PurePath], ...] = (
    pathlib.PosixPath,
    pathlib.WindowsPath,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
)

COMPLEX = struct.Struct(">dd")

# Python compares members with equal hashes, and a file can choose hashes: n members then take n * n
# comparisons.
MAX_ALIKE = 64


def check_hashes(members: Collection[object]) -> None:
    """Raise ValueError if building a set or a dict of these would take for ever."""
    if len(members) <= MAX_ALIKE:
        return
    # Sorted, not counted: a Counter takes more memory than the members.
    hashes = sorted(map(hash, members))
    if any(map(eq, hashes, islice(hashes, MAX_ALIKE, None))):
        raise ValueError(f"more than {MAX_ALIKE} members or keys of one hash")


def numpy_itemsize(code: str) -> int | None:
    """Return the size of a numpy scalar of the dtype `code`; None if it cannot be stored."""
    match = _NUMPY_CODE.fullmatch(code)
    if match is None:
        return None
    kind, size, unit = match[1], int(match[2]), match[3]
    if kind in "SU":
        return size * 4 if kind == "U" else size
    return size if size in _NUMPY_SIZES[kind] and (unit is None or kind in "mM") else None


# --- what it costs ---------------------------------------------------------------------------

# About how many bytes Python takes for a value. An empty dict is one byte in a file and 72 in
# memory, so the cost is computed before anything is built.
_SLOT = 8  # in a list
_NUMBER = 32
_LIST = 64
_SMALL_DICTS = [sys.getsizeof(dict.fromkeys(range(count))) for count in range(16)]
_PAIR = 100  # of a large dict: some of its table is free
_MEMBER = 112  # of a set, likewise

# The cost of extensions, in addition to their payloads.
_EXT_COSTS: Mapping[int, int] = {
    Ext.TUPLE: 0,
    Ext.SET: 200,
    Ext.FROZENSET: 200,
    Ext.ORDERED_DICT: 136,
    Ext.COUNTER: 72,
    Ext.DEFAULTDICT: 72,
    Ext.DEQUE: 760,
    Ext.ARRAY: 1024,
}
_RAW = (Ext.INT, Ext.TEXT, Ext.COMPLEX)
_MAX_SMALL = 64

# msgpack's first bytes: the number of length bytes that follow, for bytes, extensions, text, lists
# and dicts; and the lengths of fixed-size extensions.
_LENGTHS = {
    **{first + i: 1 << i for first in (0xC4, 0xC7, 0xD9) for i in range(3)},
    **{first + i: 2 << i for first in (0xDC, 0xDE) for i in range(2)},
}
_FIXED_EXTS = {0xD4 + i: 1 << i for i in range(5)}


def cost_of(data: bytes, limit: int) -> int:
    """Return about how much memory encoded data takes decoded, up to `limit`: 0.1 us a value."""
    at = cost = 0
    while at < len(data) and cost <= limit:
        code = data[at]
        nbytes, more = _FIRST_BYTES[code]
        if nbytes:
            at += nbytes
        else:
            at, more = _long_cost(data, at)
        cost += more
    return cost


def _long_cost(data: bytes, at: int) -> tuple[int, int]:
    """Return the start of the next value, and the cost of one whose size must be read."""
    code = data[at]
    start, count = _length(data, at)
    if code in (0xC4, 0xC5, 0xC6):
        return start + count, _SLOT + 48 + count
    if code in (0xD9, 0xDA, 0xDB):
        return start + count, _SLOT + _text_cost(count)
    if code in (0xDC, 0xDD):
        return start, _SLOT + _LIST + _SLOT * count
    if code in (0xDE, 0xDF):
        return start, _SLOT + _dict_cost(count)
    return _ext_cost(data, start, count)


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Return the start and the number of a value's bytes, items or pairs."""
    code = data[at]
    if 0x80 <= code < 0xA0:
        return at + 1, code & 0xF
    start = at + 1 + _LENGTHS.get(code, 0)
    return start, _FIXED_EXTS.get(code) or int.from_bytes(data[at + 1 : start], "big")


def _ext_cost(data: bytes, at: int, nbytes: int) -> tuple[int, int]:
    """Return the start of the next value, and the cost of an extension, whose type is at `at`."""
    start = at + 1
    if start >= len(data):
        return start, 0
    kind = data[at]
    if kind in _RAW:
        return start + nbytes, _SLOT + _text_cost(nbytes)
    if kind not in _EXT_COSTS and nbytes <= _MAX_SMALL:
        return start + nbytes, _SLOT + 64 + 8 * nbytes
    # The payload is copied, and then parsed as the next value.
    cost = _SLOT + _EXT_COSTS.get(kind, 0) + 48 + nbytes
    if kind in (Ext.SET, Ext.FROZENSET):
        cost += _MEMBER * _length(data, start)[1]
    return start, cost


def _dict_cost(count: int) -> int:
    return _SMALL_DICTS[count] if count < len(_SMALL_DICTS) else _PAIR * count


def _text_cost(nbytes: int) -> int:
    # Python caches one string for each character up to U+00FF. A character beyond U+FFFF makes all
    # of a text take four bytes each.
    return 0 if nbytes < 2 else 64 + (2 if nbytes < 32 else 4) * nbytes


# For each first byte: the bytes and the cost of a value, or of a list or dict without its items. 0
# bytes if a size must be read. Values that cost only their slot are cached by Python.
_FIRST_BYTES: Sequence[tuple[int, int]] = (
    *[(1, _SLOT)] * 128,  # 00: 0 to 127
    *[(1, _SLOT + _dict_cost(count)) for count in range(16)],  # 80
    *[(1, _SLOT + _LIST + _SLOT * count) for count in range(16)],  # 90
    *[(1 + nbytes, _SLOT + _text_cost(nbytes)) for nbytes in range(32)],  # a0
    *[(1, _SLOT)] * 4,  # c0: nil, false, true
    *[(0, 0)] * 6,  # c4
    *[(1 + nbytes, _SLOT + _NUMBER) for nbytes in (4, 8)],  # ca: floats
    *[(1 + nbytes, _SLOT + _NUMBER * (nbytes > 1)) for nbytes in (1, 2, 4, 8)],  # cc: from 0 on
    *[(1 + nbytes, _SLOT + _NUMBER) for nbytes in (1, 2, 4, 8)],  # d0: below 0
    *[(0, 0)] * 12,  # d4
    *[(1, _SLOT + _NUMBER)] * 27,  # e0: -32 to -6
    *[(1, _SLOT)] * 5,  # fb: -5 to -1
)
