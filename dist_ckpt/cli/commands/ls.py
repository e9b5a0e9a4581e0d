"""The command `ls`: list the checkpoints in a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import ListedRow, LsResult, convert
from dist_ckpt.core.commit.attempts import list_entries
from dist_ckpt.core.format.filenames import is_reserved_name
from dist_ckpt.core.storage import open_storage
from dist_ckpt.message_text import format_count, format_size, listed
from dist_ckpt.runs.listing import RunCheckpoint, checkpoints, is_run_folder
from dist_ckpt.runs.selectors import resolve

# So many columns are always shown. The other columns are shown if they are not empty.
_NUM_FIXED_COLUMNS = 7


@click.command()
@shared_options.path
@shared_options.json
def ls(path: str, *, as_json: bool) -> None:
    """List the checkpoints in a folder.

    PATH is a run's folder, or one checkpoint. STATE is "committed", or the reason why the
    checkpoint cannot be loaded. "open" means that a save is running or has crashed; "dist-ckpt gc"
    removes crashed saves. "orphaned" means that the run later resumed from an earlier step.
    "checked" means that "verify" or a load has checked every byte. "unreadable" means that this
    user may not read it, or that the storage failed; the exit code is 5 then. The table shows the
    first few metrics; --json prints all. The total counts a file once for each checkpoint that
    links it.

    \b
    dist-ckpt ls runs/a
    """
    listing, below = checkpoints(resolve(path)), _runs_in(path)
    is_whole = all(checkpoint.state != "unreadable" for checkpoint in listing)
    with output.exit_with(output.FINE if is_whole else output.IO_ERROR):
        if as_json:
            rows = convert(listing, tuple[ListedRow, ...])
            output.print_json(LsResult(path=path, checkpoints=rows, runs=tuple(below)))
        else:
            _print_table(path, listing, below)


def _print_table(path: str, listing: Sequence[RunCheckpoint], below: Sequence[str]) -> None:
    if not listing:
        hint = f", but in {listed(below)}: list one of them" if below else ""
        click.echo(output.printable(f"no checkpoints in {path}{hint}"))
        return
    now = time.time()
    cells = [
        (
            checkpoint.name,
            output.cell(checkpoint.step),
            checkpoint.state,
            output.cell(checkpoint.nbytes, format_size),
            output.cell(checkpoint.world_size),
            output.cell(checkpoint.num_tensors),
            output.cell(checkpoint.saved_at, lambda at: output.format_duration(now - at)),
            output.metrics_cell(checkpoint.metrics),
            "; ".join(_notes(checkpoint)),
        )
        for checkpoint in listing
    ]
    heads = ("NAME", "STEP", "STATE", "SIZE", "RANKS", "TENSORS", "AGE", "METRICS", "NOTES")
    shown = [i for i in range(len(heads)) if i < _NUM_FIXED_COLUMNS or any(row[i] for row in cells)]
    output.print_table(
        [heads[i] for i in shown],
        [[row[i] for i in shown] for row in cells],
        right=frozenset({1, 3, 4, 5, 6}),
    )
    total = format_size(sum(checkpoint.nbytes or 0 for checkpoint in listing))
    click.echo(f"{format_count(len(listing), 'checkpoint')}, {total}")
    for checkpoint in listing:
        is_unreadable = checkpoint.state in ("damaged", "incompatible", "unreadable")
        if problem := checkpoint.damage or (checkpoint.problem if is_unreadable else None):
            click.echo(f"{output.printable(checkpoint.name)}: {output.printable(problem)}")
    if below:
        click.echo(output.printable(f"there are more in {listed(below)}: list one of them"))


def _notes(checkpoint: RunCheckpoint) -> list[str]:
    """Return the annotations of a checkpoint as texts."""
    notes = ["orphaned"] * checkpoint.is_orphaned + ["checked"] * checkpoint.is_verified
    notes += [f"link to {checkpoint.link}"] if checkpoint.link else []
    return [*["damaged"] * (checkpoint.damage is not None), *notes, *checkpoint.protected_by]


def _runs_in(path: str) -> list[str]:
    """Return the folders of runs in a folder."""
    storage, root = open_storage(path)
    folders = [entry.name for entry in list_entries(storage, root) if entry.kind == "folder"]
    names = [name for name in folders if not is_reserved_name(name)]
    return [os.path.join(path, name) for name in names if is_run_folder(storage, f"{root}/{name}")]
