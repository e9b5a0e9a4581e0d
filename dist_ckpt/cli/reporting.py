"""The command that makes a page about a checkpoint or a run: report. It does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import click

from dist_ckpt.cli import options, output
from dist_ckpt.html_report.verdict import CHECKS, Check
from dist_ckpt.html_report.written import report_facts, write_report
from dist_ckpt.reports import Progress


@click.command()
@options.path
@click.option(
    "-o",
    "--output",
    "file",
    type=options.PATH,
    default="report.html",
    show_default=True,
    help="The file to write.",
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
@options.json
def report(path: str, *, file: str, check: Check, overwrite: bool, as_json: bool) -> None:
    """Write a page about a checkpoint or a run: one HTML file that loads nothing from anywhere.

    PATH is one checkpoint, or a run's folder. Of a checkpoint the page has its sizes by name, who
    stores what, what is damaged, what is attached, configuration and metadata. Of a run it has what
    was saved when and how long it took, metrics with what is kept, left behind or damaged, and
    sizes. An older report is replaced. Exit code 1 if anything is damaged. With --json no page is
    written.

    \b
    dist-ckpt report runs/a -o run.html
    dist-ckpt report runs/a@latest --verify full
    """  # noqa: D301 - click knows the backspace
    with ExitStack() as bars:

        def progress_of(what: str) -> Progress:
            bars.close()  # that of the checkpoint before
            return bars.enter_context(output.progress(what))

        if as_json:
            facts = report_facts(path, check=check, progress_of=progress_of)
        else:
            try:
                facts = write_report(
                    path, file, check=check, overwrite=overwrite, progress_of=progress_of
                )
            except ModuleNotFoundError as error:
                raise click.UsageError(str(error)) from None
    if as_json:
        output.print_json("report", facts)
    else:
        click.echo(f"{output.printable(file)}: {_told(facts)}")
    if _is_damaged(facts):
        raise click.exceptions.Exit(output.FINDING)


def _told(facts: Mapping[str, Any]) -> str:
    if facts["about"] == "run":
        num = facts["num_checkpoints"]
        checked = "" if facts["check"] == "none" else f", {facts['num_damaged']} damaged"
        return f"{num} checkpoint{'s' * (num != 1)}{checked}"
    verdict = facts["verdict"]
    if verdict["result"] == "not checked":
        return "one checkpoint, not checked"
    return f"one checkpoint, {verdict['num_problems']} problems by the {verdict['level']} check"


def _is_damaged(facts: Mapping[str, Any]) -> bool:
    if facts["about"] == "run":
        return bool(facts["num_damaged"])
    return bool(facts["verdict"]["result"] == "damaged" or facts["unreadable"])
