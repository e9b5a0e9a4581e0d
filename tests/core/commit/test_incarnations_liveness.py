"""A start shows that it lives; nothing but words comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_ckpt.core.commit.records.incarnations import (
    Incarnation,
    LivenessFile,
    begin_incarnation,
    last_liveness,
    newest_incarnation,
    read_history,
)
from dist_ckpt.core.storage import Entry, Storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import ConflictError, StorageError
from dist_ckpt.testing.memory_storage import MemoryStorage

ROOT = "/runs"


class Clocked(MemoryStorage):
    """A storage whose clock is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__({ROOT: None}, clock=lambda: self.now)


def started(storage: Storage, root: str = ROOT) -> LivenessFile:
    number = begin_incarnation(storage, root, restored=None, why="a test", by="a job").number
    return LivenessFile(storage, root, number)


def signs(storage: MemoryStorage) -> list[str]:
    return [one.name for one in storage.list(f"{ROOT}/.incarnations") if "alive" in one.name]


def test_the_last_sign_has_the_storages_time_and_there_is_one() -> None:
    storage = Clocked()
    sign = started(storage)
    assert last_liveness(storage, ROOT, 1) is None
    for storage.now in (2000.0, 2030.0):
        sign.renew()
        assert last_liveness(storage, ROOT, 1) == storage.now
        assert len(signs(storage)) == 1
    sign.end()
    sign.end()
    assert last_liveness(storage, ROOT, 1) is None


def test_a_newer_start_clears_up_after_an_older_one_and_never_the_other_way_round() -> None:
    storage = Clocked()
    older, newer = started(storage), started(storage)
    older.renew()
    newer.renew()
    assert [name.partition("-")[0] for name in signs(storage)] == ["2.alive"]
    older.renew()  # it does not know yet
    older.end()
    assert [name.partition("-")[0] for name in signs(storage)] == ["2.alive"]


def test_signs_are_no_starts(tmp_path: Path) -> None:
    storage, root = LocalStorage(), str(tmp_path)
    started(storage, root).renew()
    newest = newest_incarnation(storage, root)
    assert newest is not None
    assert newest.number == 1
    assert [*read_history(storage, root).incarnations] == [1]


def test_who_is_refused_is_told_when_the_other_was_last_alive() -> None:
    storage = Clocked()
    started(storage)
    started(storage).renew()
    with pytest.raises(ConflictError, match=r"; it was last seen at 1970-01-01 00:16:40"):
        Incarnation(ROOT, 1).check(storage)


def test_a_storage_that_cannot_say_takes_only_the_words() -> None:
    class Refusing(Clocked):
        def list(self, folder: str, *, follow: bool = True) -> list[Entry]:
            raise StorageError("planted")

    assert last_liveness(Refusing(), ROOT, 1) is None
