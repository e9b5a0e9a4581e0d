"""Programs that hold locks and arenas in processes of their own, which tests can kill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]

START = """
import os, sys
from dist_ckpt.async_save.snapshots.arena import Arena, ArenaReader
from dist_ckpt.async_save.snapshots.arena_layout import Image, Seal, Snapshot, arena_nbytes
from dist_ckpt.async_save.snapshots.arena import ArenaPool
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.core.runtime.lock_files import owner_of, take
def say(*words):
    print(*words, flush=True)
def wait():
    sys.stdin.readline()
args = sys.argv[1:]
"""


class Program:
    """A program that says lines and waits for some."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@contextmanager
def program(code: str, *args: object) -> Iterator[Program]:
    """Run code in a process of its own, which ends with the block at the latest."""
    run = [sys.executable, "-c", START + code, *map(str, args)]
    with subprocess.Popen(
        run, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Program(process)
        finally:
            process.kill()
