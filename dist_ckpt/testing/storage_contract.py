"""The contract of a storage, as tests: subclass `StorageContract` for each backend."""

# ruff: noqa: D102  # the names of the tests are sentences

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, StorageError

_TIMEOUT_S = 30


def write(storage: Storage, path: str, data: Buffer) -> int:
    """Write a whole file durably, and return the size that the storage reports."""
    file = storage.create(path, len(data))
    file.write_at(0, data)
    return file.finish()


def read(storage: Storage, path: str) -> bytes:
    """Read a whole file."""
    with closing(storage.open(path)) as file:
        data = bytearray(file.nbytes)
        assert file.read_into(0, memoryview(data)) == len(data)
    return bytes(data)


def num_links(storage: Storage, path: str) -> int:
    """Return how many names a file has."""
    with closing(storage.open(path)) as file:
        return file.num_links


class StorageContract:
    """The tests of a backend. A subclass has fixtures `storage` and `root`, an empty folder."""

    def test_a_new_folder_is_empty_and_listed(self, storage: Storage, root: str) -> None:
        storage.make_folder(f"{root}/d")
        assert storage.list(f"{root}/d") == []
        assert [(e.name, e.kind, e.nbytes) for e in storage.list(root)] == [("d", "folder", 0)]

    def test_a_listing_is_sorted_and_tells_kinds_and_sizes(
        self, storage: Storage, root: str
    ) -> None:
        write(storage, f"{root}/b", b"12")
        storage.make_folder(f"{root}/c")
        write(storage, f"{root}/.a", b"")
        write(storage, f"{root}/c/not listed", b"1")
        entries = [(entry.name, entry.kind, entry.nbytes) for entry in storage.list(root)]
        assert entries == [(".a", "file", 0), ("b", "file", 2), ("c", "folder", 0)]

    def test_a_folder_that_is_not_there_cannot_be_listed(self, storage: Storage, root: str) -> None:
        with pytest.raises(FileNotFoundError):
            storage.list(f"{root}/d")

    def test_a_file_and_what_is_below_it_cannot_be_listed(
        self, storage: Storage, root: str
    ) -> None:
        write(storage, f"{root}/f", b"1")
        for path in ("f", "f/g", "f/g/h"):
            with pytest.raises(NotADirectoryError):
                storage.list(f"{root}/{path}")
        with pytest.raises(NotADirectoryError):
            storage.list(f"{root}/f", follow=False)

    def test_a_folder_that_is_no_link_is_listed_without_following(
        self, storage: Storage, root: str
    ) -> None:
        storage.make_folder(f"{root}/d")
        write(storage, f"{root}/d/f", b"1")
        assert storage.list(f"{root}/d", follow=False) == storage.list(f"{root}/d")
        with pytest.raises(FileNotFoundError):
            storage.list(f"{root}/e", follow=False)

    def test_a_folder_is_made_once(self, storage: Storage, root: str) -> None:
        storage.make_folder(f"{root}/d")
        write(storage, f"{root}/f", b"1")
        for name in ("d", "f"):
            with pytest.raises(FileExistsError):
                storage.make_folder(f"{root}/{name}")

    def test_a_folder_needs_a_folder_above_it(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/f", b"1")
        with pytest.raises(FileNotFoundError):
            storage.make_folder(f"{root}/d/e")
        with pytest.raises(NotADirectoryError):
            storage.make_folder(f"{root}/f/e")

    def test_what_is_written_anywhere_in_a_file_is_read_back(
        self, storage: Storage, root: str
    ) -> None:
        file = storage.create(f"{root}/f", 6)
        file.write_at(4, b"ef")
        file.write_at(0, bytearray(b"ab"))
        file.write_at(2, memoryview(b"cd"))
        assert file.finish() == 6
        assert read(storage, f"{root}/f") == b"abcdef"

    def test_memory_of_any_item_size_is_written_and_filled(
        self, storage: Storage, root: str
    ) -> None:
        numbers = array("d", [1.5, -2.5])
        file = storage.create(f"{root}/f", 16)
        file.write_at(0, memoryview(numbers))
        assert file.finish() == 16
        target = array("d", [0.0, 0.0])
        reader = storage.open(f"{root}/f")
        assert reader.read_into(0, memoryview(target)) == 16
        reader.close()
        assert target == numbers

    def test_finish_tells_the_size_that_was_written_not_the_one_that_was_asked_for(
        self, storage: Storage, root: str
    ) -> None:
        file = storage.create(f"{root}/f", 1000)
        file.write_at(0, b"abc")
        assert file.finish() == 3

    def test_an_empty_file_is_a_file(self, storage: Storage, root: str) -> None:
        assert storage.create(f"{root}/f", 0).finish() == 0
        assert read(storage, f"{root}/f") == b""

    def test_threads_write_different_places_at_once(self, storage: Storage, root: str) -> None:
        size, parts = 10_000, 16
        file = storage.create(f"{root}/f", size * parts)
        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(file.write_at, i * size, bytes([i]) * size) for i in range(parts)]
            for future in done:
                future.result(timeout=_TIMEOUT_S)
        assert file.finish() == size * parts
        assert read(storage, f"{root}/f") == b"".join(bytes([i]) * size for i in range(parts))

    def test_a_file_is_created_once(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/f", b"first")
        storage.make_folder(f"{root}/d")
        for name in ("f", "d"):
            with pytest.raises(FileExistsError):
                storage.create(f"{root}/{name}", 1)
        assert read(storage, f"{root}/f") == b"first"

    def test_a_file_needs_a_folder(self, storage: Storage, root: str) -> None:
        with pytest.raises(FileNotFoundError):
            storage.create(f"{root}/d/f", 1)

    def test_a_finished_or_discarded_file_takes_no_more(self, storage: Storage, root: str) -> None:
        finished, discarded = storage.create(f"{root}/f", 1), storage.create(f"{root}/g", 1)
        finished.finish()
        discarded.discard()
        for file in (finished, discarded):
            file.discard()
            with pytest.raises(StorageError):
                file.write_at(0, b"x")
            with pytest.raises(StorageError):
                file.finish()

    def test_a_read_past_the_end_is_short(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/f", b"abcdef")
        file = storage.open(f"{root}/f")
        assert file.nbytes == 6
        target = bytearray(b"....")
        assert file.read_into(4, memoryview(target)) == 2
        assert target == b"ef.."
        assert file.read_into(6, memoryview(target)) == 0
        file.close()

    def test_a_file_that_is_not_there_cannot_be_opened(self, storage: Storage, root: str) -> None:
        with pytest.raises(FileNotFoundError):
            storage.open(f"{root}/f")

    def test_a_folder_in_the_place_of_a_file_is_damage(self, storage: Storage, root: str) -> None:
        storage.make_folder(f"{root}/f")
        with pytest.raises(CorruptError, match="folder"):
            storage.open(f"{root}/f")

    def test_an_open_file_is_read_though_its_name_goes_away(
        self, storage: Storage, root: str
    ) -> None:
        storage.make_folder(f"{root}/d")
        write(storage, f"{root}/d/f", b"abc")
        file = storage.open(f"{root}/d/f")
        storage.rename(f"{root}/d", f"{root}/e")
        storage.remove(f"{root}/e/f")
        target = bytearray(3)
        assert file.read_into(0, memoryview(target)) == 3
        assert target == b"abc"
        file.close()

    def test_a_closed_file_is_closed(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/f", b"abc")
        file = storage.open(f"{root}/f")
        file.close()
        file.close()
        with pytest.raises(StorageError):
            file.read_into(0, memoryview(bytearray(1)))

    def test_a_rename_moves_a_file_and_a_folder_with_all_in_it(
        self, storage: Storage, root: str
    ) -> None:
        storage.make_folder(f"{root}/d")
        write(storage, f"{root}/d/f", b"abc")
        storage.rename(f"{root}/d/f", f"{root}/d/g")
        storage.rename(f"{root}/d", f"{root}/e")
        assert [entry.name for entry in storage.list(root)] == ["e"]
        assert read(storage, f"{root}/e/g") == b"abc"
        with pytest.raises(FileNotFoundError):
            storage.create(f"{root}/d/h", 1)

    def test_a_rename_never_replaces(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/f", b"file")
        write(storage, f"{root}/old", b"old")
        storage.make_folder(f"{root}/d")
        storage.make_folder(f"{root}/olds")
        for old, new in (("old", "f"), ("old", "d"), ("olds", "d"), ("olds", "f")):
            with pytest.raises(FileExistsError):
                storage.rename(f"{root}/{old}", f"{root}/{new}")
        assert [entry.name for entry in storage.list(root)] == ["d", "f", "old", "olds"]
        assert read(storage, f"{root}/f") == b"file"

    def test_what_is_gone_cannot_be_renamed(self, storage: Storage, root: str) -> None:
        with pytest.raises(FileNotFoundError):
            storage.rename(f"{root}/f", f"{root}/g")

    def test_of_many_renames_to_one_name_one_succeeds(self, storage: Storage, root: str) -> None:
        self._race(storage, root, "apart", lambda i: f"{root}/{i}")

    def test_of_many_renames_of_one_file_one_succeeds(self, storage: Storage, root: str) -> None:
        self._race(storage, root, "together", lambda _: f"{root}/0")

    def _race(self, storage: Storage, root: str, new: str, old: Callable[[int], str]) -> None:
        racers = 8
        for i in range(racers):
            write(storage, f"{root}/{i}", bytes([i]))
        start = threading.Barrier(racers)

        def rename(i: int) -> int | None:
            start.wait(timeout=_TIMEOUT_S)
            try:
                storage.rename(old(i), f"{root}/{new}")
            except (FileExistsError, FileNotFoundError):
                return None
            return i

        with ThreadPoolExecutor(racers) as pool:
            done = [pool.submit(rename, i) for i in range(racers)]
            results = [future.result(timeout=_TIMEOUT_S) for future in done]
            winners = [result for result in results if result is not None]
        assert len(winners) == 1
        winner = old(winners[0]).rpartition("/")[2]
        assert read(storage, f"{root}/{new}") == bytes([int(winner)])
        assert winner not in [entry.name for entry in storage.list(root)]

    def test_a_file_has_one_more_name_and_keeps_each_when_the_other_goes(
        self, storage: Storage, root: str
    ) -> None:
        storage.make_folder(f"{root}/d")
        write(storage, f"{root}/f", b"abc")
        assert num_links(storage, f"{root}/f") == 1
        storage.link(f"{root}/f", f"{root}/d/g")
        assert num_links(storage, f"{root}/f") == num_links(storage, f"{root}/d/g") == 2
        entries = [(entry.name, entry.kind, entry.nbytes) for entry in storage.list(f"{root}/d")]
        assert entries == [("g", "file", 3)]
        storage.remove(f"{root}/f")
        assert read(storage, f"{root}/d/g") == b"abc"
        assert num_links(storage, f"{root}/d/g") == 1

    def test_a_link_never_replaces(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/f", b"file")
        write(storage, f"{root}/g", b"other")
        storage.make_folder(f"{root}/d")
        for new in ("f", "g", "d"):
            with pytest.raises(FileExistsError):
                storage.link(f"{root}/f", f"{root}/{new}")
        assert read(storage, f"{root}/g") == b"other"
        assert num_links(storage, f"{root}/f") == 1

    def test_what_is_gone_cannot_be_linked_nor_into_a_folder_that_is_gone(
        self, storage: Storage, root: str
    ) -> None:
        write(storage, f"{root}/f", b"1")
        for old, new in (("gone", "g"), ("gone/f", "g"), ("f", "gone/g")):
            with pytest.raises(FileNotFoundError):
                storage.link(f"{root}/{old}", f"{root}/{new}")
        assert [entry.name for entry in storage.list(root)] == ["f"]

    def test_a_folder_is_not_linked_and_nothing_into_a_file(
        self, storage: Storage, root: str
    ) -> None:
        write(storage, f"{root}/f", b"1")
        storage.make_folder(f"{root}/d")
        for old, new in (("d", "e"), ("f", "f/g")):
            with pytest.raises(StorageError):
                storage.link(f"{root}/{old}", f"{root}/{new}")
        assert [entry.name for entry in storage.list(root)] == ["d", "f"]

    def test_a_file_and_an_empty_folder_are_removed(self, storage: Storage, root: str) -> None:
        storage.make_folder(f"{root}/d")
        write(storage, f"{root}/f", b"1")
        for name in ("d", "f"):
            storage.remove(f"{root}/{name}")
            with pytest.raises(FileNotFoundError):
                storage.remove(f"{root}/{name}")
        assert storage.list(root) == []

    def test_a_folder_that_holds_something_is_not_removed(
        self, storage: Storage, root: str
    ) -> None:
        storage.make_folder(f"{root}/d")
        write(storage, f"{root}/d/f", b"1")
        with pytest.raises(StorageError, match="not empty"):
            storage.remove(f"{root}/d")
        assert read(storage, f"{root}/d/f") == b"1"

    def test_a_folder_is_synced_unless_it_is_gone(self, storage: Storage, root: str) -> None:
        storage.sync(root)
        with pytest.raises(FileNotFoundError):
            storage.sync(f"{root}/d")

    def test_names_of_any_characters_come_back(self, storage: Storage, root: str) -> None:
        name = "two words, ünïcode, [brackets] and a\ttab"
        write(storage, f"{root}/{name}", b"1")
        assert [entry.name for entry in storage.list(root)] == [name]
        assert read(storage, f"{root}/{name}") == b"1"

    def test_the_clock_of_the_storage_goes_on(self, storage: Storage, root: str) -> None:
        write(storage, f"{root}/f", b"1")
        storage.make_folder(f"{root}/d")
        times = {entry.name: entry.modified_at for entry in storage.list(root)}
        assert 0 < times["f"] <= times["d"]
