"""`dc.average`: choose the sources, agree on them, plan, write and commit.

The average has the same files as the newest source, with averaged tensors. Each rank of the job
writes some of these files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial

from torch.distributed import ProcessGroup

from dist_ckpt import __version__
from dist_ckpt.core.comm.collectives.collective import SingleProcessCollective
from dist_ckpt.core.comm.exchange.channel import (
    COORDINATOR,
    SingleProcessChannel,
    check_equal_on_all_ranks,
)
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.transaction import IndexFields, RankWriteResult, Transaction
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import Index, ObjectsFileRecord
from dist_ckpt.core.format.index.index_json import EncodedCatalog
from dist_ckpt.core.planning.name_selection import parse_selection
from dist_ckpt.core.planning.plan import FilePlan, FileReceipt, Receipt
from dist_ckpt.core.planning.save.save_planner import plan_all_files, stored_cells_by_rank
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.shard_io.read.open_files import read_encoded_objects
from dist_ckpt.core.shard_io.read.read_windows import WindowReaders
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, write_rank_files
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.storage_wrappers import CountingStorage
from dist_ckpt.errors import NotFoundError, StorageError
from dist_ckpt.reports import CopyProgress, IoCount, Phases, Progress, SaveReport
from dist_ckpt.settings import Settings
from dist_ckpt.tools.average.checkpoint_selection import (
    AverageOptions,
    AverageSource,
    choose_sources,
    lease_sources,
)
from dist_ckpt.tools.average.mean import AveragedTensors, select_tensors
from dist_ckpt.tools.new_files import WritePlan, paths_to_replace

_log = logging.getLogger("dist_ckpt")

PathLike = str | os.PathLike[str]


def average(
    sources: PathLike | Sequence[PathLike],
    *,
    to: PathLike,
    last: int | None = None,
    best: int | None = None,
    min: str | None = None,  # noqa: A002  (as `keep.best` has it)
    max: str | None = None,  # noqa: A002
    weights: Sequence[float] | None = None,
    decay: float | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
    group: ProcessGroup | None = None,
    progress: Progress | None = None,
) -> SaveReport:
    """Write the average of checkpoints as a new checkpoint at `to`. Collective in a job.

    `sources` is a list of checkpoints: paths, or selectors such as "runs/a@latest". Or `sources` is
    the folder of a run. Then `last=n` averages its last n checkpoints, and `best=n` its best n by
    `min="val/loss"` or `max="accuracy"`. If n <= 0, or if the run has fewer than n, it averages all
    of them, or all that have the metric. Checkpoints of a run are leased meanwhile.

    Trainable tensors of floating-point or complex numbers are averaged. To choose other tensors,
    give `include` and `exclude`: patterns on the names of floating-point tensors. They are required
    if the checkpoints do not record which tensors are trainable. All other contents come from the
    newest source: buffers, integers, frozen parameters, optimizer state, values, metadata, per-rank
    values. The newest source has the highest step. If steps are equal or missing, it is the last
    one that was saved.
    The average has the step, world size and layout of the newest source, but neither its
    annotations, such as metrics, nor its attached files.

    By default all weights are equal. `weights` has a number for each source, in their order (for
    a run, oldest first). With `decay` d, a source with k newer sources has the weight d**k. That is
    an exponential moving average, corrected for its start. Weights are scaled by a power of two, so
    that the largest is from 1 to 2. For each element, `w * x` is added from the oldest source to
    the newest. The sum is in float64 for float64 and complex128, otherwise in float32, and each
    step is rounded. The sum is divided by the sum of the weights and rounded to the tensor's dtype.
    A nan in a source makes the mean nan.

    It takes about 200 MB of memory for tensors, and one file of other data. Every rank of `group`
    calls this: each rank writes some of the files, and rank 0 commits. On return the average is
    complete and durable. An error is raised on all ranks, and the average does not exist.
    `overwrite` replaces a checkpoint at `to`. Every byte that is read is checked. `progress` is
    called with the bytes that this rank has read and will read in total.

    Raises ValueError and TypeError for bad arguments, IncompatibleError with all differences of the
    sources, and CorruptError with the name of a damaged source. Raises NotFoundError if a source or
    the metric does not exist, or if a source was replaced or deleted meanwhile. Also raises the
    errors of a save to `to`.
    """
    options = AverageOptions(
        last=last,
        best=best,
        min=min,
        max=max,
        weights=weights,
        decay=decay,
        include=include,
        exclude=exclude,
        overwrite=overwrite,
    )
    return average_together(session_of(group), AverageCall(sources, to, options, progress))


@dataclass(slots=True)
class AverageCall:
    """The arguments of `average`. It opens the storages, and counts the bytes read from sources.

    For tests, `source_storage` and `target_storage` replace the storages of the paths.
    """

    sources: PathLike | Sequence[PathLike]
    target: PathLike
    options: AverageOptions
    progress: Progress | None = None
    source_storage: Storage | None = None
    target_storage: Storage | None = None
    opened: list[CountingStorage] = field(default_factory=list)

    @property
    def is_run(self) -> bool:
        """True if `sources` is the folder of a run."""
        return isinstance(self.sources, str | os.PathLike)

    def open_source(self, path: PathLike) -> tuple[Storage, str]:
        """Return the storage of a source, which counts its reads, and the path there."""
        storage, text = open_storage(path, direct_reads=True)
        self.opened.append(CountingStorage(self.source_storage or storage))
        return self.opened[-1], text

    def open_target(self) -> tuple[CountingStorage, str]:
        """Return the storage of the target, and the path there."""
        storage, text = open_storage(self.target)
        return CountingStorage(self.target_storage or storage), text

    def open_sources(self) -> list[tuple[Storage, str]]:
        """Check the arguments, and open the sources."""
        self.options.check(is_run=self.is_run)
        if isinstance(self.sources, bytes) or not isinstance(
            self.sources, str | os.PathLike | Sequence
        ):
            raise TypeError(
                f"sources is a {type(self.sources).__name__}: give a list of checkpoints, or the "
                f"folder of a run"
            )
        if self.progress is not None and not callable(self.progress):
            raise TypeError(f"progress={self.progress!r}: give a function, or None")
        paths = [self.sources] if isinstance(self.sources, str | os.PathLike) else self.sources
        return [self.open_source(path) for path in paths]


def plan_average(
    sources: PathLike | Sequence[PathLike], to: PathLike, options: AverageOptions
) -> WritePlan[SaveReport]:
    """Return the plan of an average by this process alone, even in a job with other ranks.

    Raises the errors that `average` raises before it writes.
    """
    call = AverageCall(sources, to, options)
    opened, target = call.open_sources(), call.open_target()
    chosen = choose_sources(opened, target, options, None, is_run=call.is_run)
    _select_tensors(chosen, options)
    newest = chosen[-1].index
    files = {newest.file_name(record): record.nbytes for record in newest.files}
    files |= {record.name: record.nbytes for record in newest.objects}

    def run(progress: Progress | None) -> SaveReport:
        call.progress = progress
        channel, settings = SingleProcessChannel(), Settings.from_environment()
        return average_together(Session(channel, SingleProcessCollective(), settings), call, chosen)

    replaces = paths_to_replace(*target, overwrite=options.overwrite)
    return WritePlan(target[1], run, lambda: files, replaces, tuple(map(str, chosen)))


class _AverageRequest(Message, frozen=True):
    """The request of a rank, which must be equal on all ranks."""

    sources: tuple[str, ...]
    target: str
    options: str


class _AgreedSources(Message, frozen=True):
    """The path, attempt and weight of each source, oldest first."""

    sources: tuple[tuple[str, Attempt, float], ...]


def average_together(
    session: Session, call: AverageCall, chosen: tuple[AverageSource, ...] = ()
) -> SaveReport:
    """Average over a session. `chosen` are the sources of a plan, if there is one. Collective."""
    channel = session.channel
    with (
        session.operation(f"average to {call.target}"),
        ExitStack() as leases,
        Transaction(channel, session.settings) as transaction,
    ):
        phases = Phases("average", str(call.target), quiet=channel.rank != COORDINATOR)
        with phases.phase("agree"):
            sources, agreed = _agree(session, call, chosen, leases)
        with phases.phase("plan"):
            plan = _plan_and_claim(session, call, transaction, sources, agreed)
        with phases.phase("write"):
            newest = plan.sources[-1].index
            decision = transaction.write_and_commit(
                EncodedCatalog(newest.catalog),
                _index_fields(plan.sources),
                partial(_write, session, plan, call.progress),
                to_plan_ranks=partial(to_plan_ranks, newest),
            )
        with phases.phase("clean up"):
            transaction.remove_superseded()
        reads = IoCount()
        for storage in (*call.opened, plan.storage):
            reads = reads.plus_all(storage.reads)
        return transaction.report(
            decision,
            phases,
            reads=reads,
            writes=plan.storage.writes,
            collectives=session.collective_calls,
        )


def _agree(
    session: Session, call: AverageCall, chosen: tuple[AverageSource, ...], leases: ExitStack
) -> tuple[tuple[AverageSource, ...], _AgreedSources]:
    """Agree on the sources. Rank 0 chooses and leases them. Only rank 0 gets `AverageSource`s."""
    with session.channel.exchange("agree") as agreeing:
        sources = call.open_sources()
        target = call.open_target()
        request = _AverageRequest(tuple(path for _, path in sources), target[1], repr(call.options))
        gathered = agreeing.gather(request)
        if gathered is not None:
            check_equal_on_all_ranks("average", gathered)
            if chosen:
                lease_sources(chosen, leases)
            else:
                chosen = choose_sources(sources, target, call.options, leases, is_run=call.is_run)
            agreed = tuple((source.path, source.attempt, source.weight) for source in chosen)
            agreeing.decide(_AgreedSources(agreed))
    return chosen, agreeing.result(_AgreedSources)


def _read_source(call: AverageCall, path: str, attempt: Attempt, weight: float) -> AverageSource:
    storage, _ = call.open_source(path)
    index = attempts.read_index(storage, path, attempt)
    if not isinstance(index, Index):
        raise NotFoundError(f"{path}/{attempt} was replaced or deleted meanwhile: average again")
    return AverageSource(storage, path, attempt, index, weight)


@dataclass(frozen=True, slots=True)
class _AveragePlan:
    """The sources, the names of the tensors to average, and the files that this rank writes."""

    sources: tuple[AverageSource, ...]
    averaged: frozenset[str]
    assignments: list[RankAssignment]
    storage: CountingStorage


def _plan_and_claim(
    session: Session,
    call: AverageCall,
    transaction: Transaction,
    sources: tuple[AverageSource, ...],
    agreed: _AgreedSources,
) -> _AveragePlan:
    """Check that the sources match, plan, and claim the target: the first change on disk."""
    options, channel = call.options, session.channel
    with channel.exchange("plan") as planning:
        sources = sources or tuple(_read_source(call, *source) for source in agreed.sources)
        storage, path = call.open_target()
        averaged = _select_tensors(sources, options)
        assignments = assign_files(
            sources[-1].index,
            averaged,
            len(sources),
            rank=channel.rank,
            world_size=channel.world_size,
        )
        planning.gather(None)
        if planning.is_coordinator:
            _log.info("average to %s: %s", path, "; ".join(map(str, sources)))
            nbytes = sources[-1].index.nbytes
            attempt = transaction.claim(storage, path, overwrite=options.overwrite, nbytes=nbytes)
            planning.decide(attempt)
    transaction.set_attempt(storage, path, planning.result(Attempt))
    return _AveragePlan(sources, averaged, assignments, storage)


def _select_tensors(sources: Sequence[AverageSource], options: AverageOptions) -> frozenset[str]:
    catalogs = [(source.path, source.index.catalog) for source in sources]
    return select_tensors(catalogs, parse_selection(options.include, options.exclude))


def _index_fields(sources: Sequence[AverageSource]) -> IndexFields:
    newest = sources[-1].index
    metadata = {
        key: value
        for key, value in newest.metadata.items()
        if value is None or isinstance(value, bool | int | float | str)
    }
    averaged = {"averaged_by": f"dist_ckpt {__version__}", "averaged": "; ".join(map(str, sources))}
    saved_by = {**newest.saved_by, **averaged}
    return IndexFields(step=newest.step, metadata=metadata, saved_by=saved_by)


def _write(
    session: Session, plan: _AveragePlan, progress: Progress | None, folder: str
) -> RankWriteResult:
    """Write the files of this rank. Return their receipts and the seconds."""
    start = time.monotonic()
    newest = plan.sources[-1]
    source_folder = f"{newest.path}/{newest.attempt}"
    plans = [file for assignment in plan.assignments for file in assignment.plans]
    receipts: list[FileReceipt] = []
    with closing(AveragedTensors(plan.sources, plan.averaged, session.scratch_buffers)) as tensors:
        count_read = CopyProgress(tensors.nbytes_to_read(plans), progress)
        with closing(tensors.windows(plans, count_read)) as filled:
            readers = iter(WindowReaders(plans, filled).readers)
            for assignment in plan.assignments:
                with attempts.not_found_if_removed(newest.storage, newest.path, newest.attempt):
                    objects = {
                        record.name: read_encoded_objects(newest.storage, source_folder, record)
                        for record in assignment.objects
                    }
                files = RankFiles(
                    step=newest.index.step,
                    plans=assignment.plans,
                    readers=tuple(next(readers) for _ in assignment.plans),
                    objects=objects,
                )
                # One thread, so that it requests the blocks in the order of the windows.
                receipts += write_rank_files(plan.storage, folder, files, threads=1)
    return RankWriteResult(tuple(receipts), (), time.monotonic() - start)


# --- assign files to the ranks of the job. Pure ------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """The files that a rank of the job writes for one rank of the checkpoint."""

    plans: tuple[FilePlan, ...]
    objects: tuple[ObjectsFileRecord, ...]


def assign_files(
    index: Index, averaged: Collection[str], num_sources: int, *, rank: int, world_size: int
) -> list[RankAssignment]:
    """Return the files of the average that a rank of the job writes.

    Each file goes to the rank with the least load, the costliest file first. All ranks of the job
    compute the same assignment.
    """
    costs = _file_costs(index, averaged, num_sources)
    loads = [0] * world_size
    writers = {}
    for name, cost in sorted(costs.items(), key=lambda item: (-item[1], item[0])):
        writers[name] = min(range(world_size), key=lambda rank: (loads[rank], rank))
        loads[writers[name]] += cost
    assignments = []
    for number, plans in enumerate(plan_all_files(index.catalog)):
        local_plans = tuple(plan for plan in plans if writers[plan.name] == rank)
        local_objects = tuple(
            record
            for record in index.objects
            if writers[record.name] == rank and _file_rank(record.name) == number
        )
        if local_plans or local_objects:
            assignments.append(RankAssignment(local_plans, local_objects))
    return assignments


def _file_costs(index: Index, averaged: Collection[str], num_sources: int) -> dict[str, int]:
    """Return the bytes to read for each file."""
    costs = {record.name: record.nbytes for record in index.objects}
    for rank, stored in enumerate(stored_cells_by_rank(index.catalog)):
        for component, cells in stored.items():
            name = filenames.shard_file(index.catalog.components[component].stem, rank)
            costs[name] = sum(
                cell.numel * DTYPES[dtype].itemsize * (num_sources if fqn in averaged else 1)
                for fqn, dtype, _, cell in cells
            )
    return costs


def to_plan_ranks(index: Index, receipts: Sequence[Receipt]) -> list[Receipt]:
    """Return a receipt for each rank of the checkpoint, made of those of the job's ranks.

    Raises StorageError if the objects files differ from those of the newest source.
    """
    files: list[list[FileReceipt]] = [[] for _ in range(index.catalog.world_size)]
    for file in (file for receipt in receipts for file in receipt.files):
        files[_file_rank(file.name)].append(file)
    copied = {
        (file.name, file.nbytes, file.digest)
        for receipt in receipts
        for file in receipt.files
        if not file.header_nbytes
    }
    if copied != {(record.name, record.nbytes, record.digest) for record in index.objects}:
        raise StorageError(
            "the objects files differ from those of the newest source: average again"
        )
    return [Receipt(tuple(rank_files), (), 0.0) for rank_files in files]


def _file_rank(name: str) -> int:
    """Return the rank of a file. The global objects file belongs to rank 0."""
    shard = filenames.parse_shard_file(name)
    return shard[1] if shard is not None else filenames.parse_objects_file(name) or 0
