"""Elements as numbers: the same as torch says, for every code of the small dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.shard_io.memory.host_array import has_numbers, numbers

SMALL = sorted(name for name in DTYPES if name.startswith("float8_") and hasattr(torch, name))


@pytest.mark.parametrize("dtype", SMALL)
def test_every_code_of_8_bits_is_what_torch_says(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(getattr(torch, dtype)).to(torch.float32).numpy()
    found = numbers(dtype, memoryview(bytes(range(256))))
    np.testing.assert_array_equal(found, expected)
    # 0.0 and -0.0 are equal, and not the same
    same = np.signbit(found) == np.signbit(expected)
    assert same[~np.isnan(expected)].all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_code_of_16_bits_is_what_torch_says(dtype: str) -> None:
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    expected = codes.view(getattr(torch, dtype)).to(torch.float32).numpy()
    found = numbers(dtype, memoryview(codes.numpy().tobytes())).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


def test_two_numbers_of_4_bits_share_a_byte_the_lower_half_first() -> None:
    assert numbers("float4_e2m1fn_x2", memoryview(bytes([0x21, 0xF7]))).tolist() == [
        *(0.5, 1.0),
        *(6.0, -6.0),
    ]


def test_bits_are_no_numbers() -> None:
    assert [name for name in ("bits8", "uint4", "bits16") if has_numbers(name)] == []
    with pytest.raises(TypeError, match="bits8 are not numbers"):
        numbers("bits8", memoryview(b"ab"))


def test_each_dtype_with_numbers_gives_as_many_as_there_are() -> None:
    for name in filter(has_numbers, DTYPES):
        each = 2 if name == "float4_e2m1fn_x2" else 1
        assert numbers(name, memoryview(bytes(6 * DTYPES[name].itemsize))).size == 6 * each, name
