"""Name the parameters of optimizers, and read optimizer state as a tree under these names.

A parameter's name comes from the module of the same state that has the parameter object. It is the
first name of the parameter in the checkpoint, such as `model.layers.0.weight`.

Torch's own helpers are not used. They take a real step on an optimizer without state, and cast fp32
moments to the parameter's dtype. They fail on state that only some parameters have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.state.optimizer_state import STATE, OptimizerState, check_reported
from dist_ckpt.core.state.tree.containers import PathKey, child_name
from dist_ckpt.core.state.tree.state_tree import (
    Branch,
    ModuleLeaf,
    OptimizerLeaf,
    TensorLeaf,
    Tree,
    read_value,
    walk,
)

# Keys of a group that list its parameters. They are saved as names instead.
LOCAL_KEYS = frozenset({"params", "param_names"})


@dataclass(frozen=True, slots=True)
class ParameterName:
    """The names of a parameter: in the checkpoint, for sharding rules, and in its module."""

    stored: str
    rule_name: str
    in_module: str


def name_parameters(root: Branch) -> dict[str, dict[int, ParameterName]]:
    """Return the names of the parameters of each optimizer in a state, by their id().

    Raises ValueError for a parameter without a name or with two names. Raises ValueError also for
    an inner optimizer that is in neither the outer one's `state_dict` nor the state.
    """
    optimizers: dict[str, OptimizerLeaf] = {}
    in_modules: dict[int, list[ParameterName]] = {}
    for component, child in root.children.items():
        if isinstance(child, TensorLeaf):
            continue  # fast: a state may have many tensors
        for fqn, leaf in walk(child, str(component), tensors=False):
            if isinstance(leaf, OptimizerLeaf):
                optimizers[fqn] = leaf
            elif isinstance(leaf, ModuleLeaf):
                for key, name in leaf.state.names_of_parameters().items():
                    stored = child_name(fqn, name)
                    rule_name = stored.removeprefix(f"{component}.")
                    in_modules.setdefault(key, []).append(ParameterName(stored, rule_name, name))
    _name_loose(root, optimizers.values(), in_modules)
    in_state = {id(leaf.state.optimizer) for leaf in optimizers.values()}
    for fqn, leaf in optimizers.items():
        check_reported(leaf.state.optimizer, fqn, in_state)
    return {fqn: _name_all(leaf, fqn, in_modules) for fqn, leaf in optimizers.items()}


def _name_loose(
    root: Branch, leaves: Iterable[OptimizerLeaf], names: dict[int, list[ParameterName]]
) -> None:
    """Name parameters that are in no module but in a container, such as fp32 master weights."""
    states = [leaf.state for leaf in leaves if leaf.names is None]
    loose = {id(p) for state in states for p in state.parameters()} - names.keys()
    for component, child in root.children.items() if loose else ():
        for fqn, leaf in walk(child, str(component)):
            if isinstance(leaf, TensorLeaf) and id(leaf.value) in loose:
                rule_name = fqn.removeprefix(f"{component}.")
                names.setdefault(id(leaf.value), [ParameterName(fqn, rule_name, rule_name)])


def _name_all(
    leaf: OptimizerLeaf, fqn: str, in_modules: Mapping[int, Sequence[ParameterName]]
) -> dict[int, ParameterName]:
    names: dict[int, ParameterName] = {}
    positions: dict[str, str] = {}
    for number, group in enumerate(leaf.state.groups):
        for index, parameter in enumerate(group["params"]):
            text = f"parameter {index} of group {number}, shape {tuple(parameter.shape)},"
            matches = in_modules.get(id(parameter), ())
            if leaf.names is not None:
                if id(parameter) not in leaf.names:
                    raise ValueError(f"{fqn}: {text} has no name in dc.Named: add it to `names`")
                name = leaf.names[id(parameter)]
                matches = [ParameterName(name, name, name)]
            if len(matches) != 1:
                fact = "is in no module of the state"
                if matches:
                    several = " and ".join(repr(match.stored) for match in matches)
                    fact = f"has unrelated names in the state, {several}"
                raise ValueError(
                    f"{fqn}: {text} {fact}: put that module, or a dict with the parameters, into "
                    "the state once, or name them: dc.Named(optimizer, dict(module."
                    "named_parameters()))"
                )
            names[id(parameter)] = matches[0]
            stored = matches[0].stored
            if positions.setdefault(stored, text) != text:
                raise ValueError(
                    f"{fqn}: {positions[stored]} and {text} are both called {stored!r}: give them "
                    "different names"
                )
    return names


def states_branch(
    optimizer: OptimizerState, names: Mapping[int, ParameterName], fqn: str
) -> Branch:
    """Return an optimizer's state as a branch. ValueError for state outside its groups."""
    parameters = optimizer.parameters()
    shared = optimizer.shared()
    stray = set(map(id, optimizer.state)) - set(map(id, parameters)) - set(map(id, shared))
    if stray:
        raise ValueError(
            f"{fqn}: the optimizer has state for {len(stray)} keys that are not parameters of its "
            "groups: remove it from `state`"
        )
    above = child_name(fqn, STATE)
    state: dict[PathKey, Tree] = {}
    for parameter in parameters:
        if entries := optimizer.state.get(parameter):
            name = names[id(parameter)]
            owner = name.rule_name, tuple(parameter.shape)
            state[name.stored] = state_branch(entries, child_name(above, name.stored), owner)
    for key, value in shared.items():
        state[key] = read_value(value, child_name(above, key))
    return Branch("dict", None, state)


def state_names(state: OptimizerState, names: Mapping[int, ParameterName], fqn: str) -> list[str]:
    """Return the name of an optimizer's state and all names in it.

    A parameter without state has its name too: a load may create its state.
    """
    above = child_name(fqn, STATE)
    states = {
        child_name(above, names[id(p)].stored): state.state.get(p, ()) for p in state.parameters()
    }
    entries = (child_name(name, key) for name, keys in states.items() for key in keys)
    return [above, *states, *entries, *(child_name(above, key) for key in state.shared())]


def state_branch(entries: Mapping[str, object], fqn: str, parameter: tuple[str, Shape]) -> Branch:
    """Return the state of one parameter as a branch. See `TensorLeaf` for `parameter`."""
    trees: dict[PathKey, Tree] = {
        name: _attach_parameter(read_value(value, child_name(fqn, name)), parameter)
        for name, value in entries.items()
    }
    return Branch("dict", None, trees)


def options_branch(group: Mapping[str, object], fqn: str) -> Branch:
    """Return the options of a parameter group as a branch."""
    options: dict[PathKey, Tree] = {
        key: read_value(value, child_name(fqn, key))
        for key, value in group.items()
        if key not in LOCAL_KEYS
    }
    return Branch("dict", None, options)


def _attach_parameter(tree: Tree, parameter: tuple[str, Shape]) -> Tree:
    if isinstance(tree, TensorLeaf):
        return TensorLeaf(tree.value, parameter)
    if isinstance(tree, Branch):
        children = {k: _attach_parameter(t, parameter) for k, t in tree.children.items()}
        return Branch(tree.kind, tree.live, children)
    return tree
