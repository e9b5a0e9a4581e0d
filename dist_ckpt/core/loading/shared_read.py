"""Read shared blocks once: one rank reads a unit, checks it, and sends it to the others.

The fetcher of a unit reads it into a slot of its memory, and checks it. Then it sends a message to
the ranks of its host that need the unit. They copy it from that slot, and report when they are
done. To each other host the fetcher sends the unit once, to a rank that passes it on in the same
way. A slot is free again when all ranks are done with it. Reading, checking, sending and copying
overlap.

One thread of a rank decides and copies (`SharedReading._decide`), and other threads read. None of
these waits for another rank: a fetch begins when a slot is free, a copy when the unit is there.
The threads that send and receive do wait. They cannot block each other: all ranks process the units
in one order, and have separate slots for what they receive. So for the first unit that is not
complete everywhere, its fetcher and its receivers always have a free slot. The calling thread
watches the deciding thread, which watches all others. So if any thread hangs, all ranks get an
error.

The tasks of the deciding thread are generators, one for each slot for example. Each runs until it
has to wait for a call or for a message, and then yields.

A rank that meets an error closes its links. The system does the same when a rank dies. The ranks
that still wait for it raise `SecondaryError`, and close their links too. The heartbeat detects a
rank that is frozen.

`read_together` is for callers with their own plan, such as DCP's: it checks, links the ranks, and
reads. It binds no state. As in a load, no target changes before all ranks have opened their files.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from dist_ckpt.core.comm.collectives.collective import Collective
from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.comm.messages import SecondaryError
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.loading.shared_read_group import (
    SharedRangePart,
    SharedReadGroup,
    SharedWork,
    UnreachableRanks,
    common_bits,
    gather_requests,
    listen,
    num_slots,
    runs_of,
    short,
)
from dist_ckpt.core.planning.load.read_sharing import BlockRequests, Name
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.threads import WORK_STALL_S, CallMonitor, DaemonThreads, parallel_for
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.block_reads import BlockRead
from dist_ckpt.core.shard_io.read.open_files import OpenFile, OpenFiles
from dist_ckpt.core.shard_io.read.read_work import CellTargets, SmallShardRun
from dist_ckpt.errors import CorruptError, RankError, StorageError
from dist_ckpt.reports import Phases


@dataclass(frozen=True, slots=True)
class OpenedInput:
    """The open files that a rank reads, and where their cells go."""

    files: OpenFiles
    targets: CellTargets


class _ReadRequests(Message, frozen=True):
    """What one rank reads, None if it is too long to be told here; `bulk` numbers connections."""

    wants: bytes | None
    bulk: int


class _InCommon(Message, frozen=True):
    """Whether ranks share what they read, and what each wants, if that is not yet to be told."""

    shares: bool
    wants: tuple[bytes, ...]
    bulk: int


@dataclass(frozen=True, slots=True)
class CollectiveReader:
    """The ranks that read together, and how. `phases` tell what took how long on this rank.

    `meeting` is a name that this reading alone has, the same on all ranks; with "" nothing is
    shared.
    """

    ranks: Session
    phases: Phases
    meeting: str


def read_together(
    together: CollectiveReader,
    open_files: Callable[[], OpenedInput],
    there: Callable[[], AbstractContextManager[None]],
) -> tuple[int, int]:
    """Fill the targets of each rank. Collective: every rank of the session calls this.

    `open_files` touches no target; `there` surrounds all that is done with files. Returns how many
    bytes came from storage, and how many from other ranks of the host; all ranks have all that
    they want then. Raises on all ranks what `open_files` or `BlockReader.run` raises on one.
    """
    ranks, phases = together.ranks, together.phases
    with ExitStack() as stack:
        with phases.phase("check"):
            opened, shared = _meet(ranks, together.meeting, open_files, there, stack)
        with phases.phase("read"), ranks.channel.exchange("read"), there():
            reading = BlockReader(opened.files, opened.targets, verify=True, slots=ranks.slots)
            return run(ranks, shared, reading)


def run(ranks: Session, shared: SharedReadGroup | None, reading: BlockReader) -> tuple[int, int]:
    """Do a reading, of which `shared` is what other ranks want too; see `read_shared`."""
    try:
        if shared is None:
            return reading.run(ranks.config.threads), 0
        return read_shared(shared, reading)
    except BaseException:
        if shared is not None:
            shared.give_up()
        raise


def _meet(
    ranks: Session,
    meeting: str,
    open_files: Callable[[], OpenedInput],
    there: Callable[[], AbstractContextManager[None]],
    stack: ExitStack,
) -> tuple[OpenedInput, SharedReadGroup | None]:
    """Open the files, tell what is wanted of them, and link the ranks that want the same."""
    with ranks.channel.exchange("check") as checking:
        with there():
            opened = open_files()
        stack.callback(opened.files.close)
        links = listen(ranks, meeting, stack) if meeting else None
        of_rank = BlockRequests.of(ranks.channel.host, runs_of(opened.files)) if meeting else None
        own = b"" if of_rank is None else typed_msgpack.encode(of_rank)
        request = _ReadRequests(short(own, ranks.channel.world_size), ranks.collectives_group.epoch)
        gathered = checking.gather(request)
        if gathered is not None:
            shares, wants = common_bits([one.wants for one in gathered], between_hosts=False)
            checking.decide(_InCommon(shares, tuple(wants), max(one.bulk for one in gathered)))
    common = checking.result(_InCommon)
    ranks.collectives_group.renew(common.bulk)
    if not common.shares:
        return opened, None
    with ranks.channel.exchange("prepare") as preparing:
        every = gather_requests(ranks, common.wants, own)
        shared = SharedReadGroup.of(
            ranks, opened.files, links, every, between_hosts=False, stack=stack
        )
        apart = preparing.gather(shared.missed)
        if apart is not None:
            preparing.decide(shared.judge(apart))
    shared = shared.settle(preparing.result(UnreachableRanks))
    return opened, shared if any(shared.units.values()) else None


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


# How often who waits looks after the ranks that it waits for, and after its own calls.
LOOK_S = 1.0


def read_shared(meeting: SharedReadGroup, reading: BlockReader) -> tuple[int, int]:
    """Do what `BlockReader.run` does, but what is shared is fetched once.

    Returns how many bytes came from storage, and how many from other ranks. Collective: every rank
    of `meeting` calls this. It raises the same, and SecondaryError if another rank gives up or is
    lost.
    """
    work = _work_of(meeting, reading)
    with reading.naming_touched():
        SharedReading(meeting, work, reading).run()
    return work.nbytes_moved()


def verify_shared(meeting: SharedReadGroup, reading: BlockReader) -> None:
    """Check what this rank would fetch in a shared reading; the others check the rest."""
    work = _work_of(meeting, reading)
    fetched = ((part.file, read) for part in work.fetched() for read in part.reads)
    reads = chain(work.own_reads(), fetched)
    with reading.naming_touched():
        parallel_for(lambda one: reading.read(*one), reads, threads=meeting.ranks.config.threads)


def _work_of(meeting: SharedReadGroup, reading: BlockReader) -> SharedWork:
    rank = meeting.ranks.channel.rank
    return SharedWork(rank, reading.files, reading.targets, meeting.units)


class SharedReading:
    """One rank's side of a shared reading."""

    def __init__(self, meeting: SharedReadGroup, work: SharedWork, reading: BlockReader) -> None:
        links, threads = meeting.links, meeting.ranks.config.threads
        assert links is not None, "there are units"
        self._work = work
        self._reading = reading
        self._meeting = meeting
        self._channel, self._collective = meeting.ranks.channel, meeting.ranks.collectives_group
        self._num_slots = num_slots(between_hosts=meeting.between_hosts)
        self._most_own = 2 * threads
        self._decider = _ReadThreads(1, links.wake)
        self._readers = _ReadThreads(threads, links.wake)
        self._couriers = _ReadThreads(2 * self._num_slots, links.wake)
        self._host = HostTransfer(work, reading, links)
        self._links = links

    def run(self) -> None:
        """Do all of it; after an error no other rank goes on waiting for this one."""
        try:
            self._links.accept(self._meeting.partners)
            for _ in self._decider.call(self._decide):
                self._decider.check(LOOK_S)
        except BaseException:
            # This ends the deciding thread too, unless it hangs in a copy.
            self._meeting.give_up()
            raise
        finally:
            until = time.monotonic() + WORK_STALL_S
            self._decider.end(until)
            self._readers.end(until)
            # They touch nothing but this rank's memory.
            self._couriers.end(time.monotonic() + LOOK_S)

    def _decide(self) -> None:
        """Decide and copy until all is done; who waits for that is told of each step."""
        offsets = range(0, 2 * self._num_slots * self._work.slot_nbytes, self._work.slot_nbytes)
        to_fetch, to_receive = self._work.fetched(), self._work.relayed()
        own = self._work.own_reads()
        next_look = time.monotonic() + LOOK_S
        for _ in together(
            # First what others wait for. All slots take their units from one iterator, in order.
            *(self._fetch(offset, to_fetch) for offset in offsets[: self._num_slots]),
            *(self._receive(offset, to_receive) for offset in offsets[self._num_slots :]),
            *(self._read(own) for _ in range(self._most_own)),
            self._host.take(),
        ):
            self._host.check_gone()
            if time.monotonic() >= next_look:
                self._channel.watch(sorted(self._host.awaited() | self._couriers.awaited()))
                self._readers.check()
                next_look = time.monotonic() + LOOK_S
            self._decider.put_off()
            self._host.hear(LOOK_S)

    def _fetch(self, offset: int, parts: Iterator[SharedRangePart]) -> Iterator[None]:
        """Fetch units into a slot, one after another; each is handed on to all that want it."""
        for part in parts:
            data = self._host.slot(offset, part)
            yield from self._readers.call(partial(_fetch, self._reading, part, data))
            yield from together(self._send(part, data), self._host.hand_on(offset, part))

    def _send(self, part: SharedRangePart, data: memoryview) -> Iterator[None]:
        if agents := part.unit.agents:
            yield from self._couriers.call(partial(send, self._collective, part, data), agents)

    def _receive(self, offset: int, parts: Iterator[SharedRangePart]) -> Iterator[None]:
        """Receive units into a slot, one after another, and hand them on on this host."""
        for part in parts:
            data = self._host.slot(offset, part)
            work = partial(receive, self._collective, part, data, self._reading)
            yield from self._couriers.call(work, (part.unit.fetcher,))
            yield from self._host.hand_on(offset, part)

    def _read(self, reads: Iterator[tuple[OpenFile, SmallShardRun | BlockRead]]) -> Iterator[None]:
        """Do one after another what only this rank wants."""
        for file, read in reads:
            yield from self._readers.call(partial(self._reading.read, file, read))


def _fetch(reading: BlockReader, part: SharedRangePart, data: memoryview) -> None:
    for read, place in part.places(data):
        reading.fetch(part.file, read, place)


@dataclass(slots=True, eq=False)
class _Call:
    """What another thread does; `ranks` are waited for in it, and after `until` it hangs."""

    ranks: Sequence[int]
    until: float = field(default_factory=lambda: time.monotonic() + WORK_STALL_S)
    watch: CallMonitor = field(default_factory=CallMonitor)
    future: Future[object] = field(default_factory=Future)


class _ReadThreads:
    """Threads, and the calls they are at; the end of each wakes who decides."""

    def __init__(self, threads: int, wake: Callable[[], None]) -> None:
        self._pool = DaemonThreads(threads)
        self._wake = wake
        self._calls: list[_Call] = []

    def call(self, work: Callable[[], object], ranks: Sequence[int] = ()) -> Iterator[None]:
        """Have a thread do this, and yield until it is done; raises what it raises."""
        call = _Call(ranks)
        self._calls.append(call)
        self._pool.submit(partial(call.watch.over, work), call.future)
        call.future.add_done_callback(lambda _: self._wake())
        while not call.future.done():
            yield
        self._calls.remove(call)
        call.future.result(timeout=0)

    def awaited(self) -> set[int]:
        """Return the ranks that its calls wait for."""
        return {rank for call in self._calls for rank in call.ranks}

    def put_off(self) -> None:
        """Let the time after which its calls hang begin now."""
        for call in self._calls:
            call.until = time.monotonic() + WORK_STALL_S

    def check(self, wait_s: float = 0.001) -> None:
        """Wait a moment for the end of each call; StorageError if one hangs."""
        for call in self._calls:
            fact = call.watch.wait_for(call.future, time.monotonic() + wait_s)
            if fact is None and not call.future.done() and time.monotonic() > call.until:
                fact = (
                    "the storage or the device did not answer; look at their health, then try again"
                )
            if fact is not None:
                raise StorageError(fact)

    def end(self, until: float) -> None:
        """Take back the calls that have not begun, and wait for the others."""
        # This may return with calls still stuck in the kernel; nothing can end them.
        for call in self._calls:
            call.future.cancel()
            call.watch.wait_for(call.future, until)
        self._pool.close()


def together(*ways: Iterator[None]) -> Iterator[None]:
    """Let several go on until all are at their end; yield whenever none can go on by itself."""
    going = list(ways)
    while going := [one for one in going if _goes_on(one)]:
        yield


def _goes_on(one: Iterator[None]) -> bool:
    """Let it go on as far as it can; say whether it waits there."""
    for _ in one:
        return True
    return False
