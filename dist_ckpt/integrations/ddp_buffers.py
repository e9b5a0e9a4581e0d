"""Buffers of a module in DDP: made alike before a save, as its next forward would.

Between, BatchNorm changes them by the rank's own data, and ranks that differ cannot be saved.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.distributed import ProcessGroup, broadcast


def broadcast_module_buffers(model: object) -> None:
    """Give all ranks rank 0's buffers where DDP does so at each forward. Collective with DDP."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and model.broadcast_buffers:
        broadcast_inner_buffers(model.module, model.parameters_to_ignore, group=model.process_group)


def broadcast_inner_buffers(
    module: nn.Module, ignored: Collection[str] = (), *, group: ProcessGroup | None = None
) -> None:
    """Give all ranks of a group the first's buffers of a module that DDP holds. Collective."""
    for name, buffer in module.named_buffers():
        if name not in ignored:
            broadcast(buffer, group=group, group_src=0)
