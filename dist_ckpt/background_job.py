"""What a rank has of a job that saves in the background: folder, locks, arenas, writer."""

from __future__ import annotations

import logging
from contextlib import suppress

from dist_ckpt.arenas import Arenas
from dist_ckpt.device_staging import Fence, PinnedArenas
from dist_ckpt.errors import CheckpointError
from dist_ckpt.job_folder import ROLES, JobFolder
from dist_ckpt.own_writer import OwnWriter, first_of
from dist_ckpt.surviving_writers import settle_survivors
from dist_ckpt.writer_link import Hello

_log = logging.getLogger("dist_ckpt")

# A writer that has nothing more to settle ends within this, or is killed.
END_S = 60.0


class Job:
    """One rank's part of a job. It is this rank's one trainer on this host until `close`.

    Writers of an earlier run are settled with, and a new one is started. ConflictError if the
    job has a living trainer of this rank.
    """

    def __init__(self, hello: Hello, *, settle_s: float) -> None:
        self.folder = JobFolder(hello.job)
        self._own = self.folder.rank(hello.rank)
        self._lock = self._own.lock("trainer")
        try:
            settle_survivors(self.folder, settle_s)
            self.arenas = Arenas(self._own)
            self.writer = OwnWriter(self._own, hello)
            self.writer.newest_at = self.arenas.newest_at
            self.writer.ensure()
        except BaseException:
            self._lock.release()
            raise
        self.pinned, self.fence = PinnedArenas(), Fence()
        self._world_size = hello.world_size
        self._has_reclaimed = False

    def reclaim(self, *, all_are_here: bool) -> None:
        """Remove what ranks have left that do not exist any more, once a checkpoint is durable.

        `all_are_here`: all ranks of this run hold their locks just now. Otherwise one of them may
        have ended, and have kept its snapshots for the next run: those are left alone.
        """
        if self._has_reclaimed or not self.writer.has_committed:
            return
        self._has_reclaimed = all_are_here
        for folder in self.folder.present():
            is_of_this_run = folder.rank < self._world_size and not all_are_here
            if not is_of_this_run and not any(folder.owner(role) for role in ROLES):
                # Another rank may be faster.
                with suppress(CheckpointError, OSError):
                    folder.remove()
                    _log.info("%s: what an earlier run left there was removed", folder.path)

    def close(self, *, keep: bool) -> None:
        """End the writer when everything is settled; give the memory back, unless `keep`.

        Raises what a save has failed of that nobody was told of.
        """
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
        if not keep and (writer.is_last_committed or self._own.is_empty):
            with suppress(CheckpointError, OSError):
                self._own.remove()
                self.folder.discard()
        for order in failed:
            order.is_told = True
        if errors := [order.failure for order in failed if order.failure]:
            raise first_of(errors)
