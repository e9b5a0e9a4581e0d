"""Writers that an earlier run left on this host: they may finish, then they are ended."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dist_ckpt.async_save.snapshots.job_folder import JobFolder, RankFolder
from dist_ckpt.async_save.trainer.writer_handle import PROGRAMS
from dist_ckpt.async_save.writer.messages import WRITER_END_S
from dist_ckpt.core.runtime.lock_files import LockOwner
from dist_ckpt.errors import ConflictError, StorageError, ranks_text

_log = logging.getLogger("dist_ckpt")

_STOP_S = WRITER_END_S + 10.0
# A killed process ends when the kernel permits it.
_KILL_S = 10.0
_LOOK_S = 0.02

_MAX_WORDS_NBYTES = 4096


def end_orphan_writers(folder: JobFolder, drain_timeout_s: float) -> None:
    """Wait `drain_timeout_s` for the writers on this host whose trainer is gone; then end them.

    They include an old writer of this rank: this process has the trainer's lock, but no writer yet.
    On return none of them lives. Sealed snapshots stay. Several processes may call it at once.

    ConflictError if a writer's lock belongs to a process that is not a visible writer, StorageError
    if a writer does not end after it was killed.
    """
    orphans = {
        rank_folder.rank: rank_folder
        for rank_folder in folder.rank_folders()
        if _orphan_writer(rank_folder) is not None
    }
    if not orphans:
        return
    _log.info(
        "job %s: waiting up to %g s for the background writers of %s, which an earlier run left",
        *(folder.job, drain_timeout_s, ranks_text(orphans)),
    )
    finished = _await_end(orphans, drain_timeout_s)
    stopped = {rank for rank, orphan in orphans.items() if _end(orphan, signal.SIGTERM)}
    gone = _await_end(orphans, _STOP_S)
    for orphan in orphans.values():
        _end(orphan, signal.SIGKILL)
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
            f"the background writer of rank {orphan.rank} ({_orphan_writer(orphan)}) was killed "
            f"but does not end: it waits for its storage. Repair the storage, or use another root, "
            f"or another AsyncSaver(job=...)",
            rank=orphan.rank,
        )


def _await_end(orphans: dict[int, RankFolder], timeout_s: float) -> list[int]:
    """Wait until no writer is left. Remove those that are gone, and return their ranks."""
    until = time.monotonic() + timeout_s
    gone: list[int] = []
    while True:
        for rank, orphan in list(orphans.items()):
            if _orphan_writer(orphan) is None:
                del orphans[rank]
                gone.append(rank)
        if not orphans or time.monotonic() >= until:
            return gone
        time.sleep(_LOOK_S)


def _orphan_writer(folder: RankFolder) -> LockOwner | None:
    """Return the writer of a rank that lives without its trainer."""
    # Read the writer first: a new trainer takes its lock before it starts a writer. So a writer
    # that was seen before its trainer's lock was free has no living trainer.
    writer = folder.owner("writer")
    if writer is None:
        return None
    trainer = folder.owner("trainer")
    return writer if trainer is None or trainer.is_this_process else None


def _end(folder: RankFolder, number: signal.Signals) -> bool:
    """Send a signal to the writer of a rank; False if it has ended meanwhile.

    ConflictError if another process has its lock.
    """
    owner = _orphan_writer(folder)
    if owner is None:
        return False
    with _pidfd(owner.pid) as pidfd:
        # While the pidfd is open, the signal cannot reach another process.
        if pidfd is not None and _is_writer(owner.pid, folder):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
            return True
    if _orphan_writer(folder) is None:
        return False
    raise ConflictError(
        f"{folder.path}: the lock of the writer of rank {folder.rank} belongs to {owner}, which is "
        f"not a visible background writer (it may be in another container). Stop "
        f"it, or use another root, or another AsyncSaver(job=...)",
        rank=folder.rank,
    )


@contextmanager
def _pidfd(pid: int) -> Iterator[int | None]:
    """Open a process of this user by its number; None if there is none here."""
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, AttributeError):  # AttributeError: no Linux
        yield None
        return
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _is_writer(pid: int, folder: RankFolder) -> bool:
    """Return True if a process is a background writer and has the lock file of a rank open."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(_MAX_WORDS_NBYTES).split(b"\0")
        lock = os.stat(folder.lock_path("writer"))
        return any(name.encode() in words for name in PROGRAMS) and any(
            os.path.samestat(status, lock) for status in _opened_by(pid)
        )
    except OSError:
        return False


def _opened_by(pid: int) -> Iterator[os.stat_result]:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # it has been closed since
            yield os.stat(f"/proc/{pid}/fd/{fd}")
