"""The command `stats`: show statistics of the values of each tensor."""

from __future__ import annotations

import os
from typing import Any

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import StatsResult, StatsRow, convert
from dist_ckpt.message_text import format_count
from dist_ckpt.runs.selectors import resolve
from dist_ckpt.tools.inspect.describe import TensorStats
from dist_ckpt.tools.inspect.describe import stats as stats_of


@click.command()
@shared_options.path
@shared_options.selection
@shared_options.json
def stats(path: str, *, as_json: bool, **selection: Any) -> None:
    """Show statistics of the values of each tensor.

    min, max, mean and rms describe the finite values. Zeros, nan and infinities are counted. All
    data is read and checked, a part at a time. Exit code 1 if there is a nan or an infinity.
    Exclude tensors that contain infinities on purpose, such as masks.

    \b
    dist-ckpt stats runs/a@latest -g model
    dist-ckpt stats runs/a@latest --exclude '*.mask'
    """
    path = os.fspath(resolve(path))
    with output.progress("stats") as update:
        tensors = stats_of(path, **selection, progress=update)
    bad = [tensor for tensor in tensors if not tensor.is_finite and tensor.alias_of is None]
    with output.exit_with(output.PROBLEM_FOUND if bad else output.FINE):
        if as_json:
            rows = convert(tensors, tuple[StatsRow, ...])
            output.print_json(StatsResult(path=path, ok=not bad, tensors=rows))
        else:
            _print_stats(tensors, len(bad))


def _print_stats(tensors: tuple[TensorStats, ...], num_bad: int) -> None:
    output.print_table(
        ("NAME", "DTYPE", "MIN", "MAX", "MEAN", "RMS", "ZEROS", "NAN", "INF"),
        [
            (
                row.name,
                row.dtype,
                *(output.cell(x, "{:.6g}".format) for x in (row.min, row.max, row.mean, row.rms)),
                *(output.cell(count) for count in (row.zeros, row.nan, row.inf)),
            )
            for row in tensors
        ],
        right=frozenset(range(2, 9)),
    )
    click.echo(f"{format_count(len(tensors), 'tensor')}, {num_bad} with a nan or an infinity")
