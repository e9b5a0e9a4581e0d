"""Read the tensors of an nn.Module, under names without the prefixes of wrappers.

The names are those of the module's own `state_dict`, without the prefixes of DDP, DataParallel,
torch.compile and activation checkpoints. `get_model_state_dict` returns the same names. If a class
or a hook renames tensors, as Lightning Fabric's wrapper does, they are matched by their memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dist_ckpt.core.runtime.torch_private import has_load_hooks, storage_id, wrapped_child
from dist_ckpt.core.state.fsdp1.fsdp1_modules import FlatModule, ParameterPart, flat_module
from dist_ckpt.core.state.tensors.local_tensors import PLAIN


@dataclass(frozen=True, slots=True, eq=False)
class ModulePart:
    """A module without its wrappers. `keys` are the keys of its state dict, by name.

    `flat` is set if the module has FSDP1's flat parameters.
    """

    module: nn.Module
    keys: Mapping[str, str]
    flat: FlatModule | None = None

    def has_own_load(self) -> bool:
        """Return True if the module overrides `load_state_dict` or has load hooks."""
        if self.flat is not None:
            return False
        overrides = type(self.module).load_state_dict is not nn.Module.load_state_dict
        return overrides or has_load_hooks(self.module)

    def load(self, values: Mapping[str, object], *, assign: bool = False) -> None:
        """Pass values, by name, to the module's `load_state_dict`."""
        if self.flat is not None:
            self.flat.set_extra_state(values)
            return
        load = self.module.load_state_dict
        parameters = inspect.signature(load).parameters
        takes_all = any(option.kind is option.VAR_KEYWORD for option in parameters.values())
        # Not strict: all other names are filled in place, or excluded by the user.
        options = {"strict": False, **({"assign": True} if assign else {})}
        accepted = {name: options[name] for name in options if takes_all or name in parameters}
        load({self.keys[name]: value for name, value in values.items()}, **accepted)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleState:
    """A module, or the parts of one model, and the contents of their state dicts.

    - `entries`: the values that a save stores.
    - `live`: the parameters and persistent buffers of these entries, which a load fills. An entry
      that is not in `live` (extra state, or made by a hook) is loaded by `load_state_dict`.
    - `left_out`: parameters that no entry has, by their names in the module.
    """

    parts: Sequence[ModulePart]
    entries: Mapping[str, object]
    live: Mapping[str, torch.Tensor | ParameterPart]
    left_out: Mapping[str, torch.Tensor]

    def parameters(self) -> dict[str, bool]:
        """Return for each parameter, by name, whether it requires a gradient."""
        return {
            name: tensor.requires_grad
            for name, tensor in self.live.items()
            # `isinstance` of Parameter alone takes ten times as long.
            if type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter | ParameterPart)
        }

    def names_of_parameters(self) -> dict[int, str]:
        """Return the name of each parameter by its id(): the first name of a tied one."""
        names: dict[int, str] = {}
        for name, tensor in (*self.live.items(), *self.left_out.items()):
            if isinstance(tensor, nn.Parameter | ParameterPart):
                names.setdefault(id(tensor), name)
        return names


def flat_state(module: nn.Module, fqn: str) -> ModuleState | None:
    """Read a module with FSDP1 in it, without its `state_dict`; None without FSDP1."""
    module = _innermost(module)
    if (flat := flat_module(module, fqn)) is None:
        return None
    part = ModulePart(module, {name: name for name in flat.entries}, flat)
    return ModuleState((part,), flat.entries, flat.live, {})


def _innermost(module: nn.Module) -> nn.Module:
    while (child := wrapped_child(module)) is not None:
        module = getattr(module, child)
    return module


def module_state(module: nn.Module) -> ModuleState:
    """Read a module. Its `state_dict` is called once; errors of it are not caught."""
    module = _innermost(module)
    prefixes = _prefixes(module)
    state = module.state_dict()
    keys = _map_keys(state, prefixes)
    entries = {name: state[key] for name, key in keys.items()}
    # FSDP2 reshards in `state_dict`, which replaces the parameters. So they are read after it.
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    tensors = {_unwrap_name(name, prefixes): tensor for name, tensor in named}
    with torch.no_grad():  # autograd must not record views of a DTensor's local part
        live = _live_tensors(entries, tensors)
    behind = {id(tensor) for tensor in live.values()}
    left_out = {
        name: tensor
        for name, tensor in tensors.items()
        if id(tensor) not in behind and isinstance(tensor, nn.Parameter)
    }
    return ModuleState((ModulePart(module, keys),), entries, live, left_out)


def merge_states(states: Sequence[ModuleState]) -> ModuleState | None:
    """Merge the parts of one model; None if two parts have the same name, as separate models do."""
    entries: dict[str, object] = {}
    live: dict[str, torch.Tensor | ParameterPart] = {}
    left_out: dict[str, torch.Tensor] = {}
    for state in states:
        shared = state.entries.keys() & entries.keys()
        if any(state.live.get(name) is not live.get(name, name) for name in shared):
            return None
        entries.update(state.entries)
        live.update(state.live)
        left_out.update(state.left_out)
    return ModuleState([part for state in states for part in state.parts], entries, live, left_out)


def _map_keys(state: object, prefixes: Sequence[tuple[str, str]]) -> dict[str, str]:
    if not isinstance(state, Mapping) or not {str}.issuperset(map(type, state)):
        raise TypeError("it returned something else than a mapping with str keys")
    keys = {_unwrap_name(key, prefixes): key for key in state}
    if len(keys) < len(state):
        twice = next(key for key in state if keys[_unwrap_name(key, prefixes)] != key)
        raise ValueError(f"it has {twice!r} once with and once without the prefix of a wrapper")
    return keys


def _prefixes(module: nn.Module) -> list[tuple[str, str]]:
    """Return the prefix of names below each wrapper and its replacement, inner wrappers first."""
    prefixes: list[tuple[str, str]] = []
    for path, part in module.named_modules(remove_duplicate=False):
        if (child := wrapped_child(part)) is not None:
            above = f"{path}." if path else ""
            prefixes.append((f"{above}{child}.", above))
    return prefixes[::-1]


def _unwrap_name(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    for prefix, above in prefixes:
        if name.startswith(prefix):
            name = above + name[len(prefix) :]
    return name


def _live_tensors(
    entries: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return for each entry the module's tensor with the same memory, if any."""
    live: dict[str, torch.Tensor] = {}
    unnamed: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        if not isinstance(entry, torch.Tensor):
            continue
        tensor = tensors.get(name)
        key = None if tensor is None else _memory_key(tensor)
        # A tensor subclass has no memory key: then the name decides.
        if tensor is not None and (key is None or key == _memory_key(entry)):
            live[name] = tensor
        else:
            unnamed[name] = entry
    if not unnamed:
        return live
    by_memory = {key: t for t in tensors.values() if (key := _memory_key(t)) is not None}
    for name, entry in unnamed.items():
        if (key := _memory_key(entry)) in by_memory:
            live[name] = by_memory[key]
    return {name: live[name] for name in entries if name in live}


def _memory_key(tensor: torch.Tensor) -> Hashable | None:
    """Return a key that is equal for equal views of the same memory; None if it has no key."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.is_nested:
        return None
    start = tensor.storage_offset()
    return storage_id(tensor), start, tensor.dtype, tuple(tensor.shape), tensor.stride()
