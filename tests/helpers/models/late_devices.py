"""Devices of a load that copy as late as they may, and not in the order of the calls."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from dist_ckpt.core.format.geometry import Cell
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorTarget

CPU = torch.device("cpu")


class DeviceTarget(TensorTarget):
    """A `Target` whose tensor counts as on a device: the host cannot write its memory."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor, cell: Cell) -> None:
        super().__init__(tensor, cell)
        self.tensor = tensor

    @property
    def data(self) -> bytes:
        return self.tensor.numpy().tobytes()

    def memory(self) -> None:
        return None


@dataclass
class PinnedPart:
    memory: memoryview
    error: int
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True


@dataclass
class LateMark:
    """The calls that one thread had queued. `wait` makes them."""

    calls: list[Callable[[], object]]
    shuffle: Callable[[list[Callable[[], object]]], None]

    def wait(self) -> None:
        self.shuffle(self.calls)
        while self.calls:
            self.calls.pop()()

    def hold(self) -> None:
        raise AssertionError("a load holds no stream")


@dataclass
class LateDevices:
    """Implements `LoadDevices` with tensors of the host. No call is made before someone waits."""

    error: int = 0
    answers: bool = True
    devices: Collection[torch.device] = frozenset((CPU,))
    pinned: list[PinnedPart] = field(default_factory=list)
    marks: list[LateMark] = field(default_factory=list)
    num_calls: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _queued: threading.local = field(default_factory=threading.local)

    def pin(self, memory: memoryview) -> PinnedPart:
        memory[:] = b"\xee" * len(memory)
        self.pinned.append(PinnedPart(memory, self.error))
        return self.pinned[-1]

    def queue(self, call: Callable[[], object]) -> None:
        self.num_calls += 1
        self._queued.calls = [*getattr(self._queued, "calls", []), call]

    def mark(self) -> LateMark:
        self.marks.append(LateMark(getattr(self._queued, "calls", []), self._random.shuffle))
        self._queued.calls = []
        return self.marks[-1]

    def synchronize(self) -> bool:
        for mark in self.marks if self.answers else ():
            mark.wait()
        return self.answers
