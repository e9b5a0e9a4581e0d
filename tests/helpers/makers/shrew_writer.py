"""Writes `.shrew` files as shrew's own code does, field by field; it shares no code with ours."""

from __future__ import annotations

import struct
from collections.abc import Sequence

TAGS = {"f32": 0, "f64": 1, "u8": 2, "u32": 3, "i64": 4, "f16": 5, "bf16": 6}

# (name, dtype, dims, data)
Tensor = tuple[str, str, Sequence[int], bytes]


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def f64(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)


def text(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u32(len(data)) + data


def tensor(name: str | bytes, dtype: str, dims: Sequence[int], data: bytes) -> bytes:
    shape = b"".join(u32(dim) for dim in dims)
    head = text(name) + bytes([TAGS[dtype]]) + u32(len(dims)) + shape
    return head + u64(len(data)) + data


def tensors(*some: Tensor) -> bytes:
    return u32(len(some)) + b"".join(tensor(*one) for one in some)


def version_1(*some: Tensor) -> bytes:
    return b"SHRW" + u32(1) + tensors(*some)


def model_section(*some: Tensor) -> bytes:
    return b"\x01" + tensors(*some)


def optimizer_section(
    kind: str, scalars: Sequence[tuple[str, bytes]], buffers: Sequence[tuple[str, bytes]]
) -> bytes:
    """`scalars` and `buffers` are names and the bytes of their numbers."""
    out = b"\x02" + text(kind) + u32(len(scalars))
    out += b"".join(text(name) + value for name, value in scalars) + u32(len(buffers))
    return out + b"".join(text(name) + u64(len(data) // 8) + data for name, data in buffers)


def metadata_section(
    epoch: int, global_step: int, best_loss: bytes, losses: Sequence[float]
) -> bytes:
    return b"\x03" + u64(epoch) + u64(global_step) + best_loss + u32(len(losses)) + f64(*losses)


def version_2(*sections: bytes) -> bytes:
    return b"SHRW" + u32(2) + b"".join(sections) + b"\xff"


MODEL: tuple[Tensor, ...] = (
    ("layer1/weight", "f32", (2, 3), struct.pack("<6f", *range(6))),
    ("layer1/bias", "f64", (3,), f64(0.1, float("nan"), float("-inf"))),
    ("pixels", "u8", (3,), b"\x00\x80\xff"),
    ("ids", "u32", (2, 1), struct.pack("<2I", 7, (1 << 32) - 1)),
    ("large", "i64", (3,), struct.pack("<3q", (1 << 53) + 1, (1 << 63) - 1, -(1 << 63))),
    ("half", "f16", (2,), struct.pack("<2e", 0.5, -2.0)),
    ("brain", "bf16", (2,), b"\x80\x3f\x01\x7f"),
    ("scalar", "f32", (), struct.pack("<f", 2.5)),
    ("none", "i64", (0, 4), b""),
    ("a.b/c é", "u8", (1,), b"!"),
)
# A signalling NaN, and one with a payload: whoever makes numbers of them may lose their bits.
NANS = bytes.fromhex("010000000000f07f"), bytes.fromhex("efbeadde0000f8ff")
OPTIMIZER = optimizer_section(
    "Adam",
    [("t", f64(100.0)), ("lr", f64(1e-3)), ("beta1", NANS[0])],
    [("m.0", f64(0.01, 0.02) + NANS[1]), ("v.0", f64(0.5)), ("empty", b"")],
)
METADATA = metadata_section((1 << 64) - 1, 5000, f64(float("inf")), [1.5, float("nan"), 0.032])

FILES = {
    "version 1": version_1(*MODEL),
    "version 1, empty": version_1(),
    "version 2": version_2(model_section(*MODEL), OPTIMIZER, METADATA),
    "version 2, no optimizer": version_2(
        model_section(*MODEL[:2]), metadata_section(5, 250, f64(0.1), [])
    ),
    "version 2, empty": version_2(
        model_section(), metadata_section(0, 0, f64(float("-inf")), [0.0])
    ),
    "version 2, empty optimizer": version_2(
        model_section(), optimizer_section("", [], []), metadata_section(0, 1 << 63, NANS[0], [])
    ),
    "version 2, scalars only": version_2(
        model_section(*MODEL[:1]), optimizer_section("SGD", [("lr", f64(0.1))], []), METADATA
    ),
}
