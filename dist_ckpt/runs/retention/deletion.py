"""Remove a checkpoint with all that is known of it, unless something keeps it.

First the rename, by which it is gone, then its data, its folder, and the facts about it; the mark
of who removes it goes last. So whoever comes after a crash sees what is left to do.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf

from dist_ckpt.core.commit import attempts, removal
from dist_ckpt.core.commit.records.leases import CheckpointRef, forget, remove_if_unprotected
from dist_ckpt.core.commit.records.protections import MARK, Where, protections_of
from dist_ckpt.core.commit.records.record_store import StoredAnnotation, read_annotations
from dist_ckpt.core.format.filenames import NO_CHECKPOINTS
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import (
    ConflictError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.runs.annotations import can_keep_records
from dist_ckpt.runs.selectors import open_resolved

# Facts about what is gone are kept for so long: the attempt may be one that this host sees late.
ORPHAN_S = 24 * 3600.0


def delete(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Delete the checkpoint at `path`. One process calls it; there is no way back.

    On return nothing of it shows any more, on any host. Raises NotFoundError if there is none, and
    ConflictError if it is pinned, tagged or held, unless `force`.
    """
    storage, folder = open_resolved(path)
    delete_at(storage, folder, force=force)


def delete_at(storage: Storage, path: str, *, force: bool) -> None:
    """Do so on a storage. Where there are no records of a run, nothing can keep it."""
    root = os.path.dirname(path)
    if not can_keep_records(storage, root):
        removal.delete(storage, path)
        return
    found = removal.check_deletable(storage, path)
    facts = read_annotations(storage, root)
    where = _where(storage, path)
    own = [one.attempt for one in found]
    kept = _kept(storage, root, [fact for fact in facts if fact.attempt in own], facts)
    if kept and not force:
        raise _refused(path, kept)
    if where is None:
        removal.delete(storage, path)
    else:
        subject = CheckpointRef(storage, root, path, where)

        def remove() -> None:
            removal.delete(storage, path)

        if told := remove_if_unprotected(subject, remove, others=facts, force=force):
            raise _refused(path, told)
    others = [f"{root}/{name}" for name in _folders(storage, root)]
    for gone in {(fact.step, fact.attempt) for fact in read_annotations(storage, root)}:
        if gone[1] in own:
            _forget(CheckpointRef(storage, root, path, gone), facts, others)


def _where(storage: Storage, path: str) -> Where | None:
    try:
        attempt, index = attempts.find(storage, path)
    except (CorruptError, IncompatibleError, NotFoundError):
        return None
    return None if index.step is None else (index.step, attempt)


def _kept(
    storage: Storage, root: str, own: Sequence[StoredAnnotation], facts: Sequence[StoredAnnotation]
) -> tuple[str, ...]:
    """Return what keeps the attempts that some facts are about."""
    places = {(fact.step, fact.attempt) for fact in own}
    if not places:
        return ()
    guards = protections_of(facts, removal.now_at(storage, root))
    return tuple(told for place in sorted(places) for told in guards.of(place))


def _refused(path: str, told: Iterable[str]) -> ConflictError:
    return ConflictError(
        f"{path} is kept: {'; '.join(told)}. Take that away first, or delete it with force=True "
        f"(on the command line --force)"
    )


def remove_at(
    subject: CheckpointRef,
    *,
    facts: Sequence[StoredAnnotation],
    copies: Sequence[str] = (),
    check: Callable[[], None],
) -> tuple[str, ...]:
    """Remove one checkpoint of a run that nothing keeps; return what does, or () if it is gone.

    `facts` are those of the root, as they were listed; `copies` are paths of folders in it that
    somebody has made of this one; `check` raises what forbids it.
    """
    storage, path, attempt = subject.storage, subject.path, subject.where[1]
    removal.collect(storage, path, grace_s=inf)  # what it has superseded
    there = attempts.list_attempts(storage, path)
    if attempt in there and there != [attempt]:
        return (_UNDER_WAY,)
    told = remove_if_unprotected(
        subject, lambda: removal.remove(storage, path, attempt), others=facts, check=check
    )
    if not told:
        _clear(storage, subject.root, path)
        _forget(subject, facts, copies)
    return told


_UNDER_WAY = (
    "another attempt is there: what it replaced is kept, or a save over it is under way, or died "
    '("dist-ckpt gc" then removes what that left)'
)


def _forget(
    subject: CheckpointRef, facts: Sequence[StoredAnnotation], others: Sequence[str]
) -> None:
    """Remove what is known of what is gone; of what one of the others has as well, the marks."""
    storage, (_, attempt) = subject.storage, subject.where
    if not any(attempt in attempts.list_attempts(storage, path) for path in others):
        forget(storage, subject.root, subject.where, facts)
        return
    name = subject.path.rpartition("/")[2]
    for fact in subject.facts():
        if fact.name.kind == MARK and name in fact.values.values():
            subject.take_back(fact.name)


def _folders(storage: Storage, root: str) -> list[str]:
    entries = attempts.entries_at(storage, root)
    return [one.name for one in entries if one.kind == "folder" and one.name not in NO_CHECKPOINTS]


def _clear(storage: Storage, root: str, path: str) -> None:
    """Remove the folder of a checkpoint that is gone, unless something else is in it."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            storage.remove(path)
    except StorageError:
        if not attempts.entries_at(storage, path):
            raise
    storage.sync(root)


# --- what was left ---------------------------------------------------------------------------


def finish(storage: Storage, root: str, facts: Sequence[StoredAnnotation]) -> None:
    """Finish removals that died, and remove facts about checkpoints that are long gone.

    `facts` are those of the root. What is being saved, and what only this host does not see yet, is
    left alone.
    """
    about: dict[Where, list[StoredAnnotation]] = defaultdict(list)
    for fact in facts:
        about[fact.step, fact.attempt].append(fact)
    if not about:
        return
    folders = _folders(storage, root)
    there = {
        attempt for name in folders for attempt in attempts.list_attempts(storage, f"{root}/{name}")
    }
    gone = {where: told for where, told in about.items() if where[1] not in there}
    if not gone:
        return
    now = removal.now_at(storage, root)
    for where, told in sorted(gone.items()):
        marked = {
            value for fact in told if fact.name.kind == MARK for value in fact.values.values()
        }
        for name in marked.intersection(folders):
            removal.collect(storage, f"{root}/{name}", grace_s=inf)
            _clear(storage, root, f"{root}/{name}")
        if marked or now - max(fact.modified_at for fact in told) > ORPHAN_S:
            forget(storage, root, where, facts)
