"""What the measures look like: tables for people, a document for programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.scenario import OURS, Absent, Figure, Measure, Row, Settings

SCHEMA = "dist-ckpt-bench/1"
PACKAGES = ("dist-ckpt", "torch", "torch_checkpointing", "torchsnapshot", "safetensors")
IN_MEMORY = ("tmpfs", "ramfs", "overlay")


def machine(folder: Path) -> dict[str, object]:
    """Return the facts of this machine that bear on figures, and none that name it."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "file_system": file_system_of(folder),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: _version_of(name) for name in PACKAGES},
    }


def file_system_of(folder: Path) -> str:
    """Return the type of the file system that a folder lies on."""
    found, best = "unknown", -1
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, at, kind, *_ = line.split()
        at = at.replace("\\040", " ")
        if folder.resolve().is_relative_to(at) and len(at) >= best:
            found, best = kind, len(at)
    return found


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# --- a document for programs ------------------------------------------------------------------


def document(
    measures: Sequence[Measure], settings: Settings, facts: dict[str, object]
) -> dict[str, object]:
    """Return everything as JSON values."""
    return {
        "schema": SCHEMA,
        "machine": facts,
        "rounds": settings.rounds,
        "nbytes": settings.nbytes,
        "quick": settings.quick,
        "measures": [_json_of(measure) for measure in measures],
    }


def _json_of(measure: Measure) -> dict[str, object]:
    return {
        "scenario": measure.scenario,
        "name": measure.name,
        "title": measure.title,
        "nbytes": measure.nbytes,
        "limits": list(measure.limits),
        "note": measure.note,
        "rows": [_json_row(measure, row) for row in measure.rows],
    }


def _json_row(measure: Measure, row: Row) -> dict[str, object]:
    if isinstance(row, Absent):
        return {"contender": row.contender, "reason": row.reason}
    return {
        "contender": row.contender,
        "seconds": list(row.seconds),
        "median_s": row.median_s,
        "gb_per_s": rate_of(measure, row),
        "of_limit": of_limit(measure, row),
        "ours_is_faster": ours_against(measure, row),
        "facts": dict(row.facts),
        "note": row.note,
    }


def measures_of(values: Mapping[str, Any]) -> tuple[Measure, ...]:
    """Return what `document` was made of.

    Raises KeyError, TypeError or ValueError for what it has not made.
    """
    return tuple(_measure_from(measure) for measure in values["measures"])


def _measure_from(values: Mapping[str, Any]) -> Measure:
    return Measure(
        scenario=values["scenario"],
        name=values["name"],
        title=values["title"],
        rows=tuple(_row_from(row) for row in values["rows"]),
        nbytes=values["nbytes"],
        limits=tuple(values["limits"]),
        note=values["note"],
    )


def _row_from(values: Mapping[str, Any]) -> Row:
    if "reason" in values:
        return Absent(values["contender"], values["reason"])
    seconds = tuple(float(each) for each in values["seconds"])
    if not seconds:
        raise ValueError(f"{values['contender']} has a figure of no rounds")
    return Figure(values["contender"], seconds, dict(values["facts"]), values["note"])


def rate_of(measure: Measure, figure: Figure) -> float | None:
    """Return GB/s, of 1e9 bytes."""
    return measure.nbytes / figure.median_s / 1e9 if measure.nbytes else None


def of_limit(measure: Measure, figure: Figure) -> float | None:
    """Return the speed as a fraction of the decisive limit's."""
    limit = measure.figure(measure.limits[0]) if measure.limits else None
    return limit.median_s / figure.median_s if limit else None


def ours_against(measure: Measure, figure: Figure) -> float | None:
    """Return how many times as fast as this one ours is."""
    ours = measure.figure(OURS)
    if ours is None or figure.contender in (OURS, *measure.limits):
        return None
    return figure.median_s / ours.median_s


# --- tables for people ------------------------------------------------------------------------


def show(console: Console, measure: Measure) -> None:
    """Print one measure."""
    facts = sorted({name for row in measure.rows if isinstance(row, Figure) for name in row.facts})
    title = f"{measure.scenario}: {measure.title}"
    if measure.nbytes:
        title += f" ({measure.nbytes / 1e6:,.0f} MB)"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    has_limit = bool(measure.limits)
    columns = ["median s", "min..max s", *["GB/s"] * bool(measure.nbytes)]
    columns += [*["of raw"] * has_limit, "ours is", *facts]
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("")
    for row in measure.rows:
        if isinstance(row, Absent):
            table.add_row(row.contender, *["-"] * len(columns), row.reason)
            continue
        cells = [
            _seconds(row.median_s),
            f"{_seconds(min(row.seconds))}..{_seconds(max(row.seconds))}",
        ]
        cells += [_number(rate_of(measure, row), 2)] * bool(measure.nbytes)
        cells += [_number(of_limit(measure, row), 2)] * has_limit
        cells += [_number(ours_against(measure, row), 1, unit="x")]
        cells += [_number(row.facts.get(name), 2 if "x" in name.split() else 0) for name in facts]
        style = {OURS: "bold"}.get(row.contender, "dim" if row.contender in measure.limits else "")
        table.add_row(row.contender, *cells, row.note, style=style)
    console.print(table)
    if measure.note:
        console.print(measure.note)
    console.print()


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"


def _number(value: float | None, digits: int, *, unit: str = "") -> str:
    return "" if value is None else f"{value:,.{digits}f}{unit}"
