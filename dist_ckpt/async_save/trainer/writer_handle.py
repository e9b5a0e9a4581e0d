"""The writer process of this rank, from the trainer's side: start it, send it jobs, watch it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import TypeVar

from dist_ckpt.async_save.snapshots.job_folder import RankFolder, check_file
from dist_ckpt.async_save.writer.messages import (
    Abort,
    Close,
    Done,
    Go,
    Hello,
    Link,
    LinkClosedError,
    Pause,
    Paused,
    Ping,
    Pong,
    Ready,
    Refused,
    Serve,
    Serving,
    Write,
    WriterMessage,
)
from dist_ckpt.core.comm.messages import Failure, error_of
from dist_ckpt.core.runtime.threads import run_after_fork
from dist_ckpt.errors import RankError, StorageError

# The program of a writer, by which it is told from any other process as well.
PROGRAM = "dist_ckpt.async_save.writer"
# A job that was upgraded while it ran may have left a writer of the old name.
PROGRAMS = (PROGRAM, "dist_ckpt.writer")

# To start takes a quarter of a second; on a host where all ranks start at once, some more.
START_S = 60.0
_END_S = 5.0


def start(
    folder: RankFolder, hello: Hello, *, timeout_s: float = START_S
) -> tuple[Link, Popen[bytes]]:
    """Start the writer of a rank, which logs into its folder; return it once it is ready.

    Raises what the writer cannot begin with: ConflictError if the rank has a living one already,
    ValueError for settings that make no sense. RankError if it does not start.
    """
    check_file(folder.log_path)
    ours, theirs = socket.socketpair()
    link = Link(ours)
    process: Popen[bytes] | None = None
    try:
        with theirs:
            process = _started(folder.log_path, theirs.fileno())
        link.send(hello)
        answer = link.receive(timeout_s)
        if isinstance(answer, Ready):
            return link, process
        if isinstance(answer, Refused):
            raise error_of(answer.failure)
        fact = f"it has not begun within {timeout_s:g} s"
    except LinkClosedError:
        fact = "it has ended at once"
    except OSError as error:
        _end(link, process)
        raise StorageError(
            f"the background writer of rank {folder.rank} cannot be started: {error.strerror} "
            f"({folder.log_path} is its log)",
            rank=folder.rank,
        ) from error
    except BaseException:
        _end(link, process)
        raise
    _end(link, process)
    raise RankError(
        f"the background writer of rank {folder.rank} does not start: {fact}. Look into "
        f"{folder.log_path}, then save again",
        rank=folder.rank,
    )


def _started(log_path: str, fd: int) -> Popen[bytes]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(log_path, flags, 0o600)
    try:
        return Popen(  # noqa: S603 - our own module
            # -P: a module of the user's that lies in this folder is not taken for one of Python's.
            [sys.executable, "-P", "-m", PROGRAM, str(fd)],
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=log,
            pass_fds=(fd,),
            start_new_session=True,
            env=_environment(),
        )
    finally:
        os.close(log)


def _environment() -> dict[str, str]:
    """Return the environment in which Python finds this dist_ckpt, also if it is not installed."""
    environment = dict(os.environ)
    root = os.path.abspath(f"{__file__}/../../../..")
    if os.path.basename(root) not in ("site-packages", "dist-packages"):
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{others}" if others else root
    return environment


def _end(link: Link, process: Popen[bytes] | None) -> None:
    link.close()
    if process is not None:
        try:
            process.wait(_END_S)
        except TimeoutExpired:
            process.kill()
            process.wait(_END_S)


_log = logging.getLogger("dist_ckpt")

# What a writer answers at once, it answers within this, or it is taken for dead.
ANSWER_S = 60.0

# How long to wait for a writer before asking whether it is frozen.
PING_S = 30.0

# So long one thread keeps others from looking for messages.
_SLICE_S = 0.05

T = TypeVar("T")


@dataclass(slots=True)
class WriteJob:
    """A save that the writer was told to write: `done`, or `lost` and why, or neither yet."""

    snapshot: str
    arena: int
    staged: threading.Event = field(default_factory=threading.Event)
    done: Done | None = None
    lost: Failure | None = None
    # Whether its failure has been raised somewhere.
    is_told: bool = False
    is_dropped: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will come of it."""
        return self.done is not None or self.lost is not None or self.is_dropped

    @property
    def is_committed(self) -> bool:
        """Whether it has become a checkpoint, as far as this rank knows."""
        return self.done is not None and self.done.report is not None

    @property
    def failure(self) -> Exception | None:
        """Return what it failed of, anew each time."""
        if self.lost is not None:
            return error_of(self.lost)
        if self.done is None or self.done.failure is None:
            return None
        return error_of(self.done.failure)


class WriterHandle:
    """One rank's writer; a new process takes the place of one that has died. Threads share it."""

    def __init__(self, folder: RankFolder, hello: Hello) -> None:
        self._folder = folder
        self._hello = hello
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._process: Popen[bytes] | None = None
        self._orders: dict[str, WriteJob] = {}
        self._answer: WriterMessage | None = None
        self.num_restarts = 0
        self.num_dropped = 0
        # Whether a save has been committed, and whether the one that was settled last was; None: no
        # save was settled.
        self.has_committed = False
        self.is_last_committed: bool | None = None
        # When the newest save of this job that is known here was begun, by a coordinator's clock.
        self.newest_at = 0.0
        # The store in which it meets the other writers; None until it was told one.
        self.joined: tuple[str, int, bytes] | None = None
        run_after_fork(self._forget)

    def ensure(self) -> None:
        """See that there is a living writer: start one, or another. Raises what `start` raises."""
        with self._lock:
            self.look()
            if self._link is not None:
                return
            if self._process is not None:
                self.num_restarts += 1
                _log.warning(
                    "the background writer of rank %d has ended (%s): another one is started",
                    *(self._hello.rank, self._how_it_ended()),
                )
            self._link, self._process = start(self._folder, self._hello)

    def look(self, timeout_s: float = 0.0) -> None:
        """Take in what the writer has said, and wait that long for something new."""
        # Without the lock: who has it again and again lets no other thread in, and one may save.
        if timeout_s > 0 and (link := self._link) is not None:
            link.wait(timeout_s)
        with self._lock:
            if self._link is None:
                return
            try:
                while (message := self._link.receive(0.0)) is not None:
                    self._take(message)
            except LinkClosedError:
                self._lose()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Take in what the writer says until a condition holds; False if time runs out."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        ping_at = time.monotonic() + PING_S
        while not condition():
            left = _SLICE_S if until is None else until - time.monotonic()
            if left <= 0:
                return False
            if self._link is None:  # nothing more will come
                return condition()
            self.look(min(left, _SLICE_S))
            if time.monotonic() > ping_at:
                # One that is frozen would be waited for without end: now it is lost instead.
                with suppress(RankError):
                    self._asked(Ping(), Pong)
                ping_at = time.monotonic() + PING_S
        return True

    # --- saves -------------------------------------------------------------------------------

    @property
    def orders(self) -> list[WriteJob]:
        """The saves that something may still be said of, the oldest first."""
        with self._lock:
            return [*self._orders.values()]

    @property
    def unsettled(self) -> list[WriteJob]:
        """The saves that are not settled, the oldest first."""
        return [order for order in self.orders if not order.is_settled]

    @property
    def failed(self) -> list[WriteJob]:
        """The saves whose failure nobody was told of."""
        return [order for order in self.orders if not order.is_told and order.failure]

    def forget_told(self) -> None:
        """Forget the saves of which there is nothing more to tell."""
        with self._lock:
            for order in self.orders:
                if order.is_settled and (order.is_told or not order.failure):
                    del self._orders[order.snapshot]

    def order(self, order: WriteJob, write: Write) -> None:
        """Have a snapshot written; if the writer is gone, the save is lost, which is no error here.

        So it is with the writer if this is interrupted. What was settled, and told, is forgotten.
        """
        with self._lock:
            self.forget_told()
            self._orders[order.snapshot] = order
            self.joined = write.host, write.port, write.token
            try:
                self._send(write)
            except BaseException:
                # An interrupt: nobody knows whether the writer has heard of it, nor would it say.
                self.kill()
                raise
            if self._link is None:  # since before: nobody else would say so
                self._lose_orders()

    def abort(self, order: WriteJob, reason: str) -> None:
        """Have a save fail that could not be staged."""
        self._send(Abort(order.snapshot, reason))

    def serve(self, towards: str) -> tuple[str, int, bytes]:
        """Have the writer serve a new store; return where it is, and its token."""
        token = secrets.token_bytes(32)
        answer = self._asked(Serve(token, towards), Serving)
        return answer.host, answer.port, token

    def pause(self, snapshot: str) -> bool:
        """Keep a save from beginning; say whether it had not begun."""
        return self._asked(Pause(snapshot), Paused).is_paused

    def go(self, snapshot: str, *, drop: bool) -> None:
        """Let a save that is paused begin, or drop it."""
        order = self._orders.get(snapshot)
        if drop and order is not None and not order.is_settled:  # else its writer has died over it
            order.is_dropped = True
            self.num_dropped += 1
        self._send(Go(snapshot, drop))

    def detach(self) -> None:
        """Let the writer end by itself when everything is settled; who has handles is told still.

        Waits for nothing.
        """
        self._send(Close())

    def close(self, timeout_s: float) -> None:
        """End the writer when everything is settled; kill it if that takes too long."""
        with self._lock:
            self._send(Close())
            if self._process is not None:
                try:
                    self._process.wait(timeout_s)
                except TimeoutExpired:
                    self._process.kill()
                    self._process.wait(ANSWER_S)
            self.look()
            self._lose()
            self._process = None

    # --- inside ------------------------------------------------------------------------------

    def _asked(self, question: WriterMessage, kind: type[T]) -> T:
        """Return the answer, which comes at once; a writer that gives none is ended."""
        with self._lock:
            self._answer = None
            self._send(question)
            until = time.monotonic() + ANSWER_S
            while self._answer is None and self._link is not None and time.monotonic() < until:
                self.look(_SLICE_S)
            answer = self._answer
            if isinstance(answer, Refused):
                raise error_of(answer.failure)
            if not isinstance(answer, kind):
                self.kill()
                raise RankError(
                    f"the background writer of rank {self._hello.rank} gives no answer: it is "
                    f"replaced; save again",
                    rank=self._hello.rank,
                )
            return answer

    def kill(self) -> None:
        """End the writer at once; what it had not settled has failed."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
            self._lose()

    def _send(self, message: WriterMessage) -> None:
        with self._lock:
            if self._link is not None:
                try:
                    self._link.send(message)
                except LinkClosedError:
                    self.look()  # what it said last

    def _take(self, message: WriterMessage) -> None:
        if isinstance(message, Done):
            if (order := self._orders.get(message.snapshot)) is not None:
                order.done = message
                self.is_last_committed = message.report is not None
                if message.failure is not None:
                    self.joined = None  # after it the writers may not be in step
                self.has_committed = self.has_committed or self.is_last_committed
        else:
            self._answer = message

    def _lose(self) -> None:
        """Take note that the writer is gone: what it had not settled is lost."""
        if self._link is not None:
            self._link.close()
            self._link = None
            self._lose_orders()

    def _lose_orders(self) -> None:
        self.joined = None
        for order in self.unsettled:
            self.is_last_committed = False
            message = (
                f"rank {self._hello.rank}: the background writer has ended "
                f"({self._how_it_ended()}) before its save was settled. Look into "
                f"{self._folder.log_path}, then save again: another one is started"
            )
            order.lost = Failure("RankError", message, self._hello.rank, "background save")

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "it never started"
        try:
            code = self._process.wait(1.0)
        except TimeoutExpired:
            return "it hangs"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _forget(self) -> None:
        """In a forked child: let go of the link, which would keep the writer waiting."""
        self._lock = threading.RLock()  # another thread may have held it
        if self._link is not None:
            self._link.close()
            self._link = None
        message = "the save is its parent's business, and this is a forked process: ask there"
        for order in self.unsettled:
            order.lost = Failure("ValueError", message, None, None)


def first_error(errors: Sequence[Exception]) -> Exception:
    """Return the first error of some saves, which tells of the others: nobody else does."""
    first, *others = errors
    for other in others:
        first.add_note(f"Another background save has failed as well: {other}")
    return first
