"""The elements of a tensor as numbers for numpy, without torch.

bfloat16, which numpy lacks, is the upper half of a float32. Tables have the floats of 8 bits.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from dist_ckpt.core.format.dtypes import DTYPES

if TYPE_CHECKING:
    import numpy as np

_NUMPY = frozenset(
    {
        *("float64", "float32", "float16", "complex128", "complex64", "bool"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    }
)

# Exponent bits, mantissa bits, bias, and special codes. "ieee" has infinities; nan is all ones in
# "fn", and the code of -0 in "fnuz".
_TINY_FLOATS = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def has_numbers(dtype: str) -> bool:
    """Return True if elements of a dtype are numbers: bits, and integers of few bits, are not."""
    converted = ("bfloat16", "complex32", "float8_e8m0fnu", "float4_e2m1fn_x2")
    return dtype in _NUMPY or dtype in _TINY_FLOATS or dtype in converted


def numpy_module() -> Any:  # its types are unknown if it is not installed
    """Return numpy. Raises ImportError with the remedy."""
    try:
        return importlib.import_module("numpy")
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ImportError("to compute with values needs numpy: pip install numpy") from None


def numbers(dtype: str, data: memoryview) -> np.ndarray:
    """Return elements as a flat array of exact numbers; a bool is 0 or 1. May share memory.

    TypeError for a dtype without `has_numbers`, ImportError without numpy.
    """
    if not has_numbers(dtype):
        raise TypeError(f"elements of {dtype} are not numbers")
    values: np.ndarray = _numbers(numpy_module(), dtype, data)
    return values


def _numbers(numpy: Any, dtype: str, data: memoryview) -> Any:
    if dtype == "bfloat16":
        return (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    if dtype == "complex32":
        return numpy.frombuffer(data, "<f2").astype("<f4").view("<c8")
    if dtype == "bool":
        return numpy.frombuffer(data, "u1")
    if dtype in _NUMPY:
        return numpy.frombuffer(data, numpy.dtype(dtype).newbyteorder("<"))
    return numpy.array(_table(dtype), "<f4")[numpy.frombuffer(data, "u1")].reshape(-1)


@cache
def _table(dtype: str) -> tuple[object, ...]:
    """Return the number, or two of them, of each byte of a dtype."""
    assert DTYPES[dtype].itemsize == 1
    if dtype == "float8_e8m0fnu":
        return (*(2.0 ** (code - 127) for code in range(255)), float("nan"))
    if dtype == "float4_e2m1fn_x2":  # the lower half is the first
        halves = (*_E2M1, *(-value for value in _E2M1))
        return tuple((halves[code & 15], halves[code >> 4]) for code in range(256))
    return tuple(_tiny_float(code, *_TINY_FLOATS[dtype]) for code in range(256))


def _tiny_float(
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
