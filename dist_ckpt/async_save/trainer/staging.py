"""Staging: a rank's files are copied, in their order, into the arena that a writer writes from.

This is what training pays for a background save: one copy. CUDA devices copy what only optimizers
change beside the next step: `stage_beside`, over `shard_io/memory/cuda.py`. What the writer can do
as well (headers, digests) it does.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from dist_ckpt.async_save.snapshots.arena import Arena
from dist_ckpt.async_save.snapshots.arena_layout import Image
from dist_ckpt.core.planning.plan import FilePlan
from dist_ckpt.core.planning.write_batches import Batch, BatchPart
from dist_ckpt.core.runtime.buffers import address_of, copy, move
from dist_ckpt.core.runtime.threads import parallel_for, results_of
from dist_ckpt.core.shard_io.memory.cuda import SideStreamCopies
from dist_ckpt.core.shard_io.memory.protocol import CellSource
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, SourceOf

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
