"""A ShardingConfig applied: local tensors as views of global ones, and who gets what on a load."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapreplace
from math import prod

from dist_ckpt.dtypes import DTYPES
from dist_ckpt.index import Catalog
from dist_ckpt.mesh import cells_of
from dist_ckpt.plan import Flattened, Mesh, Placed, Replicate, Ruled, Shard, View, Whole
from dist_ckpt.region import Shape
from dist_ckpt.sharding import ShardingConfig, axes_under, name_of, parameter_of


def saved_view(
    config: ShardingConfig,
    name: str,
    shape: Shape,
    *,
    rank: int,
    parameter: tuple[str, Shape] | None = None,
) -> tuple[View, Shape]:
    """Return the view of a plain local tensor for a save, and the shape for its entry.

    `parameter` is the name and local shape of the one that it is stored under, if any. The shape
    is the local one under a `Ruled` view, else the global one. Raises ValueError for a flat part
    whose size is not what ZeRO leaves the rank.
    """
    if config.flat and shape and _is_partitioned(config, parameter):
        return _flat_view(config, name, shape, rank, parameter)
    axes = axes_under(config, name, shape, parameter)
    return (Ruled(config.ranks(), axes) if any(axes) else Whole()), shape


def target_view(
    config: ShardingConfig,
    name: str,
    shape: Shape,
    *,
    parameter: tuple[str, Shape] | None = None,
    owner: int | None = None,
) -> View:
    """Return how a tensor of global `shape` lies on the ranks after a load or reshard.

    `parameter` is the name and global shape of the one that it is stored under, if any. `owner`
    is the rank that gets it where whole parameters go to ranks; None means whoever has it.
    """
    if _is_partitioned(config, parameter):
        if config.flat and shape and (parameter is None or parameter[1] == shape):
            return Flattened(config.ranks())
        if not config.flat and owner is not None:
            return Placed(Mesh(("owner",), (1,), (owner,)), (Replicate(),))
    axes = axes_under(config, name, shape, parameter)
    if not any(axes):
        return Whole()
    dims = {axis: dim for dim, cutting in enumerate(axes) for axis in cutting}
    placements = (
        Shard(dims[axis]) if axis in dims else Replicate() for axis in range(len(config.mesh))
    )
    return Placed(config.ranks(), tuple(placements))


def target_views(config: ShardingConfig, catalog: Catalog) -> dict[str, View]:
    """Return how each tensor of a checkpoint lies on the ranks after a reshard."""
    names: dict[str, str] = {}
    rule_names: dict[str, str] = {}
    shapes: dict[str, Shape] = {}
    for fqn, record in catalog.tensors.items():
        names[fqn] = name_of(fqn, catalog.components[record.component].name)
        # An optimizer over several modules calls its parameters after the modules as well.
        for name in (names[fqn], fqn):
            shapes.setdefault(name, record.shape)
            rule_names.setdefault(name, names[fqn])
    parameters: dict[str, tuple[str, Shape] | None] = {}
    nbytes: dict[str, int] = {}
    for fqn, record in catalog.tensors.items():
        found = parameter_of(names[fqn], shapes)
        parameters[fqn] = found and (rule_names[found[0]], found[1])
        if _is_partitioned(config, found):
            name = rule_names[found[0]] if found else names[fqn]
            size = prod(record.shape) * DTYPES[record.dtype].itemsize
            nbytes[name] = nbytes.get(name, 0) + size
    owners = assign(nbytes, config.world_size)
    views: dict[str, View] = {}
    for fqn, record in catalog.tensors.items():
        parameter = parameters[fqn]
        owner = owners.get(parameter[0] if parameter else names[fqn])
        views[fqn] = target_view(config, names[fqn], record.shape, parameter=parameter, owner=owner)
    return views


def assign(nbytes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Give whole parameters to ranks so that all get about the same number of bytes."""
    heap = [(0, rank) for rank in range(world_size)]
    owners = {}
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        load, rank = heap[0]
        owners[name] = rank
        heapreplace(heap, (load + nbytes[name], rank))
    return owners


def _is_partitioned(config: ShardingConfig, parameter: tuple[str, Shape] | None) -> bool:
    return config.zero_stage == 3 or (config.zero_stage > 0 and parameter is not None)


def _flat_view(
    config: ShardingConfig,
    name: str,
    shape: Shape,
    rank: int,
    parameter: tuple[str, Shape] | None,
) -> tuple[View, Shape]:
    whole = config.shapes.get(parameter[0] if parameter else name)
    if whole is None and parameter is not None and config.zero_stage < 3:
        whole = parameter[1]
    if whole is None:
        raise ValueError(
            f"{name}: a flat part of {list(shape)} does not tell the shape of its tensor: "
            "pass shapes={name: shape} to ShardingConfig.zero, or wrap it in dc.FlatShard"
        )
    view = Flattened(config.ranks())
    numel = sum(cell.numel for cell in cells_of(view, rank, whole))
    if shape == (numel,):
        return view, whole
    if parameter is not None:
        return Whole(), shape
    raise ValueError(
        f"{name}: rank {rank} holds {list(shape)}, but the even part of {list(whole)} has {numel} "
        f"elements: wrap it in dc.FlatShard, which may be uneven"
    )
