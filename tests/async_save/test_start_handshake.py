"""The first exchange of a background save: all ranks raise, skip, drop and meet alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dist_ckpt.async_save.snapshots.job_folder import JobFolder, RankFolder
from dist_ckpt.async_save.trainer import start_handshake, writer_handle
from dist_ckpt.async_save.trainer.start_handshake import (
    SaverInfo,
    StartDecision,
    WhenBusy,
    agree_on_start,
)
from dist_ckpt.async_save.trainer.writer_handle import WriterHandle
from dist_ckpt.async_save.writer.writer_messages import Go, Hello, Serve, StoreAddress
from dist_ckpt.core.comm.rank_messages import Failure
from dist_ckpt.core.comm.session import Session
from dist_ckpt.errors import RankError, StorageError
from dist_ckpt.testing.thread_channel import TEST_CONFIG
from fake_writers import SOON_S, FakeWriter, order
from ranks import run_ranks

FULL = Failure("StorageError", "rank 1 (host b): the disk is full", 1, "write")
HEARSAY = Failure("RankError", "rank 0 (host a): rank 1 is dead or frozen", 1, "write")
OLD_STORE = ("old store", 1, b"t")


class Rank:
    """One rank: its session, its writer, and who plays that."""

    def __init__(self, session: Session, writer: WriterHandle, fake: FakeWriter) -> None:
        self.number = session.channel.rank
        self.session = session
        self.writer = writer
        self.fake = fake

    def agree(self, when_busy: WhenBusy = "wait") -> StartDecision | None:
        with self.session.operation("background save to /ck"):
            return agree_on_start(
                self.session, lambda: self.writer, SaverInfo("job", None, when_busy), lambda: False
            )

    def error(self) -> Exception:
        """Return what the exchange raises; it must."""
        with pytest.raises((RankError, StorageError)) as told:
            self.agree()
        return told.value

    def await_settled(self) -> None:
        assert self.writer.wait_for(lambda: not self.writer.unsettled, SOON_S)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that runs another on some ranks, and returns what it returned on each."""
    fakes: dict[int, FakeWriter] = {}

    def start(folder: RankFolder, hello: Hello) -> object:
        if fakes[hello.rank].process.poll() is not None:
            fakes[hello.rank].end()
            fakes[hello.rank] = FakeWriter()
        return fakes[hello.rank].start(folder, hello)

    @contextmanager
    def rank_of(channel: Any, bulk: Any) -> Iterator[Rank]:
        rank = channel.rank
        fakes[rank] = FakeWriter()
        folder = JobFolder("job", roots=[str(tmp_path)]).rank(rank)
        writer = WriterHandle(folder, Hello("job", rank, 2, TEST_CONFIG, None))
        writer.ensure_running()
        yield Rank(Session(channel, bulk, TEST_CONFIG), writer, fakes[rank])
        writer.kill()

    def on_ranks(function: Callable[[Rank], Any], world_size: int = 2, **options: Any) -> Any:
        def run_rank(rank: int, channel: Any, bulk: Any) -> Any:
            with rank_of(channel, bulk) as one:
                return function(one)

        return run_ranks(run_rank, world_size=world_size, harness="threads", **options)

    monkeypatch.setattr(writer_handle, "start_writer", start)
    yield on_ranks
    for fake in fakes.values():
        fake.end()


# --- when it begins ----------------------------------------------------------------------------


def test_a_save_begins_after_the_one_before_whatever_the_clock_says(run, monkeypatch):
    clocks = iter([5e8, 4e8])
    monkeypatch.setattr(time, "time", lambda: next(clocks))

    def rank(one: Rank) -> bool:
        if one.number == 1:
            one.writer.newest_at = 1e9  # of an earlier run, whose coordinator's clock was ahead
        first, second = one.agree(), one.agree()
        assert first is not None
        assert second is not None
        return 1e9 < first.began_at < second.began_at < 1e9 + 1

    assert run(rank) == [True, True]


@pytest.mark.parametrize(
    ("machines", "peer"), [(["a", "a"], ""), (["a", "b"], "trainer-0"), (["", ""], "")]
)
def test_hosts_of_one_name_meet_where_the_ranks_of_the_job_did(machines, peer, run, monkeypatch):
    """At the loopback address, a writer of another host would not find the store."""
    monkeypatch.setenv("MASTER_ADDR", "trainer-0")
    monkeypatch.setattr(start_handshake, "_own_machine", iter(machines).__next__)
    peers: list[str] = []
    serve_store = WriterHandle.serve_store

    def serve(writer: WriterHandle, peer_host: str) -> StoreAddress:
        peers.append(peer_host)
        return serve_store(writer, peer_host)

    monkeypatch.setattr(WriterHandle, "serve_store", serve)
    run(lambda one: one.agree(), hosts=["clone", "clone"])
    assert peers == [peer]


# --- failures ----------------------------------------------------------------------------------


def test_a_failure_that_one_rank_knows_is_raised_once_on_all(run):
    def rank(one: Rank) -> str:
        order(one.writer, "a")
        if one.number == 1:
            one.fake.settle("a", FULL)
            one.await_settled()
        error = one.error()
        if one.number == 0:
            one.fake.settle("a", FULL)  # it comes to know of it later
        assert one.agree() is not None
        assert one.writer.failed == one.writer.unsettled == []
        assert any("was not begun" in note for note in error.__notes__)
        return f"{type(error).__name__}: {error}"

    assert run(rank) == [f"StorageError: {FULL.message}"] * 2


def test_the_rank_whose_writer_died_says_how(run):
    def rank(one: Rank) -> str:
        order(one.writer, "a")
        if one.number == 1:
            one.fake.end()
        else:
            one.fake.settle("a", HEARSAY)
        one.await_settled()
        return str(one.error())

    for message in run(rank):
        assert "rank 1" in message
        assert "the background writer has ended (signal 9)" in message


def test_all_failures_are_told(run):
    def rank(one: Rank) -> list[str]:
        for name in "ab":
            order(one.writer, name)
            told = Failure("StorageError", f"rank 0 (host a): {name} is gone", 0, "write")
            one.fake.settle(name, told)
        one.await_settled()
        error = one.error()
        assert one.agree() is not None
        return [str(error), *error.__notes__]

    for first, second, _ in run(rank):
        assert "a is gone" in first
        assert "b is gone" in second


def test_who_has_asked_the_handle_is_not_told_again(run):
    def rank(one: Rank) -> bool:
        order(one.writer, "a").is_reported = True
        one.fake.settle("a", FULL)
        return one.agree() is not None

    assert run(rank) == [True, True]


def test_a_save_is_no_failure_if_a_writer_died_when_others_had_committed_it(run, caplog):
    def rank(one: Rank) -> bool:
        order(one.writer, "a", OLD_STORE)
        if one.number == 1:
            one.fake.end()
        else:
            one.fake.settle("a")
        one.await_settled()
        start = one.agree()
        assert start is not None
        assert start.store != OLD_STORE
        assert one.writer.failed == []
        order(one.writer, "b")
        return bool(one.writer.unsettled)  # there is a writer, to write it

    assert run(rank) == [True, True]
    assert "other ranks report that this save is committed" in caplog.text


# --- busy --------------------------------------------------------------------------------------


def test_all_skip_if_one_is_busy_and_none_if_nobody_is(run):
    def rank(one: Rank) -> list[bool]:
        found = [one.agree("skip") is None]
        for name in "ab":
            order(one.writer, name)
            if one.number == 0:
                one.fake.settle(name)
        return [*found, one.agree("skip") is None]

    assert run(rank) == [[False, True]] * 2


@pytest.mark.parametrize("begun_on", [None, 0, 1])
def test_a_save_is_superseded_on_all_ranks_or_on_none(run, begun_on):
    def rank(one: Rank) -> list[bool]:
        one.fake.is_begun = one.number == begun_on
        orders = [order(one.writer, name) for name in "ab"]
        start = one.agree("supersede")
        assert start is not None
        one.writer.serve_store("")  # answered after all that was said before
        said = [told for told in one.fake.heard if isinstance(told, Go)]
        # What is superseded stays paused, until all agree on what takes its place.
        is_let_go = begun_on not in (None, one.number)
        assert said == [Go("b", drop=False)] * is_let_go
        return [start.queued == one.snapshot for one in orders]

    assert run(rank) == [[False, begun_on is None]] * 2


def test_what_is_paused_goes_on_if_nobody_is_busy(run):
    def rank(one: Rank) -> bool:
        order(one.writer, "a")
        start = one.agree("supersede")
        assert start is not None
        one.writer.serve_store("")
        return not start.queued and Go("a", drop=False) in one.fake.heard

    assert run(rank) == [True, True]


def test_different_ways_to_be_busy_are_refused_on_all_ranks(run):
    def rank(one: Rank) -> str:
        with pytest.raises(ValueError, match="different when_busy") as told:
            one.agree("skip" if one.number else "wait")
        return str(told.value)

    assert len(set(run(rank))) == 1


# --- where the writers meet --------------------------------------------------------------------


def store_of(one: Rank) -> tuple[str, int, bytes]:
    start = one.agree()
    assert start is not None
    return start.store


def test_writers_that_have_met_meet_there_again(run):
    def rank(one: Rank) -> list[Any]:
        first = store_of(one)
        order(one.writer, "a", first)
        one.fake.settle("a")
        return [first, store_of(one), sum(isinstance(told, Serve) for told in one.fake.heard)]

    (first, again, num_served), (its, its_again, num_others) = run(rank)
    assert first == again == its == its_again
    assert (num_served, num_others) == (1, 0)


@pytest.mark.parametrize("what", ["failed", "died"])
def test_after_a_failure_they_meet_anew(run, what):
    def rank(one: Rank) -> bool:
        order(one.writer, "a", OLD_STORE).is_reported = True
        if one.number == 1 and what == "died":
            one.fake.end()
            one.await_settled()
        else:
            one.fake.settle("a", FULL if what == "failed" else None)
        return store_of(one) != OLD_STORE

    assert run(rank) == [True, True]


def test_one_rank_alone_meets_nobody(run):
    assert run(store_of, 1) == [("", 0, b"")]


@pytest.mark.parametrize(
    "place",
    [
        None,
        ["host", 80],
        ["", 80, bytes(32)],
        ["h" * 1000, 80, bytes(32)],
        ["host", 1 << 16, bytes(32)],
        ["host", 0, bytes(32)],
        ["host", "80", bytes(32)],
        ["host", 80, b"short"],
        [b"host", 80, bytes(32)],
    ],
)
def test_a_place_to_meet_that_is_none_is_refused(run, monkeypatch, place):
    monkeypatch.setattr(start_handshake, "_choose_store", lambda *_: place)
    is_strange = place is None or [type(one) for one in place] != [str, int, bytes]
    told = "not a message" if is_strange else "rank 0 sent an invalid address for the store"
    for error in run(Rank.error):
        assert isinstance(error, RankError)
        assert told in str(error)
        assert "same version of dist_ckpt" in str(error)
