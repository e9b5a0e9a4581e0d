"""The command `pin`: protect a checkpoint until it is unpinned."""

from __future__ import annotations

import click

from dist_ckpt.cli import shared_options
from dist_ckpt.cli.protected_checkpoint import checkpoint_to_protect, print_protection
from dist_ckpt.cli.results import PinResult
from dist_ckpt.core.commit.records import leases


@click.command()
@shared_options.path
@click.option("--why", default="", help="Shown by ls, and by commands that refuse to remove it.")
@click.option("--remove", is_flag=True, help="Remove the pin.")
@shared_options.dry_run
@shared_options.json
def pin(path: str, *, why: str, remove: bool, dry_run: bool, as_json: bool) -> None:
    """Keep the checkpoint PATH until it is unpinned, whatever is pruned or deleted.

    \b
    dist-ckpt pin runs/a@12000 --why "the one of the paper"
    dist-ckpt pin runs/a@12000 --remove
    """  # noqa: D301 - click knows the backspace
    if remove and why:
        raise click.UsageError(
            "--why and --remove are given: a pin that is taken away says nothing"
        )
    subject = checkpoint_to_protect(path)
    if not dry_run:
        if remove:
            leases.unpin(subject)
        else:
            leases.pin(subject, why)
    text = f"{'unpinned' if remove else 'pinned'} {subject.path}"
    print_protection(PinResult, subject, {"why": why, "removed": remove}, text, (dry_run, as_json))
