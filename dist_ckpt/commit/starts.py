"""Starts of runs: each has a number, and what an older one writes later never gets in its way.

    <root>/.starts/<number>.json    who writes into this root from now on, and what it went on from

A start's attempts have numbers from 1000 times its own on, so those of a newer start are higher.
What an older one has above the step that a newer one went on from is left behind: nothing goes on
from it any more, and a replay replaces it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from dist_ckpt.commit.attempts import ROUNDS, entries_at, new_id, read_document
from dist_ckpt.commit.root_records import make_record_folders, put_record
from dist_ckpt.errors import ConflictError, CorruptError, StorageError
from dist_ckpt.format.filenames import (
    ATTEMPTS_OF_START,
    MAX_START,
    STARTS,
    Attempt,
    parse_start,
    start_file,
)
from dist_ckpt.format.root_records import (
    MAX_NBYTES_OF_RECORD,
    RunStart,
    decode_start,
    encode_start,
)
from dist_ckpt.storage import Storage


@dataclass(frozen=True, slots=True)
class OfRun:
    """Whose attempt a claim is: that of a start of the run in `root`."""

    root: str
    start: int

    @property
    def first(self) -> int:
        """The lowest number of its attempts; those of newer starts begin with `first` of these."""
        return self.start * ATTEMPTS_OF_START

    def check(self, storage: Storage) -> None:
        """Raise ConflictError if a newer start writes into the root."""
        newest = newest_start(storage, self.root)
        if newest is not None and newest.number > self.start:
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(newest.at))
            raise ConflictError(
                f"{self.root}: start {newest.number} of this run, {newest.by}, has taken over at "
                f"{at}, and this is start {self.start}: it saves and removes nothing more here. "
                f"End this job; if it is the one to go on, start it again"
            )


@dataclass(frozen=True, slots=True)
class History:
    """The starts of a run, by number."""

    starts: Mapping[int, RunStart]

    def is_left_behind(self, step: int, attempt: Attempt) -> bool:
        """Say whether a later start than the attempt's went on from a step below this one."""
        own = attempt.number // ATTEMPTS_OF_START
        return any(
            number > own and (start.restored is None or start.restored[0] < step)
            for number, start in self.starts.items()
        )


def read_history(storage: Storage, root: str) -> History:
    """Return the starts of a run; none if there is no such root.

    CorruptError or IncompatibleError if one cannot be read: what it has left behind is not known.
    """
    numbers = (parse_start(entry.name) for entry in entries_at(storage, f"{root}/{STARTS}"))
    return History({number: _read(storage, root, number) for number in filter(None, numbers)})


def begin(
    storage: Storage, root: str, *, restored: tuple[int, Attempt] | None, why: str, by: str
) -> RunStart:
    """Record a start, above all that are there; it is durable on return.

    Folders that are missing are made, the root as well. CorruptError or IncompatibleError if the
    newest start cannot be read: it is never passed over. StorageError if it is not certain that the
    record is there.
    """
    folder = f"{root}/{STARTS}"
    own_id = new_id()
    for _ in range(ROUNDS):
        make_record_folders(storage, root, folder)
        newest = newest_start(storage, root)
        number = 1 + (newest.number if newest else 0)
        if number > MAX_START:
            raise StorageError(f"{folder}: there are {MAX_START} starts: use another root")
        start = RunStart(number, own_id, restored, why, by, time.time())
        with suppress(FileExistsError, FileNotFoundError):  # another took it; somebody cleans up
            put_record(storage, folder, start_file(number), encode_start(start))
            return start
    raise StorageError(f"{folder}: others start again and again: end the other jobs that use it")


def newest_start(storage: Storage, root: str) -> RunStart | None:
    """Return the start with the highest number, or None if there is none."""
    names = (parse_start(entry.name) for entry in entries_at(storage, f"{root}/{STARTS}"))
    highest = max(filter(None, names), default=None)
    if highest is None:
        return None
    return _read(storage, root, highest)


def _read(storage: Storage, root: str, number: int) -> RunStart:
    file = f"{root}/{STARTS}/{start_file(number)}"
    try:
        start = decode_start(read_document(storage, file, MAX_NBYTES_OF_RECORD), file)
    except FileNotFoundError:
        raise StorageError(f"{file} was removed while it was read: try again") from None
    if start.number != number:
        raise CorruptError(f"{file}: it is the record of start {start.number}; remove it")
    return start
