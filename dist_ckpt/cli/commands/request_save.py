"""The command `request-save`: request a save from the job of a run."""

from __future__ import annotations

import time

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import RequestSaveResult
from dist_ckpt.core.commit.records.incarnations import (
    LIVENESS_INTERVAL_S,
    NO_LIVENESS,
    last_liveness,
    utc,
)
from dist_ckpt.core.format.run_records import AnswerRecord, RequestRecord
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.runs import save_requests

# Long enough for a step of some minutes and a large save.
ANSWER_S = 600.0


@click.command("request-save")
@click.argument("root", type=shared_options.PATH)
@click.option("--stop", "stops", is_flag=True, help="End the run after the save.")
@click.option("--wait", is_flag=True, help="Wait until the save is durable, and print the outcome.")
@click.option(
    "--timeout",
    "timeout_s",
    type=output.Seconds(min=0),
    help=f"Seconds to wait for an answer.  [default: {ANSWER_S:g}]",
)
@shared_options.dry_run
@shared_options.json
def request_save(
    root: str, *, stops: bool, wait: bool, timeout_s: float | None, dry_run: bool, as_json: bool
) -> None:
    """Request a save from the job that writes into ROOT.

    All ranks save at their next step, or at their next poll(). With --stop the job then ends as on
    a signal. A job that starts later ignores the request.

    \b
    Exit code with --wait:
    0  all training before the request is durable
    1  it could not be saved
    6  no answer; the request is withdrawn

    \b
    dist-ckpt request-save runs/a --stop --wait --timeout 300
    """
    if timeout_s is not None and not wait:
        raise click.UsageError("--timeout needs --wait: give both")
    storage, folder = open_storage(root)
    incarnation = save_requests.find_incarnation_to_ask(storage, folder)
    request = None if dry_run else save_requests.request_save(storage, folder, stops=stops)
    incarnation = incarnation if request is None else request.incarnation
    before = last_liveness(storage, folder, incarnation)
    text = f"incarnation {incarnation} of the run in {folder} to save{' and to end' * stops}"
    if not as_json:
        click.echo(f"{'would ask' if dry_run else 'asked'} {output.printable(text)}")
    if before is None and not as_json:
        click.echo(NO_LIVENESS, err=True)
    answer, why = None, ""
    if wait and request is not None:
        waits_s = ANSWER_S if timeout_s is None else timeout_s
        answer, why = _wait_for_answer(storage, folder, request, before, waits_s)
    if as_json:
        saved = None if answer is None else answer.saved
        document = RequestSaveResult(
            root=folder,
            incarnation=incarnation,
            stops=stops,
            wait=wait,
            dry_run=dry_run,
            last_liveness=before,
            outcome=None if answer is None else answer.outcome,
            step=None if saved is None else saved[0],
            attempt=None if saved is None else saved[1].name,
            why=why,
        )
        output.print_json(document)
    elif answer is not None and answer.saved is not None:
        click.echo(f"saved: step {answer.saved[0]}, attempt {answer.saved[1]}")
    if why:
        click.echo(f"dist-ckpt: {output.printable(why)}", err=True)
        raise click.exceptions.Exit(output.REFUSED if answer is None else output.PROBLEM_FOUND)


def _wait_for_answer(
    storage: Storage, folder: str, request: RequestRecord, before: float | None, waits_s: float
) -> tuple[AnswerRecord | None, str]:
    """Return the answer, and why nothing was saved. `before` is the liveness at the request."""
    began = time.monotonic()
    answer = save_requests.wait_for_answer(storage, folder, request, timeout_s=waits_s)
    if answer is not None:
        return answer, "" if answer.saved else f"not saved, {answer.outcome}: {answer.why}"
    waited_s = min(waits_s, round(time.monotonic() - began, 1))
    after = last_liveness(storage, folder, request.incarnation)
    return None, (
        f"there was no answer in {waited_s:g} s, and the request is withdrawn: "
        f"{_describe_liveness(before, after, waited_s)}"
    )


def _describe_liveness(before: float | None, after: float | None, waited_s: float) -> str:
    """Return a text about whether the job is alive, from its liveness before and after the wait."""
    if after is None:
        return "the job has ended, or died when it started"
    if after != before:
        return "the job is alive, but reached no step and no poll() in that time"
    if waited_s > 2 * LIVENESS_INTERVAL_S:
        return (
            f"the job was last seen at {utc(after)}: it was killed, is stalled, or cannot write "
            f"into the root"
        )
    return "check that the job is alive, and reaches a step or a poll() in that time"
