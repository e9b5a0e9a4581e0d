"""Carry over into a save the names of a checkpoint that a load has not restored.

The source must be the attempt that was loaded. Files that are carried over completely are linked or
copied; other data is copied. All copies are checked. If the source's run keeps records, the save
leases the source.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

from dist_ckpt.core.checkpoint.open_checkpoint import WINDOW_NBYTES, OpenCheckpoint
from dist_ckpt.core.comm.exchange.channel import check_equal_on_all_ranks
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.attempts import find_checkpoint
from dist_ckpt.core.commit.records.leases import leased_source
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.index.index_json import EncodedCatalog
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.name_selection import Selection, parse_selection
from dist_ckpt.core.planning.plan import FileReceipt, SavePlan
from dist_ckpt.core.planning.save.save_planner import plan_rank_files
from dist_ckpt.core.planning.sharding_config import ShardingConfig, find_recut_problem
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.host_memory import BufferPool
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.saving.carry_plan import (
    CarryPlan,
    find_not_loaded,
    merge_objects_files,
    plan_carried,
    select_carried_names,
)
from dist_ckpt.core.shard_io.read.read_windows import WindowReaders, read_windows
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, write_rank_files
from dist_ckpt.core.shard_io.write.write_or_link import MAX_SHARED
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.storage_wrappers import CountingStorage
from dist_ckpt.errors import NotFoundError, StorageError
from dist_ckpt.message_text import listed
from dist_ckpt.reports import IoCount, LoadReport

_log = logging.getLogger("dist_ckpt")


class CarryRequest(Message, frozen=True):
    """The source, equal on all ranks.

    `connection_generation` numbers the bulk connections of a rank.
    """

    carry_over: str
    attempt: str
    connection_generation: int


class CarrySourceInfo(Message, frozen=True):
    """The attempt of the source, and the number of the bulk connections that send its index."""

    attempt: Attempt
    connection_generation: int


class RestoredNames(Message, frozen=True):
    """The names of the source that one rank has restored, or has dropped on request."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CarrySource:
    """The checkpoint from which a save carries names over.

    `remaining` has the names that no rank has restored. `names` has those that are not `excluded`:
    they are carried over, unless the state has them too. `reads` counts the reads of the index.
    """

    path: str
    attempt: Attempt
    index: Index
    names: tuple[str, ...]
    remaining: tuple[str, ...]
    excluded: Selection
    reads: IoCount

    def open_on(
        self, storage: Storage, buffers: BufferPool | None = None, threads: int | None = None
    ) -> OpenCheckpoint:
        """Open the checkpoint on a storage."""
        return OpenCheckpoint(
            storage,
            self.path,
            self.attempt,
            self.index,
            buffers=buffers or BufferPool(),
            threads=threads,
        )

    def remove_matched(self, problems: Sequence[str]) -> tuple[str, ...]:
        """Return the problems, without those of `exclude` patterns that match a remaining name."""
        exclude = self.excluded.pattern_problems(())
        matched = {*exclude} - {*self.excluded.pattern_problems(self.remaining)}
        return tuple(problem for problem in problems if problem not in matched)

    def plan_names(self, plan: SavePlan) -> CarryOver:
        """Plan the names that the state does not have. ValueError if they do not fit the state."""
        names = select_carried_names(self.index.catalog, self.names, plan.catalog, plan.tree)
        carry_plan = plan_carried(plan.catalog, self.index, names)
        return CarryOver(self, carry_plan, EncodedCatalog(carry_plan.catalog))

    def take_lease(self, storage: Storage, stack: ExitStack) -> None:
        """Lease the source until `stack` is closed, if its storage allows it. Coordinator only.

        Take the lease after the claim: if the save replaces its own source, the claim would refuse
        a leased one. Close the stack before the clean-up, which removes the source.
        """
        try:
            stack.enter_context(leased_source(storage, self.path))
        except StorageError as error:
            _log.debug("%s has no lease: %s", self.path, error)


def open_source(
    session: Session, report: object, exclude: str | Sequence[str] | None, storage: Storage | None
) -> CarrySource:
    """Open the checkpoint of a load's `report`, and gather the restored names. Collective."""
    channel, encoded, reads = session.channel, b"", IoCount()
    with channel.exchange("carry") as opening:
        loaded, excluded = _check_report(report, channel.world_size), parse_selection(None, exclude)
        request = CarryRequest(loaded.path, loaded.attempt, session.collective.generation)
        if (requests := opening.gather(request)) is not None:
            check_equal_on_all_ranks("save", requests, ("carry_over", "attempt"))
            counting = CountingStorage(storage or open_storage(loaded.path)[0])
            attempt, source = _find_source(counting, loaded)
            encoded, reads = index_json.encode(source), counting.reads
            generation = max(request.connection_generation for request in requests)
            opening.decide(CarrySourceInfo(attempt, generation))
    info = opening.result(CarrySourceInfo)
    session.collective.renew(info.connection_generation)
    with channel.exchange("carried names"):
        index = index_json.decode(session.collective.broadcast(encoded or None))
        assert isinstance(index, Index)
        own = typed_msgpack.encode(RestoredNames((*loaded.restored, *loaded.dropped)))
        payloads = session.collective.all_gather_distinct(own)
        restored = [typed_msgpack.decode(payload, RestoredNames).names for payload, _ in payloads]
        done = {*chain.from_iterable(restored)}
    remaining, names = find_not_loaded(index.catalog, done, excluded)
    return CarrySource(loaded.path, info.attempt, index, names, remaining, excluded, reads)


def _check_report(report: object, world_size: int) -> LoadReport:
    if not isinstance(report, LoadReport):
        raise TypeError(
            f"carry_over is a {type(report).__name__}: give the report that dc.load has returned"
        )
    if len(report.sources) > 1:
        paths = " and ".join(source.path for source in report.sources)
        raise ValueError(
            f"carry_over: {paths} were loaded together, but the rest of only one checkpoint can "
            f"be carried over. Load each with a separate call, and give the report of one call"
        )
    if not report.as_saved:
        raise ValueError(
            f"carry_over: {report.path} was loaded with a rename, so the rest of it has other "
            f"names than the state. Load and save it once under the new names, then load that"
        )
    if report.world_size != world_size:
        raise ValueError(
            f"carry_over: {report.world_size} ranks have loaded {report.path}, but {world_size} "
            f"save: pass the same group= to both calls"
        )
    return report


def _find_source(storage: Storage, loaded: LoadReport) -> tuple[Attempt, Index]:
    remedy = "load again, and pass the new report as carry_over="
    try:
        attempt, index = find_checkpoint(storage, loaded.path)
    except NotFoundError as error:
        raise NotFoundError(f"carry_over: {error}; {remedy}") from error
    if attempt.name != loaded.attempt:
        raise NotFoundError(
            f"carry_over: {loaded.path} was replaced: {loaded.attempt} was loaded, and {attempt} "
            f"is there now; {remedy}"
        )
    return attempt, index


@dataclass(frozen=True, slots=True)
class CarryOver:
    """The carried part of one save. `encoded_catalog` is that of the whole checkpoint."""

    source: CarrySource
    plan: CarryPlan
    encoded_catalog: EncodedCatalog

    def encode_objects_files(
        self, storage: Storage, live: Mapping[str, bytes], rank: int
    ) -> dict[str, bytes]:
        """Return a rank's encoded objects files, with the carried values, by name."""
        source, objects = self.source.open_on(storage), dict(live)
        if rank == 0:
            if hidden := self.plan.names.hidden:
                text = "%s: %s is not carried over: the state has another value there"
                _log.warning(text, self.source.path, listed(hidden))
            values = {fqn: source.value(fqn) for fqn in self.plan.names.values}
            main = objects_file.decode(objects[filenames.OBJECTS])
            uncut, copied = source.objects().uncut, self.plan.copied
            if uncut and copied is not None:
                even = ShardingConfig.even(copied.catalog.world_size)
                recut = find_recut_problem(even, uncut, self.source.index.catalog, copied.catalog)
                if recut is not None:
                    raise ValueError(f"carry_over: {recut}")
            both = merge_objects_files(main, source.objects(), self.plan.names, values)
            objects[filenames.OBJECTS] = objects_file.encode(both)
        keyed = {
            fqn: {
                key: source.value_of_rank(fqn, key)
                for key, holder in self.plan.catalog.per_rank[fqn]
                if holder == rank
            }
            for fqn in self.plan.names.per_rank
        }
        if any(keyed.values()):
            name = filenames.objects_file(rank)
            own = objects_file.decode(objects[name]) if name in objects else ObjectsFile()
            carried = {fqn: values for fqn, values in keyed.items() if values}
            own = replace(own, per_rank={**own.per_rank, **carried})
            objects[name] = objects_file.encode(own)
        return objects

    def write(
        self, session: Session, storage: Storage, folder: str, step: int | None
    ) -> tuple[tuple[FileReceipt, ...], IoCount]:
        """Link and copy this rank's files. Return their receipts, and the count of linked ones.

        On return the files and their names are durable. CorruptError if the source is damaged.
        """
        rank, threads = session.channel.rank, session.settings.threads
        files = {name: file for name, file in self.plan.linked.items() if file.rank == rank}
        linked = IoCount()
        if files:
            source = self.source.open_on(storage, threads=threads)
            linked = source.link_or_copy(folder, files, most_names=MAX_SHARED)
        receipts = [
            FileReceipt(name, file.nbytes, file.header_nbytes, file.digest)
            for name, file in files.items()
        ]
        if self.plan.copied is not None:
            plans = plan_rank_files(self.plan.copied, rank)
            with self.source.open_on(storage, buffers=session.scratch_buffers) as source:
                read = read_windows(source.read, plans, WINDOW_NBYTES, lambda nbytes: None)
                copied = RankFiles(step, plans, WindowReaders(plans, read).readers, {})
                # One thread: windows are read one at a time, and their blocks written in order.
                receipts += write_rank_files(storage, folder, copied, threads=1)
        return tuple(receipts), linked
