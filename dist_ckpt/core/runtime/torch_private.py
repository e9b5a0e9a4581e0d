"""The private names of torch that we use. Those of FSDP1: `state/fsdp1/fsdp1_private_names.py`.

| name                    | from `torch.`                            | for                         |
| ----------------------- | ---------------------------------------- | --------------------------- |
| `StridedShard`          | `distributed.tensor.placement_types`     | placements of FSDP2 over TP |
| `ShardedTensor`         | `distributed._shard.sharded_tensor.api`  | to recognise it as a leaf   |
| `AsyncCollectiveTensor` | `distributed._functional_collectives`    | a local tensor to wait for  |
| `module_fqns`           | `distributed.checkpoint.state_dict`      | the prefixes that it strips |
| `default_store`         | `distributed.distributed_c10d`           | control messages            |
| `group_timeout_s`       | `distributed.ProcessGroup`               | how long training waits     |
| `wrapped_child`         | `_dynamo.eval_frame`, checkpoint_wrapper | wrappers that add a prefix  |
| `has_load_hooks`        | `nn.Module`                              | hooks that follow a load    |
| `drop_load_hooks`       | `nn.Module`                              | ... and their removal       |
| `conversion_of`         | `nn.Module`                              | classes that convert state  |
| `cuts_strided_alike`    | `distributed.tensor.placement_types`     | how this torch cuts         |
| `storage_id`            | `UntypedStorage`                         | tensors on one memory       |
| `local_tensor`          | `distributed.tensor.DTensor`             | its class, without autograd |
| `SAVE_HOOKS`            | `optim.Optimizer`                        | hooks around `state_dict`   |
| `LOAD_HOOKS`            | `optim.Optimizer`                        | ... and `load_state_dict`   |
| `TorchDispatchMode`     | `utils._python_dispatch`                 | to follow copies of tensors |
| `DcpStorageInfo`        | `distributed.checkpoint.filesystem`      | the content of DCP's files  |
| `DCP_VERSION`           | `distributed.checkpoint.filesystem`      | ... and their version       |

`tests/core/runtime/test_torch_private.py` reports names that a new version of torch has moved.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from operator import attrgetter
from typing import Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo as DcpStorageInfo
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DCP_VERSION", "LOAD_HOOKS", "SAVE_HOOKS", "AsyncCollectiveTensor", "DcpStorageInfo"]
__all__ += ["ShardedTensor", "StridedShard", "TorchDispatchMode"]
__all__ += ["cuts_strided_alike", "default_store"]
__all__ += ["conversion_of", "drop_load_hooks", "group_timeout_s", "has_load_hooks"]
__all__ += ["local_tensor", "module_fqns", "storage_id", "wrapped_child"]

# Torch 2.7 wraps this function in a cache, which keeps every module for ever: use it unwrapped.
module_fqns = getattr(_get_fqns, "__wrapped__", _get_fqns)

# None if DCP's folders have no version yet.
DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)

# `to_local` takes ten times as long, which matters with thousands of DTensors.
local_tensor = attrgetter("_local_tensor")

# An optimizer's attributes for hooks around `state_dict` and `load_state_dict`. A wrapper that
# skips torch's constructor lacks some of them.
SAVE_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def wrapped_child(module: nn.Module) -> str | None:
    """Return a wrapper's attribute with its module. None if its class defines `state_dict`."""
    if type(module).state_dict is not nn.Module.state_dict:
        return None
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    if isinstance(module, ActivationWrapper):
        return "_checkpoint_wrapped_module"
    # Before the compiler is imported, which takes seconds, no module is compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return "_orig_mod" if compiler and isinstance(module, compiler.OptimizedModule) else None


def group_timeout_s(group: ProcessGroup) -> float | None:
    """Return the timeout of a group's collectives, the longest of its backends; None if unknown."""
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return max(backend.options._timeout.total_seconds() for backend in backends)
    except (AttributeError, RuntimeError, ValueError):
        return None


def has_load_hooks(module: nn.Module) -> bool:
    """Return True if a module has hooks that run after `load_state_dict`."""
    return bool(module._load_state_dict_post_hooks)


def drop_load_hooks(module: nn.Module) -> None:
    """Remove the hooks of a module and its parts that run after `load_state_dict`."""
    for part in module.modules():
        part._load_state_dict_post_hooks.clear()


def conversion_of(module: nn.Module) -> Literal["any", "names"] | None:
    """Return how a module may convert its own state in a load, without its parts; None if not.

    Torch's own layers and hooks convert only state with other names than those of today, such as a
    BatchNorm without `num_batches_tracked`. Wrappers of parallel training convert nothing.
    """
    load = type(module)._load_from_state_dict
    if load is nn.Module._load_from_state_dict and not module._load_state_dict_pre_hooks:
        return None
    converters: list[object] = [] if load is nn.Module._load_from_state_dict else [load]
    hooks = module._load_state_dict_pre_hooks.values()
    converters += [getattr(hook, "hook", hook) for hook in hooks]
    homes = [_home(converter) for converter in converters]
    homes = [home for home in homes if not home.startswith("torch.distributed.")]
    if not homes:
        return None
    return "names" if all(home.startswith("torch.nn.") for home in homes) else "any"


def _home(converter: object) -> str:
    """Return the module of a function, or of the class of another callable."""
    while isinstance(converter, partial):
        converter = converter.func
    return str(getattr(converter, "__module__", None) or type(converter).__module__)


@cache
def cuts_strided_alike() -> bool:
    """Return True if this torch splits an uneven strided shard as the newest versions do.

    Torch 2.7 refuses such a shard. Torch 2.8 to 2.10 split it in a way that FSDP2 never used.
    """
    split = StridedShard(0, split_factor=2)._split_tensor
    try:
        parts, _ = split(torch.arange(8), 3, with_padding=False)
    except AssertionError:
        return False
    return [part.tolist() for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7], []]


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that identifies the tensor's storage among all live ones, meta ones too."""
    return int(tensor.untyped_storage()._cdata)
