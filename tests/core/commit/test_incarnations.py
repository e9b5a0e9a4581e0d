"""A start is recorded once, durably; what older ones have above it is orphaned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from dist_ckpt.core.commit.records import incarnations
from dist_ckpt.core.commit.records.incarnations import (
    Incarnation,
    IncarnationHistory,
    begin_incarnation,
    newest_incarnation,
    read_history,
)
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.run_records import IncarnationRecord, decode_record, encode_record
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import ConflictError, CorruptError, IncompatibleError, StorageError
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage

ROOT = "/runs"
ATTEMPT = Attempt(7, "0123456789abcdef")


def start(storage: Storage, root: str = ROOT, by: str = "job 1") -> IncarnationRecord:
    return begin_incarnation(storage, root, restored=(500, ATTEMPT), why="the newest", by=by)


def test_starts_count_up_and_the_newest_is_found(tmp_path: Path) -> None:
    storage, root = LocalStorage(), str(tmp_path / "a" / "runs")
    assert newest_incarnation(storage, root) is None
    first = start(storage, root)
    second = begin_incarnation(storage, root, restored=None, why="there was none", by="job 2")
    assert (first.number, second.number) == (1, 2)
    assert newest_incarnation(storage, root) == second
    assert (first.restored, second.restored) == ((500, ATTEMPT), None)
    assert {path.name for path in (tmp_path / "a/runs/.incarnations").iterdir()} == {
        "1.json",
        "2.json",
    }


def test_starts_at_once_have_numbers_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda i: start(LocalStorage(), str(tmp_path), f"{i}"), range(6)))
    assert sorted(one.number for one in found) == [1, 2, 3, 4, 5, 6]
    assert newest_incarnation(LocalStorage(), str(tmp_path)) == max(
        found, key=lambda one: one.number
    )


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
            assert newest_incarnation(inner, ROOT) == made
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
        newest = newest_incarnation(left, ROOT)
        assert newest in (None, first, second)
        assert "first" not in point.marks or newest is not None
        assert "second" not in point.marks or newest == second


def test_a_newest_start_that_cannot_be_read_is_never_passed_over(tmp_path: Path) -> None:
    start(LocalStorage(), str(tmp_path))
    record = tmp_path / ".incarnations" / "1.json"
    (tmp_path / ".incarnations" / "5.json").write_bytes(record.read_bytes())
    with pytest.raises(
        CorruptError, match=r"5\.json: it is the record of incarnation 1; remove it"
    ):
        start(LocalStorage(), str(tmp_path))
    (tmp_path / ".incarnations" / "5.json").write_bytes(record.read_bytes()[:-9])
    with pytest.raises(CorruptError):
        start(LocalStorage(), str(tmp_path))
    (tmp_path / ".incarnations" / "5.json").write_bytes(b'{"format":{"version":2,"requires":[]}}')
    with pytest.raises(IncompatibleError):
        start(LocalStorage(), str(tmp_path))


@pytest.mark.parametrize("at", [1e18, 1e300, -1.0])
def test_a_start_of_no_date_is_damaged(at: float) -> None:
    data = encode_record(IncarnationRecord(7, ATTEMPT.id, None, "", "somebody", at))
    with pytest.raises(CorruptError, match=r"7\.json, at: .* is not a time with a date"):
        decode_record(data, IncarnationRecord, "7.json")


def test_no_start_has_a_number_beyond_the_attempts(tmp_path: Path) -> None:
    start(LocalStorage(), str(tmp_path))
    data = (tmp_path / ".incarnations" / "1.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incarnations, "MAX_INCARNATION", 1)
        with pytest.raises(StorageError, match="there are 1 incarnations: use another root"):
            start(LocalStorage(), str(tmp_path))
    assert (tmp_path / ".incarnations" / "1.json").read_bytes() == data


def test_a_run_goes_back_from_start_to_start_and_all_else_is_left_behind() -> None:
    storage = MemoryStorage({ROOT: None})
    assert not read_history(storage, ROOT).is_orphaned(9, ATTEMPT)

    def begin_from(step: int | None, start: int = 0) -> None:
        restored = None if step is None else (step, Attempt(1000 * start + 3, ATTEMPT.id))
        begin_incarnation(storage, ROOT, restored=restored, why="", by="")

    def kept() -> dict[int, list[int]]:
        history, steps = read_history(storage, ROOT), (0, 200, 201, 500, 501)
        return {
            start: [n for n in steps if not history.is_orphaned(n, attempt)]
            for start in range(history.newest + 2)
            for attempt in [Attempt(1000 * start + 999, ATTEMPT.id)]
        }

    everything = [0, 200, 201, 500, 501]
    begin_from(None)
    assert kept() == {0: [], 1: everything, 2: everything}  # what is newer was not known yet
    begin_from(500, 1)
    assert kept() == {0: [], 1: [0, 200, 201, 500], 2: everything, 3: everything}
    begin_from(200, 1)
    assert kept() == {0: [], 1: [0, 200], 2: [], 3: everything, 4: everything}
    begin_from(501, 2)  # back to what was orphaned
    assert kept()[1] == [0, 200, 201, 500]
    assert kept()[2] == everything
    assert kept()[3] == []
    begin_from(None)
    assert kept() == {0: [], 1: [], 2: [], 3: [], 4: [], 5: everything, 6: everything}


def test_without_going_back_left_behind_is_what_lies_above_the_step_of_a_later_start() -> None:
    """Choose at random, but only what is not orphaned: then the shorter rule says the same."""
    random = Random(13)
    for _ in range(300):
        records: dict[int, IncarnationRecord] = {}
        saved = [(step, Attempt(7, ATTEMPT.id)) for step in (1, 2, 3)]
        for number in range(1, 7):
            history = IncarnationHistory(dict(records))
            good = [one for one in saved if not history.is_orphaned(*one)]
            restored = random.choice([*good, None])
            records[number] = IncarnationRecord(number, ATTEMPT.id, restored, "", "", 0.0)
            first = 1 + (restored[0] if restored else 0)
            mine = Attempt(1000 * number, ATTEMPT.id)
            saved += [(step, mine) for step in range(first, first + random.randint(0, 4))]
        for step, attempt in saved:
            is_below = any(
                number > attempt.incarnation and (one.restored is None or one.restored[0] < step)
                for number, one in records.items()
            )
            assert IncarnationHistory(records).is_orphaned(step, attempt) == is_below


def test_a_start_is_above_that_of_what_it_restored() -> None:
    storage = MemoryStorage({ROOT: None})  # a copy of a root, without its hidden folders
    copied = Attempt(5003, ATTEMPT.id)
    made = begin_incarnation(
        storage, ROOT, restored=(500, copied), why="the newest", by="job 1", after=0
    )
    assert made.number == 6
    history = read_history(storage, ROOT)
    assert not history.is_orphaned(500, copied)
    assert history.is_orphaned(501, copied)
    # What the starts before have saved, of which nothing is known, may be all that there is.
    assert not history.is_orphaned(400, Attempt(2001, ATTEMPT.id))
    assert not history.is_orphaned(400, Attempt(1, ATTEMPT.id))
    assert history.is_orphaned(501, Attempt(2001, ATTEMPT.id))


def test_a_start_is_refused_that_chose_before_another_began() -> None:
    storage = MemoryStorage({ROOT: None})
    assert read_history(storage, ROOT).newest == 0
    start(storage, by="job 1 on a")
    with pytest.raises(
        ConflictError, match=r"incarnation 1 of this run, job 1 on a, has begun while"
    ):
        begin_incarnation(storage, ROOT, restored=None, why="", by="job 2", after=0)
    assert begin_incarnation(storage, ROOT, restored=None, why="", by="job 2", after=1).number == 2


def test_an_older_start_is_refused_once_a_newer_one_has_begun() -> None:
    storage = MemoryStorage({ROOT: None})
    older = Incarnation(ROOT, start(storage, by="job 1 on a").number)
    older.check(storage)
    newer = Incarnation(ROOT, start(storage, by="job 2 on b").number)
    newer.check(storage)
    with pytest.raises(
        ConflictError, match="incarnation 2 of this run, job 2 on b, has taken over"
    ):
        older.check(storage)
    assert (older.first, newer.first) == (1000, 2000)


def test_a_history_with_a_start_that_cannot_be_read_is_no_history(tmp_path: Path) -> None:
    for _ in range(2):
        start(LocalStorage(), str(tmp_path))
    (tmp_path / ".incarnations" / "1.json").write_bytes(b"{}")
    with pytest.raises(
        (CorruptError, IncompatibleError),
        match=r"1\.json.*it is unknown from which checkpoint incarnation 1",
    ):
        read_history(LocalStorage(), str(tmp_path))
    newest_incarnation(LocalStorage(), str(tmp_path))
