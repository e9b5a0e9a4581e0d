"""Compound tensors that are cut over ranks: how the tensors in them are cut along.

Nothing says it: `__tensor_flatten__` has no sizes of the whole. So an inner tensor is cut
like the whole if it has its shape; in blocks if each of its dimensions divides that of the local
tensor, as the scales of rows do; and where its shape leaves it open, the class is asked: it cuts a
tensor of its own, and what comes out shows which of the inner ones are cut, and which are tables
that every rank has. What cannot be told so is stored for each shard, and loads only
where the whole is cut in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from dist_ckpt.format.geometry import Region, Shape
from dist_ckpt.planning import plan
from dist_ckpt.planning.mesh import cells_of, readings
from dist_ckpt.runtime.torch_private import StridedShard, local_tensor
from dist_ckpt.state.compounds import inner_tensors
from dist_ckpt.state.dtensors import cells_that_fit, mesh_within, placement_of
from dist_ckpt.state.wrappers import LocalShard


@dataclass(frozen=True, slots=True)
class HeldBox:
    """Which box of the tensor of `shape` a rank has."""

    shape: Shape
    box: Region

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of which it has not all."""
        sizes = zip(self.shape, self.box.shape, strict=True)
        return tuple(dim for dim, (whole, part) in enumerate(sizes) if whole != part)


def held_box(value: DTensor, fqn: str) -> HeldBox:
    """Return which box of a DTensor this rank has. Raises TypeError if it is more than one."""
    shape = tuple(value.shape)
    ranks: list[int] = value.device_mesh.mesh.flatten().tolist()
    mesh = mesh_within(value.device_mesh, tuple(ranks), fqn)
    assert mesh is not None
    placements = tuple(placement_of(placement, value, fqn) for placement in value.placements)
    possible = readings(plan.Placed(mesh, placements), shape)
    rank = ranks.index(dist.get_rank())
    cells = cells_that_fit(
        [cells_of(r, rank, shape) for r in possible], local_tensor(value), value, fqn
    )
    if len(cells) > 1:
        raise TypeError(
            f"{fqn}: the compound tensor on this rank is {len(cells)} boxes of the whole under "
            f"{value.placements}: choose sizes that divide evenly over the mesh"
        )
    for cell in cells:
        assert isinstance(cell, Region)
        return HeldBox(shape, cell)
    return HeldBox(shape, Region((0,) * len(shape), (0, *shape[1:])))


def inner_shards(
    value: DTensor, local: torch.Tensor, fqn: str
) -> tuple[dict[str, LocalShard], dict[str, object] | None]:
    """Return what this rank has of each tensor in a DTensor of compound ones.

    And what the record says of those that are stored for each shard, if there are any.
    """
    cut = held_box(value, fqn)
    inner = inner_tensors(local, fqn)
    tables = _tables(local, cut, inner)
    shards, single = {}, []
    for name, tensor in inner.items():
        found = inner_cut(cut, tuple(tensor.shape), is_table=tables.get(name))
        if found is not None:
            shards[name] = LocalShard(tensor, found.shape, found.box.offset)
            continue
        single.append(name)
        number, count = _place_of(value)
        shape, offset = (count, *tensor.shape), (number, *(0 for _ in tensor.shape))
        shards[name] = LocalShard(tensor.detach().unsqueeze(0), shape, offset)
    if not single:
        return shards, None
    mesh = tuple(value.device_mesh.shape)
    return shards, {"parts": single, "placements": str(value.placements), "mesh": mesh}


def inner_cut(cut: HeldBox, shape: Shape, *, is_table: bool | None) -> HeldBox | None:
    """Return which box an inner tensor of a local `shape` is, or None if that cannot be told.

    `is_table` says whether every rank has all of it, where the shape leaves that open; None if
    that is not known.
    """
    if not cut.dims or is_table:
        return HeldBox(shape, Region.whole(shape))
    if shape == cut.box.shape:
        return cut
    if len(shape) == len(cut.shape) and (found := _in_blocks(cut, shape)):
        return found
    return _in_runs(cut, shape) if is_table is False else None


def _in_blocks(cut: HeldBox, shape: Shape) -> HeldBox | None:
    """Return the box of a tensor with an element for each block of the whole, as a scale."""
    sizes, offset = [], []
    for dim, size in enumerate(shape):
        whole, part, start = cut.shape[dim], cut.box.shape[dim], cut.box.offset[dim]
        if dim not in cut.dims:
            sizes.append(size)
            offset.append(0)
            continue
        # One element for all that a rank has of a dimension may be one for all of the whole.
        if part % max(size, 1) or (size < 2 and size != part):
            return None
        block = part // max(size, 1) or 1
        if whole % block or start % block:
            return None
        sizes.append(whole // block)
        offset.append(start // block)
    return HeldBox(tuple(sizes), Region(tuple(offset), shape))


def _in_runs(cut: HeldBox, shape: Shape) -> HeldBox | None:
    """Return the box of a tensor with an element for each run of the whole's row-major ones."""
    if len(shape) != 1 or cut.dims != (0,) or not prod(shape):
        return None
    start = cut.box.offset[0] * prod(cut.shape[1:])
    run = cut.box.numel // shape[0]
    if not run or cut.box.numel % shape[0] or start % run or prod(cut.shape) % run:
        return None
    return HeldBox((prod(cut.shape) // run,), Region((start // run,), shape))


def _tables(
    local: torch.Tensor, cut: HeldBox, inner: Mapping[str, torch.Tensor]
) -> dict[str, bool]:
    """Ask the class which inner tensors are cut with it, by a few rows: those that are not."""
    if cut.dims != (0,):
        return {}
    rows, row = cut.box.shape[0], prod(cut.shape[1:])
    runs = {rows * row // t.numel() for t in inner.values() if t.ndim == 1 and t.numel()}
    for count in sorted({run // gcd(run, row) for run in runs if run}):
        if 0 < count < rows and (some := _rows_of(local, count)):
            # One element may be of all that this rank has, or of the whole.
            return {
                name: some[name].shape == tensor.shape
                for name, tensor in inner.items()
                if tensor.numel() > 1 and name in some
            }
    return {}


def _rows_of(local: torch.Tensor, count: int) -> dict[str, torch.Tensor] | None:
    try:
        with torch.no_grad():
            some = local[:count]
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return None  # it cannot be cut there
    return inner_tensors(some, "") if type(some) is type(local) else None


def _place_of(value: DTensor) -> tuple[int, int]:
    """Return the number of this rank's shard, and how many there are."""
    number, count = 0, 1
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    sizes = zip(value.placements, coordinate, value.device_mesh.shape, strict=True)
    for placement, at, size in sizes:
        if isinstance(placement, Shard | StridedShard):
            number, count = number * size + at, count * size
    return number, count
