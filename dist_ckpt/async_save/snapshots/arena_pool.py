"""The two arenas of a trainer: open, enlarge or replace them, and select the one to overwrite."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import closing, suppress

from dist_ckpt.async_save.snapshots.arena import Arena
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS, RankFolder, check_file
from dist_ckpt.async_save.snapshots.recovered_snapshots import (
    RecoveredSnapshot,
    SaveIdentity,
    open_first,
)
from dist_ckpt.core.runtime.shared_memory import (
    create_anonymous,
    create_named,
    is_out_of_space,
    open_existing,
)
from dist_ckpt.errors import CheckpointError, IncompatibleError, StorageError

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
        self._has_warned = not folder.is_shared_memory  # `JobFolder` has warned already

    def find_oldest(self, busy: Collection[int]) -> int:
        """Return the number of the arena that is not busy and was staged longest ago."""
        free = [number for number in range(NUM_ARENAS) if number not in busy]
        return min(free, key=lambda number: number == self.newest)

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
                f"dc.save, use more ranks, or give the job more memory",
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
            check_file(replaced)
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
