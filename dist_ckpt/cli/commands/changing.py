"""The commands that write or remove: reshard, backup, cp, strip, rm, gc."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from filelock import FileLock, Timeout

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.completion import components_in
from dist_ckpt.core.commit import removal
from dist_ckpt.core.commit.attempts import list_attempts
from dist_ckpt.core.commit.records.leases import check_unprotected
from dist_ckpt.core.commit.records.old_records import check_upgraded
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.errors import StorageError
from dist_ckpt.reports import size
from dist_ckpt.runs.retention.deletion import delete_at
from dist_ckpt.runs.selectors import open_resolved
from dist_ckpt.tools.rewrite.backup import backup as keep_beside
from dist_ckpt.tools.rewrite.backup import would_back_up
from dist_ckpt.tools.rewrite.copying import copy, would_copy
from dist_ckpt.tools.rewrite.reshard import ReshardOptions, would_reshard
from dist_ckpt.tools.rewrite.reshard import reshard as rewrite
from dist_ckpt.tools.rewrite.strip import remaining_after, strip_at


@click.command()
@click.argument("source", type=shared_options.PATH)
@click.argument("target", type=shared_options.PATH)
@click.option("--world-size", type=click.IntRange(min=1), help="Cut evenly for so many ranks.")
@click.option(
    "--sharding",
    type=shared_options.PATH,
    help="A ShardingConfig in a .json or .toml file.",
)
@click.option("--max-memory", type=shared_options.Bytes(), default="1GiB", show_default=True)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the checkpoint at TARGET, which may be SOURCE, once the new one is durable.",
)
@shared_options.selected
@shared_options.dry_run
@shared_options.json
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
    dry_run: bool,
    as_json: bool,
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
    given = ReshardOptions(
        sharding=config,
        world_size=world_size,
        max_memory=max_memory,
        overwrite=overwrite,
        include=include or None,
        exclude=exclude or None,
    )
    if dry_run:
        output.print_dry_run(would_reshard(source, target, **given), as_json=as_json)
        return
    with output.progress("reshard") as update:
        report = rewrite(source, target, **given, progress=update)
    told = f"{report.num_tensors} tensors, {size(report.nbytes)} in {report.num_files} files"
    output.print_written("reshard", report, f"{report.path}: {told}", as_json=as_json)


@click.command()
@shared_options.path
@click.option("--overwrite", is_flag=True, help="Replace the backup of another save of the step.")
@shared_options.dry_run
@shared_options.json
def backup(path: str, *, overwrite: bool, dry_run: bool, as_json: bool) -> None:
    """Keep the checkpoint at PATH in the folder backup beside it as well, out of prune's reach.

    Its files are hard links where that is possible, which take no space; else they are copied, and
    every byte is checked.

    \b
    dist-ckpt backup runs/a@latest
    """  # noqa: D301 - click knows the backspace
    if dry_run:
        output.print_dry_run(would_back_up(path, overwrite=overwrite), as_json=as_json)
        return
    with output.progress("backup") as update:
        kept = keep_beside(path, overwrite=overwrite, progress=update)
    if as_json:
        output.print_json("backup", {"path": kept})
    else:
        click.echo(output.printable(kept))


@click.command()
@click.argument("source", type=shared_options.PATH)
@click.argument("target", type=shared_options.PATH)
@shared_options.overwrite
@click.option("--link", is_flag=True, help="Hard links where they can be: no space, no check.")
@shared_options.dry_run
@shared_options.json
def cp(
    source: str, target: str, *, overwrite: bool, link: bool, dry_run: bool, as_json: bool
) -> None:
    """Copy the checkpoint SOURCE to TARGET, on whatever file system, and check every byte.

    TARGET becomes the checkpoint: name its folder, not the one above. It is committed as a save is,
    so a copy that failed is none. Metrics go along into a run's folder; pins and tags do not.

    \b
    dist-ckpt cp runs/a@latest archive/step-00012000
    """  # noqa: D301 - click knows the backspace
    if dry_run:
        output.print_dry_run(would_copy(source, target, overwrite=overwrite), as_json=as_json)
        return
    with output.progress("cp") as update:
        report = copy(source, target, overwrite=overwrite, link=link, progress=update)
    linked = f", {report.num_linked} linked" if link else ""
    told = f"{report.path}: {size(report.nbytes)} in {report.num_files} files{linked}"
    output.print_written("cp", report, told, as_json=as_json)


@click.command()
@shared_options.path
@click.argument("components", nargs=-1, required=True, shell_complete=components_in)
@shared_options.yes
@shared_options.dry_run
@click.option("--force", is_flag=True, help="Also if it is pinned, tagged or leased.")
@shared_options.json
def strip(
    path: str, components: tuple[str, ...], *, yes: bool, dry_run: bool, force: bool, as_json: bool
) -> None:
    """Drop COMPONENTS, top-level keys of the state, from the checkpoint at PATH.

    There is no way back. The rest stays where it is, with its metrics, tags and pin, and takes no
    new space where the storage makes hard links.

    \b
    dist-ckpt strip runs/a@12000 optim scheduler
    """  # noqa: D301 - click knows the backspace
    storage, where = open_resolved(path)
    removal.check_deletable(storage, where)
    if dry_run:
        num, nbytes = remaining_after(storage, where, frozenset(components), force=force)
        _print_left((where, num, nbytes), None, as_json=as_json)
        return
    if not yes:
        question = f"Drop {', '.join(components)} of {where}?"
        output.confirm(question, f"{where} is not stripped")
    with output.progress("strip") as update:
        report = strip_at(storage, where, frozenset(components), force=force, progress=update)
    left = where, report.num_tensors, report.nbytes
    _print_left(left, report.num_linked, as_json=as_json)


def _print_left(left: tuple[str, int, int], num_linked: int | None, *, as_json: bool) -> None:
    """Print what is left of a checkpoint, or would be if nothing is linked."""
    where, num, nbytes = left
    if as_json:
        facts = {"path": where, "num_tensors": num, "nbytes": nbytes, "num_linked": num_linked}
        output.print_json("strip", {**facts, "dry_run": num_linked is None})
        return
    done = "would be left" if num_linked is None else f"left, {num_linked} files linked"
    click.echo(f"{output.printable(where)}: {num} tensors, {size(nbytes)} {done}")


@click.command()
@shared_options.path
@shared_options.yes
@shared_options.dry_run
@click.option("--force", is_flag=True, help="Also if it is pinned, tagged or leased.")
@shared_options.json
def rm(path: str, *, yes: bool, dry_run: bool, force: bool, as_json: bool) -> None:
    """Delete the checkpoint at PATH. There is no way back.

    One that is pinned, tagged or leased is not deleted without --force.

    \b
    dist-ckpt rm runs/a@12000 --dry-run
    """  # noqa: D301 - click knows the backspace
    storage, where = open_resolved(path)
    removal.check_deletable(storage, where)
    if dry_run:
        check_upgraded(storage, os.path.dirname(where))
        if not force:
            check_unprotected(storage, where, list_attempts(storage, where), lambda *_: time.time())
    else:
        if not yes:
            output.confirm(f"Delete {where}?", f"{where} is not deleted")
        delete_at(storage, where, force=force)
    if as_json:
        output.print_json("rm", {"path": where, "dry_run": dry_run})
    else:
        click.echo(f"{'would be deleted' if dry_run else 'deleted'} {output.printable(where)}")


@click.command()
@shared_options.path
@click.option(
    "--grace",
    "grace_s",
    type=output.Seconds(min=0),
    default=3600.0,
    show_default=True,
    help="Seconds for which nothing was written, after which an open attempt counts as dead.",
)
@shared_options.dry_run
@shared_options.json
def gc(path: str, *, grace_s: float, dry_run: bool, as_json: bool) -> None:
    """Remove what dead and abandoned saves left in PATH, a run's folder or one checkpoint.

    What is committed, and what is not ours, is never touched. A save that is still running keeps
    writing, so the grace protects it. Nothing of it can be wanted back, so it does not ask.

    \b
    dist-ckpt gc runs/a
    dist-ckpt gc runs/a --grace 60 --dry-run
    """  # noqa: D301 - click knows the backspace
    storage, root = open_resolved(path)
    if dry_run:
        now = time.time()
        removed = removal.collectable_in_all(storage, root, grace_s=grace_s, now=now)
    else:
        with exclusive_gc(root):
            removed = removal.collect_all(storage, root, grace_s=grace_s)
    if as_json:
        output.print_json("gc", {"path": root, "dry_run": dry_run, "removed": list(removed)})
        return
    verb = "would be removed" if dry_run else "removed"
    for name in removed:
        click.echo(f"{verb} {output.printable(name)}")
    click.echo(f"{len(removed)} {verb}")


@contextmanager
def exclusive_gc(root: str) -> Iterator[None]:
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
