"""`dc.AsyncSaver`, and its options: training waits for one copy, and a separate process writes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Self, get_args

from torch.distributed import ProcessGroup

from dist_ckpt.async_save.memory_restore import restore_together
from dist_ckpt.async_save.save_handle import SaveHandle
from dist_ckpt.async_save.snapshots.job_folder import check_job
from dist_ckpt.async_save.snapshots.root_id import job_id, make_root_id
from dist_ckpt.async_save.trainer.background_save import save_in_background
from dist_ckpt.async_save.trainer.job import Job
from dist_ckpt.async_save.trainer.start_handshake import SaverInfo, WhenBusy, check_savers
from dist_ckpt.async_save.writer.messages import Hello
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.records.incarnations import IncarnationHistory
from dist_ckpt.core.commit.records.record_store import check_upgraded
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.public_names import refuse_old_attributes, refuse_old_parameters
from dist_ckpt.core.saving.attachments import Attachments
from dist_ckpt.core.saving.save import SaveOptions
from dist_ckpt.core.state.tree.containers import MutableState, State
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.reports import LoadReport

# Slower, a block would take so long that the storage seems to hang.
MIN_BYTES_PER_S = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverOptions:
    """The options of a saver, checked by `check` once a rank's error can reach the others."""

    root: str | os.PathLike[str] | None
    job: str | None
    when_busy: WhenBusy
    drain_timeout_s: float
    max_bytes_per_s: float | None

    def check(self) -> None:
        """Raise TypeError or ValueError for options that make no sense."""
        if self.root is not None:
            self._absolute_root()
        if self.job is not None:
            check_job(self.job)
        if self.when_busy not in get_args(WhenBusy):
            raise ValueError(f'when_busy={self.when_busy!r}: give "wait", "skip" or "supersede"')
        _check_number(
            "drain_timeout_s", self.drain_timeout_s, 0, "a finite number of seconds, 0 or more"
        )
        if self.max_bytes_per_s is not None:
            least = f"a number, {MIN_BYTES_PER_S} at least, or None"
            _check_number("max_bytes_per_s", self.max_bytes_per_s, MIN_BYTES_PER_S, least)

    def asked(self) -> SaverInfo:
        """Return what all ranks must ask for alike."""
        # Not the id of a job that the root makes: a file system has other numbers on other hosts.
        root = None if self.root is None or self.job is not None else self._absolute_root()
        return SaverInfo(self.job, root, self.when_busy)

    def root_id(self) -> str | None:
        """Return the id of the root, which gets one if need be; None if no job is made of it."""
        if self.root is None:
            return None
        if self.job is not None:
            check_upgraded(*self._opened_root())
            return None
        return make_root_id(*self._opened_root())

    def job_name(self, root_id: str | None) -> str | None:
        """Return the job, if it is known before the first save."""
        return self.job if root_id is None else job_id(self._absolute_root(), root_id)

    def _absolute_root(self) -> str:
        return self._opened_root()[1]

    def _opened_root(self) -> tuple[Storage, str]:
        assert self.root is not None
        try:
            return open_storage(self.root)
        except (TypeError, ValueError) as error:
            raise type(error)(f"root={self.root!r}: {error}") from None


def _check_number(name: str, value: object, least: int, wanted: str) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: give {wanted}")
    if not (isfinite(value) and float(value) >= least):
        raise ValueError(f"{name}={value}: give {wanted}")


_log = logging.getLogger("dist_ckpt")


class AsyncSaver:
    """Saves in the background: training waits for one copy, and storage is another process's work.

        with dc.AsyncSaver("runs/a") as saver:
            for step in range(1, 10_001):
                train(state)
                if step % 500 == 0:
                    saver.save(state, f"runs/a/step-{step:08}", step=step)

    `dc.Checkpointer` does this for a run, and finds what to go on from, in memory or on disk.

    `save` copies this rank's part of the state into one of two arenas in shared memory. A writer,
    one process a rank, writes it from there and commits it together with the other writers. It
    goes on when the trainer is killed; it does not outlive its container, Slurm step or cgroup.

    `root` is the folder under which the checkpoints lie; it is made if need be, and gets a file
    `DIST_CKPT_ROOT`, by which a folder made anew is told from the one before it. The memory belongs
    to a job, by default the one that the user and the root make; `job` names another. Two processes
    that live at once as the same rank of one job on one host are a ConflictError, and so are two
    savers of one process that are not closed. A later run of the job finds what an earlier one has
    left: first its writers may finish, `drain_timeout_s` at most, then they are ended. Without
    `root` and `job` the first save decides: its folder's parent is the root.

    `when_busy` says what `save` does while both arenas are still being written: "wait" for one,
    "skip" this save, or let it "supersede" the one that no writer has begun (else it waits).
    `max_bytes_per_s` bounds what each writer writes.

    Every rank of `group` makes one, with the same `root`, `job` and `when_busy`, and calls `save`
    and `restore` alike: making it is collective as well. One thread at a time uses it, and only the
    process that made it: a forked one has none. Without `close` it ends with the last reference to
    it: what is staged is written, and nobody is told if that fails.
    """

    @refuse_old_parameters(settle_s="drain_timeout_s")
    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        job: str | None = None,
        group: ProcessGroup | None = None,
        when_busy: WhenBusy = "wait",
        drain_timeout_s: float = 60.0,
        max_bytes_per_s: float | None = None,
    ) -> None:
        self.num_skipped = 0
        self.restored: LoadReport | None = None
        self._ranks: Session = session_of(group)
        self._options = SaverOptions(
            root=root,
            job=job,
            when_busy=when_busy,
            drain_timeout_s=drain_timeout_s,
            max_bytes_per_s=max_bytes_per_s,
        )
        self._pid = os.getpid()
        self._is_closed = False
        self._is_used = threading.Lock()
        self._job: Job | None = None
        self._root_id: str | None = None
        with self._ranks.operation("AsyncSaver"):
            self._open()

    @refuse_old_parameters(frozen="include_frozen", reuse="link_unchanged")
    def save(  # noqa: PLR0913 - the options of `dc.save`
        self,
        state: State,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        sharding: ShardingConfig | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, object] | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        include_frozen: bool = True,
        config: Mapping[str, object] | None = None,
        kind: str | None = None,
        attach: Attachments | None = None,
        link_unchanged: str | Sequence[str] = (),
    ) -> SaveHandle:
        """Save a state as the checkpoint at `path`. Collective: every rank calls this.

        The options are those of `dc.save`, without `carry_over`. On return the state is staged, and
        may change (on CUDA devices: see `fence`); nothing is durable yet: see `SaveHandle.result`.

        Raises what `dc.save` raises for a state that cannot be saved, on all ranks; then nothing
        was staged. If an earlier background save has failed that nobody was told of, its error is
        raised instead, once, on all ranks: that one made no checkpoint, this one was not begun,
        and the next call goes on.
        """
        options = SaveOptions(
            step=step,
            sharding=sharding,
            overwrite=overwrite,
            metadata=metadata,
            include=include,
            exclude=exclude,
            include_frozen=include_frozen,
            config=config,
            kind=kind,
            attach=attach,
            link_unchanged=link_unchanged,
        )
        return self.save_with(state, path, options)

    def save_with(
        self, state: State, path: str | os.PathLike[str], options: SaveOptions
    ) -> SaveHandle:
        """Save as `save` does, with options that are not of users as well. Not public."""
        with self._alone(), self._ranks.operation(f"background save to {path}"):
            if self._options.job is None and self._root_id is None:
                self._root_id = self._root_id_above(path)
            handle = save_in_background(
                self._ranks, lambda: self._job_of(path), state, path, options, self._options.asked()
            )
        self.num_skipped += handle.skipped
        return handle

    def fence(self) -> None:
        """Let what was saved change. Call it before weights change other than by an optimizer.

        CUDA devices copy what the optimizers of the state change beside the next forward and
        backward, after `save` has returned, and all else before what is asked of them next. What
        this thread asks of their current streams from now on begins when all is copied; the host
        goes on at once (see `SaveHandle.wait_staged`). torch's optimizers do this by themselves
        before a step, unless a CUDA graph replays it. On the CPU all is copied when `save` returns.
        """
        if self._job is not None:
            self._job.fence.wait()

    @refuse_old_parameters(frozen="include_frozen")
    def restore(  # noqa: PLR0913 - the options of `dc.load`
        self,
        state: MutableState,
        *,
        sharding: ShardingConfig | None = None,
        strict: bool = True,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        rename: Mapping[str, str | None] | None = None,
        include_frozen: bool = True,
        config: Mapping[str, object] | None = None,
        kind: str | None = None,
    ) -> int | None:
        """Fill a state from the newest snapshot in memory; return its step. Collective.

        It is one that an earlier run of this job, or this one, has staged completely on all ranks
        and digested, and that is what was committed under its path; or it was never committed, as
        its run died or the storage failed, and nothing else was, or what it was to overwrite.
        Unless a later step was committed since beside it, or a start of a run that is recorded in
        its folder has left it behind. It may have been saved by another number of ranks. What is
        not in the memory of this host comes from the storage.
        None, and nothing is touched, if there is no such snapshot, as after a reboot: load the
        newest checkpoint then. `restored` is the report, and says how many bytes came from memory;
        it is None only if nothing was restored, while a save without a step has none to return.

        What the options mean, and what is raised, is as for `dc.load`; everything is verified.
        """
        options = LoadOptions(
            sharding=sharding,
            strict=strict,
            include=include,
            exclude=exclude,
            rename=rename,
            include_frozen=include_frozen,
            config=config,
            kind=kind,
        )
        return self.restore_with(state, options)

    def restore_with(
        self, state: MutableState, options: LoadOptions, history: IncarnationHistory | None = None
    ) -> int | None:
        """Restore as `restore` does; `history` is what rank 0 knows of the run. Not public."""
        with self._alone():
            if self._job is None:
                raise ValueError(
                    "whose snapshots to restore is not known: make the saver with root=, the "
                    "folder under which the checkpoints lie, or with job="
                )
            writer = self._job.writer
            writer.wait_for(lambda: not writer.unsettled, None)
            found = restore_together(
                self._ranks,
                self._job.folder,
                state,
                options,
                saver=self._options.asked(),
                history=history,
            )
            if found is None:
                self.restored = None
                return None
            snapshot, self.restored = found
            self._job.arenas.spare(snapshot)
        return self.restored.step

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every save is settled: durable, failed or superseded. Only this rank does.

        Raises TimeoutError if that takes longer: the saves go on. Raises what one has failed of
        that nobody was told of.
        """
        with self._alone():
            if self._job is not None:
                self._job.wait(timeout_s)

    def detach(self) -> None:
        """End this saver, and let its writer go on with what is staged. Waits for no storage.

        Nobody is told how that ends but by the log; a later run of the job finds what was staged.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        with self._alone():
            self._is_closed = True
            if self._job is not None:
                self._job.detach()

    def close(self, *, keep: bool = False) -> None:
        """Wait until every save is settled, and end the writer of this rank. May be called again.

        The arenas are given back, unless `keep`, or the last save failed, or nothing was saved and
        what an earlier run left was never committed: then a later run of the job finds them. Raises
        what a save has failed of if nobody was told of it. ValueError while another thread is in
        `save` or `restore`: let it end first.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        with self._alone():
            self._is_closed = True
            if self._job is not None:
                self._job.close(keep=keep)

    if not TYPE_CHECKING:
        __getattr__ = refuse_old_attributes("AsyncSaver", {"leave": "detach"})

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

    def _open(self) -> None:
        """Compare the options with the other ranks', and begin the job if it is known."""
        options, channel = self._options, self._ranks.channel
        with channel.exchange("options") as comparing:
            options.check()
            savers = comparing.gather(options.asked())
            if savers is not None:
                check_savers("AsyncSaver", savers)
                comparing.decide(options.root_id() or "")
        self._root_id = comparing.result(str) or None
        if (name := options.job_name(self._root_id)) is None:
            return
        try:
            with channel.exchange("job"):
                self._begin(name)
        except BaseException:
            if self._job is not None:  # but another rank has none
                self._job.close(keep=True)
            raise

    def _root_id_above(self, path: str | os.PathLike[str]) -> str:
        """Return the id of the folder that a first save's checkpoint lies in. Collective."""
        with self._ranks.channel.exchange("root") as rooting:
            storage, own = open_storage(path)
            paths = rooting.gather(own)
            if paths is not None:
                rooting.decide(make_root_id(storage, os.path.dirname(paths[0])))
        return rooting.result(str)

    def _job_of(self, path: str | os.PathLike[str]) -> Job:
        if self._job is None:
            assert self._root_id is not None
            self._begin(job_id(os.path.dirname(open_storage(path)[1]), self._root_id))
        assert self._job is not None
        return self._job

    def _begin(self, name: str) -> None:
        options, channel = self._options, self._ranks.channel
        hello = Hello(
            name,
            channel.rank,
            channel.world_size,
            replace(self._ranks.config, host=channel.host),
            None if options.max_bytes_per_s is None else float(options.max_bytes_per_s),
        )
        self._job = Job(hello, drain_timeout_s=float(options.drain_timeout_s))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads and signal handlers out: two saves at once would mix their states.

        ValueError if one is in, or if the saver is closed, or another process's.
        """
        if os.getpid() != self._pid:
            raise ValueError(
                f"this AsyncSaver belongs to process {self._pid}, and this is {os.getpid()}, which "
                f"was forked from it: save in the process that made the saver"
            )
        if not self._is_used.acquire(blocking=False):
            raise ValueError(
                "this AsyncSaver is in a call already, of another thread or one that this call "
                "interrupts: let one thread save, restore and close, and not from a signal's "
                "handler"
            )
        try:
            if self._is_closed:
                raise ValueError("this AsyncSaver is closed: make another one")
            yield
        finally:
            self._is_used.release()
