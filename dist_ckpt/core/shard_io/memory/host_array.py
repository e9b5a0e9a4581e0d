"""Tensors in plain host memory, without torch, and their elements as numbers for numpy."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import index as as_int
from types import EllipsisType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Region, RegionPiece, Shape, row_major_strides

if TYPE_CHECKING:
    import numpy as np
    import torch

# The `struct` code of each dtype. bfloat16 and complex numbers are built from these.
_STRUCT = {
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint64": "Q",
    "uint32": "I",
    "uint16": "H",
    "uint8": "B",
    "bool": "?",
}
_COMPLEX = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
_NUMPY = frozenset(_STRUCT) | {"complex128", "complex64"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Array:
    """A tensor as row-major, little-endian bytes. `numpy` and `torch` share them if writable.

    Arrays are equal if their dtypes, shapes and bytes are equal. `array[2:5, ..., 0]` is a copy of
    these elements. An index has integers, slices without a step, `...` and None, as in numpy; for
    others, index the result of `numpy` or `torch`.
    """

    dtype: str
    shape: Shape
    data: memoryview

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "data", memoryview(self.data).cast("B"))
        expected = prod(self.shape) * DTYPES[self.dtype].itemsize
        if self.data.nbytes != expected:
            raise ValueError(
                f"{self.dtype} of shape {self.shape} has {expected} bytes, not {self.data.nbytes}"
            )

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.data.nbytes

    def numpy(self) -> np.ndarray:
        """Return the tensor as a numpy array. Raises TypeError for a dtype that numpy lacks."""
        if self.dtype not in _NUMPY:
            raise TypeError(f"numpy has no {self.dtype}: use `.torch()`, or the bytes in `.data`")
        numpy = _import_installed("numpy", "numpy", "Array.numpy")
        dtype = numpy.dtype(self.dtype).newbyteorder("<")
        array: np.ndarray = numpy.frombuffer(self.data, dtype).reshape(self.shape)
        return array

    def torch(self) -> torch.Tensor:
        """Return the tensor as a CPU tensor of torch."""
        torch = _import_installed("torch", '"dist-ckpt[torch]"', "Array.torch")
        dtype = getattr(torch, self.dtype, None)
        if dtype is None:
            raise TypeError(f"torch {torch.__version__} has no {self.dtype}: upgrade torch")
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=dtype, device="cpu")  # type: ignore[no-any-return]
        memory = bytearray(self.data) if self.data.readonly else self.data
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return flat.view(dtype).view(self.shape)  # type: ignore[no-any-return]

    def __getitem__(self, index: BasicIndex | tuple[BasicIndex, ...]) -> Array:
        region, shape = select_elements(index, self.shape)
        itemsize = DTYPES[self.dtype].itemsize
        data = memoryview(bytearray(region.numel * itemsize))
        strides = row_major_strides(self.shape)
        start = sum(o * s for o, s in zip(region.offset, strides, strict=True)) * itemsize
        piece = RegionPiece(region, 0)
        ArrayTarget(data, itemsize).place(piece, region, self.data[start:], strides)
        return Array(self.dtype, shape, data)

    def __len__(self) -> int:
        return len(element_indices(self.shape))

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in element_indices(self.shape))

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())  # type: ignore[arg-type]  # complex numbers raise TypeError

    def item(self) -> object:
        """Return the one element as a Python number. ValueError for another number of them."""
        if prod(self.shape) != 1:
            raise ValueError(f"{self!r} is not one number: index it, or use `.numpy()`")
        return self._values()[0]

    def tolist(self) -> object:
        """Return nested lists of Python numbers, or one number for a tensor without dimensions."""
        return _nest(iter(self._values()), self.shape)

    def _values(self) -> Sequence[object]:
        if self.dtype in ("bfloat16", "bcomplex32"):
            halves = struct.iter_unpack("<2s", self.data)
            reals = [struct.unpack("<f", b"\0\0" + half)[0] for (half,) in halves]
            return reals if self.dtype == "bfloat16" else [*map(complex, reals[::2], reals[1::2])]
        if part := _COMPLEX.get(self.dtype):
            pairs = struct.iter_unpack(f"<2{_STRUCT[part]}", self.data)
            return [complex(real, imaginary) for real, imaginary in pairs]
        if self.dtype not in _STRUCT:
            raise TypeError(f"python has no {self.dtype}: use `.torch()`, or the bytes in `.data`")
        return struct.unpack(f"<{prod(self.shape)}{_STRUCT[self.dtype]}", self.data)

    def __array__(
        self,
        dtype: np.dtype | None = None,
        copy: bool | None = None,  # noqa: FBT001 - numpy's
    ) -> np.ndarray:
        array = self.numpy()
        if dtype is not None and dtype != array.dtype:
            if copy is False:
                raise ValueError(f"{self.dtype} as {dtype} needs a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        return (self.dtype, self.shape) == (other.dtype, other.shape) and self.data == other.data

    __hash__ = None  # type: ignore[assignment]  # the memory may change

    def __repr__(self) -> str:
        return f"Array({self.dtype}, {self.shape})"


class ArrayTarget:
    """A `Target` for row-major host bytes of a cell."""

    __slots__ = ("_itemsize", "_memory")

    def __init__(self, memory: memoryview, itemsize: int) -> None:
        self._memory = memory.cast("B")
        self._itemsize = itemsize

    def memory(self) -> memoryview | None:
        """Return the cell's bytes."""
        return self._memory

    def place(self, piece: RegionPiece, box: Region, data: memoryview, strides: Shape) -> None:
        """Copy the elements of `box` from `data`: memoryviews copy whole rows."""
        if box.numel == 0:
            return
        cell_strides = row_major_strides(piece.region.shape)
        within = box.relative_to(piece.region.offset).offset
        start = piece.start + sum(o * s for o, s in zip(within, cell_strides, strict=True))
        factor = 2 if self._itemsize == 16 else 1
        steps = zip(box.shape, cell_strides, strides, strict=True)
        dims = _merge_dims([*((n, t * factor, s * factor) for n, t, s in steps), (factor, 1, 1)])
        # One slice copies the last dimension, or the longest one if the last is short.
        is_long = dims[-1][0] >= _LONG_ROW
        row = len(dims) - 1 if is_long else max(range(len(dims)), key=lambda d: dims[d][0])
        n, t_step, s_step = dims.pop(row)
        t_reach, s_reach = (n - 1) * t_step + 1, (n - 1) * s_step + 1
        target_words, source_words = (
            _view_as_words(memory, self._itemsize // factor) for memory in (self._memory, data)
        )
        for t, s in _iter_offsets(dims, start * factor, 0):
            target_words[t : t + t_reach : t_step] = source_words[s : s + s_reach : s_step]


# --- indices ---------------------------------------------------------------------------------

# An index of one dimension. An index of several dimensions is a tuple of these.
BasicIndex = SupportsIndex | slice | EllipsisType | None


def select_elements(
    index: BasicIndex | tuple[BasicIndex, ...], shape: Shape
) -> tuple[Region, Shape]:
    """Return the region that an index selects, and the shape of the result.

    IndexError as in numpy. ValueError if the index is not a basic index with step 1.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if (num_dots := sum(entry is Ellipsis for entry in entries)) > 1:
        raise ValueError("an index can have one `...` only")
    num_dims = len(entries) - num_dots - sum(entry is None for entry in entries)
    if num_dims > len(shape):
        raise IndexError(f"{num_dims} indices for a tensor of {len(shape)} dimensions")
    rest = (slice(None),) * (len(shape) - num_dims)
    at = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    offset: list[int] = []
    extent: list[int] = []
    result: list[int] = []
    for entry in (*entries[:at], *rest, *entries[at + 1 :]):
        if entry is None:
            result.append(1)
            continue
        bounds = _bounds(entry, shape[len(offset)], len(offset))
        offset.append(bounds.start)
        extent.append(len(bounds))
        if isinstance(entry, slice):
            result.append(len(bounds))
    return Region(tuple(offset), tuple(extent)), tuple(result)


def _bounds(entry: BasicIndex, size: int, dim: int) -> range:
    """Return the range of one entry of an index in its dimension."""
    if isinstance(entry, slice):
        start, stop, step = entry.indices(size)
        if step != 1:
            raise ValueError(f"a step of {step}: read the range, then index its `.numpy()`")
        return range(start, stop)
    number = _whole_number(entry)
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of bounds for dimension {dim} of size {size}")
    return range(number % size, number % size + 1)


def _whole_number(entry: object) -> int:
    """Return an integer of an index. ValueError for others: lists, masks, arrays, bools."""
    # An array of one element has `__index__`, and numpy takes it for a list of indices.
    is_scalar = isinstance(entry, SupportsIndex) and not getattr(entry, "shape", ())
    if is_scalar and "bool" not in (type(entry).__name__ + str(getattr(entry, "dtype", ""))):
        with suppress(TypeError):
            return as_int(entry)  # type: ignore[arg-type]
    raise ValueError(
        f"an index has integers, slices, `...` and None here, not {type(entry).__name__}: for "
        f"lists and masks, read the range, then index its `.numpy()`"
    )


def element_indices(shape: Shape) -> range:
    """Return the indices of the first dimension. TypeError if there is none, as in numpy."""
    if not shape:
        raise TypeError("a tensor without dimensions has no length: see `.item()` and `.torch()`")
    return range(shape[0])


# --- copying boxes ---------------------------------------------------------------------------

# The memoryview code of integers by size. An item of 16 bytes is two integers of 8.
_WORDS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
# With rows of at least this length, one step of the loop for each row is fast enough.
_LONG_ROW = 32

# A dimension: its size, its step in the target, and its step in the source.
_Dim = tuple[int, int, int]


def _merge_dims(dims: Sequence[_Dim]) -> list[_Dim]:
    """Merge contiguous dimensions, and drop those of size 1."""
    merged: list[_Dim] = []
    for n, t, s in dims:
        if n == 1:
            continue
        if merged and merged[-1][1:] == (n * t, n * s):
            merged[-1] = (merged[-1][0] * n, t, s)
        else:
            merged.append((n, t, s))
    return merged or [(1, 1, 1)]


def _iter_offsets(dims: Sequence[_Dim], target: int, source: int) -> Iterator[tuple[int, int]]:
    if not dims:
        yield target, source
        return
    (n, t, s), rest = dims[0], dims[1:]
    for i in range(n):
        yield from _iter_offsets(rest, target + i * t, source + i * s)


def _view_as_words(memory: memoryview, size: int) -> memoryview:
    whole = memory.cast("B")
    return whole[: whole.nbytes // size * size].cast(_WORDS[size])


def _import_installed(module: str, package: str, user: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ImportError(f"{user} needs {module}: pip install {package}") from None


def _nest(values: Iterator[object], shape: Shape) -> object:
    if not shape:
        return next(values)
    return [_nest(values, shape[1:]) for _ in range(shape[0])]


# --- elements as numbers -----------------------------------------------------------------------

# Exponent bits, mantissa bits, bias, and the rule for special codes. "ieee" has infinities. In
# "fn", nan is all ones. In "fnuz", nan has the code of -0.
_TINY_FLOATS = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def has_numbers(dtype: str) -> bool:
    """Return True if `numbers` supports a dtype. Bits and tiny integers are unsupported."""
    converted = ("bfloat16", "complex32", "bcomplex32", "float8_e8m0fnu", "float4_e2m1fn_x2")
    return dtype in _NUMPY or dtype in _TINY_FLOATS or dtype in converted


def numpy_module() -> Any:  # its types are unknown if it is not installed
    """Return the module numpy. Raises ImportError with the remedy."""
    return _import_installed("numpy", "numpy", "to compute with values")


def numbers(dtype: str, data: memoryview) -> np.ndarray:
    """Return elements as a flat array of exact numbers, which may share memory.

    A bool becomes 0 or 1. Raises TypeError unless `has_numbers`, and ImportError without numpy.
    """
    if not has_numbers(dtype):
        raise TypeError(f"elements of {dtype} are not numbers")
    numpy = numpy_module()
    values: np.ndarray
    if dtype in ("bfloat16", "bcomplex32"):
        reals = (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        values = reals if dtype == "bfloat16" else reals.view("<c8")
    elif dtype == "complex32":
        values = numpy.frombuffer(data, "<f2").astype("<f4").view("<c8")
    elif dtype == "bool":
        values = numpy.frombuffer(data, "u1")
    elif dtype in _NUMPY:
        values = numpy.frombuffer(data, numpy.dtype(dtype).newbyteorder("<"))
    else:
        values = numpy.array(_decode_table(dtype), "<f4")[numpy.frombuffer(data, "u1")].reshape(-1)
    return values


@cache
def _decode_table(dtype: str) -> tuple[object, ...]:
    """Return the number of each byte code of a dtype, or the two numbers of a packed dtype."""
    assert DTYPES[dtype].itemsize == 1
    if dtype == "float8_e8m0fnu":
        return (*(2.0 ** (code - 127) for code in range(255)), float("nan"))
    if dtype == "float4_e2m1fn_x2":  # the low half is the first number
        halves = (*_E2M1, *(-value for value in _E2M1))
        return tuple((halves[code & 15], halves[code >> 4]) for code in range(256))
    return tuple(_decode_tiny_float(code, *_TINY_FLOATS[dtype]) for code in range(256))


def _decode_tiny_float(
    code: int, exponent_bits: int, mantissa_bits: int, bias: int, specials: str
) -> float:
    sign = -1.0 if code >> 7 else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if (specials == "fnuz" and code == 0x80) or (specials == "fn" and code & 0x7F == 0x7F):
        return float("nan")
    if specials == "ieee" and exponent == (1 << exponent_bits) - 1:
        return float("nan") if mantissa else sign * float("inf")
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return float(sign * (1 + fraction) * 2.0 ** (exponent - bias))
