"""Multiply elements of 8-bit weights by their scales, in float32, and round once."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from dist_ckpt.core.format.geometry import Cell, Region, Shape
from dist_ckpt.core.planning.weight_scales import ScaledWeight
from dist_ckpt.core.shard_io.memory.torch_tensor import host_memory

# The elements that are multiplied at a time: some MiB of float32.
_STEP = 1 << 20


def multiply_by_scale(
    part: torch.Tensor, cell: Cell, shape: Shape, weight: ScaledWeight, scale: torch.Tensor
) -> bool:
    """Multiply a cell of a weight in place. Return True if a finite value became infinite.

    `part` has the elements of the cell, in its dtype. `shape` is that of the whole weight.
    """
    region, start = (cell, 0) if isinstance(cell, Region) else (Region.whole(shape), cell.start)
    scale = decode_scale(scale).reshape(weight.scale_shape)
    has_overflown = False
    with torch.no_grad():
        flat = part.reshape(-1)  # a copy if the memory has gaps
        for first in range(0, flat.numel(), _STEP):
            values = flat[first : first + _STEP]
            stop = first + values.numel()
            factors = _factors(scale, weight.blocks, region, start + first, start + stop)
            product = (values.float() * factors.to(values.device)).to(values.dtype)
            has_overflown = has_overflown or bool((product.isinf() & values.isfinite()).any())
            values.copy_(product)
        if not part.is_contiguous():
            part.copy_(flat.reshape(part.shape))
    return has_overflown


def dequantized_bytes(
    data: memoryview,
    dtype: str,
    first: int,
    region: Region,
    weight: ScaledWeight,
    scale: torch.Tensor,
) -> memoryview:
    """Return the float32 of elements in row-major order, from element `first` of a region on."""
    values = torch.frombuffer(data, dtype=getattr(torch, dtype)).float()
    scale = decode_scale(scale).reshape(weight.scale_shape)
    values *= _factors(scale, weight.blocks, region, first, first + values.numel())
    memory = host_memory(values)
    assert memory is not None, "a new CPU tensor"
    return memory


def decode_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return a scale in float32. One byte without a sign is an exponent, as in E8M0."""
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scale.float()
    exponents = scale.view(torch.uint8).int()
    ones = torch.ones_like(exponents, dtype=torch.float64)
    powers = torch.ldexp(ones, exponents - 127).float()
    return powers.masked_fill(exponents == 255, float("nan"))


def _factors(
    scale: torch.Tensor, blocks: Shape, region: Region, first: int, stop: int
) -> torch.Tensor:
    """Return the scale of each element of a region, from one to another in row-major order."""
    if not region.shape:
        return scale.reshape(1)
    columns = region.shape[-1]
    first_row, stop_row = first // columns, -(-stop // columns)
    rows = scale[tuple(_block_numbers(region, blocks, first_row, stop_row))]
    positions = torch.arange(columns) + region.offset[-1]
    factors = rows[:, positions // blocks[-1]] if rows.dim() == 2 else rows[positions // blocks[-1]]
    return factors.reshape(-1)[first - first_row * columns : stop - first_row * columns]


def _block_numbers(
    region: Region, blocks: Shape, first_row: int, stop_row: int
) -> Iterator[torch.Tensor]:
    """Yield the block of each row in each dimension but the last."""
    rows = torch.arange(first_row, stop_row)
    for dim, (size, offset) in enumerate(zip(region.shape[:-1], region.offset, strict=False)):
        position = rows // prod(region.shape[dim + 1 : -1]) % size
        yield (position + offset) // blocks[dim]
