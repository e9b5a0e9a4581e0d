"""A local torch tensor as the source or the target of bytes. Thread-safe.

Bits are copied, never cast: tensors are viewed as integers of the same size.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch

from dist_ckpt.core.format.geometry import (
    Cell,
    ElementRange,
    Region,
    RegionPiece,
    Shape,
    boxes_of,
    row_major_strides,
)

# Memory of any length: a type for each length would cost more than the views themselves.
_Memory = ctypes.c_char * sys.maxsize

# The bytes of a tensor that is not contiguous to send at once.
_MAX_SEND_NBYTES = 4 << 20

# An integer of each size. There is none of 16 bytes: complex128 is two of 8 in a last dimension.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class TensorSource:
    """The bytes of a local tensor in row-major order (`CellSource`).

    A contiguous CPU tensor is read in place; others, and lazy conjugates, are copied on access.
    """

    # A state may have very many: values that can be computed on access are not stored.
    __slots__ = ("_tensor", "_within")

    def __init__(self, tensor: torch.Tensor, within: ElementRange | None = None) -> None:
        """Use a tensor, or the elements `within` it in row-major order."""
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._within = within

    @property
    def _first(self) -> int:
        return 0 if self._within is None else self._within.start

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self._tensor.device

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        if self._within is None:
            return self._tensor.nbytes
        return self._within.numel * self._tensor.itemsize

    def part(self, cell: Cell) -> TensorSource:
        """Return the source of a part, in coordinates that begin at this cell's start."""
        if isinstance(cell, ElementRange):
            first = self._first
            return TensorSource(self._tensor, ElementRange(first + cell.start, first + cell.stop))
        whole = self._within is None or self._within.numel == self._tensor.numel()
        assert whole, "a box of a range of elements"
        return TensorSource(self._tensor[slices_of(cell)])

    def address(self) -> int | None:
        """Return the address of a contiguous CPU tensor's bytes, else None."""
        tensor = self._tensor
        if not tensor.is_cpu or not tensor.is_contiguous() or _is_typed(tensor):
            return None
        return tensor.data_ptr() + self._first * tensor.itemsize

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        """Return the bytes `start` to `stop`: a view of the tensor, or `scratch`, filled."""
        first = self._first * self._tensor.itemsize
        memory = None if _is_typed(self._tensor) else host_memory(self._tensor)
        if memory is not None:
            return memory[first + start : first + stop]
        filled = scratch[: stop - start]
        if filled.nbytes:
            self._fill((first + start) // self._tensor.itemsize, filled)
        return filled

    def send(self, start: int, stop: int, memory: memoryview) -> None:
        """Queue a copy of the bytes `start` to `stop` into `memory` on the device's current stream.

        Tensor and memory must stay unchanged until that stream has done so. If the memory is not
        pinned, this waits for the copy and all work before it.
        """
        itemsize, nbytes = self._tensor.itemsize, stop - start
        # The device first makes other tensors contiguous, in new device memory.
        is_contiguous = self._tensor.is_contiguous() and not _is_typed(self._tensor)
        chunk_nbytes = nbytes if is_contiguous else _MAX_SEND_NBYTES // itemsize * itemsize
        for done in range(0, nbytes, max(chunk_nbytes, 1)):
            room = memory[done : min(done + chunk_nbytes, nbytes)]
            self._fill(self._first + (start + done) // itemsize, room, non_blocking=True)

    def _fill(self, element: int, memory: memoryview, *, non_blocking: bool = False) -> None:
        tensor, itemsize = self._tensor, self._tensor.itemsize
        # One copy serves any range of a contiguous tensor.
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor
        words = _over(memory, _WORDS[itemsize])
        done = 0
        elements = ElementRange(element, element + memory.nbytes // itemsize)
        for box in boxes_of(elements, tuple(flat.shape)):
            values = as_words(flat[slices_of(box)].resolve_conj().resolve_neg())
            room = words[done : done + values.numel()].view(values.shape)
            room.copy_(values, non_blocking=non_blocking)
            done += values.numel()


class TensorTarget:
    """A `Target` for a local tensor of the cell's shape, or 1-d if flat, without self-overlap."""

    # A state may have very many: values that can be computed on access are not stored.
    __slots__ = ("_cell", "_is_counted", "_tensor")

    def __init__(self, tensor: torch.Tensor, cell: Cell) -> None:
        self._cell = cell
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._is_counted = False

    def memory(self) -> memoryview | None:
        """Return the tensor's bytes if they are row-major in host memory, else None."""
        memory = None if _is_typed(self._tensor) else host_memory(self._tensor)
        if memory is not None and not self._is_counted:
            # Autograd counts in-place writes, but cannot see this one.
            torch.autograd.graph.increment_version(self._tensor)
            self._is_counted = True
        return memory

    def place(self, piece: RegionPiece, box: Region, data: memoryview, strides: Shape) -> None:
        """Copy the elements of `box` from `data` into the tensor."""
        if box.numel == 0:
            return
        itemsize = self._tensor.itemsize
        dtype = self._tensor.dtype if _is_typed(self._tensor) else _WORDS[itemsize]
        factor = itemsize // dtype.itemsize
        extra = (factor,) if factor > 1 else ()
        values = values_in(
            data,
            dtype,
            (*box.shape, *extra),
            (*(s * factor for s in strides), *((1,) * len(extra))),
        )
        with torch.no_grad():
            self._box(piece, box).copy_(values)

    def _box(self, piece: RegionPiece, box: Region) -> torch.Tensor:
        words = self._tensor if _is_typed(self._tensor) else as_words(self._tensor)
        within = box.relative_to(piece.region.offset)
        if isinstance(self._cell, Region):
            return words[slices_of(within)]
        # The piece is row-major in the flat memory, whose elements may have a stride.
        flat = words[piece.start : piece.start + piece.region.numel]
        step = flat.stride(0)
        strides = (s * step for s in row_major_strides(piece.region.shape))
        extra, extra_strides = flat.shape[1:], flat.stride()[1:]
        boxed = flat.as_strided((*piece.region.shape, *extra), (*strides, *extra_strides))
        return boxed[slices_of(within)]


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all work on the accelerators that have these tensors.

    Sources and targets use other streams than training: call it before the first read or place, and
    after the last place.
    """
    devices = {tensor.device for tensor in tensors} - {torch.device("cpu"), torch.device("meta")}
    for device in sorted(devices, key=str):
        torch.accelerator.synchronize(device)


def host_memory(tensor: torch.Tensor) -> memoryview | None:
    """Return the bytes of a tensor, writable, if they are row-major in host memory, else None.

    The view keeps the tensor alive. Do not use it after the tensor's storage was resized.
    """
    if not tensor.is_cpu or not tensor.is_contiguous():
        return None
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes == 0:
        return memoryview(bytearray())
    array = _Memory.from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # the memory lives as long as the view
    return memoryview(array)[:nbytes].cast("B")


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers of the item size, or pairs of them in a last dimension."""
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.itemsize])


def slices_of(region: Region) -> tuple[slice, ...]:
    """Return the index that selects a region of a tensor."""
    return tuple(slice(o, s) for o, s in zip(region.offset, region.stop, strict=True))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if elements may share memory, as after `expand`."""
    if tensor.is_contiguous():
        return False
    reach = 0
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def values_in(data: memoryview, dtype: torch.dtype, shape: Shape, strides: Shape) -> torch.Tensor:
    """Return the elements of a box that begins at the start of `data`; strides are in elements."""
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return _over(data[: (last + 1) * dtype.itemsize], dtype).as_strided(shape, strides)


def _is_typed(tensor: torch.Tensor) -> bool:
    """Return True if a view's memory is not its value, so that torch has to read or write it."""
    return tensor.is_conj() or tensor.is_neg()


def _over(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    # frombuffer warns about read-only memory, although nothing here writes into it
    return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=dtype)
