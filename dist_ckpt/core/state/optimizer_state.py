"""The state of an optimizer: its groups, its parameters' state, and further entries.

Torch's own `state_dict` returns only `state` and `param_groups`. An optimizer with this method is
read and filled directly (`direct_state`). A class with its own methods or hooks may have more
state: its `state_dict` is called, and its `load_state_dict` gets the same form back
(`reported_state`). An inner optimizer whose state no method returns is refused.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dist_ckpt.core.runtime.torch_private import LOAD_HOOKS, SAVE_HOOKS
from dist_ckpt.core.state.tensors.local_tensors import PLAIN
from dist_ckpt.core.state.tree.containers import PathKey

STATE = "state"
GROUPS = "param_groups"
_PARAMS = "params"


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """The state of an optimizer.

    - `groups`: the parameter groups, with the parameters themselves.
    - `state`: the state by parameter; under a str, state that belongs to no single parameter.
    - `defaults`: the hyperparameters of the optimizer's class.
    - `partition`: the id()s of the parameters whose state is on this rank; None for all.
    - `reported`: the result of the class's own `state_dict`, or None.

    Without `reported`, `groups` and `state` are the optimizer's own, and a load changes them.
    Otherwise they are copies: after a load, `load_state_dict` gets `state_dict()` of this object.
    """

    optimizer: Optimizer
    groups: list[dict[str, Any]]
    state: MutableMapping[Any, Any]
    defaults: Mapping[str, object]
    partition: frozenset[int] | None = None
    reported: Mapping[str, Any] | None = None

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all groups."""
        return [parameter for group in self.groups for parameter in group[_PARAMS]]

    def missing_nbytes(self) -> int:
        """Estimate the state of this rank's parameters that have none before the first step."""
        return sum(
            _local_nbytes(parameter) * _count_moments(group)
            for group in self.groups
            for parameter in group[_PARAMS]
            if parameter.requires_grad and not self.state.get(parameter)
        )

    @property
    def is_capturable(self) -> bool:
        """True if a CUDA graph may replay its step."""
        return any(group.get("capturable") for group in self.groups)

    def has_state_here(self, parameter: torch.Tensor) -> bool:
        """Return True if the state of a parameter is on this rank."""
        return self.partition is None or id(parameter) in self.partition

    def shared(self) -> dict[PathKey, object]:
        """Return the state that is not under a parameter."""
        return {key: value for key, value in self.state.items() if isinstance(key, str)}

    def further(self) -> dict[PathKey, object]:
        """Return the reported entries besides the groups and the parameters' state."""
        return {
            key: value for key, value in (self.reported or {}).items() if key not in (STATE, GROUPS)
        }

    def state_dict(self, further: Mapping[str, object]) -> dict[str, object]:
        """Return this state in the reported form, for `load_state_dict`."""
        assert self.reported is not None
        ids: dict[int, int | str] = {}
        groups = []
        for former, group in zip(self.reported[GROUPS], self.groups, strict=True):
            ids.update(zip(map(id, group[_PARAMS]), former[_PARAMS], strict=True))
            groups.append({**group, _PARAMS: former[_PARAMS]})
        # The class may change the containers that it gets, so they are copies.
        state = {
            key if isinstance(key, str) else ids[id(key)]: copy(entries)
            for key, entries in self.state.items()
        }
        return {**self.reported, STATE: state, GROUPS: groups, **further}


def direct_state(optimizer: Optimizer, fqn: str) -> OptimizerState | None:
    """Read an optimizer directly; None if it has its own methods or hooks.

    Raises ValueError for a ZeroRedundancyOptimizer that cannot be read.
    """
    if _is_zero(optimizer):
        return _read_zero(optimizer, fqn)
    if _has_own_methods(optimizer, Optimizer):
        return None
    return OptimizerState(
        optimizer, optimizer.param_groups, optimizer.state, read_defaults(optimizer)
    )


def reported_state(
    optimizer: Optimizer, reported: object, *, live: bool = False
) -> OptimizerState | None:
    """Convert a result of `state_dict` to state by parameter; None if it is not in torch's form.

    In torch's form the keys of `state` are the keys in the groups, in the order of the parameters.
    With `live` the state of a parameter is the reported dict itself, not a copy.
    """
    if (parameters := _parameters_by_key(reported, optimizer)) is None:
        return None
    assert isinstance(reported, Mapping)
    state: defaultdict[torch.Tensor | str, Any] = defaultdict(dict)
    for key, entries in reported[STATE].items():
        if key not in parameters and not isinstance(key, str):
            return None
        state[parameters.get(key, key)] = entries if live else copy(entries)
    groups = [
        {**group, _PARAMS: current[_PARAMS]}
        for group, current in zip(reported[GROUPS], optimizer.param_groups, strict=True)
    ]
    return OptimizerState(optimizer, groups, state, read_defaults(optimizer), reported=reported)


def convert_state(optimizer: OptimizerState, absent: Mapping[int, Iterable[str]]) -> None:
    """Let the class convert loaded state by its `__setstate__`, as torch's `load_state_dict` does.

    It makes tensors of counters that files before torch 1.12 have as numbers, and adds options.
    `absent` are options, by number of the group, that were not saved. The class sets its default,
    or else they keep their current value.
    """
    outer: Any = optimizer.optimizer
    real: Optimizer = outer if optimizer.partition is None else outer.optim
    if real is not outer:
        _copy_options(optimizer.groups, real.param_groups)
    _place_steps(real)
    former = [
        {key: group.pop(key) for key in absent.get(number, ()) if key in group}
        for number, group in enumerate(real.param_groups)
    ]
    try:
        real.__setstate__({STATE: real.state, GROUPS: real.param_groups})
    finally:
        for group, options in zip(real.param_groups, former, strict=True):
            group.update({**options, **group})
    if real is not outer:
        _copy_options(real.param_groups, optimizer.groups)


def _copy_options(
    sources: Iterable[Mapping[str, Any]], targets: Iterable[MutableMapping[str, Any]]
) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.update((key, value) for key, value in source.items() if key != _PARAMS)


def _place_steps(optimizer: Optimizer) -> None:
    """Move step counts to the device for steps that are computed there, as torch does."""
    for group in optimizer.param_groups:
        if not (group.get("capturable") or group.get("fused")):
            continue
        for parameter in group[_PARAMS]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, torch.Tensor):
                moved = step.to(dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter]["step"] = moved


# Keys that torch's schedulers, and Lightning, add to groups.
_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "name"}
)


def find_lost_counters(
    optimizer: Optimizer, saved: Mapping[str, object], group: Mapping[str, object]
) -> str | None:
    """Return a text for saved values of a group that are no options of the class; None if none."""
    options = _arguments(optimizer)
    names = [
        key
        for key, value in saved.items()
        if key in group and key not in options and key not in _OF_SCHEDULERS
        if type(value) in (int, float, bool) and value != group[key]
    ]
    if not names:
        return None
    name = type([*with_inner_optimizers(optimizer)][-1]).__name__
    return (
        f"{', '.join(names)}, which {name} keeps there as its state: exclude the "
        "options that you want to keep by their names, such as '*.param_groups.*.lr'"
    )


def may_be_option(optimizer: Optimizer, key: str) -> bool:
    """Return False for what a class keeps in a group as its state, such as `train_mode`.

    An option is an argument of the class. A class that takes any arguments may have any option.
    """
    parameters = _arguments(optimizer)
    return key in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _arguments(optimizer: Optimizer) -> dict[str, Parameter]:
    """Return the arguments of the classes of an optimizer, and of those that it wraps."""
    return {
        name: parameter
        for each in with_inner_optimizers(optimizer)
        for cls in type(each).__mro__
        if issubclass(cls, Optimizer)
        for name, parameter in signature(cls.__init__).parameters.items()
    }


def check_reported(optimizer: Optimizer, fqn: str, listed: Container[int]) -> None:
    """Raise ValueError for an inner optimizer whose state would be lost.

    Its state is in neither the outer `state_dict`, nor is its id() in `listed`.
    """
    for name, inner in _unreported_optimizers(optimizer):
        if id(inner) not in listed:
            raise ValueError(
                f"{fqn}: {type(optimizer).__name__} keeps a {type(inner).__name__} in `{name}`, "
                "whose state is missing in its state_dict(): add that optimizer to the state too"
            )


def check_unnamed(optimizer: Optimizer, fqn: str) -> None:
    """Raise TypeError for state in the class's own form whose parameters are not plain tensors.

    Such state is loaded as a whole. It has no parameter names, so it cannot be sharded.
    """
    parameters = (p for group in getattr(optimizer, GROUPS, ()) for p in group[_PARAMS])
    kind = next((type(p).__name__ for p in parameters if type(p) not in PLAIN), None)
    if kind is not None:
        raise TypeError(
            f"{fqn}: state_dict() of {type(optimizer).__name__} is not in torch's form, so its "
            f"state has no parameter names, and its parameters are {kind}s. Return torch's form "
            "there ('state' has the numbers in 'param_groups' as keys), or save the inner "
            "optimizer instead"
        )


def read_defaults(optimizer: Optimizer) -> Mapping[str, object]:
    """Return the default hyperparameters of an optimizer, or else of its inner optimizers."""
    defaults = getattr(optimizer, "defaults", None)
    if defaults is not None and not _is_zero(optimizer):
        return dict(defaults)
    return {
        k: value
        for _, inner in _inner_optimizers(optimizer)
        for k, value in read_defaults(inner).items()
    }


def with_inner_optimizers(optimizer: Optimizer, depth: int = 8) -> Iterator[Optimizer]:
    """Yield an optimizer and those that it wraps, such as accelerate's around torchao's."""
    yield optimizer
    for _, inner in _inner_optimizers(optimizer) if depth else ():
        yield from with_inner_optimizers(inner, depth - 1)


def _unreported_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield inner optimizers whose state is in no `state_dict` of the outer one."""
    if _is_zero(optimizer) or _overrides(optimizer, Optimizer, "state_dict"):
        return
    if any(getattr(optimizer, name, None) for name in SAVE_HOOKS):
        return
    for name, inner in _inner_optimizers(optimizer):
        if getattr(inner, STATE, None) is not optimizer.state:
            yield name, inner


def _is_zero(optimizer: Optimizer) -> bool:
    # The import takes a second. A user of the class has already imported the module.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _read_zero(optimizer: Any, fqn: str) -> OptimizerState:
    """Read a ZeroRedundancyOptimizer from its inner optimizer, which has this rank's state.

    Its own `state_dict` would need a collective that gathers all state on one rank.
    """
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        raise ValueError(
            f"{fqn}: with overlap_with_ddp=True a {type(optimizer).__name__} has no optimizer on "
            "this rank that could be read: create it with overlap_with_ddp=False"
        )
    base = sys.modules["torch.distributed.optim"].ZeroRedundancyOptimizer
    for part, expected in ((optimizer, base), (inner, Optimizer)):
        if _has_own_methods(part, expected) or any(_unreported_optimizers(part)):
            raise ValueError(
                f"{fqn}: {type(part).__name__} overrides state_dict or load_state_dict, has hooks, "
                "or has an inner optimizer, which does not work with a partition. Use "
                "ZeroRedundancyOptimizer over an optimizer without them"
            )
    return OptimizerState(
        optimizer,
        optimizer.param_groups,
        inner.state,
        read_defaults(inner),
        partition=frozenset(id(p) for group in inner.param_groups for p in group[_PARAMS]),
    )


def _has_own_methods(optimizer: Optimizer, base: type) -> bool:
    """Return True if overrides or hooks change how `base` makes or loads a state dict."""
    return (
        _overrides(optimizer, base, "state_dict")
        or _overrides(optimizer, base, "load_state_dict")
        or any(getattr(optimizer, name, None) for name in (*SAVE_HOOKS, *LOAD_HOOKS))
    )


def _overrides(optimizer: Optimizer, base: type, method: str) -> bool:
    current = getattr(type(optimizer), method)
    return method in vars(optimizer) or current is not getattr(base, method)


def _inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    for name, value in vars(optimizer).items():
        items: Iterable[object] = (value,)
        if isinstance(value, Mapping):
            items = value.values()
        elif isinstance(value, list | tuple):
            items = value
        yield from ((name, item) for item in items if isinstance(item, Optimizer))


def _parameters_by_key(reported: object, optimizer: Optimizer) -> dict[Any, torch.Tensor] | None:
    """Return the parameters by their keys in a state dict of torch's form, or None."""
    if not isinstance(reported, Mapping) or not isinstance(reported.get(STATE), Mapping):
        return None
    groups, now = reported.get(GROUPS), getattr(optimizer, GROUPS, None)
    if not isinstance(groups, list) or not isinstance(now, list) or len(groups) != len(now):
        return None
    parameters: dict[Any, torch.Tensor] = {}
    for group, live in zip(groups, now, strict=True):
        if not _is_group(group) or len(group[_PARAMS]) != len(live[_PARAMS]):
            return None
        parameters.update(zip(group[_PARAMS], live[_PARAMS], strict=True))
    entries = (reported[STATE].get(key, {}) for key in parameters)
    return parameters if all(isinstance(entry, dict) for entry in entries) else None


def _is_group(group: object) -> TypeGuard[Mapping[str, Any]]:
    return (
        isinstance(group, Mapping)
        and isinstance(group.get(_PARAMS), list)
        and all(type(key) in (int, str) for key in group[_PARAMS])
    )


def _local_nbytes(parameter: torch.Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes


def _count_moments(group: Mapping[str, Any]) -> int:
    """Return how many tensors of a parameter's size a usual optimizer has, by its options."""
    if "betas" in group:
        return 2 + bool(group.get("amsgrad"))
    return bool(group.get("momentum")) + ("alpha" in group) + bool(group.get("centered"))
