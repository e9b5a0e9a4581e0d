"""What a placement with a strided shard may mean. Pure.

torch defines `_StridedShard` axis by axis: each axis cuts what the axes before it left. FSDP2 over
TP, for which it was made, cuts the other way round: TP first, then FSDP what TP left. Both give
the same cells where sizes divide evenly; where they do not, torch's placements still say the
first while the memory holds the second. Which it is shows only in the shape of the local tensor.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from dist_ckpt.format.geometry import Shape
from dist_ckpt.planning.mesh import layout_of
from dist_ckpt.planning.plan import Mesh, Placed, Replicate, Shard, StridedShard


@lru_cache(maxsize=4096)
def readings(view: Placed, shape: Shape) -> tuple[Placed, ...]:
    """Return the views that these placements may stand for: one, or two that differ.

    FSDP2's comes first.
    """
    if _is_even(view, shape) or (reordered := as_applied(view)) is None:
        return (view,)
    if layout_of(view, shape) == layout_of(reordered, shape):
        return (view,)
    return reordered, view


def as_applied(view: Placed) -> Placed | None:
    """Return the same placements with the mesh axes in the order in which they cut, or None.

    `split_factor` is the number of cuts made before on the dimension, by later axes: each strided
    axis comes right after the axes whose sizes make up that number. None if nothing is strided or
    no order explains the number.
    """
    orders: dict[int, list[int]] = {}
    for axis in reversed(range(len(view.placements))):
        placement = view.placements[axis]
        if isinstance(placement, Replicate):
            continue
        order = orders.setdefault(placement.dim, [])
        place = _place(placement, [view.mesh.shape[a] for a in order])
        if place is None:
            return None
        order.insert(place, axis)
    if not any(isinstance(placement, StridedShard) for placement in view.placements):
        return None
    cutting = [axis for order in orders.values() for axis in order]
    axes = cutting + [a for a in range(len(view.placements)) if a not in cutting]
    placements = (view.placements[axis] for axis in axes)
    return Placed(
        _transposed(view.mesh, axes),
        tuple(p if isinstance(p, Replicate) else Shard(p.dim) for p in placements),
    )


def _place(placement: Shard | StridedShard, sizes: list[int]) -> int | None:
    if isinstance(placement, Shard):
        return 0
    for place in range(len(sizes) + 1):
        if prod(sizes[:place]) == placement.split_factor:
            return place
    return None


def _is_even(view: Placed, shape: Shape) -> bool:
    cuts = [1] * len(shape)
    for placement, size in zip(view.placements, view.mesh.shape, strict=True):
        if not isinstance(placement, Replicate):
            cuts[placement.dim] *= size
    return all(size % cut == 0 for size, cut in zip(shape, cuts, strict=True))


def _transposed(mesh: Mesh, axes: list[int]) -> Mesh:
    """Return the mesh with its axes in another order."""
    shape = tuple(mesh.shape[axis] for axis in axes)
    strides = [prod(mesh.shape[axis + 1 :]) for axis in axes]
    ranks = [0]
    for size, stride in zip(shape, strides, strict=True):
        ranks = [place + i * stride for place in ranks for i in range(size)]
    return Mesh(
        tuple(mesh.names[axis] for axis in axes), shape, tuple(mesh.ranks[r] for r in ranks)
    )
