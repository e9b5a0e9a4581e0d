"""The storage that fails on cue fails where it was told to, and nowhere else."""

from __future__ import annotations

import pytest

from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import StorageError
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.storage_contract import StorageContract, read, write

ROOT = {"/root": None}


class TestFaultyStorageWithoutFaults(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return FaultyStorage(MemoryStorage(ROOT))

    @pytest.fixture
    def root(self) -> str:
        return "/root"


def use_everything(storage: Storage) -> None:
    storage.make_folder("/root/d")  # 1
    write(storage, "/root/d/f", b"abc")  # 2 create, 3 write_at, 4 finish
    storage.rename("/root/d/f", "/root/d/g")  # 5
    storage.sync("/root/d")  # 6
    storage.list("/root")  # 7
    read(storage, "/root/d/g")  # 8 open, 9 read_into
    storage.link("/root/d/g", "/root/h")  # 10
    storage.remove("/root/d/g")  # 11


CALLS = (
    *("make_folder", "create", "write_at", "finish", "rename"),
    *("sync", "list", "open", "read_into", "link", "remove"),
)


@pytest.mark.parametrize(("number", "method"), list(enumerate(CALLS, 1)))
def test_the_nth_call_fails_whatever_it_is(number, method):
    storage = FaultyStorage(MemoryStorage(ROOT), fail_at_call=number)
    with pytest.raises(StorageError, match="a planted fault"):
        use_everything(storage)
    assert storage.calls == number
    assert storage.failed.startswith(f"{method} ")


def test_without_a_fault_all_calls_are_counted():
    storage = FaultyStorage(MemoryStorage(ROOT))
    use_everything(storage)
    assert storage.calls == len(CALLS)


def test_a_fault_happens_once_unless_it_is_sticky():
    once = FaultyStorage(MemoryStorage(ROOT), fail_at_call=1)
    sticky = FaultyStorage(MemoryStorage(ROOT), fail_at_call=1, sticky=True)
    for storage in (once, sticky):
        with pytest.raises(StorageError):
            storage.list("/root")
    assert once.list("/root") == []
    with pytest.raises(StorageError):
        sticky.list("/root")


def test_a_lost_reply_is_work_done():
    inner = MemoryStorage(ROOT)
    storage = FaultyStorage(inner, fail_at_call=1, done=True)
    with pytest.raises(StorageError):
        storage.make_folder("/root/d")
    assert [entry.name for entry in inner.list("/root")] == ["d"]


def test_the_error_is_the_one_that_was_given():
    storage = FaultyStorage(MemoryStorage(), fail_at_call=1, error=FileNotFoundError("planted"))
    with pytest.raises(FileNotFoundError, match="planted"):
        storage.list("/")
