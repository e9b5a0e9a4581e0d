"""What a background writer has to do: saves in order, which its trainer may pause, drop, abort."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass

from dist_ckpt.errors import CheckpointError, ConflictError, CorruptError, RankError
from dist_ckpt.snapshots.arena import ArenaReader, Followed
from dist_ckpt.snapshots.job_folder import NUM_ARENAS, RankFolder
from dist_ckpt.writer.messages import NonsenseError, Write

# More than a trainer has arenas, which it stages into one after the other.
MAX_SAVES = 8

# How long at most nobody looks whether there is still something to wait for.
_STEP_S = 60.0


@dataclass(slots=True, eq=False)
class QueuedSave:
    """A save that is to be written; `arena` is where it is staged, or why it cannot be opened."""

    write: Write
    arena: ArenaReader | CheckpointError
    is_paused: bool = False
    aborted: str = ""

    def follow(self) -> Followed:
        """Return the snapshot in its arena."""
        if isinstance(self.arena, CheckpointError):
            raise self.arena
        return self.arena.follow(self.write.snapshot)


class WriterQueue:
    """The saves of one writer. One thread puts them in and changes them, another takes them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._changed = threading.Condition()
        self._saves: deque[QueuedSave] = deque()
        self._is_ended = False
        self._is_trainer_gone = False
        self._current: QueuedSave | None = None

    def put(self, save: QueuedSave) -> None:
        """Add a save."""
        with self._changed:
            if self._is_ended or len(self._saves) >= MAX_SAVES:
                raise NonsenseError("more saves than there may be are to be written")
            self._saves.append(save)
            self._changed.notify_all()

    def abort(self, snapshot: str, reason: str) -> None:
        """Have a save fail, unless it is complete."""
        with self._changed:
            for save in self.unsettled:
                if save.write.snapshot == snapshot:
                    save.aborted = reason or "no reason was given"

    def pause(self, snapshot: str) -> bool:
        """Keep a save from being taken; say whether it had not been."""
        with self._changed:
            paused = [save for save in self._saves if save.write.snapshot == snapshot]
            for save in paused:
                save.is_paused = True
            return bool(paused)

    def go(self, snapshot: str, *, drop: bool) -> None:
        """Let a save that is paused be taken, or drop it."""
        with self._changed:
            for save in [*self._saves]:
                if save.write.snapshot == snapshot and save.is_paused:
                    save.is_paused = False
                    if drop:
                        self._saves.remove(save)
            self._changed.notify_all()

    def end(self, *, is_trainer_gone: bool) -> None:
        """Take nothing more in. A save that is paused can be taken: nobody will say so."""
        with self._changed:
            self._is_ended = True
            self._is_trainer_gone = self._is_trainer_gone or is_trainer_gone
            for save in self._saves:
                save.is_paused = False
            self._changed.notify_all()

    def take(self) -> QueuedSave | None:
        """Return the next save, once there is one not paused; None when there is no more."""
        with self._changed:
            self._current = None
            while not (self._saves and not self._saves[0].is_paused):
                if self._is_ended and not self._saves:
                    return None
                self._changed.wait(_STEP_S)
            self._current = self._saves[0]  # first: `unsettled` misses none
            self._saves.popleft()
            return self._current

    @property
    def unsettled(self) -> list[QueuedSave]:
        """The save taken last, and those to be taken.

        Takes no lock: an interrupt, which may come at any moment, may have left it held.
        """
        saves = (self._current, *self._saves)
        return list(dict.fromkeys(save for save in saves if save is not None))

    def check(self, save: QueuedSave) -> None:
        """Raise the error of a save that is not complete and will never be."""
        if save.aborted:
            raise CheckpointError(
                f"a snapshot of {save.write.path} could not be staged: {save.aborted}",
                rank=self._rank,
            )
        if self._is_trainer_gone:
            raise RankError(
                f"the trainer of rank {self._rank} has ended before its snapshot of "
                f"{save.write.path} was staged: nothing is committed. Look into that rank's log, "
                f"and restart the job",
                rank=self._rank,
            )


class KnownArenas:
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
