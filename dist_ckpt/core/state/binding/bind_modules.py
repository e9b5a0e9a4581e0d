"""The loading side of a module: its tensors are filled in place, or loaded by the module itself.

`conversions.py` decides. A module that converts its state gets what was saved, in new host memory,
through its `load_state_dict`. All other tensors are filled in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from dist_ckpt.core.planning.module_versions import modules_above
from dist_ckpt.core.state.binding.bind_context import BindContext
from dist_ckpt.core.state.binding.conversions import ConversionDecision, decide_conversion, is_in
from dist_ckpt.core.state.binding.values import Value
from dist_ckpt.core.state.module_tensors import (
    Converter,
    ModulePart,
    ModuleState,
    Rehearsal,
    find_unsaved_meta,
    without_swaps,
)
from dist_ckpt.core.state.tensors.local_tensors import PLAIN, dtype_name, torch_dtype
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
    `metadata` the saved versions. `is_sure` is True if a rehearsal has found what is missing.
    """

    scopes: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    values: Mapping[str, Value] = field(default_factory=dict)
    metadata: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    is_sure: bool = True

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
    saved = context.saved
    names = _PartNames(context, fqn, part, leaf, tied)
    decision = decide_conversion(
        {path: c for path, c in converters.items() if names.are_restored(path)},
        part.metadata,
        lambda path: saved.module_metadata(_module_name(fqn, path)),
        mismatches=names.mismatches,
        cut=names.cut,
    )
    _report(context, fqn, converters, decision, part)
    scopes = decision.staged | decision.renaming
    if not scopes:
        return _PartStaging()
    metadata = _metadata(context, fqn, part, scopes)
    rehearsal, problem = _rehearse(fqn, part, names.rehearsed(scopes), metadata)
    useful = decision.staged | names.useful(decision.renaming, rehearsal)
    if not useful:
        return _PartStaging()
    if useful != scopes:
        scopes, metadata = useful, _metadata(context, fqn, part, useful)
        rehearsal, problem = _rehearse(fqn, part, names.rehearsed(scopes), metadata)
    if problem:
        context.problems.append(problem)
    known = rehearsal or Rehearsal()
    for name in names.missing & known.missing:
        context.missing[child_name(fqn, name)] = None
    values = names.request(scopes, known.unexpected)
    inside = frozenset(name for name in part.keys if is_in(name, scopes))
    return _PartStaging(scopes, inside, values, metadata, is_sure=rehearsal is not None)


def _rehearse(
    fqn: str,
    part: ModulePart,
    values: Mapping[str, object],
    metadata: Mapping[str, Mapping[str, object]],
) -> tuple[Rehearsal | None, str]:
    """Return the result of a rehearsal, None if it fails, and the reason if a load will fail too.

    A class may convert only tensors with data, or may not be copied: then the load will show it.
    """
    try:
        with calling_user_code(fqn, part.module, "load_state_dict"):
            return part.rehearse(values, metadata), ""
    except CheckpointError as error:
        if "Error(s) in loading state_dict" not in str(error):
            return None, ""
        return None, (
            f"{fqn}: the module cannot convert the saved state: {' '.join(str(error).split())}. "
            "Create the model as it was saved, or exclude the names"
        )


def _module_name(fqn: str, path: str) -> str:
    return child_name(fqn, path) if path else fqn


def _metadata(
    context: BindContext, fqn: str, part: ModulePart, scopes: frozenset[str]
) -> dict[str, Mapping[str, object]]:
    """Return the saved versions of the modules in `scopes`, and the live ones of the others."""
    saved = context.saved.model_metadata(fqn)
    metadata = {**part.metadata}
    for path in dict.fromkeys((*part.metadata, *saved)):
        of_module = context.saved.module_metadata(_module_name(fqn, path))
        if is_in(path, scopes) and of_module is not None:
            metadata[path] = of_module
    return metadata


def _report(
    context: BindContext,
    fqn: str,
    converters: Mapping[str, Converter],
    decision: ConversionDecision,
    part: ModulePart,
) -> None:
    """Report what cannot be converted, newer versions, and unknown ones."""

    def text(path: str) -> str:
        metadata = context.saved.module_metadata(_module_name(fqn, path)) or {}
        now = part.metadata.get(path, {}).get("version")
        return (
            f"{_module_name(fqn, path)}: saved by version {metadata.get('version', 'unknown')} of "
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
        paths = [_module_name(fqn, path) for path in decision.unknown]
        context.assumed.append(
            f"{listed(paths)}: the checkpoint has no versions of modules; the state was loaded as "
            "one of the present version"
        )


class _PartNames:
    """The saved names of one part of a model, compared with those of its state dict."""

    def __init__(
        self,
        context: BindContext,
        fqn: str,
        part: ModulePart,
        leaf: ModuleLeaf,
        tied: Mapping[str, str],
    ) -> None:
        self._context, self._fqn, self._tied = context, fqn, tied
        live = leaf.state.live
        self._live = {name: live[name] for name in part.keys if name in live}
        start = len(fqn) + 1 if fqn else 0
        below = (name for name in context.saved.below(fqn) if context.is_selected(name))
        saved, entries = [name[start:] for name in below], leaf.state.entries
        self._saved = [name for name in saved if name in self._live]
        # An entry with parts, such as an extra state, has names below its own.
        self._further = [name for name in saved if not is_in(name, entries)]
        self._whole = {
            name: tensor
            for name, tensor in self._live.items()
            if isinstance(tensor, torch.Tensor) and self._is_whole(child_name(fqn, name), tensor)
        }
        self.cut = frozenset(self._live.keys() - self._whole)
        wanted = (name for name in self._live if context.is_selected(child_name(fqn, name)))
        self.missing = frozenset(
            name for name in wanted if name not in tied and not context.has(child_name(fqn, name))
        )
        self.mismatches = self.missing.union(
            self._further, filter(self._has_other_shape, self._saved)
        )
        self._parents = {"", *modules_above((*self._saved, *self._further))}

    def are_restored(self, path: str) -> bool:
        """Return True if anything that is loaded was saved in a module."""
        return path in self._parents

    def useful(self, renaming: frozenset[str], rehearsal: Rehearsal | None) -> frozenset[str]:
        """Return the modules that load names which do not fit: in a strict load all of them.

        The names of the others are reported as missing or unexpected.
        """
        if rehearsal is None:
            return frozenset()
        rest = rehearsal.rest

        def is_useful(path: str) -> bool:
            left = {name for name in rest if is_in(name, (path,))}
            return (
                not left
                if self._context.strict
                else not self.mismatches
                <= rest.union(name for name in self.mismatches if not is_in(name, (path,)))
            )

        return frozenset(filter(is_useful, renaming))

    def rehearsed(self, scopes: frozenset[str]) -> dict[str, object]:
        """Return a meta tensor for each name that the part loads; a saved one in `scopes`."""
        values: dict[str, object] = {
            name: torch.empty_like(tensor.detach(), device="meta")
            for name, tensor in self._whole.items()
            if not is_in(name, scopes)
        }
        for name, source in self._staged(scopes):
            if (saved := self._context.saved.tensor(child_name(self._fqn, source))) is not None:
                dtype = torch_dtype(saved[1].dtype)
                values[name] = torch.empty(saved[1].shape, dtype=dtype, device="meta")
        return values

    def request(self, scopes: frozenset[str], unexpected: frozenset[str]) -> dict[str, Value]:
        """Request the saved values of the names in `scopes`."""
        context, values = self._context, dict[str, Value]()
        for name, source in self._staged(scopes):
            full = child_name(self._fqn, source)
            value: Value | None = values.get(source)
            if value is None and context.saved.tensor(full) is None:
                value = context.peek_value(full)
            elif value is None:
                value = context.targets.request_whole(full)
                if name in self._whole and not self._has_other_shape(name):
                    context.targets.check_dtype(full, dtype_name(self._whole[name].dtype, full))
            if value is not None:
                values[name] = value
                if name not in unexpected:
                    context.restore(full)
                    context.restored[child_name(self._fqn, name)] = None
        return values

    def _staged(self, scopes: frozenset[str]) -> Iterator[tuple[str, str]]:
        """Yield each name in `scopes`, and the saved name that has its value."""
        for name in (*self._saved, *self._further):
            if is_in(name, scopes):
                yield name, name
        for name, source in self._tied.items():
            if name in self._live and is_in(name, scopes):
                yield name, source

    def _is_whole(self, full: str, tensor: torch.Tensor) -> bool:
        """Return True if this rank has the whole tensor in plain memory of torch."""
        if type(tensor) not in PLAIN:
            return False
        rules = self._context.template.rules
        return rules is None or rules.view(full, TensorLeaf(tensor), tuple(tensor.shape)) is None

    def _has_other_shape(self, name: str) -> bool:
        saved = self._context.saved.tensor(child_name(self._fqn, name))
        if saved is None or name not in self._whole:
            return False
        return saved[1].shape != tuple(self._whole[name].shape)


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
            if staging.scopes and not staging.is_sure:
                self._check(result)
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
