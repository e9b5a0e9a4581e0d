"""What the history says, as pictures. Whoever imports this needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.lines import Line2D

from benchmarks.history import HistoryError, Run, Taken, newest, over_time
from benchmarks.report import of_limit, rate_of
from benchmarks.scenario import OURS, Absent, Figure, Measure

NUM_COLUMNS = 3
MAX_DATES = 4
OUR_COLOUR, THEIR_COLOUR, LIMIT_COLOUR = "#1f6feb", "#b6bec9", "#d1242f"


def draw_newest(runs: Sequence[Run], path: Path) -> None:
    """Draw the newest figures: a panel each, a bar for every contender, the raw limit as a line.

    The format is the file's suffix.
    """
    found = newest(runs)
    with _picture(path, num_panels=len(found)) as (_, panels):
        for (run, measure), panel in zip(found, panels, strict=True):
            _draw_bars(panel, measure)
            panel.set_xlabel(f"{_unit(measure)}\n{_name_of(run)}")


def draw_trends(runs: Sequence[Run], path: Path) -> None:
    """Draw ours over all runs: a panel for each measure, a colour for each machine.

    The format is the file's suffix.
    """
    found = over_time(runs)
    colours = _colour_of_each_machine(found)
    with _picture(path, num_panels=len(found)) as (picture, panels):
        for taken, panel in zip(found, panels, strict=True):
            _draw_trend(panel, taken, colours)
        handles = [
            Line2D([], [], color=colour, marker="o", label=textwrap.fill(machine, 150))
            for machine, colour in colours.items()
        ]
        picture.legend(handles=handles, loc="outside lower left", frameon=False)


@contextmanager
def _picture(path: Path, *, num_panels: int) -> Iterator[tuple[Picture, list[Axes]]]:
    """Write a picture of what is drawn into its panels meanwhile."""
    if not num_panels:
        raise HistoryError("the history has no figures of what is to be drawn")
    num_rows = -(-num_panels // NUM_COLUMNS)
    # The same measures give the same bytes: no date, no random names.
    with rc_context({"svg.hashsalt": "bench", "font.size": 8}):
        picture = Picture(figsize=(4.2 * NUM_COLUMNS, 2.2 * num_rows), layout="constrained")
        axes = picture.subplots(num_rows, NUM_COLUMNS, squeeze=False)
        panels: list[Axes] = [panel for row in axes for panel in row]
        for panel in panels[num_panels:]:
            panel.set_visible(False)
        for panel in panels:
            panel.spines[["top", "right"]].set_visible(False)
        yield picture, panels[:num_panels]
        picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


# --- bars -------------------------------------------------------------------------------------


def _draw_bars(panel: Axes, measure: Measure) -> None:
    rows = [row for row in measure.rows if row.contender not in measure.limits][::-1]
    for at, row in enumerate(rows):
        if isinstance(row, Absent):
            panel.text(0, at, " no figure", va="center", color="#6e7781")
            continue
        value = _value(measure, row)
        panel.barh(at, value, color=OUR_COLOUR if row.contender == OURS else THEIR_COLOUR)
        panel.text(value, at, f" {value:.3g}", va="center")
    panel.set_ylim(-0.6, len(rows) - 0.4)
    panel.set_yticks(range(len(rows)), [row.contender for row in rows])
    for name in measure.limits[:1]:
        if limit := measure.figure(name):
            panel.axvline(_value(measure, limit), color=LIMIT_COLOUR, linestyle="--", linewidth=1)
    panel.set_title(_title(measure), fontsize=8, loc="left")


def _title(measure: Measure) -> str:
    return textwrap.fill(f"{measure.scenario}: {measure.title}", 48)


def _unit(measure: Measure) -> str:
    return "GB/s, more is better; dashed: raw" if measure.nbytes else "seconds"


def _value(measure: Measure, figure: Figure) -> float:
    """Return the speed, or the seconds where there is no speed."""
    rate = rate_of(measure, figure)
    return figure.median_s if rate is None else rate


def _name_of(run: Run) -> str:
    """Return the day, and the commit if there is one, with a "+" if the code differed from it."""
    commit, mark, _ = (run.commit or "").partition("+")
    return f"{run.date:%Y-%m-%d} {commit[:7]}{mark}".strip()


# --- trends -----------------------------------------------------------------------------------


def _draw_trend(panel: Axes, taken: Sequence[Taken], colours: dict[str, str]) -> None:
    """Draw our fraction of the raw limit, which compares between busy machines, or the value."""
    _, last = taken[-1]
    as_fraction = _our_fraction(last) is not None
    values = [_our_fraction(measure) if as_fraction else _ours(measure) for _, measure in taken]
    for machine, colour in colours.items():
        points = [
            (at, value)
            for at, ((run, _), value) in enumerate(zip(taken, values, strict=True))
            if value is not None and _machine_of(run) == machine
        ]
        if points:
            panel.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, linewidth=1)
    if as_fraction:
        panel.axhline(1, color=LIMIT_COLOUR, linestyle="--", linewidth=1)
    highest = max(value for value in values if value is not None)
    panel.set_ylim(0, 1.1 * max(highest, 1 if as_fraction else 0))
    _date_the_runs(panel, [run for run, _ in taken])
    size = f", {last.nbytes / 1e6:,.0f} MB" if last.nbytes else ""
    panel.set_title(_title(last) + size, fontsize=8, loc="left")
    panel.set_ylabel(
        f"of {last.limits[0]}" if as_fraction else "GB/s" if last.nbytes else "seconds"
    )


def _date_the_runs(panel: Axes, runs: Sequence[Run]) -> None:
    """Name some runs on the axis, the first and the last among them."""
    last = len(runs) - 1
    marks = sorted({round(last * part / (MAX_DATES - 1)) for part in range(MAX_DATES)})
    panel.set_xlim(-0.5, len(runs) - 0.5)
    panel.set_xticks(marks, [f"{runs[at].date:%Y-%m-%d}" for at in marks])


def _our_fraction(measure: Measure) -> float | None:
    ours = measure.figure(OURS)
    return None if ours is None else of_limit(measure, ours)


def _ours(measure: Measure) -> float | None:
    ours = measure.figure(OURS)
    return None if ours is None else _value(measure, ours)


def _colour_of_each_machine(found: Sequence[Sequence[Taken]]) -> dict[str, str]:
    """Return colours by machine, in the order of its first run in the history."""
    runs = sorted((run for taken in found for run, _ in taken), key=lambda run: run.date)
    machines = list(dict.fromkeys(_machine_of(run) for run in runs))
    return {machine: f"C{number % 10}" for number, machine in enumerate(machines)}


def _machine_of(run: Run) -> str:
    """Return its facts in words, but for the packages: they are what is measured."""
    facts = [(name, value) for name, value in run.machine.items() if name != "packages"]
    return ", ".join(f"{name} {value}" for name, value in facts if value is not None)
