"""The state as a tree of leaves: the type of every key.

`read_tree.py` makes the tree. `state/inventory_builder.py` stores the leaves, and
`state/binding/bind.py` finds the saved value of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.planning.selection import Selection
from dist_ckpt.core.state.modules import ModuleState
from dist_ckpt.core.state.optimizer_state import OptimizerState
from dist_ckpt.core.state.tree.containers import RECORD, PathKey, is_mapping, join
from dist_ckpt.core.state.wrappers import RNG, PerRank


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A container with tensors in it. `live` is the user's own; None if it is not the user's."""

    kind: str
    live: object
    children: Mapping[PathKey, Tree]


@dataclass(frozen=True, slots=True, eq=False)
class TensorLeaf:
    """A tensor, a local part of one, or a numpy array.

    If it is stored under a parameter, `under` has that parameter's name, as rules of a
    ShardingConfig see it, and its local shape.
    """

    value: object
    under: tuple[str, Shape] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SubclassLeaf:
    """A tensor that is made of others: these by attribute, and the record that describes it."""

    value: torch.Tensor
    inner: Mapping[str, TensorLeaf | SubclassLeaf]
    record: Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class PlainLeaf:
    """Anything else: plain data, or a value that a save refuses."""

    value: object


@dataclass(frozen=True, slots=True, eq=False)
class PerRankLeaf:
    """A value of one rank."""

    wrapper: PerRank | RNG


@dataclass(frozen=True, slots=True, eq=False)
class ModuleLeaf:
    """A module, and the leaves of its state dict."""

    state: ModuleState
    children: Mapping[PathKey, Tree]


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerLeaf:
    """An optimizer, with the user's names of its parameters, by id().

    `further` are the entries of its `state_dict` besides the groups and the parameters' state. An
    optimizer over FSDP1's flat parameters is replaced by a view (`state/fsdp1/optimizers.py`).
    """

    state: OptimizerState
    names: Mapping[int, str] | None
    further: Mapping[PathKey, Tree]


@dataclass(frozen=True, slots=True, eq=False)
class ObjectLeaf:
    """An object with `load_state_dict`, and the result of its `state_dict`."""

    owner: object
    content: Tree


Tree = (
    Branch
    | TensorLeaf
    | SubclassLeaf
    | PlainLeaf
    | PerRankLeaf
    | ModuleLeaf
    | OptimizerLeaf
    | ObjectLeaf
)


def walk(tree: Tree, fqn: str = "", *, tensors: bool = True) -> Iterator[tuple[str, Tree]]:
    """Yield the name and node of everything at and below `fqn`; without `tensors` much faster."""
    if fqn:
        yield fqn, tree
    if isinstance(tree, ObjectLeaf):
        yield from walk(tree.content, fqn, tensors=tensors)
        return
    for key, child in children_of(tree).items():
        if not isinstance(child, TensorLeaf):
            yield from walk(child, join(fqn, key), tensors=tensors)
        elif tensors:
            yield join(fqn, key), child  # without a generator for each


def without_frozen(selection: Selection, root: Tree) -> Selection:
    """Return the selection, with the names of frozen parameters if it needs them."""
    if selection.include_frozen:
        return selection
    trained = requires_grad(root)
    frozen = frozenset(name for name in trained if not trained[name])
    return replace(selection, without=frozen, knows_parameters=bool(trained))


def requires_grad(root: Tree) -> dict[str, bool]:
    """Return for each parameter of a state, by name, whether it requires a gradient."""
    named: dict[str, bool] = {}
    for fqn, tree in walk(root):
        if isinstance(tree, ModuleLeaf):
            named |= {join(fqn, name): trained for name, trained in tree.state.parameters().items()}
        elif isinstance(tree, TensorLeaf) and isinstance(tree.value, torch.nn.Parameter):
            named[fqn] = tree.value.requires_grad
    return named


# Returns the names of an optimizer that a selection may choose from.
OptimizerNames = Callable[[str, OptimizerLeaf], Iterable[str]]


def choices(tree: Tree, optimizer_names: OptimizerNames, fqn: str = "") -> Iterator[str]:
    """Yield the names that a selection may choose from, at and below `fqn`."""
    if fqn:
        yield fqn
    if isinstance(tree, OptimizerLeaf):
        yield from optimizer_names(fqn, tree)
    elif isinstance(tree, Branch | ModuleLeaf):
        for key, child in tree.children.items():
            yield from choices(child, optimizer_names, join(fqn, key))


def selected(
    tree: Tree, fqn: str, selection: Selection, optimizer_names: OptimizerNames
) -> Tree | None:
    """Return the part of a tree that a selection chooses, None if nothing.

    Objects and tensor subclasses are chosen as a whole; an optimizer stays if any part of it does.
    ValueError if a list would lose an item.
    """
    if isinstance(tree, OptimizerLeaf):
        names = (fqn, *optimizer_names(fqn, tree))
        return tree if any(name in selection for name in names) else None
    if not isinstance(tree, Branch | ModuleLeaf):
        return tree if fqn in selection else None
    chosen = {
        key: child
        for key, own in tree.children.items()
        if (child := selected(own, join(fqn, key), selection, optimizer_names)) is not None
    }
    if not chosen and (tree.children or fqn not in selection):
        return None
    if isinstance(tree, ModuleLeaf):
        return ModuleLeaf(tree.state, chosen)
    if not is_mapping(tree.kind) and len(chosen) < len(tree.children):
        lost = next(key for key in tree.children if key not in chosen)
        raise ValueError(
            f"{join(fqn, lost)}: an item of a {tree.kind} cannot be left out of a save, because "
            f"the others would move. Leave all of {fqn!r} out, or make it a dict"
        )
    return Branch(tree.kind, tree.live, chosen)


def children_of(tree: Tree | None) -> Mapping[PathKey, Tree]:
    """Return the children of a leaf or branch by key; for an object, those of its content."""
    match tree:
        case Branch() | ModuleLeaf():
            return tree.children
        case SubclassLeaf():
            children: dict[PathKey, Tree] = {}
            children.update(tree.inner)
            return {**children, RECORD: PlainLeaf(tree.record)}
        case OptimizerLeaf():
            return tree.further
        case ObjectLeaf():
            return children_of(tree.content)
    return {}
