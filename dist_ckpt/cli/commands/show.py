"""The command `show`: print a summary of each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import ShowAllResult, ShowResult, convert, extend
from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.commit.records.incarnations import utc
from dist_ckpt.core.commit.records.recorded_checks import find_recorded_damage
from dist_ckpt.core.format.index.model_description import KIND, iterate_leaves
from dist_ckpt.core.format.index.model_description import as_json as plain_json
from dist_ckpt.core.storage import open_storage
from dist_ckpt.default_opener import OPENER
from dist_ckpt.message_text import format_count, format_size, listed
from dist_ckpt.tools.inspect.describe import CheckpointSummary, summarize


@click.command()
@shared_options.paths
@shared_options.json
def show(paths: tuple[str, ...], *, as_json: bool) -> None:
    """Describe one checkpoint or several: step, sizes, tensors, configuration.

    \b
    dist-ckpt show runs/a@latest
    dist-ckpt show runs/a@latest runs/b@latest runs/a@tag:release
    """
    documents = []
    for number, path in enumerate(paths):
        with checkpoint.open(path, opener=OPENER) as ck:
            summary = summarize(ck)
            if as_json:
                config = _config_problem(summary) or plain_json(summary.config)
                more = {"mesh": dict(summary.mesh), "damage": _damage(summary) or None}
                documents.append(extend(summary, ShowResult, config=config, **more))
            else:
                click.echo("\n" * (number > 0), nl=False)
                _print_summary(summary, list(ck.index.catalog.values), _damage(summary))
    if as_json and len(paths) == 1:
        output.print_json(documents[0])
    elif as_json:
        output.print_json(convert({"checkpoints": documents}, ShowAllResult))


def _config_problem(summary: CheckpointSummary) -> str | None:
    problem = summary.config_problem
    return None if problem is None else f"cannot be read: {problem}"


def _damage(summary: CheckpointSummary) -> str:
    """Return the damage that is recorded in the run; "" if there is none."""
    storage, path = open_storage(summary.path)
    return find_recorded_damage(storage, f"{path}/{summary.attempt}", summary.step)


def _print_summary(summary: CheckpointSummary, values: list[str], damage: str) -> None:
    saved = utc(summary.saved_at)
    mesh = " x ".join(f"{axis or 'axis'}={num}" for axis, num in summary.mesh)
    ranks = format_count(summary.world_size, "rank")
    by = ", ".join(f"{name} {version}" for name, version in summary.saved_by.items())
    lines = [
        ("checkpoint", summary.path),
        *([("damaged", damage)] if damage else []),
        ("step", output.cell(summary.step)),
        *([] if summary.kind is None else [("kind", summary.kind)]),
        # Files of other systems have no time of commit.
        *([("committed", f"{saved}, attempt {summary.attempt}")] if summary.saved_at else []),
        ("laid out", f"for {ranks}{f', saved on mesh {mesh}' if mesh else ''}"),
        ("saved by", by),
        ("size", f"{format_size(summary.nbytes)} in {format_count(summary.num_files, 'file')}"),
        ("tensors", f"{summary.num_tensors}, and {format_count(summary.num_aliases, 'tied name')}"),
        # List the names, which help to write globs.
        ("values", f"{len(values)}: {listed(values)}" if values else "0"),
    ]
    if summary.num_parameters is not None:
        counts = f"{summary.num_parameters:,}, of which {summary.num_trainable:,} are trained"
        lines.append(("parameters", counts))
    lines += _size_lines("component", summary.nbytes_by_component)
    lines += _size_lines("dtype", summary.nbytes_by_dtype)
    lines += [("replicas", f"{fqn}: {rule}") for fqn, rule in summary.replicas.items()]
    for fqn, num in summary.per_rank.items():
        lines.append(("per rank", f"{fqn}: {format_count(num, 'key')}"))
    lines += [("attached", f"{name}: {format_size(num)}") for name, num in summary.attached.items()]
    if (problem := _config_problem(summary)) is not None:
        lines.append(("config", problem))
    elif summary.config is not None:
        lines += [("config", f"{name} = {value}") for name, value in iterate_leaves(summary.config)]
    metadata = {key: value for key, value in summary.metadata.items() if key != KIND}
    lines += [("metadata", f"{key} = {value!r}") for key, value in metadata.items()]
    for name, text in lines:
        click.echo(f"{name:<11} {output.printable(text)}")


def _size_lines(label: str, sizes: Mapping[str, int]) -> list[tuple[str, str]]:
    largest_first = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    return [(label, f"{name}: {format_size(nbytes)}") for name, nbytes in largest_first]
