"""A training process: it holds a state, trains, and saves in the background when it is told to."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import limits
from benchmarks.contenders import DistCkpt
from benchmarks.rank import StorageLocation
from benchmarks.savers import STEP, Kind, OurSaver, Pending, SaverInfo
from benchmarks.scenario import DifferentError
from benchmarks.workload import WIPED, Spec, Workload, example, make

# Of the text that the example trains on: samples a step, and bytes in each.
BATCH, LENGTH = 2, 64


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds from the call of save until it returned, until it had staged, until it had ended."""

    called_s: float
    staged_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of each step, which of them had a save under way, and how many saves ended."""

    seconds: tuple[float, ...]
    busy: tuple[bool, ...]
    num_saved: int


class Trainer:
    """The operations. `kinds` is the one way to save, or empty for a training without saves."""

    def __init__(self, place: StorageLocation, kinds: tuple[Kind, ...]) -> None:
        self._timeout_s = place.timeout_s
        self._kind = kinds[0] if kinds else None
        self._saver: SaverInfo | None = None
        self._workload = Workload({})
        self._num_samples = 0

    def make(self, spec: Spec, *, seed: int = 0) -> Workload:
        """Return a state."""
        return make(spec, seed=seed)

    def hold(self, spec: Spec) -> int:
        """Make a state; return how many bytes it has."""
        self._workload = self.make(spec)
        return self._workload.local_nbytes()

    def start(self, job: str) -> float:
        """Start the saver; return the seconds that it took."""
        assert self._kind is not None
        start = time.perf_counter()
        self._saver = self._kind.start(job)
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the saver, if there is one."""
        if self._saver is not None:
            self._saver.close()

    def save(self, folder: Path) -> Stall:
        """Save, and wait for the end of it."""
        assert self._saver is not None
        gc.collect()
        start = time.perf_counter()
        pending = self._saver.save(self._workload, folder)
        called = time.perf_counter()
        pending.wait_staged(self._timeout_s)
        staged = time.perf_counter()
        pending.result(self._timeout_s)
        return Stall(called - start, staged - start, time.perf_counter() - start)

    def check(self, spec: Spec, folder: Path) -> str | None:
        """Save, and overwrite the state once it is staged; load, and return what differs."""
        assert self._kind is not None
        assert self._saver is not None
        expected = self.make(spec, seed=1)
        expected.assign(self._workload)
        pending = self._saver.save(self._workload, folder)
        pending.wait_staged(self._timeout_s)
        self._workload.wipe()
        pending.result(self._timeout_s)
        self._kind.load(self._workload, folder)
        return self._workload.difference(expected)

    # --- steps -------------------------------------------------------------------------------

    def train(self, num_steps: int, save_every: int, folder: Path) -> Steps:
        """Train for some steps, and save after the first and after every so many more.

        A save that is due while another is under way is put off until that has ended, so that no
        step waits for storage. The last one is waited for, outside of all steps.
        """
        text = example().Text.of_standard_library(LENGTH, 0)
        folder.mkdir()
        seconds, busy = [], []
        pending: Pending | None = None
        is_due, num_saved = False, 0
        gc.collect()
        for number in range(num_steps):
            start = time.perf_counter()
            is_busy = pending is not None
            self._step(text)
            is_due = is_due or number % save_every == 0
            if pending is not None and pending.done():
                pending.result(self._timeout_s)
                pending, num_saved = None, num_saved + 1
            if self._saver is not None and is_due and pending is None:
                pending = self._saver.save(self._workload, folder / str(number))
                pending.wait_staged(self._timeout_s)
                is_busy, is_due = True, False
            seconds.append(time.perf_counter() - start)
            busy.append(is_busy)
        if pending is not None:
            pending.result(self._timeout_s)
        return Steps(tuple(seconds), tuple(busy), num_saved)

    def _step(self, text: Any) -> None:
        """Do what the loop of the example does."""
        model, optimizer = self._workload.model, self._workload.optimizer
        assert model is not None
        assert optimizer is not None
        inputs, targets = text.batch(self._num_samples, BATCH)
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        self._num_samples += BATCH

    # --- restarts ----------------------------------------------------------------------------

    def restore(self, spec: Spec) -> float:
        """Restore what the run before this one saved; return the seconds that it took."""
        saver = self._saver
        assert isinstance(saver, OurSaver)

        def run() -> None:
            if (step := saver.restore(self._workload)) != STEP:
                raise DifferentError(f"step {STEP} was saved, and {step} restored")

        return self._brought_back(run, spec)

    def save_plainly(self, folder: Path) -> None:
        """Save in the foreground, so that nothing of it is in shared memory."""
        DistCkpt().save(self._workload, folder)

    def load_cold(self, spec: Spec, folder: Path) -> float:
        """Load from the disk; return the seconds that it took."""
        limits.cool(folder)
        return self._brought_back(lambda: DistCkpt().load(self._workload, folder), spec)

    def _brought_back(self, run: Callable[[], object], spec: Spec) -> float:
        self._workload.wipe()
        gc.collect()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        if difference := self._workload.difference(self.make(spec)):
            raise DifferentError(f"came back different: {difference}")
        return seconds


class Copier:
    """The operations of the reference: copies of a state into memory that was touched before."""

    def __init__(self, place: StorageLocation, nothing: tuple[object, ...]) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def hold(self, spec: Spec) -> int:
        """Make a state and the memory that it is copied into; return how many bytes it has."""
        source, target = make(spec), make(spec, seed=1)
        held = zip(source.local_tensors(), target.local_tensors(), strict=True)
        self._pairs = [(mine, other) for (_, mine), (_, other) in held]
        return source.local_nbytes()

    def close(self) -> None:
        """Do nothing: it runs nothing."""

    def copy(self, way: str) -> float:
        """Copy; return the seconds that it took."""
        for _, target in self._pairs:
            target.view(torch.uint8).fill_(WIPED)
        with ThreadPoolExecutor(limits.MEMORY_THREADS) as pool:
            start = time.perf_counter()
            if way == MEMMOVES:
                list(pool.map(_move, self._pairs))
            else:
                for pair in self._pairs:
                    _WAYS[way](pair)
            seconds = time.perf_counter() - start
        if not all(torch.equal(_ints(mine), _ints(other)) for mine, other in self._pairs):
            raise DifferentError("the copy is different")
        return seconds


def _ints(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


def _assign(pair: tuple[Tensor, Tensor]) -> None:
    source, target = pair
    target.copy_(source)


def _move(pair: tuple[Tensor, Tensor]) -> None:
    source, target = pair
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


_WAYS = {"torch copy_": _assign, "memmove": _move}
MEMMOVES = f"memmove, {limits.MEMORY_THREADS} threads"
COPIES = (*_WAYS, MEMMOVES)
