"""One background save, until it is staged: agree, plan, copy. The rest is the writers'."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dist_ckpt.background.handle import SaveHandle
from dist_ckpt.background.job import Job
from dist_ckpt.background.readiness import Readiness, Start, WhenBusy
from dist_ckpt.background.staging import images_of, stage, stage_beside
from dist_ckpt.background.writer_client import Order, OwnWriter
from dist_ckpt.comm.collective import Bodies
from dist_ckpt.comm.exchange import Doc
from dist_ckpt.comm.session import Session
from dist_ckpt.memory.cuda import check_no_capture
from dist_ckpt.planning.plan import SavePlan
from dist_ckpt.reports import Phases, SaveReport, Tally
from dist_ckpt.saving.agreement import CachedPlan, PlanAgreement
from dist_ckpt.saving.attempt_run import SaveRequest
from dist_ckpt.saving.held_state import HeldState
from dist_ckpt.saving.save import SaveOptions, request_of
from dist_ckpt.shard_io.shard_writer import RankFiles
from dist_ckpt.snapshots.arena import Arena
from dist_ckpt.snapshots.arena_layout import Snapshot, arena_nbytes
from dist_ckpt.snapshots.details import Details, encode_details
from dist_ckpt.snapshots.job_folder import NUM_ARENAS
from dist_ckpt.state.containers import State
from dist_ckpt.storage import open_storage
from dist_ckpt.writer.messages import Done, Write

# As long as the real one, which is not known before all ranks have agreed.
_NO_ID = "0" * 32


class BackgroundSave:
    """One rank's side of one save; its methods run inside the exchanges.

    `job` returns what this rank has of the job, which the first save may have to begin.
    """

    def __init__(
        self,
        ranks: Session,
        job: Callable[[], Job],
        state: State,
        path: str | os.PathLike[str],
        options: SaveOptions,
    ) -> None:
        self._ranks = ranks
        self._job_of = job
        self._options = options
        self._where = path
        self._held = HeldState(ranks, state, options.sharding)
        self._phases = Phases("background save", str(path), quiet=ranks.channel.rank != 0)
        self._job: Job
        self._start: Start
        self._request: SaveRequest
        self._files: RankFiles
        self._snapshot: Snapshot
        self._arena: Arena
        self._number = 0

    def run(self, when_busy: WhenBusy, saver: Doc) -> SaveHandle:
        """Return a handle of the save, which is staged, or skipped. Collective.

        What lies on a CUDA device is still copied. `saver`: its options, as `Readiness` has them.
        """
        with self._phases.phase("ready"):
            start = Readiness(self._ranks, self._begin, when_busy, saver).agree()
        if start is None:
            return SaveHandle(str(self._where), self._options.step)
        self._start = start
        is_agreed = False
        try:
            with self._phases.phase("agree"):
                planned, name = self._agree()
            is_agreed = True
        finally:
            # A save that waits to be written is superseded only by one that is agreed.
            if start.queued is not None:
                self._job.writer.go(start.queued, drop=is_agreed)
        with self._phases.phase("stage"):
            order = self._stage(name)
        staged = _Staged(
            path=self._request.path,
            step=self._options.step,
            world_size=self._ranks.channel.world_size,
            num_tensors=len(planned.plan.catalog.tensors),
            seconds=dict(self._phases.seconds),
            exchanges=self._ranks.exchanges,
            collectives=self._ranks.collectives,
        )
        return SaveHandle(staged.path, staged.step, self._job.writer, order, staged.report)

    def _begin(self) -> OwnWriter:
        self._job = self._job_of()
        self._job.fence.join()
        return self._job.writer

    def _agree(self) -> tuple[CachedPlan, str]:
        self._job.reclaim(all_are_here=True)
        agreement = PlanAgreement(self._ranks, lambda: secrets.token_hex(16), self._prepare)
        return agreement.agree(self._ask, self._held.take)

    def _ask(self) -> Doc:
        self._options.check()
        check_no_capture()
        self._request = request_of(*open_storage(self._where), self._options)
        return self._request.asked()

    def _prepare(self, plan: SavePlan, bodies: Bodies) -> None:
        """Make room: an arena that nobody writes from, as large as it needs to be."""
        options, channel = self._options, self._ranks.channel
        self._files = self._held.files(plan, options.step, options.metadata or {})
        details = Details(
            overwrite=options.overwrite,
            mirrored=self._request.mirrored,
            saved_by=self._request.saved_by,
            began_at=self._start.began_at,
            bodies=bodies,
            replicas=self._held.all_replica_digests(plan),
        )
        self._snapshot = Snapshot(
            id=_NO_ID,
            path=self._request.path,
            step=options.step,
            rank=channel.rank,
            world_size=channel.world_size,
            images=images_of(self._files),
            details=encode_details(details),
        )
        # Both are busy still if no save could be superseded on all ranks.
        self._job.writer.wait_for(lambda: len(self._busy) < NUM_ARENAS, None)
        self._number = self._job.arenas.oldest(self._busy)
        nbytes = arena_nbytes(self._snapshot)
        self._job.pinned.release(self._number, nbytes)
        self._arena = self._job.arenas.fitting(self._number, nbytes)

    @property
    def _busy(self) -> set[int]:
        """The arenas that are written from, but for that of a save which will be superseded."""
        unsettled = self._job.writer.unsettled
        return {order.arena for order in unsettled if order is not self._start.queued}

    def _stage(self, name: str) -> Order:
        """Copy, while the writer follows. If that fails here, the save fails on all ranks."""
        writer, order = self._job.writer, Order(name, self._number)
        host, port, token = self._start.store
        place, path = self._arena.place, self._request.path
        write = Write(name, path, place, self._number, host, port, token)
        try:
            images = self._arena.begin(replace(self._snapshot, id=name))
            writer.order(order, write)
            if devices := self._held.cuda_devices:
                self._copy_beside(order, images, devices)
            else:
                self._held.synchronize()
                self._copy(order, lambda: stage(self._arena, images, self._files))
        except BaseException as error:
            if order not in writer.orders:  # the other writers wait for this one
                writer.order(order, write)
            order.is_told = True
            self._abort(order, error)
            raise
        return order

    def _copy_beside(
        self, order: Order, images: Sequence[memoryview], devices: Sequence[torch.device]
    ) -> None:
        """Have CUDA devices copy what they have, and copy the rest. A thread sees the end of it."""
        self._job.pinned.pin(self._number, self._arena.memory, devices[0])
        with self._job.streams.beside(devices) as beside:
            late = self._held.changed_in_steps()
            follow = stage_beside(self._arena, images, self._files, beside, late)

            def copy() -> None:
                try:
                    self._copy(order, follow)
                except Exception as error:  # noqa: BLE001 - a thread's outer edge: the writers tell it
                    self._abort(order, error)

            self._job.fence.run(beside.mark(), copy)

    def _copy(self, order: Order, stage_it: Callable[[], None]) -> None:
        try:
            stage_it()
            self._job.arenas.newest = self._number
        finally:
            order.staged.set()

    def _abort(self, order: Order, error: BaseException) -> None:
        self._job.writer.abort(order, f"{type(error).__name__}: {error}"[:500])


@dataclass(frozen=True, slots=True)
class _Staged:
    """What the trainer knows for the report of a save. It keeps nothing of the state alive."""

    path: str
    step: int | None
    world_size: int
    num_tensors: int
    seconds: Mapping[str, float]
    exchanges: Tally
    collectives: Tally

    def report(self, done: Done) -> SaveReport:
        """Return the report, given what the writer says of a save that it has committed."""
        assert done.verdict is not None
        return SaveReport(
            path=self.path,
            step=self.step,
            world_size=self.world_size,
            num_tensors=self.num_tensors,
            seconds={**self.seconds, **done.seconds},
            exchanges=self.exchanges.plus_all(Tally(*done.exchanges)),
            collectives=self.collectives,
            nbytes_receipt=done.nbytes_receipt,
            storage_reads=Tally(*done.reads),
            storage_writes=Tally(*done.writes),
            **done.verdict,
        )
