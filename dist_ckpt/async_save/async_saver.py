"""`dc.AsyncSaver`, and its options: training waits for one copy, and a separate process writes."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, get_args

from torch.distributed import ProcessGroup

from dist_ckpt.async_save.memory_restore import restore_together
from dist_ckpt.async_save.snapshots.job_folder import check_job, make_job_name, make_root_id
from dist_ckpt.async_save.trainer.background_save import prepare_arenas, save_in_background
from dist_ckpt.async_save.trainer.job import Job
from dist_ckpt.async_save.trainer.start_handshake import SaverInfo, WhenBusy
from dist_ckpt.async_save.trainer.writer_handle import SaveHandle
from dist_ckpt.async_save.writer.writer_messages import Hello
from dist_ckpt.core.comm.exchange.channel import check_equal_on_all_ranks
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.records.record_store import check_upgraded
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.planning.replica_rules import ReplicaRule
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.arguments import check_number
from dist_ckpt.core.runtime.processes import find_process
from dist_ckpt.core.runtime.public_names import refuse_old_attributes, refuse_old_parameters
from dist_ckpt.core.saving.attachments import Attachments
from dist_ckpt.core.saving.save_options import CheckReplicas, SaveOptions
from dist_ckpt.core.state.binding.sources.rename import RenameRules
from dist_ckpt.core.state.tree.containers import MutableState, State
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.reports import LoadReport

# At a lower rate one block takes so long that the storage seems to hang.
MIN_BYTES_PER_S = 16 << 10


_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverOptions:
    """The options of a saver. `check` runs inside an exchange, so that errors reach all ranks."""

    root: str | os.PathLike[str] | None
    job: str | None
    when_busy: WhenBusy
    drain_timeout_s: float
    max_bytes_per_s: float | None

    def check(self) -> None:
        """Raise TypeError or ValueError for invalid options."""
        if self.root is not None:
            open_root(self.root)
        if self.job is not None:
            check_job(self.job)
        if self.when_busy not in get_args(WhenBusy):
            raise ValueError(f'when_busy={self.when_busy!r}: give "wait", "skip" or "supersede"')
        wanted = "a finite number of seconds, 0 or more"
        check_number("drain_timeout_s", self.drain_timeout_s, wanted, 0)
        if self.max_bytes_per_s is not None:
            wanted = f"a number, {MIN_BYTES_PER_S} at least, or None"
            check_number("max_bytes_per_s", self.max_bytes_per_s, wanted, MIN_BYTES_PER_S)

    def saver_info(self) -> SaverInfo:
        """Return the options that must be equal on all ranks."""
        # Without the job id of a root: the device number of a file system differs between hosts.
        root = None if self.root is None or self.job is not None else open_root(self.root)[1]
        return SaverInfo(self.job, root, self.when_busy)

    def make_root_id(self) -> str | None:
        """Return the id of the root, and create it if needed. None if the job has another name."""
        if self.root is None:
            return None
        if self.job is not None:
            check_upgraded(*open_root(self.root))
            return None
        return make_root_id(*open_root(self.root))


def open_root(root: Any) -> tuple[Storage, str]:
    """Return the storage and the path of a root. An error names the argument `root`."""
    try:
        return open_storage(root)
    except (TypeError, ValueError) as error:
        raise type(error)(f"root={root!r}: {error}") from None


class AsyncSaver:
    """Save in the background: training waits for one copy, and another process writes.

        with dc.AsyncSaver("runs/a") as saver:
            for step in range(1, 10_001):
                train(state)
                if step % 500 == 0:
                    saver.save(state, f"runs/a/step-{step:08}", step=step)

    `dc.Checkpointer` does this for a run, and finds its restore point, in memory or on disk.

    `save` copies this rank's part of the state into one of two arenas in shared memory. A writer,
    one process a rank, writes it from there and commits it together with the other writers. The
    writer continues if the trainer is killed. It ends with its container, Slurm step or cgroup.

    `root` is the folder of the checkpoints. It is created if needed, with a file `DIST_CKPT_ROOT`
    that distinguishes it from a later folder of the same name. The memory belongs to a job. `job`
    names the job; by default the user and the root identify it. Raises ConflictError if two living
    processes are the same rank of one job on one host, or if a process has two open savers. A later
    run of the job finds the snapshots of an earlier run. The earlier writers may first finish, for
    `drain_timeout_s`; then they are ended. Without `root` and `job`, the root is the parent folder
    of the first save.

    `when_busy` applies while both arenas are in use. With "wait" a `save` waits for an arena, and
    with "skip" it saves nothing. With "supersede" it replaces the save that no writer has begun; if
    there is none, it waits.
    `max_bytes_per_s` limits each writer.

    Collective: every rank of `group` creates a saver with the same `root`, `job` and `when_busy`,
    and makes the same calls of `save` and `restore`. Use a saver in one thread at a time, in the
    process that created it. Without `close` the saver ends with its last reference: staged saves
    are still written, but a failure is only logged.
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
        self._session: Session = session_of(group)
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
        with self._session.operation("AsyncSaver"):
            self._open()
        _savers.add(self)

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
        check_replicas: CheckReplicas = "sample",
        replicas: Mapping[str, ReplicaRule] | None = None,
    ) -> SaveHandle:
        """Save a state as the checkpoint at `path`. Collective: every rank calls this.

        The options are those of `dc.save`, without `carry_over`. On return the state is staged, and
        may change (on CUDA devices: see `fence`). It is not durable yet: see `SaveHandle.result`.

        Raises the errors of `dc.save` for an invalid state, on all ranks; then nothing was staged.
        If an earlier background save failed and its error was not raised yet, that error is raised
        once, on all ranks. The earlier save made no checkpoint, and this one was not begun: call
        `save` again.
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
            check_replicas=check_replicas,
            replicas=replicas,
        )
        return self.save_with(state, path, options)

    def save_with(
        self, state: State, path: str | os.PathLike[str], options: SaveOptions
    ) -> SaveHandle:
        """Save with all options, also internal ones. Not public."""
        with self._exclusive(), self._session.operation(f"background save to {path}"):
            info = self._options.saver_info()
            if self._options.job is None and self._root_id is None:
                with self._session.channel.exchange("root") as rooting:
                    storage, local_path = open_storage(path)
                    paths = rooting.gather(local_path)
                    if paths is not None:
                        rooting.decide(make_root_id(storage, os.path.dirname(paths[0])))
                self._root_id = rooting.result(str)
            handle = save_in_background(
                self._session, lambda: self._ensure_job(path), state, path, options, info
            )
        self.num_skipped += handle.skipped
        return handle

    def prepare(self, state: State) -> None:
        """Make the memory for saves of a state, in parallel to training.

        Collective: every rank calls this. Call it after `restore`, and best after a first step: the
        optimizers have their state then, otherwise it is estimated. Without this call the first
        save makes the memory, and training waits. If there is too little memory, a warning says so,
        and a save raises the error.

        ValueError if the saver has neither `root` nor `job`.
        """
        with self._exclusive(), self._session.operation("prepare"):
            if self._job is None:
                raise ValueError(
                    "this AsyncSaver has no job whose memory it could prepare: create it with "
                    "root=, the folder of the checkpoints, or with job="
                )
            prepare_arenas(self._session, self._job, state)

    def fence(self) -> None:
        """Order later work after late copies. Call it before your own code changes weights.

        CUDA devices copy a state into their own memory before any later work. Without room for it,
        they copy the tensors that optimizers change late: during the next forward and backward. If
        such a tensor changes before its copy, the save fails. After `fence`, the current streams of
        this thread wait for late copies. The host does not wait: see `SaveHandle.wait_staged`.
        torch's optimizers call it before a step, unless a CUDA graph replays the step. On the CPU,
        all is copied when `save` returns.
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
        rename: RenameRules | None = None,
        include_frozen: bool = True,
        resize: Mapping[str, int] | None = None,
        config: Mapping[str, object] | None = None,
        kind: str | None = None,
    ) -> int | None:
        """Fill a state from the newest snapshot in memory; return its step. Collective.

        A snapshot is used if this run or an earlier one of this job staged it completely on all
        ranks, and the writers digested it. It is the committed checkpoint at its path, or it was
        never committed: its run died, or the storage failed. In the second case the path must have
        no checkpoint, or one that the save would overwrite. A snapshot is not used if a later step
        was committed in the same folder since, or if a later incarnation orphaned it. Another
        number of ranks may have saved it. Files that are not in the memory of this host are read
        from the storage.

        Without such a snapshot, as after a reboot, returns None and changes nothing: load the
        newest checkpoint then. `restored` is the report, with the number of bytes from memory. A
        report means that a snapshot was restored, even if its save had no step to return.

        Options and errors are those of `dc.load`. All data is verified.
        """
        options = LoadOptions(
            sharding=sharding,
            strict=strict,
            include=include,
            exclude=exclude,
            rename=rename,
            include_frozen=include_frozen,
            resize=resize,
            config=config,
            kind=kind,
        )
        return self.restore_with(state, options)

    def restore_with(self, state: MutableState, options: LoadOptions) -> int | None:
        """Restore with all options, also internal ones. Not public."""
        with self._exclusive():
            if self._job is None:
                raise ValueError(
                    "this AsyncSaver has no job whose snapshots it could restore: create it with "
                    "root=, the folder of the checkpoints, or with job="
                )
            writer = self._job.writer
            writer.wait_for(lambda: not writer.unsettled, None)
            saver = self._options.saver_info()
            snapshot, self.restored = restore_together(
                self._session, self._job.folder, state, options, saver=saver
            ) or ("", None)
            if self.restored is None:
                return None
            self._job.arenas.overwrite_last(snapshot)
        return self.restored.step

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every save of this rank is settled: durable, failed or superseded.

        TimeoutError after `timeout_s`; the saves continue. Raises an error of a save that was not
        raised yet.
        """
        with self._exclusive():
            if self._job is not None:
                self._job.wait(timeout_s)

    def detach(self) -> None:
        """End this saver, and let its writer finish staged saves. Does not wait for storage.

        Only the log shows their outcome. A later run of the job finds the snapshots.
        """
        self._end(Job.detach)

    def close(self, *, keep: bool = False) -> None:
        """Wait until every save is settled, and end the writer of this rank. Idempotent.

        The memory is freed, with three exceptions: `keep`; the last save failed; nothing was saved,
        and the snapshots of an earlier run were never committed. A later run of the job finds the
        snapshots then. Raises an error of a save that was not raised yet. ValueError while another
        thread is in `save` or `restore`: wait until that call ends.
        """
        self._end(lambda job: job.close(keep=keep))

    def _end(self, end_job: Callable[[Job], None]) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        with self._exclusive():
            self._is_closed = True
            if self._job is not None:
                end_job(self._job)

    if not TYPE_CHECKING:
        __getattr__ = refuse_old_attributes("AsyncSaver", {"leave": "detach"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close it. After an error the snapshots stay in memory for the next run."""
        try:
            self.close(keep=error is not None)
        except Exception as failure:
            if error is None:
                raise
            _log.error("a background save failed as well: %s", failure)

    @property
    def num_superseded(self) -> int:
        """The number of saves that a newer save superseded."""
        return 0 if self._job is None else self._job.writer.num_dropped

    @property
    def num_restarts(self) -> int:
        """The number of times that the writer of this rank died and was replaced."""
        return 0 if self._job is None else self._job.writer.num_restarts

    def _open(self) -> None:
        """Compare the options of all ranks, and begin the job if its name is known."""
        options, channel = self._options, self._session.channel
        with channel.exchange("options") as comparing:
            options.check()
            savers = comparing.gather(options.saver_info())
            if savers is not None:
                check_equal_on_all_ranks("AsyncSaver", savers)
                comparing.decide(options.make_root_id() or "")
        self._root_id = root_id = comparing.result(str) or None
        name = options.job
        if root_id is not None:
            name = make_job_name(open_root(options.root)[1], root_id)
        if name is None:  # the path of the first save decides it
            return
        try:
            with channel.exchange("job"):
                self._job = self._begin_job(name)
        except BaseException:
            if self._job is not None:  # another rank has failed
                self._job.close(keep=True)
            raise

    def _ensure_job(self, path: str | os.PathLike[str]) -> Job:
        if self._job is None:
            assert self._root_id is not None
            root = os.path.dirname(open_storage(path)[1])
            self._job = self._begin_job(make_job_name(root, self._root_id))
        return self._job

    def _begin_job(self, name: str) -> Job:
        options, channel = self._options, self._session.channel
        hello = Hello(
            name,
            channel.rank,
            channel.world_size,
            replace(self._session.settings, host=channel.host),
            None if options.max_bytes_per_s is None else float(options.max_bytes_per_s),
            find_process(os.getpid()),
        )
        return Job(hello, drain_timeout_s=float(options.drain_timeout_s))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Exclude other threads and signal handlers: two saves together would mix their states.

        ValueError if another call runs, if the saver is closed, or in a forked process.
        """
        if os.getpid() != self._pid:
            raise ValueError(
                f"this AsyncSaver belongs to process {self._pid}, and this is {os.getpid()}, which "
                f"was forked from it: save in the process that made the saver"
            )
        if not self._is_used.acquire(blocking=False):
            raise ValueError(
                "this AsyncSaver is in a call already, in another thread or in the code that a "
                "signal interrupted. Save, restore and close it in one thread, and not in a "
                "signal handler"
            )
        try:
            if self._is_closed:
                raise ValueError("this AsyncSaver is closed: make another one")
            yield
        finally:
            self._is_used.release()


_savers: weakref.WeakSet[AsyncSaver] = weakref.WeakSet()


def open_savers() -> list[AsyncSaver]:
    """Return the savers of this process that are not closed. Not public."""
    return [each for each in _savers if not each._is_closed and each._pid == os.getpid()]
