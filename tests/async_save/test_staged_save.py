"""What is written of a snapshot is what was staged, whenever that comes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.async_save.snapshots.arena import ArenaPool, ArenaReader
from dist_ckpt.async_save.writer import staged_save
from dist_ckpt.async_save.writer.staged_save import Staging, open_staged_files
from dist_ckpt.async_save.writer.writer_messages import Hello
from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.planning.save.save_planner import plan_rank_files
from dist_ckpt.core.runtime.host_memory import address_of
from dist_ckpt.core.runtime.processes import find_process
from dist_ckpt.core.shard_io.write.shard_writer import (
    NullStorage,
    WritableStorage,
    write_rank_files,
)
from dist_ckpt.core.storage.storage_protocol import WritableFile
from dist_ckpt.errors import CheckpointError, ConflictError, CorruptError, RankError
from dist_ckpt.settings import Settings
from dist_ckpt.testing.memory_storage import MemoryStorage
from staged_saves import Staged, State, new_id

# One shard of several blocks, and small ones.
STATE = State(1, {"large": (2500, 1000), "s": (7, 3), "t": (300, 50)})
FOLDER = "/a"


class Recording(MemoryStorage):
    """Records the writes from writable memory: where to, where from and how much."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.wrote: list[tuple[int, int, int]] = []

    def create(self, path: str, nbytes: int) -> WritableFile:
        file = super().create(path, nbytes)
        write_at = file.write_at

        def record(offset: int, data: Buffer) -> None:
            view = memoryview(data)
            if not view.readonly:
                self.wrote.append((offset, address_of(view), view.nbytes))
            write_at(offset, data)

        file.write_at = record  # type: ignore[method-assign]
        return file


class Case:
    """One snapshot, seen from both sides."""

    def __init__(self, arenas: ArenaPool, state: State = STATE) -> None:
        self.state = state
        self.staged = Staged(arenas.open_fitting(0, 1 << 16), state, Path("/ck"), name=new_id())
        self.follower = ArenaReader(self.staged.arena.path, "job")
        self.followed = self.follower.follow(self.staged.snapshot.id)
        # Its files want memory aligned, as direct I/O does.
        self.storage = Recording({FOLDER: None}, alignment=4096)

    def write(
        self, check: Callable[[], None], threads: int = 1, storage: WritableStorage | None = None
    ) -> tuple[FileReceipt, ...]:
        plans = plan_rank_files(self.state.plan, 0)
        files = open_staged_files(self.followed, Staging(self.followed, check), plans)
        return write_rank_files(storage or self.storage, FOLDER, files, threads=threads)

    def written(self) -> dict[str, bytes]:
        return {
            path.removeprefix(f"{FOLDER}/"): data
            for path, data in self.storage.tree().items()
            if data is not None
        }

    def images(self) -> dict[str, bytes]:
        images = self.staged.snapshot.images
        return {
            image.name: bytes(memory)
            for image, memory in zip(images, self.followed.images, strict=True)
        }


def nothing() -> None:
    """Say that more may come."""


def fail() -> None:
    raise CheckpointError("nothing more will come")


@pytest.mark.parametrize("threads", [1, 4])
def test_what_was_staged_is_written_and_the_arena_is_the_file(arenas, threads):
    case = Case(arenas)
    case.staged.complete()
    receipts = case.write(fail, threads=threads)
    assert [name for name, *_ in receipts] == ["model-00000.safetensors", "objects.msgpack"]
    written = case.written()
    assert written == case.images()
    for plan in plan_rank_files(STATE.plan, 0):
        for item in plan.items:
            start = plan.header.nbytes + item.span.start
            data = written[plan.name][start : start + item.span.nbytes]
            assert data == STATE.tensors[item.fqn].of(item.cell)
    case.follower.close()


def test_what_is_written_nowhere_is_digested_and_the_arena_is_the_file_all_the_same(arenas):
    case = Case(arenas)
    case.staged.complete()
    receipts, images = case.write(fail), case.images()
    case.follower.close()
    again = Case(arenas)
    again.staged.complete()
    for image, (_, header, _) in zip(again.staged._images, again.staged._files, strict=True):
        image[:header] = bytes(header)
    assert again.images() != images
    assert again.write(fail, storage=NullStorage()) == receipts
    assert (again.images(), again.written()) == (images, {})
    again.follower.close()


def test_what_is_not_staged_yet_is_waited_for(arenas):
    case = Case(arenas)
    # Whenever the writer finds that there is nothing to write, the trainer takes one step.
    arena, images = case.staged.arena, case.staged._images
    _, header, data = case.staged._files[0]
    start = arena.spans.images[0].start
    done = header

    def step() -> None:
        nonlocal done
        stop = min(done + 100_000, header + len(data))
        images[0][done:stop] = data[done - header : stop - header]
        done = stop
        arena.advance(start + done)
        if done == header + len(data):
            case.staged.complete()

    case.write(step)
    assert case.written() == case.images()
    assert case.written()["model-00000.safetensors"][header:] == data
    case.follower.close()


def test_a_large_block_goes_from_the_arena_to_the_storage_without_a_copy(arenas):
    case = Case(arenas)
    case.staged.complete()
    case.write(fail)
    assert case.written() == case.images()
    first = address_of(case.followed.images[0])
    in_place = sum(
        nbytes for offset, address, nbytes in case.storage.wrote if address == first + offset
    )
    assert in_place >= len(STATE.tensors["model.large"].data)
    case.follower.close()


def test_a_write_ends_when_nothing_more_will_come(arenas):
    case = Case(arenas)
    with pytest.raises(CheckpointError, match="nothing more will come"):
        case.write(fail)
    case.staged.stage(1)
    with pytest.raises(CheckpointError, match="nothing more will come"):
        Staging(case.followed, fail).await_complete()
    with pytest.raises(CheckpointError, match="nothing more will come"):
        Staging(case.followed, fail).check()
    case.follower.close()


def test_a_trainer_that_stages_nothing_more_is_logged_and_then_named(arenas, monkeypatch, caplog):
    case, now = Case(arenas), [0.0]
    own = find_process(os.getpid())
    assert own is not None
    monkeypatch.setattr(staged_save, "running_time", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda _: None)

    def step() -> None:
        now[0] += 10
        if now[0] == 280:
            case.staged.stage(1)  # it counts from here

    hello = Hello("job", 0, 1, Settings(), None, own)
    with (
        pytest.raises(RankError, match="has staged nothing more of /ck for 300 s") as caught,
        caplog.at_level(logging.WARNING, "dist_ckpt"),
    ):
        Staging(case.followed, step, hello).await_complete()
    assert f"the trainer of rank 0 (process {own.pid} is running)" in str(caught.value)
    assert now[0] == 580
    assert len(caplog.messages) == 2
    for line in caplog.messages:
        assert line.endswith("nothing more of /ck for 30 s; the limit is 300 s")
    case.follower.close()


def test_what_became_complete_before_the_end_is_taken(arenas):
    case = Case(arenas)

    def complete_and_fail() -> None:
        case.staged.complete()
        fail()

    case.write(complete_and_fail)
    assert case.written() == case.images()
    Staging(case.followed, fail).await_complete()
    case.follower.close()


def test_a_snapshot_that_is_overwritten_meanwhile_is_told(arenas):
    case = Case(arenas)

    def overwrite() -> None:
        Staged(case.staged.arena, STATE, Path("/other"), name=new_id())

    with pytest.raises(ConflictError, match="was overwritten in memory"):
        case.write(overwrite)
    with pytest.raises(ConflictError, match="was overwritten in memory"):
        Staging(case.followed, nothing).await_complete()
    case.follower.close()


def test_a_snapshot_of_other_files_than_planned_is_refused(arenas):
    case = Case(arenas)
    other = State(1, {"large": (2501, 1000)})
    with pytest.raises(CorruptError, match="has other files than its plan"):
        open_staged_files(
            case.followed, Staging(case.followed, fail), plan_rank_files(other.plan, 0)
        )
    with pytest.raises(CorruptError, match="has other files than its plan"):
        open_staged_files(case.followed, Staging(case.followed, fail), ())
    case.follower.close()
