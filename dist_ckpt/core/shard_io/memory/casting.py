"""Convert values of one dtype into memory of another."""

from __future__ import annotations

import re
from math import inf

import torch

from dist_ckpt.core.format.geometry import Cell, Region, RegionPiece, Shape, row_major_strides
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorTarget, host_memory, values_in

# The bits of a whole number that each represents exactly.
_PRECISION = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_PRECISION_OF_COMPLEX = {"complex128": 53, "complex64": 24}
# Any wider dtype has all their values. The other direction would need a scale.
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")

# torch converts this few elements without its threads, which wait for each other. On a busy
# processor, 8 MiB took 23 to 39 ms with them, and 0.7 without.
_NUM_SERIAL = 31 << 10

_INTEGER = re.compile(r"(u?)int(8|16|32|64)")


def can_cast(saved: str, live: str) -> bool:
    """Return True if a load may cast: between floating dtypes, or without any loss."""
    if live in _PRECISION and (saved in _PRECISION or saved in _FLOAT8):
        return True
    if live in _PRECISION_OF_COMPLEX:
        bits = {**_PRECISION, **_PRECISION_OF_COMPLEX}.get(saved)
        if bits is not None:
            return bits <= _PRECISION_OF_COMPLEX[live]
    have, need = _whole_numbers(live), _whole_numbers(saved)
    if have is None or need is None or saved in _PRECISION or saved in _PRECISION_OF_COMPLEX:
        return False
    return have[0] <= need[0] and need[1] <= have[1]


def _whole_numbers(dtype: str) -> tuple[int, int] | None:
    """Return the range in which a dtype has all whole numbers, or None."""
    if dtype == "bool":
        return 0, 1
    if bits := {**_PRECISION, **_PRECISION_OF_COMPLEX}.get(dtype):
        return -(1 << bits), 1 << bits
    if match := _INTEGER.fullmatch(dtype):
        bits = int(match[2])
        return (0, (1 << bits) - 1) if match[1] else (-(1 << bits - 1), (1 << bits - 1) - 1)
    return None


class CastTarget:
    """A `Target` whose dtype differs from the saved one: values are converted block by block.

    `has_overflown`: a finite value became infinite.
    """

    __slots__ = ("_dtype", "_narrows", "_saved", "_target", "has_overflown")

    def __init__(self, tensor: torch.Tensor, cell: Cell, saved: torch.dtype) -> None:
        self._target = TensorTarget(tensor, cell)
        self._dtype, self._saved = tensor.dtype, saved
        self._narrows = _narrows(saved, tensor.dtype)
        self.has_overflown = False

    def memory(self) -> memoryview | None:
        """Return None: the tensor cannot have a file's bytes."""
        return None

    def place(self, piece: RegionPiece, box: Region, data: memoryview, strides: Shape) -> None:
        """Convert the elements of `box`, which `data` has in the saved dtype."""
        if box.numel == 0:
            return
        values = values_in(data, self._saved, box.shape, strides)
        cast = values.to(self._dtype).contiguous()
        if self._narrows and _has_overflown(values, cast):
            self.has_overflown = True
        memory = host_memory(cast)
        assert memory is not None, "a new CPU tensor"
        self._target.place(piece, box, memory, row_major_strides(box.shape))


def converted(data: memoryview, saved: str, live: str) -> memoryview | None:
    """Return elements in another dtype, or None if a finite value became infinite."""
    values = torch.frombuffer(data, dtype=getattr(torch, saved))
    cast = torch.empty(values.shape, dtype=getattr(torch, live))
    narrows = _narrows(values.dtype, cast.dtype)
    for source, target in zip(values.split(_NUM_SERIAL), cast.split(_NUM_SERIAL), strict=True):
        target.copy_(source)
        if narrows and not _is_finite(target) and _has_overflown(source, target):
            return None
    return host_memory(cast)


def _narrows(saved: torch.dtype, live: torch.dtype) -> bool:
    both_float = live.is_floating_point and saved.is_floating_point
    return both_float and torch.finfo(live).max < torch.finfo(saved).max


def _is_finite(values: torch.Tensor) -> bool:
    least, greatest = torch.aminmax(values)
    return -inf < float(least) and float(greatest) < inf


def _has_overflown(values: torch.Tensor, cast: torch.Tensor) -> bool:
    return bool((cast.isinf() & values.isfinite()).any())
