"""The command `report`: write a page about a checkpoint or a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.report_results import (
    CheckpointReport,
    DamagedReport,
    ReportResult,
    RunReport,
)
from dist_ckpt.cli.results import convert
from dist_ckpt.reports import Progress
from dist_ckpt.tools.report.checkpoint_facts import CHECKS, Check
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
    help="How to look for damage.",
)
@click.option("--overwrite", is_flag=True, help="Replace a file that is no report.")
@shared_options.dry_run
@shared_options.json
def report(
    path: str,
    *,
    file: str | None,
    check: Check,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write a page about a checkpoint or a run: one HTML file that loads nothing from anywhere.

    PATH is one checkpoint, or a run's folder. Of a checkpoint the page has its sizes by name, who
    stores what, what is damaged, what is attached, configuration and metadata. Of a run it has what
    was saved when and how long it took, metrics with what is kept, orphaned or damaged, and
    sizes. An older report is replaced. Exit code 1 if anything is damaged, 5 if something could not
    be checked. With --json no page is written.

    \b
    dist-ckpt report runs/a -o run.html
    dist-ckpt report runs/a@latest --verify full
    """  # noqa: D301 - click knows the backspace
    if as_json and (file is not None or overwrite or dry_run):
        raise click.UsageError("--json writes no page: leave --output and the like out")
    file = file or "report.html"
    if dry_run:
        report_facts(path, check="none", progress_of=lambda _: lambda *_: None)
        replaces = check_target(file, overwrite=overwrite) and os.path.lexists(file)
        click.echo(output.printable(f"{file}: would be {'replaced' if replaces else 'written'}"))
        return
    with ExitStack() as bars:

        def progress_of(what: str) -> Progress:
            bars.close()  # that of the checkpoint before
            return bars.enter_context(output.progress(what))

        if as_json:
            facts = report_facts(path, check=check, progress_of=progress_of)
        else:
            facts = write_report(
                path, file, check=check, overwrite=overwrite, progress_of=progress_of
            )
    with output.exit_with(_code(facts)):
        if as_json:
            output.print_json(convert(facts, _type_of(facts)))
        else:
            click.echo(output.printable(f"{file}: {_summary(facts)}"))


def _type_of(facts: Mapping[str, Any]) -> type[ReportResult]:
    if facts["about"] == "run":
        return RunReport
    return CheckpointReport if facts["unreadable"] is None else DamagedReport


def _summary(facts: Mapping[str, Any]) -> str:
    if facts["about"] == "run":
        num = facts["num_checkpoints"]
        checked = "" if facts["check"] == "none" else f", {facts['num_damaged']} damaged"
        failed = sum(checkpoint["has_failed"] for checkpoint in facts["checkpoints"])
        more = f", {failed} could not be checked" if failed else ""
        return f"{num} checkpoint{'s' * (num != 1)}{checked}{more}"
    check = facts["verification"]
    if check["result"] == "not checked":
        why = f": {check['why']}" if check["has_failed"] else ""
        return f"one checkpoint, not checked{why}"
    return f"one checkpoint, {check['num_problems']} problems by the {check['level']} check"


def _code(facts: Mapping[str, Any]) -> int:
    """Return the exit code, as `dist-ckpt verify` has it."""
    is_run = facts["about"] == "run"
    if facts["num_damaged"] if is_run else facts["unreadable"] or facts["verification"]["problems"]:
        return output.FINDING
    failed = (
        [checkpoint for checkpoint in facts["checkpoints"] if checkpoint["has_failed"]]
        if is_run
        else []
    )
    if any(checkpoint["state"] == "incompatible" for checkpoint in failed):
        return output.INCOMPATIBLE
    has_failed = bool(failed) if is_run else facts["verification"]["has_failed"]
    return output.IO_ERROR if has_failed else output.FINE
