"""Staging: a rank's files are copied, in their order, into the arena that a writer writes from.

This is what training pays for a background save: one copy. What the writer can do as well (the
headers, digests, writing) it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock

from dist_ckpt.arena import Arena
from dist_ckpt.arena_layout import Image
from dist_ckpt.batches import Batch
from dist_ckpt.host_memory import address_of, copy, move
from dist_ckpt.parallel import each
from dist_ckpt.plan import FilePlan
from dist_ckpt.writer import RankFiles, SourceOf

# What a thread copies at once: so much that to hand it over does not count.
_UNIT_NBYTES = 16 << 20

# Two keep the memory of most hosts busy; more would take cores from other ranks.
_THREADS = 2


def images_of(files: RankFiles) -> tuple[Image, ...]:
    """Return the files of a rank as a snapshot has them: shard files, then objects files."""
    return (
        *(Image(plan.name, plan.nbytes) for plan in files.plans),
        *(Image(name, len(data)) for name, data in sorted(files.objects.items())),
    )


def stage(
    arena: Arena,
    images: Sequence[memoryview],
    files: RankFiles,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Copy all but the headers into the images that `arena.begin` has returned; complete it.

    Each thread copies within an `around()` of its own. On return the state may change. Whatever is
    raised instead leaves the snapshot incomplete: ValueError if a tensor has another size than
    when the save began.
    """
    units = list(_units(arena, images, files))
    progress = _Progress(arena, units, around)
    each(progress.copy, range(len(units)), threads=_THREADS)
    encoded = [data for _, data in sorted(files.objects.items())]
    for image, data in zip(images[len(files.plans) :], encoded, strict=True):
        image[:] = data
    arena.complete()


@dataclass(frozen=True, slots=True)
class _Unit:
    """Batches of a file that one thread copies: `memory` is their room, which ends at `stop`."""

    plan: FilePlan
    source_of: SourceOf
    batches: tuple[Batch, ...]
    memory: memoryview
    stop: int

    def copy(self) -> None:
        first = self.batches[0].start
        for batch in self.batches:
            self._copy(batch, self.memory[batch.start - first :])

    def _copy(self, batch: Batch, room: memoryview) -> None:
        to, filled = address_of(room), 0
        for item, nbytes, start, stop in batch.parts:
            source = self.source_of(item)
            if source.nbytes != nbytes:
                raise ValueError(
                    f"{self.plan.items[item].fqn}: {nbytes} bytes when the save began, and "
                    f"{source.nbytes} now: change no tensor before it is staged"
                )
            size = stop - start
            if len(batch.parts) > 1 and (address := source.address()) is not None:
                move(to + filled, address + start, size)
            else:
                data = source.read(start, stop, room[filled : filled + size])
                if data.obj is not room.obj:
                    copy(room[filled : filled + size], data)
            filled += size


class _Progress:
    """Copies units, and tells the arena up to where everything is staged. Threads share it."""

    def __init__(
        self,
        arena: Arena,
        units: Sequence[_Unit],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._arena = arena
        self._units = units
        self._around = around
        self._lock = Lock()
        self._done = [False] * len(units)
        self._next = 0

    def copy(self, number: int) -> None:
        with self._around():
            self._units[number].copy()
        with self._lock:
            self._done[number] = True
            first = self._next
            while self._next < len(self._units) and self._done[self._next]:
                self._next += 1
            if self._next > first:
                self._arena.advance(self._units[self._next - 1].stop)


def _units(arena: Arena, images: Sequence[memoryview], files: RankFiles) -> Iterator[_Unit]:
    spans = arena.placement.images
    for plan, source_of, image, span in zip(
        files.plans, files.sources, images, spans, strict=False
    ):
        for batches in _runs(plan.batches):
            last = batches[-1]
            start = plan.header_nbytes + batches[0].start
            stop = plan.header_nbytes + last.start + _nbytes(last)
            yield _Unit(plan, source_of, batches, image[start:stop], span.start + stop)


def _runs(batches: Sequence[Batch]) -> Iterator[tuple[Batch, ...]]:
    """Cut the batches of a file into what is copied at once; an empty file has none."""
    run: list[Batch] = []
    nbytes = 0
    for batch in batches:
        if not batch.parts:
            continue
        run.append(batch)
        nbytes += _nbytes(batch)
        if nbytes >= _UNIT_NBYTES:
            yield tuple(run)
            run, nbytes = [], 0
    if run:
        yield tuple(run)


def _nbytes(batch: Batch) -> int:
    return sum(part.stop - part.start for part in batch.parts)
