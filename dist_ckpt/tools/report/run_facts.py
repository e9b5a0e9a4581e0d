"""What a report says of a run, as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import isnan

from dist_ckpt.core.commit.records.incarnations import read_history
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.format.index.model_description import as_json
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.storage import open_storage
from dist_ckpt.errors import CorruptError, IncompatibleError
from dist_ckpt.reports import Progress
from dist_ckpt.runs.annotations import SaveTimes, save_times
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.tools.report.checkpoint_facts import (
    MAX_ROWS,
    Check,
    CheckResult,
    bounded,
    checked,
    first_of,
)

# Of a run the newest so many checkpoints are shown, of their metrics so many.
MAX_CHECKPOINTS = 1000
MAX_METRICS = 12

# Makes what is called while a checkpoint is checked (bytes done, bytes in all), of its name.
ProgressOf = Callable[[str], Progress | None]


def run_facts(root: str, check: Check, progress_of: ProgressOf) -> dict[str, Json]:
    """Return what there is to say of the run in `root`. NotFoundError without such a folder."""
    storage, folder = open_storage(root)
    listing = list_run(storage, folder, now=time.time())
    shown = listing.checkpoints[-MAX_CHECKPOINTS:]
    times = save_times(listing.annotations)
    rows = [_row(one, times, check, progress_of) for one in shown]
    problems, _ = first_of(map(bounded, listing.problems))
    try:
        incarnations = _incarnations(listing)
    except (CorruptError, IncompatibleError):
        incarnations = []  # `history_problem` says why
    return {
        "about": "run",
        "check": check,
        "num_checkpoints": len(listing.checkpoints),
        "num_left_out": len(listing.checkpoints) - len(shown),
        "nbytes": sum(one.nbytes or 0 for one in listing.checkpoints),
        "checkpoints": list(rows),
        "num_damaged": sum(one["result"] == "damaged" for one in rows),
        "incarnations": incarnations,
        **_metrics(shown),
        **_times(shown, times),
        "history_problem": bounded(listing.history_problem),
        "problems": problems,
    }


def _row(
    one: RunCheckpoint,
    times: Mapping[CheckpointKey, SaveTimes],
    check: Check,
    progress_of: ProgressOf,
) -> dict[str, Json]:
    took = times.get(one.where) if one.where else None
    if one.state in ("open", "abandoned"):
        verification = CheckResult(why=f"it is not committed: {one.state}")
    else:
        verification = checked(one.path, check, progress_of(one.name))
    problems = [problem.what for problem in verification.problems]
    # Where the index cannot be read that is known without any check.
    is_damaged = one.state == "damaged" or bool(problems)
    return {
        "name": bounded(one.name),
        "step": one.step,
        "state": one.state,
        "nbytes": one.nbytes,
        "world_size": one.world_size,
        "num_tensors": one.num_tensors,
        "saved_at": one.saved_at,
        "metrics": {bounded(name): as_json(value) for name, value in sorted(one.metrics.items())},
        "protected_by": [bounded(text) for text in one.protected_by],
        "tags": [bounded(name) for name in one.tags],
        "is_pinned": one.is_pinned,
        "is_leased": bool(one.leases),
        "is_verified": one.is_verified,
        "is_orphaned": one.is_orphaned,
        "is_being_replaced": one.is_being_replaced,
        "problem": bounded(one.problem or (problems[0] if problems else "")),
        "result": "damaged" if is_damaged else verification.result,
        "why": bounded(verification.why),
        "has_failed": verification.has_failed,
        "num_problems": max(len(problems), int(is_damaged)),
        "seconds": {bounded(phase): s for phase, s in sorted(took.seconds.items())} if took else {},
        "stalled_s": took.stalled_s if took else None,
        "slowest_rank": took.slowest_rank if took else None,
        "slowest_s": took.slowest_s if took else None,
    }


def _incarnations(listing: Listing) -> list[Json]:
    storage, root = open_storage(listing.root)
    history = read_history(storage, root, with_old=bool(listing.old_folders))
    newest = sorted(history.incarnations.values(), key=lambda one: one.number)[-MAX_ROWS:]
    return [
        {
            "number": one.number,
            "at": one.at,
            "by": bounded(one.by),
            "restored_step": None if one.restored is None else one.restored[0],
            "why": bounded(one.why),
        }
        for one in newest
    ]


def _metrics(shown: tuple[RunCheckpoint, ...]) -> dict[str, Json]:
    """Return of each metric the newest, lowest and highest value; of what is not orphaned."""
    names = sorted({name for one in shown for name in one.metrics})
    alive = [one for one in shown if one.where and not one.is_orphaned]
    return {
        "metrics": [_metric(name, alive) for name in names[:MAX_METRICS]],
        "num_more_metrics": max(len(names) - MAX_METRICS, 0),
    }


def _metric(name: str, alive: list[RunCheckpoint]) -> Json:
    found = [(one.metrics[name], one.step) for one in alive if name in one.metrics]
    numbers = [(value, step) for value, step in found if not isnan(value)]
    row: dict[str, Json] = {"name": bounded(name), "num_values": len(found)}
    chosen = {
        "newest": found[-1] if found else None,
        "lowest": min(numbers, key=lambda one: one[0], default=None),
        "highest": max(numbers, key=lambda one: one[0], default=None),
    }
    for which, one in chosen.items():
        row[which] = None if one is None else {"value": as_json(one[0]), "step": one[1]}
    return row


def _times(
    shown: tuple[RunCheckpoint, ...], times: Mapping[CheckpointKey, SaveTimes]
) -> dict[str, Json]:
    """Return for how long the training stood still for saves, and which rank was slowest."""
    known = {one.where: times[one.where] for one in shown if one.where and one.where in times}
    stalls = {where: of.stalled_s for where, of in known.items() if of.stalled_s is not None}
    longest = max(stalls, key=stalls.__getitem__, default=None)
    slowest: dict[int, int] = {}
    for of in known.values():
        if of.slowest_rank is not None:
            slowest[of.slowest_rank] = slowest.get(of.slowest_rank, 0) + 1
    ordered = sorted(slowest.items(), key=lambda one: (-one[1], one[0]))
    return {
        "num_timed": len(known),
        "stalled_s": sum(stalls.values()) if stalls else None,
        "longest_stall": None
        if longest is None
        else {"step": longest[0], "seconds": stalls[longest]},
        "slowest_ranks": [{"rank": rank, "num_saves": num} for rank, num in ordered[:5]],
    }
