"""Pinned host memory of a load: blocks are read into its buffers, and devices copy from there.

The copies run while the next blocks are read. A buffer is used again when its copies are complete.
"""

from __future__ import annotations

import logging
import mmap
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Protocol

import torch

from dist_ckpt.core.runtime.host_memory import allocate_scratch
from dist_ckpt.core.shard_io.memory.cell_memory import UNIT_NBYTES, Target
from dist_ckpt.core.shard_io.memory.cuda import CurrentStreams
from dist_ckpt.core.shard_io.memory.device_staging import Mark
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorTarget, bytes_of

_log = logging.getLogger("dist_ckpt")

# The limit of one load. With larger blocks, the host may have to wait for each copy.
MAX_PINNED_NBYTES = 512 << 20

# Buffers whose copies are not complete, besides those that the threads fill.
_NUM_SPARE = 2


class Pinned(Protocol):
    """Pinned memory. After an `error`, which is not 0, it is not pinned."""

    error: int

    def close(self) -> None:
        """Unpin the memory, which no copy may still use."""


class LoadDevices(Protocol):
    """The devices that a load fills. Its threads use the streams that are current in them."""

    @property
    def devices(self) -> Collection[torch.device]:
        """The devices."""

    def pin(self, memory: memoryview) -> Pinned:
        """Pin memory for all of these devices."""

    def queue(self, call: Callable[[], object]) -> None:
        """Make a call of torch that queues work of this thread."""

    def mark(self) -> Mark:
        """Return the point at which all work is complete that this thread has queued."""

    def synchronize(self) -> bool:
        """Wait for all work of all threads. Return False if a device does not answer."""


class PinnedBuffers:
    """Implements `DeviceBuffers` with pinned memory, made on demand. Thread-safe."""

    def __init__(self, devices: LoadDevices, num_buffers: int, buffer_nbytes: int) -> None:
        self._devices = devices
        self._buffer_nbytes = buffer_nbytes
        self._num_left = num_buffers
        self._free: deque[tuple[memoryview, Mark]] = deque()
        self._pinned: list[Pinned] = []
        self._is_refused = False
        self._lock = Lock()

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """Lend a buffer whose earlier copies are complete. There are more buffers than threads."""
        buffer, mark = self._take()
        try:
            if mark is not None:
                mark.wait()
            yield buffer
            self._free.append((buffer, self._devices.mark()))
        except BaseException:
            # A call that hangs may still use the buffer. Another one replaces it.
            with self._lock:
                self._num_left += 1
            raise

    def copy(self, target: Target, start: int, data: memoryview) -> bool:
        """See `DeviceBuffers.copy`."""
        if self._is_refused or not isinstance(target, TensorTarget):
            return False
        memory = target.device_memory(self._devices.devices)
        if memory is None:
            return False
        if data.nbytes:
            part = memory[start : start + data.nbytes]
            self._devices.queue(partial(part.copy_, bytes_of(data), non_blocking=True))
        return True

    def close(self) -> None:
        """Unpin all buffers when all copies are complete.

        If a device does not answer, they stay pinned: it may still read them.
        """
        if self._pinned and self._devices.synchronize():
            for pinned in self._pinned:
                pinned.close()

    def _take(self) -> tuple[memoryview, Mark | None]:
        with self._lock:
            if not self._num_left:
                return self._free.popleft()
            self._num_left -= 1
        buffer = allocate_scratch(self._buffer_nbytes)
        # A forked child would share the pages, and a later write could move them away from the
        # device. It does not need them.
        with suppress(OSError, AttributeError):
            buffer.obj.madvise(mmap.MADV_DONTFORK)  # type: ignore[attr-defined]
        self._pin(buffer)
        return buffer, None

    def _pin(self, buffer: memoryview) -> None:
        pinned = self._devices.pin(buffer)
        self._pinned.append(pinned)
        if pinned.error and not self._is_refused:
            self._is_refused = True
            _log.warning(
                "%d bytes of memory cannot be pinned (error %d of the device): this load waits for "
                "each copy to the device, which is slower. Allow the container and its runtime to "
                "lock memory (ulimit -l)",
                *(buffer.nbytes, pinned.error),
            )


def find_buffers(
    tensors: Sequence[torch.Tensor], *, threads: int, block_nbytes: int
) -> tuple[int, int] | None:
    """Return the number and the size of the buffers for a load into tensors; None for no buffers.

    Pinning takes 2 ms a buffer, so a small load has none.
    """
    buffer_nbytes = max(UNIT_NBYTES, block_nbytes)
    num_buffers = threads + _NUM_SPARE
    is_small = sum(tensor.nbytes for tensor in tensors) < UNIT_NBYTES
    if is_small or num_buffers * buffer_nbytes > MAX_PINNED_NBYTES:
        return None
    return num_buffers, buffer_nbytes


@contextmanager
def open_buffers(
    tensors: Sequence[torch.Tensor], *, threads: int, block_nbytes: int
) -> Iterator[PinnedBuffers | None]:
    """Yield the buffers for a load into tensors on devices, or None. Wait for all copies then."""
    on_cuda = [tensor for tensor in tensors if tensor.is_cuda]
    found = find_buffers(on_cuda, threads=threads, block_nbytes=block_nbytes)
    if found is None:
        yield None
        return
    buffers = PinnedBuffers(CurrentStreams(frozenset(tensor.device for tensor in on_cuda)), *found)
    try:
        yield buffers
    finally:
        buffers.close()
