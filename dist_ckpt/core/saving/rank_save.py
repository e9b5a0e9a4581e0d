"""Read one rank's state for a save: its inventory, and the files that the rank writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from msgspec import structs

from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import block_digest, document_digest
from dist_ckpt.core.format.geometry import Cell
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.plain_codec import encode_value
from dist_ckpt.core.planning.name_selection import SELECT_ALL, Selection
from dist_ckpt.core.planning.plan import (
    FilePlan,
    Inventory,
    ReplicaDigests,
    ReplicaGroup,
    SavePlan,
    TensorEntry,
)
from dist_ckpt.core.planning.save.save_planner import (
    CellNumbers,
    Origin,
    find_local_cells,
    find_origin,
    find_replica_groups,
    number_cells,
    plan_rank_files,
)
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.processes import paused_collector
from dist_ckpt.core.saving.agreement import SaveCache
from dist_ckpt.core.shard_io.memory.cell_memory import CellReader
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles
from dist_ckpt.core.state.inventory_builder import LocalState, build_inventory
from dist_ckpt.core.state.tree.containers import State

# A sample of a replica has all its bytes up to this size. Above, it has 16 blocks of 64 KiB.
_WHOLE_NBYTES = 1 << 20
_BLOCK_NBYTES = 64 << 10
_BLOCKS = _WHOLE_NBYTES // _BLOCK_NBYTES
# The copies of this many bytes are compared in full by the first save of a layout.
FIRST_NBYTES = 256 << 20
# A multiple of the size of every dtype.
_ITEM_NBYTES = 16


@dataclass(frozen=True, slots=True)
class StateReader:
    """A function that reads the state, for callers that build a `LocalState` themselves.

    It is called inside the exchange, so that its error reaches all ranks.
    """

    read: Callable[[], LocalState]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The part of one rank in a plan: its files, its replica groups, and its numbered cells.

    `origins` has a tuple for each file: the local cell of each of its items.
    """

    plan: SavePlan
    files: tuple[FilePlan, ...]
    groups: tuple[ReplicaGroup, ...]
    origins: tuple[tuple[Origin, ...], ...]
    cells: CellNumbers

    @staticmethod
    def of(plan: SavePlan, inventory: Inventory, rank: int) -> RankPlan:
        """Select the part of one rank."""
        files = plan_rank_files(plan, rank)
        cells = number_cells(find_local_cells(inventory, rank, plan))
        origins = tuple(
            tuple(find_origin(cells, item.fqn, item.cell) for item in file.items) for file in files
        )
        return RankPlan(plan, files, find_replica_groups(plan, rank), origins, cells)


# The patterns, and the tensors and aliases of an inventory, which they select.
_LinkKey = tuple[tuple[str, ...], tuple[TensorEntry, ...], tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class LinkPatterns:
    """The tensors that `link_unchanged` matches: `names` of tensors with data, not of aliases."""

    key: _LinkKey
    names: tuple[str, ...]
    pattern_problems: tuple[str, ...]

    @staticmethod
    def of(key: _LinkKey) -> LinkPatterns:
        """Match patterns with the names of an inventory."""
        patterns, tensors, aliases = key
        names = {entry.fqn: entry.fqn for entry in tensors} | dict(aliases)
        matches = {
            pattern: {to for fqn, to in names.items() if fqn in Selection((pattern,))}
            for pattern in patterns
        }
        problems = tuple(
            f"link_unchanged: {pattern!r} matches no tensor: correct or remove it"
            for pattern in patterns
            if not matches[pattern]
        )
        return LinkPatterns(key, tuple(sorted(set().union(*matches.values()))), problems)


@dataclass(slots=True)
class _RankCache:
    """The cache of one session. A match of thousands of names, and a rank's plan, take long."""

    rank_plan: RankPlan | None = None
    link_patterns: LinkPatterns | None = None


class RankSave:
    """One rank's state in one save: its inventory, and its files by a plan."""

    def __init__(self, session: Session, local_state: LocalState) -> None:
        self.inventory = local_state.inventory
        self.pattern_problems = local_state.pattern_problems
        self.num_sampled = 0  # replicas of which only a sample was compared
        self._cache = session.cache(_RankCache)
        self._rank = session.channel.rank
        self.local_state = local_state

    @staticmethod
    def read(
        session: Session,
        state: State | StateReader,
        sharding: ShardingConfig | None,
        selection: Selection = SELECT_ALL,
        link_unchanged: tuple[str, ...] = (),
    ) -> RankSave:
        """Read the state of this rank. ValueError or TypeError if it cannot be saved."""
        if isinstance(state, StateReader):
            return RankSave(session, state.read())
        cached = session.cache(SaveCache).plan
        with paused_collector():
            local = build_inventory(
                state,
                sharding=sharding,
                rank=session.channel.rank,
                world_size=session.channel.world_size,
                group_ranks=session.group_ranks,
                last=None if cached is None else cached.inventory,
                selection=selection,
            )
        rank_save = RankSave(session, local)
        if link_unchanged:
            rank_save._separate_files(link_unchanged)
        return rank_save

    def map_state(self, change: Callable[[LocalState], LocalState]) -> RankSave:
        """Return a save of this state with changes to its inventory, values or memory."""
        local = replace(
            self.local_state, inventory=self.inventory, pattern_problems=self.pattern_problems
        )
        changed = copy(self)
        changed.local_state = local = change(local)
        changed.inventory, changed.pattern_problems = local.inventory, local.pattern_problems
        return changed

    def _separate_files(self, patterns: tuple[str, ...]) -> None:
        """Give each matching tensor a separate file, which later saves can link to."""
        key = patterns, self.inventory.tensors, self.inventory.aliases
        matched = self._cache.link_patterns
        if matched is None or matched.key != key:
            matched = self._cache.link_patterns = LinkPatterns.of(key)
        self.pattern_problems = (*self.pattern_problems, *matched.pattern_problems)
        self.inventory = structs.replace(self.inventory, linkable=matched.names)

    @property
    def cuda_devices(self) -> Sequence[torch.device]:
        """The CUDA devices of its tensors."""
        parts = (part for parts in self.local_state.parts.values() for part in parts)
        devices = {part.device for part in parts if part.is_cuda}
        return sorted(devices, key=str)

    def files(
        self,
        plan: SavePlan,
        step: int | None,
        metadata: Mapping[str, object],
        attached: Mapping[str, bytes],
    ) -> RankFiles:
        """Return the files that this rank writes, on rank 0 with the attached files.

        Call `local_state.synchronize()` first.
        """
        with paused_collector():
            rank_plan = self._rank_plan(plan)
        objects = encode_objects_files(plan, self.local_state, self._rank, metadata)
        if self._rank == 0:
            objects |= {filenames.attached_file(name): data for name, data in attached.items()}
        return RankFiles(
            step=step,
            plans=rank_plan.files,
            readers=tuple(partial(self._reader_of, origins) for origins in rank_plan.origins),
            objects=objects,
        )

    def replica_digests(self, plan: SavePlan, *, whole_nbytes: float) -> ReplicaDigests:
        """Return the digests of this rank's members of each replica group, by the group's id.

        The members of a group are digested in full as long as they have at most `whole_nbytes`
        together. All later members are digested by sample.
        """
        self.num_sampled = 0
        rank_plan = self._rank_plan(plan)
        # The id of a group is a digest of its ranks. Its members follow from the plan.
        ids = [document_digest(repr(group.ranks).encode()) for group in rank_plan.groups]
        digests = [
            tuple(self._digests(group, rank_plan.cells, whole_nbytes).items())
            for group in rank_plan.groups
        ]
        return tuple(zip(ids, digests, strict=True))

    def replica_cells(self, plan: SavePlan) -> dict[str, tuple[str, Cell]]:
        """Return this rank's cells of tensors in replica groups, by the names in the digests."""
        groups = self._rank_plan(plan).groups
        return {member_name(*member): member for group in groups for member in group.cells}

    def replica_reader(self, plan: SavePlan, fqn: str, cell: Cell) -> CellReader:
        """Return the memory of one of these cells."""
        return self._reader_of((find_origin(self._rank_plan(plan).cells, fqn, cell),), 0)

    def _rank_plan(self, plan: SavePlan) -> RankPlan:
        """Return this rank's part of a plan, cached for the next save."""
        cached = self._cache.rank_plan
        if cached is None or cached.plan is not plan:
            cached = self._cache.rank_plan = RankPlan.of(plan, self.inventory, self._rank)
        return cached

    def _reader_of(self, origins: Sequence[Origin], number: int) -> CellReader:
        fqn, cell_number, part = origins[number]
        reader = self.local_state.reader(fqn, cell_number)
        return reader if part is None else reader.part(part)

    def _digests(
        self, group: ReplicaGroup, cells: CellNumbers, whole_nbytes: float
    ) -> dict[str, str]:
        """Digest this rank's copy of each member of a replica group, by name."""
        digests = {}
        for fqn, cell in group.cells:
            name = member_name(fqn, cell)
            reader = self._reader_of((find_origin(cells, fqn, cell),), 0)
            whole_nbytes -= reader.nbytes
            is_whole = whole_nbytes >= 0
            self.num_sampled += not is_whole and reader.nbytes > _WHOLE_NBYTES
            digests[name] = digest_whole(reader) if is_whole else digest_sample(reader, name)
        values = {**self.local_state.per_rank, **self.local_state.values}
        digests |= {fqn: document_digest(encode_value(values[fqn])) for fqn in group.values}
        return digests


def member_name(fqn: str, cell: Cell) -> str:
    """Return the name of a tensor's cell in a replica group."""
    return f"{fqn}[{cell}]"


def encode_objects_files(
    plan: SavePlan, local: LocalState, rank: int, metadata: Mapping[str, object]
) -> dict[str, bytes]:
    """Return the encoded objects files of a rank, by name.

    Rank 0 writes the global file. Another rank writes a file if the plan gives it values.
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
            objects=plan.objects,
            has_text_keys=plan.has_text_keys,
            uncut=dict(plan.uncut),
        )
        files[filenames.OBJECTS] = objects_file.encode(main)
        stored = {}
    if stored or per_rank:
        of_rank = objects_file.ObjectsFile(values=stored, per_rank=per_rank)
        files[filenames.objects_file(rank)] = objects_file.encode(of_rank)
    return files


def digest_sample(reader: CellReader, name: str) -> str:
    """Return the digest of a sample: all bytes up to 1 MiB, otherwise 16 blocks of 64 KiB.

    The offsets of the blocks follow from the size and `name`, so `name` must be the same on all
    ranks.
    """
    return _digest_blocks(reader, sample_offsets(reader.nbytes, name), _BLOCK_NBYTES)


def digest_whole(reader: CellReader) -> str:
    """Return the digest of all bytes."""
    return _digest_blocks(reader, range(0, reader.nbytes, _WHOLE_NBYTES), _WHOLE_NBYTES)


def _digest_blocks(reader: CellReader, offsets: Iterable[int], nbytes: int) -> str:
    scratch = memoryview(bytearray(min(nbytes, reader.nbytes)))
    digests = [
        block_digest(reader.read(start, min(start + nbytes, reader.nbytes), scratch))
        for start in offsets
    ]
    return document_digest(f"{reader.nbytes} {' '.join(digests)}".encode())


def sample_offsets(nbytes: int, name: str) -> list[int]:
    """Return the offsets of the blocks of a sample."""
    if nbytes <= _WHOLE_NBYTES:
        return list(range(0, nbytes, _BLOCK_NBYTES))
    # One block in each sixteenth, at an offset that differs between tensors.
    size = nbytes // _BLOCKS
    num_offsets = size - _BLOCK_NBYTES + 1
    offsets = [int(block_digest(f"{name} {n}".encode()), 16) % num_offsets for n in range(_BLOCKS)]
    return [(n * size + offset) // _ITEM_NBYTES * _ITEM_NBYTES for n, offset in enumerate(offsets)]
