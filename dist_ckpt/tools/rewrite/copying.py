"""A checkpoint once more, in another folder or on another file system, checked."""

from __future__ import annotations

import os
from dataclasses import replace

from dist_ckpt.config import Config
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.records.leases import leased_source
from dist_ckpt.core.commit.records.record_store import can_keep_records, read_annotations_of
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.saving.transaction import Transaction
from dist_ckpt.core.shard_io.write.copied_files import files_of, link_or_copy_files
from dist_ckpt.core.storage import Storage, open_storage, real_path
from dist_ckpt.core.storage.forwarding import CountingStorage
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.interop.registry import foreign_at
from dist_ckpt.reports import CopyProgress, Phases, Progress, SaveReport
from dist_ckpt.runs.annotations import annotations_of, put_metrics
from dist_ckpt.runs.selectors import open_resolved
from dist_ckpt.tools.rewrite.dry_run import DryRun, dry_run


def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    link: bool = False,
    progress: Progress | None = None,
) -> SaveReport:
    """Copy the checkpoint at `source` to `target`, which is to be the checkpoint's own folder.

    Every byte is checked on its way, and the copy is committed as a save is: durable and complete
    on return, and no checkpoint before. It is the same save, for as many ranks; what was measured
    goes along where the target's folder is a run's. Pins, tags and leases do not. With `link` files
    are hard links where the storage makes them: nothing of those is read or checked, and a link
    shares what later befalls the file. One process calls it.

    `progress` may be called from other threads, by one at a time. Raises NotFoundError if there is
    no such checkpoint, IncompatibleError for files of another system, ExistsError if something is
    at `target` (unless `overwrite`), CorruptError for a damaged source, StorageError if the space
    does not suffice: of a copy that failed nothing is left.
    """
    for name, given in (("overwrite", overwrite), ("link", link)):
        if type(given) is not bool:
            raise TypeError(f"{name}={given!r}: give True or False")
    storage, old, new = _opened(source, target)
    counting = CountingStorage(storage)
    phases = Phases("copy", new, quiet=False)
    with leased_source(counting, old) as (attempt, index):
        with Transaction(SingleProcessChannel(), label="copy") as transaction:
            copied = transaction.claim(counting, new, overwrite=overwrite)
            files = files_of(index)
            with phases.phase("write"):
                linked = link_or_copy_files(
                    counting,
                    index,
                    f"{old}/{attempt}",
                    transaction.folder,
                    files,
                    threads=Config.from_environment().threads,
                    links=link,
                    tell=CopyProgress(sum(one.nbytes for one in files.values()), progress),
                )
            with phases.phase("commit"):
                decision = transaction.commit_index(
                    replace(index, attempt=copied.name),
                    seconds=phases.seconds["write"],
                    linked=linked,
                )
            transaction.supersede()
        _carry_metrics(counting, (old, attempt), (new, copied), index)
    return transaction.report(decision, phases, reads=counting.reads, writes=counting.writes)


def plan_copy(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False
) -> DryRun:
    """Return what `copy` would write. Nothing is changed. Raises what it would before it writes."""
    storage, old, new = _opened(source, target)
    _, index = attempts.find(storage, old)
    files = {name: record.nbytes for name, record in files_of(index).items()}
    return dry_run(storage, new, files, overwrite=overwrite)


def _opened(
    source: str | os.PathLike[str], target: str | os.PathLike[str]
) -> tuple[Storage, str, str]:
    storage, old = open_resolved(source)
    new = real_path(open_storage(target)[1])
    _check_copyable(storage, old, new)
    return storage, old, new


def _check_copyable(storage: Storage, source: str, target: str) -> None:
    """Raise IncompatibleError or ValueError unless one checkpoint may be copied to the other."""
    if foreign_at(storage, source) is not None:
        raise IncompatibleError(
            f"{source} is of another system: copy its files, or make a checkpoint of it with "
            f"`dist-ckpt import`"
        )
    if source == target:
        raise ValueError(f"source and target are both {source}: give another target")
    if target.startswith(f"{source}/"):
        raise ValueError(f"the target {target} lies in the source: give another target")


def _carry_metrics(
    storage: Storage, old: tuple[str, Attempt], new: tuple[str, Attempt], index: Index
) -> None:
    """Have what was measured put down for the copy as well, if its folder is a run's."""
    roots = [path.rpartition("/")[0] or "/" for path, _ in (old, new)]
    if index.step is None or not all(can_keep_records(storage, root) for root in roots):
        return
    was, now = (index.step, old[1]), (index.step, new[1])
    facts = read_annotations_of(storage, roots[0], *was, with_old=True)
    measured = annotations_of(facts, 0.0).metrics.get(was)
    if measured:
        put_metrics(storage, roots[1], now, measured)
