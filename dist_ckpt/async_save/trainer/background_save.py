"""One background save until it is staged: agree, plan, copy. Then the writers continue.

Staging copies a rank's files, in order, into an arena. This copy is the only cost for training: the
writer adds headers and digests. During the next step, CUDA devices copy the tensors that only
optimizers change: see `stage_overlapped`, and `core/shard_io/memory/cuda.py`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from msgspec import structs

from dist_ckpt.async_save.snapshots import arena_layout as layout
from dist_ckpt.async_save.snapshots.arena import Arena
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS
from dist_ckpt.async_save.trainer.job import Job
from dist_ckpt.async_save.trainer.start_handshake import SaverInfo, StartDecision, agree_on_start
from dist_ckpt.async_save.trainer.writer_handle import BackgroundSave, SaveHandle, WriterHandle
from dist_ckpt.async_save.writer.writer_messages import Write
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.planning.plan import Batch, FilePlan, Inventory
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.host_memory import address_of, copy, move
from dist_ckpt.core.runtime.threads import parallel_for, stream_results
from dist_ckpt.core.saving.agreement import (
    AgreedPlan,
    SaveAgreement,
    SaveArguments,
    SaveCache,
    agree,
    plan_together,
)
from dist_ckpt.core.saving.attachments import read_attached
from dist_ckpt.core.saving.rank_save import RankSave, StateReader
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.shard_io.memory.cell_memory import CellReader
from dist_ckpt.core.shard_io.memory.cuda import SideStreamCopies, check_no_capture
from dist_ckpt.core.shard_io.memory.device_staging import DeviceStaging, Mark, PlacedTensor
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, ReaderOf
from dist_ckpt.core.state.tree.containers import State
from dist_ckpt.core.storage import open_storage
from dist_ckpt.reports import Phases, SaveReport

# A copy thread's chunk. It is so large that the handover costs nothing.
_CHUNK_NBYTES = 16 << 20

# Two threads saturate the memory of most hosts. More would take cores from other ranks.
_THREADS = 2


def list_images(files: RankFiles) -> tuple[layout.Image, ...]:
    """Return the images of a rank's files: shard files, then objects files."""
    return (
        *(layout.Image(plan.name, plan.nbytes) for plan in files.plans),
        *(layout.Image(name, len(data)) for name, data in sorted(files.objects.items())),
    )


def stage(arena: Arena, images: Sequence[memoryview], files: RankFiles) -> None:
    """Copy all but the headers into the images of `arena.begin`, and complete the snapshot.

    On return the state may change. An error leaves the snapshot incomplete. ValueError if the size
    of a tensor has changed since the save began.
    """
    chunks = list(_split_into_chunks(arena, images, files))
    with closing(stream_results(_CopyChunk.copy, chunks, threads=_THREADS)) as copied:
        for chunk, _ in zip(chunks, copied, strict=True):  # in order: no gap before `stop`
            arena.advance(chunk.stop)
    _copy_objects(images, files)
    arena.complete()


def stage_overlapped(
    arena: Arena,
    images: Sequence[memoryview],
    files: RankFiles,
    device_copies: SideStreamCopies,
    find_late: Callable[[], Container[str]],
) -> tuple[Mark | None, Callable[[], None]]:
    """Stage like `stage`, but CUDA devices copy their own tensors.

    On return, the caller may change all tensors if the mark is None. Otherwise, devices may still
    copy tensors that `find_late` names, and device work that changes these must wait for the mark.
    For example, weights change in `optimizer.step()`, so each step waits for the mark.

    Call the returned function in any thread. It publishes the progress, and returns when the
    snapshot is complete. CheckpointError if a tensor changed before the mark.
    """
    on_devices, on_host = [], []
    for fqn, reader, start in _place_items(arena, files):
        if device_copies.can_copy(reader):
            on_devices.append(PlacedTensor(fqn, reader, start, reader.nbytes))
        else:
            on_host.append((reader, start))
    staging = DeviceStaging(on_devices, arena.memory, device_copies, find_late)
    copy_parts = partial(_copy_parts, arena.memory)
    parallel_for(copy_parts, _group_parts(on_host), threads=_THREADS)
    _copy_objects(images, files)

    def follow() -> None:
        for stop in staging.follow():
            arena.advance(stop)
        arena.complete()

    return staging.late_end, follow


def _place_items(arena: Arena, files: RankFiles) -> Iterator[tuple[str, CellReader, int]]:
    """Yield the memory of each item of all files, and its position in the arena."""
    for plan, reader_of, span in zip(files.plans, files.readers, arena.spans.images, strict=False):
        first = span.start + plan.header.nbytes
        for number, item in enumerate(plan.items):
            reader = reader_of(number)
            _check_size(item.fqn, item.span.stop - item.span.start, reader)
            yield item.fqn, reader, first + item.span.start


# Bytes of a reader, and their position in the arena.
_HostPart = tuple[CellReader, int, int, int]


def _group_parts(readers: Iterable[tuple[CellReader, int]]) -> Iterator[list[_HostPart]]:
    """Cut large readers, and put small ones together, into chunks for one thread."""
    group: list[_HostPart] = []
    nbytes = 0
    for reader, position in readers:
        for start in range(0, reader.nbytes, _CHUNK_NBYTES):
            stop = min(start + _CHUNK_NBYTES, reader.nbytes)
            group.append((reader, start, stop, position + start))
            nbytes += stop - start
            if nbytes >= _CHUNK_NBYTES:
                yield group
                group, nbytes = [], 0
    yield group


def _copy_parts(memory: memoryview, parts: Sequence[_HostPart]) -> None:
    for reader, start, stop, position in parts:
        target = memory[position : position + stop - start]
        data = reader.read(start, stop, target)
        if data.obj is not target.obj:
            copy(target, data)


def _copy_objects(images: Sequence[memoryview], files: RankFiles) -> None:
    encoded = [data for _, data in sorted(files.objects.items())]
    for image, data in zip(images[len(files.plans) :], encoded, strict=True):
        image[:] = data


@dataclass(frozen=True, slots=True)
class _CopyChunk:
    """Batches of a file that one thread copies into `memory`, which ends at byte `stop`."""

    plan: FilePlan
    reader_of: ReaderOf
    batches: tuple[Batch, ...]
    memory: memoryview
    stop: int

    def copy(self) -> None:
        """Copy all parts."""
        first = self.batches[0].start
        for batch in self.batches:
            target = self.memory[batch.start - first :]
            target_address, filled = address_of(target), 0
            for part in batch.parts:
                reader, start, stop = self.reader_of(part.item), part.start, part.stop
                _check_size(self.plan.items[part.item].fqn, part.nbytes, reader)
                size = stop - start
                if len(batch.parts) > 1 and (address := reader.address()) is not None:
                    move(target_address + filled, address + start, size)
                else:
                    data = reader.read(start, stop, target[filled : filled + size])
                    if data.obj is not target.obj:
                        copy(target[filled : filled + size], data)
                filled += size


def _check_size(fqn: str, nbytes: int, reader: CellReader) -> None:
    if reader.nbytes != nbytes:
        raise ValueError(
            f"{fqn}: {nbytes} bytes when the save began, and {reader.nbytes} now: change no tensor "
            f"before it is staged"
        )


def _split_into_chunks(
    arena: Arena, images: Sequence[memoryview], files: RankFiles
) -> Iterator[_CopyChunk]:
    spans = arena.spans.images
    for plan, reader_of, image, span in zip(
        files.plans, files.readers, images, spans, strict=False
    ):
        for batches in _group_batches(plan.batches, _CHUNK_NBYTES):
            last = batches[-1]
            start = plan.header.nbytes + batches[0].start
            stop = plan.header.nbytes + last.start + _nbytes(last)
            yield _CopyChunk(plan, reader_of, batches, image[start:stop], span.start + stop)


def _group_batches(batches: Sequence[Batch], min_nbytes: int) -> Iterator[tuple[Batch, ...]]:
    """Cut the batches of a file into groups of at least `min_nbytes`. An empty file has none."""
    group: list[Batch] = []
    nbytes = 0
    for batch in batches:
        if not batch.parts:
            continue
        group.append(batch)
        nbytes += _nbytes(batch)
        if nbytes >= min_nbytes:
            yield tuple(group)
            group, nbytes = [], 0
    if group:
        yield tuple(group)


def _nbytes(batch: Batch) -> int:
    return sum(part.stop - part.start for part in batch.parts)


# It has the length of the real id, which is known when all ranks have agreed.
_PLACEHOLDER_ID = "0" * 32


def save_in_background(
    session: Session,
    get_job: Callable[[], Job],
    state: State,
    path: str | os.PathLike[str],
    options: SaveOptions,
    saver: SaverInfo,
) -> SaveHandle:
    """Stage a save, or skip it. Return its handle. Collective.

    On return, CUDA devices may still copy. `get_job` returns this rank's job. The first save begins
    the job.
    """
    phases = Phases("background save", str(path), quiet=session.channel.rank != COORDINATOR)

    def begin() -> WriterHandle:
        job = get_job()
        job.fence.wait_until_staged()
        return job.writer

    with phases.phase("ready"):
        start = agree_on_start(session, begin, saver, options.is_urgent)
    if start is None:
        return SaveHandle(str(path), options.step)
    job, is_agreed = get_job(), False
    if job.writer.has_unequal_replicas:
        # With a new plan, this save compares in full again.
        session.cache(SaveCache).plan, job.writer.has_unequal_replicas = None, False
    try:
        with phases.phase("agree"):
            job.remove_stale_folders(has_all_ranks=True)
            read_state = options.with_means(session, state)
            prepared, save_id, _ = agree(
                session,
                partial(_prepare_save, session, job, start, options, read_state, path),
                partial(_make_room_and_choose_id, options),
                SaveAgreement[str],
            )
        is_agreed = True
    finally:
        # A queued save is superseded only if all ranks have agreed on this one.
        if start.queued:
            job.writer.end_pause(start.queued, drop=is_agreed)
    with phases.phase("stage"):
        save = _stage(prepared, save_id)
    num_sampled = prepared.rank_save.num_sampled
    report = _make_report_merger(session, phases.seconds, num_sampled)
    return SaveHandle(prepared.arguments.path, options.step, job.writer, save, report)


# A snapshot also has its plan, and a page for each file.
_EXTRA_NBYTES = 16 << 20


def prepare_arenas(session: Session, job: Job, state: State) -> None:
    """Make both arenas for a state in parallel to training. Collective."""
    with session.channel.exchange("prepare") as preparing:
        rank_save = RankSave.read(session, state, None)
        preparing.gather(None)
        if preparing.is_coordinator:
            preparing.decide("")
    preparing.result(str)
    with session.channel.exchange("plan") as planning:
        plan = plan_together(session, rank_save.inventory)
        planning.gather(None)
        if planning.is_coordinator:
            planning.decide(secrets.token_hex(16))
    # The first save of the same state needs no other plan.
    session.cache(SaveCache).plan = plan = replace(plan, plan_id=planning.result(str))
    nbytes = sum(
        image.nbytes for image in list_images(rank_save.files(plan.save_plan, None, {}, {}))
    )
    local = sum(part.nbytes for parts in rank_save.local_state.parts.values() for part in parts)
    # Replicas are divided among the ranks: the state that optimizers will have is, too.
    missing = rank_save.local_state.missing_optimizer_nbytes() * nbytes // max(local, 1)
    devices = rank_save.cuda_devices
    first = job.arenas.find_oldest(())
    job.preparation.begin(
        sorted(range(NUM_ARENAS), key=lambda number: number != first),
        nbytes + missing + _EXTRA_NBYTES,
        devices[0] if devices else None,
    )


def _make_room_and_choose_id(options: SaveOptions, _: object, plan: AgreedPlan) -> str:
    options.make_room(plan.nbytes_to_write)
    return secrets.token_hex(16)


@dataclass(slots=True)
class _BackgroundPreparation:
    """A rank's part of a save before the ranks agree on it.

    `accept_plan` sets the fields after `attached`: the files to stage, their snapshot, which has no
    id yet, and an arena for it.
    """

    arguments: SaveArguments
    inventory: Inventory
    pattern_problems: tuple[str, ...]
    session: Session
    job: Job
    start: StartDecision
    options: SaveOptions
    rank_save: RankSave
    attached: Mapping[str, bytes]
    files: RankFiles = field(init=False)
    snapshot: layout.Snapshot = field(init=False)
    arena: Arena = field(init=False)
    arena_number: int = field(init=False)

    def accept_plan(self, plan: AgreedPlan) -> None:
        """Wait for an arena that is not busy, and make it large enough for the files of a plan."""
        job, options, rank_save = self.job, self.options, self.rank_save
        metadata = options.all_metadata()
        self.files = rank_save.files(plan.save_plan, options.step, metadata, self.attached)
        fields = options.index_fields()
        details = layout.SnapshotMetadata(
            overwrite=options.overwrite,
            mirrored=fields.metadata,
            saved_by=fields.saved_by,
            began_at=self.start.began_at,
            inventories=plan.inventories,
            replicas=options.replica_digests(rank_save, plan),
            incarnation=options.incarnation,
        )
        self.snapshot = layout.Snapshot(
            id=_PLACEHOLDER_ID,
            path=self.arguments.path,
            step=options.step,
            rank=self.session.channel.rank,
            world_size=self.session.channel.world_size,
            images=list_images(self.files),
            details=typed_msgpack.encode(details),
        )
        # Both arenas are still busy if the ranks could not all supersede a save.
        job.writer.wait_for(lambda: len(self._busy_arenas()) < NUM_ARENAS, None)
        number = job.arenas.find_oldest(self._busy_arenas())
        nbytes = layout.arena_nbytes(self.snapshot)
        job.preparation.finish(number)
        job.pinned.release(number, nbytes)
        self.arena_number, self.arena = number, job.arenas.open_fitting(number, nbytes)

    def _busy_arenas(self) -> set[int]:
        """Return the arenas of unsettled saves, except a save that will be superseded."""
        unsettled = self.job.writer.unsettled
        return {save.arena for save in unsettled if save.snapshot != self.start.queued}


def _prepare_save(
    session: Session,
    job: Job,
    start: StartDecision,
    options: SaveOptions,
    state: State | StateReader,
    path: str | os.PathLike[str],
) -> _BackgroundPreparation:
    options.check()
    check_no_capture()
    attached = read_attached(options.attach)
    arguments = options.arguments(open_storage(path)[1], attached)
    rank_save = options.read_rank(session, state)
    checked = arguments, rank_save.inventory, rank_save.pattern_problems
    return _BackgroundPreparation(*checked, session, job, start, options, rank_save, attached)


def _stage(prepared: _BackgroundPreparation, save_id: str) -> BackgroundSave:
    """Copy, while the writer follows. An error here makes the save fail on all ranks."""
    job, arena, rank_save = prepared.job, prepared.arena, prepared.rank_save
    save = BackgroundSave(save_id, prepared.arena_number)
    write = Write(save_id, prepared.arguments.path, arena.path, save.arena, *prepared.start.store)
    try:
        images = arena.begin(structs.replace(prepared.snapshot, id=save_id))
        job.writer.submit(save, write)
        if devices := rank_save.cuda_devices:
            _copy_overlapped(prepared, save, images, devices)
        else:
            rank_save.local_state.synchronize()
            _copy(job, save, lambda: stage(arena, images, prepared.files))
    except BaseException as error:
        if save not in job.writer.saves:  # the other writers wait for this one
            job.writer.submit(save, write)
        save.is_reported = True
        _abort(job, save, error)
        raise
    return save


def _copy_overlapped(
    prepared: _BackgroundPreparation,
    save: BackgroundSave,
    images: Sequence[memoryview],
    devices: Sequence[torch.device],
) -> None:
    """Start the copies of CUDA devices, and copy the rest. A thread waits for the devices."""
    job, arena = prepared.job, prepared.arena
    job.pinned.pin(save.arena, arena.memory, devices[0])
    with job.streams.copies(devices) as device_copies:
        late_end, follow = stage_overlapped(
            arena, images, prepared.files, device_copies, partial(_find_late, prepared)
        )

        def copy() -> None:
            try:
                _copy(job, save, follow)
            except Exception as error:  # noqa: BLE001 - a thread's outer edge: writers report it
                # Perhaps something changes weights unseen: the next save copies first.
                job.copies_first = True
                _abort(job, save, error)

        job.fence.run(late_end, copy)
    # The next save needs the other arena.
    others = set(range(NUM_ARENAS)) - {save.arena}
    job.preparation.begin(others, arena.nbytes, devices[0])


def _find_late(prepared: _BackgroundPreparation) -> Container[str]:
    """Return the tensors that devices may copy in parallel to training, without room for a copy."""
    if prepared.job.copies_first:
        return ()
    return prepared.rank_save.local_state.changed_in_steps()


def _copy(job: Job, save: BackgroundSave, stage_files: Callable[[], None]) -> None:
    try:
        stage_files()
        job.arenas.newest = save.arena
    finally:
        save.staged.set()


def _abort(job: Job, save: BackgroundSave, error: BaseException) -> None:
    job.writer.abort(save, f"{type(error).__name__}: {error}"[:500])


def _make_report_merger(
    session: Session, seconds: Mapping[str, float], num_sampled: int
) -> Callable[[SaveReport], SaveReport]:
    """Return a function that adds the trainer's part to the report of the writer."""
    # The handle keeps these values, and nothing of the state.
    staged_s, exchanges, collectives = dict(seconds), session.exchanges, session.collective_calls

    def report(written: SaveReport) -> SaveReport:
        return replace(
            written,
            seconds={**staged_s, **written.seconds},
            exchanges=exchanges.plus_all(written.exchanges),
            collectives=collectives,
            num_sampled=num_sampled,
        )

    return report
