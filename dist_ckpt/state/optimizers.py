"""The optimizer adapter: what an optimizer holds, under its parameters' names.

Torch's helpers are not used: they take a real step on an optimizer without state, cast fp32
moments to the parameter's dtype, and fail on state that only some parameters have. Reading here
looks, and creates nothing.

Names come from the modules of the same state, by the identity of the parameter. If one module
has all of an optimizer's parameters, they are called as in that module (`layers.0.weight`);
if there are several, after the modules as well (`generator.layers.0.weight`). Of tied parameters
the first name counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from dist_ckpt.format.geometry import Shape
from dist_ckpt.state.containers import PathKey, join
from dist_ckpt.state.tree import (
    Branch,
    GroupLeaf,
    ModuleLeaf,
    OptimizerLeaf,
    PlainLeaf,
    TensorLeaf,
    Tree,
    read_value,
)

# What says which parameters a group has, in other words than ours.
LOCAL_KEYS = frozenset({"params", "param_names"})


@dataclass(frozen=True, slots=True)
class ParameterName:
    """`stored`: the name in the checkpoint. `rule`: what a ShardingConfig's patterns see."""

    stored: str
    rule: str


def name_parameters(
    leaves: Iterable[tuple[str, str, Tree]],
) -> dict[str, dict[int, ParameterName]]:
    """Return the names of the parameters of each optimizer in a state, by their id().

    `leaves` are what `walk` yields. Raises ValueError for a parameter without a name or with two.
    """
    found = [one for one in leaves if isinstance(one[2], ModuleLeaf | OptimizerLeaf)]
    names = _Names(found)
    return {fqn: names.of(leaf, fqn) for fqn, _, leaf in found if isinstance(leaf, OptimizerLeaf)}


class _Names:
    """The names that the modules of a state give to parameters."""

    def __init__(self, leaves: Iterable[tuple[str, str, Tree]]) -> None:
        self._places: dict[int, list[tuple[str, str, str]]] = {}
        for fqn, component, leaf in leaves:
            if isinstance(leaf, ModuleLeaf):
                for identity, name in leaf.state.names_of_parameters().items():
                    self._places.setdefault(identity, []).append((component, fqn, name))

    def of(self, leaf: OptimizerLeaf, fqn: str) -> dict[int, ParameterName]:
        if leaf.names is None:
            names = self._by_module(leaf.optimizer, fqn)
        else:
            names = {identity: ParameterName(name, name) for identity, name in leaf.names.items()}
        taken: dict[str, str] = {}
        for parameter, where in _parameters(leaf.optimizer):
            if id(parameter) not in names:
                raise ValueError(f"{fqn}: {where} has no name in dc.Named: add it to `names`")
            name = names[id(parameter)].stored
            if taken.setdefault(name, where) != where:
                raise ValueError(
                    f"{fqn}: {taken[name]} and {where} are both called {name!r}: give them "
                    "different names"
                )
        return names

    def _by_module(self, optimizer: Optimizer, fqn: str) -> dict[int, ParameterName]:
        places = {}
        for parameter, where in _parameters(optimizer):
            found = self._places.get(id(parameter), [])
            if len(found) != 1:
                raise ValueError(f"{fqn}: {where} {_found(found)}{_REMEDY}")
            places[id(parameter)] = found[0]
        several = len({module for _, module, _ in places.values()}) > 1
        return {
            identity: ParameterName(
                stored=join(module, name) if several else name,
                rule=join(module, name).removeprefix(f"{component}."),
            )
            for identity, (component, module, name) in places.items()
        }


_REMEDY = "put that module into the state once, or pass dc.Named(optimizer, names)"


def _found(places: list[tuple[str, str, str]]) -> str:
    if not places:
        return "is in no module of the state: "
    names = " and ".join(repr(join(module, name)) for _, module, name in places)
    return f"has unrelated names in the state, {names}: "


def _parameters(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield each parameter, and where it is in words."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            where = f"parameter {position} of group {number}, shape {tuple(parameter.shape)},"
            yield parameter, where


def optimizer_tree(leaf: OptimizerLeaf, names: Mapping[int, ParameterName], fqn: str) -> Branch:
    """Return what a save stores of an optimizer: a branch of `state` and `param_groups`.

    Raises ValueError for state that belongs to no parameter of a group.
    """
    optimizer = leaf.optimizer
    parameters = [parameter for parameter, _ in _parameters(optimizer)]
    strange = set(map(id, optimizer.state)) - set(map(id, parameters))
    if strange:
        raise ValueError(
            f"{fqn}: the optimizer has state for {len(strange)} keys that are no parameters of its "
            "groups: remove it, or put the optimizer's state_dict() into the state"
        )
    state: dict[str | int, Tree] = {}
    for parameter in parameters:
        entries = optimizer.state.get(parameter)
        if entries:
            name = names[id(parameter)]
            state[name.stored] = state_branch(
                entries, join(join(fqn, "state"), name.stored), (name.rule, tuple(parameter.shape))
            )
    groups: dict[str | int, Tree] = {
        number: group_leaf(group, names, join(join(fqn, "param_groups"), number))
        for number, group in enumerate(optimizer.param_groups)
    }
    return Branch(
        "dict",
        None,
        {"state": Branch("dict", None, state), "param_groups": Branch("list", None, groups)},
    )


def state_branch(entries: Mapping[str, object], fqn: str, under: tuple[str, Shape]) -> Branch:
    """Return the state of one parameter as a branch; `under` is the parameter."""
    trees: dict[PathKey, Tree] = {
        name: _under(read_value(value, join(fqn, name)), under) for name, value in entries.items()
    }
    return Branch("dict", None, trees)


def group_leaf(
    group: Mapping[str, object], names: Mapping[int, ParameterName], fqn: str
) -> GroupLeaf:
    """Return a parameter group as a leaf."""
    params = group["params"]
    assert isinstance(params, list)
    trees = {
        key: read_value(value, join(fqn, key))
        for key, value in group.items()
        if key not in LOCAL_KEYS
    }
    return GroupLeaf(
        params=tuple(names[id(parameter)].stored for parameter in params),
        values={key: tree.value for key, tree in trees.items() if isinstance(tree, PlainLeaf)},
        tensors={key: tree for key, tree in trees.items() if not isinstance(tree, PlainLeaf)},
    )


def _under(tree: Tree, under: tuple[str, Shape]) -> Tree:
    if isinstance(tree, TensorLeaf):
        return TensorLeaf(tree.value, under)
    if isinstance(tree, Branch):
        return Branch(tree.kind, tree.live, {k: _under(t, under) for k, t in tree.children.items()})
    return tree
