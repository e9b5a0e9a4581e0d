"""Record the results of checks: a checkpoint was read and is whole, or it is damaged.

    verified  {"level": "full"}     every byte was checked; "load": all of it was loaded
    verified  {"level": "", "damage": "...", "found_by": "full"}    or "load", or "quick"

A result replaces the older one, with one exception: only a full check withdraws damage that a full
check has found. Damage is recorded after a second read, and never for an error of the storage. For
the error of a load, `record_damage` in `core/checkpoint/verify_checkpoint.py` reads again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from dist_ckpt.core.commit.attempts import find_checkpoint, list_attempts, list_readable_folders
from dist_ckpt.core.commit.records.incarnations import read_history
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.commit.records.record_store import (
    StoredAnnotation,
    can_keep_records,
    new_annotation,
    put_annotation,
    read_annotations,
    read_annotations_of,
)
from dist_ckpt.core.format.filenames import parse_attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, CorruptError

_log = logging.getLogger("dist_ckpt")

# The kind of these annotations.
CHECK = "verified"

_FULL = "full"

# The text of damage is cut here. The check that found the damage has reported all of it.
_MAX_DAMAGE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class RecordedCheck:
    """The result of a check of a checkpoint.

    `level` is "full", "load" or "quick"; `damage` is "" if the checkpoint is whole.
    """

    level: str
    damage: str


def newest_checks(annotations: Iterable[StoredAnnotation]) -> dict[CheckpointKey, RecordedCheck]:
    """Return the result that counts for each checkpoint. Pure; `annotations` are in order."""
    results: dict[CheckpointKey, RecordedCheck] = {}
    for stored in annotations:
        if stored.name.kind != CHECK or stored.problem:
            continue
        key, values = (stored.step, stored.attempt), stored.values
        damage = str(values.get("damage") or "")
        level = str(values.get("found_by" if damage else "level") or "")
        before = results.get(key)
        if before is None or not (before.damage and before.level == _FULL != level):
            results[key] = RecordedCheck(level, damage)
    return {key: result for key, result in results.items() if result.level or result.damage}


def put_check(
    storage: Storage, root: str, key: CheckpointKey, level: str, damage: str = ""
) -> None:
    """Record the result of a check; durable on return. Without `damage` the checkpoint is whole."""
    values = {"level": level}
    if damage:
        values = {"level": "", "damage": damage[:_MAX_DAMAGE_CHARS], "found_by": level}
    put_annotation(storage, root, new_annotation(*key, CHECK, values))


# False in a dry run, which writes nothing.
_is_recording = ContextVar("is_recording", default=True)


@contextmanager
def recording_nothing() -> Iterator[None]:
    """Record no result of a check in this block."""
    token = _is_recording.set(False)
    try:
        yield
    finally:
        _is_recording.reset(token)


def record_check(storage: Storage, path: str, index: Index, level: str, damage: str = "") -> None:
    """Call `put_check` for the checkpoint at a path, if it is in a run. Never raises.

    A result that is recorded already is not recorded again, unless this is a full check.
    """
    root, key = path.rpartition("/")[0] or "/", index.key
    try:
        if (
            not _is_recording.get()
            or key is None
            or not (can_keep_records(storage, root) or (damage and _has_more(storage, root)))
        ):
            return
        known = read_damage(storage, root, key)
        if level == _FULL or known is None or bool(known) != bool(damage):
            put_check(storage, root, key, level, damage)
    except (CheckpointError, OSError) as error:
        severity = logging.WARNING if damage else logging.DEBUG
        _log.log(severity, "%s: the result of its check could not be recorded: %s", path, error)


def iterate_siblings(storage: Storage, path: str) -> Iterator[tuple[str, Index]]:
    """Yield the other checkpoints in the folder of a checkpoint, without those not readable."""
    for other in list_readable_folders(storage, path.rpartition("/")[0] or "/"):
        if other != path:
            with suppress(CheckpointError, OSError):
                yield other, find_checkpoint(storage, other)[1]


def find_newest_good(storage: Storage, path: str) -> str | None:
    """Return the newest checkpoint of a run that is not known to be damaged, except `path`.

    Orphaned checkpoints do not count. None if there is none, and after an error.
    """
    root = path.rpartition("/")[0] or "/"
    try:
        checks, history = (
            newest_checks(read_annotations(storage, root)),
            read_history(storage, root),
        )
        siblings = [(index.key, other) for other, index in iterate_siblings(storage, path)]
    except (CheckpointError, OSError):
        return None
    good = [
        (key, other)
        for key, other in siblings
        if key and not history.is_orphaned(*key) and not (key in checks and checks[key].damage)
    ]
    return max(good)[1] if good else None


def name_newest_good(error: CorruptError, storage: Storage, path: str) -> None:
    """Name the newest good checkpoint of the run in an error about the one at `path`."""
    if (newest := find_newest_good(storage, path)) is not None:
        error.args = (f"{error}. The newest good checkpoint is {newest}",)


@contextmanager
def naming_newest_good(storage: Storage, path: str) -> Iterator[None]:
    """Call `name_newest_good` for an error of damage in this block."""
    try:
        yield
    except CorruptError as error:
        name_newest_good(error, storage, path)
        raise


def find_recorded_damage(storage: Storage, folder: str, step: int | None) -> str:
    """Return the recorded damage of the attempt in a folder; "" if there is none, or an error."""
    path, _, name = folder.rpartition("/")
    attempt = parse_attempt(name)
    with suppress(CheckpointError, OSError):
        if step is not None and attempt is not None:
            return read_damage(storage, path.rpartition("/")[0] or "/", (step, attempt)) or ""
    return ""


def read_damage(storage: Storage, root: str, key: CheckpointKey) -> str | None:
    """Return the recorded damage of a checkpoint, "" if it is whole, and None without a check.

    Raises StorageError.
    """
    result = newest_checks(read_annotations_of(storage, root, *key)).get(key)
    return None if result is None else result.damage


def _has_more(storage: Storage, root: str) -> bool:
    """Return True if a folder has several checkpoints, so that a prune may choose among them."""
    have = (path for path in list_readable_folders(storage, root) if list_attempts(storage, path))
    return next(have, None) is not None and next(have, None) is not None
