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
from dist_ckpt.core.format.geometry import ByteRange, join_runs
from dist_ckpt.core.planning.load.read_sharing import (
    SHARED_RANGE_NBYTES,
    BlockRuns,
    RangeKey,
    RankBlockRuns,
    SharedBlockRange,
    have_equal_requests,
    receivers_of,
    shared_block_ranges,
)
from dist_ckpt.core.planning.plan import ReadItem
from dist_ckpt.core.runtime.typed_msgpack import Message, decode, encode
from dist_ckpt.core.shard_io.read.block_reads import (
    BlockRead,
    CellTargets,
    NeededBlock,
    PlannedRead,
    SmallShardRun,
    by_shard,
    divide,
    group_successive,
    needed_blocks,
    reads_of,
    requested_blocks,
)
from dist_ckpt.core.shard_io.read.open_files import OpenFile, OpenFiles
from dist_ckpt.errors import ranks_text

_log = logging.getLogger("dist_ckpt")

# An exchange moves at most this much from all ranks together, or to all of them. More data goes by
# a bulk collective, whose cost does not grow with the ranks.
MAX_SPREAD_NBYTES = 4 << 20


def fits_exchange(nbytes: int, world_size: int) -> bool:
    """Return True if an exchange may move this much data from each rank, or to each rank."""
    return nbytes * world_size <= MAX_SPREAD_NBYTES


def none_if_too_long(data: bytes, world_size: int) -> bytes | None:
    """Return the data of one rank, or None if it is too long for an exchange."""
    return data if fits_exchange(len(data), world_size) else None


# --- the requests of the ranks ---------------------------------------------------------------


def request_blocks(
    session: Session, shared_read_id: str, files: OpenFiles, stack: ExitStack
) -> tuple[HostLinks | None, bytes]:
    """Let the ranks of this host connect, and return this rank's encoded block requests.

    `shared_read_id` is a name that only this load has; with "" the ranks share nothing. The links
    are None if there can be none. `stack` closes them after the load.
    """
    if not shared_read_id:
        return None, b""
    links = None
    with suppress(OSError):
        links = HostLinks(
            shared_read_id, session.channel.rank, timeout_s=session.config.heartbeat_timeout_s
        )
        stack.callback(links.close)
    return links, encode(RankBlockRuns.of(session.channel.host, runs_of(files)))


def runs_of(files: OpenFiles) -> dict[int, BlockRuns]:
    """Return the runs of blocks that a plan needs, by the number of the file in the index."""
    runs_by_file = {}
    for number, items in files.plan.items():
        file = files.files[number]
        runs = (run for shard in by_shard(file, items) for run in _runs_of_shard(file, *shard))
        runs_by_file[number] = tuple(join_runs(runs))
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
    encoded_runs: Sequence[bytes | None], *, between_hosts: bool
) -> tuple[bool, Sequence[bytes]]:
    """Return True if ranks have requests in common, and all requests if an exchange can send them.

    If a request was too long for the exchange, the ranks are taken to have some in common.
    """
    received = [encoded for encoded in encoded_runs if encoded is not None]
    if len(received) < len(encoded_runs):
        return True, ()
    if not all(received) or not have_equal_requests(
        (decode(encoded, RankBlockRuns) for encoded in received), between_hosts=between_hosts
    ):
        return False, ()
    # Between hosts they are gathered all the same: that connects the hosts.
    is_sent = fits_exchange(sum(map(len, received)), len(received)) and not between_hosts
    return True, received if is_sent else ()


def gather_requests(
    session: Session, encoded_runs: Sequence[bytes], own: bytes
) -> Mapping[int, RankBlockRuns]:
    """Return the requests of each rank: `encoded_runs`, or gather each rank's `own`. Collective.

    If a rank fails before this, the others wait until gloo's deadline.
    """
    if encoded_runs:
        return {rank: decode(encoded, RankBlockRuns) for rank, encoded in enumerate(encoded_runs)}
    bodies = session.collective.all_gather_distinct(own)
    return {rank: decode(body, RankBlockRuns) for body, holders in bodies for rank in holders}


# --- the work of one rank --------------------------------------------------------------------


def slot_nbytes(files: OpenFiles) -> int:
    """Return the size of a slot: the largest range of these files fits."""
    return max(SHARED_RANGE_NBYTES, *(file.header.block_nbytes for file in files.files.values()), 0)


def num_slots(*, between_hosts: bool) -> int:
    """Return how many ranges a rank reads, and receives, before all ranks have copied them."""
    # On a host, two slots made a load of replicas 15 % slower, and not faster from a cold cache:
    # the slots of all ranks then exceed a processor's cache. Sending a range takes as long as
    # reading it.
    return 2 if between_hosts else 1


def common_nbytes(files: OpenFiles, *, between_hosts: bool) -> int:
    """Return the size of a rank's shared memory for a shared read of these files."""
    slots = num_slots(between_hosts=between_hosts)
    return slot_nbytes(files) * slots * (2 if between_hosts else 1)


@dataclass(frozen=True, slots=True)
class SharedRangePart:
    """A shared range, and the reads that fill it; this rank needs all its blocks.

    `tags` are the numbers of the range among those that its fetcher sends to each agent.
    """

    shared_range: SharedBlockRange
    file: OpenFile
    reads: tuple[PlannedRead, ...]
    tags: Mapping[int, int]

    @property
    def span(self) -> ByteRange:
        """Its bytes in the data section; the reads fill it in order, without a hole."""
        return ByteRange(self.reads[0].span.start, self.reads[-1].span.stop)

    def slices(self, data: memoryview) -> Iterator[tuple[PlannedRead, memoryview]]:
        """Yield each read, and its slice of `data`, the memory of the range."""
        begin = self.span.start
        for read in self.reads:
            yield read, data[read.span.start - begin : read.span.stop - begin]


class SharedWork:
    """The reads of a rank that fill its targets: its own, and `shared_ranges` by file."""

    def __init__(
        self,
        rank: int,
        files: OpenFiles,
        targets: CellTargets | None,
        shared_ranges: Mapping[int, Sequence[SharedBlockRange]],
    ) -> None:
        self.rank = rank
        self.slot_nbytes = slot_nbytes(files)
        self._files = files
        self._targets = targets
        self._shared_ranges = shared_ranges
        self._tags = _tags_of(self._all())
        self._divided: dict[int, tuple[list[PlannedRead], dict[int, SharedRangePart]]] = {}

    def own_reads(self) -> Iterator[tuple[OpenFile, PlannedRead]]:
        """Yield the reads of blocks that no other rank needs."""
        for number in self._files.plan:
            for read in self._of(number)[0]:
                yield self._files.files[number], read

    def fetched(self) -> Iterator[SharedRangePart]:
        """Yield the shared ranges that this rank reads, in the order of all ranks."""
        return (
            self.part(shared_range.key)
            for shared_range in self._all()
            if shared_range.fetcher == self.rank
        )

    def relayed(self) -> Iterator[SharedRangePart]:
        """Yield the shared ranges that it receives from other hosts, in the same order."""
        return (
            self.part(shared_range.key)
            for shared_range in self._all()
            if self.rank in shared_range.agents
        )

    def keys_by_sender(self) -> dict[int, set[RangeKey]]:
        """Return the keys of the ranges that other ranks of this host hand on, by rank."""
        keys: dict[int, set[RangeKey]] = {}
        for shared_range in self._all():
            first = shared_range.host_of(self.rank)[0]
            if first != self.rank:
                keys.setdefault(first, set()).add(shared_range.key)
        return keys

    def part(self, key: RangeKey) -> SharedRangePart:
        """Return a shared range with its reads."""
        file, block = key
        return self._of(file)[1][block]

    def nbytes_moved(self) -> tuple[int, int]:
        """Return how many bytes come from storage, and from other ranks, when all is done."""
        own = sum(read.span.nbytes for _, read in self.own_reads())
        fetched = sum(part.span.nbytes for part in self.fetched())
        shared = sum(self.part(shared_range.key).span.nbytes for shared_range in self._all())
        return own + fetched, shared - fetched

    def _all(self) -> Iterator[SharedBlockRange]:
        return (
            shared_range
            for file in sorted(self._shared_ranges)
            for shared_range in self._shared_ranges[file]
        )

    def _of(self, number: int) -> tuple[list[PlannedRead], dict[int, SharedRangePart]]:
        if number not in self._divided:
            self._divided[number] = self._divide(number)
        return self._divided[number]

    def _divide(self, number: int) -> tuple[list[PlannedRead], dict[int, SharedRangePart]]:
        """Divide the needed blocks of a file into reads of its own and shared ranges."""
        file = self._files.files[number]
        shared_ranges = self._shared_ranges.get(number, ())
        small_shards, items = divide(file, self._files.plan[number])
        blocks = (
            block
            for shared_range in shared_ranges
            for block in (shared_range.blocks.start, shared_range.blocks.stop)
        )
        bounds = [file.block_starts[block] for block in blocks]
        contents: defaultdict[int | None, _RangeContents] = defaultdict(_RangeContents)
        for run in small_shards:
            for part in _cut(run, file.shards.starts, bounds):
                contents[_range_at(part.span.start, bounds)].small_shards.append(part)
        for block in needed_blocks(file, items, self._targets):
            contents[_range_at(block.start, bounds)].blocks.append(block)
        parts = {
            shared_range.blocks.start: SharedRangePart(
                shared_range, file, contents[number].all_reads(), self._tags[shared_range.key]
            )
            for number, shared_range in enumerate(shared_ranges)
        }
        own = contents[None]
        return [*own.small_shards, *reads_of(own.blocks)], parts


@dataclass(frozen=True, slots=True)
class _RangeContents:
    """The runs of small shards and the other blocks of a range, or of no range, each in order."""

    small_shards: list[SmallShardRun] = field(default_factory=list)
    blocks: list[NeededBlock] = field(default_factory=list)

    def all_reads(self) -> tuple[PlannedRead, ...]:
        """Return the reads of the whole range, in order. It has no hole."""
        runs = group_successive(self.blocks, lambda run, block: run[-1].stop == block.start)
        reads = [BlockRead(ByteRange(run[0].start, run[-1].stop), tuple(run)) for run in runs]
        return tuple(sorted([*self.small_shards, *reads], key=lambda read: read.span.start))


def _range_at(start: int, bounds: Sequence[int]) -> int | None:
    """Return the number of the range that has a byte; `bounds` are start and stop of each range."""
    before = bisect_right(bounds, start)
    # If one range ends where the next begins, both bounds are before it.
    return before // 2 if before % 2 else None


def _cut(
    run: SmallShardRun, starts: Sequence[int], bounds: Sequence[int]
) -> Iterator[SmallShardRun]:
    """Cut a run of small shards where ranges begin and end."""
    inside = bounds[bisect_right(bounds, run.span.start) : bisect_left(bounds, run.span.stop)]
    cuts = [run.first, *(bisect_left(starts, bound) for bound in dict.fromkeys(inside))]
    for first, stop in pairwise([*cuts, run.first + len(run.items)]):
        items = run.items[first - run.first : stop - run.first]
        yield SmallShardRun(first, items, ByteRange(starts[first], starts[stop]))


def _tags_of(shared_ranges: Iterable[SharedBlockRange]) -> dict[RangeKey, dict[int, int]]:
    """Return the numbers of the shared ranges between each fetcher and agent, the same on both."""
    counts: dict[tuple[int, int], int] = {}
    tags: dict[RangeKey, dict[int, int]] = {}
    for shared_range in shared_ranges:
        tags[shared_range.key] = {
            agent: counts.get((shared_range.fetcher, agent), 0) for agent in shared_range.agents
        }
        counts |= {
            (shared_range.fetcher, agent): tag + 1 for agent, tag in tags[shared_range.key].items()
        }
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
    """The requests of each rank, the ranges that this rank shares, and its links.

    `shared_ranges` are those with other ranks, by file. Before `settle`, they assume that all
    ranks can share. `links` lead to the ranks of its host; if they are None, this rank shares
    nothing. `missed` are the ranks that it cannot reach.
    """

    session: Session
    files: OpenFiles
    between_hosts: bool
    runs_by_rank: Mapping[int, RankBlockRuns]
    shared_ranges: Mapping[int, tuple[SharedBlockRange, ...]]
    links: HostLinks | None
    missed: FailedLinks

    @staticmethod
    def of(
        session: Session,
        files: OpenFiles,
        links: HostLinks | None,
        runs_by_rank: Mapping[int, RankBlockRuns],
        *,
        between_hosts: bool,
        stack: ExitStack,
    ) -> SharedReadGroup:
        """Link this rank with those of its host. Without memory or a socket it shares nothing."""
        ranges_by_file = _shared_ranges_of(
            session.channel.rank, runs_by_rank, files, between_hosts=between_hosts
        )
        shared_ranges = [r for ranges in ranges_by_file.values() for r in ranges]
        missed: tuple[int, ...] | None = ()
        if shared_ranges:
            try:
                nbytes = common_nbytes(files, between_hosts=between_hosts)
                memory = stack.enter_context(session.shared_scratch(nbytes))
            except OSError:
                links = None
            missed = None
            if links is not None:
                links.offer(memory)
                missed = tuple(links.connect(receivers_of(links.rank, shared_ranges)))
        return SharedReadGroup(
            session, files, between_hosts, runs_by_rank, ranges_by_file, links, FailedLinks(missed)
        )

    def meet(self, exchange: Exchange) -> None:
        """Gather `missed` of all ranks, and decide. Each rank calls this inside the exchange."""
        if (gathered := exchange.gather(self.missed)) is not None:
            exchange.decide(self.judge(gathered))

    def judge(self, failed_links: Sequence[FailedLinks]) -> UnreachableRanks:
        """Return the ranks that cannot share, and warn about them. Coordinator only."""
        unlinked = {rank for rank, missed in enumerate(failed_links) if missed.ranks is None}
        hosts = {
            self.runs_by_rank[rank].host
            for missed in failed_links
            for rank in {*(missed.ranks or ())} - unlinked
        }
        apart = [rank for rank in range(len(failed_links)) if self.runs_by_rank[rank].host in hosts]
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
        """Return the group with the ranges that can be shared; None if this rank has none.

        Ranks that are not on one machine, though their hosts have one name, get separate hosts.
        """
        group = self
        if unreachable.unlinked or unreachable.elsewhere:
            runs_by_rank = {
                r: rank_runs
                for r, rank_runs in self.runs_by_rank.items()
                if r not in unreachable.unlinked
            }
            for rank in unreachable.elsewhere:
                runs_by_rank[rank] = structs.replace(
                    runs_by_rank[rank], host=f"{runs_by_rank[rank].host} ({rank})"
                )
            own = self.session.channel.rank
            shared_ranges = _shared_ranges_of(
                own, runs_by_rank, self.files, between_hosts=self.between_hosts
            )
            group = replace(self, shared_ranges=shared_ranges)
        return group if any(group.shared_ranges.values()) else None

    @property
    def partners(self) -> list[int]:
        """The ranks of this host with which it has ranges in common."""
        if self.links is None:
            return []
        return receivers_of(
            self.links.rank, (r for ranges in self.shared_ranges.values() for r in ranges)
        )

    def give_up(self) -> None:
        """Close the links after an error, so that no rank waits for this one. Never raises."""
        if self.links is not None:
            self.links.close()
        if any(len(r.hosts) > 1 for ranges in self.shared_ranges.values() for r in ranges):
            self.session.collective.break_off()


def _shared_ranges_of(
    own: int, runs_by_rank: Mapping[int, RankBlockRuns], files: OpenFiles, *, between_hosts: bool
) -> dict[int, tuple[SharedBlockRange, ...]]:
    """Return the ranges that a rank shares with the ranks in `runs_by_rank`, by file."""
    if own not in runs_by_rank:
        return {}
    by_file: dict[int, dict[int, RankBlockRuns]] = {
        file: {} for file in runs_by_rank[own].gaps_and_lengths
    }
    for rank, rank_runs in sorted(runs_by_rank.items()):
        if between_hosts or rank_runs.host == runs_by_rank[own].host:
            for file in rank_runs.gaps_and_lengths.keys() & by_file.keys():
                by_file[file][rank] = rank_runs
    ranges_by_file = {}
    for file, requests in sorted(by_file.items()):
        if len(requests) > 1:
            shared_ranges = shared_block_ranges(file, files.files[file].block_starts, requests)
            ranges_by_file[file] = tuple(
                r for r in shared_ranges if any(own in ranks for ranks in r.hosts)
            )
    return ranges_by_file
