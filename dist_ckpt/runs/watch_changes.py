"""What changes in a run's folder, in words: two looks at it, compared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dist_ckpt.core.commit.attempts import Status, statuses
from dist_ckpt.core.commit.records.incarnations import newest_incarnation
from dist_ckpt.core.commit.records.liveness import last_liveness
from dist_ckpt.core.commit.records.protections import MARK
from dist_ckpt.core.format.run_records import IncarnationRecord
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, IncompatibleError
from dist_ckpt.reports import size
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.runs.retention.prune import plan_prune
from dist_ckpt.runs.retention.retention_policy import RetentionPolicy


@dataclass(frozen=True, slots=True)
class RunObservation:
    """A run as it was at a time of this host's clock.

    `start` is the newest, None if there is none or it cannot be read; `last_liveness` when it was
    last alive, by the storage's clock, None once it has ended. `writing` are the attempts that are
    being written, or were left by a crash, by the path of their checkpoint.
    """

    at: float
    listing: Listing
    start: IncarnationRecord | None = None
    writing: Mapping[str, Status] = field(default_factory=dict)
    last_liveness: float | None = None

    @property
    def newest(self) -> RunCheckpoint | None:
        """The newest checkpoint that the run may go on from."""
        there = () if self.listing.history_problem else self.listing.alive
        return there[-1] if there else None


def observe_run(storage: Storage, root: str) -> RunObservation:
    """Look at a run. NotFoundError if there is no such folder, ValueError if it is a checkpoint."""
    now = time.time()
    listing = list_run(storage, root, now=now)
    if listing.root != root:
        raise ValueError(f"{root} is one checkpoint: give the folder that it is in")
    try:
        start = newest_incarnation(storage, root)
    except (CorruptError, IncompatibleError):  # the listing says so
        start = None
    writing: dict[str, Status] = {}
    for one in listing.checkpoints:
        if one.state == "open" or one.is_being_replaced:
            for status in statuses(storage, one.path):
                if status.state == "open":  # the last counts
                    writing[one.path] = status
    alive_at = None if start is None else last_liveness(storage, root, start.number)
    return RunObservation(now, listing, start, writing, alive_at)


def kept_by(look: RunObservation, keep: RetentionPolicy | None) -> dict[str, tuple[str, ...]]:
    """Return what keeps each checkpoint, by its path; without `keep` only what no rule says. Pure.

    Nothing while it is not known what is left behind.
    """
    if look.listing.history_problem:
        return {}
    return {one.path: told for one, told in plan_prune(look.listing, keep or RetentionPolicy({}))}


def changes(
    before: RunObservation | None, after: RunObservation, keep: RetentionPolicy | None = None
) -> Iterator[str]:
    """Yield what has changed between two looks, in words; `keep` is what prunes the run. Pure."""
    old = {one.path: one for one in before.listing.checkpoints} if before else {}
    if after.start and (not before or before.start != after.start):
        yield describe_incarnation(after.start)
    elif after.start and before and before.last_liveness and not after.last_liveness:
        yield f"start {after.start.number} has ended"
    if before is None:
        yield _told_first(after)
        yield from (f"{_named_at(path)} is being written" for path in after.writing)
        return
    for one in after.listing.checkpoints:
        if one.path in after.writing and one.path not in before.writing:
            yield f"{_named_at(one.path)} is being written"
        yield from _of_one(old.pop(one.path, None), one)
    for gone in old.values():
        yield f"{_named(gone)} is gone: {_why_gone(gone, before, after, keep)}"
    problem = after.listing.history_problem
    if problem and problem != before.listing.history_problem:
        yield f"what is left behind is not known: {problem}"


def describe_incarnation(start: IncarnationRecord) -> str:
    """Return who has begun to write, and with what."""
    done = "begins anew" if start.restored is None else f"goes on from step {start.restored[0]}"
    return f"start {start.number}, {start.by}, {done}: {start.why}"


def _told_first(look: RunObservation) -> str:
    count = sum(one.state == "committed" for one in look.listing.checkpoints)
    if not count:
        return "no checkpoints yet"
    newest = "there is none that a run may go on from"
    if look.newest is not None:
        newest = f"the newest is of step {look.newest.step}"
    return f"{count} checkpoint{'s' * (count != 1)}: {newest}"


def _of_one(before: RunCheckpoint | None, after: RunCheckpoint) -> Iterator[str]:
    name = _named(after)
    if after.state != "committed":
        if after.state != "open" and (before is None or before.state != after.state):
            yield f"{name} is {after.state}: {after.problem}"
        return
    if before is None or before.attempt != after.attempt:
        again = " again" if before is not None and before.attempt is not None else ""
        ranks = f"{after.world_size} rank{'s' * (after.world_size != 1)}"
        yield f"{name} is durable{again}: {size(after.nbytes or 0)} by {ranks}"
        before = replace(after, metrics={}, guards=(), is_verified=False, is_left_behind=False)
    if new := set(_told_metrics(after)) - set(_told_metrics(before)):
        yield f"{name}: {', '.join(sorted(new))}"
    if after.is_verified > before.is_verified:
        yield f"{name} was checked in full"
    if after.is_left_behind > before.is_left_behind:
        yield f"{name} is left behind: the run does not go on from it"
    yield from (f"{name} is kept: {why}" for why in after.guards if why not in before.guards)
    yield from (
        f"{name} is not kept any more: {why}" for why in before.guards if why not in after.guards
    )


def _told_metrics(one: RunCheckpoint) -> list[str]:
    """Return what was measured, as text, in which a nan is like another."""
    return [f"{name}={value:g}" for name, value in one.metrics.items()]


def _why_gone(
    one: RunCheckpoint, before: RunObservation, after: RunObservation, keep: RetentionPolicy | None
) -> str:
    told = []
    if one.state != "committed":
        told.append("what was left of a save was removed")
    elif one.is_left_behind:
        told.append("it was left behind")
    elif keep is not None:
        told.append(_why_not_kept(one, after, keep))
    facts = (*before.listing.facts, *after.listing.facts)
    marked = {
        fact.by for fact in facts if fact.name.kind == MARK and fact.attempt.name == one.attempt
    }
    told += [f"removed by {who or 'somebody'}" for who in sorted(marked)]
    return "; ".join(filter(None, told)) or "it was pruned or deleted"


def _why_not_kept(one: RunCheckpoint, after: RunObservation, keep: RetentionPolicy) -> str:
    """Say whether the rules would keep it beside what there is now."""
    there: Sequence[RunCheckpoint] = (*after.listing.checkpoints, one)
    listing = replace(after.listing, checkpoints=tuple(sorted(there, key=lambda x: x.step or 0)))
    told = kept_by(replace(after, listing=listing), keep).get(one.path)
    if told is None:
        return ""
    return f"although it was kept by {', '.join(told)}" if told else "no rule keeps it"


def _named(one: RunCheckpoint) -> str:
    return _named_at(one.path) if one.step is None else f"step {one.step}"


def _named_at(path: str) -> str:
    return path.rpartition("/")[2]
