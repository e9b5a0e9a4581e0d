"""Read the tensors of an nn.Module, under names without the prefixes of wrappers.

The names are those of the module's own `state_dict`, without the prefixes of DDP, DataParallel,
torch.compile and activation checkpoints. `get_model_state_dict` returns the same names. If a class
or a hook renames tensors, as Lightning Fabric's wrapper does, they are matched by their memory.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dist_ckpt.core.planning.module_versions import state_dict_metadata
from dist_ckpt.core.planning.name_selection import names_above
from dist_ckpt.core.runtime.torch_private import (
    TorchDispatchMode,
    conversion_of,
    drop_load_hooks,
    has_load_hooks,
    storage_id,
    wrapped_child,
)
from dist_ckpt.core.state.fsdp1 import fsdp1_private_names
from dist_ckpt.core.state.fsdp1.fsdp1_modules import FlatModule, ParameterPart, flat_module
from dist_ckpt.core.state.tensors.hollow_tensors import find_hollow
from dist_ckpt.core.state.tensors.local_tensors import PLAIN, class_name
from dist_ckpt.core.state.tensors.locate_tensor import is_meta
from dist_ckpt.core.state.tree.containers import child_name

# Modules with their paths in the outermost one. A module that is shared has several.
NamedModules = Sequence[tuple[str, nn.Module]]


def named_modules(module: nn.Module) -> NamedModules:
    """Return a module, and all modules in it."""
    return [*module.named_modules(remove_duplicate=False)]


@dataclass(frozen=True, slots=True)
class Converter:
    """A module of class `cls` that may convert its state while it is loaded.

    With `by_names` it converts only state with other names. `overrides_load` is True for a root
    with its own `load_state_dict`.
    """

    cls: str
    by_names: bool = False
    overrides_load: bool = False


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The missing and unexpected names that `load_state_dict` will report.

    `origins` has the name of the saved tensor whose value a parameter gets unchanged, by its id().
    """

    missing: frozenset[str] = frozenset()
    unexpected: frozenset[str] = frozenset()
    origins: Mapping[int, str] = field(default_factory=dict)

    @property
    def rest(self) -> frozenset[str]:
        """All names that the load will leave out."""
        return self.missing | self.unexpected


@dataclass(frozen=True, slots=True, eq=False)
class ModulePart:
    """A module without its wrappers.

    `keys` are the keys of its state dict, by name. `metadata` is the state dict's `_metadata`, by
    the paths of modules without the prefixes of wrappers, and `paths` are the paths with them.
    `modules` has all modules in it, by their own paths. `flat` is set if the module has FSDP1's
    flat parameters.
    """

    module: nn.Module
    keys: Mapping[str, str]
    metadata: Mapping[str, Mapping[str, object]]
    paths: Mapping[str, str]
    modules: NamedModules
    flat: FlatModule | None = None

    def converters(self) -> Mapping[str, Converter]:
        """Return the modules that may convert their state while they are loaded, by path."""
        found: dict[str, Converter] = {}
        kinds = [(key, part, kind) for key, part in self.modules if (kind := conversion_of(part))]
        paths = {key: path for path, key in self.paths.items()} if kinds else {}
        for key, part, kind in kinds:
            # A class may leave its own prefix out of the keys, as Lightning Fabric's does.
            path = paths.get(key, paths.get(key.partition(".")[2], ""))
            found.setdefault(path, Converter(class_name(part), by_names=kind == "names"))
        if self.flat is None and _overrides_load(self.module):
            found[""] = Converter(class_name(self.module), overrides_load=True)
        return found

    def has_own_load(self) -> bool:
        """Return True if the module overrides `load_state_dict`, or has hooks that follow it."""
        return self.flat is None and has_own_load(self.module, self.modules)

    def key_of(self, name: str) -> str:
        """Return the key of a name in the state dict, with the prefixes of wrappers."""
        if name in self.keys:
            return self.keys[name]
        above = next((up for up in names_above(name) if up in self.paths), "")
        return child_name(self.paths[above], name[len(above) :].lstrip(".")) if above else name

    def load(
        self,
        values: Mapping[str, object],
        metadata: Mapping[str, Mapping[str, object]] | None = None,
        *,
        assign: bool = False,
    ) -> object:
        """Pass values, by name, to the module's `load_state_dict`; return its result.

        `metadata` has the versions of the values, by the paths of modules: None for those of the
        module. Each call gets a new copy, because torch writes into it.
        """
        if self.flat is not None:
            self.flat.set_extra_state(values)
            return None
        load = self.module.load_state_dict
        parameters = inspect.signature(load).parameters
        takes_all = any(option.kind is option.VAR_KEYWORD for option in parameters.values())
        # Not strict: all other names are filled in place, or excluded by the user.
        options = {"strict": False, **({"assign": True} if assign else {})}
        accepted = {name: options[name] for name in options if takes_all or name in parameters}
        state = OrderedDict((self.key_of(name), value) for name, value in values.items())
        versions = self.metadata if metadata is None else metadata
        state._metadata = deepcopy({self.path_of(p): {**of} for p, of in versions.items()})  # type: ignore[attr-defined]
        return load(state, **accepted)

    def path_of(self, path: str) -> str:
        """Return the path of a module with the prefixes of wrappers."""
        return self.paths[path] if path in self.paths else self.key_of(path)

    def rehearse(
        self, values: Mapping[str, object], metadata: Mapping[str, Mapping[str, object]]
    ) -> Rehearsal:
        """Load meta tensors into a copy of the module on the meta device.

        The module is not changed. Hooks that follow a load are not called. Raises any error of a
        module that cannot be copied, or that converts only tensors with data.
        """
        tensors = (*self.module.parameters(), *self.module.buffers())
        memo: dict[int, object] = {id(tensor): _on_meta(tensor) for tensor in tensors}
        module = deepcopy(self.module, memo)
        drop_load_hooks(module)
        sources = {n: value for n, value in values.items() if isinstance(value, torch.Tensor)}
        with warnings.catch_warnings(), _OriginTracker(sources) as tracker:
            # Torch warns of tensors with data that a class makes for its meta parameters.
            warnings.simplefilter("ignore")
            result = replace(self, module=module).load(values, metadata)
        missing, unexpected = result.missing_keys, result.unexpected_keys  # type: ignore[attr-defined]
        names = {key: name for name, key in self.keys.items()}
        names |= {self.key_of(name): name for name in values}
        return Rehearsal(
            frozenset(names.get(key, key) for key in missing),
            frozenset(names.get(key, key) for key in unexpected),
            {
                id(parameter): origin
                for parameter, copied in _pair_parameters(self.module, module)
                if (origin := tracker.origin(copied)) is not None
            },
        )


@dataclass(frozen=True, slots=True, eq=False)
class ModuleState:
    """A module, or the parts of one model, and the contents of their state dicts.

    - `entries`: the values that a save stores.
    - `live`: the parameters and persistent buffers of these entries, which a load fills. An entry
      that is not in `live` (extra state, or made by a hook) is loaded by `load_state_dict`.
    - `left_out`: parameters that no entry has, by their names in the module.
    - `hollow`: the reasons why tensors of `live` have no value of their own.
    """

    parts: Sequence[ModulePart]
    entries: Mapping[str, object]
    live: Mapping[str, torch.Tensor | ParameterPart]
    left_out: Mapping[str, torch.Tensor]
    hollow: Mapping[str, str] = field(default_factory=dict)

    def metadata(self) -> dict[str, Mapping[str, object]]:
        """Return the `_metadata` of the state dicts, by the paths of modules without wrappers."""
        return {path: module for part in self.parts for path, module in part.metadata.items()}

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
    modules = named_modules(module)
    unwrapped, paths = _read_metadata(modules, None, _prefixes(modules))
    metadata = {fsdp1_private_names.clean_path(path): of for path, of in unwrapped.items()}
    paths = {fsdp1_private_names.clean_path(path): key for path, key in paths.items()}
    part = ModulePart(module, {name: name for name in flat.entries}, metadata, paths, modules, flat)
    return ModuleState((part,), flat.entries, flat.live, {})


@contextmanager
def without_swaps() -> Iterator[None]:
    """Let `load_state_dict` copy tensors onto themselves, not swap them: DDP refers to them."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def has_own_load(module: nn.Module, modules: NamedModules) -> bool:
    """Return True if a module overrides `load_state_dict`, or has hooks that follow it."""
    return _overrides_load(module) or any(has_load_hooks(part) for _, part in modules)


def _overrides_load(module: nn.Module) -> bool:
    return type(module).load_state_dict is not nn.Module.load_state_dict


def find_unsaved_meta(modules: NamedModules, *, with_attributes: bool) -> list[str]:
    """Return the names of meta tensors that are in no state dict: those of a RoPE, for example.

    They are buffers with `persistent=False`. With `with_attributes` tensors count that are plain
    attributes of a module.
    """
    found: dict[int, str] = {}
    for path, part in modules:
        if not part._non_persistent_buffers_set and not with_attributes:
            continue
        tensors = {name: part._buffers.get(name) for name in part._non_persistent_buffers_set}
        for name, value in {**tensors, **(vars(part) if with_attributes else {})}.items():
            if isinstance(value, torch.Tensor) and is_meta(value):
                found.setdefault(id(value), child_name(path, name))
    prefixes = _prefixes(modules) if found else ()
    return sorted(_unwrap_name(name, prefixes) for name in found.values())


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor.detach(), device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty


def _pair_parameters(
    module: nn.Module, copied: nn.Module
) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield the parameters of a module, and those with the same names in its copy."""
    copies = dict(copied.named_parameters(remove_duplicate=False))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in copies:
            yield parameter, copies[name]


def _innermost(module: nn.Module) -> nn.Module:
    while (child := wrapped_child(module)) is not None:
        module = getattr(module, child)
    return module


def module_state(module: nn.Module) -> ModuleState:
    """Read a module. Its `state_dict` is called once; errors of it are not caught."""
    module = _innermost(module)
    modules = named_modules(module)
    prefixes = _prefixes(modules)
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
    part = ModulePart(module, keys, *_read_metadata(modules, state, prefixes), modules)
    return ModuleState((part,), entries, live, left_out, find_hollow(modules, live))


def merge_states(states: Sequence[ModuleState]) -> ModuleState | None:
    """Merge the parts of one model; None if two parts have the same name, as separate models do."""
    entries: dict[str, object] = {}
    live: dict[str, torch.Tensor | ParameterPart] = {}
    left_out: dict[str, torch.Tensor] = {}
    hollow: dict[str, str] = {}
    for state in states:
        shared = state.entries.keys() & entries.keys()
        if any(state.live.get(name) is not live.get(name, name) for name in shared):
            return None
        entries.update(state.entries)
        live.update(state.live)
        left_out.update(state.left_out)
        hollow.update(state.hollow)
    parts = [part for state in states for part in state.parts]
    return ModuleState(parts, entries, live, left_out, hollow)


def _map_keys(state: object, prefixes: Sequence[tuple[str, str]]) -> dict[str, str]:
    if not isinstance(state, Mapping) or not {str}.issuperset(map(type, state)):
        raise TypeError("it returned something else than a mapping with str keys")
    keys = {_unwrap_name(key, prefixes): key for key in state}
    if len(keys) < len(state):
        twice = next(key for key in state if keys[_unwrap_name(key, prefixes)] != key)
        raise ValueError(f"it has {twice!r} once with and once without the prefix of a wrapper")
    return keys


def _read_metadata(
    modules: NamedModules, state: object, prefixes: Sequence[tuple[str, str]]
) -> tuple[Mapping[str, Mapping[str, object]], Mapping[str, str]]:
    """Return the versions of a module's state dict, or of its modules if that has none."""
    if (metadata := state_dict_metadata(state)) is None:
        metadata = {path: {"version": part._version} for path, part in modules}
    if not prefixes:
        return metadata, dict(zip(metadata, metadata, strict=True))
    # A wrapper and its module become one path: the module, which is below, counts.
    paths = {_unwrap_name(f"{path}.", prefixes)[:-1] if path else "": path for path in metadata}
    return {path: metadata[key] for path, key in paths.items()}, paths


def _prefixes(modules: NamedModules) -> list[tuple[str, str]]:
    """Return the prefix of names below each wrapper and its replacement, inner wrappers first."""
    prefixes: list[tuple[str, str]] = []
    for path, part in modules:
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


_COPIES = ("aten::clone", "aten::_to_copy")


class _OriginTracker(TorchDispatchMode):
    """Find the tensors that have the value of one of `sources`, which have names.

    A copy has it, in any dtype. A view with another shape or other strides does not.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive = [*sources.values()]  # a new storage must not get the id of an old one
        # The names of views of a storage, by its number.
        self._names: dict[int, dict[Hashable, str]] = {}
        for name, tensor in sources.items():
            self._names[storage_id(tensor)] = {_memory_key(tensor): name}

    def origin(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the source whose value a tensor has; None if there is none."""
        key = _memory_key(tensor)
        return None if key is None else self._names.get(storage_id(tensor), {}).get(key)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an operator, and record what becomes of values."""
        call: Callable[..., Any] = func
        result = call(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in _COPIES:
            self._record(result, args[0])
        elif name == "aten::copy_":
            self._record(result, args[1])
        elif name.endswith("_") and args and isinstance(args[0], torch.Tensor):
            self._record(args[0], None)
        return result

    def _record(self, target: torch.Tensor, source: torch.Tensor | None) -> None:
        """Record that a tensor has been written, with the value of another one or a new value."""
        is_copy = source is not None and source.shape == target.shape
        origin = self.origin(source) if source is not None and is_copy else None
        if (key := _memory_key(target)) is not None:
            self._alive.append(target)
            self._names[storage_id(target)] = {} if origin is None else {key: origin}
