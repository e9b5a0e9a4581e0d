"""Remove the checkpoints of a run that no rule and no guard keeps: plan, then act."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from dist_ckpt.core.commit import removal
from dist_ckpt.core.commit.records.incarnations import Incarnation, newest_incarnation
from dist_ckpt.core.commit.records.leases import CheckpointRef
from dist_ckpt.core.commit.records.protections import HOLD, Where
from dist_ckpt.core.format.filenames import ATTEMPTS_PER_INCARNATION
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import ConflictError
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.runs.retention.deletion import finish, remove_at
from dist_ckpt.runs.retention.policy_text import parse_rules
from dist_ckpt.runs.retention.retention_policy import Candidate, RetentionPolicy

_log = logging.getLogger("dist_ckpt")

# A checkpoint, and all that keeps it, in words; nothing if it is to be removed.
Decision = tuple[RunCheckpoint, tuple[str, ...]]

NEWEST, NEWEST_CHECKED = "the newest", "the newest that was checked in full"
NEWEST_WHOLE = "the newest that is whole by a quick check"


def plan_prune(listing: Listing, keep: RetentionPolicy) -> list[Decision]:
    """Return of each checkpoint of a run what keeps it. Pure.

    Rules look at steps that a run may go on from: of one step at the highest attempt, and what they
    keep of it they keep of all its attempts. What a start of the run has left behind is kept by
    pins, tags and holds only. CorruptError if it is not known what is left behind.
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
        told = [*_never(one)]
        if one.path in paths:
            told += kept[one.step]
            told += [NEWEST] * (one.path == newest)
            told += [NEWEST_CHECKED] * (one.path == checked)
        decisions.append((one, (*told, *one.guards)))
    return decisions


def _never(one: RunCheckpoint) -> list[str]:
    """Return why something is no matter of a rule."""
    if one.state != "committed":
        return [f"it is {one.state}: that is for dist-ckpt gc, or rm"]
    if one.where is None:
        return ["it has no step"]
    if one.is_left_behind and one.where[1].start == 0:
        # A save of its own, say of the final model: to a run it is what it does not go on from.
        return ["no start of the run has saved it: that is for dist-ckpt rm"]
    return ["a save over it is under way, or died"] * one.is_being_replaced


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
    """Remove what nothing keeps; return of each checkpoint what keeps it, or nothing if it is gone.

    First what an earlier call left half done is finished. `is_whole` is a quick check, of the
    newest one and of older ones until one passes. With `run`, a start of a run, nothing is removed
    once a newer start has begun: ConflictError; so it is without, if a start has begun meanwhile.
    With `among`, others than these stay, also the same ones elsewhere. A `dry_run` changes nothing.
    NotFoundError if there is no such folder, ValueError if it is a checkpoint.
    """
    listing = list_run(storage, root, now=time.time())
    if not dry_run and any(fact.name.kind == HOLD for fact in listing.facts):
        listing = list_run(storage, root, now=removal.now_at(storage, root))
    if listing.root != root:
        raise ValueError(f"{root} is one checkpoint: give the folder that it is in")
    if not dry_run:
        finish(storage, root, listing.facts)
    decisions = [_spare_newer(one, run) for one in plan_prune(listing, keep)]
    if among is not None:
        shown = {(one.path, one.where) for one in among}
        decisions = [_spare_others(one, shown) for one in decisions]
    if any(not told for _, told in decisions):
        decisions = _spare_whole(listing, decisions, is_whole)
    if not dry_run and any(not told for _, told in decisions):
        _make_newest_durable(storage, listing)
        decisions = [(one, told or _remove(storage, listing, one, run)) for one, told in decisions]
    return decisions


def _spare_newer(decision: Decision, run: Incarnation | None) -> Decision:
    """Leave what a newer start has saved: nothing is known here of what that needs."""
    one, told = decision
    if (
        run is not None
        and one.where
        and one.where[1].number >= run.first + ATTEMPTS_PER_INCARNATION
    ):
        told = (*told, "a newer start saved it")
    return one, told


def _spare_others(decision: Decision, shown: set[tuple[str, Where | None]]) -> Decision:
    one, told = decision
    is_asked = (one.path, one.where) in shown
    return one, (told if told or is_asked else ("its removal was not asked for",))


def _spare_whole(
    listing: Listing, decisions: list[Decision], is_whole: Callable[[RunCheckpoint], bool]
) -> list[Decision]:
    whole = next((one.path for one in reversed(listing.alive) if is_whole(one)), None)
    return [(one, (*told, NEWEST_WHOLE) if one.path == whole else told) for one, told in decisions]


def _make_newest_durable(storage: Storage, listing: Listing) -> None:
    """Before an older one goes: whoever saved the newest may have died before it did so."""
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
            _check_no_start_since(storage, listing)

    copies = [o.path for o in listing.checkpoints if o.where == one.where and o.path != one.path]
    subject = CheckpointRef(storage, listing.root, one.path, one.where)
    told = remove_at(subject, facts=listing.facts, copies=copies, check=check)
    if not told:
        _log.info("pruned %s, step %s", one.path, one.step)
    return told


def _check_no_start_since(storage: Storage, listing: Listing) -> None:
    """Look for a start that may have left behind what is kept, and go on from what is not."""
    newest = newest_incarnation(storage, listing.root)
    if newest is not None and newest.number > listing.newest_incarnation:
        raise ConflictError(
            f"{listing.root}: start {newest.number} of this run, {newest.by}, has begun while it "
            f"was pruned, so that other checkpoints matter now: prune it again"
        )
