"""What the commands print: text, JSON, progress, and errors as exit codes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dist_ckpt.cli import results
from dist_ckpt.cli.results import JsonObject, convert
from dist_ckpt.core.format.index.model_description import as_json as plain_json
from dist_ckpt.core.storage.local.local_storage import with_remedy
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
)
from dist_ckpt.reports import SaveReport, size
from dist_ckpt.tools.rewrite.write_plan import Result, WritePlan

FINE, FINDING, USAGE, NOT_FOUND, INCOMPATIBLE, IO_ERROR, REFUSED = range(7)
INTERRUPTED = 130
STOPPED = 143

# Where there is no terminal, a log gets a line so often, and less often the longer it takes: a day
# of work is some 200 lines.
LINE_S = 5.0
LINE_OF_TIME = 0.05
# How long all takes is not told by less of it.
PART_THAT_TELLS = 0.01
# So many files are named of those that would be written.
MOST_FILES = 30
# Of those of one checkpoint in a table.
_MOST_METRICS = 4

# No wait is longer: it is 30 years, and the system's clocks do not take much more.
MOST_SECONDS = 1e9


class Seconds(click.FloatRange):
    """A number of seconds that can be waited for; click's own range takes nan and 1e300 as well."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number of seconds; what is none is a usage error."""
        seconds = float(super().convert(value, param, ctx))
        if not seconds <= MOST_SECONDS:
            self.fail(f"give a number of seconds, up to {MOST_SECONDS:g}", param, ctx)
        return seconds


def exit_code(error: Exception) -> int:
    """Return the exit code that tells a script what kind of error this was."""
    match error:
        case NotFoundError():
            return NOT_FOUND
        case IncompatibleError():
            return INCOMPATIBLE
        case CorruptError():
            return FINDING
        case ValueError() | TypeError() | ImportError():
            return USAGE
    return IO_ERROR


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Turn what a user can run into one line on stderr and an exit code, never a traceback."""
    try:
        yield
    except (CheckpointError, ValueError, TypeError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        message = printable(_error_text(error), allowed="\n")
        click.echo(f"dist-ckpt: {message}", err=True)
        raise click.exceptions.Exit(exit_code(error)) from error
    except MemoryError as error:
        click.echo("dist-ckpt: there is not enough memory for that: give it more", err=True)
        raise click.exceptions.Exit(IO_ERROR) from error


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, CheckpointError):
        return f"{error.filename}: {with_remedy(error)}" if error.filename else with_remedy(error)
    return str(error)


@contextmanager
def exit_with(code: int) -> Iterator[None]:
    """Print, and exit with a code."""
    try:
        yield
    except BrokenPipeError:  # nobody reads on: what was found is the exit code all the same
        if code == FINE:
            raise
    if code != FINE:
        raise click.exceptions.Exit(code)


def confirm(question: str, refused: str, *, about: Iterable[str] = ()) -> None:
    """Ask whether to do what cannot be undone, having told what it is `about`; exit if not.

    Where there is nobody to ask it says what was `refused`. All of it is on stderr: what a command
    prints may be a document.
    """
    if not sys.stdin.isatty():
        click.echo(f"dist-ckpt: {printable(refused)}: say --yes to mean it", err=True)
        raise click.exceptions.Exit(REFUSED)
    for line in about:
        click.echo(printable(line), err=True)
    if not click.confirm(printable(question), err=True):
        raise click.exceptions.Exit(REFUSED)


def printable(text: str, *, allowed: str = "") -> str:
    """Escape what could steer a terminal: names in a checkpoint are somebody else's text.

    Also line feeds, unless they are `allowed`: a name must not look like a line of ours.
    """
    return "".join(c if c.isprintable() or c in allowed else repr(c)[1:-1] for c in text)


def print_json(
    document: JsonObject | str, facts: Mapping[str, object] | None = None, *, indent: int | None = 2
) -> None:
    """Print a document of `results`; without `indent` on one line."""
    if isinstance(document, str):
        document = convert(facts, results.BY_NAME[document])
    click.echo(json.dumps(plain_json(msgspec.to_builtins(document, enc_hook=str)), indent=indent))


def print_written(name: str, report: SaveReport, text: str, *, as_json: bool) -> None:
    """Print the report of a written checkpoint, as text or as a document."""
    if as_json:
        print_json(convert(report, results.BY_NAME[name]))
    else:
        click.echo(printable(text))


def run_plan(plan: WritePlan[Result], label: str, *, dry_run: bool, as_json: bool) -> Result | None:
    """Run a plan and show its progress. For `--dry-run`, print it instead and return None."""
    if dry_run:
        _print_plan(plan, as_json=as_json)
        return None
    with progress(label) as update:
        return plan.run(progress=update)


def _print_plan(plan: WritePlan[Any], *, as_json: bool) -> None:
    """Print the target of a plan, its files, what it replaces, and its sources."""
    sizes = plan.files
    if as_json:
        files = [{"name": name, "nbytes": nbytes} for name, nbytes in sizes.items()]
        facts = {"path": plan.path, "nbytes": sum(sizes.values()), "files": files}
        replaces, sources = list(plan.replaces), list(plan.sources)
        print_json("dry-run", {**facts, "replaces": replaces, "reads": sources})
        return
    for source in plan.sources:
        click.echo(f"would be read  {printable(source)}")
    for gone in plan.replaces:
        click.echo(f"would be replaced  {printable(gone)}")
    for name, nbytes in [*sizes.items()][:MOST_FILES]:
        click.echo(f"would be written  {printable(name)}  {size(nbytes)}")
    if (more := len(sizes) - MOST_FILES) > 0:
        click.echo(f"... and {more} files more, which --json lists")
    total = f"{size(sum(sizes.values()))} in {len(sizes)} files would be written"
    click.echo(f"{printable(plan.path)}: {total}")


def age(seconds: float) -> str:
    """Return an age for people: the largest unit that fits."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int]) -> None:
    """Print columns as `table_lines` lays them out."""
    click.echo("\n".join(table_lines(heads, rows, right)))


def metrics_cell(metrics: Mapping[str, float]) -> str:
    """Return what was measured for a cell of a table: a few, for trainers note dozens."""
    shown = [f"{name}={value:g}" for name, value in metrics.items()]
    more = len(shown) - _MOST_METRICS
    return ", ".join([*shown[:_MOST_METRICS], *[f"{more} more"] * (more > 0)])


def table_lines(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int]
) -> list[str]:
    """Lay out columns as wide as they need to be; those in `right` are aligned to the right."""
    lines = []
    table = [list(heads), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    for row in table:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback (bytes done, bytes in all): a bar on a terminal, else lines in a log."""
    console = Console(stderr=True)
    # A dumb one, such as that of an editor, would be shown no bar: it gets lines.
    if sys.stderr.isatty() and not console.is_dumb_terminal:
        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Bar(*columns, console=console, transient=True) as bar:
            shown = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(shown, completed=done, total=total)
        return
    yield _Log(what).tell


class _Log:
    """What a log is told of long work: a line every few seconds, and none of what is soon done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = self._printed_at = time.monotonic()
        self._first: tuple[float, int] | None = None

    def tell(self, done: int, total: int) -> None:
        """Print a line if it is time for one."""
        now = time.monotonic()
        # What was done before the first word, such as imports, has no such rate.
        since, before = self._first = self._first or (now, done)
        if now - self._printed_at < max(LINE_S, LINE_OF_TIME * (now - self._began)):
            return
        self._printed_at = now
        rate = (done - before) / (now - since) if now > since else 0.0
        is_known = rate and total > done >= total * PART_THAT_TELLS
        left = f", {age((total - done) / rate)} left" if is_known else ""
        click.echo(f"{self._what}: {size(done)} of {size(total)}{left}", err=True)
