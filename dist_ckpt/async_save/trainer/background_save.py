"""One background save, until it is staged: agree, plan, copy. The rest is the writers'."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from msgspec import structs

from dist_ckpt.async_save.save_handle import SaveHandle
from dist_ckpt.async_save.snapshots.arena import Arena
from dist_ckpt.async_save.snapshots.arena_layout import Snapshot, SnapshotMetadata, arena_nbytes
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS
from dist_ckpt.async_save.trainer.job import Job
from dist_ckpt.async_save.trainer.staging import images_of, stage, stage_beside
from dist_ckpt.async_save.trainer.start_handshake import SaverInfo, Start, agree_on_start
from dist_ckpt.async_save.trainer.writer_handle import WriteJob, WriterHandle
from dist_ckpt.async_save.writer.messages import Done, Write
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.planning.plan import Inventory
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.saving.agreement import CachedPlan, SaveAgreement, SaveRequest, agree
from dist_ckpt.core.saving.attachments import read_attached
from dist_ckpt.core.saving.local_save_state import LocalSaveState
from dist_ckpt.core.saving.save import SaveOptions
from dist_ckpt.core.shard_io.memory.cuda import check_no_capture
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles
from dist_ckpt.core.state.tree.containers import State
from dist_ckpt.core.storage import open_storage
from dist_ckpt.reports import Phases, SaveReport

# As long as the real one, which is not known before all ranks have agreed.
_NO_ID = "0" * 32


def save_in_background(
    ranks: Session,
    job_of: Callable[[], Job],
    state: State,
    path: str | os.PathLike[str],
    options: SaveOptions,
    saver: SaverInfo,
) -> SaveHandle:
    """Return a handle of a save that is staged, or skipped. Collective.

    What lies on a CUDA device is still copied. `job_of` returns what this rank has of the job,
    which the first save has to begin.
    """
    phases = Phases("background save", str(path), quiet=ranks.channel.rank != COORDINATOR)

    def begin() -> WriterHandle:
        job = job_of()
        job.fence.join()
        return job.writer

    with phases.phase("ready"):
        start = agree_on_start(ranks, begin, saver, options.is_urgent)
    if start is None:
        return SaveHandle(str(path), options.step)
    job, is_agreed = job_of(), False
    try:
        with phases.phase("agree"):
            job.reclaim(all_are_here=True)
            name, room = _agree(_BegunSave(ranks, job, start, options), state, path)
        is_agreed = True
    finally:
        # A save that waits to be written is superseded only by one that is agreed.
        if start.queued:
            job.writer.go(start.queued, drop=is_agreed)
    with phases.phase("stage"):
        order = _stage(job, name, room, start)
    report = _reporter(ranks, room, options, phases.seconds)
    return SaveHandle(room.snapshot.path, options.step, job.writer, order, report)


@dataclass(frozen=True, slots=True)
class _BegunSave:
    """A save that has begun: whose it is, and how."""

    ranks: Session
    job: Job
    start: Start
    options: SaveOptions

    @property
    def busy(self) -> set[int]:
        """The arenas that are written from, but for that of a save which will be superseded."""
        unsettled = self.job.writer.unsettled
        return {order.arena for order in unsettled if order.snapshot != self.start.queued}


@dataclass(frozen=True, slots=True)
class _Room:
    """What this rank holds, what of it is to be staged, and an arena that has room for that.

    The snapshot lacks the save's name.
    """

    local_state: LocalSaveState
    num_tensors: int
    files: RankFiles
    snapshot: Snapshot
    arena: Arena
    number: int


@dataclass(slots=True)
class _BackgroundPreparation:
    """A rank's part of a save, before the ranks agree on it; `room` once there is a plan."""

    call: _BegunSave
    request: SaveRequest
    local_state: LocalSaveState
    attached: Mapping[str, bytes]
    room: _Room | None = None

    @property
    def inventory(self) -> Inventory:
        """See `Preparation.inventory`."""
        return self.local_state.inventory

    @property
    def unmatched(self) -> tuple[str, ...]:
        """See `Preparation.unmatched`."""
        return self.local_state.unmatched

    def use(self, plan: CachedPlan) -> None:
        """Find an arena for the files of the plan."""
        self.room = _make_room(self, plan)


def _agree(call: _BegunSave, state: State, where: str | os.PathLike[str]) -> tuple[str, _Room]:
    """Agree on the save and its name, and make room. All ranks raise the error of any rank."""
    prepared, name, _ = agree(
        call.ranks,
        partial(_prepare, call, state, where),
        lambda _: secrets.token_hex(16),
        SaveAgreement[str],
    )
    assert prepared.room is not None
    return name, prepared.room


def _prepare(
    call: _BegunSave, state: State, where: str | os.PathLike[str]
) -> _BackgroundPreparation:
    options = call.options
    options.check()
    check_no_capture()
    attached = read_attached(options.attach)
    request = options.request(open_storage(where)[1], attached)
    return _BackgroundPreparation(call, request, options.local_state(call.ranks, state), attached)


def _make_room(prepared: _BackgroundPreparation, planned: CachedPlan) -> _Room:
    """Find an arena that nobody writes from, and make it as large as it needs to be."""
    call, request, local_state = prepared.call, prepared.request, prepared.local_state
    job, options, channel = call.job, call.options, call.ranks.channel
    files = local_state.files(planned.plan, options.step, options.all_metadata(), prepared.attached)
    fields = options.index_fields()
    details = SnapshotMetadata(
        overwrite=options.overwrite,
        mirrored=fields.metadata,
        saved_by=fields.saved_by,
        began_at=call.start.began_at,
        bodies=planned.bodies,
        replicas=local_state.replica_digests(planned.plan),
        run=options.run,
    )
    snapshot = Snapshot(
        id=_NO_ID,
        path=request.path,
        step=options.step,
        rank=channel.rank,
        world_size=channel.world_size,
        images=images_of(files),
        details=typed_msgpack.encode(details),
    )
    # Both are busy still if no save could be superseded on all ranks.
    job.writer.wait_for(lambda: len(call.busy) < NUM_ARENAS, None)
    number, nbytes = job.arenas.oldest(call.busy), arena_nbytes(snapshot)
    job.pinned.release(number, nbytes)
    arena, num_tensors = job.arenas.fitting(number, nbytes), len(planned.plan.catalog.tensors)
    return _Room(local_state, num_tensors, files, snapshot, arena, number)


def _stage(job: Job, name: str, room: _Room, start: Start) -> WriteJob:
    """Copy, while the writer follows. If that fails here, the save fails on all ranks."""
    arena, local_state = room.arena, room.local_state
    order = WriteJob(name, room.number)
    write = Write(name, room.snapshot.path, arena.place, room.number, *start.store)
    try:
        images = arena.begin(structs.replace(room.snapshot, id=name))
        job.writer.order(order, write)
        if devices := local_state.cuda_devices:
            _copy_beside(job, room, order, images, devices)
        else:
            local_state.local.synchronize()
            _copy(job, order, lambda: stage(arena, images, room.files))
    except BaseException as error:
        if order not in job.writer.orders:  # the other writers wait for this one
            job.writer.order(order, write)
        order.is_told = True
        _abort(job, order, error)
        raise
    return order


def _copy_beside(
    job: Job,
    room: _Room,
    order: WriteJob,
    images: Sequence[memoryview],
    devices: Sequence[torch.device],
) -> None:
    """Have CUDA devices copy what they have, and copy the rest. A thread sees the end of it."""
    job.pinned.pin(room.number, room.arena.memory, devices[0])
    with job.streams.beside(devices) as beside:
        late = room.local_state.local.changed_in_steps()
        follow = stage_beside(room.arena, images, room.files, beside, late)

        def copy() -> None:
            try:
                _copy(job, order, follow)
            except Exception as error:  # noqa: BLE001 - a thread's outer edge: the writers tell it
                _abort(job, order, error)

        job.fence.run(beside.mark(), copy)


def _copy(job: Job, order: WriteJob, stage_it: Callable[[], None]) -> None:
    try:
        stage_it()
        job.arenas.newest = order.arena
    finally:
        order.staged.set()


def _abort(job: Job, order: WriteJob, error: BaseException) -> None:
    job.writer.abort(order, f"{type(error).__name__}: {error}"[:500])


def _reporter(
    ranks: Session, room: _Room, options: SaveOptions, seconds: Mapping[str, float]
) -> Callable[[Done], SaveReport]:
    """Return what makes the report, given what the writer says of a save that it has committed."""
    # Only these live on with the handle, and nothing of the state.
    path, step = room.snapshot.path, options.step
    num_tensors, staged_s = room.num_tensors, dict(seconds)
    world_size, exchanges = ranks.channel.world_size, ranks.exchanges
    collectives = ranks.collectives

    def report(done: Done) -> SaveReport:
        assert done.decision is not None
        return SaveReport(
            path=path,
            step=step,
            world_size=world_size,
            num_tensors=num_tensors,
            seconds={**staged_s, **done.seconds},
            exchanges=exchanges.plus_all(done.exchanges),
            collectives=collectives,
            nbytes_receipt=done.nbytes_receipt,
            storage_reads=done.reads,
            storage_writes=done.writes,
            **structs.asdict(done.decision),
        )

    return report
