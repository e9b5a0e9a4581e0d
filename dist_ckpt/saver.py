"""`dc.save`: inventory, agree and claim, write, receipts and verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite

import torch
from torch.distributed import ProcessGroup

from dist_ckpt import __version__, objects, paths
from dist_ckpt.collector import paused_collector
from dist_ckpt.coordinator import CachedPlan, SaveRequest, SaveRun, Verdict
from dist_ckpt.digest import document_digest
from dist_ckpt.index import MAX_STEP, Json
from dist_ckpt.memory import Source
from dist_ckpt.paths import Attempt
from dist_ckpt.phases import Phases
from dist_ckpt.plan import FilePlan, Receipt, ReplicaGroup, SavePlan
from dist_ckpt.replicas import digest_sample
from dist_ckpt.reports import SaveReport
from dist_ckpt.save_planner import (
    HeldCells,
    Origin,
    held_cells,
    items_of,
    numbered,
    origin_of,
    replica_groups_of,
)
from dist_ckpt.session import Session, session_of
from dist_ckpt.sharding import ShardingConfig
from dist_ckpt.state import LocalState, take
from dist_ckpt.storage import Storage, open_storage
from dist_ckpt.storage.counting import CountingStorage
from dist_ckpt.strict_json import is_text
from dist_ckpt.writer import RankFiles, write_all

# The user's metadata lies in the objects file; its short scalars are mirrored in the index, so
# that listing checkpoints reads one document.
MAX_MIRRORED_CHARS = 1024


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The options of `save`, checked by `check` once a rank's error can reach the others."""

    step: int | None = None
    sharding: ShardingConfig | None = None
    overwrite: bool = False
    metadata: Mapping[str, object] | None = None

    def check(self) -> None:
        """Raise TypeError or ValueError for options that make no sense."""
        if self.step is not None and type(self.step) is not int:
            raise TypeError(f"step={self.step!r}: give a whole number or None")
        if self.step is not None and not 0 <= self.step <= MAX_STEP:
            raise ValueError(f"step={self.step}: give a number from 0 to 2**63 - 1")
        if self.sharding is not None and not isinstance(self.sharding, ShardingConfig):
            raise TypeError(f"sharding is a {type(self.sharding).__name__}: give a ShardingConfig")
        if type(self.overwrite) is not bool:
            raise TypeError(f"overwrite={self.overwrite!r}: give True or False")
        if self.metadata is not None:
            if not isinstance(self.metadata, Mapping):
                raise TypeError(f"metadata is a {type(self.metadata).__name__}: give a dict")
            objects.check_plain(dict(self.metadata), "metadata")


def save(
    state: Mapping[str | int, object],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    sharding: ShardingConfig | None = None,
    group: ProcessGroup | None = None,
    overwrite: bool = False,
    metadata: Mapping[str, object] | None = None,
) -> SaveReport:
    """Save a state as the checkpoint at `path`. Collective: every rank of `group` calls this.

    `path` is on storage that all ranks share. On return the checkpoint is complete and durable on
    every rank; if it raises, on all ranks, there is none from this call and older ones are as
    they were. Saving changes nothing in the state and runs no step of an optimizer.

    `sharding` says how plain local tensors are parts of global ones; `overwrite` replaces the
    checkpoint that is there once the new one is durable; `metadata` is plain data to keep with
    it. Raises ValueError or TypeError for a state that cannot be saved or that ranks disagree
    on, ExistsError, ConflictError, StorageError, and RankError if a rank dies or never calls.
    """
    options = SaveOptions(step, sharding, overwrite, metadata)
    return save_together(session_of(group), state, path, options)


def save_together(
    ranks: Session,
    state: Mapping[str | int, object],
    path: str | os.PathLike[str],
    options: SaveOptions,
    storage: Storage | None = None,
) -> SaveReport:
    """Save over a given session. Collective: every rank of the session calls this."""
    with ranks.operation(f"save to {path}"):
        return _Save(ranks, state, path, options, storage).run()


@dataclass(frozen=True, slots=True)
class _Part:
    """What a plan comes to on this rank: its files, its replicas, and the cells that it holds.

    `origins` say of each item of each file where this rank holds it; `held` numbers its cells.
    """

    plan: SavePlan
    files: tuple[FilePlan, ...]
    groups: tuple[ReplicaGroup, ...]
    origins: tuple[tuple[Origin, ...], ...]
    held: HeldCells


class _Save:
    """One rank's side of one save; the callbacks run inside the exchanges."""

    def __init__(
        self,
        ranks: Session,
        state: Mapping[str | int, object],
        path: str | os.PathLike[str],
        options: SaveOptions,
        storage: Storage | None,
    ) -> None:
        self._ranks = ranks
        self._rank = ranks.channel.rank
        self._state = state
        self._options = options
        self._where = path
        self._given = storage
        self._phases = Phases("save", str(path), quiet=self._rank != 0)

    def run(self) -> SaveReport:
        phases = self._phases
        run = SaveRun(self._ranks)
        with phases.phase("agree"):
            plan, attempt = run.agree(self._request, lambda: self._take().inventory)
        with phases.phase("write"):
            verdict = run.settle(
                plan,
                attempt,
                lambda: self._write(plan, attempt),
                lambda group: self._replica_digests(plan, group),
            )
        with phases.phase("clean up"):
            run.clean_up()
        report = self._report(plan, verdict, run.nbytes_receipt)
        phases.done(report)
        return report

    def _request(self) -> SaveRequest:
        options = self._options
        options.check()
        own, self._path = open_storage(self._where)
        self._storage = CountingStorage(self._given or own)
        metadata = dict(options.metadata or {})
        return SaveRequest(
            storage=self._storage,
            path=self._path,
            step=options.step,
            overwrite=options.overwrite,
            metadata=document_digest(objects.encode_value(metadata)),
            mirrored=_mirrored(metadata),
            saved_by={"dist_ckpt": __version__, "torch": str(torch.__version__)},
        )

    def _take(self) -> LocalState:
        cached: CachedPlan | None = self._ranks.plan_cache
        with paused_collector():
            self._local = take(
                self._state,
                sharding=self._options.sharding,
                rank=self._rank,
                world_size=self._ranks.channel.world_size,
                group_ranks=self._ranks.group_ranks,
                last=None if cached is None else cached.inventory,
            )
        return self._local

    def _write(self, plan: SavePlan, attempt: Attempt) -> Receipt:
        start = time.monotonic()
        self._local.synchronize()
        with paused_collector():
            part = self._part(plan)
        files = RankFiles(
            catalog=plan.catalog,
            step=self._options.step,
            plans=part.files,
            sources=tuple(partial(self._source_of, origins) for origins in part.origins),
            objects=objects_files(plan, self._local, self._rank, self._options.metadata or {}),
        )
        folder = f"{self._path}/{attempt.name}"
        written = write_all(
            self._storage,
            folder,
            files,
            threads=self._ranks.config.threads,
            slots=self._ranks.slots,
        )
        replicas = []
        for group in part.groups:
            members = self._digests(group, part.held).values()
            replicas.append((_group_id(group), document_digest("".join(members).encode())))
        return Receipt(written, tuple(replicas), time.monotonic() - start)

    def _part(self, plan: SavePlan) -> _Part:
        """Return this rank's part of a plan: kept for the next save, like the plan."""
        known: _Part | None = self._ranks.part_cache
        if known is None or known.plan is not plan:
            files = items_of(plan, self._rank)
            held = numbered(held_cells(self._local.inventory, self._rank, plan))
            known = self._ranks.part_cache = _Part(
                plan,
                files,
                replica_groups_of(plan, self._rank),
                tuple(
                    tuple(origin_of(held, item.fqn, item.cell) for item in file.items)
                    for file in files
                ),
                held,
            )
        return known

    def _source_of(self, origins: Sequence[Origin], number: int) -> Source:
        fqn, cell, part = origins[number]
        source = self._local.source(fqn, cell)
        return source if part is None else source.part(part)

    def _digests(self, group: ReplicaGroup, held: HeldCells) -> dict[str, str]:
        """Digest this rank's copy of each member of a replica group, by name."""
        digests = {}
        for fqn, cell in group.cells:
            name = f"{fqn}[{cell}]"
            source = self._source_of((origin_of(held, fqn, cell),), 0)
            digests[name] = digest_sample(source, name)
        for fqn in group.values:
            digests[fqn] = document_digest(objects.encode_value(self._value(fqn)))
        return digests

    def _value(self, fqn: str) -> object:
        if fqn in self._local.values:
            return self._local.values[fqn]
        return self._local.per_rank[fqn]

    def _replica_digests(self, plan: SavePlan, wanted: str) -> dict[str, str]:
        for group in self._part(plan).groups:
            if _group_id(group) == wanted:
                return self._digests(group, self._part(plan).held)
        return {}

    def _report(self, plan: SavePlan, verdict: Verdict, nbytes_receipt: int) -> SaveReport:
        ranks = self._ranks
        return SaveReport(
            path=self._path,
            step=self._options.step,
            attempt=verdict.attempt,
            world_size=ranks.channel.world_size,
            nbytes=verdict.nbytes,
            num_tensors=len(plan.catalog.tensors),
            num_files=verdict.num_files,
            seconds=self._phases.seconds,
            slowest_rank=verdict.slowest_rank,
            slowest_s=verdict.slowest_s,
            exchanges=ranks.exchanges,
            collectives=ranks.collectives,
            nbytes_receipt=nbytes_receipt,
            storage_reads=self._storage.reads,
            storage_writes=self._storage.writes,
        )


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
        main = objects.ObjectsFile(
            tree=plan.tree,
            values={**stored, **names},
            per_rank={},
            numpy=plan.numpy,
            metadata=dict(metadata),
        )
        files[paths.OBJECTS] = objects.encode(main)
        stored = {}
    if stored or per_rank:
        own = objects.ObjectsFile(tree=(), values=stored, per_rank=per_rank, numpy=(), metadata={})
        files[paths.objects_file(rank)] = objects.encode(own)
    return files


def _group_id(group: ReplicaGroup) -> str:
    # The ranks alone tell groups apart: what they hold together follows from the shared plan.
    return document_digest(repr(group.ranks).encode())


def _mirrored(metadata: Mapping[str, object]) -> dict[str, Json]:
    """Return the short scalars of the metadata; JSON has no NaN, so those become strings."""
    mirrored: dict[str, Json] = {}
    for key, value in metadata.items():
        if type(key) is not str or not is_text(key):
            continue
        if value is None or type(value) is bool or (type(value) is int and abs(value) < 1 << 63):
            mirrored[key] = value
        elif type(value) is float:
            mirrored[key] = value if isfinite(value) else str(value)
        elif type(value) is str and len(value) <= MAX_MIRRORED_CHARS and is_text(value):
            mirrored[key] = value
    return mirrored
