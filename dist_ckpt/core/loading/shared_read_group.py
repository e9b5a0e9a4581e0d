"""Which blocks several ranks read in common, and how these ranks reach each other."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import count, pairwise

from msgspec import structs

from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.comm.exchange.channel import Exchange
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.geometry import ByteRange, join_ranges
from dist_ckpt.core.planning.load.read_sharing import (
    SHARED_RANGE_NBYTES,
    BlockRanges,
    RangeKey,
    RankBlockRequests,
    SharedBlockRange,
    have_equal_requests,
    receivers_of,
    shared_block_ranges,
)
from dist_ckpt.core.runtime.typed_msgpack import Message, decode, encode
from dist_ckpt.core.shard_io.read.block_reads import (
    BlockRead,
    CellTargets,
    NeededBlock,
    PlannedRead,
    SmallShardsRead,
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
    return links, encode(RankBlockRequests.of(session.channel.host, block_ranges_of(files)))


def block_ranges_of(files: OpenFiles) -> dict[int, BlockRanges]:
    """Return the ranges of blocks that a plan needs, by the number of the file in the index."""
    ranges_by_file = {}
    for number, items in files.plan.items():
        file = files.files[number]
        block_nbytes = file.header.block_nbytes
        blocks: list[int] = []
        for shard, wanted in by_shard(file, items):
            start, stop = file.shards.starts[shard : shard + 2]
            first = bisect_left(file.block_starts, start)
            if stop - start <= block_nbytes:
                blocks.append(first)
                continue
            needed = requested_blocks(file.shards[shard], wanted, block_nbytes, lambda _: False)
            blocks += (first + block.number for block in needed)
        ranges_by_file[number] = tuple(join_ranges(range(block, block + 1) for block in blocks))
    return ranges_by_file


def shared_requests(
    encoded_requests: Sequence[bytes | None], *, between_hosts: bool
) -> tuple[bool, Sequence[bytes]]:
    """Return True if ranks have requests in common, and all requests if an exchange can send them.

    If a request was too long for the exchange, the ranks are taken to have some in common.
    """
    received = [encoded for encoded in encoded_requests if encoded is not None]
    if len(received) < len(encoded_requests):
        return True, ()
    if not all(received) or not have_equal_requests(
        (decode(encoded, RankBlockRequests) for encoded in received), between_hosts=between_hosts
    ):
        return False, ()
    # Between hosts they are gathered all the same: that connects the hosts.
    is_sent = fits_exchange(sum(map(len, received)), len(received)) and not between_hosts
    return True, received if is_sent else ()


def gather_requests(
    session: Session, encoded_requests: Sequence[bytes], own: bytes
) -> Mapping[int, RankBlockRequests]:
    """Return each rank's requests: `encoded_requests`, or gather each rank's `own`. Collective.

    If a rank fails before this, the others wait until gloo's deadline.
    """
    if encoded_requests:
        return {
            rank: decode(encoded, RankBlockRequests)
            for rank, encoded in enumerate(encoded_requests)
        }
    bodies = session.collective.all_gather_distinct(own)
    return {rank: decode(body, RankBlockRequests) for body, holders in bodies for rank in holders}


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

    def for_each_read(
        self, work: Callable[[OpenFile, PlannedRead, memoryview], None], data: memoryview
    ) -> None:
        """Call `work` with each read and its slice of `data`, the memory of the range."""
        begin = self.span.start
        for read in self.reads:
            work(self.file, read, data[read.span.start - begin : read.span.stop - begin])


class SharedWork:
    """The reads of a rank that fill its targets: its own, and the shared ranges of its group."""

    def __init__(self, group: SharedReadGroup, targets: CellTargets | None) -> None:
        self.rank = group.session.channel.rank
        self.slot_nbytes = slot_nbytes(group.files)
        self._files = group.files
        self._targets = targets
        self._shared_ranges = group.shared_ranges
        self._by_file: defaultdict[int, list[SharedBlockRange]] = defaultdict(list)
        for shared_range in group.shared_ranges:
            self._by_file[shared_range.file].append(shared_range)
        # Number the ranges from each fetcher to each agent, the same on both.
        tags: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(count)
        self._tags = {
            r.key: {agent: next(tags[r.fetcher, agent]) for agent in r.agents}
            for r in group.shared_ranges
        }
        self._divided: dict[int, tuple[list[PlannedRead], dict[int, SharedRangePart]]] = {}

    def own_reads(self) -> Iterator[tuple[OpenFile, PlannedRead]]:
        """Yield the reads of blocks that no other rank needs."""
        for number in self._files.plan:
            for read in self._divide(number)[0]:
                yield self._files.files[number], read

    def fetched(self) -> Iterator[SharedRangePart]:
        """Yield the shared ranges that this rank reads, in the order of all ranks."""
        return (self.part(r.key) for r in self._shared_ranges if r.fetcher == self.rank)

    def relayed(self) -> Iterator[SharedRangePart]:
        """Yield the shared ranges that it receives from other hosts, in the same order."""
        return (self.part(r.key) for r in self._shared_ranges if self.rank in r.agents)

    def keys_by_sender(self) -> dict[int, set[RangeKey]]:
        """Return the keys of the ranges that other ranks of this host hand on, by rank."""
        keys: dict[int, set[RangeKey]] = {}
        for shared_range in self._shared_ranges:
            first = shared_range.host_of(self.rank)[0]
            if first != self.rank:
                keys.setdefault(first, set()).add(shared_range.key)
        return keys

    def part(self, key: RangeKey) -> SharedRangePart:
        """Return a shared range with its reads."""
        file, block = key
        return self._divide(file)[1][block]

    def nbytes_moved(self) -> tuple[int, int]:
        """Return how many bytes come from storage, and from other ranks, when all is done."""
        own = sum(read.span.nbytes for _, read in self.own_reads())
        fetched = sum(part.span.nbytes for part in self.fetched())
        shared = sum(self.part(r.key).span.nbytes for r in self._shared_ranges)
        return own + fetched, shared - fetched

    def _divide(self, number: int) -> tuple[list[PlannedRead], dict[int, SharedRangePart]]:
        """Divide the needed blocks of a file, once, into reads of its own and shared ranges."""
        if number in self._divided:
            return self._divided[number]
        file = self._files.files[number]
        shared_ranges = self._by_file[number]
        bounds = [
            file.block_starts[block]
            for shared_range in shared_ranges
            for block in (shared_range.blocks.start, shared_range.blocks.stop)
        ]
        # The content of each range, and of no range, in order.
        small_reads: defaultdict[int | None, list[SmallShardsRead]] = defaultdict(list)
        blocks: defaultdict[int | None, list[NeededBlock]] = defaultdict(list)
        whole_reads, items = divide(file, self._files.plan[number])
        for whole in whole_reads:
            for cut_read in _cut(whole, file.shards.starts, bounds):
                small_reads[_range_at(cut_read.span.start, bounds)].append(cut_read)
        for block in needed_blocks(file, items, self._targets):
            blocks[_range_at(block.start, bounds)].append(block)
        parts = {}
        for n, shared_range in enumerate(shared_ranges):
            # A range has no hole: all its adjacent blocks are read at once.
            groups = group_successive(blocks[n], lambda group, b: group[-1].stop == b.start)
            reads: list[PlannedRead] = [*small_reads[n]]
            reads += (BlockRead(ByteRange(g[0].start, g[-1].stop), tuple(g)) for g in groups)
            reads.sort(key=lambda read: read.span.start)
            part = SharedRangePart(shared_range, file, tuple(reads), self._tags[shared_range.key])
            parts[shared_range.blocks.start] = part
        self._divided[number] = [*small_reads[None], *reads_of(blocks[None])], parts
        return self._divided[number]


def _range_at(start: int, bounds: Sequence[int]) -> int | None:
    """Return the number of the range that has a byte; `bounds` are start and stop of each range."""
    before = bisect_right(bounds, start)
    # If one range ends where the next begins, both bounds are before it.
    return before // 2 if before % 2 else None


def _cut(
    read: SmallShardsRead, starts: Sequence[int], bounds: Sequence[int]
) -> Iterator[SmallShardsRead]:
    """Cut the read of small shards where ranges begin and end."""
    inside = bounds[bisect_right(bounds, read.span.start) : bisect_left(bounds, read.span.stop)]
    cuts = [read.first, *(bisect_left(starts, bound) for bound in dict.fromkeys(inside))]
    for first, stop in pairwise([*cuts, read.first + len(read.items)]):
        items = read.items[first - read.first : stop - read.first]
        yield SmallShardsRead(first, items, ByteRange(starts[first], starts[stop]))


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

    `shared_ranges` are those with other ranks, in order. Before `without_unreachable`, they assume
    that all ranks can share. `links` lead to the ranks of its host; if they are None, this rank
    shares nothing. `missed` are the ranks that it cannot reach.
    """

    session: Session
    files: OpenFiles
    between_hosts: bool
    requests_by_rank: Mapping[int, RankBlockRequests]
    shared_ranges: tuple[SharedBlockRange, ...]
    links: HostLinks | None
    missed: FailedLinks

    @staticmethod
    def of(
        session: Session,
        files: OpenFiles,
        links: HostLinks | None,
        requests_by_rank: Mapping[int, RankBlockRequests],
        *,
        between_hosts: bool,
        stack: ExitStack,
    ) -> SharedReadGroup:
        """Link this rank with those of its host. Without memory or a socket it shares nothing."""
        shared_ranges = _shared_ranges_of(
            session.channel.rank, requests_by_rank, files, between_hosts=between_hosts
        )
        missed: tuple[int, ...] | None = ()
        if shared_ranges:
            # Slots for what it reads, and between hosts also for what it receives.
            slots = num_slots(between_hosts=between_hosts) * (2 if between_hosts else 1)
            try:
                memory = stack.enter_context(session.shared_scratch(slot_nbytes(files) * slots))
            except OSError:
                links = None
            missed = None
            if links is not None:
                links.offer(memory)
                missed = tuple(links.connect(receivers_of(links.rank, shared_ranges)))
        return SharedReadGroup(
            session,
            files,
            between_hosts,
            requests_by_rank,
            shared_ranges,
            links,
            FailedLinks(missed),
        )

    def meet(self, exchange: Exchange) -> None:
        """Gather `missed` of all ranks. Each rank calls this inside the exchange.

        The coordinator decides which ranks cannot share, and warns about them.
        """
        if (failed_links := exchange.gather(self.missed)) is None:
            return
        unlinked = {rank for rank, missed in enumerate(failed_links) if missed.ranks is None}
        hosts = {
            self.requests_by_rank[rank].host
            for missed in failed_links
            for rank in {*(missed.ranks or ())} - unlinked
        }
        apart = [
            rank for rank in range(len(failed_links)) if self.requests_by_rank[rank].host in hosts
        ]
        if alone := {*unlinked, *apart}:
            _log.warning(
                "%s cannot share memory with the ranks of the same host name, so their common data "
                "is read more than once. If they are on several hosts, give each host a different "
                "name (DIST_CKPT_HOST)",
                ranks_text(alone),
            )
        elsewhere = tuple(rank for rank in apart if rank not in unlinked)
        exchange.decide(UnreachableRanks(tuple(sorted(unlinked)), elsewhere))

    def without_unreachable(self, unreachable: UnreachableRanks) -> SharedReadGroup | None:
        """Return the group with the ranges that can be shared; None if this rank has none.

        Ranks that are not on one machine, though their hosts have one name, get separate hosts.
        """
        group = self
        if unreachable.unlinked or unreachable.elsewhere:
            requests_by_rank = {
                rank: structs.replace(rank_requests, host=f"{rank_requests.host} ({rank})")
                if rank in unreachable.elsewhere
                else rank_requests
                for rank, rank_requests in self.requests_by_rank.items()
                if rank not in unreachable.unlinked
            }
            own = self.session.channel.rank
            shared_ranges = _shared_ranges_of(
                own, requests_by_rank, self.files, between_hosts=self.between_hosts
            )
            group = replace(self, shared_ranges=shared_ranges)
        return group if group.shared_ranges else None

    @property
    def partners(self) -> list[int]:
        """The ranks of this host with which it has ranges in common."""
        return [] if self.links is None else receivers_of(self.links.rank, self.shared_ranges)

    def give_up(self) -> None:
        """Close the links after an error, so that no rank waits for this one. Never raises."""
        if self.links is not None:
            self.links.close()
        if any(len(shared_range.hosts) > 1 for shared_range in self.shared_ranges):
            self.session.collective.break_off()


def _shared_ranges_of(
    own: int,
    requests_by_rank: Mapping[int, RankBlockRequests],
    files: OpenFiles,
    *,
    between_hosts: bool,
) -> tuple[SharedBlockRange, ...]:
    """Return the ranges that a rank shares with the ranks in `requests_by_rank`, in order."""
    if own not in requests_by_rank:
        return ()
    by_file: dict[int, dict[int, RankBlockRequests]] = {
        file: {} for file in requests_by_rank[own].gaps_and_lengths
    }
    for rank, rank_requests in sorted(requests_by_rank.items()):
        if between_hosts or rank_requests.host == requests_by_rank[own].host:
            for file in rank_requests.gaps_and_lengths.keys() & by_file.keys():
                by_file[file][rank] = rank_requests
    return tuple(
        shared_range
        for file, requests in sorted(by_file.items())
        if len(requests) > 1
        for shared_range in shared_block_ranges(file, files.files[file].block_starts, requests)
        if any(own in ranks for ranks in shared_range.hosts)
    )
