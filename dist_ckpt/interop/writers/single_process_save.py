"""Save a plain state as a checkpoint in one process, without torch and without a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

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
from dist_ckpt.reports import Phases, Progress, SaveReport
from dist_ckpt.tools.rewrite.write_plan import WritePlan, paths_to_replace

Opened = AbstractContextManager[Callable[[PlainTensor], CellSource]]


def plan_single_process_save(
    state: PlainState,
    path: str | os.PathLike[str],
    open_data: Callable[[Progress | None], Opened],
    *,
    step: int | None,
    overwrite: bool,
    imported_from: str,
) -> WritePlan[SaveReport]:
    """Return the plan to save a state at `path` as a save by one rank does.

    `open_data` opens the data when the plan runs. What it yields returns the source of a tensor's
    bytes; threads call it at the same time. Once the plan has run, the checkpoint is complete and
    durable; if the run raises, it made no checkpoint. It raises the errors of `dc.save` and of the
    sources.
    """
    if type(overwrite) is not bool:
        raise TypeError(f"overwrite={overwrite!r}: give True or False")
    storage, folder = open_storage(path)
    plan = plan_save([(state.inventory, (0,))], 1)
    saved_by = {"dist_ckpt": __version__, "imported_from": imported_from}
    fields = IndexFields(step, {}, saved_by)

    def run(progress: Progress | None) -> SaveReport:
        with open_data(progress) as source_of:
            files = _files_of(state, plan, source_of, step)
            return _save(CountingStorage(storage), folder, plan, files, fields, overwrite=overwrite)

    def sizes() -> dict[str, int]:
        documents = {name: len(data) for name, data in _objects_of(state, plan).items()}
        return {file.name: file.nbytes for file in items_of(plan, 0)} | documents

    return WritePlan(folder, run, sizes, paths_to_replace(storage, folder, overwrite=overwrite))


def _save(
    storage: CountingStorage,
    path: str,
    plan: SavePlan,
    files: RankFiles,
    fields: IndexFields,
    *,
    overwrite: bool,
) -> SaveReport:
    config, channel = Config.from_environment(), SingleProcessChannel()
    phases = Phases("import to", path, quiet=False)

    def write(folder: str) -> RankWriteResult:
        start = time.monotonic()
        receipts = write_all(storage, folder, files, threads=config.threads)
        return RankWriteResult(receipts, (), time.monotonic() - start)

    with Transaction(channel, config) as transaction:
        with phases.phase("claim"), channel.exchange("claim"):
            transaction.claim(storage, path, overwrite=overwrite)
        with phases.phase("write"):
            decision = transaction.commit(EncodedCatalog(plan.catalog), fields, write)
        with phases.phase("clean up"):
            transaction.supersede()
    return transaction.report(decision, phases, reads=storage.reads, writes=storage.writes)


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
