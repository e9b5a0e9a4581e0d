"""What an nn.Module holds, under the names that `get_model_state_dict` gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from dist_ckpt.runtime.torch_private import module_fqns


@dataclass(frozen=True, slots=True, eq=False)
class ModuleState:
    """A module and what its state dict holds.

    `entries` are what a save stores. `live` are the parameters and persistent buffers behind
    them, which a load fills; an entry that is not in `live` (extra state, what a hook adds) goes
    back through `load_state_dict`. `raw` are the module's own names, prefixes of wrappers
    included.
    """

    module: nn.Module
    entries: Mapping[str, object]
    live: Mapping[str, torch.Tensor]
    raw: Mapping[str, str]

    def names_of_parameters(self) -> dict[int, str]:
        """Return the name of each parameter by its id(): of tied ones, the first."""
        names: dict[int, str] = {}
        for name, tensor in self.live.items():
            if isinstance(tensor, nn.Parameter):
                names.setdefault(id(tensor), name)
        return names


def module_state(module: nn.Module, fqn: str) -> ModuleState:
    """Read a module. Its `state_dict` is called once. Raises TypeError if torch cannot name it."""
    try:
        entries = get_model_state_dict(module)
    except (AssertionError, AttributeError, RuntimeError) as error:
        raise TypeError(
            f"{fqn}: torch's get_model_state_dict does not work for this "
            f"{type(module).__name__} ({error}): put a mapping of its tensors into the state, "
            "such as its state_dict()"
        ) from error
    # The state dict above has put sharded parameters back in place (FSDP2 reshards), so the live
    # ones are read after it.
    named = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    live, raw = {}, {}
    for own_name, tensor in named.items():
        for name in module_fqns(module, own_name):
            raw[name] = own_name
            if name in entries:
                live[name] = tensor
    for prefix, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            own_name = f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE
            raw.update(dict.fromkeys(module_fqns(module, own_name), own_name))
    order = {name: live[name] for name in entries if name in live}
    return ModuleState(module, entries, order, raw)


# torch's name of what `get_extra_state` returns, in every state dict
_EXTRA_STATE = "_extra_state"
