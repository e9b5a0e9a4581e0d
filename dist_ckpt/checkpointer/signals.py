"""Handlers of signals that ask a run to save or to stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

_log = logging.getLogger("dist_ckpt")


class Signals:
    """Handlers of some signals, from construction until `close`.

    `received` is the first signal, and `received_at` its time by the monotonic clock. The previous
    handler is called too, except Python's own handler of Ctrl-C. A forked child, such as a data
    loader worker, gets the previous handlers back. Only the main thread can set handlers: in
    another thread it raises ValueError, or if `is_default` it logs that no signal is handled.
    """

    def __init__(self, names: Iterable[str], *, is_default: bool = False) -> None:
        self.received: str | None = None
        self.received_at = 0.0
        self._is_over = False
        self._previous: dict[int, Any] = {}
        names = tuple(names)
        if names and threading.current_thread() is not threading.main_thread():
            problem = "on_signal() needs the main thread, as only there a handler can be set"
            if not is_default:
                raise ValueError(
                    f"{problem}: make the Checkpointer there, or leave on_signal() out"
                )
            _log.warning("no signal makes this run save and stop: %s", problem)
            names = ()
        _installed.add(self)
        try:
            for name in names:
                number = signal.Signals[f"SIG{name}"]
                self._previous[number] = signal.signal(number, self._handle)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restore the previous handlers, unless others were set since.

        Only the main thread can do that. In another thread, pass on all signals to them.
        """
        if self._previous and threading.current_thread() is not threading.main_thread():
            self._is_over = True
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                # None: it was not set by Python, and cannot be restored.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}

    def drop(self) -> None:
        """Restore the previous handlers, and pass on all signals to them meanwhile."""
        self._is_over = True
        self.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Without lock and log: the main thread may be anywhere.
        if self.received is None:
            self.received_at = time.monotonic()
            self.received = signal.Signals(number).name
        previous = self._previous.get(number)
        if self._is_over and previous in (None, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif callable(previous) and (self._is_over or previous is not signal.default_int_handler):
            previous(number, frame)


_installed: weakref.WeakSet[Signals] = weakref.WeakSet()

# The signal mask of the thread that forks, from before the fork.
_forking = threading.local()


def _block_signals() -> None:
    """Block the signals during a fork, until the child has its previous handlers back.

    Otherwise a new child would only note a signal. `terminate()` of a new worker would have no
    effect, and its `join()` would hang.
    """
    numbers = {number for signals in tuple(_installed) for number in signals._previous}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _close_in_child() -> None:
    for signals in tuple(_installed):
        signals.close()
    _restore_mask()


os.register_at_fork(
    before=_block_signals, after_in_parent=_restore_mask, after_in_child=_close_in_child
)
