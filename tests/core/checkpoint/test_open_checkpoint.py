"""A checkpoint that is open for reading: its tensors in windows, and what is wrong with them."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint, cut_into_boxes
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.geometry import Region, row_major_strides
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.errors import CorruptError, NotFoundError
from dist_ckpt.testing.memory_storage import MemoryStorage
from written import Saved, one_cell, random_tensor, rows, write

ATTEMPT = Attempt(1, "0123456789abcdef")
FOLDER = f"/ck/{ATTEMPT.name}"
SHAPE = (6, 5, 4)
SAVED: dict[str, Saved] = {
    "model.rows": random_tensor(SHAPE, rows(SHAPE, 2, 3)),
    "model.empty": random_tensor((0, 3), one_cell((0, 3))),
    "model.whole": random_tensor((7, 3), one_cell((7, 3))),
}


def stored() -> tuple[MemoryStorage, Index]:
    storage = MemoryStorage({"/ck": None, FOLDER: None})
    return storage, write(storage, FOLDER, SAVED, world_size=3, block_nbytes=64)


def opened() -> OpenCheckpoint:
    storage, index = stored()
    return OpenCheckpoint(storage, "/ck", ATTEMPT, index)


@pytest.mark.parametrize("window_nbytes", [64, 256, 1 << 20])
def test_a_stream_by_names_has_the_bytes_of_each_tensor_in_order(window_nbytes: int) -> None:
    names = ["model.whole", "model.empty", "model.rows"]
    found: dict[str, bytes] = defaultdict(bytes)
    with opened() as checkpoint:
        for window in checkpoint.stream(names, window_nbytes=window_nbytes, order="names"):
            assert window.nbytes <= window_nbytes
            assert bytes(window.data) == b"".join(bytes(data) for _, data in window.parts)
            for want, data in window.parts:
                assert len(want.cells) == 1
                found[want.fqn] += bytes(data)
    assert list(found) == ["model.whole", "model.rows"]
    assert found == {name: saved.data for name, saved in SAVED.items() if saved.data}


@pytest.mark.parametrize("window_nbytes", [64, 1 << 20])
def test_a_stream_by_files_has_each_byte_once(window_nbytes: int) -> None:
    with opened() as checkpoint:
        total = checkpoint.tensor_nbytes(SAVED)
        windows = checkpoint.stream(SAVED, window_nbytes=window_nbytes)
        assert sum(window.nbytes for window in windows) == total
        assert total == sum(len(saved.data) for saved in SAVED.values())


def test_a_stream_that_is_closed_early_leaves_nothing_open() -> None:
    with opened() as checkpoint:
        stream = checkpoint.stream(SAVED, window_nbytes=64, order="names")
        next(stream)
        stream.close()
        assert checkpoint.has_open_files
    assert not checkpoint.has_open_files


@settings(max_examples=200)
@given(shape=st.lists(st.integers(1, 6), max_size=4).map(tuple), most=st.integers(1, 40))
def test_boxes_in_order_are_what_a_tensor_holds_in_row_major_order(
    shape: tuple[int, ...], most: int
) -> None:
    strides = row_major_strides(shape)
    start = 0
    for box in cut_into_boxes(Region.whole(shape), most):
        assert 0 < box.numel <= most
        assert sum(at * stride for at, stride in zip(box.offset, strides, strict=True)) == start
        start += box.numel
        # Of the dimensions behind the first that has more than one, all is there.
        cut = next((dim for dim, size in enumerate(box.shape) if size > 1), len(shape))
        assert box.shape[cut + 1 :] == shape[cut + 1 :]
    assert start == prod(shape)


def whole(name: str) -> TensorRequest:
    saved = SAVED[name]
    return TensorRequest(name, saved.dtype, saved.shape, (Region.whole(saved.shape),))


def test_what_was_removed_meanwhile_is_not_called_damaged() -> None:
    storage, index = stored()
    memory = memoryview(bytearray(1 << 10))
    tree = storage.tree()
    del tree[next(path for path in tree if path.endswith("-00000.safetensors"))]
    with pytest.raises(CorruptError, match="is missing; it holds"):
        OpenCheckpoint(MemoryStorage(tree), "/ck", ATTEMPT, index).read(
            [whole("model.whole")], memory
        )
    gone = OpenCheckpoint(MemoryStorage({"/ck": None}), "/ck", ATTEMPT, index)
    with pytest.raises(NotFoundError, match="was replaced or deleted while it was read"):
        gone.read([whole("model.whole")], memory)


def test_a_check_finds_damage_and_keeps_nothing() -> None:
    storage, index = stored()
    tree = storage.tree()
    name, data = next((n, bytearray(d or b"")) for n, d in tree.items() if "-00001.safe" in n)
    data[-1] ^= 1
    checkpoint = OpenCheckpoint(MemoryStorage({**tree, name: bytes(data)}), "/ck", ATTEMPT, index)
    checkpoint.check([whole("model.whole")])
    with checkpoint, pytest.raises(CorruptError, match=r"model\.rows rows"):
        checkpoint.check([whole("model.rows")])


def test_after_closing_nothing_is_read() -> None:
    checkpoint = opened()
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ValueError, match="/ck was closed; open it again"):
        checkpoint.read([whole("model.whole")], memoryview(bytearray(1 << 10)))


def test_an_index_without_its_objects_file_is_damaged() -> None:
    checkpoint = opened()
    assert not checkpoint.has_objects()
    with pytest.raises(CorruptError, match="the index lists no objects"):
        checkpoint.objects()
