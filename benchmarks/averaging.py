"""How fast checkpoints are averaged, beside reading the same files.

    .venv/bin/python -m benchmarks.averaging --dir /tmp --gb 2 --dtype bfloat16

Each round reads all files of the sources with 4 threads past the page cache ("raw"), verifies them
(`dc.verify`), and averages them, which reads them and writes one more; another one begins each
time. Before each they are put out of the page cache, but on storage in memory. A rate is the
sources' bytes by the seconds.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

import dist_ckpt as dc

BUFFER_NBYTES = 8 << 20
THREADS = 4
TENSORS = 8


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--gb", type=float, default=2.0, help="of all sources together")
    parser.add_argument("--sources", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="averaging-") as folder:
        sources = _save(Path(folder), args.sources, args.gb, getattr(torch, args.dtype))
        files = [file for path in sources for file in path.rglob("*") if file.is_file()]
        nbytes = sum(file.stat().st_size for file in files)
        works: dict[str, Callable[[], object]] = {
            "raw": partial(_read, files, _slots()),
            "verify": lambda: [dc.verify(path) for path in sources],
            "average": lambda: dc.average(
                sources, to=Path(folder, "mean"), include="model", overwrite=True
            ),
        }
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for number in range(args.rounds):
            # Who reads first may find less in a cache below the machine, and pays for it.
            turns = deque(works.items())
            turns.rotate(number)
            for name, work in turns:
                forget(files)
                start = time.monotonic()
                work()
                seconds[name].append(time.monotonic() - start)
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        print(
            f"{args.sources} x {nbytes / args.sources / 1e9:.2f} GB of {args.dtype} in {args.dir}"
        )
        for name, median in medians.items():
            rate = f"{nbytes / median / 1e9:.2f} GB/s"
            print(f"{name:8} {median:7.3f} s  {rate:10}  {medians['raw'] / median:.2f} of raw")


def _save(folder: Path, count: int, gb: float, dtype: torch.dtype) -> list[Path]:
    numel = int(gb * 1e9 / count / TENSORS / dtype.itemsize)
    paths = []
    for step in range(count):
        model = {f"w{n}": torch.randn(numel).to(dtype) for n in range(TENSORS)}
        paths.append(folder / f"step-{step}")
        dc.save({"model": model}, paths[-1], step=step)
    return paths


def _slots() -> SimpleQueue[mmap.mmap]:
    """Return memory to read into that has been touched before, as ours has."""
    free: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(THREADS):
        memory = mmap.mmap(-1, BUFFER_NBYTES)
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:] = bytes(BUFFER_NBYTES)
        free.put(memory)
    return free


def _read(files: Sequence[Path], free: SimpleQueue[mmap.mmap]) -> None:
    def read(place: tuple[Path, int]) -> None:
        memory = free.get()
        fd = os.open(place[0], os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(fd, [memory], place[1])
        finally:
            os.close(fd)
            free.put(memory)

    places = [(f, start) for f in files for start in range(0, f.stat().st_size, BUFFER_NBYTES)]
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(read, places))


def forget(files: Sequence[Path]) -> None:
    """Put files out of the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


if __name__ == "__main__":
    main()
