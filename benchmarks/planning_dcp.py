"""What DCP's coordinator does for a save, for simulated ranks: the plans that it would be sent.

That is: unpickle the local plans of all ranks, `create_global_plan`, unpickle what they wrote,
build the metadata and pickle it. To pickle and scatter the global plans is left out.
"""

from __future__ import annotations

import pickle  # noqa: TID251  (what DCP sends and stores)
import tempfile
import time
from math import prod

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dist_ckpt.core.format.geometry import Region, Shape
from dist_ckpt.core.planning.plan import Inventory
from dist_ckpt.core.planning.tensor_views import Whole, compute_cells


def coordinate(inventory: Inventory, world_size: int) -> dict[str, float]:
    """Return the seconds of each step; every rank holds what `inventory` says."""
    plans = [pickle.dumps(_local_plan(inventory, rank)) for rank in range(world_size)]
    planner = DefaultSavePlanner()
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder, sync_files=False)
        start = time.process_time()
        local_plans = [pickle.loads(plan) for plan in plans]
        seconds["unpickle plans"] = time.process_time() - start
        start = time.process_time()
        global_plans, metadata = planner.create_global_plan(local_plans)
        seconds["global plan"] = time.process_time() - start
        results = [pickle.dumps(_results(plan, rank)) for rank, plan in enumerate(global_plans)]
        start = time.process_time()
        writer.finish(metadata, [pickle.loads(result) for result in results])
        seconds["metadata"] = time.process_time() - start
    return seconds


def _local_plan(inventory: Inventory, rank: int) -> SavePlan:
    properties = TensorProperties.create_from_tensor(torch.empty(0))
    items = []
    for entry in inventory.tensors:
        view = inventory.views[entry.view]
        kind = WriteItemType.TENSOR if isinstance(view, Whole) else WriteItemType.SHARD
        for cell in compute_cells(view, rank, entry.shape):
            assert isinstance(cell, Region)
            offset, shape = torch.Size(cell.offset), torch.Size(cell.shape)
            data = TensorWriteData(
                ChunkStorageMetadata(offset, shape), properties, torch.Size(entry.shape)
            )
            items.append(WriteItem(MetadataIndex(entry.fqn, offset), kind, tensor_data=data))
    items += [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO) for fqn in inventory.values]
    # How the nested state was flattened; every rank sends it.
    names = (*(entry.fqn for entry in inventory.tensors), *inventory.values)
    return SavePlan(items, planner_data={name: tuple(name.split(".", 1)) for name in names})


def _results(plan: SavePlan, rank: int) -> list[WriteResult]:
    results, start = [], 0
    for item in plan.items:
        shape: Shape = tuple(item.tensor_data.chunk.sizes) if item.tensor_data else (100,)
        info = _StorageInfo(f"__{rank}_0.distcp", start, 4 * prod(shape))
        results.append(WriteResult(item.index, info.length, info))
        start += info.length
    return results
