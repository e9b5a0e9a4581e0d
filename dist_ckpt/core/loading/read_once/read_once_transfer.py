"""How shared units get from rank to rank: through memory on a host, and over the network."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator

from dist_ckpt.core.comm.collectives.collective import Collective
from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.comm.messages import SecondaryError
from dist_ckpt.core.loading.read_once.read_once_units import SharedRangePart, SharedWork
from dist_ckpt.core.planning.load.read_sharing import Name
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.errors import CorruptError, RankError

# Kind; where a slot begins in the memory; of the unit in it: file and first block.
_MESSAGE = struct.Struct("<BQQQ")
_READY, _DONE = range(2)


class HostTransfer:
    """What the ranks of a host hand on to each other, as one of them sees it."""

    def __init__(self, work: SharedWork, reading: BlockReader, links: HostLinks) -> None:
        self._work = work
        self._reading = reading
        self._links = links
        self._to_take = work.told_by()  # what others hand on and this rank has not taken, by rank
        self._told: deque[tuple[int, int, Name]] = deque()  # which rank has it in which slot
        self._users: dict[int, set[int]] = {}  # the others that have not taken what is in a slot
        self._gone: set[int] = set()  # ranks whose links have ended

    def slot(self, offset: int, part: SharedRangePart) -> memoryview:
        """Return the place of a unit in this rank's own memory."""
        return self._memory(self._work.rank, offset, part)

    def hand_on(self, offset: int, part: SharedRangePart) -> Iterator[None]:
        """Let all ranks of this host have what is in a slot; ends when they have taken it."""
        _, *others = part.unit.host_of(self._work.rank)
        users = self._users[offset] = set(others)
        for other in others:
            self._links.send(other, _MESSAGE.pack(_READY, offset, *part.unit.name))
        self._place(part, self.slot(offset, part))
        while users:
            yield
        del self._users[offset]

    def take(self) -> Iterator[None]:
        """Take what others hand on, one unit at a time, until this rank has all of it.

        The copies are made here: to have other threads make them would take as long again.
        """
        while any(self._to_take.values()):
            yield
            if self._told:
                rank, offset, name = self._told.popleft()
                part = self._work.part(name)
                self._place(part, self._memory(rank, offset, part))
                self._links.send(rank, _MESSAGE.pack(_DONE, offset, *name))
                self._to_take[rank].remove(name)

    def hear(self, timeout_s: float) -> None:
        """Take note of what other ranks say; without anything to take, wait for that or a wake."""
        for rank, message in self._links.receive(0 if self._told else timeout_s):
            if message is None:
                self._gone.add(rank)
                continue
            kind, offset, file, block = _MESSAGE.unpack(message)
            if kind == _DONE:
                self._users[offset].discard(rank)
            else:
                self._told.append((rank, offset, (file, block)))

    def awaited(self) -> set[int]:
        """Return the ranks that this one waits for now, or will."""
        ranks = {rank for rank, names in self._to_take.items() if names}
        return ranks.union(*self._users.values())

    def check_gone(self) -> None:
        """Raise SecondaryError if a rank is waited for whose link has ended, maybe long ago."""
        if lost := self._gone and self._gone & self.awaited():
            raise SecondaryError(
                f"rank {min(lost)} of this host has given up or is gone, and had not handed on "
                "and taken all that is shared; look into that rank's log"
            )

    def _memory(self, rank: int, offset: int, part: SharedRangePart) -> memoryview:
        return self._links.memory_of(rank)[offset : offset + part.span.nbytes]

    def _place(self, part: SharedRangePart, data: memoryview) -> None:
        for read, place in part.places(data):
            self._reading.place(part.file, read, place)


def send(collective: Collective, part: SharedRangePart, data: memoryview) -> None:
    """Send a unit to the ranks that hand it on on their hosts, and wait until they have it."""
    sent = [collective.send(agent, data, tag) for agent, tag in part.tags.items()]
    for transfer in sent:
        transfer.wait()


def receive(
    collective: Collective, part: SharedRangePart, data: memoryview, reading: BlockReader
) -> None:
    """Wait for a unit that another host's rank sends, and check it again."""
    fetcher = part.unit.fetcher
    collective.receive(fetcher, data, part.tags[collective.rank]).wait()
    try:
        for read, place in part.places(data):
            reading.check(part.file, read, place)
    except CorruptError as error:
        raise RankError(
            f"what rank {fetcher} has read and sent arrived damaged: {error}. Look at the "
            "network and the memory of both hosts, then try again",
            rank=fetcher,
        ) from error
