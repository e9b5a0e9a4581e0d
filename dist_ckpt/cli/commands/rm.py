"""The command `rm`: delete a checkpoint."""

from __future__ import annotations

import os

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import RmResult
from dist_ckpt.core.commit import removal
from dist_ckpt.core.commit.attempts import list_attempts
from dist_ckpt.core.commit.records.record_store import check_upgraded
from dist_ckpt.runs.prune import check_unprotected, delete_at
from dist_ckpt.runs.selectors import open_resolved


@click.command()
@shared_options.path
@shared_options.yes
@shared_options.dry_run
@click.option("--force", is_flag=True, help="Delete it even if it is pinned, tagged or leased.")
@shared_options.json
def rm(path: str, *, yes: bool, dry_run: bool, force: bool, as_json: bool) -> None:
    """Delete the checkpoint at PATH.

    This cannot be undone. A pinned, tagged or leased checkpoint is deleted only with --force.

    \b
    dist-ckpt rm runs/a@12000 --dry-run
    """
    storage, folder = open_resolved(path)
    removal.check_deletable(storage, folder)
    if dry_run:
        check_upgraded(storage, os.path.dirname(folder))
        if not force:
            check_unprotected(storage, folder, list_attempts(storage, folder))
    else:
        if not yes:
            output.confirm(f"Delete {folder}?", f"{folder} is not deleted")
        delete_at(storage, folder, force=force)
    text = f"{'would be ' * dry_run}deleted {folder}"
    output.print_result(RmResult(path=folder, dry_run=dry_run), text, as_json=as_json)
