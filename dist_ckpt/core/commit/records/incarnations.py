"""Incarnations of a run: each start of a job has a number, which fences older ones.

    <root>/.incarnations/<number>.json          which job writes here, and what it resumed from
    <root>/.incarnations/<number>.alive-<id>    empty, replaced every LIVENESS_INTERVAL_S seconds

Incarnation n numbers its attempts from 1000 * n, so a newer incarnation has higher attempts. A run
can resume from every checkpoint of its newest incarnation, and from some checkpoints of older ones.
For example, incarnation 2 restored step 500: checkpoints of incarnation 1 up to step 500 are valid,
and later checkpoints of incarnation 1 are orphaned. Nothing resumes from an orphaned checkpoint,
and a replay of its step replaces it.

A process of incarnation 1 may wake up in the middle of a save, after incarnation 2 has begun. The
process looks for newer incarnations before each claim, commit and removal. Incarnation 2 may begin
just after such a look. Then the next action of the old process is harmless: at the same path its
attempt is lower than the attempts of incarnation 2. The test of this rule is
`tests/core/commit/test_incarnations_model.py`.

Liveness files are heartbeats on storage, used only in messages. A missing file proves nothing: the
process may pause, or lose the storage, and continue later.
"""

from __future__ import annotations

import posixpath
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.records.record_store import (
    check_upgraded,
    find_old_folders,
    make_durable_folders,
    put_record,
    read_record,
)
from dist_ckpt.core.format.filenames import (
    ATTEMPTS_PER_INCARNATION,
    INCARNATIONS,
    MAX_INCARNATION,
    OLD_INCARNATIONS,
    Attempt,
    incarnation_file,
    liveness_file,
    parse_incarnation,
    parse_liveness,
)
from dist_ckpt.core.format.run_records import IncarnationRecord, encode_record
from dist_ckpt.core.format.strict_json import RESTORE_REMEDY
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.storage import Storage, is_linked_step
from dist_ckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    NotFoundError,
    StorageError,
)

LIVENESS_INTERVAL_S = 30.0

NO_LIVENESS = "no heartbeat: it has ended, or has only just begun"


class Incarnation(Message, frozen=True):
    """One start of the run in `root`, a path of the storage. Its number is a fencing token."""

    root: str
    number: int

    @property
    def first(self) -> int:
        """The lowest number of its attempts; attempts of newer incarnations have higher ones."""
        return self.number * ATTEMPTS_PER_INCARNATION

    def check(self, storage: Storage) -> None:
        """Raise ConflictError if a newer incarnation writes into the root.

        An incarnation of dist_ckpt 0.1.0 that has begun after this one counts as newer, whatever
        its number: it cannot detect this one.
        """
        if find_old_folders(storage, self.root, (OLD_INCARNATIONS,)):
            raise ConflictError(
                f"{self.root}: {OLD_INCARNATIONS} is here, so a job of dist_ckpt 0.1.0 has begun "
                f"to write here. Incarnation {self.number}, this job, saves and removes nothing "
                f"more. End both jobs, run `dist-ckpt upgrade {shlex.quote(self.root)}`, and start "
                f"one of them again with this version"
            )
        newest = newest_incarnation(storage, self.root)
        if newest is not None and newest.number > self.number:
            alive = describe_liveness(storage, self.root, newest.number)
            raise ConflictError(
                f"{self.root}: incarnation {newest.number} of this run, {newest.by}, has taken "
                f"over at {utc(newest.at)}. Incarnation {self.number}, this job, saves and removes "
                f"nothing more here. End this job, or start it again to continue the run with "
                f"it{alive}"
            )

    def next_attempt(self, highest: int, path: str) -> int:
        """Return the number of the next attempt at `path`, where `highest` is the highest so far.

        ConflictError if `highest` belongs to a newer incarnation, StorageError if all numbers of
        this incarnation are used.
        """
        last = self.first + ATTEMPTS_PER_INCARNATION - 1
        if highest > last:
            raise ConflictError(
                f"{path}: incarnation {highest // ATTEMPTS_PER_INCARNATION} of this run saves "
                f"here. Incarnation {self.number}, this job, saves nothing more here. End this "
                f"job, or start it again to continue the run with it"
            )
        if highest == last:
            raise StorageError(
                f"{path}: incarnation {self.number} of this run has made "
                f"{ATTEMPTS_PER_INCARNATION} attempts to save here: see why they fail, then start "
                f"the job again"
            )
        return max(self.first, highest + 1)


@dataclass(frozen=True, slots=True)
class IncarnationHistory:
    """The incarnations of a run, by number."""

    incarnations: Mapping[int, IncarnationRecord]

    @property
    def newest(self) -> int:
        """The number of the newest incarnation; 0 if there is none."""
        return max(self.incarnations, default=0)

    def is_orphaned(self, step: int, attempt: Attempt) -> bool:
        """Return True if the newest incarnation does not descend from this attempt.

        An attempt of the newest incarnation, or of a still newer one, is not orphaned. An older
        attempt is orphaned if a later incarnation restored a lower step. (A restore of an orphan
        changes that rule: it makes the orphan an ancestor again.)

        In a copy of a root, an incarnation may have no record, so its restored step is unknown.
        Then an older attempt is orphaned only if its step is above one that a newer incarnation
        restored.
        """
        number, until = self.newest, step
        while attempt.incarnation < number:
            record = self.incarnations.get(number)
            if record is None:
                return step > until
            if record.restored is None or record.restored[1].incarnation >= number:
                return True  # it began anew
            until, number = record.restored[0], record.restored[1].incarnation
        if attempt.incarnation > self.newest:
            return False
        return attempt.incarnation != number or step > until


def read_history(storage: Storage, root: str, *, with_old: bool = False) -> IncarnationHistory:
    """Return the incarnations of a run; none if the root does not exist.

    `with_old` includes the records of dist_ckpt 0.1.0. CorruptError or IncompatibleError if a
    record cannot be read: then it is unknown which checkpoints are orphaned.
    """
    records: dict[int, IncarnationRecord] = {}
    for folder in _folders(root, with_old=with_old):
        for number in incarnations_in(storage, folder):
            record = read_incarnation(storage, folder, number)
            check_same_incarnation(root, records.setdefault(number, record), record)
    return IncarnationHistory(records)


def _folders(root: str, *, with_old: bool) -> list[str]:
    # An upgrade writes the new record before it removes the old one. So read the old folder first.
    names = (OLD_INCARNATIONS, INCARNATIONS) if with_old else (INCARNATIONS,)
    return [f"{root}/{name}" for name in names]


def incarnations_in(storage: Storage, folder: str) -> list[int]:
    """Return the numbers of the records in a folder, the lowest first."""
    numbers = (parse_incarnation(entry.name) for entry in attempts.list_entries(storage, folder))
    return sorted(filter(None, numbers))


def check_same_incarnation(root: str, old: IncarnationRecord, new: IncarnationRecord) -> None:
    """Raise CorruptError if two jobs have recorded the same number, in the old and new folder."""
    if old != new:
        name = incarnation_file(new.number)
        raise CorruptError(
            f"{root}: {OLD_INCARNATIONS}/{name} is of {old.by}, and {INCARNATIONS}/{name} of "
            f"{new.by}: a job of dist_ckpt 0.1.0 and a newer one have used this root together. "
            f"End both, and remove the file of the one that shall not continue"
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
    """Record a new incarnation, durable on return. Its number is above all earlier ones.

    `restored` is the step and the attempt from which it resumes. Lease that checkpoint until this
    function returns: otherwise a late pruner of an older incarnation may remove it. Then call
    `secure_incarnation`.

    `after` is the number of the newest incarnation when `restored` was chosen, or 0 without one.
    ConflictError if there is a newer incarnation now: it may have orphaned `restored`.

    Missing folders are created, also the root. CorruptError or IncompatibleError if the newest
    record cannot be read: it is never skipped. StorageError if the record may not exist.
    """
    folder = f"{root}/{INCARNATIONS}"
    own_id = attempts.new_id()
    for _ in range(attempts.MAX_TRIES):
        check_upgraded(storage, root)
        make_durable_folders(storage, root, folder)
        newest = newest_incarnation(storage, root)
        if newest is not None and after is not None and newest.number > after:
            raise ConflictError(
                f"{root}: incarnation {newest.number} of this run, {newest.by}, has begun while "
                f"this one restored: make sure that only one job uses this root, then start again"
            )
        # A root may be a copy without its records: also stay above the restored attempt.
        below = 0 if restored is None else restored[1].incarnation
        number = 1 + max(below, newest.number if newest else 0)
        if number > MAX_INCARNATION:
            raise StorageError(
                f"{folder}: there are {MAX_INCARNATION} incarnations: use another root"
            )
        record = IncarnationRecord(number, own_id, restored, why, by, time.time())
        with suppress(FileExistsError, FileNotFoundError):  # the number or the folder was taken
            put_record(storage, folder, incarnation_file(number), encode_record(record))
            return record
    raise StorageError(f"{folder}: other jobs start again and again: end those that use this root")


def secure_incarnation(
    storage: Storage, path: str, restored: Attempt, incarnation: Incarnation, *, by: str
) -> None:
    """Prevent late saves of older incarnations from replacing the restored checkpoint.

    Abandons the open attempts of older incarnations at `path` above the restored attempt. Older
    incarnations do not commit a later claim: before a commit they check for newer incarnations.
    ConflictError if one has replaced the checkpoint already. That happens only after a restore of
    an orphan.
    """
    reason = f"incarnation {incarnation.number} resumed from {restored}"
    # Nothing saves through the link of a moved step.
    open_above = [] if is_linked_step(path) else attempts.list_attempts(storage, path)
    for other in open_above:
        is_late = restored < other and other.number < incarnation.first
        if is_late and not attempts.is_decided(storage, path, other):
            attempts.try_abandon(storage, path, other, by=by, reason=reason)
    current: Attempt | None = None
    with suppress(NotFoundError):
        current, _ = attempts.find_checkpoint(storage, path)
    if current is None or (
        current.incarnation != restored.incarnation and current.number < incarnation.first
    ):
        raise ConflictError(
            f"{path}: {restored} was restored, and {current or 'nothing'} is the checkpoint there "
            f"now: end the job that saves or removes here, then start again"
        )


def newest_incarnation(
    storage: Storage, root: str, *, with_old: bool = False
) -> IncarnationRecord | None:
    """Return the newest incarnation, or None. `with_old` includes records of dist_ckpt 0.1.0."""
    records = [
        (number, folder)
        for folder in _folders(root, with_old=with_old)
        for number in incarnations_in(storage, folder)
    ]
    if not records:
        return None
    number, folder = max(records, key=lambda item: item[0])
    return read_incarnation(storage, folder, number)


def read_incarnation(storage: Storage, folder: str, number: int) -> IncarnationRecord:
    """Return the record of an incarnation in a folder of records, old or new.

    CorruptError or IncompatibleError if the file cannot be read, StorageError if it is gone.
    """
    file = f"{folder}/{incarnation_file(number)}"
    is_old = posixpath.basename(folder) == OLD_INCARNATIONS
    try:
        record = read_record(storage, file, IncarnationRecord, is_old=is_old)
    except FileNotFoundError:
        raise StorageError(f"{file} was removed while it was read: try again") from None
    except CorruptError as error:
        raise CorruptError(
            f"{str(error).removesuffix(RESTORE_REMEDY)}: it is unknown from which checkpoint "
            f"incarnation {number} of this run resumed. Restore the file from a copy. Without a "
            f"copy, end the job of that incarnation, remove the file, and start again. Use "
            f"restore(at=...) if that incarnation went back to an older step"
        ) from error
    if record.number != number:
        raise CorruptError(f"{file}: it is the record of incarnation {record.number}; remove it")
    return record


@dataclass(frozen=True, slots=True)
class LivenessFile:
    """The heartbeat of an incarnation on storage. Only one thread uses it."""

    storage: Storage
    root: str
    incarnation: int

    def renew(self) -> None:
        """Write a heartbeat. Remove earlier ones, also those of older incarnations."""
        new = liveness_file(self.incarnation, attempts.new_id())
        attempts.write_small_file(self.storage, f"{self.root}/{INCARNATIONS}/{new}", b"")
        self._remove(but=new)

    def end(self) -> None:
        """Remove the heartbeat: the incarnation has ended."""
        self._remove()

    def _remove(self, but: str = "") -> None:
        folder = f"{self.root}/{INCARNATIONS}"
        for entry in attempts.list_entries(self.storage, folder):
            number = parse_liveness(entry.name)
            if number is not None and number <= self.incarnation and entry.name != but:
                with suppress(FileNotFoundError):
                    self.storage.remove(f"{folder}/{entry.name}")


def last_liveness(
    storage: Storage, root: str, incarnation: int, *, with_old: bool = False
) -> float | None:
    """Return when an incarnation was last seen, by the storage's clock, in seconds since 1970.

    None if it has ended by itself or has no heartbeat yet. Also None if the storage fails: this is
    only for a message, and must not stop the caller. `with_old` includes dist_ckpt 0.1.0.
    """
    with suppress(CheckpointError, OSError):
        folders = _folders(root, with_old=with_old)
        entries = [entry for folder in folders for entry in attempts.list_entries(storage, folder)]
        times = [e.modified_at for e in entries if parse_liveness(e.name) == incarnation]
        return max(times, default=None)
    return None


def describe_liveness(storage: Storage, root: str, incarnation: int) -> str:
    """Return a text that says when an incarnation was last seen; "" if that is unknown."""
    at = last_liveness(storage, root, incarnation)
    return "" if at is None else f"; it was last seen at {utc(at)}"


def utc(at: float) -> str:
    """Return a time in seconds since 1970 as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
