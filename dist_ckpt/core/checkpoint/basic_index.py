"""What a stored tensor can be indexed with: integers, slices without a step, and `...`."""

from __future__ import annotations

from operator import index as as_int
from types import EllipsisType
from typing import SupportsIndex

from dist_ckpt.core.format.geometry import Region, Shape

# Each is one entry of a tuple, too.
BasicIndex = SupportsIndex | slice | EllipsisType


def select(where: BasicIndex | tuple[BasicIndex, ...], shape: Shape) -> tuple[Region, Shape]:
    """Return the box that an index means, and the shape of what it returns.

    Raises IndexError as numpy does, ValueError for what is no basic index of step 1.
    """
    entries = where if isinstance(where, tuple) else (where,)
    if (num_dots := sum(entry is Ellipsis for entry in entries)) > 1:
        raise ValueError("an index can have one `...` only")
    if (num_dims := len(entries) - num_dots) > len(shape):
        raise IndexError(f"{num_dims} indices for a tensor of {len(shape)} dimensions")
    rest = (slice(None),) * (len(shape) - num_dims)
    at = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    offset, extent, kept = [], [], []
    for dim, entry in enumerate((*entries[:at], *rest, *entries[at + 1 :])):
        bounds = _bounds(entry, shape[dim], dim)
        offset.append(bounds.start)
        extent.append(len(bounds))
        if isinstance(entry, slice):
            kept.append(len(bounds))
    return Region(tuple(offset), tuple(extent)), tuple(kept)


def _bounds(entry: BasicIndex, size: int, dim: int) -> range:
    """Return what one entry of an index selects of its dimension."""
    if isinstance(entry, slice):
        start, stop, step = entry.indices(size)
        if step != 1:
            raise ValueError(f"a step of {step}: read the range and pick from it")
        return range(start, stop)
    if isinstance(entry, bool) or not isinstance(entry, SupportsIndex):
        raise ValueError(f"{entry!r} is no index here: use integers, slices and `...`")
    number = as_int(entry)
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of bounds for dimension {dim} of size {size}")
    return range(number % size, number % size + 1)
