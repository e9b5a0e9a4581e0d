"""The command `tag`: name a checkpoint of a run, and protect it."""

from __future__ import annotations

import time

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.commands.pin import checkpoint_to_protect
from dist_ckpt.cli.results import TagResult
from dist_ckpt.core.commit.records import protection_protocol
from dist_ckpt.errors import NotFoundError
from dist_ckpt.runs.listing import list_run


@click.command()
@shared_options.path
@click.argument("name")
@click.option("--remove", is_flag=True, help="Remove the tag.")
@shared_options.dry_run
@shared_options.json
def tag(path: str, name: str, *, remove: bool, dry_run: bool, as_json: bool) -> None:
    """Give the checkpoint PATH the tag NAME.

    A tag protects a checkpoint like a pin. Every command takes the selector "runs/a@tag:NAME". Only
    one checkpoint of a run has a given tag: a second call moves the tag.

    \b
    dist-ckpt tag runs/a@min:val/loss release
    """
    if not name:
        raise click.UsageError("NAME is empty: give the name of the tag")
    ref = checkpoint_to_protect(path)
    if remove:
        listing = list_run(ref.storage, ref.path, now=time.time())
        if not any(name in checkpoint.tags for checkpoint in listing.checkpoints):
            raise NotFoundError(f"{ref.path} does not have the tag {name!r}; see dist-ckpt ls")
    if not dry_run:
        if remove:
            protection_protocol.untag(ref, name)
        else:
            protection_protocol.tag(ref, name)
    change = "removed from" if remove else "on"
    text = f"{'would be: ' * dry_run}tag {name!r} {change} {ref.path}"
    path, step = ref.path, ref.key[0]
    document = TagResult(path=path, step=step, name=name, removed=remove, dry_run=dry_run)
    output.print_result(document, text, as_json=as_json)
