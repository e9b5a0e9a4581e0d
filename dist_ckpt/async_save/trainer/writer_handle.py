"""The trainer's handle of its writer process: start it, send saves, get outcomes.

If the writer dies, its saves fail (`_fail_unsettled`), and the next save starts another writer.
`SaveHandle` is such a save for the user: `AsyncSaver.save` returns it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import TypeVar

from dist_ckpt.async_save.snapshots.job_folder import RankFolder, check_regular_file
from dist_ckpt.async_save.writer import writer_messages
from dist_ckpt.core.comm.rank_messages import Failure, build_error
from dist_ckpt.core.runtime.processes import running_time
from dist_ckpt.core.runtime.threads import run_after_fork
from dist_ckpt.errors import RankError, StorageError, UnequalReplicasError
from dist_ckpt.reports import SaveReport

_log = logging.getLogger("dist_ckpt")

# The program of a writer. It also identifies the process as a writer.
PROGRAM = "dist_ckpt.async_save.writer"
# A job that was upgraded while it ran may have left a writer of the old name.
PROGRAMS = (PROGRAM, "dist_ckpt.writer")

# A start takes a quarter of a second, and longer if all ranks of a host start together.
START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0

# A writer answers immediately. Without an answer within this time, it counts as dead.
ANSWER_TIMEOUT_S = 60.0

# The time of a wait after which a ping checks that the writer is not frozen.
PING_INTERVAL_S = 30.0

# The longest time for which one thread keeps other threads from receiving messages.
_POLL_INTERVAL_S = 0.05

T = TypeVar("T")


def start_writer(
    folder: RankFolder, hello: writer_messages.Hello
) -> tuple[writer_messages.Link, Popen[bytes]]:
    """Start the writer of a rank, and return when it is ready. Its log is in the rank's folder.

    Raises the error of the writer: ConflictError if the rank has a living one, ValueError for
    invalid settings. RankError if it does not start.
    """
    check_regular_file(folder.log_path)
    trainer_end, writer_end = socket.socketpair()
    link = writer_messages.Link(trainer_end)
    process: Popen[bytes] | None = None
    try:
        with writer_end:
            process = _start_process(folder.log_path, writer_end.fileno())
        link.send(hello)
        answer = link.receive(START_TIMEOUT_S)
        if isinstance(answer, writer_messages.Ready):
            return link, process
        if isinstance(answer, writer_messages.Refused):
            raise build_error(answer.failure)
        fact = f"it has not begun within {START_TIMEOUT_S:g} s"
    except writer_messages.LinkClosedError:
        fact = "it has ended immediately"
    except OSError as error:
        _end_process(link, process)
        raise StorageError(
            f"the background writer of rank {folder.rank} cannot be started: {error.strerror} "
            f"({folder.log_path} is its log)",
            rank=folder.rank,
        ) from error
    except BaseException:
        _end_process(link, process)
        raise
    _end_process(link, process)
    raise RankError(
        f"the background writer of rank {folder.rank} does not start: {fact}. Look into "
        f"{folder.log_path}, then save again",
        rank=folder.rank,
    )


def _start_process(log_path: str, fd: int) -> Popen[bytes]:
    environment = dict(os.environ)
    root = os.path.abspath(f"{__file__}/../../../..")
    # So that Python finds this dist_ckpt, even if it is not installed.
    if os.path.basename(root) not in ("site-packages", "dist-packages"):
        paths = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{paths}" if paths else root
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(log_path, flags, 0o600)
    try:
        return Popen(  # noqa: S603 - our own module
            # -P: a module of the user in the current folder must not shadow one of Python.
            [sys.executable, "-P", "-m", PROGRAM, str(fd)],
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=log,
            pass_fds=(fd,),
            start_new_session=True,
            env=environment,
        )
    finally:
        os.close(log)


def _end_process(link: writer_messages.Link, process: Popen[bytes] | None) -> None:
    link.close()
    if process is not None:
        try:
            process.wait(_END_TIMEOUT_S)
        except TimeoutExpired:
            process.kill()
            process.wait(_END_TIMEOUT_S)


@dataclass(slots=True)
class BackgroundSave:
    """A save that was sent to the writer, and its outcome.

    `lost` is its failure if the writer died. `is_reported`: a call on some rank raised its failure.
    """

    snapshot: str
    arena: int
    staged: threading.Event = field(default_factory=threading.Event)
    done: writer_messages.Done | None = None
    lost: Failure | None = None
    is_reported: bool = False
    is_dropped: bool = False

    @property
    def is_settled(self) -> bool:
        """True if its outcome is final."""
        return self.done is not None or self.lost is not None or self.is_dropped

    @property
    def is_committed(self) -> bool:
        """True if this rank's writer reported a commit."""
        return self.done is not None and self.done.report is not None

    @property
    def failure(self) -> Exception | None:
        """The error of the save, a new object each time, or None."""
        failure = self.lost or (None if self.done is None else self.done.failure)
        return None if failure is None else build_error(failure)


class WriterHandle:
    """One rank's writer. A new process replaces a dead one. Threads may share the handle."""

    def __init__(self, folder: RankFolder, hello: writer_messages.Hello) -> None:
        self._folder = folder
        self._hello = hello
        self._lock = threading.RLock()
        self._link: writer_messages.Link | None = None
        self._process: Popen[bytes] | None = None
        self._saves: dict[str, BackgroundSave] = {}
        self._answer: writer_messages.WriterMessage | None = None
        self.num_restarts = 0
        self.num_dropped = 0
        self.has_committed = False
        # None until a save is settled.
        self.is_last_committed: bool | None = None
        # The start of the newest save of this job, by its coordinator's clock.
        self.newest_at = 0.0
        # The store where it meets the other writers.
        self.joined: writer_messages.StoreAddress | None = None
        # A save has failed because replicas differ, and none has begun since.
        self.has_unequal_replicas = False
        run_after_fork(self._detach_in_child)

    def ensure_running(self) -> None:
        """Start a writer if none lives. Raises the errors of `start_writer`."""
        with self._lock:
            self.receive_messages()
            if self._link is not None:
                return
            if self._process is not None:
                self.num_restarts += 1
                _log.warning(
                    "the background writer of rank %d has ended (%s): another one is started",
                    *(self._hello.rank, self._how_it_ended()),
                )
            self._link, self._process = start_writer(self._folder, self._hello)

    def receive_messages(self, timeout_s: float = 0.0) -> None:
        """Receive messages of the writer. Wait up to `timeout_s` for the first."""
        # Wait without the lock: a thread that takes it repeatedly would starve other threads.
        if timeout_s > 0 and (link := self._link) is not None:
            link.wait(timeout_s)
        with self._lock:
            if self._link is None:
                return
            try:
                while (message := self._link.receive(0.0)) is not None:
                    self._process_message(message)
            except writer_messages.LinkClosedError:
                self._close_link()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Receive messages of the writer until a condition is true. False after `timeout_s`."""
        until = None if timeout_s is None else running_time() + timeout_s
        ping_at = running_time() + PING_INTERVAL_S
        while not condition():
            remaining_s = _POLL_INTERVAL_S if until is None else until - running_time()
            if remaining_s <= 0:
                return False
            if self._link is None:  # no message can follow
                return condition()
            self.receive_messages(min(remaining_s, _POLL_INTERVAL_S))
            if running_time() > ping_at:
                # This kills a frozen writer. Otherwise the wait would never end.
                with suppress(RankError):
                    self._request(writer_messages.Ping(), writer_messages.Pong)
                ping_at = running_time() + PING_INTERVAL_S
        return True

    @property
    def saves(self) -> list[BackgroundSave]:
        """The saves that are unsettled or not reported, the oldest first."""
        with self._lock:
            return [*self._saves.values()]

    @property
    def unsettled(self) -> list[BackgroundSave]:
        """The saves that are not settled, the oldest first."""
        return [save for save in self.saves if not save.is_settled]

    @property
    def failed(self) -> list[BackgroundSave]:
        """The failed saves whose failure was not reported."""
        return [save for save in self.saves if not save.is_reported and save.failure]

    def raise_failed(self) -> None:
        """Raise the errors that were not reported: the first, with notes about the others."""
        failed = self.failed
        for save in failed:
            save.is_reported = True
        if errors := [error for save in failed if (error := save.failure)]:
            raise first_error(errors)

    def forget_reported(self) -> None:
        """Remove the saves that are settled and have no failure left to report."""
        with self._lock:
            for save in self.saves:
                if save.is_settled and (save.is_reported or not save.failure):
                    del self._saves[save.snapshot]

    def submit(self, save: BackgroundSave, write: writer_messages.Write) -> None:
        """Send a snapshot. If the writer is dead, the save is lost. Interrupts kill the writer."""
        with self._lock:
            self.forget_reported()
            self._saves[save.snapshot] = save
            self.joined = write.host, write.port, write.token
            try:
                self._send(write)
            except BaseException:
                # An interrupt: it is unknown if the writer has received the message.
                self.kill()
                raise
            if self._link is None:  # it was lost before this save
                self._fail_unsettled()

    def abort(self, save: BackgroundSave, reason: str) -> None:
        """Fail a save that could not be staged."""
        self._send(writer_messages.Abort(save.snapshot, reason))

    def serve_store(self, peer_host: str) -> writer_messages.StoreAddress:
        """Make the writer serve a new store. Return its host, port and token."""
        token = secrets.token_bytes(32)
        answer = self._request(writer_messages.Serve(token, peer_host), writer_messages.Serving)
        return answer.host, answer.port, token

    def pause(self, snapshot: str) -> bool:
        """Pause a save. Return False if it has begun."""
        return self._request(writer_messages.Pause(snapshot), writer_messages.Paused).is_paused

    def end_pause(self, snapshot: str, *, drop: bool) -> None:
        """Continue a paused save, or drop it."""
        save = self._saves.get(snapshot)
        if drop and save is not None and not save.is_settled:  # settled: its writer died
            save.is_dropped = True
            self.num_dropped += 1
        self._send(writer_messages.Go(snapshot, drop))

    def detach(self) -> None:
        """Let the writer end when all saves are settled. Handles still get results. No wait."""
        self._send(writer_messages.Close())

    def close(self, timeout_s: float) -> None:
        """End the writer when all saves are settled. Kill it after `timeout_s`."""
        with self._lock:
            self._send(writer_messages.Close())
            if self._process is not None:
                until = running_time() + timeout_s
                while self._process.poll() is None and running_time() < until:
                    with suppress(TimeoutExpired):
                        self._process.wait(_POLL_INTERVAL_S)
                if self._process.poll() is None:
                    self._process.kill()
                    self._process.wait(ANSWER_TIMEOUT_S)
            self.receive_messages()
            self._close_link()
            self._process = None

    def _request(self, request: writer_messages.WriterMessage, answer_type: type[T]) -> T:
        """Return the writer's answer. Kill a writer that sends none, and raise RankError."""
        with self._lock:
            self._answer = None
            self._send(request)
            until = running_time() + ANSWER_TIMEOUT_S
            while self._answer is None and self._link is not None and running_time() < until:
                self.receive_messages(_POLL_INTERVAL_S)
            answer = self._answer
            if isinstance(answer, writer_messages.Refused):
                raise build_error(answer.failure)
            if not isinstance(answer, answer_type):
                self.kill()
                raise RankError(
                    f"the background writer of rank {self._hello.rank} does not answer and was "
                    f"killed: save again, which starts another one",
                    rank=self._hello.rank,
                )
            return answer

    def kill(self) -> None:
        """Kill the writer. Its unsettled saves have failed."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
            self._close_link()

    def _send(self, message: writer_messages.WriterMessage) -> None:
        with self._lock:
            if self._link is not None:
                try:
                    self._link.send(message)
                except writer_messages.LinkClosedError:
                    self.receive_messages()  # its last messages

    def _process_message(self, message: writer_messages.WriterMessage) -> None:
        if not isinstance(message, writer_messages.Done):
            self._answer = message
        elif (save := self._saves.get(message.snapshot)) is not None:
            save.done = message
            self.is_last_committed = message.report is not None
            if message.failure is not None:
                self.joined = None  # the writers may be out of step after a failure
                if message.failure.kind == UnequalReplicasError.__name__:
                    self.has_unequal_replicas = True
            self.has_committed = self.has_committed or self.is_last_committed

    def _close_link(self) -> None:
        """Close the link to a dead writer. Its unsettled saves are lost."""
        if self._link is not None:
            self._link.close()
            self._link = None
            self._fail_unsettled()

    def _fail_unsettled(self) -> None:
        self.joined = None
        for save in self.unsettled:
            self.is_last_committed = False
            message = (
                f"rank {self._hello.rank}: the background writer has ended "
                f"({self._how_it_ended()}) before its save was settled. Look into "
                f"{self._folder.log_path}, then save again: another one is started"
            )
            save.lost = Failure("RankError", message, self._hello.rank, "background save")

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "it never started"
        try:
            code = self._process.wait(1.0)
        except TimeoutExpired:
            return "it hangs"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _detach_in_child(self) -> None:
        """Close the link in a forked child. Otherwise the writer would wait for the child too."""
        self._lock = threading.RLock()  # another thread may have had the old one
        if self._link is not None:
            self._link.close()
            self._link = None
        message = "this process was forked from the one that began the save: use the handle there"
        for save in self.unsettled:
            save.lost = Failure("ValueError", message, None, None)


def first_error(errors: Sequence[Exception]) -> Exception:
    """Return the first error, with a note for each later error."""
    first, *later = errors
    for error in later:
        first.add_note(f"Another background save has failed as well: {error}")
    return first


@dataclass(eq=False, repr=False)
class SaveHandle:
    """A background save. Threads may share it. Its methods are local: no other rank waits."""

    path: str
    step: int | None
    _writer: WriterHandle | None = None
    _save: BackgroundSave | None = None
    _report: Callable[[SaveReport], SaveReport] | None = None

    @property
    def skipped(self) -> bool:
        """True if nothing was saved because two older saves were not written yet."""
        return self._save is None

    @property
    def superseded(self) -> bool:
        """True if a newer save replaced it before it began."""
        return self._save is not None and self._save.is_dropped

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until the state may change. On the CPU it may when `save` returns.

        TimeoutError after `timeout_s`; the save continues.
        """
        if self._save is not None and not self._save.staged.wait(timeout_s):
            raise TimeoutError(
                f"{self.path}: not staged within {timeout_s:g} s; the save continues, wait again"
            )

    def done(self) -> bool:
        """Return True if it is settled: durable, failed, skipped or superseded."""
        if self._save is None or self._writer is None:
            return True
        if not self._save.is_settled:
            self._writer.receive_messages()
        return self._save.is_settled

    def result(self, timeout_s: float | None = None) -> SaveReport | None:
        """Wait until the checkpoint is durable; None if it was skipped or superseded.

        TimeoutError after `timeout_s`; the save continues. Raises the error of a failed save: then
        there is no new checkpoint, and older ones are unchanged. But if this rank's writer died,
        the other writers may have committed the save just before.
        """
        if (failure := self.exception(timeout_s)) is not None:
            raise failure
        done = None if self._save is None else self._save.done
        if done is None or done.report is None or self._report is None:
            return None
        return self._report(done.report)

    def exception(self, timeout_s: float | None = None) -> Exception | None:
        """Wait as `result` does, but return the error of the save instead of raising it."""
        save = self._save
        if save is None or self._writer is None:
            return None
        if not self._writer.wait_for(lambda: save.is_settled, timeout_s):
            raise TimeoutError(
                f"{self.path}: not durable within {timeout_s:g} s; the save continues, wait again"
            )
        save.is_reported = True
        return save.failure
