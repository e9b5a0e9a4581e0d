"""Optimizers on the loading side: state and groups are put in place, or given to the class.

Torch's own `load_state_dict` is never called: it casts state to the parameter's dtype. An optimizer
with methods of its own gets what it told, with what was saved in place of it, and what its
`load_state_dict` casts is put back.

Parameter groups on the loading side: hyperparameters come back by the parameters' names.

A group takes those that its parameters were saved with, in whatever group they were then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import signature
from typing import Any

import torch

from dist_ckpt.core.state.binding.bind_requests import BindContext
from dist_ckpt.core.state.binding.targets.load_values import ConstantValue, NewContainer, Value
from dist_ckpt.core.state.binding.targets.new_subclasses import subclass_types
from dist_ckpt.core.state.binding.targets.targets import PlacementHint
from dist_ckpt.core.state.fsdp1.optimizers import FlatOptimizer
from dist_ckpt.core.state.optimizers.named_optimizers import (
    LOCAL_KEYS,
    ParameterName,
    options_branch,
    state_branch,
)
from dist_ckpt.core.state.optimizers.optimizer_state import (
    GROUPS,
    STATE,
    OptimizerState,
    reported_state,
)
from dist_ckpt.core.state.tensors.read_tensor import is_meta
from dist_ckpt.core.state.tree.containers import PathKey, entries_of, is_mapping, join
from dist_ckpt.core.state.tree.leaves import OptimizerLeaf, PlainLeaf, TensorLeaf, Tree
from dist_ckpt.core.state.tree.read_tree import calling_user_code, read_value

# How a step is computed, not what: torch lets any of them change between two steps.
_WAYS_TO_STEP = frozenset({"foreach", "fused", "capturable", "differentiable"})


def saved_groups(requests: BindContext, groups: str) -> dict[str, str]:
    """Return the name of the group in which each parameter was saved, by the parameter's."""
    saved: dict[str, str] = {}
    number = 0
    while requests.has(name := join(groups, number)):
        saved.update(dict.fromkeys(requests.params(name), name))
        number += 1
    return saved


def sources_of(fqn: str, params: Sequence[str], saved: Mapping[str, str]) -> list[str]:
    """Return the names of the saved groups that the parameters of a group come from.

    Where nothing names a parameter, that of the same number.
    """
    if not params or not saved:
        return [fqn]
    return list(dict.fromkeys(saved[name] for name in params if name in saved))


@dataclass(frozen=True, slots=True, eq=False)
class GroupBinding:
    """One parameter group, and the names of the saved ones that its parameters come from."""

    requests: BindContext
    fqn: str
    group: dict[str, Any]
    sources: Sequence[str]

    def bind(self, defaults: Mapping[str, object], states: Iterable[str]) -> None:
        """Ask for the hyperparameters.

        `defaults` are those that they are checked against. That is done also if the load leaves
        them out but has some of `states`, the names of the state of the group's parameters.
        """
        requests = self.requests
        saved = filter(requests.has, self.sources)
        left_out = [name for name in saved if not requests.selected(name)]
        if left_out and any(map(requests.chosen, states)):
            self._check_left_out(left_out, defaults)
        if not self.sources and requests.selected(self.fqn):
            requests.missing[self.fqn] = None
        sources = list(filter(requests.selected, self.sources))
        asked = [options for name in sources if (options := self._ask(name)) is not None]
        if not asked or len(asked) < len(sources) or self._has_several_tensors(sources):
            return
        if len(asked) > 1:
            self._check_agreement(dict(zip(sources, asked, strict=True)))
        known = {key: o.value if isinstance(o, ConstantValue) else o for key, o in asked[0].items()}
        self._check_options(known, defaults)

        # Of nothing that has `requests`: they would keep each other alive, and the state.
        requests.effects.append(partial(_assign, self.group, asked[0]))

    def _check_left_out(self, names: Sequence[str], defaults: Mapping[str, object]) -> None:
        """Check saved groups that are not loaded."""
        requests = self.requests
        for name in names:
            own = requests.peek(name)
            options = own.value if own is not None else {}
            if isinstance(options, Mapping):
                # A tensor is no switch: it only has to be there.
                parts = {str(key): requests.peek(n) for key, n in requests.children(name)}
                known = {key: part.value if part else None for key, part in parts.items()}
                self._check_options({**options, **known}, defaults)

    def _has_several_tensors(self, sources: Sequence[str]) -> bool:
        """Report it if hyperparameters would have to be compared that are tensors, not yet read."""
        saved = self.requests.saved
        tensors = [leaf for name in sources for leaf in saved.below(name) if saved.tensor(leaf)]
        if len(sources) == 1 or not tensors:
            return False
        self.requests.problems.append(
            f"{self.fqn}: its parameters were saved in {' and '.join(sources)}, and {tensors[0]} "
            "is a tensor, which may differ between them: group them as they were, or exclude the "
            "groups to keep the present hyperparameters"
        )
        return True

    def _ask(self, name: str) -> dict[str, Value] | None:
        """Ask for the hyperparameters of a saved group."""
        requests = self.requests
        # One that is no optimizer's own but a dict of tensors and values was saved as a container.
        container = requests.is_container(name)
        own = options_branch(self.group, name) if container else None
        values = requests.subtree(name, own) if container else requests.value(name)
        if values is None:
            requests.report_mismatch(name, "a parameter group")
            return None
        options = _items_of(values)
        if options is None:
            what = values.kind if isinstance(values, NewContainer) else type(values()).__name__
            requests.problems.append(
                f"{name}: saved as a {what}, the state has a parameter group: exclude it, or load "
                "an optimizer's checkpoint"
            )
            return None
        for key, child in () if container else requests.children(name):
            live = read_value(self.group.get(str(key)), child)
            if (tensor := requests.subtree(child, live)) is not None:
                options[str(key)] = tensor
        return {key: o for key, o in options.items() if key not in LOCAL_KEYS and self._takes(key)}

    def _takes(self, key: str) -> bool:
        """Say whether no pattern leaves out just this hyperparameter of a group that is loaded."""
        selected = self.requests.selected
        names = (self.fqn, *self.sources)
        return all(selected(join(name, key)) for name in names if selected(name))

    def _check_agreement(self, saved: Mapping[str, Mapping[str, Value]]) -> None:
        """Report hyperparameters, of which none is a tensor, that differ between saved groups."""
        plain = {name: {key: o() for key, o in options.items()} for name, options in saved.items()}
        (first, options), *others = plain.items()
        for name, other in others:
            for key in dict.fromkeys((*options, *other)):
                one, two = options.get(key), other.get(key)
                if type(one) is not type(two) or one != two:
                    self._report(
                        f"its parameters were saved in {first}{self._where(first)} and in {name}"
                        f"{self._where(name)}, which differ in "
                        f"{key!r} ({_short(one)} and {_short(two)}): group them as they were, or "
                        "exclude the groups to keep the present hyperparameters"
                    )
                    return

    def _check_options(self, saved: Mapping[str, Any], defaults: Mapping[str, object]) -> None:
        """Report hyperparameters of another optimizer, or that need other state.

        A switch may be missing: torch's versions add some. One that is on here and was off may
        need state that was not saved.
        """
        live = {key: self.group[key] for key in defaults if key in self.group and self._takes(key)}
        absent = [
            key
            for key, value in live.items()
            if key not in saved and not (value is None or isinstance(value, bool))
        ]
        optimizer = self.fqn.rpartition(f".{GROUPS}.")[0]
        as_saved = (
            f"make the optimizer as it was saved, exclude all of it ({optimizer!r}), or load "
            "with strict=False"
        )
        if absent:
            self._report(
                f"saved with {', '.join(sorted(saved))}, but without {', '.join(absent)}, which "
                f"the optimizer here has: {as_saved}"
            )
            return
        # What else is saved may be a scheduler's, or have come with the first step.
        foreign = sorted(saved.keys() & options_of_torch() - self.group.keys() - _WAYS_TO_STEP)
        if live and foreign:
            self._report(
                f"saved with {', '.join(foreign)}, which the optimizer here does not have: "
                f"{as_saved}"
            )
            return
        for key, value in live.items():
            was_off = key in saved and (saved[key] is None or saved[key] is False)
            if value is True and was_off and key not in _WAYS_TO_STEP:
                self._report(
                    f"saved with {key}={saved[key]}, the optimizer here has {key}=True, for which "
                    f"state may not have been saved: {as_saved} to go on as saved"
                )
                return

    def _where(self, name: str) -> str:
        return self.requests.saved.where(name)

    def _report(self, problem: str) -> None:
        self.requests.problems.append(f"{self.fqn}: {problem}")


def _assign(group: dict[str, Any], options: Mapping[str, Value]) -> None:
    for key, option in options.items():
        # What is the group's own was filled in place; the rest other groups may get too.
        value = option()
        group[key] = value if value is group.get(key) else deepcopy(value)


def _items_of(saved: Value) -> dict[str, Value] | None:
    """Return what a saved group holds; None if it is no mapping."""
    if isinstance(saved, NewContainer) and is_mapping(saved.kind):
        return {str(key): item for key, item in saved.items.items()}
    if isinstance(saved, ConstantValue) and isinstance(saved.value, Mapping):
        return {key: ConstantValue(value) for key, value in saved.value.items()}
    return None


@cache
def options_of_torch() -> frozenset[str]:
    """Return the hyperparameters that any optimizer of torch has."""
    classes = (
        cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and torch.optim.Optimizer in cls.__mro__[1:]
    )
    return frozenset(name for cls in classes for name in signature(cls).parameters) - LOCAL_KEYS


def _short(value: object) -> str:
    return repr(value)[:100]


# As torch does: unless the step is computed on the device, it is counted in host memory.
_STEP = "step"


def bind_optimizer(requests: BindContext, fqn: str, leaf: OptimizerLeaf) -> None:
    """Ask for an optimizer's state and groups. Optimizers are closed.

    State that the checkpoint has and memory lacks is made. State of a parameter that was saved
    without any, as before its first step, is dropped; other state in memory that the checkpoint
    lacks is missing. A group takes the hyperparameters that its parameters were saved with: those
    have to agree, and under `strict` to be those of this optimizer's class.
    """
    held, names = leaf.held, requests.template.parameters[fqn]
    if requests.chosen(fqn) and any(map(is_meta, held.parameters())):
        requests.problems.append(
            f"{fqn}: the optimizer holds meta parameters, which a load of the module replaces: "
            "materialize the module (`to_empty`) and make the optimizer then"
        )
        return
    state, groups = join(fqn, STATE), join(fqn, GROUPS)
    requests.split(groups)
    saved = saved_groups(requests, groups)
    stored = _stored_names(held, names, saved)
    if saved and all(name.isdecimal() for name in saved):
        stored = _numbered(requests, fqn, held, saved) or stored
    classes = subclass_types(held.optimizer)
    defaults = held.defaults if requests.strict else {}
    before = len(requests.effects)
    for number, group in enumerate(held.groups):
        on_host = not (group.get("capturable") or group.get("fused"))
        for parameter in filter(held.keeps, group["params"]):
            name = stored[id(parameter)]
            beside = PlacementHint(parameter, names[id(parameter)].rule, on_host, classes)
            full = join(state, name)
            if name in saved and not requests.has(full) and requests.saved.says_stepless(full):
                _drop_state(requests, full, held, parameter)
            else:
                _bind_state(requests, full, held, beside)
        params = [stored[id(parameter)] for parameter in group["params"]]
        own = join(groups, number)
        binding = GroupBinding(requests, own, group, sources_of(own, params, saved))
        binding.bind(defaults, (join(state, name) for name in params))
    _bind_shared(requests, state, held, saved)
    if isinstance(held, FlatOptimizer):
        _bind_flat(requests, state, held, stored)
        held = held.own
    further = requests.parts(fqn, leaf.further)
    if held.told is not None and (further or len(requests.effects) > before):
        _load(requests, fqn, held, further)


def _bind_flat(
    requests: BindContext, state: str, held: FlatOptimizer, stored: Mapping[int, str]
) -> None:
    """Hand on what is bound to a view of an optimizer; what has one state needs all or nothing."""
    for parts in held.in_one():
        here = [stored[id(part)] for part in parts]
        lacking = [name for name in here if not requests.chosen(join(state, name))]
        if lacking and len(lacking) < len(here):
            has = next(name for name in here if name not in lacking)
            requests.problems.append(
                f"{state}: FSDP1 has one state for {lacking[0]} and {has} here, and the load has "
                f"some for {has} alone: wrap the model with use_orig_params=True, or exclude both"
            )
    requests.effects.append(held.write_back)


def _stored_names(
    held: OptimizerState, names: Mapping[int, ParameterName], saved: Mapping[str, str]
) -> dict[int, str]:
    """Return what the checkpoint calls the parameters, by id().

    Torch's helpers and `dc.Named` may have called them as their module does, not as the state.
    """
    parameters = list(dict.fromkeys(map(id, held.parameters())))
    own = {key: names[key].own for key in parameters}
    stored = {key: names[key].stored for key in parameters}
    if saved.keys().isdisjoint(stored.values()) and len({*own.values()}) == len(own):
        return own if not saved.keys().isdisjoint(own.values()) else stored
    return stored


def _numbered(
    requests: BindContext, fqn: str, held: OptimizerState, saved: Mapping[str, str]
) -> dict[int, str]:
    """Return what torch's own state dict calls the parameters: numbers, in the order of the groups.

    Nothing, and a problem, if the groups are others.
    """
    of_groups: dict[str, list[str]] = {}
    for name, group in saved.items():
        of_groups.setdefault(group, []).append(name)
    here = [len(group["params"]) for group in held.groups]
    if (there := [len(names) for names in of_groups.values()]) != here:
        requests.problems.append(
            f"{fqn}: its parameters were saved by number, in groups of {there}, and the optimizer "
            f"has groups of {here}: group them as they were, or exclude {fqn!r}"
        )
        return {}
    parameters = [id(parameter) for group in held.groups for parameter in group["params"]]
    return dict(zip(parameters, saved, strict=True))


def _drop_state(
    requests: BindContext, fqn: str, held: OptimizerState, parameter: torch.Tensor
) -> None:
    """Go back to before the parameter's first step."""
    live = [key for key in held.state.get(parameter, {}) if requests.selected(join(fqn, key))]
    requests.dropped += [join(fqn, key) for key in live]

    def drop() -> None:
        state = held.state[parameter]
        for key in live:
            del state[key]
        if not state:
            del held.state[parameter]

    if live:
        requests.effects.append(drop)


def _bind_state(
    requests: BindContext, fqn: str, held: OptimizerState, beside: PlacementHint
) -> None:
    parameter = beside.parameter
    under = beside.rule, tuple(parameter.shape)
    live = state_branch(held.state.get(parameter, {}), fqn, under).children
    requests.split(fqn)
    saved = requests.children(fqn)
    found: dict[PathKey, Value] = {}
    for key, name in saved:
        if requests.chosen(name) and (one := _entry(requests, name, key, live.get(key), beside)):
            found[key] = one
    absent = live.keys() - {key for key, _ in saved}
    names = (join(fqn, key) for key in live if key in absent)
    requests.missing.update((name, None) for name in names if requests.selected(name))

    def assign() -> None:
        entries = {key: value() for key, value in found.items()}
        held.state.setdefault(parameter, {}).update(entries)

    if found:
        requests.effects.append(assign)


def _bind_shared(
    requests: BindContext, state: str, held: OptimizerState, saved: Mapping[str, str]
) -> None:
    """Ask for the state that is under no parameter. Saved without any state it is dropped."""
    live = held.shared()
    # Numbers are keys there, and names here.
    children = requests.children(state) if saved else ()
    names = {key: name for key, name in children if str(key) not in saved}
    found: dict[PathKey, Value] = {}
    for key, name in names.items():
        tree = read_value(live[key], name) if key in live else None
        if (value := requests.subtree(name, tree)) is not None:
            found[key] = value
    for key in live:
        if key in names or not requests.selected(name := join(state, key)):
            continue
        if requests.children(state):
            requests.missing[name] = None
        else:
            requests.dropped.append(name)
            requests.effects.append(partial(held.state.pop, key))
    if found:
        requests.effects.append(
            lambda: held.state.update((str(key), value()) for key, value in found.items())
        )


def _entry(
    requests: BindContext, name: str, key: PathKey, live: Tree | None, beside: PlacementHint
) -> Value | None:
    """Ask for one entry of a parameter's state; what is there must be of the saved kind."""
    if requests.saved.tensor(name) is None:
        if isinstance(live, TensorLeaf):
            requests.report_mismatch(name, "a tensor")
            return None
        return requests.subtree(name, live, replace(beside, on_host=False))
    if isinstance(live, TensorLeaf):
        requests.restore(name)
        return ConstantValue(requests.targets.fill(name, live))
    if live is not None and not (isinstance(live, PlainLeaf) and live.value is None):
        requests.report_mismatch(name, "no tensor")
        return None
    on_host = beside.on_host and key == _STEP
    return requests.subtree(name, None, replace(beside, on_host=on_host))


def _load(
    requests: BindContext, fqn: str, held: OptimizerState, further: Mapping[str, Value]
) -> None:
    """Give an optimizer what it told, once what was saved is in place of it."""

    def load() -> None:
        state = held.state_dict({key: value() for key, value in further.items()})
        with calling_user_code(fqn, held.optimizer, "load_state_dict"):
            held.optimizer.load_state_dict(state)
        with calling_user_code(fqn, held.optimizer, "state_dict"):
            told = reported_state(held.optimizer, held.optimizer.state_dict(), live=True)
        if told is not None:
            _put_back(told.state, held.state)

    requests.loads.append((fqn, load))


def _put_back(told: Mapping[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Undo the casts of torch's `load_state_dict`, where what is told is the state itself.

    Where it is a copy, that changes nothing: the class then says what becomes of its state.
    """
    for parameter, entries in saved.items():
        live = told.get(parameter, {})
        # State under no parameter is not cast.
        for name, value in entries.items() if isinstance(parameter, torch.Tensor) else ():
            if name in live and _dtypes(live[name]) != _dtypes(value):
                live[name] = value


def _dtypes(value: object) -> list[torch.dtype]:
    if isinstance(value, torch.Tensor):
        return [value.dtype]
    return [dtype for item in (entries_of(value) or {}).values() for dtype in _dtypes(item)]
