"""The command `pin`: protect a checkpoint until it is unpinned."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import PinResult, TagResult, convert
from dist_ckpt.core.commit.records import leases
from dist_ckpt.core.commit.records.leases import CheckpointRef
from dist_ckpt.errors import NotFoundError
from dist_ckpt.runs.listing import list_run
from dist_ckpt.runs.selectors import checkpoint_ref_of, open_resolved


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


def print_protection(
    document: type[PinResult] | type[TagResult],
    subject: CheckpointRef,
    facts: Mapping[str, object],
    text: str,
    how: tuple[bool, bool],
) -> None:
    """Print what keeps a checkpoint now or does no longer, as a text or a document of that name."""
    dry_run, as_json = how
    if as_json:
        about = {"path": subject.path, "step": subject.where[0], "dry_run": dry_run}
        output.print_json(convert({**about, **facts}, document))
    else:
        click.echo(f"{'would be: ' * dry_run}{output.printable(text)}")


def checkpoint_to_protect(path: str) -> CheckpointRef:
    """Return the one checkpoint at a path, or that a selector names. NotFoundError."""
    storage, where = open_resolved(path)
    for checkpoint in list_run(storage, where, now=time.time()).checkpoints:
        if checkpoint.path == where:
            if checkpoint.state != "committed":
                raise NotFoundError(f"{path} is {checkpoint.state}: only what is committed is kept")
            return checkpoint_ref_of(storage, checkpoint)
    root = os.path.basename(where)
    raise NotFoundError(f"{path} is no checkpoint: name one, such as {root}@latest")
