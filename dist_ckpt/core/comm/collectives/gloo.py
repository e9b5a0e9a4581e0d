"""Bulk collectives over gloo connections of our own, in host memory.

They do not use `torch.distributed` process groups: `new_group` shifts the counters that name the
user's next groups. With `use_local_synchronization`, its names differ between ranks that are in
different numbers of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

from dist_ckpt.core.comm.collectives import collective
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.exchange.failure_detector import PollInterval
from dist_ckpt.core.comm.exchange.store_channel import StoreChannel
from dist_ckpt.core.comm.rank_messages import SecondaryError
from dist_ckpt.core.runtime.threads import POLL_S, DaemonThreads, has_outcome
from dist_ckpt.reports import IoCount
from dist_ckpt.settings import Settings

# The number of broadcasts under way at the same time.
MAX_BROADCASTS = 16

# If all ranks are in a step for the heartbeat timeout and this long, their connections do not work.
# A busy host needs a moment to connect.
CONNECT_S = 5.0

# The deadline of gloo itself, longer than any stop of this process, which it would count. The ranks
# watch each other, and detect a lost or late rank earlier.
GLOO_TIMEOUT = timedelta(days=30)

# No message has this tag.
NO_TAG = (1 << 31) - 1


# A ProcessGroupGloo: torch's stubs leave out the methods used here.
_Group = Any


class GlooCollective:
    """A `Collective` over gloo; it connects when it is first used.

    `open_store` returns the part of the job's store with this name, the same on all ranks, over a
    separate connection. While this rank waits, it watches the other ranks: a lost one ends the
    wait. Gloo's own deadlines would also count while this process is stopped.
    """

    def __init__(
        self, open_store: Callable[[str], Store], channel: StoreChannel, settings: Settings
    ) -> None:
        self.rank = channel.rank
        self.world_size = channel.world_size
        self.generation = 0
        self.calls = IoCount()
        self._open_store = open_store
        self._channel = channel
        self._settings = settings
        self._group: _Group | None = None
        # Gloo may use it as long as the connections last.
        self._rendezvous: _Rendezvous | None = None
        # The name of the connections, and how many steps this rank has begun over them.
        self._name = ""
        self._num_steps = 0

    def renew(self, generation: int) -> None:
        """See `Collective.renew`."""
        if generation != self.generation:
            self.close()
            self.generation = generation

    def close(self) -> None:
        """See `Collective.close`."""
        self._group = None
        if self._rendezvous is not None:
            self._rendezvous.is_broken_off = True

    def all_gather_distinct(self, payload: bytes) -> collective.DistinctPayloads:
        """See `Collective.all_gather_distinct`."""
        with self._connected() as group:
            own = collective.payload_name(payload)
            received = bytearray(len(own) * self.world_size)
            parts = list(_tensor(received).view(self.world_size, len(own)).unbind())
            self._wait_for(group.allgather([parts], [_tensor(bytearray(own))]))
            starts = range(0, len(received), len(own))
            ranks = collective.ranks_by_value([bytes(received[n : n + len(own)]) for n in starts])
            payload_nbytes = collective.payload_nbytes
            buffers = {
                name: bytearray(payload if name == own else payload_nbytes(name)) for name in ranks
            }
            sends = [
                (senders[0], buffers[name]) for name, senders in ranks.items() if buffers[name]
            ]
            for start in range(0, len(sends), MAX_BROADCASTS):
                self._send(group, sends[start : start + MAX_BROADCASTS])
            payloads = []
            for name, senders in ranks.items():
                if collective.payload_name(data := bytes(buffers[name])) != name:
                    raise RuntimeError(f"data of rank {senders[0]} arrived damaged")
                payloads.append((data, senders))
            is_sender = ranks[own][0] == self.rank
            self.calls = self.calls.plus(len(own) + (len(payload) if is_sender else 0))
            return tuple(payloads)

    def broadcast(self, data: bytes | None) -> bytes:
        """See `Collective.broadcast`."""
        own = data if data is not None and self.rank == 0 else b""
        with self._connected() as group:
            size = bytearray(len(own).to_bytes(8, "little"))
            self._send(group, [(0, size)])
            buffer = bytearray(own or int.from_bytes(size, "little"))
            if buffer:
                self._send(group, [(0, buffer)])
            self.calls = self.calls.plus(len(size) + len(own) if self.rank == 0 else 0)
            return bytes(buffer)

    def send(self, rank: int, data: memoryview, tag: int) -> collective.Transfer:
        """See `Collective.send`."""
        return _GlooTransfer(lambda group: group.send([_tensor(data)], rank, tag), self._group)

    def receive(self, rank: int, data: memoryview, tag: int) -> collective.Transfer:
        """See `Collective.receive`."""
        return _GlooTransfer(lambda group: group.recv([_tensor(data)], rank, tag), self._group)

    def break_off(self) -> None:
        """See `Collective.break_off`."""
        group = self._group
        self.renew(self.generation + 1)
        if group is None:
            return
        # Gloo cannot abort, but closes all connections when one message is late. One connection
        # that is still open is enough.
        for other in range(self.world_size):
            if other != self.rank:
                with suppress(RuntimeError):
                    late = group.recv([_tensor(bytearray(1))], other, NO_TAG)
                    late.wait(timedelta(milliseconds=1))

    @contextmanager
    def _connected(self) -> Iterator[_Group]:
        try:
            with _gloo_errors():
                if self._group is None:
                    self._group = self._connect()
                yield self._group
                self._show(f"{self._num_steps:09}.")
        except BaseException:
            # A gloo connection that failed once fails for ever, on every rank. One that was left
            # in the middle of a collective would pass its bytes to the next.
            self.break_off()
            raise

    def _connect(self) -> _Group:
        self._name, self._num_steps = f"gloo/{self._channel.token}", 0
        poll = PollInterval(self.world_size, self._settings)
        store = self._rendezvous = _Rendezvous(self._open_store(self._name), poll)
        connect = partial(ProcessGroupGloo, store, self.rank, self.world_size, GLOO_TIMEOUT)
        connected: Future[_Group] = Future()
        DaemonThreads(1).submit(connect, connected)
        try:
            self._wait_until(partial(has_outcome, connected, POLL_S))
        except BaseException:
            # Let the thread end: if it returns from C++ while the interpreter ends, torch aborts.
            self.close()
            has_outcome(connected, 1.0)
            raise
        return connected.result(timeout=0)

    def _wait_for(self, work: Work) -> None:
        self._wait_until(partial(_has_ended, work))
        work.wait()  # it has ended: this raises its error

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait for a step of all ranks: call `is_done`, which waits a moment, until it is True.

        Raises RankError with the name of a rank that is lost meanwhile. RuntimeError if all ranks
        are in this step and the data does not arrive.
        """
        self._num_steps += 1
        own = f"{self._num_steps:09}"
        late_s = self._settings.late_timeout_s
        stall_s = min(late_s, self._settings.heartbeat_timeout_s + CONNECT_S)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        absent, last_came_at = [*others], 0.0
        poll = PollInterval(self.world_size, self._settings)
        while not is_done():
            if not poll.is_look_due():
                continue
            # Rank 0 watches all ranks. The others get its failure.
            self._channel.watch(others if self.rank == COORDINATOR else [COORDINATOR])
            if poll.waited_s < stall_s:
                continue
            self._show(own)
            while absent and (shown := self._read_shown(absent[-1])) >= own:
                absent.pop()
                if shown > own:  # it has done the step, perhaps just now
                    last_came_at = poll.waited_s
            if not absent and poll.waited_s >= last_came_at + stall_s:
                raise RuntimeError(f"data between ranks does not arrive for {stall_s:g} s")
            if poll.waited_s >= late_s:
                raise RuntimeError(f"a step of all ranks has not ended after {late_s:g} s")

    def _show(self, step: str) -> None:
        """Show a step to the other ranks: this rank has waited long in it; with a ".", is done."""
        self._channel.notes.put(f"{self._name}/{self.rank}", step)

    def _read_shown(self, rank: int) -> str:
        return "".join(self._channel.notes.read([f"{self._name}/{rank}"]) or ())

    def _send(self, group: _Group, buffers: Sequence[tuple[int, bytearray]]) -> None:
        works = []
        for rank, buffer in buffers:
            options = BroadcastOptions()
            options.rootRank = rank
            options.rootTensor = 0
            works.append(group.broadcast([_tensor(buffer)], options))
        for work in works:
            self._wait_for(work)


class _Rendezvous(Store):
    """The store in which gloo waits for the addresses of all ranks."""

    def __init__(self, store: Store, poll: PollInterval) -> None:
        super().__init__()
        self._store = store
        self._poll = poll
        self.is_broken_off = False

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta = GLOO_TIMEOUT) -> None:
        # A store's own wait cannot be broken off, and torch prints lines at its timeout.
        while not self._store.check(keys):
            if self.is_broken_off:
                raise RuntimeError("the rendezvous is broken off")
            self._poll.pause()


class _GlooTransfer:
    def __init__(self, begin: Callable[[_Group], Work], group: _Group | None) -> None:
        with _gloo_errors():
            if group is None:
                raise RuntimeError("the connections are closed")
            self._work = begin(group)

    def wait(self) -> None:
        with _gloo_errors():
            self._work.wait(GLOO_TIMEOUT)


def _has_ended(work: Work) -> bool:
    """Wait a moment, and return True if the work has ended, also with an error."""
    with suppress(RuntimeError):
        work.wait(timedelta(seconds=POLL_S))
    return work.is_completed()


@contextmanager
def _gloo_errors() -> Iterator[None]:
    """Raise SecondaryError, with the reason in short, for an error of gloo."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise SecondaryError(
            f"the gloo connections of dist_ckpt failed: {reason}. If no rank has died, try again: "
            "dist_ckpt makes new connections."
        ) from error


def _tensor(buffer: bytearray | memoryview) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)
