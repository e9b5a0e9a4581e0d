"""Facts are put once, whole and durable, whoever races, dies or is lied to."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dist_ckpt.core.commit.records.record_store import put_annotation, read_annotations
from dist_ckpt.core.format.filenames import AnnotationName, Attempt
from dist_ckpt.core.format.run_records import Annotation, encode_record
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import NotFoundError, StorageError
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage

ROOT = "/runs"
ATTEMPT = Attempt(1000, "0123456789abcdef")
FACT = Annotation(500, ATTEMPT, "metrics", {"val/loss": 0.5, "note": "nan"}, "rank 0 on a", 1.5)


def values(storage: Storage, root: str = ROOT) -> list[tuple[int, dict[str, object]]]:
    return [(one.name.number, dict(one.values)) for one in read_annotations(storage, root)]


def test_what_was_put_is_read(tmp_path: Path) -> None:
    storage, root = LocalStorage(), str(tmp_path / "runs")
    assert read_annotations(storage, root) == ()
    storage.make_folder(root)
    first = put_annotation(storage, root, FACT)
    second = put_annotation(storage, root, replace(FACT, values={"val/loss": None}))
    tag = put_annotation(storage, root, replace(FACT, kind="tag", values={"best": True}), above=7)
    older = put_annotation(storage, root, replace(FACT, step=7))
    names = [(one.step, one.name) for one in read_annotations(storage, root)]
    assert names == [(7, older), (500, first), (500, second), (500, tag)]
    assert [name.number for name in (first, second, tag, older)] == [1, 2, 8, 1]
    found = read_annotations(storage, root)[1]
    assert (found.attempt, found.values, found.problem) == (ATTEMPT, FACT.values, "")
    assert found.modified_at > 1e9
    (folder,) = (tmp_path / "runs" / ".annotations" / "500").iterdir()
    assert {path.name for path in folder.iterdir()} == {str(first), str(second), str(tag)}


def test_names_that_are_not_ours_are_left_out(tmp_path: Path) -> None:
    name = put_annotation(LocalStorage(), str(tmp_path), FACT)
    folder = tmp_path / ".annotations" / "500" / ATTEMPT.name
    data = (folder / str(name)).read_bytes()
    for strange in ("metrics-0-" + "0" * 16 + ".json", ".record-" + "0" * 16 + ".tmp", "x"):
        (folder / strange).write_bytes(data)
    (folder / f"pin-1-{'0' * 16}.json").mkdir()
    (tmp_path / ".annotations" / "0500").mkdir()
    (tmp_path / ".annotations" / "7").write_text("")
    (folder.parent / "notes").mkdir()
    assert [one.name for one in read_annotations(LocalStorage(), str(tmp_path))] == [name]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:-60], "does not end with its digest|not JSON"),
        (lambda data: data.replace(b"0.5", b"0.6"), "its digest is wrong"),
        (lambda _: b"", "not JSON"),
        (
            lambda _: encode_record(replace(FACT, step=7)),
            "it has metrics of a1000-.*, step 7; remove it",
        ),
        (lambda _: encode_record(replace(FACT, attempt=Attempt(1, "0" * 16))), "metrics of a1-0"),
        (lambda _: encode_record(replace(FACT, kind="pin")), "it has pin of a1000"),
        (lambda _: bytes(2 << 20), "the limit is 1048576"),
    ],
)
def test_a_fact_that_cannot_be_read_is_told_with_the_reason(tmp_path, change, problem):
    name = put_annotation(LocalStorage(), str(tmp_path), FACT)
    file = tmp_path / ".annotations" / "500" / ATTEMPT.name / str(name)
    file.write_bytes(change(file.read_bytes()))
    (found,) = read_annotations(LocalStorage(), str(tmp_path))
    assert (found.name, found.values) == (name, {})
    assert re.search(problem, found.problem)


def test_a_link_in_place_of_a_fact_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    name = put_annotation(LocalStorage(), str(tmp_path / "a"), FACT)
    file = tmp_path / "a" / ".annotations" / "500" / ATTEMPT.name / str(name)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert read_annotations(LocalStorage(), str(tmp_path / "a")) == ()


@pytest.mark.parametrize("done", [False, True])
def test_a_fault_at_any_call_leaves_the_fact_or_says_that_it_is_not_there(done: bool) -> None:
    told: set[bool] = set()
    number = 0
    while True:
        number += 1
        inner = MemoryStorage({ROOT: None})
        storage = FaultyStorage(
            inner, fail_at_call=number, error=StorageError("planted"), done=done
        )
        try:
            put_annotation(storage, ROOT, FACT)
            told.add(True)
        except StorageError:
            assert not (done and storage.failed.startswith("rename"))
            told.add(False)
        else:
            assert values(inner) == [(1, FACT.values)]
        assert all(one.problem == "" for one in read_annotations(inner, ROOT))
        if not storage.failed:
            break
    assert told == {True, False}
    assert number > 10


def test_what_was_put_outlives_any_crash_and_nothing_shows_in_part() -> None:
    disk = CrashStorage()
    disk.make_folder(ROOT)
    disk.sync("/")
    storage = disk.client("rank 0")
    put_annotation(storage, ROOT, FACT)
    disk.mark("first")
    put_annotation(storage, ROOT, replace(FACT, values={"val/loss": 0.4}))
    disk.mark("second")
    count = 0
    for point, left in states(disk.log):
        found = [values for _, values in values_of(left)]
        assert found in ([], [FACT.values], [FACT.values, {"val/loss": 0.4}], [{"val/loss": 0.4}])
        assert "first" not in point.marks or FACT.values in found
        assert "second" not in point.marks or len(found) == 2
        count += 1
    assert count > 10


def values_of(storage: Storage) -> list[tuple[int, dict[str, object]]]:
    assert all(one.problem == "" for one in read_annotations(storage, ROOT))
    return values(storage)


def test_facts_that_are_put_at_once_are_all_there(tmp_path: Path) -> None:
    def put(number: int) -> AnnotationName:
        return put_annotation(LocalStorage(), str(tmp_path), replace(FACT, values={"n": number}))

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(put, range(24)))
    found = read_annotations(LocalStorage(), str(tmp_path))
    assert {one.name for one in found} == set(names)
    assert {one.values["n"] for one in found} == set(range(24))


def test_a_fact_that_no_file_can_hold_is_refused_and_nothing_made(tmp_path: Path) -> None:
    for wrong in ({"x": float("nan")}, {"x": "y" * (1 << 20)}, {"x": "\ud800"}):
        with pytest.raises(ValueError, match=r"JSON compliant|the limit is|surrogates"):
            put_annotation(LocalStorage(), str(tmp_path), replace(FACT, values=wrong))
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_was_moved_meanwhile_is_not_made_again() -> None:
    storage = MemoryStorage({"/above": None})
    with pytest.raises(NotFoundError, match="/above/run was moved or removed: find it"):
        put_annotation(storage, "/above/run", FACT)
    assert storage.list("/above") == []


def test_where_no_number_is_left_nothing_is_put_that_nobody_would_see() -> None:
    storage = MemoryStorage({ROOT: None})
    with pytest.raises(StorageError, match="no number is left above 999999999999999999"):
        put_annotation(storage, ROOT, FACT, above=10**18 - 1)
    assert read_annotations(storage, ROOT) == ()
