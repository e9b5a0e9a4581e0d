"""The private names of torch that we depend on; `state/fsdp1/private_names.py` has FSDP1's.

| name                    | from `torch.`                            | for                         |
| ----------------------- | ---------------------------------------- | --------------------------- |
| `StridedShard`          | `distributed.tensor.placement_types`     | what FSDP2 over TP makes    |
| `ShardedTensor`         | `distributed._shard.sharded_tensor.api`  | to recognise it as a leaf   |
| `AsyncCollectiveTensor` | `distributed._functional_collectives`    | a local tensor to wait for  |
| `module_fqns`           | `distributed.checkpoint.state_dict`      | the prefixes that it strips |
| `default_store`         | `distributed.distributed_c10d`           | control messages            |
| `wrapped_child`         | `_dynamo.eval_frame`, checkpoint_wrapper | wrappers that add a prefix  |
| `has_load_hooks`        | `nn.Module`                              | hooks that follow a load    |
| `cuts_strided_alike`    | `distributed.tensor.placement_types`     | how this torch cuts         |
| `storage_id`            | `UntypedStorage`                         | tensors on one memory       |
| `local_tensor`          | `distributed.tensor.DTensor`             | its class, without autograd |
| `SAVE_HOOKS`            | `optim.Optimizer`                        | hooks around `state_dict`   |
| `LOAD_HOOKS`            | `optim.Optimizer`                        | ... and `load_state_dict`   |
| `DcpStorageInfo`        | `distributed.checkpoint.filesystem`      | what DCP's files say        |
| `DCP_VERSION`           | `distributed.checkpoint.filesystem`      | ... and of which version    |

`tests/core/runtime/test_torch_private.py` says which of them a new version of torch has moved.
"""

from __future__ import annotations

import sys
from functools import cache
from operator import attrgetter

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo as DcpStorageInfo
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "DCP_VERSION",
    "LOAD_HOOKS",
    "SAVE_HOOKS",
    "AsyncCollectiveTensor",
    "DcpStorageInfo",
    "ShardedTensor",
    "StridedShard",
    "cuts_strided_alike",
    "default_store",
    "has_load_hooks",
    "local_tensor",
    "module_fqns",
    "storage_id",
    "wrapped_child",
]

# Without the cache that it has in 2.7, which keeps every module for ever.
module_fqns = getattr(_get_fqns, "__wrapped__", _get_fqns)

# None where DCP's folders do not say it yet.
DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)

# `to_local` takes ten times as long, which counts where there are thousands of DTensors.
local_tensor = attrgetter("_local_tensor")

# The attributes in which an optimizer keeps its hooks around `state_dict`, and `load_state_dict`.
# Of one that wraps another without torch's own constructor some are missing.
SAVE_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def wrapped_child(module: nn.Module) -> str | None:
    """Return the attribute in which a wrapper has its module; None for any other module.

    A class that overrides `state_dict` decides itself what its names are.
    """
    if type(module).state_dict is not nn.Module.state_dict:
        return None
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    if isinstance(module, ActivationWrapper):
        return "_checkpoint_wrapped_module"
    # Nothing is compiled where nobody has imported the compiler, which takes seconds.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return "_orig_mod" if compiler and isinstance(module, compiler.OptimizedModule) else None


def has_load_hooks(module: nn.Module) -> bool:
    """Say whether anything is called after `load_state_dict` of a module or a part of it."""
    return any(part._load_state_dict_post_hooks for part in module.modules())


@cache
def cuts_strided_alike() -> bool:
    """Say whether torch cuts what a strided shard does not divide as it defines that today.

    2.7 refuses to, 2.8 to 2.10 cut in another way, which was not FSDP2's even then.
    """
    split = StridedShard(0, split_factor=2)._split_tensor
    try:
        parts, _ = split(torch.arange(8), 3, with_padding=False)
    except AssertionError:
        return False
    return [part.tolist() for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7], []]


def storage_id(tensor: torch.Tensor) -> int:
    """Return what tells the tensor's storage from all others that are alive, meta ones too."""
    return int(tensor.untyped_storage()._cdata)
