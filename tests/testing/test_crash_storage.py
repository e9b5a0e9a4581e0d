"""The recording storage keeps the contract, and tells exactly what a crash may leave."""

from __future__ import annotations

import pytest

from dist_ckpt.core.storage import Storage
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.storage_contract import StorageContract, write

Tree = dict[str, bytes | None]


class TestCrashStorage(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        storage = CrashStorage()
        storage.make_folder("/root")
        return storage

    @pytest.fixture
    def root(self) -> str:
        return "/root"


def left(disk: CrashStorage, since: str, **options) -> list[Tree]:
    """Return what may be left by a crash after the mark, and before the next."""
    return [
        storage.tree()
        for point, storage in states(disk.log, since=since, **options)
        if point.marks[-1] == since
    ]


def same(found: list[Tree], expected: list[Tree]) -> bool:
    return sorted(map(repr, found)) == sorted(map(repr, expected))


def test_a_file_that_is_not_finished_may_have_lost_any_of_its_bytes():
    disk = CrashStorage()
    file = disk.create("/f", 4)
    disk.sync("/")
    file.write_at(2, b"cd")
    file.write_at(0, b"ab")
    disk.mark("written")
    contents = [b"", b"ab", b"\0\0\0\0", b"abcd"]
    assert same(left(disk, "written"), [{"/f": content} for content in contents])
    file.finish()
    disk.mark("finished")
    assert left(disk, "finished") == [{"/f": b"abcd"}]


def test_a_finished_file_without_a_synced_name_is_whole_or_not_there():
    disk = CrashStorage()
    write(disk, "/f", b"ab")
    disk.mark("finished")
    assert same(left(disk, "finished"), [{}, {"/f": b"ab"}])


def test_names_that_were_not_synced_are_there_in_any_combination():
    disk = CrashStorage()
    for name in "fgh":
        write(disk, f"/{name}", b"")
    disk.mark("written")
    assert len(left(disk, "written")) == 8


def test_a_rename_happens_whole_or_not_and_never_before_the_name_was_made():
    disk = CrashStorage()
    write(disk, "/old", b"1")
    disk.rename("/old", "/new")
    disk.mark("renamed")
    assert same(left(disk, "renamed"), [{}, {"/old": b"1"}, {"/new": b"1"}])
    disk.sync("/")
    disk.mark("synced")
    assert left(disk, "synced") == [{"/new": b"1"}]


def test_a_link_is_there_or_not_whatever_becomes_of_the_other_name():
    disk = CrashStorage()
    for folder in ("/a", "/b"):
        disk.make_folder(folder)
    write(disk, "/a/f", b"1")
    for folder in ("/", "/a"):
        disk.sync(folder)
    disk.link("/a/f", "/b/g")
    disk.remove("/a/f")
    disk.mark("linked")
    files = [sorted(path for path, data in tree.items() if data) for tree in left(disk, "linked")]
    assert sorted(files) == [[], ["/a/f"], ["/a/f", "/b/g"], ["/b/g"]]
    disk.sync("/b")
    disk.mark("synced")
    files = [sorted(path for path, data in tree.items() if data) for tree in left(disk, "synced")]
    assert sorted(files) == [["/a/f", "/b/g"], ["/b/g"]]


def test_a_name_is_not_taken_again_before_it_was_freed():
    disk = CrashStorage()
    write(disk, "/f", b"1")
    disk.sync("/")
    disk.remove("/f")
    write(disk, "/f", b"2")
    disk.mark("replaced")
    assert same(left(disk, "replaced"), [{"/f": b"1"}, {}, {"/f": b"2"}])


def test_what_is_in_a_folder_is_lost_with_the_folders_own_name_and_moves_with_it():
    disk = CrashStorage()
    disk.make_folder("/d")
    write(disk, "/d/f", b"1")
    disk.sync("/d")
    disk.mark("synced inside")
    assert same(left(disk, "synced inside"), [{}, {"/d": None, "/d/f": b"1"}])
    disk.sync("/")
    disk.rename("/d", "/e")
    disk.remove("/e/f")
    disk.mark("removed")
    folders = [{f"/{d}": None, **f} for d in "de" for f in ({}, {f"/{d}/f": b"1"})]
    assert same(left(disk, "removed"), folders)


def test_a_clients_sync_may_cover_its_own_names_only():
    disk = CrashStorage()
    write(disk.client("a"), "/f", b"")
    write(disk.client("b"), "/g", b"")
    disk.client("a").sync("/")
    disk.mark("synced")
    assert left(disk, "synced") == [{"/f": b"", "/g": b""}]
    assert same(left(disk, "synced", own_syncs=True), [{"/f": b""}, {"/f": b"", "/g": b""}])


def test_a_clients_sync_covers_what_its_own_names_build_on():
    disk = CrashStorage()
    write(disk.client("a"), "/old", b"1")
    disk.client("b").rename("/old", "/new")
    disk.client("b").sync("/")
    disk.mark("synced")
    assert left(disk, "synced", own_syncs=True) == [{"/new": b"1"}]


def test_a_forgotten_call_is_as_if_it_were_not_in_the_code():
    disk = CrashStorage(forget=lambda number, operation: operation.kind == "sync")
    write(disk, "/f", b"1")
    disk.sync("/")
    disk.mark("not synced")
    assert disk.num_syncs == 2
    assert len(left(disk, "not synced")) == 2


def test_of_more_states_than_the_limit_a_sample_with_the_extremes_is_yielded():
    disk = CrashStorage()
    names = [f"/{number:02}" for number in range(30)]
    for name in names:
        write(disk, name, b"")
    disk.mark("written")
    found = [frozenset(tree) for tree in left(disk, "written", limit=100)]
    assert {len(tree) for tree in found} >= {0, 1, 29, 30}
    assert 100 < len(found) < 1000
    assert len(set(found)) == len(found)


def test_a_state_is_yielded_once_under_the_same_marks():
    disk = CrashStorage()
    write(disk, "/f", b"1")
    disk.sync("/")
    found = [(point.marks, *storage.tree().items()) for point, storage in states(disk.log)]
    assert len(found) == len(set(found))
