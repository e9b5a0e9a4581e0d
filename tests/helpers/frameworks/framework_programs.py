"""Runs the programs that train with a framework, on one rank or several."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SIGKILL = -9


def trained(
    program: str, root: Path, *options: str, ranks: int = 1, code: int = 0, **environ: str
) -> list[dict[str, Any]]:
    """Run a program of this folder on a root; return what its ranks print, by rank."""
    command = [str(Path(__file__).with_name(program)), str(root), *options]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*torchrun, *command]
    done = run_python(command, Path.cwd(), **environ)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return sorted(found, key=lambda one: int(one.get("rank", 0)))


def run_python(
    command: list[str], folder: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run Python on the CPU, outside of any job."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environ}
    own.pop("WORLD_SIZE", None)
    return subprocess.run(
        [sys.executable, *command],
        env=own,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def killed_and_whole(
    program: str, folder: Path, *options: str, die: int, ranks: int = 1
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what a run comes to, and the same run killed after a batch and started again."""
    whole = trained(program, folder / "whole", *options, ranks=ranks)
    killed = ("--die", str(die))
    trained(
        program, folder / "cut", *options, *killed, ranks=ranks, code=SIGKILL if ranks == 1 else 1
    )
    return whole, trained(program, folder / "cut", *options, ranks=ranks)


def check_config_matches(
    whole: list[dict[str, Any]], rest: list[dict[str, Any]], *, first: int
) -> None:
    """Check that a run went on behind its `first` batches, and came to the same, bit for bit."""
    assert len(whole) == len(rest)
    for one, other in zip(whole, rest, strict=True):
        assert other["losses"] == one["losses"][first:]
        assert other["seen"] == one["seen"][first * len(one["seen"]) // len(one["losses"]) :]
        for name in ("step", "rates", "weights"):
            assert other[name] == one[name], name


def programs_of(page: str) -> list[str]:
    """Return the Python blocks of a page of docs/."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
