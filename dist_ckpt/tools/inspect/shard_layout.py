"""`dc.layout`: the file and rank of each part of each tensor of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Cell
from dist_ckpt.core.planning.save.save_planner import cells_of_ranks
from dist_ckpt.core.planning.selection import selection_of
from dist_ckpt.openers import OPENER


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """One shard of a tensor, with `nbytes` of data.

    `cell` is a box of the tensor, or a range of its elements in row-major order.
    """

    tensor: str
    cell: Cell
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileContents:
    """One shard file, with its shards of the selected tensors."""

    name: str
    rank: int
    component: str
    nbytes: int
    num_shards: int
    shards: tuple[ShardPlacement, ...]


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """All shard files, by rank, and the bytes that each rank stores."""

    path: str
    files: tuple[FileContents, ...]
    nbytes_by_rank: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The most bytes of a rank, divided by the mean of all ranks; 1.0 is even."""
        total = sum(self.nbytes_by_rank)
        return max(self.nbytes_by_rank) * len(self.nbytes_by_rank) / total if total else 1.0


def layout(
    path: str | os.PathLike[str],
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
) -> CheckpointLayout:
    """Return the file and rank of each part of the selected tensors. Only the index is read.

    Without `include` and `exclude` no shards are listed, as there may be millions: give
    `include="*"` for all. `path` is as for `dc.open`. Raises ValueError for a pattern that matches
    nothing, otherwise as `dc.open`.
    """
    selection = selection_of(include, exclude)
    with OpenCheckpoint.open(path, opener=OPENER) as checkpoint:
        index = checkpoint.index
    names = set() if selection.is_everything else {*checkpoint.select(selection).values()}
    records = {(record.rank, record.component): record for record in index.files}
    files = []
    for rank, components in enumerate(cells_of_ranks(index.catalog)):
        for component, cells in sorted(components.items()):
            if (record := records.get((rank, component))) is None:
                continue  # files of another system are split differently
            shards = (
                ShardPlacement(fqn, cell, cell.numel * DTYPES[dtype].itemsize)
                for fqn, dtype, _, cell in cells
                if fqn in names
            )
            files.append(
                FileContents(
                    name=index.file_name(record),
                    rank=rank,
                    component=index.catalog.components[component].name,
                    nbytes=record.nbytes,
                    num_shards=len(cells),
                    shards=tuple(shards),
                )
            )
    nbytes = [0] * index.catalog.world_size
    for file in files:
        nbytes[file.rank] += file.nbytes
    return CheckpointLayout(checkpoint.path, tuple(files), tuple(nbytes))
