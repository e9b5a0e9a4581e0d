"""The command `ls`: list the checkpoints in a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import ListedRow, LsResult, convert
from dist_ckpt.core.commit.attempts import list_entries
from dist_ckpt.core.format.filenames import is_reserved_name
from dist_ckpt.core.storage import open_storage
from dist_ckpt.message_text import format_count, format_size, listed
from dist_ckpt.runs.listing import RunCheckpoint, checkpoints, is_run_folder
from dist_ckpt.runs.selectors import resolve


class _Column(NamedTuple):
    """A column of the table. An optional one is shown if any of its cells has text."""

    head: str
    cell: Callable[[RunCheckpoint], str]
    is_number: bool = False
    is_optional: bool = False


def _columns(now: float) -> tuple[_Column, ...]:
    cell = output.cell
    return (
        _Column("NAME", lambda row: row.name),
        _Column("STEP", lambda row: cell(row.step), is_number=True),
        _Column("STATE", lambda row: row.state),
        _Column("SIZE", lambda row: cell(row.nbytes, format_size), is_number=True),
        _Column("RANKS", lambda row: cell(row.world_size), is_number=True),
        _Column("TENSORS", lambda row: cell(row.num_tensors), is_number=True),
        _Column("AGE", lambda row: cell(row.saved_at, partial(_age, now)), is_number=True),
        _Column("METRICS", lambda row: output.metrics_cell(row.metrics), is_optional=True),
        _Column("NOTES", lambda row: "; ".join(_notes(row)), is_optional=True),
    )


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
    columns = [
        column
        for column in _columns(time.time())
        if not column.is_optional or any(map(column.cell, listing))
    ]
    output.print_table(
        [column.head for column in columns],
        [[column.cell(row) for column in columns] for row in listing],
        right=frozenset(n for n, column in enumerate(columns) if column.is_number),
    )
    total = format_size(sum(checkpoint.nbytes or 0 for checkpoint in listing))
    click.echo(f"{format_count(len(listing), 'checkpoint')}, {total}")
    for checkpoint in listing:
        is_unreadable = checkpoint.state in ("damaged", "incompatible", "unreadable")
        if problem := checkpoint.damage or (checkpoint.problem if is_unreadable else None):
            click.echo(f"{output.printable(checkpoint.name)}: {output.printable(problem)}")
    if below:
        click.echo(output.printable(f"there are more in {listed(below)}: list one of them"))


def _age(now: float, saved_at: float) -> str:
    return output.format_duration(now - saved_at)


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
