"""The commands that write or remove: reshard, backup, strip, rm, gc."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from filelock import FileLock, Timeout

from dist_ckpt.cli import output
from dist_ckpt.commit import removal
from dist_ckpt.errors import StorageError
from dist_ckpt.format.checksums import document_digest
from dist_ckpt.offline.backup import backup as keep_beside
from dist_ckpt.offline.reshard import reshard as rewrite
from dist_ckpt.offline.strip import strip_at
from dist_ckpt.planning.sharding_config import ShardingConfig
from dist_ckpt.reports import size
from dist_ckpt.runs.removing import delete_at
from dist_ckpt.runs.selectors import open_resolved
from dist_ckpt.storage import open_storage

_path = click.argument("path", type=click.Path())


class Bytes(click.ParamType[int]):
    """A size such as 512MB or 4GiB, in bytes."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number of bytes; what is no size is a usage error."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+)\s*([kMGT]?)(i?)B?", str(value))
        if match is None:
            self.fail(f"{value!r} is no size: write it like 512MB or 4GiB", param, ctx)
        base = 1024 if match[3] else 1000
        factor: int = base ** " kMGT".index(match[2] or " ")
        return int(match[1]) * factor


@click.command()
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--world-size", type=click.IntRange(min=1), help="Cut evenly for so many ranks.")
@click.option(
    "--sharding",
    type=click.Path(),
    help="A ShardingConfig in a .json or .toml file.",
)
@click.option("--max-memory", type=Bytes(), default="1GiB", show_default=True)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the checkpoint at TARGET, which may be SOURCE, once the new one is durable.",
)
@click.option("--include", multiple=True, help="Only names that match; may be given again.")
@click.option("--exclude", multiple=True, help="Not what matches; may be given again.")
def reshard(  # noqa: PLR0913 - those of dc.reshard
    source: str,
    target: str,
    *,
    world_size: int | None,
    sharding: str | None,
    max_memory: int,
    overwrite: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
) -> None:
    """Write the checkpoint SOURCE again at TARGET, laid out for other ranks.

    Loading does this by itself; reshard once where many jobs will load the same layout.

    \b
    dist-ckpt reshard run/step-00001000 run-8 --world-size 8
    dist-ckpt reshard run@latest model --world-size 1 --include model
    """  # noqa: D301 - click knows the backspace
    if (world_size is None) == (sharding is None):
        raise click.UsageError("give either --world-size or --sharding")
    config = None if sharding is None else ShardingConfig.from_file(sharding)
    with output.progress("reshard") as update:
        report = rewrite(
            source,
            target,
            sharding=config,
            world_size=world_size,
            max_memory=max_memory,
            overwrite=overwrite,
            include=include or None,
            exclude=exclude or None,
            progress=update,
        )
    click.echo(
        f"{report.path}: {report.num_tensors} tensors, {size(report.nbytes)} "
        f"in {report.num_files} files"
    )


@click.command()
@_path
@click.option("--overwrite", is_flag=True, help="Replace the backup of another save of the step.")
def backup(path: str, *, overwrite: bool) -> None:
    """Keep the checkpoint at PATH in the folder backup beside it as well, out of prune's reach.

    Its files are hard links where that is possible, which take no space; else they are copied, and
    every byte is checked.

    \b
    dist-ckpt backup runs/a@latest
    """  # noqa: D301 - click knows the backspace
    click.echo(output.printable(keep_beside(path, overwrite=overwrite)))


@click.command()
@_path
@click.argument("components", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also if it is pinned, tagged or held.")
def strip(path: str, components: tuple[str, ...], *, yes: bool, force: bool) -> None:
    """Drop COMPONENTS, top-level keys of the state, from the checkpoint at PATH.

    There is no way back. The rest stays where it is, with its metrics, tags and pin, and takes no
    new space where the storage makes hard links.

    \b
    dist-ckpt strip runs/a@12000 optim scheduler
    """  # noqa: D301 - click knows the backspace
    storage, where = open_resolved(path)
    removal.check_deletable(storage, where)
    _confirm(f"Drop {', '.join(components)} of {where}?", f"{where} is not stripped", yes=yes)
    report = strip_at(storage, where, frozenset(components), force=force)
    left = f"{report.num_tensors} tensors, {size(report.nbytes)}"
    click.echo(f"{output.printable(where)}: {left} left, {report.num_linked} files linked")


def _confirm(question: str, refused: str, *, yes: bool) -> None:
    """Ask whether to do what cannot be undone, where there is somebody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        click.echo(f"dist-ckpt: {output.printable(refused)}: say --yes to mean it", err=True)
        raise click.exceptions.Exit(output.REFUSED)
    if not click.confirm(output.printable(question)):
        raise click.exceptions.Exit(output.REFUSED)


@click.command()
@_path
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also if it is pinned, tagged or held.")
def rm(path: str, *, yes: bool, force: bool) -> None:
    """Delete the checkpoint at PATH. There is no way back.

    One that is pinned, tagged or held is not deleted without --force.
    """
    storage, where = open_resolved(path)
    removal.check_deletable(storage, where)
    _confirm(f"Delete {where}?", f"{where} is not deleted", yes=yes)
    delete_at(storage, where, force=force)
    click.echo(f"deleted {output.printable(where)}")


@click.command()
@_path
@click.option(
    "--grace",
    "grace_s",
    type=output.Seconds(min=0),
    default=3600.0,
    show_default=True,
    help="Seconds for which nothing was written, after which an open attempt counts as dead.",
)
def gc(path: str, *, grace_s: float) -> None:
    """Remove what dead and abandoned saves left in PATH, a run's folder or one checkpoint.

    What is committed, and what is not ours, is never touched. A save that is still running keeps
    writing, so the grace protects it.
    """
    storage, root = open_storage(path)
    with only_collector(root):
        removed = removal.collect_all(storage, root, grace_s=grace_s)
    for name in removed:
        click.echo(f"removed {output.printable(name)}")
    click.echo(f"{len(removed)} removed")


@contextmanager
def only_collector(root: str) -> Iterator[None]:
    """Keep other collectors of this user and host out of a root; StorageError if one is in it.

    It spares two of them each other's errors. That nothing is lost rests on the commit order.
    """
    key = document_digest(os.fsencode(os.path.realpath(root)))
    # Not in the root: a lock file there would be one more thing to tell from a checkpoint.
    lock = FileLock(Path(tempfile.gettempdir()) / f"dist-ckpt-gc-{os.getuid()}-{key}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StorageError(
            f"another dist-ckpt gc is at work in {root}: wait until it has ended, then try again"
        ) from None
    try:
        yield
    finally:
        lock.release()
