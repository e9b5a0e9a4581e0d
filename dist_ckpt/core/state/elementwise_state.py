"""Which state of an optimizer has a value for each element of its parameter.

Such state is cut with its parameter. A square parameter may have other state of the same shape:
the preconditioners of Shampoo and SOAP. A part of these means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.index import JOINED, WHOLE
from dist_ckpt.core.planning.tensor_views import RuleSharded
from dist_ckpt.core.state.fsdp1.fsdp1_modules import ParameterPart
from dist_ckpt.core.state.named_optimizers import ParameterName
from dist_ckpt.core.state.optimizer_state import STATE, OptimizerState
from dist_ckpt.core.state.sharding_rules import ShardingRules
from dist_ckpt.core.state.tree.containers import child_name
from dist_ckpt.core.state.tree.elementwise_keys import KNOWN_KEYS, elementwise_keys, is_square
from dist_ckpt.core.state.tree.state_tree import Branch, TensorLeaf, children_of, walk


def find_uncut(
    optimizer: OptimizerState,
    states: Branch,
    fqn: str,
    names: Mapping[int, ParameterName],
    rules: ShardingRules | None,
) -> dict[str, str]:
    """Return the tensors of an optimizer's state that are not cut with their parameter.

    See `ObjectsFile.uncut`. `states` is the state as a branch, and `names` are its parameters'.
    """
    uncut: dict[str, str] = {}
    by_rule: list[tuple[str, str, TensorLeaf, torch.Tensor, Shape]] = []
    parameters = optimizer.parameters()
    if rules is None:
        parameters = [p for p in parameters if isinstance(p, DTensor)]
    for parameter in parameters:
        name = names[id(parameter)].stored
        above = child_name(child_name(fqn, STATE), name)
        for key, full, leaf, value in _plain_tensors(states.children.get(name), above):
            if isinstance(parameter, DTensor):
                uncut[full] = WHOLE
            elif key not in KNOWN_KEYS:
                by_rule.append((key, full, leaf, value, tuple(parameter.shape)))
    outcomes = elementwise_keys((k, shape, tuple(v.shape)) for k, _, _, v, shape in by_rule)
    for key, full, leaf, value, shape in by_rule:
        is_like = tuple(value.shape) == shape and is_square(shape)
        if is_like and not outcomes.get(key) and _is_cut(rules, full, leaf, shape):
            uncut[full] = JOINED
    return uncut


def _plain_tensors(
    state: object, above: str
) -> Iterator[tuple[str, str, TensorLeaf, torch.Tensor]]:
    """Yield the plain tensors with dimensions in a parameter's state, with their keys and names."""
    for key, tree in children_of(state).items() if isinstance(state, Branch) else ():
        for full, leaf in walk(tree, child_name(above, key)):
            if not isinstance(leaf, TensorLeaf) or isinstance(leaf.value, DTensor):
                continue
            if isinstance(leaf.value, torch.Tensor) and leaf.value.ndim:
                yield str(key), full, leaf, leaf.value


def _is_cut(rules: ShardingRules | None, fqn: str, leaf: TensorLeaf, shape: Shape) -> bool:
    """Return True if a rule for the parameter, not for the state itself, cuts the tensor."""
    if rules is None or rules.names_state(fqn):
        return False
    found = rules.view(fqn, leaf, shape)
    view = None if found is None else found[0]
    if not isinstance(view, RuleSharded):
        return False
    return any(view.mesh.shape[axis] > 1 for axes in view.axes for axis in axes)


# --- where a load places new state ------------------------------------------------------------


def uncut_problem(name: str) -> str:
    """Return the error text for state whose parts have no known meaning."""
    key = name.rpartition(".")[2]
    return (
        f"{name}: it has the shape of its parameter, and nothing shows that it has a value for "
        "each element, as moments do, so it cannot be cut in another way than it was saved. Load "
        "on as many ranks as it was saved by, exclude it, or let the optimizer create its state "
        "before the load, such as by a step. If it is elementwise, name it in a rule: "
        f"sharding=dc.ShardingConfig(mesh, {{'*.{key}': {{axis: dim}}}})"
    )


@dataclass(frozen=True, slots=True, eq=False)
class PlacementHint:
    """The parameter whose placement new optimizer state gets, and its name for sharding rules.

    With `on_host` the state stays in host memory. `classes` are the tensor subclasses that may be
    created, by their full names. `elementwise` is True if the state is cut with its parameter,
    False if it is not, and None if it is unknown. `outcomes` returns this for the keys of the
    optimizer's state.
    """

    parameter: torch.Tensor | ParameterPart
    rule_name: str
    on_host: bool = False
    classes: Mapping[str, type[torch.Tensor]] = field(default_factory=dict)
    outcomes: Callable[[], Mapping[str, bool]] = dict
    elementwise: bool | None = True

    def of_entry(self, key: object, *, on_host: bool) -> PlacementHint:
        """Return the hint for one entry of the parameter's state."""
        name = str(key)
        elementwise = True if name in KNOWN_KEYS else self.outcomes().get(name)
        return replace(self, on_host=on_host, elementwise=elementwise)

    def fits(self, shape: Shape) -> bool:
        """Return True if state of this shape, which is the parameter's, is cut with it."""
        return self.elementwise is True or not is_square(shape)
