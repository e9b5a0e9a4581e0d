"""One rank's side: a process that holds states, and saves and loads them when it is told to."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import limits
from benchmarks.contenders import Contender
from benchmarks.limits import Limits, RankView
from benchmarks.workload import Spec, Workload, make


@dataclass(frozen=True, slots=True)
class Sample:
    """What one rank measured once.

    `fetched_nbytes` came from the device; `extra_nbytes` is the memory that the process had at
    most, over what it had before. `difference` names what did not come back as it was.
    """

    seconds: float
    fetched_nbytes: int = 0
    extra_nbytes: int = 0
    difference: str | None = None


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """Where a rank is: which one, of how many, where they meet and where it may print."""

    rank: int
    world_size: int
    store: str
    log: str
    timeout_s: float


Operations = Callable[[StorageLocation, tuple[Any, ...]], object]


def serve(
    operations: Operations, place: StorageLocation, contenders: Sequence[object], pipe: Connection
) -> None:
    """Answer calls of methods of `operations(place, contenders)` until the pipe is closed.

    The main function of a process. An answer is (True, what was returned) or (False, what was
    raised, in words).
    """
    _set_up_process(place)
    rank = operations(place, tuple(contenders))
    while True:
        try:
            method, args, options = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(rank, method)(*args, **options))
        except Exception as error:  # noqa: BLE001  (a process's outer edge)
            traceback.print_exc()
            answer = (False, f"{type(error).__name__}: {error}")
        pipe.send(answer)


def _set_up_process(place: StorageLocation) -> None:
    # A group of its own: whatever it starts is ended with it.
    os.setpgid(0, 0)
    # An interrupt at the keyboard is for the parent; when it ends, so does the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if place.world_size > 1:
        torch.set_num_threads(1)  # as torchrun has it
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(place.store, place.world_size),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=place.timeout_s),
        )


class Rank:
    """The operations. Those that take a folder are collective: every rank of the pool runs them."""

    def __init__(self, place: StorageLocation, contenders: tuple[Contender, ...]) -> None:
        self._place = place
        self._contenders = {contender.name: contender for contender in contenders}
        self._states: dict[Spec, tuple[Workload, Workload]] = {}
        self._limits = Limits()

    def hold(self, spec: Spec) -> int:
        """Make a state and another to load into; return how many bytes it has over all ranks."""
        source, _ = self._held(spec)
        is_cut = spec.placement in ("row", "column")
        return source.local_nbytes() * (self._place.world_size if is_cut else 1)

    def forget(self) -> None:
        """Release all states and buffers."""
        self._states.clear()
        self._limits = Limits()

    def save(self, name: str, spec: Spec, folder: Path) -> Sample:
        """Let a contender save; a save that is not durable by itself is synced, by rank 0."""
        contender, (source, _) = self._contenders[name], self._held(spec)

        def run() -> None:
            contender.save(source, folder)
            if not contender.syncs:
                self._barrier()
                if self._place.rank == 0:
                    limits.sync_tree(folder)

        return self._timed(run)

    def load(self, name: str, spec: Spec, folder: Path, *, cold: bool) -> Sample:
        """Let a contender load into wiped tensors, and compare what is in them then."""
        contender, (source, target) = self._contenders[name], self._held(spec)
        target.wipe()
        self._set_cache(folder, cold=cold)
        sample = self._timed(lambda: contender.load(target, folder))
        return _judged(sample, target.difference(source))

    def limit(self, name: str, spec: Spec, folder: Path, *, cold: bool) -> Sample:
        """Do what the hardware can do with as many bytes."""
        run = self._limit(name, spec, folder, cold=cold)
        if name == "write":
            return self._timed(run)
        self._set_cache(folder, cold=cold)
        return _judged(self._timed(run), self._limits.difference())

    def _limit(self, name: str, spec: Spec, folder: Path, *, cold: bool) -> Callable[[], None]:
        place, (source, _) = self._place, self._held(spec)
        everything, nbytes = spec.placement == "replicated", source.local_nbytes()
        if everything and name == "write":
            nbytes = -(-nbytes // place.world_size)
        share = RankView(place.rank, place.world_size, nbytes, everything)
        if name == "write":
            return self._limits.write(share, folder)
        if name == "copy":
            return self._limits.copy(share)
        threads = limits.DISK_THREADS if cold else limits.MEMORY_THREADS
        return self._limits.read(share, folder, direct=name == "direct read", threads=threads)

    def _held(self, spec: Spec) -> tuple[Workload, Workload]:
        if spec not in self._states:
            self._states[spec] = make(spec), make(spec, seed=1)
        return self._states[spec]

    def _set_cache(self, folder: Path, *, cold: bool) -> None:
        gc.collect()  # a file that is still mapped stays in the cache
        self._barrier()
        if self._place.rank == 0:
            (limits.cool if cold else limits.warm)(folder)

    def _timed(self, run: Callable[[], None]) -> Sample:
        gc.collect()
        self._barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before_nbytes, fetched_nbytes = _status_nbytes("VmRSS"), _fetched_nbytes()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        extra_nbytes = _status_nbytes("VmHWM") - before_nbytes
        return Sample(seconds, _fetched_nbytes() - fetched_nbytes, max(0, extra_nbytes))

    def _barrier(self) -> None:
        if self._place.world_size > 1:
            dist.barrier()


def _judged(sample: Sample, difference: str | None) -> Sample:
    return Sample(sample.seconds, sample.fetched_nbytes, sample.extra_nbytes, difference)


def _status_nbytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0


def _fetched_nbytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0
