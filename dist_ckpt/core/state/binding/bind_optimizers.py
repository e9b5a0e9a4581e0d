"""Load the state and the parameter groups of optimizers.

State is filled in place. Torch's own `load_state_dict` is never called: it casts state to the
parameter's dtype. Only its last step runs here: the class converts the loaded state
(`convert_state`). An optimizer class with its own `load_state_dict` gets its reported state back,
with the saved values in it. If that call casts state, the cast is undone.

Parameters are matched by name. A group gets the hyperparameters that its parameters were saved
with, even if they were in other groups.

Saved names arrive here after the option `rename`. With a rule for a parameter, the state of that
parameter is renamed too (`Rename._move_with_parameter` in `sources/rename.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from itertools import count, takewhile
from typing import Any

import torch
from torch.optim import Optimizer

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.state.binding.bind_context import BindContext
from dist_ckpt.core.state.binding.new_subclasses import subclass_types
from dist_ckpt.core.state.binding.values import FixedValue, NewContainer, Value
from dist_ckpt.core.state.elementwise_state import PlacementHint
from dist_ckpt.core.state.fsdp1.fsdp1_optimizers import FlatOptimizer
from dist_ckpt.core.state.named_optimizers import (
    LOCAL_KEYS,
    ParameterName,
    options_branch,
    state_branch,
)
from dist_ckpt.core.state.optimizer_state import (
    GROUPS,
    STATE,
    OptimizerState,
    convert_state,
    find_lost_counters,
    may_be_option,
    reported_state,
)
from dist_ckpt.core.state.tensors.locate_tensor import is_meta
from dist_ckpt.core.state.tree.containers import PathKey, child_name, container_entries, is_mapping
from dist_ckpt.core.state.tree.elementwise_keys import elementwise_keys
from dist_ckpt.core.state.tree.state_tree import (
    OptimizerLeaf,
    PlainLeaf,
    TensorLeaf,
    Tree,
    calling_user_code,
    read_value,
)

# Options that select an implementation of the step. Torch allows changes between two steps.
_STEP_VARIANTS = frozenset({"foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True, slots=True, eq=False)
class _GroupBinding:
    """One parameter group, and the names of the saved groups that have its parameters."""

    context: BindContext
    fqn: str
    group: dict[str, Any]
    saved_groups: Sequence[str]
    optimizer: Optimizer

    def bind(self, defaults: Mapping[str, object], states: Iterable[str]) -> Sequence[str] | None:
        """Request the hyperparameters, and check them against the class's `defaults`.

        `states` are the names of the state of the group's parameters. If the load includes some of
        it but leaves out saved groups, those groups are checked too. Return the switches that were
        not saved: the class may set them. None if an optimizer of another class saved the group.
        """
        context = self.context
        stored = filter(context.has, self.saved_groups)
        left_out = [name for name in stored if not context.is_selected(name)]
        is_checked = left_out and any(map(context.selected_leaves, states))
        if is_checked and not self._check_left_out(left_out, defaults):
            return None
        if not self.saved_groups and context.is_selected(self.fqn):
            context.missing[self.fqn] = None
        selected = list(filter(context.is_selected, self.saved_groups))
        groups = [
            options for name in selected if (options := self._request_options(name)) is not None
        ]
        if not groups or len(groups) < len(selected) or self._has_several_tensors(selected):
            return ()
        if len(groups) > 1:
            self._check_agreement(dict(zip(selected, groups, strict=True)))
        saved = {k: o.value if isinstance(o, FixedValue) else o for k, o in groups[0].items()}
        if not self._check_options(saved, defaults):
            return None
        # No reference to `context`: a reference cycle would keep the state alive.
        context.value_setters.append(partial(_assign, self.group, groups[0]))
        return [key for key, value in self.group.items() if self._is_absent(key, value, saved)]

    def _is_absent(self, key: str, live: object, saved: Mapping[str, object]) -> bool:
        is_switch = live is None or isinstance(live, bool)
        is_known = key not in saved and key in _torch_options()
        return is_switch and is_known and self._is_option_selected(key)

    def _check_left_out(self, names: Sequence[str], defaults: Mapping[str, object]) -> bool:
        context, fits = self.context, True
        for name in names:
            saved = context.peek_value(name)
            options = saved.value if saved is not None else {}
            if isinstance(options, Mapping):
                # The value of a tensor hyperparameter is not checked, only its presence.
                children = {str(key): context.peek_value(n) for key, n in context.children(name)}
                tensors = {key: child.value if child else None for key, child in children.items()}
                fits = self._check_options({**options, **tensors}, defaults) and fits
                if lost := find_lost_counters(self.optimizer, options, self.group):
                    context.warnings.append(f"{name} is left out, and so are {lost}")
        return fits

    def _has_several_tensors(self, names: Sequence[str]) -> bool:
        """Report tensor hyperparameters of several groups: their values are not read yet."""
        saved = self.context.saved
        tensors = [leaf for name in names for leaf in saved.below(name) if saved.tensor(leaf)]
        if len(names) == 1 or not tensors:
            return False
        self.context.problems.append(
            f"{self.fqn}: its parameters were saved in {' and '.join(names)}, and {tensors[0]} "
            "is a tensor, which may differ between them: group them as they were, or exclude the "
            "groups to keep the current hyperparameters"
        )
        return True

    def _request_options(self, name: str) -> dict[str, Value] | None:
        context = self.context
        # A group with tensors in it was saved as a container.
        container = context.is_container(name)
        live = options_branch(self.group, name) if container else None
        match context.request_subtree(name, live) if container else context.request_value(name):
            case None:
                context.report_mismatch(name, "a parameter group")
                return None
            case NewContainer(kind, items) if is_mapping(kind):
                options = {str(key): item for key, item in items.items()}
            case FixedValue(Mapping() as plain):
                options = {key: FixedValue(value) for key, value in plain.items()}
            case values:
                kind = values.kind if isinstance(values, NewContainer) else type(values()).__name__
                context.problems.append(
                    f"{name}: saved as a {kind}, the state has a parameter group: exclude it, or "
                    "load an optimizer's checkpoint"
                )
                return None
        for key, child in () if container else context.children(name):
            value = read_value(self.group.get(str(key)), child)
            if (tensor := context.request_subtree(child, value)) is not None:
                options[str(key)] = tensor
        return {
            key: o
            for key, o in options.items()
            if key not in LOCAL_KEYS and self._is_option_selected(key)
        }

    def _is_option_selected(self, key: str) -> bool:
        """Return False if a pattern leaves out this hyperparameter of a loaded group."""
        selected = self.context.is_selected
        names = (self.fqn, *self.saved_groups)
        return all(selected(child_name(name, key)) for name in names if selected(name))

    def _check_agreement(self, saved: Mapping[str, Mapping[str, Value]]) -> None:
        """Report plain hyperparameters that differ between saved groups."""
        plain = {name: {key: o() for key, o in options.items()} for name, options in saved.items()}
        (first, options), *further = plain.items()
        source_text = self.context.saved.source_text
        for name, other in further:
            for key in dict.fromkeys((*options, *other)):
                left, right = options.get(key), other.get(key)
                if type(left) is not type(right) or left != right:
                    self._report(
                        f"its parameters were saved in {first}{source_text(first)} and in "
                        f"{name}{source_text(name)}, which differ in "
                        f"{key!r} ({left!r:.100} and {right!r:.100}): group them as they were, "
                        "or exclude the groups to keep the current hyperparameters"
                    )
                    return

    def _check_options(self, saved: Mapping[str, Any], defaults: Mapping[str, object]) -> bool:
        """Report hyperparameters of another optimizer class, or that need state not saved.

        Return True if there are none. With `strict=False` they are accepted. A missing boolean is
        accepted: new versions of torch add some. A boolean that is True here and was saved as False
        may need more state, such as `amsgrad`.
        """
        live = {
            key: self.group[key]
            for key in defaults
            if key in self.group and self._is_option_selected(key)
        }
        absent = [
            key
            for key, value in live.items()
            if key not in saved and not (value is None or isinstance(value, bool))
        ]
        optimizer = self.fqn.rpartition(f".{GROUPS}.")[0]
        as_saved = (
            f"create the optimizer as it was saved, exclude all of it ({optimizer!r}), or load "
            "with strict=False"
        )
        # Only torch's options are foreign: a scheduler or the first step may add other keys.
        foreign = sorted(saved.keys() & _torch_options() - self.group.keys() - _STEP_VARIANTS)
        on = (key for key, value in live.items() if value is True and key not in _STEP_VARIANTS)
        switched = [
            key
            for key in on
            if key in saved and (saved[key] is None or saved[key] is False)
            if may_be_option(self.optimizer, key)
        ]
        if absent:
            self._report_strict(
                f"saved with {', '.join(sorted(saved))}, but without {', '.join(absent)}, which "
                f"the optimizer here has: {as_saved}"
            )
        elif live and foreign:
            self._report_strict(
                f"saved with {', '.join(foreign)}, which the optimizer here does not have: "
                f"{as_saved}"
            )
        elif switched:
            key = switched[0]
            self._report_strict(
                f"saved with {key}={saved[key]}, the optimizer here has {key}=True, for which "
                f"state may not have been saved: {as_saved} to continue as saved"
            )
        return not (absent or (live and foreign) or switched)

    def _report_strict(self, problem: str) -> None:
        if self.context.strict:
            self._report(problem)

    def _report(self, problem: str) -> None:
        self.context.problems.append(f"{self.fqn}: {problem}")


@dataclass(slots=True, eq=False)
class _Conversion:
    """The conversion of a loaded optimizer by its class, after all of its state is placed.

    `absent` are the switches that were not saved, by number of the group. If not `fits`, the user
    loads the state of another class. If not `is_whole`, a part of it is left out.
    """

    fqn: str
    optimizer: OptimizerState
    is_whole: bool = True
    fits: bool = True
    absent: dict[int, Sequence[str]] = field(default_factory=dict)

    def add_group(self, number: int, absent: Sequence[str] | None) -> None:
        self.fits &= absent is not None
        self.absent[number] = absent or ()

    def __call__(self) -> None:
        """Convert the state. State of another class may lack a part that the class converts."""
        lacking = nullcontext() if self.fits else suppress(KeyError)
        with calling_user_code(self.fqn, self.optimizer.optimizer, "__setstate__"), lacking:
            convert_state(self.optimizer, self.absent)


def _assign(group: dict[str, Any], options: Mapping[str, Value]) -> None:
    for key, option in options.items():
        # Tensors of the group were filled in place. Other values are copied: several groups may
        # get the same one.
        value = option()
        group[key] = value if value is group.get(key) else deepcopy(value)


@cache
def _torch_options() -> frozenset[str]:
    """Return the hyperparameters of all of torch's optimizers."""
    classes = (
        cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and torch.optim.Optimizer in cls.__mro__[1:]
    )
    return frozenset(name for cls in classes for name in signature(cls).parameters) - LOCAL_KEYS


def bind_optimizer(context: BindContext, fqn: str, leaf: OptimizerLeaf) -> None:
    """Request an optimizer's state and parameter groups.

    Saved state that the optimizer does not have yet is created. A parameter that was saved without
    any state, as before its first step, loses its state here. All other state that the checkpoint
    lacks is missing. A group gets the hyperparameters that its parameters were saved with. These
    must be equal, and with `strict` they must fit this optimizer's class.
    """
    optimizer, names = leaf.state, context.template.parameters[fqn]
    if context.selected_leaves(fqn) and any(map(is_meta, optimizer.parameters())):
        context.problems.append(
            f"{fqn}: the optimizer has meta parameters, which a load of the module replaces: "
            "materialize the module (`to_empty`) and create the optimizer then"
        )
        return
    state, groups = child_name(fqn, STATE), child_name(fqn, GROUPS)
    # Without tensors, as before the first step, these were saved as one value.
    for name in (fqn, state, groups):
        context.split_value(name)
    # The saved group of each parameter.
    names_of_groups = takewhile(context.has, (child_name(groups, number) for number in count()))
    saved = {param: name for name in names_of_groups for param in context.parameter_names(name)}
    stored = _stored_names(optimizer, names, saved)
    if saved and all(name.isdecimal() for name in saved):
        stored = _names_by_number(context, fqn, optimizer, saved) or stored
    before, restored = len(context.value_setters), len(context.restored)
    conversion = _Conversion(fqn, optimizer)
    classes = subclass_types(optimizer.optimizer)
    outcomes = cache(lambda: elementwise_keys(_saved_shapes(context, optimizer, stored, state)))
    for number, group in enumerate(optimizer.groups):
        params = [stored[id(parameter)] for parameter in group["params"]]
        full = child_name(groups, number)
        # A group without parameters or saved names takes the saved group of the same number.
        saved_groups = (
            dict.fromkeys(saved[n] for n in params if n in saved) if params and saved else [full]
        )
        for hint in _placements(optimizer, group, names, classes, outcomes):
            name = stored[id(hint.parameter)]
            of_state = child_name(state, name)
            context.targets.matcher.resized_names.follow_parameter(
                of_state, names[id(hint.parameter)].stored, hint.parameter
            )
            _note_untied(context, name, saved)
            context.parameter_states.append((id(hint.parameter), of_state))
            if name in saved and not context.has(of_state) and context.saved.is_stepless(of_state):
                _drop_state(context, of_state, optimizer, hint.parameter)
            else:
                conversion.is_whole &= _bind_state(context, of_state, optimizer, hint)
        binding = _GroupBinding(context, full, group, [*saved_groups], optimizer.optimizer)
        absent = binding.bind(optimizer.defaults, (child_name(state, name) for name in params))
        conversion.add_group(number, absent)
    _bind_shared(context, state, optimizer, saved)
    if isinstance(optimizer, FlatOptimizer):
        _bind_flat(context, state, optimizer, stored)
        optimizer = optimizer.real
    further = context.request_entries(fqn, leaf.further)
    context.check_objects(
        fqn,
        "make it before the load, such as by one step with gradients of zero, or exclude it: then "
        "the optimizer starts without it",
    )
    if optimizer.reported is not None and (further or len(context.value_setters) > before):
        _load_reported(context, fqn, optimizer, further)
    elif optimizer.reported is None and conversion.is_whole and len(context.restored) > restored:
        context.conversions.append((fqn, conversion))


def _note_untied(context: BindContext, name: str, saved: Mapping[str, str]) -> None:
    first = None if name in saved else context.saved.first_of_tied(name)
    if first is not None:
        context.assumed.append(
            f"{name} was tied to {first}, and is not tied here: it has no saved optimizer state"
        )


def _placements(
    optimizer: OptimizerState,
    group: Mapping[str, Any],
    names: Mapping[int, ParameterName],
    classes: Mapping[str, type[torch.Tensor]],
    outcomes: Callable[[], Mapping[str, bool]],
) -> Iterator[PlacementHint]:
    """Yield the placement for each parameter of a group whose state is on this rank."""
    on_host = not (group.get("capturable") or group.get("fused"))
    for parameter in filter(optimizer.has_state_here, group["params"]):
        rule_name = names[id(parameter)].rule_name
        yield PlacementHint(parameter, rule_name, on_host, classes, outcomes)


def _saved_shapes(
    context: BindContext, optimizer: OptimizerState, stored: Mapping[int, str], state: str
) -> Iterator[tuple[str, Shape, Shape]]:
    """Yield the key, the shape of the parameter, and the shape of each saved tensor of state."""
    for parameter in optimizer.parameters():
        name = stored[id(parameter)]
        whole = getattr(parameter, "global_shape", parameter.shape)
        record = context.saved.tensor(name)
        shape = tuple(whole) if record is None else record[1].shape
        for key, child in context.children(child_name(state, name)):
            for leaf in (child, *context.saved.below(child)):
                if (tensor := context.saved.tensor(leaf)) is not None:
                    yield str(key), shape, tensor[1].shape


def _bind_flat(
    context: BindContext, state: str, optimizer: FlatOptimizer, stored: Mapping[int, str]
) -> None:
    """Schedule `write_back` of an FSDP1 optimizer.

    Parts of one flat parameter share one state. A load of only some of them is reported.
    """
    for parts in optimizer.parts_in_one_state():
        here = [stored[id(part)] for part in parts]
        lacking = [name for name in here if not context.selected_leaves(child_name(state, name))]
        if lacking and len(lacking) < len(here):
            has = next(name for name in here if name not in lacking)
            context.problems.append(
                f"{state}: FSDP1 has one state for {lacking[0]} and {has} here, but the load has "
                f"state for {has} only: wrap the model with use_orig_params=True, or exclude both"
            )
    context.value_setters.append(optimizer.write_back)


def _stored_names(
    optimizer: OptimizerState, names: Mapping[int, ParameterName], saved: Mapping[str, str]
) -> dict[int, str]:
    """Return the name of each parameter in the checkpoint, by its id().

    Torch's helpers and `dc.Named` may save the names in the module (`0.weight`) instead of those
    in the state (`model.0.weight`).
    """
    parameters = dict.fromkeys(map(id, optimizer.parameters()))
    stored = {key: names[key].stored for key in parameters}
    in_modules = {key: names[key].in_module for key in parameters}
    are_unique = len({*in_modules.values()}) == len(in_modules)
    if saved.keys().isdisjoint(stored.values()) and are_unique:
        return stored if saved.keys().isdisjoint(in_modules.values()) else in_modules
    return stored


def _names_by_number(
    context: BindContext, fqn: str, optimizer: OptimizerState, saved: Mapping[str, str]
) -> dict[int, str]:
    """Match parameters by number, as torch's state dict does, and return the numbers by id().

    If the sizes of the groups differ, report a problem and return {}.
    """
    of_groups: dict[str, list[str]] = {}
    for name, group in saved.items():
        of_groups.setdefault(group, []).append(name)
    live = [len(group["params"]) for group in optimizer.groups]
    if (stored := [len(names) for names in of_groups.values()]) != live:
        context.problems.append(
            f"{fqn}: its parameters were saved by number, in groups of {stored}, and the optimizer "
            f"has groups of {live}: group them as they were, or exclude {fqn!r}"
        )
        return {}
    parameters = [id(parameter) for group in optimizer.groups for parameter in group["params"]]
    return dict(zip(parameters, saved, strict=True))


def _drop_state(
    context: BindContext, fqn: str, optimizer: OptimizerState, parameter: object
) -> None:
    live = [
        key
        for key in optimizer.state.get(parameter, {})
        if context.is_selected(child_name(fqn, key))
    ]
    context.dropped += [child_name(fqn, key) for key in live]

    def drop() -> None:
        state = optimizer.state[parameter]
        for key in live:
            del state[key]
        if not state:
            del optimizer.state[parameter]

    if live:
        context.value_setters.append(drop)


def _bind_state(
    context: BindContext, fqn: str, optimizer: OptimizerState, hint: PlacementHint
) -> bool:
    """Request the state of a parameter; return False if it lacks a part that was saved."""
    parameter = hint.parameter
    owner = hint.rule_name, tuple(parameter.shape)
    live = state_branch(optimizer.state.get(parameter, {}), fqn, owner).children
    context.split_value(fqn)
    children = context.children(fqn)
    matched: Mapping[PathKey, PathKey] = context.match_keys(fqn, [k for k, _ in children], live)
    saved = [(matched.get(key, key), name) for key, name in children]
    values: dict[PathKey, Value] = {}
    for key, name in saved:
        if context.selected_leaves(name) and (
            entry := _request_entry(context, name, key, live.get(key), hint)
        ):
            values[key] = entry
    present = {key for key, _ in saved}
    absent = (child_name(fqn, key) for key in live if key not in present)
    context.missing.update((name, None) for name in absent if context.is_selected(name))

    def assign() -> None:
        entries = {key: value() for key, value in values.items()}
        optimizer.state.setdefault(parameter, {}).update(entries)

    if values:
        context.value_setters.append(assign)
    return not values or present <= {*values, *live}


def _bind_shared(
    context: BindContext, state: str, optimizer: OptimizerState, saved: Mapping[str, str]
) -> None:
    """Request the state that belongs to no parameter. If no state was saved, drop it."""
    live = optimizer.shared()
    # Keys that name a parameter, such as torch's numbers, are not shared state.
    children = context.children(state) if saved else ()
    names = {key: name for key, name in children if str(key) not in saved}
    values: dict[PathKey, Value] = {}
    for key, name in names.items():
        tree = read_value(live[key], name) if key in live else None
        if (value := context.request_subtree(name, tree)) is not None:
            values[key] = value
    for key in live:
        if key in names or not context.is_selected(name := child_name(state, key)):
            continue
        if context.children(state):
            context.missing[name] = None
        else:
            context.dropped.append(name)
            context.value_setters.append(partial(optimizer.state.pop, key))
    if values:
        context.value_setters.append(
            lambda: optimizer.state.update((str(key), value()) for key, value in values.items())
        )


def _request_entry(
    context: BindContext, name: str, key: PathKey, live: Tree | None, hint: PlacementHint
) -> Value | None:
    """Request one entry of a parameter's state. Report a live entry of another kind."""
    if context.saved.has_copies(name):
        on_host = hint.on_host and key == "step"
        return context.request_subtree(name, live, hint.of_entry(key, on_host=on_host))
    if (saved := context.saved.tensor(name)) is None:
        if isinstance(live, TensorLeaf) and not _is_replaceable(context, name, live):
            context.report_mismatch(name, "a tensor")
            return None
        return context.request_subtree(name, live, hint.of_entry(key, on_host=False))
    if isinstance(live, TensorLeaf):
        context.restore(name)
        return FixedValue(context.targets.request_fill(name, live))
    is_number = isinstance(live, PlainLeaf) and type(live.value) in (int, float)
    is_unset = live is None or (isinstance(live, PlainLeaf) and live.value is None)
    if not is_unset and not (is_number and not saved[1].shape):
        context.report_mismatch(name, "something else than a tensor")
        return None
    # As in torch, the step count is in host memory, unless the step is computed on the device.
    on_host = hint.on_host and key == "step"
    return context.request_subtree(name, None, hint.of_entry(key, on_host=on_host))


def _is_replaceable(context: BindContext, name: str, live: TensorLeaf) -> bool:
    """Return True if a saved value takes a tensor's place, as in torch: a number, or None."""
    if (saved := context.peek_value(name)) is None:
        return False
    is_counter = isinstance(live.value, torch.Tensor) and not live.value.ndim
    return saved.value is None or (is_counter and type(saved.value) in (int, float))


def _load_reported(
    context: BindContext, fqn: str, optimizer: OptimizerState, further: Mapping[str, Value]
) -> None:
    """Schedule `load_state_dict` with the optimizer's reported state and the saved values."""

    def load() -> None:
        state = optimizer.state_dict({key: value() for key, value in further.items()})
        with calling_user_code(fqn, optimizer.optimizer, "load_state_dict"):
            optimizer.optimizer.load_state_dict(state)
        with calling_user_code(fqn, optimizer.optimizer, "state_dict"):
            current = reported_state(
                optimizer.optimizer, optimizer.optimizer.state_dict(), live=True
            )
        # Undo casts: torch's `load_state_dict` casts the state of parameters. This has no effect
        # if `state_dict` returns copies.
        current_state = {} if current is None else current.state
        for parameter, entries in optimizer.state.items():
            live = current_state.get(parameter, {})
            for name, value in entries.items() if isinstance(parameter, torch.Tensor) else ():
                if name in live and _is_cast(_dtypes(value), _dtypes(live[name])):
                    live[name] = value

    context.object_loads.append((fqn, load))


def _is_cast(before: Sequence[torch.dtype], after: Sequence[torch.dtype]) -> bool:
    """Return True if the same tensors have other dtypes. A number may have become a tensor."""
    return len(before) == len(after) and before != after


def _dtypes(value: object) -> list[torch.dtype]:
    if isinstance(value, torch.Tensor):
        return [value.dtype]
    return [dtype for item in (container_entries(value) or {}).values() for dtype in _dtypes(item)]
