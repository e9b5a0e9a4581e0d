"""The measures as one picture: a panel each, a bar for every contender, the raw limit as a line."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import rate_of
from benchmarks.scenario import OURS, Absent, Figure, Measure

NUM_COLUMNS = 3
OUR_COLOUR, THEIR_COLOUR, LIMIT_COLOUR = "#1f6feb", "#b6bec9", "#d1242f"


def draw(measures: Sequence[Measure], path: Path) -> None:
    """Write a chart whose format is the file's suffix. Raises ImportError without matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415  (only charts need it)

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    num_rows = -(-len(measures) // NUM_COLUMNS)
    # The same measures give the same bytes: no date, no random names.
    with mpl.rc_context({"svg.hashsalt": "bench", "font.size": 8}):
        figure, axes = plt.subplots(
            num_rows, NUM_COLUMNS, figsize=(4.2 * NUM_COLUMNS, 2.2 * num_rows), squeeze=False
        )
        panels = [panel for row in axes for panel in row]
        for panel in panels[len(measures) :]:
            panel.set_visible(False)
        for measure, panel in zip(measures, panels, strict=False):
            _draw_panel(panel, measure)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
        plt.close(figure)


def _draw_panel(panel: Any, measure: Measure) -> None:
    """Draw speeds, or seconds where there is no speed."""
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
    title = textwrap.fill(f"{measure.scenario}: {measure.title}", 48)
    panel.set_title(title, fontsize=8, loc="left")
    panel.set_xlabel("GB/s, more is better; dashed: raw" if measure.nbytes else "seconds")
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.2)
    panel.set_xlim(left=0)


def _value(measure: Measure, figure: Figure) -> float:
    return rate_of(measure, figure) or figure.median_s
