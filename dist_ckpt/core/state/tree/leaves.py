"""The state as a tree of leaves: what every key of it is.

`read_tree.py` makes it; both sides of a checkpoint walk it: `state/inventory_builder.py` to store
the leaves, `state/binding/bind.py` to find where they go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.planning.selection import Selection
from dist_ckpt.core.state.modules import ModuleState
from dist_ckpt.core.state.optimizers.optimizer_state import OptimizerState
from dist_ckpt.core.state.tree.containers import RECORD, PathKey, is_mapping, join
from dist_ckpt.core.state.wrappers import RNG, PerRank


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A container that holds tensors. `live` is the user's own; None if it is made by us."""

    kind: str
    live: object
    children: Mapping[PathKey, Tree]


@dataclass(frozen=True, slots=True, eq=False)
class TensorLeaf:
    """A tensor, a local part of one, or a numpy array.

    One that is stored under a parameter names that in `under`, as rules of a ShardingConfig see
    it, with the parameter's local shape.
    """

    value: object
    under: tuple[str, Shape] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SubclassLeaf:
    """A tensor that is made of others: these by attribute, and the record of what it is."""

    value: torch.Tensor
    inner: Mapping[str, TensorLeaf | SubclassLeaf]
    record: Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class PlainLeaf:
    """Anything else: plain data, or what a save has to refuse."""

    value: object


@dataclass(frozen=True, slots=True, eq=False)
class PerRankLeaf:
    """A value of one rank."""

    wrapper: PerRank | RNG


@dataclass(frozen=True, slots=True, eq=False)
class ModuleLeaf:
    """A module, and what each entry of its state dict is."""

    state: ModuleState
    children: Mapping[PathKey, Tree]


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerLeaf:
    """An optimizer, with the names that the user gave its parameters, by id().

    `further` is what its `state_dict` tells besides the groups and the parameters' state. One over
    FSDP1's flat parameters is replaced by a view of it (`state/fsdp1/optimizers.py`).
    """

    held: OptimizerState
    names: Mapping[int, str] | None
    further: Mapping[PathKey, Tree]


@dataclass(frozen=True, slots=True, eq=False)
class ObjectLeaf:
    """An object with `load_state_dict`, and what its `state_dict` returned."""

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
    """Yield everything in a state, or at and below `fqn`, containers first: its name, and itself.

    Most are `TensorLeaf`s: who asks for none of them gets the others in a fraction of the time.
    """
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
    """Return a selection that knows which parameters of a state require no gradient, if it asks."""
    if selection.include_frozen:
        return selection
    knows = bool(_trained(root))
    return replace(selection, without=frozen_names(root), knows_parameters=knows)


def frozen_names(root: Tree) -> frozenset[str]:
    """Return the names of a state's parameters that require no gradient."""
    return frozenset(name for name, trained in _trained(root).items() if not trained)


def _trained(root: Tree) -> dict[str, bool]:
    named: dict[str, bool] = {}
    for fqn, tree in walk(root):
        if isinstance(tree, ModuleLeaf):
            named |= {join(fqn, name): trained for name, trained in tree.state.parameters().items()}
        elif isinstance(tree, TensorLeaf) and isinstance(tree.value, torch.nn.Parameter):
            named[fqn] = tree.value.requires_grad
    return named


# The names that a selection may choose among in the optimizer of a name.
OfOptimizer = Callable[[str, OptimizerLeaf], Iterable[str]]


def choices(tree: Tree, of_optimizer: OfOptimizer, fqn: str = "") -> Iterator[str]:
    """Yield the names that a selection may choose among, at and below `fqn`."""
    if fqn:
        yield fqn
    if isinstance(tree, OptimizerLeaf):
        yield from of_optimizer(fqn, tree)
    elif isinstance(tree, Branch | ModuleLeaf):
        for key, child in tree.children.items():
            yield from choices(child, of_optimizer, join(fqn, key))


def selected(tree: Tree, fqn: str, selection: Selection, of_optimizer: OfOptimizer) -> Tree | None:
    """Return what a selection leaves of a tree, None if that is nothing.

    Objects, and tensors that are made of others, are left in or out as a whole; an optimizer stays
    if any of it does. ValueError where a list would lose an item.
    """
    if isinstance(tree, OptimizerLeaf):
        names = (fqn, *of_optimizer(fqn, tree))
        return tree if any(name in selection for name in names) else None
    if not isinstance(tree, Branch | ModuleLeaf):
        return tree if fqn in selection else None
    kept = {
        key: child
        for key, own in tree.children.items()
        if (child := selected(own, join(fqn, key), selection, of_optimizer)) is not None
    }
    if not kept and (tree.children or fqn not in selection):
        return None
    if isinstance(tree, ModuleLeaf):
        return ModuleLeaf(tree.state, kept)
    if not is_mapping(tree.kind) and len(kept) < len(tree.children):
        lost = next(key for key in tree.children if key not in kept)
        raise ValueError(
            f"{join(fqn, lost)}: an item of a {tree.kind} cannot be left out of a save, as the "
            f"others would move: leave all of {fqn!r} out, or make it a dict"
        )
    return Branch(tree.kind, tree.live, kept)


def children_of(tree: Tree | None) -> Mapping[PathKey, Tree]:
    """Return what is below the name of a leaf or branch; of an object, what is in its content."""
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
