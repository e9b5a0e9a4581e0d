"""What a save carries on of a checkpoint that was loaded in part: agreed by all ranks, and written.

The source must be what the load has seen: the same attempt. Whole files of it are linked, else
copied; all that is copied is checked. It is held meanwhile where a run keeps records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from dist_ckpt.core.checkpoint.open_checkpoint import WINDOW_NBYTES, OpenCheckpoint
from dist_ckpt.core.comm.exchange.channel import check_equal_on_all_ranks
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.attempts import find, not_found_if_removed
from dist_ckpt.core.commit.records.leases import leased_source
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.catalog_json import EncodedCatalog
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.plan import FileReceipt, SavePlan
from dist_ckpt.core.planning.save.save_planner import items_of
from dist_ckpt.core.planning.selection import Selection, selection_of
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.buffers import BufferPool
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.saving.carry_plan import (
    CarryPlan,
    carried_names,
    not_loaded,
    plan_carried,
    with_carried,
)
from dist_ckpt.core.shard_io.read.read_windows import Windows, read_windows
from dist_ckpt.core.shard_io.write.link_unchanged import MAX_SHARED
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, write_all
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.forwarding import CountingStorage
from dist_ckpt.errors import NotFoundError, StorageError, listed
from dist_ckpt.reports import IoCount, LoadReport

_log = logging.getLogger("dist_ckpt")


class CarryRequest(Message, frozen=True):
    """What a rank wants carried on, the same on all but `bulk`, the number of its connections."""

    carry_over: str
    attempt: str
    bulk: int


class CarrySourceInfo(Message, frozen=True):
    """The attempt of the source; `bulk` are the connections over which its index comes."""

    attempt: Attempt
    bulk: int


class RestoredNames(Message, frozen=True):
    """The names of the source that a rank's load has filled, or left out on purpose."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CarrySource:
    """The checkpoint that a save carries on from.

    `names` are carried on unless the state holds them; `found` are all of which no rank has
    loaded anything, and `excluded` leaves some out. `reads` is what it took here to find it.
    """

    path: str
    attempt: Attempt
    index: Index
    names: tuple[str, ...]
    found: tuple[str, ...]
    excluded: Selection
    reads: IoCount

    def opened(
        self, storage: Storage, slots: BufferPool | None = None, threads: int | None = None
    ) -> OpenCheckpoint:
        """Return it open for reading on a storage."""
        return OpenCheckpoint(
            storage, self.path, self.attempt, self.index, slots=slots, threads=threads
        )

    def unmatched(self, problems: Sequence[str]) -> tuple[str, ...]:
        """Return the problems of patterns that match nothing here either: `exclude` is for both."""
        of_exclude, left = self.excluded.unmatched(()), self.excluded.unmatched(self.found)
        return tuple(one for one in problems if one not in of_exclude or one in left)

    def planned(self, plan: SavePlan) -> CarryOver:
        """Return what is carried on beside the state that is planned. ValueError if it cannot."""
        live = plan.catalog
        names = carried_names(self.index.catalog, self.names, live, plan.tree)
        found = plan_carried(live, self.index, names)
        return CarryOver(self, found, EncodedCatalog(found.catalog))

    def hold(self, storage: Storage, held: ExitStack) -> None:
        """Hold the source until `held` ends, if it can be. Coordinator only, after the claim.

        Where the save replaces it: before that it could not, and it must end before the clean-up.
        """
        try:
            held.enter_context(leased_source(storage, self.path))
        except StorageError as error:
            _log.debug("%s is not held: %s", self.path, error)


def open_source(
    ranks: Session,
    report: object,
    exclude: str | Sequence[str] | None,
    storage: Storage | None,
) -> CarrySource:
    """Find the checkpoint of a load's `report`, and agree on what of it was loaded. Collective."""
    channel, encoded, reads = ranks.channel, b"", IoCount()
    with channel.exchange("carry") as opening:
        loaded, excluded = _checked(report, channel.world_size), selection_of(None, exclude)
        asked = CarryRequest(loaded.path, loaded.attempt, ranks.collectives_group.epoch)
        gathered = opening.gather(asked)
        if gathered is not None:
            check_equal_on_all_ranks("save", gathered, ("carry_over", "attempt"))
            counting = CountingStorage(storage or open_storage(loaded.path)[0])
            attempt, source = _find(counting, loaded)
            encoded, reads = index_json.encode(source), counting.reads
            opening.decide(CarrySourceInfo(attempt, max(one.bulk for one in gathered)))
    info = opening.result(CarrySourceInfo)
    ranks.collectives_group.renew(info.bulk)
    with channel.exchange("carried names"):
        index = index_json.decode(ranks.collectives_group.broadcast(encoded or None))
        assert isinstance(index, Index)
        own = RestoredNames((*loaded.restored, *loaded.dropped))
        bodies = ranks.collectives_group.all_gather_distinct(typed_msgpack.encode(own))
        told_names = (typed_msgpack.decode(body, RestoredNames).names for body, _ in bodies)
        done = {name for names in told_names for name in names}
    found, names = not_loaded(index.catalog, done, excluded)
    return CarrySource(loaded.path, info.attempt, index, names, found, excluded, reads)


def _checked(report: object, world_size: int) -> LoadReport:
    if not isinstance(report, LoadReport):
        raise TypeError(
            f"carry_over is a {type(report).__name__}: give the report that dc.load has returned"
        )
    if len(report.sources) > 1:
        raise ValueError(
            f"carry_over: {' and '.join(one.path for one in report.sources)} were loaded together: "
            f"load from one after the other, and give the report of that whose rest is to come "
            f"along"
        )
    if not report.as_saved:
        raise ValueError(
            f"carry_over: {report.path} was loaded with a rename, so that what is left of it has "
            f"other names than the state: load and save it once under the new names, then load that"
        )
    if report.world_size != world_size:
        raise ValueError(
            f"carry_over: {report.world_size} ranks have loaded {report.path}, and {world_size} "
            f"save: give the same group to both"
        )
    return report


def _find(storage: Storage, loaded: LoadReport) -> tuple[Attempt, Index]:
    remedy = "load again, and give carry_over= the report of that"
    try:
        attempt, index = find(storage, loaded.path)
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
    """What one save carries on; `text` is that of the catalog of all that is stored."""

    source: CarrySource
    plan: CarryPlan
    text: EncodedCatalog

    def objects(self, storage: Storage, live: Mapping[str, bytes], rank: int) -> dict[str, bytes]:
        """Return a rank's objects files with what it carries on in them, encoded, by name."""
        source, objects = self.source.opened(storage), dict(live)
        if rank == 0:
            if hidden := self.plan.names.hidden:
                what = f"{self.source.path}: {listed(hidden)}"
                _log.warning("%s: not carried on, the state has something else there", what)
            values = {fqn: source.value(fqn) for fqn in self.plan.names.values}
            main = objects_file.decode(objects[filenames.OBJECTS])
            both = with_carried(main, source.objects(), self.plan.names, values)
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
        self, ranks: Session, storage: Storage, folder: str, step: int | None
    ) -> tuple[tuple[FileReceipt, ...], IoCount]:
        """Link and copy this rank's part; return its files, and what was linked.

        On return they are durable, under their names. CorruptError if the source is damaged.
        """
        rank, threads = ranks.channel.rank, ranks.config.threads
        files = {n: one for n, one in self.plan.linked.items() if one.rank == rank}
        linked = IoCount()
        if files:
            source = self.source.opened(storage, threads=threads)
            linked = source.link_or_copy(folder, files, most_names=MAX_SHARED)
        receipts = tuple(
            (name, one.nbytes, one.header_nbytes, one.digest) for name, one in files.items()
        )
        return (*receipts, *self._copy(ranks, storage, folder, step)), linked

    def _copy(
        self, ranks: Session, storage: Storage, folder: str, step: int | None
    ) -> tuple[FileReceipt, ...]:
        if self.plan.copied is None:
            return ()
        plans = items_of(self.plan.copied, ranks.channel.rank)
        with self.source.opened(storage, slots=ranks.slots) as source:
            windows = Windows(
                plans, read_windows(source.read, plans, WINDOW_NBYTES, lambda nbytes: None)
            )
            files = RankFiles(step, plans, windows.sources, {})
            # One thread: a window is read at a time, and its blocks are written in its order.
            return write_all(storage, folder, files, threads=1)

    @contextmanager
    def reading(self, storage: Storage) -> Iterator[None]:
        """Read the source in this block: if it is gone, that is NotFoundError, and no damage."""
        with not_found_if_removed(storage, self.source.path, self.source.attempt):
            yield
