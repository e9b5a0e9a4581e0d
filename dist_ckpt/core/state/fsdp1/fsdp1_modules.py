"""Read modules under FSDP1: this rank's part of each parameter, under the parameter's name.

Torch's `state_dict` of such a module gathers all parameters on every rank. Here no data moves. A
rank's part of a parameter is a `FlatShard` over FSDP1's memory: a save reads it, a load fills it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.state.fsdp1 import fsdp1_private_names
from dist_ckpt.core.state.fsdp1.fsdp1_private_names import FlatParameter, Original
from dist_ckpt.core.state.tree.containers import child_name
from dist_ckpt.core.state.wrappers import FlatShard

# torch's name for the result of `get_extra_state`, in every state dict
EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPart(FlatShard):
    """This rank's part of a parameter that is in a flat parameter of FSDP1."""

    tensor: torch.Tensor
    flat: FlatParameter
    original: Original

    @property
    def shape(self) -> Shape:
        """The shape of the optimizer's parameter with `use_orig_params=True`."""
        return self.original.shape if not self.flat.is_cut else (self.original.numel,)

    @property
    def requires_grad(self) -> bool:
        """True if an optimizer may change the parameter."""
        parameter = self.original.parameter
        return (self.flat.parameter if parameter is None else parameter).requires_grad


@dataclass(frozen=True, slots=True, eq=False)
class FlatModule:
    """A module with flat parameters. `entries` and `live` are as in `ModuleState`.

    `cast` are the buffers that FSDP1 has cast to a lower precision, each with a copy in its first
    precision. The copy is saved and loaded instead of the buffer. `extras` are the modules whose
    `get_extra_state` returned an entry, by the name of the entry.
    """

    entries: Mapping[str, object]
    live: Mapping[str, torch.Tensor | ParameterPart]
    parameters: tuple[FlatParameter, ...]
    cast: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    extras: Mapping[str, nn.Module]

    def parts(self) -> Mapping[int, tuple[ParameterPart, ...]]:
        """Return the parts in each parameter that an optimizer may have, by its id()."""
        by_parameter: dict[int, dict[int, ParameterPart]] = {}
        for value in self.live.values():
            if isinstance(value, ParameterPart):
                parameter = value.original.parameter
                key = id(value.flat.parameter if parameter is None else parameter)
                by_parameter.setdefault(key, {})[id(value)] = value
        return {key: tuple(parts.values()) for key, parts in by_parameter.items()}

    def update_copies(self) -> None:
        """Update FSDP1's copies of parameters and buffers after a load."""
        for buffer, stored in self.cast:
            with torch.no_grad():
                buffer.copy_(stored)
        for parameter in self.parameters:
            parameter.free_gathered()

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Call `set_extra_state` of the module of each entry, as `load_state_dict` does."""
        for name, value in values.items():
            self.extras[name].set_extra_state(value)


def flat_module(module: nn.Module, fqn: str) -> FlatModule | None:
    """Read a module with FSDP1 in it; None without FSDP1. No collectives, no copies.

    Raises TypeError or ValueError, with the remedy, for a module that cannot be read.
    """
    if not fsdp1_private_names.has_fsdp1(module):
        return None
    try:
        parameters, dtypes = (
            fsdp1_private_names.flat_parameters(module),
            fsdp1_private_names.cast_buffers(module),
        )
        return _read(module, tuple(parameters), dtypes)
    except AttributeError as error:
        raise TypeError(
            f"{fqn}: this version of torch keeps FSDP1's shards in another way ({error}): "
            f"{_OTHER_WAYS}"
        ) from error
    except (TypeError, ValueError) as error:
        raise type(error)(f"{fqn}: FullyShardedDataParallel: {error}") from error


def check_not_flattened(value: object, *path: str) -> None:
    """Raise ValueError for FSDP1's flat part of a parameter outside of its module."""
    if fsdp1_private_names.is_flattened(value):
        raise ValueError(
            f"{'.'.join(path)}: a flat part of a parameter of FullyShardedDataParallel: add that "
            "module itself to the state"
        )


_OTHER_WAYS = (
    "use `fully_shard`, or save the result of "
    "`torch.distributed.checkpoint.state_dict.get_state_dict`"
)


def _read(
    module: nn.Module, parameters: tuple[FlatParameter, ...], dtypes: Mapping[int, torch.dtype]
) -> FlatModule:
    parts: dict[int, dict[str, ParameterPart]] = {}
    for flat in parameters:
        for original in flat.originals:
            tensor, shape = original.slice_row(flat.shard), original.shape
            part = ParameterPart(tensor, shape, original.start, flat=flat, original=original)
            for owner, name in original.owners:
                parts.setdefault(id(owner), {})[name] = part
    rows = {id(flat.parameter) for flat in parameters}
    cast = {
        id(buffer): (buffer, buffer.detach().to(dtypes[id(buffer)]))
        for buffer in module.buffers()
        if id(buffer) in dtypes
    }
    entries: dict[str, object] = {}
    live: dict[str, torch.Tensor | ParameterPart] = {}
    extras: dict[str, nn.Module] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        if change := fsdp1_private_names.find_state_dict_change(owner):
            raise TypeError(
                f"{type(owner).__name__} has {change}, and running it would gather all parameters "
                f"on every rank: {_OTHER_WAYS}"
            )
        tensors: Mapping[str, torch.Tensor | ParameterPart] = {
            **fsdp1_private_names.direct_tensors(owner),
            **parts.get(id(owner), {}),
        }
        for key, value in tensors.items():
            for name in (
                ()
                if id(value) in rows
                else fsdp1_private_names.clean_names(module, child_name(prefix, key))
            ):
                entries[name] = live[name] = cast[id(value)][1] if id(value) in cast else value
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            for name in fsdp1_private_names.clean_names(module, child_name(prefix, EXTRA_STATE)):
                extras[name] = owner
                entries[name] = owner.get_extra_state()
    return FlatModule(entries, live, parameters, tuple(cast.values()), extras)
