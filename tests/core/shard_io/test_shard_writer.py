"""What the writer puts into a folder is exactly what the plan and the header say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.checksums import Buffer, block_digest, document_digest
from dist_ckpt.core.format.geometry import Cell
from dist_ckpt.core.format.shard_file import decode_header
from dist_ckpt.core.planning.save import save_planner
from dist_ckpt.core.runtime.host_memory import BufferPool, address_of, allocate_scratch
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorReader
from dist_ckpt.core.shard_io.write.shard_writer import NUM_WAITING, RankFiles, write_rank_files
from dist_ckpt.core.storage import WritableFile
from dist_ckpt.errors import ConflictError, StorageError
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from long_mode import examples
from written import BytesReader, Saved, catalog_of, one_cell, random_tensor, rank_files, rows

FOLDER = "/ck"


def folder() -> MemoryStorage:
    return MemoryStorage({FOLDER: None})


def content(storage: MemoryStorage, name: str) -> bytes:
    data = storage.tree()[f"{FOLDER}/{name}"]
    assert data is not None
    return data


def tensors() -> dict[str, Saved]:
    return {
        "model.w": random_tensor((40, 8), rows((40, 8), 13), seed=1),
        "model.b": random_tensor((5,), one_cell((5,)), dtype="bfloat16", seed=2),
        "model.n": random_tensor((), one_cell(()), dtype="int64", seed=3),
        "model.e": random_tensor((0, 3), one_cell((0, 3)), seed=4),
        "model.z": random_tensor((3, 4), one_cell((3, 4)), dtype="complex128", seed=5),
    }


def files_of(saved: Mapping[str, Saved], rank: int = 0, **options: object) -> RankFiles:
    catalog = catalog_of(saved, 2)
    return rank_files(saved, catalog, rank, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_nbytes", [16, 64, 4 << 20])
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("small", [0, 48, 1 << 20])
def test_a_file_holds_every_shard_at_its_place_with_the_digests_of_its_blocks(
    monkeypatch: pytest.MonkeyPatch, block_nbytes: int, copies: bool, small: int
) -> None:
    monkeypatch.setattr(save_planner, "SMALL_NBYTES", small)
    storage, saved = folder(), tensors()
    files = files_of(saved, block_nbytes=block_nbytes, copies=copies)
    (receipt,) = write_rank_files(storage, FOLDER, files, threads=3)
    data = content(storage, "model-00000.safetensors")
    name, nbytes, header_nbytes, digest = receipt
    assert (name, nbytes) == ("model-00000.safetensors", len(data))
    assert digest == document_digest(data[:header_nbytes])
    header = decode_header(data[:header_nbytes], nbytes=len(data))
    assert (header.component, header.rank, header.step) == ("model", 0, 7)
    assert {shard.fqn for shard in header.shards} == set(saved)
    for shard in header.shards:
        stored = data[header_nbytes + shard.span.start : header_nbytes + shard.span.stop]
        assert stored == saved[shard.fqn].of(shard.cell)
        blocks = [stored[i : i + block_nbytes] for i in range(0, len(stored), block_nbytes)]
        assert shard.digests == tuple(map(block_digest, blocks))


class _GoneAtTheEnd(MemoryStorage):
    """Somebody gives the attempt up once every file is durable."""

    def sync(self, folder: str) -> None:
        raise FileNotFoundError(folder)


def test_a_folder_that_goes_away_before_its_sync_is_a_conflict() -> None:
    with pytest.raises(ConflictError, match=f"^{FOLDER}: the folder is gone.*try again"):
        write_rank_files(_GoneAtTheEnd({FOLDER: None}), FOLDER, files_of(tensors()), threads=1)


def test_the_same_state_gives_the_same_bytes_however_many_threads_write_it() -> None:
    contents = []
    for threads in (1, 4):
        storage = folder()
        write_rank_files(storage, FOLDER, files_of(tensors(), block_nbytes=32), threads=threads)
        contents.append(storage.tree())
    assert contents[0] == contents[1]


def test_each_component_and_each_objects_file_has_a_receipt() -> None:
    storage = folder()
    saved = {
        "model.w": random_tensor((2,), one_cell((2,))),
        "optim.m": random_tensor((2,), one_cell((2,))),
    }
    catalog = catalog_of(saved, 1, ("model", "optim"))
    files = rank_files(saved, catalog, 0, objects={"objects.msgpack": b"abc"})
    receipts = write_rank_files(storage, FOLDER, files, threads=2)
    assert [receipt[0] for receipt in receipts] == [
        "model-00000.safetensors",
        "optim-00000.safetensors",
        "objects.msgpack",
    ]
    assert receipts[-1] == ("objects.msgpack", 3, 0, document_digest(b"abc"))
    assert content(storage, "objects.msgpack") == b"abc"


def test_a_rank_that_stores_nothing_touches_nothing() -> None:
    saved = {"model.w": random_tensor((2,), one_cell((2,)))}
    assert write_rank_files(MemoryStorage(), "/gone", files_of(saved, rank=1), threads=2) == ()


class Spoiled(MemoryStorage):
    """A storage whose files break on cue; it records what was discarded and finished."""

    def __init__(self, *, fail_write: int | None = None, finish: int | None = None) -> None:
        super().__init__({FOLDER: None})
        self.fail_write = fail_write
        self.finish = finish
        self.ended: list[str] = []

    def create(self, path: str, nbytes: int) -> WritableFile:
        return SpoiledFile(self, path, super().create(path, nbytes))


class SpoiledFile:
    def __init__(self, storage: Spoiled, path: str, file: WritableFile) -> None:
        self._storage = storage
        self._path = path
        self._file = file

    @property
    def alignment(self) -> int:
        return self._file.alignment

    def write_at(self, offset: int, data: Buffer) -> None:
        if self._storage.fail_write is not None:
            self._storage.fail_write -= 1
            if self._storage.fail_write < 0:
                raise StorageError(f"{self._path}: no space left")
        self._file.write_at(offset, data)

    def finish(self) -> int:
        actual = self._file.finish()
        return actual if self._storage.finish is None else self._storage.finish

    def discard(self) -> None:
        self._storage.ended.append(self._path)
        self._file.discard()


def test_a_failed_write_is_raised_and_every_file_is_let_go() -> None:
    saved = {
        "model.w": random_tensor((64,), one_cell((64,))),
        "optim.m": random_tensor((64,), one_cell((64,))),
    }
    catalog = catalog_of(saved, 1, ("model", "optim"))
    for n in range(4):
        storage = Spoiled(fail_write=n)
        files = rank_files(saved, catalog, 0)
        with pytest.raises(StorageError, match="no space left"):
            write_rank_files(storage, FOLDER, files, threads=2)
        assert sorted(storage.ended) == [
            f"{FOLDER}/model-00000.safetensors",
            f"{FOLDER}/optim-00000.safetensors",
        ]
        # No file is left that could be taken for a good one: the header comes last.
        if n < 2:
            assert not content(storage, "model-00000.safetensors")[:8].strip(b"\0")


def test_a_file_whose_size_is_not_what_was_written_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="has 12 bytes after writing"):
        write_rank_files(Spoiled(finish=12), FOLDER, files_of(tensors()), threads=1)


def test_an_objects_file_of_another_size_is_a_storage_error() -> None:
    files = RankFiles(None, (), (), {"objects.msgpack": b"abc"})
    with pytest.raises(StorageError, match="has 1 bytes after writing 3"):
        write_rank_files(Spoiled(finish=1), FOLDER, files, threads=1)


def test_a_folder_that_is_gone_means_the_attempt_was_given_up() -> None:
    with pytest.raises(ConflictError, match="was abandoned"):
        write_rank_files(MemoryStorage(), "/gone", files_of(tensors()), threads=1)


def test_a_file_that_is_there_already_means_the_rank_runs_twice() -> None:
    storage = folder()
    write_rank_files(storage, FOLDER, files_of(tensors()), threads=1)
    with pytest.raises(ConflictError, match="running twice"):
        write_rank_files(storage, FOLDER, files_of(tensors()), threads=1)


def test_names_are_synced_only_after_every_file_is_durable() -> None:
    events: list[str] = []

    class Recording(MemoryStorage):
        def create(self, path: str, nbytes: int) -> WritableFile:
            events.append("create")
            file = super().create(path, nbytes)
            finish = file.finish

            def recorded() -> int:
                events.append("finish")
                return finish()

            file.finish = recorded  # type: ignore[method-assign]
            return file

        def sync(self, folder: str) -> None:
            events.append(f"sync {folder}")
            super().sync(folder)

    files = files_of(tensors(), objects={"objects.msgpack": b"x"})
    write_rank_files(Recording({FOLDER: None}), FOLDER, files, threads=2)
    assert events == ["create", "finish", "create", "finish", f"sync {FOLDER}"]


def test_no_more_scratch_is_used_than_is_written_waits_and_is_made_ready() -> None:
    seen: set[int] = set()
    lock = threading.Lock()

    class Watching(BytesReader):
        def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
            with lock:
                seen.add(id(scratch.obj))
            return super().read(start, stop, scratch)

    saved = {"model.w": random_tensor((4096,), one_cell((4096,)))}
    files = files_of(saved, block_nbytes=64)
    (plan,) = files.plans
    watching = [Watching(saved["model.w"], item.cell, copies=True) for item in plan.items]
    write_rank_files(folder(), FOLDER, replace(files, readers=(watching.__getitem__,)), threads=3)
    assert 1 <= len(seen) <= 3 + NUM_WAITING + 1


class Telling(MemoryStorage):
    """A storage that says when a write begins, before its bytes are there."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__({FOLDER: None})
        self._tell = tell

    def write(self, node: object, offset: int, data: Buffer) -> None:
        self._tell()
        super().write(node, offset, data)  # type: ignore[arg-type]


class LoadArguments(BytesReader):
    """A source that says when a block is asked for."""

    def __init__(self, saved: Saved, cell: Cell, tell: Callable[[], None]) -> None:
        super().__init__(saved, cell)
        self._tell = tell

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        self._tell()
        return super().read(start, stop, scratch)


def asked_of(tell: Callable[[], None]) -> RankFiles:
    """Return the files of a state of eight blocks, each of which is a batch."""
    saved = {"model.w": random_tensor((128,), one_cell((128,)))}
    files = files_of(saved, block_nbytes=64)
    (item,) = files.plans[0].items
    return replace(files, readers=(lambda _: LoadArguments(saved["model.w"], item.cell, tell),))


def test_blocks_are_made_ready_while_all_threads_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_planner, "SMALL_NBYTES", 0)
    asked: list[None] = []
    ready = threading.Event()

    def ask() -> None:
        asked.append(None)
        if len(asked) >= 3:
            ready.set()

    def begin() -> None:
        assert ready.wait(10), "two threads write, and nothing gets ready meanwhile"

    write_rank_files(Telling(begin), FOLDER, asked_of(ask), threads=2)


def test_one_thread_asks_for_no_block_before_it_has_written_the_former_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save_planner, "SMALL_NBYTES", 0)
    events: list[str] = []
    files = asked_of(lambda: events.append("ask"))
    write_rank_files(Telling(lambda: events.append("write")), FOLDER, files, threads=1)
    assert events == [*["ask", "write"] * 8, "write"]  # the header


class Placing(MemoryStorage):
    """A storage whose files want aligned memory, and tell which writes came in other memory."""

    def __init__(self, alignment: int) -> None:
        super().__init__({FOLDER: None}, alignment=alignment)
        self.misplaced: list[int] = []
        self.addresses: list[int] = []

    def create(self, path: str, nbytes: int) -> WritableFile:
        return PlacedFile(self, super().create(path, nbytes))


class PlacedFile(SpoiledFile):
    def __init__(self, storage: Placing, file: WritableFile) -> None:
        self._placing = storage
        self._file = file

    def write_at(self, offset: int, data: Buffer) -> None:
        # A header is bytes, and goes where it can.
        if isinstance(data, memoryview) and self.alignment > 1:
            self._placing.addresses.append(address_of(data))
            if (address_of(data) - offset) % self.alignment:
                self._placing.misplaced.append(offset)
        self._file.write_at(offset, data)

    def finish(self) -> int:
        return self._file.finish()

    def discard(self) -> None:
        self._file.discard()


@examples(60)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    alignment=st.sampled_from([1, 4, 64, 512, 4096]),
    block_nbytes=st.sampled_from([16, 40, 256, 4096]),
    small=st.sampled_from([0, 48, 1 << 20]),
    copies=st.booleans(),
)
def test_whatever_the_alignment_the_file_is_the_same_and_its_memory_lies_as_it_wants(
    sizes: list[int], alignment: int, block_nbytes: int, small: int, copies: bool
) -> None:
    saved = {
        f"model.{n}": random_tensor((size,), one_cell((size,)), seed=n)
        for n, size in enumerate(sizes)
    }
    before, save_planner.SMALL_NBYTES = save_planner.SMALL_NBYTES, small
    try:
        files = files_of(saved, block_nbytes=block_nbytes, copies=copies)
    finally:
        save_planner.SMALL_NBYTES = before
    plain, placing = folder(), Placing(alignment)
    expected = write_rank_files(plain, FOLDER, files, threads=1)
    assert write_rank_files(placing, FOLDER, files, threads=3) == expected
    assert placing.tree() == plain.tree()
    assert placing.misplaced == []


def test_a_tensor_that_has_another_size_by_now_is_refused_by_name() -> None:
    files = files_of(tensors())
    (of_item,) = files.readers
    smaller = torch.zeros(1, dtype=torch.uint8)
    grown = replace(files, readers=(lambda number: TensorReader(smaller),))
    with pytest.raises(ValueError, match=r"model\.\w: \d+ bytes when the save began, and 1 now"):
        write_rank_files(folder(), FOLDER, grown, threads=2)
    write_rank_files(folder(), FOLDER, replace(files, readers=(of_item,)), threads=2)


class InMemory(BytesReader):
    """The bytes of a cell in memory that begins at a place we choose."""

    def __init__(self, data: bytes, remainder: int) -> None:
        self._live = allocate_scratch(len(data) + 4096)[remainder : remainder + len(data)]
        self._live[:] = data

    @property
    def nbytes(self) -> int:
        return len(self._live)

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        return self._live[start:stop]


@pytest.mark.parametrize(("remainder", "copied"), [(0, False), (64, False), (1, True), (63, True)])
def test_a_block_is_copied_only_where_its_memory_does_not_lie_as_the_file_wants(
    remainder: int, copied: bool
) -> None:
    saved = {"model.w": random_tensor((256,), one_cell((256,)))}
    files = files_of(saved)
    (item,) = files.plans[0].items
    source = InMemory(saved["model.w"].of(item.cell), remainder)
    storage = Placing(64)
    files = replace(files, readers=(lambda _: source,))
    (receipt,) = write_rank_files(storage, FOLDER, files, threads=1)
    assert content(storage, "model-00000.safetensors")[receipt[2] :] == bytes(source._live)
    assert (storage.addresses != [address_of(source._live)]) == copied


def test_a_file_is_durable_before_the_next_is_written_not_after_all_of_them() -> None:
    events: list[str] = []

    class Recording(MemoryStorage):
        def create(self, path: str, nbytes: int) -> WritableFile:
            return RecordedFile(path.removeprefix(f"{FOLDER}/")[0], super().create(path, nbytes))

    class RecordedFile(SpoiledFile):
        def __init__(self, name: str, file: WritableFile) -> None:
            self._name, self._file = name, file

        def write_at(self, offset: int, data: Buffer) -> None:
            events.append(f"write {self._name}")
            self._file.write_at(offset, data)

        def finish(self) -> int:
            events.append(f"finish {self._name}")
            return self._file.finish()

        def discard(self) -> None:
            self._file.discard()

    saved = {f"{name}.w": random_tensor((8,), one_cell((8,))) for name in "abc"}
    catalog = catalog_of(saved, 1, ("a", "b", "c"))
    write_rank_files(Recording({FOLDER: None}), FOLDER, rank_files(saved, catalog, 0), threads=1)
    assert events == [f"{event} {name}" for name in "abc" for event in ("write", "write", "finish")]


def test_a_file_of_empty_tensors_is_finished_too() -> None:
    storage = folder()
    saved = {"model.e": random_tensor((0, 3), one_cell((0, 3)))}
    (receipt,) = write_rank_files(storage, FOLDER, files_of(saved), threads=2)
    assert len(content(storage, receipt[0])) == receipt[1] == receipt[2]


def test_a_disk_that_fills_up_while_the_slots_go_round_fails_the_save_and_no_slot_is_reused() -> (
    None
):
    saved = {f"model.{n}": random_tensor((64,), one_cell((64,)), seed=n) for n in range(8)}
    files = files_of(saved, block_nbytes=256)
    buffers = BufferPool(8192)
    with buffers.borrow():
        pass
    for n in range(1, 8):
        full = FaultyStorage(
            Placing(512), fail_at_call=n + 1, error=StorageError("ENOSPC"), sticky=True
        )
        with pytest.raises(StorageError, match="ENOSPC"):
            write_rank_files(full, FOLDER, files, threads=2, buffers=buffers)
        assert full.failed.startswith("write_at")
    good = folder()
    write_rank_files(good, FOLDER, files, threads=2, buffers=buffers)
    plain = folder()
    write_rank_files(plain, FOLDER, files, threads=2)
    assert good.tree() == plain.tree()


def test_small_blocks_come_straight_from_the_memory_of_tensors() -> None:
    saved = {f"model.{n}": random_tensor((n,), one_cell((n,)), seed=n) for n in (3, 70, 40, 5)}
    files = files_of(saved, block_nbytes=64)
    (plan,) = files.plans
    held = [
        TensorReader(torch.frombuffer(bytearray(saved[item.fqn].of(item.cell)), dtype=torch.uint8))
        for item in plan.items
    ]
    from_bytes, from_tensors = folder(), folder()
    receipts = write_rank_files(from_bytes, FOLDER, files, threads=2)
    tensors = replace(files, readers=(held.__getitem__,))
    assert write_rank_files(from_tensors, FOLDER, tensors, threads=2) == receipts
    assert from_tensors.tree() == from_bytes.tree()


def test_slots_are_kept_from_one_save_to_the_next() -> None:
    seen: list[object] = []

    class Watching(BytesReader):
        def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
            seen.append(scratch.obj)
            return super().read(start, stop, scratch)

    saved = {"model.w": random_tensor((4,), one_cell((4,)))}
    files = files_of(saved)
    (item,) = files.plans[0].items
    watching = replace(files, readers=(lambda _: Watching(saved["model.w"], item.cell),))
    buffers = BufferPool()
    for _ in range(2):
        write_rank_files(folder(), FOLDER, watching, threads=1, buffers=buffers)
    assert seen[0] is seen[1]
