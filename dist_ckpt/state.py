"""The saving side of a state: what this rank holds, without copying or changing any of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import assert_never

import torch

from dist_ckpt import objects
from dist_ckpt.catalog_codec import MAX_FQN_CHARS
from dist_ckpt.containers import PathKey, join
from dist_ckpt.index import Key, Node
from dist_ckpt.memory import Source
from dist_ckpt.optimizers import ParameterName, name_parameters, optimizer_tree
from dist_ckpt.plan import Flattened, Inventory, NameList, Placed, TensorEntry, View, Whole
from dist_ckpt.rules import Rules
from dist_ckpt.sharding import ShardingConfig
from dist_ckpt.state_tree import (
    LOOSE,
    Branch,
    GroupLeaf,
    ModuleLeaf,
    ObjectLeaf,
    OptimizerLeaf,
    PerRankLeaf,
    PlainLeaf,
    TensorLeaf,
    Tree,
    as_tensor,
    is_array,
    module_children,
    read_state,
    state_of,
)
from dist_ckpt.tensors import Held, describe, tie_key
from dist_ckpt.torch_memory import TensorSource, synchronize
from dist_ckpt.torch_objects import without_tensors
from dist_ckpt.wrappers import RNG, PerRank, key_of


@dataclass(frozen=True, slots=True)
class LocalState:
    """What one rank holds: the inventory, and what is behind each of its names.

    `sources` has one source for each cell that the rank holds of a tensor, in the order in which
    the plan numbers them; an alias, which is no tensor of the inventory, has them too. `values`
    and `per_rank` hold checked plain data; a per-rank value is (key, value), its tensors are
    `objects.Array`s. `parts` is the local memory of all tensors.
    """

    inventory: Inventory
    sources: Mapping[str, tuple[Source, ...]]
    values: Mapping[str, object]
    per_rank: Mapping[str, tuple[Key, object]]
    parts: tuple[torch.Tensor, ...]

    def synchronize(self) -> None:
        """Wait until the accelerators have finished what is to be saved."""
        synchronize(self.parts)


def take(
    state: Mapping[PathKey, object],
    *,
    sharding: ShardingConfig | None,
    rank: int,
    world_size: int,
    group_ranks: Sequence[int],
) -> LocalState:
    """Describe a state.

    `group_ranks[r]` is the global rank of rank r of the group. No tensor is copied and nothing
    changes: no optimizer step, no state created, no generator used. Each object's `state_dict`
    is called once. Raises TypeError or ValueError for a state that cannot be saved, naming the
    key path, the class and what to do.
    """
    root = read_state(state)
    taker = _Taker(
        Rules(sharding, root, rank=rank, world_size=world_size),
        name_parameters(root),
        rank,
        group_ranks,
    )
    taker.add_root(root)
    return taker.taken(sharding)


class _Taker:
    """Adds one leaf after another to an inventory."""

    def __init__(
        self,
        rules: Rules,
        names: Mapping[str, Mapping[int, ParameterName]],
        rank: int,
        group_ranks: Sequence[int],
    ) -> None:
        self._rules = rules
        self._names = names
        self._rank = rank
        self._group_ranks = tuple(group_ranks)
        self._paths: set[str] = set()
        self._component = ""
        self._components: dict[str, int] = {}
        self._views: dict[View, int] = {}
        self._starts: dict[int, tuple[str, Held, View]] = {}
        self._ties: dict[Hashable, str] = {}
        self._tensors: list[TensorEntry] = []
        self._aliases: list[tuple[str, str]] = []
        self._tree: list[Node] = []
        self._name_lists: list[NameList] = []
        self._numpy: list[str] = []
        self._sources: dict[str, tuple[Source, ...]] = {}
        self._parts: list[torch.Tensor] = []
        self._values: dict[str, object] = {}
        self._per_rank: dict[str, tuple[Key, object]] = {}
        self._keys: dict[str, Key | None] = {}

    def add_root(self, root: Branch) -> None:
        self._tree.append(Node("", root.kind, tuple(root.children)))
        for key, child in root.children.items():
            self._component = LOOSE if isinstance(child, TensorLeaf) else str(key)
            self._add(str(key), child)

    def taken(self, sharding: ShardingConfig | None) -> LocalState:
        inventory = Inventory(
            mesh=mesh_of(self._views, sharding),
            components=tuple(self._components),
            views=tuple(self._views),
            tensors=tuple(self._tensors),
            aliases=tuple(self._aliases),
            values=tuple(self._values),
            per_rank=tuple(self._keys.items()),
            tree=tuple(self._tree),
            name_lists=tuple(self._name_lists),
            numpy=tuple(self._numpy),
        )
        return LocalState(
            inventory, self._sources, self._values, self._per_rank, tuple(self._parts)
        )

    def _add(self, fqn: str, tree: Tree) -> None:
        match tree:
            case TensorLeaf():
                self._add_tensor(fqn, tree)
            case Branch():
                self._add_branch(fqn, tree.kind, tree.children)
            case ModuleLeaf():
                self._add_branch(fqn, "dict", module_children(tree))
            case OptimizerLeaf():
                self._add(fqn, optimizer_tree(tree, self._names[fqn], fqn))
            case ObjectLeaf():
                self._add(fqn, tree.content)
            case PlainLeaf():
                self._add_value(fqn, tree.value)
            case PerRankLeaf():
                self._add_per_rank(fqn, tree.wrapper)
            case GroupLeaf():
                self._add_group(fqn, tree)
            case _:
                assert_never(tree)

    def _add_branch(self, fqn: str, kind: str, children: Mapping[PathKey, Tree]) -> None:
        self._claim(fqn)
        self._tree.append(Node(fqn, kind, tuple(children)))
        for key, child in children.items():
            self._add(join(fqn, key), child)

    def _add_value(self, fqn: str, value: object) -> None:
        self._claim(fqn)
        objects.check_plain(value, fqn)
        self._values[fqn] = value

    def _add_per_rank(self, fqn: str, wrapper: PerRank | RNG) -> None:
        self._claim(fqn)
        value = wrapper.capture() if isinstance(wrapper, RNG) else state_of(wrapper.value, fqn)
        data = without_tensors(value, fqn)
        objects.check_plain(data, fqn)
        self._per_rank[fqn] = (key_of(wrapper, self._rank), data)
        self._keys[fqn] = wrapper.key

    def _add_group(self, fqn: str, group: GroupLeaf) -> None:
        self._add_value(fqn, dict(group.values))
        self._claim(f"{fqn}.params")
        self._name_lists.append(NameList(f"{fqn}.params", group.params))
        # No container of this name: the group is a value, its tensors lie below it.
        for key, child in group.tensors.items():
            self._add(join(fqn, key), child)

    def _add_tensor(self, fqn: str, leaf: TensorLeaf) -> None:
        self._claim(fqn)
        held = describe(
            as_tensor(leaf.value, fqn, writable=False),
            fqn,
            rank=self._rank,
            group=self._group_ranks,
        )
        view, shape = held.view, held.shape
        if isinstance(view, Whole):
            view, shape = self._rules.view(fqn, leaf, shape) or (view, shape)
        # ZeRO leaves the last ranks nothing of a short tensor: an empty part of no cell.
        left = not isinstance(view, Flattened) or 0 in shape or 0 not in held.shape
        parts = held.parts if left else ()
        self._sources[fqn] = tuple(map(TensorSource, parts))
        self._parts += parts
        if is_array(leaf.value):
            self._numpy.append(fqn)
        if (first := self._tied(fqn, held, view)) != fqn:
            self._aliases.append((fqn, first))
            return
        number = self._views.setdefault(view, len(self._views))
        component = self._components.setdefault(self._component, len(self._components))
        self._tensors.append(TensorEntry(fqn, held.dtype, shape, number, component))

    def _tied(self, fqn: str, held: Held, view: View) -> str:
        """Return the first name of the same memory, seen the same way."""
        if not held.parts:
            return fqn
        # What begins elsewhere is other memory: most tensors need no more than that.
        known = self._starts.setdefault(held.parts[0].data_ptr(), (fqn, held, view))
        if known[0] == fqn:
            return fqn
        for name, one, seen in (known, (fqn, held, view)):
            if (tie := tie_key(one)) is not None:
                first = self._ties.setdefault((tie, seen), name)
            else:
                first = name
        return first

    def _claim(self, fqn: str) -> None:
        if len(fqn) > MAX_FQN_CHARS:
            raise ValueError(
                f"{fqn[:100]}...: a name of {len(fqn)} characters, {MAX_FQN_CHARS} are the most: "
                "use shorter keys"
            )
        if fqn in self._paths:
            raise ValueError(
                f"{fqn.removesuffix('.')}: two paths of the state have this name once their keys "
                "are joined with dots: rename one of the keys"
            )
        self._paths.add(fqn)


def mesh_of(views: Iterable[View], sharding: ShardingConfig | None) -> tuple[tuple[str, int], ...]:
    """Return the job's mesh: the config's, else the largest that a tensor lies on."""
    if sharding is not None:
        return tuple(sharding.mesh.items())
    meshes = [view.mesh for view in views if isinstance(view, Placed)]
    if not meshes:
        return ()
    mesh = max(meshes, key=lambda mesh: prod(mesh.shape))
    return tuple(zip(mesh.names, mesh.shape, strict=True))
