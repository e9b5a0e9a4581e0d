"""What the ranks of a load share when they read, and how they reach each other: one exchange."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from msgspec import structs

from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.loading.read_once.read_once_units import common_nbytes
from dist_ckpt.core.planning.load.read_sharing import (
    BlockRequests,
    SharedBlockRange,
    receivers_of,
    shared_block_ranges,
)
from dist_ckpt.core.runtime.typed_msgpack import Message, decode
from dist_ckpt.core.shard_io.read.open_files import OpenFiles
from dist_ckpt.errors import ranks_text

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
