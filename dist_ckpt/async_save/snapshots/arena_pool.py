"""The two arenas of a trainer: found again, made, grown, or had elsewhere when memory is short."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass

from dist_ckpt.async_save.snapshots.arena import Arena
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS, RankFolder, check_file
from dist_ckpt.async_save.snapshots.recovered_snapshots import SaveIdentity, open_first
from dist_ckpt.core.runtime.shared_memory import (
    create_anonymous,
    create_named,
    is_out_of_space,
    open_existing,
)
from dist_ckpt.errors import CheckpointError, IncompatibleError, StorageError

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
