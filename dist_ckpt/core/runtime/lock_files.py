"""Lock files: who is alive, as the kernel knows it.

A lock is an flock, which ends with its process, however that dies. It belongs to the open file,
though, and a forked child shares that: the child of a dead trainer (a data loader's worker) would
keep it looking alive. So a child closes its copy as soon as it is forked, which leaves the
parent's lock as it is; a program that is started gets none of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
from dataclasses import dataclass

from dist_ckpt.errors import ConflictError

# Whoever asks for an owner holds the lock for an instant; longer than this, it is held for real.
_TAKE_S = 0.2
_RETRY_S = 0.002

# Nothing is there, or a link, or a socket.
_NO_LOCK = (errno.ENOENT, errno.ELOOP, errno.ENXIO)

_MAX_TEXT_NBYTES = 512
_TEXT = re.compile(r"([1-9][0-9]{0,9}) (\S+) (\S+)\n")


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Who holds a lock, in its own words: that it is held is certain, they are not.

    `pid` is a number of the owner's container; 0 if it had not said anything yet.
    """

    pid: int
    host: str
    since: str

    @property
    def is_this_process(self) -> bool:
        """Whether that is what calls this; also if it is another container's namesake."""
        return (self.pid, self.host) == (os.getpid(), _own_host())

    def __str__(self) -> str:
        if not self.pid:
            return "a process that has not said its name yet"
        return f"process {self.pid} on {self.host}, running since {self.since}"


class LockFile:
    """A lock that this process holds, until `release` or its end. Made by `take`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # For ever, and so is this object: a few hundred bytes for each lock that is ever taken.
        os.register_at_fork(after_in_child=self._forget)

    @property
    def is_held(self) -> bool:
        """Whether this process holds it; a forked child does not."""
        return self._fd >= 0

    def release(self) -> None:
        """Give the lock up. The file stays, for another may be waiting at it."""
        if self.is_held:
            fd, self._fd = self._fd, -1
            # Not only closed: between its fork and its first step a child has a copy as well.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _forget(self) -> None:
        if self.is_held:
            fd, self._fd = self._fd, -1
            os.close(fd)  # closed only: to unlock it would unlock the parent's


def take(path: str) -> LockFile:
    """Take a lock, whose file is made if need be; its folder exists.

    Raises ConflictError, which names the owner, if somebody holds it: in this process too. Links
    are not followed (OSError).
    """
    until = time.monotonic() + _TAKE_S
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, fd):
                # What an earlier owner said goes first: this one may end before it says its own.
                os.ftruncate(fd, 0)
                os.pwrite(fd, _own_words().encode(), 0)
                return LockFile(fd)
            os.close(fd)  # its owner has removed the file with the folder; there may be a new one
        except BlockingIOError:
            owner = _said(fd)
            os.close(fd)
            if time.monotonic() > until:
                raise ConflictError(f"{path} is held by {owner}") from None
            time.sleep(_RETRY_S)
        except BaseException:
            os.close(fd)
            raise


def owner_of(path: str) -> LockOwner | None:
    """Return who holds the lock at a path, or None if nobody does. Takes nothing from anybody.

    What is no file is no lock.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NO_LOCK:
            return None
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _said(fd)
    finally:
        os.close(fd)
    return None


def _own_host() -> str:
    return re.sub(r"\s", "-", socket.gethostname()) or "-"


def _own_words() -> str:
    return f"{os.getpid()} {_own_host()} {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n"


def _said(fd: int) -> LockOwner:
    text = os.pread(fd, _MAX_TEXT_NBYTES, 0).decode(errors="replace")
    match = _TEXT.fullmatch(text)
    return LockOwner(int(match[1]), match[2], match[3]) if match else LockOwner(0, "", "")


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False
