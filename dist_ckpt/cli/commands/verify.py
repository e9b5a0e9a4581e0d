"""The command `verify`: check every byte of one checkpoint, or of all in a run's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import click

from dist_ckpt.cli import output, results, shared_options
from dist_ckpt.core.checkpoint.verify_checkpoint import Level, Problem, VerifyReport
from dist_ckpt.core.checkpoint.verify_checkpoint import verify as verify_checkpoint
from dist_ckpt.core.commit.records.recorded_checks import find_newest_good
from dist_ckpt.core.shard_io.read.open_files import rows_text
from dist_ckpt.core.storage import open_storage
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import CheckpointError, NotFoundError
from dist_ckpt.message_text import format_count, format_size, group_similar, listed, states_text
from dist_ckpt.runs.listing import RunCheckpoint, checkpoints
from dist_ckpt.runs.selectors import resolve


@click.command()
@shared_options.path
@click.option(
    "--quick", is_flag=True, help="Check the index, sizes and headers only, not every block."
)
@shared_options.json
def verify(path: str, *, quick: bool, as_json: bool) -> None:
    """Check every byte of a checkpoint, and name damaged files and tensors.

    PATH is one checkpoint, or a run's folder. In a folder it checks all committed checkpoints that
    "dist-ckpt ls" lists. Exit code 1 if anything is damaged, 5 if the storage could not read
    something: it may be whole. The result is recorded in the run: prune, @latest and a resume obey
    it.

    \b
    dist-ckpt verify runs/a@latest
    dist-ckpt verify runs/a --quick
    """
    level: Level = "quick" if quick else "full"
    path = os.fspath(resolve(path))
    listing = checkpoints(path)
    if not listing or listing[0].path == open_storage(path)[1]:
        with output.progress("verify") as update:
            report = verify_checkpoint(path, level=level, progress=update, opener=OPENER)
        with output.exit_with(_code(report)):
            if as_json:
                output.print_json(results.convert(report, results.VerifyResult))
            else:
                newest = find_newest_good(*open_storage(path))
                advice = f"; the newest good one is {newest}" if newest else "; load an older one"
                _print(report, "" if report.is_unread else advice)
    else:
        _verify_all(path, listing, level, as_json=as_json)


def _code(report: VerifyReport) -> int:
    if report.is_unread:
        return output.IO_ERROR
    return output.FINE if report.ok else output.PROBLEM_FOUND


def _verify_all(
    root: str, listing: Sequence[RunCheckpoint], level: Level, *, as_json: bool
) -> None:
    """Check all checkpoints of a run. After an error continue with the next one.

    Exit with `PROBLEM_FOUND` if a checkpoint is damaged. Otherwise, if some could not be checked,
    exit with the lowest code of their errors. Raises NotFoundError if no checkpoint is committed.
    """
    reports: list[VerifyReport] = []
    not_checked: list[results.SkippedCheckpoint] = []
    codes = set[int]()
    for checkpoint in listing:
        result, code = _verify(checkpoint, level)
        codes |= {code} - {output.FINE}
        if isinstance(result, VerifyReport):
            reports.append(result)
            codes |= {output.IO_ERROR} if result.is_unread else set()
        else:
            not_checked.append(result)
        if not as_json:
            with suppress(BrokenPipeError):  # continue: the exit code depends on all checks
                _print(result)
    if not reports and not codes:
        states = [f"{each.path} is {each.why}" for each in not_checked]
        text = f"no committed checkpoint is in {root}: {states_text(states)}. Check the path"
        raise NotFoundError(text)
    num_unread = sum(report.is_unread for report in reports)
    num_damaged = sum(not report.ok for report in reports) - num_unread
    with output.exit_with(output.PROBLEM_FOUND if num_damaged else min(codes, default=output.FINE)):
        if as_json:
            document = results.VerifyAllResult(
                path=root,
                ok=not num_damaged and not codes,
                checkpoints=results.convert(reports, tuple[results.VerifiedCheckpoint, ...]),
                not_checked=tuple(not_checked),
            )
            output.print_json(document)
        else:
            checked = f"{format_count(len(reports), 'checkpoint')} checked"
            good = [report.path for report in reports if report.ok]
            newest = f"; the newest good one is {good[-1]}" if num_damaged and good else ""
            unread = f", {num_unread} not read completely" if num_unread else ""
            click.echo(
                output.printable(f"{root}: {checked}, {num_damaged} damaged{unread}{newest}")
            )


def _verify(
    checkpoint: RunCheckpoint, level: Level
) -> tuple[VerifyReport | results.SkippedCheckpoint, int]:
    """Check one checkpoint. Return the result, and the exit code if it could not be checked."""
    code = output.FINE
    if checkpoint.state in ("open", "abandoned"):
        why = f"not committed ({checkpoint.state})"
    elif checkpoint.link and checkpoint.state == "damaged":
        why, code = checkpoint.problem or "", output.PROBLEM_FOUND
    else:
        try:
            with output.progress(f"verify {checkpoint.name}") as update:
                return verify_checkpoint(checkpoint.path, level=level, progress=update), code
        except NotFoundError:
            why = "replaced or deleted during the check"
        except CheckpointError as error:
            why, code = str(error), output.exit_code(error)
    return results.SkippedCheckpoint(path=checkpoint.path, why=why), code


def _print(report: VerifyReport | results.SkippedCheckpoint, advice: str = "") -> None:
    if isinstance(report, results.SkippedCheckpoint):
        path, why = output.printable(report.path), output.printable(report.why)
        click.echo(f"note     {path}: {why}: not checked")
        return
    causes = [problem for problem in report.problems if problem.cause is None]
    for line in _damage_lines(causes, report.problems):
        click.echo(output.printable(line))
    for note in report.notes:
        click.echo(f"note     {output.printable(note)}")
    files = format_count(report.num_files, "file")
    problems = format_count(len(causes), "problem")
    checked = f"{files}, {format_size(report.nbytes_checked)} checked"
    result = "ok" if report.ok else f"{problems}{advice}"
    click.echo(output.printable(f"{report.path}: {checked}: {result}"))


def _damage_lines(causes: Sequence[Problem], problems: Sequence[Problem]) -> Iterator[str]:
    """Yield a line for each cause, and below it a line for all that is like it, or lost with it."""
    lost: dict[tuple[str, str | None], list[str]] = {}
    for problem in problems:
        lost.setdefault((problem.file, problem.cause), []).append(_place(problem))
    for first, *others in group_similar(causes, lambda p: p.what.replace(p.tensor or "\n", "#")):
        yield f"{'UNREAD ' if first.is_unread else 'DAMAGED'}  {first.what}"
        if others:
            yield f"         and {len(others)} more like it: {listed([*map(_place, others)])}"
        if parts := [part for p in (first, *others) for part in lost.get((p.file, p.what), ())]:
            lack = "not read" if first.is_unread else "lost"
            yield f"         {lack} with it: {listed(parts)}"


def _place(problem: Problem) -> str:
    if problem.tensor is None:
        return problem.file
    return f"{problem.tensor} {rows_text(problem.rows)}"
