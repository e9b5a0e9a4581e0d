"""The table of dtypes: torch's name, the size in bytes, and the code of safetensors.

A dtype without a code is stored as U8, with a last dimension of its size. Its real name is in the
shard file's `__metadata__`. An element has at least one byte, as in torch. A tensor subclass that
packs several numbers in a byte is stored as its inner tensors. `docs/architecture.md` lists the
other tables that a new dtype needs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype as it is stored; `safetensors` is None if that format has no code for it."""

    name: str
    itemsize: int
    safetensors: str | None = None


_TABLE = (
    DType("float64", 8, "F64"),
    DType("float32", 4, "F32"),
    DType("float16", 2, "F16"),
    DType("bfloat16", 2, "BF16"),
    DType("complex128", 16),
    DType("complex64", 8, "C64"),
    DType("complex32", 4),
    DType("bcomplex32", 4),  # two bfloat16, of torch 2.14
    DType("float8_e4m3fn", 1, "F8_E4M3"),
    DType("float8_e5m2", 1, "F8_E5M2"),
    DType("float8_e8m0fnu", 1, "F8_E8M0"),
    DType("float8_e4m3fnuz", 1),
    DType("float8_e5m2fnuz", 1),
    DType("float4_e2m1fn_x2", 1),
    DType("int64", 8, "I64"),
    DType("int32", 4, "I32"),
    DType("int16", 2, "I16"),
    DType("int8", 1, "I8"),
    DType("uint64", 8, "U64"),
    DType("uint32", 4, "U32"),
    DType("uint16", 2, "U16"),
    DType("uint8", 1, "U8"),
    DType("bool", 1, "BOOL"),
    # torch stores one of these in each byte, and computes with none of them
    *(DType(f"int{bits}", 1) for bits in range(1, 8)),
    *(DType(f"uint{bits}", 1) for bits in range(1, 8)),
    *(DType(name, 1) for name in ("bits8", "bits1x8", "bits2x4", "bits4x2")),
    DType("bits16", 2),
)

DTYPES = {dtype.name: dtype for dtype in _TABLE}
