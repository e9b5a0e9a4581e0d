"""Remove a checkpoint with its annotations, unless it is protected.

First the rename, by which it is gone, then its data, its folder, and its annotations; the deletion
intent is removed last. So after a crash the next process sees what is left to do.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf

from dist_ckpt.core.commit import attempts, removal
from dist_ckpt.core.commit.records.leases import CheckpointRef, forget, remove_if_unprotected
from dist_ckpt.core.commit.records.protections import DELETION_INTENT, Where, protections_of
from dist_ckpt.core.commit.records.record_store import (
    StoredAnnotation,
    can_keep_records,
    check_upgraded,
    read_annotations,
)
from dist_ckpt.core.format.filenames import NO_CHECKPOINTS
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import (
    ConflictError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.runs.selectors import open_resolved

# Annotations of absent attempts stay for this long: this host may see the attempt late.
GONE_S = 24 * 3600.0


def delete(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Delete the checkpoint at `path`. One process calls it; there is no way back.

    On return no host sees it any more. Raises NotFoundError if there is none, and ConflictError if
    it is pinned, tagged or leased, unless `force`.
    """
    storage, folder = open_resolved(path)
    delete_at(storage, folder, force=force)


def delete_at(storage: Storage, path: str, *, force: bool) -> None:
    """Delete a checkpoint on a storage. In a root without records of a run it has no protection.

    IncompatibleError if its root is to be upgraded.
    """
    root = os.path.dirname(path)
    check_upgraded(storage, root)
    if not can_keep_records(storage, root):
        removal.delete(storage, path)
        return
    statuses = removal.check_deletable(storage, path)
    annotations = read_annotations(storage, root)
    where = _where(storage, path)
    own = [status.attempt for status in statuses]
    protections = _protections_of(
        storage,
        root,
        [annotation for annotation in annotations if annotation.attempt in own],
        annotations,
    )
    if protections and not force:
        raise _refused(path, protections)
    if where is None:
        removal.delete(storage, path)
    else:
        subject = CheckpointRef(storage, root, path, where)

        def remove() -> None:
            removal.delete(storage, path)

        if late := remove_if_unprotected(subject, remove, others=annotations, force=force):
            raise _refused(path, late)
    others = [f"{root}/{name}" for name in _folders(storage, root)]
    for gone in {
        (annotation.step, annotation.attempt) for annotation in read_annotations(storage, root)
    }:
        if gone[1] in own:
            _forget(CheckpointRef(storage, root, path, gone), annotations, others)


def _where(storage: Storage, path: str) -> Where | None:
    try:
        attempt, index = attempts.find(storage, path)
    except (CorruptError, IncompatibleError, NotFoundError):
        return None
    return None if index.step is None else (index.step, attempt)


def _protections_of(
    storage: Storage,
    root: str,
    own: Sequence[StoredAnnotation],
    annotations: Sequence[StoredAnnotation],
) -> tuple[str, ...]:
    """Return the protections of the attempts of some annotations, as texts."""
    subjects = {(annotation.step, annotation.attempt) for annotation in own}
    if not subjects:
        return ()
    protections = protections_of(annotations, removal.now_at(storage, root))
    return tuple(text for where in sorted(subjects) for text in protections.of(where))


def _refused(path: str, protections: Iterable[str]) -> ConflictError:
    return ConflictError(
        f"{path} is protected: {'; '.join(protections)}. Remove the protection first, or delete "
        f"it with force=True (on the command line --force)"
    )


def remove_at(
    subject: CheckpointRef,
    *,
    annotations: Sequence[StoredAnnotation],
    copies: Sequence[str] = (),
    check: Callable[[], None],
) -> tuple[str, ...]:
    """Remove one checkpoint of a run, unless it is protected; return why it stays, or ().

    `annotations` are those of the root, as they were listed; `copies` are paths of copies of this
    checkpoint in the root; `check` raises what forbids the removal.
    """
    storage, path, attempt = subject.storage, subject.path, subject.where[1]
    removal.collect(storage, path, grace_s=inf)  # what it has superseded
    there = attempts.list_attempts(storage, path)
    if attempt in there and there != [attempt]:
        return (_UNDER_WAY,)
    reasons = remove_if_unprotected(
        subject, lambda: removal.remove(storage, path, attempt), others=annotations, check=check
    )
    if not reasons:
        _clear(storage, subject.root, path)
        _forget(subject, annotations, copies)
    return reasons


_UNDER_WAY = (
    "another attempt is there: what it replaced is protected, or a save over it is in progress, or "
    'died ("dist-ckpt gc" then removes what that left)'
)


def _forget(
    subject: CheckpointRef, annotations: Sequence[StoredAnnotation], others: Sequence[str]
) -> None:
    """Remove the annotations of a removed checkpoint; if a copy exists, only deletion intents."""
    storage, (_, attempt) = subject.storage, subject.where
    if not any(attempt in attempts.list_attempts(storage, path) for path in others):
        forget(storage, subject.root, subject.where, annotations)
        return
    name = subject.path.rpartition("/")[2]
    for annotation in subject.annotations():
        if annotation.name.kind == DELETION_INTENT and name in annotation.values.values():
            subject.withdraw(annotation.name)


def _folders(storage: Storage, root: str) -> list[str]:
    entries = attempts.entries_at(storage, root)
    names = [entry.name for entry in entries if entry.kind == "folder"]
    return [name for name in names if name not in NO_CHECKPOINTS]


def _clear(storage: Storage, root: str, path: str) -> None:
    """Remove the folder of a checkpoint that is gone, unless something else is in it."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            storage.remove(path)
    except StorageError:
        if not attempts.entries_at(storage, path):
            raise
    storage.sync(root)


# --- after a crash ---------------------------------------------------------------------------


def finish(storage: Storage, root: str, annotations: Sequence[StoredAnnotation]) -> None:
    """Finish removals that died, and remove annotations of checkpoints that are long gone.

    `annotations` are those of the root. Saves in progress, and checkpoints that this host may not
    see yet, are not touched.
    """
    about: dict[Where, list[StoredAnnotation]] = defaultdict(list)
    for annotation in annotations:
        about[annotation.step, annotation.attempt].append(annotation)
    if not about:
        return
    folders = _folders(storage, root)
    there = {
        attempt for name in folders for attempt in attempts.list_attempts(storage, f"{root}/{name}")
    }
    gone = {where: those for where, those in about.items() if where[1] not in there}
    if not gone:
        return
    now = removal.now_at(storage, root)
    for where, those in sorted(gone.items()):
        intended = {
            value
            for annotation in those
            if annotation.name.kind == DELETION_INTENT
            for value in annotation.values.values()
        }
        for name in intended.intersection(folders):
            removal.collect(storage, f"{root}/{name}", grace_s=inf)
            _clear(storage, root, f"{root}/{name}")
        if intended or now - max(annotation.modified_at for annotation in those) > GONE_S:
            forget(storage, root, where, annotations)
