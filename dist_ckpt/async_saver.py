"""`dc.AsyncSaver`: saves that training pays for with one copy; a process of their own writes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Self, get_args

from torch.distributed import ProcessGroup

from dist_ckpt.background_job import Job
from dist_ckpt.background_save import BackgroundSave
from dist_ckpt.job_folder import job_id
from dist_ckpt.load_options import LoadOptions
from dist_ckpt.process_groups import session_of
from dist_ckpt.readiness import WhenBusy
from dist_ckpt.reports import LoadReport
from dist_ckpt.restore import restore_together
from dist_ckpt.save_handle import SaveHandle
from dist_ckpt.saver import SaveOptions
from dist_ckpt.session import Session
from dist_ckpt.sharding import ShardingConfig
from dist_ckpt.storage import open_storage
from dist_ckpt.writer_link import Hello

_log = logging.getLogger("dist_ckpt")

# Slower, a block would take so long that the storage seems to hang.
MIN_BYTES_PER_S = 16 << 10


class AsyncSaver:
    """Saves in the background: training waits for one copy, and storage is another process's work.

        with dc.AsyncSaver("runs/a") as saver:
            if (first := saver.restore(state)) is None:  # not in memory, or not any more
                first = load_the_newest(state)  # with `dc.load`; 0 if there is none
            for step in range(first + 1, 10_001):
                train(state)
                if step % 500 == 0:
                    saver.save(state, f"runs/a/step-{step:08}", step=step)

    `save` copies this rank's part of the state into one of two arenas in shared memory. A writer,
    one process a rank, writes it from there and commits it together with the other writers. It
    goes on when the trainer is killed; it does not outlive its container, Slurm step or cgroup.

    `root` is the folder under which the checkpoints lie. The memory belongs to a job, by default
    the one that the user and the root make; `job` names another. Two processes that live at once
    as the same rank of one job on one host are a ConflictError. A later run of the job finds what
    an earlier one has left: first its writers may finish, `settle_s` at most, then they are ended.
    Without `root` and `job` the first save decides: its folder's parent is the root.

    `when_busy` says what `save` does while both arenas are still being written: "wait" for one,
    "skip" this save, or let it "supersede" the one that no writer has begun (else it waits).
    `max_bytes_per_s` bounds what each writer writes.

    Every rank of `group` makes one, and calls `save` and `restore` alike. One thread at a time
    uses it, and only the process that made it: a forked one has none.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        job: str | None = None,
        group: ProcessGroup | None = None,
        when_busy: WhenBusy = "wait",
        settle_s: float = 60.0,
        max_bytes_per_s: float | None = None,
    ) -> None:
        if when_busy not in get_args(WhenBusy):
            raise ValueError(f'when_busy={when_busy!r}: give "wait", "skip" or "supersede"')
        if settle_s < 0:
            raise ValueError(f"settle_s={settle_s}: give a number of seconds, 0 or more")
        if max_bytes_per_s is not None and max_bytes_per_s < MIN_BYTES_PER_S:
            raise ValueError(
                f"max_bytes_per_s={max_bytes_per_s}: give {MIN_BYTES_PER_S} at least, or None"
            )
        self.num_skipped = 0
        self.restored: LoadReport | None = None
        self._ranks: Session = session_of(group)
        self._when_busy = when_busy
        self._settle_s = settle_s
        self._max_bytes_per_s = max_bytes_per_s
        self._pid = os.getpid()
        self._is_closed = False
        self._is_used = threading.Lock()
        self._job: Job | None = None
        if job is None and root is not None:
            job = job_id(f"{open_storage(root)[1]}/a checkpoint")
        if job is not None:
            self._begin(job)

    def save(
        self,
        state: Mapping[str | int, object],
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        sharding: ShardingConfig | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, object] | None = None,
    ) -> SaveHandle:
        """Save a state as the checkpoint at `path`. Collective: every rank calls this.

        The options are those of `dc.save`. On return the state is staged, and may change (on CUDA
        devices: see `fence`); nothing is durable yet: see `SaveHandle.result`.

        Raises what `dc.save` raises for a state that cannot be saved, on all ranks; then nothing
        was staged. If an earlier background save has failed that nobody was told of, its error is
        raised instead, once, on all ranks: that one made no checkpoint, this one was not begun,
        and the next call goes on.
        """
        self._check_open()
        options = SaveOptions(step, sharding, overwrite, metadata)
        with self._alone(), self._ranks.operation(f"background save to {path}"):
            save = BackgroundSave(self._ranks, lambda: self._job_of(path), state, path, options)
            handle = save.run(self._when_busy)
        self.num_skipped += handle.skipped
        return handle

    def fence(self) -> None:
        """Wait until what was saved may change. Call it before weights change in another way.

        With CUDA devices `save` returns while their memory is copied, beside the next forward and
        backward; the optimizers in the state wait for that by themselves before a step. On the CPU
        all is copied when `save` returns.
        """
        if self._job is not None:
            self._job.fence.wait()

    def restore(
        self,
        state: MutableMapping[str | int, object],
        *,
        sharding: ShardingConfig | None = None,
        strict: bool = True,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        rename: Mapping[str, str | None] | None = None,
    ) -> int | None:
        """Fill a state from the newest snapshot in memory; return its step. Collective.

        It is one that an earlier run of this job, or this one, has staged completely on all ranks
        and digested, and that is what was committed under its path, or was never committed and
        nothing else was; unless a later step was committed since beside it. It may have been saved
        by another number of ranks. What is not in the memory of this host comes from the storage.
        None, and nothing is touched, if there is no such snapshot, as after a reboot: load the
        newest checkpoint then. `restored` is the report of it, and says how many bytes came from
        memory.

        The options, and what is raised, are those of `dc.load`; everything is verified.
        """
        self._check_open()
        if self._job is None:
            raise ValueError(
                "whose snapshots to restore is not known: make the saver with root=, the folder "
                "under which the checkpoints lie, or with job="
            )
        options = LoadOptions(
            sharding, strict=strict, include=include, exclude=exclude, rename=rename
        )
        writer = self._job.writer
        with self._alone():
            writer.wait_for(lambda: not writer.unsettled, None)
            self.restored = restore_together(self._ranks, self._job.folder, state, options)
            if self.restored is not None:
                self._job.arenas.spare(self.restored.attempt)
        return None if self.restored is None else self.restored.step

    def close(self, *, keep: bool = False) -> None:
        """Wait until every save is settled, and end the writer of this rank. May be called again.

        The arenas are given back, unless `keep`, or the last save failed: then a later run of the
        job finds them. Raises what a save has failed of if nobody was told of it.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        if self._job is not None:
            self._job.close(keep=keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; after an error what is in memory is kept for the next run."""
        try:
            self.close(keep=error is not None)
        except Exception as failure:
            if error is None:
                raise
            _log.error("a background save failed as well: %s", failure)

    @property
    def num_superseded(self) -> int:
        """How many saves a newer one has superseded."""
        return 0 if self._job is None else self._job.writer.num_dropped

    @property
    def num_restarts(self) -> int:
        """How many times the writer of this rank was replaced, as it had died."""
        return 0 if self._job is None else self._job.writer.num_restarts

    def _job_of(self, path: str | os.PathLike[str]) -> Job:
        if self._job is None:
            self._begin(job_id(open_storage(path)[1]))
        assert self._job is not None
        return self._job

    def _begin(self, name: str) -> None:
        channel = self._ranks.channel
        hello = Hello(
            name,
            channel.rank,
            channel.world_size,
            {**asdict(self._ranks.config), "host": channel.host},
            self._max_bytes_per_s,
        )
        self._job = Job(hello, settle_s=self._settle_s)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads and signal handlers out: two saves at once would mix their states."""
        if not self._is_used.acquire(blocking=False):
            raise ValueError(
                "this AsyncSaver is in a call already, of another thread or one that this call "
                "interrupts: let one thread save and restore, and not from a signal's handler"
            )
        try:
            yield
        finally:
            self._is_used.release()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ValueError(
                f"this AsyncSaver belongs to process {self._pid}, and this is {os.getpid()}, which "
                f"was forked from it: save in the process that made the saver"
            )
        if self._is_closed:
            raise ValueError("this AsyncSaver is closed: make another one")
