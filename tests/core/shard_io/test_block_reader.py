"""What a load fills, what it reads for it, and what it says of damage."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.checksums import BLOCK_NBYTES
from dist_ckpt.core.format.geometry import (
    Cell,
    ElementRange,
    Flat,
    Grid,
    Layout,
    Region,
    RegionPiece,
    Regions,
    Shape,
)
from dist_ckpt.core.format.index.index import Index, ObjectsFileRecord
from dist_ckpt.core.planning.plan import LoadPlan, TensorRequest
from dist_ckpt.core.shard_io.memory.pinned_buffers import PinnedBuffers
from dist_ckpt.core.shard_io.read import block_reader, open_files, read_grouping
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.read_grouping import READ_NBYTES, BlockRead, SmallShardsRead
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CorruptError, StorageError
from dist_ckpt.testing.memory_storage import MemoryStorage
from late_devices import DeviceTarget, LateDevices
from long_mode import examples
from written import BytesTarget, Saved, numbers_of, one_cell, plan_of, random_tensor, rows, write

FOLDER = "/ck"
FillTargets = Mapping[tuple[str, int], BytesTarget | DeviceTarget]


class Counting(MemoryStorage):
    """Counts the bytes and reads behind the headers, and the files that are open."""

    def __init__(self, tree: Mapping[str, bytes | None] | None = None) -> None:
        super().__init__(tree or {FOLDER: None})
        self.reads: list[tuple[str, int, int]] = []
        self.num_open = 0
        self.max_open = 0

    def open(self, path: str) -> ReadableFile:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        return CountingFile(self, path, super().open(path))


class CountingFile:
    def __init__(self, storage: Counting, path: str, file: ReadableFile) -> None:
        self._storage = storage
        self._path = path
        self._file = file
        self.nbytes = file.nbytes
        self.num_links = file.num_links

    def read_into(self, offset: int, target: memoryview) -> int:
        if offset:
            self._storage.reads.append((self._path, offset, len(target)))
        return self._file.read_into(offset, target)

    def close(self) -> None:
        self._storage.num_open -= 1
        self._file.close()


def targets_of(
    wanted: list[TensorRequest], saved: Mapping[str, Saved], *, lends: bool = True
) -> FillTargets:
    return {
        (want.fqn, part): BytesTarget(saved[want.fqn].itemsize, cell, want.shape, lends=lends)
        for want in wanted
        for part, cell in enumerate(want.cells)
    }


def device_targets(
    wanted: list[TensorRequest], saved: Mapping[str, Saved], *, is_strided: bool
) -> FillTargets:
    """Return targets on devices. If they are strided, devices cannot copy bytes to them."""

    def make(dtype: torch.dtype, cell: Cell) -> DeviceTarget:
        shape = (cell.numel,) if isinstance(cell, ElementRange) else cell.shape
        wide = torch.zeros(*shape, 2, dtype=dtype)[..., 0]
        return DeviceTarget(wide if is_strided else wide.contiguous(), cell)

    return {
        (want.fqn, part): make(getattr(torch, saved[want.fqn].dtype), cell)
        for want in wanted
        for part, cell in enumerate(want.cells)
    }


def want(saved: Mapping[str, Saved], fqn: str, *cells: Cell) -> TensorRequest:
    tensor = saved[fqn]
    return TensorRequest(fqn, tensor.dtype, tensor.shape, cells or (Region.whole(tensor.shape),))


class ReadTotals(NamedTuple):
    nbytes_read: int
    nbytes_placed: int


def load(
    storage: MemoryStorage,
    index: Index,
    plan: LoadPlan,
    targets: FillTargets,
    *,
    verify: bool = True,
    buffers: PinnedBuffers | None = None,
) -> ReadTotals:
    with closing(open_files.open_files(storage, FOLDER, index, plan, threads=2)) as files:
        reader = BlockReader(files, targets, verify=verify)
        reader.device_buffers = buffers
        nbytes_read = reader.read_all(2)
    return ReadTotals(nbytes_read, read_grouping.count_placed_nbytes(plan))


def check_filled(
    targets: FillTargets, wanted: list[TensorRequest], saved: Mapping[str, Saved]
) -> None:
    for one in wanted:
        for part, cell in enumerate(one.cells):
            assert bytes(targets[one.fqn, part].data) == saved[one.fqn].of(cell), (one.fqn, cell)


def round_trip(
    saved: Mapping[str, Saved],
    wanted: list[TensorRequest],
    *,
    world_size: int = 1,
    block_nbytes: int = BLOCK_NBYTES,
    memory: str = "host",
) -> tuple[ReadTotals, Counting]:
    storage = Counting()
    index = write(storage, FOLDER, saved, world_size=world_size, block_nbytes=block_nbytes)
    plan = plan_of(index, wanted)
    if memory in ("host", "copied"):
        targets = targets_of(wanted, saved, lends=memory == "host")
        totals = load(storage, index, plan, targets)
    else:
        targets = device_targets(wanted, saved, is_strided=memory == "strided")
        # Small shards are read together, up to 1 MiB.
        buffers = PinnedBuffers(devices := LateDevices(), num_buffers=4, buffer_nbytes=1 << 16)
        totals = load(storage, index, plan, targets, buffers=buffers)
        buffers.close()
        assert all(part.is_closed for part in devices.pinned)
    check_filled(targets, wanted, saved)
    assert storage.num_open == 0
    assert totals.nbytes_read == sum(nbytes for _, _, nbytes in storage.reads)
    return totals, storage


# --- any layout into any layout --------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    return (0, *sorted(inner), size)


@st.composite
def layouts(draw: st.DrawFn, shape: Shape, world_size: int) -> Layout:
    cut: Grid | Flat | Regions
    if draw(st.booleans()):
        cut = Flat(draw(cuts(prod(shape))))
    else:
        cut = Grid(tuple(draw(cuts(n)) for n in shape))
        if draw(st.booleans()):
            cut = Regions(tuple(cut.cell(i) for i in range(cut.num_cells)))
    ranks = st.sets(st.integers(0, world_size - 1), min_size=1, max_size=3)
    holders = tuple(tuple(sorted(draw(ranks))) for _ in range(cut.num_cells))
    return Layout(cut, holders)


@st.composite
def cells(draw: st.DrawFn, shape: Shape) -> Cell:
    if draw(st.booleans()):
        ends = st.integers(0, prod(shape))
        start, stop = sorted((draw(ends), draw(ends)))
        return ElementRange(start, stop)
    corners = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in corners), tuple(b - a for a, b in corners))


@st.composite
def loads(draw: st.DrawFn) -> tuple[dict[str, Saved], list[TensorRequest]]:
    saved, wanted = {}, []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        dtype = draw(st.sampled_from(["uint8", "float16", "float32", "complex128"]))
        layout, rotation = draw(layouts(shape, 3)), draw(st.integers(0, 2))
        fqn = f"model.t{number}"
        saved[fqn] = random_tensor(shape, layout, dtype=dtype, seed=number, rotation=rotation)
        parts = tuple(draw(st.lists(cells(shape), max_size=3)))
        wanted.append(TensorRequest(fqn, dtype, shape, parts))
    return saved, wanted


@examples()
@given(
    case=loads(),
    block_nbytes=st.sampled_from([16, 32, 64]),
    direct=st.sampled_from([0, 48, 1 << 20]),
    most=st.sampled_from([16, 100, 1 << 20]),
    least=st.sampled_from([1, 2, 16]),
    memory=st.sampled_from(["host", "copied", "device", "strided"]),
)
def test_what_was_saved_in_any_layout_fills_any_cells(
    case: tuple[dict[str, Saved], list[TensorRequest]],
    block_nbytes: int,
    direct: int,
    most: int,
    least: int,
    memory: str,
) -> None:
    saved, wanted = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_grouping, "MIN_SHARDS", least)
        patch.setattr(read_grouping, "SMALL_READ_NBYTES", most)
        patch.setattr(read_grouping, "MAX_SMALL_READS", least)
        patch.setattr(read_grouping, "WORK_NBYTES", most)
        patch.setattr(read_grouping, "ZERO_COPY_NBYTES", direct)
        patch.setattr(read_grouping, "READ_NBYTES", most)
        patch.setattr(block_reader, "UNIT_NBYTES", 2 * block_nbytes)
        totals, _ = round_trip(
            saved, wanted, world_size=3, block_nbytes=block_nbytes, memory=memory
        )
    itemsizes = {fqn: tensor.itemsize for fqn, tensor in saved.items()}
    assert totals.nbytes_placed == sum(
        cell.numel * itemsizes[one.fqn] for one in wanted for cell in one.cells
    )


# --- what is read ----------------------------------------------------------------------------


def blocks_holding(saved: Saved, stored: Cell, cell: Cell, block_nbytes: int) -> int:
    """Count the bytes of the blocks of a stored cell that hold elements of another, one by one."""
    wanted = set(numbers_of(cell, saved.shape))
    places = [i for i, n in enumerate(numbers_of(stored, saved.shape)) if n in wanted]
    numbers = {i * saved.itemsize // block_nbytes for i in places}
    nbytes = stored.numel * saved.itemsize
    return sum(min((n + 1) * block_nbytes, nbytes) - n * block_nbytes for n in numbers)


@examples()
@given(data=st.data(), block_nbytes=st.sampled_from([16, 64]))
def test_exactly_the_blocks_that_hold_wanted_elements_are_read(
    data: st.DataObject, block_nbytes: int
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    saved = random_tensor(shape, one_cell(shape))
    cell = data.draw(cells(shape))
    totals, _ = round_trip(
        {"model.w": saved},
        [TensorRequest("model.w", "float32", shape, (cell,))],
        block_nbytes=block_nbytes,
    )
    least = blocks_holding(saved, Region.whole(shape), cell, block_nbytes)
    assert least <= totals.nbytes_read <= 1.05 * least


def test_a_few_rows_cost_their_blocks_and_not_the_shard() -> None:
    shape = (1 << 12, 1 << 10)
    data = random.Random(0).randbytes(1 << 24)
    saved = {"model.w": Saved("float32", shape, one_cell(shape), data)}
    cell = Region((100, 0), (30, 1 << 10))
    storage = Counting()
    index = write(storage, FOLDER, saved)
    plan = plan_of(index, [want(saved, "model.w", cell)])
    targets = {("model.w", 0): Whole(cell, 4)}
    totals = load(storage, index, plan, targets)  # type: ignore[arg-type]
    assert bytes(targets["model.w", 0].data) == data[100 << 12 : 130 << 12]
    assert totals.nbytes_read == BLOCK_NBYTES


class Whole:
    """Memory of a large cell that is only ever filled as it lies."""

    def __init__(self, cell: Cell, itemsize: int) -> None:
        self.data = bytearray(cell.numel * itemsize)

    def memory(self) -> memoryview:
        return memoryview(self.data)

    def place(self, piece: RegionPiece, box: Region, data: memoryview, strides: Shape) -> None:
        raise AssertionError("nothing here needs to be placed")


def test_a_large_shard_comes_straight_into_the_target_in_a_few_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, reads = BlockReader.read, []

    def counted(
        reading: BlockReader, file: open_files.OpenFile, one: SmallShardsRead | BlockRead
    ) -> int:
        reads.append(one.span.nbytes)
        return read(reading, file, one)

    monkeypatch.setattr(BlockReader, "read", counted)
    shape = (3 * READ_NBYTES + 5,)
    data = random.Random(0).randbytes(shape[0])
    saved = {"model.w": Saved("uint8", shape, one_cell(shape), data)}
    storage = Counting()
    index = write(storage, FOLDER, saved)
    wanted = [want(saved, "model.w")]
    targets = {("model.w", 0): Whole(Region.whole(shape), 1)}
    totals = load(storage, index, plan_of(index, wanted), targets)  # type: ignore[arg-type]
    assert targets["model.w", 0].data == data
    assert totals == ReadTotals(len(data), len(data))
    assert sorted(reads) == [5, *[READ_NBYTES] * 3]


def test_cells_that_begin_and_end_with_blocks_come_straight_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_grouping, "ZERO_COPY_NBYTES", 0)
    saved = {"model.w": random_tensor((8, 4), one_cell((8, 4)))}
    parts = [Region((i, 0), (2, 4)) for i in (0, 2, 4, 6)]
    totals, storage = round_trip(saved, [want(saved, "model.w", *parts)], block_nbytes=16)
    assert totals == ReadTotals(128, 128)
    assert len(storage.reads) == 4


def test_many_small_tensors_come_with_one_read() -> None:
    saved = {
        f"model.t{i}": random_tensor((50,), one_cell((50,)), dtype="float16", seed=i)
        for i in range(40)
    }
    totals, storage = round_trip(saved, [want(saved, fqn) for fqn in saved])
    assert totals == ReadTotals(4000, 4000)
    assert len(storage.reads) == 1


def many() -> dict[str, Saved]:
    """Forty tensors of 100 bytes; the writer sorts them by name."""
    return {
        f"model.t{i:02}": random_tensor((50,), one_cell((50,)), dtype="float16", seed=i)
        for i in range(40)
    }


@pytest.mark.parametrize("memory", ["host", "copied", "device"])
def test_what_is_not_wanted_whole_by_one_cell_interrupts_a_row(memory: str) -> None:
    saved = many()
    whole, part = Region.whole((50,)), Region((7,), (30,))
    wanted = [want(saved, fqn) for fqn in saved]
    wanted[18] = want(saved, "model.t18", part)
    wanted[19] = want(saved, "model.t19", whole, part)
    wanted[20] = want(saved, "model.t20", whole, whole)
    totals, storage = round_trip(saved, wanted, memory=memory)
    assert totals == ReadTotals(4000, 4000 - 100 + 60 + 60 + 100)
    assert len(storage.reads) == 3


def test_small_tensors_that_lie_apart_come_in_rows_without_what_lies_between() -> None:
    saved = {
        **{f"model.a{i:02}": tensor for i, tensor in enumerate(many().values())},
        "model.b": random_tensor((70_000,), one_cell((70_000,)), dtype="float16"),
        **{f"model.c{i:02}": tensor for i, tensor in enumerate(many().values())},
    }
    wanted = [want(saved, fqn) for fqn in saved if fqn != "model.b"]
    totals, storage = round_trip(saved, wanted)
    assert totals == ReadTotals(8000, 8000)
    assert len(storage.reads) == 2
    assert [nbytes for _, _, nbytes in storage.reads] == [4000, 4000]


def test_a_small_hole_is_read_through_but_never_more_than_it_is_worth() -> None:
    sizes = {"a": 20_000, "b": 400, "c": 20_000, "d": 400, "e": 400}
    saved = {
        f"model.{name}": random_tensor((n,), one_cell((n,)), dtype="uint8")
        for name, n in sizes.items()
    }
    through, storage = round_trip(saved, [want(saved, "model.a"), want(saved, "model.c")])
    assert through == ReadTotals(40_400, 40_000)
    assert len(storage.reads) == 1
    around, storage = round_trip(saved, [want(saved, "model.b"), want(saved, "model.e")])
    assert around == ReadTotals(800, 800)
    assert len(storage.reads) == 2


def test_a_block_that_several_cells_want_is_read_once() -> None:
    saved = {"model.w": random_tensor((8, 8), one_cell((8, 8)))}
    columns = [Region((0, i), (8, 1)) for i in range(8)]
    totals, storage = round_trip(saved, [want(saved, "model.w", *columns)], block_nbytes=64)
    assert totals == ReadTotals(256, 256)
    assert len(storage.reads) == 1


# --- damage ----------------------------------------------------------------------------------


def damaged(storage: MemoryStorage, name: str, change: Mapping[int, int] | bytes) -> Counting:
    """Return a copy of a storage with some bits of a file flipped, or another content."""
    tree = storage.tree()
    data = bytearray(tree[f"{FOLDER}/{name}"] or b"")
    if isinstance(change, bytes):
        data = bytearray(change)
    else:
        for at, bits in change.items():
            data[at] ^= bits
    tree[f"{FOLDER}/{name}"] = bytes(data)
    return Counting(tree)


SHAPE = (40, 8)


def two_ranks() -> tuple[Counting, Index, dict[str, Saved]]:
    """Rows 0:13 are rank 0's, 13:40 rank 1's; a row is 32 bytes, a block two rows."""
    saved = {
        "model.w": random_tensor(SHAPE, rows(SHAPE, 13)),
        "model.b": random_tensor((3,), one_cell((3,), 1), seed=1),
        "model.s": random_tensor((), one_cell((), 1), dtype="int16", seed=2),
    }
    storage = Counting()
    return storage, write(storage, FOLDER, saved, world_size=2, block_nbytes=64), saved


def load_all(storage: Counting, index: Index, saved: Mapping[str, Saved]) -> None:
    wanted = [want(saved, fqn) for fqn in saved]
    load(storage, index, plan_of(index, wanted), targets_of(wanted, saved))


def test_any_flipped_bit_is_reported_with_its_file_and_rank() -> None:
    storage, index, saved = two_ranks()
    name = "model-00001.safetensors"
    nbytes = index.files[1].nbytes
    start = index.files[1].header_nbytes
    for at in [*range(0, 600, 41), start - 3, *range(start, nbytes, 11), nbytes - 1]:
        spoiled = damaged(storage, name, {at: 1 << (at % 8)})
        with pytest.raises(CorruptError, match=r"model-00001\.safetensors of rank 1") as caught:
            load_all(spoiled, index, saved)
        assert str(caught.value).endswith("load an older checkpoint")
        assert spoiled.num_open == 0


def test_a_flipped_bit_is_named_by_tensor_rows_rank_file_and_bytes() -> None:
    storage, index, saved = two_ranks()
    start = index.files[1].header_nbytes
    # Rank 1 begins with row 13; its third block is rows 17 and 18.
    spoiled = damaged(storage, "model-00001.safetensors", {start + 12 + 130: 4})
    with pytest.raises(CorruptError) as caught:
        load_all(spoiled, index, saved)
    message = str(caught.value)
    assert message.startswith("model.w rows 17:19: damaged, the block's digest is ")
    assert f"(/ck/model-00001.safetensors of rank 1, bytes {start + 140}:{start + 204})" in message


def test_damage_of_a_range_of_elements_is_named_by_the_rows_it_touches() -> None:
    layout = Layout(Flat((0, 21, 320)), ((0,), (1,)))
    saved = {"model.w": random_tensor(SHAPE, layout)}
    storage = Counting()
    index = write(storage, FOLDER, saved, world_size=2, block_nbytes=64)
    start = index.files[1].header_nbytes
    spoiled = damaged(storage, "model-00001.safetensors", {start: 1})
    with pytest.raises(CorruptError, match="rows 2:5: damaged"):
        load_all(spoiled, index, saved)


def test_damage_where_nothing_is_wanted_is_not_read() -> None:
    storage, index, saved = two_ranks()
    start = index.files[1].header_nbytes
    spoiled = damaged(storage, "model-00001.safetensors", {start + 12 + 130: 4})
    wanted = [want(saved, "model.w", Region((0, 0), (17, 8)))]
    targets = targets_of(wanted, saved)
    load(spoiled, index, plan_of(index, wanted), targets)
    check_filled(targets, wanted, saved)


def test_unverified_damage_is_loaded_as_it_is() -> None:
    storage, index, saved = two_ranks()
    at = index.files[0].header_nbytes
    spoiled = damaged(storage, "model-00000.safetensors", {at: 1})
    wanted = [want(saved, "model.w")]
    targets = targets_of(wanted, saved)
    load(spoiled, index, plan_of(index, wanted), targets, verify=False)
    assert targets["model.w", 0].data[0] == saved["model.w"].data[0] ^ 1


def test_nothing_damaged_is_placed_through_scratch() -> None:
    storage, index, saved = two_ranks()
    at = index.files[0].header_nbytes
    spoiled = damaged(storage, "model-00000.safetensors", {at: 1})
    wanted = [want(saved, "model.w", Region((0, 0), (1, 8)))]
    targets = targets_of(wanted, saved)
    with pytest.raises(CorruptError) as caught:
        load(spoiled, index, plan_of(index, wanted), targets)
    assert caught.value.touched == ()
    assert set(targets["model.w", 0].data) == {0xEE}


def test_what_came_straight_and_damaged_is_listed_as_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_grouping, "ZERO_COPY_NBYTES", 0)
    storage, index, saved = two_ranks()
    at = index.files[0].header_nbytes
    spoiled = damaged(storage, "model-00000.safetensors", {at: 1})
    wanted = [want(saved, "model.w")]
    with pytest.raises(CorruptError) as caught:
        load(spoiled, index, plan_of(index, wanted), targets_of(wanted, saved))
    assert caught.value.touched == ("model.w",)


@pytest.mark.parametrize("change", [-1, +1, -700, +4096])
def test_a_file_of_another_size_is_refused_before_anything_is_read(change: int) -> None:
    storage, index, saved = two_ranks()
    name = "model-00001.safetensors"
    data = storage.tree()[f"{FOLDER}/{name}"] or b""
    changed = data[:change] if change < 0 else data + bytes(change)
    spoiled = damaged(storage, name, changed)
    size = f"{len(changed):,} of {len(data):,} bytes" if change < 0 else f"{len(changed):,} bytes"
    text = f"of rank 1 {'is truncated:' if change < 0 else 'has'} {size}"
    with pytest.raises(CorruptError, match=text) as caught:
        load_all(spoiled, index, saved)
    assert "it holds model.w rows 13:40, model.b rows 0:3, model.s (a scalar)" in str(caught.value)
    assert not spoiled.reads
    assert spoiled.num_open == 0


def test_all_missing_files_are_named_at_once_with_their_ranks_and_tensors() -> None:
    storage, index, saved = two_ranks()
    for rank in (0, 1):
        storage.remove(f"{FOLDER}/model-0000{rank}.safetensors")
    with pytest.raises(CorruptError) as caught:
        load_all(storage, index, saved)
    assert "model-00000.safetensors of rank 0 is missing; it holds model.w rows 0:13" in str(
        caught.value
    )
    assert "model-00001.safetensors of rank 1 is missing" in str(caught.value)


def test_of_many_missing_files_the_first_is_named_and_the_others_are_counted() -> None:
    saved = {"model.w": random_tensor((30, 3), rows((30, 3), *range(1, 30)))}
    storage = Counting()
    index = write(storage, FOLDER, saved, world_size=30)
    for record in index.files:
        storage.remove(f"{FOLDER}/{index.file_name(record)}")
    with pytest.raises(CorruptError) as caught:
        load_all(storage, index, saved)
    first = "/ck/model-00000.safetensors of rank 0 is missing; it holds model.w rows 0:1"
    assert str(caught.value) == f"{first} (and 29 more like it); load an older checkpoint"


def test_a_file_that_is_cut_off_while_it_is_read_is_corrupt() -> None:
    storage, index, saved = two_ranks()
    wanted = [want(saved, "model.w")]
    plan, targets = plan_of(index, wanted), targets_of(wanted, saved)

    class Cut(CountingFile):
        def read_into(self, offset: int, target: memoryview) -> int:
            return super().read_into(offset, target[: len(target) - 5] if offset else target)

    class Cutting(Counting):
        def open(self, path: str) -> ReadableFile:
            return Cut(self, path, super().open(path))

    with pytest.raises(CorruptError, match=r"model\.w rows 12:13: the file ended while"):
        load(Cutting(storage.tree()), index, plan, targets)


def test_an_error_of_the_storage_says_which_tensors_may_be_partial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_grouping, "ZERO_COPY_NBYTES", 0)
    storage, index, saved = two_ranks()
    wanted = [want(saved, "model.w")]

    class Broken(CountingFile):
        def read_into(self, offset: int, target: memoryview) -> int:
            if offset:
                raise StorageError("input/output error")
            return super().read_into(offset, target)

    class Breaking(Counting):
        def open(self, path: str) -> ReadableFile:
            return Broken(self, path, super().open(path))

    with pytest.raises(StorageError, match=r"output error; partial data may be in model\.w"):
        load(Breaking(storage.tree()), index, plan_of(index, wanted), targets_of(wanted, saved))


@pytest.mark.parametrize("hurt", ["flipped", "cut off"])
def test_damage_of_a_shard_in_a_row_is_told_as_if_it_were_read_alone(
    hurt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(CountingFile):
        def read_into(self, offset: int, target: memoryview) -> int:
            return super().read_into(offset, target[:2950] if offset else target)

    class Cutting(Counting):
        def open(self, path: str) -> ReadableFile:
            return Cut(self, path, super().open(path))

    saved = many()
    storage = Counting()
    index = write(storage, FOLDER, saved)
    start = index.files[0].header_nbytes
    spoiled = (
        Cutting(storage.tree())
        if hurt == "cut off"
        else damaged(storage, "model-00000.safetensors", {start + 2950: 4, start + 3950: 4})
    )
    wanted = [want(saved, fqn) for fqn in saved]
    told = []
    for least in (1, 1000):
        monkeypatch.setattr(read_grouping, "MIN_SHARDS", least)
        targets = targets_of(wanted, saved)
        with pytest.raises(CorruptError) as caught:
            load(spoiled, index, plan_of(index, wanted), targets)
        told.append(str(caught.value))
        for fqn in saved:
            if fqn not in caught.value.touched:
                assert set(targets[fqn, 0].data) == {0xEE}
        assert "model.t29" not in caught.value.touched
    assert told[0] == told[1]
    assert told[0].startswith("model.t29 rows 0:50: ")


def test_a_file_of_another_world_is_refused() -> None:
    storage, index, saved = two_ranks()
    other = replace(index, catalog=replace(index.catalog, world_size=3))
    with pytest.raises(CorruptError, match="world_size is 2, the index says 3"):
        load_all(storage, other, saved)


def test_a_file_may_have_been_written_by_the_save_of_another_step() -> None:
    storage, index, saved = two_ranks()
    wanted = [want(saved, fqn) for fqn in saved]
    targets = targets_of(wanted, saved)
    load(storage, replace(index, step=8), plan_of(index, wanted), targets)
    assert targets["model.w", 0].data == saved["model.w"].data


def test_a_file_of_another_rank_is_refused() -> None:
    storage, index, saved = two_ranks()
    first, second = index.files
    swapped = replace(first, rank=1), replace(second, rank=0)
    tree = storage.tree()
    a, b = f"{FOLDER}/model-00000.safetensors", f"{FOLDER}/model-00001.safetensors"
    tree[a], tree[b] = tree[b], tree[a]
    plan = plan_of(replace(index, files=(swapped[1], swapped[0])), [want(saved, "model.w")])
    with pytest.raises(CorruptError, match="rank is 1, the index says 0"):
        open_files.open_files(
            Counting(tree), FOLDER, replace(index, files=(swapped[1], swapped[0])), plan, threads=1
        )


def test_a_shard_that_the_file_lacks_or_has_in_another_shape_is_refused() -> None:
    storage, index, saved = two_ranks()
    plan = plan_of(index, [want(saved, "model.w")])
    file, items = next(iter(plan.items()))
    lost = replace(items[0], overlap=replace(items[0].overlap, stored=Region((0, 0), (12, 8))))
    broken = {file: (lost,)}
    with pytest.raises(CorruptError, match=r"lacks model\.w\[0:12,0:8\]"):
        open_files.open_files(storage, FOLDER, index, broken, threads=1)
    record = replace(index.catalog.tensors["model.w"], dtype="int32")
    tensors = {**index.catalog.tensors, "model.w": record}
    other = replace(index, catalog=replace(index.catalog, tensors=tensors))
    with pytest.raises(CorruptError, match=r"model\.w as float32 \[40, 8\], the index as int32"):
        open_files.open_files(storage, FOLDER, other, plan, threads=1)
    assert storage.num_open == 0


def test_beyond_a_bound_files_are_opened_again_when_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_files, "MAX_OPEN", 3)
    shape = (24, 2)
    saved = {"model.w": random_tensor(shape, rows(shape, *range(2, 24, 2)))}
    _, storage = round_trip(saved, [want(saved, "model.w")], world_size=12)
    assert storage.max_open <= 3 + 2 + 2


def test_an_objects_file_that_is_too_large_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "objects.msgpack").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    record = ObjectsFileRecord("objects.msgpack", 1 << 40, "0" * 32)
    with pytest.raises(CorruptError, match="no objects file has 1099511627776 bytes"):
        open_files.read_objects(LocalStorage(), str(tmp_path), record)
