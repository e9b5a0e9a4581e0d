"""What a report says of damage: which check was done, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dist_ckpt.core.checkpoint.verify import Level, Problem, VerifyReport, verify
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.errors import CheckpointError
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import Progress
from dist_ckpt.tools.report.texts import bounded, first_of

# What a report checks: nothing, or as `dist_ckpt.verify` does.
Check = Literal["none", "quick", "full"]
CHECKS: tuple[Check, ...] = ("none", "quick", "full")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check has found, or `why` there was none: it was not asked for, or it has failed."""

    report: VerifyReport | None = None
    why: str = ""
    has_failed: bool = False

    @property
    def result(self) -> str:
        """The result: "ok", "damaged" or "not checked"."""
        if self.report is None:
            return "not checked"
        return "ok" if self.report.ok else "damaged"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong."""
        return () if self.report is None else self.report.problems

    def to_json(self) -> dict[str, Json]:
        """Return it as a report has it: of many problems the first."""
        notes = () if self.report is None else self.report.notes
        return {
            "result": self.result,
            "level": None if self.report is None else self.report.level,
            "why": bounded(self.why),
            "has_failed": self.has_failed,
            "problems": first_of(map(_problem, self.problems))[0],
            "num_problems": len(self.problems),
            "notes": first_of(map(bounded, notes))[0],
            "nbytes_checked": 0 if self.report is None else self.report.nbytes_checked,
        }


def checked(path: str, check: Check, progress: Progress | None) -> CheckResult:
    """Check a checkpoint, or say why not."""
    if check == "none":
        return CheckResult(why="no check was asked for")
    level: Level = check
    try:
        return CheckResult(verify(path, level=level, progress=progress, opener=OPENER))
    except CheckpointError as error:
        return CheckResult(why=str(error), has_failed=True)


def _problem(one: Problem) -> Json:
    return {
        "file": bounded(one.file),
        "rank": one.rank,
        "tensor": None if one.tensor is None else bounded(one.tensor),
        "rows": None if one.rows is None else [one.rows.start, one.rows.stop],
        "what": bounded(one.what),
    }
