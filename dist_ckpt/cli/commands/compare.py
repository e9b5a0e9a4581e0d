"""The command `compare`: show several runs side by side."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict
from math import isfinite

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import CompareResult, extend
from dist_ckpt.core.format.index.model_description import as_json as plain_json
from dist_ckpt.tools.inspect.compare import Comparison
from dist_ckpt.tools.inspect.compare import compare as compare_runs


@click.command()
@shared_options.paths
@click.option("--min", "lowest", help="Sort by the lowest value of this metric.")
@click.option("--max", "highest", help="Sort by the highest value of this metric.")
@shared_options.json
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
def compare(
    paths: tuple[str, ...], lowest: str | None, highest: str | None, *, as_json: bool, as_csv: bool
) -> None:
    """Compare several runs, such as those of a sweep.

    PATHS are folders of runs, or one folder that contains them. Configuration values that differ
    are printed below the table.

    \b
    dist-ckpt compare sweep --min val/loss
    dist-ckpt compare runs/a runs/b --csv > table.csv
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other: give one of them")
    comparison = compare_runs(*paths, min=lowest, max=highest)
    if as_json:
        runs = [{**asdict(run), "config": plain_json(run.config)} for run in comparison.runs]
        output.print_json(extend(comparison, CompareResult, runs=runs))
    elif as_csv:
        _print_csv(comparison)
    else:
        _print_table(comparison)


def _print_csv(comparison: Comparison) -> None:
    """Print a row for each run, with columns for metrics and differing configuration values."""
    metrics = sorted({name for run in comparison.runs for name in run.metrics})
    fields = (
        *("name", "path", "kind", "num_parameters", "num_trainable", "num_checkpoints", "step"),
        *("best", "best_step", "best_path"),
    )
    heads = [*fields, *(f"metrics.{name}" for name in metrics)]
    heads += [*(f"config.{name}" for name in comparison.differing), "problems"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([output.printable(head) for head in heads])
    for run in comparison.runs:
        row = [getattr(run, name) for name in fields]
        row += [run.metrics.get(name) for name in metrics]
        row += [by_run.get(run.name) for by_run in comparison.differing.values()]
        row.append("; ".join(run.problems))
        writer.writerow(["" if value is None else output.printable(str(value)) for value in row])


def _print_table(comparison: Comparison) -> None:
    best = [] if comparison.metric is None else [f"BEST {comparison.metric}", "AT STEP"]
    heads = ["RUN", "KIND", "PARAMETERS", "CHECKPOINTS", "STEP", *best, "METRICS", "NOTES"]
    rows = [
        [
            *(run.name, _text(run.kind)),
            output.cell(run.num_parameters, "{:,}".format),
            *(str(run.num_checkpoints), _text(run.step)),
            *([_text(run.best), _text(run.best_step)] if best else []),
            *(output.metrics_cell(run.metrics), "; ".join(run.problems)),
        ]
        for run in comparison.runs
    ]
    right = {2, 3, 4, *range(5, 5 + len(best))}
    output.print_table([output.printable(head) for head in heads], rows, right=frozenset(right))
    metrics = sorted({name for run in comparison.runs for name in run.metrics})
    if comparison.metric is not None and all(run.best is None for run in comparison.runs):
        hint = f"; the metrics there are: {', '.join(metrics)}" if metrics else ""
        click.echo(output.printable(f"no run has a value of {comparison.metric!r}{hint}"))
    for name, by_run in comparison.differing.items():
        values = ", ".join(f"{run}: {value}" for run, value in by_run.items())
        click.echo(output.printable(f"config.{name} differs: {values}"))


def _text(value: object) -> str:
    if isinstance(value, float) and isfinite(value):
        return f"{value:g}"
    return output.cell(value)
