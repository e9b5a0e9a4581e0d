"""Tensors in plain host memory."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import (
    ElementRange,
    Region,
    RegionPiece,
    pieces,
    row_major_strides,
)
from dist_ckpt.core.shard_io.memory.host_array import Array, ArrayTarget, numbers

SIZES = st.sampled_from([1, 2, 4, 8, 16])
SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def numbered(shape, itemsize):
    """Bytes in which every item differs, and the same as a numpy array of items."""
    numbers = np.arange(1, prod(shape) + 1, dtype="<u8")
    items = np.zeros((prod(shape), itemsize), dtype=np.uint8)
    raw = numbers.view(np.uint8).reshape(-1, 8)
    width = min(8, itemsize)
    items[:, :width] = raw[:, :width]
    if itemsize == 16:
        items[:, 8:] = 255 - raw
    return bytearray(items.tobytes()), items.reshape(*shape, itemsize)


@st.composite
def boxes(draw, outer):
    """A box inside another that is not empty."""
    offset, shape = [], []
    for start, stop in zip(outer.offset, outer.stop, strict=True):
        offset.append(draw(st.integers(start, stop - 1)))
        shape.append(draw(st.integers(1, stop - offset[-1])))
    return Region(tuple(offset), tuple(shape))


def index(region):
    return tuple(slice(o, s) for o, s in zip(region.offset, region.stop, strict=True))


@given(st.data(), SHAPES, SIZES)
def test_a_box_is_placed_from_any_layout(data, shape, itemsize):
    memory, items = numbered(shape, itemsize)
    cell = data.draw(boxes(Region.whole(shape)))
    box = data.draw(boxes(cell))
    first = sum(o * s for o, s in zip(box.offset, row_major_strides(shape), strict=True))
    held = bytearray(cell.numel * itemsize)
    target = ArrayTarget(memoryview(held), itemsize)
    view = memoryview(memory)[first * itemsize :]
    target.place(RegionPiece(cell, 0), box, view, row_major_strides(shape))
    expected = np.zeros((*cell.shape, itemsize), dtype=np.uint8)
    expected[index(box.relative_to(cell.offset))] = items[index(box)]
    assert held == expected.tobytes()


@given(st.data(), SHAPES, SIZES)
def test_the_pieces_of_a_flat_cell_fill_it(data, shape, itemsize):
    memory, items = numbered(shape, itemsize)
    start = data.draw(st.integers(0, prod(shape) - 1))
    stop = data.draw(st.integers(start + 1, prod(shape)))
    held = bytearray((stop - start) * itemsize)
    target = ArrayTarget(memoryview(held), itemsize)
    for piece in pieces(ElementRange(start, stop), shape):
        block = items[index(piece.region)].tobytes()
        target.place(piece, piece.region, memoryview(block), row_major_strides(piece.region.shape))
    assert held == memory[start * itemsize : stop * itemsize]


def test_a_target_gives_its_memory_out():
    memory = bytearray(8)
    view = ArrayTarget(memoryview(memory), 4).memory()
    assert view is not None
    view[0] = 1
    assert memory[0] == 1


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_becomes_a_tensor_with_the_same_bytes(name):
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    data = bytes(range(1, 1 + 6 * DTYPES[name].itemsize))
    tensor = Array(name, (2, 3), memoryview(data)).torch()
    assert tensor.dtype == getattr(torch, name)
    assert tensor.shape == (2, 3)
    assert bytes(tensor.view(-1).view(torch.uint8).tolist()) == data


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "int64", "int8", "uint16", "bool", "complex128", "complex64"],
)
def test_numbers_are_those_of_numpy(dtype):
    array = np.array([[0, 1, 2], [3, 100, 5]]).astype(dtype)
    ours = Array(dtype, (2, 3), memoryview(array.tobytes()))
    assert ours.numpy().tolist() == array.tolist()
    assert ours.tolist() == array.tolist()
    assert np.asarray(ours).dtype == array.dtype
    assert np.asarray(ours, dtype="complex128").tolist() == array.astype("complex128").tolist()


def test_numbers_that_numpy_lacks_are_those_of_torch():
    for dtype in (torch.bfloat16, torch.complex64):
        tensor = torch.tensor([[1.5, -2.0], [0.1, 3e30]]).to(dtype)
        ours = Array(
            str(dtype)[6:], (2, 2), memoryview(bytes(tensor.view(torch.uint8).flatten().tolist()))
        )
        assert ours.tolist() == tensor.tolist()
        assert torch.equal(ours.torch(), tensor)


def test_a_dtype_without_python_numbers_says_what_to_do():
    array = Array("float8_e5m2", (1,), memoryview(b"\0"))
    for convert in (array.tolist, array.numpy):
        with pytest.raises(TypeError, match=r"\.torch\(\)"):
            convert()


def test_shapes_without_dimensions_or_elements():
    scalar = Array("int16", (), memoryview(b"\x05\0"))
    assert (scalar.tolist(), scalar.numpy().shape, scalar.torch().item()) == (5, (), 5)
    empty = Array("float32", (2, 0), memoryview(b""))
    assert (empty.tolist(), empty.numpy().shape, tuple(empty.torch().shape)) == (
        [[], []],
        (2, 0),
        (2, 0),
    )


def test_writable_memory_is_shared_and_read_only_memory_is_not():
    memory = bytearray(4)
    array = Array("float32", (1,), memoryview(memory))
    array.torch()[0] = 1.0
    assert array.tolist() == [1.0]
    array.numpy()[0] = 2.0
    assert array.tolist() == [2.0]
    fixed = Array("float32", (1,), memoryview(bytes(4)))
    fixed.torch()[0] = 1.0
    assert fixed.tolist() == [0.0]
    assert not fixed.numpy().flags.writeable


def test_equal_arrays_have_equal_dtype_shape_and_bytes():
    nan = Array("float32", (1,), memoryview(b"\0\0\xc0\x7f"))
    assert nan == Array("float32", (1,), memoryview(bytearray(b"\0\0\xc0\x7f")))
    assert nan != Array("int32", (1,), nan.data)
    assert nan != Array("float32", (1, 1), nan.data)
    assert nan != Array("float32", (1,), memoryview(bytes(4)))


def test_a_size_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="24 bytes, not 20"):
        Array("float32", (2, 3), memoryview(bytes(20)))
    with pytest.raises(ValueError, match="unknown dtype 'float33'"):
        Array("float33", (1,), memoryview(bytes(4)))


def test_both_orders_of_a_large_transposed_copy_agree():
    items = np.arange(200 * 3, dtype="<i4").reshape(200, 3)
    for shape, view in product([(200, 3), (3, 200)], [memoryview(items.tobytes())]):
        region = Region((0, 1), (shape[0], 2))
        held = bytearray(region.numel * 4)
        target = ArrayTarget(memoryview(held), 4)
        target.place(RegionPiece(region, 0), region, view[4:], row_major_strides(shape))
        assert held == items.reshape(shape)[:, 1:3].tobytes()


@given(st.data(), SHAPES, st.sampled_from(["int8", "int16", "float32", "int64", "complex128"]))
def test_an_index_is_that_of_numpy(data, shape, dtype):
    array = np.arange(prod(shape)).astype(dtype).reshape(shape)
    ours = Array(dtype, shape, memoryview(array.tobytes()))
    parts = []
    for size in shape:
        start = data.draw(st.integers(-size, size - 1))
        stop = data.draw(st.integers(-size - 1, size + 1))
        parts += data.draw(st.sampled_from([[start], [slice(start, stop)], [None, start]]))
    index = tuple(parts[: data.draw(st.integers(0, len(parts)))])
    index += data.draw(st.sampled_from([(), (...,)]))
    assert ours[index].shape == array[index].shape
    assert ours[index].tolist() == array[index].tolist()


def test_an_array_of_one_element_is_a_number():
    three = Array("int16", (1, 1), memoryview(b"\x03\0"))
    assert (three.item(), float(three), bool(three), bool(three[0, 0])) == (3, 3.0, True, True)
    assert not Array("bool", (), memoryview(b"\0"))
    for size in (0, 2):
        for use in (bool, float, Array.item):
            with pytest.raises(ValueError, match="is not one number: index it, or use"):
                use(Array("int8", (size,), memoryview(bytes(size))))


def test_complex_numbers_of_bfloat16_are_pairs_of_it():
    parts = torch.tensor([1.5, -2.0, 0.125, 3e30], dtype=torch.bfloat16)
    data = memoryview(bytearray(parts.view(torch.uint8).tolist()))
    array = Array("bcomplex32", (2,), data)
    real = parts.float().tolist()
    expected = [complex(real[0], real[1]), complex(real[2], real[3])]
    assert array.tolist() == expected
    assert array[1].item() == expected[1]
    assert numbers("bcomplex32", data).tolist() == expected
    if hasattr(torch, "bcomplex32"):
        assert array.torch().dtype == torch.bcomplex32
    else:
        with pytest.raises(TypeError, match="has no bcomplex32: upgrade torch"):
            array.torch()
