"""Removing attempts: un-commit by one rename, make that durable, then unlink.

A folder that was renamed is no attempt any more: whoever still works in it finds its path gone.
Nobody removes an open attempt without having abandoned it, but the saver who claimed it. Names
that are not dist_ckpt's are never touched.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Sequence
from contextlib import suppress

from dist_ckpt.core.commit.attempts import (
    Status,
    abandon,
    entries_at,
    has_index,
    list_attempts,
    new_id,
    not_found_error,
    statuses,
    trash_at,
)
from dist_ckpt.core.commit.outcome import DATA_IS_KEPT, partial_delete_error
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.commit.records.leases import protections_at
from dist_ckpt.core.commit.records.old_records import (
    check_upgraded,
    old_folders_in,
    refuse_old,
)
from dist_ckpt.core.format.filenames import (
    Attempt,
    is_in_attempt,
    is_temporary_root_id,
    trash_name,
)
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, NotFoundError, StorageError

_log = logging.getLogger("dist_ckpt")


def remove(storage: Storage, path: str, attempt: Attempt) -> None:
    """Remove an attempt that is abandoned, superseded or deleted; fine if it is gone.

    On return it is durably no attempt any more; its space is free, but for files that are not
    dist_ckpt's, which are left and logged.
    """
    trash = f"{path}/{trash_name(attempt)}"
    try:
        with suppress(FileNotFoundError):  # somebody else removes it as well
            storage.rename(f"{path}/{attempt}", trash)
        _empty(storage, path, trash)
    except FileExistsError as error:
        raise StorageError(f"{trash} exists while {attempt} does: remove it by hand") from error


def supersede(
    storage: Storage, path: str, attempt: Attempt, run: Incarnation | None = None
) -> None:
    """Remove what is lower than the attempt that was just committed, and all trash.

    Raises no error of the storage, but logs it: the save has succeeded, and the next one, or a
    collector, removes what is left. So is what is pinned, tagged or leased, and all of it
    if a newer incarnation than the attempt's has taken over.
    """
    by = f"the saver of {attempt}"
    try:
        below = [other for other in list_attempts(storage, path) if other < attempt]
        kept = protections_at(storage, path, below, now_at)
        for lower in below:
            if lower in kept:
                _log.info("%s/%s is left for now: %s", path, lower, "; ".join(kept[lower]))
                continue
            if run is not None:
                run.check(storage)
            if not has_index(storage, path, lower):
                abandon(storage, path, lower, by=by, reason="a later attempt was committed")
            remove(storage, path, lower)
        _empty_all(storage, path)
    except (CheckpointError, OSError) as error:
        _log.warning("%s: an older attempt could not be removed yet: %s", path, error)


def delete(storage: Storage, path: str) -> None:
    """Remove the checkpoint at `path`, and `path` itself if nothing else is in it.

    What was claimed before the call can never be committed after it, but for an attempt that was
    committed during it: that one stays. A delete that was stopped is finished. Raises
    NotFoundError if there is no checkpoint, StorageError that says what is left.
    """
    found = check_deletable(storage, path)
    try:
        doomed = [
            status.attempt
            for status in found
            if status.state != "open"
            or abandon(storage, path, status.attempt, by="a delete", reason=f"{path} was deleted")
        ]
        # Lowest first, each durably: whenever it stops, what is left at the path is the newest.
        for attempt in doomed:
            remove(storage, path, attempt)
        _empty_all(storage, path)
    except CheckpointError as error:
        raise partial_delete_error(storage, path, error) from error
    # Somebody else's files, or a new attempt, or a link beside which a link leads here.
    with suppress(StorageError, FileNotFoundError, NotADirectoryError):
        storage.remove(path)


def check_deletable(storage: Storage, path: str) -> tuple[Status, ...]:
    """Return the attempts at `path` if a checkpoint is there, or the rest of a stopped delete.

    Raises NotFoundError otherwise: what is open, and alone, may be somebody's first save.
    """
    found = statuses(storage, path)
    if any(status.state in DATA_IS_KEPT for status in found):
        return found
    is_stopped = all(status.state == "abandoned" for status in found)
    if is_stopped and any(entry.kind == "folder" for entry in trash_at(storage, path)):
        return found
    raise not_found_error(storage, path)


def collect(storage: Storage, path: str, *, grace_s: float) -> tuple[str, ...]:
    """Remove what dead and abandoned saves left at `path`; return the names of what is gone.

    That is trash, abandoned attempts, those below a later committed one, and by the storage's own
    clock open ones in which nothing was written for `grace_s`, and ids of the folder that for so
    long were not renamed into place. Damaged ones are left, and while there are any, older
    checkpoints too.
    """
    names = _empty_all(storage, path)
    found = statuses(storage, path)
    superseded = _superseded(storage, path, found, now_at)
    ids = [
        entry
        for entry in entries_at(storage, path)
        if entry.kind == "file" and is_temporary_root_id(entry.name)
    ]
    has_open = any(status.state == "open" for status in found)
    now = now_at(storage, path) if has_open or ids else 0.0
    for entry in ids:
        if now - entry.modified_at > grace_s:
            with suppress(FileNotFoundError):  # its maker has renamed it after all
                storage.remove(f"{path}/{entry.name}")
                names.append(entry.name)
    reason = f"nothing was written in it for more than {grace_s:g} seconds"
    for status in found:
        attempt = status.attempt
        is_dead = status.state == "open" and now - status.modified_at > grace_s
        if (
            status.state == "abandoned"
            or attempt in superseded
            or (is_dead and abandon(storage, path, attempt, by="a collector", reason=reason))
        ):
            remove(storage, path, attempt)
            names.append(attempt.name)
    return tuple(names)


def collectable(storage: Storage, path: str, *, grace_s: float, now: float) -> tuple[str, ...]:
    """Return what `collect` would remove at `path` if it were `now` by the storage's clock.

    Nothing is changed.
    """
    names = [entry.name for entry in trash_at(storage, path) if entry.kind == "folder"]
    names += [
        entry.name
        for entry in entries_at(storage, path)
        if entry.kind == "file"
        and is_temporary_root_id(entry.name)
        and now - entry.modified_at > grace_s
    ]
    found = statuses(storage, path)
    superseded = _superseded(storage, path, found, lambda *_: now)
    return (
        *names,
        *(
            status.attempt.name
            for status in found
            if status.state == "abandoned"
            or status.attempt in superseded
            or (status.state == "open" and now - status.modified_at > grace_s)
        ),
    )


def collectable_in_all(
    storage: Storage, root: str, *, grace_s: float, now: float
) -> tuple[str, ...]:
    """Return what `collect_all` would remove, as `collectable` does."""
    return tuple(
        f"{path}/{name}"
        for path in _folders(storage, root)
        for name in collectable(storage, path, grace_s=grace_s, now=now)
    )


def _superseded(
    storage: Storage, path: str, found: Sequence[Status], now: Callable[[Storage, str], float]
) -> Sequence[Attempt]:
    """Return the committed attempts below a later one, once that is certainly durable."""
    committed = [status.attempt for status in found if status.state == "committed"]
    readable = all(status.state not in ("damaged", "incompatible") for status in found)
    if len(committed) < 2 or not readable:
        return ()
    try:
        storage.sync(f"{path}/{committed[-1]}")  # its saver may have died before it did so
    except FileNotFoundError:  # deleted, or overwritten, since it was listed
        return ()
    kept = protections_at(storage, path, committed[:-1], now)
    return [attempt for attempt in committed[:-1] if attempt not in kept]


def collect_all(storage: Storage, root: str, *, grace_s: float) -> tuple[str, ...]:
    """Do so at `root` and at every folder in it; return the paths of what is gone.

    Raises NotFoundError if there is no such folder, IncompatibleError if it, or the folder that it
    is in, is to be upgraded.
    """
    return tuple(
        f"{path}/{name}"
        for path in _folders(storage, root)
        for name in collect(storage, path, grace_s=grace_s)
    )


def _folders(storage: Storage, root: str) -> Sequence[str]:
    """Return a folder, and those in it. IncompatibleError if its records are old."""
    try:
        entries = storage.list(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{root} is no folder; choose another path") from error
    refuse_old(root, old_folders_in(entries))
    check_upgraded(storage, posixpath.dirname(root))
    return [root, *(f"{root.rstrip('/')}/{e.name}" for e in entries if e.kind == "folder")]


def now_at(storage: Storage, path: str) -> float:
    """Return the time by the storage's clock: that of a folder just made there, as trash."""
    name = trash_name(Attempt(1, new_id()))
    try:
        with suppress(FileExistsError):  # nobody else has this name: an answer that came twice
            storage.make_folder(f"{path}/{name}")
        times = [entry.modified_at for entry in storage.list(path) if entry.name == name]
        storage.remove(f"{path}/{name}")
    except FileNotFoundError:  # another collector is at work: leave it to that one
        times = []
    return max(times, default=0.0)


def _empty_all(storage: Storage, path: str) -> list[str]:
    """Empty every trash folder at a path; return the names of those that are gone."""
    names = []
    for entry in trash_at(storage, path):
        trash = f"{path}/{entry.name}"
        if entry.kind != "folder":
            _leave(trash)
        elif _empty(storage, path, trash):
            names.append(entry.name)
    return names


def _empty(storage: Storage, path: str, trash: str) -> bool:
    """Remove a trash folder and what is dist_ckpt's in it; say whether all of it is gone."""
    try:
        # Before anything in it goes, also if somebody else renamed it: after a power cut a
        # rename that was not durable would bring back the attempt, without its files.
        storage.sync(path)
        # Nothing is listed or removed through a link, which may take the folder's place any time.
        entries = storage.list(trash, follow=False)
        foreign = []
        for entry in entries:
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
        _leave(trash)
        return False
    return True


def _leave(link: str) -> None:
    _log.warning("%s is no folder, so not dist_ckpt's: remove it by hand", link)
