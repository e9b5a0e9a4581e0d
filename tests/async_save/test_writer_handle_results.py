"""A handle tells what has become of its save, to whoever asks, as often as they ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.async_save.trainer import writer_handle
from dist_ckpt.async_save.trainer.writer_handle import SaveHandle, WriterHandle
from dist_ckpt.async_save.writer.writer_messages import Hello
from dist_ckpt.core.comm.rank_messages import Failure
from dist_ckpt.errors import StorageError
from dist_ckpt.settings import Settings
from fake_writers import A_REPORT, SOON_S, FakeWriter, order

FULL = Failure("StorageError", "rank 0 (host a): the disk is full", 0, "write")


@pytest.fixture
def fake() -> Iterator[FakeWriter]:
    found = FakeWriter()
    yield found
    found.end()


@pytest.fixture
def writer(
    fake: FakeWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WriterHandle]:
    monkeypatch.setattr(writer_handle, "start_writer", fake.start)
    folder = JobFolder("job", roots=[str(tmp_path)]).rank(0)
    made = WriterHandle(folder, Hello("job", 0, 1, Settings(), None))
    made.ensure_running()
    yield made
    made.kill()


def handle_of(writer: WriterHandle, name: str) -> SaveHandle:
    report: Any = lambda done: f"report of {done.attempt}"  # noqa: E731
    return SaveHandle(f"/ck/{name}", 1, writer, order(writer, name), report)


def test_a_save_that_is_durable_has_its_report(writer, fake):
    handle = handle_of(writer, "a")
    assert not handle.done()
    fake.settle("a")
    expected: Any = f"report of {A_REPORT.attempt}"
    assert handle.result(SOON_S) == handle.result(0) == expected
    assert handle.done()
    assert not handle.skipped
    assert not handle.superseded


def test_running_out_of_time_says_so_and_tells_nothing_else(writer, fake):
    handle = handle_of(writer, "a")
    with pytest.raises(
        TimeoutError, match=r"/ck/a: not durable within 0\.01 s; the save continues"
    ):
        handle.result(0.01)
    with pytest.raises(TimeoutError, match=r"/ck/a: not staged within 0\.01 s; the save continues"):
        handle.wait_staged(0.01)
    fake.settle("a", FULL)
    assert writer.wait_for(lambda: not writer.unsettled, SOON_S)
    # The next save is to raise it: nobody was told yet.
    assert len(writer.failed) == 1


def test_a_failure_is_raised_as_often_as_it_is_asked_for_and_then_by_nobody_else(writer, fake):
    handle = handle_of(writer, "a")
    fake.settle("a", FULL)
    for _ in range(2):
        with pytest.raises(StorageError, match="the disk is full"):
            handle.result(SOON_S)
    assert writer.failed == []


def test_a_save_that_was_superseded_or_skipped_has_no_report(writer):
    handle = handle_of(writer, "a")
    (its,) = writer.saves
    assert writer.pause(its.snapshot)
    writer.end_pause(its.snapshot, drop=True)
    skipped = SaveHandle("/ck/b", 1)
    for one in (handle, skipped):
        one.wait_staged(0) if one is skipped else None
        assert one.done()
        assert one.result(0) is None
        assert one.exception(0) is None
    assert (handle.superseded, handle.skipped) == (True, False)
    assert (skipped.superseded, skipped.skipped) == (False, True)
