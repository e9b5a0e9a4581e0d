"""`dc.save`: inventory, agree and claim, write, receipts and verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import torch
from torch.distributed import ProcessGroup

from dist_ckpt import __version__
from dist_ckpt.comm.exchange import Doc
from dist_ckpt.comm.process_group import session_of
from dist_ckpt.comm.session import Session
from dist_ckpt.format import objects_file
from dist_ckpt.format.checksums import document_digest
from dist_ckpt.format.filenames import Attempt, parse_attempt
from dist_ckpt.format.index import MAX_STEP
from dist_ckpt.format.strict_json import Json, is_text
from dist_ckpt.planning.plan import Receipt, SavePlan
from dist_ckpt.planning.sharding_config import ShardingConfig
from dist_ckpt.reports import Phases, SaveReport
from dist_ckpt.saving.agreement import CachedPlan, PlanAgreement
from dist_ckpt.saving.attempt_run import AttemptRun, SaveRequest, Verdict
from dist_ckpt.saving.held_state import HeldState
from dist_ckpt.shard_io.shard_writer import write_all
from dist_ckpt.state.containers import State
from dist_ckpt.storage import Storage, open_storage
from dist_ckpt.storage.counting import CountingStorage

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
            objects_file.check_plain(dict(self.metadata), "metadata")


def save(
    state: State,
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
    state: State,
    path: str | os.PathLike[str],
    options: SaveOptions,
    storage: Storage | None = None,
) -> SaveReport:
    """Save over a given session. Collective: every rank of the session calls this."""
    with ranks.operation(f"save to {path}"):
        return _Save(ranks, state, path, options, storage).run()


class _Save:
    """One rank's side of one save; the callbacks run inside the exchanges."""

    def __init__(
        self,
        ranks: Session,
        state: State,
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
        self._run: AttemptRun | None = None
        self._held = HeldState(ranks, state, options.sharding)
        self._phases = Phases("save", str(path), quiet=self._rank != 0)

    def run(self) -> SaveReport:
        phases = self._phases
        with phases.phase("agree"):
            planned, attempt = self._agree()
        plan = planned.plan
        assert self._run is not None
        with phases.phase("write"):
            verdict = self._run.settle(
                planned.text,
                attempt,
                lambda: self._write(plan, attempt),
                lambda group: self._held.replica_digests(plan, group),
            )
        with phases.phase("clean up"):
            self._run.clean_up()
        report = self._report(plan, verdict, self._run.nbytes_receipt)
        phases.done(report)
        return report

    def _agree(self) -> tuple[CachedPlan, Attempt]:
        """Agree on what is saved, and claim an attempt: until then nothing on disk has changed."""
        agreement = PlanAgreement(self._ranks, self._claim)
        try:
            planned, name = agreement.agree(self._ask, self._held.take)
        except BaseException as error:
            run = self._run
            if run is not None and run.claimed is not None:  # but the ranks could not be told
                run.recover(run.claimed, error)
            raise
        attempt = parse_attempt(name)
        assert attempt is not None
        return planned, attempt

    def _ask(self) -> Doc:
        self._options.check()
        own, self._path = open_storage(self._where)
        self._storage = CountingStorage(self._given or own)
        request = request_of(self._storage, self._path, self._options)
        self._run = AttemptRun(self._ranks.channel, self._ranks.config, request)
        return request.asked()

    def _claim(self) -> str:
        assert self._run is not None
        return self._run.claim()

    def _write(self, plan: SavePlan, attempt: Attempt) -> Receipt:
        start = time.monotonic()
        options = self._options
        self._held.synchronize()
        files = self._held.files(plan, options.step, options.metadata or {})
        written = write_all(
            self._storage,
            f"{self._path}/{attempt.name}",
            files,
            threads=self._ranks.config.threads,
            slots=self._ranks.slots,
        )
        return Receipt(written, self._held.replicas(plan), time.monotonic() - start)

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


def request_of(storage: Storage, path: str, options: SaveOptions) -> SaveRequest:
    """Return what a save with these options, which make sense, asks for."""
    metadata = dict(options.metadata or {})
    return SaveRequest(
        storage=storage,
        path=path,
        step=options.step,
        overwrite=options.overwrite,
        metadata=document_digest(objects_file.encode_value(metadata)),
        mirrored=_mirrored(metadata),
        saved_by={"dist_ckpt": __version__, "torch": str(torch.__version__)},
    )


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
