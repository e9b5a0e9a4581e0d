"""An arena: shared memory with one snapshot.

The trainer stages the snapshot (`Arena`), and its writer reads it (`ArenaReader`). After the
trainer's end, `recovered_snapshots.py` reads it. Three words in the header are its state:

- `sequence` is odd while a snapshot is staged, and even when it is complete.
- `ready` is the first byte that is not staged.
- `committed` is the sequence of the last snapshot that became a checkpoint.

A word must be stored in one step. Assignment to an item of a memoryview of words does this, but
`struct` copies byte by byte. `_fence` orders the store of a word with the stores of the bytes that
the word describes. Without it the writer could digest bytes before they are staged, and no check
would detect that. x86 keeps the order of stores. ARM does not, but the release and acquisition of a
lock are a full barrier there (POSIX: "synchronize memory").

`ArenaPool` has the two arenas of a trainer: it enlarges or replaces them, and selects the one to
overwrite.
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
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS, RankFolder, check_regular_file
from dist_ckpt.async_save.snapshots.recovered_snapshots import (
    RecoveredSnapshot,
    SaveIdentity,
    open_first,
)
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.host_memory import (
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

# More than all saves of a job, and less than the largest word.
_MAX_SEQUENCE = 1 << 62


class _MappedArena:
    """The mapped memory of an arena. Threads may share its words."""

    def __init__(self, fd: int, *, touch: bool) -> None:
        self.memory = map_writable(fd, touch=touch)
        self.view = memoryview(self.memory)
        self._words = self.view[: layout.HEADER_NBYTES].cast("Q")
        self._lock = threading.Lock()
        self._lock.acquire()

    def load(self, word: int) -> int:
        """Return a word, ordered with the reads before and after."""
        self._fence()
        value = self._words[word]
        self._fence()
        return value

    def store(self, word: int, value: int) -> None:
        """Store a word, ordered with the writes before and after."""
        self._fence()
        self._words[word] = value
        self._fence()

    def write(self, offset: int, start: int, document: bytes, sequence: int) -> None:
        """Write a document, then its record."""
        self.view[start : start + len(document)] = document
        record = layout.encode_record(layout.make_record(sequence, document))
        self.view[offset : offset + len(record)] = record

    def images(self, spans: layout.SnapshotSpans) -> tuple[memoryview, ...]:
        return tuple(self.view[span.start : span.stop] for span in spans.images)

    def _fence(self) -> None:
        self._lock.release()
        self._lock.acquire()


class Arena:
    """The trainer's side of an arena. One thread stages at a time. The caller has the lock."""

    def __init__(self, path: str, fd: int, job: str) -> None:
        """Open a file of shared memory. A snapshot of this job in it stays until `begin`.

        Other processes open it by `path`. CorruptError or IncompatibleError unless the file is
        empty or an arena of this job. `close` closes the descriptor. An error here closes it too.
        """
        self.path = path
        self._fd = fd
        try:
            header = os.pread(fd, layout.HEADER_NBYTES, 0)
            if any(header):
                layout.check_identity(header, job, path)
            else:
                reserve(fd, layout.HEADER_NBYTES)
                os.pwrite(fd, layout.encode_identity(job), 0)
            self._mapped = _MappedArena(fd, touch=True)
            if self._mapped.load(layout.SEQUENCE_WORD) > _MAX_SEQUENCE:
                raise CorruptError(f"{path}: the header is damaged")
        except BaseException:
            os.close(fd)
            raise
        self._spans: layout.SnapshotSpans | None = None
        run_after_fork(self.detach_in_child)

    @property
    def nbytes(self) -> int:
        """The size of its memory."""
        return len(self._mapped.view)

    @property
    def memory(self) -> memoryview:
        """All of its memory, for a driver to pin. `reserve` may replace it by a larger mapping."""
        return self._mapped.view

    def reserve(self, nbytes: int) -> None:
        """Enlarge the arena to `nbytes` if it is smaller. Its content stays.

        OSError without enough memory. A writer keeps its mapping, and maps the new part when a
        snapshot needs it.
        """
        if nbytes > self.nbytes:
            reserve(self._fd, nbytes)
            self._mapped = _MappedArena(self._fd, touch=True)

    def begin(self, snapshot: layout.Snapshot) -> tuple[memoryview, ...]:
        """Overwrite the last snapshot with one that fits. Return its images, with old bytes."""
        document = typed_msgpack.encode(snapshot)
        spans = layout.compute_spans(snapshot, len(document))
        assert spans.nbytes <= self.nbytes, f"{spans.nbytes} bytes into {self.nbytes}"
        mapped = self._mapped
        # A number that was never used, so that no older seal matches.
        odd = (mapped.load(layout.SEQUENCE_WORD) + 1) | 1
        mapped.store(layout.SEQUENCE_WORD, odd)
        mapped.store(layout.READY_WORD, 0)
        mapped.write(layout.DOCUMENT_RECORD, spans.document.start, document, odd + 1)
        self._spans = spans
        return mapped.images(spans)

    @property
    def spans(self) -> layout.SnapshotSpans:
        """The layout of the current snapshot."""
        assert self._spans is not None, "nothing was begun"
        return self._spans

    def advance(self, stop: int) -> None:
        """Publish that all bytes of the arena before `stop` are staged."""
        self._mapped.store(layout.READY_WORD, stop)

    def complete(self) -> None:
        """Publish that the snapshot is complete. Nothing may change it before the next `begin`."""
        self.advance(self.spans.nbytes)
        odd = self._mapped.load(layout.SEQUENCE_WORD)
        assert odd % 2, "completed twice"
        self._mapped.store(layout.SEQUENCE_WORD, odd + 1)

    def close(self) -> None:
        """Release the memory. Views of it that are still used keep it mapped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._spans = None
            del self._mapped

    def detach_in_child(self) -> None:
        """Release the memory in a forked child, even if it is in use. The child may live longer."""
        if self._fd >= 0:
            detach_in_child(self._mapped.memory, self._fd)


@dataclass(frozen=True, slots=True, eq=False)
class FollowedArena:
    """The writer's view of one snapshot. It reads the images, and writes the headers into them."""

    snapshot: layout.Snapshot
    spans: layout.SnapshotSpans
    images: tuple[memoryview, ...]
    sequence: int
    _mapped: _MappedArena

    @property
    def ready(self) -> int:
        """The first byte that is not staged. ConflictError if another snapshot is there now."""
        ready = self._mapped.load(layout.READY_WORD)
        self.check()
        return min(ready, self.spans.nbytes)

    @property
    def is_complete(self) -> bool:
        """True if all is staged. ConflictError if another snapshot is there now."""
        return self.check() == self.sequence

    def check(self) -> int:
        """Return the sequence of the arena. ConflictError if it has another snapshot now."""
        sequence = self._mapped.load(layout.SEQUENCE_WORD)
        if sequence not in (self.sequence - 1, self.sequence):
            raise ConflictError(
                f"snapshot {self.snapshot.id} of {self.snapshot.path} was overwritten in memory "
                f"before it was written: save again"
            )
        return sequence

    def seal(self, seal: layout.Seal) -> None:
        """Store the seal of a complete snapshot. Its headers and digests are in the arena."""
        assert self.is_complete, "sealed before it was complete"
        document = typed_msgpack.encode(seal)
        span = self.spans.seal
        assert len(document) <= span.nbytes, f"a seal of {len(document)} bytes"
        self._mapped.write(layout.SEAL_RECORD, span.start, document, self.sequence)

    def mark_committed(self) -> None:
        """Mark a sealed snapshot as committed."""
        self._mapped.store(layout.COMMITTED_WORD, self.sequence)


class ArenaReader:
    """The writer's side of an arena. One thread uses it at a time.

    It closes with its last reference. Views of the memory that are still used keep it mapped.
    """

    def __init__(self, path: str, job: str) -> None:
        """Open an arena. CorruptError or IncompatibleError unless it belongs to this job."""
        self.path = path
        self.fd = open_existing(path, writable=True)  # others may open /proc/PID/fd/FD
        self._close = weakref.finalize(self, os.close, self.fd)
        try:
            layout.check_identity(os.pread(self.fd, layout.HEADER_NBYTES, 0), job, path)
            self._mapped = _MappedArena(self.fd, touch=False)
        except BaseException:
            self._close()
            raise

    def follow(self, snapshot_id: str) -> FollowedArena:
        """Return a view of a snapshot, which may still be incomplete.

        ConflictError if the arena has another snapshot, CorruptError if its content is invalid.
        """
        record = layout.decode_record(self._mapped.view, layout.DOCUMENT_RECORD)
        if record is None:
            raise CorruptError(f"{self.path} has no snapshot")
        nbytes = os.fstat(self.fd).st_size
        span = layout.document_span(record, self.path)
        document = os.pread(self.fd, span.nbytes, span.start)
        snapshot, spans = layout.decode_snapshot(document, record, nbytes, self.path)
        if spans.nbytes > len(self._mapped.view):  # the arena has grown
            self._mapped = _MappedArena(self.fd, touch=False)
        if snapshot.id != snapshot_id:
            raise ConflictError(
                f"{self.path} has snapshot {snapshot.id} of {snapshot.path}, not {snapshot_id}"
            )
        images = self._mapped.images(spans)
        followed = FollowedArena(snapshot, spans, images, record.sequence, self._mapped)
        followed.check()
        return followed

    def close(self) -> None:
        """Close the arena now. `follow` must not be called any more."""
        if self._close.alive:
            self._close()
            del self._mapped


_log = logging.getLogger("dist_ckpt")


class ArenaPool:
    """The arenas of a trainer, by their numbers. The caller has the trainer's lock of the folder.

    Snapshots of an earlier run stay until they are overwritten, or their arena is replaced.
    `newest` is the number of the arena that was staged last: it is overwritten last. `newest_at` is
    when that save began, by its coordinator's clock, or 0.
    """

    def __init__(self, folder: RankFolder) -> None:
        self._folder = folder
        began_at = {number: save.began_at for number, save in _complete_saves(folder).items()}
        self.newest = max(began_at, key=began_at.__getitem__, default=0)
        self.newest_at = began_at.get(self.newest, 0.0)
        self._arenas: dict[int, Arena] = {}
        self._has_snapshot = frozenset(began_at)
        self._has_warned = not folder.is_shared_memory  # `JobFolder` has warned already

    def find_oldest(self, busy: Collection[int]) -> int:
        """Return the number of the arena that is not busy and was staged longest ago."""
        free = [number for number in range(NUM_ARENAS) if number not in busy]
        return min(free, key=lambda number: number == self.newest)

    def is_unused(self, number: int) -> bool:
        """Return True if nothing was staged into an arena, also by an earlier run."""
        return number not in self._arenas and number not in self._has_snapshot

    def overwrite_last(self, snapshot: str) -> None:
        """Overwrite a restored snapshot last: a newer one may be incomplete on another rank."""
        for number, save in _complete_saves(self._folder).items():
            if save.id == snapshot:
                self.newest = number

    def open_fitting(self, number: int, nbytes: int) -> Arena:
        """Return an arena of at least this size. StorageError without enough memory.

        An arena that must grow keeps its content if its file can grow. Otherwise anonymous memory
        replaces it. The caller stages nothing into the arena during this call.
        """
        arena = self._arenas.pop(number, None) or self._reopen(number)
        try:
            if arena is not None:
                try:
                    arena.reserve(nbytes)
                except OSError as error:
                    arena.close()
                    if not is_out_of_space(error):
                        raise
                    arena = None
            if arena is None:
                arena = Arena(*self._allocate(number, nbytes), self._folder.job)
        except OSError as error:
            raise StorageError(
                f"no memory for a snapshot of {nbytes:,} bytes: {error.strerror}; save with "
                f"dc.save or background=False, use more ranks, or give the job more memory",
                rank=self._folder.rank,
            ) from error
        self._arenas[number] = arena
        return arena

    def close(self) -> None:
        """Release all memory. Named arenas stay for a later run."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _reopen(self, number: int) -> Arena | None:
        """Return the arena of an earlier run of the job, if it is valid."""
        for path in self._folder.open_paths(number):
            with suppress(CheckpointError, OSError):
                fd = open_existing(path, writable=True)
                is_anonymous = path.startswith("/proc/")
                opened_by = self._publish(number, fd) if is_anonymous else path
                return Arena(opened_by, fd, self._folder.job)
        return None

    def _allocate(self, number: int, nbytes: int) -> tuple[str, int]:
        path = self._folder.arena_path(number)
        for replaced in (path, f"{path}.new"):  # by `create_named`
            check_regular_file(replaced)
        has_anonymous = hasattr(os, "memfd_create")
        if self._folder.is_shared_memory or not has_anonymous:
            try:
                return path, create_named(path, nbytes)
            except OSError as error:
                if not has_anonymous or not is_out_of_space(error):
                    raise
                self._warn(nbytes, error)
        # The named arena would be opened first, and its memory is needed.
        with suppress(FileNotFoundError):
            os.unlink(path)
        fd = create_anonymous(nbytes)
        return self._publish(number, fd), fd

    def _publish(self, number: int, fd: int) -> str:
        """Publish anonymous memory. Return its path. An error closes the descriptor."""
        try:
            return self._folder.publish("trainer", number, fd)
        except BaseException:
            os.close(fd)
            raise

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


def find_only_copy(folder: RankFolder) -> str:
    """Return the name of a save that may exist only in the arenas of a rank, or "".

    It is the newest restorable snapshot, if it was never committed. For an arena of another version
    of dist_ckpt, return the problem.
    """
    try:
        snapshots = [_read_complete(folder, number) for number in range(NUM_ARENAS)]
    except IncompatibleError as error:
        return str(error)
    sealed = [complete for complete in snapshots if complete and complete[1].seal is not None]
    if not sealed:
        return ""
    save, recovered = max(sealed, key=lambda complete: complete[0].began_at)
    return "" if recovered.is_committed else save.name


def _complete_saves(folder: RankFolder) -> dict[int, SaveIdentity]:
    """Return the save of the complete snapshot in each arena, if this version can read it."""
    saves: dict[int, SaveIdentity] = {}
    for number in range(NUM_ARENAS):
        with suppress(IncompatibleError):
            if (complete := _read_complete(folder, number)) is not None:
                saves[number] = complete[0]
    return saves


def _read_complete(
    folder: RankFolder, number: int
) -> tuple[SaveIdentity, RecoveredSnapshot] | None:
    """Return the complete snapshot in an arena, closed. IncompatibleError for another version."""
    recovered, problems = open_first(folder, number)
    for problem in problems:  # other problems: damaged arenas, or other files
        if isinstance(problem, IncompatibleError):
            raise problem
    if recovered is None:
        return None
    with closing(recovered), suppress(ValueError):
        if recovered.is_complete:
            return SaveIdentity.of(recovered.snapshot), recovered
    return None
