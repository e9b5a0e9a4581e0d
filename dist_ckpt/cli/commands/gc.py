"""The command `gc`: remove the files of crashed and aborted saves."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from filelock import FileLock, Timeout

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import GcResult
from dist_ckpt.core.commit import removal
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.errors import StorageError
from dist_ckpt.runs.selectors import open_resolved


@click.command()
@shared_options.path
@click.option(
    "--grace",
    "grace_s",
    type=output.Seconds(min=0),
    default=3600.0,
    show_default=True,
    help="An open attempt is dead if nothing was written to it for this many seconds.",
)
@shared_options.dry_run
@shared_options.json
def gc(path: str, *, grace_s: float, dry_run: bool, as_json: bool) -> None:
    """Remove the files that dead and aborted saves left in PATH.

    PATH is a run's folder, or one checkpoint. Committed checkpoints and files of other programs
    stay. A running save writes all the time, so --grace protects it. gc does not ask for
    confirmation, as nothing can load the removed files. What this user may not read or remove is
    named, and the exit code is 5 then.

    \b
    dist-ckpt gc runs/a
    dist-ckpt gc runs/a --grace 60 --dry-run
    """
    storage, root = open_resolved(path)
    refused: list[str] = []
    if dry_run:
        now = time.time()
        removed = removal.list_all_garbage(storage, root, grace_s=grace_s, now=now, refused=refused)
    else:
        with exclusive_gc(root):
            removed = removal.remove_all_garbage(storage, root, grace_s=grace_s, refused=refused)
    for text in refused:
        click.echo(f"dist-ckpt: {output.printable(text)}", err=True)
    with output.exit_with(output.IO_ERROR if refused else output.FINE):
        if as_json:
            output.print_json(GcResult(path=root, dry_run=dry_run, removed=tuple(removed)))
            return
        verb = "would be removed" if dry_run else "removed"
        for name in removed:
            click.echo(f"{verb} {output.printable(name)}")
        click.echo(f"{len(removed)} {verb}")


@contextmanager
def exclusive_gc(root: str) -> Iterator[None]:
    """Lock a root against other `gc` commands of this user on this host.

    This only avoids the errors of two concurrent commands. The commit order protects the data.
    Raises StorageError if another command has the lock.
    """
    key = document_digest(os.fsencode(os.path.realpath(root)))
    # Not in the root: readers of the root would have to ignore the lock file.
    lock = FileLock(Path(tempfile.gettempdir()) / f"dist-ckpt-gc-{os.getuid()}-{key}.lock")
    try:
        acquired = lock.acquire(timeout=0)
    except Timeout:
        raise StorageError(
            f"another dist-ckpt gc is running in {root}: wait until it has ended, then try again"
        ) from None
    with acquired:
        yield
