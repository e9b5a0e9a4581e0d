"""A start is recorded once, durably; what older ones have above it is left behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dist_ckpt.commit import starts
from dist_ckpt.commit.starts import OfRun, begin, newest_start, read_history
from dist_ckpt.errors import ConflictError, CorruptError, IncompatibleError, StorageError
from dist_ckpt.format.filenames import Attempt
from dist_ckpt.format.root_records import RunStart
from dist_ckpt.storage import Storage
from dist_ckpt.storage.local import LocalStorage
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage

ROOT = "/runs"
ATTEMPT = Attempt(1000, "0123456789abcdef")


def start(storage: Storage, root: str = ROOT, by: str = "job 1") -> RunStart:
    return begin(storage, root, restored=(500, ATTEMPT), why="the newest", by=by)


def test_starts_count_up_and_the_newest_is_found(tmp_path: Path) -> None:
    storage, root = LocalStorage(), str(tmp_path / "a" / "runs")
    assert newest_start(storage, root) is None
    first = start(storage, root)
    second = begin(storage, root, restored=None, why="there was none", by="job 2")
    assert (first.number, second.number) == (1, 2)
    assert newest_start(storage, root) == second
    assert (first.restored, second.restored) == ((500, ATTEMPT), None)
    assert {path.name for path in (tmp_path / "a/runs/.starts").iterdir()} == {"1.json", "2.json"}


def test_starts_at_once_have_numbers_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda i: start(LocalStorage(), str(tmp_path), f"{i}"), range(6)))
    assert sorted(one.number for one in found) == [1, 2, 3, 4, 5, 6]
    assert newest_start(LocalStorage(), str(tmp_path)) == max(found, key=lambda one: one.number)


@pytest.mark.parametrize("done", [False, True])
def test_a_fault_at_any_call_leaves_the_start_or_says_that_it_is_not_certain(done: bool) -> None:
    number = 0
    while True:
        number += 1
        inner = MemoryStorage({ROOT: None})
        storage = FaultyStorage(
            inner, fail_at_call=number, error=StorageError("planted"), done=done
        )
        try:
            made = start(storage)
        except StorageError:
            assert not (done and storage.failed.startswith("rename"))
        else:
            assert newest_start(inner, ROOT) == made
            assert made.number == 1
        if not storage.failed:
            break
    assert number > 8


def test_a_start_outlives_any_crash() -> None:
    disk = CrashStorage()
    disk.make_folder(ROOT)
    disk.sync("/")
    first = start(disk.client("a"))
    disk.mark("first")
    second = start(disk.client("b"))
    disk.mark("second")
    for point, left in states(disk.log):
        newest = newest_start(left, ROOT)
        assert newest in (None, first, second)
        assert "first" not in point.marks or newest is not None
        assert "second" not in point.marks or newest == second


def test_a_newest_start_that_cannot_be_read_is_never_passed_over(tmp_path: Path) -> None:
    start(LocalStorage(), str(tmp_path))
    record = tmp_path / ".starts" / "1.json"
    (tmp_path / ".starts" / "5.json").write_bytes(record.read_bytes())
    with pytest.raises(CorruptError, match=r"5\.json: it is the record of start 1; remove it"):
        start(LocalStorage(), str(tmp_path))
    (tmp_path / ".starts" / "5.json").write_bytes(record.read_bytes()[:-9])
    with pytest.raises(CorruptError):
        start(LocalStorage(), str(tmp_path))
    (tmp_path / ".starts" / "5.json").write_bytes(b'{"format":{"version":2,"requires":[]}}')
    with pytest.raises(IncompatibleError):
        start(LocalStorage(), str(tmp_path))


def test_no_start_has_a_number_beyond_the_attempts(tmp_path: Path) -> None:
    start(LocalStorage(), str(tmp_path))
    data = (tmp_path / ".starts" / "1.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starts, "MAX_START", 1)
        with pytest.raises(StorageError, match="there are 1 starts: use another root"):
            start(LocalStorage(), str(tmp_path))
    assert (tmp_path / ".starts" / "1.json").read_bytes() == data


def test_what_older_starts_have_above_a_newer_ones_step_is_left_behind() -> None:
    storage = MemoryStorage({ROOT: None})
    assert not read_history(storage, ROOT).is_left_behind(9, ATTEMPT)
    for step in (None, 500, 200):
        restored = None if step is None else (step, ATTEMPT)
        begin(storage, ROOT, restored=restored, why="", by="")
    history = read_history(storage, ROOT)

    def left(start: int) -> list[int]:
        attempt = Attempt(1000 * start + 3, ATTEMPT.id)
        return [n for n in (0, 200, 201, 500, 501) if history.is_left_behind(n, attempt)]

    assert left(0) == [0, 200, 201, 500, 501]  # the first start began anew
    assert left(1) == left(2) == [201, 500, 501]
    assert left(3) == left(4) == []


def test_an_older_start_is_refused_once_a_newer_one_has_begun() -> None:
    storage = MemoryStorage({ROOT: None})
    older = OfRun(ROOT, start(storage, by="job 1 on a").number)
    older.check(storage)
    newer = OfRun(ROOT, start(storage, by="job 2 on b").number)
    newer.check(storage)
    with pytest.raises(ConflictError, match="start 2 of this run, job 2 on b, has taken over"):
        older.check(storage)
    assert (older.first, newer.first) == (1000, 2000)


def test_a_history_with_a_start_that_cannot_be_read_is_no_history(tmp_path: Path) -> None:
    for _ in range(2):
        start(LocalStorage(), str(tmp_path))
    (tmp_path / ".starts" / "1.json").write_bytes(b"{}")
    with pytest.raises((CorruptError, IncompatibleError), match=r"1\.json"):
        read_history(LocalStorage(), str(tmp_path))
    newest_start(LocalStorage(), str(tmp_path))
