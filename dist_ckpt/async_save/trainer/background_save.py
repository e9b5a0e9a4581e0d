"""One background save, until it is staged: agree, plan, copy. The rest is the writers'.

Staging: a rank's files are copied, in their order, into the arena that a writer writes from.

This is what training pays for a background save: one copy. CUDA devices copy what only optimizers
change beside the next step: `stage_beside`, over `shard_io/memory/cuda.py`. What the writer can do
as well (headers, digests) it does.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from msgspec import structs

from dist_ckpt.async_save.save_handle import SaveHandle
from dist_ckpt.async_save.snapshots.arena import Arena
from dist_ckpt.async_save.snapshots.arena_layout import (
    Image,
    Snapshot,
    SnapshotMetadata,
    arena_nbytes,
)
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS
from dist_ckpt.async_save.trainer.job import Job
from dist_ckpt.async_save.trainer.start_handshake import SaverInfo, Start, agree_on_start
from dist_ckpt.async_save.trainer.writer_handle import WriteJob, WriterHandle
from dist_ckpt.async_save.writer.messages import Write
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.planning.plan import Batch, BatchPart, FilePlan, Inventory
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.buffers import address_of, copy, move
from dist_ckpt.core.runtime.threads import parallel_for, results_of
from dist_ckpt.core.saving.agreement import CachedPlan, SaveAgreement, SaveRequest, agree
from dist_ckpt.core.saving.attachments import read_attached
from dist_ckpt.core.saving.local_save_state import LocalSaveState
from dist_ckpt.core.saving.save import SaveOptions
from dist_ckpt.core.shard_io.memory.cuda import SideStreamCopies, check_no_capture
from dist_ckpt.core.shard_io.memory.protocol import CellSource
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, SourceOf
from dist_ckpt.core.state.tree.containers import State
from dist_ckpt.core.storage import open_storage
from dist_ckpt.reports import Phases, SaveReport

# What a thread copies at once: so much that to hand it over does not count.
_UNIT_NBYTES = 16 << 20

# Of what devices copy the writer is told in steps of this size, each about a millisecond.
_BESIDE_NBYTES = 64 << 20

# Two keep the memory of most hosts busy; more would take cores from other ranks.
_THREADS = 2


def images_of(files: RankFiles) -> tuple[Image, ...]:
    """Return the files of a rank as a snapshot has them: shard files, then objects files."""
    return (
        *(Image(plan.name, plan.nbytes) for plan in files.plans),
        *(Image(name, len(data)) for name, data in sorted(files.objects.items())),
    )


def stage(arena: Arena, images: Sequence[memoryview], files: RankFiles) -> None:
    """Copy all but the headers into the images that `arena.begin` has returned; complete it.

    On return the state may change. Whatever is raised instead leaves the snapshot incomplete:
    ValueError if a tensor has another size than when the save began.
    """
    units = list(_units(arena, images, files, _UNIT_NBYTES))
    with closing(results_of(_CopyUnit.copy, units, threads=_THREADS)) as copied:
        for unit, _ in zip(units, copied, strict=True):  # in order: up to here all is staged
            arena.advance(unit.stop)
    _copy_objects(images, files)
    arena.complete()


def stage_beside(
    arena: Arena,
    images: Sequence[memoryview],
    files: RankFiles,
    beside: SideStreamCopies,
    late: Container[str],
) -> Callable[[], None]:
    """Do what `stage` does, but for what is on some devices: have these copy it.

    On return what the host has may change, and, in what is asked of the devices from now on, what
    they have, but for the tensors `late`: those only after a mark that is made now. What this
    returns is called then, in any thread: it tells the arena how far the copies have come, and
    returns when the snapshot is complete.
    """
    units = list(_units(arena, images, files, _BESIDE_NBYTES))
    sent = [[part for part in unit.parts() if beside.takes(part.source)] for unit in units]
    others = [part for parts in sent for part in parts if part.fqn not in late]
    for part in others:
        beside.send(part.source, part.start, part.stop, part.room)
    if others:
        beside.hold_training()
    marks = []
    for parts in sent:
        for part in parts:
            if part.fqn in late:
                beside.send(part.source, part.start, part.stop, part.room)
        marks.append(beside.mark())
    parallel_for(partial(_CopyUnit.copy, beside=beside), units, threads=_THREADS)
    _copy_objects(images, files)

    def follow() -> None:
        for unit, mark in zip(units, marks, strict=True):
            mark.reached()
            arena.advance(unit.stop)
        arena.complete()

    return follow


def _copy_objects(images: Sequence[memoryview], files: RankFiles) -> None:
    encoded = [data for _, data in sorted(files.objects.items())]
    for image, data in zip(images[len(files.plans) :], encoded, strict=True):
        image[:] = data


class _PlacedPart(NamedTuple):
    """A part of a tensor, and its room in the image."""

    fqn: str
    source: CellSource
    start: int
    stop: int
    room: memoryview


@dataclass(frozen=True, slots=True)
class _CopyUnit:
    """Batches of a file that one thread copies: `memory` is their room, which ends at `stop`."""

    plan: FilePlan
    source_of: SourceOf
    batches: tuple[Batch, ...]
    memory: memoryview
    stop: int

    def copy(self, beside: SideStreamCopies | None = None) -> None:
        """Copy it, but for what others take."""
        first = self.batches[0].start
        for batch in self.batches:
            self._copy(batch, self.memory[batch.start - first :], beside)

    def parts(self) -> Iterator[_PlacedPart]:
        """Yield everything in it, in order: each tensor's blocks as one, for one copy."""
        filled = 0
        parts = (part for batch in self.batches for part in batch.parts)
        for item, group in groupby(parts, attrgetter("item")):
            own = [*group]
            start, stop = own[0].start, own[-1].stop
            room = self.memory[filled : filled + stop - start]
            yield _PlacedPart(self.plan.items[item].fqn, self._source(own[0]), start, stop, room)
            filled += room.nbytes

    def _source(self, part: BatchPart) -> CellSource:
        source = self.source_of(part.item)
        if source.nbytes != part.nbytes:
            raise ValueError(
                f"{self.plan.items[part.item].fqn}: {part.nbytes} bytes when the save began, and "
                f"{source.nbytes} now: change no tensor before it is staged"
            )
        return source

    def _copy(self, batch: Batch, room: memoryview, beside: SideStreamCopies | None) -> None:
        to, filled = address_of(room), 0
        for part in batch.parts:
            source, start, stop = self._source(part), part.start, part.stop
            size = stop - start
            if beside is not None and beside.takes(source):
                pass
            elif len(batch.parts) > 1 and (address := source.address()) is not None:
                move(to + filled, address + start, size)
            else:
                data = source.read(start, stop, room[filled : filled + size])
                if data.obj is not room.obj:
                    copy(room[filled : filled + size], data)
            filled += size


def _units(
    arena: Arena, images: Sequence[memoryview], files: RankFiles, nbytes: int
) -> Iterator[_CopyUnit]:
    spans = arena.placement.images
    for plan, source_of, image, span in zip(
        files.plans, files.sources, images, spans, strict=False
    ):
        for batches in _runs(plan.batches, nbytes):
            last = batches[-1]
            start = plan.header.nbytes + batches[0].start
            stop = plan.header.nbytes + last.start + _nbytes(last)
            yield _CopyUnit(plan, source_of, batches, image[start:stop], span.start + stop)


def _runs(batches: Sequence[Batch], most: int) -> Iterator[tuple[Batch, ...]]:
    """Cut the batches of a file into runs that reach `most` bytes; an empty file has none."""
    run: list[Batch] = []
    nbytes = 0
    for batch in batches:
        if not batch.parts:
            continue
        run.append(batch)
        nbytes += _nbytes(batch)
        if nbytes >= most:
            yield tuple(run)
            run, nbytes = [], 0
    if run:
        yield tuple(run)


def _nbytes(batch: Batch) -> int:
    return sum(part.stop - part.start for part in batch.parts)


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
    report = _reporter(ranks, phases.seconds)
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
    return _Room(local_state, files, snapshot, job.arenas.fitting(number, nbytes), number)


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


def _reporter(ranks: Session, seconds: Mapping[str, float]) -> Callable[[SaveReport], SaveReport]:
    """Return a function that adds the trainer's part to the report of the writer."""
    # The handle keeps these values, and nothing of the state.
    staged_s, exchanges, collectives = dict(seconds), ranks.exchanges, ranks.collectives

    def report(written: SaveReport) -> SaveReport:
        return replace(
            written,
            seconds={**staged_s, **written.seconds},
            exchanges=exchanges.plus_all(written.exchanges),
            collectives=collectives,
        )

    return report
