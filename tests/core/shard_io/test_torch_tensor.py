"""Local tensors as sources and targets of bytes."""

from __future__ import annotations

import gc
import warnings
from typing import Any

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
from dist_ckpt.core.shard_io.memory.torch_tensor import (
    TensorReader,
    TensorTarget,
    overlaps_itself,
    synchronize,
)
from sources import read_all

NAMES = sorted(name for name in DTYPES if hasattr(torch, name))


def filled(name, shape):
    """A tensor of a dtype with bytes that differ, NaN patterns and all, and those bytes."""
    numel = torch.Size(shape).numel()
    data = bytes((7 * i + i // 251) % 256 for i in range(numel * DTYPES[name].itemsize))
    if name == "bool":
        data = bytes(byte % 2 for byte in data)
    flat = torch.frombuffer(bytearray(data or b"\0" * 16), dtype=torch.uint8)[: len(data)]
    return flat.view(getattr(torch, name)).view(shape), data


def bytes_of(tensor):
    """The bytes of a tensor by a way that the code does not take."""
    if tensor.numel() == 0:
        return b""
    flat = tensor.reshape(-1).contiguous().as_strided((tensor.numel(),), (1,))
    return bytes(flat.view(torch.uint8).tolist())


def place_all(target, cell, shape, data, itemsize):
    """Place row-major bytes of a cell, piece by piece."""
    for piece in pieces(cell, shape):
        start = piece.start * itemsize
        block = memoryview(data)[start : start + piece.region.numel * itemsize]
        target.place(piece, piece.region, block, row_major_strides(piece.region.shape))


# --- sources ---------------------------------------------------------------------------------


def test_of_a_conjugate_view_only_what_is_asked_for_is_resolved():
    # All of it would be terabytes.
    tensor = torch.tensor([1 + 2j, 3 - 4j]).view(2, 1).expand(2, 1 << 40).conj()
    scratch = memoryview(bytearray(48))
    start = ((1 << 40) - 3) * 8
    data = TensorReader(tensor).read(start, start + 48, scratch)
    assert torch.frombuffer(data, dtype=torch.complex64).tolist() == [1 - 2j] * 3 + [3 + 4j] * 3


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_read_and_placed_bit_for_bit(name):
    itemsize = DTYPES[name].itemsize
    tensor, data = filled(name, (4, 6))
    assert read_all(TensorReader(tensor), 5 * itemsize) == data
    columns = tensor.t()
    by_column = b"".join(
        data[(row * 6 + column) * itemsize :][:itemsize] for column in range(6) for row in range(4)
    )
    assert read_all(TensorReader(columns), 5 * itemsize) == by_column

    target, _ = filled(name, (6, 4))
    whole = Region.whole((4, 6))
    place_all(TensorTarget(target.t(), whole), whole, (4, 6), data, itemsize)
    assert read_all(TensorReader(target), 64) == by_column


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
def test_parts_of_a_source_are_its_boxes_and_ranges(data, shape):
    tensor, _ = filled("int32", (*shape, 2))
    tensor = tensor[..., 1]
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    block_nbytes = 4 * data.draw(st.integers(1, 5))
    source = TensorReader(tensor)
    part = source.part(ElementRange(start, stop))
    assert part.nbytes == 4 * (stop - start)
    expected = tensor.reshape(-1)[start:stop].contiguous()
    assert read_all(part, block_nbytes) == bytes_of(expected)
    assert read_all(part.part(ElementRange(0, stop - start)), block_nbytes) == bytes_of(expected)
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Region(offset, tuple(n - o for n, o in zip(shape, offset, strict=True)))
    expected = tensor[tuple(slice(o, None) for o in offset)]
    assert read_all(source.part(box), block_nbytes) == bytes_of(expected)


def test_a_contiguous_tensor_is_read_in_place_and_outlives_its_owner():
    tensor = torch.arange(8, dtype=torch.int32)
    view = TensorReader(tensor).read(4, 12, memoryview(bytearray(8)))
    tensor[1] = 77
    assert bytes(view) == (77).to_bytes(4, "little") + (2).to_bytes(4, "little")
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    others = [torch.zeros(8, dtype=torch.int32) for _ in range(64)]
    assert address not in [other.data_ptr() for other in others]
    assert bytes(view[:4]) == (77).to_bytes(4, "little")


def test_scalars_and_empty_tensors_are_sources_too():
    assert read_all(TensorReader(torch.tensor(5, dtype=torch.int16)), 8) == b"\5\0"
    assert read_all(
        TensorReader(torch.tensor(1 + 2j, dtype=torch.complex128)).part(Region((), ())), 16
    )
    for shape in ((0,), (3, 0), (0, 4)):
        source = TensorReader(torch.empty(shape, dtype=torch.complex128))
        assert (source.nbytes, bytes(source.read(0, 0, memoryview(b"")))) == (0, b"")


def test_conjugate_and_negative_views_are_read_as_their_value():
    for dtype in (torch.complex64, torch.complex128):
        tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=dtype)
        value = torch.tensor([1 - 2j, 3 + 4j], dtype=dtype)
        assert tensor.conj().is_conj()
        assert read_all(TensorReader(tensor.conj()), value.itemsize) == bytes_of(value)
        assert tensor.conj().imag.is_neg()
        assert read_all(TensorReader(tensor.conj().imag), 8) == bytes_of(value.imag.clone())


def test_reading_changes_nothing_about_a_parameter():
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    (parameter.t() * 2).sum().backward()
    version = parameter._version
    read_all(TensorReader(parameter.t()), 16)
    read_all(TensorReader(parameter), 16)
    assert (parameter._version, parameter.requires_grad) == (version, True)


# --- targets ---------------------------------------------------------------------------------


def test_a_box_is_placed_out_of_a_larger_row_major_buffer():
    target = torch.zeros(3, 4, dtype=torch.int32)
    cell = Region((10, 20), (3, 4))
    data = torch.arange(100, dtype=torch.int32)
    box = Region((11, 21), (2, 2))
    view = memoryview(bytearray(bytes_of(data)))[4 * 7 :]
    TensorTarget(target, cell).place(RegionPiece(cell, 0), box, view, (10, 2))
    assert target.tolist() == [[0, 0, 0, 0], [0, 7, 9, 0], [0, 17, 19, 0]]


@pytest.mark.parametrize("name", ["bool", "bfloat16", "int64", "complex128"])
def test_a_flat_target_takes_its_pieces_even_if_its_elements_lie_apart(name):
    whole, data = filled(name, (3, 4, 5))
    itemsize = DTYPES[name].itemsize
    cell = ElementRange(7, 52)
    spread, _ = filled(name, (45, 2))
    flat = spread[:, 1]
    target = TensorTarget(flat, cell)
    assert target.memory() is None
    place_all(target, cell, (3, 4, 5), data[7 * itemsize : 52 * itemsize], itemsize)
    assert bytes_of(flat) == data[7 * itemsize : 52 * itemsize]
    assert bytes_of(whole) == data


def test_read_only_data_is_placed_without_a_warning():
    target = torch.zeros(2, 2)[:, :1]
    cell = Region((0, 0), (2, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = memoryview(bytes(bytearray(b"\0\0\x80\x3f" * 2)))
        TensorTarget(target, cell).place(RegionPiece(cell, 0), cell, block, (1, 1))
    assert target.tolist() == [[1.0], [1.0]]


def test_scalars_are_placed():
    for dtype in (torch.bool, torch.float32, torch.complex128):
        value = torch.ones((), dtype=dtype)
        target = torch.zeros((), dtype=dtype)
        whole = Region((), ())
        block = memoryview(bytearray(bytes_of(value)))
        TensorTarget(target, whole).place(RegionPiece(whole, 0), whole, block, ())
        assert target.item() == value.item()


def test_parameters_and_inference_tensors_are_filled():
    with torch.inference_mode():
        made_in_inference = torch.zeros(2, 3)
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    data = bytes_of(torch.arange(6.0))
    for tensor in (parameter, made_in_inference):
        cell = Region.whole((3, 2))
        place_all(TensorTarget(tensor.t(), cell), cell, (3, 2), data, 4)
        assert tensor.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
        memory = TensorTarget(tensor, Region.whole((2, 3))).memory()
        assert memory is not None
        memory[:] = data
        assert tensor.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert parameter.requires_grad


def test_autograd_notices_that_a_saved_tensor_was_filled():
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = (parameter * parameter).sum()
    memory = TensorTarget(parameter, Region((0,), (3,))).memory()
    assert memory is not None
    memory[:] = bytes(12)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_conjugate_and_negative_targets_take_the_value():
    whole = Region((0,), (1,))
    base = torch.zeros(1, dtype=torch.complex64)
    block = memoryview(bytearray(bytes_of(torch.tensor([1 + 2j]))))
    target = TensorTarget(base.conj(), whole)
    assert target.memory() is None
    target.place(RegionPiece(whole, 0), whole, block, (1,))
    assert base.item() == 1 - 2j
    imaginary = memoryview(bytearray(bytes_of(torch.tensor([5.0]))))
    TensorTarget(base.conj().imag, whole).place(RegionPiece(whole, 0), whole, imaginary, (1,))
    assert base.item() == 1 - 5j


def test_nothing_is_placed_for_an_empty_box():
    whole = Region((0, 0), (0, 3))
    target = TensorTarget(torch.empty(0, 3), whole)
    target.place(RegionPiece(whole, 0), whole, memoryview(b""), (3, 1))
    memory = target.memory()
    assert memory is not None
    assert memory.nbytes == 0


def test_tensors_that_overlap_themselves_are_known():
    base = torch.arange(12.0)
    assert overlaps_itself(torch.ones(1).expand(3))
    assert overlaps_itself(base.as_strided((3, 4), (2, 1)))
    assert not overlaps_itself(torch.ones(1, 3).expand(1, 3))
    assert not overlaps_itself(base.view(3, 4).t()[1:, ::2])
    assert not overlaps_itself(torch.ones(1).expand(0))
    assert not overlaps_itself(torch.tensor(1.0))


def test_host_memory_needs_no_synchronizing():
    synchronize([torch.ones(2), torch.empty(2, device="meta")])


def test_a_source_tells_where_its_bytes_lie_if_they_are_row_major_on_the_host() -> None:
    tensor = torch.arange(12, dtype=torch.int32).view(3, 4)
    assert TensorReader(tensor).address() == tensor.data_ptr()
    assert TensorReader(tensor[1:]).address() == tensor.data_ptr() + 16
    assert TensorReader(tensor).part(Region((2, 0), (1, 4))).address() == tensor.data_ptr() + 32
    assert (
        TensorReader(tensor.view(-1)).part(ElementRange(5, 9)).address() == tensor.data_ptr() + 20
    )
    assert TensorReader(tensor.t()).address() is None
    assert TensorReader(tensor).part(Region((0, 1), (3, 2))).address() is None
    assert TensorReader(torch.empty(2, device="meta")).address() is None


@pytest.mark.parametrize("nbytes", [10 << 20, 0, 12])
def test_what_is_out_of_order_is_sent_in_parts(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []
    fill = TensorReader._fill

    def counted(self: Any, element: int, memory: torch.Tensor, **options: Any) -> None:
        filled.append(memory.nbytes)
        fill(self, element, memory, **options)

    monkeypatch.setattr(TensorReader, "_fill", counted)
    rows = torch.arange(nbytes // 12 * 3, dtype=torch.int32).view(-1, 3)
    for tensor in (rows, rows.t(), rows.flip(0)[:, :2], rows.to(torch.complex128).conj()):
        memory, first = memoryview(bytearray(tensor.nbytes)), tensor.nbytes // 2 // 16 * 16
        filled.clear()
        TensorReader(tensor).send(0, first, memory[:first])
        TensorReader(tensor).send(first, tensor.nbytes, memory[first:])
        assert memory == read_all(TensorReader(tensor), 1 << 16)
        assert max(filled, default=0) <= 4 << 20 or tensor is rows
        assert len(filled) <= 2 or tensor is not rows
