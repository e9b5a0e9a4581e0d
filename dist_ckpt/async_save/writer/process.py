"""The process that writes a rank's snapshots in the background: `python -m` runs it.

Its argument is a descriptor, the link to its trainer. It runs in a session of its own, and outlives
its trainer until what that has staged is settled. It cannot outlive its container, or the step or
control group that it runs in.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import platform
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.async_save.writer.messages import (
    WRITER_END_S,
    Abort,
    Close,
    Go,
    Hello,
    Link,
    LinkClosedError,
    Pause,
    Paused,
    Ping,
    Pong,
    ProtocolError,
    Ready,
    Refused,
    Serve,
    Serving,
    Write,
    WriterMessage,
)
from dist_ckpt.async_save.writer.write_jobs import (
    OpenArenas,
    WriterQueue,
    WriterRendezvous,
    WriterSave,
    WriterSaves,
    host_of,
)
from dist_ckpt.core.comm.key_value.key_server import KeyServer, reachable_host
from dist_ckpt.core.comm.messages import failure_of
from dist_ckpt.core.storage.forwarding import RateLimit
from dist_ckpt.errors import CheckpointError

_log = logging.getLogger("dist_ckpt")

_BY_HAND = (
    "dist_ckpt.async_save.writer: dc.AsyncSaver starts it, and gives it a socket "
    "to a rank's trainer; "
    "to look at checkpoints, start dist-ckpt (python -m dist_ckpt)"
)

# How long the trainer may take to say whose writer this is.
HELLO_S = 60.0

# Training comes first, but not so much that heartbeats are late.
_NICENESS = 19

# ioprio_set, which the C library does not have: its number, by the machine.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "riscv64": 30}
# Best effort, the lowest level of it: the idle class may wait for ever.
_IOPRIO = 2 << 13 | 7

# When all is sealed, who was told to end has so long to abandon its save: what takes longer hangs,
# in a storage that does not answer, or at a lock, which an interrupt may have left held. A call of
# the storage that is interrupted may take half of it.
_ABANDON_S = 10.0

# What the thread that ends the process interrupts the main one with.
_INTERRUPT = signal.SIGUSR1
_TOLD = f"it was told to end by signal {signal.SIGTERM:d}"
EXIT_CODE = 128 + signal.SIGTERM

# Some thousand saves.
MAX_LOG_NBYTES = 4 << 20


class TerminatedError(SystemExit):
    """This process was told to end."""


class Termination:
    """Whether this process was told to end, by SIGTERM. A thread of its own waits for that.

    It interrupts the main thread, seals what is staged, and ends the process if the main thread
    does not: that may hang in the storage. If the process has not ended `end_s` later, it does so
    then, and says on stderr where it hung.
    """

    def __init__(self, end_s: float = WRITER_END_S) -> None:
        self._end_s = end_s
        self._is_told = False
        self._is_raised = False
        self._seal: Callable[[], None] = lambda: None
        self._sealed = threading.Event()

    def begin(self) -> None:
        """Wait for the signal from now on. The main thread calls it, before there are others."""
        # Blocked in all threads, as those to come inherit it, so that the one which waits gets it.
        # More of them change nothing: each rank of a new run on this host tells all writers that
        # are left, maybe while Python ends.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.signal(_INTERRUPT, self._interrupt)
        threading.Thread(target=self._end, name="dist_ckpt end", daemon=True).start()

    def set_seal(self, seal: Callable[[], None]) -> None:
        """Say what seals all that is staged. It does not count on the main thread."""
        self._seal = seal

    def check(self) -> None:
        """Raise if it was told to end."""
        if self._is_told:
            raise CheckpointError("the background writer was told to end")

    def finish(self) -> None:
        """Raise if it was told to end, once all is sealed. The main thread calls it."""
        if self._is_told:
            self._sealed.wait(self._end_s)
            raise TerminatedError(_TOLD)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # Anybody may send it, a job's scheduler for one.
        if self._is_told and not self._is_raised:
            self._is_raised = True
            raise TerminatedError(_TOLD)

    def _end(self) -> None:
        signal.sigwait({signal.SIGTERM})
        # First, so that no thread that the main one waits for waits on.
        self._is_told = True
        # A watch that takes no lock of Python's.
        faulthandler.dump_traceback_later(self._end_s, exit=True)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, _INTERRUPT)
        try:
            self._seal()
        except Exception:  # noqa: BLE001 - a thread's outer edge
            _log.exception("not all that is staged is sealed")
        self._sealed.set()
        time.sleep(_ABANDON_S)
        _log.warning("ended: %s, and hangs; what it wrote may still lie there", _TOLD)
        os._exit(EXIT_CODE)


class Stores:
    """The stores that this writer serves: the newest, and older ones that a save still needs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[bytes, KeyServer] = {}
        self._newest = b""

    def serve(self, message: Serve) -> Serving:
        """Serve one more. OSError or ValueError if that cannot be."""
        host = "" if message.towards else "127.0.0.1"
        server = KeyServer(message.token, host=host)
        with self._lock:
            self._servers[message.token] = server
            self._newest = message.token
        seen_at = reachable_host(message.towards) if message.towards else host
        return Serving(seen_at, server.address[1])

    def close_unused(self, needed: set[bytes]) -> None:
        """Close those that have been replaced, but for the ones with these tokens."""
        with self._lock:
            unused = self._servers.keys() - needed - {self._newest}
            servers = [self._servers.pop(token) for token in unused]
        for server in servers:
            server.close()

    def close(self) -> None:
        """Close all."""
        self._newest = b""
        self.close_unused(set())


class BackgroundWriter:
    """One rank's writer: a thread listens to the trainer, the main thread does the saves."""

    def __init__(
        self,
        link: Link,
        hello: Hello,
        allowance: RateLimit | None,
        arenas: OpenArenas,
        termination: Termination,
    ) -> None:
        self._link = link
        self._termination = termination
        self._arenas = arenas
        self._queue = WriterQueue(hello.rank)
        self._stores = Stores()
        self._meetings = WriterRendezvous(hello)
        self._saves = WriterSaves(hello, self._meetings, self._check, allowance)
        self._hello = hello
        self._problem = ""

    def run(self) -> str:
        """Do what the trainer says until it is gone and all is settled.

        Returns what has gone wrong with this process itself, "" if nothing has.
        """
        self._termination.set_seal(self._seal)
        listener = threading.Thread(target=self._listen, name="dist_ckpt listener", daemon=True)
        listener.start()
        try:
            while (save := self._queue.take()) is not None:
                _bound_log()
                done = save.settle()
                # Who is told of it stages over it: not while it is being sealed.
                self._termination.finish()
                with suppress(LinkClosedError):
                    self._link.send(done)
                if done.failure is not None:
                    gc.collect()  # what a traceback refers to: the memory of an arena
                self._close_unused_stores()
            self._meetings.linger()
        except TerminatedError:
            self._termination.finish()
            raise
        finally:
            self._meetings.close()
            self._stores.close()
        return self._problem

    def _seal(self) -> None:
        for save in self._queue.unsettled:
            save.seal()

    def _close_unused_stores(self) -> None:
        needed = {save.write.token for save in self._queue.unsettled}
        self._stores.close_unused(needed | {self._meetings.token or b""})

    def _check(self, write: Write) -> None:
        self._termination.check()
        self._queue.check(write)

    def _listen(self) -> None:
        try:
            while (message := self._link.receive(None)) is not None:
                self._take(message)
        except ProtocolError as error:
            _log.error("%s", error)
            self._problem = str(error)
        except LinkClosedError as error:
            _log.info("the trainer is gone (%s): what is staged is written, then this ends", error)
        except Exception as error:  # noqa: BLE001 - a thread's outer edge
            _log.exception("the link to the trainer is given up")
            self._problem = f"{type(error).__name__}: {error}"
        finally:
            self._queue.end(is_trainer_gone=True)
            self._meetings.hurry()

    def _take(self, message: WriterMessage) -> None:
        queue = self._queue
        match message:
            case Write():
                queue.put(WriterSave(self._saves, message, self._arenas.open(message)))
            case Serve():
                self._link.send(self._served(message))
            case Abort(snapshot, reason):
                queue.abort(snapshot, reason)
            case Pause(snapshot):
                self._link.send(Paused(snapshot, queue.pause(snapshot)))
            case Go(snapshot, drop):
                queue.go(snapshot, drop=drop)
            case Ping():
                self._link.send(Pong())
            case Close():
                queue.end(is_trainer_gone=False)
            case _:
                raise ProtocolError(f"the trainer sent a {type(message).__name__}")

    def _served(self, message: Serve) -> Serving | Refused:
        _allow_many_connections()
        try:
            serving = self._stores.serve(message)
            # Those that no save was ordered in: nobody else would close them if none ever is.
            self._close_unused_stores()
            return serving
        except (OSError, ValueError) as error:
            host = host_of(self._hello.config)
            return Refused(failure_of(error, "serve", self._hello.rank, host))


def _ignore_signals() -> None:
    # Who stops the trainer from a terminal does not mean its writer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _step_back() -> None:
    """Leave processors and disks to who is in more of a hurry; threads to come do so too."""
    with suppress(OSError):
        os.nice(_NICENESS)
    number = _IOPRIO_SET.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO)


def _bound_log() -> None:
    """Begin the log anew when it is long: it lies in shared memory, and nobody else rotates it."""
    with suppress(OSError):
        if os.fstat(sys.stderr.fileno()).st_size > MAX_LOG_NBYTES:
            os.ftruncate(sys.stderr.fileno(), 0)


def _log_to_stderr(rank: int | str) -> None:
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s rank {rank} writer {os.getpid()} %(levelname)s %(message)s",
        stream=sys.stderr,
        force=True,
    )


def _allow_many_connections() -> None:
    """Raise the limit of open files: each rank's writer has a connection."""
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(arguments: list[str]) -> int:
    """Be the background writer at the end of a link; return the process's exit code."""
    faulthandler.enable()
    termination = Termination()
    _ignore_signals()
    _log_to_stderr("?")
    try:
        termination.begin()
        if (end := _link_of(arguments)) is None:
            print(_BY_HAND, file=sys.stderr)
            return 2
        problem = _serve_trainer(end, termination)
    except TerminatedError as error:
        _log.warning("ended: %s; what was not committed is abandoned", error)
        return EXIT_CODE
    except LinkClosedError as error:
        problem = str(error)
    except Exception:  # noqa: BLE001 - the process's outer edge
        _log.exception("ended by an error of its own")
        return 1
    if problem:
        _log.error("ended: %s", problem)
        return 1
    _log.info("ended: everything is settled")
    return 0


def _link_of(arguments: list[str]) -> Link | None:
    """Return the link whose end a trainer hands over; None if this was started otherwise."""
    try:
        (number,) = arguments
        return Link(socket.socket(fileno=int(number)))
    except (ValueError, OSError):
        return None


def _serve_trainer(link: Link, termination: Termination) -> str:
    hello = link.receive(HELLO_S)
    if not isinstance(hello, Hello):
        return f"a trainer says hello first, within {HELLO_S:g} s; this one said {hello}"
    _log_to_stderr(hello.rank)
    _step_back()
    try:
        hello.check()
        cap = hello.max_bytes_per_s
        allowance = None if cap is None else RateLimit(cap, termination.check)
        folder = JobFolder(hello.job).rank(hello.rank)
        lock = folder.lock("writer")
    except (CheckpointError, ValueError, TypeError) as error:
        host = socket.gethostname()
        failure = failure_of(error, "start of a writer", hello.rank, host)
        link.send(Refused(failure))
        return f"it cannot begin: {error}"
    arenas = OpenArenas(folder)
    try:
        link.send(Ready(os.getpid()))
        _log.info("the writer of rank %d of %d has started", hello.rank, hello.world_size)
        return BackgroundWriter(link, hello, allowance, arenas, termination).run()
    finally:
        arenas.close()
        lock.release()
