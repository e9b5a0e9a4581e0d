"""Signals that ask a run to save and to stop: a handler only sets a flag."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any


class Signals:
    """Handlers for some signals, from construction until `close`.

    `got` is what came first, and `got_at` when, by the monotonic clock.
    A handler that was there is called as well, but for Python's own for Ctrl-C. A forked child,
    such as a worker of a data loader, has what was there before. ValueError outside of the main
    thread, where no handler can be set.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.got: str | None = None
        self.got_at = 0.0
        self._is_over = False
        self._before: dict[int, Any] = {}
        names = tuple(names)
        if names and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "on_signal() needs the main thread, as only there a handler can be set: make the "
                "Checkpointer there, or leave on_signal() out"
            )
        _living.add(self)
        try:
            for name in names:
                number = signal.Signals[f"SIG{name}"]
                self._before[number] = signal.signal(number, self._handle)
        except BaseException:
            self.close()
            raise

    def forget(self) -> None:
        """Take what came as done."""
        self.got = None

    def close(self) -> None:
        """Put back the handlers that were there, unless others were set since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                # None: it was set by other means than Python's, and cannot be put back.
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def let_go(self) -> None:
        """Close it, if this is the main thread; else what comes goes to who was there before."""
        self._is_over = True
        if threading.current_thread() is threading.main_thread():
            self.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No lock and no log: the main thread may be anywhere.
        if self.got is None:
            self.got_at = time.monotonic()
            self.got = signal.Signals(number).name
        before = self._before.get(number)
        if self._is_over and before in (None, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif callable(before) and (self._is_over or before is not signal.default_int_handler):
            before(number, frame)


_living: weakref.WeakSet[Signals] = weakref.WeakSet()

# What the thread that forks lets through, as it was before.
_forking = threading.local()


def _block_signals() -> None:
    """Let none of the signals through: what came now to the child would only set our flag in it.

    So `terminate()` of a worker that was just started would be lost, and its `join()` hang.
    """
    numbers = {number for one in tuple(_living) for number in one._before}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _close_in_child() -> None:
    for one in tuple(_living):
        one.close()
    _let_through()


os.register_at_fork(
    before=_block_signals, after_in_parent=_let_through, after_in_child=_close_in_child
)
