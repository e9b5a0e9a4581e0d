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
from dist_ckpt.core.runtime.typed_msgpack import Message, decode
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

# What the coordinator takes from all ranks, or hands to all of them, in an exchange; more than
# that comes by a bulk collective, whose cost does not grow with the ranks.
MAX_SPREAD_NBYTES = 4 << 20


def runs_of(files: OpenFiles) -> dict[int, BlockRuns]:
    """Return which blocks of each file a plan needs, by the file's number in the index."""
    found = {}
    for number, items in files.plan.items():
        file = files.files[number]
        runs = (run for shard in by_shard(file, items) for run in _runs_of(file, *shard))
        found[number] = tuple(joined(runs))
    return found


def _runs_of(file: OpenFile, number: int, items: Sequence[ReadItem]) -> Iterator[range]:
    """Return the blocks of one shard that items need, numbered within the file."""
    start, stop = file.shards.starts[number : number + 2]
    first = bisect_left(file.block_starts, start)
    if stop - start <= file.header.block_nbytes:
        yield range(first, first + 1)
        return
    for need in requested_blocks(
        file.shards[number], items, file.header.block_nbytes, lambda _: False
    ):
        yield range(first + need.number, first + need.number + 1)


def slot_nbytes(files: OpenFiles) -> int:
    """Return the size of a slot that holds any unit of some files."""
    return max(SHARED_RANGE_NBYTES, *(file.header.block_nbytes for file in files.files.values()), 0)


def num_slots(*, between_hosts: bool) -> int:
    """Return how many units a rank fetches before all have taken them, and receives ahead."""
    # On a host two made a load of replicas 15 % slower, from a cold cache no faster: the slots of
    # all its ranks then exceed a processor's cache. To send a unit takes as long as to fetch one.
    return 2 if between_hosts else 1


def common_nbytes(files: OpenFiles, *, between_hosts: bool) -> int:
    """Return the size of a rank's common memory for a shared reading of some files."""
    slots = num_slots(between_hosts=between_hosts)
    return slot_nbytes(files) * slots * (2 if between_hosts else 1)


@dataclass(frozen=True, slots=True)
class SharedRangePart:
    """A unit, and the reads that bring it; this rank needs all its blocks.

    `tags` number it among what its fetcher sends to each agent.
    """

    unit: SharedBlockRange
    file: OpenFile
    reads: tuple[SmallShardRun | BlockRead, ...]
    tags: Mapping[int, int]

    @property
    def span(self) -> ByteRange:
        """Its bytes in the data section; the reads fill it in order, without a hole."""
        return ByteRange(self.reads[0].span.start, self.reads[-1].span.stop)

    def places(self, data: memoryview) -> Iterator[tuple[SmallShardRun | BlockRead, memoryview]]:
        """Return each read, and where in the unit, which is `data`, it brings its bytes."""
        begin = self.span.start
        for read in self.reads:
            yield read, data[read.span.start - begin : read.span.stop - begin]


class SharedWork:
    """What a rank does to fill its targets, when all ranks share `units`, given by file."""

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
        self._tags = _tags_of(unit for file in sorted(units) for unit in units[file])
        self._known: dict[
            int, tuple[list[SmallShardRun | BlockRead], dict[int, SharedRangePart]]
        ] = {}

    def own_reads(self) -> Iterator[tuple[OpenFile, SmallShardRun | BlockRead]]:
        """Return the reads of what no other rank wants."""
        for number in self._files.plan:
            for read in self._of(number)[0]:
                yield self._files.files[number], read

    def fetched(self) -> Iterator[SharedRangePart]:
        """Return the units that this rank fetches, in the order of all ranks."""
        return (self.part(unit.name) for unit in self._all() if unit.fetcher == self.rank)

    def relayed(self) -> Iterator[SharedRangePart]:
        """Return those that it brings from other hosts, in the same order."""
        return (self.part(unit.name) for unit in self._all() if self.rank in unit.agents)

    def told_by(self) -> dict[int, set[Name]]:
        """Return the names of the units that others of this host hand on, by rank."""
        names: dict[int, set[Name]] = {}
        for unit in self._all():
            first = unit.host_of(self.rank)[0]
            if first != self.rank:
                names.setdefault(first, set()).add(unit.name)
        return names

    def part(self, name: Name) -> SharedRangePart:
        """Return what there is to do with a unit."""
        file, block = name
        return self._of(file)[1][block]

    def nbytes_moved(self) -> tuple[int, int]:
        """Return how many bytes come from storage, and from other ranks, when all of it is done."""
        own = sum(read.span.nbytes for _, read in self.own_reads())
        fetched = sum(part.span.nbytes for part in self.fetched())
        shared = sum(self.part(unit.name).span.nbytes for unit in self._all())
        return own + fetched, shared - fetched

    def _all(self) -> Iterator[SharedBlockRange]:
        return (unit for file in sorted(self._units) for unit in self._units[file])

    def _of(
        self, number: int
    ) -> tuple[list[SmallShardRun | BlockRead], dict[int, SharedRangePart]]:
        if number not in self._known:
            self._known[number] = self._divide(number)
        return self._known[number]

    def _divide(
        self, number: int
    ) -> tuple[list[SmallShardRun | BlockRead], dict[int, SharedRangePart]]:
        """Divide the needed blocks of a file into reads of this rank's own, and units."""
        file = self._files.files[number]
        starts = file.block_starts
        units = self._units.get(number, ())
        rows, others = divide(file, self._files.plan[number])
        bounds = [
            starts[block] for unit in units for block in (unit.blocks.start, unit.blocks.stop)
        ]
        pieces: defaultdict[int | None, _Pieces] = defaultdict(_Pieces)  # None: of no unit
        for row in rows:
            for part in _cut(row, file.shards.starts, bounds):
                pieces[_place(part.span.start, bounds)].rows.append(part)
        for need in needs_of(file, others, self._targets):
            pieces[_place(need.start, bounds)].needs.append(need)
        parts = {
            unit.blocks.start: SharedRangePart(
                unit, file, pieces[number].filling(), self._tags[unit.name]
            )
            for number, unit in enumerate(units)
        }
        own = pieces[None]
        return [*own.rows, *reads_of(own.needs)], parts


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What lies in a unit, or in none: rows of small shards, and other blocks, each in order."""

    rows: list[SmallShardRun] = field(default_factory=list)
    needs: list[BlockRequest] = field(default_factory=list)

    def filling(self) -> tuple[SmallShardRun | BlockRead, ...]:
        """Return the reads of all of it, which lies without a hole, in order."""
        runs = gathered(self.needs, lambda run, need: run[-1].stop == need.start)
        reads = [BlockRead(ByteRange(run[0].start, run[-1].stop), tuple(run)) for run in runs]
        return tuple(sorted([*self.rows, *reads], key=lambda read: read.span.start))


def _place(start: int, bounds: Sequence[int]) -> int | None:
    """Return the number of the unit in which a byte lies; `bounds` are start and stop of each."""
    before = bisect_right(bounds, start)
    # Where one unit ends and the next begins both bounds are before it.
    return before // 2 if before % 2 else None


def _cut(
    row: SmallShardRun, starts: Sequence[int], bounds: Sequence[int]
) -> Iterator[SmallShardRun]:
    """Cut a row of small shards where units begin and end."""
    inside = bounds[bisect_right(bounds, row.span.start) : bisect_left(bounds, row.span.stop)]
    cuts = [row.first, *(bisect_left(starts, bound) for bound in dict.fromkeys(inside))]
    for first, stop in pairwise([*cuts, row.first + len(row.items)]):
        items = row.items[first - row.first : stop - row.first]
        yield SmallShardRun(first, items, ByteRange(starts[first], starts[stop]))


def _tags_of(units: Iterable[SharedBlockRange]) -> dict[Name, dict[int, int]]:
    """Return the numbers of units among what each rank sends to each other: alike on both."""
    counts: dict[tuple[int, int], int] = {}
    tags: dict[Name, dict[int, int]] = {}
    for unit in units:
        ours = tags[unit.name] = {}
        for agent in unit.agents:
            ours[agent] = counts.get((unit.fetcher, agent), 0)
            counts[unit.fetcher, agent] = ours[agent] + 1
    return tags


_log = logging.getLogger("dist_ckpt")


class FailedLinks(Message, frozen=True):
    """The ranks of its host that a rank cannot reach; None if it can share nothing at all."""

    ranks: tuple[int, ...] | None


class UnreachableRanks(Message, frozen=True):
    """The ranks that can share nothing, and others that are not on the host they name."""

    unlinked: tuple[int, ...]
    elsewhere: tuple[int, ...]


def listen(ranks: Session, meeting: str, stack: ExitStack) -> HostLinks | None:
    """Let the ranks of this host connect from now on; None if that cannot be.

    `meeting` is a name that this load alone has. `stack` gets what is to be closed after the load.
    """
    with suppress(OSError):
        links = HostLinks(meeting, ranks.channel.rank, timeout_s=ranks.config.heartbeat_timeout_s)
        stack.callback(links.close)
        return links
    return None


def short(data: bytes, world_size: int) -> bytes | None:
    """Return what all ranks may tell, or be told, in an exchange; None if it is too long."""
    return data if fits_exchange(len(data), world_size) else None


def fits_exchange(nbytes: int, world_size: int) -> bool:
    """Return True if an exchange may move so much data from each rank, or to each rank."""
    return nbytes * world_size <= MAX_SPREAD_NBYTES


def common_bits(
    wants: Sequence[bytes | None], *, between_hosts: bool
) -> tuple[bool, Sequence[bytes]]:
    """Say whether ranks share what they read; return what all want if that can be handed out.

    They are taken to share where some want is too long to have come here.
    """
    told = [want for want in wants if want is not None]
    if len(told) < len(wants):
        return True, ()
    if not all(told):
        return False, ()
    if not have_equal_requests(
        (decode(want, BlockRequests) for want in told), between_hosts=between_hosts
    ):
        return False, ()
    is_short = fits_exchange(sum(map(len, told)), len(told))
    # To gather them connects the hosts, which then send to each other.
    return True, told if is_short and not between_hosts else ()


def gather_requests(
    ranks: Session, told: Sequence[bytes], own: bytes
) -> Mapping[int, BlockRequests]:
    """Return what each rank wants: `told`, or if that is empty each tells its `own`. Collective."""
    if told:
        return {rank: decode(want, BlockRequests) for rank, want in enumerate(told)}
    # Who fails before this leaves the others waiting until gloo's deadline.
    bodies = ranks.collectives_group.all_gather_distinct(own)
    return {rank: decode(body, BlockRequests) for body, who in bodies for rank in who}


@dataclass(frozen=True, slots=True)
class SharedReadGroup:
    """What each rank wants, what this one shares of it, and how it reaches those of its host.

    `units` are what it has in common with others, by file: if all of them can share, until
    `settle` has heard who can. `links` lead to the ranks of its host; they are None where none can
    be made, and such a rank shares nothing. `missed`: who is out of its reach.
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
        found = _units(ranks.channel.rank, wants, files, between_hosts=between_hosts)
        units = [unit for units in found.values() for unit in units]
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
            ranks, files, between_hosts, wants, found, links, FailedLinks(missed)
        )

    def judge(self, told: Sequence[FailedLinks]) -> UnreachableRanks:
        """Return who can share nothing, and who is not where it says. Coordinator only."""
        unlinked = {rank for rank, missed in enumerate(told) if missed.ranks is None}
        hosts = {
            self.wants[rank].host for missed in told for rank in {*(missed.ranks or ())} - unlinked
        }
        apart = [rank for rank in range(len(told)) if self.wants[rank].host in hosts]
        if alone := {*unlinked, *apart}:
            _log.warning(
                "%s cannot share memory with the ranks of the same host name: what several of "
                "them want is fetched more than once. If they are on several hosts, give each host "
                "a name of its own (DIST_CKPT_HOST)",
                ranks_text(alone),
            )
        return UnreachableRanks(
            tuple(sorted(unlinked)), tuple(r for r in apart if r not in unlinked)
        )

    def settle(self, apart: UnreachableRanks) -> SharedReadGroup:
        """Return this with what is shared, now that it is known who can.

        Ranks that turn out not to be on one machine, though their hosts have one name, are taken
        to be on hosts of their own.
        """
        if not apart.unlinked and not apart.elsewhere:
            return self
        wants = {r: want for r, want in self.wants.items() if r not in apart.unlinked}
        for rank in apart.elsewhere:
            wants[rank] = structs.replace(wants[rank], host=f"{wants[rank].host} ({rank})")
        own = self.ranks.channel.rank
        units = _units(own, wants, self.files, between_hosts=self.between_hosts)
        return replace(self, units=units)

    @property
    def partners(self) -> list[int]:
        """The ranks of this host with which there are units in common."""
        if self.links is None:
            return []
        return receivers_of(self.links.rank, (u for units in self.units.values() for u in units))

    def give_up(self) -> None:
        """Let no other rank go on waiting for this one: it has met an error. Never raises."""
        if self.links is not None:
            self.links.close()
        if any(len(unit.hosts) > 1 for units in self.units.values() for unit in units):
            self.ranks.collectives_group.break_off()


def _units(
    own: int, wants: Mapping[int, BlockRequests], files: OpenFiles, *, between_hosts: bool
) -> dict[int, tuple[SharedBlockRange, ...]]:
    """Return the units that a rank shares, as far as it is known who can."""
    if own not in wants:
        return {}
    by_file: dict[int, dict[int, BlockRequests]] = {file: {} for file in wants[own].steps}
    for rank, want in sorted(wants.items()):
        if between_hosts or want.host == wants[own].host:
            for file in want.steps.keys() & by_file.keys():
                by_file[file][rank] = want
    found = {}
    for file, wanting in sorted(by_file.items()):
        if len(wanting) > 1:
            units = shared_block_ranges(file, files.files[file].block_starts, wanting)
            found[file] = tuple(u for u in units if any(own in ranks for ranks in u.hosts))
    return found
