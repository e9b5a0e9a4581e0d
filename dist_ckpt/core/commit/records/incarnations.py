"""Starts of runs: each has a number, and what an older one writes later never gets in its way.

    <root>/.starts/<number>.json    who writes into this root from now on, and what it went on from

A start's attempts have numbers from 1000 times its own on, so those of a newer start are higher.
A run goes on from what its newest start has saved, from what the start before that had saved up to
the step that the newest one restored, and so on back. All else is left behind: nothing goes on from
it any more, and a replay replaces it.

A process of an older start may wake up at any point of a save. It looks for newer starts before it
claims, commits and removes; what it does between such a look and the next call is harmless, as
`tests/core/commit/test_incarnations_model.py` shows: it is lower than what newer starts have at
that path.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from dist_ckpt.core.commit.attempts import (
    ROUNDS,
    abandon,
    entries_at,
    find,
    has_index,
    list_attempts,
    new_id,
    read_document,
)
from dist_ckpt.core.commit.records.liveness import describe_liveness, utc
from dist_ckpt.core.commit.records.record_store import make_record_folders, put_record
from dist_ckpt.core.format.filenames import (
    ATTEMPTS_PER_INCARNATION,
    MAX_INCARNATION,
    STARTS,
    Attempt,
    incarnation_file,
    parse_incarnation,
)
from dist_ckpt.core.format.run_records import (
    MAX_NBYTES_OF_RECORD,
    IncarnationRecord,
    decode_incarnation,
    encode_incarnation,
)
from dist_ckpt.core.format.strict_json import REMEDY
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import ConflictError, CorruptError, NotFoundError, StorageError


class Incarnation(Message, frozen=True):
    """Whose attempt a claim is: that of a start of the run in `root`, a path of the storage."""

    root: str
    start: int

    @property
    def first(self) -> int:
        """The lowest number of its attempts; those of newer starts begin with `first` of these."""
        return self.start * ATTEMPTS_PER_INCARNATION

    def check(self, storage: Storage) -> None:
        """Raise ConflictError if a newer start writes into the root."""
        newest = newest_incarnation(storage, self.root)
        if newest is not None and newest.number > self.start:
            alive = describe_liveness(storage, self.root, newest.number)
            raise ConflictError(
                f"{self.root}: start {newest.number} of this run, {newest.by}, has taken over at "
                f"{utc(newest.at)}, and this is start {self.start}: it saves and removes nothing "
                f"more here. End this job; if it is the one to go on, start it again{alive}"
            )

    def next_attempt(self, highest: int, path: str) -> int:
        """Return the number of its next attempt at `path`, where `highest` is the highest so far.

        ConflictError if that is a newer start's, StorageError if all of its own are used up.
        """
        last = self.first + ATTEMPTS_PER_INCARNATION - 1
        if highest > last:
            raise ConflictError(
                f"{path}: start {highest // ATTEMPTS_PER_INCARNATION} of this run saves here, and "
                f"this is start {self.start}: it saves nothing more here. End this job; if it is "
                f"the one to go on, start it again"
            )
        if highest == last:
            raise StorageError(
                f"{path}: start {self.start} of this run has made {ATTEMPTS_PER_INCARNATION} "
                f"attempts to save here: see why they fail, then start the job again"
            )
        return max(self.first, highest + 1)


@dataclass(frozen=True, slots=True)
class IncarnationHistory:
    """The starts of a run, by number."""

    starts: Mapping[int, IncarnationRecord]

    @property
    def newest(self) -> int:
        """The number of the newest start; 0 if there is none."""
        return max(self.starts, default=0)

    def is_left_behind(self, step: int, attempt: Attempt) -> bool:
        """Say whether the newest start does not go back to this attempt.

        Not if that is its own, or a still newer one's. If starts only ever go on from what is not
        left behind, that is: if a later start than the attempt's restored a step below this one.
        Of a start that has no record, as in a copy of a root, it is not known what it went on from:
        what is not above that may be all that there is.
        """
        number, until = self.newest, step
        while attempt.start < number:
            start = self.starts.get(number)
            if start is None:
                return step > until
            if start.restored is None or start.restored[1].start >= number:
                return True  # it began anew
            until, number = start.restored[0], start.restored[1].start
        if attempt.start > self.newest:
            return False
        return attempt.start != number or step > until


def read_history(storage: Storage, root: str) -> IncarnationHistory:
    """Return the starts of a run; none if there is no such root.

    CorruptError or IncompatibleError if one cannot be read: what it has left behind is not known.
    """
    numbers = (parse_incarnation(entry.name) for entry in entries_at(storage, f"{root}/{STARTS}"))
    return IncarnationHistory(
        {number: _read(storage, root, number) for number in filter(None, numbers)}
    )


def begin_incarnation(
    storage: Storage,
    root: str,
    *,
    restored: tuple[int, Attempt] | None,
    why: str,
    by: str,
    after: int | None = None,
) -> IncarnationRecord:
    """Record a start, above all that are there and that of `restored`; it is durable on return.

    `after` is the number of the newest start that was known when `restored` was chosen, 0 for none;
    ConflictError if there is a newer one: it may have left behind what was chosen. What is restored
    is to be held until this returns, else a late pruner of an older start may have removed it; see
    `secure` for what to do then.

    Folders that are missing are made, the root as well. CorruptError or IncompatibleError if the
    newest start cannot be read: it is never passed over. StorageError if it is not certain that the
    record is there.
    """
    folder = f"{root}/{STARTS}"
    own_id = new_id()
    for _ in range(ROUNDS):
        make_record_folders(storage, root, folder)
        newest = newest_incarnation(storage, root)
        if newest is not None and after is not None and newest.number > after:
            raise ConflictError(
                f"{root}: start {newest.number} of this run, {newest.by}, has begun while this one "
                f"restored: see that only one job uses this root, then start again"
            )
        # Not below that of a root which this one was copied from, without its records.
        below = 0 if restored is None else restored[1].start
        number = 1 + max(below, newest.number if newest else 0)
        if number > MAX_INCARNATION:
            raise StorageError(f"{folder}: there are {MAX_INCARNATION} starts: use another root")
        start = IncarnationRecord(number, own_id, restored, why, by, time.time())
        with suppress(FileExistsError, FileNotFoundError):  # another took it; somebody cleans up
            put_record(storage, folder, incarnation_file(number), encode_incarnation(start))
            return start
    raise StorageError(f"{folder}: others start again and again: end the other jobs that use it")


def secure_incarnation(
    storage: Storage, path: str, restored: Attempt, run: Incarnation, *, by: str
) -> None:
    """Keep late saves of older starts from replacing what a start that is recorded went on from.

    Abandons what they have open at `path`, above the attempt that was restored there; what they
    claim later they do not commit, as they look for newer starts before that. ConflictError if one
    has replaced it already. It is one only where somebody went back to what was left behind.
    """
    reason = f"start {run.start} went on from {restored}"
    for other in list_attempts(storage, path):
        if restored < other and other.number < run.first and not has_index(storage, path, other):
            abandon(storage, path, other, by=by, reason=reason)
    try:
        found, _ = find(storage, path)
    except NotFoundError:
        found = None
    if found is None or (found.start != restored.start and found.number < run.first):
        raise ConflictError(
            f"{path}: {restored} was restored, and {found or 'nothing'} is the checkpoint there by "
            f"now: end the job that saves or removes here, then start again"
        )


def newest_incarnation(storage: Storage, root: str) -> IncarnationRecord | None:
    """Return the start with the highest number, or None if there is none."""
    names = (parse_incarnation(entry.name) for entry in entries_at(storage, f"{root}/{STARTS}"))
    highest = max(filter(None, names), default=None)
    if highest is None:
        return None
    return _read(storage, root, highest)


def _read(storage: Storage, root: str, number: int) -> IncarnationRecord:
    file = f"{root}/{STARTS}/{incarnation_file(number)}"
    try:
        start = decode_incarnation(read_document(storage, file, MAX_NBYTES_OF_RECORD), file)
    except FileNotFoundError:
        raise StorageError(f"{file} was removed while it was read: try again") from None
    except CorruptError as error:
        raise CorruptError(
            f"{str(error).removesuffix(REMEDY)}: what start {number} of this run went on from is "
            f"not known. Restore the file from a copy; if there is none, end the job of that "
            f"start, remove the file, and start again, with restore(at=...) if that start was to "
            f"go back to an older step"
        ) from error
    if start.number != number:
        raise CorruptError(f"{file}: it is the record of start {start.number}; remove it")
    return start
