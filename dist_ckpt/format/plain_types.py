"""The types of plain data: msgpack's extension types, and stand-ins for what needs torch or numpy.

What msgpack has itself (None, bool, 64-bit int, float, str, bytes, list, dict) is stored as that;
every other type is an extension, see `docs/format.md`. What needs torch or numpy is recognised
without importing them and decoded as a stand-in; the caller says what becomes of it.
"""

from __future__ import annotations

import pathlib
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

# Deeper data is refused; so is data that contains itself.
MAX_DEPTH = 64


class Ext(IntEnum):
    """The codes of the extension types. A code is never given another meaning."""

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


@dataclass(frozen=True, slots=True)
class DTypeValue:
    """Stands for a torch.dtype: "float32"."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """Stands for a torch.device: "cuda:0"."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """Stands for a torch.Size."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NumpyScalar:
    """Stands for a numpy scalar: numpy's code of its dtype, such as "<f4", and its bytes."""

    dtype: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """Stands for a tensor or numpy array inside a per-rank value: row-major bytes of a dtype."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    kind: Literal["tensor", "numpy"] = "tensor"


StandIn = DTypeValue | Device | Size | NumpyScalar | ArrayValue

_NUMPY_CODE = re.compile(r"[<>|]([biufcmMSU])([1-9][0-9]{0,5})(\[[0-9A-Za-z]+\])?")

# Not long double: its bytes mean something else on other machines.
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

# Python looks at all members of one hash in turn, and a file can choose them: n cost n * n.
_MAX_ALIKE = 64


def check_hashes(members: Collection[object]) -> None:
    """Raise ValueError if a set, or a dict, of these would take for ever to make."""
    if len(members) <= _MAX_ALIKE:
        return
    _, count = Counter(map(hash, members)).most_common(1)[0]
    if count > _MAX_ALIKE:
        raise ValueError(f"{count} members or keys of one hash, where {_MAX_ALIKE} is the limit")


def numpy_itemsize(code: str) -> int | None:
    """Return the size of a numpy scalar of the dtype `code`; None if it is not stored."""
    match = _NUMPY_CODE.fullmatch(code)
    if match is None:
        return None
    kind, size, unit = match[1], int(match[2]), match[3]
    if kind in "SU":
        return size * 4 if kind == "U" else size
    return size if size in _NUMPY_SIZES[kind] and (unit is None or kind in "mM") else None
