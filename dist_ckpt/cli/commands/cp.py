"""The command `cp`: copy a checkpoint and check every byte."""

from __future__ import annotations

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import CpResult
from dist_ckpt.tools.rewrite.copying import plan_copy


@click.command()
@click.argument("source", type=shared_options.PATH)
@click.argument("target", type=shared_options.PATH)
@shared_options.overwrite
@click.option("--link", is_flag=True, help="Use hard links where possible: no space, no check.")
@shared_options.dry_run
@shared_options.json
def cp(
    source: str, target: str, *, overwrite: bool, link: bool, dry_run: bool, as_json: bool
) -> None:
    """Copy the checkpoint SOURCE to TARGET, and check every byte.

    TARGET is the path of the new checkpoint, not the folder above it. It may be on another file
    system. The copy is committed like a save: a failed copy leaves no checkpoint. In the folder of
    a run, the copy also has the metrics, but not the pin and the tags.

    \b
    dist-ckpt cp runs/a@latest archive/step-00012000
    """
    plan = plan_copy(source, target, overwrite=overwrite, link=link)
    output.write_checkpoint(plan, CpResult, dry_run=dry_run, as_json=as_json)
