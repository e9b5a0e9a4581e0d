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
from dist_ckpt.cli.results import WatchedRow, WatchResult
from dist_ckpt.core.commit.records.incarnations import NO_LIVENESS
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import CheckpointError, NotFoundError
from dist_ckpt.reports import size
from dist_ckpt.runs import retention_policy as policies
from dist_ckpt.runs.retention_policy import RetentionPolicy
from dist_ckpt.runs.watch_changes import (
    RunObservation,
    changes,
    describe_incarnation,
    kept_by,
    observe_run,
)

# What changed last, below what there is: so many lines, and no more than this part of a terminal.
NUM_EVENTS = 8
EVENTS_OF_TERMINAL = 3

# A look at a large run takes a while: at most this part of the time is spent with looking.
MOST_OF_TIME = 0.2


@click.command()
@click.argument("root", type=shared_options.PATH)
@click.option(
    "--interval",
    "interval_s",
    type=output.Seconds(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two looks; more where a look takes long.",
)
@click.option("--once", is_flag=True, help="Look once, print what there is, and end.")
@click.option("--keep", "policy", help="The run's policy: then it shows what its rules keep.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document a line.")
def watch(root: str, *, interval_s: float, once: bool, policy: str | None, as_json: bool) -> None:
    """Follow the run in ROOT: its newest step, what is being written, kept, and gone.

    On a terminal the checkpoints are shown as they are; else there is a line for each change. A
    folder that is not there yet is waited for. Ctrl-C ends it. Nothing is changed. With --json a
    document is printed for each look at which something has changed.

    \b
    dist-ckpt watch runs/a --keep "last(3) | best(2, min='val/loss')"
    dist-ckpt watch runs/a --once --json
    """  # noqa: D301 - click knows the backspace
    storage, where = open_storage(root)
    keep = None if policy is None else policies.parse(policy)
    if once:
        look = observe_run(storage, where)
        if as_json:
            output.print_json(_document(look, where, [], keep), indent=None)
        else:
            click.echo("\n".join(lines(look, keep)))
        return
    looks = _looks(storage, where, interval_s, keep)
    with suppress(KeyboardInterrupt):
        if as_json:
            for seen, events in looks:
                if events:
                    output.print_json(_document(seen, where, events, keep), indent=None)
        elif sys.stdout.isatty() and not Console().is_dumb_terminal:
            _show(looks, keep)
        else:
            for _, events in looks:
                for line in _timed(events):
                    click.echo(line)


def _show(
    looks: Iterator[tuple[RunObservation | None, list[str]]], keep: RetentionPolicy | None
) -> None:
    """Show the run on the terminal, and below it what changed last."""
    console, last = Console(), deque[str](maxlen=NUM_EVENTS)
    with Live(console=console, auto_refresh=False) as live:
        for look, events in looks:
            last += _timed(events)
            height = console.size.height - 1  # the cursor stands in the last
            newest = [*last][-(height // EVENTS_OF_TERMINAL) :]
            shown = [] if look is None else [*lines(look, keep, height - len(newest) - 1), ""]
            live.update(Text("\n".join([*shown, *newest]), no_wrap=True), refresh=True)


def _looks(
    storage: Storage, root: str, interval_s: float, keep: RetentionPolicy | None
) -> Iterator[tuple[RunObservation | None, list[str]]]:
    """Look again and again; yield what was seen last, if anything was, and what has changed."""
    before: RunObservation | None = None
    problem = ""
    while True:
        began = time.monotonic()
        try:
            look = observe_run(storage, root)
            events, problem = [*changes(before, look, keep)], ""
            before = look
        except CheckpointError as error:
            waits = isinstance(error, NotFoundError) and before is None
            text = f"{root} is not there yet" if waits else f"it cannot be read now: {error}"
            events, problem = [text] * (text != problem), text
        yield before, events
        took_s = time.monotonic() - began
        time.sleep(max(interval_s, took_s / MOST_OF_TIME))


def _timed(events: Sequence[str]) -> list[str]:
    now = time.strftime("%H:%M:%S")
    return [f"{now}  {output.printable(line)}" for line in events]


def _document(
    look: RunObservation | None, root: str, events: Sequence[str], keep: RetentionPolicy | None
) -> WatchResult:
    """Return the document of an observation; None if the folder does not exist yet."""
    if look is None:
        return WatchResult(
            root=root,
            at=time.time(),
            changes=tuple(events),
            incarnation=None,
            last_liveness=None,
            step=None,
            problem="",
            checkpoints=(),
        )
    kept, newest = kept_by(look, keep), look.newest
    rows = tuple(
        WatchedRow(
            name=checkpoint.name,
            step=checkpoint.step,
            state=checkpoint.state,
            nbytes=checkpoint.nbytes,
            saved_at=checkpoint.saved_at,
            metrics=checkpoint.metrics,
            is_orphaned=checkpoint.is_orphaned,
            nbytes_written=None
            if (status := look.writing.get(checkpoint.path)) is None
            else status.nbytes,
            kept_by=kept.get(checkpoint.path, ()),
        )
        for checkpoint in look.listing.checkpoints
    )
    return WatchResult(
        root=root,
        at=look.at,
        changes=tuple(events),
        incarnation=None if look.incarnation is None else look.incarnation.number,
        last_liveness=look.last_liveness,
        step=None if newest is None else newest.step,
        problem=look.listing.history_problem,
        checkpoints=rows,
    )


def lines(
    look: RunObservation, keep: RetentionPolicy | None, height: int | None = None
) -> list[str]:
    """Return what is to be shown of a run, in so many lines: of its checkpoints the newest."""
    head = [output.printable(look.listing.root)]
    if look.incarnation is not None:
        began = output.age(look.at - look.incarnation.at)
        head.append(output.printable(f"{describe_incarnation(look.incarnation)} ({began} ago)"))
        last_seen = NO_LIVENESS
        if look.last_liveness is not None:
            last_seen = f"last seen {output.age(look.at - look.last_liveness)} ago"
        head.append(last_seen)
    if (newest := look.newest) is not None:
        saved = output.age(look.at - (newest.saved_at or 0.0))
        head.append(f"newest: step {newest.step}, saved {saved} ago")
    for path, status in look.writing.items():
        quiet = output.age(look.at - status.modified_at)
        name = output.printable(os.path.basename(path))
        head.append(f"being written: {name}, {size(status.nbytes)}, the last of it {quiet} ago")
    if look.listing.history_problem:
        head.append(output.printable(look.listing.history_problem))
    # Two are the head of the table, and how many are left out.
    most = None if height is None else max(height - len(head) - 2, 1)
    return [*head, *_table(look, keep, most)]


def _table(look: RunObservation, keep: RetentionPolicy | None, most: int | None) -> Sequence[str]:
    there = look.listing.checkpoints
    if not there:
        return ["no checkpoints"]
    shown = there if most is None else there[-most:]
    kept = kept_by(look, keep)
    rows = [
        (
            checkpoint.name if checkpoint.step is None else str(checkpoint.step),
            "orphaned" if checkpoint.is_orphaned else checkpoint.state,
            "-" if checkpoint.nbytes is None else size(checkpoint.nbytes),
            "-" if checkpoint.saved_at is None else output.age(look.at - checkpoint.saved_at),
            output.metrics_cell(checkpoint.metrics),
            "; ".join(kept.get(checkpoint.path, ())),
        )
        for checkpoint in shown
    ]
    heads = ("STEP", "STATE", "SIZE", "AGE", "METRICS", "KEPT BY")
    table = output.table_lines(heads, rows, right=frozenset({0, 2, 3}))
    earlier = len(there) - len(shown)
    return [table[0], *[f"... and {earlier} before these"] * bool(earlier), *table[1:]]
