"""What the ranks of a load share when they read, and how they reach each other: one exchange."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from dist_ckpt.comm.collective import Collective
from dist_ckpt.comm.exchange import Doc
from dist_ckpt.comm.host_links import HostLinks
from dist_ckpt.comm.session import Session
from dist_ckpt.errors import ranks_text
from dist_ckpt.loading.read_once_units import common_nbytes
from dist_ckpt.planning.read_sharing import BlockWants, Unit, decode, partners_of, units_of
from dist_ckpt.shard_io.open_files import OpenFiles

_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True)
class Agreement:
    """The units that this rank has in common with others, by file, and how it reaches them.

    `links` lead to the ranks of its host. They are None where none can be made; such a rank
    shares nothing.
    """

    units: Mapping[int, tuple[Unit, ...]]
    links: HostLinks | None
    collective: Collective
    between_hosts: bool

    @property
    def partners(self) -> list[int]:
        """The ranks of this host with which there are units in common."""
        if self.links is None:
            return []
        return partners_of(self.links.rank, (u for units in self.units.values() for u in units))

    def give_up(self) -> None:
        """Let no other rank go on waiting for this one: it has met an error. Never raises."""
        if self.links is not None:
            self.links.close()
        if any(len(unit.hosts) > 1 for units in self.units.values() for unit in units):
            self.collective.break_off()


class Agreeing:
    """One rank's side of the agreement; `stack` gets what is to be closed after the load.

    First all `listen`; then all `meet`, once it is known that there is something to share; then
    `settle` gets what the coordinator has answered to that with `judge`.
    """

    def __init__(
        self, ranks: Session, files: OpenFiles, *, between_hosts: bool, stack: ExitStack
    ) -> None:
        self._ranks = ranks
        self._files = files
        self._between_hosts = between_hosts
        self._stack = stack
        self._links: HostLinks | None = None
        self._wants: dict[int, BlockWants] = {}
        self._found: dict[int, tuple[Unit, ...]] = {}

    def listen(self, meeting: str) -> None:
        """Let the ranks of this host connect from now on.

        `meeting` is a name that this load alone has.
        """
        with suppress(OSError):
            self._links = HostLinks(
                meeting, self._ranks.channel.rank, timeout_s=self._ranks.config.silence_s
            )
            self._stack.callback(self._links.close)

    def meet(self, wants: Mapping[int, BlockWants], own: bytes) -> Doc:
        """Link this rank with those of its host; return which are out of reach.

        `wants` are those of all ranks, or empty: then each tells its `own`. Returns None if there
        is something to share, but this rank has no memory or no socket for it.
        """
        if not wants:
            # Who fails before this leaves the others waiting until gloo's deadline.
            bodies = self._ranks.bulk().all_gather_distinct(own)
            wants = {rank: decode(body) for body, who in bodies for rank in who}
        self._wants = dict(wants)
        self._found = self._units()
        units = [unit for units in self._found.values() for unit in units]
        if not units:
            return []
        try:
            nbytes = common_nbytes(self._files, between_hosts=self._between_hosts)
            memory = self._stack.enter_context(self._ranks.common_memory(nbytes))
        except OSError:
            self._links = None
        if self._links is None:
            return None
        self._links.offer(memory)
        return self._links.connect(partners_of(self._links.rank, units))

    def settle(self, answer: Doc) -> Agreement:
        """Return what is shared, now that it is known who can.

        Ranks that turn out not to be on one machine, though their hosts have one name, are taken
        to be on hosts of their own.
        """
        unlinked, apart = answer
        for rank in unlinked:
            del self._wants[rank]
        for rank in apart:
            want = self._wants[rank]
            self._wants[rank] = replace(want, host=f"{want.host} ({rank})")
        if unlinked or apart:
            self._found = self._units()
        return Agreement(self._found, self._links, self._ranks.bulk(), self._between_hosts)

    def judge(self, payloads: Sequence[Doc]) -> Doc:
        """Return who can share nothing, and who is not where it says. Coordinator only."""
        unlinked = {rank for rank, missed in enumerate(payloads) if missed is None}
        hosts = {
            self._wants[rank].host for missed in payloads for rank in {*(missed or ())} - unlinked
        }
        apart = [rank for rank in range(len(payloads)) if self._wants[rank].host in hosts]
        if alone := {*unlinked, *apart}:
            _log.warning(
                "%s cannot share memory with the ranks of the same host name: what several of "
                "them want is fetched more than once. If they are on several hosts, give each host "
                "a name of its own (DIST_CKPT_HOST)",
                ranks_text(alone),
            )
        return [sorted(unlinked), [rank for rank in apart if rank not in unlinked]]

    def _units(self) -> dict[int, tuple[Unit, ...]]:
        """Return the units that this rank shares, as far as it is known who can."""
        own = self._ranks.channel.rank
        if own not in self._wants:
            return {}
        by_file: dict[int, dict[int, BlockWants]] = {file: {} for file in self._wants[own].runs}
        for rank, want in sorted(self._wants.items()):
            if self._between_hosts or want.host == self._wants[own].host:
                for file in want.runs.keys() & by_file.keys():
                    by_file[file][rank] = want
        found = {}
        for file, wants in sorted(by_file.items()):
            if len(wants) > 1:
                units = units_of(file, self._files.files[file].block_starts, wants)
                found[file] = tuple(u for u in units if any(own in ranks for ranks in u.hosts))
        return found
