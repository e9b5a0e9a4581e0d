"""The command `prune`: remove the checkpoints of a run that no rule keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import PruneResult, PruneRow, extend
from dist_ckpt.message_text import format_count, format_size
from dist_ckpt.runs import retention_policy as policies
from dist_ckpt.runs.prune import Decision, is_refused
from dist_ckpt.runs.run import Run


@click.command()
@click.argument("root", type=shared_options.PATH)
@click.option("--keep", "policy", required=True, help="The retention policy: rules, joined by |.")
@click.option("--explain", is_flag=True, help="Print why each checkpoint stays.")
@click.option("--damaged", is_flag=True, help="Also remove those that are recorded as damaged.")
@shared_options.yes
@shared_options.dry_run
@shared_options.json
def prune(  # noqa: PLR0913 - its options
    root: str, *, policy: str, dry_run: bool, explain: bool, damaged: bool, yes: bool, as_json: bool
) -> None:
    """Remove the checkpoints of the run in ROOT that no rule keeps.

    This cannot be undone. The rules:

    \b
    last(3)                       the newest three
    best(2, min="val/loss")       the best two by a metric, and two not measured yet
    every(steps=10000)            the one nearest to each multiple; or hours=
    within(days=7)                those saved in the week before the newest

    \b
    These stay under every policy:
    - the newest, and the newest that passes a quick check
    - the newest that was checked in full
    - all that are pinned, tagged or leased

    Checkpoints that "dist-ckpt verify" or a load found damaged do not count for any rule. They
    stay, because their good parts may repair another one, unless you give --damaged. Those that
    this user may not read or remove stay and are named, and the exit code is 5 then.

    \b
    dist-ckpt prune runs/a --keep "last(3) | best(2, min='val/loss')" --dry-run --explain
    """
    run, keep = Run(root), policies.parse(policy)
    plan = run.prune(keep, damaged=damaged, dry_run=True)
    doomed = [checkpoint for checkpoint, reasons in plan if not reasons]
    if doomed and not (dry_run or yes):
        count = format_count(len(doomed), "checkpoint")
        output.confirm(
            f"Remove {count}?",
            f"{count} {'is' if len(doomed) == 1 else 'are'} not removed",
            about=_lines(plan, explain=explain, verb="to be removed"),
        )
    if doomed and not dry_run:
        # A job may have saved meanwhile. Only checkpoints that were shown are removed.
        plan = run.prune(keep, among=doomed, damaged=damaged)
    refused = any(is_refused(info, reasons) for info, reasons in plan)
    with output.exit_with(output.IO_ERROR if refused else output.FINE):
        if as_json:
            rows = tuple(extend(info, PruneRow, kept_by=reasons) for info, reasons in plan)
            output.print_json(PruneResult(root=root, dry_run=dry_run, checkpoints=rows))
            return
        verb = "would be removed" if dry_run else "removed"
        for line in _lines(plan, explain=explain, verb=verb):
            click.echo(output.printable(line))


def _lines(plan: Sequence[Decision], *, explain: bool, verb: str) -> Iterator[str]:
    gone = [checkpoint for checkpoint, reasons in plan if not reasons]
    for checkpoint, reasons in plan:
        if not reasons:
            yield f"{verb}  {checkpoint.name}  {format_size(checkpoint.nbytes or 0)}"
        elif explain or is_refused(checkpoint, reasons):
            yield f"kept  {checkpoint.name}  {'; '.join(reasons)}"
    freed = format_size(sum(checkpoint.nbytes or 0 for checkpoint in gone))
    yield f"{len(gone)} {verb} ({freed}), {len(plan) - len(gone)} kept"
