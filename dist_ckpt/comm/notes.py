"""Notes that ranks leave for each other, outside any exchange: nobody waits for who reads them.

Short texts under keys of the job's store, for threads beside the training; those that are put once
never change.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from dist_ckpt.comm import store_thread
from dist_ckpt.comm.store_thread import StoreLine


class Notes(Protocol):
    """Where notes are. Threads may share it. NoAnswerError if the store does not answer."""

    def put(self, key: str, text: str) -> None:
        """Leave a note."""

    def put_once(self, key: str, text: str) -> str:
        """Leave a note unless there is one; return the one that is there."""

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """Return the notes under these keys, or None if one is not there yet."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove notes that nobody reads any more. Waits for nothing."""


class StoreNotes:
    """Notes in a store that all ranks reach, through the thread that this rank talks to it with."""

    def __init__(self, line: StoreLine) -> None:
        self._line = line

    def put(self, key: str, text: str) -> None:
        """See `Notes.put`."""
        self._line.call(store_thread.put, _note(key), text.encode())

    def put_once(self, key: str, text: str) -> str:
        """See `Notes.put_once`."""
        return _text(self._line.call(store_thread.put_once, _note(key), text))

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """See `Notes.read`."""
        found = self._line.call(store_thread.get_all, [_note(key) for key in keys])
        return None if found is None else [_text(data) for data in found]

    def remove(self, keys: Sequence[str]) -> None:
        """See `Notes.remove`."""
        self._line.post(store_thread.delete, [_note(key) for key in keys])


class AloneNotes:
    """The notes of a world of one."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, key: str, text: str) -> None:
        """See `Notes.put`."""
        with self._lock:
            self._texts[key] = text

    def put_once(self, key: str, text: str) -> str:
        """See `Notes.put_once`."""
        with self._lock:
            return self._texts.setdefault(key, text)

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """See `Notes.read`."""
        with self._lock:
            found = [self._texts.get(key) for key in keys]
        return None if None in found else [text for text in found if text is not None]

    def remove(self, keys: Sequence[str]) -> None:
        """See `Notes.remove`."""
        with self._lock:
            for key in keys:
                self._texts.pop(key, None)


def _note(key: str) -> str:
    return f"notes/{key}"


def _text(data: bytes) -> str:
    # What is no text was put by none of ours: who reads it finds that it says nothing of ours.
    return data.decode(errors="replace")
