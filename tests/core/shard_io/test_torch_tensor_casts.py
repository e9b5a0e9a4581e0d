"""Which dtypes are cast into which, and what becomes of values."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

import torch

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Region, pieces, row_major_strides
from dist_ckpt.core.shard_io.memory.torch_tensor import CastTarget, can_cast

FLOATS = {"float64", "float32", "float16", "bfloat16"}
EIGHT_BITS = {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
INTEGERS = {f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)}


def edges(name: str) -> torch.Tensor:
    """Return the numbers of a dtype at which a cast would lose something, if any cast does."""
    dtype = getattr(torch, name)
    if name == "bool":
        return torch.tensor([False, True])
    if name in INTEGERS:
        whole = torch.iinfo(dtype)
        return torch.tensor([whole.min, whole.max, whole.max // 2, 1], dtype=dtype)
    if dtype.is_complex:
        return torch.complex(*(edges(f"float{dtype.itemsize * 4}") for _ in range(2)))
    if name in EIGHT_BITS:
        every = torch.arange(256, dtype=torch.uint8)
        return every[every.view(dtype).float().isfinite()].view(dtype)
    info = torch.finfo(dtype)
    return torch.tensor([info.max, info.smallest_normal, 1 + info.eps, -1], dtype=dtype)


@pytest.mark.parametrize("saved", sorted(FLOATS | EIGHT_BITS | INTEGERS | {"bool", "complex64"}))
def test_what_is_cast_loses_nothing_but_between_floating_dtypes(saved: str) -> None:
    values = edges(saved)
    for live in sorted(FLOATS | INTEGERS | {"bool", "complex64", "complex128"} - {saved}):
        if saved == live or not can_cast(saved, live):
            continue
        if {saved, live} <= FLOATS:
            continue
        there = values.to(getattr(torch, live))
        if saved in INTEGERS and live in INTEGERS:
            assert there.tolist() == values.tolist(), live
        elif saved in EIGHT_BITS:
            assert torch.equal(there.double(), values.double()), live
        else:
            back = there.real if there.is_complex() and not values.is_complex() else there
            assert torch.equal(back.to(values.dtype), values), live


def test_every_pair_is_decided() -> None:
    """Of what a pair of dtypes would do nothing is left to torch."""
    cast = {(a, b) for a, b in itertools.product(DTYPES, DTYPES) if a != b and can_cast(a, b)}
    assert {(a, b) for a, b in itertools.permutations(FLOATS, 2)} <= cast
    assert {a for a, b in cast if b == "float16"} == {
        *FLOATS,
        *EIGHT_BITS,
        "bool",
        "int8",
        "uint8",
    } - {"float16"}
    assert {a for a, b in cast if b == "int64"} == {"bool", "int8", "int16", "int32"} | {
        "uint8",
        "uint16",
        "uint32",
    }
    assert ("int64", "float64") not in cast
    assert ("int32", "float64") in cast
    assert ("float64", "complex64") not in cast
    assert {b for a, b in cast if a == "int64"} == {b for a, b in cast if a == "uint64"} == set()
    assert {b for _, b in cast} & (EIGHT_BITS | {"bool", "float8_e8m0fnu", "complex32"}) == set()
    assert {a for a, _ in cast} & {"float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "int4"} == set()


def test_a_box_is_cast_into_its_place_and_what_overflows_is_known() -> None:
    cell = Region((0, 0), (3, 4))
    live = torch.zeros(4, 3, dtype=torch.float16).t()
    target = CastTarget(live, cell, torch.float32)
    assert target.memory() is None
    (piece,) = pieces(cell, (3, 4))
    values = torch.arange(12.0).reshape(3, 4)
    values[0] = torch.tensor([0.0, torch.inf, torch.nan, 3.0])
    box = Region((1, 1), (2, 2))
    data = memoryview(values.numpy().tobytes())
    target.place(piece, box, data[5 * 4 :], row_major_strides((3, 4)))
    assert live[1:, 1:3].tolist() == [[5, 6], [9, 10]]
    assert (live[0].tolist(), live[1:, 0].tolist()) == ([0] * 4, [0, 0])
    target.place(piece, cell, data, row_major_strides((3, 4)))
    assert live[0].isfinite().tolist() == [True, False, False, True]  # as they were
    assert not target.has_overflown
    values[2, 3] = 1e5
    target.place(piece, cell, memoryview(values.numpy().tobytes()), row_major_strides((3, 4)))
    assert target.has_overflown
