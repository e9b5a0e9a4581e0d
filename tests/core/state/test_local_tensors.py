"""Dtypes and arrays; which tensors are refused is tested in test_locate_tensor.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.state.tensors.local_tensors import (
    dtype_name,
    from_numpy,
    is_ordinary,
    torch_dtype,
)
from dist_ckpt.errors import IncompatibleError


def test_dtypes_have_the_names_of_torch():
    assert dtype_name(torch.float8_e4m3fn, "w") == "float8_e4m3fn"
    assert torch_dtype("complex32") == torch.complex32
    with pytest.raises(IncompatibleError, match="no dtype float7"):
        torch_dtype("float7")
    with pytest.raises(IncompatibleError):
        torch_dtype("nn")
    with pytest.raises(TypeError, match="w: dtype qint8 cannot be stored"):
        dtype_name(torch.qint8, "w")


def test_every_dtype_of_torch_can_be_stored_or_is_quantised():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes:
        if "q" in str(dtype):
            continue
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPES:  # of a newer torch than tests/core/format/test_dtypes.py knows
            with pytest.raises(TypeError, match=f"w: dtype {name} cannot be stored"):
                dtype_name(dtype, "w")
            continue
        assert torch_dtype(dtype_name(dtype, "w")) == dtype


def test_numpy_arrays_share_their_memory_with_the_tensor():
    array = np.zeros((2, 3), dtype=np.uint16)
    from_numpy(array, "a", writable=True)[1, 2] = 7
    assert array[1, 2] == 7
    fixed = np.arange(3)
    fixed.flags.writeable = False
    assert from_numpy(fixed, "a", writable=False).tolist() == [0, 1, 2]
    assert from_numpy(np.arange(3)[::-1], "a", writable=False).tolist() == [2, 1, 0]
    field = np.array([(1, 2), (3, 4)], dtype=[("a", "i2"), ("b", "i8")])["b"]
    assert from_numpy(field, "a", writable=False).tolist() == [2, 4]
    read_only: list[Any] = [fixed, np.arange(3)[::-1], field]
    for array in read_only:
        with pytest.raises(ValueError, match="a: an array that is read-only"):
            from_numpy(array, "a", writable=True)
    swapped: Any = np.arange(3, dtype=">i4")
    for other in (np.array(["x"]), np.array([object()]), swapped, np.ma.ones(2)):
        with pytest.raises(TypeError, match="a: "):
            from_numpy(other, "a", writable=False)


def resized(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def test_only_what_needs_no_second_look_is_ordinary():
    for tensor in (torch.ones(3), torch.ones(4)[1:3], torch.nn.Parameter(torch.ones(()))):
        assert is_ordinary(tensor)
    for value in (
        np.ones(3),
        torch.ones(3, device="meta"),
        torch.ones(0),
        torch.ones(4, 4).t(),
        torch.ones(1).expand(3),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.ones(3).as_subclass(type("Sub", (torch.Tensor,), {})),
        resized(torch.ones(8), 0),
        resized(torch.ones(8), 16),
        resized(torch.ones(8)[4:], 0),
        torch._efficientzerotensor(3),
    ):
        assert not is_ordinary(value), value
    seen = []

    def look(tensor):
        seen.append(is_ordinary(tensor))
        return tensor

    torch.func.vmap(look)(torch.ones(2, 3))
    assert seen == [False]
