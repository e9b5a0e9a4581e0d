"""Remove the checkpoints of a run that no rule and no protection keeps: plan, then act."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from dist_ckpt.core.commit import removal
from dist_ckpt.core.commit.records.incarnations import Incarnation, newest_incarnation
from dist_ckpt.core.commit.records.leases import CheckpointRef
from dist_ckpt.core.commit.records.protections import LEASE, Where
from dist_ckpt.core.commit.records.record_store import refuse_old
from dist_ckpt.core.format.filenames import ATTEMPTS_PER_INCARNATION
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import ConflictError
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.runs.retention.deletion import finish, remove_at
from dist_ckpt.runs.retention.policy_text import parse_rules
from dist_ckpt.runs.retention.retention_policy import Candidate, RetentionPolicy

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


def _spare_others(decision: Decision, shown: set[tuple[str, Where | None]]) -> Decision:
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
