"""Delete a checkpoint, or prune a run by a retention policy, unless a protection forbids it.

A removal renames the checkpoint first: then it is gone. Its data, its folder and its annotations
follow; the deletion intent is last. So after a crash the next process sees what is left to do.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from math import inf

from dist_ckpt.core.commit import attempts, removal
from dist_ckpt.core.commit.records.incarnations import Incarnation, newest_incarnation
from dist_ckpt.core.commit.records.leases import CheckpointRef, forget, remove_if_unprotected
from dist_ckpt.core.commit.records.protections import (
    DELETION_INTENT,
    LEASE,
    CheckpointKey,
    protections_of,
)
from dist_ckpt.core.commit.records.record_store import (
    StoredAnnotation,
    can_keep_records,
    check_upgraded,
    read_annotations,
    refuse_old,
)
from dist_ckpt.core.format.filenames import ATTEMPTS_PER_INCARNATION, NO_CHECKPOINTS
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import (
    ConflictError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.runs.retention_policy import Candidate, RetentionPolicy, parse_rules
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

        if late := remove_if_unprotected(
            subject, remove, other_annotations=annotations, force=force
        ):
            raise _refused(path, late)
    others = [f"{root}/{name}" for name in _folders(storage, root)]
    for gone in {
        (annotation.step, annotation.attempt) for annotation in read_annotations(storage, root)
    }:
        if gone[1] in own:
            _forget(CheckpointRef(storage, root, path, gone), annotations, others)


def _where(storage: Storage, path: str) -> CheckpointKey | None:
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
    storage, path, attempt = subject.storage, subject.path, subject.key[1]
    removal.collect(storage, path, grace_s=inf)  # what it has superseded
    there = attempts.list_attempts(storage, path)
    if attempt in there and there != [attempt]:
        return (_UNDER_WAY,)
    reasons = remove_if_unprotected(
        subject,
        lambda: removal.remove(storage, path, attempt),
        other_annotations=annotations,
        check=check,
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
    storage, (_, attempt) = subject.storage, subject.key
    if not any(attempt in attempts.list_attempts(storage, path) for path in others):
        forget(storage, subject.root, subject.key, annotations)
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
    about: dict[CheckpointKey, list[StoredAnnotation]] = defaultdict(list)
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


_log = logging.getLogger("dist_ckpt")

# A checkpoint, and the reasons why it stays, as texts; none if it is to be removed.
Decision = tuple[RunCheckpoint, tuple[str, ...]]

NEWEST, NEWEST_CHECKED = "the newest", "the newest that was checked in full"
NEWEST_WHOLE = "the newest that is whole by a quick check"


def plan_prune(listing: Listing, keep: RetentionPolicy) -> list[Decision]:
    """Return for each checkpoint of a run the reasons why it stays. Pure.

    Rules look at steps that a run may resume from: at the highest attempt of each step. If they
    keep it, they keep all attempts of the step. Orphaned checkpoints stay only if they are pinned,
    tagged or leased. CorruptError if it is not known which are orphaned.
    """
    alive = listing.alive
    paths = {one.path for one in alive}
    of_step = {one.step: one for one in alive}  # by step and attempt: the last is the highest
    chosen = keep.reasons([_candidate(one) for one in of_step.values()])
    kept = dict(zip(of_step, chosen, strict=True))
    newest = alive[-1].path if alive else None
    checked = next((one.path for one in reversed(alive) if one.is_verified), None)
    decisions = []
    for one in listing.checkpoints:
        reasons = [*_never(one)]
        if one.path in paths:
            reasons += kept[one.step]
            reasons += [NEWEST] * (one.path == newest)
            reasons += [NEWEST_CHECKED] * (one.path == checked)
        decisions.append((one, (*reasons, *one.protected_by)))
    return decisions


def _never(one: RunCheckpoint) -> list[str]:
    """Return why rules do not apply to a checkpoint; nothing if they do."""
    if one.state != "committed":
        return [f"it is {one.state}: that is for dist-ckpt gc, or rm"]
    if one.where is None:
        return ["it has no step"]
    if one.is_orphaned and one.where[1].incarnation == 0:
        # A single save, say of the final model: the run does not resume from it.
        return ["no incarnation of the run has saved it: that is for dist-ckpt rm"]
    return ["a save over it is in progress, or died"] * one.is_being_replaced


def _candidate(one: RunCheckpoint) -> Candidate:
    assert one.where is not None
    return Candidate(*one.where, one.saved_at or 0.0, one.metrics)


def metrics_of(keep: RetentionPolicy) -> set[str]:
    """Return the metrics that a policy's rules look at."""
    return {
        value
        for _, _, named in parse_rules(str(keep))
        for name, value in named.items()
        if name in ("min", "max") and isinstance(value, str)
    }


def prune(  # noqa: PLR0913 - what is removed, and by whom
    storage: Storage,
    root: str,
    keep: RetentionPolicy,
    *,
    is_whole: Callable[[RunCheckpoint], bool],
    run: Incarnation | None = None,
    among: Collection[RunCheckpoint] | None = None,
    dry_run: bool = False,
) -> list[Decision]:
    """Remove checkpoints that have no reason to stay; return the reasons of each, () if removed.

    First, finish what an earlier call has left incomplete. `is_whole` is a quick check, of the
    newest checkpoint and of older ones until one passes. Once an incarnation newer than `run` has
    begun, nothing is removed: ConflictError. Without `run`, if an incarnation has begun meanwhile.
    With `among`, only these may be removed, each at its path. A `dry_run` changes nothing.
    NotFoundError if there is no such folder, ValueError if it is a checkpoint, IncompatibleError
    if it is to be upgraded, also for a `dry_run`.
    """
    listing = list_run(storage, root, now=time.time())
    refuse_old(listing.root, listing.old_folders)
    if not dry_run and any(annotation.name.kind == LEASE for annotation in listing.annotations):
        listing = list_run(storage, root, now=removal.now_at(storage, root))
    if listing.root != root:
        raise ValueError(f"{root} is one checkpoint: give the folder that it is in")
    if not dry_run:
        finish(storage, root, listing.annotations)
    decisions = [_spare_newer(one, run) for one in plan_prune(listing, keep)]
    if among is not None:
        shown = {(one.path, one.where) for one in among}
        decisions = [_spare_others(one, shown) for one in decisions]
    if any(not reasons for _, reasons in decisions):
        decisions = _spare_whole(listing, decisions, is_whole)
    if not dry_run and any(not reasons for _, reasons in decisions):
        _make_newest_durable(storage, listing)
        decisions = [
            (one, reasons or _remove(storage, listing, one, run)) for one, reasons in decisions
        ]
    return decisions


def _spare_newer(decision: Decision, run: Incarnation | None) -> Decision:
    """Spare what a newer incarnation has saved: this process does not know what that needs."""
    one, reasons = decision
    if (
        run is not None
        and one.where
        and one.where[1].number >= run.first + ATTEMPTS_PER_INCARNATION
    ):
        reasons = (*reasons, "a newer incarnation saved it")
    return one, reasons


def _spare_others(decision: Decision, shown: set[tuple[str, CheckpointKey | None]]) -> Decision:
    one, reasons = decision
    is_shown = (one.path, one.where) in shown
    return one, (reasons if reasons or is_shown else ("its removal was not asked for",))


def _spare_whole(
    listing: Listing, decisions: list[Decision], is_whole: Callable[[RunCheckpoint], bool]
) -> list[Decision]:
    whole = next((one.path for one in reversed(listing.alive) if is_whole(one)), None)
    return [
        (one, (*reasons, NEWEST_WHOLE) if one.path == whole else reasons)
        for one, reasons in decisions
    ]


def _make_newest_durable(storage: Storage, listing: Listing) -> None:
    """Sync the newest before an older one is removed: its saver may have died before the sync."""
    for one in listing.alive[-1:]:
        for folder in (f"{one.path}/{one.attempt}", one.path, listing.root):
            storage.sync(folder)


def _remove(
    storage: Storage, listing: Listing, one: RunCheckpoint, run: Incarnation | None
) -> tuple[str, ...]:
    assert one.where is not None

    def check() -> None:
        if run is not None:
            run.check(storage)
        else:
            _check_no_incarnation_since(storage, listing)

    copies = [o.path for o in listing.checkpoints if o.where == one.where and o.path != one.path]
    subject = CheckpointRef(storage, listing.root, one.path, one.where)
    reasons = remove_at(subject, annotations=listing.annotations, copies=copies, check=check)
    if not reasons:
        _log.info("pruned %s, step %s", one.path, one.step)
    return reasons


def _check_no_incarnation_since(storage: Storage, listing: Listing) -> None:
    """Raise ConflictError if a new incarnation began: other checkpoints may be orphaned now."""
    newest = newest_incarnation(storage, listing.root)
    if newest is not None and newest.number > listing.newest_incarnation:
        raise ConflictError(
            f"{listing.root}: incarnation {newest.number} of this run, {newest.by}, has begun "
            f"while it was pruned, so that other checkpoints matter now: prune it again"
        )
