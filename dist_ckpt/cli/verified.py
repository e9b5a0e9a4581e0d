"""What `dist-ckpt verify` prints of one checkpoint, and of all in a run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field

import click

from dist_ckpt.cli import output
from dist_ckpt.errors import CheckpointError, NotFoundError
from dist_ckpt.offline.checkpoint import CheckpointSummary
from dist_ckpt.offline.verify import Level, VerifyReport, verify
from dist_ckpt.reports import size


def verify_one(path: str, level: Level, *, as_json: bool) -> None:
    """Check one checkpoint and print what was found; exit with `FINDING` if that is damage."""
    with output.progress("verify") as update:
        report = verify(path, level=level, progress=update)
    with _exit_code_of(output.FINE if report.ok else output.FINDING):
        if as_json:
            output.print_json("verify", _facts(report))
        else:
            _print(report)


@dataclass(slots=True)
class _RunFindings:
    """What came of a run's checkpoints; `not_checked` are paths, and why."""

    reports: list[VerifyReport] = field(default_factory=list)
    not_checked: list[tuple[str, str]] = field(default_factory=list)
    codes: set[int] = field(default_factory=set)


def verify_all(
    root: str, checkpoints: Sequence[CheckpointSummary], level: Level, *, as_json: bool
) -> None:
    """Check the checkpoints of a run, each as `verify_one` would; what fails stops none of them.

    Exits with `FINDING` if one is damaged, else with the code of the first that could not be
    checked. Raises NotFoundError if none is committed.
    """
    found = _RunFindings()
    for one in checkpoints:
        _verify(one, level, found)
        if not as_json:
            with suppress(BrokenPipeError):  # the exit code is still to be found out
                _print_last(one, found)
    if not found.reports and not found.codes:
        states = ", ".join(f"{path} is {why}" for path, why in found.not_checked)
        raise NotFoundError(f"no committed checkpoint is in {root}: {states}. Check the path")
    num_damaged = sum(not report.ok for report in found.reports)
    with _exit_code_of(output.FINDING if num_damaged else min(found.codes, default=output.FINE)):
        if as_json:
            output.print_json("verify-all", _facts_of_all(root, found))
        else:
            num = len(found.reports)
            checked = f"{num} checkpoint{'s' * (num != 1)} checked"
            click.echo(f"{output.printable(root)}: {checked}, {num_damaged} damaged")


def _verify(one: CheckpointSummary, level: Level, found: _RunFindings) -> None:
    if one.state in ("open", "abandoned"):
        found.not_checked.append((one.path, f"not committed ({one.state})"))
        return
    try:
        with output.progress(f"verify {one.name}") as update:
            found.reports.append(verify(one.path, level=level, progress=update))
    except NotFoundError:
        found.not_checked.append((one.path, "replaced or deleted meanwhile"))
    except CheckpointError as error:
        found.not_checked.append((one.path, str(error)))
        found.codes.add(output.exit_code(error))


def _print_last(one: CheckpointSummary, found: _RunFindings) -> None:
    if found.reports and found.reports[-1].path == one.path:
        _print(found.reports[-1])
    else:
        path, why = found.not_checked[-1]
        click.echo(f"note     {output.printable(path)}: {output.printable(why)}: it is not checked")


@contextmanager
def _exit_code_of(code: int) -> Iterator[None]:
    """Print, and exit with a code."""
    try:
        yield
    except BrokenPipeError:  # nobody reads on: what was found is the exit code all the same
        if code == output.FINE:
            raise
    if code != output.FINE:
        raise click.exceptions.Exit(code)


def _facts_of_all(root: str, found: _RunFindings) -> dict[str, object]:
    return {
        "path": root,
        "ok": all(report.ok for report in found.reports) and not found.codes,
        "checkpoints": [_facts(report) for report in found.reports],
        "not_checked": [{"path": path, "why": why} for path, why in found.not_checked],
    }


def _facts(report: VerifyReport) -> dict[str, object]:
    return {
        "path": report.path,
        "level": report.level,
        "ok": report.ok,
        "num_files": report.num_files,
        "nbytes_checked": report.nbytes_checked,
        "problems": [
            {
                **asdict(problem),
                "rows": problem.rows and [problem.rows.start, problem.rows.stop],
            }
            for problem in report.problems
        ],
        "notes": list(report.notes),
    }


def _print(report: VerifyReport) -> None:
    for problem in report.problems:
        click.echo(f"DAMAGED  {output.printable(problem.what)}")
    for note in report.notes:
        click.echo(f"note     {output.printable(note)}")
    checked = f"{report.num_files} files, {size(report.nbytes_checked)} checked"
    verdict = "ok" if report.ok else f"{_problems(len(report.problems))}; load an older one"
    click.echo(f"{output.printable(report.path)}: {checked}: {verdict}")


def _problems(count: int) -> str:
    return "1 problem" if count == 1 else f"{count} problems"
