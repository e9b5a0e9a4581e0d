"""The ranks that share reads, their ranges, and the links between them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from msgspec import structs

from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.comm.exchange.channel import Exchange
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.planning.load.read_sharing import (
    SHARED_RANGE_NBYTES,
    RankBlockRequests,
    SharedBlockRange,
    find_partners,
    shared_block_ranges,
)
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.shard_io.read.open_files import OpenFiles
from dist_ckpt.errors import ranks_text

_log = logging.getLogger("dist_ckpt")


def slot_nbytes(files: OpenFiles) -> int:
    """Return the size of a slot: the largest range of these files fits."""
    return max(SHARED_RANGE_NBYTES, *(file.header.block_nbytes for file in files.files.values()), 0)


def num_slots(*, between_hosts: bool) -> int:
    """Return how many ranges a rank reads, and receives, before all ranks have copied them."""
    # On a host, two slots made a load of replicas 15 % slower, and not faster from a cold cache:
    # the slots of all ranks then exceed a processor's cache. Sending a range takes as long as
    # reading it.
    return 2 if between_hosts else 1


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
                missed = tuple(links.connect(find_partners(links.rank, shared_ranges)))
        return SharedReadGroup(
            session,
            files,
            between_hosts,
            requests_by_rank,
            shared_ranges,
            links,
            FailedLinks(missed),
        )

    def decide_unreachable(self, exchange: Exchange) -> None:
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
        return [] if self.links is None else find_partners(self.links.rank, self.shared_ranges)

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
