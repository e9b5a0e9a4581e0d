"""What a background writer has to do: saves in order, which its trainer may pause, drop, abort."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable

from dist_ckpt.async_save.snapshots.arena import ArenaReader
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS, RankFolder
from dist_ckpt.async_save.writer.messages import ProtocolError, Write
from dist_ckpt.async_save.writer.write_jobs import WriterSave
from dist_ckpt.errors import CheckpointError, ConflictError, CorruptError, RankError

# More than a trainer has arenas, which it stages into one after the other.
MAX_SAVES = 8

# How long at most nobody looks whether there is still something to wait for.
_STEP_S = 60.0


class WriterQueue:
    """The saves of one writer. One thread puts them in and changes them, another takes them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._changed = threading.Condition()
        self._saves: deque[WriterSave] = deque()
        # Snapshots: those that wait, and why some fail.
        self._paused: set[str] = set()
        self._aborted: dict[str, str] = {}
        self._is_ended = False
        self._is_trainer_gone = False
        self._current: WriterSave | None = None

    def put(self, save: WriterSave) -> None:
        """Add a save."""
        with self._changed:
            if self._is_ended or len(self._saves) >= MAX_SAVES:
                raise ProtocolError("more saves than there may be are to be written")
            self._saves.append(save)
            self._changed.notify_all()

    def abort(self, snapshot: str, reason: str) -> None:
        """Have a save fail, unless it is complete."""
        with self._changed:
            if snapshot in _names(self.unsettled):
                self._aborted[snapshot] = reason or "no reason was given"

    def pause(self, snapshot: str) -> bool:
        """Keep a save from being taken; say whether it had not been."""
        with self._changed:
            if is_there := snapshot in _names(self._saves):
                self._paused.add(snapshot)
            return is_there

    def go(self, snapshot: str, *, drop: bool) -> None:
        """Let a save that is paused be taken, or drop it."""
        with self._changed:
            if drop and snapshot in self._paused:
                del self._saves[_names(self._saves).index(snapshot)]
            self._paused.discard(snapshot)
            self._changed.notify_all()

    def end(self, *, is_trainer_gone: bool) -> None:
        """Take nothing more in. A save that is paused can be taken: nobody will say so."""
        with self._changed:
            self._is_ended = True
            self._is_trainer_gone = self._is_trainer_gone or is_trainer_gone
            self._paused.clear()
            self._changed.notify_all()

    def take(self) -> WriterSave | None:
        """Return the next save, once there is one not paused; None when there is no more."""
        with self._changed:
            if self._current is not None:
                self._aborted.pop(self._current.write.snapshot, None)
                self._current = None
            while not self._saves or self._saves[0].write.snapshot in self._paused:
                if self._is_ended and not self._saves:
                    return None
                self._changed.wait(_STEP_S)
            self._current = self._saves[0]  # first: `unsettled` misses none
            self._saves.popleft()
            return self._current

    @property
    def unsettled(self) -> list[WriterSave]:
        """The save taken last, and those to be taken.

        Takes no lock: an interrupt, which may come at any moment, may have left it held.
        """
        saves = (self._current, *self._saves)
        return list(dict.fromkeys(save for save in saves if save is not None))

    def check(self, write: Write) -> None:
        """Raise the error of a save that is not complete and will never be."""
        if (reason := self._aborted.get(write.snapshot)) is not None:
            raise CheckpointError(
                f"a snapshot of {write.path} could not be staged: {reason}",
                rank=self._rank,
            )
        if self._is_trainer_gone:
            raise RankError(
                f"the trainer of rank {self._rank} has ended before its snapshot of "
                f"{write.path} was staged: nothing is committed. Look into that rank's log, "
                f"and restart the job",
                rank=self._rank,
            )


def _names(saves: Iterable[WriterSave]) -> list[str]:
    return [save.write.snapshot for save in saves]


class OpenArenas:
    """The arenas of a rank, opened once, so that they outlive the trainer.

    One that another has replaced is closed as soon as no save needs it.
    """

    def __init__(self, folder: RankFolder) -> None:
        self._folder = folder
        self._known: dict[int, ArenaReader] = {}

    def open(self, write: Write) -> ArenaReader | CheckpointError:
        """Return the arena of a save, or why there is none; others are told where it is."""
        number, place = write.number, write.place
        try:
            if not 0 <= number < NUM_ARENAS:
                raise CorruptError(f"there is no arena {number} of rank {self._folder.rank}")
            known = self._known.get(number)
            if (
                known is not None
                and known.place == place
                and os.path.samestat(os.stat(place), os.fstat(known.fd))
            ):
                return known
            reader = ArenaReader(place, self._folder.job)
            if place.startswith("/proc/"):
                self._folder.tell("writer", number, reader.fd)
            self._known[number] = reader
        except FileNotFoundError:
            return ConflictError(f"{place} is gone: who has removed it? Save again")
        except OSError as error:
            return CorruptError(f"{place} cannot be opened: {error.strerror}")
        except CheckpointError as error:
            return error
        return reader

    def close(self) -> None:
        """Close all. No thread uses them any more."""
        for reader in self._known.values():
            reader.close()
