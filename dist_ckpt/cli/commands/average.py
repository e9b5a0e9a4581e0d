"""The command `average`: write the mean of the weights of several checkpoints."""

from __future__ import annotations

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.reports import size


@click.command()
@click.argument("sources", type=shared_options.PATH, nargs=-1, required=True)
@click.option(
    "--to", "target", type=shared_options.PATH, required=True, help="Where the average goes."
)
@click.option("--last", type=int, help="The last N of a run's folder; 0 for all.")
@click.option("--best", type=int, help="The best N of a run's folder; 0 for all measured.")
@click.option("--min", "lowest", metavar="METRIC", help="The best have the lowest value of it.")
@click.option("--max", "highest", metavar="METRIC", help="The best have the highest value of it.")
@click.option("--weight", "weights", type=float, multiple=True, help="One for each source.")
@click.option("--decay", type=float, help="The weight of a source that has k newer is DECAY**k.")
@click.option("-g", "--include", multiple=True, help="Tensors to average, by name or pattern.")
@click.option("--exclude", multiple=True, help="Tensors to take from the newest.")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is there.")
@shared_options.dry_run
@shared_options.json
def average(  # noqa: PLR0913  (one for each option)
    sources: tuple[str, ...],
    target: str,
    *,
    last: int | None,
    best: int | None,
    lowest: str | None,
    highest: str | None,
    weights: tuple[float, ...],
    decay: float | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the average of the checkpoints SOURCES, or of some of a run.

    Trainable tensors are averaged, all else is the newest's.

    \b
    dist-ckpt average run/step-00001000 run/step-00002000 --to mean
    dist-ckpt average run --best 5 --min val/loss --to mean
    """  # noqa: D301 - click knows the backspace
    of_run = last is not None or best is not None
    if of_run and len(sources) > 1:
        raise click.UsageError("--last and --best are of one run's folder: give only that")
    if not of_run and len(sources) == 1:
        raise click.UsageError(
            "one checkpoint has no average: give two or more, or --last or --best of a run's folder"
        )
    try:
        from dist_ckpt.tools.average.average import plan_average  # noqa: PLC0415  (it needs torch)
        from dist_ckpt.tools.average.source_selection import AverageOptions  # noqa: PLC0415  (it goes with that)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            'averages need torch: pip install "dist-ckpt[torch]", or ".[torch]" in a clone'
        ) from None
    options = AverageOptions(
        last=last,
        best=best,
        min=lowest,
        max=highest,
        weights=weights or None,
        decay=decay,
        include=include or None,
        exclude=exclude or None,
        overwrite=overwrite,
    )
    chosen = sources[0] if of_run else sources
    plan = plan_average(chosen, target, options)
    report = output.run_plan(plan, "average", dry_run=dry_run, as_json=as_json)
    if report is None:
        return
    if not as_json:
        for source in plan.sources:
            click.echo(output.printable(source))
    summary = f"{report.num_tensors} tensors, {size(report.nbytes)} in {report.num_files} files"
    output.print_written("average", report, f"{report.path}: {summary}", as_json=as_json)
