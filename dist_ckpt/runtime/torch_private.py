"""The private names of torch that we depend on, and nothing else.

| name                    | from `torch.distributed.`       | for                         |
| ----------------------- | ------------------------------- | --------------------------- |
| `StridedShard`          | `tensor.placement_types`        | what FSDP2 over TP makes    |
| `ShardedTensor`         | `_shard.sharded_tensor.api`     | to recognise it as a leaf   |
| `AsyncCollectiveTensor` | `_functional_collectives`       | a local tensor to wait for  |
| `module_fqns`           | `checkpoint.state_dict`         | the prefixes that it strips |
| `default_store`         | `distributed_c10d`              | control messages            |

`tests/runtime/test_torch_private.py` says which of them a new version of torch has moved.
"""

from __future__ import annotations

from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import _get_fqns as module_fqns
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["AsyncCollectiveTensor", "ShardedTensor", "StridedShard", "default_store", "module_fqns"]
