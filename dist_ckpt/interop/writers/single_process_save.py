"""Save a plain state as a checkpoint in one process, without torch and without a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from dist_ckpt import __version__
from dist_ckpt.config import Config
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index.catalog_json import EncodedCatalog
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.planning.plan import FilePlan, SavePlan
from dist_ckpt.core.planning.save.save_planner import items_of, plan_save
from dist_ckpt.core.saving.transaction import IndexFields, RankWriteResult, Transaction
from dist_ckpt.core.shard_io.memory.protocol import CellSource
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, SourceOf, write_all
from dist_ckpt.core.storage import open_storage
from dist_ckpt.core.storage.forwarding import CountingStorage
from dist_ckpt.interop.writers.plain_states import PlainState, PlainTensor
from dist_ckpt.reports import Phases, SaveReport
from dist_ckpt.tools.rewrite.dry_run import DryRun, dry_run


def save_single_process(
    state: PlainState,
    path: str | os.PathLike[str],
    source_of: Callable[[PlainTensor], CellSource],
    *,
    step: int | None,
    overwrite: bool,
    imported_from: str,
) -> SaveReport:
    """Save a state at `path`: claim, write and commit it as a save by one rank.

    `source_of` returns the source of a tensor's bytes; threads call it at the same time. On return
    the checkpoint is complete and durable; if it raises, this call made no checkpoint. Raises the
    errors of `dc.save` and of the sources.
    """
    if type(overwrite) is not bool:
        raise TypeError(f"overwrite={overwrite!r}: give True or False")
    own, folder = open_storage(path)
    storage, config, channel = (
        CountingStorage(own),
        Config.from_environment(),
        SingleProcessChannel(),
    )
    plan = plan_save([(state.inventory, (0,))], 1)
    phases = Phases("import to", folder, quiet=False)

    def write(folder: str) -> RankWriteResult:
        start = time.monotonic()
        files = _files_of(state, plan, source_of, step)
        receipts = write_all(storage, folder, files, threads=config.threads)
        return RankWriteResult(receipts, (), time.monotonic() - start)

    with Transaction(channel, config) as transaction:
        with phases.phase("claim"), channel.exchange("claim"):
            transaction.claim(storage, folder, overwrite=overwrite)
        with phases.phase("write"):
            saved_by = {"dist_ckpt": __version__, "imported_from": imported_from}
            decision = transaction.commit(
                EncodedCatalog(plan.catalog), IndexFields(step, {}, saved_by), write
            )
        with phases.phase("clean up"):
            transaction.supersede()
    return transaction.report(decision, phases, reads=storage.reads, writes=storage.writes)


def plan_single_process_save(
    state: PlainState, path: str | os.PathLike[str], *, overwrite: bool
) -> DryRun:
    """Return the plan of `save_single_process`, with its errors. Nothing is changed."""
    if type(overwrite) is not bool:
        raise TypeError(f"overwrite={overwrite!r}: give True or False")
    plan = plan_save([(state.inventory, (0,))], 1)
    files = {file.name: file.nbytes for file in items_of(plan, 0)}
    files |= {name: len(data) for name, data in _objects_of(state, plan).items()}
    return dry_run(*open_storage(path), files, overwrite=overwrite)


def _objects_of(state: PlainState, plan: SavePlan) -> dict[str, bytes]:
    main = objects_file.ObjectsFile(tree=plan.tree, values=state.values)
    return {filenames.OBJECTS: objects_file.encode(main)}


def _files_of(
    state: PlainState,
    plan: SavePlan,
    source_of: Callable[[PlainTensor], CellSource],
    step: int | None,
) -> RankFiles:
    def sources(file: FilePlan) -> SourceOf:
        return lambda number: source_of(state.tensors[file.items[number].fqn])

    plans = items_of(plan, 0)
    return RankFiles(
        step=step,
        plans=plans,
        sources=tuple(map(sources, plans)),
        objects=_objects_of(state, plan),
    )
