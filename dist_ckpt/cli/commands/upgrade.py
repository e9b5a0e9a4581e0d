"""The command `upgrade`: convert the records of an older version."""

from __future__ import annotations

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import UpgradeResult, extend
from dist_ckpt.core.storage import open_storage, real_path
from dist_ckpt.message_text import format_count
from dist_ckpt.runs.upgrade import plan_upgrade
from dist_ckpt.runs.upgrade import upgrade as convert_root


@click.command()
@click.argument("root", type=shared_options.PATH)
@shared_options.yes
@shared_options.dry_run
@shared_options.json
def upgrade(root: str, *, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Convert the records of dist_ckpt 0.1.0 in the folder ROOT of a run.

    Version 0.1.0 stored pins, tags, leases and metrics in ROOT/.facts, and the incarnations of the
    run in ROOT/.starts. They become ROOT/.annotations and ROOT/.incarnations, also next to backups.
    Checkpoints do not change. Before the upgrade, checkpoints in ROOT can be read, but not
    saved or removed.

    End the jobs of 0.1.0 first. If a job seems to use ROOT, upgrade asks for confirmation. If the
    upgrade is interrupted, run it again. Afterwards 0.1.0 cannot read the records.

    \b
    dist-ckpt upgrade runs/a --dry-run
    dist-ckpt upgrade runs/a
    """
    storage, path = open_storage(root)
    folder = real_path(path)
    plan = plan_upgrade(storage, folder, dry_run=dry_run)
    if not dry_run:
        if plan.alive and not yes:
            output.confirm(
                f"Upgrade {folder} anyway?",
                f"{folder} is not upgraded, as jobs of 0.1.0 may use it: {'; '.join(plan.alive)}",
                about=plan.alive,
            )
        plan = convert_root(storage, folder)
    if dry_run and plan.folders and not as_json:
        for job in plan.alive:
            click.echo(f"may use it: {output.printable(job)}")
    annotations = format_count(plan.num_annotations, "annotation")
    counts = f"{annotations} and {format_count(plan.num_incarnations, 'incarnation')}"
    summary = f"{counts} {'would be ' * dry_run}converted" if plan.folders else "nothing to upgrade"
    document = extend(plan, UpgradeResult, dry_run=dry_run)
    output.print_result(document, f"{plan.root}: {summary}", as_json=as_json)
