"""What a save and a load tell their caller, and the log.

Units: seconds, bytes, and GB/s with 1e9 bytes to the GB. `seconds` are this rank's, by phase, and
add up to the call of a `dc.save` or `dc.load`. Four tallies say what the call has cost this rank
(`num` calls, `nbytes`): `exchanges` on the control channel with what it put into them,
`collectives` with what it gave in them, and `storage_reads` and `storage_writes`, of every kind of
file, headers, values and index included. Of a background save `seconds` are the trainer's phases
and its writer's, without what lies between: `async_save/trainer/background_save.py` makes its
report of the writer's message `Done`, and the writer logs the `CommitDecision`. A rate is the bytes
of the whole job by the seconds of the rank that took longest, or of the call; it is 0.0 where
nothing was measured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True)
class IoCount:
    """How many calls of one kind there were on this rank, and how many bytes went with them."""

    num: int = 0
    nbytes: int = 0

    def plus(self, nbytes: int) -> IoCount:
        """Return this with one more call."""
        return IoCount(self.num + 1, self.nbytes + nbytes)

    def plus_all(self, more: IoCount) -> IoCount:
        """Return this with more calls."""
        return IoCount(self.num + more.num, self.nbytes + more.nbytes)

    def since(self, earlier: IoCount) -> IoCount:
        """Return what was added after `earlier`, when this was that."""
        return IoCount(self.num - earlier.num, self.nbytes - earlier.nbytes)


def slowest_of(seconds: Sequence[float]) -> tuple[int, float]:
    """Return the rank that took longest, and how long."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return rank, seconds[rank]


# Called with (bytes done so far, bytes to do in all), from the thread that made the call.
Progress = Callable[[int, int], None]


class CopyProgress:
    """Report the progress of a copy. Thread-safe. Links are not counted."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done, self._turn = 0, Lock()

    def __call__(self, nbytes: int) -> None:
        """Count what was copied."""
        with self._turn:
            self._done = min(self._done + nbytes, self._total)
            if self._progress is not None:
                self._progress(self._done, self._total)


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did.

    `nbytes` and `num_files` are what all ranks together have stored. `slowest_s` is how long rank
    `slowest_rank` took to write its files and make them durable: the longest of all ranks. Of the
    bytes of `exchanges` `nbytes_receipt` are this rank's receipt, which grows with its number of
    files; the coordinator sends none. `num_linked` of the files, with `nbytes_linked` of the bytes,
    were not written: they are those of an older checkpoint under one more name.
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

    @property
    def total_s(self) -> float:
        """The seconds of the call on this rank."""
        return sum(self.seconds.values())

    @property
    def gb_per_s(self) -> float:
        """What all ranks have stored, by the seconds of the call."""
        return _rate(self.nbytes, self.total_s) / 1e9

    @property
    def write_gb_per_s(self) -> float:
        """What all ranks have stored, by the seconds that the slowest wrote."""
        return _rate(self.nbytes, self.slowest_s) / 1e9

    def __str__(self) -> str:
        """Return one line for people and logs."""
        return (
            f"saved {_what(self.path, self.step)}: {size(self.nbytes)} by "
            f"{_ranks(self.world_size)} in {self.total_s:.3g} s "
            f"({size(_rate(self.nbytes, self.total_s))}/s; "
            f"write {self.slowest_s:.3g} s{_slowest(self.world_size, self.slowest_rank)}"
            f"{f'; {size(self.nbytes_linked)} linked' if self.num_linked else ''})"
        )


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A checkpoint that a load has read, and the names that it filled from it on this rank."""

    path: str
    step: int | None
    attempt: str
    restored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did, on this rank.

    `restored` are the names that were filled, `resharded` those of them whose parts here are cut
    otherwise than the stored ones, `missing` those that the checkpoint lacks, `unexpected` saved
    names that no rank asked for, `dropped` what `on_reshard` or a `rename` to None left out, and
    the optimizer's state of parameters that had none when they were saved: it is removed.

    `nbytes_read` counts shard data read here, `nbytes_received` what other ranks handed on,
    `nbytes_placed` what was filled here. `job_nbytes_read` and `job_nbytes_placed` are over all
    ranks. Of all that was read here, headers and values included, `nbytes_from_memory` came from
    what background saves have left in the memory of this host, and `storage_reads` tell the rest.
    `slowest_s` is how long rank `slowest_rank` took to read, check and fill its tensors: the
    longest of all ranks.

    `sources` says what came from where; `path`, `step` and `attempt` are of the first source.
    `as_saved`: no rename has given saved names other ones. The report of a load that has left
    something out says to `dc.save(carry_over=...)` what to carry on.
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

    @property
    def total_s(self) -> float:
        """The seconds of the call on this rank."""
        return sum(self.seconds.values())

    @property
    def gb_per_s(self) -> float:
        """What was filled on all ranks, by the seconds of the call."""
        return _rate(self.job_nbytes_placed, self.total_s) / 1e9

    @property
    def read_gb_per_s(self) -> float:
        """What all ranks read, from storage or memory, by the seconds that the slowest took."""
        return _rate(self.job_nbytes_read, self.slowest_s) / 1e9

    def __str__(self) -> str:
        """Return one line for people and logs."""
        memory = self.nbytes_from_memory
        return (
            f"loaded {_sources(self)}: {size(self.job_nbytes_placed)} on "
            f"{_ranks(self.world_size)} in {self.total_s:.3g} s "
            f"({size(_rate(self.job_nbytes_placed, self.total_s))}/s; "
            f"read {size(self.job_nbytes_read)} in {self.slowest_s:.3g} s"
            f"{_slowest(self.world_size, self.slowest_rank)}"
            f"{f'; {size(memory)} here from memory' if memory else ''})"
        )


def size(nbytes: float) -> str:
    """Return a size for people: three digits, decimal units."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    return f"{nbytes:.0f} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds else 0.0


def _what(path: str, step: int | None) -> str:
    return path if step is None else f"step {step}"


def _sources(report: LoadReport) -> str:
    if len(report.sources) < 2:
        return _what(report.path, report.step)
    return " and ".join(one.path for one in report.sources)


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def _slowest(world_size: int, rank: int) -> str:
    return "" if world_size == 1 else f", slowest rank {rank}"


_log = logging.getLogger("dist_ckpt")


class Phases:
    """Measures the phases of one operation; `quiet` ranks measure without logging.

    One operation on one thread: not shared.
    """

    def __init__(self, operation: str, where: str, *, quiet: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._what = f"{operation} {where}"
        self._quiet = quiet

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase; a phase that is entered twice adds up. Logs when it ends well."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if not self._quiet:
            _log.info("%s: %s took %.3f s", self._what, name, seconds)

    def done(self, report: object) -> None:
        """Log what the operation came to."""
        if not self._quiet:
            _log.info("%s: %s", self._what, report)
