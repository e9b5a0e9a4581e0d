"""Modules on the loading side: live parameters are filled, meta ones assigned, extra state set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dist_ckpt.core.state.binding.bind_requests import BindContext
from dist_ckpt.core.state.binding.targets.load_values import Value
from dist_ckpt.core.state.modules import ModulePart, ModuleState
from dist_ckpt.core.state.tensors.local_tensors import PLAIN
from dist_ckpt.core.state.tensors.read_tensor import is_meta
from dist_ckpt.core.state.tree.containers import join
from dist_ckpt.core.state.tree.leaves import ModuleLeaf, SubclassLeaf, TensorLeaf
from dist_ckpt.core.state.tree.read_tree import calling_user_code, read_tensor


def bind_module(requests: BindContext, fqn: str, leaf: ModuleLeaf) -> None:
    """Request the values of a module's state dict. Modules are closed."""
    state = leaf.state
    assigned = _bind_live(requests, fqn, state)
    further = {name: tree for name, tree in leaf.children.items() if name not in state.live}
    extras = requests.parts(fqn, further)
    for part in state.parts:
        _assign(requests, fqn, part, {n: v for n, v in assigned.items() if n in part.keys})
        if part.flat is not None:
            requests.effects.append(part.flat.settle)
        _load(requests, fqn, leaf, part, {n: v for n, v in extras.items() if n in part.keys})


def _bind_live(requests: BindContext, fqn: str, state: ModuleState) -> dict[str, object]:
    """Request the live tensors; return the new tensors in place of those on meta."""
    created: dict[int, object] = {}
    assigned: dict[str, object] = {}
    tied = _tied_to_saved(requests, fqn, state)
    for name in (name for name in state.live if name not in tied):
        full, live = join(fqn, name), state.live[name]
        # The live tensor, not that of the state dict: a hook may have copied it.
        own = TensorLeaf(live) if type(live) in PLAIN else read_tensor(live, full)
        if isinstance(own, SubclassLeaf):
            requests.subclass_tensor(full, own)
            continue
        if not requests.takes(full):
            continue
        if not is_meta(live):
            requests.targets.fill(full, own)
            continue
        # Tied parameters stay one object, which exists if another of its names came first.
        own = replace(own, value=created.get(id(live), live))
        assigned[name] = created[id(live)] = requests.targets.fill(full, own)
    for name in tied:
        requests.restored[join(fqn, name)] = None
        if (twin := created.get(id(state.live[name]))) is not None:
            assigned[name] = twin
    return assigned


def _tied_to_saved(requests: BindContext, fqn: str, state: ModuleState) -> set[str]:
    """Return the names of tied tensors that are saved only under another of their names."""
    names: dict[int, list[str]] = {}
    for name, live in state.live.items():
        names.setdefault(id(live), []).append(name)
    if len(names) == len(state.live):
        return set()
    tied: set[str] = set()
    for twins in names.values():
        selected = [name for name in twins if requests.selected(join(fqn, name))]
        lacking = [name for name in selected if not requests.has(join(fqn, name))]
        if any(requests.saved.tensor(join(fqn, name)) for name in selected):
            tied.update(lacking)
    return tied


def _assign(
    requests: BindContext, fqn: str, part: ModulePart, assigned: Mapping[str, object]
) -> None:
    def assign() -> None:
        with calling_user_code(fqn, part.module, "load_state_dict"):
            part.load(assigned, assign=True)

    if assigned:
        requests.assigns.append((fqn, assign))


def _load(
    requests: BindContext,
    fqn: str,
    leaf: ModuleLeaf,
    part: ModulePart,
    extras: Mapping[str, Value],
) -> None:
    """Call `load_state_dict` with values that are not live tensors, or with all if it does more."""
    live = {name: tensor for name, tensor in leaf.state.live.items() if name in part.keys}
    restored = any(join(fqn, name) in requests.restored for name in live)
    whole = part.loads_itself() and (restored or extras)

    def load() -> None:
        # Live tensors are filled already: copying one onto itself does nothing.
        values: dict[str, object] = {}
        values.update((name, live[name]) for name in live if whole and not is_meta(live[name]))
        values.update((name, extra()) for name, extra in extras.items())
        with calling_user_code(fqn, part.module, "load_state_dict"):
            part.load(values)

    if extras or whole:
        requests.loads.append((fqn, load))
