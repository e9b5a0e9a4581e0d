"""A storage that counts reads and writes, of one rank in one operation."""

# ruff: noqa: D102  # `ForwardingStorage` documents the methods

from __future__ import annotations

import threading
from collections.abc import Callable

from dist_ckpt.core.storage.protocol import Storage
from dist_ckpt.core.storage.wrappers.forwarding import ForwardingStorage
from dist_ckpt.reports import IoCount


class CountingStorage(ForwardingStorage):
    """Forwards every call to `inner`; `reads` and `writes` count calls and bytes of files."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.reads = self.writes = IoCount()
        self._lock = threading.Lock()

    def read(self, path: str, nbytes: int, act: Callable[[], int]) -> int:
        count = super().read(path, nbytes, act)
        with self._lock:
            self.reads = self.reads.plus(count)
        return count

    def write(self, path: str, nbytes: int, act: Callable[[], None]) -> None:
        super().write(path, nbytes, act)
        with self._lock:
            self.writes = self.writes.plus(nbytes)
