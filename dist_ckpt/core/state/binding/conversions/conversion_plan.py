"""Plan how modules convert saved state: the names that they get, and a rehearsal of the load."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn

from dist_ckpt.core.planning.module_versions import modules_above
from dist_ckpt.core.state.binding.bind_context import BindContext
from dist_ckpt.core.state.binding.conversions.conversion_decision import (
    ConversionDecision,
    decide_conversion,
    is_in,
)
from dist_ckpt.core.state.binding.values import Value
from dist_ckpt.core.state.module_tensors import Converter, ModulePart, Rehearsal
from dist_ckpt.core.state.tensors.local_tensors import PLAIN, dtype_name, torch_dtype
from dist_ckpt.core.state.tree.containers import child_name
from dist_ckpt.core.state.tree.state_tree import ModuleLeaf, TensorLeaf, calling_user_code
from dist_ckpt.errors import CheckpointError
from dist_ckpt.message_text import listed


@dataclass(frozen=True, slots=True, eq=False)
class ConversionPlan:
    """The modules of a part that convert saved state, by their paths.

    `metadata` has the versions that they get. `rehearsal` is None if it failed; `problem` is the
    reason, if a load will fail too. `cannot` are modules that would convert, but are sharded.
    """

    scopes: frozenset[str] = frozenset()
    metadata: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    rehearsal: Rehearsal | None = None
    problem: str = ""
    cannot: tuple[str, ...] = ()


def decide(
    context: BindContext,
    fqn: str,
    part: ModulePart,
    converters: Mapping[str, Converter],
    names: PartNames,
) -> ConversionDecision:
    """Decide which modules of a part convert, of those that have any of `names`."""
    return decide_conversion(
        {path: c for path, c in converters.items() if names.are_restored(path)},
        part.metadata,
        lambda path: context.saved.module_metadata(module_name(fqn, path)),
        mismatches=names.mismatches,
        cut=names.cut,
    )


def plan_conversion(
    context: BindContext, fqn: str, part: ModulePart, names: PartNames, decision: ConversionDecision
) -> ConversionPlan:
    """Rehearse a load, and return the modules that convert: those of which it is useful."""
    scopes = decision.staged | decision.renaming
    if not scopes:
        return ConversionPlan(cannot=decision.refused)
    metadata = _metadata(context, fqn, part, scopes)
    rehearsal, problem = _rehearse(fqn, part, names.rehearsed(scopes), metadata)
    useful = decision.staged | names.useful(decision.renaming, rehearsal)
    if useful and useful != scopes:
        metadata = _metadata(context, fqn, part, useful)
        rehearsal, problem = _rehearse(fqn, part, names.rehearsed(useful), metadata)
    if not useful:
        return ConversionPlan(cannot=decision.refused)
    return ConversionPlan(useful, metadata, rehearsal, problem, decision.refused)


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
        is_sure = isinstance(error.__cause__, KeyError)
        if not is_sure and "Error(s) in loading state_dict" not in str(error):
            return None, ""
        return None, (
            f"{fqn}: the module cannot convert the saved state: {' '.join(str(error).split())}. "
            "Create the model as it was saved, or exclude the names"
        )


def module_name(fqn: str, path: str) -> str:
    """Return the name of a module in the state, by its path in the model `fqn`."""
    return child_name(fqn, path) if path else fqn


def _metadata(
    context: BindContext, fqn: str, part: ModulePart, scopes: frozenset[str]
) -> dict[str, Mapping[str, object]]:
    """Return the saved versions of the modules in `scopes`, and the live ones of the others."""
    saved = context.saved.model_metadata(fqn)
    metadata = {**part.metadata}
    for path in dict.fromkeys((*part.metadata, *saved)):
        of_module = context.saved.module_metadata(module_name(fqn, path))
        if is_in(path, scopes) and of_module is not None:
            metadata[path] = of_module
    return metadata


class PartNames:
    """The saved names of one part of a model, compared with those of its state dict."""

    def __init__(
        self,
        context: BindContext,
        fqn: str,
        part: ModulePart,
        leaf: ModuleLeaf,
        tied: Mapping[str, str],
        *,
        is_whole: bool = False,
    ) -> None:
        self._context, self._fqn, self._tied = context, fqn, tied
        self._arguments = context, fqn, part, leaf, tied
        live = leaf.state.live
        self._live = {name: live[name] for name in part.keys if name in live}
        start = len(fqn) + 1 if fqn else 0
        every = [*context.saved.below(fqn)]
        below = every if is_whole else [name for name in every if context.is_selected(name)]
        self.is_partial = len(below) < len(every)
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
        wanted = (n for n in self._live if is_whole or context.is_selected(child_name(fqn, n)))
        self.missing = frozenset(
            name for name in wanted if name not in tied and not context.has(child_name(fqn, name))
        )
        self.mismatches = self.missing.union(
            self._further, filter(self._has_other_shape, self._saved)
        )
        self._parents = {"", *modules_above((*self._saved, *self._further))}

    def whole(self) -> PartNames:
        """Return these names without a selection."""
        return PartNames(*self._arguments, is_whole=True) if self.is_partial else self

    def parameters(self) -> dict[int, list[str]]:
        """Return the names of each parameter, by its id()."""
        names: dict[int, list[str]] = {}
        for name, tensor in self._live.items():
            if isinstance(tensor, nn.Parameter):
                names.setdefault(id(tensor), []).append(name)
        return names

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


@dataclass(frozen=True, slots=True, eq=False)
class StateCheck:
    """Compare the state that optimizers load with the conversions of one part of a model.

    A module converts its parameters, but not their moments, which keep the saved form.
    """

    context: BindContext
    fqn: str
    part: ModulePart
    converters: Mapping[str, Converter]
    names: PartNames
    plan: ConversionPlan

    def run(self) -> None:
        """Report the state of converted parameters, also of those that are not loaded."""
        if not (states := self._loaded_states()):
            return
        names, plan = self.names.whole(), self.plan
        if names is not self.names:
            decision = decide(self.context, self.fqn, self.part, self.converters, names)
            plan = plan_conversion(self.context, self.fqn, self.part, names, decision)
            scopes = plan.cannot if plan.rehearsal else (*plan.scopes, *plan.cannot)
            self._add_warnings([state for _, params, state in states if _any_in(params, scopes)])
        if plan.rehearsal is None:
            return
        origins = plan.rehearsal.origins
        converted = {
            state: params[0]
            for key, params, state in states
            if _any_in(params, plan.scopes) and not self._fits(params, state, origins.get(key))
        }
        if converted:
            self.context.problems.append(self._problem(converted))

    def warn(self, values: Mapping[str, object]) -> None:
        """Warn of the state of parameters that a load has changed, if no rehearsal was possible."""
        now = dict(self.part.module.named_parameters(remove_duplicate=False))
        same = {
            name
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
            and (parameter := now.get(self.part.key_of(name))) is not None
            and value.shape == parameter.shape
            and torch.equal(value.to(parameter), parameter)
        }
        self._add_warnings(
            state
            for _, params, state in self._loaded_states()
            if same.isdisjoint(params) and not values.keys().isdisjoint(params)
        )

    def _loaded_states(self) -> list[tuple[int, list[str], str]]:
        """Return the id() and names of each parameter for which state is loaded, and its name."""
        parameters = self.names.parameters()
        return [
            (key, parameters[key], state)
            for key, state in self.context.parameter_states
            if key in parameters and self._moments(state)
        ]

    def _moments(self, state: str) -> list[str]:
        """Return the loaded tensors of a state, without scalars and what the user has converted."""
        saved = self.context.saved
        return [
            leaf
            for leaf in self.context.selected_leaves(state)
            if (tensor := saved.tensor(leaf)) is not None
            and prod(tensor[1].shape) > 1
            and tensor[0] not in saved.derived
        ]

    def _fits(self, params: Sequence[str], state: str, origin: str | None) -> bool:
        """Return True if a parameter gets the saved value that the state belongs to."""
        if not any(state.endswith(f".{name}") for name in params):
            return origin is not None  # torch matches the state by number
        names = (child_name(self.fqn, name) for name in params)
        return origin in params or not any(map(self.context.saved.tensor, names))

    def _problem(self, converted: Mapping[str, str]) -> str:
        """Return the error text for states, by the names of their parameters."""
        (state, name), names = next(iter(converted.items())), listed([*converted])
        (moment, *_) = self._moments(state)
        return (
            f"{names}: {child_name(self.fqn, name)} is converted by its class while it is loaded, "
            "and its optimizer state keeps the saved form, which has another meaning: exclude "
            f"{names} to begin without, or convert the state too, such as "
            f"rename={{{moment!r}: [dc.Transpose(), {moment!r}]}}"
        )

    def _add_warnings(self, states: Iterable[str]) -> None:
        if names := [*states]:
            self.context.warnings.append(
                f"{listed(names)}: the class of the model may have converted the parameters of "
                "this optimizer state, which keeps the saved form: if it has, exclude the state"
            )


def _any_in(names: Sequence[str], modules: Collection[str]) -> bool:
    return any(is_in(name, modules) for name in names)
