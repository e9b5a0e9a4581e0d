"""Requests to save and their answers: each put once, whole, and never somebody else's."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dist_ckpt.core.commit.records.incarnations import LivenessFile, begin_incarnation
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError, StorageError
from dist_ckpt.runs import save_requests
from dist_ckpt.runs.save_requests import (
    RequestNames,
    list_requests,
    put_answer,
    read_answer,
    read_request,
    remove_request_file,
    request_save,
    wait_for_answer,
)
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage

ROOT = "/runs"
FOLDER = f"{ROOT}/.requests"
SAVED = (500, Attempt(1000, "0123456789abcdef"))


def run_of(storage: Storage, root: str = ROOT, *, starts: int = 1) -> Storage:
    for number in range(starts):
        begin_incarnation(storage, root, restored=None, why="there was none", by=f"job {number}")
    return storage


def test_a_request_is_read_and_answered(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    storage = run_of(LocalStorage(), root, starts=2)
    assert list_requests(storage, root) == RequestNames((), (), ())
    asked = request_save(storage, root, stops=True)
    assert (asked.incarnation, asked.stops) == (2, True)
    assert read_request(storage, root, asked.id) == asked
    assert read_answer(storage, root, asked.id) is None
    put_answer(storage, root, asked.id, "saved", "it is durable", SAVED)
    answer = wait_for_answer(storage, root, asked, timeout_s=0)
    assert answer is not None
    assert (answer.outcome, answer.saved, answer.why) == ("saved", SAVED, "it is durable")
    assert list_requests(storage, root) == RequestNames((asked.id,), (asked.id,), ())
    names = {path.name for path in (tmp_path / "run/.requests").iterdir()}
    assert names == {f"request-{asked.id}.json", f"answer-{asked.id}.json"}


def test_where_no_job_has_begun_nothing_is_asked(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotFoundError, match=r"no job is writing here.*give the root of a"):
            request_save(LocalStorage(), str(root), stops=False)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("data", [b"", b'{"format":{"version":2,"requires":[]}}'])
def test_a_start_that_cannot_be_read_is_told(data: bytes) -> None:
    storage = MemoryStorage(
        {ROOT: None, f"{ROOT}/.incarnations": None, f"{ROOT}/.incarnations/1.json": data}
    )
    with pytest.raises((CorruptError, IncompatibleError), match=r"/runs/.incarnations/1\.json"):
        request_save(storage, ROOT, stops=False)


def test_requests_at_once_are_requests_of_their_own(tmp_path: Path) -> None:
    storage, root = run_of(LocalStorage(), str(tmp_path)), str(tmp_path)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: request_save(LocalStorage(), root, stops=False), range(6)))
    assert {one.id for one in found} == set(list_requests(storage, root).requests)
    assert len({one.id for one in found}) == 6


def test_the_first_answer_stands() -> None:
    storage = run_of(MemoryStorage({ROOT: None}))
    asked = request_save(storage, ROOT, stops=False)
    put_answer(storage, ROOT, asked.id, "ended", "incarnation 2 has begun")
    put_answer(storage, ROOT, asked.id, "saved", "it is durable", SAVED)
    answer = read_answer(storage, ROOT, asked.id)
    assert answer is not None
    assert (answer.outcome, answer.saved) == ("ended", None)
    assert list_requests(storage, ROOT).temporary == ()


def test_who_waits_sees_the_answer_when_it_comes() -> None:
    storage = run_of(MemoryStorage({ROOT: None}))
    asked = request_save(storage, ROOT, stops=False)
    late = threading.Timer(0.1, put_answer, (storage, ROOT, asked.id, "failed", "no space"))
    late.start()
    answer = wait_for_answer(storage, ROOT, asked, timeout_s=30, poll_s=0.01)
    late.join()
    assert answer is not None
    assert answer.why == "no space"


def test_what_nobody_answers_is_taken_back() -> None:
    storage = run_of(MemoryStorage({ROOT: None}))
    mine, other = (request_save(storage, ROOT, stops=False) for _ in range(2))
    assert wait_for_answer(storage, ROOT, mine, timeout_s=0.05, poll_s=0.01) is None
    assert list_requests(storage, ROOT).requests == (other.id,)
    assert read_request(storage, ROOT, mine.id) is None


def test_who_asks_a_start_that_has_ended_does_not_wait_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save_requests, "LIVENESS_EXPIRED_S", 0.2)
    storage = run_of(MemoryStorage({ROOT: None}))
    sign = LivenessFile(storage, ROOT, 1)
    sign.renew()
    ends = threading.Timer(0.5, sign.end)
    ends.start()
    asked, began = request_save(storage, ROOT, stops=True), time.monotonic()
    assert wait_for_answer(storage, ROOT, asked, timeout_s=10_000, poll_s=0.01) is None
    waited_s = time.monotonic() - began
    ends.join()
    assert waited_s >= 0.5  # not before it has ended
    assert list_requests(storage, ROOT).requests == ()


def test_an_answer_that_comes_as_it_is_taken_back_counts() -> None:
    class Slow(MemoryStorage):
        def remove(self, path: str) -> None:
            if "request-" in path:
                put_answer(self, ROOT, asked.id, "saved", "just now", SAVED)
            super().remove(path)

    storage = Slow({ROOT: None})
    run_of(storage)
    asked = request_save(storage, ROOT, stops=False)
    answer = wait_for_answer(storage, ROOT, asked, timeout_s=0)
    assert answer is not None
    assert answer.why == "just now"


def test_what_is_not_ours_is_left_out(tmp_path: Path) -> None:
    storage, root = run_of(LocalStorage(), str(tmp_path)), str(tmp_path)
    asked = request_save(storage, root, stops=False)
    folder = tmp_path / ".requests"
    for name in ("notes", "request-1.json", f"Request-{asked.id}.json", f"{asked.id}.json"):
        (folder / name).write_text("")
    (folder / f"request-{'1' * 16}.json").mkdir()
    (folder / f"answer-{'2' * 16}.json").symlink_to(folder / "notes")
    (folder / f".record-{'3' * 16}.tmp").write_text("")
    temporary = (f".record-{'3' * 16}.tmp",)
    assert list_requests(storage, root) == RequestNames((asked.id,), (), temporary)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", CorruptError),
        (b"x" * (2 << 20), CorruptError),
        (b'{"format":{"version":2,"requires":[]}}', IncompatibleError),
        (None, CorruptError),
    ],
)
def test_damage_is_told_by_the_name_of_the_file(data: bytes | None, error: type[Exception]) -> None:
    own_id = "0" * 16
    storage = run_of(MemoryStorage({ROOT: None}))
    asked = request_save(storage, ROOT, stops=False)
    put_answer(storage, ROOT, asked.id, "failed", "no space")
    tree = storage.tree() if isinstance(storage, MemoryStorage) else {}
    for kind, read in (("request", read_request), ("answer", read_answer)):
        file = f"{FOLDER}/{kind}-{own_id}.json"
        content = tree[f"{FOLDER}/{kind}-{asked.id}.json"] if data is None else data
        with pytest.raises(error, match=file):
            read(MemoryStorage({**tree, file: content}), ROOT, own_id)


@pytest.mark.parametrize("done", [False, True])
def test_a_fault_at_any_call_leaves_the_request_or_says_that_it_is_not_certain(done: bool) -> None:
    number = 0
    while True:
        number += 1
        inner = MemoryStorage({ROOT: None})
        run_of(inner)
        storage = FaultyStorage(
            inner, fail_at_call=number, error=StorageError("planted"), done=done
        )
        try:
            asked = request_save(storage, ROOT, stops=False)
        except StorageError:
            assert not (done and storage.failed.startswith("rename"))
        else:
            assert list_requests(inner, ROOT).requests == (asked.id,)
        if not storage.failed:
            return


def test_a_request_outlives_any_crash() -> None:
    disk = CrashStorage()
    disk.make_folder(ROOT)
    disk.sync("/")
    run_of(disk.client("job"))
    asked = request_save(disk.client("a"), ROOT, stops=False)
    disk.mark("asked")
    put_answer(disk.client("job"), ROOT, asked.id, "failed", "no space")
    disk.mark("answered")
    for point, left in states(disk.log):
        names = list_requests(left, ROOT)
        assert "asked" not in point.marks or names.requests == (asked.id,)
        assert "answered" not in point.marks or names.answers == (asked.id,)
        for own_id in names.requests:
            assert read_request(left, ROOT, own_id) == asked
        for own_id in names.answers:
            assert read_answer(left, ROOT, own_id) is not None


def test_what_is_gone_is_removed_without_complaint() -> None:
    remove_request_file(MemoryStorage({ROOT: None}), ROOT, "request-1.json")
