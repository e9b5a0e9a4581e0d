"""Collect the facts for the report of a checkpoint or a run, as JSON of bounded size."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Literal

from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.checkpoint.verify_checkpoint import Level, Problem, VerifyReport, verify
from dist_ckpt.core.commit.records.incarnations import read_history
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.commit.records.recorded_checks import find_newest_good
from dist_ckpt.core.format.index.model_description import CONFIG, KIND, as_json, iterate_leaves
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.storage import open_storage
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError
from dist_ckpt.reports import Progress
from dist_ckpt.runs.listing import RunCheckpoint, list_run
from dist_ckpt.runs.metrics import SaveTimes, is_speed, save_times
from dist_ckpt.tools.inspect.describe import summarize
from dist_ckpt.tools.report.report_sizes import clip, component_sizes, rank_sizes, sizes_tree

# A list, such as a configuration, has at most this many rows.
MAX_ROWS = 300


def limit_rows(rows: Iterable[Json]) -> tuple[list[Json], int]:
    """Return the first `MAX_ROWS` rows, and the number of the other rows."""
    rows = list(rows)
    return rows[:MAX_ROWS], max(len(rows) - MAX_ROWS, 0)


def _select(value: object, *names: str) -> dict[str, Json]:
    return {name: getattr(value, name) for name in names}


def _text_pairs(values: Mapping[str, object]) -> tuple[list[Json], int]:
    """Return names and values of nested mappings as texts, and the number of left out rows."""
    return limit_rows([clip(name), clip(text)] for name, text in iterate_leaves(values) if name)


# The check of a report: none, or a level of `dist_ckpt.verify`.
Check = Literal["none", "quick", "full"]
CHECKS: tuple[Check, ...] = ("none", "quick", "full")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check. Without a report, `why` is the reason: not requested, or failed.

    `recorded` is the damage that an earlier check has found, unless a full check withdraws it.
    """

    report: VerifyReport | None = None
    why: str = ""
    has_failed: bool = False
    recorded: str | None = None

    @property
    def result(self) -> str:
        """The result: "ok", "damaged" or "not checked"."""
        if self.problems:
            return "damaged"
        return "not checked" if self.report is None else "ok"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems that the check found, or the recorded one."""
        if self.report is not None and (self.report.problems or self.report.level == "full"):
            return self.report.problems
        return (Problem("", None, None, None, self.recorded),) if self.recorded else ()

    def to_json(self) -> dict[str, Json]:
        """Return the result as JSON, with the first problems."""
        notes = () if self.report is None else self.report.notes
        return {
            "result": self.result,
            "level": None if self.report is None else self.report.level,
            "why": clip(self.why),
            "has_failed": self.has_failed,
            "problems": limit_rows(map(_problem_row, self.problems))[0],
            "num_problems": len(self.problems),
            "notes": limit_rows(map(clip, notes))[0],
            "nbytes_checked": 0 if self.report is None else self.report.nbytes_checked,
        }


def check_damage(
    path: str, info: RunCheckpoint | None, check: Check, progress: Progress | None
) -> CheckResult:
    """Check a checkpoint for damage, unless `check` is "none"."""
    recorded = None if info is None else info.damage
    if check == "none":
        return CheckResult(why="no check was requested", recorded=recorded)
    level: Level = check
    try:
        report = verify(path, level=level, progress=progress, opener=OPENER)
        if report.is_unread:
            return CheckResult(why=str(report.problems[0]), has_failed=True, recorded=recorded)
        return CheckResult(report, recorded=recorded)
    except CheckpointError as error:
        return CheckResult(why=str(error), has_failed=True, recorded=recorded)


def _problem_row(problem: Problem) -> Json:
    rows = problem.rows
    return {
        "file": clip(problem.file),
        "rank": problem.rank,
        "tensor": None if problem.tensor is None else clip(problem.tensor),
        "rows": None if rows is None else [rows.start, rows.stop],
        "what": clip(problem.what) if problem.cause is None else "lost with the file",
        "is_unread": problem.is_unread,
    }


def checkpoint_facts(
    path: str, info: RunCheckpoint | None, check: Check, progress: Progress | None
) -> dict[str, Json]:
    """Return the facts of the checkpoint at `path`. `info` has its annotations, if it is in a run.

    If damage prevents opening it, `unreadable` is the reason, and most facts are missing. Raises
    NotFoundError if it does not exist.
    """
    facts: dict[str, Json] = {"about": "checkpoint", "unreadable": None}
    has_digests = True
    try:
        with checkpoint.open(path, opener=OPENER) as ck:
            facts |= _read_contents(ck)
            has_digests = ck.index.has_digests
    except CorruptError as error:
        facts["unreadable"] = clip(str(error))
    # A checkpoint outside of a run has no annotations.
    metrics = [] if info is None else sorted(info.metrics.items())
    notes = [] if info is None else [*info.protected_by, *["orphaned"] * info.is_orphaned]
    facts["metrics"] = [[clip(name), as_json(value)] for name, value in metrics]
    verification = CheckResult(why="files of another system have no checksums")
    if has_digests:
        verification = check_damage(path, info, check, progress)
    if verification.problems and (newest := find_newest_good(*open_storage(path))) is not None:
        notes.append(f"the newest good checkpoint is {newest}")
    facts["notes"] = [clip(text) for text in notes]
    return {**facts, "verification": verification.to_json()}


def _read_contents(ck: Checkpoint) -> dict[str, Json]:
    summary = summarize(ck)
    tensors = {fqn: info for fqn, info in ck.tensors.items() if info.alias_of is None}
    config, num_more_config = _text_pairs(summary.config or {})
    metadata, num_more_metadata = _text_pairs(
        {name: value for name, value in summary.metadata.items() if name not in (CONFIG, KIND)}
    )
    per_rank, num_more_per_rank = limit_rows([clip(f), num] for f, num in summary.per_rank.items())
    replicas, num_more_replicas = _text_pairs(summary.replicas)
    problem = summary.config_problem
    return {
        **_select(summary, "step", "kind", "attempt", "saved_at", "world_size", "nbytes"),
        **_select(summary, "num_files", "num_tensors", "num_values"),
        # None if they cannot be read. The verification reports the damage.
        **_select(summary, "num_parameters", "num_trainable"),
        "saved_by": [[clip(name), clip(text)] for name, text in summary.saved_by.items()],
        "mesh": [[clip(name), size] for name, size in summary.mesh],
        "tensor_nbytes": sum(summary.nbytes_by_component.values()),
        "num_tied": summary.num_aliases,
        "tree": sizes_tree(ck.tensors),
        **component_sizes(tensors),
        "ranks": rank_sizes(ck.index),
        "attached": [[clip(name), nbytes] for name, nbytes in summary.attached.items()],
        "config": config,
        "config_problem": None if problem is None else clip(problem),
        "num_more_config": num_more_config,
        "metadata": metadata,
        "num_more_metadata": num_more_metadata,
        "per_rank": per_rank,
        "num_more_per_rank": num_more_per_rank,
        "replicas": replicas,
        "num_more_replicas": num_more_replicas,
    }


# A report shows at most this many checkpoints, the newest, and this many metrics.
MAX_CHECKPOINTS = 1000
MAX_METRICS = 12

# Returns the progress callback of a check, from the name of the checkpoint.
ProgressOf = Callable[[str], Progress | None]


def run_facts(root: str, check: Check, progress_of: ProgressOf) -> dict[str, Json]:
    """Return the facts of the run in `root`. NotFoundError if the folder does not exist."""
    storage, folder = open_storage(root)
    listing = list_run(storage, folder, now=time.time(), with_unreadable=True)
    shown = listing.checkpoints[-MAX_CHECKPOINTS:]
    times = save_times(listing.annotations)
    rows = [_checkpoint_row(info, times, check, progress_of) for info in shown]
    try:
        storage, folder = open_storage(listing.root)
        history = read_history(storage, folder, with_old=bool(listing.old_folders))
    except (CorruptError, IncompatibleError):
        records = []  # `listing.history_problem` has the error
    else:
        records = sorted(history.incarnations.values(), key=lambda record: record.number)
    return {
        "about": "run",
        "check": check,
        "num_checkpoints": len(listing.checkpoints),
        "num_left_out": len(listing.checkpoints) - len(shown),
        "nbytes": sum(info.nbytes or 0 for info in listing.checkpoints),
        "checkpoints": [*rows],
        "num_damaged": sum(row["result"] == "damaged" for row in rows),
        "incarnations": [
            {
                "number": record.number,
                "at": record.at,
                "by": clip(record.by),
                "restored_step": None if record.restored is None else record.restored[0],
                "why": clip(record.why),
            }
            for record in records[-MAX_ROWS:]
        ],
        **_summarize_metrics(shown),
        **_summarize_times(shown, times),
        "history_problem": clip(listing.history_problem),
        "problems": limit_rows(map(clip, listing.problems))[0],
    }


def _checkpoint_row(
    info: RunCheckpoint,
    times: Mapping[CheckpointKey, SaveTimes],
    check: Check,
    progress_of: ProgressOf,
) -> dict[str, Json]:
    took = (times.get(info.where) if info.where else None) or SaveTimes({}, None, None, None)
    if info.state in ("open", "abandoned"):
        verification = CheckResult(why=f"it is not committed: {info.state}")
    elif info.link and info.state == "damaged":
        verification = CheckResult(why=info.problem or "")
    else:
        verification = check_damage(info.path, info, check, progress_of(info.name))
    problems = [problem.what for problem in verification.problems]
    # Damage of the index is detected without a check.
    is_damaged = info.state == "damaged" or bool(problems)
    return {
        **_select(info, "step", "state", "nbytes", "world_size", "num_tensors", "saved_at"),
        **_select(info, "is_pinned", "is_orphaned", "is_being_replaced"),
        **_select(took, "stalled_s", "slowest_rank", "slowest_s"),
        "name": clip(info.name),
        "metrics": {clip(name): as_json(value) for name, value in sorted(info.metrics.items())},
        "protected_by": [clip(text) for text in info.protected_by],
        "tags": [clip(name) for name in info.tags],
        "is_leased": bool(info.leases),
        "is_verified": info.is_verified and not is_damaged,
        "problem": clip(info.problem or (problems[0] if problems else "")),
        "result": "damaged" if is_damaged else verification.result,
        "why": clip(verification.why),
        "has_failed": verification.has_failed,
        "num_problems": max(len(problems), int(is_damaged)),
        "seconds": {clip(phase): seconds for phase, seconds in sorted(took.seconds.items())},
    }


def _summarize_metrics(shown: tuple[RunCheckpoint, ...]) -> dict[str, Json]:
    """Return the newest, lowest and highest value of each metric. Orphaned ones do not count."""
    names = sorted(
        {name for info in shown for name in info.metrics}, key=lambda n: (is_speed(n), n)
    )
    alive = [info for info in shown if info.where and not info.is_orphaned]
    rows: list[Json] = []
    for name in names[:MAX_METRICS]:
        values = [(info.metrics[name], info.step) for info in alive if name in info.metrics]
        numbers = [item for item in values if not isnan(item[0])]
        chosen = {
            "newest": values[-1] if values else None,
            "lowest": min(numbers, key=lambda item: item[0], default=None),
            "highest": max(numbers, key=lambda item: item[0], default=None),
        }
        row: dict[str, Json] = {"name": clip(name), "num_values": len(values)}
        for kind, item in chosen.items():
            row[kind] = None if item is None else {"value": as_json(item[0]), "step": item[1]}
        rows.append(row)
    return {"metrics": rows, "num_more_metrics": max(len(names) - MAX_METRICS, 0)}


def _summarize_times(
    shown: tuple[RunCheckpoint, ...], times: Mapping[CheckpointKey, SaveTimes]
) -> dict[str, Json]:
    """Return the seconds that training waited for saves, and the slowest ranks."""
    timed = {info.where: times[info.where] for info in shown if info.where and info.where in times}
    stalls = {key: of.stalled_s for key, of in timed.items() if of.stalled_s is not None}
    longest = max(stalls, key=stalls.__getitem__, default=None)
    slowest = Counter(of.slowest_rank for of in timed.values() if of.slowest_rank is not None)
    ordered = sorted(slowest.items(), key=lambda item: (-item[1], item[0]))
    return {
        "num_timed": len(timed),
        "stalled_s": sum(stalls.values()) if stalls else None,
        "longest_stall": None
        if longest is None
        else {"step": longest[0], "seconds": stalls[longest]},
        "slowest_ranks": [{"rank": rank, "num_saves": num} for rank, num in ordered[:5]],
    }
