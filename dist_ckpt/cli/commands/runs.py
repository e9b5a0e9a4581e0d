"""The commands about a run's checkpoints as a whole: prune, pin, tag, request-save."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.core.commit.records import leases
from dist_ckpt.core.commit.records.leases import CheckpointRef
from dist_ckpt.core.commit.records.liveness import (
    LIVENESS_INTERVAL_S,
    NO_LIVENESS,
    last_liveness,
    utc,
)
from dist_ckpt.core.format.run_records import AnswerRecord, RequestRecord
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import NotFoundError
from dist_ckpt.reports import size
from dist_ckpt.runs import save_requests as asking
from dist_ckpt.runs.listing import list_run
from dist_ckpt.runs.retention import retention_policy as policies
from dist_ckpt.runs.retention.prune import Decision
from dist_ckpt.runs.selectors import checkpoint_ref_of, open_resolved
from dist_ckpt.tools.inspect.run import Run

_path = click.argument("path", type=shared_options.PATH)

# How long who asks for a save waits for it: steps of minutes, and a large save, fit in.
ANSWER_S = 600.0


@click.command()
@click.argument("root", type=shared_options.PATH)
@click.option("--keep", "policy", required=True, help="What to keep: rules, joined by |.")
@click.option("--explain", is_flag=True, help="Print for each checkpoint why it stays.")
@shared_options.yes
@shared_options.dry_run
@shared_options.json
def prune(
    root: str, *, policy: str, dry_run: bool, explain: bool, yes: bool, as_json: bool
) -> None:
    """Remove the checkpoints of the run in ROOT that no rule keeps. There is no way back.

    \b
    last(3)                       the newest three
    best(2, min="val/loss")       the best two by a metric, and two not measured yet
    every(steps=10000)            the nearest to each multiple; or hours=
    within(days=7)                what was saved in the week before the newest

    Whatever the rules say, these stay: the newest, the newest that passes a quick check, the newest
    that was checked in full, and what is pinned, tagged or leased.

    \b
    dist-ckpt prune runs/a --keep "last(3) | best(2, min='val/loss')" --dry-run --explain
    """  # noqa: D301 - click knows the backspace
    run, keep = Run(root), policies.parse(policy)
    plan = run.prune(keep, dry_run=True)
    doomed = [one for one, reasons in plan if not reasons]
    if doomed and not (dry_run or yes):
        output.confirm(
            f"Remove {len(doomed)} checkpoints?",
            f"{len(doomed)} checkpoints are not removed",
            about=_lines(plan, explain=explain, verb="to be removed"),
        )
    if doomed and not dry_run:
        # A job may have saved meanwhile: what was not shown stays.
        plan = run.prune(keep, among=doomed)
    if as_json:
        facts = [
            {"name": one.name, "path": one.path, "step": one.step, "kept_by": list(reasons)}
            for one, reasons in plan
        ]
        output.print_json("prune", {"root": root, "dry_run": dry_run, "checkpoints": facts})
    else:
        verb = "would be removed" if dry_run else "removed"
        for line in _lines(plan, explain=explain, verb=verb):
            click.echo(output.printable(line))


def _lines(plan: Sequence[Decision], *, explain: bool, verb: str) -> Iterator[str]:
    gone = [one for one, reasons in plan if not reasons]
    for one, reasons in plan:
        if not reasons:
            yield f"{verb}  {one.name}  {size(one.nbytes or 0)}"
        elif explain:
            yield f"kept  {one.name}  {'; '.join(reasons)}"
    freed = size(sum(one.nbytes or 0 for one in gone))
    yield f"{len(gone)} {verb} ({freed}), {len(plan) - len(gone)} kept"


@click.command()
@_path
@click.option("--why", default="", help="Shown by ls, and by commands that refuse to remove it.")
@click.option("--remove", is_flag=True, help="Remove the pin.")
@shared_options.dry_run
@shared_options.json
def pin(path: str, *, why: str, remove: bool, dry_run: bool, as_json: bool) -> None:
    """Keep the checkpoint PATH until it is unpinned, whatever is pruned or deleted.

    \b
    dist-ckpt pin runs/a@12000 --why "the one of the paper"
    dist-ckpt pin runs/a@12000 --remove
    """  # noqa: D301 - click knows the backspace
    if remove and why:
        raise click.UsageError(
            "--why and --remove are given: a pin that is taken away says nothing"
        )
    subject = _subject(path)
    if not dry_run:
        if remove:
            leases.unpin(subject)
        else:
            leases.pin(subject, why)
    text = f"{'unpinned' if remove else 'pinned'} {subject.path}"
    _print_kept("pin", subject, {"why": why, "removed": remove}, text, (dry_run, as_json))


@click.command()
@_path
@click.argument("name")
@click.option("--remove", is_flag=True, help="Remove the tag from it.")
@shared_options.dry_run
@shared_options.json
def tag(path: str, name: str, *, remove: bool, dry_run: bool, as_json: bool) -> None:
    """Give the checkpoint PATH the tag NAME, which protects it as a pin does.

    One checkpoint of a run has a tag: another that had it loses it. Then "runs/a@tag:NAME" is this
    one, for every command.

    \b
    dist-ckpt tag runs/a@min:val/loss release
    """  # noqa: D301 - click knows the backspace
    if not name:
        raise click.UsageError("NAME is empty: give the tag a name")
    subject = _subject(path)
    if remove:
        _check_tagged(subject, name)
    if not dry_run:
        if remove:
            leases.untag(subject, name)
        else:
            leases.tag(subject, name)
    text = f"took tag {name!r} from" if remove else f"tag {name!r} on"
    facts = {"name": name, "removed": remove}
    _print_kept("tag", subject, facts, f"{text} {subject.path}", (dry_run, as_json))


def _print_kept(
    name: str,
    subject: CheckpointRef,
    facts: Mapping[str, object],
    text: str,
    how: tuple[bool, bool],
) -> None:
    """Print what keeps a checkpoint now or does no longer, as a text or a document of that name."""
    dry_run, as_json = how
    if as_json:
        about = {"path": subject.path, "step": subject.where[0], **facts}
        output.print_json(name, {**about, "dry_run": dry_run})
    else:
        click.echo(f"{'would be: ' * dry_run}{output.printable(text)}")


def _check_tagged(subject: CheckpointRef, name: str) -> None:
    listing = list_run(subject.storage, subject.path, now=time.time())
    if not any(name in one.tags for one in listing.checkpoints):
        raise NotFoundError(f"{subject.path} does not have the tag {name!r}; see dist-ckpt ls")


def _subject(path: str) -> CheckpointRef:
    """Return the one checkpoint at a path, or that a selector names. NotFoundError."""
    storage, where = open_resolved(path)
    for one in list_run(storage, where, now=time.time()).checkpoints:
        if one.path == where:
            if one.state != "committed":
                raise NotFoundError(f"{path} is {one.state}: only what is committed is kept")
            return checkpoint_ref_of(storage, one)
    root = os.path.basename(where)
    raise NotFoundError(f"{path} is no checkpoint: name one, such as {root}@latest")


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
        document = {"root": where, "incarnation": incarnation, "stops": stops, "wait": wait}
        document |= {"dry_run": dry_run, "last_liveness": before, **_answered(answer, why)}
        output.print_json("request-save", document)
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


def _answered(answer: AnswerRecord | None, why: str) -> dict[str, object]:
    """Return the outcome of a request, if there is one, as fields of the document."""
    step, attempt = (None, None) if answer is None or answer.saved is None else answer.saved
    return {
        "outcome": None if answer is None else answer.outcome,
        "step": step,
        "attempt": None if attempt is None else attempt.name,
        "why": why,
    }


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
