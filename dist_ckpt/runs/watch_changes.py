"""Describe what changes in a run's folder: compare two observations of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from dist_ckpt.core.commit.attempts import Status, list_statuses
from dist_ckpt.core.commit.records.incarnations import last_liveness, newest_incarnation
from dist_ckpt.core.commit.records.protections import DELETION_INTENT
from dist_ckpt.core.format.run_records import IncarnationRecord
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, IncompatibleError
from dist_ckpt.message_text import format_count, format_size
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.runs.prune import plan_prune
from dist_ckpt.runs.retention_policy import RetentionPolicy


@dataclass(frozen=True, slots=True)
class RunObservation:
    """A run as it was at a time of this host's clock.

    `incarnation` is the newest incarnation; None if none is recorded, or its record cannot be read.
    `last_liveness` is the time of its last heartbeat by the storage's clock; None after its end.
    `writing` has the attempts in progress, or left by a crash, by the path of their checkpoint.
    """

    at: float
    listing: Listing
    incarnation: IncarnationRecord | None = None
    writing: Mapping[str, Status] = field(default_factory=dict)
    last_liveness: float | None = None

    @property
    def newest(self) -> RunCheckpoint | None:
        """The newest checkpoint that the run may resume from."""
        usable = () if self.listing.history_problem else self.listing.usable
        return usable[-1] if usable else None


def observe_run(storage: Storage, root: str) -> RunObservation:
    """Observe a run. NotFoundError without the folder, ValueError if it is a checkpoint."""
    now = time.time()
    listing = list_run(storage, root, now=now)
    if listing.root != root:
        raise ValueError(f"{root} is one checkpoint: give the folder that it is in")
    with_old = bool(listing.old_folders)
    try:
        incarnation = newest_incarnation(storage, root, with_old=with_old)
    except (CorruptError, IncompatibleError):  # the listing says so
        incarnation = None
    writing: dict[str, Status] = {}
    for info in listing.checkpoints:
        if info.state == "open" or info.is_being_replaced:
            for status in list_statuses(storage, info.path):
                if status.state == "open":  # the last counts
                    writing[info.path] = status
    seen_at = None
    if incarnation is not None:
        seen_at = last_liveness(storage, root, incarnation.number, with_old=with_old)
    return RunObservation(now, listing, incarnation, writing, seen_at)


def kept_by(seen: RunObservation, keep: RetentionPolicy | None) -> dict[str, tuple[str, ...]]:
    """Return the reasons why each checkpoint stays, by its path. Pure.

    Without `keep` only protections are reasons. Empty if the history cannot be read.
    """
    if seen.listing.history_problem:
        return {}
    decisions = plan_prune(seen.listing, keep or RetentionPolicy({}))
    return {info.path: reasons for info, reasons in decisions}


def changes(
    before: RunObservation | None, after: RunObservation, keep: RetentionPolicy | None = None
) -> Iterator[str]:
    """Yield the changes between two observations as texts; `keep` prunes the run. Pure."""
    old = {info.path: info for info in before.listing.checkpoints} if before else {}
    newest = after.incarnation
    if newest and (not before or before.incarnation != newest):
        yield describe_incarnation(newest)
    elif newest and before and before.last_liveness and not after.last_liveness:
        yield f"incarnation {newest.number} has ended"
    if before is None:
        yield _describe_first(after)
        yield from (f"{_folder_name(path)} is being written" for path in after.writing)
        return
    for info in after.listing.checkpoints:
        if info.path in after.writing and info.path not in before.writing:
            yield f"{_folder_name(info.path)} is being written"
        yield from _describe_changes(old.pop(info.path, None), info)
    for gone in old.values():
        yield f"{_name_checkpoint(gone)} is gone: {_explain_removal(gone, before, after, keep)}"
    problem = after.listing.history_problem
    if problem and problem != before.listing.history_problem:
        yield f"the orphaned checkpoints are unknown: {problem}"


def describe_incarnation(record: IncarnationRecord) -> str:
    """Return a text about an incarnation: its process, and what it resumed from."""
    begin = "begins anew"
    if record.restored is not None:
        begin = f"resumes from step {record.restored[0]}"
    return f"incarnation {record.number}, {record.by}, {begin}: {record.why}"


def _describe_first(seen: RunObservation) -> str:
    count = sum(info.state == "committed" for info in seen.listing.checkpoints)
    if not count:
        return "no checkpoints yet"
    newest = "there is none that a run may resume from"
    if seen.newest is not None:
        newest = f"the newest is of step {seen.newest.step}"
    return f"{format_count(count, 'checkpoint')}: {newest}"


def _describe_changes(before: RunCheckpoint | None, after: RunCheckpoint) -> Iterator[str]:
    name = _name_checkpoint(after)
    if after.state != "committed":
        if after.state != "open" and (before is None or before.state != after.state):
            yield f"{name} is {after.state}: {after.problem}"
        return
    if before is None or before.attempt != after.attempt:
        again = " again" if before is not None and before.attempt is not None else ""
        ranks = format_count(after.world_size or 0, "rank")
        yield f"{name} is durable{again}: {format_size(after.nbytes or 0)} by {ranks}"
        before = replace(
            after, metrics={}, protected_by=(), is_verified=False, damage=None, is_orphaned=False
        )
    if new := set(_format_metrics(after)) - set(_format_metrics(before)):
        yield f"{name}: {', '.join(sorted(new))}"
    if after.is_verified > before.is_verified:
        yield f"{name} was checked in full"
    if after.damage is not None and before.damage is None:
        yield f"{name} is damaged: {after.damage}"
    if after.is_orphaned > before.is_orphaned:
        yield f"{name} is orphaned: the run does not resume from it"
    yield from (
        f"{name} is kept: {why}" for why in after.protected_by if why not in before.protected_by
    )
    yield from (
        f"{name} is not kept any more: {why}"
        for why in before.protected_by
        if why not in after.protected_by
    )


def _format_metrics(info: RunCheckpoint) -> list[str]:
    """Return metrics as texts. Texts of two nan are equal, but two nan are not."""
    return [f"{name}={value:g}" for name, value in info.metrics.items()]


def _explain_removal(
    info: RunCheckpoint, before: RunObservation, after: RunObservation, keep: RetentionPolicy | None
) -> str:
    reasons = []
    if info.state != "committed":
        reasons.append("what was left of a save was removed")
    elif info.is_orphaned:
        reasons.append("it was orphaned")
    elif keep is not None:
        reasons.append(_explain_prune(info, after, keep))
    annotations = (*before.listing.annotations, *after.listing.annotations)
    removers = {
        annotation.by
        for annotation in annotations
        if annotation.name.kind == DELETION_INTENT and annotation.attempt.name == info.attempt
    }
    reasons += [f"removed by {name or 'another process'}" for name in sorted(removers)]
    return "; ".join(filter(None, reasons)) or "it was pruned or deleted"


def _explain_prune(info: RunCheckpoint, after: RunObservation, keep: RetentionPolicy) -> str:
    """Return a text that says if the rules would keep the checkpoint, were it still there."""
    checkpoints = sorted((*after.listing.checkpoints, info), key=lambda other: other.step or 0)
    listing = replace(after.listing, checkpoints=tuple(checkpoints))
    reasons = kept_by(replace(after, listing=listing), keep).get(info.path)
    if reasons is None:
        return ""
    return f"although it was kept by {', '.join(reasons)}" if reasons else "no rule keeps it"


def _name_checkpoint(info: RunCheckpoint) -> str:
    return _folder_name(info.path) if info.step is None else f"step {info.step}"


def _folder_name(path: str) -> str:
    return path.rpartition("/")[2]
