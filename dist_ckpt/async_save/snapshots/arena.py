"""An arena: shared memory that a snapshot is staged into, and that its writer writes it from.

The trainer stages (`Arena`), the writer follows (`ArenaReader`); `recovered_snapshots.py` reads
what is left. Words tell how far it has come: `sequence`, odd while a snapshot is staged and even
when it is complete; `ready`, up to where the file is staged; `committed`, the sequence of the last
one that became a checkpoint.

A word is stored whole (an item of a memoryview of words is copied at once, `struct` goes byte by
byte), and `_fence` keeps it in order with the bytes that it speaks of: the writer digests what it
sees, so nobody would notice later that it had seen a word before the bytes. x86 shows stores in
their order anyway. ARM does not, but the release of a lock and then its acquisition are a barrier
in both directions there; POSIX calls it synchronising memory.

The two arenas of a trainer: found again, made, grown, or had elsewhere when memory is short.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass

from dist_ckpt.async_save.snapshots import arena_layout as layout
from dist_ckpt.async_save.snapshots.arena_layout import Record, Seal, Snapshot, SnapshotSpans
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS, RankFolder, check_file
from dist_ckpt.async_save.snapshots.recovered_snapshots import SaveIdentity, open_first
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.shared_memory import (
    create_anonymous,
    create_named,
    detach_in_child,
    is_out_of_space,
    map_writable,
    open_existing,
    reserve,
)
from dist_ckpt.core.runtime.threads import run_after_fork
from dist_ckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    IncompatibleError,
    StorageError,
)

# More saves than anybody makes; a word holds more.
_MAX_SEQUENCE = 1 << 62


class _Words:
    """The words of a mapped arena. Threads may share it."""

    def __init__(self, view: memoryview) -> None:
        self._words = view[: layout.HEADER_NBYTES].cast("Q")
        self._lock = threading.Lock()
        self._lock.acquire()

    def load(self, word: int) -> int:
        """Return a word, between what was read before and what is read afterwards."""
        self._fence()
        value = self._words[word]
        self._fence()
        return value

    def store(self, word: int, value: int) -> None:
        """Store a word, between what was written before and what is written afterwards."""
        self._fence()
        self._words[word] = value
        self._fence()

    def _fence(self) -> None:
        self._lock.release()
        self._lock.acquire()


class _Mapped:
    """An arena that is mapped here: its memory, and the words in it."""

    def __init__(self, fd: int, *, touch: bool) -> None:
        self.memory = map_writable(fd, touch=touch)
        self.view = memoryview(self.memory)
        self.words = _Words(self.view)

    def record(self, offset: int) -> Record | None:
        return layout.decode_record(self.view[: layout.HEADER_NBYTES], offset)

    def write(self, offset: int, start: int, document: bytes, sequence: int) -> None:
        """Put a document in its place, then its record."""
        self.view[start : start + len(document)] = document
        record = layout.encode_record(layout.record_of(sequence, document))
        self.view[offset : offset + len(record)] = record


class Arena:
    """The trainer's side of an arena, whose lock it holds. One thread stages at a time."""

    def __init__(self, place: str, fd: int, job: str) -> None:
        """Take over a file of shared memory. What it holds of this job stays, until `begin`.

        `place` is where other processes find it.

        CorruptError or IncompatibleError if it is something else than an empty file or an arena
        of this job; the descriptor is closed by `close`, and by an error here.
        """
        self.place = place
        self._fd = fd
        try:
            header = os.pread(fd, layout.HEADER_NBYTES, 0)
            if any(header):
                layout.check_identity(header, job, place)
            else:
                reserve(fd, layout.HEADER_NBYTES)
                os.pwrite(fd, layout.encode_identity(job), 0)
            self._mapped = _Mapped(fd, touch=True)
            if self._mapped.words.load(layout.SEQUENCE_WORD) > _MAX_SEQUENCE:
                raise CorruptError(f"{place}: the header is damaged")
        except BaseException:
            os.close(fd)
            raise
        self._placement: SnapshotSpans | None = None
        run_after_fork(self.leave)

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return len(self._mapped.view)

    @property
    def memory(self) -> memoryview:
        """All of it, for a driver to pin; it is other memory once `reserve` has made it larger."""
        return self._mapped.view

    def reserve(self, nbytes: int) -> None:
        """Make it as large as this, at least; what is in it stays. OSError if there is no room.

        A writer that has it mapped keeps what it has, and maps the rest when a snapshot needs it.
        """
        if nbytes > self.nbytes:
            reserve(self._fd, nbytes)
            self._mapped = _Mapped(self._fd, touch=True)

    def begin(self, snapshot: Snapshot) -> tuple[memoryview, ...]:
        """Begin to stage: return the memory of the images, with whatever was in it.

        From here on the snapshot that lay here is gone. The arena is large enough for this one.
        """
        document = typed_msgpack.encode(snapshot)
        placement = layout.place(snapshot, len(document))
        assert placement.nbytes <= self.nbytes, f"{placement.nbytes} bytes into {self.nbytes}"
        mapped = self._mapped
        # Never a number that was used before: what was sealed then is no seal of this.
        odd = (mapped.words.load(layout.SEQUENCE_WORD) + 1) | 1
        mapped.words.store(layout.SEQUENCE_WORD, odd)
        mapped.words.store(layout.READY_WORD, 0)
        mapped.write(layout.DOCUMENT_RECORD, placement.document.start, document, odd + 1)
        self._placement = placement
        return tuple(mapped.view[span.start : span.stop] for span in placement.images)

    @property
    def placement(self) -> SnapshotSpans:
        """Where the snapshot that is staged lies."""
        assert self._placement is not None, "nothing was begun"
        return self._placement

    def advance(self, stop: int) -> None:
        """Say that everything before this byte of the arena is staged."""
        self._mapped.words.store(layout.READY_WORD, stop)

    def complete(self) -> None:
        """Say that the snapshot is staged, and will not change before the next `begin`."""
        self.advance(self.placement.nbytes)
        words = self._mapped.words
        odd = words.load(layout.SEQUENCE_WORD)
        assert odd % 2, "completed twice"
        words.store(layout.SEQUENCE_WORD, odd + 1)

    def close(self) -> None:
        """Let go of the memory; views of it that are still used keep it mapped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._placement = None
            del self._mapped

    def leave(self) -> None:
        """In a forked child: let go of the memory, whoever uses it. The child may outlive that."""
        if self._fd >= 0:
            detach_in_child(self._mapped.memory, self._fd)


@dataclass(frozen=True, slots=True, eq=False)
class FollowedArena:
    """One snapshot that is staged, as the writer sees it. Its images may be written from.

    They may also be written to where the trainer does not: in the room of the headers.
    """

    snapshot: Snapshot
    placement: SnapshotSpans
    images: tuple[memoryview, ...]
    sequence: int
    _mapped: _Mapped

    @property
    def ready(self) -> int:
        """Up to which byte of the arena it is staged.

        ConflictError if the arena holds another one by now: what was read of this is worthless.
        """
        ready = self._mapped.words.load(layout.READY_WORD)
        self.check()
        return min(ready, self.placement.nbytes)

    @property
    def is_complete(self) -> bool:
        """Whether all of it is staged. ConflictError as above."""
        return self.check() == self.sequence

    def check(self) -> int:
        """Return where the arena's sequence is. ConflictError if that is another snapshot's."""
        now = self._mapped.words.load(layout.SEQUENCE_WORD)
        if now not in (self.sequence - 1, self.sequence):
            raise ConflictError(
                f"snapshot {self.snapshot.id} of {self.snapshot.path} was overwritten in memory "
                f"before it was written: save again"
            )
        return now

    def seal(self, seal: Seal) -> None:
        """Say that the headers and digests are in. The snapshot is complete."""
        assert self.is_complete, "sealed before it was complete"
        document = typed_msgpack.encode(seal)
        room = self.placement.seal
        assert len(document) <= room.nbytes, f"a seal of {len(document)} bytes"
        self._mapped.write(layout.SEAL_RECORD, room.start, document, self.sequence)

    def mark_committed(self) -> None:
        """Say that the snapshot became a checkpoint. It is sealed."""
        self._mapped.words.store(layout.COMMITTED_WORD, self.sequence)


class ArenaReader:
    """The writer's side of an arena, which it maps once. One thread uses it at a time.

    It is closed with the last reference to it; views of the memory that are still used keep it
    mapped.
    """

    def __init__(self, place: str, job: str) -> None:
        """Open an arena. CorruptError or IncompatibleError if it is not one of this job."""
        self.place = place
        self.fd = open_existing(place, writable=True)  # another process may open it by that
        self._close = weakref.finalize(self, os.close, self.fd)
        try:
            layout.check_identity(os.pread(self.fd, layout.HEADER_NBYTES, 0), job, place)
            self._mapped = _Mapped(self.fd, touch=False)
        except BaseException:
            self._close()
            raise

    def follow(self, snapshot_id: str) -> FollowedArena:
        """Return the snapshot that was begun, of which some or all is staged.

        ConflictError if another one lies there, CorruptError if what lies there makes no sense.
        """
        record = self._mapped.record(layout.DOCUMENT_RECORD)
        if record is None:
            raise CorruptError(f"{self.place} holds no snapshot")
        snapshot, placement = self._document(record)
        if snapshot.id != snapshot_id:
            raise ConflictError(
                f"{self.place} holds snapshot {snapshot.id} of {snapshot.path}, not {snapshot_id}"
            )
        view = self._mapped.view
        images = tuple(view[span.start : span.stop] for span in placement.images)
        followed = FollowedArena(snapshot, placement, images, record.sequence, self._mapped)
        followed.check()
        return followed

    def close(self) -> None:
        """Close it already now. Nothing can be followed any more."""
        if self._close.alive:
            self._close()
            del self._mapped

    def _document(self, record: Record) -> tuple[Snapshot, SnapshotSpans]:
        nbytes = os.fstat(self.fd).st_size
        span = layout.document_span(record, self.place)
        document = os.pread(self.fd, span.nbytes, span.start)
        found = layout.open_document(document, record, nbytes, self.place)
        if found[1].nbytes > len(self._mapped.view):  # the arena has grown
            self._mapped = _Mapped(self.fd, touch=False)
        return found


_log = logging.getLogger("dist_ckpt")


class ArenaPool:
    """A trainer's arenas, by their numbers. It holds the trainer's lock of the folder.

    What an earlier run left in them stays until it is staged into, or until they must be made anew.
    """

    def __init__(self, folder: RankFolder) -> None:
        self._folder = folder
        # The number of the one that was staged last; it is overwritten last.
        # When that was, by the clock of its coordinator; 0 if there is none.
        self.newest, self.newest_at = _newest_in(folder)
        self._arenas: dict[int, Arena] = {}
        self._has_warned = not folder.is_shared_memory  # the folder has said so already

    def oldest(self, busy: Collection[int]) -> int:
        """Return the number of the arena that is not busy and was staged longest ago."""
        free = [number for number in range(NUM_ARENAS) if number not in busy]
        return min(free, key=lambda number: number == self.newest)

    def spare(self, snapshot: str) -> None:
        """Overwrite the snapshot with this id last: that was restored.

        A newer snapshot may be complete here, but not on all ranks.
        """
        for number in range(NUM_ARENAS):
            found = _known_in(self._folder, number)
            if found is not None and found.save.id == snapshot:
                self.newest = number

    def fitting(self, number: int, nbytes: int) -> Arena:
        """Return an arena that is so large, at least. StorageError if there is no memory for it.

        One that must grow stays what it is, with what is in it, as long as there is room where it
        lies; else it is replaced by memory without a name. Nobody stages into it now.
        """
        arena = self._arenas.pop(number, None) or self._found(number)
        if arena is not None:
            try:
                arena.reserve(nbytes)
            except OSError as error:
                arena.close()
                if not is_out_of_space(error):
                    raise self._failed(nbytes, error) from error
                arena = None
        self._arenas[number] = arena or self._made(number, nbytes)
        return self._arenas[number]

    def close(self) -> None:
        """Let go of all memory. What has a name stays, for a later run."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _found(self, number: int) -> Arena | None:
        """Return what an earlier run of the job left, if it is an arena that we understand."""
        for place in self._folder.places(number):
            with suppress(CheckpointError, OSError):
                fd = open_existing(place, writable=True)
                is_nameless = place.startswith("/proc/")
                here = self._told(number, fd) if is_nameless else place
                return Arena(here, fd, self._folder.job)
        return None

    def _made(self, number: int, nbytes: int) -> Arena:
        try:
            return Arena(*self._memory(number, nbytes), self._folder.job)
        except OSError as error:
            raise self._failed(nbytes, error) from error

    def _memory(self, number: int, nbytes: int) -> tuple[str, int]:
        path = self._folder.arena_path(number)
        for one in (path, f"{path}.new"):  # what `create_named` replaces
            check_file(one)
        has_nameless = hasattr(os, "memfd_create")
        if self._folder.is_shared_memory or not has_nameless:
            try:
                return path, create_named(path, nbytes)
            except OSError as error:
                if not has_nameless or not is_out_of_space(error):
                    raise
                self._warn(nbytes, error)
        self._forget(number)  # it would be found first, and its room is needed
        fd = create_anonymous(nbytes)
        return self._told(number, fd), fd

    def _told(self, number: int, fd: int) -> str:
        """Say where memory without a name is; the descriptor is closed by an error."""
        try:
            return self._folder.tell("trainer", number, fd)
        except BaseException:
            os.close(fd)
            raise

    def _forget(self, number: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._folder.arena_path(number))

    def _warn(self, nbytes: int, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: no room for a snapshot of %d bytes (%s). Background saves stage into memory "
                "without a name instead: a snapshot lives as long as the trainer or its writer, "
                "and a restart after both have ended loads from storage. To keep it longer, "
                "enlarge /dev/shm (docker run --shm-size)",
                *(self._folder.path, nbytes, error.strerror),
            )

    def _failed(self, nbytes: int, error: OSError) -> StorageError:
        return StorageError(
            f"no memory for a snapshot of {nbytes:,} bytes: {error.strerror}; save without "
            f"background, use more ranks, or give the job more memory",
            rank=self._folder.rank,
        )


@dataclass(frozen=True, slots=True)
class _FoundSnapshot:
    """A complete snapshot that an earlier run has left; `is_whole` if it is sealed as well."""

    save: SaveIdentity
    is_whole: bool
    is_committed: bool


def only_copy_in(folder: RankFolder) -> str:
    """Say what may be nowhere but in the arenas of a rank, "" if that is nothing.

    That is the newest snapshot which could be restored, if it never became a checkpoint.
    """
    try:
        found = [_found_in(folder, number) for number in range(NUM_ARENAS)]
    except IncompatibleError as error:
        return str(error)
    newest = max(
        (one for one in found if one is not None and one.is_whole),
        key=lambda one: one.save.began_at,
        default=None,
    )
    return "" if newest is None or newest.is_committed else newest.save.name


def _newest_in(folder: RankFolder) -> tuple[int, float]:
    """Return which arena holds the newest complete snapshot of an earlier run, and its time."""
    found = [_known_in(folder, number) for number in range(NUM_ARENAS)]
    began_at = [0.0 if one is None else one.save.began_at for one in found]
    newest = max(range(NUM_ARENAS), key=began_at.__getitem__)
    return newest, began_at[newest]


def _known_in(folder: RankFolder, number: int) -> _FoundSnapshot | None:
    """Return the complete snapshot in an arena, if this version knows of one."""
    with suppress(IncompatibleError):
        return _found_in(folder, number)
    return None


def _found_in(folder: RankFolder, number: int) -> _FoundSnapshot | None:
    """Return the complete snapshot in an arena, if there is one.

    IncompatibleError if another version of dist_ckpt has left what is there.
    """
    kept, problems = open_first(folder, number)
    for problem in problems:  # the others are damaged, or no arenas
        if isinstance(problem, IncompatibleError):
            raise problem
    if kept is None:
        return None
    with closing(kept), suppress(ValueError):
        if kept.is_complete:
            identity = SaveIdentity.of(kept.snapshot)
            return _FoundSnapshot(identity, kept.seal is not None, kept.is_committed)
    return None
