"""Record the results of checks: a checkpoint was read and is whole, or it is damaged.

    verified  {"level": "full"}     every byte was checked; "load": all of it was loaded
    verified  {"level": "", "damage": "...", "found_by": "full"}    or "load", or "quick"

A result replaces the older one, with one exception: only a full check withdraws damage that a full
check has found. Damage is recorded after a second read, and never for an error of the storage.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from dist_ckpt.core.commit.attempts import find_checkpoint, list_attempts, list_entries
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
from dist_ckpt.core.format.filenames import RESERVED_NAMES, Attempt, parse_attempt
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


def note_check(
    storage: Storage, path: str, key: CheckpointKey, level: str, damage: str = ""
) -> None:
    """Call `put_check` for the checkpoint at a path, if it is in a run. Never raises.

    Damage that is recorded already is not recorded again, unless a full check has found it now.
    """
    root = path.rpartition("/")[0] or "/"
    try:
        if not (can_keep_records(storage, root) or (damage and _has_more(storage, root))):
            return
        if damage and level != _FULL and _read_damage(storage, root, key):
            return
        put_check(storage, root, key, level, damage)
    except (CheckpointError, OSError) as error:
        severity = logging.WARNING if damage else logging.DEBUG
        _log.log(severity, "%s: the result of its check could not be recorded: %s", path, error)


def iterate_siblings(storage: Storage, path: str) -> Iterator[tuple[str, Attempt, Index]]:
    """Yield the readable checkpoints that are in the same folder as a checkpoint."""
    root = path.rpartition("/")[0] or "/"
    for entry in storage.list(root):
        other = f"{root.rstrip('/')}/{entry.name}"
        if other != path and entry.kind == "folder" and entry.name not in RESERVED_NAMES:
            with suppress(CheckpointError, OSError):
                yield other, *find_checkpoint(storage, other)


def find_newest_good(storage: Storage, path: str) -> str | None:
    """Return the newest checkpoint of a run that is not known to be damaged, except `path`.

    Orphaned checkpoints do not count. None if there is none, and after an error.
    """
    root, good = path.rpartition("/")[0] or "/", []
    try:
        checks, history = (
            newest_checks(read_annotations(storage, root)),
            read_history(storage, root),
        )
        for other, attempt, index in iterate_siblings(storage, path):
            if index.step is None or history.is_orphaned(index.step, attempt):
                continue
            check = checks.get((index.step, attempt))
            if check is None or not check.damage:
                good.append((index.step, attempt, other))
    except (CheckpointError, OSError):
        return None
    return max(good)[2] if good else None


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


def is_known_damaged(storage: Storage, folder: str, step: int | None) -> bool:
    """Return True if the attempt in a folder is recorded as damaged. False after an error."""
    return find_recorded_damage(storage, folder, step) != ""


def find_recorded_damage(storage: Storage, folder: str, step: int | None) -> str:
    """Return the recorded damage of the attempt in a folder; "" if there is none, or an error."""
    path, _, name = folder.rpartition("/")
    attempt = parse_attempt(name)
    with suppress(CheckpointError, OSError):
        if step is not None and attempt is not None:
            return _read_damage(storage, path.rpartition("/")[0] or "/", (step, attempt))
    return ""


def _read_damage(storage: Storage, root: str, key: CheckpointKey) -> str:
    result = newest_checks(read_annotations_of(storage, root, *key)).get(key)
    return "" if result is None else result.damage


def _has_more(storage: Storage, root: str) -> bool:
    """Return True if a folder has several checkpoints, so that a prune may choose among them."""
    folders = [entry.name for entry in list_entries(storage, root) if entry.kind == "folder"]
    names = (name for name in folders if name not in RESERVED_NAMES)
    have = (name for name in names if list_attempts(storage, f"{root.rstrip('/')}/{name}"))
    return next(have, None) is not None and next(have, None) is not None
