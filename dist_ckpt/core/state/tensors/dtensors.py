"""Convert DTensors for plans: placements, mesh, and the boxes in local memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dist_ckpt.core.format.geometry import Cell, Region, Shape
from dist_ckpt.core.planning import tensor_views
from dist_ckpt.core.planning.tensor_views import compute_cells, possible_views
from dist_ckpt.core.runtime.torch_private import StridedShard, cuts_strided_alike
from dist_ckpt.core.shard_io.memory.torch_tensor import slices_of
from dist_ckpt.core.state.tensors.local_tensors import class_name


def local_of(value: DTensor) -> torch.Tensor:
    """Return the local tensor, outside of autograd."""
    with torch.no_grad():
        return value.to_local()


def dtensor_like(value: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with another local tensor of the same size, without communication."""
    return DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def new_uncut(like: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor as `new_empty` does, but never cut as `like` is."""
    if not isinstance(like, DTensor) or tuple(like.shape) != shape:
        return like.new_empty(shape, dtype=dtype)
    local = local_of(like).new_empty(shape, dtype=dtype)
    placements = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(local, like.device_mesh, placements, run_check=False)


def plan_placement(placement: Placement, value: DTensor, fqn: str) -> tensor_views.AxisPlacement:
    """Convert a torch placement to a plan's placement.

    Raises ValueError for a Partial placement, TypeError for an unknown one.
    """
    match placement:
        case Replicate():
            return tensor_views.ReplicatedAxis()
        # Before Shard: in some versions of torch StridedShard is a subclass of Shard.
        case StridedShard():
            return tensor_views.StridedAxis(placement.dim % value.ndim, int(placement.split_factor))
        case Shard():
            return tensor_views.ShardedAxis(placement.dim % value.ndim)
        case Partial():
            raise ValueError(
                f"{fqn}: a DTensor under {placement!r} is not yet summed up over its mesh: "
                "`redistribute` it to Replicate or Shard first"
            )
    raise TypeError(
        f"{fqn}: the placement {placement} of class {class_name(placement)} is unknown: "
        "`redistribute` the DTensor to Replicate or Shard first"
    )


def plan_mesh(mesh: DeviceMesh, group_ranks: tuple[int, ...], fqn: str) -> tensor_views.Mesh | None:
    """Return the mesh in ranks of the group; None if torch hides the ranks."""
    # Slices of one mesh compare equal although their ranks differ. This rank is part of the cache
    # key, and selects its slice.
    own_rank = dist.get_rank() if dist.is_initialized() else -1
    try:
        return _mesh_in(mesh, own_rank, group_ranks)
    except ValueError as error:
        raise ValueError(f"{fqn}: {error}") from None


# A job has a few meshes and thousands of tensors, and a mesh may have thousands of ranks.
@lru_cache(maxsize=64)
def _mesh_in(
    mesh: DeviceMesh, _own_rank: int, group_ranks: tuple[int, ...]
) -> tensor_views.Mesh | None:
    try:
        ranks: list[int] = mesh.mesh.flatten().tolist()
    except RuntimeError:  # torch hides the ranks of a mesh without this rank
        return None
    numbers = {rank: number for number, rank in enumerate(group_ranks)}
    if outside := [rank for rank in ranks if rank not in numbers]:
        raise ValueError(
            f"its mesh has the global ranks {outside[:8]}, which are not in the group: call with "
            "a group that has the whole mesh"
        )
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return tensor_views.Mesh(
        tuple(names), tuple(mesh.shape), tuple(numbers[rank] for rank in ranks)
    )


def local_cells(
    view: tensor_views.MeshPlaced, rank: int, local: torch.Tensor, value: DTensor, fqn: str
) -> tuple[tensor_views.View, tuple[Cell, ...]]:
    """Return the view of a DTensor, and its cells in the local tensor of this rank.

    Some placements have two meanings in torch, and the local shape decides. Then the view lists the
    cells, not the placements. Raises ValueError if the shape fits neither meaning, or both.
    """
    shape = tuple(value.shape)
    possible = possible_views(view, shape, as_defined=cuts_strided_alike())
    label = f"{fqn}: a DTensor of shape {shape} under {value.placements}"
    all_cells = [compute_cells(reading, rank, shape) for reading in possible]
    fitting = {cells for cells in all_cells if _extent(cells, local) == tuple(local.shape)}
    if not fitting:
        raise ValueError(
            f"{label} on {value.device_mesh} has a local tensor of shape {tuple(local.shape)} "
            "here, which does not fit its placements: use dist_ckpt.LocalShard for such parts"
        )
    if len(fitting) > 1:
        raise ValueError(
            f"{label} can be read in two ways here: choose sizes that divide evenly over the mesh, "
            "or use dist_ckpt.LocalShard"
        )
    cells = fitting.pop()
    return possible[0] if len(possible) == 1 else tensor_views.Parts(cells), cells


def _runs(cells: Sequence[Cell], dim: int) -> dict[int, int]:
    boxes = [cell for cell in cells if isinstance(cell, Region)]
    return dict(sorted((box.offset[dim], box.shape[dim]) for box in boxes))


def _extent(cells: Sequence[Cell], local: torch.Tensor) -> Shape:
    """Return the shape of all boxes together. Without boxes, any empty shape is correct."""
    if not cells and not local.numel():
        return tuple(local.shape)
    return tuple(sum(_runs(cells, dim).values()) for dim in range(local.ndim))


def split_boxes(local: torch.Tensor, cells: Sequence[Cell]) -> Iterator[torch.Tensor]:
    """Yield the part of the local tensor for each box."""
    starts = []
    for dim in range(local.ndim):
        runs = _runs(cells, dim)
        starts.append(dict(zip(runs, accumulate(runs.values(), initial=0), strict=False)))
    for cell in cells:
        assert isinstance(cell, Region)
        at = tuple(starts[dim][offset] for dim, offset in enumerate(cell.offset))
        yield local[slices_of(Region(at, cell.shape))]
