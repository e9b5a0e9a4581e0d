"""Parameter groups on the loading side: hyperparameters come back by the parameters' names.

A group takes those that its parameters were saved with, in whatever group they were then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any

import torch

from dist_ckpt.core.state.binding.bind_requests import BindContext
from dist_ckpt.core.state.binding.targets.load_values import ConstantValue, NewContainer, Value
from dist_ckpt.core.state.optimizers.named_optimizers import LOCAL_KEYS, options_branch
from dist_ckpt.core.state.optimizers.optimizer_state import GROUPS
from dist_ckpt.core.state.tree.containers import is_mapping, join
from dist_ckpt.core.state.tree.read_tree import read_value

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
