"""A local torch tensor that bytes are read from or placed in. Thread-safe.

Bits are copied: tensors are viewed as integers of the same size. Only `CastTarget` and
`cast_elements` change values: they convert them into another dtype.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import inf
from operator import add, le

import torch

from dist_ckpt.core.format.geometry import (
    Cell,
    ElementRange,
    Region,
    RegionPiece,
    Shape,
    row_major_strides,
    split_into_boxes,
)

# One type for memory of any length: a type for each length costs more than the views.
_Memory = ctypes.c_char * sys.maxsize

# A tensor that is not contiguous is sent in parts of this size.
_MAX_SEND_NBYTES = 4 << 20

# Integers by item size. None has 16 bytes: complex128 is two integers of 8, in a last dimension.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class TensorReader:
    """The bytes of a local tensor in row-major order (`CellReader`).

    A contiguous CPU tensor is read in place. Other tensors, and lazy conjugates, are copied.
    """

    # A state may have very many readers: values that can be computed are not stored.
    __slots__ = ("_tensor", "_within")

    def __init__(self, tensor: torch.Tensor, within: ElementRange | None = None) -> None:
        """Use a tensor, or only its row-major elements `within`."""
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

    def part(self, cell: Cell) -> TensorReader:
        """Return the reader of a part, in coordinates relative to this one."""
        if isinstance(cell, ElementRange):
            first = self._first
            return TensorReader(self._tensor, ElementRange(first + cell.start, first + cell.stop))
        whole = self._within is None or self._within.numel == self._tensor.numel()
        assert whole, "a box of a range of elements"
        return TensorReader(self._tensor[slices_of(cell)])

    def address(self) -> int | None:
        """Return the address of the bytes of a contiguous CPU tensor, else None."""
        tensor = self._tensor
        if not tensor.is_cpu or not tensor.is_contiguous() or _is_lazy(tensor):
            return None
        return tensor.data_ptr() + self._first * tensor.itemsize

    def flat(self) -> torch.Tensor | None:
        """Return the elements in one dimension if they are contiguous and not lazy, else None."""
        tensor = self._tensor
        if not tensor.is_contiguous() or _is_lazy(tensor):
            return None
        flat, within = tensor.view(-1), self._within
        return flat if within is None else flat[within.start : within.stop]

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        """Return the bytes `start` to `stop`: a view of the tensor, or a copy in `scratch`."""
        first = self._first * self._tensor.itemsize
        memory = None if _is_lazy(self._tensor) else host_memory(self._tensor)
        if memory is not None:
            return memory[first + start : first + stop]
        filled = scratch[: stop - start]
        if filled.nbytes:
            words = _as_tensor(filled, _WORDS[self._tensor.itemsize])
            self._fill((first + start) // self._tensor.itemsize, words)
        return filled

    def copy_to(self, memory: torch.Tensor) -> None:
        """Queue a copy of all bytes into a flat tensor of bytes, which is aligned."""
        if memory.numel():
            self._fill(self._first, memory.view(_WORDS[self._tensor.itemsize]), non_blocking=True)

    def send(self, start: int, stop: int, memory: memoryview) -> None:
        """Queue a copy of the bytes `start` to `stop` into `memory` on the device's current stream.

        The tensor and the memory must stay unchanged until the copy is complete. If the memory is
        not pinned, this call waits for the copy, and for all work queued before it.
        """
        itemsize, nbytes = self._tensor.itemsize, stop - start
        # The device copies other tensors into new device memory first, to make them contiguous.
        is_contiguous = self._tensor.is_contiguous() and not _is_lazy(self._tensor)
        chunk_nbytes = nbytes if is_contiguous else _MAX_SEND_NBYTES // itemsize * itemsize
        for done in range(0, nbytes, max(chunk_nbytes, 1)):
            target = memory[done : min(done + chunk_nbytes, nbytes)]
            words = _as_tensor(target, _WORDS[itemsize])
            self._fill(self._first + (start + done) // itemsize, words, non_blocking=True)

    def _fill(self, element: int, words: torch.Tensor, *, non_blocking: bool = False) -> None:
        tensor = self._tensor
        # Flat, any range of a contiguous tensor is one copy.
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor
        done = 0
        elements = ElementRange(element, element + words.nbytes // tensor.itemsize)
        for box in split_into_boxes(elements, tuple(flat.shape)):
            values = as_words(flat[slices_of(box)].resolve_conj().resolve_neg())
            target = words[done : done + values.numel()].view(values.shape)
            target.copy_(values, non_blocking=non_blocking)
            done += values.numel()


class TensorTarget:
    """A `Target` for a local tensor: of the cell's shape, or 1-d for an element range.

    The elements of the tensor must not share memory (`overlaps_itself`).
    """

    # A state may have very many targets: values that can be computed are not stored.
    __slots__ = ("_cell", "_is_counted", "_tensor")

    def __init__(self, tensor: torch.Tensor, cell: Cell) -> None:
        self._cell = cell
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._is_counted = False

    def memory(self) -> memoryview | None:
        """Return the tensor's bytes if they are row-major in host memory, else None."""
        memory = None if _is_lazy(self._tensor) else host_memory(self._tensor)
        if memory is not None and not self._is_counted:
            # Autograd counts in-place writes, but it cannot see writes through this view.
            torch.autograd.graph.increment_version(self._tensor)
            self._is_counted = True
        return memory

    def device_memory(self, devices: Container[torch.device]) -> torch.Tensor | None:
        """Return the tensor's bytes if they are row-major on one of the devices, else None."""
        tensor = self._tensor
        if tensor.device not in devices or not tensor.is_contiguous() or _is_lazy(tensor):
            return None
        # With one element or none, a contiguous tensor may have any stride.
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)

    def place(self, piece: RegionPiece, box: Region, data: memoryview, strides: Shape) -> None:
        """Copy the elements of `box` from `data` into the tensor."""
        if box.numel == 0:
            return
        itemsize = self._tensor.itemsize
        dtype = self._tensor.dtype if _is_lazy(self._tensor) else _WORDS[itemsize]
        factor = itemsize // dtype.itemsize
        extra = (factor,) if factor > 1 else ()
        steps = (*(s * factor for s in strides), *((1,) * len(extra)))
        values = view_elements(data, dtype, (*box.shape, *extra), steps)
        with torch.no_grad():
            self._box(piece, box).copy_(values)

    def _box(self, piece: RegionPiece, box: Region) -> torch.Tensor:
        words = self._tensor if _is_lazy(self._tensor) else as_words(self._tensor)
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


# `torch.cat` copies the bits of these. It does not know all others, or converts them.
_JOINED = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
)


def gather(readers: Iterable[TensorReader], memory: torch.Tensor) -> None:
    """Queue copies of all bytes of the readers, one after another, into a flat tensor of bytes.

    The memory is on their device, and each reader's part of it is aligned. Contiguous tensors of
    one dtype are copied by one call.
    """
    start = 0
    joined: list[torch.Tensor] = []
    for reader in readers:
        flat = reader.flat()
        can_join = flat is not None and flat.dtype in _JOINED
        if joined and (flat is None or flat.dtype != joined[0].dtype):
            start = _join(joined, memory, start)
            joined = []
        if flat is not None and can_join:
            joined.append(flat)
        else:
            reader.copy_to(memory[start : start + reader.nbytes])
            start += reader.nbytes
    _join(joined, memory, start)


def _join(joined: Sequence[torch.Tensor], memory: torch.Tensor, start: int) -> int:
    """Copy flat tensors of one dtype, and return where they end."""
    stop = start + sum(flat.nbytes for flat in joined)
    if start < stop:
        torch.cat([*joined], out=memory[start:stop].view(joined[0].dtype))
    return stop


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all work on the accelerators that have these tensors.

    Readers and targets use other streams than training. So call this before the first read or
    place, and after the last place.
    """
    devices = {tensor.device for tensor in tensors} - {torch.device("cpu"), torch.device("meta")}
    for device in sorted(devices, key=str):
        torch.accelerator.synchronize(device)


def host_memory(tensor: torch.Tensor) -> memoryview | None:
    """Return the writable bytes of a tensor if they are row-major in host memory, else None.

    The view keeps the tensor alive. Do not use the view after the tensor's storage was resized.
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
    """Return the same memory as integers of the item size, or pairs for items of 16 bytes."""
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.itemsize])


def slices_of(region: Region) -> tuple[slice, ...]:
    """Return the index that selects a region of a tensor."""
    return tuple(slice(o, s) for o, s in zip(region.offset, region.stop, strict=True))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if elements of a tensor may share memory, as after `expand`."""
    if tensor.is_contiguous():
        return False
    reach = 0
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def view_elements(
    data: memoryview, dtype: torch.dtype, shape: Shape, strides: Shape
) -> torch.Tensor:
    """Return a box of elements in `data`, which begins with the first. Strides are in elements."""
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return _as_tensor(data[: (last + 1) * dtype.itemsize], dtype).as_strided(shape, strides)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Return True if the memory of a view differs from its values (lazy conj or neg)."""
    return tensor.is_conj() or tensor.is_neg()


def bytes_of(memory: memoryview) -> torch.Tensor:
    """Return a tensor of bytes that shares memory, which is writable and not empty."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def _as_tensor(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    # `frombuffer` warns about read-only memory, although nothing here writes to the tensor
    return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=dtype)


# Each dtype represents whole numbers of up to this many bits exactly.
_PRECISION = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_PRECISION_OF_COMPLEX = {"complex128": 53, "complex64": 24}
_PRECISIONS = {**_PRECISION, **_PRECISION_OF_COMPLEX}
# Each wider floating dtype has all values of these. A cast to these would need a scale.
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")

# torch converts so few elements without threads. Its threads wait for each other: on a busy
# processor, 8 MiB took 23 to 39 ms with threads, and 0.7 ms without.
_MAX_SERIAL_NUMEL = 31 << 10

_INTEGER = re.compile(r"(u?)int(8|16|32|64)")


def can_cast(saved: str, live: str) -> bool:
    """Return True if a load can cast `saved` to `live`: both are floating, or nothing is lost."""
    if live in _PRECISION and (saved in _PRECISION or saved in _FLOAT8):
        return True
    if saved in _PRECISIONS:
        return live in _PRECISION_OF_COMPLEX and _PRECISIONS[saved] <= _PRECISIONS[live]
    live_range, saved_range = _whole_number_range(live), _whole_number_range(saved)
    if live_range is None or saved_range is None:
        return False
    return live_range[0] <= saved_range[0] and saved_range[1] <= live_range[1]


def _whole_number_range(dtype: str) -> tuple[int, int] | None:
    """Return the range in which a dtype represents all whole numbers, or None."""
    if dtype == "bool":
        return 0, 1
    if bits := _PRECISIONS.get(dtype):
        return -(1 << bits), 1 << bits
    if match := _INTEGER.fullmatch(dtype):
        bits = int(match[2])
        return (0, (1 << bits) - 1) if match[1] else (-(1 << bits - 1), (1 << bits - 1) - 1)
    return None


class CastTarget:
    """A `Target` with another dtype than the saved one: values are converted block by block.

    `has_overflown` is True if a finite value became infinite.
    """

    __slots__ = ("_dtype", "_is_narrowing", "_saved", "_target", "has_overflown")

    def __init__(self, tensor: torch.Tensor, cell: Cell, saved: torch.dtype) -> None:
        self._target = TensorTarget(tensor, cell)
        self._dtype, self._saved = tensor.dtype, saved
        self._is_narrowing = _is_narrowing(saved, tensor.dtype)
        self.has_overflown = False

    def memory(self) -> memoryview | None:
        """Return None: the bytes of a file have another dtype."""
        return None

    def place(self, piece: RegionPiece, box: Region, data: memoryview, strides: Shape) -> None:
        """Convert the elements of `box` from the saved dtype in `data`, and copy them."""
        if box.numel == 0:
            return
        values = view_elements(data, self._saved, box.shape, strides)
        cast = values.to(self._dtype).contiguous()
        if self._is_narrowing and _has_overflown(values, cast):
            self.has_overflown = True
        memory = host_memory(cast)
        assert memory is not None, "a new CPU tensor"
        self._target.place(piece, box, memory, row_major_strides(box.shape))


def cast_elements(data: memoryview, saved: str, live: str) -> memoryview | None:
    """Return elements in another dtype, or None if a finite value became infinite."""
    values = torch.frombuffer(data, dtype=getattr(torch, saved))
    cast = torch.empty(values.shape, dtype=getattr(torch, live))
    is_narrowing = _is_narrowing(values.dtype, cast.dtype)
    for source, target in zip(
        values.split(_MAX_SERIAL_NUMEL), cast.split(_MAX_SERIAL_NUMEL), strict=True
    ):
        target.copy_(source)
        if is_narrowing:
            least, greatest = torch.aminmax(target)
            is_finite = -inf < float(least) and float(greatest) < inf
            if not is_finite and _has_overflown(source, target):
                return None
    return host_memory(cast)


def _is_narrowing(saved: torch.dtype, live: torch.dtype) -> bool:
    both_float = live.is_floating_point and saved.is_floating_point
    return both_float and torch.finfo(live).max < torch.finfo(saved).max


def _has_overflown(values: torch.Tensor, cast: torch.Tensor) -> bool:
    return bool((cast.isinf() & values.isfinite()).any())


# --- tensors that share memory: their values are read into buffers, and then copied ---------------


@dataclass(frozen=True, slots=True, eq=False)
class AliasBuffers:
    """The local parts of a tensor that shares memory, and the host buffers that are read into."""

    name: str
    parts: tuple[torch.Tensor, ...]
    buffers: tuple[torch.Tensor, ...]

    def copy_to_parts(self) -> None:
        """Copy the buffers to the parts, bit by bit."""
        with torch.no_grad():
            for part, buffer in zip(self.parts, self.buffers, strict=True):
                if part.is_conj() or part.is_neg():
                    part.copy_(buffer)
                else:
                    as_words(part).copy_(as_words(buffer))

    def is_in_place(self) -> bool:
        """Return True if the parts equal the buffers."""
        return all(
            torch.equal(as_words(part.resolve_conj().resolve_neg()).cpu(), as_words(buffer))
            for part, buffer in zip(self.parts, self.buffers, strict=True)
        )


def find_aliased_tensors(tensors: Sequence[Sequence[torch.Tensor]]) -> frozenset[int]:
    """Return the indices of the tensors, given by their parts, that share or interleave memory."""
    all_parts = [part for parts in tensors for part in parts]
    if all(part.is_cpu and part.is_contiguous() for part in all_parts):
        # A cheap check that is usually sufficient. Without overlap, the sorted ends and starts
        # alternate: each tensor ends before the next one starts.
        starts = [part.data_ptr() for part in all_parts]
        stops = sorted(map(add, starts, [part.nbytes for part in all_parts]))
        starts.sort()
        if all(map(le, stops, islice(starts, 1, None))):
            return frozenset()
    reaches = sorted(
        (device, start, stop, number)
        for number, parts in enumerate(tensors)
        for device, (start, stop) in _memory_ranges(parts).items()
    )
    numbers: set[int] = set()
    last = ("", 0, 0, -1)  # the range with the highest end so far
    for reach in reaches:
        if reach[0] == last[0] and reach[1] < last[2]:
            numbers |= {reach[3], last[3]}
        if reach[0] != last[0] or reach[2] > last[2]:
            last = reach
    return frozenset(numbers)


def overwrites(other: AliasBuffers, buffers: AliasBuffers) -> bool:
    """Return True if a copy of the other buffers changes what a copy of these has written."""
    buffers.copy_to_parts()
    other.copy_to_parts()
    return not buffers.is_in_place()


def _memory_ranges(parts: Sequence[torch.Tensor]) -> dict[str, tuple[int, int]]:
    reach: dict[str, tuple[int, int]] = {}
    for part in parts:
        if numel := part.numel():
            if not part.is_contiguous():
                dims = zip(part.shape, part.stride(), strict=True)
                numel = 1 + sum((size - 1) * stride for size, stride in dims)
            start = part.data_ptr()
            stop = start + numel * part.itemsize
            device = _device_name(part.device)
            former = reach.get(device, (start, stop))
            reach[device] = min(start, former[0]), max(stop, former[1])
    return reach


_device_name = lru_cache(maxsize=64)(str)
