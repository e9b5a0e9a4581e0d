"""The command that tells what checkpoints will cost: plan."""

from __future__ import annotations

from dataclasses import asdict

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.core.format.index.catalog_json import MAX_WORLD_SIZE
from dist_ckpt.reports import size
from dist_ckpt.runs.retention import retention_policy as policies
from dist_ckpt.tools.inspect.estimate import Estimate, estimate, measured_rate


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
def plan(  # noqa: PLR0913 - those of dc.estimate
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
    """Tell size, time and space of the checkpoints of a job before it is started.

    Metrics are taken to be as costly as can be: the best are the oldest. Exit code 1 if the folder
    has not the space now.

    \b
    dist-ckpt plan --from runs/a@latest --world-size 64 --rate 2GB
    dist-ckpt plan --from runs/a@latest --steps 10000 --save-every 500 --keep 'last(3)'
    """  # noqa: D301 - click knows the backspace
    if rate is not None and measure:
        raise click.UsageError("--rate and --measure are given: give one of them")
    if rate == 0:
        raise click.UsageError("--rate is 0: give the bytes a second, such as 2GB")
    keep = None if policy is None else policies.parse(policy)
    given = {"world_size": world_size, "steps": steps, "save_every": save_every}
    found = estimate(source, **given, step_s=step_s, keep=keep, rate=rate, folder=folder)
    if measure:
        at = measured_rate(found.folder)
        found = estimate(source, **given, step_s=step_s, keep=keep, rate=at, folder=folder)
    with output.exit_with(output.FINE if found.fits else output.FINDING):
        if as_json:
            more = {"nbytes_peak": found.nbytes_peak, "save_s": found.save_s, "fits": found.fits}
            output.print_json("plan", {**asdict(found), **more})
        else:
            _print(found)


def _print(found: Estimate) -> None:
    ranks = f"{found.world_size} ranks"
    lines = [
        ("like", found.path),
        ("size", f"{size(found.nbytes)} in {found.num_files} files"),
        ("by", f"{ranks}, of which the fullest writes {size(found.nbytes_rank)}"),
        ("saves", f"{found.num_saves}, of which {found.num_kept} are kept"),
    ]
    if found.rate is not None and found.save_s is not None:
        lines.append(("a save", f"{found.save_s:.3g} s at {size(found.rate)}/s"))
    fits = "it fits" if found.fits else "it does NOT fit"
    lines += [
        ("peak", f"{size(found.nbytes_peak)}: {found.num_at_once} at once"),
        ("free", f"{size(found.nbytes_free)} at {found.folder}: {fits}"),
    ]
    for name, text in lines:
        click.echo(f"{name:<7} {output.printable(text)}")
