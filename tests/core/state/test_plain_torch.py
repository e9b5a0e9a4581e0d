from __future__ import annotations

import numpy as np
import pytest
import torch

from dist_ckpt.core.format.objects.plain_codec import decode_value, encode_value
from dist_ckpt.core.format.objects.plain_types import ArrayValue, Device, DTypeValue, NumpyScalar
from dist_ckpt.core.state.tensors.plain_torch import make_torch_value, without_tensors
from dist_ckpt.errors import IncompatibleError

EXOTIC = torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "value",
    [
        torch.bfloat16,
        torch.device("cuda:3"),
        torch.Size([2, 3]),
        np.float32(1.5),
        np.datetime64("2020-01-02"),
        np.int16(-3),
    ],
)
def test_what_needs_torch_or_numpy_comes_back_as_it_was(value: object) -> None:
    back = decode_value(encode_value(value), make=make_torch_value)
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(True),
        torch.empty(0, 3, dtype=torch.int8),
        torch.tensor([1 + 2j]).conj(),
        EXOTIC,
    ],
)
def test_tensors_come_back_bit_for_bit_and_writable(tensor: torch.Tensor) -> None:
    data = encode_value(without_tensors({"a": (tensor,)}, "p"))
    back = decode_value(data, make=make_torch_value)
    assert encode_value(without_tensors(back, "p")) == data
    assert back["a"][0].dtype == tensor.dtype
    if tensor.dtype is not torch.float8_e4m3fn:
        assert torch.equal(back["a"][0], tensor)
    back["a"][0].zero_()


def test_numpy_arrays_come_back_as_arrays() -> None:
    array = np.arange(6, dtype=np.uint16)[::-1]
    back = decode_value(encode_value(without_tensors([array], "p")), make=make_torch_value)[0]
    assert type(back) is np.ndarray
    assert back.dtype == np.uint16
    assert back.tolist() == array.tolist()


def test_a_tensor_without_bytes_of_its_own_is_refused_by_its_place() -> None:
    with pytest.raises(TypeError, match=r"p\.a\.0: .*to_dense"):
        without_tensors({"a": [torch.eye(2).to_sparse()]}, "p")


def test_stand_ins_that_cannot_be_made_are_errors() -> None:
    with pytest.raises(ValueError, match="not a device"):
        make_torch_value(Device("toaster:1"))
    with pytest.raises(IncompatibleError, match="float1"):
        make_torch_value(DTypeValue("float1"))
    with pytest.raises(ValueError, match="size"):
        make_torch_value(NumpyScalar("<f4", b"123"))
    with pytest.raises(IncompatibleError, match="dtype"):
        make_torch_value(ArrayValue("float1", (0,), b""))
