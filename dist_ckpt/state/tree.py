"""The state as a tree of leaves: what every key of it is.

`read_tree.py` makes it; both sides of a checkpoint walk it: `local_state.py` to store the leaves,
`binding/bind.py` to find where they go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from dist_ckpt.format.geometry import Shape
from dist_ckpt.state.containers import RECORD, PathKey, join
from dist_ckpt.state.modules import ModuleState
from dist_ckpt.state.optimizer_state import OptimizerState
from dist_ckpt.state.wrappers import RNG, PerRank


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
class CompoundLeaf:
    """A tensor that is made of others: these by attribute, and the record of what it is."""

    value: torch.Tensor
    inner: Mapping[str, TensorLeaf | CompoundLeaf]
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
    FSDP1's flat parameters is replaced by a view of it (`flat_optimizers.py`).
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
    | CompoundLeaf
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


def children_of(tree: Tree | None) -> Mapping[PathKey, Tree]:
    """Return what is below the name of a leaf or branch; of an object, what is in its content."""
    match tree:
        case Branch() | ModuleLeaf():
            return tree.children
        case CompoundLeaf():
            children: dict[PathKey, Tree] = {}
            children.update(tree.inner)
            return {**children, RECORD: PlainLeaf(tree.record)}
        case OptimizerLeaf():
            return tree.further
        case ObjectLeaf():
            return children_of(tree.content)
    return {}
