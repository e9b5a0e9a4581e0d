"""The facts of the report of a run, as JSON."""

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
    check_damage,
    first_of,
)

# The limits of checkpoints, the newest, and of their metrics.
MAX_CHECKPOINTS = 1000
MAX_METRICS = 12

# Returns the progress callback of a check, from the name of the checkpoint.
ProgressOf = Callable[[str], Progress | None]


def run_facts(root: str, check: Check, progress_of: ProgressOf) -> dict[str, Json]:
    """Return the facts of the run in `root`. NotFoundError if the folder does not exist."""
    storage, folder = open_storage(root)
    listing = list_run(storage, folder, now=time.time())
    shown = listing.checkpoints[-MAX_CHECKPOINTS:]
    times = save_times(listing.annotations)
    rows = [_row(info, times, check, progress_of) for info in shown]
    problems, _ = first_of(map(bounded, listing.problems))
    try:
        incarnations = _incarnations(listing)
    except (CorruptError, IncompatibleError):
        incarnations = []  # `history_problem` has the error
    return {
        "about": "run",
        "check": check,
        "num_checkpoints": len(listing.checkpoints),
        "num_left_out": len(listing.checkpoints) - len(shown),
        "nbytes": sum(info.nbytes or 0 for info in listing.checkpoints),
        "checkpoints": list(rows),
        "num_damaged": sum(row["result"] == "damaged" for row in rows),
        "incarnations": incarnations,
        **_metrics(shown),
        **_times(shown, times),
        "history_problem": bounded(listing.history_problem),
        "problems": problems,
    }


def _row(
    info: RunCheckpoint,
    times: Mapping[CheckpointKey, SaveTimes],
    check: Check,
    progress_of: ProgressOf,
) -> dict[str, Json]:
    took = times.get(info.where) if info.where else None
    if info.state in ("open", "abandoned"):
        verification = CheckResult(why=f"it is not committed: {info.state}")
    else:
        verification = check_damage(info.path, check, progress_of(info.name))
    problems = [problem.what for problem in verification.problems]
    # Damage of the index is known without a check.
    is_damaged = info.state == "damaged" or bool(problems)
    return {
        "name": bounded(info.name),
        "step": info.step,
        "state": info.state,
        "nbytes": info.nbytes,
        "world_size": info.world_size,
        "num_tensors": info.num_tensors,
        "saved_at": info.saved_at,
        "metrics": {bounded(name): as_json(value) for name, value in sorted(info.metrics.items())},
        "protected_by": [bounded(text) for text in info.protected_by],
        "tags": [bounded(name) for name in info.tags],
        "is_pinned": info.is_pinned,
        "is_leased": bool(info.leases),
        "is_verified": info.is_verified,
        "is_orphaned": info.is_orphaned,
        "is_being_replaced": info.is_being_replaced,
        "problem": bounded(info.problem or (problems[0] if problems else "")),
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
    newest = sorted(history.incarnations.values(), key=lambda record: record.number)[-MAX_ROWS:]
    return [
        {
            "number": record.number,
            "at": record.at,
            "by": bounded(record.by),
            "restored_step": None if record.restored is None else record.restored[0],
            "why": bounded(record.why),
        }
        for record in newest
    ]


def _metrics(shown: tuple[RunCheckpoint, ...]) -> dict[str, Json]:
    """Return the newest, lowest and highest value of each metric, without orphans."""
    names = sorted({name for info in shown for name in info.metrics})
    alive = [info for info in shown if info.where and not info.is_orphaned]
    return {
        "metrics": [_metric(name, alive) for name in names[:MAX_METRICS]],
        "num_more_metrics": max(len(names) - MAX_METRICS, 0),
    }


def _metric(name: str, alive: list[RunCheckpoint]) -> Json:
    values = [(info.metrics[name], info.step) for info in alive if name in info.metrics]
    numbers = [(value, step) for value, step in values if not isnan(value)]
    row: dict[str, Json] = {"name": bounded(name), "num_values": len(values)}
    chosen = {
        "newest": values[-1] if values else None,
        "lowest": min(numbers, key=lambda item: item[0], default=None),
        "highest": max(numbers, key=lambda item: item[0], default=None),
    }
    for kind, item in chosen.items():
        row[kind] = None if item is None else {"value": as_json(item[0]), "step": item[1]}
    return row


def _times(
    shown: tuple[RunCheckpoint, ...], times: Mapping[CheckpointKey, SaveTimes]
) -> dict[str, Json]:
    """Return how long the training waited for saves, and the slowest ranks."""
    timed = {info.where: times[info.where] for info in shown if info.where and info.where in times}
    stalls = {where: of.stalled_s for where, of in timed.items() if of.stalled_s is not None}
    longest = max(stalls, key=stalls.__getitem__, default=None)
    slowest: dict[int, int] = {}
    for of in timed.values():
        if of.slowest_rank is not None:
            slowest[of.slowest_rank] = slowest.get(of.slowest_rank, 0) + 1
    ordered = sorted(slowest.items(), key=lambda item: (-item[1], item[0]))
    return {
        "num_timed": len(timed),
        "stalled_s": sum(stalls.values()) if stalls else None,
        "longest_stall": None
        if longest is None
        else {"step": longest[0], "seconds": stalls[longest]},
        "slowest_ranks": [{"rank": rank, "num_saves": num} for rank, num in ordered[:5]],
    }
