"""Elements that lie apart, as of a transposed tensor, brought into the row-major order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Literal

from dist_ckpt.errors import CorruptError
from dist_ckpt.format.geometry import Shape

_FORMATS: Mapping[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def gathered(there: memoryview, shape: Shape, strides: Shape, itemsize: int) -> memoryview:
    """Return the elements of a tensor in order, whose first is at the start of `there`.

    CorruptError if `there` is too short. The longest dimension is copied at a time.
    """
    if itemsize == 16:  # a complex number is two of the widest words
        return gathered(there, (*shape, 2), (*(2 * stride for stride in strides), 1), 8)
    spanned = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if len(there) < spanned * itemsize:
        raise CorruptError("a tensor's elements end before the file does; fetch it anew")
    if not shape:
        return there[:itemsize]
    code = _FORMATS[itemsize]
    source = there[: spanned * itemsize].cast(code)
    data = memoryview(bytearray(prod(shape) * itemsize))
    target = data.cast(code)
    own = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = max(range(len(shape)), key=lambda dim: shape[dim])
    count, step, own_step = shape[inner], strides[inner], own[inner]
    others = [dim for dim in range(len(shape)) if dim != inner]
    for place in product(*(range(shape[dim]) for dim in others)):
        at = sum(i * strides[dim] for i, dim in zip(place, others, strict=True))
        to = sum(i * own[dim] for i, dim in zip(place, others, strict=True))
        target[to : to + (count - 1) * own_step + 1 : own_step] = source[
            at : at + (count - 1) * step + 1 : step
        ]
    return data
