"""Which rank of the job writes which files of the average. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.index.index import Index, ObjectsFileRecord
from dist_ckpt.core.planning.plan import FilePlan, FileReceipt, Receipt
from dist_ckpt.core.planning.save.save_planner import cells_of_ranks, items_of_ranks
from dist_ckpt.errors import StorageError


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """What a rank of the job writes of one rank of the checkpoint."""

    plans: tuple[FilePlan, ...]
    objects: tuple[ObjectsFileRecord, ...]


def share_of(
    index: Index, averaged: Collection[str], num_sources: int, *, rank: int, world_size: int
) -> list[RankAssignment]:
    """Return what a rank of the job writes: files as they are in the newest source.

    Whole files, the costliest first, each to the rank that has least to do; all ranks of the job
    come to the same.
    """
    writers = _writers(_costs(index, averaged, num_sources), world_size)
    shares = []
    for number, plans in enumerate(items_of_ranks(index.catalog)):
        own_plans = tuple(plan for plan in plans if writers[plan.name] == rank)
        own_objects = tuple(
            record
            for record in index.objects
            if writers[record.name] == rank and _rank_of(record.name) == number
        )
        if own_plans or own_objects:
            shares.append(RankAssignment(own_plans, own_objects))
    return shares


def _costs(index: Index, averaged: Collection[str], num_sources: int) -> dict[str, int]:
    """Return of each file how many bytes are read for it."""
    costs = {record.name: record.nbytes for record in index.objects}
    for rank, stored in enumerate(cells_of_ranks(index.catalog)):
        for component, cells in stored.items():
            name = filenames.shard_file(index.catalog.components[component].stem, rank)
            costs[name] = sum(
                cell.numel * DTYPES[dtype].itemsize * (num_sources if fqn in averaged else 1)
                for fqn, dtype, _, cell in cells
            )
    return costs


def _writers(costs: dict[str, int], world_size: int) -> dict[str, int]:
    loads = [0] * world_size
    writers = {}
    for name, cost in sorted(costs.items(), key=lambda one: (-one[1], one[0])):
        writers[name] = min(range(world_size), key=lambda rank: (loads[rank], rank))
        loads[writers[name]] += cost
    return writers


def receipts_by_rank(index: Index, receipts: Sequence[Receipt]) -> list[Receipt]:
    """Return what each rank of the checkpoint would report, given what those of the job do.

    StorageError if the objects files are not those of the newest source, which they copy.
    """
    files: list[list[FileReceipt]] = [[] for _ in range(index.catalog.world_size)]
    for file in (file for receipt in receipts for file in receipt.files):
        files[_rank_of(file[0])].append(file)
    copied = {(name, nbytes, digest) for name, nbytes, digest in _objects_in(files)}
    if copied != {(one.name, one.nbytes, one.digest) for one in index.objects}:
        raise StorageError("the objects files are not those of the newest source: try again")
    return [Receipt(tuple(own), (), 0.0) for own in files]


def _objects_in(files: Sequence[Sequence[FileReceipt]]) -> Iterator[tuple[str, int, str]]:
    for name, nbytes, header_nbytes, digest in (file for own in files for file in own):
        if not header_nbytes:
            yield name, nbytes, digest


def _rank_of(name: str) -> int:
    """Return the rank whose file it is; the global objects file is rank 0's."""
    shard = filenames.parse_shard_file(name)
    return shard[1] if shard is not None else filenames.parse_objects_file(name) or 0
