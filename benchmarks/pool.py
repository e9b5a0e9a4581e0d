"""Real ranks as processes that live for many calls, each of which has a deadline."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.rank import Operations, Rank, StorageLocation, serve

# What takes seconds to import is imported once, in the process that ranks are forked from.
PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "dist_ckpt.core.saving.save",
    "dist_ckpt.core.loading.load",
)


class RanksError(Exception):
    """A rank raised, died, or did not answer in time. The pool's processes are gone then."""


class Pools:
    """A pool of processes for each world size, started when it is first called.

    A call that fails ends its pool, whose ranks may wait for each other in vain; the next call
    starts a new one.
    """

    def __init__(
        self,
        folder: Path,
        contenders: Sequence[object],
        *,
        deadline_s: float,
        operations: Operations = Rank,
    ) -> None:
        self._folder = folder
        self._operations = operations
        self._contenders = tuple(contenders)
        self.deadline_s = deadline_s
        self._pools: dict[int, list[tuple[Any, Connection]]] = {}

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for world_size in list(self._pools):
            self.end(world_size)

    def call(self, world_size: int, method: str, *args: object, **options: object) -> list[Any]:
        """Call an operation on all ranks; return what each returned, or raise RanksError."""
        if world_size not in self._pools:
            self._pools[world_size] = self._start(world_size)
        deadline = time.monotonic() + self.deadline_s
        try:
            for _, pipe in self._pools[world_size]:
                pipe.send((method, args, options))
            pipes = [pipe for _, pipe in self._pools[world_size]]
            return _answers(pipes, deadline, f"{method} on {world_size} ranks")
        except BaseException:
            self.end(world_size)
            raise

    def forget(self) -> None:
        """Have all ranks release what they hold."""
        for world_size in list(self._pools):
            self.call(world_size, "forget")

    def end(self, world_size: int) -> None:
        """End a pool's processes and those that they started, whatever they are doing."""
        processes = self._pools.pop(world_size, [])
        for process, pipe in processes:
            pipe.close()
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process, _ in processes:
            process.join(10)

    def _start(self, world_size: int) -> list[tuple[Any, Connection]]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=self._folder))
        pool = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            place = StorageLocation(
                rank=rank,
                world_size=world_size,
                store=str(folder / "store"),
                log=str(folder / f"log-{rank}"),
                timeout_s=self.deadline_s,
            )
            # No daemon: some contenders start processes themselves, which a daemon may not.
            process = context.Process(
                target=serve, args=(self._operations, place, self._contenders, theirs)
            )
            process.start()
            theirs.close()
            pool.append((process, ours))
        return pool


def _answers(pipes: Sequence[Connection], deadline: float, what: str) -> list[Any]:
    """Return one answer from each; the first error ends the wait, as others may be stuck."""
    waiting = dict(enumerate(pipes))
    answers: dict[int, Any] = {}
    while waiting:
        left_s = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(waiting.values(), left_s)
        if not ready:
            late = ", ".join(str(rank) for rank in waiting)
            raise RanksError(f"{what}: no answer in time from rank {late}")
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                succeeded, answer = waiting.pop(rank).recv()
            except (EOFError, ConnectionResetError):
                raise RanksError(f"{what}: rank {rank} died") from None
            if not succeeded:
                raise RanksError(answer)
            answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]
