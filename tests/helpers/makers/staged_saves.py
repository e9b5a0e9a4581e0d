"""What a trainer does for a background save, by hand: arenas, snapshots and a writer's process."""

from __future__ import annotations

import random
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from subprocess import Popen
from typing import Any
from unittest.mock import patch

from dist_ckpt.async_save.snapshots.arena import Arena
from dist_ckpt.async_save.snapshots.arena_layout import (
    Image,
    Snapshot,
    SnapshotMetadata,
    arena_nbytes,
)
from dist_ckpt.async_save.snapshots.job_folder import RankFolder
from dist_ckpt.async_save.trainer.writer_handle import start_writer
from dist_ckpt.async_save.writer.writer_messages import (
    Done,
    Hello,
    Link,
    Serve,
    Serving,
    Write,
    WriterMessage,
)
from dist_ckpt.core.comm.collectives.collective import DistinctPayloads
from dist_ckpt.core.comm.rank_messages import Failure
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.geometry import Grid, Layout, Shape
from dist_ckpt.core.format.index.index import Node
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.planning.plan import Inventory, TensorEntry
from dist_ckpt.core.planning.save.save_planner import plan_rank_files
from dist_ckpt.core.planning.tensor_views import Mesh, MeshPlaced, ShardedAxis, Whole
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.saving.agreement import build_plan
from dist_ckpt.reports import SaveReport
from dist_ckpt.settings import Settings
from fork_server import forked_python
from written import Saved

# A writer that says nothing for so long fails the test.
ANSWER_S = 60.0
STAGED_AT = 1.0
CONFIG = Settings(
    heartbeat_timeout_s=1.5, join_timeout_s=20.0, join_warning_s=5.0, visibility_timeout_s=10.0
)


class State:
    """Tensors that all ranks cut by rows, one that all hold, and a value of rank 0."""

    def __init__(self, world_size: int, shapes: Mapping[str, Shape], seed: int = 0) -> None:
        self.world_size = world_size
        mesh = Mesh(("dp",), (world_size,), tuple(range(world_size)))
        entries = [
            TensorEntry(f"model.{name}", "float32", shape, 0, 0) for name, shape in shapes.items()
        ]
        inventory = Inventory(
            mesh=(("dp", world_size),),
            components=("model",),
            views=(MeshPlaced(mesh, (ShardedAxis(0),)), Whole()),
            tensors=(*entries, TensorEntry("model.b", "float32", (5,), 1, 0)),
            aliases=(),
            values=("step",),
            per_rank=(),
            tree=(Node("", "dict", ("model", "step")), Node("model", "dict", (*shapes, "b"))),
            name_lists=(),
            numpy=(),
        )
        body = typed_msgpack.encode(inventory)
        self.inventories: DistinctPayloads = ((body, tuple(range(world_size))),)
        self.plan = build_plan(self.inventories, world_size)
        self.tensors = {}
        for entry in inventory.tensors:
            data = random.Random(f"{seed} {entry.fqn}").randbytes(4 * prod(entry.shape))
            whole = Layout(Grid(tuple((0, n) for n in entry.shape)), ((0,),))
            self.tensors[entry.fqn] = Saved("float32", entry.shape, whole, data)

    def files(self, rank: int, step: int) -> list[tuple[Image, int, bytes]]:
        """Return a rank's files: the room of the header, and what is staged after it."""
        found = []
        for plan in plan_rank_files(self.plan, rank):
            data = b"".join(self.tensors[item.fqn].of(item.cell) for item in plan.items)
            found.append((Image(plan.name, plan.nbytes), plan.header.nbytes, data))
        if rank == 0:
            main = objects_file.encode(objects_file.ObjectsFile(self.plan.tree, {"step": step}))
            found.append((Image(filenames.OBJECTS, len(main)), 0, main))
        return found


class Staged:
    """One snapshot of one rank in an arena: begun, and then `stage`d and `complete`d."""

    def __init__(
        self,
        arena: Arena,
        state: State,
        path: Path,
        *,
        name: str,
        rank: int = 0,
        step: int = 7,
        overwrite: bool = False,
        replicas: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (),
    ) -> None:
        self.arena = arena
        self._files = state.files(rank, step)
        details = SnapshotMetadata(
            overwrite, {"note": 1}, {"dist_ckpt": "0"}, STAGED_AT, state.inventories, replicas
        )
        self.snapshot = Snapshot(
            name,
            str(path),
            step,
            rank,
            state.world_size,
            tuple(image for image, _, _ in self._files),
            typed_msgpack.encode(details),
        )
        arena.reserve(arena_nbytes(self.snapshot))
        self._images = arena.begin(self.snapshot)

    def stage(self, num: int | None = None) -> None:
        """Copy the first files, or all."""
        spans = self.arena.spans.images
        for (_, header, data), image, span in list(
            zip(self._files, self._images, spans, strict=True)
        )[:num]:
            image[header:] = data
            self.arena.advance(span.stop)

    def complete(self) -> None:
        self.stage()
        self.arena.complete()


class Trainer:
    """One rank's writer in a process of its own, and the end of the link to it."""

    def __init__(self, folder: RankFolder, link: Link, process: Popen[bytes]) -> None:
        self.folder = folder
        self.link = link
        self.process = process
        self.store: tuple[str, int, bytes] | None = None

    def hear(self, kind: type | None = None) -> WriterMessage:
        message = self.link.receive(ANSWER_S)
        assert message is not None, f"the writer says nothing: {self.log()}"
        assert kind is None or isinstance(message, kind), message
        return message

    def serve(self, token: bytes) -> Serving:
        self.link.send(Serve(token, ""))
        answer = self.hear(Serving)
        assert isinstance(answer, Serving)
        return answer

    def log(self) -> str:
        return Path(self.folder.log_path).read_text()

    def wait(self) -> int:
        return self.process.wait(ANSWER_S)


def failure_of(done: Done) -> Failure:
    """Return what a save failed of."""
    assert done.failure is not None
    return done.failure


def report_of(done: Done) -> SaveReport:
    assert done.report is not None
    return done.report


def write_of(
    staged: Staged, number: int = 0, store: tuple[str, int, bytes] = ("", 0, b"")
) -> Write:
    shot = staged.snapshot
    return Write(shot.id, shot.path, staged.arena.path, number, *store)


def new_id() -> str:
    return secrets.token_hex(16)


def hello(
    folder: RankFolder, world_size: int, config: Settings = CONFIG, cap: float | None = None
) -> Hello:
    return Hello(folder.job, folder.rank, world_size, config, cap)


@contextmanager
def writers(
    folders: list[RankFolder], *, python: str | None = None, **options: Any
) -> Iterator[list[Trainer]]:
    """Start a writer for each of these ranks; all have ended when this does.

    They are forked, unless another Python is named: then `Trainer.process` is the writer itself.
    """
    with ExitStack() as stack:
        trainers = []
        for folder in folders:
            said = hello(folder, len(folders), **options)
            with patch.object(sys, "executable", python or forked_python()):
                link, process = start_writer(folder, said)
            stack.callback(_end, link, process)
            trainers.append(Trainer(folder, link, process))
        yield trainers


def _end(link: Link, process: Popen[bytes]) -> None:
    link.close()
    with suppress(ProcessLookupError):
        process.kill()
    process.wait(ANSWER_S)
