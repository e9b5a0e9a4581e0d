"""The command `estimate`: estimate the size, time and space of a run's checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import EstimateResult, convert
from dist_ckpt.core.format.index.index_json import MAX_WORLD_SIZE
from dist_ckpt.message_text import format_count, format_size
from dist_ckpt.runs import retention_policy as policies
from dist_ckpt.tools.inspect.estimate import Estimate, measure_rate
from dist_ckpt.tools.inspect.estimate import estimate as compute


@click.command()
@click.option(
    "--from",
    "source",
    type=shared_options.PATH,
    required=True,
    help="A checkpoint with the same state as the job.",
)
@click.option(
    "--world-size",
    type=click.IntRange(1, MAX_WORLD_SIZE),
    help="Number of ranks.  [default: as in the checkpoint]",
)
@click.option("--steps", type=click.IntRange(min=1), help="Number of steps of the job.")
@click.option("--save-every", type=click.IntRange(min=1), help="Number of steps between two saves.")
@click.option("--step-s", type=output.Seconds(min=0), help="Seconds that a step takes.")
@click.option("--keep", "policy", help="Retention policy, as for prune.  [default: keep all]")
@click.option(
    "--folder",
    type=shared_options.PATH,
    help="Folder of the checkpoints.  [default: that of --from]",
)
@click.option("--rate", type=shared_options.Bytes(), help="Write rate in bytes per second.")
@click.option("--measure", is_flag=True, help="Measure the rate: write 256 MiB to the folder.")
@shared_options.json
def estimate(
    *, source: str, policy: str | None, rate: int | None, measure: bool, as_json: bool, **job: Any
) -> None:
    """Estimate size, time and space of the checkpoints of a future job.

    For retention policies with metrics the estimate assumes the worst case: the best checkpoints
    are the oldest. Exit code 1 if the folder does not have enough space now.

    \b
    dist-ckpt estimate --from runs/a@latest --world-size 64 --rate 2GB
    dist-ckpt estimate --from runs/a@latest --steps 10000 --save-every 500 --keep 'last(3)'
    """
    if rate is not None and measure:
        raise click.UsageError("--rate and --measure exclude each other: give one of them")
    if rate == 0:
        raise click.UsageError("--rate is 0: give bytes per second, such as 2GB")
    keep = None if policy is None else policies.parse(policy)
    compute_at = partial(compute, source, keep=keep, **job)
    costs = compute_at(rate=rate)
    if measure:
        costs = compute_at(rate=measure_rate(costs.folder))
    with output.exit_with(output.FINE if costs.fits else output.PROBLEM_FOUND):
        if as_json:
            output.print_json(convert(costs, EstimateResult))
        else:
            _print(costs)


def _print(costs: Estimate) -> None:
    ranks = format_count(costs.world_size, "rank")
    checkpoints = format_count(costs.num_at_once, "checkpoint")
    lines = [
        ("like", costs.path),
        ("size", f"{format_size(costs.nbytes)} in {format_count(costs.num_files, 'file')}"),
        ("by", f"{ranks}, at most {format_size(costs.nbytes_rank)} each"),
        ("saves", f"{costs.num_saves}, and {costs.num_kept} of them stay"),
    ]
    if costs.rate is not None and costs.save_s is not None:
        lines.append(("a save", f"{costs.save_s:.3g} s at {format_size(costs.rate)}/s"))
    fits = "the peak fits" if costs.fits else "the peak does NOT fit"
    lines += [
        ("peak", f"{format_size(costs.nbytes_peak)}: {checkpoints} at the same time"),
        ("free", f"{format_size(costs.nbytes_free)} at {costs.folder}: {fits}"),
    ]
    for name, text in lines:
        click.echo(f"{name:<7} {output.printable(text)}")
