"""Optimizers on the loading side: state and groups are assigned directly.

`Optimizer.load_state_dict` is never called: it casts state to the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from dist_ckpt.binding.contents import Contents, Deferred
from dist_ckpt.binding.fresh_compounds import compound_classes
from dist_ckpt.binding.requests import Requests
from dist_ckpt.binding.targets import Beside
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.state.containers import PathKey, join
from dist_ckpt.state.optimizers import LOCAL_KEYS, ParameterName, state_branch
from dist_ckpt.state.tensors import is_meta
from dist_ckpt.state.tree import Branch, PlainLeaf, TensorLeaf, Tree, read_value

# As torch does: unless the step is computed on the device, it is counted in host memory.
_STEP = "step"


def bind_optimizer(
    requests: Requests,
    fqn: str,
    optimizer: Optimizer,
    names: Mapping[int, ParameterName],
    *,
    strict: bool,
) -> None:
    """Ask for an optimizer's state and groups. Optimizers are closed.

    State that the checkpoint has and memory lacks is made. State of a parameter that was saved
    without any, as before its first step, is dropped; other state in memory that the checkpoint
    lacks is missing. Under `strict` a parameter must be in the group in which it was saved.
    """
    if requests.chosen(fqn) and any(map(is_meta, _parameters(optimizer))):
        requests.problems.append(
            f"{fqn}: the optimizer holds meta parameters, which a load of the module replaces: "
            "materialize the module (`to_empty`) and make the optimizer then"
        )
        return
    state, groups = join(fqn, "state"), join(fqn, "param_groups")
    requests.split(groups)
    saved = _saved_groups(requests, groups)
    classes = compound_classes(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        on_host = not (group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            name = names[id(parameter)]
            beside = Beside(parameter, name.rule, on_host, classes)
            full = join(state, name.stored)
            if name.stored in saved and not requests.has(full):
                _drop_state(requests, full, optimizer, parameter)
            else:
                _bind_state(requests, full, optimizer, beside)
        _bind_group(requests, join(groups, number), group)
    if strict:
        _check_groups(requests, groups, optimizer, names, saved)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _saved_groups(requests: Requests, groups: str) -> dict[str, int]:
    """Return the group in which each parameter was saved, by its name."""
    saved: dict[str, int] = {}
    number = 0
    while requests.has(name := join(groups, number)):
        saved.update(dict.fromkeys(requests.params(name), number))
        number += 1
    return saved


def _drop_state(
    requests: Requests, fqn: str, optimizer: Optimizer, parameter: torch.Tensor
) -> None:
    """Go back to before the parameter's first step."""
    live = [key for key in optimizer.state.get(parameter, {}) if requests.selected(join(fqn, key))]
    requests.dropped += [join(fqn, key) for key in live]

    def drop(_: Contents) -> None:
        state = optimizer.state[parameter]
        for key in live:
            del state[key]
        if not state:
            del optimizer.state[parameter]

    if live:
        requests.effects.append(drop)


def _bind_state(requests: Requests, fqn: str, optimizer: Optimizer, beside: Beside) -> None:
    parameter = beside.parameter
    under = beside.rule, tuple(parameter.shape)
    live = state_branch(optimizer.state.get(parameter, {}), fqn, under).children
    requests.split(fqn)
    saved = requests.children(fqn)
    gets: dict[PathKey, Deferred] = {}
    for key, name in saved:
        if requests.chosen(name) and (get := _entry(requests, name, key, live.get(key), beside)):
            gets[key] = get
    absent = live.keys() - {key for key, _ in saved}
    names = (join(fqn, key) for key in live if key in absent)
    requests.missing.update((name, None) for name in names if requests.selected(name))

    def assign(contents: Contents) -> None:
        entries = {key: get(contents) for key, get in gets.items()}
        optimizer.state[parameter].update(entries)

    if gets:
        requests.effects.append(assign)


def _entry(
    requests: Requests, name: str, key: PathKey, live: Tree | None, beside: Beside
) -> Deferred | None:
    """Ask for one entry of a parameter's state; what is there must be of the saved kind."""
    if requests.saved.tensor(name) is None:
        if isinstance(live, TensorLeaf):
            requests.misfit(name, "a tensor")
            return None
        return requests.subtree(name, live, replace(beside, on_host=False))
    if isinstance(live, TensorLeaf):
        requests.restore(name)
        value = requests.targets.fill(name, live)
        return lambda _: value
    if live is not None and not (isinstance(live, PlainLeaf) and live.value is None):
        requests.misfit(name, "no tensor")
        return None
    on_host = beside.on_host and key == _STEP
    return requests.subtree(name, None, replace(beside, on_host=on_host))


def _bind_group(requests: Requests, fqn: str, group: dict[str, Any]) -> None:
    if not requests.selected(fqn):
        return
    # One that is no optimizer's own but a dict of tensors and values was saved as a container.
    container = requests.is_container(fqn)
    get = requests.subtree(fqn, _group_tree(fqn, group)) if container else requests.value(fqn)
    if get is None:
        requests.misfit(fqn, "a parameter group")
        return
    values = get
    tensors: dict[PathKey, Deferred] = {}
    for key, name in () if container else requests.children(fqn):
        live = read_value(group.get(str(key)), name)
        if (tensor := requests.subtree(name, live)) is not None:
            tensors[key] = tensor

    def assign(contents: Contents) -> None:
        saved = values(contents)
        if not isinstance(saved, Mapping):
            raise IncompatibleError(
                f"{fqn}: saved as a {type(saved).__name__}, the state has a parameter group: "
                "exclude it, or load an optimizer's checkpoint"
            )
        group.update((key, value) for key, value in saved.items() if key not in LOCAL_KEYS)
        group.update((str(key), get(contents)) for key, get in tensors.items())

    requests.effects.append(assign)


def _group_tree(fqn: str, group: Mapping[str, Any]) -> Branch:
    children: dict[PathKey, Tree] = {
        key: read_value(value, join(fqn, key))
        for key, value in group.items()
        if key not in LOCAL_KEYS
    }
    return Branch("dict", None, children)


def _check_groups(
    requests: Requests,
    groups: str,
    optimizer: Optimizer,
    names: Mapping[int, ParameterName],
    saved: Mapping[str, int],
) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[id(parameter)].stored
            if saved.get(name, number) != number and requests.selected(join(groups, number)):
                requests.problems.append(
                    f"{groups}: {name} was saved in group {saved[name]} and is in group {number} "
                    "here: group the parameters as they were, or exclude the groups to keep the "
                    "present hyperparameters"
                )
