"""The ranks that share reads: the blocks that each needs, their common ranges, and their links."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from msgspec import structs

from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.comm.exchange.channel import Exchange, fits_exchange
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.geometry import join_ranges
from dist_ckpt.core.planning.load.shared_ranges import (
    SHARED_RANGE_NBYTES,
    BlockRanges,
    RankBlockRequests,
    SharedBlockRange,
    find_partners,
    find_shared_ranges,
    has_shared_blocks,
)
from dist_ckpt.core.runtime.typed_msgpack import Message, decode, encode
from dist_ckpt.core.shard_io.read.open_files import OpenFiles
from dist_ckpt.core.shard_io.read.read_grouping import find_shard_blocks, group_by_shard
from dist_ckpt.message_text import ranks_text

_log = logging.getLogger("dist_ckpt")


def slot_nbytes(files: OpenFiles) -> int:
    """Return the size of a slot, which holds the largest range of these files."""
    return max(SHARED_RANGE_NBYTES, *(file.header.block_nbytes for file in files.files.values()), 0)


def num_slots(*, between_hosts: bool) -> int:
    """Return the number of slots for ranges that a rank reads, and for those that it receives."""
    # On one host, a second slot made a load of replicas 15 % slower: the slots of all ranks then
    # exceed a processor's cache. From a cold page cache, loads were equally fast. Between hosts, a
    # rank sends one range while it reads the next: both take equally long.
    return 2 if between_hosts else 1


class FailedLinks(Message, frozen=True):
    """The ranks of its host that a rank cannot reach; None if the rank can share nothing."""

    ranks: tuple[int, ...] | None


class UnreachableRanks(Message, frozen=True):
    """The ranks that cannot share, and the ranks that are not on the host that they name."""

    unlinked: tuple[int, ...]
    elsewhere: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedReadGroup:
    """The ranks that share reads, as one of them sees the group.

    `shared_ranges` are the ranges that this rank shares, in order. Before `without_unreachable`,
    they assume that all ranks can share. `links` connect this rank with the ranks of its host. If
    `links` is None, this rank shares nothing.
    """

    session: Session
    files: OpenFiles
    between_hosts: bool
    requests_by_rank: Mapping[int, RankBlockRequests]
    shared_ranges: tuple[SharedBlockRange, ...]
    links: HostLinks | None
    failed_links: FailedLinks

    @staticmethod
    def link(
        session: Session,
        files: OpenFiles,
        links: HostLinks | None,
        requests_by_rank: Mapping[int, RankBlockRequests],
        *,
        between_hosts: bool,
        stack: ExitStack,
    ) -> SharedReadGroup:
        """Link this rank with the ranks of its host.

        Without shared memory or without a socket, the rank shares nothing.
        """
        shared_ranges = _find_shared_ranges(
            session.channel.rank, requests_by_rank, files, between_hosts=between_hosts
        )
        unlinked: tuple[int, ...] | None = ()
        if shared_ranges:
            # Slots for ranges that this rank reads, and between hosts also for received ranges.
            slots = num_slots(between_hosts=between_hosts) * (2 if between_hosts else 1)
            try:
                memory = stack.enter_context(session.shared_scratch(slot_nbytes(files) * slots))
            except OSError:
                links = None
            unlinked = None
            if links is not None:
                links.offer(memory)
                unlinked = tuple(links.connect(find_partners(links.rank, shared_ranges)))
        failed = FailedLinks(unlinked)
        return SharedReadGroup(
            session, files, between_hosts, requests_by_rank, shared_ranges, links, failed
        )

    def decide_unreachable(self, exchange: Exchange) -> None:
        """Decide which ranks cannot share, and warn about them. Every rank calls this.

        The exchange gathers the failed links of all ranks, and answers `UnreachableRanks`.
        """
        if (gathered := exchange.gather(self.failed_links)) is None:
            return
        unlinked = {rank for rank, failed in enumerate(gathered) if failed.ranks is None}
        hosts = {
            self.requests_by_rank[rank].host
            for failed in gathered
            for rank in {*(failed.ranks or ())} - unlinked
        }
        apart = [rank for rank in range(len(gathered)) if self.requests_by_rank[rank].host in hosts]
        if unreachable := {*unlinked, *apart}:
            _log.warning(
                "%s cannot share memory with the ranks of the same host name, so their common data "
                "is read more than once. If they are on several hosts, give each host a different "
                "name (DIST_CKPT_HOST)",
                ranks_text(unreachable),
            )
        elsewhere = tuple(rank for rank in apart if rank not in unlinked)
        exchange.decide(UnreachableRanks(tuple(sorted(unlinked)), elsewhere))

    def without_unreachable(self, unreachable: UnreachableRanks) -> SharedReadGroup | None:
        """Return the group with the ranges that can be shared, or None if this rank shares none.

        Ranks on different machines with the same host name get different host names.
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
            shared_ranges = _find_shared_ranges(
                own, requests_by_rank, self.files, between_hosts=self.between_hosts
            )
            group = replace(self, shared_ranges=shared_ranges)
        return group if group.shared_ranges else None

    @property
    def partners(self) -> list[int]:
        """The ranks of this host that share ranges with this rank."""
        return [] if self.links is None else find_partners(self.links.rank, self.shared_ranges)

    def give_up(self) -> None:
        """Close the links after an error, so that no rank waits for this one. Never raises."""
        if self.links is not None:
            self.links.close()
        if any(len(shared_range.ranks_by_host) > 1 for shared_range in self.shared_ranges):
            self.session.collective.break_off()


def _find_shared_ranges(
    own: int,
    requests_by_rank: Mapping[int, RankBlockRequests],
    files: OpenFiles,
    *,
    between_hosts: bool,
) -> tuple[SharedBlockRange, ...]:
    """Return the ranges that rank `own` shares with the ranks in `requests_by_rank`, in order."""
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
        for shared_range in find_shared_ranges(file, files.files[file].block_starts, requests)
        if any(own in ranks for ranks in shared_range.ranks_by_host)
    )


def open_shared_read(
    session: Session, shared_read_id: str, files: OpenFiles, stack: ExitStack
) -> tuple[HostLinks | None, bytes]:
    """Open this rank's links on its host, and return its encoded block requests.

    `shared_read_id` is a name that only this load has, or "" if the ranks share nothing. The links
    are None if they cannot be opened. `stack` closes them after the load.
    """
    if not shared_read_id:
        return None, b""
    links = None
    with suppress(OSError):
        links = HostLinks(
            shared_read_id, session.channel.rank, timeout_s=session.settings.heartbeat_timeout_s
        )
        stack.callback(links.close)
    return links, encode(RankBlockRequests.of(session.channel.host, find_block_ranges(files)))


def find_block_ranges(files: OpenFiles) -> dict[int, BlockRanges]:
    """Return the ranges of blocks that a load needs, by the number of the file in the index."""
    ranges_by_file = {}
    for number, items in files.plan.items():
        file = files.files[number]
        block_nbytes = file.header.block_nbytes
        blocks: list[int] = []
        for shard, wanted in group_by_shard(file, items):
            start, stop = file.shards.starts[shard : shard + 2]
            first = bisect_left(file.block_starts, start)
            if stop - start <= block_nbytes:
                blocks.append(first)
                continue
            needed = find_shard_blocks(file.shards[shard], wanted, block_nbytes, lambda _: False)
            blocks += (first + block.number for block in needed)
        ranges_by_file[number] = tuple(join_ranges(range(block, block + 1) for block in blocks))
    return ranges_by_file


def find_shared_requests(
    encoded_requests: Sequence[bytes | None], *, between_hosts: bool
) -> tuple[bool, Sequence[bytes]]:
    """Return True if ranks need the same blocks, and all requests if an exchange can send them.

    A request is None if it was too long for the exchange. Then the result is also True.
    """
    received = [encoded for encoded in encoded_requests if encoded is not None]
    if len(received) < len(encoded_requests):
        return True, ()
    if not all(received) or not has_shared_blocks(
        (decode(encoded, RankBlockRequests) for encoded in received), between_hosts=between_hosts
    ):
        return False, ()
    # Between hosts a collective always gathers the requests: it also connects the hosts.
    is_sent = fits_exchange(sum(map(len, received)), len(received)) and not between_hosts
    return True, received if is_sent else ()


def gather_requests(
    session: Session, encoded_requests: Sequence[bytes], own: bytes
) -> Mapping[int, RankBlockRequests]:
    """Return the requests of all ranks. Collective: every rank calls this.

    Decode `encoded_requests`. If they are empty, gather the `own` requests of each rank first.
    """
    if encoded_requests:
        return {
            rank: decode(encoded, RankBlockRequests)
            for rank, encoded in enumerate(encoded_requests)
        }
    payloads = session.collective.all_gather_distinct(own)
    return {
        rank: decode(payload, RankBlockRequests)
        for payload, holders in payloads
        for rank in holders
    }
