"""The command `watch`: follow a run."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import WatchedRow, WatchResult, extend
from dist_ckpt.core.commit.records.incarnations import NO_LIVENESS
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import CheckpointError, NotFoundError
from dist_ckpt.message_text import format_size
from dist_ckpt.runs import retention_policy as policies
from dist_ckpt.runs.listing import Listing
from dist_ckpt.runs.retention_policy import RetentionPolicy
from dist_ckpt.runs.watch_changes import (
    RunObservation,
    changes,
    describe_incarnation,
    kept_by,
    observe_run,
)

# The last changes are shown below the checkpoints: at most this many lines, and at most one third
# of the terminal.
MAX_EVENTS = 8
TERMINAL_PARTS = 3

# To list a large run takes long. At most this share of the time is spent on it.
MAX_TIME_SHARE = 0.2


@click.command()
@click.argument("root", type=shared_options.PATH)
@click.option(
    "--interval",
    "interval_s",
    type=output.Seconds(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two listings. Longer if a listing takes long.",
)
@click.option("--once", is_flag=True, help="Print the run once, and end.")
@click.option("--keep", "policy", help="Show which checkpoints this retention policy keeps.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on each line.")
def watch(root: str, *, interval_s: float, once: bool, policy: str | None, as_json: bool) -> None:
    """Follow the run in ROOT: new, open, protected and removed checkpoints.

    On a terminal it shows the current checkpoints. Otherwise it prints one line for each change.
    With --json it prints a document when there are changes. It waits for a folder that does not
    exist yet. It never changes the run. Ctrl-C ends it.

    \b
    dist-ckpt watch runs/a --keep "last(3) | best(2, min='val/loss')"
    dist-ckpt watch runs/a --once --json
    """
    storage, folder = open_storage(root)
    keep = None if policy is None else policies.parse(policy)
    if once:
        run = observe_run(storage, folder)
        if as_json:
            output.print_json(_document(run, folder, [], keep), indent=None)
        else:
            click.echo("\n".join(describe_run(run, keep)))
        return
    observations = _observe(storage, folder, interval_s, keep)
    with suppress(KeyboardInterrupt):
        if as_json:
            for observation, events in observations:
                if events:
                    output.print_json(_document(observation, folder, events, keep), indent=None)
        elif sys.stdout.isatty() and not Console().is_dumb_terminal:
            _show(observations, keep)
        else:
            for _, events in observations:
                for line in _with_time(events):
                    click.echo(line)


def _show(
    observations: Iterator[tuple[RunObservation | None, list[str]]], keep: RetentionPolicy | None
) -> None:
    """Show the run on the terminal, and the last changes below it."""
    console, last = Console(), deque[str](maxlen=MAX_EVENTS)
    with Live(console=console, auto_refresh=False) as live:
        for run, events in observations:
            last += _with_time(events)
            height = console.size.height - 1  # the last line is for the cursor
            newest = [*last][-(height // TERMINAL_PARTS) :]
            shown = [] if run is None else [*describe_run(run, keep, height - len(newest) - 1), ""]
            live.update(Text("\n".join([*shown, *newest]), no_wrap=True), refresh=True)


def _observe(
    storage: Storage, root: str, interval_s: float, keep: RetentionPolicy | None
) -> Iterator[tuple[RunObservation | None, list[str]]]:
    """Observe the run repeatedly. Yield each observation, and the changes before it."""
    before: RunObservation | None = None
    problem = ""
    while True:
        began = time.monotonic()
        try:
            after = observe_run(storage, root)
            events, problem = [*changes(before, after, keep)], ""
            before = after
        except CheckpointError as error:
            waits = isinstance(error, NotFoundError) and before is None
            text = f"{root} does not exist yet" if waits else f"{root} cannot be read now: {error}"
            events, problem = [text] * (text != problem), text
        yield before, events
        took_s = time.monotonic() - began
        time.sleep(max(interval_s, took_s / MAX_TIME_SHARE))


def _with_time(events: Sequence[str]) -> list[str]:
    now = time.strftime("%H:%M:%S")
    return [f"{now}  {output.printable(line)}" for line in events]


def _document(
    run: RunObservation | None, root: str, events: Sequence[str], keep: RetentionPolicy | None
) -> WatchResult:
    """Return the document of an observation. `run` is None if the folder does not exist yet."""
    run = run or RunObservation(time.time(), Listing(root, (), ()))
    reasons, newest = kept_by(run, keep), run.newest
    rows = []
    for checkpoint in run.listing.checkpoints:
        status = run.writing.get(checkpoint.path)
        nbytes_written = None if status is None else status.nbytes
        kept = reasons.get(checkpoint.path, ())
        rows.append(extend(checkpoint, WatchedRow, nbytes_written=nbytes_written, kept_by=kept))
    return extend(
        run,
        WatchResult,
        root=root,
        changes=tuple(events),
        incarnation=None if run.incarnation is None else run.incarnation.number,
        step=None if newest is None else newest.step,
        problem=run.listing.history_problem,
        checkpoints=tuple(rows),
    )


def describe_run(
    run: RunObservation, keep: RetentionPolicy | None, height: int | None = None
) -> list[str]:
    """Return the lines that describe a run: with `height`, at most as many lines."""
    head = [output.printable(run.listing.root)]
    if run.incarnation is not None:
        began = output.format_duration(run.at - run.incarnation.at)
        head.append(output.printable(f"{describe_incarnation(run.incarnation)} ({began} ago)"))
        last_seen = NO_LIVENESS
        if run.last_liveness is not None:
            last_seen = f"last seen {output.format_duration(run.at - run.last_liveness)} ago"
        head.append(last_seen)
    if (newest := run.newest) is not None:
        saved = output.format_duration(run.at - (newest.saved_at or 0.0))
        head.append(f"newest: step {newest.step}, saved {saved} ago")
    for path, status in run.writing.items():
        quiet = output.format_duration(run.at - status.modified_at)
        name = output.printable(os.path.basename(path))
        head.append(f"being written: {name}, {format_size(status.nbytes)}, last write {quiet} ago")
    if run.listing.history_problem:
        head.append(output.printable(run.listing.history_problem))
    # Two more lines are the head of the table and the number of older checkpoints.
    most = None if height is None else max(height - len(head) - 2, 1)
    return [*head, *_table(run, keep, most)]


def _table(run: RunObservation, keep: RetentionPolicy | None, most: int | None) -> Sequence[str]:
    checkpoints = run.listing.checkpoints
    if not checkpoints:
        return ["no checkpoints"]
    shown = checkpoints if most is None else checkpoints[-most:]
    reasons = kept_by(run, keep)
    rows = [
        (
            checkpoint.name if checkpoint.step is None else str(checkpoint.step),
            "orphaned" if checkpoint.is_orphaned else checkpoint.state,
            output.cell(checkpoint.nbytes, format_size),
            output.cell(checkpoint.saved_at, lambda at: output.format_duration(run.at - at)),
            output.metrics_cell(checkpoint.metrics),
            "; ".join(reasons.get(checkpoint.path, ())),
        )
        for checkpoint in shown
    ]
    heads = ("STEP", "STATE", "SIZE", "AGE", "METRICS", "KEPT BY")
    table = output.table_lines(heads, rows, right=frozenset({0, 2, 3}))
    num_older = len(checkpoints) - len(shown)
    return [table[0], *[f"... and {num_older} before these"] * bool(num_older), *table[1:]]
