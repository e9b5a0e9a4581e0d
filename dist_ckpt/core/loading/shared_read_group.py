"""Which blocks several ranks read in common, and how these ranks reach each other."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

from msgspec import structs

from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.comm.exchange.channel import Exchange
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.geometry import ByteRange, joined
from dist_ckpt.core.planning.load.read_sharing import (
    SHARED_RANGE_NBYTES,
    BlockRequests,
    BlockRuns,
    Name,
    SharedBlockRange,
    have_equal_requests,
    receivers_of,
    shared_block_ranges,
)
from dist_ckpt.core.planning.plan import ReadItem
from dist_ckpt.core.runtime.typed_msgpack import Message, decode, encode
from dist_ckpt.core.shard_io.read.block_reads import (
    BlockRead,
    BlockRequest,
    gathered,
    reads_of,
    requested_blocks,
)
from dist_ckpt.core.shard_io.read.open_files import OpenFile, OpenFiles
from dist_ckpt.core.shard_io.read.read_work import (
    CellTargets,
    SmallShardRun,
    by_shard,
    divide,
    needs_of,
)
from dist_ckpt.errors import ranks_text

_log = logging.getLogger("dist_ckpt")

# An exchange moves at most this much from all ranks together, or to all of them. More data goes by
# a bulk collective, whose cost does not grow with the ranks.
MAX_SPREAD_NBYTES = 4 << 20


def fits_exchange(nbytes: int, world_size: int) -> bool:
    """Return True if an exchange may move this much data from each rank, or to each rank."""
    return nbytes * world_size <= MAX_SPREAD_NBYTES


def short(data: bytes, world_size: int) -> bytes | None:
    """Return the data of one rank, or None if it is too long for an exchange."""
    return data if fits_exchange(len(data), world_size) else None


# --- the requests of the ranks ---------------------------------------------------------------


def request_blocks(
    ranks: Session, meeting: str, files: OpenFiles, stack: ExitStack
) -> tuple[HostLinks | None, bytes]:
    """Let the ranks of this host connect, and return this rank's encoded block requests.

    `meeting` is a name that only this load has; with "" the ranks share nothing. The links are None
    if there can be none. `stack` closes them after the load.
    """
    if not meeting:
        return None, b""
    links = None
    with suppress(OSError):
        links = HostLinks(meeting, ranks.channel.rank, timeout_s=ranks.config.heartbeat_timeout_s)
        stack.callback(links.close)
    return links, encode(BlockRequests.of(ranks.channel.host, runs_of(files)))


def runs_of(files: OpenFiles) -> dict[int, BlockRuns]:
    """Return the runs of blocks that a plan needs, by the number of the file in the index."""
    runs_by_file = {}
    for number, items in files.plan.items():
        file = files.files[number]
        runs = (run for shard in by_shard(file, items) for run in _runs_of_shard(file, *shard))
        runs_by_file[number] = tuple(joined(runs))
    return runs_by_file


def _runs_of_shard(file: OpenFile, number: int, items: Sequence[ReadItem]) -> Iterator[range]:
    """Return the blocks of one shard that items need, numbered within the file."""
    start, stop = file.shards.starts[number : number + 2]
    first = bisect_left(file.block_starts, start)
    block_nbytes = file.header.block_nbytes
    if stop - start <= block_nbytes:
        yield range(first, first + 1)
        return
    for block in requested_blocks(file.shards[number], items, block_nbytes, lambda _: False):
        yield range(first + block.number, first + block.number + 1)


def shared_requests(
    wants: Sequence[bytes | None], *, between_hosts: bool
) -> tuple[bool, Sequence[bytes]]:
    """Return True if ranks have requests in common, and all requests if an exchange can send them.

    If a request was too long for the exchange, the ranks are taken to have some in common.
    """
    received = [want for want in wants if want is not None]
    if len(received) < len(wants):
        return True, ()
    if not all(received) or not have_equal_requests(
        (decode(want, BlockRequests) for want in received), between_hosts=between_hosts
    ):
        return False, ()
    # Between hosts they are gathered all the same: that connects the hosts.
    is_sent = fits_exchange(sum(map(len, received)), len(received)) and not between_hosts
    return True, received if is_sent else ()


def gather_requests(
    ranks: Session, wants: Sequence[bytes], own: bytes
) -> Mapping[int, BlockRequests]:
    """Return the requests of each rank: `wants`, or if empty, gather each rank's `own`. Collective.

    If a rank fails before this, the others wait until gloo's deadline.
    """
    if wants:
        return {rank: decode(want, BlockRequests) for rank, want in enumerate(wants)}
    bodies = ranks.collectives_group.all_gather_distinct(own)
    return {rank: decode(body, BlockRequests) for body, holders in bodies for rank in holders}


# --- the work of one rank --------------------------------------------------------------------


def slot_nbytes(files: OpenFiles) -> int:
    """Return the size of a slot: the largest unit of these files fits."""
    return max(SHARED_RANGE_NBYTES, *(file.header.block_nbytes for file in files.files.values()), 0)


def num_slots(*, between_hosts: bool) -> int:
    """Return how many units a rank reads, and receives, before all ranks have copied them."""
    # On a host, two slots made a load of replicas 15 % slower, and not faster from a cold cache:
    # the slots of all ranks then exceed a processor's cache. Sending a unit takes as long as
    # reading it.
    return 2 if between_hosts else 1


def common_nbytes(files: OpenFiles, *, between_hosts: bool) -> int:
    """Return the size of a rank's shared memory for a shared read of these files."""
    slots = num_slots(between_hosts=between_hosts)
    return slot_nbytes(files) * slots * (2 if between_hosts else 1)


_PlannedRead = SmallShardRun | BlockRead


@dataclass(frozen=True, slots=True)
class SharedRangePart:
    """A unit, and the reads that fill it; this rank needs all its blocks.

    `tags` are the numbers of the unit among those that its fetcher sends to each agent.
    """

    unit: SharedBlockRange
    file: OpenFile
    reads: tuple[_PlannedRead, ...]
    tags: Mapping[int, int]

    @property
    def span(self) -> ByteRange:
        """Its bytes in the data section; the reads fill it in order, without a hole."""
        return ByteRange(self.reads[0].span.start, self.reads[-1].span.stop)

    def slices(self, data: memoryview) -> Iterator[tuple[_PlannedRead, memoryview]]:
        """Yield each read, and its slice of `data`, the memory of the unit."""
        begin = self.span.start
        for read in self.reads:
            yield read, data[read.span.start - begin : read.span.stop - begin]


class SharedWork:
    """The reads of a rank that fill its targets: its own, and those of `units`, given by file."""

    def __init__(
        self,
        rank: int,
        files: OpenFiles,
        targets: CellTargets | None,
        units: Mapping[int, Sequence[SharedBlockRange]],
    ) -> None:
        self.rank = rank
        self.slot_nbytes = slot_nbytes(files)
        self._files = files
        self._targets = targets
        self._units = units
        self._tags = _tags_of(self._all())
        self._divided: dict[int, tuple[list[_PlannedRead], dict[int, SharedRangePart]]] = {}

    def own_reads(self) -> Iterator[tuple[OpenFile, _PlannedRead]]:
        """Yield the reads of blocks that no other rank needs."""
        for number in self._files.plan:
            for read in self._of(number)[0]:
                yield self._files.files[number], read

    def fetched(self) -> Iterator[SharedRangePart]:
        """Yield the units that this rank reads, in the order of all ranks."""
        return (self.part(unit.name) for unit in self._all() if unit.fetcher == self.rank)

    def relayed(self) -> Iterator[SharedRangePart]:
        """Yield the units that it receives from other hosts, in the same order."""
        return (self.part(unit.name) for unit in self._all() if self.rank in unit.agents)

    def names_by_sender(self) -> dict[int, set[Name]]:
        """Return the names of the units that other ranks of this host hand on, by rank."""
        names: dict[int, set[Name]] = {}
        for unit in self._all():
            first = unit.host_of(self.rank)[0]
            if first != self.rank:
                names.setdefault(first, set()).add(unit.name)
        return names

    def part(self, name: Name) -> SharedRangePart:
        """Return a unit with its reads."""
        file, block = name
        return self._of(file)[1][block]

    def nbytes_moved(self) -> tuple[int, int]:
        """Return how many bytes come from storage, and from other ranks, when all is done."""
        own = sum(read.span.nbytes for _, read in self.own_reads())
        fetched = sum(part.span.nbytes for part in self.fetched())
        shared = sum(self.part(unit.name).span.nbytes for unit in self._all())
        return own + fetched, shared - fetched

    def _all(self) -> Iterator[SharedBlockRange]:
        return (unit for file in sorted(self._units) for unit in self._units[file])

    def _of(self, number: int) -> tuple[list[_PlannedRead], dict[int, SharedRangePart]]:
        if number not in self._divided:
            self._divided[number] = self._divide(number)
        return self._divided[number]

    def _divide(self, number: int) -> tuple[list[_PlannedRead], dict[int, SharedRangePart]]:
        """Divide the needed blocks of a file into reads of this rank's own, and units."""
        file = self._files.files[number]
        units = self._units.get(number, ())
        small_shards, items = divide(file, self._files.plan[number])
        blocks = (block for unit in units for block in (unit.blocks.start, unit.blocks.stop))
        bounds = [file.block_starts[block] for block in blocks]
        contents: defaultdict[int | None, _UnitContents] = defaultdict(_UnitContents)
        for run in small_shards:
            for part in _cut(run, file.shards.starts, bounds):
                contents[_unit_at(part.span.start, bounds)].small_shards.append(part)
        for block in needs_of(file, items, self._targets):
            contents[_unit_at(block.start, bounds)].blocks.append(block)
        parts = {
            unit.blocks.start: SharedRangePart(
                unit, file, contents[number].all_reads(), self._tags[unit.name]
            )
            for number, unit in enumerate(units)
        }
        own = contents[None]
        return [*own.small_shards, *reads_of(own.blocks)], parts


@dataclass(frozen=True, slots=True)
class _UnitContents:
    """The runs of small shards and the other blocks of a unit, or of no unit, each in order."""

    small_shards: list[SmallShardRun] = field(default_factory=list)
    blocks: list[BlockRequest] = field(default_factory=list)

    def all_reads(self) -> tuple[_PlannedRead, ...]:
        """Return the reads of the whole unit, in order. It has no hole."""
        runs = gathered(self.blocks, lambda run, block: run[-1].stop == block.start)
        reads = [BlockRead(ByteRange(run[0].start, run[-1].stop), tuple(run)) for run in runs]
        return tuple(sorted([*self.small_shards, *reads], key=lambda read: read.span.start))


def _unit_at(start: int, bounds: Sequence[int]) -> int | None:
    """Return the number of the unit that has a byte; `bounds` are start and stop of each unit."""
    before = bisect_right(bounds, start)
    # If one unit ends where the next begins, both bounds are before it.
    return before // 2 if before % 2 else None


def _cut(
    run: SmallShardRun, starts: Sequence[int], bounds: Sequence[int]
) -> Iterator[SmallShardRun]:
    """Cut a run of small shards where units begin and end."""
    inside = bounds[bisect_right(bounds, run.span.start) : bisect_left(bounds, run.span.stop)]
    cuts = [run.first, *(bisect_left(starts, bound) for bound in dict.fromkeys(inside))]
    for first, stop in pairwise([*cuts, run.first + len(run.items)]):
        items = run.items[first - run.first : stop - run.first]
        yield SmallShardRun(first, items, ByteRange(starts[first], starts[stop]))


def _tags_of(units: Iterable[SharedBlockRange]) -> dict[Name, dict[int, int]]:
    """Return the numbers of the units between each fetcher and agent, the same on both."""
    counts: dict[tuple[int, int], int] = {}
    tags: dict[Name, dict[int, int]] = {}
    for unit in units:
        tags[unit.name] = {agent: counts.get((unit.fetcher, agent), 0) for agent in unit.agents}
        counts |= {(unit.fetcher, agent): tag + 1 for agent, tag in tags[unit.name].items()}
    return tags


# --- the ranks that share --------------------------------------------------------------------


class FailedLinks(Message, frozen=True):
    """The ranks of its host that a rank cannot reach; None if it can share nothing."""

    ranks: tuple[int, ...] | None


class UnreachableRanks(Message, frozen=True):
    """The ranks that can share nothing, and those that are on another host than they name."""

    unlinked: tuple[int, ...]
    elsewhere: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedReadGroup:
    """The requests of each rank, the units that this rank shares, and its links.

    `units` are the units in common with other ranks, by file. Before `settle`, these assume that
    all ranks can share. `links` lead to the ranks of its host; if they are None, this rank shares
    nothing. `missed` are the ranks that it cannot reach.
    """

    ranks: Session
    files: OpenFiles
    between_hosts: bool
    wants: Mapping[int, BlockRequests]
    units: Mapping[int, tuple[SharedBlockRange, ...]]
    links: HostLinks | None
    missed: FailedLinks

    @staticmethod
    def of(
        ranks: Session,
        files: OpenFiles,
        links: HostLinks | None,
        wants: Mapping[int, BlockRequests],
        *,
        between_hosts: bool,
        stack: ExitStack,
    ) -> SharedReadGroup:
        """Link this rank with those of its host. Without memory or a socket it shares nothing."""
        units_by_file = _units(ranks.channel.rank, wants, files, between_hosts=between_hosts)
        units = [unit for units in units_by_file.values() for unit in units]
        missed: tuple[int, ...] | None = ()
        if units:
            try:
                nbytes = common_nbytes(files, between_hosts=between_hosts)
                memory = stack.enter_context(ranks.shared_scratch(nbytes))
            except OSError:
                links = None
            missed = None
            if links is not None:
                links.offer(memory)
                missed = tuple(links.connect(receivers_of(links.rank, units)))
        return SharedReadGroup(
            ranks, files, between_hosts, wants, units_by_file, links, FailedLinks(missed)
        )

    def meet(self, exchange: Exchange) -> None:
        """Gather `missed` of all ranks, and decide. Each rank calls this inside the exchange."""
        if (gathered := exchange.gather(self.missed)) is not None:
            exchange.decide(self.judge(gathered))

    def judge(self, failed_links: Sequence[FailedLinks]) -> UnreachableRanks:
        """Return the ranks that cannot share, and warn about them. Coordinator only."""
        unlinked = {rank for rank, missed in enumerate(failed_links) if missed.ranks is None}
        hosts = {
            self.wants[rank].host
            for missed in failed_links
            for rank in {*(missed.ranks or ())} - unlinked
        }
        apart = [rank for rank in range(len(failed_links)) if self.wants[rank].host in hosts]
        if alone := {*unlinked, *apart}:
            _log.warning(
                "%s cannot share memory with the ranks of the same host name, so their common data "
                "is read more than once. If they are on several hosts, give each host a different "
                "name (DIST_CKPT_HOST)",
                ranks_text(alone),
            )
        return UnreachableRanks(
            tuple(sorted(unlinked)), tuple(r for r in apart if r not in unlinked)
        )

    def settle(self, unreachable: UnreachableRanks) -> SharedReadGroup | None:
        """Return the group with the units that can be shared; None if this rank has none.

        Ranks that are not on one machine, though their hosts have one name, get separate hosts.
        """
        group = self
        if unreachable.unlinked or unreachable.elsewhere:
            wants = {r: want for r, want in self.wants.items() if r not in unreachable.unlinked}
            for rank in unreachable.elsewhere:
                wants[rank] = structs.replace(wants[rank], host=f"{wants[rank].host} ({rank})")
            own = self.ranks.channel.rank
            units = _units(own, wants, self.files, between_hosts=self.between_hosts)
            group = replace(self, units=units)
        return group if any(group.units.values()) else None

    @property
    def partners(self) -> list[int]:
        """The ranks of this host with which it has units in common."""
        if self.links is None:
            return []
        return receivers_of(self.links.rank, (u for units in self.units.values() for u in units))

    def give_up(self) -> None:
        """Close the links after an error, so that no rank waits for this one. Never raises."""
        if self.links is not None:
            self.links.close()
        if any(len(unit.hosts) > 1 for units in self.units.values() for unit in units):
            self.ranks.collectives_group.break_off()


def _units(
    own: int, wants: Mapping[int, BlockRequests], files: OpenFiles, *, between_hosts: bool
) -> dict[int, tuple[SharedBlockRange, ...]]:
    """Return the units that a rank shares with the ranks in `wants`, by file."""
    if own not in wants:
        return {}
    by_file: dict[int, dict[int, BlockRequests]] = {file: {} for file in wants[own].steps}
    for rank, want in sorted(wants.items()):
        if between_hosts or want.host == wants[own].host:
            for file in want.steps.keys() & by_file.keys():
                by_file[file][rank] = want
    units_by_file = {}
    for file, requests in sorted(by_file.items()):
        if len(requests) > 1:
            units = shared_block_ranges(file, files.files[file].block_starts, requests)
            units_by_file[file] = tuple(u for u in units if any(own in ranks for ranks in u.hosts))
    return units_by_file
