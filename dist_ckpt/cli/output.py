"""Print the output of commands: text, tables, JSON, progress, and errors as exit codes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dist_ckpt.cli.results import (
    DryRunResult,
    JsonObject,
    PlannedFile,
    WrittenCheckpoint,
    convert,
    document_name,
    extend,
)
from dist_ckpt.core.format.index.model_description import as_json as plain_json
from dist_ckpt.core.storage.local.local_storage import describe_os_error
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.message_text import format_count, format_size
from dist_ckpt.reports import SaveReport
from dist_ckpt.runs.metrics import is_speed
from dist_ckpt.tools.new_files import Result, WritePlan

_CellValue = TypeVar("_CellValue")

# The exit codes, as in `docs/command-line.md`.
FINE = 0
PROBLEM_FOUND = 1
USAGE = 2
NOT_FOUND = 3
INCOMPATIBLE = 4
IO_ERROR = 5
REFUSED = 6
INTERRUPTED = 130
STOPPED = 143

# Without a terminal, progress is a line every `LINE_INTERVAL_S`. After a while it is a line after
# each further `LINE_INTERVAL_SHARE` of the elapsed time. So a day of work has some 200 lines.
LINE_INTERVAL_S = 5.0
LINE_INTERVAL_SHARE = 0.05
# The remaining time is estimated when this part of the work is done.
MIN_PART_FOR_ESTIMATE = 0.01
# A dry run lists at most this many files.
MAX_FILES = 30
# A table shows at most this many metrics of a checkpoint.
_MAX_METRICS = 4

# The longest wait: 30 years. The clocks of the system overflow not much later.
MAX_SECONDS = 1e9


class Seconds(click.FloatRange):
    """A number of seconds to wait. The range of click also accepts nan and 1e300."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number of seconds. Anything else is a usage error."""
        seconds = float(super().convert(value, param, ctx))
        if not seconds <= MAX_SECONDS:
            self.fail(f"give a number of seconds up to {MAX_SECONDS:g}", param, ctx)
        return seconds


def exit_code(error: Exception) -> int:
    """Return the exit code of an error."""
    match error:
        case NotFoundError():
            return NOT_FOUND
        case IncompatibleError():
            return INCOMPATIBLE
        case CorruptError():
            return PROBLEM_FOUND
        case ValueError() | TypeError() | ImportError():
            return USAGE
    return IO_ERROR


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Print an expected error as one line on stderr, without a traceback. Then exit."""
    try:
        yield
    except (CheckpointError, ValueError, TypeError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        text = str(error)
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            text = f"{error.filename}: " * bool(error.filename) + describe_os_error(error)
        message = printable(text, allowed="\n")
        click.echo(f"dist-ckpt: {message}", err=True)
        raise click.exceptions.Exit(exit_code(error)) from error
    except MemoryError as error:
        click.echo("dist-ckpt: out of memory: give the process more memory", err=True)
        raise click.exceptions.Exit(IO_ERROR) from error


@contextmanager
def exit_with(code: int) -> Iterator[None]:
    """Exit with a code when the block has printed its output."""
    try:
        yield
    except BrokenPipeError:  # the exit code stays, even if the output is not read
        if code == FINE:
            raise
    if code != FINE:
        raise click.exceptions.Exit(code)


def confirm(question: str, refused: str, *, about: Iterable[str] = ()) -> None:
    """Ask for confirmation of a change. Exit unless the answer is yes.

    First print the lines `about` the change. Without a terminal, print `refused` and exit. All of
    this goes to stderr, because stdout may be a document.
    """
    if not sys.stdin.isatty():
        click.echo(f"dist-ckpt: {printable(refused)}: add --yes to confirm", err=True)
        raise click.exceptions.Exit(REFUSED)
    for line in about:
        click.echo(printable(line), err=True)
    if not click.confirm(printable(question), err=True):
        raise click.exceptions.Exit(REFUSED)


def printable(text: str, *, allowed: str = "") -> str:
    """Escape control characters. Names in a checkpoint are untrusted, and could control a terminal.

    Line feeds are escaped too, unless they are `allowed`. So a name cannot look like a line of the
    output.
    """
    return "".join(c if c.isprintable() or c in allowed else repr(c)[1:-1] for c in text)


def print_json(document: JsonObject, *, indent: int | None = 2) -> None:
    """Print a document of `results.py`. With `indent=None` it is on one line."""
    click.echo(json.dumps(plain_json(msgspec.to_builtins(document, enc_hook=str)), indent=indent))


def print_result(document: JsonObject, text: str, *, as_json: bool) -> None:
    """Print a document as JSON, or its text for people."""
    if as_json:
        print_json(document)
    else:
        click.echo(printable(text))


@contextmanager
def needs_torch(label: str) -> Iterator[None]:
    """Raise ModuleNotFoundError with the command that installs torch, if torch is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f'{label} needs torch: pip install "dist-ckpt[torch]", or ".[torch]" in a clone'
        ) from None


def write_checkpoint(
    plan: WritePlan[SaveReport], document: type[WrittenCheckpoint], *, dry_run: bool, as_json: bool
) -> None:
    """Run a plan, show its progress, and print the report. For a dry run, print the plan."""
    report = run_plan(plan, document_name(document), dry_run=dry_run, as_json=as_json)
    if report is None:
        return
    if not as_json:
        for source in plan.sources:
            click.echo(printable(source))
    notes = [f"{report.num_linked} linked"] * bool(report.num_linked)
    if report.num_unchecked:
        notes.append(f"{format_count(report.num_unchecked, 'tensor')} without a checksum to check")
    files = f"{format_size(report.nbytes)} in {format_count(report.num_files, 'file')}"
    summary = ", ".join((format_count(report.num_tensors, "tensor"), files, *notes))
    print_result(convert(report, document), f"{report.path}: {summary}", as_json=as_json)


def run_plan(plan: WritePlan[Result], label: str, *, dry_run: bool, as_json: bool) -> Result | None:
    """Run a plan and show its progress. For a dry run, print the plan and return None."""
    if dry_run:
        _print_plan(plan, as_json=as_json)
        return None
    with progress(label) as update:
        return plan.run(update)


def _print_plan(plan: WritePlan[Any], *, as_json: bool) -> None:
    sizes = plan.list_files()
    nbytes = sum(sizes.values())
    if as_json:
        files = [PlannedFile(name=name, nbytes=num) for name, num in sizes.items()]
        document = extend(plan, DryRunResult, nbytes=nbytes, files=files, reads=plan.sources)
        print_json(document)
        return
    for source in plan.sources:
        click.echo(f"would be read  {printable(source)}")
    for path in plan.replaces:
        click.echo(f"would be replaced  {printable(path)}")
    for name, num in [*sizes.items()][:MAX_FILES]:
        click.echo(f"would be written  {printable(name)}  {format_size(num)}")
    if (num_more := len(sizes) - MAX_FILES) > 0:
        click.echo(f"... and {format_count(num_more, 'more file')}, which --json lists")
    total = f"{format_size(nbytes)} in {format_count(len(sizes), 'file')} would be written"
    click.echo(f"{printable(plan.path)}: {total}")


def format_duration(seconds: float) -> str:
    """Return a duration as text, in the largest unit that fits."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int]) -> None:
    """Print a table. The columns in `right` are aligned to the right."""
    click.echo("\n".join(table_lines(heads, rows, right)))


def cell(value: _CellValue | None, text: Callable[[_CellValue], str] = str) -> str:
    """Return the text of a table cell: "-" for None."""
    return "-" if value is None else text(value)


def metrics_cell(metrics: Mapping[str, float]) -> str:
    """Return the text of a table cell: the first metrics, because a trainer may log dozens."""
    texts = [f"{name}={value:g}" for name, value in metrics.items() if not is_speed(name)]
    shown = texts[:_MAX_METRICS]
    more = len(metrics) - len(shown)
    return ", ".join([*shown, *[f"{more} more"] * (more > 0)])


def table_lines(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int]
) -> list[str]:
    """Return the lines of a table, as `print_table` prints them."""
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
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a progress callback. It shows a bar on a terminal, and prints lines elsewhere."""
    console = Console(stderr=True)
    # A dumb terminal, such as in an editor, cannot show a bar.
    if sys.stderr.isatty() and not console.is_dumb_terminal:
        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Bar(*columns, console=console, transient=True) as bar:
            bar_id = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(bar_id, completed=done, total=total)
        return
    yield _ProgressLog(label).update


class _ProgressLog:
    """Progress as lines on stderr, one every few seconds. Short work prints none."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._began = self._printed_at = time.monotonic()
        self._first: tuple[float, int] | None = None

    def update(self, done: int, total: int) -> None:
        """Print a line if the last one is old enough."""
        now = time.monotonic()
        # Measure the rate from the first call: imports before it do not count.
        since, before = self._first = self._first or (now, done)
        if now - self._printed_at < max(LINE_INTERVAL_S, LINE_INTERVAL_SHARE * (now - self._began)):
            return
        self._printed_at = now
        rate = (done - before) / (now - since) if now > since else 0.0
        has_estimate = rate and total > done >= total * MIN_PART_FOR_ESTIMATE
        remaining = f", {format_duration((total - done) / rate)} left" if has_estimate else ""
        click.echo(
            f"{self._label}: {format_size(done)} of {format_size(total)}{remaining}", err=True
        )
