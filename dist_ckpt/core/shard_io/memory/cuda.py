"""Staging from CUDA devices beside the training: pinned arenas, and copies on streams of their own.

All is asked of the devices within the call of save, in the order of the files; the host goes on.
What anything may change is copied first, and the training's streams wait for that
(`hold_training`). What only the state's optimizers change (`LocalState.changed_in_steps`) is copied
last, beside the forward and backward of the next step, and no step begins on the device before it
is: `Fence`. A thread sees how far the copies have come, and calls nothing of CUDA but that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dist_ckpt.core.runtime.buffers import address_of
from dist_ckpt.core.runtime.threads import DaemonThreads
from dist_ckpt.core.shard_io.memory.protocol import CellSource
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorSource
from dist_ckpt.errors import CheckpointError

_log = logging.getLogger("dist_ckpt")

# A copy waits for all that was asked of the device before. What takes longer than this hangs.
COPY_TIMEOUT_S = 1800.0

# The memory is pinned for all devices of the process (cudaHostRegisterPortable).
_PORTABLE = 1

T = TypeVar("T")
Stream = torch.cuda.Stream
Event = torch.cuda.Event


def check_no_capture() -> None:
    """Raise ValueError while a CUDA graph is captured here: nothing would be copied now."""
    has_begun: Callable[[], bool] = torch.cuda.is_initialized
    if has_begun() and torch.cuda.is_current_stream_capturing():
        raise ValueError("a CUDA graph is captured here: save when that is over")


class StreamMark:
    """A moment in what some streams do. Threads may share it."""

    def __init__(self, streams: Mapping[torch.device, Stream]) -> None:
        # One that blocks sleeps until it is reached; others keep a core busy.
        self._events = {
            device: stream.record_event(Event(blocking=True)) for device, stream in streams.items()
        }

    def reached(self) -> None:
        """Return when the streams have come so far. Raises what the device has failed of."""
        for device, event in self._events.items():
            # A new thread is on device 0: to wait there would take memory of it for this process.
            with torch.cuda.device(device):
                event.synchronize()

    def hold(self) -> None:
        """Have the current streams of these devices go on only then. The host goes on at once."""
        if torch.cuda.is_current_stream_capturing():
            return  # nothing is done now; who replays the graph has to fence it
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)


class SideStreamCopies:
    """Copies on streams of their own, which begin when the training's have come as far as now."""

    def __init__(
        self, training: Mapping[torch.device, Stream], own: Mapping[torch.device, Stream]
    ) -> None:
        self._training = training
        self._own = own

    def takes(self, source: CellSource) -> bool:
        """Say whether these devices have it; what they have not is the host's to copy."""
        return isinstance(source, TensorSource) and source.device in self._own

    def send(self, source: CellSource, start: int, stop: int, memory: memoryview) -> None:
        """Have its bytes `start` to `stop` copied; both stay until a later mark is reached."""
        assert isinstance(source, TensorSource)
        source.send(start, stop, memory)

    def mark(self) -> StreamMark:
        """Return the moment at which all that was sent until now is copied."""
        return StreamMark(self._own)

    def hold_training(self) -> None:
        """Have the training's streams go on only then. The host goes on at once."""
        for device, stream in self._training.items():
            stream.wait_stream(self._own[device])


class SideStreams:
    """A stream of each device for our copies.

    They are kept: torch has 32 of a device, and hands them out again and again, so that new ones
    would soon be those on which others communicate. Memory that torch takes for a copy stays with
    the stream, too.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Stream] = {}

    @contextmanager
    def beside(self, devices: Iterable[torch.device]) -> Iterator[SideStreamCopies]:
        """Copy beside the training in the block. If that fails, nothing is copied any more after.

        No graph is captured here: see `check_no_capture`.
        """
        training, own = {}, {}
        with ExitStack() as stack:
            for device in devices:
                training[device] = torch.cuda.current_stream(device)
                if device not in self._streams:
                    self._streams[device] = Stream(device)
                own[device] = self._streams[device]
                own[device].wait_stream(training[device])
                stack.enter_context(torch.cuda.stream(own[device]))
            try:
                yield SideStreamCopies(training, own)
            except BaseException:
                for stream in own.values():
                    stream.synchronize()
                raise


class Fence:
    """Keeps weights from changing while they are copied beside the training."""

    def __init__(self) -> None:
        self._end: StreamMark | None = None
        self._following: threading.Thread | None = None
        self._hook: RemovableHandle | None = None

    def run(self, end: StreamMark, follow: Callable[[], None]) -> None:
        """Let nothing change before `end`; `follow`, in a thread, returns when all is staged.

        From the first call on every optimizer waits before its step, whoever made it: those that
        are not in the state, and those that step within the backward, change weights as well.
        """
        self.join()
        if self._hook is None:
            # A compiler that looks into a step would keep the events of one save in its code.
            hold = torch.compiler.disable(self._hold)
            self._hook = register_optimizer_step_pre_hook(
                lambda *_: hold() if self._end is not None else None
            )
        self._end = end
        self._following = threading.Thread(
            target=self._follow, args=(follow,), name="dist_ckpt staging", daemon=True
        )
        try:
            self._following.start()
        except RuntimeError:  # the system starts no more threads; nobody could join this one
            self._end = self._following = None
            raise

    def wait(self) -> None:
        """Have what is asked of the devices from now on begin when all is copied.

        That is said of the current streams of this thread; the host goes on at once.
        """
        if self._end is not None:
            self._hold()

    def join(self) -> None:
        """Return when all is staged. CheckpointError if that takes so long that a device hangs."""
        following = self._following
        # In that thread itself a job may end that was dropped meanwhile: all is staged then.
        if following is not None and following is not threading.current_thread():
            following.join(COPY_TIMEOUT_S)
            if following.is_alive():
                raise CheckpointError(
                    f"the devices have not copied the save before this one for {COPY_TIMEOUT_S:g} "
                    "s: look for the cause, such as a collective that a rank has not entered"
                )
            self._following = None

    def close(self) -> None:
        """Return when all is staged, and let go of the optimizers.

        Not for a finalizer: garbage may be collected while a step goes through the hooks, and none
        may be removed then. After `join` the hook does nothing.
        """
        try:
            self.join()
        finally:
            if self._hook is not None:
                self._hook.remove()
                self._hook = None

    def _hold(self) -> None:
        if (end := self._end) is not None:  # a thread may have seen the end meanwhile
            end.hold()

    def _follow(self, follow: Callable[[], None]) -> None:
        try:
            follow()
        finally:
            self._end = None


class PinnedMemory:
    """Memory that is locked for the devices, until `close`; this keeps it mapped."""

    def __init__(self, view: memoryview, device: torch.device) -> None:
        self.view = view
        self._device = device
        self._runtime = torch.cuda.cudart()
        address, nbytes = address_of(view), view.nbytes
        # That of CUDA, 0 if it is pinned.
        self.error = int(
            _apart(device, lambda: self._runtime.cudaHostRegister(address, nbytes, _PORTABLE))
        )

    def close(self) -> None:
        """Unlock it. May be called again; nothing is copied into it any more."""
        if self.error == 0:
            self.error = -1
            # No thread is started any more while python ends; what hangs keeps its memory.
            with suppress(RuntimeError, CheckpointError):
                address = address_of(self.view)
                _apart(self._device, lambda: self._runtime.cudaHostUnregister(address))


class PinnedArenas:
    """The arenas of a rank, pinned: by their numbers, anew where one has other memory by now."""

    def __init__(self) -> None:
        self._pinned: dict[int, PinnedMemory] = {}
        self._has_warned = False

    def pin(self, number: int, view: memoryview, device: torch.device) -> None:
        """Pin the memory of an arena; where that fails it is used as it is, and said once."""
        known = self._pinned.get(number)
        if known is None or known.view.obj is not view.obj:
            if known is not None:
                known.close()
            self._pinned[number] = PinnedMemory(view, device)
            self._warn(self._pinned[number])

    def release(self, number: int, nbytes: int) -> None:
        """Let go of an arena that is smaller than this: its memory may be replaced."""
        known = self._pinned.get(number)
        if known is not None and known.view.nbytes < nbytes:
            known.close()
            del self._pinned[number]

    def close(self) -> None:
        """Unlock all."""
        for pinned in self._pinned.values():
            pinned.close()
        self._pinned.clear()

    def _warn(self, pinned: PinnedMemory) -> None:
        if pinned.error and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%d bytes of shared memory cannot be pinned (CUDA error %d): saves wait for their "
                "copy from the devices, which is slower, too. Let the container and its runtime "
                "allow memory to be locked (ulimit -l)",
                *(pinned.view.nbytes, pinned.error),
            )


def _apart(device: torch.device, call: Callable[[], T]) -> T:
    """Return what a call of CUDA returns that is made in a thread of its own.

    CheckpointError if it hangs.

    CUDA keeps an error for the thread that has met it, and the next kernel that the thread launches
    raises it. torch has no call that takes it back, but here the thread ends.
    """

    def on_device() -> T:
        with torch.cuda.device(device):
            return call()

    threads = DaemonThreads(1)
    try:
        return threads.submit(on_device).result(COPY_TIMEOUT_S)
    except TimeoutError:
        raise CheckpointError(
            f"{device} has not answered for {COPY_TIMEOUT_S:g} s: look for what it hangs in"
        ) from None
    finally:
        threads.close()
