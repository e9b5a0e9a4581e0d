"""Bulk collectives over gloo connections of our own, in host memory.

They do not use `torch.distributed` process groups: `new_group` shifts the counters that name the
user's next groups. With `use_local_synchronization`, its names differ between ranks that are in
different numbers of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

from dist_ckpt.core.comm.collectives import collective
from dist_ckpt.core.comm.rank_messages import SecondaryError
from dist_ckpt.reports import IoCount
from dist_ckpt.settings import STALL_TIMEOUT_S

# The number of broadcasts under way at once.
MAX_BROADCASTS = 16

# How long a transfer waits for the other rank, which may be slow. A lost rank is detected much
# earlier, by its heartbeat.
TRANSFER_S = 3 * STALL_TIMEOUT_S

# No message has this tag.
NO_TAG = (1 << 31) - 1


# A ProcessGroupGloo: torch's stubs leave out the methods used here.
_Group = Any


class GlooCollective:
    """A `Collective` over gloo; it connects when it is first used.

    `open_store` returns an empty part of the job's store, the same on all ranks, over a connection
    that nothing else uses: gloo's rendezvous blocks it. No step of a call takes longer than
    `timeout_s`.
    """

    def __init__(
        self, open_store: Callable[[], Store], rank: int, world_size: int, *, timeout_s: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = 0
        self.calls = IoCount()
        self._open_store = open_store
        self._timeout = timedelta(seconds=timeout_s)
        self._group: _Group | None = None

    def renew(self, generation: int) -> None:
        """See `Collective.renew`."""
        if generation != self.generation:
            self.close()
            self.generation = generation

    def close(self) -> None:
        """See `Collective.close`."""
        self._group = None

    def all_gather_distinct(self, payload: bytes) -> collective.DistinctPayloads:
        """See `Collective.all_gather_distinct`."""
        with self._connected() as group:
            own = collective.payload_name(payload)
            received = bytearray(len(own) * self.world_size)
            parts = list(_tensor(received).view(self.world_size, len(own)).unbind())
            group.allgather([parts], [_tensor(bytearray(own))]).wait(self._timeout)
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
        if (group := self._group) is None:
            return
        self.renew(self.generation + 1)
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
            if self._group is None:
                store = self._open_store()
                self._group = ProcessGroupGloo(store, self.rank, self.world_size, self._timeout)
            yield self._group
        except BaseException as error:
            # A gloo connection that failed once fails for ever, on every rank. One that was left
            # in the middle of a collective would pass its bytes to the next.
            self.renew(self.generation + 1)
            if not isinstance(error, RuntimeError):
                raise
            raise _secondary_error(error) from error

    def _send(self, group: _Group, buffers: Sequence[tuple[int, bytearray]]) -> None:
        works = []
        for rank, buffer in buffers:
            options = BroadcastOptions()
            options.rootRank = rank
            options.rootTensor = 0
            works.append(group.broadcast([_tensor(buffer)], options))
        for work in works:
            work.wait(self._timeout)


class _GlooTransfer:
    def __init__(self, begin: Callable[[_Group], Work], group: _Group | None) -> None:
        try:
            if group is None:
                raise RuntimeError("the connections are closed")
            self._work = begin(group)
        except RuntimeError as error:
            raise _secondary_error(error) from error

    def wait(self) -> None:
        try:
            self._work.wait(timedelta(seconds=TRANSFER_S))
        except RuntimeError as error:
            raise _secondary_error(error) from error


def _secondary_error(error: RuntimeError) -> SecondaryError:
    reason = str(error).splitlines()[0].partition(". ")[0]
    return SecondaryError(
        f"the gloo connections of dist_ckpt failed: {reason}. If no rank has died, try again: "
        "dist_ckpt makes new connections."
    )


def _tensor(buffer: bytearray | memoryview) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)
