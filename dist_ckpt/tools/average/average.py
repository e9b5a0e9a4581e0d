"""`dc.average`: choose, agree and plan, write, commit.

The average has the files of the newest source, with the averaged tensors in them. Each rank of the
job writes some of these files.
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
from dist_ckpt.config import Config
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
from dist_ckpt.core.planning.plan import FilePlan, FileReceipt, Receipt
from dist_ckpt.core.planning.save.save_planner import plan_all_files, stored_cells_by_rank
from dist_ckpt.core.planning.selection import parse_selection
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.shard_io.read.open_files import read_encoded_objects
from dist_ckpt.core.shard_io.read.read_windows import Windows
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, write_all
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.forwarding import CountingStorage
from dist_ckpt.errors import NotFoundError, StorageError
from dist_ckpt.reports import IoCount, Phases, Progress, SaveReport
from dist_ckpt.tools.average.mean import AveragedTensors, averaged_names
from dist_ckpt.tools.average.source_selection import (
    AverageOptions,
    AverageSource,
    choose,
    lease_sources,
)
from dist_ckpt.tools.rewrite.write_plan import WritePlan, paths_to_replace

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
    """Write the average of checkpoints as a new one, at `to`. Collective in a job.

    `sources` are checkpoints; a selector of a run ("runs/a@latest") is one too. Or `sources` is the
    folder of a run, with `last=n` for its last n, or `best=n` and `min="val/loss"` or
    `max="accuracy"` for its best; n <= 0 for all, or for all with the metric. If the run has fewer,
    they are averaged. Checkpoints that are chosen from a run are leased meanwhile.

    Trainable tensors of floating-point or complex numbers are averaged. If the checkpoints do not
    record which are trainable, or to choose others, give `include` and `exclude`: patterns on the
    names of floating-point tensors. All other contents come from the newest source: buffers,
    integers, frozen parameters, optimizer state, values, metadata, per-rank values. The newest has
    the highest step; for equal steps, or if one source has no step, it was saved last. The average
    has the step, world size and layout of the newest, but neither its annotations, such as metrics,
    nor its attached files.

    The average is uniform; or `weights` has a number for each source, in their order (for a run,
    oldest first); or, with `decay` d, a source with k newer ones has the weight d**k. That is an
    exponential moving average, corrected for its start. Weights are scaled by a power of two, so
    that the largest is from 1 to 2. For each element, `w * x` is added from the oldest source to
    the newest. The sum is in float64 for float64 and complex128, otherwise in float32, and each
    step is rounded. The sum is divided by the sum of the weights and rounded to the tensor's dtype.
    A nan in a source makes nan.

    One window of the tensors is in memory at a time, about 200 MB in total, and one file of other
    data. Every rank of `group` calls this: each writes some of the files, and the first rank
    commits. On return the average is complete and durable; after an error, on all ranks, it does
    not exist. `overwrite` replaces a checkpoint at `to`. Every byte that is read is checked.
    `progress` gets the bytes read and the total of this rank.

    Raises ValueError and TypeError for bad arguments, IncompatibleError with all differences of the
    sources, and CorruptError with the name of a damaged source. Raises NotFoundError if a source or
    the metric does not exist, or a source was replaced or deleted meanwhile. Otherwise raises the
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
    """The arguments of `average`. Opens the storages, and counts what is read from the sources.

    `source_storage` and `target_storage` replace the storages of the paths.
    """

    sources: PathLike | Sequence[PathLike]
    target: PathLike
    options: AverageOptions
    progress: Progress | None = None
    source_storage: Storage | None = None
    target_storage: Storage | None = None
    opened: list[CountingStorage] = field(default_factory=list)

    @property
    def is_of_run(self) -> bool:
        """Whether the sources are chosen from a run."""
        return isinstance(self.sources, str | os.PathLike)

    def open_source(self, path: PathLike) -> tuple[Storage, str]:
        """Return the storage of a source, which counts what is read, and the path there."""
        storage, text = open_storage(path, direct_reads=True)
        self.opened.append(CountingStorage(self.source_storage or storage))
        return self.opened[-1], text

    def open_target(self) -> tuple[CountingStorage, str]:
        """Return the storage of the target, and the path there."""
        storage, text = open_storage(self.target)
        return CountingStorage(self.target_storage or storage), text

    def open_sources(self) -> list[tuple[Storage, str]]:
        """Check the arguments, and open the sources."""
        self.options.check(of_run=self.is_of_run)
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
    """Return the plan to average in this process alone, even if a launcher started other ranks.

    Raises the errors that `average` raises before it writes.
    """
    call = AverageCall(sources, to, options)
    opened, target = call.open_sources(), call.open_target()
    chosen = choose(opened, target, options, None, of_run=call.is_of_run)
    _averaged_names(chosen, options)
    newest = chosen[-1].index
    files = {newest.file_name(record): record.nbytes for record in newest.files}
    files |= {record.name: record.nbytes for record in newest.objects}

    def run(progress: Progress | None) -> SaveReport:
        call.progress = progress
        channel, config = SingleProcessChannel(), Config.from_environment()
        return average_together(Session(channel, SingleProcessCollective(), config), call, chosen)

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
    """Average over a session; `chosen` are the sources of a plan. Collective."""
    channel = session.channel
    with (
        session.operation(f"average to {call.target}"),
        ExitStack() as leases,
        Transaction(channel, session.config) as transaction,
    ):
        phases = Phases("average", str(call.target), quiet=channel.rank != COORDINATOR)
        with phases.phase("agree"):
            sources, agreed = _agree(session, call, chosen, leases)
        with phases.phase("plan"):
            plan = _plan_and_claim(session, call, transaction, sources, agreed)
        with phases.phase("write"):
            newest = plan.sources[-1].index
            decision = transaction.commit(
                EncodedCatalog(newest.catalog),
                _index_fields(plan.sources),
                partial(_write, session, plan, call.progress),
                receipts_by_rank=partial(receipts_by_rank, newest),
            )
        with phases.phase("clean up"):
            transaction.supersede()
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
    """Agree on the sources. Rank 0 chooses and leases them; only there they have their indexes."""
    with session.channel.exchange("agree") as agreeing:
        sources = call.open_sources()
        target = call.open_target()
        request = _AverageRequest(tuple(path for _, path in sources), target[1], repr(call.options))
        gathered = agreeing.gather(request)
        if gathered is not None:
            check_equal_on_all_ranks("average", gathered, _AverageRequest.__struct_fields__)
            if chosen:
                lease_sources(chosen, leases)
            else:
                chosen = choose(sources, target, call.options, leases, of_run=call.is_of_run)
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
    """The sources, the names of the tensors to average, and the files of this rank."""

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
    """Check that the sources match, plan, and claim. The claim is the first change on disk."""
    options, channel = call.options, session.channel
    with channel.exchange("plan") as planning:
        sources = sources or tuple(_read_source(call, *source) for source in agreed.sources)
        storage, path = call.open_target()
        averaged = _averaged_names(sources, options)
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
            planning.decide(transaction.claim(storage, path, overwrite=options.overwrite))
    transaction.join(storage, path, planning.result(Attempt))
    return _AveragePlan(sources, averaged, assignments, storage)


def _averaged_names(sources: Sequence[AverageSource], options: AverageOptions) -> frozenset[str]:
    catalogs = [(source.path, source.index.catalog) for source in sources]
    return averaged_names(catalogs, parse_selection(options.include, options.exclude))


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
    """Write this rank's files."""
    start = time.monotonic()
    newest = plan.sources[-1]
    source_folder = f"{newest.path}/{newest.attempt}"
    plans = [file for assignment in plan.assignments for file in assignment.plans]
    receipts: list[FileReceipt] = []
    with closing(AveragedTensors(plan.sources, plan.averaged, session.scratch_buffers)) as tensors:
        done, nbytes = 0, tensors.nbytes_to_read(plans)

        def tell(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, nbytes)

        with closing(tensors.windows(plans, tell)) as filled:
            sources = iter(Windows(plans, filled).sources)
            for assignment in plan.assignments:
                with attempts.not_found_if_removed(newest.storage, newest.path, newest.attempt):
                    objects = {
                        record.name: read_encoded_objects(newest.storage, source_folder, record)
                        for record in assignment.objects
                    }
                files = RankFiles(
                    step=newest.index.step,
                    plans=assignment.plans,
                    sources=tuple(next(sources) for _ in assignment.plans),
                    objects=objects,
                )
                # One thread: blocks are requested in the order of the windows.
                receipts += write_all(plan.storage, folder, files, threads=1)
    return RankWriteResult(tuple(receipts), (), time.monotonic() - start)


# --- assign files to the ranks of the job. Pure ------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """The files of one rank of the checkpoint that a rank of the job writes."""

    plans: tuple[FilePlan, ...]
    objects: tuple[ObjectsFileRecord, ...]


def assign_files(
    index: Index, averaged: Collection[str], num_sources: int, *, rank: int, world_size: int
) -> list[RankAssignment]:
    """Return the files of the newest source that a rank of the job writes.

    Whole files are assigned, the costliest first, each to the rank with the least load. All ranks
    of the job compute the same.
    """
    costs = _costs(index, averaged, num_sources)
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
            if writers[record.name] == rank and _rank_of(record.name) == number
        )
        if local_plans or local_objects:
            assignments.append(RankAssignment(local_plans, local_objects))
    return assignments


def _costs(index: Index, averaged: Collection[str], num_sources: int) -> dict[str, int]:
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


def receipts_by_rank(index: Index, receipts: Sequence[Receipt]) -> list[Receipt]:
    """Return the receipts of the checkpoint's ranks, from the receipts of the job's ranks.

    StorageError if the objects files differ from those of the newest source.
    """
    files: list[list[FileReceipt]] = [[] for _ in range(index.catalog.world_size)]
    for file in (file for receipt in receipts for file in receipt.files):
        files[_rank_of(file[0])].append(file)
    copied = {
        (name, nbytes, digest)
        for receipt in receipts
        for name, nbytes, header_nbytes, digest in receipt.files
        if not header_nbytes
    }
    if copied != {(record.name, record.nbytes, record.digest) for record in index.objects}:
        raise StorageError("the objects files are not those of the newest source: try again")
    return [Receipt(tuple(rank_files), (), 0.0) for rank_files in files]


def _rank_of(name: str) -> int:
    """Return the rank of a file; the global objects file is rank 0's."""
    shard = filenames.parse_shard_file(name)
    return shard[1] if shard is not None else filenames.parse_objects_file(name) or 0
