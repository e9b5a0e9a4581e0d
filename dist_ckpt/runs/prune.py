"""Delete a checkpoint, or prune a run by a retention policy, unless a protection forbids it.

A removal first renames the checkpoint, so that no process sees it any more. Then it removes the
data, the folder and the annotations; the deletion intent is last. After a crash, the next process
reads the deletion intent and finishes the removal.
"""

from __future__ import annotations

import logging
import os
import posixpath
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from math import inf

from dist_ckpt.core.commit import attempts, removal
from dist_ckpt.core.commit.records.incarnations import Incarnation, newest_incarnation
from dist_ckpt.core.commit.records.protection_protocol import (
    CheckpointRef,
    is_forbidden,
    protections_at,
    remove_annotations,
    remove_if_unprotected,
)
from dist_ckpt.core.commit.records.protections import DELETION_INTENT, LEASE, CheckpointKey
from dist_ckpt.core.commit.records.record_store import (
    StoredAnnotation,
    can_keep_records,
    check_upgraded,
    read_annotations,
    refuse_old,
)
from dist_ckpt.core.commit.records.recorded_checks import newest_checks
from dist_ckpt.core.format.filenames import ATTEMPTS_PER_INCARNATION, Attempt, parse_step_folder
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import (
    ConflictError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.runs.policy_text import parse_rules
from dist_ckpt.runs.retention_policy import Candidate, RetentionPolicy
from dist_ckpt.runs.selectors import open_resolved

# Annotations of an absent attempt stay for this long, as this host may see the attempt late. So do
# temporary files of annotations.
GONE_S = 24 * 3600.0


def delete(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Delete the checkpoint at `path` for good. One process calls this.

    On return no host sees it any more. Raises NotFoundError if it does not exist, and ConflictError
    if it is pinned, tagged or leased, unless `force`.
    """
    storage, folder = open_resolved(path)
    delete_at(storage, folder, force=force)


def delete_at(storage: Storage, path: str, *, force: bool) -> None:
    """Delete a checkpoint on a storage. In a root without records of a run it has no protection.

    IncompatibleError if its root needs an upgrade.
    """
    root = os.path.dirname(path)
    check_upgraded(storage, root)
    if not can_keep_records(storage, root):
        removal.delete(storage, path)
        return
    statuses = removal.check_deletable(storage, path)
    annotations = read_annotations(storage, root)
    key = _find_key(storage, path)
    deleted = [status.attempt for status in statuses]
    if not force:
        check_unprotected(storage, path, deleted, clock=removal.read_storage_clock)
    if key is None:
        removal.delete(storage, path)
    elif late := remove_if_unprotected(
        CheckpointRef(storage, root, path, key),
        lambda: removal.delete(storage, path),
        other_annotations=annotations,
        force=force,
    ):
        raise _protection_error(path, late, "delete")
    paths = attempts.list_readable_folders(storage, root)
    for step, attempt in {
        (stored.step, stored.attempt) for stored in read_annotations(storage, root)
    }:
        if attempt in deleted:
            _remove_annotations(
                CheckpointRef(storage, root, path, (step, attempt)), annotations, paths
            )


def check_unprotected(
    storage: Storage,
    path: str,
    candidates: Collection[Attempt],
    *,
    clock: Callable[[Storage, str], float] = lambda *_: time.time(),
    change: str = "delete",
) -> None:
    """Raise ConflictError if one of the attempts at `path` is protected.

    By default leases expire by this host's clock, as reading the storage's clock needs a write.
    """
    protections = protections_at(storage, path, candidates, clock)
    if texts := [text for _, texts in sorted(protections.items()) for text in texts]:
        raise _protection_error(path, texts, change)


def _find_key(storage: Storage, path: str) -> CheckpointKey | None:
    with suppress(CorruptError, IncompatibleError, NotFoundError):
        return attempts.find_checkpoint(storage, path)[1].key
    return None


def _protection_error(path: str, protections: Iterable[str], change: str) -> ConflictError:
    return ConflictError(
        f"{path} is protected: {'; '.join(protections)}. Remove the protection first, or {change} "
        f"it with force=True (on the command line --force)"
    )


_IN_PROGRESS = (
    "another attempt exists: a replaced one that is protected, or stays because this one is "
    'damaged; or a save over it that is in progress or has died ("dist-ckpt gc" removes its files)'
)


def _remove_annotations(
    ref: CheckpointRef, annotations: Sequence[StoredAnnotation], paths: Sequence[str]
) -> None:
    """Remove the annotations of a removed checkpoint.

    If one of the `paths` has a copy of it, remove only the deletion intents.
    """
    storage, (_, attempt) = ref.storage, ref.key
    if not any(_may_have(storage, path, attempt) for path in paths):
        waits = removal.awaits_readers(storage, ref.path)
        remove_annotations(storage, ref.root, ref.key, annotations, keep_intents=waits)
        return
    name = ref.path.rpartition("/")[2]
    for annotation in ref.annotations():
        if annotation.name.kind == DELETION_INTENT and name in annotation.values.values():
            ref.withdraw(annotation.name)


def _may_have(storage: Storage, path: str, attempt: Attempt) -> bool:
    """Return True if a folder has an attempt, or cannot be read."""
    try:
        return attempts.has_folder(storage, path, attempt)
    except StorageError:
        return True


def _list_linked_steps(storage: Storage, root: str) -> set[int]:
    """Return the steps that a run has as links to other folders."""
    names = [entry.name for entry in attempts.list_entries(storage, root) if entry.kind == "other"]
    return {step for name in names if (step := parse_step_folder(name)) is not None}


def _remove_folder(storage: Storage, root: str, path: str) -> None:
    """Remove the folder of a checkpoint that is gone, unless something else is in it."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            storage.remove(path)
    except StorageError:
        if not attempts.list_entries(storage, path):
            raise
    storage.sync(root)


def finish_removals(storage: Storage, root: str, annotations: Sequence[StoredAnnotation]) -> None:
    """Finish interrupted removals, and remove annotations of checkpoints that are long gone.

    `annotations` are those of the root. Saves in progress, and checkpoints that this host may not
    see yet, are not touched.
    """
    by_checkpoint: dict[CheckpointKey, list[StoredAnnotation]] = defaultdict(list)
    for annotation in annotations:
        by_checkpoint[annotation.step, annotation.attempt].append(annotation)
    if not by_checkpoint:
        return
    folders = attempts.list_folders(storage, root)
    existing = {attempt for path in folders for attempt in attempts.list_attempts(storage, path)}
    # The target of a linked step may be away for a time.
    linked = _list_linked_steps(storage, root)
    gone = {
        key: stored
        for key, stored in by_checkpoint.items()
        if key[1] not in existing and key[0] not in linked
    }
    if not gone:
        return
    now = removal.read_storage_clock(storage, root)
    for key, stored in sorted(gone.items()):
        intended = {
            value
            for annotation in stored
            if annotation.name.kind == DELETION_INTENT
            for value in annotation.values.values()
        }
        paths = [path for path in folders if posixpath.basename(path) in intended]
        for path in paths:
            removal.remove_garbage(storage, path, grace_s=inf)
            _remove_folder(storage, root, path)
        if any(removal.awaits_readers(storage, path) for path in paths):
            continue
        if intended or now - max(annotation.modified_at for annotation in stored) > GONE_S:
            remove_annotations(storage, root, key, annotations)


_log = logging.getLogger("dist_ckpt")

# A checkpoint, and the reasons why it stays, as texts; none if it should be removed.
Decision = tuple[RunCheckpoint, tuple[str, ...]]

NEWEST, NEWEST_CHECKED = "the newest", "the newest that was checked in full"
NEWEST_WHOLE = "the newest that passes a quick check"
NEWEST_UNDAMAGED = "the newest without recorded damage"
_NOT_ALLOWED = "this user may not remove it"
DAMAGED = "it is damaged, but its good parts may repair another one: remove it with --damaged"
_NOT_REQUESTED = "its removal was not requested"


def plan_prune(listing: Listing, keep: RetentionPolicy, *, damaged: bool = False) -> list[Decision]:
    """Return for each checkpoint of a run the reasons why it stays. Pure.

    Rules apply to the steps that a run may resume from, by the highest attempt of each step. If a
    rule keeps that attempt, it keeps all attempts of the step. Orphaned checkpoints stay only if
    they are pinned, tagged or leased. Rules neither count nor remove checkpoints that are recorded
    as damaged. With `damaged`, these stay only if they are protected, or if no other is left.
    Raises CorruptError if the history cannot be read.
    """
    usable = listing.usable
    paths = {info.path for info in usable}
    # `usable` is sorted by step and attempt: the last of a step is the highest.
    newest_by_step = {info.step: info for info in usable}
    candidates = [
        Candidate(*info.where, info.saved_at or 0.0, info.metrics)
        for info in newest_by_step.values()
        if info.where
    ]
    reasons_by_step = dict(zip(newest_by_step, keep.reasons(candidates), strict=True))
    newest = next((info.path for info in reversed(usable or listing.not_orphaned)), None)
    # Results of checks count for neither of two plain copies. Yet no copy may cost another step.
    checks = newest_checks(listing.annotations)
    known = [(info, checks.get(info.where)) for info in reversed(usable) if info.where]
    undamaged = next((info.path for info, check in known if not (check and check.damage)), None)
    checked = next((info.where for info, check in known if check and not check.damage), None)
    decisions = []
    for info in listing.checkpoints:
        reasons = _find_exemptions(info)
        if info.damage is not None:
            reasons += [] if damaged else [DAMAGED]
            reasons += [NEWEST] * (info.path == newest)
        elif info.path in paths:
            reasons += reasons_by_step[info.step]
            reasons += [NEWEST] * (info.path == newest)
            reasons += [NEWEST_UNDAMAGED] * (info.path == undamaged and undamaged != newest)
            reasons += [NEWEST_CHECKED] * (info.where == checked)
        decisions.append((info, (*reasons, *info.protected_by)))
    return decisions


def _find_exemptions(info: RunCheckpoint) -> list[str]:
    """Return why rules do not apply to a checkpoint, or nothing if they apply."""
    if info.link is not None:
        return [f"it is a link to {info.link}, which stays: remove the link by hand"]
    if info.state == "unreadable":
        return [f"it cannot be read: {info.problem}"]
    if info.state != "committed":
        return [f"it is {info.state}: remove it by dist-ckpt gc or rm"]
    if info.where is None:
        return ["it has no step"]
    if info.is_orphaned and info.where[1].incarnation == 0:
        # A single save, for example of the final model: the run does not resume from it.
        return ["no incarnation of the run has saved it: remove it by dist-ckpt rm"]
    return ["a save over it is in progress, or died"] * info.is_being_replaced


def find_metric_names(keep: RetentionPolicy) -> set[str]:
    """Return the names of the metrics that a policy uses."""
    return {
        value
        for _, _, named in parse_rules(str(keep))
        for name, value in named.items()
        if name in ("min", "max") and isinstance(value, str)
    }


def prune(  # noqa: PLR0913 - the run, the policy, and limits
    storage: Storage,
    root: str,
    keep: RetentionPolicy,
    *,
    is_whole: Callable[[RunCheckpoint], bool],
    incarnation: Incarnation | None = None,
    among: Collection[RunCheckpoint] | None = None,
    damaged: bool = False,
    dry_run: bool = False,
) -> list[Decision]:
    """Remove checkpoints that have no reason to stay; return the reasons of each, () if removed.

    First, finish the removals that an earlier call has left incomplete. `is_whole` is a quick
    check: of the newest checkpoint, and of older ones until one passes. With `among`, only these
    checkpoints may be removed, each at its path. `damaged` is as in `plan_prune`. A `dry_run`
    changes nothing. Checkpoints that the storage cannot read stay, and so do those that this user
    may not remove: see `is_refused`.

    Raises ConflictError, and removes no more, if an incarnation newer than `incarnation` has begun;
    without `incarnation`, if one begins during the call. NotFoundError if the folder does not
    exist, ValueError if it is a checkpoint, IncompatibleError if it needs an upgrade, also for a
    `dry_run`.
    """
    listing = list_run(storage, root, now=time.time(), with_unreadable=True)
    refuse_old(listing.root, listing.old_folders)
    if not dry_run and any(annotation.name.kind == LEASE for annotation in listing.annotations):
        now = removal.read_storage_clock(storage, root)
        listing = list_run(storage, root, now=now, with_unreadable=True)
    if listing.root != root:
        raise ValueError(f"{root} is one checkpoint: give the folder that it is in")
    if not dry_run:
        # A checkpoint that cannot be read may be the one that annotations are about.
        if all(info.state != "unreadable" for info in listing.checkpoints):
            finish_removals(storage, root, listing.annotations)
        removal.remove_temporary_records(storage, root, grace_s=GONE_S)
    # The first attempt of newer incarnations, which may need their checkpoints.
    limit = inf if incarnation is None else incarnation.first + ATTEMPTS_PER_INCARNATION
    decisions = [
        (info, (*reasons, "a newer incarnation saved it"))
        if info.where and info.where[1].number >= limit
        else (info, reasons)
        for info, reasons in plan_prune(listing, keep, damaged=damaged)
    ]
    if among is not None:
        shown = {(info.path, info.where) for info in among}
        decisions = [
            (info, reasons if reasons or (info.path, info.where) in shown else (_NOT_REQUESTED,))
            for info, reasons in decisions
        ]
    if any(not reasons for _, reasons in decisions):
        whole = next((info.path for info in reversed(listing.usable) if is_whole(info)), None)
        decisions = [
            (info, (*reasons, NEWEST_WHOLE) if info.path == whole else reasons)
            for info, reasons in decisions
        ]
    if not dry_run and any(not reasons for _, reasons in decisions):
        _sync_newest(storage, listing)
        decisions = [
            (info, reasons or _remove_if_allowed(storage, listing, info, incarnation))
            for info, reasons in decisions
        ]
    return decisions


def _remove_if_allowed(
    storage: Storage, listing: Listing, info: RunCheckpoint, incarnation: Incarnation | None
) -> tuple[str, ...]:
    """Call `_remove`, but return the error as the reason if this user has no permission."""
    try:
        return _remove(storage, listing, info, incarnation)
    except StorageError as error:
        if not is_forbidden(error):
            raise
        return (f"{_NOT_ALLOWED}: {error}",)


def is_refused(info: RunCheckpoint, reasons: Iterable[str]) -> bool:
    """Return True if a checkpoint stays because the storage cannot read or may not remove it."""
    return info.state == "unreadable" or any(why.startswith(_NOT_ALLOWED) for why in reasons)


def _sync_newest(storage: Storage, listing: Listing) -> None:
    """Sync the newest before an older one is removed: its saver may have died before the sync.

    NotFoundError if another process has removed or replaced it since the listing.
    """
    for newest in (listing.usable or listing.not_orphaned)[-1:]:
        folders = (f"{newest.path}/{newest.attempt}", newest.path) if newest.link is None else ()
        try:
            for folder in (*folders, listing.root):
                storage.sync(folder)
        except FileNotFoundError as error:
            text = f"{newest.path} was removed or replaced during the prune: prune again"
            raise NotFoundError(text) from error


def remove_dead_saves(storage: Storage, root: str, incarnation: Incarnation) -> None:
    """Remove what never becomes a checkpoint: attempts of older incarnations, and abandoned ones.

    Raises ConflictError if a newer incarnation has begun.
    """
    incarnation.check(storage)
    for path in attempts.list_folders(storage, root):
        try:
            _remove_dead_saves_at(storage, path, incarnation)
        except StorageError as error:
            if not is_forbidden(error):
                raise
            _log.warning("what dead saves have left in %s stays: %s", path, error)


def _remove_dead_saves_at(storage: Storage, path: str, incarnation: Incarnation) -> None:
    for attempt in attempts.list_attempts(storage, path):
        is_older = 0 < attempt.incarnation < incarnation.number
        if is_older and not attempts.is_decided(storage, path, attempt):
            reason = f"{incarnation.number} is a newer incarnation, and needs its space"
            attempts.try_abandon(storage, path, attempt, by="a newer run", reason=reason)
    removal.remove_garbage(storage, path, grace_s=inf)


def plan_room(listing: Listing, missing: int) -> tuple[RunCheckpoint, ...]:
    """Return the oldest checkpoints that free `missing` bytes, or () if all are too few. Pure.

    Each is older than one that was recorded as checked in full, and is not protected. Links to
    files of other checkpoints are counted as bytes, so less may become free.
    """
    usable = listing.usable
    checked = max((n for n, info in enumerate(usable) if info.is_verified), default=0)
    freed: list[RunCheckpoint] = []
    for info in usable[:checked]:
        if missing > 0 and not info.protected_by and not _find_exemptions(info):
            freed.append(info)
            missing -= info.nbytes or 0
    return () if missing > 0 else tuple(freed)


def free_oldest(
    storage: Storage,
    root: str,
    missing: int,
    *,
    is_whole: Callable[[RunCheckpoint], bool],
    incarnation: Incarnation,
) -> None:
    """Remove the oldest checkpoints of a run, although rules keep them, if that frees `missing`.

    A newer one stays that was checked in full, and passes the quick check `is_whole` now. Raises
    the errors of `prune`.
    """
    listing = list_run(storage, root, now=removal.read_storage_clock(storage, root))
    checked = next((info for info in reversed(listing.usable) if info.is_verified), None)
    oldest = plan_room(listing, missing)
    if oldest and checked is not None and is_whole(checked):
        _sync_newest(storage, listing)
        for info in oldest:
            _log.warning("%s is removed, as the next save does not fit (free_first)", info.path)
            _remove(storage, listing, info, incarnation)


def _remove(
    storage: Storage, listing: Listing, info: RunCheckpoint, incarnation: Incarnation | None
) -> tuple[str, ...]:
    """Remove one checkpoint of a run, unless it is protected; return why it stays, or ()."""
    assert info.where is not None
    root, path, (_, attempt) = listing.root, info.path, info.where

    def check() -> None:
        if incarnation is not None:
            incarnation.check(storage)
            return
        # After a new incarnation has begun, other checkpoints may be orphaned.
        newest = newest_incarnation(storage, root)
        if newest is not None and newest.number > listing.newest_incarnation:
            raise ConflictError(
                f"{root}: incarnation {newest.number} of this run, {newest.by}, has begun "
                f"during the prune, so other checkpoints may be orphaned now: prune it again"
            )

    removal.remove_garbage(storage, path, grace_s=inf)  # the attempts that it has superseded
    existing = attempts.list_attempts(storage, path)
    if attempt in existing and existing != [attempt]:
        return (_IN_PROGRESS,)
    ref = CheckpointRef(storage, root, path, info.where)
    reasons = remove_if_unprotected(
        ref,
        lambda: removal.remove(storage, path, attempt),
        other_annotations=listing.annotations,
        check=check,
    )
    if not reasons:
        _remove_folder(storage, root, path)
        same = [other.path for other in listing.checkpoints if other.where == info.where]
        _remove_annotations(ref, listing.annotations, [other for other in same if other != path])
        _log.info("pruned %s, step %s", path, info.step)
    return reasons
