"""The reports of saves and loads, and what they measure: phases, counts and progress.

Units: seconds, bytes, and GB/s with 1e9 bytes to the GB. `seconds` has the seconds of each phase on
this rank; their sum is the time of the `dc.save` or `dc.load`. `exchanges` and `collectives` count
calls, and the bytes that this rank sent. `storage_reads` and `storage_writes` count all files, also
headers, objects files and the index.

In a background save, the writer makes the report, and the trainer adds its own phases. The time
between these phases does not count. A rate divides the bytes of all ranks by the seconds of the
call, or of the slowest rank. A rate is 0.0 if nothing was measured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from dist_ckpt.message_text import format_count, format_size


@dataclass(frozen=True, slots=True)
class IoCount:
    """The number of calls of one kind on this rank, and their bytes."""

    num: int = 0
    nbytes: int = 0

    def plus(self, nbytes: int) -> IoCount:
        """Return this count with one more call."""
        return IoCount(self.num + 1, self.nbytes + nbytes)

    def plus_all(self, more: IoCount) -> IoCount:
        """Return the sum of two counts."""
        return IoCount(self.num + more.num, self.nbytes + more.nbytes)

    def since(self, earlier: IoCount) -> IoCount:
        """Return the difference between this count and an earlier one."""
        return IoCount(self.num - earlier.num, self.nbytes - earlier.nbytes)


def find_slowest(seconds: Sequence[float]) -> tuple[int, float]:
    """Return the slowest rank and its seconds."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return rank, seconds[rank]


# Called with (bytes done, total bytes), from the thread that made the call.
Progress = Callable[[int, int], None]


class CopyProgress:
    """Report the progress of a copy or of reads. Thread-safe. Links are not counted."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done, self._lock = 0, Lock()

    def __call__(self, nbytes: int) -> None:
        """Count bytes, and report the progress."""
        with self._lock:
            self._done = min(self._done + nbytes, self._total)
            if self._progress is not None:
                self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The report of a save.

    `nbytes` and `num_files` count all ranks. `slowest_rank` took longest to write its files and
    make them durable: `slowest_s` seconds. `nbytes_receipt` is the size of this rank's receipt,
    which grows with the number of files. It is a part of the bytes of `exchanges`, and 0 on the
    coordinator. `num_linked` files with `nbytes_linked` bytes were linked from an older checkpoint,
    not written. Of `num_sampled` replicas on this rank only a sample was compared with the copies
    of other ranks: see `check_replicas` of `dc.save`. `num_unchecked` tensors of an import had no
    checksum in its source. `replicas` has the names whose copies on several ranks were stored by a
    rule, with the rule: see `replicas` of `dc.save`.
    """

    path: str
    step: int | None
    attempt: str
    world_size: int
    nbytes: int
    num_tensors: int
    num_files: int
    seconds: Mapping[str, float]
    slowest_rank: int
    slowest_s: float
    exchanges: IoCount
    collectives: IoCount
    nbytes_receipt: int
    storage_reads: IoCount
    storage_writes: IoCount
    num_linked: int = 0
    nbytes_linked: int = 0
    num_unchecked: int = 0
    num_sampled: int = 0
    replicas: Mapping[str, str] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """The seconds of the call on this rank."""
        return sum(self.seconds.values())

    @property
    def gb_per_s(self) -> float:
        """The stored bytes of all ranks, divided by the seconds of the call."""
        return _rate(self.nbytes, self.total_s) / 1e9

    @property
    def write_gb_per_s(self) -> float:
        """The stored bytes of all ranks, divided by the write time of the slowest rank."""
        return _rate(self.nbytes, self.slowest_s) / 1e9

    def __str__(self) -> str:
        return (
            f"saved {_label(self.path, self.step)}: {format_size(self.nbytes)} by "
            f"{format_count(self.world_size, 'rank')} in {self.total_s:.3g} s "
            f"({format_size(_rate(self.nbytes, self.total_s))}/s; "
            f"write {self.slowest_s:.3g} s{_slowest(self.world_size, self.slowest_rank)}"
            f"{f'; {format_size(self.nbytes_linked)} linked' if self.num_linked else ''}"
            f"{f'; {self.num_sampled} replicas sampled' if self.num_sampled else ''}"
            f"{f'; {len(self.replicas)} names by a rule of replicas=' if self.replicas else ''})"
        )


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A checkpoint that a load has read, and the names that were filled from it on this rank."""

    path: str
    step: int | None
    attempt: str
    restored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The report of a load, on this rank.

    `restored` has the names that were filled, `resharded` those of them that were saved in another
    layout. `missing` names are not in the checkpoint. No rank requested the `unexpected` names.
    `dropped` names were left out by `on_reshard`, or by a `rename` to None. They include optimizer
    state that was removed because its parameter had no state when it was saved.

    `nbytes_read` counts shard data that this rank read, `nbytes_received` data from other ranks,
    `nbytes_placed` data in the tensors of this rank. `job_nbytes_read` and `job_nbytes_placed`
    count all ranks. `nbytes_from_memory` counts bytes that background saves had left in the memory
    of this host, `storage_reads` all other reads. Both include headers and objects files.
    `slowest_rank` took longest to read, check and fill its tensors: `slowest_s` seconds.

    `dequantized` names are 8-bit weights that were multiplied by their scales: see `dequantize` of
    `dc.load`. `sources` lists the checkpoints; `path`, `step` and `attempt` are those of the first.
    `as_saved` is True if no rename has changed saved names, and nothing was dequantized. After a
    load that left something out, pass the report to `dc.save(carry_over=...)` to keep it. `assumed`
    has a text for each assumption, such as the order of a fused tensor stored without
    pieces, or keys that DCP made text. `resized` has a text for each resized tensor: which rows are
    loaded, cut or kept. `unfilled` names the tensors of loaded modules that are in no state dict
    and still on the meta device, such as buffers with `persistent=False`.
    """

    path: str
    step: int | None
    attempt: str
    world_size: int
    restored: tuple[str, ...]
    resharded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    dropped: tuple[str, ...]
    nbytes_read: int
    nbytes_received: int
    nbytes_placed: int
    nbytes_from_memory: int
    job_nbytes_read: int
    job_nbytes_placed: int
    seconds: Mapping[str, float]
    slowest_rank: int
    slowest_s: float
    exchanges: IoCount
    collectives: IoCount
    storage_reads: IoCount
    sources: tuple[LoadedSource, ...] = ()
    as_saved: bool = True
    assumed: tuple[str, ...] = ()
    dequantized: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()

    @property
    def total_s(self) -> float:
        """The seconds of the call on this rank."""
        return sum(self.seconds.values())

    @property
    def gb_per_s(self) -> float:
        """The bytes filled on all ranks, divided by the seconds of the call."""
        return _rate(self.job_nbytes_placed, self.total_s) / 1e9

    @property
    def read_gb_per_s(self) -> float:
        """The bytes read on all ranks, divided by the read time of the slowest rank."""
        return _rate(self.job_nbytes_read, self.slowest_s) / 1e9

    def __str__(self) -> str:
        memory, source = self.nbytes_from_memory, _label(self.path, self.step)
        if len(self.sources) > 1:
            source = " and ".join(each.path for each in self.sources)
        return (
            f"loaded {source}: {format_size(self.job_nbytes_placed)} on "
            f"{format_count(self.world_size, 'rank')} in {self.total_s:.3g} s "
            f"({format_size(_rate(self.job_nbytes_placed, self.total_s))}/s; "
            f"read {format_size(self.job_nbytes_read)} in {self.slowest_s:.3g} s"
            f"{_slowest(self.world_size, self.slowest_rank)}"
            f"{f'; {format_size(memory)} here from memory' if memory else ''})"
        )


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds else 0.0


def _label(path: str, step: int | None) -> str:
    return path if step is None else f"step {step}"


def _slowest(world_size: int, rank: int) -> str:
    return "" if world_size == 1 else f", slowest rank {rank}"


_log = logging.getLogger("dist_ckpt")


class Phases:
    """Measures the phases of an operation on one thread. `quiet` ranks do not log them."""

    def __init__(self, operation: str, path: str, *, quiet: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._label = f"{operation} {path}"
        self._quiet = quiet

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase, and log it if it succeeds. Phases of one name add up."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if not self._quiet:
            _log.info("%s: %s took %.3f s", self._label, name, seconds)

    def done(self, report: object) -> None:
        """Log the operation's report."""
        if not self._quiet:
            _log.info("%s: %s", self._label, report)
