"""The control channel of a single process, which has no other ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import TypeVar

from dist_ckpt.core.comm.exchange.channel import COORDINATOR, Exchange, SharedNotes
from dist_ckpt.core.comm.messages import build_error, describe_error, is_interrupt, pack, unpack
from dist_ckpt.errors import CheckpointError
from dist_ckpt.reports import IoCount

T = TypeVar("T")


class _SingleProcessNotes:
    """The notes of a single process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, key: str, text: str) -> None:
        with self._lock:
            self._texts[key] = text

    def put_once(self, key: str, text: str) -> str:
        with self._lock:
            return self._texts.setdefault(key, text)

    def read(self, keys: Sequence[str]) -> list[str] | None:
        with self._lock:
            texts = [self._texts.get(key) for key in keys]
        return None if None in texts else [text for text in texts if text is not None]

    def remove(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._texts.pop(key, None)


class SingleProcessChannel:
    """The `Channel` of a single process. Errors are as in a group, but name no rank."""

    rank = COORDINATOR
    world_size = 1

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.exchanges = IoCount()
        self.notes: SharedNotes = _SingleProcessNotes()

    def enter(self, call: str) -> None:
        """Do nothing: no other rank waits."""

    def exchange(self, phase: str) -> Exchange:
        """See `Channel.exchange`."""
        self.exchanges = self.exchanges.plus(0)
        return SingleProcessExchange(phase)

    def watch(self, ranks: Sequence[int]) -> None:
        """Do nothing."""

    def fail_without_others(self, why: str) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SingleProcessExchange(Exchange):
    """An exchange of a single process with itself."""

    is_coordinator = True

    def _gathered(self) -> Sequence[bytes]:
        assert self._own is not None
        return [self._own]

    def _unpack(self, rank: int, data: bytes, expected: type[T]) -> T:
        return unpack(data, expected)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if is_interrupt(error):
            return
        if isinstance(self._decided, Exception):
            raise self._decided from error
        self._answer = self._decided or pack(None)
        is_foreign = not isinstance(error, CheckpointError | ValueError | TypeError)
        if error is not None and is_foreign and self._decided is None:
            raise build_error(describe_error(error, self.phase)) from error
