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
from dist_ckpt.runs import save_requests as asking

# How long who asks for a save waits for it: steps of minutes, and a large save, fit in.
ANSWER_S = 600.0


@click.command("request-save")
@click.argument("root", type=shared_options.PATH)
@click.option("--stop", "stops", is_flag=True, help="End the run once it is saved.")
@click.option("--wait", is_flag=True, help="Wait until it is durable, and say what happened.")
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
    """Ask the job that writes into ROOT to save now.

    All ranks save at their next step, or where they poll; with --stop the job then ends as on a
    signal. Jobs that begin later do not get the request. With --wait the exit code is 0 once what
    was trained is durable, 1 if it cannot be, and 6 without an answer: then the request is
    withdrawn.

    \b
    dist-ckpt request-save runs/a --stop --wait --timeout 300
    """  # noqa: D301 - click knows the backspace
    if timeout_s is not None and not wait:
        raise click.UsageError("--timeout says how long to wait: give --wait as well")
    storage, where = open_storage(root)
    incarnation = asking.incarnation_to_ask(storage, where)
    request = None if dry_run else asking.request_save(storage, where, stops=stops)
    incarnation = incarnation if request is None else request.incarnation
    before = last_liveness(storage, where, incarnation)
    text = f"incarnation {incarnation} of the run in {where} to save{' and to end' * stops}"
    if not as_json:
        click.echo(f"{'would ask' if dry_run else 'asked'} {output.printable(text)}")
    if before is None and not as_json:
        click.echo(NO_LIVENESS, err=True)
    answer, why = None, ""
    if wait and request is not None:
        waits_s = ANSWER_S if timeout_s is None else timeout_s
        answer, why = _wait_for_answer((storage, where), request, before, waits_s)
    if as_json:
        saved = None if answer is None else answer.saved
        document = RequestSaveResult(
            root=where,
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
        raise click.exceptions.Exit(output.REFUSED if answer is None else output.FINDING)


def _wait_for_answer(
    at: tuple[Storage, str], request: RequestRecord, before: float | None, timeout_s: float
) -> tuple[AnswerRecord | None, str]:
    """Return the answer to a request, if there is one, and why nothing is saved, if so."""
    began = time.monotonic()
    answer = asking.wait_for_answer(*at, request, timeout_s=timeout_s)
    if answer is not None:
        return answer, "" if answer.saved else f"not saved, {answer.outcome}: {answer.why}"
    waited_s = min(timeout_s, round(time.monotonic() - began, 1))
    after = last_liveness(*at, request.incarnation)
    return None, (
        f"there was no answer in {waited_s:g} s, and the request is withdrawn: "
        f"{_describe_life(before, after, waited_s)}"
    )


def _describe_life(before: float | None, after: float | None, waited_s: float) -> str:
    """Return as text if a job lives, by its last heartbeats before and after waiting."""
    if after is None:
        return "the job has ended, or has died as it began"
    if after != before:
        return "the job is alive, but has come to no step and no poll() in that time"
    if waited_s > 2 * LIVENESS_INTERVAL_S:
        return (
            f"the job was last seen at {utc(after)}: it was killed, is stalled, or cannot write "
            f"into the root"
        )
    return "see whether the job is alive, and comes to a step or a poll() in that time"
