"""What a rank holds of a state that is saved: its inventory, and what it stores by a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from msgspec import structs

from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.plain_codec import encode_value
from dist_ckpt.core.planning.plan import (
    FilePlan,
    Inventory,
    ReplicaDigests,
    ReplicaGroup,
    SavePlan,
    TensorEntry,
)
from dist_ckpt.core.planning.save.save_planner import (
    HeldCells,
    Origin,
    held_cells,
    items_of,
    numbered,
    origin_of,
    replica_groups_of,
)
from dist_ckpt.core.planning.selection import SELECT_ALL, Selection
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.gc_pause import paused_collector
from dist_ckpt.core.saving.agreement import CachedPlan
from dist_ckpt.core.saving.replica_samples import digest_sample
from dist_ckpt.core.shard_io.memory.protocol import CellSource
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles
from dist_ckpt.core.state.inventory_builder import LocalState, build_inventory
from dist_ckpt.core.state.tree.containers import State


@dataclass(frozen=True, slots=True)
class _RankPlan:
    """What a plan comes to on this rank: its files, its replicas, and the cells that it holds.

    `origins` say of each item of each file where this rank holds it; `held` numbers its cells.
    """

    plan: SavePlan
    files: tuple[FilePlan, ...]
    groups: tuple[ReplicaGroup, ...]
    origins: tuple[tuple[Origin, ...], ...]
    held: HeldCells


@dataclass(frozen=True, slots=True)
class _Reused:
    """Which tensors the patterns of `link_unchanged` match; of a tied one, that which has the data.

    Kept for the next save: to match thousands of names takes long.
    """

    patterns: tuple[str, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    unmatched: tuple[str, ...]

    @staticmethod
    def of(chosen: tuple[str, ...], inventory: Inventory) -> _Reused:
        """Match the names of an inventory."""
        names = {entry.fqn: entry.fqn for entry in inventory.tensors} | dict(inventory.aliases)
        found = {one: {to for f, to in names.items() if f in Selection((one,))} for one in chosen}
        unmatched = tuple(
            f"link_unchanged: {one!r} matches no tensor: mend or remove it"
            for one in chosen
            if not found[one]
        )
        reused = tuple(sorted(set().union(*found.values())))
        return _Reused(chosen, inventory.tensors, inventory.aliases, reused, unmatched)


@dataclass(frozen=True, slots=True)
class StateReader:
    """Instead of a state, what reads one: others may know better than we what is to be saved.

    It is called once the ranks have begun to agree, so that all are told what it raises.
    """

    read: Callable[[], LocalState]


class LocalSaveState:
    """One rank's state in one save: what it holds, and what a plan makes of it."""

    def __init__(self, ranks: Session, local: LocalState) -> None:
        self.inventory = local.inventory
        self.unmatched = local.unmatched
        self._ranks = ranks
        self._rank = ranks.channel.rank
        self.local = local

    @staticmethod
    def take(
        ranks: Session,
        state: State | StateReader,
        sharding: ShardingConfig | None,
        selection: Selection = SELECT_ALL,
        link_unchanged: tuple[str, ...] = (),
    ) -> LocalSaveState:
        """See what this rank holds. Raises ValueError or TypeError for what cannot be saved."""
        if isinstance(state, StateReader):
            return LocalSaveState(ranks, state.read())
        last = ranks.kept(CachedPlan)
        with paused_collector():
            local = build_inventory(
                state,
                sharding=sharding,
                rank=ranks.channel.rank,
                world_size=ranks.channel.world_size,
                group_ranks=ranks.group_ranks,
                last=None if last is None else last.inventory,
                selection=selection,
            )
        held = LocalSaveState(ranks, local)
        if link_unchanged:
            held._link_unchanged(link_unchanged)
        return held

    def _link_unchanged(self, chosen: tuple[str, ...]) -> None:
        """Note which tensors get files that later saves link to, and which patterns match none."""
        inventory = self.inventory
        known = self._ranks.kept(_Reused)
        if known is None or (known.patterns, known.tensors, known.aliases) != (
            chosen,
            inventory.tensors,
            inventory.aliases,
        ):
            known = _Reused.of(chosen, inventory)
            self._ranks.keep(known)
        self.unmatched = (*self.unmatched, *known.unmatched)
        self.inventory = structs.replace(inventory, reused=known.names)

    @property
    def cuda_devices(self) -> Sequence[torch.device]:
        """The CUDA devices on which some of its tensors are."""
        parts = self.local.parts.values()
        found = {part.device for some in parts for part in some if part.is_cuda}
        return sorted(found, key=str)

    def files(
        self,
        plan: SavePlan,
        step: int | None,
        metadata: Mapping[str, object],
        attached: Mapping[str, bytes],
    ) -> RankFiles:
        """Return what this rank writes. Its tensors may not be finished: `local.synchronize`.

        Rank 0 writes what users attach, beside the objects files.
        """
        with paused_collector():
            part = self._part(plan)
        objects = objects_files(plan, self.local, self._rank, metadata)
        if self._rank == 0:
            objects |= {filenames.attached_file(name): data for name, data in attached.items()}
        return RankFiles(
            step=step,
            plans=part.files,
            sources=tuple(partial(self._source_of, origins) for origins in part.origins),
            objects=objects,
        )

    def replica_digests(self, plan: SavePlan) -> ReplicaDigests:
        """Digest this rank's copy of each member of each replica group, by the group's id."""
        part = self._part(plan)
        return tuple(
            (_group_id(group), tuple(self._digests(group, part.held).items()))
            for group in part.groups
        )

    def _part(self, plan: SavePlan) -> _RankPlan:
        """Return this rank's part of a plan: kept for the next save, like the plan."""
        known = self._ranks.kept(_RankPlan)
        if known is None or known.plan is not plan:
            files = items_of(plan, self._rank)
            held = numbered(held_cells(self.inventory, self._rank, plan))
            known = _RankPlan(
                plan,
                files,
                replica_groups_of(plan, self._rank),
                tuple(
                    tuple(origin_of(held, item.fqn, item.cell) for item in file.items)
                    for file in files
                ),
                held,
            )
            self._ranks.keep(known)
        return known

    def _source_of(self, origins: Sequence[Origin], number: int) -> CellSource:
        fqn, held_number, part = origins[number]
        source = self.local.source(fqn, held_number)
        return source if part is None else source.part(part)

    def _digests(self, group: ReplicaGroup, held: HeldCells) -> dict[str, str]:
        """Digest this rank's copy of each member of a replica group, by name."""
        digests = {}
        for fqn, cell in group.cells:
            name = f"{fqn}[{cell}]"
            source = self._source_of((origin_of(held, fqn, cell),), 0)
            digests[name] = digest_sample(source, name)
        for fqn in group.values:
            digests[fqn] = document_digest(encode_value(self._value(fqn)))
        return digests

    def _value(self, fqn: str) -> object:
        if fqn in self.local.values:
            return self.local.values[fqn]
        return self.local.per_rank[fqn]


def objects_files(
    plan: SavePlan, local: LocalState, rank: int, metadata: Mapping[str, object]
) -> dict[str, bytes]:
    """Return the objects files that a rank writes, encoded, by name.

    The coordinator writes the global one. Every rank writes what only it stores, if there is any.
    """
    stored = {
        fqn: local.values[fqn]
        for fqn, holder in plan.catalog.values.items()
        if holder == rank and fqn in local.values
    }
    per_rank = {
        fqn: {key: local.per_rank[fqn][1]}
        for fqn, keys in plan.catalog.per_rank.items()
        for key, holder in keys
        if holder == rank and fqn in local.per_rank and local.per_rank[fqn][0] == key
    }
    files = {}
    if rank == 0:
        names = {names.fqn: list(names.names) for names in plan.name_lists}
        main = objects_file.ObjectsFile(
            tree=plan.tree,
            values={**stored, **names},
            numpy=plan.numpy,
            metadata=dict(metadata),
        )
        files[filenames.OBJECTS] = objects_file.encode(main)
        stored = {}
    if stored or per_rank:
        own = objects_file.ObjectsFile(values=stored, per_rank=per_rank)
        files[filenames.objects_file(rank)] = objects_file.encode(own)
    return files


def _group_id(group: ReplicaGroup) -> str:
    # The ranks alone tell groups apart: what they hold together follows from the shared plan.
    return document_digest(repr(group.ranks).encode())
