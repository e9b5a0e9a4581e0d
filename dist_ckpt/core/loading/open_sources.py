"""The files of several checkpoints as those of one, so that one reading serves them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from dist_ckpt.core.loading.load_messages import ResolvedCheckpoint
from dist_ckpt.core.planning.load.load_planner import plan_load
from dist_ckpt.core.planning.plan import ReadItem, TensorRequest
from dist_ckpt.core.runtime.gc_pause import paused_collector
from dist_ckpt.core.shard_io.read.open_files import MAX_OPEN, OpenFile, OpenFiles, open_files
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree
from dist_ckpt.core.state.binding.sources.scopes import tagged, untagged
from dist_ckpt.core.storage import Storage


def by_checkpoint(wanted: Iterable[TensorRequest], saved: SavedTree) -> list[list[TensorRequest]]:
    """Return what is wanted of each checkpoint, by the names there."""
    if not saved.origins:
        return [[*wanted]]
    found: list[list[TensorRequest]] = [[] for _ in saved.origins]
    for want in wanted:
        number, fqn = untagged(want.fqn)
        found[number].append(want._replace(fqn=fqn))
    return found


def open_all(
    storages: Sequence[Storage],
    checkpoints: Sequence[ResolvedCheckpoint],
    wanted: Sequence[Sequence[TensorRequest]],
    saved: SavedTree,
    *,
    threads: int,
    stack: ExitStack,
) -> OpenFiles:
    """Open what is to be read; `stack` gets what closes it. Raises what `open_files` does.

    The files of several checkpoints are numbered one after another, alike on all ranks, and what
    is read of them has the names that `saved` has.
    """
    opened: list[OpenFiles] = []
    for storage, one, some in zip(storages, checkpoints, wanted, strict=True):
        with paused_collector():
            plan = plan_load(one.index, some)
        folder, most = f"{one.path}/{one.attempt.name}", MAX_OPEN // len(checkpoints)
        files = open_files(storage, folder, one.index, plan, threads=threads, most_open=most)
        stack.callback(files.close)
        opened.append(files)
    return _joined(opened, checkpoints) if saved.origins else opened[0]


def _joined(opened: Sequence[OpenFiles], checkpoints: Sequence[ResolvedCheckpoint]) -> OpenFiles:
    plan: dict[int, tuple[ReadItem, ...]] = {}
    files: dict[int, OpenFile] = {}
    first = 0
    for number, (one, found) in enumerate(zip(opened, checkpoints, strict=True)):
        for file, items in one.plan.items():
            plan[first + file] = tuple(replace(i, fqn=tagged(number, i.fqn)) for i in items)
            files[first + file] = one.files[file]
        first += len(found.index.files)
    return OpenFiles(plan, files)
