"""How a trainer starts its background writer."""

from __future__ import annotations

import os
import socket
import sys
from subprocess import DEVNULL, Popen, TimeoutExpired

from dist_ckpt.async_save.snapshots.job_folder import RankFolder, check_file
from dist_ckpt.async_save.writer.messages import Hello, Link, LinkClosedError, Ready, Refused
from dist_ckpt.core.comm.messages import error_of
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
