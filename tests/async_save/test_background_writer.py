"""Background writers in processes of their own: they commit, or all are told why not."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace as replace_config
from pathlib import Path

import pytest
from msgspec.structs import replace

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.arena import Arena, ArenaPool
from dist_ckpt.async_save.snapshots.arena_layout import arena_nbytes
from dist_ckpt.async_save.snapshots.job_folder import JobFolder, RankFolder
from dist_ckpt.async_save.trainer.writer_handle import start_writer
from dist_ckpt.async_save.writer.background_writer import MAX_LOG_NBYTES
from dist_ckpt.async_save.writer.writer_messages import (
    Abort,
    Close,
    Done,
    Go,
    LinkClosedError,
    Pause,
    Paused,
    Ping,
    Pong,
    Ready,
)
from dist_ckpt.core.runtime.host_memory import create_anonymous
from dist_ckpt.core.runtime.lock_files import owner_of
from dist_ckpt.errors import ConflictError, RankError, StorageError
from recovered_arenas import kept_in
from staged_saves import (
    ANSWER_S,
    CONFIG,
    STAGED_AT,
    Staged,
    State,
    Trainer,
    failure_of,
    hello,
    new_id,
    report_of,
    write_of,
    writers,
)

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(2), pytest.mark.timeout(120)]

ALONE = ("", 0, b"")
SHAPES = {"w": (12, 40), "v": (700, 600)}


class Job:
    """The folders, arenas and trainers of one job; nothing of it is left at the end."""

    def __init__(self, path: Path) -> None:
        self.folder = JobFolder(f"test-{secrets.token_hex(8)}")
        self.path = path
        self._arenas: dict[int, ArenaPool] = {}

    def ranks(self, world_size: int) -> list[RankFolder]:
        return [self.folder.rank(rank) for rank in range(world_size)]

    def staged(
        self, state: State, rank: int = 0, *, number: int = 0, name: str = "", path: str = "ck"
    ) -> Staged:
        arenas = self._arenas.setdefault(rank, ArenaPool(self.folder.rank(rank)))
        arena = arenas.open_fitting(number, 1 << 16)
        return Staged(arena, state, self.path / path, name=name or new_id(), rank=rank)

    def end(self) -> None:
        for arenas in self._arenas.values():
            arenas.close()
        for one in self.folder.rank_folders():
            one.remove()
        os.rmdir(self.folder.path)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.end()


def done(trainer: Trainer) -> Done:
    answer = trainer.hear(Done)
    assert isinstance(answer, Done)
    return answer


def check(path: Path, state: State) -> None:
    """Check that all of a state is in the checkpoint at a path."""
    assert dc.verify(path, level="full").ok
    with dc.open(path) as found:
        assert found.step == 7
        assert found.objects["step"] == 7
        assert {name: bytes(found[name][...].data) for name in found.tensors} == {
            name: saved.data for name, saved in state.tensors.items()
        }


def is_sealed(folder: RankFolder, staged: Staged) -> bool:
    """Say whether a restart can use a rank's part of a save."""
    with kept_in(folder) as (found, _):
        (kept,) = (one for one in found if one.snapshot.id == staged.snapshot.id)
        return kept.seal is not None


def order_all(
    job: Job, trainers: list[Trainer], state: State, *, path: str = "ck", number: int = 0
) -> list[Staged]:
    """Begin one save on all ranks and tell their writers; they meet in a store if need be."""
    name = new_id()
    staged = [
        job.staged(state, rank, name=name, path=path, number=number)
        for rank in range(len(trainers))
    ]
    store = store_of(trainers)
    for trainer, one in zip(trainers, staged, strict=True):
        trainer.link.send(write_of(one, number, store))
    return staged


def store_of(trainers: list[Trainer]) -> tuple[str, int, bytes]:
    if len(trainers) == 1:
        return ALONE
    if trainers[0].store is None:
        token = secrets.token_bytes(32)
        serving = trainers[0].serve(token)
        trainers[0].store = serving.host, serving.port, token
    return trainers[0].store


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_staged_is_committed_and_sealed(job, world_size):
    state = State(world_size, SHAPES)
    with writers(job.ranks(world_size)) as trainers:
        for turn in range(3):
            staged = order_all(job, trainers, state, path=f"ck{turn}", number=turn % 2)
            for one in staged:
                one.complete()
            answers = [done(trainer) for trainer in trainers]
            assert [one.failure for one in answers] == [None] * world_size
            reports = [report_of(one) for one in answers]
            assert len({(one.attempt, one.nbytes, one.num_files) for one in reports}) == 1
            assert set(reports[0].seconds) == {"claim", "write", "clean up"}
            assert all(one.storage_writes.nbytes > 400_000 for one in reports)
            check(job.path / f"ck{turn}", state)
            # Of when it was staged, not of when it was committed: another may be staged meanwhile.
            (summary,) = dc.checkpoints(job.path / f"ck{turn}")
            assert summary.saved_at == STAGED_AT
            assert dc.open(job.path / f"ck{turn}").index.save == staged[0].snapshot.id
            attempt = reports[0].attempt
            for rank, folder in enumerate(job.ranks(world_size)):
                with kept_in(folder) as (found, problems):
                    assert problems == []
                    kept = next(k for k in found if k.snapshot.id == staged[0].snapshot.id)
                    assert kept.seal is not None
                    assert kept.seal.attempt == attempt
                    for number, (name, nbytes, _, _) in enumerate(kept.seal.files):
                        data = bytearray(nbytes)
                        kept.read_into(number, 0, memoryview(data))
                        on_disk = job.path / f"ck{turn}" / attempt / name
                        assert bytes(data) == on_disk.read_bytes(), rank
        for trainer in trainers:
            trainer.link.send(Close())
        assert [trainer.wait() for trainer in trainers] == [0] * world_size
        assert "ended: everything is settled" in trainers[0].log()
        assert "ERROR" not in trainers[0].log()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_trainer_that_dies_after_staging_leaves_a_checkpoint(job, world_size):
    state = State(world_size, SHAPES)
    with writers(job.ranks(world_size)) as trainers:
        staged = order_all(job, trainers, state)
        for one in staged[:-1]:
            one.complete()
        staged[-1].complete()
        trainers[-1].link.close()
        assert trainers[-1].wait() == 0
        assert [done(trainer).failure for trainer in trainers[:-1]] == [None] * (world_size - 1)
        check(job.path / "ck", state)


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (3, 0), (3, 2)])
def test_a_trainer_that_dies_while_it_stages_leaves_nothing(job, world_size, rank):
    state = State(world_size, SHAPES)
    with writers(job.ranks(world_size)) as trainers:
        staged = order_all(job, trainers, state)
        for number, one in enumerate(staged):
            if number != rank:
                one.complete()
        wait_for_attempt(job.path / "ck")
        trainers[rank].link.close()
        assert trainers[rank].wait() == 0
        for number, trainer in enumerate(trainers):
            if number != rank:
                failure = failure_of(done(trainer))
                assert failure.kind == "RankError"
                assert failure.rank == rank
                assert f"the trainer of rank {rank} has ended" in failure.message
        with pytest.raises(dc.NotFoundError):
            dc.open(job.path / "ck")
        assert not (job.path / "ck").exists()


@pytest.mark.waits
def test_who_still_writes_when_the_trainer_of_rank_0_has_died_is_told_of_it(job):
    state = State(2, SHAPES)
    with writers(job.ranks(2), cap=2e5) as trainers:
        staged = order_all(job, trainers, state)
        staged[1].complete()
        wait_for_attempt(job.path / "ck")
        trainers[0].link.close()
        failure = failure_of(done(trainers[1]))
        assert (failure.kind, failure.rank) == ("RankError", 0)
        assert "the trainer of rank 0 has ended" in failure.message


@pytest.mark.waits
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("trainer_dies", [True, False])
def test_a_writer_does_not_wait_long_for_one_that_never_came(job, rank, trainer_dies):
    state = State(2, SHAPES)
    config = replace_config(CONFIG, join_timeout_s=10_000.0)
    with writers(job.ranks(2), config=config) as trainers:
        store = store_of(trainers)
        staged = job.staged(state, rank)
        staged.complete()
        trainers[rank].link.send(write_of(staged, 0, store))
        if trainer_dies:
            trainers[rank].link.close()
            assert trainers[rank].wait() == 0
        else:
            assert done(trainers[rank]).failure is not None
        assert f"rank {1 - rank} did not call background save" in trainers[rank].log()
        assert trainers[1 - rank].process.poll() is None
        assert not (job.path / "ck").exists()


def test_the_death_of_a_writer_is_told_to_all_others_by_name(job):
    state = State(3, SHAPES)
    with writers(job.ranks(3), python=sys.executable) as trainers:
        for one in order_all(job, trainers, state, path="first"):
            one.complete()
        for trainer in trainers:
            assert done(trainer).failure is None
        staged = order_all(job, trainers, state)
        trainers[1].process.kill()
        assert trainers[1].wait() == -signal.SIGKILL
        for one in staged:
            one.complete()
        for trainer in (trainers[0], trainers[2]):
            failure = failure_of(done(trainer))
            assert is_sealed(trainer.folder, staged[0])
            assert failure.rank == 1
            assert "is dead or frozen" in failure.message
            assert "background writer" in failure.message
        with pytest.raises(LinkClosedError):
            trainers[1].link.receive(ANSWER_S)
        check(job.path / "first", state)
        with pytest.raises(dc.NotFoundError):
            dc.open(job.path / "ck")


def test_a_new_store_brings_a_new_writer_and_the_old_ones_together(job):
    state = State(2, SHAPES)
    folders = job.ranks(2)
    with writers(folders, python=sys.executable) as trainers:
        for one in order_all(job, trainers, state, path="first"):
            one.complete()
        assert [done(trainer).failure for trainer in trainers] == [None, None]
        trainers[1].process.kill()
        trainers[1].wait()
        link, process = start_writer(folders[1], hello(folders[1], 2))
        try:
            again = [trainers[0], Trainer(folders[1], link, process)]
            trainers[0].store = None
            for one in order_all(job, again, state):
                one.complete()
            assert [done(trainer).failure for trainer in again] == [None, None]
            check(job.path / "ck", state)
        finally:
            process.kill()
            process.wait()
            link.close()


def test_of_stores_that_no_save_was_ordered_in_only_the_newest_is_served(job):
    with writers(job.ranks(1), python=sys.executable) as (trainer,):
        num_open = []
        for _ in range(3):
            trainer.serve(secrets.token_bytes(32))
            num_open.append(len(os.listdir(f"/proc/{trainer.process.pid}/fd")))
        assert num_open[0] == num_open[-1]


def test_the_log_does_not_grow_for_ever(job):
    state = State(1, SHAPES)
    with writers(job.ranks(1)) as trainers:
        (trainer,) = trainers
        os.truncate(trainer.folder.log_path, MAX_LOG_NBYTES + 1)
        for one in order_all(job, trainers, state):
            one.complete()
        assert done(trainer).failure is None
        assert "is committed" in trainer.log()
        assert os.path.getsize(trainer.folder.log_path) < 1 << 16


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_could_not_be_staged_fails_on_all_ranks_and_the_next_one_succeeds(job, rank):
    state = State(2, SHAPES)
    with writers(job.ranks(2)) as trainers:
        staged = order_all(job, trainers, state)
        staged[1 - rank].complete()
        trainers[rank].link.send(Abort(staged[0].snapshot.id, "the device is on fire"))
        for trainer in trainers:
            failure = failure_of(done(trainer))
            assert failure.rank == rank
            assert "the device is on fire" in failure.message
        for one in order_all(job, trainers, state, number=1):
            one.complete()
        assert [done(trainer).failure for trainer in trainers] == [None, None]
        check(job.path / "ck", state)


def test_an_abort_of_what_is_complete_changes_nothing(job):
    state = State(1, SHAPES)
    with writers(job.ranks(1)) as (trainer,):
        staged = job.staged(state)
        staged.complete()
        trainer.link.send(write_of(staged))
        trainer.link.send(Abort(staged.snapshot.id, "too late"))
        assert done(trainer).failure is None
        check(job.path / "ck", state)


def test_an_arena_that_holds_something_else_fails_the_save_on_all_ranks(job):
    state = State(2, SHAPES)
    with writers(job.ranks(2)) as trainers:
        store = store_of(trainers)
        name = new_id()
        staged = [job.staged(state, rank, name=name) for rank in range(2)]
        for one in staged:
            one.complete()
        job.staged(state, 1, path="other")
        for trainer, one in zip(trainers, staged, strict=True):
            trainer.link.send(write_of(one, 0, store))
        for trainer in trainers:
            failure = failure_of(done(trainer))
            assert (failure.kind, failure.rank) == ("ConflictError", 1)
        lost = write_of(staged[0], 0, store)
        trainers[0].link.send(lost)
        trainers[1].link.send(
            replace(lost, arena_path=f"{job.folder.path}/rank-00001/none", number=1)
        )
        for trainer in trainers:
            failure = failure_of(done(trainer))
            assert (failure.kind, failure.rank) == ("ConflictError", 1)
            assert "was removed" in failure.message
        trainers[0].link.send(lost)
        trainers[1].link.send(replace(lost, arena_path=staged[1].arena.path, number=7))
        for trainer in trainers:
            assert "arena 7 of rank 1 does not exist" in failure_of(done(trainer)).message


def test_writers_that_were_told_different_saves_commit_neither(job):
    state = State(2, SHAPES)
    with writers(job.ranks(2)) as trainers:
        store = store_of(trainers)
        for rank, trainer in enumerate(trainers):
            staged = job.staged(state, rank)
            staged.complete()
            trainer.link.send(write_of(staged, 0, store))
        for trainer in trainers:
            failure = failure_of(done(trainer))
            assert failure.kind == "ConflictError"
            assert "do not write the same save" in failure.message
        assert not (job.path / "ck").exists()


def test_a_save_is_paused_then_dropped_or_released(job):
    state = State(1, SHAPES)
    with writers(job.ranks(1)) as (trainer,):
        # As long as the first is not complete, nothing after it begins.
        first = job.staged(state, path="first")
        trainer.link.send(write_of(first))
        wait_for_attempt(job.path / "first")
        for path, drop in (("second", True), ("third", False)):
            staged = job.staged(state, number=1, path=path)
            staged.complete()
            trainer.link.send(write_of(staged, 1))
            trainer.link.send(Pause(staged.snapshot.id))
            assert trainer.hear() == Paused(staged.snapshot.id, is_paused=True)
            trainer.link.send(Go(staged.snapshot.id, drop=drop))
        trainer.link.send(Pause(first.snapshot.id))
        assert trainer.hear() == Paused(first.snapshot.id, is_paused=False)
        first.complete()
        for one in (first, staged):
            answer = done(trainer)
            assert (answer.snapshot, answer.failure) == (one.snapshot.id, None)
        assert sorted(one.name for one in job.path.iterdir()) == ["first", "third"]
        trainer.link.send(Close())
        assert trainer.wait() == 0


def test_a_save_that_is_paused_when_the_trainer_dies_is_committed(job):
    state = State(1, SHAPES)
    with writers(job.ranks(1)) as (trainer,):
        first = job.staged(state, path="first")
        trainer.link.send(write_of(first))
        second = job.staged(state, number=1)
        second.complete()
        trainer.link.send(write_of(second, 1))
        trainer.link.send(Pause(second.snapshot.id))
        assert trainer.hear() == Paused(second.snapshot.id, is_paused=True)
        trainer.link.close()
        assert trainer.wait() == 0
        check(job.path / "ck", state)
        assert not (job.path / "first").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_writer_that_is_told_to_end_abandons_what_is_under_way(job, rank):
    state = State(2, SHAPES)
    with writers(job.ranks(2)) as trainers:
        for one in order_all(job, trainers, state, path="first"):
            one.complete()
        assert [done(trainer).failure for trainer in trainers] == [None, None]
        staged = order_all(job, trainers, state)
        staged[1 - rank].complete()
        wait_for_attempt(job.path / "ck", f"model-{rank:05d}.safetensors")
        trainers[rank].process.terminate()
        assert trainers[rank].wait() == 128 + signal.SIGTERM
        failure = failure_of(done(trainers[1 - rank]))
        assert failure.rank == rank
        assert "TerminatedError" in failure.message
        assert "it received signal" in trainers[rank].log()
        assert not (job.path / "ck").exists()
        folders = job.ranks(2)
        assert owner_of(f"{folders[rank].path}/writer.lock") is None
        assert is_sealed(folders[1 - rank], staged[0])
        assert not is_sealed(folders[rank], staged[0])


@pytest.mark.waits
def test_what_is_staged_when_a_writer_is_told_to_end_is_sealed(job):
    state = State(1, SHAPES)
    with writers(job.ranks(1), cap=1e5) as (trainer,):
        staged = [job.staged(state, number=number, path=f"ck{number}") for number in range(2)]
        for number, one in enumerate(staged):
            one.complete()
            trainer.link.send(write_of(one, number))
        trainer.link.send(Ping())
        trainer.hear(Pong)  # so it has heard of both
        wait_for_attempt(job.path / "ck0", "model-00000.safetensors")
        trainer.process.terminate()
        assert trainer.wait() == 128 + signal.SIGTERM
        assert list(job.path.iterdir()) == []
        assert [is_sealed(trainer.folder, one) for one in staged] == [True, True]


# A writer that hangs in its storage when it makes a file of rank 0 durable.
HANGS = """
import os, sys, time
from dist_ckpt.async_save.writer import background_writer
from dist_ckpt.core.storage.local import local_storage as local

def sync(fd, real=local._sync):
    if "/model-00000" in os.readlink(f"/proc/self/fd/{fd}"):
        print("the storage hangs", file=sys.stderr, flush=True)
        time.sleep(600)
    real(fd)

local._sync = sync
sys.exit(background_writer.main(sys.argv[-1:]))
"""


def test_what_is_staged_when_a_writer_is_told_to_end_while_its_storage_hangs_is_sealed(
    job, tmp_path_factory
):
    python = tmp_path_factory.mktemp("python") / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{HANGS}' \"$@\"\n")
    python.chmod(0o700)
    state = State(2, SHAPES)
    with writers(job.ranks(2), python=str(python)) as trainers:
        first = order_all(job, trainers, state)
        second = order_all(job, trainers, state, path="second", number=1)
        for one in (*first, *second):
            one.complete()
        while "the storage hangs" not in trainers[0].log():
            time.sleep(0.001)
        for _ in range(2):
            trainers[0].process.terminate()
        assert trainers[0].wait() == 128 + signal.SIGTERM
        assert "background writer of rank 0" in failure_of(done(trainers[1])).message
        (folder, _) = job.ranks(2)
        assert [is_sealed(folder, one[0]) for one in (first, second)] == [True, True]
        assert trainers[0].log().count("ended: it received signal") == 1


def test_a_writer_that_is_told_again_and_again_to_end_does_what_it_did_when_told_once(job):
    state = State(1, SHAPES)
    with writers(job.ranks(1), python=sys.executable) as (trainer,):
        first = job.staged(state, path="first")
        first.complete()
        trainer.link.send(write_of(first))
        assert done(trainer).failure is None
        staged = job.staged(state, number=1)
        staged.stage(1)
        trainer.link.send(write_of(staged, 1))
        wait_for_attempt(job.path / "ck", "model-00000.safetensors")
        # Each rank of a new run on this host tells every writer that is left.
        while trainer.process.poll() is None:
            trainer.process.terminate()
            time.sleep(0.0005)
        assert trainer.wait() == 128 + signal.SIGTERM
        assert "Traceback" not in trainer.log()
        assert trainer.log().count("ended: it received signal") == 1
        assert not (job.path / "ck").exists()
        check(job.path / "first", state)
        assert job.ranks(1)[0].owner("writer") is None


def wait_for_attempt(path: Path, file: str = "claim.json") -> None:
    """Wait until an attempt at a path has a file: the test's own deadline ends this."""
    while True:
        with suppress(FileNotFoundError):
            if any((attempt / file).exists() for attempt in path.iterdir()):
                return
        time.sleep(0.001)


def test_a_writer_without_work_ends_when_it_is_told_to(job):
    with writers(job.ranks(1), python=sys.executable) as (trainer,):
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(trainer.process.pid, number)
        trainer.link.send(Pause("0" * 32))
        assert trainer.hear() == Paused("0" * 32, is_paused=False)
        trainer.process.terminate()
        assert trainer.wait() == 128 + signal.SIGTERM


def test_a_writer_that_was_told_to_end_and_hangs_ends_all_the_same():
    hangs = """if True:
        import os, signal, time
        from dist_ckpt.async_save.writer.background_writer import Termination
        termination = Termination(end_s=1.0)
        termination.set_seal(lambda: time.sleep(600))
        termination.begin()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        except SystemExit:
            time.sleep(600)
        """
    ended = subprocess.run(
        [sys.executable, "-c", hangs], capture_output=True, text=True, timeout=ANSWER_S, check=False
    )
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    # A sleep that begins as the interrupt comes is not ended by it.
    assert re.search("line (9|11) in <module>", ended.stderr)


def test_only_a_writer_that_was_told_to_end_can_be_interrupted():
    told = """if True:
        import os, signal, time
        from dist_ckpt.async_save.writer.background_writer import Termination
        sealed = []
        termination = Termination()
        termination.set_seal(lambda: sealed.append(1))
        termination.begin()
        os.kill(os.getpid(), signal.SIGUSR1)
        termination.check()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            while True:  # a pause that begins when the signal is here would last
                time.sleep(0.01)
        except SystemExit as error:
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGTERM)
                termination.finish()
            except SystemExit:
                print(sealed, error)
        """
    ended = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, timeout=ANSWER_S, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "[1] it received signal 15\n"


def test_a_rank_has_one_writer(job):
    (folder,) = job.ranks(1)
    with writers([folder]) as (trainer,):
        with pytest.raises(ConflictError, match="has a living writer of rank 0"):
            start_writer(folder, hello(folder, 1))
        assert trainer.process.poll() is None
        trainer.link.close()
        assert trainer.wait() == 0
    with writers([folder]):
        pass


def test_settings_that_make_no_sense_are_told(job):
    (folder,) = job.ranks(1)
    for said, match in [
        (replace(hello(folder, 1), rank=1), "rank 1 of 1"),
        (hello(folder, 1, cap=-1.0), "max_bytes_per_s"),
    ]:
        with pytest.raises(ValueError, match=match):
            start_writer(folder, said)


def test_a_writer_that_does_not_start_is_told_with_its_log(job, monkeypatch):
    (folder,) = job.ranks(1)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RankError, match=r"does not start: it has ended immediately.*writer\.log"):
        start_writer(folder, hello(folder, 1))


def test_a_writer_that_cannot_be_started_is_told_as_an_error_of_ours(job, monkeypatch):
    (folder,) = job.ranks(1)
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/no/such/program")
        with pytest.raises(StorageError, match=r"cannot be started: No such file.*writer\.log"):
            start_writer(folder, hello(folder, 1))
    os.unlink(folder.log_path)
    os.symlink("/dev/null", folder.log_path)
    with pytest.raises(StorageError, match=r"writer\.log is a link, .* remove it, or"):
        start_writer(folder, hello(folder, 1))
    os.unlink(folder.log_path)
    os.mkfifo(folder.log_path)  # to open it would take until somebody reads from it
    with pytest.raises(StorageError, match=r"writer\.log is a pipe, .* remove it, or"):
        start_writer(folder, hello(folder, 1))
    os.unlink(folder.log_path)


@pytest.mark.parametrize("first", [b"", Ready(1)])
def test_nonsense_on_the_link_ends_the_writer(job, first):
    (folder,) = job.ranks(1)
    with writers([folder]) as (trainer,):
        if first:
            trainer.link.send(first)
        else:
            end = socket.socket(fileno=os.dup(trainer.link._end.fileno()))
            end.sendall(struct.pack(">I", 1 << 31))
            end.close()
        assert trainer.wait() == 1
        assert "invalid" in trainer.log() or "sent a Ready" in trainer.log()


def test_memory_without_a_name_outlives_the_trainer_that_made_it(job):
    """The descriptor of the trainer is closed: what is left is the writer's."""
    state = State(1, SHAPES)
    (folder,) = job.ranks(1)
    with writers([folder], python=sys.executable) as (trainer,):
        fd = create_anonymous(1 << 20)
        arena = Arena(folder.publish("trainer", 0, fd), fd, folder.job)
        staged = Staged(arena, state, job.path / "ck", name=new_id())
        assert arena.nbytes >= arena_nbytes(staged.snapshot)
        trainer.link.send(write_of(staged))
        wait_for_attempt(job.path / "ck")
        staged.complete()
        arena.close()
        assert done(trainer).failure is None
        place = f"/proc/{trainer.process.pid}/fd/"
        assert [one for one in folder.open_paths(0) if one.startswith(place)]
        with kept_in(folder) as ((kept,), _):
            assert kept.snapshot == staged.snapshot
            assert kept.seal is not None
        check(job.path / "ck", state)


def test_an_arena_that_was_made_anew_in_the_same_place_is_opened_anew(job):
    state, larger = State(1, SHAPES), State(1, {"w": (3000, 70)}, seed=1)
    (folder,) = job.ranks(1)
    with writers([folder]) as (trainer,):
        first = job.staged(state, path="first")
        first.complete()
        trainer.link.send(write_of(first))
        assert done(trainer).failure is None
        os.unlink(first.arena.path)
        job._arenas.pop(0).close()
        second = job.staged(larger)
        assert second.arena.path == first.arena.path
        second.complete()
        trainer.link.send(write_of(second))
        assert done(trainer).failure is None
        check(job.path / "ck", larger)


def test_a_failed_save_leaves_an_older_checkpoint_as_it_was(job):
    state = State(1, SHAPES)
    with writers(job.ranks(1)) as (trainer,):
        for turn in range(2):
            staged = job.staged(state, number=turn)
            staged.complete()
            trainer.link.send(write_of(staged, turn))
            answer = done(trainer)
            assert (answer.failure is None) == (turn == 0)
        assert failure_of(answer).kind == "ExistsError"
        check(job.path / "ck", state)


def test_the_writer_runs_at_a_low_priority_in_a_session_of_its_own(job):
    with writers(job.ranks(1), python=sys.executable) as (trainer,):
        pid = trainer.process.pid
        assert os.getsid(pid) == pid
        assert os.getpriority(os.PRIO_PROCESS, pid) >= os.getpriority(os.PRIO_PROCESS, 0)
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
