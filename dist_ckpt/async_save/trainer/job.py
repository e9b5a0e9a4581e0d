"""One rank's part of a job that saves in the background: folder, locks, arenas, writer.

Writers that an earlier run left on this host may first finish; then they are ended.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from weakref import finalize

import torch

from dist_ckpt.async_save.snapshots.arena import ArenaPool, find_only_copy
from dist_ckpt.async_save.snapshots.job_folder import ROLES, JobFolder, RankFolder
from dist_ckpt.async_save.trainer.writer_handle import PROGRAMS, WriterHandle
from dist_ckpt.async_save.writer.writer_messages import WRITER_END_S, Hello
from dist_ckpt.core.runtime.lock_files import LockFile, LockOwner
from dist_ckpt.core.runtime.processes import running_time
from dist_ckpt.core.runtime.threads import POLL_S
from dist_ckpt.core.shard_io.memory.cuda import Fence, PinnedArenas, SideStreams
from dist_ckpt.errors import CheckpointError, ConflictError, StorageError
from dist_ckpt.message_text import ranks_text

_log = logging.getLogger("dist_ckpt")

# A writer without unsettled saves ends within this time, or is killed.
CLOSE_TIMEOUT_S = 60.0

# The same after SIGTERM, for a writer that an earlier run left.
_STOP_S = WRITER_END_S + 10.0
# A killed process ends when the kernel permits it.
_KILL_S = 10.0
_END_CHECK_INTERVAL_S = 0.02

_MAX_WORDS_NBYTES = 4096

_LOWEST_PRIORITY = 19


class ArenaPreparation:
    """Makes arenas in parallel to training: allocates, touches and pins them, one after another.

    The threads have the lowest priority, and pause between the pinned pieces: a training step that
    launches work on a device waits for a piece. One thread uses this object.
    """

    def __init__(self, arenas: ArenaPool, pinned: PinnedArenas) -> None:
        self._arenas, self._pinned = arenas, pinned
        self._ready: dict[int, threading.Event] = {}
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._is_closed = False

    def begin(self, numbers: Iterable[int], nbytes: int, device: torch.device | None) -> None:
        """Begin with arenas that no save uses, in this order, unless they are prepared already.

        An arena with a snapshot of an earlier run stays as it is, until a save needs it.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        unused = [number for number in numbers if self._arenas.is_unused(number)]
        self._ready = {number: threading.Event() for number in unused}
        if unused:
            work = partial(self._run, unused, nbytes, device)
            thread = threading.Thread(target=work, name="dist_ckpt arena", daemon=True)
            with suppress(RuntimeError):  # out of threads: each save makes its arena
                thread.start()
                self._thread = thread

    def finish(self, number: int) -> None:
        """Wait until an arena is prepared, if it was begun. There are no more pauses until then."""
        if (ready := self._ready.get(number)) is not None and self._thread is not None:
            self._hurry.set()
            while not ready.wait(POLL_S) and self._thread.is_alive():
                pass
            self._hurry.clear()

    def close(self) -> None:
        """Prepare no more, and wait for the end of what has begun."""
        self._is_closed = True
        self._hurry.set()
        thread = self._thread
        # A dropped job may end in this thread itself.
        while thread not in (None, threading.current_thread()) and thread.is_alive():
            thread.join(POLL_S)

    def _run(self, numbers: Sequence[int], nbytes: int, device: torch.device | None) -> None:
        with suppress(OSError):  # of this thread only, and of the threads that it starts
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        for number in numbers:
            if not self._is_closed:
                self._prepare(number, nbytes, device)
            self._ready[number].set()

    def _prepare(self, number: int, nbytes: int, device: torch.device | None) -> None:
        try:
            arena = self._arenas.open_fitting(number, nbytes)
            if device is not None:
                self._pinned.pin(number, arena.memory, device, self._hurry)
        except (CheckpointError, OSError) as error:
            _log.warning("an arena cannot be prepared in parallel to training: %s", error)


class Job:
    """One rank's part of a job: this process is the rank's only trainer on this host until `close`.

    The constructor ends the writers of an earlier run and starts a new one. ConflictError if the
    job has a living trainer of this rank, in this process or another. Without `close` the job ends
    with its last reference: its writer continues as if this process had died.
    """

    def __init__(self, hello: Hello, *, drain_timeout_s: float) -> None:
        self.folder = JobFolder(hello.job)
        self._rank_folder = self.folder.rank(hello.rank)
        self._lock = _take_trainer_lock(self._rank_folder)
        try:
            end_orphan_writers(self.folder, drain_timeout_s)
            self.arenas = ArenaPool(self._rank_folder)
            self.writer = WriterHandle(self._rank_folder, hello)
            self.writer.newest_at = self.arenas.newest_at
            self.writer.ensure_running()
        except BaseException:
            self._lock.release()
            raise
        self.streams, self.pinned, self.fence = SideStreams(), PinnedArenas(), Fence()
        # A save has failed, as a tensor changed while it was copied: copy all before training.
        self.copies_first = False
        self._world_size = hello.world_size
        self._has_removed_stale = False
        self.preparation = ArenaPreparation(self.arenas, self.pinned)
        self._resources = _Resources(
            self._lock, self.arenas, self.pinned, self.preparation, self.fence, self.writer
        )
        self._finalizer = finalize(self, _detach_unclosed, self._resources, hello.job)
        # The exit of the process releases the resources.
        self._finalizer.atexit = False

    def remove_stale_folders(self, *, has_all_ranks: bool) -> None:
        """Remove the folders of ranks that no longer exist, once a checkpoint is durable.

        `has_all_ranks`: all ranks of this run have their locks now. Without it, a rank of this run
        may have ended and left snapshots for the next run: its folder stays.
        """
        if self._has_removed_stale or not self.writer.has_committed:
            return
        self._has_removed_stale = has_all_ranks
        for folder in self._find_ownerless():
            if folder.rank >= self._world_size or has_all_ranks:
                _remove(folder)

    def _find_ownerless(self) -> list[RankFolder]:
        folders = self.folder.rank_folders()
        return [folder for folder in folders if not any(map(folder.owner, ROLES))]

    def wait(self, timeout_s: float | None) -> None:
        """Wait until all saves are settled. Raises TimeoutError, or the error of a failed save."""
        writer = self.writer
        if not writer.wait_for(lambda: not writer.unsettled, timeout_s):
            paths = ", ".join(save.snapshot for save in writer.unsettled)
            raise TimeoutError(
                f"saves are not settled within {timeout_s:g} s ({paths}): they continue, wait again"
            )
        writer.raise_failed()

    def detach(self) -> None:
        """Let the writer finish staged saves and end. Another process may become the trainer."""
        self._finalizer.detach()
        self.fence.close()
        self._resources.detach()

    def close(self, *, keep: bool) -> None:
        """End the writer when all saves are settled. Free the memory, unless `keep`.

        A snapshot that may be the only copy stays. Raises an error that was not reported yet.
        """
        self._finalizer.detach()
        writer = self.writer
        try:
            self.fence.close()
            writer.wait_for(lambda: not writer.unsettled, None)
            writer.close(CLOSE_TIMEOUT_S)
            self.remove_stale_folders(has_all_ranks=False)
        finally:
            self.preparation.close()
            self.pinned.close()
            self.arenas.close()
            self._lock.release()
        try:
            if not keep:
                self._free_memory()
        finally:
            writer.raise_failed()

    def _free_memory(self) -> None:
        if self.writer.is_last_committed is not None:  # something was saved
            if self.writer.is_last_committed or self._rank_folder.is_empty:
                _remove(self._rank_folder)
        else:
            removed = [
                folder for folder in self._find_ownerless() if folder.rank >= self._world_size
            ]
            for folder in (self._rank_folder, *removed):
                if not (name := find_only_copy(folder)):
                    _remove(folder)
                else:
                    _log.warning(
                        "%s: a snapshot stays in memory, as it may be the only copy: %s. Start "
                        "the job again to restore the snapshot, or remove that folder",
                        *(folder.path, name),
                    )
        self.folder.remove_if_empty()


class _Resources(NamedTuple):
    """The resources of a job. They are a separate value, as they outlive the job."""

    lock: LockFile
    arenas: ArenaPool
    pinned: PinnedArenas
    preparation: ArenaPreparation
    fence: Fence
    writer: WriterHandle

    def detach(self) -> None:
        """Let the writer finish staged saves; release the lock. Does not wait for storage."""
        try:
            self.preparation.close()
            self.fence.wait_until_staged()
            self.pinned.close()
        finally:
            self.arenas.close()
            self.writer.detach()
            self.lock.release()


def _detach_unclosed(resources: _Resources, job: str) -> None:
    """Leave a job that was not closed. Log the state of its saves."""
    if not resources.lock.is_locked:  # a forked child does not have the lock
        return
    # This does not wait: no copy is running, as a copy has a reference to the job. The hook of the
    # fence stays, but does nothing: an optimizer step may be iterating over all hooks now.
    resources.detach()
    if unsettled := resources.writer.unsettled:
        _log.warning(
            "an AsyncSaver of job %s was dropped without close(): its background writer continues "
            "with %d unsettled saves, and only its log has their outcome",
            *(job, len(unsettled)),
        )
    for save in resources.writer.failed:
        _log.error("a background save of job %s has failed: %s", job, save.failure)
    warnings.warn(f"unclosed AsyncSaver of job {job}", ResourceWarning, stacklevel=2)


def _take_trainer_lock(rank_folder: RankFolder) -> LockFile:
    """Become the trainer of a rank. ConflictError if it has one."""
    try:
        return rank_folder.lock("trainer")
    except ConflictError:
        owner = rank_folder.owner("trainer")
        if owner is not None and not owner.is_this_process:
            raise
    # An AsyncSaver without other references may be in a cycle, such as one made by its error.
    gc.collect()
    try:
        return rank_folder.lock("trainer")
    except ConflictError as error:
        raise ConflictError(
            f"another AsyncSaver of job {rank_folder.job!r} is open in this process: close it, or "
            f"use it in a `with`. If its name is lost, call dc.close_all(). For two at the same "
            f"time, use another root, or give this one another job: AsyncSaver(job=...)",
            rank=rank_folder.rank,
        ) from error


def _remove(folder: RankFolder) -> None:
    """Remove a rank's folder, unless another process was faster or uses it now."""
    with suppress(CheckpointError, OSError):
        folder.remove()
        _log.info("%s: removed", folder.path)


def end_orphan_writers(folder: JobFolder, drain_timeout_s: float) -> None:
    """Wait `drain_timeout_s` for the writers on this host whose trainer is gone; then end them.

    An old writer of this rank is one of them: this process has the trainer's lock, but no writer
    yet. On return none of them lives. Sealed snapshots stay. Several processes may do so together.

    ConflictError if a writer's lock belongs to a process that is not a visible writer, StorageError
    if a writer does not end after it was killed.
    """
    orphans = {
        rank_folder.rank: rank_folder
        for rank_folder in folder.rank_folders()
        if _find_orphan_writer(rank_folder) is not None
    }
    if not orphans:
        return
    _log.info(
        "job %s: waiting up to %g s for the background writers of %s, which an earlier run left",
        *(folder.job, drain_timeout_s, ranks_text(orphans)),
    )
    finished = _await_end(orphans, drain_timeout_s)
    stopped = {rank for rank, orphan in orphans.items() if _signal_writer(orphan, signal.SIGTERM)}
    gone = _await_end(orphans, _STOP_S)
    for orphan in orphans.values():
        _signal_writer(orphan, signal.SIGKILL)
    killed = _await_end(orphans, _KILL_S)
    for outcome, ranks in (
        ("finished", [*finished, *(rank for rank in gone if rank not in stopped)]),
        ("were stopped", [rank for rank in gone if rank in stopped]),
        ("were killed", killed),
    ):
        if ranks:
            _log.warning("job %s: the writers of %s %s", folder.job, ranks_text(ranks), outcome)
    for orphan in orphans.values():
        raise StorageError(
            f"the background writer of rank {orphan.rank} ({_find_orphan_writer(orphan)}) was "
            f"killed but does not end: it waits for its storage. Repair the storage, or use "
            f"another root, or another AsyncSaver(job=...)",
            rank=orphan.rank,
        )


def _await_end(orphans: dict[int, RankFolder], timeout_s: float) -> list[int]:
    """Wait until all writers have ended. Remove them from `orphans`, and return their ranks."""
    until = running_time() + timeout_s
    gone: list[int] = []
    while True:
        for rank, orphan in list(orphans.items()):
            if _find_orphan_writer(orphan) is None:
                del orphans[rank]
                gone.append(rank)
        if not orphans or running_time() >= until:
            return gone
        time.sleep(_END_CHECK_INTERVAL_S)


def _find_orphan_writer(folder: RankFolder) -> LockOwner | None:
    """Return the writer of a rank that lives without its trainer."""
    # Read the writer first: a new trainer takes its lock before it starts a writer. So a writer
    # that was seen before its trainer's lock was free has no living trainer.
    writer = folder.owner("writer")
    if writer is None:
        return None
    trainer = folder.owner("trainer")
    return writer if trainer is None or trainer.is_this_process else None


def _signal_writer(folder: RankFolder, number: signal.Signals) -> bool:
    """Send a signal to a rank's writer; False if it has ended. ConflictError for another owner."""
    owner = _find_orphan_writer(folder)
    if owner is None:
        return False
    pidfd = -1
    with suppress(OSError, AttributeError):  # no such process here, or no Linux
        pidfd = os.pidfd_open(owner.pid)
    if pidfd >= 0:
        try:
            # While the pidfd is open, the signal cannot reach another process.
            if _is_writer(owner.pid, folder):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
                return True
        finally:
            os.close(pidfd)
    if _find_orphan_writer(folder) is None:
        return False
    raise ConflictError(
        f"{folder.path}: the lock of the writer of rank {folder.rank} belongs to {owner}, which is "
        f"not a visible background writer (it may be in another container). Stop "
        f"it, or use another root, or another AsyncSaver(job=...)",
        rank=folder.rank,
    )


def _is_writer(pid: int, folder: RankFolder) -> bool:
    """Return True if a process is a background writer and has the lock file of a rank open."""
    with suppress(OSError):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(_MAX_WORDS_NBYTES).split(b"\0")
        lock = os.stat(folder.lock_path("writer"))
        fds = os.listdir(f"/proc/{pid}/fd") if any(p.encode() in words for p in PROGRAMS) else []
        for fd in fds:
            with suppress(OSError):  # it has been closed since
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), lock):
                    return True
    return False
