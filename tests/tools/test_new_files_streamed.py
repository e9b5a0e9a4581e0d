"""Files that are written from their beginning to their end, by a thread of their own."""

from __future__ import annotations

import random
import threading
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.storage import WritableFile, open_storage
from dist_ckpt.errors import StorageError
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.tools import new_files
from dist_ckpt.tools.new_files import StreamedFile

_SLOT_NBYTES = 4096


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_files, "_BUFFER_NBYTES", _SLOT_NBYTES)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 8192, 100_000])
def test_bytes_are_as_they_were_given_however_they_are_cut(nbytes: int, tmp_path: Path) -> None:
    draw = random.Random(nbytes)
    data = draw.randbytes(nbytes)
    storage, path = open_storage(tmp_path / "file")
    with StreamedFile(storage, path, nbytes // 2) as file:
        while (start := file.tell()) < nbytes:
            part = data[start : start + draw.choice([1, 30, 4096, 10_000])]
            assert file.write(part if draw.random() < 0.5 else bytearray(part)) == len(part)
        file.finish()
    assert (tmp_path / "file").read_bytes() == data


@dataclass
class _Watched:
    """A file of another, which waits in each write for `may_write`."""

    inner: WritableFile
    may_write: threading.Event
    alignment: int = 1
    written: list[tuple[int, int, bool]] = field(default_factory=list)
    is_discarded: bool = False
    has_begun: threading.Event = field(default_factory=threading.Event)

    def write_at(self, offset: int, data: Buffer) -> None:
        view = memoryview(data)
        self.has_begun.set()
        assert self.may_write.wait(10)
        assert not self.is_discarded
        self.written.append((offset, view.nbytes, view.readonly))
        self.inner.write_at(offset, data)

    def finish(self) -> int:
        return self.inner.finish()

    def discard(self) -> None:
        self.is_discarded = True
        self.inner.discard()


class _WatchedStorage(MemoryStorage):
    """Storage whose one file is watched."""

    may_write: threading.Event
    file: _Watched

    def create(self, path: str, nbytes: int) -> WritableFile:
        self.may_write = threading.Event()
        self.file = _Watched(super().create(path, nbytes), self.may_write)
        return self.file


def test_whole_slots_are_written_from_memory_that_may_go_past_the_page_cache() -> None:
    storage = _WatchedStorage()
    with StreamedFile(storage, "/file", 0) as file:
        storage.may_write.set()
        for _ in range(9):
            file.write(bytes(1024))
        file.finish()
    assert storage.file.written == [(0, 4096, False), (4096, 4096, False), (8192, 1024, False)]


def test_bytes_are_taken_while_those_before_are_written_and_closing_waits_for_that() -> None:
    storage = _WatchedStorage()
    file = StreamedFile(storage, "/file", 0)
    file.write(b"a" * _SLOT_NBYTES)
    file.write(b"b" * (_SLOT_NBYTES - 1))  # nothing is written yet
    assert storage.file.written == []
    assert storage.file.has_begun.wait(10)  # closing takes back what has not
    threading.Timer(0.1, storage.may_write.set).start()
    file.close()
    assert storage.file.written == [(0, _SLOT_NBYTES, False)]
    assert storage.file.is_discarded


@pytest.mark.parametrize("call", [2, 3, 4])
def test_a_write_that_fails_is_raised_by_the_next_and_by_the_end(call: int) -> None:
    storage = FaultyStorage(MemoryStorage(), fail_at_call=call, sticky=True)

    def write() -> None:
        with StreamedFile(storage, "/file", 0) as file:
            file.write(bytes(2 * _SLOT_NBYTES))
            file.finish()

    with pytest.raises(StorageError, match="a planted fault"):
        write()


def test_who_is_not_told_of_errors_finds_the_one_of_a_write() -> None:
    storage = FaultyStorage(MemoryStorage(), fail_at_call=2)
    with StreamedFile(storage, "/file", 0) as file:
        with pytest.raises(StorageError) as raised:
            file.write(bytes(2 * _SLOT_NBYTES))
        assert file.failure is raised.value


def test_a_file_that_has_another_size_at_its_end_is_an_error() -> None:
    with StreamedFile(MemoryStorage(), "/file", 0) as file:
        file.write(b"abc")
        file._file.write_at(3, b"d")
        with pytest.raises(StorageError, match="/file has another size"):
            file.finish()


def test_zip_archives_are_written_in_order(tmp_path: Path) -> None:
    storage, path = open_storage(tmp_path / "file.zip")
    with StreamedFile(storage, path, 0) as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("one", b"1" * 10_000)
            archive.writestr("two", b"2")
        file.finish()
    with zipfile.ZipFile(tmp_path / "file.zip") as archive:
        assert archive.testzip() is None
        assert archive.read("one") == b"1" * 10_000
