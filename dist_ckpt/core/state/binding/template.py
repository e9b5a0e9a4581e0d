"""The template of a load: the names and memory of the state, without the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from dist_ckpt.core.format.index.index import Key
from dist_ckpt.core.format.objects.plain_codec import check_plain
from dist_ckpt.core.planning.name_selection import Selection
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.planning.tensor_views import View
from dist_ckpt.core.state.fsdp1.fsdp1_optimizers import with_original_params
from dist_ckpt.core.state.named_optimizers import ParameterName, name_parameters, state_names
from dist_ckpt.core.state.optimizer_state import GROUPS
from dist_ckpt.core.state.sharding_rules import ShardingRules, find_job_mesh
from dist_ckpt.core.state.tensors.locate_tensor import locate_for_load
from dist_ckpt.core.state.tree.containers import (
    PathKey,
    State,
    child_name,
    container_entries,
    is_mapping,
)
from dist_ckpt.core.state.tree.state_tree import (
    Branch,
    ModuleLeaf,
    ObjectLeaf,
    OptimizerLeaf,
    PlainLeaf,
    TensorLeaf,
    Tree,
    children_of,
    read_state,
    select_leaves,
    selectable_names,
    walk,
)
from dist_ckpt.core.state.wrappers import RNG, PerRank, per_rank_key


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The state to load into.

    `keys` has this rank's key of each per-rank value, by name. A load gathers `keys` from all ranks
    and `bind` compares them with the saved keys. `parameters` has the parameter names of each
    optimizer, by id(). `group_ranks[r]` is the global rank of rank r of the group.
    """

    root: Branch
    keys: Mapping[str, Key]
    parameters: Mapping[str, Mapping[int, ParameterName]]
    rules: ShardingRules | None
    rank: int
    world_size: int
    group_ranks: tuple[int, ...]

    def names(self) -> Iterator[str]:
        """Yield the names that `include` and `exclude` can match, with each optimizer option."""
        return selectable_names(self.root, self._optimizer_names)

    def _optimizer_names(self, fqn: str, leaf: OptimizerLeaf) -> list[str]:
        groups = enumerate(leaf.state.groups)
        options = (
            child_name(child_name(fqn, GROUPS), f"{n}.{key}")
            for n, group in groups
            for key in group
        )
        return [*options, *state_names(leaf.state, self.parameters[fqn], fqn)]

    def check_plain(self, selection: Selection) -> None:
        """Raise TypeError for a selected value that is not plain data: a save refuses it."""
        chosen = select_leaves(self.root, "", selection, self._optimizer_names)
        for fqn, leaf in walk(chosen) if chosen is not None else ():
            if isinstance(leaf, PlainLeaf):
                check_plain(leaf.value, fqn)

    def mesh(self) -> tuple[tuple[str, int], ...]:
        """Return the job's mesh, as far as the state shows it."""
        views: list[View] = []
        for fqn, leaf in walk(self.root):
            if isinstance(leaf, TensorLeaf):
                try:
                    local = locate_for_load(
                        leaf.value, fqn, rank=self.rank, group_ranks=self.group_ranks
                    )
                except (TypeError, ValueError):
                    continue  # `bind` reports it
                views.append(local.view)
        return find_job_mesh(self.rules, views)


def read_template(
    state: State,
    *,
    sharding: ShardingConfig | None,
    rank: int,
    world_size: int,
    group_ranks: Sequence[int],
) -> Template:
    """Read a state as a template; each object's `state_dict` is called once. Changes nothing.

    Raises TypeError or ValueError for a state that cannot be loaded into.
    """
    root = with_original_params(read_state(state))
    if not isinstance(state, MutableMapping):
        raise TypeError(f"the state is a {type(state).__name__}, which is read-only: give a dict")
    seen: set[str] = set()
    keys: dict[str, Key] = {}
    for fqn, tree in walk(root):
        if isinstance(tree, ObjectLeaf):
            continue  # its content has the same name
        if fqn in seen:
            raise ValueError(
                f"{fqn}: two paths of the state have this name when their keys are joined with "
                "dots: rename one of the keys"
            )
        seen.add(fqn)
        if isinstance(tree, PerRank | RNG):
            keys[fqn] = per_rank_key(tree, rank)
    return Template(
        root=root,
        keys=keys,
        parameters=name_parameters(root),
        rules=ShardingRules(sharding, root, rank=rank, world_size=world_size) if sharding else None,
        rank=rank,
        world_size=world_size,
        group_ranks=tuple(group_ranks),
    )


def live_children(tree: Tree | None) -> Mapping[PathKey, Tree]:
    """Return the children of a tree, also those of a container without tensors."""
    if not isinstance(tree, PlainLeaf):
        return children_of(tree)
    live = tree.value
    entries = live if isinstance(live, Mapping) else container_entries(live) or {}
    return {key: PlainLeaf(value) for key, value in entries.items()}


def live_value(tree: Tree | None) -> object:
    """Return the container of the user that a tree was read from; None for anything else."""
    match tree:
        case PlainLeaf():
            return tree.value
        case Branch():
            return tree.live
    return None


def has_entries(tree: Tree | None) -> bool:
    """Return True for an object, and for a mapping that is not empty."""
    if isinstance(tree, PlainLeaf):
        return isinstance(tree.value, Mapping) and bool(tree.value)
    if isinstance(tree, Branch):
        return is_mapping(tree.kind) and bool(tree.children)
    return isinstance(tree, ObjectLeaf | ModuleLeaf | OptimizerLeaf)
