"""The saving side of a state: the inventory of this rank, without copies or changes."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

import torch
from torch.distributed.tensor import DTensor

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.index import Key, Node
from dist_ckpt.core.format.index.index_json import MAX_FQN_CHARS
from dist_ckpt.core.format.index.tensor_ranges import parameter_ranges
from dist_ckpt.core.format.objects.plain_codec import check_plain
from dist_ckpt.core.planning.module_versions import list_versions, state_dict_metadata
from dist_ckpt.core.planning.name_selection import SELECT_ALL, Selection
from dist_ckpt.core.planning.plan import Inventory, NameList, TensorEntry
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.planning.tensor_views import Flattened, RuleSharded, View, Whole, piece_sizes
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorReader, synchronize
from dist_ckpt.core.state.elementwise_state import find_uncut
from dist_ckpt.core.state.fsdp1.fsdp1_optimizers import with_original_params
from dist_ckpt.core.state.named_optimizers import (
    ParameterName,
    name_parameters,
    options_branch,
    state_names,
    states_branch,
)
from dist_ckpt.core.state.optimizer_state import GROUPS, STATE, check_reported
from dist_ckpt.core.state.sharding_rules import ShardingRules, find_job_mesh
from dist_ckpt.core.state.tensors.local_tensors import (
    PLAIN,
    check_class,
    is_array,
    is_contiguous_memory,
)
from dist_ckpt.core.state.tensors.locate_tensor import LocalTensor, locate_for_save, tie_key
from dist_ckpt.core.state.tensors.plain_torch import without_tensors
from dist_ckpt.core.state.tensors.tensor_subclasses import is_wrapper_subclass
from dist_ckpt.core.state.tree.containers import PathKey, State, child_name
from dist_ckpt.core.state.tree.state_tree import (
    Branch,
    ModuleLeaf,
    ObjectLeaf,
    OptimizerLeaf,
    PlainLeaf,
    SubclassLeaf,
    TensorLeaf,
    Tree,
    children_of,
    has_state,
    read_state,
    read_state_dict,
    select_leaves,
    selectable_names,
    without_frozen,
)
from dist_ckpt.core.state.wrappers import RNG, PerRank, per_rank_key


@dataclass(frozen=True, slots=True)
class LocalState:
    """The inventory of one rank, and the objects behind its names.

    - `parts`: the local memory of each cell of a tensor, in the order of the plan's cell numbers.
      Aliases are included, although the inventory does not list them as tensors.
    - `values`, `per_rank`: checked plain data. A per-rank value is (key, value); its tensors are
      `ArrayValue`s.
    - `owners`: the modules and optimizers of the state, with their names.
    - `pattern_problems`: error texts for patterns that select nothing on this rank.
    """

    inventory: Inventory
    parts: Mapping[str, tuple[torch.Tensor, ...]]
    values: Mapping[str, object]
    per_rank: Mapping[str, tuple[Key, object]]
    owners: Sequence[tuple[str, ModuleLeaf | OptimizerLeaf]]
    pattern_problems: tuple[str, ...] = ()

    def changed_in_steps(self) -> frozenset[str]:
        """Return the tensors that usually change only when an optimizer of the state steps.

        These are the optimizers' state, and the parameters in their groups that require a gradient.
        All other tensors may change at any time: a forward pass changes buffers, a copy of the
        model may average the weights after the step, and a CUDA graph may replay the step of an
        optimizer that is capturable.
        """
        names: set[str] = set()
        stepped: set[int] = set()
        for fqn, leaf in self.owners:
            if isinstance(leaf, OptimizerLeaf) and not leaf.state.is_capturable:
                state = child_name(fqn, "state.")
                names.update(name for name in self.parts if name.startswith(state))
                stepped.update(id(p) for p in leaf.state.parameters() if p.requires_grad)
        for fqn, leaf in self.owners:
            if isinstance(leaf, ModuleLeaf):
                named = leaf.state.names_of_parameters()
                names.update(child_name(fqn, name) for key, name in named.items() if key in stepped)
        return frozenset(names)

    def missing_optimizer_nbytes(self) -> int:
        """Estimate the state that the optimizers have after their first step, and not yet."""
        optimizers = (leaf.state for _, leaf in self.owners if isinstance(leaf, OptimizerLeaf))
        return sum(optimizer.missing_nbytes() for optimizer in optimizers)

    def reader(self, fqn: str, number: int) -> TensorReader:
        """Return the memory of one cell of a tensor."""
        return TensorReader(self.parts[fqn][number])

    def synchronize(self) -> None:
        """Wait until the accelerators have computed the tensors of this state."""
        synchronize(part for parts in self.parts.values() for part in parts)


def build_inventory(  # noqa: PLR0913 - the rank, and its request
    state: State,
    *,
    sharding: ShardingConfig | None,
    rank: int,
    world_size: int,
    group_ranks: Sequence[int],
    last: Inventory | None = None,
    selection: Selection = SELECT_ALL,
) -> LocalState:
    """Read a state, and return the inventory of this rank with its values and memory.

    `group_ranks[r]` is the global rank of rank r of the group. No tensor is copied and nothing
    changes: no optimizer step, no new state, no use of a generator. Each object's `state_dict` is
    called once. Entries equal to those of the `last` inventory are reused, so that the comparison
    of both is fast. Values outside `selection` are left out. Raises TypeError or ValueError for a
    state that cannot be saved, with the key path, the class and the remedy.
    """
    root = with_original_params(read_state(state))
    parameters = name_parameters(root)
    selection = without_frozen(selection, root)
    builder = _InventoryBuilder(
        ShardingRules(sharding, root, rank=rank, world_size=world_size) if sharding else None,
        parameters,
        rank,
        group_ranks,
        last.tensors if last else (),
        selection,
    )
    if selection.is_everything:
        builder.add_root(root)
        return builder.local_state()

    def optimizer_names(fqn: str, leaf: OptimizerLeaf) -> list[str]:
        return state_names(leaf.state, parameters[fqn], fqn)

    chosen = select_leaves(root, "", selection, optimizer_names)
    assert chosen is None or isinstance(chosen, Branch), "as the root is"
    builder.add_root(chosen or Branch(root.kind, None, {}))
    pattern_problems = selection.pattern_problems(selectable_names(root, optimizer_names))
    if chosen is None or not chosen.children:
        pattern_problems += (f"nothing of the state is left to save: change {selection}",)
    return replace(builder.local_state(), pattern_problems=pattern_problems)


@dataclass(slots=True, eq=False)
class _InventoryBuilder:
    """Adds the leaves of a state one after another.

    `names` are the parameter names of each optimizer, by id(). `last` are the tensors of the last
    inventory.
    """

    rules: ShardingRules | None
    names: Mapping[str, Mapping[int, ParameterName]]
    rank: int
    group_ranks: Sequence[int]
    last: Sequence[TensorEntry]
    selection: Selection
    paths: set[str] = field(default_factory=set)
    component: str = ""
    components: dict[str, int] = field(default_factory=dict)
    views: dict[View, int] = field(default_factory=dict)
    # The entry (dtype name, shape, view) of ordinary tensors without rules, by dtype and shape.
    kinds: dict[tuple[torch.dtype, Shape], tuple[str, Shape, int]] = field(default_factory=dict)
    by_address: dict[int, tuple[str, TensorLeaf]] = field(default_factory=dict)
    # The first name of each tensor without a part on this rank, by id().
    absent: dict[int, str] = field(default_factory=dict)
    # The descriptions of tensors whose entry was not taken from `kinds`.
    descriptions: dict[str, tuple[LocalTensor, View, Shape]] = field(default_factory=dict)
    ties: dict[Hashable, str] = field(default_factory=dict)
    tensors: list[TensorEntry] = field(default_factory=list)
    aliases: list[tuple[str, str]] = field(default_factory=list)
    tree: list[Node] = field(default_factory=list)
    name_lists: list[NameList] = field(default_factory=list)
    numpy: list[str] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    uncut: dict[str, str] = field(default_factory=dict)
    num_objects_around: int = 0
    parts: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    per_rank: dict[str, tuple[Key, object]] = field(default_factory=dict)
    wrappers: dict[str, PerRank | RNG] = field(default_factory=dict)
    owners: list[tuple[str, ModuleLeaf | OptimizerLeaf]] = field(default_factory=list)
    parameters: dict[str, bool] = field(default_factory=dict)
    versions: list[tuple[str, str]] = field(default_factory=list)

    def add_root(self, root: Branch) -> None:
        self.tree.append(Node("", root.kind, tuple(root.children)))
        self._add_dict_versions("", root)
        for key, child in root.children.items():
            # Tensors at the top of the state are one component.
            self.component = "state" if isinstance(child, TensorLeaf) else str(key)
            self._add(str(key), child)
        # This may call user code with collectives, so all ranks use the same order.
        for fqn in sorted(self.wrappers):
            wrapper = self.wrappers[fqn]
            if isinstance(wrapper, RNG):
                value: object = wrapper.capture()
            else:
                if isinstance(wrapper.value, torch.optim.Optimizer):
                    check_reported(wrapper.value, fqn, ())
                value = read_state_dict(wrapper.value, fqn)
            data = without_tensors(value, fqn)
            check_plain(data, fqn)
            self.per_rank[fqn] = (per_rank_key(wrapper, self.rank), data)

    def local_state(self) -> LocalState:
        inventory = Inventory(
            mesh=find_job_mesh(self.rules, self.views),
            components=tuple(self.components),
            views=tuple(self.views),
            tensors=tuple(self.tensors),
            aliases=tuple(self.aliases),
            values=tuple(self.values),
            per_rank=tuple((fqn, wrapper.key) for fqn, wrapper in self.wrappers.items()),
            tree=tuple(self.tree),
            name_lists=tuple(self.name_lists),
            numpy=tuple(self.numpy),
            parameters=parameter_ranges((entry.fqn for entry in self.tensors), self.parameters),
            objects=tuple(self.objects),
            versions=tuple(self.versions),
            uncut=tuple(self.uncut.items()),
        )
        return LocalState(inventory, self.parts, self.values, self.per_rank, self.owners)

    def _add(self, fqn: str, tree: Tree) -> None:
        match tree:
            case TensorLeaf():
                self._add_tensor(fqn, tree)
            case Branch():
                self._add_dict_versions(fqn, tree)
                self._add_branch(fqn, tree.kind, tree.children)
            case SubclassLeaf():
                self._add_subclass_tensor(fqn, tree)
            case ModuleLeaf():
                self._add_module(fqn, tree)
            case OptimizerLeaf():
                self._add_owner(fqn, tree)
                self._add_optimizer(fqn, tree)
            case ObjectLeaf():
                self.objects.append(fqn)
                self.num_objects_around += 1
                self._add(fqn, tree.content)
                self.num_objects_around -= 1
            case PlainLeaf():
                self._add_value(fqn, tree.value)
            case PerRank() | RNG():
                self._reserve_name(fqn)
                self.wrappers[fqn] = tree
                if isinstance(tree, PerRank) and has_state(tree.value):
                    self.objects.append(fqn)
            case _:
                assert_never(tree)

    def _add_owner(self, fqn: str, leaf: ModuleLeaf | OptimizerLeaf) -> None:
        self.owners.append((fqn, leaf))
        if self.num_objects_around:
            self.objects.append(fqn)

    def _add_container(self, fqn: str, kind: str, keys: Iterable[PathKey]) -> None:
        self._reserve_name(fqn)
        self.tree.append(Node(fqn, kind, tuple(keys)))

    def _add_module(self, fqn: str, tree: ModuleLeaf) -> None:
        state = tree.state
        if hollow := [name for name in state.hollow if name in tree.children]:
            raise ValueError(f"{child_name(fqn, hollow[0])}: {state.hollow[hollow[0]]}")
        for name, child in tree.children.items():
            live = state.live.get(str(name))
            is_changed = isinstance(child, TensorLeaf) and type(child.value) in PLAIN
            if is_changed and type(live) not in PLAIN and isinstance(live, torch.nn.Parameter):
                self._check_parameter(child_name(fqn, name), live)
        self._add_owner(fqn, tree)
        named = state.parameters()
        self.parameters.update((child_name(fqn, name), named[name]) for name in named)
        self._add_versions(fqn, state.metadata(), state.entries)
        self._add_branch(fqn, "dict", tree.children)

    def _check_parameter(self, fqn: str, live: torch.Tensor) -> None:
        if not isinstance(live, DTensor) and not is_wrapper_subclass(live):
            check_class(live, fqn)

    def _add_dict_versions(self, fqn: str, tree: Branch) -> None:
        if (metadata := state_dict_metadata(tree.live)) is not None:
            self._add_versions(fqn, metadata, map(str, tree.children))

    def _add_versions(
        self, fqn: str, metadata: Mapping[str, Mapping[str, object]], names: Iterable[str]
    ) -> None:
        listed = list_versions(metadata, names)
        self.versions.append((fqn, json.dumps(listed, sort_keys=True)))

    def _add_branch(self, fqn: str, kind: str, children: Mapping[PathKey, Tree]) -> None:
        self._add_container(fqn, kind, children)
        for key, child in children.items():
            self._add(child_name(fqn, key), child)

    def _add_subclass_tensor(self, fqn: str, leaf: SubclassLeaf) -> None:
        if self.rules is not None:
            self.rules.check_whole(fqn, leaf)
        if (trainable := self.parameters.get(fqn)) is not None:
            self.parameters.update((child_name(fqn, name), trainable) for name in leaf.inner)
        self._add_branch(fqn, "dict", children_of(leaf))

    def _add_value(self, fqn: str, value: object) -> None:
        self._reserve_name(fqn)
        check_plain(value, fqn)
        self.values[fqn] = value

    def _add_optimizer(self, fqn: str, leaf: OptimizerLeaf) -> None:
        optimizer, groups = leaf.state, child_name(fqn, GROUPS)
        self._add_container(fqn, "dict", (STATE, GROUPS, *leaf.further))
        states = states_branch(optimizer, self.names[fqn], fqn)
        self.uncut.update(find_uncut(optimizer, states, fqn, self.names[fqn], self.rules))
        if not self.selection.is_everything:
            chosen = select_leaves(states, child_name(fqn, STATE), self.selection, lambda *_: ())
            self._add(child_name(fqn, STATE), chosen or Branch("dict", None, {}))
        else:
            self._add(child_name(fqn, STATE), states)
        self._add_container(groups, "list", range(len(optimizer.groups)))
        for number, group in enumerate(optimizer.groups):
            full = child_name(groups, number)
            options = options_branch(group, full).children
            plain = {k: leaf.value for k, leaf in options.items() if isinstance(leaf, PlainLeaf)}
            self._add_value(full, plain)
            self._reserve_name(f"{full}.params")
            params = tuple(self.names[fqn][id(parameter)].stored for parameter in group["params"])
            self.name_lists.append(NameList(f"{full}.params", params))
            # The group was added as a value, not as a container. Its tensors are added below it.
            for key, child in options.items():
                if key not in plain:
                    self._add(child_name(full, key), child)
        for key, child in leaf.further.items():
            self._add(child_name(fqn, key), child)

    def _add_tensor(self, fqn: str, leaf: TensorLeaf) -> None:
        self._reserve_name(fqn)
        value = leaf.value
        # `isinstance` of Parameter is slow, and most tensors are exactly `torch.Tensor`.
        if type(value) is not torch.Tensor and isinstance(value, torch.nn.Parameter):
            self.parameters[fqn] = value.requires_grad
        kind = None
        if self.rules is None and is_contiguous_memory(value):
            kind = value.dtype, value.shape
            if (entry := self.kinds.get(kind)) and self._is_first(fqn, leaf, value):
                # A tensor of the same dtype and shape has been described below.
                self.parts[fqn] = (value,)
                self._add_entry(fqn, *entry)
                return
        if is_array(value):
            self.numpy.append(fqn)
        local, view, shape = self.descriptions[fqn] = self._describe(fqn, leaf)
        self.parts[fqn] = local.parts
        if not local.parts and self.absent.setdefault(id(value), fqn) != fqn:
            # One object under two names is tied, also on a rank without a part of the tensor.
            self._tie(fqn, self.absent[id(value)])
            return
        if local.parts and not self._is_first(fqn, leaf, local.parts[0]):
            first = self._first_name(fqn, local.parts[0])
            if first != fqn:
                self._tie(fqn, first)
                return
        number = self.views.setdefault(view, len(self.views))
        self._add_entry(fqn, local.dtype, shape, number)
        if kind is not None:
            self.kinds[kind] = local.dtype, shape, number

    def _tie(self, fqn: str, first: str) -> None:
        self.aliases.append((fqn, first))
        if (trainable := self.parameters.get(fqn)) is not None:
            self.parameters[first] = trainable or self.parameters.get(first, False)

    def _add_entry(self, fqn: str, dtype: str, shape: Shape, view: int) -> None:
        component = self.components.setdefault(self.component, len(self.components))
        entry = TensorEntry(fqn, dtype, shape, view, component)
        number = len(self.tensors)
        is_in_last = number < len(self.last) and self.last[number] == entry
        self.tensors.append(self.last[number] if is_in_last else entry)

    def _describe(self, fqn: str, leaf: TensorLeaf) -> tuple[LocalTensor, View, Shape]:
        local = locate_for_save(leaf.value, fqn, rank=self.rank, group_ranks=self.group_ranks)
        view, shape = local.view, local.shape
        if self.rules is not None and isinstance(view, Whole):
            view, shape = self.rules.view(fqn, leaf, shape) or (view, shape)
        elif self.rules is not None:
            self.rules.check_dtensor(fqn, leaf, local)
        if isinstance(view, RuleSharded) and view.pieces:
            local = _split_pieces(local, view, self.rank)
        # With ZeRO the last ranks may have an empty part, and no cell, of a short tensor.
        if isinstance(view, Flattened) and 0 in local.shape and 0 not in shape:
            local = replace(local, parts=())
        return local, view, shape

    def _is_first(self, fqn: str, leaf: TensorLeaf, part: torch.Tensor) -> bool:
        """Return True if no earlier tensor begins at the same address. Then it is not tied."""
        return self.by_address.setdefault(part.data_ptr(), (fqn, leaf))[0] == fqn

    def _first_name(self, fqn: str, part: torch.Tensor) -> str:
        """Return the first name of the same memory with the same layout."""
        other, leaf = self.by_address[part.data_ptr()]
        if other not in self.descriptions:
            self.descriptions[other] = self._describe(other, leaf)
        first = fqn
        for name in (other, fqn):
            local, *stored = self.descriptions[name]
            tie = tie_key(local)
            first = name if tie is None else self.ties.setdefault((tie, *stored), name)
        return first

    def _reserve_name(self, fqn: str) -> None:
        if len(fqn) > MAX_FQN_CHARS:
            raise ValueError(
                f"{fqn[:100]}...: the name has {len(fqn)} characters, the limit is "
                f"{MAX_FQN_CHARS}: use shorter keys"
            )
        if fqn in self.paths:
            raise ValueError(
                f"{fqn.removesuffix('.')}: two paths of the state have this name when their keys "
                "are joined with dots: rename one of the keys"
            )
        self.paths.add(fqn)


def _split_pieces(local: LocalTensor, view: RuleSharded, rank: int) -> LocalTensor:
    """Return a fused local tensor with a part for each piece. Wrong sizes stay whole.

    The plan reports wrong sizes, with the ranks.
    """
    (whole,), sizes = local.parts, piece_sizes(view, rank)
    if not whole.numel() or sum(sizes) != whole.shape[view.dim]:
        return local
    return replace(local, parts=tuple(whole.split(sizes, view.dim)))
