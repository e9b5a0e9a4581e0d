"""Which file and rank of a checkpoint holds which part of which tensor."""

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
    """One shard of a tensor: `cell` is a box of it, or a range of its elements in row-major order.

    `nbytes` are of its data.
    """

    tensor: str
    cell: Cell
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileContents:
    """One shard file: its size, and of the tensors that were asked for the shards that it holds."""

    name: str
    rank: int
    component: str
    nbytes: int
    num_shards: int
    shards: tuple[ShardPlacement, ...]


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """Who stores what: all shard files, by rank, and how many bytes each rank has stored."""

    path: str
    files: tuple[FileContents, ...]
    nbytes_by_rank: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The bytes of the rank with the most, by the mean of all ranks; 1.0 is even."""
        total = sum(self.nbytes_by_rank)
        return max(self.nbytes_by_rank) * len(self.nbytes_by_rank) / total if total else 1.0


def layout(
    path: str | os.PathLike[str],
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
) -> CheckpointLayout:
    """Return which file and rank holds which part of the chosen tensors, from the index alone.

    Without `include` and `exclude` no shards are listed, for there may be millions: give
    `include="*"` for all. `path` is what `dc.open` takes. Nothing is changed. Raises ValueError for
    a pattern that matches nothing, otherwise as `dc.open`.
    """
    selection = selection_of(include, exclude)
    with OpenCheckpoint.open(path, opener=OPENER) as checkpoint:
        index = checkpoint.index
    names = set() if selection.is_everything else {*checkpoint.select(selection).values()}
    records = {(one.rank, one.component): one for one in index.files}
    files = []
    for rank, components in enumerate(cells_of_ranks(index.catalog)):
        for component, cells in sorted(components.items()):
            if (record := records.get((rank, component))) is None:
                continue  # of another system's files, which are cut otherwise
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
    for one in files:
        nbytes[one.rank] += one.nbytes
    return CheckpointLayout(checkpoint.path, tuple(files), tuple(nbytes))
