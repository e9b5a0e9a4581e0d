"""`dc.backup`: a checkpoint once more, in the folder `backup` beside it, where no rule reaches."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace

from dist_ckpt.config import Config
from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.records.leases import leased_source
from dist_ckpt.core.commit.records.protections import Where
from dist_ckpt.core.commit.records.record_store import check_upgraded, read_annotations_of
from dist_ckpt.core.format.filenames import BACKUP, Attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.saving.transaction import Transaction
from dist_ckpt.core.shard_io.write.copied_files import files_of, link_or_copy_files
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, ExistsError, IncompatibleError, NotFoundError
from dist_ckpt.reports import CopyProgress, Progress
from dist_ckpt.runs.annotations import annotations_of, put_metrics
from dist_ckpt.runs.selectors import open_resolved
from dist_ckpt.tools.rewrite.dry_run import DryRun, dry_run

_log = logging.getLogger("dist_ckpt")


def backup(
    path: str | os.PathLike[str], *, overwrite: bool = False, progress: Progress | None = None
) -> str:
    """Keep the checkpoint at `path` in the folder `backup` beside it as well; return where.

    `runs/a/step-100`, or `runs/a@latest` if that is it, is kept as `runs/a/backup/step-100`: a
    checkpoint of its own, durable on return, with what was measured of it. What prunes or lists
    `runs/a` does not look there. Its files are hard links where the storage makes them, else copies
    of which every byte is checked: a link takes no space, and shares what later befalls the file.
    If the same save is there already nothing is done. One process calls it. `progress` may be
    called from other threads, by one at a time.

    Raises NotFoundError if there is no such checkpoint, ExistsError if another save has the place
    (unless `overwrite`), CorruptError for a damaged source, as far as it is read.
    """
    if type(overwrite) is not bool:
        raise TypeError(f"overwrite={overwrite!r}: give True or False")
    storage, source = open_resolved(path)
    return backup_at(storage, source, overwrite=overwrite, progress=progress)


def backup_at(
    storage: Storage, path: str, *, overwrite: bool, progress: Progress | None = None
) -> str:
    """Do so for a checkpoint at a storage's path, in which no link leads elsewhere."""
    root, folder, target = _places(storage, path)
    check_upgraded(storage, root)
    with leased_source(storage, path) as (attempt, index):
        kept = _kept_at(storage, target, index)
        if kept is None:
            source = OpenCheckpoint(storage, path, attempt, index)
            kept = _make(storage, source, target, overwrite=overwrite, progress=progress)
        # Whoever made what was there may have died before it had synced it.
        for one in (f"{target}/{kept}", target, folder, root):
            storage.sync(one)
        if index.step is not None:
            measured = _measured(storage, root, (index.step, attempt))
            known = _measured(storage, folder, (index.step, kept))
            if measured and measured != known:
                put_metrics(storage, folder, (index.step, kept), measured)
    return target


def plan_backup(path: str | os.PathLike[str], *, overwrite: bool = False) -> DryRun:
    """Return what `backup` would write: no files if the same save is there already.

    Nothing is changed. Raises what it would before it writes.
    """
    storage, source = open_resolved(path)
    root, _, target = _places(storage, source)
    check_upgraded(storage, root)
    _, index = attempts.find(storage, source)
    if _kept_at(storage, target, index) is not None:
        return DryRun(target, {})
    files = {name: record.nbytes for name, record in files_of(index).items()}
    return dry_run(storage, target, files, overwrite=overwrite)


def _places(storage: Storage, path: str) -> tuple[str, str, str]:
    """Return the folder of a checkpoint, that of the backups in it, and where it is kept there."""
    above, _, name = path.rpartition("/")
    root, folder = above or "/", f"{above}/{BACKUP}"
    if root.rpartition("/")[2] == BACKUP:
        raise ValueError(f"{path} is a backup itself: give the checkpoint of a run")
    if attempts.list_attempts(storage, folder):
        raise ExistsError(f"{folder} is a checkpoint, and backups would lie in it: rename it first")
    return root, folder, f"{folder}/{name}"


def _kept_at(storage: Storage, target: str, index: Index) -> Attempt | None:
    """Return the attempt that keeps the same save already, if one does."""
    try:
        attempt, there = attempts.find(storage, target)
    except (NotFoundError, CorruptError, IncompatibleError):
        return None  # to be replaced, or refused, as the claim says
    # Of an index from before saves had ids the digests of its files tell.
    is_same = (there.save, there.files) == (index.save, index.files)
    return attempt if is_same or (index.save and there.save == index.save) else None


def _make(
    storage: Storage,
    source: OpenCheckpoint,
    target: str,
    *,
    overwrite: bool,
    progress: Progress | None,
) -> Attempt:
    sizes = {name: record.nbytes for name, record in files_of(source.index).items()}
    with Transaction(SingleProcessChannel(), label="backup") as transaction:
        attempt = transaction.claim(storage, target, overwrite=overwrite)
        linked = link_or_copy_files(
            storage,
            source.index,
            f"{source.path}/{source.attempt}",
            transaction.folder,
            files_of(source.index),
            threads=Config.from_environment().threads,
            tell=CopyProgress(sum(sizes.values()), progress),
        )
        transaction.commit_index(replace(source.index, attempt=attempt.name))
        transaction.supersede()
    text = "%s is kept as %s: %d of %d files linked"
    _log.info(text, source.path, target, linked.num, len(sizes))
    return attempt


def _measured(storage: Storage, root: str, where: Where) -> Mapping[str, float]:
    return annotations_of(read_annotations_of(storage, root, *where), 0.0).metrics.get(where, {})
