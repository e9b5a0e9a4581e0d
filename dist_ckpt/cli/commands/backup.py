"""The command `backup`: copy a checkpoint out of reach of prune."""

from __future__ import annotations

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import BackupResult
from dist_ckpt.tools.rewrite.copying import plan_backup


@click.command()
@shared_options.path
@click.option("--overwrite", is_flag=True, help="Replace the backup of another save of this step.")
@shared_options.dry_run
@shared_options.json
def backup(path: str, *, overwrite: bool, dry_run: bool, as_json: bool) -> None:
    """Copy a checkpoint out of reach of prune.

    The copy is in the folder "backup" next to the checkpoint at PATH. Its files are hard links,
    which take no space. Where hard links are not possible, files are copied, and every byte is
    checked.

    \b
    dist-ckpt backup runs/a@latest
    """
    plan = plan_backup(path, overwrite=overwrite)
    target = output.run_plan(plan, "backup", dry_run=dry_run, as_json=as_json)
    if target is not None:
        output.print_result(BackupResult(path=target), target, as_json=as_json)
