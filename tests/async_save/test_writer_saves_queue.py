"""A writer's saves come in order, and arenas stay open for as long as somebody needs them."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from dist_ckpt.async_save.snapshots.arena import Arena, ArenaPool, ArenaReader
from dist_ckpt.async_save.writer.writer_messages import Hello, ProtocolError, Write
from dist_ckpt.async_save.writer.writer_saves import (
    MAX_SAVES,
    OpenArenas,
    WriterContext,
    WriterQueue,
    WriterRendezvous,
    WriterSave,
)
from dist_ckpt.core.runtime.host_memory import create_anonymous
from dist_ckpt.errors import CheckpointError, ConflictError, RankError
from staged_saves import CONFIG, Staged, State, new_id, write_of

STATE = State(1, {"w": (3, 4)})
HELLO = Hello("job", 0, 1, CONFIG, None)


def save(name: str, arena: ArenaReader | None = None) -> WriterSave:
    write = Write(name, f"/ck/{name}", "/dev/shm/none", 0, "", 0, b"")
    return saved(write, arena or ConflictError("no arena"))


def saved(write: Write, arena: ArenaReader | CheckpointError) -> WriterSave:
    return WriterSave(WriterContext(HELLO, WriterRendezvous(HELLO), lambda _: None), write, arena)


@pytest.fixture
def queue() -> WriterQueue:
    return WriterQueue(2)


def names(*saves: WriterSave | None) -> list[str]:
    return [one.write.snapshot for one in saves if one is not None]


def test_saves_come_in_order_and_then_the_end(queue):
    for name in "abc":
        queue.put(save(name))
    queue.end(is_trainer_gone=False)
    assert names(*(queue.take() for _ in range(3))) == ["a", "b", "c"]
    assert queue.take() is None
    with pytest.raises(ProtocolError):
        queue.put(save("d"))


def test_there_are_no_more_saves_than_anybody_has(queue):
    for number in range(MAX_SAVES):
        queue.put(save(str(number)))
    with pytest.raises(ProtocolError):
        queue.put(save("more"))


def test_only_what_has_not_begun_can_be_paused(queue):
    queue.put(save("a"))
    queue.put(save("b"))
    first = queue.take()
    assert names(first) == ["a"]
    assert not queue.pause("a")
    assert queue.pause("b")
    assert not queue.pause("c")
    queue.go("a", drop=True)
    queue.go("b", drop=True)
    assert queue.unsettled == [first]
    queue.put(save("c"))
    queue.go("c", drop=True)  # it is not paused
    assert names(*queue.unsettled) == ["a", "c"]


def test_unsettled_is_the_save_taken_last_and_what_is_queued(queue):
    assert queue.unsettled == []
    queue.put(save("a"))
    queue.put(save("b"))
    assert names(*queue.unsettled) == ["a", "b"]
    queue.take()
    assert names(*queue.unsettled) == ["a", "b"]
    with queue._changed:  # an interrupt has left it held
        assert names(*queue.unsettled) == ["a", "b"]
    queue.take()
    assert names(*queue.unsettled) == ["b"]
    queue.end(is_trainer_gone=False)
    assert queue.take() is None
    assert queue.unsettled == []


def test_a_save_that_is_paused_keeps_those_after_it_back(queue):
    queue.put(save("a"))
    queue.put(save("b"))
    assert queue.pause("a")
    taken: list[WriterSave | None] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    queue.go("a", drop=False)
    thread.join(60)
    assert names(*taken) == ["a"]


def test_the_end_lets_what_is_paused_go(queue):
    queue.put(save("a"))
    assert queue.pause("a")
    queue.end(is_trainer_gone=True)
    assert names(queue.take(), queue.take()) == ["a"]


def test_an_abort_meets_what_is_queued_and_what_has_begun(queue):
    begun, queued, other = save("a"), save("b"), save("c")
    for one in (begun, queued, other):
        queue.put(one)
    assert queue.take() is begun
    for name in ("a", "b", "unknown"):
        queue.abort(name, "on fire")
    for one in (begun, queued):
        with pytest.raises(CheckpointError, match="could not be staged: on fire") as caught:
            queue.check(one.write)
        assert caught.value.rank == 2
    queue.check(other.write)
    queue.end(is_trainer_gone=False)
    queue.check(other.write)
    queue.end(is_trainer_gone=True)
    with pytest.raises(RankError, match="the trainer of rank 2 has ended"):
        queue.check(other.write)


# --- arenas ----------------------------------------------------------------------------------


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_arena_is_opened_once_and_closed_at_the_end(arenas, rank_folder):
    known = OpenArenas(rank_folder)

    def follow(number: int) -> ArenaReader:
        staged = Staged(arenas.open_fitting(number, 1 << 16), STATE, Path("/ck"), name=new_id())
        follower = known.open(write_of(staged, number))
        assert isinstance(follower, ArenaReader)
        assert follower.follow(staged.snapshot.id).snapshot == staged.snapshot
        return follower

    for number in range(2):
        arenas.open_fitting(number, 1 << 16)
    gc.collect()
    before = open_fds()
    assert len({follow(turn % 2) for turn in range(5)}) == 2
    known.close()
    gc.collect()
    assert open_fds() == before


def test_an_arena_that_was_replaced_is_closed_once_no_save_needs_it(arenas, rank_folder):
    known = OpenArenas(rank_folder)
    first = Staged(arenas.open_fitting(0, 1 << 16), STATE, Path("/ck"), name=new_id())
    queued = known.open(write_of(first))
    assert isinstance(queued, ArenaReader)
    os.unlink(first.arena.path)
    again = ArenaPool(rank_folder)
    second = Staged(again.open_fitting(0, 1 << 16), STATE, Path("/ck"), name=new_id())
    follower = known.open(write_of(second))
    assert isinstance(follower, ArenaReader)
    assert follower.follow(second.snapshot.id).snapshot == second.snapshot
    assert queued.follow(first.snapshot.id).snapshot == first.snapshot
    before = open_fds()
    del queued
    assert open_fds() == before - 2  # its own, and that of what was mapped
    known.close()
    assert open_fds() == before - 4
    again.close()


def test_memory_without_a_name_is_told_and_outlives_who_made_it(rank_folder):
    known = OpenArenas(rank_folder)
    for turn in range(2):
        fd = create_anonymous(1 << 16)
        arenas = ArenaPool(rank_folder)
        place = rank_folder.publish("trainer", 1, fd)
        arena = Arena(place, fd, rank_folder.job)
        staged = Staged(arena, STATE, Path(f"/ck{turn}"), name=new_id())
        follower = known.open(write_of(staged, 1))
        assert isinstance(follower, ArenaReader)
        arena.close()
        arenas.close()
        assert f"/proc/{os.getpid()}/fd/{follower.fd}" in rank_folder.open_paths(1)
        assert follower.follow(staged.snapshot.id).snapshot == staged.snapshot
    known.close()


def test_what_is_no_arena_is_an_error_of_its_save(rank_folder):
    known = OpenArenas(rank_folder)
    path = f"{rank_folder.path}/arena-0"
    write = Write("a", "/ck", path, 0, "", 0, b"")
    for match in ("was removed", "is not an arena"):
        failure = saved(write, known.open(write)).settle().failure
        assert failure is not None
        assert match in failure.message
        Path(path).write_bytes(bytes(8192))
