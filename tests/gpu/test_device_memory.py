"""Tensors on an accelerator as sources and targets of bytes."""

from __future__ import annotations

import pytest
import torch

from dist_ckpt.core.format.geometry import (
    ElementRange,
    Region,
    RegionPiece,
    pieces,
    row_major_strides,
)
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorReader, TensorTarget, synchronize
from sources import read_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex128]


@pytest.fixture
def device():
    return torch.accelerator.current_accelerator()


def bytes_of(tensor):
    host = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return bytes(host.tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_on_the_device_is_read_and_placed_bit_for_bit(device, dtype):
    value = torch.arange(60, device=device).view(3, 4, 5).to(dtype)
    for tensor in (value, value.transpose(0, 2), value[:, 1::2]):
        expected = bytes_of(tensor)
        synchronize([tensor])
        assert read_all(TensorReader(tensor), 7 * dtype.itemsize) == expected
        cell = Region.whole(tuple(tensor.shape))
        target = torch.zeros_like(tensor)
        strides = row_major_strides(cell.shape)
        data = memoryview(bytearray(expected))
        TensorTarget(target, cell).place(RegionPiece(cell, 0), cell, data, strides)
        synchronize([target])
        assert bytes_of(target) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flat_shard_on_the_device_takes_its_pieces(device, dtype):
    value = torch.arange(60).view(3, 4, 5).to(dtype)
    flat = torch.zeros(45, dtype=dtype, device=device)
    cell = ElementRange(7, 52)
    target = TensorTarget(flat, cell)
    assert target.memory() is None
    data = memoryview(bytearray(bytes_of(value)))[7 * dtype.itemsize :]
    for piece in pieces(cell, (3, 4, 5)):
        block = data[piece.start * dtype.itemsize :]
        target.place(piece, piece.region, block, row_major_strides(piece.region.shape))
    synchronize([flat])
    assert bytes_of(flat) == bytes_of(value.view(-1)[7:52])
