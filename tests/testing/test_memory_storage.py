"""The storage in memory keeps the contract, so that what is proved on it holds elsewhere."""

from __future__ import annotations

import pytest

from dist_ckpt.core.storage import Storage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.storage_contract import StorageContract, write


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage({"/root": None})

    @pytest.fixture
    def root(self) -> str:
        return "/root"


def test_a_tree_goes_in_and_comes_out():
    tree = {"/a": None, "/a/b": None, "/a/b/f": b"1", "/a-b": None, "/g": b""}
    storage = MemoryStorage(tree)
    assert storage.tree() == tree
    write(storage, "/a/f", b"2")
    assert storage.tree() == {**tree, "/a/f": b"2"}


def test_the_clock_is_the_one_that_was_given():
    times = iter(range(100))
    storage = MemoryStorage(clock=lambda: next(times))
    write(storage, "/f", b"1")
    write(storage, "/g", b"1")
    before, after = (entry.modified_at for entry in storage.list("/"))
    assert before < after
