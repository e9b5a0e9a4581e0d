"""The resources of a group of ranks that serve all its saves and loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from dist_ckpt.core.comm.collectives.collective import Collective
from dist_ckpt.core.comm.collectives.host_links import SharedScratch
from dist_ckpt.core.comm.exchange.channel import Channel
from dist_ckpt.core.runtime.host_memory import BufferPool
from dist_ckpt.reports import IoCount
from dist_ckpt.settings import Settings

T = TypeVar("T")


class Session:
    """The channel, collectives and caches of a group. One thread uses it at a time.

    `group_ranks` are the ranks of the group as ranks of the job. `scratch_buffers` are a few tens
    of MiB for reads and writes: touching new memory each time would cost more.
    `collective` connects when it is first used.
    """

    def __init__(
        self,
        channel: Channel,
        collective: Collective,
        settings: Settings | None = None,
        group_ranks: tuple[int, ...] | None = None,
    ) -> None:
        self.channel = channel
        self.settings = settings or Settings()
        self.group_ranks = group_ranks or tuple(range(channel.world_size))
        self._caches: dict[type, object] = {}
        self.scratch_buffers = BufferPool()
        self._scratch: SharedScratch | None = None
        self.collective = collective
        self._initial_counts = channel.exchanges, collective.calls

    @contextmanager
    def operation(self, call: str) -> Iterator[None]:
        """Run one operation of the group, such as "save to /ck". Collective.

        Other ranks are notified when this one leaves, whatever the reason.
        """
        self.channel.enter(call)
        try:
            self._initial_counts = self.channel.exchanges, self.collective.calls
            yield
        finally:
            try:
                self.channel.leave()
            except (KeyboardInterrupt, SystemExit):  # `leave` may not have begun
                self.channel.leave()
                raise

    @property
    def exchanges(self) -> IoCount:
        """The exchanges of the operation so far, and the bytes that this rank has sent."""
        return self.channel.exchanges.since(self._initial_counts[0])

    @property
    def collective_calls(self) -> IoCount:
        """The bulk collectives of the operation so far, and the bytes that this rank has sent."""
        return self.collective.calls.since(self._initial_counts[1])

    def cache(self, kind: type[T]) -> T:
        """Return the session's cache of a type; it is created empty at its first use."""
        cache = self._caches.get(kind)
        if not isinstance(cache, kind):
            cache = self._caches[kind] = kind()
        return cache

    @contextmanager
    def shared_scratch(self, nbytes: int) -> Iterator[SharedScratch]:
        """Yield memory that a host's ranks share, of at least this size; reused, as new is slow."""
        memory, self._scratch = self._scratch, None
        if memory is None or memory.view.nbytes < nbytes:
            memory = SharedScratch(nbytes)
        yield memory
        # Not after an error: a call that hangs may still use it.
        self._scratch = memory

    def close(self) -> None:
        """Stop the heartbeat and close the connections."""
        self.channel.close()
        self.collective.close()
        self.scratch_buffers.clear()
        self._scratch = None
