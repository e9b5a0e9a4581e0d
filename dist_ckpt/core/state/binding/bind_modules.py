"""The loading side of a module: its tensors are filled in place, or loaded by the module itself.

`conversions/` decides. A module that converts its state gets what was saved, in new host memory,
through its `load_state_dict`. All other tensors are filled in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from dist_ckpt.core.state.binding.bind_context import BindContext
from dist_ckpt.core.state.binding.conversions.conversion_decision import ConversionDecision, is_in
from dist_ckpt.core.state.binding.conversions.conversion_plan import (
    PartNames,
    StateCheck,
    decide,
    module_name,
    plan_conversion,
)
from dist_ckpt.core.state.binding.values import Value
from dist_ckpt.core.state.module_tensors import (
    Converter,
    ModulePart,
    ModuleState,
    Rehearsal,
    find_unsaved_meta,
    without_swaps,
)
from dist_ckpt.core.state.tensors.local_tensors import PLAIN
from dist_ckpt.core.state.tensors.locate_tensor import is_meta, materialize
from dist_ckpt.core.state.tree.containers import child_name
from dist_ckpt.core.state.tree.state_tree import (
    ModuleLeaf,
    SubclassLeaf,
    TensorLeaf,
    calling_user_code,
    read_tensor,
)
from dist_ckpt.errors import CheckpointError, IncompatibleError
from dist_ckpt.message_text import listed


@dataclass(frozen=True, slots=True, eq=False)
class _PartStaging:
    """The saved values that one part of a model converts itself.

    `scopes` are the converting modules, `names` the tensors in them, `values` the saved values, and
    `metadata` the saved versions. `check_values` is set if a rehearsal has failed: it gets the
    values after the load.
    """

    scopes: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    values: Mapping[str, Value] = field(default_factory=dict)
    metadata: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    check_values: Callable[[Mapping[str, object]], None] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.names


def bind_module(context: BindContext, fqn: str, leaf: ModuleLeaf) -> None:
    """Request the values of a module's state dict. Only names that the module has are loaded."""
    state = leaf.state
    tied = _tied_to_saved(context, fqn, state)
    converters = [part.converters() for part in state.parts]
    stagings = [
        _plan_staging(context, fqn, part, found, leaf, tied) if found else _PartStaging()
        for part, found in zip(state.parts, converters, strict=True)
    ]
    staged = frozenset[str]().union(*(staging.names for staging in stagings))
    in_place = [name for name in state.live if name not in staged]
    assigned = _bind_live(context, fqn, state, in_place, tied)
    converted = {name for staging in stagings for name in staging.values}
    further = {
        name: tree
        for name, tree in leaf.children.items()
        if name not in state.live and name not in converted
    }
    extras = context.request_entries(fqn, further)
    for extra in extras:
        full = child_name(fqn, extra)
        remedy = "make it before the load, so that get_extra_state() returns it"
        context.check_objects(full, f"{remedy}, or exclude {full!r}")
    for part, found, staging in zip(state.parts, converters, stagings, strict=True):
        if part.flat is not None:
            context.value_setters.append(part.flat.update_copies)
        load = _PartLoad(context, fqn, part, state.live, staging, can_convert=bool(found))
        load.schedule(assigned, extras)
        if any(child_name(fqn, name) in context.restored for name in part.keys):
            was_meta = bool(assigned) or any(map(is_meta, map(state.live.get, staging.names)))
            context.unsaved_meta.append(partial(_find_unsaved_meta, fqn, part, was_meta=was_meta))


def _find_unsaved_meta(fqn: str, part: ModulePart, *, was_meta: bool) -> list[str]:
    names = find_unsaved_meta(part.modules, with_attributes=was_meta)
    return [child_name(fqn, name) for name in names]


def _bind_live(
    context: BindContext, fqn: str, state: ModuleState, names: list[str], tied: Mapping[str, str]
) -> dict[str, object]:
    """Request the live tensors; return the new tensors that replace meta tensors, by name."""
    created: dict[int, object] = {}
    assigned: dict[str, object] = {}
    for name in names:
        if name in tied:
            continue
        full, live = child_name(fqn, name), state.live[name]
        if name in state.hollow and context.is_selected(full):
            context.problems.append(f"{full}: {state.hollow[name]}")
            context.mark_requested(full)
            continue
        # A hook may have copied the tensor in the state dict, so the live tensor is filled.
        leaf = TensorLeaf(live) if type(live) in PLAIN else read_tensor(live, full)
        if isinstance(leaf, SubclassLeaf):
            context.request_subclass(full, leaf)
            continue
        # Tied meta parameters become one new tensor: reuse it under its second name.
        value = _fill_live(context, full, leaf, created.get(id(live)))
        if value is not None and is_meta(live):
            assigned[name] = created[id(live)] = value
    for name in tied:
        context.restored[child_name(fqn, name)] = None
        if (twin := created.get(id(state.live[name]))) is not None:
            assigned[name] = twin
    return assigned


def _fill_live(
    context: BindContext, full: str, leaf: TensorLeaf, twin: object | None
) -> object | None:
    """Request a live tensor; return it or its replacement. None if it is not loaded."""
    if twin is not None:
        leaf = replace(leaf, value=twin)
    if context.saved.has_copies(full):
        if is_meta(leaf.value):
            leaf = replace(leaf, value=materialize(leaf.value))
        return leaf.value if context.request_copy(full, leaf) else None
    return context.targets.request_fill(full, leaf) if context.request_tensor(full) else None


def _tied_to_saved(context: BindContext, fqn: str, state: ModuleState) -> dict[str, str]:
    """Return the names of tied tensors whose value is saved under another name, and that name."""
    names: dict[int, list[str]] = {}
    for name, live in state.live.items():
        names.setdefault(id(live), []).append(name)
    tied: dict[str, str] = {}
    for twins in names.values() if len(names) < len(state.live) else ():
        selected = [name for name in twins if context.is_selected(child_name(fqn, name))]
        saved = [name for name in selected if context.saved.tensor(child_name(fqn, name))]
        if saved:
            missing = (name for name in selected if not context.has(child_name(fqn, name)))
            tied.update(dict.fromkeys(missing, saved[0]))
    return tied


# --- modules that convert their state --------------------------------------------------------


def _plan_staging(
    context: BindContext,
    fqn: str,
    part: ModulePart,
    converters: Mapping[str, Converter],
    leaf: ModuleLeaf,
    tied: Mapping[str, str],
) -> _PartStaging:
    """Find the modules of a part that convert what was saved, and request their values."""
    names = PartNames(context, fqn, part, leaf, tied)
    decision = decide(context, fqn, part, converters, names)
    _report(context, fqn, converters, decision, part)
    plan = plan_conversion(context, fqn, part, names, decision)
    check = StateCheck(context, fqn, part, converters, names, plan)
    context.state_checks.append(check.run)
    if not plan.scopes:
        return _PartStaging()
    if plan.problem:
        context.problems.append(plan.problem)
    known = plan.rehearsal or Rehearsal()
    for name in names.missing & known.missing:
        context.missing[child_name(fqn, name)] = None
    for key, params in names.parameters().items():
        if (origin := known.origins.get(key)) is not None and origin not in params:
            context.moved[child_name(fqn, origin)] = child_name(fqn, params[0])
    values = names.request(plan.scopes, known.unexpected)
    inside = frozenset(name for name in part.keys if is_in(name, plan.scopes))
    after = None if plan.rehearsal else check.warn
    return _PartStaging(plan.scopes, inside, values, plan.metadata, after)


def _report(
    context: BindContext,
    fqn: str,
    converters: Mapping[str, Converter],
    decision: ConversionDecision,
    part: ModulePart,
) -> None:
    """Report what cannot be converted, newer versions, and unknown ones."""

    def text(path: str) -> str:
        metadata = context.saved.module_metadata(module_name(fqn, path)) or {}
        now = part.metadata.get(path, {}).get("version")
        return (
            f"{module_name(fqn, path)}: saved by version {metadata.get('version', 'unknown')} of "
            f"{converters[path].cls}, the state has version {now}"
        )

    context.problems += (
        f"{text(path)}, which converts its state while it is loaded. Its tensors are sharded here, "
        "and a part of a tensor cannot be converted: load the checkpoint into the model before it "
        "is sharded, in one process, save that, and load the new checkpoint"
        for path in decision.refused
    )
    context.warnings += (
        f"{text(path)}, which is older and may not know this form: upgrade the code of the model"
        for path in decision.newer
    )
    if decision.unknown:
        paths = [module_name(fqn, path) for path in decision.unknown]
        context.assumed.append(
            f"{listed(paths)}: the checkpoint has no versions of these modules; their state was "
            "loaded as that of the present version"
        )


# --- calls of load_state_dict ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _PartLoad:
    """The `load_state_dict` calls of one part of a model."""

    context: BindContext
    fqn: str
    part: ModulePart
    live: Mapping[str, object]
    staging: _PartStaging
    can_convert: bool

    def schedule(self, assigned: Mapping[str, object], extras: Mapping[str, Value]) -> None:
        """Schedule the calls.

        The first call assigns the tensors that replace meta tensors. The second passes the values
        that are not live tensors; all values if the class has its own `load_state_dict` or hooks,
        or converts its state. With staging there is only one call.
        """
        context, part = self.context, self.part
        assigned = {name: tensor for name, tensor in assigned.items() if name in part.keys}
        extras = {name: value for name, value in extras.items() if name in part.keys}
        if assigned and not self.staging.scopes:
            context.tensor_setters.append((self.fqn, lambda: self._assign(assigned)))
        restored = any(child_name(self.fqn, name) in context.restored for name in self._names())
        whole = part.has_own_load() and (restored or bool(extras))
        if extras or whole or self.staging.values:
            with_live = whole or self.can_convert
            context.object_loads.append(
                (self.fqn, lambda: self._load(assigned, extras, with_live=with_live))
            )

    def _names(self) -> Iterator[str]:
        return (name for name in self.live if name in self.part.keys)

    def _in_place(self, assigned: Mapping[str, object]) -> dict[str, object]:
        """Return the tensors that are already filled: to copy one onto itself does nothing."""
        return {
            name: assigned.get(name, self.live[name])
            for name in self._names()
            if name not in self.staging and (name in assigned or not is_meta(self.live[name]))
        }

    def _assign(self, assigned: Mapping[str, object]) -> None:
        values = self._in_place(assigned) if self.can_convert else assigned
        with calling_user_code(self.fqn, self.part.module, "load_state_dict"):
            self.part.load(values, assign=True)

    def _load(
        self, assigned: Mapping[str, object], extras: Mapping[str, Value], *, with_live: bool
    ) -> None:
        staging = self.staging
        values = self._in_place(assigned) if with_live else {}
        values.update((name, value()) for name, value in staging.values.items())
        values.update((name, extra()) for name, extra in extras.items())
        # The converted tensors become the parameters of a module on the meta device.
        assign = bool(staging.scopes) and any(is_meta(self.live[name]) for name in self._names())
        metadata = staging.metadata if staging.scopes else None
        try:
            swapping = nullcontext() if staging.scopes else without_swaps()
            with swapping, calling_user_code(self.fqn, self.part.module, "load_state_dict"):
                result = self.part.load(values, metadata, assign=assign)
            if staging.check_values is not None:
                self._check(result)
                staging.check_values(values)
        except CheckpointError as error:
            names = (child_name(self.fqn, name) for name in staging.values)
            error.touched = tuple(sorted({*error.touched, *names}))
            raise

    def _check(self, result: object) -> None:
        """Raise IncompatibleError if a strict load has left names of converted modules out."""
        wrong = [
            *(f"{key} is missing" for key in getattr(result, "missing_keys", ())),
            *(f"{key} is unexpected" for key in getattr(result, "unexpected_keys", ())),
        ]
        selected = [text for text in wrong if is_in(text.partition(" is ")[0], self.staging.scopes)]
        if selected and self.context.strict:
            raise IncompatibleError(
                f"{self.fqn}: load_state_dict has converted the saved state, but "
                f"{listed(selected)}: load with strict=False, or create the model as it was saved"
            )
