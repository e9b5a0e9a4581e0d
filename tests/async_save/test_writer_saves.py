"""What a writer makes of one save, in this process: the report, the cap, and what is refused."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Iterator
from dataclasses import replace as replace_config
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dist_ckpt.async_save.snapshots.arena import ArenaPool, ArenaReader
from dist_ckpt.async_save.snapshots.arena_layout import HEADER_NBYTES
from dist_ckpt.async_save.snapshots.recovered_snapshots import RecoveredSnapshot, open_recovered
from dist_ckpt.async_save.writer import writer_saves
from dist_ckpt.async_save.writer.background_writer import StoreServers
from dist_ckpt.async_save.writer.writer_messages import Done, Hello, Serve, Write
from dist_ckpt.async_save.writer.writer_saves import WriterContext, WriterRendezvous, WriterSave
from dist_ckpt.core.comm.exchange.store_channel import StoreChannel
from dist_ckpt.core.comm.key_value.key_client import KeyClient
from dist_ckpt.core.storage.storage_wrappers import RateLimit
from dist_ckpt.errors import CheckpointError
from dist_ckpt.reports import IoCount
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from staged_saves import CONFIG, Staged, State, failure_of, new_id, report_of, write_of

STATE = State(1, {"w": (30, 40)})
ALONE = Hello("job", 0, 1, CONFIG, None)


def nothing(write: Write) -> None:
    """Say that a save may still come."""


def settled(
    arenas: ArenaPool,
    where: Path,
    hello: Hello = ALONE,
    state: State = STATE,
    allowance: RateLimit | None = None,
    /,
    **said: Any,
) -> Done:
    staged = Staged(arenas.open_fitting(0, 1 << 16), state, where, name=new_id())
    staged.complete()
    follower = ArenaReader(staged.arena.path, "job")
    write = replace(write_of(staged), **said)
    saves = WriterContext(hello, WriterRendezvous(hello), nothing, allowance)
    done = WriterSave(saves, write, follower).settle()
    follower.close()
    return done


def test_a_save_that_is_settled_keeps_no_arena(arenas, tmp_path):
    staged = Staged(arenas.open_fitting(0, 1 << 16), STATE, tmp_path / "ck", name=new_id())
    staged.complete()
    follower = ArenaReader(staged.arena.path, "job")
    saves = WriterContext(ALONE, WriterRendezvous(ALONE), nothing)
    save = WriterSave(saves, write_of(staged), follower)
    assert save.settle().failure is None
    arena = weakref.ref(follower)
    gc.disable()
    try:
        del save, follower
        assert arena() is None
    finally:
        gc.enable()


def test_a_save_is_reported_with_its_costs(arenas, tmp_path):
    done = settled(arenas, tmp_path / "ck")
    assert done.failure is None
    assert report_of(done).num_files == 2
    assert (report_of(done).exchanges, report_of(done).nbytes_receipt) == (IoCount(2, 0), 0)
    assert report_of(done).storage_writes.nbytes > report_of(done).nbytes > 4800
    assert report_of(done).storage_reads.num == 1


def kept(arenas: ArenaPool) -> RecoveredSnapshot:
    """Return what a restart would find."""
    found = open_recovered(arenas.open_fitting(0, 1).path, "job")
    assert found is not None
    found.close()
    return found


def wipe(arenas: ArenaPool) -> None:
    """Forget the headers of what was staged before."""
    memory = arenas.open_fitting(0, 1 << 16).memory
    memory[HEADER_NBYTES:] = bytes(len(memory) - HEADER_NBYTES)


def images_in(arenas: ArenaPool) -> list[bytes]:
    memory, there = arenas.open_fitting(0, 1).memory, kept(arenas)
    return [bytes(memory[span.start : span.stop]) for span in there.spans.images]


def test_wherever_the_storage_fails_what_is_staged_is_sealed_as_if_it_had_been_written(
    arenas, monkeypatch
):
    storage: FaultyStorage
    monkeypatch.setattr(writer_saves, "open_storage", lambda path: (storage, str(path)))
    storage = FaultyStorage(MemoryStorage({"/root": None}))
    assert settled(arenas, Path("/root/ck")).failure is None
    assert kept(arenas).is_committed
    seal, images = kept(arenas).seal, images_in(arenas)
    assert seal is not None
    attempts = set()
    for failed_at in count(1):
        inner = MemoryStorage({"/root": None})
        storage = FaultyStorage(inner, fail_at_call=failed_at, sticky=True)
        wipe(arenas)
        done = settled(arenas, Path("/root/ck"))
        found = kept(arenas)
        assert found.is_committed == (done.failure is None)
        assert found.seal is not None
        assert found.seal.files == seal.files, failed_at
        assert images_in(arenas) == images
        attempts.add(found.seal.attempt[:3])
        if not storage.failed:
            break
    assert failed_at > 15
    assert attempts == {"", "a1-"}


def test_what_is_not_complete_when_its_save_has_failed_is_sealed_only_if_it_will_be(
    arenas, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("no folder")
    for is_aborted in (True, False):
        staged = Staged(arenas.open_fitting(0, 1 << 16), STATE, tmp_path / "file/ck", name=new_id())
        follower = ArenaReader(staged.arena.path, "job")
        calls = count()

        def check(
            write: Write,
            staged: Staged = staged,
            is_aborted: bool = is_aborted,
            calls: Iterator[int] = calls,
        ) -> None:
            if next(calls) == 0:  # the claim comes first
                return
            if is_aborted:
                raise CheckpointError("the trainer could not stage it")
            staged.complete()

        saves = WriterContext(ALONE, WriterRendezvous(ALONE), check)
        done = WriterSave(saves, write_of(staged), follower).settle()
        assert failure_of(done).kind == "ExistsError"
        follower.close()
        assert (kept(arenas).seal is None) == is_aborted


def test_what_a_writer_is_interrupted_in_the_sealing_of_can_be_sealed_again(arenas, tmp_path):
    (tmp_path / "file").write_text("no folder")
    staged = Staged(arenas.open_fitting(0, 1 << 16), STATE, tmp_path / "file/ck", name=new_id())
    follower = ArenaReader(staged.arena.path, "job")
    calls = count()

    def check(write: Write) -> None:
        if next(calls) == 1:  # the claim came first
            staged.complete()
            raise SystemExit

    saves = WriterContext(ALONE, WriterRendezvous(ALONE), check)
    save = WriterSave(saves, write_of(staged), follower)
    with pytest.raises(SystemExit):
        save.settle()
    assert kept(arenas).seal is None
    save.seal()
    follower.close()
    assert kept(arenas).seal is not None


def test_a_cap_is_kept_by_all_that_is_written_to_files(arenas, tmp_path):
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    allowance = RateLimit(1000, clock=lambda: now, sleep=sleep)
    done = settled(arenas, tmp_path / "ck", ALONE, STATE, allowance)
    assert done.failure is None
    written = sum(file.stat().st_size for file in (tmp_path / "ck").glob("*/*[ks]"))
    last = (tmp_path / "ck" / report_of(done).attempt / "objects.msgpack").stat().st_size
    assert written == report_of(done).nbytes
    assert now == pytest.approx((written - last) / 1000)


def test_a_snapshot_of_another_save_is_refused(arenas, tmp_path):
    for said, kind in [
        ({"path": "/other"}, "CorruptError"),
        ({"snapshot": "0" * 32}, "ConflictError"),
    ]:
        done = settled(arenas, tmp_path / "ck", **said)
        assert (done.report, failure_of(done).kind) == (None, kind)
        assert failure_of(done).rank == 0
        assert kept(arenas).seal is None
    done = settled(arenas, tmp_path / "ck", ALONE, State(2, {"w": (30, 40)}))
    assert "is of another save" in failure_of(done).message
    assert kept(arenas).seal is None
    assert not (tmp_path / "ck").exists()


def test_a_store_that_cannot_be_reached_is_told_at_once(arenas, tmp_path):
    config = replace_config(CONFIG, heartbeat_timeout_s=0.1)
    hello = Hello("job", 0, 2, config, None)
    state = State(2, {"w": (30, 40)})
    done = settled(arenas, tmp_path / "ck", hello, state, host="127.0.0.1", port=9, token=b"t" * 32)
    assert failure_of(done).kind == "RankError"
    assert "that the background writer of rank 0 serves is gone" in failure_of(done).message
    seal = kept(arenas).seal
    assert seal is not None
    assert seal.attempt == ""


def reaches(token: bytes, port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 60.0).close()
    except ConnectionRefusedError:
        return False
    KeyClient(("127.0.0.1", port), token, connect_s=60.0, timeout_s=60.0).close()
    return True


def test_a_store_is_served_until_no_save_needs_it():
    stores = StoreServers()
    tokens = [bytes([number]) * 32 for number in range(3)]
    ports = [stores.serve(Serve(token, "")).port for token in tokens]
    assert all(map(reaches, tokens, ports))
    stores.close_unused({tokens[1]})
    assert [*map(reaches, tokens, ports)] == [False, True, True]
    stores.close_unused(set())
    assert [*map(reaches, tokens, ports)] == [False, False, True]
    stores.close()
    assert not any(map(reaches, tokens, ports))


def test_a_store_for_other_hosts_is_reached_from_them():
    stores = StoreServers()
    serving = stores.serve(Serve(b"t" * 32, "127.0.0.1"))
    assert serving.host == "127.0.0.1"
    assert reaches(b"t" * 32, serving.port)
    stores.close()
    with pytest.raises(ValueError, match="token"):
        stores.serve(Serve(b"short", ""))


@pytest.mark.parametrize("is_early", [True, False])
def test_a_writer_without_trainer_waits_less_long_for_others(is_early):
    stores = StoreServers()
    serving = stores.serve(Serve(b"t" * 32, ""))
    meetings = WriterRendezvous(Hello("job", 0, 2, CONFIG, None))
    write = Write("0" * 32, "/ck", "", 0, serving.host, serving.port, b"t" * 32)
    if is_early:
        meetings.hurry()
    channel = meetings.open_channel(write)
    assert isinstance(channel, StoreChannel)
    expected = CONFIG.heartbeat_timeout_s if is_early else 3 * CONFIG.heartbeat_timeout_s
    assert channel._state.unseen_timeout_s == expected
    meetings.hurry()
    assert channel._state.unseen_timeout_s == CONFIG.heartbeat_timeout_s
    assert meetings.open_channel(write) is channel
    meetings.close()
    stores.close()
