"""Read once: what several ranks want is fetched by one of them, checked, and handed on.

The fetcher of a unit reads it into a slot of its memory and checks it. On its host it then tells
the ranks that want it; they copy out of that slot and say when they are done. To each other host
it sends the unit once, into a slot of the rank there that hands it on in the same way. A slot is
free again when all are done with it. Reading, checking, handing on and placing overlap.

One thread of a rank decides and copies (`SharedReading._go`), others read. None of that waits for
another rank: a fetch begins when a slot is free, a copy when the unit is there. So whatever a host
has is copied, and its slots get free. Those threads that send and receive do wait, but all ranks go
through the units in one order, and have slots of their own for what they receive: of all units that
are not everywhere yet, the first has its fetcher's and its receivers' next slots. So no order in
which ranks get on can block them. The thread that has called watches the one that decides, which
watches all others: so any of them may hang, and all ranks learn it.

A rank that meets an error gives up: it closes its links. So does the system when a rank dies. Who
still waits for that rank raises a fallout, and closes its links too. A rank that is frozen is
noticed by its heartbeat.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain

from dist_ckpt.comm.messages import FalloutError
from dist_ckpt.comm.session import Session
from dist_ckpt.errors import CorruptError, RankError, StorageError
from dist_ckpt.format.geometry import Span
from dist_ckpt.loading.read_once_agreement import Agreement
from dist_ckpt.loading.read_once_units import SharedWork, UnitPart, num_slots
from dist_ckpt.runtime.threads import WORK_STALL_S, DaemonThreads, Watch, each
from dist_ckpt.shard_io.block_reader import Reading
from dist_ckpt.shard_io.block_reads import BlockRead
from dist_ckpt.shard_io.small_shards import Row

# How often who waits looks after the ranks that it waits for, and after its own calls.
LOOK_S = 1.0

# The user of a slot that stands for all other hosts.
_OTHER_HOSTS = -1

# Kind; where a slot begins in the memory; of the unit in it: file and first block.
_MESSAGE = struct.Struct("<BQQQ")
_READY, _DONE = range(2)


def read_shared(ranks: Session, agreement: Agreement, reading: Reading) -> tuple[int, int]:
    """Do what `Reading.run` does, but what is shared is fetched once.

    Returns how many bytes came from storage, and how many from other ranks. Collective: every rank
    of `agreement` calls this. It raises the same, and FalloutError if another rank gives up or is
    lost.
    """
    work = SharedWork(ranks.channel.rank, reading.files, reading.targets, agreement.units)
    flow = SharedReading(work, reading, agreement, ranks.channel.watch)
    with reading.telling_touched():
        flow.run(ranks.config.threads)
    return flow.nbytes_read, flow.nbytes_received


def verify_shared(ranks: Session, agreement: Agreement, reading: Reading) -> None:
    """Check what this rank would fetch in a shared reading; the others check the rest."""
    work = SharedWork(ranks.channel.rank, reading.files, reading.targets, agreement.units)
    fetched = ((p.file, read) for p in map(work.part, work.fetched()) for read in p.reads)
    reads = chain(work.own_reads(), fetched)
    with reading.telling_touched():
        each(lambda one: reading.read(*one), reads, threads=ranks.config.threads)


class SharedReading:
    """One rank's side of a shared reading; its counts are of shard data.

    `watch` raises an error if one of some ranks, for which this one waits, is lost.
    """

    def __init__(
        self,
        work: SharedWork,
        reading: Reading,
        agreement: Agreement,
        watch: Callable[[Sequence[int]], None],
    ) -> None:
        assert agreement.links is not None, "there are units"
        self.nbytes_read = self.nbytes_received = 0
        self._work = work
        self._reading = reading
        self._agreement = agreement
        self._links = agreement.links
        self._collective = agreement.collective
        self._watch = watch
        self._own = work.own_reads()
        self._fetched = deque(work.fetched())
        self._relayed = deque(work.relayed())
        self._untold = work.told_by()
        self._told: deque[tuple[int, int, UnitPart]] = deque()  # which rank has it in which slot
        self._to_send: deque[tuple[int, UnitPart]] = deque()
        self._num_slots = slots = num_slots(between_hosts=agreement.between_hosts)
        offsets = range(0, 2 * slots * work.slot_nbytes, work.slot_nbytes)
        self._free = list(offsets[:slots])
        self._free_to_receive = list(offsets[slots:])
        self._users: dict[int, set[int]] = {}  # of the slots that are not free
        self._gone: set[int] = set()  # ranks whose links have ended
        self._calls: list[_Call] = []
        self._couriers: list[_Call] = []
        self._next_look = time.monotonic() + LOOK_S

    def run(self, threads: int) -> None:
        """Do all of it; after an error no other rank goes on waiting for this one."""
        decider, pool = DaemonThreads(1), DaemonThreads(threads)
        couriers = DaemonThreads(2 * self._num_slots)
        going = _Call(lambda: self._go(going, 2 * threads, pool, couriers))
        try:
            self._links.accept(self._agreement.partners)
            going.begin(decider)
            while not going.is_done():
                going.check(LOOK_S)
        except BaseException:
            # This ends the deciding thread too, unless it hangs in a copy.
            self._agreement.give_up()
            raise
        finally:
            until = time.monotonic() + WORK_STALL_S
            _end((going,), until)
            _end(self._calls, until)
            # They touch nothing but this rank's memory.
            _end(self._couriers, time.monotonic() + LOOK_S)
            for one in (decider, pool, couriers):
                one.close()

    def _go(
        self, itself: _Call, most_calls: int, pool: DaemonThreads, couriers: DaemonThreads
    ) -> None:
        """Decide and copy until all is done; who waits for that is told of each step."""
        wake = self._links.wake
        while True:
            while len(self._calls) < most_calls and (call := self._next()) is not None:
                self._calls.append(call)
                call.begin(pool, wake)
            while (call := self._next_courier()) is not None:
                self._couriers.append(call)
                call.begin(couriers, wake)
            if self._is_done():
                break
            if self._told:
                self._copy(*self._told.popleft())
                self._hear(0)
            else:
                self._hear(LOOK_S)
            self._calls = _settled(self._calls)
            self._couriers = _settled(self._couriers)
            self._check_gone()
            self._look()
            itself.put_off()

    def _is_done(self) -> bool:
        underway = self._calls or self._couriers or self._users
        ahead = self._told or self._fetched or self._relayed or any(self._untold.values())
        return not underway and not ahead

    def _next(self) -> _Call | None:
        """Return what to read next, if anything can be: first what others wait for."""
        if self._free and self._fetched:
            offset, part = self._free.pop(), self._work.part(self._fetched.popleft())
            return _Call(partial(self._fetch, offset, part), partial(self._is_here, offset, part))
        if (own := next(self._own, None)) is not None:
            return _Call(partial(self._reading.read, *own), partial(self._count_read, own[1].span))
        return None

    def _next_courier(self) -> _Call | None:
        """Return what to send or receive next, if there is a slot with it, or for it."""
        if self._to_send:
            offset, part = self._to_send.popleft()
            done = partial(self._release, offset, _OTHER_HOSTS)
            return _Call(partial(self._send, offset, part), done, part.unit.agents)
        if self._free_to_receive and self._relayed:
            offset = self._free_to_receive.pop()
            part = self._work.part(self._relayed.popleft())
            done = partial(self._is_received, offset, part)
            return _Call(partial(self._receive, offset, part), done, (part.unit.fetcher,))
        return None

    def _copy(self, rank: int, offset: int, part: UnitPart) -> None:
        """Take what a rank hands on. At once: to have a thread do it would take as long again."""
        data = self._links.memory_of(rank)[offset : offset + part.span.nbytes]
        for read in part.reads:
            self._reading.place(part.file, read, _of(read, part, data))
        if rank == self._work.rank:
            self._release(offset, rank)
        else:
            self.nbytes_received += part.span.nbytes
            self._links.send(rank, _MESSAGE.pack(_DONE, offset, *part.unit.name))

    # --- what other threads do -------------------------------------------------------------------

    def _fetch(self, offset: int, part: UnitPart) -> None:
        data = self._slot(offset, part)
        for read in part.reads:
            self._reading.fetch(part.file, read, _of(read, part, data))

    def _send(self, offset: int, part: UnitPart) -> None:
        data = self._slot(offset, part)
        sent = [self._collective.send(agent, data, tag) for agent, tag in part.tags.items()]
        for transfer in sent:
            transfer.wait()

    def _receive(self, offset: int, part: UnitPart) -> None:
        tag = part.tags[self._work.rank]
        fetcher, data = part.unit.fetcher, self._slot(offset, part)
        self._collective.receive(fetcher, data, tag).wait()
        begin = part.span.start
        try:
            for read in part.reads:
                place = data[read.span.start - begin : read.span.stop - begin]
                self._reading.check(part.file, read, place)
        except CorruptError as error:
            raise RankError(
                f"what rank {fetcher} has read and sent arrived damaged: {error}. Look at the "
                "network and the memory of both hosts, then try again",
                rank=fetcher,
            ) from error

    def _slot(self, offset: int, part: UnitPart) -> memoryview:
        return self._links.memory_of(self._work.rank)[offset : offset + part.span.nbytes]

    # --- what follows ----------------------------------------------------------------------------

    def _is_here(self, offset: int, part: UnitPart) -> None:
        """Hand on a unit that has been fetched or received."""
        unit, rank = part.unit, self._work.rank
        if unit.fetcher == rank:
            self._count_read(part.span)
        self._users[offset] = set(unit.host_of(rank))
        for other in unit.host_of(rank)[1:]:
            self._links.send(other, _MESSAGE.pack(_READY, offset, *unit.name))
        self._told.append((rank, offset, part))
        if unit.fetcher == rank and unit.agents:
            self._users[offset].add(_OTHER_HOSTS)
            self._to_send.append((offset, part))

    def _is_received(self, offset: int, part: UnitPart) -> None:
        self.nbytes_received += part.span.nbytes
        self._is_here(offset, part)

    def _release(self, offset: int, user: int) -> None:
        self._users[offset].discard(user)
        if not self._users[offset]:
            del self._users[offset]
            is_first = offset < self._num_slots * self._work.slot_nbytes
            (self._free if is_first else self._free_to_receive).append(offset)

    def _count_read(self, span: Span) -> None:
        self.nbytes_read += span.nbytes

    # --- the other ranks -------------------------------------------------------------------------

    def _hear(self, timeout_s: float) -> None:
        """Take note of what other ranks say; wait for that, or for the end of a call."""
        for rank, message in self._links.receive(timeout_s):
            if message is None:
                self._gone.add(rank)
                continue
            kind, offset, file, block = _MESSAGE.unpack(message)
            if kind == _DONE:
                self._release(offset, rank)
            else:
                self._untold[rank].remove((file, block))
                self._told.append((rank, offset, self._work.part((file, block))))

    def _check_gone(self) -> None:
        """Raise FalloutError if a rank is waited for whose link has ended, maybe long ago."""
        if lost := self._gone and self._gone & self._awaited():
            raise FalloutError(
                f"rank {min(lost)} of this host has given up or is gone, and had not handed on "
                "and taken all that is shared; look into that rank's log"
            )

    def _awaited(self) -> set[int]:
        """Return the ranks that this one waits for now, or will."""
        ranks = {rank for rank, names in self._untold.items() if names}
        ranks.update(*self._users.values(), *(call.ranks for call in self._couriers))
        return ranks - {self._work.rank, _OTHER_HOSTS}

    def _look(self) -> None:
        """Raise an error if a rank that is waited for is lost, or a call hangs."""
        if time.monotonic() < self._next_look:
            return
        self._watch(sorted(self._awaited()))
        for call in self._calls:
            call.check()
        self._next_look = time.monotonic() + LOOK_S


def _of(read: Row | BlockRead, part: UnitPart, data: memoryview) -> memoryview:
    """Return what one read brings of a part, all of which is `data`."""
    start, stop = read.span.start - part.span.start, read.span.stop - part.span.start
    return data[start:stop]


class _Call:
    """What another thread does, and what follows when it is done; `ranks` are waited for in it."""

    def __init__(
        self,
        work: Callable[[], object],
        then: Callable[[], None] = lambda: None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        self.ranks = ranks
        self._work = work
        self._then = then
        self._watch = Watch()
        self._future: Future[object] = Future()
        self._until = time.monotonic() + WORK_STALL_S

    def begin(self, pool: DaemonThreads, wake: Callable[[], None] = lambda: None) -> None:
        """Have a thread of the pool do the work; it calls `wake` when it is done."""
        self._future = pool.submit(partial(self._watch.over, self._work))
        self._future.add_done_callback(lambda _: wake())

    def put_off(self) -> None:
        """Let the time after which the work hangs begin now."""
        self._until = time.monotonic() + WORK_STALL_S

    def is_done(self) -> bool:
        """Say whether the work is done; if so, do what follows, or raise what it raised."""
        if not self._future.done():
            return False
        self._future.result(timeout=0)
        self._then()
        return True

    def check(self, wait_s: float = 0.001) -> None:
        """Wait a moment for the end of the work; raise StorageError if it hangs."""
        fact = self._watch.wait_for(self._future, time.monotonic() + wait_s)
        if fact is None and not self._future.done() and time.monotonic() > self._until:
            fact = "the storage or the device did not answer; look at their health, then try again"
        if fact is not None:
            raise StorageError(fact)

    def end(self, until: float) -> None:
        """Take the work back, or wait for its end if it has begun."""
        self._future.cancel()
        self._watch.wait_for(self._future, until)


def _settled(calls: Iterable[_Call]) -> list[_Call]:
    return [call for call in calls if not call.is_done()]


def _end(calls: Iterable[_Call], until: float) -> None:
    # This may return with calls still stuck in the kernel; nothing can end them.
    for call in calls:
        call.end(until)
