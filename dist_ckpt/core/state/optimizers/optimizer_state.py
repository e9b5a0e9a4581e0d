"""What an optimizer holds: its groups, its parameters' state, and what its class tells besides.

Torch's own `state_dict` tells no more than `state` and `param_groups`, so an optimizer that has it
is read and filled directly. One with methods of its own, or with hooks around them, may tell more,
or keep it elsewhere: it is asked, and its `load_state_dict` gets back what it told. One that keeps
what nothing tells is refused.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.optim import Optimizer

from dist_ckpt.core.runtime.torch_private import LOAD_HOOKS, SAVE_HOOKS
from dist_ckpt.core.state.tensors.local_tensors import PLAIN
from dist_ckpt.core.state.tree.containers import PathKey

STATE = "state"
GROUPS = "param_groups"
_PARAMS = "params"


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """What an optimizer holds. `groups` have the parameters themselves, `state` is by parameter.

    What an optimizer keeps for all parameters together may be in `state` too, under a text.
    Both are the optimizer's own, for a load to change, where `told` is None. Else they are copies
    of what `state_dict` returned: after a load has changed them, `state_dict()` of this is what
    `load_state_dict` takes. `partition` are the id()s of the parameters whose state is on this
    rank, None for all. `defaults` are the hyperparameters of its class.
    """

    optimizer: Optimizer
    groups: list[dict[str, Any]]
    state: MutableMapping[Any, Any]
    defaults: Mapping[str, object]
    partition: frozenset[int] | None = None
    told: Mapping[str, Any] | None = None

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all groups."""
        return [parameter for group in self.groups for parameter in group[_PARAMS]]

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Say whether the state of a parameter is on this rank."""
        return self.partition is None or id(parameter) in self.partition

    def shared(self) -> dict[PathKey, object]:
        """Return the state that is under no parameter."""
        return {key: value for key, value in self.state.items() if isinstance(key, str)}

    def further(self) -> dict[PathKey, object]:
        """Return what was told besides the groups and the parameters' state."""
        return {
            key: value for key, value in (self.told or {}).items() if key not in (STATE, GROUPS)
        }

    def state_dict(self, further: Mapping[str, object]) -> dict[str, object]:
        """Return this in the form in which it was told, for `load_state_dict`."""
        assert self.told is not None
        ids: dict[int, int | str] = {}
        groups = []
        for told, group in zip(self.told[GROUPS], self.groups, strict=True):
            ids.update(zip(map(id, group[_PARAMS]), told[_PARAMS], strict=True))
            groups.append({**group, _PARAMS: told[_PARAMS]})
        # Of its own containers: the class may change those that it gets.
        state = {
            key if isinstance(key, str) else ids[id(key)]: copy(entries)
            for key, entries in self.state.items()
        }
        return {**self.told, STATE: state, GROUPS: groups, **further}


def direct_state(optimizer: Optimizer, fqn: str) -> OptimizerState | None:
    """Return what an optimizer holds, without its methods; None if it has methods of its own.

    Raises ValueError for a ZeroRedundancyOptimizer that cannot be read.
    """
    if _is_zero(optimizer):
        return _partitioned(optimizer, fqn)
    if _has_own_methods(optimizer, Optimizer):
        return None
    return OptimizerState(
        optimizer, optimizer.param_groups, optimizer.state, defaults_of(optimizer)
    )


def reported_state(
    optimizer: Optimizer, told: object, *, live: bool = False
) -> OptimizerState | None:
    """Return what `state_dict` told, by parameter; None if it is of another form than torch's.

    In torch's form `state` is by what the groups call their parameters, in their order. `live`
    keeps the entries of a parameter in the dict that was told, which may be the optimizer's.
    """
    parameters = _called(told, optimizer)
    if parameters is None:
        return None
    assert isinstance(told, Mapping)
    state: defaultdict[torch.Tensor | str, Any] = defaultdict(dict)
    for key, entries in told[STATE].items():
        if key not in parameters and not isinstance(key, str):
            return None
        state[parameters.get(key, key)] = entries if live else copy(entries)
    groups = [
        {**group, _PARAMS: own[_PARAMS]}
        for group, own in zip(told[GROUPS], optimizer.param_groups, strict=True)
    ]
    return OptimizerState(optimizer, groups, state, defaults_of(optimizer), told=told)


def check_reported(optimizer: Optimizer, fqn: str, beside: Container[int]) -> None:
    """Raise ValueError for an optimizer that keeps another of whose state nothing tells.

    `beside` are the id()s of the optimizers that the state holds besides.
    """
    for name, inner in _untold(optimizer):
        if id(inner) not in beside:
            raise ValueError(
                f"{fqn}: {_class(optimizer)} keeps a {_class(inner)} in `{name}`, of whose state "
                "its state_dict() tells nothing: put that optimizer into the state as well"
            )


def check_unnamed(optimizer: Optimizer, fqn: str) -> None:
    """Raise TypeError if state in a form of the class's own could not be given back.

    It comes back whole: what is under no parameter's name cannot lie as the parameter does.
    """
    parameters = (p for group in getattr(optimizer, GROUPS, ()) for p in group[_PARAMS])
    kind = next((type(p).__name__ for p in parameters if type(p) not in PLAIN), None)
    if kind is not None:
        raise TypeError(
            f"{fqn}: state_dict() of {_class(optimizer)} has a form of its own, in which parameters"
            f" have no names, and here they are {kind}s: let it return torch's form, in which "
            "'state' is by the numbers in 'param_groups', or save what it wraps instead"
        )


def defaults_of(optimizer: Optimizer) -> Mapping[str, object]:
    """Return the hyperparameters of an optimizer's class; of a wrapper without, what is within."""
    own = getattr(optimizer, "defaults", None)
    if own is not None and not _is_zero(optimizer):
        return dict(own)
    return {key: value for _, one in _inner(optimizer) for key, value in defaults_of(one).items()}


def _untold(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers within one, unless it says itself what its state dict is."""
    if _is_zero(optimizer) or _overrides(optimizer, Optimizer, "state_dict"):
        return
    if any(getattr(optimizer, name, None) for name in SAVE_HOOKS):
        return
    for name, inner in _inner(optimizer):
        if getattr(inner, STATE, None) is not optimizer.state:
            yield name, inner


def _is_zero(optimizer: Optimizer) -> bool:
    # Not imported for it: that takes a second, and who has one has imported it.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _partitioned(optimizer: Any, fqn: str) -> OptimizerState:
    """Read a ZeroRedundancyOptimizer: the optimizer within has this rank's parameters and state.

    Its `state_dict` would need a collective that gathers all of it on one rank.
    """
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        raise ValueError(
            f"{fqn}: with overlap_with_ddp=True a {_class(optimizer)} has no optimizer on this "
            "rank that could be read: make it with overlap_with_ddp=False"
        )
    base = sys.modules["torch.distributed.optim"].ZeroRedundancyOptimizer
    for one, known in ((optimizer, base), (inner, Optimizer)):
        if _has_own_methods(one, known) or any(_untold(one)):
            raise ValueError(
                f"{fqn}: {_class(one)} has a state_dict or load_state_dict of its own, or hooks, "
                "or an optimizer within, which does not work with a partition: use "
                "ZeroRedundancyOptimizer over an optimizer without them"
            )
    return OptimizerState(
        optimizer,
        optimizer.param_groups,
        inner.state,
        defaults_of(inner),
        partition=frozenset(id(p) for group in inner.param_groups for p in group[_PARAMS]),
    )


def _has_own_methods(optimizer: Optimizer, base: type) -> bool:
    """Say whether more than the methods of `base` make or take a state dict."""
    return (
        _overrides(optimizer, base, "state_dict")
        or _overrides(optimizer, base, "load_state_dict")
        or any(getattr(optimizer, name, None) for name in (*SAVE_HOOKS, *LOAD_HOOKS))
    )


def _overrides(optimizer: Optimizer, base: type, method: str) -> bool:
    return method in vars(optimizer) or getattr(type(optimizer), method) is not getattr(
        base, method
    )


def _inner(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers in an optimizer's attributes, and in the containers there."""
    for name, value in vars(optimizer).items():
        items: Iterable[object] = (value,)
        if isinstance(value, Mapping):
            items = value.values()
        elif isinstance(value, list | tuple):
            items = value
        yield from ((name, one) for one in items if isinstance(one, Optimizer))


def _called(told: object, optimizer: Optimizer) -> dict[Any, torch.Tensor] | None:
    """Return the parameters by what a state dict in torch's form calls them, or None."""
    if not isinstance(told, Mapping) or not isinstance(told.get(STATE), Mapping):
        return None
    groups, own = told.get(GROUPS), getattr(optimizer, GROUPS, None)
    if not isinstance(groups, list) or not isinstance(own, list) or len(groups) != len(own):
        return None
    parameters: dict[Any, torch.Tensor] = {}
    for group, its in zip(groups, own, strict=True):
        if not _is_group(group) or len(group[_PARAMS]) != len(its[_PARAMS]):
            return None
        parameters.update(zip(group[_PARAMS], its[_PARAMS], strict=True))
    entries = (told[STATE].get(key, {}) for key in parameters)
    return parameters if all(isinstance(one, dict) for one in entries) else None


def _is_group(group: object) -> TypeGuard[Mapping[str, Any]]:
    return (
        isinstance(group, Mapping)
        and isinstance(group.get(_PARAMS), list)
        and all(type(key) in (int, str) for key in group[_PARAMS])
    )


def _class(optimizer: object) -> str:
    return type(optimizer).__name__
