"""A storage that counts keeps the contract, and counts what goes through it."""

from __future__ import annotations

import pytest

from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.storage_wrappers import CountingStorage
from dist_ckpt.reports import IoCount
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.storage_contract import StorageContract


class TestCountingStorage(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return CountingStorage(MemoryStorage({"/root": None}))

    @pytest.fixture
    def root(self) -> str:
        return "/root"


def test_calls_and_bytes_that_went_through_are_counted() -> None:
    storage = CountingStorage(MemoryStorage())
    writer = storage.create("/a", 10)
    writer.write_at(0, b"1234")
    writer.write_at(4, memoryview(bytearray(24)).cast("q"))
    writer.finish()
    assert (storage.writes, storage.reads) == (IoCount(2, 28), IoCount())
    reader = storage.open("/a")
    reader.read_into(2, memoryview(bytearray(5)))
    reader.read_into(20, memoryview(bytearray(100)))  # the file ends after 28
    reader.close()
    assert (storage.writes, storage.reads) == (IoCount(2, 28), IoCount(2, 13))


def test_what_is_refused_is_not_counted() -> None:
    storage = CountingStorage(MemoryStorage({"/a": b"123"}))
    with pytest.raises(FileExistsError):
        storage.create("/a", 10)
    with pytest.raises(FileNotFoundError):
        storage.open("/b")
    assert (storage.writes, storage.reads) == (IoCount(), IoCount())
