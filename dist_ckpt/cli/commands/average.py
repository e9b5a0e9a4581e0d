"""The command `average`: write the mean of the weights of several checkpoints."""

from __future__ import annotations

from typing import Any

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import AverageResult


@click.command()
@click.argument("sources", type=shared_options.PATH, nargs=-1, required=True)
@click.option(
    "--to", "target", type=shared_options.PATH, required=True, help="The path of the average."
)
@click.option("--last", type=int, help="The last N of a run; 0 for all.")
@click.option("--best", type=int, help="The best N of a run; 0 for all with the metric.")
@click.option("--min", metavar="METRIC", help="With --best: lower values are better.")
@click.option("--max", metavar="METRIC", help="With --best: higher values are better.")
@shared_options.repeatable_option(
    "--weight", "weights", type=float, help="The weight of a source. Give one for each."
)
@click.option("--decay", type=float, help="Weight DECAY**k for the source with k newer sources.")
@shared_options.repeatable_option("-g", "--include", help="Globs of tensors to average.")
@shared_options.repeatable_option("--exclude", help="Globs of tensors to copy from the newest.")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at --to.")
@shared_options.dry_run
@shared_options.json
def average(
    sources: tuple[str, ...], target: str, *, dry_run: bool, as_json: bool, **of_average: Any
) -> None:
    """Average several checkpoints.

    SOURCES are checkpoints, or one folder of a run with --last or --best. Trainable tensors are
    averaged. All other values are copied from the newest source.

    \b
    dist-ckpt average run/step-00001000 run/step-00002000 --to mean
    dist-ckpt average run --best 5 --min val/loss --to mean
    """
    is_run = of_average["last"] is not None or of_average["best"] is not None
    if is_run and len(sources) > 1:
        raise click.UsageError("--last and --best select from one run: give only its folder")
    if not is_run and len(sources) == 1:
        raise click.UsageError(
            "one checkpoint has no average: give two or more, or --last or --best of a run's folder"
        )
    with output.needs_torch("average"):
        from dist_ckpt.tools.average.average import plan_average  # noqa: PLC0415  (it needs torch)
        from dist_ckpt.tools.average.checkpoint_selection import AverageOptions  # noqa: PLC0415  (it goes with that)
    plan = plan_average(sources[0] if is_run else sources, target, AverageOptions(**of_average))
    output.write_checkpoint(plan, AverageResult, dry_run=dry_run, as_json=as_json)
