"""Upgrade a root of dist_ckpt 0.1.0: `.facts` to `.annotations`, `.starts` to `.incarnations`.

An upgrade can die at any call; then repeat it. Until the last removal the root has an old folder:
other processes write nothing there, and read the old and the new folders. The folder of annotations
is renamed, so that each file keeps its time of creation: a lease ends by that time. Records of
incarnations have new field names, so they are written anew. The old records are removed when all
new records are durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dist_ckpt.core.commit import removal
from dist_ckpt.core.commit.attempts import (
    list_attempts,
    list_entries,
    parse_attempts,
    read_document,
)
from dist_ckpt.core.commit.records.incarnations import (
    LIVENESS_INTERVAL_S,
    check_same_incarnation,
    incarnations_in,
    read_incarnation,
    utc,
)
from dist_ckpt.core.commit.records.protections import LEASE, TAG, CheckpointKey, protections_of
from dist_ckpt.core.commit.records.record_store import (
    StoredAnnotation,
    find_old_folders,
    make_durable_folders,
    put_record,
    read_annotations,
)
from dist_ckpt.core.format.filenames import (
    ANNOTATIONS,
    BACKUP,
    INCARNATIONS,
    OLD_ANNOTATIONS,
    OLD_INCARNATIONS,
    AnnotationName,
    Attempt,
    incarnation_file,
    is_temporary_record,
    parse_annotation_name,
    parse_attempt,
    parse_incarnation,
    parse_liveness,
    parse_step,
)
from dist_ckpt.core.format.run_records import MAX_NBYTES_OF_RECORD, IncarnationRecord, encode_record
from dist_ckpt.core.storage import Entry, Storage
from dist_ckpt.errors import ExistsError, StorageError
from dist_ckpt.runs.listing import list_folder

# A job whose last sign of life is older than this has died, or ends soon: nothing proves it.
ALIVE_S = 4 * LIVENESS_INTERVAL_S


@dataclass(frozen=True, slots=True)
class UpgradePlan:
    """What an upgrade of a root converts.

    `folders` are the paths of the old folders, also those next to backups. `alive` names the jobs
    of dist_ckpt 0.1.0 that may still use the root, in words.
    """

    root: str
    folders: tuple[str, ...]
    num_annotations: int
    num_incarnations: int
    alive: tuple[str, ...]


def plan_upgrade(storage: Storage, root: str, *, dry_run: bool = False) -> UpgradePlan:
    """Check an upgrade of a root, and return what it converts.

    A `dry_run` changes nothing, and takes the time from this host. Otherwise a folder is made and
    removed to get the time of the storage. NotFoundError if the folder does not exist, ValueError
    if it is a checkpoint. CorruptError or IncompatibleError if a record of an incarnation cannot be
    read, or two jobs have recorded the same one. ExistsError if an old folder has other files.
    """
    if list_attempts(storage, root):
        raise ValueError(f"{root} is a checkpoint: give the folder that it is in")
    entries = list_folder(storage, root)
    folders: list[str] = []
    alive: list[str] = []
    num_annotations = num_incarnations = 0
    for above in _list_roots(root, entries):
        folders += [f"{above}/{name}" for name in find_old_folders(storage, above)]
        annotations = [
            stored for stored in read_annotations(storage, above, with_old=True) if stored.is_old
        ]
        incarnations = _read_old_incarnations(storage, above)
        _check_names(storage, above)
        alive += _find_live_jobs(storage, above, annotations, incarnations, dry_run=dry_run)
        num_annotations += len(annotations)
        num_incarnations += len(incarnations)
    return UpgradePlan(root, tuple(folders), num_annotations, num_incarnations, tuple(alive))


def upgrade(storage: Storage, root: str) -> UpgradePlan:
    """Convert the old folders of a root; return what was converted. One process calls it.

    First end the jobs that are alive in the plan: the next record of such a job creates the old
    folders again, and newer jobs are refused again. On return the upgrade is durable. If the call
    is killed, or raises a StorageError, repeat it. Raises the errors of `plan_upgrade` first.
    """
    plan = plan_upgrade(storage, root, dry_run=True)
    for above in _list_roots(root, storage.list(root)):
        # A file with the name of an old folder is not of dist_ckpt, and stays.
        folders = find_old_folders(storage, above)
        if OLD_ANNOTATIONS in folders:
            old = f"{above}/{OLD_ANNOTATIONS}"
            try:
                storage.rename(old, f"{above}/{ANNOTATIONS}")
            except FileExistsError:
                _merge_annotations(storage, above)
                _remove(storage, old)
            except FileNotFoundError:
                pass
        if OLD_INCARNATIONS in folders:
            _convert_incarnations(storage, above)
        storage.sync(above)
    return plan


def _list_roots(root: str, entries: Sequence[Entry]) -> list[str]:
    """Return the folders of a run that may have records, the root last."""
    root = root.rstrip("/")
    backups = [entry for entry in entries if entry.name == BACKUP and entry.kind == "folder"]
    return [f"{root}/{BACKUP}"] * len(backups) + [root]


def _read_old_incarnations(storage: Storage, root: str) -> list[IncarnationRecord]:
    """Return the old records, lowest first. CorruptError if a new one of a number is another."""
    new = set(incarnations_in(storage, f"{root}/{INCARNATIONS}"))
    old = f"{root}/{OLD_INCARNATIONS}"
    records = [read_incarnation(storage, old, number) for number in incarnations_in(storage, old)]
    for record in records:
        if record.number in new:
            other = read_incarnation(storage, f"{root}/{INCARNATIONS}", record.number)
            check_same_incarnation(root, record, other)
    return records


def _check_names(storage: Storage, root: str) -> None:
    """Raise ExistsError if a folder to empty has files that dist_ckpt did not write."""
    _list_own_names(storage, f"{root}/{OLD_INCARNATIONS}", _is_of_incarnations)
    if not list_entries(storage, f"{root}/{ANNOTATIONS}"):
        return  # the folder of annotations is renamed as a whole
    old = f"{root}/{OLD_ANNOTATIONS}"
    for step in _list_own_names(storage, old, _is_step):
        for attempt in _list_own_names(storage, f"{old}/{step}", _is_attempt):
            _list_own_names(storage, f"{old}/{step}/{attempt}", _is_annotation)


def _list_own_names(storage: Storage, folder: str, is_ours: Callable[[Entry], bool]) -> list[str]:
    """Return the names in a folder. ExistsError if dist_ckpt did not write all of them."""
    entries = list_entries(storage, folder)
    if foreign := [entry.name for entry in entries if not is_ours(entry)]:
        raise ExistsError(
            f"{folder} has files that dist_ckpt did not write ({', '.join(foreign[:5])}): move "
            f"them away, then upgrade again"
        )
    return [entry.name for entry in entries]


def _is_step(entry: Entry) -> bool:
    return entry.kind == "folder" and parse_step(entry.name) is not None


def _is_attempt(entry: Entry) -> bool:
    return entry.kind == "folder" and parse_attempt(entry.name) is not None


def _is_annotation(entry: Entry) -> bool:
    name = entry.name
    is_ours = is_temporary_record(name) or parse_annotation_name(name) is not None
    return entry.kind == "file" and is_ours


def _is_of_incarnations(entry: Entry) -> bool:
    parsed = (parse_incarnation(entry.name), parse_liveness(entry.name))
    return entry.kind == "file" and (is_temporary_record(entry.name) or any(parsed))


def _find_live_jobs(
    storage: Storage,
    root: str,
    annotations: Sequence[StoredAnnotation],
    incarnations: Sequence[IncarnationRecord],
    *,
    dry_run: bool,
) -> list[str]:
    """Return the jobs of dist_ckpt 0.1.0 that may use a root: new liveness files, and leases."""
    entries = list_entries(storage, f"{root}/{OLD_INCARNATIONS}")
    liveness = {
        number: entry for entry in entries if (number := parse_liveness(entry.name)) is not None
    }
    if not liveness and not any(stored.name.kind == LEASE for stored in annotations):
        return []
    now = time.time() if dry_run else removal.read_storage_clock(storage, root)
    by = {record.number: record.by for record in incarnations}
    jobs = [
        f"incarnation {number}, {by.get(number, 'of no record')}, was alive at {utc(at)}"
        for number, entry in sorted(liveness.items())
        if now - (at := entry.modified_at) < ALIVE_S
    ]
    leases = protections_of(annotations, now).leases
    return jobs + [
        f"{owner} has a lease on step {key[0]}" for key in sorted(leases) for owner in leases[key]
    ]


def _merge_annotations(storage: Storage, root: str) -> None:
    """Move annotations one by one, the lowest number first, above the existing numbers.

    Nothing is written to the new folder while an old one exists: so its annotations are older.
    """
    annotations = read_annotations(storage, root, with_old=True)
    highest: dict[tuple[str, CheckpointKey | None], int] = {}
    moved = {_identity(stored) for stored in annotations if not stored.is_old}
    for stored in annotations:
        if not stored.is_old:
            highest[_scope(stored)] = max(stored.name.number, highest.get(_scope(stored), 0))
    moving = [stored for stored in annotations if stored.is_old]
    for stored in sorted(moving, key=lambda stored: (stored.name, stored.step, stored.attempt)):
        if _identity(stored) not in moved:
            number = max(stored.name.number, 1 + highest.get(_scope(stored), 0))
            highest[_scope(stored)] = number
            _link(storage, root, stored, AnnotationName(stored.name.kind, number, stored.name.id))
        folder = f"{root}/{ANNOTATIONS}/{stored.step}/{stored.attempt}"
        storage.sync(folder)  # also the files of a killed upgrade
        _remove(storage, f"{root}/{OLD_ANNOTATIONS}/{stored.step}/{stored.attempt}/{stored.name}")
    _remove_folders(storage, root)


def _identity(stored: StoredAnnotation) -> tuple[int, Attempt, str, str]:
    return stored.step, stored.attempt, stored.name.kind, stored.name.id


def _scope(stored: StoredAnnotation) -> tuple[str, CheckpointKey | None]:
    """Return the scope in which numbers are unique: for a tag the whole root."""
    return stored.name.kind, None if stored.name.kind == TAG else (stored.step, stored.attempt)


def _link(storage: Storage, root: str, stored: StoredAnnotation, name: AnnotationName) -> None:
    """Link an annotation to its new name. The link keeps the time by which a lease ends."""
    inner = f"{stored.step}/{stored.attempt}"
    old_file = f"{root}/{OLD_ANNOTATIONS}/{inner}/{stored.name}"
    folder = f"{root}/{ANNOTATIONS}/{inner}"
    make_durable_folders(storage, root, folder)
    try:
        storage.link(old_file, f"{folder}/{name}")
    except StorageError:  # the storage has no links: a lease then lasts longer
        data = read_document(storage, old_file, MAX_NBYTES_OF_RECORD)
        put_record(storage, folder, str(name), data)


def _remove_folders(storage: Storage, root: str) -> None:
    """Remove the folders of moved annotations, and temporary files in them."""
    old = f"{root}/{OLD_ANNOTATIONS}"
    for step in filter(_is_step, list_entries(storage, old)):
        for attempt in parse_attempts(list_entries(storage, f"{old}/{step.name}")):
            folder = f"{old}/{step.name}/{attempt}"
            for file in list_entries(storage, folder):
                if is_temporary_record(file.name):
                    _remove(storage, f"{folder}/{file.name}")
            _remove(storage, folder)
        _remove(storage, f"{old}/{step.name}")


def _convert_incarnations(storage: Storage, root: str) -> None:
    """Write the records anew; remove the old ones once all are durable."""
    old, new = f"{root}/{OLD_INCARNATIONS}", f"{root}/{INCARNATIONS}"
    records = _read_old_incarnations(storage, root)
    if records:
        make_durable_folders(storage, root, new)
        existing = set(incarnations_in(storage, new))
        for record in records:
            if record.number not in existing:
                put_record(storage, new, incarnation_file(record.number), encode_record(record))
        storage.sync(new)  # also the files of a killed upgrade
    for entry in list_entries(storage, old):
        if _is_of_incarnations(entry):
            _remove(storage, f"{old}/{entry.name}")
    _remove(storage, old)


def _remove(storage: Storage, path: str) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        storage.remove(path)
