"""A file's descriptor that threads share, some of which may be stuck in the kernel with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from dist_ckpt.errors import StorageError


class Descriptor:
    """An open file's descriptor, or several, which threads share; closed once nobody uses them.

    A call that hangs in the kernel outlives the wait for it: were a descriptor closed under it,
    it could go on with its number when that has become another file's.
    """

    def __init__(self, path: str, *fds: int) -> None:
        self.path = path
        self._fds = [*fds]
        self._lock = threading.Lock()
        self._num_users = 0
        self._released = False

    @contextmanager
    def lend(self) -> Iterator[Sequence[int]]:
        """Lend the descriptors for some calls. Raises StorageError once it was released."""
        with self._lock:
            if self._released:
                raise StorageError(f"{self.path} is closed: it was given up; try again")
            self._num_users += 1
        try:
            yield self._fds
        finally:
            with self._lock:
                self._num_users -= 1
                is_last = self._released and not self._num_users
            if is_last:
                self._close()

    def release(self) -> None:
        """Lend it no more, and have it closed: now, or by the last that uses it."""
        with self._lock:
            is_last = not self._released and not self._num_users
            self._released = True
        if is_last:
            self._close()

    def take(self) -> int:
        """Hand the first over to the caller, who closes it. Nobody else may be using any."""
        with self._lock:
            if self._released:
                raise StorageError(f"{self.path} is closed: it was given up; try again")
            assert not self._num_users, f"{self.path} is finished while it is written"
            self._released = True
        first, *self._fds = self._fds
        self._close()
        return first

    def _close(self) -> None:
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
