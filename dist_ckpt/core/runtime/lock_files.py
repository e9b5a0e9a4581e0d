"""Lock files: find the processes that are alive, through the kernel.

A lock is an flock: the kernel releases it when its process ends, for whatever reason. A forked
child shares it, and a data loader's worker could keep the lock of its dead trainer. So a child
closes its copy immediately, which does not release the parent's lock. A program started with exec
has no copy.
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

# `owner_of` takes the lock for an instant; a lock held longer than this has a real owner.
_TAKE_TIMEOUT_S = 0.2
_RETRY_S = 0.002

# Errors of `open`: the file does not exist, or is a link or a socket.
_NO_LOCK = (errno.ENOENT, errno.ELOOP, errno.ENXIO)

_MAX_TEXT_NBYTES = 512
_TEXT = re.compile(r"([1-9][0-9]{0,9}) (\S+) (\S+)\n")


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The owner of a lock as it describes itself; `pid` 0 means that it has not done so yet."""

    pid: int
    host: str
    since: str

    @property
    def is_this_process(self) -> bool:
        """True if the owner has this process's pid and host name, even in another container."""
        return (self.pid, self.host) == (os.getpid(), _host_name())

    def __str__(self) -> str:
        if not self.pid:
            return "a process that has not written its name yet"
        return f"process {self.pid} on {self.host}, running since {self.since}"


class LockFile:
    """A lock that this process holds until `release` or its end. Created by `take`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # The hook stays for ever, and with it this object: a few hundred bytes for each lock.
        os.register_at_fork(after_in_child=self._forget)

    @property
    def is_locked(self) -> bool:
        """True if this process holds the lock; False in a forked child."""
        return self._fd >= 0

    def release(self) -> None:
        """Release the lock. The file stays, as another process may be waiting for it."""
        if self.is_locked:
            fd, self._fd = self._fd, -1
            # Unlock explicitly: a child that is being forked has a copy of the descriptor.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _forget(self) -> None:
        if self.is_locked:
            fd, self._fd = self._fd, -1
            os.close(fd)  # not unlocked: that would release the parent's lock


def take(path: str) -> LockFile:
    """Take a lock; its file is created if necessary, in a folder that exists.

    ConflictError with the owner if a process holds it, even this one. OSError if it is a link.
    """
    deadline = time.monotonic() + _TAKE_TIMEOUT_S
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, fd):
                # Truncate first: this process may die before it writes its own name.
                os.ftruncate(fd, 0)
                since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                os.pwrite(fd, f"{os.getpid()} {_host_name()} {since}\n".encode(), 0)
                return LockFile(fd)
            os.close(fd)  # the owner has removed the file with its folder; try a new one
        except BlockingIOError:
            owner = _read_owner(fd)
            os.close(fd)
            if time.monotonic() > deadline:
                raise ConflictError(f"{path} is held by {owner}") from None
            time.sleep(_RETRY_S)
        except BaseException:
            os.close(fd)
            raise


def owner_of(path: str) -> LockOwner | None:
    """Return the owner of the lock at a path, or None, without taking it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NO_LOCK:
            return None
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_owner(fd)
    finally:
        os.close(fd)
    return None


def _host_name() -> str:
    return re.sub(r"\s", "-", socket.gethostname()) or "-"


def _read_owner(fd: int) -> LockOwner:
    text = os.pread(fd, _MAX_TEXT_NBYTES, 0).decode(errors="replace")
    match = _TEXT.fullmatch(text)
    return LockOwner(int(match[1]), match[2], match[3]) if match else LockOwner(0, "", "")


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False
