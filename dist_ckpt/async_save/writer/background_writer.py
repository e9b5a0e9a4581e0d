"""The writer process of a rank: it writes snapshots in the background. `python -m` runs it.

Its argument is a file descriptor, the link to its trainer. It runs in a new session, and outlives
its trainer until all staged saves are settled. It cannot outlive its container, Slurm step or
cgroup.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
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
from dist_ckpt.async_save.writer import writer_messages, writer_saves
from dist_ckpt.core.comm.key_value.key_server import KeyServer
from dist_ckpt.core.comm.rank_messages import describe_error
from dist_ckpt.core.runtime.network import reachable_host
from dist_ckpt.core.storage.storage_wrappers import RateLimit
from dist_ckpt.errors import CheckpointError

_log = logging.getLogger("dist_ckpt")

_USAGE = (
    "dist_ckpt.async_save.writer: dc.AsyncSaver starts this program, with a socket to a rank's "
    "trainer; to look at checkpoints, start dist-ckpt (python -m dist_ckpt)"
)

# The deadline of the trainer's first message.
HELLO_TIMEOUT_S = 60.0

# Training has priority, but heartbeats must not be late.
_NICENESS = 19

# The number of the system call ioprio_set, by machine. The C library has no function for it.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "riscv64": 30}
# The lowest level of the class "best effort": the class "idle" may wait forever.
_IOPRIO = 2 << 13 | 7

# The time to abandon the save after all is sealed. An interrupted storage call may take half of it.
# A process that lives longer hangs: in a storage that does not answer, or at a lock that the
# interrupted code has.
_ABANDON_S = 10.0

# The termination thread interrupts the main thread with it.
_INTERRUPT = signal.SIGUSR1
_REASON = f"it received signal {signal.SIGTERM:d}"
EXIT_CODE = 128 + signal.SIGTERM

# The lines of some thousand saves.
MAX_LOG_NBYTES = 4 << 20


class TerminatedError(SystemExit):
    """This process received SIGTERM."""


class Termination:
    """The end of this process by SIGTERM. A separate thread waits for the signal.

    The thread interrupts the main thread, seals staged snapshots, and ends the process if the main
    thread hangs in the storage. After `end_s` the process ends in any case, with a traceback of the
    hang on stderr.
    """

    def __init__(self, end_s: float = writer_messages.WRITER_END_S) -> None:
        self._end_s = end_s
        self._is_signalled = False
        self._is_raised = False
        self._seal: Callable[[], None] = lambda: None
        self._sealed = threading.Event()

    def begin(self) -> None:
        """Start to wait for the signal. The main thread calls it before it starts others."""
        # All later threads inherit the blocked signal, so only the waiting thread gets it. Repeated
        # signals change nothing: each rank of a new run on this host signals all orphan writers,
        # maybe while Python shuts down.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.signal(_INTERRUPT, self._interrupt)
        threading.Thread(target=self._terminate, name="dist_ckpt end", daemon=True).start()

    def set_seal(self, seal: Callable[[], None]) -> None:
        """Set the function that seals all staged snapshots, without the main thread."""
        self._seal = seal

    def check(self) -> None:
        """Raise CheckpointError after the signal."""
        if self._is_signalled:
            raise CheckpointError("the background writer received SIGTERM")

    def finish(self) -> None:
        """Raise after the signal, when all is sealed. The main thread calls it."""
        if self._is_signalled:
            self._sealed.wait(self._end_s)
            raise TerminatedError(_REASON)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # Other processes may send this signal too, for example a scheduler.
        if self._is_signalled and not self._is_raised:
            self._is_raised = True
            raise TerminatedError(_REASON)

    def _terminate(self) -> None:
        signal.sigwait({signal.SIGTERM})
        # Set this first: it ends the waits of threads for which the main thread waits.
        self._is_signalled = True
        # A watchdog without Python locks.
        faulthandler.dump_traceback_later(self._end_s, exit=True)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, _INTERRUPT)
        try:
            self._seal()
        except Exception:  # noqa: BLE001 - a thread's outer edge
            _log.exception("not all staged snapshots are sealed")
        self._sealed.set()
        time.sleep(_ABANDON_S)
        _log.warning("ended: %s, and hangs; files of its save may remain", _REASON)
        os._exit(EXIT_CODE)


class StoreServers:
    """The stores that this writer serves: the newest, and older ones that a save still needs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[bytes, KeyServer] = {}
        self._newest = b""

    def serve(self, message: writer_messages.Serve) -> writer_messages.Serving:
        """Serve another store. OSError or ValueError if that fails."""
        host = "" if message.peer_host else "127.0.0.1"
        server = KeyServer(message.token, host=host)
        with self._lock:
            self._servers[message.token] = server
            self._newest = message.token
        public_host = reachable_host(message.peer_host) if message.peer_host else host
        return writer_messages.Serving(public_host, server.address[1])

    def close_unused(self, needed: set[bytes]) -> None:
        """Close all stores but the newest and those with the `needed` tokens."""
        with self._lock:
            unused = self._servers.keys() - needed - {self._newest}
            servers = [self._servers.pop(token) for token in unused]
        for server in servers:
            server.close()

    def close(self) -> None:
        """Close all stores."""
        self._newest = b""
        self.close_unused(set())


class BackgroundWriter:
    """One rank's writer: a thread listens to the trainer, the main thread does the saves."""

    def __init__(
        self,
        link: writer_messages.Link,
        hello: writer_messages.Hello,
        rate_limit: RateLimit | None,
        arenas: writer_saves.OpenArenas,
        termination: Termination,
    ) -> None:
        self._link = link
        self._termination = termination
        self._arenas = arenas
        self._queue = writer_saves.WriterQueue(hello.rank)
        self._stores = StoreServers()
        self._rendezvous = writer_saves.WriterRendezvous(hello)
        self._context = writer_saves.WriterContext(hello, self._rendezvous, self._check, rate_limit)
        self._hello = hello
        self._problem = ""

    def run(self) -> str:
        """Process the trainer's messages until the trainer has ended and all saves are settled.

        Return the problem of this process, or "".
        """
        self._termination.set_seal(self._seal)
        listener = threading.Thread(target=self._listen, name="dist_ckpt listener", daemon=True)
        listener.start()
        try:
            while (save := self._queue.take()) is not None:
                _truncate_log()
                done = save.settle()
                # After `done` the trainer may overwrite the snapshot, so it must be sealed before.
                self._termination.finish()
                with suppress(writer_messages.LinkClosedError):
                    self._link.send(done)
                if done.failure is not None:
                    gc.collect()  # the traceback refers to the memory of an arena
                self._close_unused_stores()
            self._rendezvous.linger()
        except TerminatedError:
            self._termination.finish()
            raise
        finally:
            self._rendezvous.close()
            self._stores.close()
        return self._problem

    def _seal(self) -> None:
        for save in self._queue.unsettled:
            save.seal()

    def _close_unused_stores(self) -> None:
        needed = {save.write.token for save in self._queue.unsettled}
        self._stores.close_unused(needed | {self._rendezvous.token or b""})

    def _check(self, write: writer_messages.Write) -> None:
        self._termination.check()
        self._queue.check(write)

    def _listen(self) -> None:
        try:
            while (message := self._link.receive(None)) is not None:
                self._process_message(message)
        except writer_messages.ProtocolError as error:
            _log.error("%s", error)
            self._problem = str(error)
        except writer_messages.LinkClosedError as error:
            _log.info("the trainer has ended (%s): staged saves are written, then this ends", error)
        except Exception as error:  # noqa: BLE001 - a thread's outer edge
            _log.exception("the link to the trainer has failed")
            self._problem = f"{type(error).__name__}: {error}"
        finally:
            self._queue.end(is_trainer_gone=True)
            self._rendezvous.hurry()

    def _process_message(self, message: writer_messages.WriterMessage) -> None:
        queue = self._queue
        match message:
            case writer_messages.Write():
                queue.put(
                    writer_saves.WriterSave(self._context, message, self._arenas.open(message))
                )
            case writer_messages.Serve():
                self._link.send(self._serve(message))
            case writer_messages.Abort(snapshot, reason):
                queue.abort(snapshot, reason)
            case writer_messages.Pause(snapshot):
                self._link.send(writer_messages.Paused(snapshot, queue.pause(snapshot)))
            case writer_messages.Go(snapshot, drop):
                queue.go(snapshot, drop=drop)
            case writer_messages.Ping():
                self._link.send(writer_messages.Pong())
            case writer_messages.Close():
                queue.end(is_trainer_gone=False)
            case _:
                raise writer_messages.ProtocolError(f"the trainer sent a {type(message).__name__}")

    def _serve(
        self, message: writer_messages.Serve
    ) -> writer_messages.Serving | writer_messages.Refused:
        _allow_many_connections()
        try:
            serving = self._stores.serve(message)
            # Only this closes stores that no save has used.
            self._close_unused_stores()
            return serving
        except (OSError, ValueError) as error:
            host = writer_saves.host_of(self._hello.settings)
            return writer_messages.Refused(describe_error(error, "serve", self._hello.rank, host))


def _ignore_signals() -> None:
    # A signal of the terminal is for the trainer, not for its writer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _lower_priority() -> None:
    """Lower the CPU and I/O priority of this process and its later threads."""
    with suppress(OSError):
        os.nice(_NICENESS)
    number = _IOPRIO_SET.get(os.uname().machine)
    if sys.platform == "linux" and number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO)


def _truncate_log() -> None:
    """Truncate a long log. It is in shared memory, and nothing else rotates it."""
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
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def main(arguments: list[str]) -> int:
    """Run the background writer of a trainer. Return the exit code."""
    faulthandler.enable()
    termination = Termination()
    _ignore_signals()
    _log_to_stderr("?")
    try:
        termination.begin()
        if (link := _open_link(arguments)) is None:
            print(_USAGE, file=sys.stderr)
            return 2
        problem = _serve_trainer(link, termination)
    except TerminatedError as error:
        _log.warning("ended: %s; uncommitted saves are abandoned", error)
        return EXIT_CODE
    except writer_messages.LinkClosedError as error:
        problem = str(error)
    except Exception:  # noqa: BLE001 - the process's outer edge
        _log.exception("ended by an internal error")
        return 1
    if problem:
        _log.error("ended: %s", problem)
        return 1
    _log.info("ended: everything is settled")
    return 0


def _open_link(arguments: list[str]) -> writer_messages.Link | None:
    """Return the link to the trainer, or None if no trainer started this process."""
    try:
        (number,) = arguments
        return writer_messages.Link(socket.socket(fileno=int(number)))
    except (ValueError, OSError):
        return None


def _serve_trainer(link: writer_messages.Link, termination: Termination) -> str:
    hello = link.receive(HELLO_TIMEOUT_S)
    if not isinstance(hello, writer_messages.Hello):
        return (
            f"the first message must be Hello, within {HELLO_TIMEOUT_S:g} s; "
            f"the trainer sent {hello}"
        )
    _log_to_stderr(hello.rank)
    _lower_priority()
    try:
        hello.check()
        rate = hello.max_bytes_per_s
        rate_limit = None if rate is None else RateLimit(rate, termination.check)
        folder = JobFolder(hello.job).rank(hello.rank)
        lock = folder.lock("writer")
    except (CheckpointError, ValueError, TypeError) as error:
        failure = describe_error(error, "start of a writer", hello.rank, socket.gethostname())
        link.send(writer_messages.Refused(failure))
        return f"it cannot begin: {error}"
    arenas = writer_saves.OpenArenas(folder)
    try:
        link.send(writer_messages.Ready(os.getpid()))
        _log.info("the writer of rank %d of %d has started", hello.rank, hello.world_size)
        return BackgroundWriter(link, hello, rate_limit, arenas, termination).run()
    finally:
        arenas.close()
        lock.release()
