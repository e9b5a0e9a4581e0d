"""What a rank has of a job that saves in the background: folder, locks, arenas, writer."""

from __future__ import annotations

import gc
import logging
import warnings
from contextlib import suppress
from weakref import finalize

from dist_ckpt.async_save.snapshots.arena import ArenaPool, only_copy_in
from dist_ckpt.async_save.snapshots.job_folder import ROLES, JobFolder, RankFolder
from dist_ckpt.async_save.trainer.orphan_writers import end_orphan_writers
from dist_ckpt.async_save.trainer.writer_handle import WriterHandle, first_error
from dist_ckpt.async_save.writer.messages import Hello
from dist_ckpt.core.runtime.lock_files import LockFile
from dist_ckpt.core.shard_io.memory.cuda import Fence, PinnedArenas, SideStreams
from dist_ckpt.errors import CheckpointError, ConflictError

_log = logging.getLogger("dist_ckpt")

# A writer that has nothing more to settle ends within this, or is killed.
END_S = 60.0


class Job:
    """One rank's part of a job. It is this rank's one trainer on this host until `close`.

    Writers of an earlier run are settled with, and a new one is started. ConflictError if the
    job has a living trainer of this rank, in this process or another. If it is not closed, it ends
    with the last reference to it: its writer goes on as if this process had died.
    """

    def __init__(self, hello: Hello, *, drain_timeout_s: float) -> None:
        self.folder = JobFolder(hello.job)
        self._own = self.folder.rank(hello.rank)
        self._lock = _trainer_lock(self._own)
        try:
            end_orphan_writers(self.folder, drain_timeout_s)
            self.arenas = ArenaPool(self._own)
            self.writer = WriterHandle(self._own, hello)
            self.writer.newest_at = self.arenas.newest_at
            self.writer.ensure()
        except BaseException:
            self._lock.release()
            raise
        self.streams, self.pinned, self.fence = SideStreams(), PinnedArenas(), Fence()
        self._world_size = hello.world_size
        self._has_reclaimed = False
        self._held = self._lock, self.arenas, self.pinned, self.fence, self.writer
        self._dropped = finalize(self, _let_go, *self._held, hello.job)
        # At the end of the process all that ends anyway.
        self._dropped.atexit = False

    def reclaim(self, *, all_are_here: bool) -> None:
        """Remove what ranks have left that do not exist any more, once a checkpoint is durable.

        `all_are_here`: all ranks of this run hold their locks just now. Otherwise one of them may
        have ended, and have kept its snapshots for the next run: those are left alone.
        """
        if self._has_reclaimed or not self.writer.has_committed:
            return
        self._has_reclaimed = all_are_here
        for folder in self._ownerless():
            if folder.rank >= self._world_size or all_are_here:
                _remove(folder)

    def _ownerless(self) -> list[RankFolder]:
        folders = self.folder.present()
        return [one for one in folders if not any(one.owner(role) for role in ROLES)]

    def wait(self, timeout_s: float | None) -> None:
        """Wait until everything is settled. Raises TimeoutError, and what a save has failed of."""
        writer = self.writer
        if not writer.wait_for(lambda: not writer.unsettled, timeout_s):
            paths = ", ".join(order.snapshot for order in writer.unsettled)
            raise TimeoutError(
                f"saves are not settled within {timeout_s:g} s ({paths}): they go on, wait again"
            )
        failed = writer.failed
        for order in failed:
            order.is_told = True
        if errors := [order.failure for order in failed if order.failure]:
            raise first_error(errors)

    def detach(self) -> None:
        """Let the writer finish what is staged, and end by itself; others may be trainer."""
        self._dropped.detach()
        self.fence.close()
        _leave(*self._held)

    def close(self, *, keep: bool) -> None:
        """End the writer when everything is settled; give the memory back, unless `keep`.

        What may be nowhere else is kept as well. Raises what a save has failed of that nobody was
        told of.
        """
        self._dropped.detach()
        writer = self.writer
        try:
            self.fence.close()
            writer.wait_for(lambda: not writer.unsettled, None)
            writer.close(END_S)
            self.reclaim(all_are_here=False)
        finally:
            self.pinned.close()
            self.arenas.close()
            self._lock.release()
        failed = writer.failed
        for order in failed:
            order.is_told = True
        try:
            if not keep:
                self._give_back()
        finally:
            if errors := [order.failure for order in failed if order.failure]:
                raise first_error(errors)

    def _give_back(self) -> None:
        if self.writer.is_last_committed is not None:  # something was saved
            if self.writer.is_last_committed or self._own.is_empty:
                _remove(self._own)
        else:
            gone = [one for one in self._ownerless() if one.rank >= self._world_size]
            for folder in (self._own, *gone):
                if not (name := only_copy_in(folder)):
                    _remove(folder)
                else:
                    _log.warning(
                        "%s: kept in memory, as it may be nowhere else: %s. A later run of the job "
                        "may restore and save it; else remove that folder",
                        *(folder.path, name),
                    )
        self.folder.discard()


def _leave(
    lock: LockFile, arenas: ArenaPool, pinned: PinnedArenas, fence: Fence, writer: WriterHandle
) -> None:
    """Let the writer finish what is staged, and others be trainer. Waits for no storage."""
    try:
        fence.join()
        pinned.close()
    finally:
        arenas.close()
        writer.detach()
        lock.release()


def _let_go(
    lock: LockFile,
    arenas: ArenaPool,
    pinned: PinnedArenas,
    fence: Fence,
    writer: WriterHandle,
    job: str,
) -> None:
    """Leave a job that was dropped, and not closed; say what became of its saves."""
    if not lock.is_held:  # a forked child has no part in it
        return
    # Waits for nothing: a copy that is under way keeps the job. The fence's hook stays, for a step
    # may be going through all of them just now; it does nothing any more.
    _leave(lock, arenas, pinned, fence, writer)
    if unsettled := writer.unsettled:
        _log.warning(
            "an AsyncSaver of job %s is gone without close(): its background writer goes on "
            "with the saves that were not settled (%d), and only its log says how they end",
            *(job, len(unsettled)),
        )
    for order in writer.failed:
        _log.error("a background save of job %s has failed: %s", job, order.failure)
    warnings.warn(f"unclosed AsyncSaver of job {job}", ResourceWarning, stacklevel=2)


def _trainer_lock(own: RankFolder) -> LockFile:
    """Become the trainer of a rank. ConflictError if there is one."""
    try:
        return own.lock("trainer")
    except ConflictError:
        owner = own.owner("trainer")
        if owner is not None and not owner.is_this_process:
            raise
    # One that was dropped may be part of a cycle, such as an error that was raised in it makes.
    gc.collect()
    try:
        return own.lock("trainer")
    except ConflictError as error:
        raise ConflictError(
            f"another AsyncSaver of job {own.job!r} is open in this process: close it, use "
            f"another root, or give this one another job: AsyncSaver(job=...)",
            rank=own.rank,
        ) from error


def _remove(folder: RankFolder) -> None:
    """Remove what a rank has left, if no other is faster, or uses it by now."""
    with suppress(CheckpointError, OSError):
        folder.remove()
        _log.info("%s: what was left there is removed", folder.path)
