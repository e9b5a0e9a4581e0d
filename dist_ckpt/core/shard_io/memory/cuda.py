"""Stage from CUDA devices in parallel to training: pinned arenas, and copies on side streams.

`device_staging.py` queues the copies. A thread waits for them, and makes no other CUDA calls. If a
device has no room for a copy of its tensors, those that only the optimizers of the state change
(`LocalState.changed_in_steps`) are copied during the next forward and backward pass. Then the next
optimizer step waits on the device (`Fence`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dist_ckpt.core.runtime.host_memory import address_of
from dist_ckpt.core.runtime.processes import running_time
from dist_ckpt.core.runtime.threads import POLL_S, DaemonThreads, has_outcome
from dist_ckpt.core.shard_io.memory.cell_memory import CellReader
from dist_ckpt.core.shard_io.memory.device_staging import PIN_NBYTES, Mark
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorReader
from dist_ckpt.errors import CheckpointError

_log = logging.getLogger("dist_ckpt")

# A copy waits for all work queued before it on the device. A longer wait means a hang.
COPY_TIMEOUT_S = 1800.0

# The memory is pinned for all devices of the process (cudaHostRegisterPortable).
_PORTABLE = 1

# Longer than a piece takes, 4 ms, so that training continues between two.
_PAUSE_S = 0.02

T = TypeVar("T")
Stream = torch.cuda.Stream
Event = torch.cuda.Event


def check_no_capture() -> None:
    """Raise ValueError during the capture of a CUDA graph: copies would be captured, not run."""
    has_begun: Callable[[], bool] = torch.cuda.is_initialized
    if has_begun() and torch.cuda.is_current_stream_capturing():
        raise ValueError("a CUDA graph is being captured: save after the capture")


class StreamMark:
    """A point in the work of some streams. Thread-safe."""

    def __init__(self, streams: Mapping[torch.device, Stream]) -> None:
        # The wait for a blocking event sleeps. The wait for another event keeps a core busy.
        self._events = {
            device: stream.record_event(Event(blocking=True)) for device, stream in streams.items()
        }

    def wait(self) -> None:
        """Wait until the streams reach the mark. Raises the errors of the devices."""
        for device, event in self._events.items():
            # A new thread uses device 0: without this block, the wait would take memory there.
            with torch.cuda.device(device):
                event.synchronize()

    def hold(self) -> None:
        """Make the current streams of these devices wait for the mark. The host does not wait."""
        if torch.cuda.is_current_stream_capturing():
            return  # nothing runs now: the code that replays the graph has to wait
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)


@dataclass(frozen=True, slots=True, eq=False)
class SideStreamCopies:
    """Copies on side streams, which begin after the work that training has queued."""

    _training: Mapping[torch.device, Stream]
    _own: Mapping[torch.device, Stream]
    _buffers: Mapping[torch.device, BufferMemory]

    def can_copy(self, reader: CellReader) -> TypeGuard[TensorReader]:
        """Return True if a reader is on these devices. The host has to copy other readers."""
        return isinstance(reader, TensorReader) and reader.device in self._own

    def room(self) -> Mapping[torch.device, int]:
        """See `DeviceCopies.room`."""
        return {device: memory.room() for device, memory in self._buffers.items()}

    def allocate(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """See `DeviceCopies.allocate`. Free memory stays with the stream, until torch needs it."""
        return self._buffers[device].allocate(nbytes)

    def queue(self, call: Callable[[], object]) -> None:
        """See `DeviceCopies.queue`."""
        call()

    def mark(self) -> StreamMark:
        """See `DeviceCopies.mark`."""
        return StreamMark(self._own)

    def hold_training(self) -> None:
        """See `DeviceCopies.hold_training`."""
        for device, stream in self._training.items():
            stream.wait_stream(self._own[device])


# The share of a device's memory that no buffer takes: training may need more than it ever did.
_MARGIN = 0.05


def compute_room(*, free: int, total: int, reserved: int, peak: int, cached: int) -> int:
    """Return how many bytes a buffer may have on a device.

    Training may need its `peak` again. `cached` bytes are those of an earlier buffer, which torch
    has not returned to the device.
    """
    return max(free - (peak - reserved) - int(total * _MARGIN), cached, 0)


class BufferMemory:
    """The memory of one device for buffers.

    torch's allocator keeps the last buffer for the stream, and returns it to the device before
    it raises an error for lack of memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cached, self._num_freed = 0, -1

    def room(self) -> int:
        """Return how many bytes the next buffer may have."""
        free, total = torch.cuda.mem_get_info(self._device)
        stats = torch.cuda.memory_stats(self._device)
        is_cached = stats.get("num_device_free", -2) == self._num_freed
        return compute_room(
            free=free,
            total=total,
            reserved=stats.get("reserved_bytes.all.current", 0),
            peak=stats.get("reserved_bytes.all.peak", 0),
            cached=self._cached if is_cached else 0,
        )

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of bytes for the current stream."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        num_freed = torch.cuda.memory_stats(self._device).get("num_device_free", -1)
        if num_freed != self._num_freed:
            self._cached = 0
        self._cached, self._num_freed = max(self._cached, nbytes), num_freed
        return buffer


class SideStreams:
    """One stream for copies on each device, created once.

    torch has 32 streams for each device and reuses them: new streams would soon be shared with
    other code. Memory that torch allocates for a copy also stays with the stream.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Stream] = {}
        self._buffers: dict[torch.device, BufferMemory] = {}

    @contextmanager
    def copies(self, devices: Iterable[torch.device]) -> Iterator[SideStreamCopies]:
        """Yield copies that run in parallel to training. Call `check_no_capture` first."""
        training, own = {}, {}
        with ExitStack() as stack:
            for device in devices:
                training[device] = torch.cuda.current_stream(device)
                if device not in self._streams:
                    self._streams[device] = Stream(device)
                    self._buffers[device] = BufferMemory(device)
                own[device] = self._streams[device]
                own[device].wait_stream(training[device])
                stack.enter_context(torch.cuda.stream(own[device]))
            try:
                yield SideStreamCopies(training, own, self._buffers)
            except BaseException:
                for stream in own.values():
                    stream.synchronize()
                raise


class Fence:
    """Keeps weights unchanged while they are copied in parallel to training."""

    def __init__(self) -> None:
        self._end: Mark | None = None
        self._thread: threading.Thread | None = None
        self._hook: RemovableHandle | None = None

    def run(self, end: Mark | None, follow: Callable[[], None]) -> None:
        """Forbid changes before `end`. A thread runs `follow`, which returns when all is staged.

        From now on every optimizer waits before its step. Optimizers outside of the state change
        weights too, and some of them step during the backward pass.
        """
        self.wait_until_staged()
        if end is not None and self._hook is None:
            # A compiler that traces a step would store the events of one save in its code.
            wait = torch.compiler.disable(self.wait)
            self._hook = register_optimizer_step_pre_hook(
                lambda *_: wait() if self._end is not None else None
            )
        self._end = end
        self._thread = threading.Thread(
            target=self._run_thread, args=(follow,), name="dist_ckpt staging", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # out of threads: this one could not be joined
            self._end = self._thread = None
            raise

    def wait(self) -> None:
        """Make later work on the current streams wait for the copies. The host does not wait."""
        if (end := self._end) is not None:  # the thread may clear it meanwhile
            end.hold()

    def wait_until_staged(self) -> None:
        """Return when all is staged. CheckpointError if a device hangs."""
        thread = self._thread
        # A dropped job may end in the staging thread itself: then all is staged.
        if thread is not None and thread is not threading.current_thread():
            until = running_time() + COPY_TIMEOUT_S
            while thread.is_alive() and running_time() < until:
                thread.join(POLL_S)
            if thread.is_alive():
                raise CheckpointError(
                    f"the devices have not copied the previous save for {COPY_TIMEOUT_S:g} s: look "
                    "for the cause, such as a collective that a rank has not entered"
                )
            self._thread = None

    def close(self) -> None:
        """Return when all is staged, and remove the optimizer hook.

        Do not call this in a finalizer: it could remove the hook while a step runs the hooks.
        """
        try:
            self.wait_until_staged()
        finally:
            if self._hook is not None:
                self._hook.remove()
                self._hook = None

    def _run_thread(self, follow: Callable[[], None]) -> None:
        try:
            follow()
        finally:
            self._end = None


class PinnedMemory:
    """Memory that is pinned for the devices until `close`, in pieces. This object keeps it mapped.

    `error` is the error code of CUDA, or 0. After an error nothing is pinned. Until `hurry` is set,
    there is a pause after each piece: training can launch no work while one is pinned.
    """

    def __init__(
        self, view: memoryview, device: torch.device, hurry: threading.Event | None = None
    ) -> None:
        self.view = view
        self._device = device
        self._hurry = hurry
        self._runtime = torch.cuda.cudart()
        self._addresses: list[int] = []
        self.error = _call_in_new_thread(device, self._register)
        if self.error:
            self.close()

    def _register(self) -> int:
        first, nbytes = address_of(self.view), self.view.nbytes
        for start in range(0, nbytes, PIN_NBYTES):
            address, size = first + start, min(PIN_NBYTES, nbytes - start)
            if error := int(self._runtime.cudaHostRegister(address, size, _PORTABLE)):
                return error
            self._addresses.append(address)
            if self._hurry is not None:
                self._hurry.wait(_PAUSE_S)
        return 0

    def _unregister(self) -> None:
        while self._addresses:
            self._runtime.cudaHostUnregister(self._addresses.pop())

    def close(self) -> None:
        """Unpin the memory, which no copy may still use. May be called again."""
        if self._addresses:
            # Python starts no threads at exit. After a hang the memory stays pinned.
            with suppress(RuntimeError, CheckpointError):
                _call_in_new_thread(self._device, self._unregister)


@dataclass(frozen=True, slots=True)
class CurrentStreams:
    """The devices of a load (`LoadDevices`): each thread uses its current streams."""

    devices: frozenset[torch.device]

    def pin(self, memory: memoryview) -> PinnedMemory:
        """See `LoadDevices.pin`."""
        return PinnedMemory(memory, next(iter(self.devices)))

    def queue(self, call: Callable[[], object]) -> None:
        """See `LoadDevices.queue`."""
        call()

    def mark(self) -> StreamMark:
        """See `LoadDevices.mark`."""
        return StreamMark({device: torch.cuda.current_stream(device) for device in self.devices})

    def synchronize(self) -> bool:
        """See `LoadDevices.synchronize`."""
        try:
            for device in self.devices:
                _call_in_new_thread(device, torch.cuda.synchronize)
        except (CheckpointError, RuntimeError):
            return False
        return True


class PinnedArenas:
    """The pinned arenas of a rank, by number."""

    def __init__(self) -> None:
        self._pinned: dict[int, PinnedMemory] = {}
        self._has_warned = False

    def pin(
        self,
        number: int,
        view: memoryview,
        device: torch.device,
        hurry: threading.Event | None = None,
    ) -> None:
        """Pin the memory of an arena if it is new. If that fails, it stays unpinned: warn once.

        `hurry`: see `PinnedMemory`.
        """
        pinned = self._pinned.get(number)
        if pinned is None or pinned.view.obj is not view.obj:
            if pinned is not None:
                pinned.close()
            self._pinned[number] = PinnedMemory(view, device, hurry)
            error = self._pinned[number].error
            if error and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%d bytes of shared memory cannot be pinned (CUDA error %d): saves wait for "
                    "their copy from the devices, which is slower, too. Allow the container and "
                    "its runtime to lock memory (ulimit -l)",
                    *(view.nbytes, error),
                )

    def release(self, number: int, nbytes: int) -> None:
        """Unpin an arena of fewer than `nbytes`: its memory may be replaced."""
        pinned = self._pinned.get(number)
        if pinned is not None and pinned.view.nbytes < nbytes:
            pinned.close()
            del self._pinned[number]

    def close(self) -> None:
        """Unpin all arenas."""
        for pinned in self._pinned.values():
            pinned.close()
        self._pinned.clear()


def _call_in_new_thread(device: torch.device, call: Callable[[], T]) -> T:
    """Return the result of a CUDA call in a new thread. CheckpointError if it hangs.

    The next kernel of a thread raises the thread's earlier CUDA error, and torch cannot clear that
    error. So the call gets a thread that ends.
    """

    def on_device() -> T:
        with torch.cuda.device(device):
            return call()

    threads = DaemonThreads(1)
    try:
        answer = threads.submit(on_device)
        if not has_outcome(answer, COPY_TIMEOUT_S):
            raise CheckpointError(
                f"{device} has not answered for {COPY_TIMEOUT_S:g} s: look for the cause of "
                "the hang"
            )
        return answer.result(timeout=0)
    finally:
        threads.close()
