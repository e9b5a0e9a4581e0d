"""The views of stored tensors under a ShardingConfig, after a load or a reshard."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.index import Catalog, Node
from dist_ckpt.core.format.index.index_json import parameter_ranges
from dist_ckpt.core.planning.plan import (
    Flattened,
    Inventory,
    Mesh,
    MeshPlaced,
    Replicate,
    RuleSharded,
    SavePlan,
    Shard,
    TensorEntry,
    View,
    Whole,
)
from dist_ckpt.core.planning.save.balance import assign_evenly
from dist_ckpt.core.planning.save.save_planner import plan_save
from dist_ckpt.core.planning.sharding_config import (
    ShardingConfig,
    find_axes,
    find_parameter,
    strip_component,
)


def target_view(
    config: ShardingConfig,
    name: str,
    shape: Shape,
    *,
    parameter: tuple[str, Shape] | None = None,
    owner: int | None = None,
) -> View:
    """Return the view of a tensor of global `shape` after a load or reshard.

    `parameter` is the name and shape of the parameter that the tensor belongs to. `owner` is the
    rank that gets the tensor if ranks own whole parameters. With None, any rank may have it.
    """
    if _is_partitioned(config, parameter):
        if config.flat and shape and (parameter is None or parameter[1] == shape):
            return Flattened(config.ranks())
        if not config.flat and owner is not None:
            return MeshPlaced(Mesh(("owner",), (1,), (owner,)), (Replicate(),))
    axes = find_axes(config, name, shape, parameter)
    if not any(axes):
        return Whole()
    return chunked_view(RuleSharded(config.ranks(), axes))


def chunked_view(view: RuleSharded) -> MeshPlaced:
    """Return the view with the same cuts, in parts as `torch.chunk` makes them."""
    dims = {axis: dim for dim, cutting in enumerate(view.axes) for axis in cutting}
    placements = (
        Shard(dims[axis]) if axis in dims else Replicate() for axis in range(len(view.mesh.shape))
    )
    return MeshPlaced(view.mesh, tuple(placements))


def target_views(config: ShardingConfig, catalog: Catalog) -> dict[str, View]:
    """Return the view of each tensor of a checkpoint after a reshard."""
    names: dict[str, str] = {}
    rule_names: dict[str, str] = {}
    shapes: dict[str, Shape] = {}
    for fqn, record in catalog.tensors.items():
        names[fqn] = strip_component(fqn, catalog.components[record.component].name)
        # An optimizer over several modules prefixes its parameters with the names of the modules.
        for name in (names[fqn], fqn):
            shapes.setdefault(name, record.shape)
            rule_names.setdefault(name, names[fqn])
    parameters: dict[str, tuple[str, Shape] | None] = {}
    nbytes: dict[str, int] = {}
    for fqn, record in catalog.tensors.items():
        parameter = find_parameter(names[fqn], shapes)
        parameters[fqn] = parameter and (rule_names[parameter[0]], parameter[1])
        if _is_partitioned(config, parameter):
            name = rule_names[parameter[0]] if parameter else names[fqn]
            size = prod(record.shape) * DTYPES[record.dtype].itemsize
            nbytes[name] = nbytes.get(name, 0) + size
    owners = assign_evenly(nbytes, config.world_size)
    views: dict[str, View] = {}
    for fqn, record in catalog.tensors.items():
        parameter = parameters[fqn]
        owner = owners.get(parameter[0] if parameter else names[fqn])
        views[fqn] = target_view(config, names[fqn], record.shape, parameter=parameter, owner=owner)
    return views


def plan_reshard(
    catalog: Catalog, config: ShardingConfig, tree: tuple[Node, ...], numpy: tuple[str, ...]
) -> SavePlan:
    """Return the plan by which the ranks of `config` save the content of a checkpoint."""
    components = tuple(component.name for component in catalog.components)
    views: dict[View, int] = {}
    tensors = []
    for fqn, view in target_views(config, catalog).items():
        record = catalog.tensors[fqn]
        number = views.setdefault(view, len(views))
        tensors.append(TensorEntry(fqn, record.dtype, record.shape, number, record.component))
    inventory = Inventory(
        mesh=catalog.mesh,
        components=components,
        views=tuple(views),
        tensors=tuple(tensors),
        aliases=tuple(catalog.aliases.items()),
        values=tuple(catalog.values),
        per_rank=(),
        tree=tree,
        name_lists=(),
        numpy=numpy,
        parameters=parameter_ranges((entry.fqn for entry in tensors), catalog.parameters),
    )
    plan = plan_save([(inventory, tuple(range(config.world_size)))], config.world_size)
    # Per-rank keys and the mesh still describe the ranks that saved. The values are distributed
    # over the new ranks: an objects file has a size limit.
    per_rank = {
        fqn: tuple((key, number % config.world_size) for number, (key, _) in enumerate(keys))
        for fqn, keys in catalog.per_rank.items()
    }
    return replace(plan, catalog=replace(plan.catalog, per_rank=per_rank))


def _is_partitioned(config: ShardingConfig, parameter: tuple[str, Shape] | None) -> bool:
    return config.zero_stage == 3 or (config.zero_stage > 0 and parameter is not None)
