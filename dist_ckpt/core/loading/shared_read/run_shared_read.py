"""Run a shared read: one rank reads a range, checks it, and sends it to the ranks that need it.

Each range has one fetcher, a rank that reads the range into a slot of shared memory and checks the
range. Then the fetcher sends a message to the ranks of its host that need the range. These ranks
copy the range from the slot, and answer. To each other host, the fetcher sends the range once. One
rank there, the agent, receives the range into a slot of its own host, and serves the ranks there in
the same way. A slot is free again when all ranks that need its range have copied the range.
Reading, checking, sending and copying overlap.

| Threads of a rank | Work | Wait for other ranks | Watched by |
| --- | --- | --- | --- |
| the calling thread | watches | no | |
| the scheduling thread | schedules and copies (`_run_turns`) | no | the calling thread |
| reading threads | read from storage | no | the scheduling thread |
| couriers | send and receive | yes | the scheduling thread |

Couriers cannot deadlock. All ranks process the ranges in one order, and have separate slots for
received ranges. So each rank that fetches or receives the first incomplete range has a slot for it.
If a thread hangs, all ranks get an error.

The scheduling thread runs generators, such as one for each slot. A generator yields when it has to
wait for a call or for a message.

Errors: a rank that meets an error closes its links. The system closes those of a dead process. The
ranks that still wait for that rank raise `SecondaryError`, and close their links too. The heartbeat
detects a frozen rank.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise

from dist_ckpt.core.comm.collectives.collective import Collective
from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.comm.rank_messages import SecondaryError
from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.loading.shared_read.shared_read_group import (
    SharedReadGroup,
    num_slots,
    slot_nbytes,
)
from dist_ckpt.core.planning.load.shared_ranges import RangeKey, SharedBlockRange
from dist_ckpt.core.runtime.processes import running_time
from dist_ckpt.core.runtime.threads import WORK_STALL_S, CallMonitor, DaemonThreads
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.open_files import OpenFile
from dist_ckpt.core.shard_io.read.read_grouping import (
    BlockRead,
    CellTargets,
    NeededBlock,
    PlannedRead,
    SmallShardsRead,
    find_needed_blocks,
    group_into_reads,
    group_successive,
    split_off_small_shards,
)
from dist_ckpt.errors import CorruptError, RankError, StorageError

# --- transfer: through shared memory on a host, over the network between hosts ----------------

# The kind, the offset of a slot in the memory, and the range in it: its file and first block.
_MESSAGE = struct.Struct("<BQQQ")
_READY, _DONE = range(2)


class HostTransfer:
    """One rank's side of the transfer of ranges between the ranks of its host."""

    def __init__(self, work: RankReads, reader: BlockReader, links: HostLinks) -> None:
        self._work = work
        self._reader = reader
        self._links = links
        self._to_copy = work.keys_by_sender()  # ranges that this rank still needs, by sender
        # Ranges that this rank can copy now: sender, offset of the slot, key.
        self._ready: deque[tuple[int, int, RangeKey]] = deque()
        self._users: dict[int, set[int]] = {}  # ranks that still need the range in a slot
        self._gone: set[int] = set()  # ranks whose links have ended

    def slot_memory(self, offset: int, planned: PlannedRange) -> memoryview:
        """Return the memory of a range in a slot of this rank."""
        return self._memory(self._work.rank, offset, planned)

    def offer_range(self, offset: int, planned: PlannedRange) -> Iterator[None]:
        """Offer the range in a slot to the ranks of this host; end when all have copied it."""
        _, *receivers = planned.shared_range.ranks_on_host_of(self._work.rank)
        users = self._users[offset] = set(receivers)
        for rank in receivers:
            self._links.send(rank, _MESSAGE.pack(_READY, offset, *planned.shared_range.key))
        planned.for_each_read(self._reader.place, self.slot_memory(offset, planned))
        while users:
            yield
        del self._users[offset]

    def copy_ranges(self) -> Iterator[None]:
        """Copy ranges from other ranks, one at a time, until this rank has all that it needs.

        The scheduling thread copies: copies by other threads took twice as long.
        """
        while any(self._to_copy.values()):
            yield
            if self._ready:
                rank, offset, key = self._ready.popleft()
                planned = self._work.planned_range(key)
                planned.for_each_read(self._reader.place, self._memory(rank, offset, planned))
                self._links.send(rank, _MESSAGE.pack(_DONE, offset, *key))
                self._to_copy[rank].remove(key)

    def receive(self, timeout_s: float) -> None:
        """Process messages of other ranks. With no range to copy, wait for one, or to be woken."""
        for rank, message in self._links.receive(0 if self._ready else timeout_s):
            if message is None:
                self._gone.add(rank)
                continue
            kind, offset, file, block = _MESSAGE.unpack(message)
            if kind == _DONE:
                self._users[offset].discard(rank)
            else:
                self._ready.append((rank, offset, (file, block)))

    def awaited_ranks(self) -> set[int]:
        """Return the ranks that this rank waits for, now or later."""
        ranks = {rank for rank, keys in self._to_copy.items() if keys}
        return ranks.union(*self._users.values())

    def check_awaited_ranks(self) -> None:
        """Raise SecondaryError if the link to an awaited rank has ended."""
        if lost := self._gone and self._gone & self.awaited_ranks():
            raise SecondaryError(
                f"rank {min(lost)} of this host has failed or ended before it sent and received "
                "all shared data; see that rank's log"
            )

    def _memory(self, rank: int, offset: int, planned: PlannedRange) -> memoryview:
        return self._links.memory_of(rank)[offset : offset + planned.span.nbytes]


def send_range(collective: Collective, planned: PlannedRange, data: memoryview) -> None:
    """Send a range to its agent on each other host, and wait until all agents have it."""
    transfers = [collective.send(agent, data, tag) for agent, tag in planned.send_numbers.items()]
    for transfer in transfers:
        transfer.wait()


def receive_range(
    collective: Collective, planned: PlannedRange, data: memoryview, reader: BlockReader
) -> None:
    """Receive a range from another host, and check it again."""
    fetcher = planned.shared_range.fetcher
    collective.receive(fetcher, data, planned.send_numbers[collective.rank]).wait()
    try:
        planned.for_each_read(reader.check, data)
    except CorruptError as error:
        raise RankError(
            f"data that rank {fetcher} read and sent has arrived damaged: {error}. Check the "
            "network and the memory of both hosts, then try again",
            rank=fetcher,
        ) from error


# --- the threads of a rank -------------------------------------------------------------------

# At this interval a waiting thread checks its calls, and the ranks that it waits for.
RANK_CHECK_INTERVAL_S = 1.0


class SharedReader:
    """One rank's side of a shared read."""

    def __init__(self, group: SharedReadGroup, work: RankReads, reader: BlockReader) -> None:
        links, threads = group.links, group.session.settings.threads
        assert links is not None, "there are ranges"
        self._work = work
        self._reader = reader
        self._group = group
        self._channel, self._collective = group.session.channel, group.session.collective
        self._num_slots = num_slots(between_hosts=group.between_hosts)
        self._max_local_reads = 2 * threads
        self._scheduler = _WatchedThreads(1, links.wake)
        self._readers = _WatchedThreads(threads, links.wake)
        self._couriers = _WatchedThreads(2 * self._num_slots, links.wake)
        self._transfer = HostTransfer(work, reader, links)
        self._links = links

    def read_all(self) -> None:
        """Read and share all blocks. After an error, no other rank waits for this rank."""
        try:
            self._links.accept(self._group.partners)
            for _ in self._scheduler.call(self._run_turns):
                self._scheduler.check(RANK_CHECK_INTERVAL_S)
        except BaseException:
            # This ends the scheduling thread too, unless it hangs in a copy.
            self._group.give_up()
            raise
        finally:
            deadline = running_time() + WORK_STALL_S
            self._scheduler.end(deadline)
            self._readers.end(deadline)
            # The couriers use only this rank's memory.
            self._couriers.end(running_time() + RANK_CHECK_INTERVAL_S)

    def _run_turns(self) -> None:
        """Schedule and copy until all blocks are read. Wake the calling thread at each step."""
        offsets = range(0, 2 * self._num_slots * self._work.slot_nbytes, self._work.slot_nbytes)
        to_fetch, to_receive = self._work.fetched_ranges(), self._work.received_ranges()
        local_reads = self._work.local_reads()
        next_check = running_time() + RANK_CHECK_INTERVAL_S
        for _ in run_in_turns(
            # Ranges for other ranks come first. All slots share one iterator of ranges, in order.
            *(self._fetch(offset, to_fetch) for offset in offsets[: self._num_slots]),
            *(self._receive(offset, to_receive) for offset in offsets[self._num_slots :]),
            *(self._read(local_reads) for _ in range(self._max_local_reads)),
            self._transfer.copy_ranges(),
        ):
            self._transfer.check_awaited_ranks()
            if running_time() >= next_check:
                self._channel.watch(
                    sorted(self._transfer.awaited_ranks() | self._couriers.awaited_ranks())
                )
                self._readers.check()
                next_check = running_time() + RANK_CHECK_INTERVAL_S
            self._scheduler.postpone_deadlines()
            self._transfer.receive(RANK_CHECK_INTERVAL_S)

    def _fetch(self, offset: int, ranges: Iterator[PlannedRange]) -> Iterator[None]:
        """Read ranges into a slot, one after another. Send each to all ranks that need it."""
        for planned in ranges:
            data = self._transfer.slot_memory(offset, planned)
            yield from self._readers.call(partial(planned.for_each_read, self._reader.fetch, data))
            yield from run_in_turns(
                self._send(planned, data), self._transfer.offer_range(offset, planned)
            )

    def _send(self, planned: PlannedRange, data: memoryview) -> Iterator[None]:
        if agents := planned.shared_range.agents:
            yield from self._couriers.call(
                partial(send_range, self._collective, planned, data), agents
            )

    def _receive(self, offset: int, ranges: Iterator[PlannedRange]) -> Iterator[None]:
        """Receive ranges into a slot, one after another. Offer each to the ranks of this host."""
        for planned in ranges:
            data = self._transfer.slot_memory(offset, planned)
            work = partial(receive_range, self._collective, planned, data, self._reader)
            yield from self._couriers.call(work, (planned.shared_range.fetcher,))
            yield from self._transfer.offer_range(offset, planned)

    def _read(self, reads: Iterator[tuple[OpenFile, PlannedRead]]) -> Iterator[None]:
        """Read blocks that only this rank needs, one after another."""
        for file, read in reads:
            yield from self._readers.call(partial(self._reader.read, file, read))


@dataclass(slots=True, eq=False)
class _Call:
    """A call in a thread. It waits for `ranks`, and counts as hanging after `deadline`."""

    ranks: Sequence[int]
    deadline: float = field(default_factory=lambda: running_time() + WORK_STALL_S)
    watch: CallMonitor = field(default_factory=CallMonitor)
    future: Future[object] = field(default_factory=Future)


class _WatchedThreads:
    """Threads with their calls. The end of a call wakes the scheduling thread."""

    def __init__(self, threads: int, wake: Callable[[], None]) -> None:
        self._pool = DaemonThreads(threads)
        self._wake = wake
        self._calls: list[_Call] = []

    def call(self, work: Callable[[], object], ranks: Sequence[int] = ()) -> Iterator[None]:
        """Run a call in a thread, and yield until it is done. Raises its error."""
        call = _Call(ranks)
        self._calls.append(call)
        self._pool.submit(partial(call.watch.run, work), call.future)
        call.future.add_done_callback(lambda _: self._wake())
        while not call.future.done():
            yield
        self._calls.remove(call)
        call.future.result(timeout=0)

    def awaited_ranks(self) -> set[int]:
        """Return the ranks that the calls wait for."""
        return {rank for call in self._calls for rank in call.ranks}

    def postpone_deadlines(self) -> None:
        """Postpone the deadline after which the calls count as hanging."""
        for call in self._calls:
            call.deadline = running_time() + WORK_STALL_S

    def check(self, wait_s: float = 0.001) -> None:
        """Wait a moment for each call. StorageError if one hangs."""
        for call in self._calls:
            problem = call.watch.wait_for(call.future, running_time() + wait_s)
            if problem is None and not call.future.done() and running_time() > call.deadline:
                problem = (
                    "the storage or the device did not answer; look at their health, then try again"
                )
            if problem is not None:
                raise StorageError(problem)

    def end(self, deadline: float) -> None:
        """Cancel the calls that have not begun, and wait for the other calls.

        A call may still be stuck in the kernel afterwards: nothing can end it.
        """
        for call in self._calls:
            call.future.cancel()
            call.watch.wait_for(call.future, deadline)
        self._pool.close()


_ENDED = object()


def run_in_turns(*generators: Iterator[None]) -> Iterator[None]:
    """Run generators until all have ended. Yield each time that all have to wait."""
    remaining = list(generators)
    while remaining := [each for each in remaining if next(each, _ENDED) is not _ENDED]:
        yield


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """A shared range, and the reads that fill it. This rank needs all its blocks.

    `send_numbers` has the number of the range for each agent: the fetcher counts the ranges that it
    sends to an agent.
    """

    shared_range: SharedBlockRange
    file: OpenFile
    reads: tuple[PlannedRead, ...]
    send_numbers: Mapping[int, int]

    @property
    def span(self) -> ByteRange:
        """The bytes of the range in the data section. The reads fill it in order, without gap."""
        return ByteRange(self.reads[0].span.start, self.reads[-1].span.stop)

    def for_each_read(
        self, work: Callable[[OpenFile, PlannedRead, memoryview], None], data: memoryview
    ) -> None:
        """Call `work` with each read and its slice of `data`, the memory of the range."""
        begin = self.span.start
        for read in self.reads:
            work(self.file, read, data[read.span.start - begin : read.span.stop - begin])


class RankReads:
    """The reads that fill the targets of a rank: local reads, and the ranges that it shares."""

    def __init__(self, group: SharedReadGroup, targets: CellTargets | None) -> None:
        self.rank = group.session.channel.rank
        self.slot_nbytes = slot_nbytes(group.files)
        self._files = group.files
        self._targets = targets
        self._shared_ranges = group.shared_ranges
        self._by_file: defaultdict[int, list[SharedBlockRange]] = defaultdict(list)
        for shared_range in group.shared_ranges:
            self._by_file[shared_range.file].append(shared_range)
        # Number the ranges from each fetcher to each agent. Both ranks count the same.
        numbers: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(count)
        self._send_numbers = {
            r.key: {agent: next(numbers[r.fetcher, agent]) for agent in r.agents}
            for r in group.shared_ranges
        }
        self._divided: dict[int, tuple[list[PlannedRead], dict[int, PlannedRange]]] = {}

    def local_reads(self) -> Iterator[tuple[OpenFile, PlannedRead]]:
        """Yield the reads of blocks that no other rank needs."""
        for number in self._files.plan:
            for read in self._divide(number)[0]:
                yield self._files.files[number], read

    def fetched_ranges(self) -> Iterator[PlannedRange]:
        """Yield the shared ranges that this rank reads, in the order that all ranks use."""
        return (self.planned_range(r.key) for r in self._shared_ranges if r.fetcher == self.rank)

    def received_ranges(self) -> Iterator[PlannedRange]:
        """Yield the shared ranges that this rank receives from other hosts, in the same order."""
        return (self.planned_range(r.key) for r in self._shared_ranges if self.rank in r.agents)

    def keys_by_sender(self) -> dict[int, set[RangeKey]]:
        """Return the keys of the ranges that this rank copies from its host, by sender."""
        keys: dict[int, set[RangeKey]] = {}
        for shared_range in self._shared_ranges:
            first = shared_range.ranks_on_host_of(self.rank)[0]
            if first != self.rank:
                keys.setdefault(first, set()).add(shared_range.key)
        return keys

    def planned_range(self, key: RangeKey) -> PlannedRange:
        """Return a shared range with its reads."""
        file, block = key
        return self._divide(file)[1][block]

    def nbytes_moved(self) -> tuple[int, int]:
        """Return the bytes that this rank gets from storage, and those from other ranks."""
        own = sum(read.span.nbytes for _, read in self.local_reads())
        fetched = sum(planned.span.nbytes for planned in self.fetched_ranges())
        shared = sum(self.planned_range(r.key).span.nbytes for r in self._shared_ranges)
        return own + fetched, shared - fetched

    def _divide(self, number: int) -> tuple[list[PlannedRead], dict[int, PlannedRange]]:
        """Divide the needed blocks of a file into local reads and shared ranges. Cached."""
        if number in self._divided:
            return self._divided[number]
        file = self._files.files[number]
        shared_ranges = self._by_file[number]
        bounds = [
            file.block_starts[block]
            for shared_range in shared_ranges
            for block in (shared_range.blocks.start, shared_range.blocks.stop)
        ]
        # The content of each range, in order. The key None has the blocks outside of all ranges.
        small_reads: defaultdict[int | None, list[SmallShardsRead]] = defaultdict(list)
        blocks: defaultdict[int | None, list[NeededBlock]] = defaultdict(list)
        whole_reads, items = split_off_small_shards(file, self._files.plan[number])
        for whole in whole_reads:
            for cut_read in _cut_read(whole, file.shards.starts, bounds):
                small_reads[_find_range(cut_read.span.start, bounds)].append(cut_read)
        for block in find_needed_blocks(file, items, self._targets):
            blocks[_find_range(block.start, bounds)].append(block)
        planned_ranges = {}
        for n, shared_range in enumerate(shared_ranges):
            # A range has no gap: all its adjacent blocks are read together.
            groups = group_successive(blocks[n], lambda group, b: group[-1].stop == b.start)
            reads: list[PlannedRead] = [*small_reads[n]]
            reads += (BlockRead(ByteRange(g[0].start, g[-1].stop), tuple(g)) for g in groups)
            reads.sort(key=lambda read: read.span.start)
            planned_ranges[shared_range.blocks.start] = PlannedRange(
                shared_range, file, tuple(reads), self._send_numbers[shared_range.key]
            )
        local_reads: list[PlannedRead] = [*small_reads[None], *group_into_reads(blocks[None])]
        self._divided[number] = local_reads, planned_ranges
        return local_reads, planned_ranges


def _find_range(start: int, bounds: Sequence[int]) -> int | None:
    """Return the number of the range with the byte `start`, or None.

    `bounds` are the start and stop of each range, in order.
    """
    before = bisect_right(bounds, start)
    # Where one range stops and the next one starts, both bounds count: the byte is in the next one.
    return before // 2 if before % 2 else None


def _cut_read(
    read: SmallShardsRead, starts: Sequence[int], bounds: Sequence[int]
) -> Iterator[SmallShardsRead]:
    """Cut a read of small shards where ranges begin and end."""
    inside = bounds[bisect_right(bounds, read.span.start) : bisect_left(bounds, read.span.stop)]
    cuts = [read.first, *(bisect_left(starts, bound) for bound in dict.fromkeys(inside))]
    for first, stop in pairwise([*cuts, read.first + len(read.items)]):
        items = read.items[first - read.first : stop - read.first]
        yield SmallShardsRead(first, items, ByteRange(starts[first], starts[stop]))
