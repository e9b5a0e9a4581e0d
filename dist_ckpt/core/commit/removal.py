"""Remove attempts: rename the folder to trash, make that durable, then delete the files.

Trash is not an attempt any more. A process that still uses the old name gets "not found". An open
attempt is abandoned before it is removed, except by the process that claimed it. Files that
dist_ckpt did not write are never touched.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from dist_ckpt.core.commit.attempts import (
    AttemptState,
    Status,
    is_decided,
    list_attempt_entries,
    list_entries,
    list_statuses,
    list_trash,
    new_id,
    no_folder_error,
    not_found_error,
    parse_attempts,
    read_index,
    trash_among,
    try_abandon,
)
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.commit.records.protection_protocol import is_forbidden, protections_at
from dist_ckpt.core.commit.records.record_store import (
    check_upgraded,
    list_temporary_records,
    old_folders_in,
    refuse_old,
)
from dist_ckpt.core.commit.records.recorded_checks import read_damage
from dist_ckpt.core.format.filenames import (
    RESERVED_NAMES,
    Attempt,
    is_in_attempt,
    is_nfs_file,
    is_temporary_root_id,
    trash_name,
)
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Entry, Storage, refuse_linked_step
from dist_ckpt.errors import CheckpointError, StorageError
from dist_ckpt.message_text import listed

_log = logging.getLogger("dist_ckpt")

# Attempts in these states may have data to read or repair.
_DATA_IS_KEPT = ("committed", "damaged", "incompatible")


def remove(storage: Storage, path: str, attempt: Attempt) -> None:
    """Remove an attempt that is abandoned, superseded or deleted. Do nothing if it is gone.

    On return the removal is durable and the space is free. Files that dist_ckpt did not write stay;
    their names are logged. ExistsError for a linked step: the step may just have been moved.
    """
    if posixpath.islink(path):
        refuse_linked_step(path)
    trash = f"{path}/{trash_name(attempt)}"
    try:
        with suppress(FileNotFoundError):  # another process removes it too
            storage.rename(f"{path}/{attempt}", trash)
        _empty_trash(storage, path, trash)
    except FileExistsError as error:
        raise StorageError(f"{trash} exists while {attempt} does: remove it by hand") from error


def remove_superseded(
    storage: Storage, path: str, attempt: Attempt, incarnation: Incarnation | None = None
) -> None:
    """Remove all attempts below `attempt`, which was just committed, and all trash.

    Pinned, tagged and leased attempts stay. If a newer incarnation has begun, all attempts stay.
    The save has succeeded, so an error of the storage is only logged: the next save to this path,
    or `gc`, removes the remaining attempts.
    """
    by = f"the save of {attempt}"
    try:
        entries = list_attempt_entries(storage, path)
        below = sorted(other for other in parse_attempts(entries) if other < attempt)
        protections = protections_at(storage, path, below, read_storage_clock)
        for lower in below:
            if lower in protections:
                _log.info("%s/%s stays for now: %s", path, lower, "; ".join(protections[lower]))
                continue
            if incarnation is not None:
                incarnation.check(storage)
            if not is_decided(storage, path, lower):
                try_abandon(storage, path, lower, by=by, reason="a later attempt was committed")
            remove(storage, path, lower)
        _empty_all_trash(storage, path, trash_among(entries))
    except (CheckpointError, OSError) as error:
        _log.warning("%s: an older attempt could not be removed yet: %s", path, error)


def delete(storage: Storage, path: str) -> None:
    """Remove the checkpoint at `path`, and `path` itself if it is empty then.

    An attempt that was claimed before the call is never committed after the call. An attempt that
    is committed during the call stays. A second call completes a delete that was stopped. Raises
    NotFoundError without a checkpoint. Raises StorageError after a partial delete; the message says
    if the checkpoint still exists.
    """
    attempts, reason = check_deletable(storage, path), f"{path} was deleted"
    try:
        doomed = [
            status.attempt
            for status in attempts
            if status.state != "open"
            or try_abandon(storage, path, status.attempt, by="a delete", reason=reason)
        ]
        # The lowest first, each durably. So a delete that is stopped leaves the newest attempts.
        for attempt in doomed:
            remove(storage, path, attempt)
        _empty_all_trash(storage, path, list_trash(storage, path))
    except CheckpointError as error:
        raise _partial_delete_error(storage, path, error) from error
    # The folder may be a link, or have files of other programs or a new attempt.
    with suppress(StorageError, FileNotFoundError, NotADirectoryError):
        storage.remove(path)


def _partial_delete_error(storage: Storage, path: str, error: BaseException) -> StorageError:
    """Return the error of a delete that `error` stopped."""
    again = ", then delete it again"
    try:
        attempts = list_statuses(storage, path)
        if any(status.state in _DATA_IS_KEPT for status in attempts):
            result = f"{path} is not deleted: check the storage{again}"
        elif attempts or list_trash(storage, path):
            result = (
                f"{path} is deleted, but not all of its space is free, and a power cut may bring "
                f"it back: check the storage{again}"
            )
        else:
            result = f"{path} is deleted, but a power cut may bring it back: check the storage"
    except (CheckpointError, OSError):
        result = (
            "Now it is unknown whether it is deleted: check the storage, list the path with "
            f"`dist-ckpt ls`{again}"
        )
    return StorageError(f"{error}. {result}")


def check_deletable(storage: Storage, path: str) -> tuple[Status, ...]:
    """Return the attempts at `path` if it has a checkpoint, or remains of a stopped delete.

    Raises NotFoundError otherwise: an open attempt may be the first save of another job. Raises
    ExistsError for a linked step.
    """
    refuse_linked_step(path)
    attempts = list_statuses(storage, path)
    if any(status.state in _DATA_IS_KEPT for status in attempts):
        return attempts
    is_stopped = all(status.state == "abandoned" for status in attempts)
    if is_stopped and any(entry.kind == "folder" for entry in list_trash(storage, path)):
        return attempts
    raise not_found_error(storage, path)


def remove_garbage(storage: Storage, path: str, *, grace_s: float) -> tuple[str, ...]:
    """Remove the remains of dead and abandoned saves at `path`; return the removed names.

    These are trash, abandoned attempts, and attempts below a later committed one. Also, by the
    storage's clock: open attempts without a write for `grace_s`, and temporary files of a root's id
    that are older than that. If an attempt is damaged, it stays, and so do all older ones: its
    index cannot be read, or damage is recorded. Recorded damage is logged.
    ExistsError for a linked step.
    """
    refuse_linked_step(path)
    names = _empty_all_trash(storage, path, list_trash(storage, path))
    ids, attempts = _find_garbage(storage, path, grace_s, read_storage_clock)
    for name in ids:
        with suppress(FileNotFoundError):  # its writer has renamed it now
            storage.remove(f"{path}/{name}")
            names.append(name)
    reason = f"nothing was written in it for more than {grace_s:g} seconds"
    for attempt, state in attempts:
        if state != "open" or try_abandon(storage, path, attempt, by="`gc`", reason=reason):
            remove(storage, path, attempt)
            names.append(attempt.name)
    return tuple(names)


def list_garbage(storage: Storage, path: str, *, grace_s: float, now: float) -> tuple[str, ...]:
    """Return the names that `remove_garbage` would remove now, by the storage's clock `now`."""
    trash = (entry.name for entry in list_trash(storage, path) if entry.kind == "folder")
    ids, attempts = _find_garbage(storage, path, grace_s, lambda *_: now)
    return (*trash, *ids, *(attempt.name for attempt, _ in attempts))


def _find_garbage(
    storage: Storage, path: str, grace_s: float, clock: Callable[[Storage, str], float]
) -> tuple[list[str], list[tuple[Attempt, AttemptState]]]:
    """Return the temporary files of a root's id, and the attempts, that are not needed any more."""
    attempts = list_statuses(storage, path)
    superseded = _find_superseded(storage, path, attempts, clock)
    entries = list_entries(storage, path)
    ids = [entry for entry in entries if entry.kind == "file" and is_temporary_root_id(entry.name)]
    has_open = any(status.state == "open" for status in attempts)
    oldest = clock(storage, path) - grace_s if has_open or ids else 0.0
    return [entry.name for entry in ids if entry.modified_at < oldest], [
        (status.attempt, status.state)
        for status in attempts
        if status.state == "abandoned"
        or status.attempt in superseded
        or (status.state == "open" and status.modified_at < oldest)
    ]


def list_all_garbage(
    storage: Storage, root: str, *, grace_s: float, now: float, refused: list[str] | None = None
) -> tuple[str, ...]:
    """Return the paths that `remove_all_garbage` would remove at the storage's time `now`."""
    records = list_temporary_records(storage, root)
    return (
        *_collect(
            _list_folders(storage, root),
            lambda path: list_garbage(storage, path, grace_s=grace_s, now=now),
            refused,
        ),
        *(file for file, modified_at in records if now - modified_at > grace_s),
    )


def _collect(
    paths: Sequence[str], collect: Callable[[str], Sequence[str]], refused: list[str] | None
) -> Iterator[str]:
    """Yield the garbage in folders. See `remove_all_garbage` about `refused`."""
    for path in paths:
        try:
            yield from [f"{path}/{name}" for name in collect(path)]
        except StorageError as error:
            if refused is None or not is_forbidden(error):
                raise
            refused.append(str(error))


def _find_superseded(
    storage: Storage, path: str, attempts: Sequence[Status], now: Callable[[Storage, str], float]
) -> Sequence[Attempt]:
    """Return the unprotected attempts below the highest committed one, after a sync of that one.

    Return none if that one is recorded as damaged: one below may be the last good copy.
    """
    committed = [status.attempt for status in attempts if status.state == "committed"]
    readable = all(status.state not in ("damaged", "incompatible") for status in attempts)
    if len(committed) < 2 or not readable:
        return ()
    folder = f"{path}/{committed[-1]}"
    try:
        storage.sync(folder)  # its saver may have died before its own sync
        index = read_index(storage, path, committed[-1])
    except FileNotFoundError:  # deleted or overwritten since it was listed
        return ()
    protections = protections_at(storage, path, committed[:-1], now)
    superseded = [attempt for attempt in committed[:-1] if attempt not in protections]
    key, root = index.key if isinstance(index, Index) else None, path.rpartition("/")[0] or "/"
    if superseded and key and (damage := read_damage(storage, root, key)):
        names = listed([attempt.name for attempt in superseded])
        _log.warning(
            "%s: %s stays, because %s is damaged: %s. To use the older one, move %s elsewhere",
            *(path, names, committed[-1], damage, folder),
        )
        return ()
    return superseded


def remove_all_garbage(
    storage: Storage, root: str, *, grace_s: float, refused: list[str] | None = None
) -> tuple[str, ...]:
    """Call `remove_garbage` at `root` and at every folder in it; return the removed paths.

    Removes also the folders in `root` that become empty, and old temporary records. Raises
    NotFoundError if `root` does not exist, ExistsError if it is a linked step, and
    IncompatibleError if `root` or its parent needs an upgrade. With `refused`, a folder for which
    this user has no permission does not end the call: its error is added there.
    """

    def remove_at(path: str) -> Sequence[str]:
        names = remove_garbage(storage, path, grace_s=grace_s)
        if names and path != root:
            with suppress(StorageError, FileNotFoundError, NotADirectoryError):
                storage.remove(path)
        return names

    removed = _collect(_list_folders(storage, root), remove_at, refused)
    return (*removed, *remove_temporary_records(storage, root, grace_s=grace_s))


def remove_temporary_records(storage: Storage, root: str, *, grace_s: float) -> tuple[str, ...]:
    """Remove temporary records of killed processes that are older than `grace_s`.

    A slow process may still rename such a file. If the file is gone, the process writes it again.
    """
    temporary = list_temporary_records(storage, root)
    now = read_storage_clock(storage, root) if temporary else 0.0
    removed = tuple(file for file, modified_at in temporary if now - modified_at > grace_s)
    for file in removed:
        with suppress(FileNotFoundError, NotADirectoryError):
            storage.remove(file)
        with suppress(StorageError, FileNotFoundError, NotADirectoryError):
            for folder in PurePosixPath(file).parents[:2]:  # of the attempt, then of the step
                storage.remove(str(folder))
    return removed


def _list_folders(storage: Storage, root: str) -> Sequence[str]:
    """Return `root` and the folders in it. Raises the errors of `remove_all_garbage`."""
    refuse_linked_step(root)
    try:
        entries = storage.list(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise no_folder_error(root, error) from error
    refuse_old(root, old_folders_in(entries))
    check_upgraded(storage, posixpath.dirname(root))
    names = (entry.name for entry in entries if entry.kind == "folder")
    return [root, *(f"{root.rstrip('/')}/{name}" for name in names if name not in RESERVED_NAMES)]


def read_storage_clock(storage: Storage, path: str) -> float:
    """Return the storage's time: create an empty trash folder, and return its modification time."""
    name = trash_name(Attempt(1, new_id()))
    try:
        with suppress(FileExistsError):  # the name is unique: the call was answered twice
            storage.make_folder(f"{path}/{name}")
        times = [entry.modified_at for entry in storage.list(path) if entry.name == name]
        storage.remove(f"{path}/{name}")
    except FileNotFoundError:  # another process removes garbage too
        times = []
    return max(times, default=0.0)


def _empty_all_trash(storage: Storage, path: str, entries: Iterable[Entry]) -> list[str]:
    names = []
    for entry in entries:
        trash = f"{path}/{entry.name}"
        if entry.kind != "folder":
            _log_foreign(trash)
        elif _empty_trash(storage, path, trash):
            names.append(entry.name)
    return names


def _empty_trash(storage: Storage, path: str, trash: str) -> bool:
    """Remove a trash folder and the files of dist_ckpt in it. Return False if something stays."""
    try:
        # Sync before any removal, also if another process has renamed the folder. Without a durable
        # rename, a power cut would bring back the attempt without its files.
        storage.sync(path)
        # Do not follow links: another program may replace the folder by a link at any time.
        foreign = []
        for entry in storage.list(trash, follow=False):
            if is_nfs_file(entry.name):
                continue
            if entry.kind == "folder" or not is_in_attempt(entry.name):
                foreign.append(entry.name)
                continue
            with suppress(FileNotFoundError):
                storage.remove(f"{trash}/{entry.name}")
        if foreign:
            _log.warning("%s: left %s, not dist_ckpt's: remove by hand", trash, ", ".join(foreign))
            return False
        storage.remove(trash)
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        _log_foreign(trash)
        return False
    except StorageError:
        if not _has_nfs_files(storage, trash):
            raise
        _log.info("%s is still read: a later prune or gc removes this folder", trash)
        return False
    return True


def awaits_readers(storage: Storage, path: str) -> bool:
    """Return True if NFS keeps removed files at `path` for processes that still read them."""
    trash = list_trash(storage, path)
    return any(_has_nfs_files(storage, f"{path}/{entry.name}") for entry in trash)


def _has_nfs_files(storage: Storage, trash: str) -> bool:
    return any(is_nfs_file(entry.name) for entry in list_entries(storage, trash))


def _log_foreign(link: str) -> None:
    _log.warning("%s is not a folder, so not dist_ckpt's: remove it by hand", link)
