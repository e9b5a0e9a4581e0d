"""The command `cp`: copy a checkpoint and check every byte."""

from __future__ import annotations

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.reports import size
from dist_ckpt.tools.rewrite.copying import plan_copy


@click.command()
@click.argument("source", type=shared_options.PATH)
@click.argument("target", type=shared_options.PATH)
@shared_options.overwrite
@click.option("--link", is_flag=True, help="Hard links where they can be: no space, no check.")
@shared_options.dry_run
@shared_options.json
def cp(
    source: str, target: str, *, overwrite: bool, link: bool, dry_run: bool, as_json: bool
) -> None:
    """Copy the checkpoint SOURCE to TARGET, on whatever file system, and check every byte.

    TARGET becomes the checkpoint: name its folder, not the one above. It is committed as a save is,
    so a copy that failed is none. Metrics go along into a run's folder; pins and tags do not.

    \b
    dist-ckpt cp runs/a@latest archive/step-00012000
    """  # noqa: D301 - click knows the backspace
    plan = plan_copy(source, target, overwrite=overwrite, link=link)
    report = output.run_plan(plan, "cp", dry_run=dry_run, as_json=as_json)
    if report is None:
        return
    linked = f", {report.num_linked} linked" if link else ""
    summary = f"{report.path}: {size(report.nbytes)} in {report.num_files} files{linked}"
    output.print_written("cp", report, summary, as_json=as_json)
