"""Staging from CUDA devices beside the training: pinned arenas, and copies on streams of their own.

The copy of a device's memory into a pinned arena runs at the speed of the bus, and beside the
forward and backward of the next step. Weights change only when it is over: `AsyncSaver.fence`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dist_ckpt.host_memory import address_of

_log = logging.getLogger("dist_ckpt")


class SideStreams:
    """Streams that copy what some devices hold once all that was asked of these before is done."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = []
        for device in devices:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams.append(stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Copy on these streams, in the thread that is in the block. Threads may share them."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield


class Fence:
    """Keeps weights from changing while they are copied in a thread beside the training."""

    def __init__(self) -> None:
        self._copying: threading.Thread | None = None
        self._hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()

    def run(self, copy: Callable[[], None], optimizers: Iterable[Optimizer]) -> None:
        """Begin to copy; from now on these optimizers wait for the end of it before a step."""
        self.wait()
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                hook = optimizer.register_step_pre_hook(lambda *_: self.wait())
                self._hooks[optimizer] = hook
        self._copying = threading.Thread(target=copy, name="dist_ckpt staging", daemon=True)
        self._copying.start()

    def wait(self) -> None:
        """Return when nothing is copied any more. Any thread may wait."""
        if (copying := self._copying) is not None:
            copying.join()
            self._copying = None

    def close(self) -> None:
        """Wait, and let go of the optimizers."""
        self.wait()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


class PinnedMemory:
    """Memory that is locked for the devices, until `close`; this keeps it mapped."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = self._runtime.cudaHostRegister(address_of(view), view.nbytes, 0)
        self._is_pinned = int(code) == 0
        if not self._is_pinned:
            _log.warning(
                "%d bytes of shared memory cannot be pinned (CUDA error %d), so that staging takes "
                "longer: raise the limit of locked memory (ulimit -l)",
                *(view.nbytes, int(code)),
            )

    def close(self) -> None:
        """Unlock it. May be called again."""
        if self._is_pinned:
            self._is_pinned = False
            self._runtime.cudaHostUnregister(address_of(self.view))


class PinnedArenas:
    """The arenas of a rank, pinned: by their numbers, anew where one has other memory by now."""

    def __init__(self) -> None:
        self._pinned: dict[int, PinnedMemory] = {}

    def pin(self, number: int, view: memoryview) -> None:
        """Pin the memory of an arena."""
        known = self._pinned.get(number)
        if known is None or known.view.obj is not view.obj:
            if known is not None:
                known.close()
            self._pinned[number] = PinnedMemory(view)

    def close(self) -> None:
        """Unlock all."""
        for pinned in self._pinned.values():
            pinned.close()
        self._pinned.clear()
