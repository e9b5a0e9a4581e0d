"""A file's descriptor that threads share, some of which may be stuck in the kernel with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dist_ckpt.errors import StorageError


class Descriptor:
    """An open file's descriptor, which threads share; closed once nobody uses it any more.

    A call that hangs in the kernel outlives the wait for it: were the descriptor closed under it,
    it could go on with its number when that has become another file's.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._lock = threading.Lock()
        self._num_users = 0
        self._released = False

    @contextmanager
    def lend(self) -> Iterator[int]:
        """Lend the descriptor for some calls. Raises StorageError once it was released."""
        with self._lock:
            if self._released:
                raise StorageError(f"{self.path} is closed: it was given up; try again")
            self._num_users += 1
        try:
            yield self._fd
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
        """Hand it over to the caller, who closes it. Nobody else may be using it."""
        with self._lock:
            if self._released:
                raise StorageError(f"{self.path} is closed: it was given up; try again")
            assert not self._num_users, f"{self.path} is finished while it is written"
            self._released = True
            return self._fd

    def _close(self) -> None:
        with suppress(OSError):
            os.close(self._fd)
