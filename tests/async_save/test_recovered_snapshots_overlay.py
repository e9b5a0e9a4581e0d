"""Files in memory are read like files on the storage, and what is not there is read from that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_ckpt.async_save.snapshots.arena import Arena, ArenaPool, ArenaReader
from dist_ckpt.async_save.snapshots.arena_layout import Image, Seal, Snapshot, arena_nbytes
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.async_save.snapshots.recovered_snapshots import RecoveredSnapshot
from dist_ckpt.async_save.snapshots.snapshot_files import MemoryFile
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.storage import ReadableFile, Storage
from dist_ckpt.core.storage.overlay_storage import BytesFile, OverlayStorage
from dist_ckpt.errors import CorruptError, StorageError
from dist_ckpt.reports import IoCount
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.storage_contract import StorageContract
from recovered_arenas import kept_in

FOLDER = "/runs/ck/a1-0123456789abcdef"
DATA = bytes(range(256)) * 64


def put(storage: MemoryStorage, path: str, data: bytes) -> None:
    file = storage.create(path, len(data))
    file.write_at(0, data)
    file.finish()


def stored(data: bytes | None) -> MemoryStorage:
    storage = MemoryStorage()
    for folder in ("/runs", "/runs/ck", FOLDER):
        storage.make_folder(folder)
    if data is not None:
        put(storage, f"{FOLDER}/one", data)
    return storage


def read(file: ReadableFile, offset: int, nbytes: int) -> bytes:
    target = bytearray(nbytes)
    return bytes(target[: file.read_into(offset, memoryview(target))])


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    folder = JobFolder("job", roots=[str(tmp_path)]).rank(0)
    arenas = ArenaPool(folder)
    what = Snapshot("1" * 32, "/runs/ck", 7, 0, 1, (Image("one", len(DATA)),))
    made = arenas.open_fitting(0, arena_nbytes(what))
    made.begin(what)[0][:] = DATA
    made.complete()
    follower = ArenaReader(made.path, "job")
    follower.follow(what.id).seal(
        Seal("a1-0123456789abcdef", (FileReceipt("one", len(DATA), 0, "f" * 32),))
    )
    follower.close()
    yield made
    arenas.close()


@pytest.fixture
def kept(arena: Arena, tmp_path: Path) -> Iterator[RecoveredSnapshot]:
    with kept_in(JobFolder("job", roots=[str(tmp_path)]).rank(0)) as ((found,), _):
        yield found


def stage_over(arena: Arena) -> None:
    arena.begin(Snapshot("2" * 32, "/runs/ck", 8, 0, 1, (Image("one", len(DATA)),)))


class TestSnapshotStorage(StorageContract):
    """What it does not serve is as good as without it."""

    @pytest.fixture
    def storage(self) -> Storage:
        storage = OverlayStorage(MemoryStorage({"/root": None}))
        storage.serve({f"{FOLDER}/one": BytesFile(b"abc")})
        return storage

    @pytest.fixture
    def root(self) -> str:
        return "/root"


def test_a_file_in_memory_is_read_from_any_byte_and_ends_where_it_ends(kept):
    storage = OverlayStorage(stored(None))
    storage.serve({f"{FOLDER}/one": MemoryFile(kept, 0), f"{FOLDER}/two": BytesFile(b"abc")})
    file = storage.open(f"{FOLDER}/one")
    assert file.nbytes == len(DATA)
    for offset, nbytes in ((0, 10), (5, 4096), (len(DATA) - 3, 10), (len(DATA), 1), (10**6, 1)):
        assert read(file, offset, nbytes) == DATA[offset : offset + nbytes]
    other = storage.open(f"{FOLDER}/two")
    assert (other.nbytes, read(other, 1, 9), read(other, 3, 9)) == (3, b"bc", b"")
    assert storage.from_memory == IoCount(7, 10 + 4096 + 3 + 2)
    file.close()
    other.close()


def test_what_is_not_served_is_the_storages(kept):
    inner = stored(b"disk")
    storage = OverlayStorage(inner)
    storage.serve({f"{FOLDER}/two": MemoryFile(kept, 0)})
    assert read(storage.open(f"{FOLDER}/one"), 0, 9) == b"disk"
    with pytest.raises(FileNotFoundError):
        storage.open(f"{FOLDER}/three")
    put(storage, f"{FOLDER}/three", b"new")  # type: ignore[arg-type]
    assert read(inner.open(f"{FOLDER}/three"), 0, 9) == b"new"
    assert storage.from_memory == IoCount()


def test_what_is_served_is_listed_whether_the_storage_has_it_or_not(kept):
    empty = OverlayStorage(MemoryStorage())
    with pytest.raises(FileNotFoundError):
        empty.list("/runs/ck")
    both = OverlayStorage(stored(b"disk"))
    for storage in (empty, both):
        storage.serve(
            {f"{FOLDER}/one": MemoryFile(kept, 0), f"{FOLDER}/index.json": BytesFile(b"abc")}
        )
        (attempt,) = storage.list("/runs/ck")
        assert (attempt.name, attempt.kind) == ("a1-0123456789abcdef", "folder")
        assert [(one.name, one.kind) for one in storage.list(FOLDER)] == [
            ("index.json", "file"),
            ("one", "file"),
        ]


def test_threads_may_read_at_once(kept):
    storage = OverlayStorage(stored(None))
    storage.serve({f"{FOLDER}/one": MemoryFile(kept, 0)})
    file, wrong = storage.open(f"{FOLDER}/one"), []

    def run(offset: int) -> None:
        for _ in range(200):
            if read(file, offset, 1000) != DATA[offset : offset + 1000]:
                wrong.append(offset)

    threads = [threading.Thread(target=run, args=(offset,)) for offset in range(0, 8000, 1999)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert storage.from_memory.num == 200 * len(threads)


def test_a_snapshot_that_is_overwritten_is_read_from_the_storage_from_then_on(kept, arena):
    storage = OverlayStorage(stored(b"x" * len(DATA)))
    storage.serve({f"{FOLDER}/one": MemoryFile(kept, 0)})
    file = storage.open(f"{FOLDER}/one")
    assert read(file, 0, 9) == DATA[:9]
    stage_over(arena)
    assert read(file, 0, 9) == b"x" * 9
    assert read(file, len(DATA) - 1, 9) == b"x"
    assert storage.from_memory == IoCount(1, 9)
    file.close()


def test_a_snapshot_that_is_overwritten_and_is_nowhere_else_is_an_error(kept, arena):
    storage = OverlayStorage(stored(None))
    storage.serve({f"{FOLDER}/one": MemoryFile(kept, 0)})
    file = storage.open(f"{FOLDER}/one")
    stage_over(arena)
    for _ in range(2):
        with pytest.raises(CorruptError, match="was overwritten while it was read"):
            read(file, 0, 9)
    assert storage.from_memory == IoCount()


def test_an_arena_that_is_cut_short_is_read_from_the_storage(kept, arena):
    storage = OverlayStorage(stored(b"x" * len(DATA)))
    storage.serve({f"{FOLDER}/one": MemoryFile(kept, 0)})
    file = storage.open(f"{FOLDER}/one")
    with open(arena.path, "r+b") as memory:
        memory.truncate(9000)
    assert read(file, 0, 9000) == b"x" * 9000


def test_a_file_whose_snapshot_was_closed_is_not_read(kept):
    storage = OverlayStorage(stored(None))
    storage.serve({f"{FOLDER}/one": MemoryFile(kept, 0)})
    file = storage.open(f"{FOLDER}/one")
    kept.close()
    with pytest.raises(StorageError, match="is closed"):
        read(file, 0, 9)
