"""Read the parameters of `FullyShardedDataParallel` (FSDP1) from its private names.

| of             | name                                   | for                                    |
| -------------- | -------------------------------------- | -------------------------------------- |
| the wrapper    | `_handle`                              | its flat parameter, if it has one      |
| the wrapper    | `_buffer_name_to_orig_dtype`           | the buffers that `buffer_dtype` cast   |
| the handle     | `flat_param`                           | the parameters in one row              |
| the handle     | `uses_sharded_strategy`                | whether each rank has a part of it     |
| the handle     | `_training_state`                      | whether it is gathered now             |
| the handle     | `_unsharded_flat_param_for_skipped_views` | whether a forward left it gathered  |
| the handle     | `reshard`, `post_reshard`              | to free the gathered parameter         |
| the handle     | `_prefetched`                          | the same                               |
| flat parameter | `_local_shard`                         | this rank's part, from the first step  |
| flat parameter | `_full_param_padded`                   | the gathered parameter                 |
| flat parameter | `_full_prec_full_param_padded`         | the same, in full precision            |
| flat parameter | `_params`, `_param_infos`, `_shapes`   | which parameters are in it             |
| flat parameter | `_shared_param_infos`                  | other names of them                    |
| flat parameter | `_shard_param_infos`                   | which elements of each are here        |
| flat parameter | `_param_extensions`                    | whether one is a DTensor's local part  |
| flat parameter | `_contiguities`                        | whether it is in row-major order       |
| a parameter    | `_fsdp_flattened`                      | whether it is a flat one, or in one    |
| torch          | `fsdp._common_utils.clean_tensor_name` | the prefixes of wrappers               |
| any module     | `_non_persistent_buffers_set`          | buffers outside the state dict         |
| any module     | `_modules`                             | its children                           |
| any module     | `_save_to_state_dict`                  | changes of the state dict              |
| any module     | `_state_dict_hooks`                    | the same                               |
| any module     | `_state_dict_pre_hooks`                | the same                               |

`tests/core/state/test_fsdp1_private_names.py` reports names that a new version of torch has moved.
A missing name raises AttributeError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name

from dist_ckpt.core.runtime.torch_private import module_fqns


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """A parameter of the user's model, and its elements on this rank.

    `owners` are the modules that have the parameter, with its name there; a tied one has several.
    The rank has `numel` elements: from `start` on in the parameter, in row-major order, and from
    `offset` on in the rank's shard. `parameter` is the optimizer's parameter; None if the optimizer
    has the flat parameter.
    """

    owners: tuple[tuple[nn.Module, str], ...]
    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int
    parameter: nn.Parameter | None

    def slice_row(self, row: torch.Tensor) -> torch.Tensor:
        """Return the parameter's elements in a tensor of the same shape as the shard."""
        return row[self.offset : self.offset + self.numel]


@dataclass(frozen=True, slots=True, eq=False)
class FlatParameter:
    """Several parameters in one row, of which this rank has a padded `shard`.

    Optimizers step on the shard, which has full precision. An offloaded shard is in host memory.
    The memory of the shard never moves. If `is_cut` is False, every rank has all elements.
    """

    parameter: nn.Parameter
    shard: torch.Tensor
    is_cut: bool
    originals: tuple[Original, ...]
    handle: Any

    def free_gathered(self) -> None:
        """Free the gathered parameter: the next forward would use its old values."""
        flat = self.handle.flat_param
        if not self.is_cut or not hasattr(flat, "_local_shard"):
            return
        self.handle.reshard(free_unsharded_flat_param=True)
        self.handle.post_reshard()
        self.handle._prefetched = False
        # `reshard` above frees only one of these two, depending on the module's mode.
        for name in ("_full_param_padded", "_full_prec_full_param_padded"):
            if hasattr(flat, name):
                getattr(flat, name).untyped_storage().resize_(0)


def has_fsdp1(module: nn.Module) -> bool:
    """Return True if FSDP1 has wrapped a module or one in it."""
    # Every save checks every module, and `modules()` takes several times as long as this loop.
    waiting: list[nn.Module | None] = [module]
    while waiting:
        if (part := waiting.pop()) is not None:
            if isinstance(part, FullyShardedDataParallel):
                return True
            waiting.extend(part._modules.values())
    return False


def direct_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors in a module's state dict, without those of its children."""
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    left_out = module._non_persistent_buffers_set
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **{name: buffer for name, buffer in buffers if name not in left_out},
    }


def clean_names(module: nn.Module, own_name: str) -> set[str]:
    """Return all names of a tensor in a module, without the prefixes of wrappers."""
    # Torch does not remove FSDP1's prefix inside an activation checkpoint wrapper.
    return {clean_tensor_name(name) for name in module_fqns(module, own_name)}


def clean_path(path: str) -> str:
    """Return the path of a module without the prefixes of FSDP1 and of activation checkpoints."""
    return str(clean_tensor_name(f"{path}.")).removesuffix(".") if path else ""


def find_state_dict_change(module: nn.Module) -> str | None:
    """Return a description of user code that changes a module's state dict; None without any."""
    for name in ("state_dict", "_save_to_state_dict"):
        if getattr(type(module), name) is not getattr(nn.Module, name):
            return f"its own `{name}`"
    for hook in (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()):
        if not str(getattr(hook, "__module__", None)).startswith("torch."):
            return f"the hook {getattr(hook, '__qualname__', hook)} on its state dict"
    return None


def is_flattened(value: object) -> bool:
    """Return True if a parameter is a flat one, or a view of one."""
    return bool(getattr(value, "_fsdp_flattened", False))


def flat_parameters(module: nn.Module) -> list[FlatParameter]:
    """Return the flat parameters in a module.

    Raises ValueError if a parameter is gathered at the moment, or not in FSDP1's memory. Raises
    TypeError for a parameter whose elements are not in row-major order.
    """
    return [_flat_parameter(part._handle) for part in _wrappers(module) if part._handle is not None]


def cast_buffers(module: nn.Module) -> Mapping[int, torch.dtype]:
    """Return the dtypes of buffers before FSDP1 has cast them, by the buffer's id()."""
    originals: dict[int, torch.dtype] = {}
    for part in _wrappers(module):
        if part.mixed_precision.buffer_dtype is not None:
            dtypes = part._buffer_name_to_orig_dtype
            for name, buffer in part.named_buffers():
                dtype = dtypes.get(clean_tensor_name(name), buffer.dtype)
                if dtype != buffer.dtype:
                    originals[id(buffer)] = dtype
    return originals


def _wrappers(module: nn.Module) -> Iterator[Any]:
    return (part for part in module.modules() if isinstance(part, FullyShardedDataParallel))


def _flat_parameter(handle: Any) -> FlatParameter:
    flat = handle.flat_param
    if handle._training_state.name != "IDLE":
        raise ValueError(
            "it is gathered at the moment: call between steps, outside of `summon_full_params`, "
            "forward and backward"
        )
    # Until the first forward the flat parameter is the shard itself.
    shard = getattr(flat, "_local_shard", flat).detach()
    originals = tuple(_originals(flat))
    if shard.ndim != 1 or any(part.offset + part.numel > len(shard) for part in originals):
        raise ValueError(
            f"a flat parameter has a shard of shape {tuple(shard.shape)} here, which is shorter "
            "than FSDP1's records of it: do not replace its parameters"
        )
    if handle._unsharded_flat_param_for_skipped_views is None:
        for original in originals:
            _check_memory(original, shard)
    return FlatParameter(flat, shard, bool(handle.uses_sharded_strategy), originals, handle)


def _originals(flat: Any) -> Iterator[Original]:
    tied: dict[tuple[int, str], list[tuple[nn.Module, str]]] = {}
    for shared in flat._shared_param_infos:
        first = id(shared.prim_module), shared.prim_param_name
        tied.setdefault(first, []).append((shared.module, shared.param_name))
    # Versions of torch without this record always keep elements in row-major order.
    contiguous = getattr(flat, "_contiguities", [True] * len(flat._shapes))
    for number, info in enumerate(flat._param_infos):
        if flat._param_extensions[number] is not None:
            raise TypeError(
                f"{info.param_name} of {info.module_name!r} is a DTensor inside of FSDP1: use "
                "`fully_shard` over tensor parallelism"
            )
        if not contiguous[number]:
            raise TypeError(
                f"{info.param_name} of {info.module_name!r} is not contiguous (channels_last?), "
                "and FSDP1 keeps its elements in the order of memory: make it contiguous before "
                "it is wrapped, or use `fully_shard`"
            )
        here, owner = flat._shard_param_infos[number], (info.module, info.param_name)
        yield Original(
            owners=(owner, *tied.get((id(info.module), info.param_name), ())),
            shape=tuple(flat._shapes[number]),
            start=here.intra_param_start_idx if here.in_shard else 0,
            offset=here.offset_in_shard if here.in_shard else 0,
            numel=here.numel_in_shard if here.in_shard else 0,
            parameter=flat._params[number] if flat._params is not None else None,
        )


def _check_memory(original: Original, shard: torch.Tensor) -> None:
    """Raise ValueError for a parameter outside the shard: FSDP1 copies it in the next forward."""
    parameter = original.parameter
    if parameter is None or not original.numel:
        return
    here = original.slice_row(shard)
    if (parameter.data_ptr(), parameter.numel()) != (here.data_ptr(), original.numel):
        raise ValueError(
            f"{original.owners[0][1]} of shape {original.shape} has memory outside FSDP1's shard "
            "(`.data = ...`): copy into the parameter instead, or run a forward first"
        )
