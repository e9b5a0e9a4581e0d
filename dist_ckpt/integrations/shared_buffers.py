"""Buffers of a module in DDP: made alike before a save, as its next forward would."""

from __future__ import annotations

from torch import nn
from torch.distributed import broadcast, get_global_rank


def hand_out_buffers(model: object) -> None:
    """Give all ranks rank 0's buffers where DDP does so at each forward. Collective with DDP.

    Between, BatchNorm changes them by the rank's own data, and ranks that differ cannot be saved.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel) or not model.broadcast_buffers:
        return
    source = get_global_rank(model.process_group, 0)
    for name, buffer in model.module.named_buffers():
        if name not in model.parameters_to_ignore:
            broadcast(buffer, src=source, group=model.process_group)
