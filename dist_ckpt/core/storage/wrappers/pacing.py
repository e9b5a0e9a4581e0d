"""A storage with a limit of written bytes for each second, over all threads."""

# ruff: noqa: D102  # `ForwardingStorage` documents the methods

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dist_ckpt.core.storage.protocol import Storage
from dist_ckpt.core.storage.wrappers.forwarding import ForwardingStorage

# The longest time between two calls of `check`.
STEP_S = 0.05


class RateLimit:
    """Limits bytes per second over all users. Thread-safe. `check` may raise to end a wait."""

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
        """Return when `nbytes` may be moved."""
        with self._lock:
            # Unused time is lost: later bursts do not get it.
            begin_at = max(self._free_at, self._clock())
            self._free_at = begin_at + nbytes / self._max_bytes_per_s
        while (left_s := begin_at - self._clock()) > 0:
            self._check()
            self._sleep(min(left_s, STEP_S))


class RateLimitedStorage(ForwardingStorage):
    """Forwards every call to `inner`, and delays writes before their deadline begins."""

    def __init__(self, inner: Storage, allowance: RateLimit) -> None:
        super().__init__(inner)
        self._allowance = allowance

    def write(self, path: str, nbytes: int, act: Callable[[], None]) -> None:
        self._allowance.take(nbytes)
        super().write(path, nbytes, act)
