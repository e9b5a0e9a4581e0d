"""A ShardingConfig applied to what is stored: who gets which part on a load or a reshard."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.catalog_json import runs_of
from dist_ckpt.core.format.index.index import Catalog, Node
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
from dist_ckpt.core.planning.save.balance import evenly
from dist_ckpt.core.planning.save.save_planner import plan_save
from dist_ckpt.core.planning.sharding_config import (
    ShardingConfig,
    axes_under,
    name_of,
    parameter_of,
)


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
            return MeshPlaced(Mesh(("owner",), (1,), (owner,)), (Replicate(),))
    axes = axes_under(config, name, shape, parameter)
    if not any(axes):
        return Whole()
    return chunked(RuleSharded(config.ranks(), axes))


def chunked(view: RuleSharded) -> MeshPlaced:
    """Return the same cuts with the parts that `torch.chunk` makes."""
    dims = {axis: dim for dim, cutting in enumerate(view.axes) for axis in cutting}
    placements = (
        Shard(dims[axis]) if axis in dims else Replicate() for axis in range(len(view.mesh.shape))
    )
    return MeshPlaced(view.mesh, tuple(placements))


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
    owners = evenly(nbytes, config.world_size)
    views: dict[str, View] = {}
    for fqn, record in catalog.tensors.items():
        parameter = parameters[fqn]
        owner = owners.get(parameter[0] if parameter else names[fqn])
        views[fqn] = target_view(config, names[fqn], record.shape, parameter=parameter, owner=owner)
    return views


def plan_stored(
    catalog: Catalog, config: ShardingConfig, tree: tuple[Node, ...], numpy: tuple[str, ...]
) -> SavePlan:
    """Return the plan of a save, by the ranks of `config`, of what a checkpoint holds."""
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
        parameters=runs_of((entry.fqn for entry in tensors), catalog.parameters),
    )
    plan = plan_save([(inventory, tuple(range(config.world_size)))], config.world_size)
    # The keys mean what they meant to the ranks that saved, so the mesh stays theirs as well. They
    # go round the ranks: an objects file has a limit.
    per_rank = {
        fqn: tuple((key, number % config.world_size) for number, (key, _) in enumerate(keys))
        for fqn, keys in catalog.per_rank.items()
    }
    return replace(plan, catalog=replace(plan.catalog, per_rank=per_rank))


def _is_partitioned(config: ShardingConfig, parameter: tuple[str, Shape] | None) -> bool:
    return config.zero_stage == 3 or (config.zero_stage > 0 and parameter is not None)
