"""The commands that only read: ls, show, verify. None of them imports torch."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from math import isfinite

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.commands import verified
from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.checkpoint import verify as verifier
from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.commit.attempts import attempts_in, entries_at
from dist_ckpt.core.format.filenames import is_reserved_name
from dist_ckpt.core.format.index.model_description import KIND, as_json, leaves_of
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import CheckpointError, listed
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import size
from dist_ckpt.runs.listing import RunCheckpoint, checkpoints
from dist_ckpt.runs.selectors import resolve

# The first so many columns of `ls`.
_ALWAYS = 7


@click.command()
@shared_options.path
@shared_options.json
def ls(path: str, *, as_json: bool) -> None:
    """List the checkpoints in a folder.

    PATH is a run's folder, or one checkpoint. What is not committed is listed with its state:
    "open" is being written or was left by a crash ("dist-ckpt gc" removes what is left). Metrics,
    tags, pins and leases are shown where there are any (of many metrics the first few, all with
    --json). "orphaned" is what a run has saved above the step from which it was resumed later.

    \b
    dist-ckpt ls runs/a
    """  # noqa: D301 - click knows the backspace
    found, below = checkpoints(resolve(path)), _runs_in(path)
    if as_json:
        facts = [_facts_of(one) for one in found]
        output.print_json("ls", {"path": path, "checkpoints": facts, "runs": below})
        return
    if not found:
        told = f", but in {listed(below)}: list one of them" if below else ""
        click.echo(output.printable(f"no checkpoints in {path}{told}"))
        return
    rows = [
        (
            one.name,
            "-" if one.step is None else str(one.step),
            one.state,
            "-" if one.nbytes is None else size(one.nbytes),
            "-" if one.world_size is None else str(one.world_size),
            "-" if one.num_tensors is None else str(one.num_tensors),
            "-" if one.saved_at is None else output.age(time.time() - one.saved_at),
            output.metrics_cell(one.metrics),
            "; ".join(_notes(one)),
        )
        for one in found
    ]
    heads = ("NAME", "STEP", "STATE", "SIZE", "RANKS", "TENSORS", "AGE", "METRICS", "NOTES")
    # What nothing is known of has no column.
    shown = [i for i in range(len(heads)) if i < _ALWAYS or any(row[i] for row in rows)]
    output.print_table(
        [heads[i] for i in shown],
        [[row[i] for i in shown] for row in rows],
        right=frozenset({1, 3, 4, 5, 6}),
    )
    for one in found:
        if one.problem is not None and one.state in ("damaged", "incompatible"):
            click.echo(f"{output.printable(one.name)}: {output.printable(one.problem)}")
    if below:
        click.echo(output.printable(f"there are more in {listed(below)}: list one of them"))


def _notes(one: RunCheckpoint) -> list[str]:
    """Return more about a checkpoint, as texts."""
    notes = ["orphaned"] * one.is_orphaned + ["checked"] * one.is_verified
    return [*notes, *one.protected_by]


def _runs_in(path: str) -> list[str]:
    """Return the folders in a folder that have checkpoints: it may be that of several runs."""
    storage, where = open_storage(path)
    folders = [one.name for one in entries_at(storage, where) if one.kind == "folder"]
    names = [name for name in folders if not is_reserved_name(name)]
    return [os.path.join(path, name) for name in names if _is_run(storage, f"{where}/{name}")]


def _is_run(storage: Storage, folder: str) -> bool:
    with suppress(CheckpointError, OSError):  # it is a hint
        entries = storage.list(folder)
        if any(attempts_in(entries)):  # a checkpoint
            return False
        below = [one.name for one in entries if one.kind == "folder"]
        return any(any(attempts_in(entries_at(storage, f"{folder}/{name}"))) for name in below)
    return False


def _facts_of(one: RunCheckpoint) -> dict[str, object]:
    facts = asdict(one)
    # JSON has no nan and no infinities.
    metrics = {
        name: value if isfinite(value) else str(value) for name, value in one.metrics.items()
    }
    return {**facts, "metrics": metrics}


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
        output.print_json("show", summaries[0])
    elif as_json:
        output.print_json("show-all", {"checkpoints": summaries})


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
        told = f"{facts['num_parameters']:,}, of which {facts['num_trainable']:,} are trained"
        lines.append(("parameters", told))
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


@click.command()
@shared_options.path
@click.option(
    "--quick", is_flag=True, help="Check the index, sizes and headers only, not every block."
)
@shared_options.json
def verify(path: str, *, quick: bool, as_json: bool) -> None:
    """Check every byte of a checkpoint and name what is damaged.

    PATH is one checkpoint, or a run's folder: then all that "dist-ckpt ls" lists are checked, but
    for what is not committed. Exit code 1 if anything is damaged.

    \b
    dist-ckpt verify runs/a@latest
    dist-ckpt verify runs/a --quick
    """  # noqa: D301 - click knows the backspace
    level: verifier.Level = "quick" if quick else "full"
    path = os.fspath(resolve(path))
    found = checkpoints(path)
    if not found or found[0].path == open_storage(path)[1]:
        verified.verify_one(path, level, as_json=as_json)
    else:
        verified.verify_all(path, found, level, as_json=as_json)
