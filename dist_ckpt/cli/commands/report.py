"""The command `report`: write a page about a checkpoint or a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.report_results import CheckpointReport, DamagedReport, RunReport
from dist_ckpt.cli.results import convert
from dist_ckpt.message_text import format_count
from dist_ckpt.reports import Progress
from dist_ckpt.tools.report.report_content import CHECKS, Check
from dist_ckpt.tools.report.write_report import check_target, report_facts, write_report


@click.command()
@shared_options.path
@click.option(
    "-o",
    "--output",
    "file",
    type=shared_options.PATH,
    help="The file to write.  [default: report.html]",
)
@click.option(
    "--verify",
    "check",
    type=click.Choice(CHECKS),
    default="quick",
    show_default=True,
    help="The check for damage.",
)
@click.option("--overwrite", is_flag=True, help="Also replace a file that is not a report.")
@shared_options.dry_run
@shared_options.json
def report(
    path: str, *, file: str | None, check: Check, overwrite: bool, dry_run: bool, as_json: bool
) -> None:
    """Write a page about a checkpoint or a run.

    PATH is one checkpoint, or a run's folder. The page is one HTML file that loads nothing from
    other files or the network. It replaces an older report. With --json no page is written.

    The page of a checkpoint shows its sizes by name and by rank, damage, attached files,
    configuration and metadata. The page of a run shows its saves and their durations, metrics,
    protected, orphaned and damaged checkpoints, and sizes.

    Exit code 1 if a checkpoint is damaged, 5 if one could not be checked.

    \b
    dist-ckpt report runs/a -o run.html
    dist-ckpt report runs/a@latest --verify full
    """
    if as_json and (file is not None or overwrite or dry_run):
        raise click.UsageError("--json writes no page: leave out -o, --overwrite and --dry-run")
    file = file or "report.html"
    if dry_run:
        report_facts(path, check="none", progress_of=lambda _: lambda *_: None)
        replaces = check_target(file, overwrite=overwrite) and os.path.lexists(file)
        click.echo(output.printable(f"{file}: would be {'replaced' if replaces else 'written'}"))
        return
    with ExitStack() as bars:

        def progress_of(label: str) -> Progress:
            bars.close()  # end the bar of the last checkpoint
            return bars.enter_context(output.progress(label))

        if as_json:
            facts = report_facts(path, check=check, progress_of=progress_of)
        else:
            facts = write_report(
                path, file, check=check, overwrite=overwrite, progress_of=progress_of
            )
    document = _document(facts)
    with output.exit_with(_code(document)):
        if as_json:
            output.print_json(document)
        else:
            click.echo(output.printable(f"{file}: {_summary(document)}"))


def _document(facts: Mapping[str, Any]) -> RunReport | DamagedReport:
    if facts["about"] == "run":
        return convert(facts, RunReport)
    return convert(facts, CheckpointReport if facts["unreadable"] is None else DamagedReport)


def _summary(report: RunReport | DamagedReport) -> str:
    if isinstance(report, RunReport):
        by_check = " by a quick check" if report.check == "quick" and not report.num_damaged else ""
        is_known = report.check != "none" or report.num_damaged
        checked = f", {report.num_damaged} damaged{by_check}" if is_known else ""
        num_failed = sum(row.has_failed for row in report.checkpoints)
        failed = f", {num_failed} could not be checked" if num_failed else ""
        return f"{format_count(report.num_checkpoints, 'checkpoint')}{checked}{failed}"
    check = report.verification
    if check.result == "not checked":
        return f"one checkpoint, not checked{f': {check.why}' * check.has_failed}"
    problems = format_count(check.num_problems, "problem")
    by_check = "" if check.num_problems else f" by the {check.level} check"
    return f"one checkpoint, {problems}{by_check}"


def _code(report: RunReport | DamagedReport) -> int:
    """Return the exit code. It has the same meaning as that of `dist-ckpt verify`."""
    if not isinstance(report, RunReport):
        if report.unreadable or report.verification.problems:
            return output.PROBLEM_FOUND
        return output.IO_ERROR if report.verification.has_failed else output.FINE
    if report.num_damaged:
        return output.PROBLEM_FOUND
    failed = [row for row in report.checkpoints if row.has_failed]
    if any(row.state == "incompatible" for row in failed):
        return output.INCOMPATIBLE
    return output.IO_ERROR if failed else output.FINE
