"""One background save, until it is staged: agree, plan, copy. The rest is the writers'."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from dist_ckpt.arena import Arena
from dist_ckpt.arena_layout import Snapshot, arena_nbytes
from dist_ckpt.attempt_run import SaveRequest
from dist_ckpt.background_job import Job
from dist_ckpt.channel import Doc
from dist_ckpt.collective import Bodies
from dist_ckpt.device_staging import SideStreams
from dist_ckpt.held_state import HeldState
from dist_ckpt.job_folder import NUM_ARENAS
from dist_ckpt.own_writer import Order, OwnWriter
from dist_ckpt.phases import Phases
from dist_ckpt.plan import SavePlan
from dist_ckpt.plan_agreement import PlanAgreement
from dist_ckpt.readiness import Readiness, Start, WhenBusy
from dist_ckpt.reports import SaveReport
from dist_ckpt.save_handle import SaveHandle
from dist_ckpt.saver import SaveOptions, request_of
from dist_ckpt.session import Session
from dist_ckpt.snapshot_details import Details, encode_details
from dist_ckpt.staging import images_of, stage
from dist_ckpt.state_tree import optimizers_in
from dist_ckpt.storage import open_storage
from dist_ckpt.tally import Tally
from dist_ckpt.writer import RankFiles
from dist_ckpt.writer_link import Done, Write

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
        state: Mapping[str | int, object],
        path: str | os.PathLike[str],
        options: SaveOptions,
    ) -> None:
        self._ranks = ranks
        self._job_of = job
        self._options = options
        self._where = path
        self._state = state
        self._held = HeldState(ranks, state, options.sharding)
        self._phases = Phases("background save", str(path), quiet=ranks.channel.rank != 0)
        self._job: Job
        self._start: Start
        self._request: SaveRequest
        self._files: RankFiles
        self._snapshot: Snapshot
        self._arena: Arena
        self._number = 0

    def run(self, when_busy: WhenBusy) -> SaveHandle:
        """Return a handle of the save, which is staged, or skipped. Collective.

        What lies on a CUDA device is still copied.
        """
        with self._phases.phase("ready"):
            start = Readiness(self._ranks, self._begin, when_busy).agree()
        if start is None:
            return SaveHandle(str(self._where), self._options.step)
        self._start = start
        self._job.reclaim(all_are_here=True)
        with self._phases.phase("agree"):
            agreement = PlanAgreement(self._ranks, lambda: secrets.token_hex(16), self._prepare)
            planned, name = agreement.agree(self._ask, self._held.take)
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
        self._job.fence.wait()
        return self._job.writer

    def _ask(self) -> Doc:
        self._options.check()
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
        writer = self._job.writer
        # Both are busy still if no save could be superseded on all ranks.
        writer.wait_for(lambda: len(writer.unsettled) < NUM_ARENAS, None)
        self._number = self._job.arenas.oldest({order.arena for order in writer.unsettled})
        self._arena = self._job.arenas.fitting(self._number, arena_nbytes(self._snapshot))

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
                self._copy(order, images, nullcontext)
        except BaseException as error:
            if order not in writer.orders:  # the other writers wait for this one
                writer.order(order, write)
            order.is_told = True
            self._abort(order, error)
            raise
        return order

    def _copy_beside(
        self, order: Order, images: Sequence[memoryview], devices: Iterable[torch.device]
    ) -> None:
        """Begin to copy from CUDA devices; training goes on, but no weight changes meanwhile."""
        self._job.pinned.pin(self._number, self._arena.memory)
        streams = SideStreams(devices)

        def copy() -> None:
            try:
                self._copy(order, images, streams.current)
            except Exception as error:  # noqa: BLE001 - a thread's outer edge: the writers tell it
                self._abort(order, error)

        self._job.fence.run(copy, optimizers_in(self._state))

    def _copy(
        self,
        order: Order,
        images: Sequence[memoryview],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        try:
            stage(self._arena, images, self._files, around)
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
