"""The command `pin`: protect a checkpoint until it is unpinned."""

from __future__ import annotations

import os
import time

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import PinResult
from dist_ckpt.core.commit.records import protection_protocol
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef
from dist_ckpt.errors import NotFoundError
from dist_ckpt.runs.listing import list_run
from dist_ckpt.runs.selectors import checkpoint_ref_of, open_resolved


@click.command()
@shared_options.path
@click.option("--why", help="The reason, which ls and errors show. Default: that of its pin.")
@click.option("--remove", is_flag=True, help="Remove the pin.")
@shared_options.dry_run
@shared_options.json
def pin(path: str, *, why: str | None, remove: bool, dry_run: bool, as_json: bool) -> None:
    """Protect the checkpoint PATH until you remove the pin.

    prune and rm do not remove a pinned checkpoint; only "rm --force" does.

    \b
    dist-ckpt pin runs/a@12000 --why "results of the paper"
    dist-ckpt pin runs/a@12000 --remove
    """
    if remove and why:
        raise click.UsageError("--why and --remove exclude each other: a removed pin has no reason")
    ref = checkpoint_to_protect(path)
    if why is None:
        why = "" if remove else protection_protocol.pin_reason(ref)
    if not dry_run:
        if remove:
            protection_protocol.unpin(ref)
        else:
            protection_protocol.pin(ref, why)
    text = f"{'would be: ' * dry_run}{'unpinned' if remove else 'pinned'} {ref.path}"
    path, step = ref.path, ref.key[0]
    document = PinResult(path=path, step=step, why=why, removed=remove, dry_run=dry_run)
    output.print_result(document, text, as_json=as_json)


def checkpoint_to_protect(path: str) -> CheckpointRef:
    """Return the committed checkpoint at a path or selector. NotFoundError if there is none."""
    storage, folder = open_resolved(path)
    for checkpoint in list_run(storage, folder, now=time.time()).checkpoints:
        if checkpoint.path == folder:
            if checkpoint.state != "committed":
                raise NotFoundError(
                    f"{path} is {checkpoint.state}: only a committed checkpoint can be protected"
                )
            return checkpoint_ref_of(storage, checkpoint)
    root = os.path.basename(folder)
    raise NotFoundError(f"{path} is not a checkpoint: give one, such as {root}@latest")
