"""The figures of every run, one JSON line each, beside this module and in the repository.

A line is what `--json` writes, with the date and the commit. It is appended whole, in one write, so
that runs which end at once lose nothing. A run that is killed in that write leaves a line without
its end, and the next one leaves an empty line below it: so it is told from a line that was damaged.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report import SCHEMA, measures_of
from benchmarks.scenario import OURS, Figure, Measure

USUAL_PATH = Path(__file__).with_name("history.jsonl")

log = logging.getLogger(__name__)


class HistoryError(Exception):
    """The history cannot be read, or has nothing of what is asked for."""


@dataclass(frozen=True, slots=True)
class Run:
    """What the drawings need of one line. `machine` is what `report.machine` returned."""

    date: datetime
    commit: str | None
    machine: Mapping[str, object]
    measures: tuple[Measure, ...]


Taken = tuple[Run, Measure]


# --- appending --------------------------------------------------------------------------------


def origin() -> dict[str, object]:
    """Return when and of which commit this is, for a line: to be asked when a run begins."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit_of()}


def commit_of(folder: Path = USUAL_PATH.parent) -> str | None:
    """Return the commit, with "+changed" if Python files differ from it; None outside git."""
    commit = _git(folder, "rev-parse", "HEAD")
    # Only they make figures: the history itself and the chart change with each run.
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/*.py")
    return f"{commit}+changed" if commit and changes else commit


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def append(path: Path, values: Mapping[str, object]) -> None:
    """Add a line. Any number of processes and threads may do so at once."""
    line = json.dumps(values).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        # Of a line that another is just writing this may see a part: then it is followed by an
        # empty one, which says nothing below a line that is whole.
        line = line if _ends_with_a_line(descriptor) else b"\n\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(f"{path}: the disk took a part of the line only")
    finally:
        os.close(descriptor)


def _ends_with_a_line(descriptor: int) -> bool:
    nbytes = os.fstat(descriptor).st_size
    return nbytes == 0 or os.pread(descriptor, 1, nbytes - 1) == b"\n"


# --- reading ----------------------------------------------------------------------------------


def read(path: Path) -> list[Run]:
    """Return all runs, the oldest first; a line without its end is left out, with a warning.

    Raises HistoryError, which names file and line, for any other that is no run.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        raise HistoryError(f"{path}: there is no history yet") from None
    runs = []
    for number, (line, below) in enumerate(zip(lines, [*lines[1:], b""], strict=True), 1):
        if not line.strip():
            continue
        if _is_torn(line, below):
            log.warning("%s: line %d was cut off, and is left out", path, number)
            continue
        try:
            runs.append(_run_of(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise HistoryError(f"{path}: line {number} is no run: {error!r}") from error
    return sorted(runs, key=lambda run: run.date)  # a merge may have put them in another order


def _is_torn(line: bytes, below: bytes) -> bool:
    if line.endswith(b"\n") and below != b"\n":
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _run_of(values: Mapping[str, Any]) -> Run:
    if values["schema"] != SCHEMA:
        raise ValueError(f"schema {values['schema']!r}; known is {SCHEMA!r}")
    date = datetime.fromisoformat(values["date"])
    if date.tzinfo is None:
        raise ValueError(f"date {values['date']!r} has no time zone")
    return Run(date, values["commit"], dict(values["machine"]), measures_of(values))


# --- choosing ---------------------------------------------------------------------------------


def chosen(runs: Iterable[Run], only: Sequence[str]) -> list[Run]:
    """Return the runs with only those measures that some NAME[:MEASURE] means."""

    def is_meant(measure: Measure) -> bool:
        return measure.scenario in only or f"{measure.scenario}:{measure.name}" in only

    return [replace(run, measures=tuple(filter(is_meant, run.measures))) for run in runs]


def newest(runs: Iterable[Run]) -> list[Taken]:
    """Return each measure as it was taken last, from one run: rows of two do not compare."""
    found: dict[tuple[str, str], Taken] = {}
    for run in runs:
        for measure in run.measures:
            if any(isinstance(row, Figure) for row in measure.rows):
                found[measure.scenario, measure.name] = run, measure
    return list(found.values())


def over_time(runs: Iterable[Run]) -> list[list[Taken]]:
    """Return for each measure, and each size of it, whenever ours had a figure."""
    found: dict[tuple[str, str, int | None], list[Taken]] = {}
    for run in runs:
        for measure in run.measures:
            if measure.figure(OURS) is not None:
                key = (measure.scenario, measure.name, measure.nbytes)
                found.setdefault(key, []).append((run, measure))
    return list(found.values())
