"""What the hardware does with the same bytes when nobody computes, names or checks anything.

Memory is aligned, touched before and reused. What was read is checked all the same, outside of
its time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

Action = Literal["save", "warm", "cold"]
T = TypeVar("T")

BUFFER_NBYTES = 8 << 20
ALIGNMENT = 4096

# A disk wants several requests at once; the page cache one copying thread a core.
DISK_THREADS = 8
MEMORY_THREADS = max(1, min(4, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class RankView:
    """What one rank moves: `nbytes`; `everything` if the other ranks move the same bytes."""

    rank: int
    world_size: int
    nbytes: int
    everything: bool = False


class Limits:
    """One rank's raw I/O. Each method gets ready and returns what is to be timed."""

    def __init__(self) -> None:
        self._into = _Memory(0)
        self._from = _Memory(0)
        self._lengths: Sequence[int] = ()

    def write(self, share: RankView, folder: Path) -> Callable[[], None]:
        """Write one file a rank past the page cache, then fsync."""
        nbytes = -(-share.nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._from = self._from.of(nbytes)
        _fill(memory, [(start, BUFFER_NBYTES) for start in range(0, memory.nbytes, BUFFER_NBYTES)])
        folder.mkdir(exist_ok=True)

        def run() -> None:
            fd = os.open(folder / f"raw-{share.rank}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                _each(
                    lambda slot: _whole(
                        os.pwrite(fd, memory.view[slot[0] : sum(slot)], slot[0]), slot
                    ),
                    _slots(nbytes),
                    DISK_THREADS,
                )
                os.fsync(fd)
            finally:
                os.close(fd)
            sync(folder)

        return run

    def read(
        self, share: RankView, folder: Path, *, direct: bool, threads: int
    ) -> Callable[[], None]:
        """Read this rank's share of the files by parallel preadv; direct: past the page cache."""
        paths = sorted(folder.iterdir())
        parts = [(path, slot) for path in paths for slot in _slots(path.stat().st_size)]
        # Ranks that all want everything begin at different places.
        first = len(parts) * share.rank // share.world_size
        mine = [*parts[first:], *parts[:first]]
        if not share.everything:
            mine = parts[share.rank :: share.world_size]
        memory = self._into = self._into.of(len(mine) * BUFFER_NBYTES)
        memory.bytes.zero_()
        self._lengths = [slot[1] for _, slot in mine]

        def run() -> None:
            flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
            fds = {path: os.open(path, flags) for path in paths}

            def fetch(number: int) -> None:
                path, slot = mine[number]
                into = memory.view[number * BUFFER_NBYTES :][: slot[1]]
                _whole(os.preadv(fds[path], [into], slot[0]), slot)

            try:
                _each(fetch, range(len(mine)), threads)
            finally:
                for fd in fds.values():
                    os.close(fd)

        return run

    def copy(self, share: RankView) -> Callable[[], None]:
        """Copy from memory to memory, by a thread a core."""
        source = self._from = self._from.of(share.nbytes)
        target = self._into = self._into.of(share.nbytes)
        slots = _slots(share.nbytes)
        _fill(source, slots)
        target.bytes.zero_()
        self._lengths = [length for _, length in slots]

        def move(slot: tuple[int, int]) -> None:
            start, length = slot
            ctypes.memmove(target.address + start, source.address + start, length)

        return lambda: _each(move, slots, MEMORY_THREADS)

    def difference(self) -> str | None:
        """Return which of the last read or copied slots is wrong, or None."""
        for number, length in enumerate(self._lengths):
            found = self._into.bytes[number * BUFFER_NBYTES :][:length]
            if not torch.equal(found, _PATTERN[:length]):
                return f"slot {number}"
        return None


class _Memory:
    """Page-aligned memory, all of it touched."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, ALIGNMENT)
        self._map = mmap.mmap(-1, self.nbytes)
        self.view = memoryview(self._map)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes.zero_()
        self.address = self.bytes.data_ptr()

    def of(self, nbytes: int) -> _Memory:
        """Return this memory if it is large enough, else new memory."""
        return self if self.nbytes >= nbytes else _Memory(nbytes)


_PATTERN = torch.arange(1, 1 + BUFFER_NBYTES // 8, dtype=torch.int64).view(torch.uint8)


def _fill(memory: _Memory, slots: Iterable[tuple[int, int]]) -> None:
    for start, length in slots:
        part = memory.bytes[start : start + length]
        part.copy_(_PATTERN[: len(part)])


def _slots(nbytes: int) -> list[tuple[int, int]]:
    return [
        (start, min(BUFFER_NBYTES, nbytes - start)) for start in range(0, nbytes, BUFFER_NBYTES)
    ]


def _whole(moved: int, slot: tuple[int, int]) -> None:
    if moved != slot[1]:
        raise OSError(f"{moved} of {slot[1]} bytes were moved at {slot[0]}")


def _each(function: Callable[[T], None], items: Sequence[T], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(function, items))


# --- what the page cache holds ----------------------------------------------------------------


def files_in(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sync(path: Path) -> None:
    """Make a file or a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Make a folder and all in it durable."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        sync(path)


def warm(folder: Path) -> None:
    """Have all files of a folder in the page cache."""
    buffer = bytearray(BUFFER_NBYTES)
    for path in files_in(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cool(folder: Path) -> None:
    """Have none of them in the page cache: what is dirty cannot be dropped, so sync first."""
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
