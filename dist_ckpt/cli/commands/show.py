"""The command `show`: print a summary of each checkpoint."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import ShowAllResult, ShowResult, convert
from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.format.index.model_description import KIND, as_json, leaves_of
from dist_ckpt.errors import CheckpointError, listed
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import size


@click.command()
@shared_options.paths
@shared_options.json
def show(paths: tuple[str, ...], *, as_json: bool) -> None:
    """Show what each checkpoint is: who saved it, what it holds, how large it is.

    \b
    dist-ckpt show runs/a@latest
    dist-ckpt show runs/a@latest runs/b@latest runs/a@tag:release
    """  # noqa: D301 - click knows the backspace
    summaries = []
    for number, path in enumerate(paths):
        with checkpoint.open(path, opener=OPENER) as ck:
            if as_json:
                summaries.append(_summary(ck))
            else:
                click.echo("\n" * (number > 0), nl=False)
                _print_summary(ck)
    if as_json and len(paths) == 1:
        output.print_json(convert(summaries[0], ShowResult))
    elif as_json:
        output.print_json(convert({"checkpoints": summaries}, ShowAllResult))


def _summary(ck: Checkpoint) -> dict[str, object]:
    index, config = ck.index, _config_of(ck)
    own = [info for info in ck.tensors.values() if info.alias_of is None]
    components: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for info in own:
        components[info.component] += info.nbytes
        dtypes[info.dtype] += info.nbytes
    return {
        "path": ck.path,
        "step": ck.step,
        "kind": ck.kind,
        "config": config if isinstance(config, str) else as_json(config),
        "attempt": index.attempt,
        "saved_at": index.saved_at,
        "saved_by": dict(index.saved_by),
        "world_size": ck.world_size,
        "mesh": dict(ck.mesh),
        "nbytes": ck.nbytes,
        "num_tensors": len(own),
        "num_aliases": len(ck.tensors) - len(own),
        "num_parameters": _counts_of(ck)[0],
        "num_trainable": _counts_of(ck)[1],
        "num_values": len(index.catalog.values),
        "attached": dict(ck.attached),
        "num_files": index.num_files,
        "nbytes_by_component": dict(components),
        "nbytes_by_dtype": dict(dtypes),
        "per_rank": {fqn: len(keys) for fqn, keys in index.catalog.per_rank.items()},
        "metadata": dict(index.metadata),
    }


def _config_of(ck: Checkpoint) -> Mapping[str, object] | str | None:
    """Return its configuration, or why that cannot be read: all else can still be shown."""
    try:
        return ck.config
    except CheckpointError as error:
        return f"cannot be read: {error}"


def _counts_of(ck: Checkpoint) -> tuple[int | None, int | None]:
    """Return how many parameters it has, and trains; None if that is not known, or not readable."""
    try:
        return ck.num_parameters, ck.num_trainable
    except CheckpointError:
        return None, None


def _config_lines(config: Mapping[str, object] | str | None) -> list[str]:
    if not isinstance(config, Mapping):
        return [] if config is None else [config]
    return [f"{name} = {value}" for name, value in leaves_of(config)]


def _print_summary(ck: Checkpoint) -> None:
    facts, index = _summary(ck), ck.index
    saved = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(index.saved_at))
    mesh = " x ".join(f"{axis or 'axis'}={n}" for axis, n in index.catalog.mesh)
    by = ", ".join(f"{name} {version}" for name, version in index.saved_by.items())
    lines = [
        ("checkpoint", ck.path),
        ("step", "-" if ck.step is None else str(ck.step)),
        *([] if ck.kind is None else [("kind", ck.kind)]),
        # Of files of others it is not known.
        *([("committed", f"{saved}, attempt {index.attempt}")] if index.saved_at else []),
        ("laid out", f"for {ck.world_size} ranks{f', saved on mesh {mesh}' if mesh else ''}"),
        ("saved by", by),
        ("size", f"{size(ck.nbytes)} in {facts['num_files']} files"),
        ("tensors", f"{facts['num_tensors']}, and {facts['num_aliases']} tied names"),
        ("values", _values(ck)),
    ]
    if facts["num_parameters"] is not None:
        summary = f"{facts['num_parameters']:,}, of which {facts['num_trainable']:,} are trained"
        lines.append(("parameters", summary))
    for label in ("component", "dtype"):
        counts = _nbytes(facts[f"nbytes_by_{label}"])
        lines += [(label, f"{name}: {size(nbytes)}") for name, nbytes in counts]
    for fqn, keys in index.catalog.per_rank.items():
        lines.append(("per rank", f"{fqn}: {len(keys)} keys"))
    lines += [("attached", f"{name}: {size(nbytes)}") for name, nbytes in ck.attached.items()]
    lines += [("config", text) for text in _config_lines(_config_of(ck))]
    shown = {key: value for key, value in index.metadata.items() if key != KIND}
    lines += [("metadata", f"{key} = {value!r}") for key, value in shown.items()]
    for name, text in lines:
        click.echo(f"{name:<11} {output.printable(text)}")


def _values(ck: Checkpoint) -> str:
    """Return how many values there are that are no tensors, and the names of some, for globs."""
    names = list(ck.index.catalog.values)
    return f"{len(names)}: {listed(names)}" if names else "0"


def _nbytes(counts: object) -> list[tuple[str, int]]:
    assert isinstance(counts, dict)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
