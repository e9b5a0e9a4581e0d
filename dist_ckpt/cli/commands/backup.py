"""The command `backup`: keep a second checkpoint where prune does not look."""

from __future__ import annotations

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.tools.rewrite.copying import plan_backup


@click.command()
@shared_options.path
@click.option("--overwrite", is_flag=True, help="Replace the backup of another save of the step.")
@shared_options.dry_run
@shared_options.json
def backup(path: str, *, overwrite: bool, dry_run: bool, as_json: bool) -> None:
    """Keep the checkpoint at PATH in the folder backup beside it as well, out of prune's reach.

    Its files are hard links where that is possible, which take no space; else they are copied, and
    every byte is checked.

    \b
    dist-ckpt backup runs/a@latest
    """  # noqa: D301 - click knows the backspace
    plan = plan_backup(path, overwrite=overwrite)
    target = output.run_plan(plan, "backup", dry_run=dry_run, as_json=as_json)
    if target is None:
        return
    if as_json:
        output.print_json("backup", {"path": target})
    else:
        click.echo(output.printable(target))
