"""The command `estimate`: estimate the space and time of a run."""

from __future__ import annotations

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import EstimateResult, convert
from dist_ckpt.core.format.index.catalog_json import MAX_WORLD_SIZE
from dist_ckpt.reports import size
from dist_ckpt.runs import retention_policy as policies
from dist_ckpt.tools.inspect.estimate import Estimate, measured_rate
from dist_ckpt.tools.inspect.estimate import estimate as compute


@click.command()
@click.option(
    "--from",
    "source",
    type=shared_options.PATH,
    required=True,
    help="A checkpoint like those to come.",
)
@click.option(
    "--world-size",
    type=click.IntRange(1, MAX_WORLD_SIZE),
    help="Ranks of the job.  [default: those that saved it]",
)
@click.option("--steps", type=click.IntRange(min=1), help="Steps of the job.")
@click.option("--save-every", type=click.IntRange(min=1), help="Steps from save to save.")
@click.option("--step-s", type=output.Seconds(min=0), help="Seconds of a step.")
@click.option("--keep", "policy", help="What to keep, as of prune.  [default: all]")
@click.option(
    "--folder", type=shared_options.PATH, help="Where they will lie.  [default: where --from lies]"
)
@click.option("--rate", type=shared_options.Bytes(), help="Bytes a second that the storage writes.")
@click.option("--measure", is_flag=True, help="Measure that: write 256 MiB to the folder.")
@shared_options.json
def estimate(  # noqa: PLR0913 - those of dc.estimate
    *,
    source: str,
    world_size: int | None,
    steps: int | None,
    save_every: int | None,
    step_s: float | None,
    policy: str | None,
    folder: str | None,
    rate: int | None,
    measure: bool,
    as_json: bool,
) -> None:
    """Compute size, time and space of the checkpoints of a job before it is started.

    Metrics are taken to be as costly as can be: the best are the oldest. Exit code 1 if the folder
    has not the space now.

    \b
    dist-ckpt estimate --from runs/a@latest --world-size 64 --rate 2GB
    dist-ckpt estimate --from runs/a@latest --steps 10000 --save-every 500 --keep 'last(3)'
    """  # noqa: D301 - click knows the backspace
    if rate is not None and measure:
        raise click.UsageError("--rate and --measure are given: give one of them")
    if rate == 0:
        raise click.UsageError("--rate is 0: give the bytes a second, such as 2GB")
    keep = None if policy is None else policies.parse(policy)
    given = {"world_size": world_size, "steps": steps, "save_every": save_every}
    costs = compute(source, **given, step_s=step_s, keep=keep, rate=rate, folder=folder)
    if measure:
        at = measured_rate(costs.folder)
        costs = compute(source, **given, step_s=step_s, keep=keep, rate=at, folder=folder)
    with output.exit_with(output.FINE if costs.fits else output.FINDING):
        if as_json:
            output.print_json(convert(costs, EstimateResult))
        else:
            _print(costs)


def _print(costs: Estimate) -> None:
    ranks = f"{costs.world_size} ranks"
    lines = [
        ("like", costs.path),
        ("size", f"{size(costs.nbytes)} in {costs.num_files} files"),
        ("by", f"{ranks}, of which the fullest writes {size(costs.nbytes_rank)}"),
        ("saves", f"{costs.num_saves}, of which {costs.num_kept} are kept"),
    ]
    if costs.rate is not None and costs.save_s is not None:
        lines.append(("a save", f"{costs.save_s:.3g} s at {size(costs.rate)}/s"))
    fits = "it fits" if costs.fits else "it does NOT fit"
    lines += [
        ("peak", f"{size(costs.nbytes_peak)}: {costs.num_at_once} at once"),
        ("free", f"{size(costs.nbytes_free)} at {costs.folder}: {fits}"),
    ]
    for name, text in lines:
        click.echo(f"{name:<7} {output.printable(text)}")
