"""A storage whose calls fail on request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.storage_wrappers import ForwardingStorage, T
from dist_ckpt.errors import CheckpointError, StorageError


class FaultyStorage(ForwardingStorage):
    """Forward calls to `inner`, but fail the call with number `fail_at_call`, counted from 1.

    A test fails each call in turn: it loops over the numbers. Every method of storage and files
    counts, except `discard` and `close`, which never fail. `calls` is the number of calls so far,
    and `failed` describes the first call that failed. With `sticky`, all later calls fail too. With
    `done`, the call does its work and then fails, as if the reply of a server was lost.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        fail_at_call: int | None = None,
        error: Exception | None = None,
        sticky: bool = False,
        done: bool = False,
    ) -> None:
        super().__init__(inner)
        self.calls = 0
        self.failed = ""
        self._fail_at = fail_at_call
        self._error = error
        self._sticky = sticky
        self._done = done
        self._lock = threading.Lock()

    def make_call(
        self,
        what: str,
        act: Callable[[], T],
        *,
        nbytes: int = 0,
        release: Callable[[T], None] = lambda _: None,
    ) -> T:
        """See `call`."""
        del nbytes, release
        return self.call(what, act)

    def call(self, what: str, act: Callable[[], T]) -> T:
        """Count a call, and run it or fail."""
        with self._lock:
            self.calls += 1
            at = self._fail_at
            fails = at is not None and (self.calls == at or (self._sticky and self.calls > at))
        if not fails:
            return act()
        self.failed = self.failed or what
        if self._done:
            with suppress(CheckpointError, OSError):
                act()
        raise self._error or StorageError(f"{what}: a planted fault")
