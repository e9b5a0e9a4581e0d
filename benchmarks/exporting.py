"""How fast a checkpoint is exported for Hugging Face, beside copying its files, and in what memory.

    .venv/bin/python -m benchmarks.exporting --dir /tmp --gb 2

Each round copies the checkpoint's files (`cp` and fsync of each), and exports it, as it is and as
bfloat16, in a process of its own that may have no more memory than --memory-mb (RLIMIT_DATA, which
counts what threads may use of their stacks: 1 MiB here); another one begins each time. Before each
the files are put out of the page cache, but on storage in memory. A rate is the checkpoint's bytes
by the seconds, which do not count the start of the process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

import dist_ckpt as dc
from benchmarks.averaging import forget

TENSORS = 16
RANKS = 4

# Its arguments: the most memory, the source, the folder, the dtype. Torch's own memory, and its
# import, are no part of what is measured.
EXPORT = """
import resource, sys, threading, time
from dist_ckpt.interop import hf
limit, dtype = int(sys.argv[1]), sys.argv[4] or None
if dtype:
    import dist_ckpt.memory.casting
threading.stack_size(1 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
start = time.monotonic()
hf.export_folder(sys.argv[2], sys.argv[3], dtype=dtype)
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.monotonic() - start, peak)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--memory-mb", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="exporting-") as folder:
        source, target = _save(Path(folder), args.gb), Path(folder, "target")
        files = [file for file in source.rglob("*") if file.is_file()]
        nbytes = sum(file.stat().st_size for file in files)
        export = partial(_export, args.memory_mb * 10**6, source, target)
        works: dict[str, Callable[[], tuple[float, int]]] = {
            "copy": partial(_copy, source, target),
            "export": partial(export, ""),
            # Converting needs torch, which has several hundreds of MB of its own.
            "bfloat16": partial(
                _export, args.memory_mb * 10**6 + (1 << 30), source, target, "bf16"
            ),
        }
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in works}
        for number in range(args.rounds):
            turns = deque(works.items())
            turns.rotate(number)
            for name, work in turns:
                forget(files)
                found[name].append(work())
                shutil.rmtree(target)
        print(f"{nbytes / 1e9:.2f} GB of {RANKS} ranks in {args.dir}")
        medians = {name: statistics.median(s for s, _ in some) for name, some in found.items()}
        for name, median in medians.items():
            rate = f"{nbytes / median / 1e9:.2f} GB/s"
            peak = max(peak for _, peak in found[name])
            shown = f", {peak / 1e6:.0f} MB of memory" if peak else ""
            print(
                f"{name:8} {median:7.3f} s  {rate:10} {medians['copy'] / median:.2f} of copy{shown}"
            )


def _save(folder: Path, gb: float) -> Path:
    rows = RANKS * max(1, int(gb * 1e9 / TENSORS / 4 / 1024 / RANKS))
    model = {f"w{n}": torch.randn(rows, 1024) for n in range(TENSORS)}
    dc.save({"model": model}, folder / "one")
    del model
    dc.reshard(folder / "one", folder / "source", world_size=RANKS)
    shutil.rmtree(folder / "one")
    return folder / "source"


def _copy(source: Path, target: Path) -> tuple[float, int]:
    start = time.monotonic()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for file in target.rglob("*"):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return time.monotonic() - start, 0


def _export(limit: int, source: Path, target: Path, dtype: str) -> tuple[float, int]:
    command = [sys.executable, "-c", EXPORT, str(limit), str(source), str(target), dtype]
    seconds, peak = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    return float(seconds), int(peak) << 10


if __name__ == "__main__":
    main()
