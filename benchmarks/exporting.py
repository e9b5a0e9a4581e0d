"""How fast a checkpoint is exported and imported, beside copying its files, and in what memory.

    .venv/bin/python -m benchmarks.exporting --dir /tmp --gb 2

Each round copies the checkpoint's files (`cp` and fsync of each), exports it for Hugging Face, as
it is and as bfloat16, for torch.distributed.checkpoint and for torch.load, and imports it from what
these are. Each is a process of its own that, once it has imported what it needs, may take no more
memory than --memory-mb (RLIMIT_DATA, which counts what threads may use of their stacks: 1 MiB
here). Another one begins each time. Before each the files are put out of the page cache, but on
storage in memory. A rate is the checkpoint's bytes by the seconds, which do not count the start of
the process.
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
from dist_ckpt.interop.dcp import export
from dist_ckpt.interop.hf import export as hf
from dist_ckpt.interop.torch_save import export as torch_export

TENSORS = 16
RANKS = 4

# Its arguments: the most memory, the source, the target, what to do. It tells what it took, and the
# most memory it had. Torch's own is no part of that and of the limit, and its import none of the
# time.
PROGRAM = """
import resource, sys, threading, time
what = sys.argv[4]
from dist_ckpt.interop import hf, imports
if what == "as bfloat16":
    import dist_ckpt.core.shard_io.memory.torch_tensor
if what == "for dcp":
    from dist_ckpt.interop.dcp import export as dcp_export
if what == "for torch":
    from dist_ckpt.interop.torch_save import export as torch_export
def memory(name):
    lines = open("/proc/self/status").readlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
threading.stack_size(1 << 20)
limit = memory("VmData") + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
before, start = memory("VmRSS"), time.monotonic()
match what.split():
    case ["for", "dcp"]:
        dcp_export.export_folder(sys.argv[2], sys.argv[3])
    case ["for", "torch"]:
        torch_export.export_file(sys.argv[2], sys.argv[3])
    case ["for", "hf"]:
        hf.export_folder(sys.argv[2], sys.argv[3])
    case ["as", dtype]:
        hf.export_folder(sys.argv[2], sys.argv[3], dtype=dtype)
    case ["from", kind]:
        getattr(imports, f"from_{kind}")(sys.argv[2], sys.argv[3])
print(time.monotonic() - start, memory("VmHWM") - before)
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
        foreign = _foreign(source, Path(folder))
        files += [file for one in foreign.values() for file in (one, *one.rglob("*"))]
        limit = args.memory_mb * 10**6
        works: dict[str, Callable[[], tuple[float, int]]] = {
            "copy": partial(_copy, source, target),
            **{
                f"for {kind}": partial(_run, limit, source, target, f"for {kind}")
                for kind in foreign
            },
            "as bfloat16": partial(_run, limit, source, target, "as bfloat16"),
            **{
                f"from {kind}": partial(_run, limit, one, target, f"from {kind}")
                for kind, one in foreign.items()
            },
        }
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in works}
        for number in range(args.rounds):
            turns = deque(works.items())
            turns.rotate(number)
            for name, work in turns:
                forget([file for file in files if file.is_file()])
                found[name].append(work())
                if target.is_file():
                    target.unlink()
                else:
                    shutil.rmtree(target)
        print(f"{nbytes / 1e9:.2f} GB of {RANKS} ranks in {args.dir}")
        medians = {name: statistics.median(s for s, _ in some) for name, some in found.items()}
        for name, median in medians.items():
            rate = f"{nbytes / median / 1e9:.2f} GB/s"
            peak = max(peak for _, peak in found[name])
            shown = f", {peak / 1e6:.0f} MB of memory beside torch" if peak else ""
            ratio = medians["copy"] / median
            print(f"{name:11} {median:7.3f} s  {rate:10} {ratio:.2f} of copy{shown}")


def _save(folder: Path, gb: float) -> Path:
    rows = RANKS * max(1, int(gb * 1e9 / TENSORS / 4 / 1024 / RANKS))
    model = {f"w{n}": torch.randn(rows, 1024) for n in range(TENSORS)}
    dc.save({"model": model}, folder / "one")
    del model
    dc.reshard(folder / "one", folder / "source", world_size=RANKS)
    shutil.rmtree(folder / "one")
    return folder / "source"


def _foreign(source: Path, folder: Path) -> dict[str, Path]:
    """Return the same tensors as other systems write them."""
    places = {"hf": folder / "hf", "dcp": folder / "dcp", "torch": folder / "a.pt"}
    hf.export_folder(source, places["hf"])
    export.export_folder(source, places["dcp"])
    torch_export.export_file(source, places["torch"])
    return places


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


def _run(limit: int, source: Path, target: Path, what: str) -> tuple[float, int]:
    command = [sys.executable, "-c", PROGRAM, str(limit), str(source), str(target), what]
    seconds, peak = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    return float(seconds), int(peak)


if __name__ == "__main__":
    main()
