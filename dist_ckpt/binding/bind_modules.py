"""Modules on the loading side: live parameters are filled, meta ones assigned, extra state set."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dist_ckpt.binding.requests import Contents, Deferred, Requests
from dist_ckpt.state.containers import join
from dist_ckpt.state.tensors import is_meta
from dist_ckpt.state.tree import ModuleLeaf, TensorLeaf, users_code


def bind_module(requests: Requests, fqn: str, leaf: ModuleLeaf) -> None:
    """Ask for what a module's state dict holds. Modules are closed."""
    state = leaf.state
    made: dict[int, tuple[str, object]] = {}
    assigned: dict[str, object] = {}
    for name, live in state.live.items():
        full = join(fqn, name)
        if not requests.takes(full):
            continue
        if not is_meta(live):
            # The live tensor, not what the state dict returned: a hook may have copied that.
            requests.targets.fill(full, TensorLeaf(live))
            continue
        if id(live) not in made:
            made[id(live)] = full, requests.targets.fill(full, TensorLeaf(live))
        # Tied parameters stay one object.
        first, assigned[state.raw[name]] = made[id(live)]
        requests.targets.check_tied(first, full)
    if assigned:
        requests.effects.append(lambda _: _load(state.module, assigned, assign=True))
    _bind_extras(requests, fqn, leaf)


def _bind_extras(requests: Requests, fqn: str, leaf: ModuleLeaf) -> None:
    extras: dict[str, Deferred] = {}
    for name, tree in leaf.extras.items():
        full = join(fqn, name)
        if not requests.has(full):
            if requests.selected(full):
                requests.missing[full] = None
        elif (get := requests.subtree(full, tree)) is not None:
            extras[leaf.state.raw.get(name, name)] = get

    def load(contents: Contents) -> None:
        values = {name: get(contents) for name, get in extras.items()}
        with users_code(fqn, leaf.state.module, "load_state_dict"):
            _load(leaf.state.module, values, assign=False)

    if extras:
        requests.loads.append((fqn, load))


def _load(module: nn.Module, values: Mapping[str, object], *, assign: bool) -> None:
    # Not strict: the rest of the module is filled in place, or was left out by the user.
    module.load_state_dict(dict(values), strict=False, assign=assign)
