"""`dc.copy` and `dc.backup`: write a second copy of a checkpoint, by hard links or by bytes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.records.leases import leased
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.commit.records.record_store import (
    can_keep_records,
    check_upgraded,
    read_annotations_of,
)
from dist_ckpt.core.commit.transaction import CommitDecision, Transaction
from dist_ckpt.core.format.filenames import BACKUP, Attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.runtime.arguments import check_flag
from dist_ckpt.core.storage import Storage, entry_path, open_storage, real_path
from dist_ckpt.core.storage.storage_wrappers import CountingStorage
from dist_ckpt.errors import CorruptError, ExistsError, IncompatibleError, NotFoundError
from dist_ckpt.interop.registry import open_foreign
from dist_ckpt.reports import Phases, Progress, SaveReport
from dist_ckpt.runs.metrics import metrics_by_checkpoint, put_metrics
from dist_ckpt.runs.selectors import open_resolved
from dist_ckpt.tools.new_files import WritePlan, check_outside, paths_to_replace

_log = logging.getLogger("dist_ckpt")


def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    link: bool = False,
    progress: Progress | None = None,
) -> SaveReport:
    """Copy the checkpoint at `source` to `target`, the path of the new checkpoint.

    Every byte is checked. The copy is committed like a save: on return it is durable and complete,
    and it does not exist before. It has the id and the world size of the source. If the folder
    above `target` is a run, the metrics are copied too, but not pins, tags and leases. With `link`,
    files are hard links where the storage supports them. For a linked shard file, only the size and
    the header are checked. Later damage to it damages both checkpoints. One process calls this.

    `progress` may be called from other threads, one call at a time. Raises NotFoundError if the
    checkpoint does not exist, IncompatibleError for files of another system, ExistsError if
    something is at `target` (unless `overwrite`), CorruptError for a damaged source, and
    StorageError if there is not enough space. After an error, no part of the copy remains.
    """
    return plan_copy(source, target, overwrite=overwrite, link=link).run(progress)


def plan_copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    link: bool = False,
) -> WritePlan[SaveReport]:
    """Return the plan of `copy`. Raises the errors that `copy` raises before it writes."""
    check_flag("overwrite", overwrite)
    check_flag("link", link)
    storage, source_path = open_resolved(source)
    path = entry_path(open_storage(target)[1])
    if open_foreign(storage, source_path) is not None:
        raise IncompatibleError(
            f"{source_path} was written by another system: copy its files, or convert it with "
            f"`dist-ckpt import`"
        )
    check_outside(real_path(source_path), real_path(path))
    counting = CountingStorage(storage)
    opened = OpenCheckpoint.at(counting, source_path)

    def execute(progress: Progress | None) -> SaveReport:
        with leased(counting, opened.path, opened.attempt, opened.index):
            transaction, decision, phases = _write(
                opened, path, "copy", progress, overwrite=overwrite, links=link
            )
            _copy_metrics(opened, path, transaction.attempt)
        return transaction.report(decision, phases, reads=counting.reads, writes=counting.writes)

    replaces = paths_to_replace(storage, path, overwrite=overwrite)
    return WritePlan(path, execute, partial(_file_sizes, opened.index), replaces)


def _copy_metrics(source: OpenCheckpoint, path: str, attempt: Attempt) -> None:
    """Copy the metrics of the source to its copy, if both are in folders of runs."""
    roots = [checkpoint.rpartition("/")[0] or "/" for checkpoint in (source.path, path)]
    step = source.index.step
    if step is None or not all(can_keep_records(source.storage, root) for root in roots):
        return
    if metrics := _read_metrics(source.storage, roots[0], (step, source.attempt), with_old=True):
        put_metrics(source.storage, roots[1], (step, attempt), metrics)


def _read_metrics(
    storage: Storage, root: str, key: CheckpointKey, *, with_old: bool = False
) -> Mapping[str, float]:
    annotations = read_annotations_of(storage, root, *key, with_old=with_old)
    return metrics_by_checkpoint(annotations).get(key, {})


def _file_sizes(index: Index) -> dict[str, int]:
    return {name: record.nbytes for name, record in index.all_files.items()}


def _write(
    source: OpenCheckpoint,
    path: str,
    label: str,
    progress: Progress | None,
    *,
    overwrite: bool,
    links: bool,
) -> tuple[Transaction, CommitDecision, Phases]:
    """Link or copy all files into a new attempt at `path`, and commit it."""
    storage, index = source.storage, source.index
    phases = Phases(label, path, quiet=label != "copy")
    with Transaction(SingleProcessChannel(), label=label) as transaction:
        attempt = transaction.claim(storage, path, overwrite=overwrite)
        with phases.phase("write"):
            linked = source.link_or_copy(
                transaction.folder,
                links=links,
                check_room=transaction.check_room,
                progress=progress,
            )
        with phases.phase("commit"):
            decision = transaction.commit_index(
                replace(index, attempt=attempt.name), seconds=phases.seconds["write"], linked=linked
            )
        transaction.remove_superseded()
    return transaction, decision, phases


def backup(
    path: str | os.PathLike[str], *, overwrite: bool = False, progress: Progress | None = None
) -> str:
    """Write a second copy of the checkpoint at `path` into the folder `backup` next to it.

    Returns the path of the backup. The backup of `runs/a/step-100` is `runs/a/backup/step-100`: a
    separate checkpoint, durable on return, with the metrics. Listings and prunes of `runs/a` ignore
    it. Files are hard links where the storage supports them, otherwise checked copies. A link takes
    no space, but later damage to the file damages both checkpoints. If the same save is there
    already, nothing is written. One process calls this. `progress` may be called from other
    threads, one call at a time.

    Raises NotFoundError if the checkpoint does not exist, ExistsError if another save is at the
    path of the backup (unless `overwrite`), and CorruptError if a file that is read is damaged.
    """
    return plan_backup(path, overwrite=overwrite).run(progress)


def plan_backup(path: str | os.PathLike[str], *, overwrite: bool = False) -> WritePlan[str]:
    """Return the plan of `backup`. It has no files if the backup of the same save exists.

    Raises the errors that `backup` raises before it writes.
    """
    check_flag("overwrite", overwrite)
    return plan_backup_at(*open_resolved(path), overwrite=overwrite)


def plan_backup_at(storage: Storage, path: str, *, overwrite: bool) -> WritePlan[str]:
    """Return the plan of `backup` for a checkpoint at a real path of a storage."""
    above, _, name = path.rpartition("/")
    root, folder = above or "/", f"{above}/{BACKUP}"
    target = f"{folder}/{name}"
    if root.rpartition("/")[2] == BACKUP:
        raise ValueError(f"{path} is a backup itself: give the checkpoint of a run")
    if attempts.list_attempts(storage, folder):
        raise ExistsError(f"{folder} is a checkpoint, so it cannot hold backups: rename it first")
    check_upgraded(storage, root)
    source = OpenCheckpoint.at(storage, path)
    index = source.index

    def execute(progress: Progress | None) -> str:
        with leased(storage, path, source.attempt, index):
            attempt = _find_same_backup(storage, target, index)
            if attempt is None:
                transaction, decision, _ = _write(
                    source, target, "backup", progress, overwrite=overwrite, links=True
                )
                attempt = transaction.attempt
                text = "%s: backup is %s: linked %d of %d files"
                _log.info(text, path, target, decision.num_linked, index.num_files)
            # A process that made this backup earlier may have died before it synced.
            for made in (f"{target}/{attempt}", target, folder, root):
                storage.sync(made)
            if index.step is not None:
                metrics = _read_metrics(storage, root, (index.step, source.attempt))
                key = (index.step, attempt)
                if metrics and metrics != _read_metrics(storage, folder, key):
                    put_metrics(storage, folder, key, metrics)
        return target

    if _find_same_backup(storage, target, index) is not None:
        return WritePlan(target, execute, dict)
    replaces = paths_to_replace(storage, target, overwrite=overwrite)
    return WritePlan(target, execute, partial(_file_sizes, index), replaces)


def _find_same_backup(storage: Storage, target: str, index: Index) -> Attempt | None:
    """Return the attempt of an existing backup at `target` with the same save, or None."""
    try:
        attempt, backup_index = attempts.find_checkpoint(storage, target)
    except (NotFoundError, CorruptError, IncompatibleError):
        return None  # the claim decides whether it may be replaced
    # Old indexes have no save id: compare the digests of the files.
    is_same = (backup_index.save, backup_index.files) == (index.save, index.files)
    return attempt if is_same or (index.save and backup_index.save == index.save) else None
