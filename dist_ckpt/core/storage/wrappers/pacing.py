"""A storage that is written to at no more than so many bytes a second, by all threads together."""

# ruff: noqa: D102  # `ForwardingStorage` documents the methods

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dist_ckpt.core.storage.protocol import Storage
from dist_ckpt.core.storage.wrappers.forwarding import ForwardingStorage

# How long at most nobody looks whether there is still something to wait for.
STEP_S = 0.05


class RateLimit:
    """So many bytes a second, for all who share it. Threads may.

    Who has taken some waits until all that was taken before has had its time. `check` is called
    while somebody waits, and ends it by raising.
    """

    def __init__(
        self,
        max_bytes_per_s: float,
        check: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 < max_bytes_per_s < float("inf"):
            raise ValueError(f"max_bytes_per_s={max_bytes_per_s}: it must be a positive number")
        self._max_bytes_per_s = max_bytes_per_s
        self._check = check
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, nbytes: int) -> None:
        """Return when it is time to move so many bytes."""
        with self._lock:
            # What was not used in time is lost: no burst makes good for it.
            begin_at = max(self._free_at, self._clock())
            self._free_at = begin_at + nbytes / self._max_bytes_per_s
        while (left_s := begin_at - self._clock()) > 0:
            self._check()
            self._sleep(min(left_s, STEP_S))


class RateLimitedStorage(ForwardingStorage):
    """Hands every call to `inner`, and writes to files when the allowance says so.

    It sleeps before a call, not within: a deadline of `inner` does not run meanwhile.
    """

    def __init__(self, inner: Storage, allowance: RateLimit) -> None:
        super().__init__(inner)
        self._allowance = allowance

    def write(self, path: str, nbytes: int, act: Callable[[], None]) -> None:
        self._allowance.take(nbytes)
        super().write(path, nbytes, act)
