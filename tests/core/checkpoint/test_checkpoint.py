"""Looking into a checkpoint: what it says of itself, and parts of its tensors."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from threading import Lock
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.commit.commit_protocol import claim
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.geometry import Flat, Layout, Region, Shape, row_major_strides
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.format.objects.plain_types import ArrayValue, DTypeValue
from dist_ckpt.core.runtime.threads import IDLE_S
from dist_ckpt.core.shard_io.memory.host_array import Array, select_elements
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CorruptError, NotFoundError
from dist_ckpt.testing.memory_storage import MemoryStorage
from long_mode import examples
from written import Saved, catalog_of, one_cell, random_tensor, rows, save, write

SHAPE = (6, 5, 4)


def in_memory(tensors: dict[str, Saved], world_size: int = 1) -> tuple[MemoryStorage, Index]:
    storage = MemoryStorage({"/ck": None, "/ck/a1-0123456789abcdef": None})
    index = write(
        storage, "/ck/a1-0123456789abcdef", tensors, world_size=world_size, block_nbytes=64
    )
    return storage, index


def opened(tensors: dict[str, Saved], world_size: int = 1) -> Checkpoint:
    storage, index = in_memory(tensors, world_size)
    return Checkpoint(storage, "/ck", Attempt(1, "0123456789abcdef"), index)


# --- slices ----------------------------------------------------------------------------------


@st.composite
def entries(draw: st.DrawFn, size: int) -> int | slice:
    ends = st.none() | st.integers(-size - 2, size + 2)
    if size and draw(st.booleans()):
        return draw(st.integers(-size, size - 1))
    return slice(draw(ends), draw(ends), draw(st.sampled_from([None, 1])))


@st.composite
def indices(draw: st.DrawFn, shape: Shape) -> tuple[object, ...]:
    given: list[Any] = [draw(entries(size)) for size in shape]
    if draw(st.booleans()):
        first = draw(st.integers(0, len(shape)))
        last = draw(st.integers(first, len(shape)))
        given[first:last] = [...]
        return tuple(given)
    return tuple(given[: draw(st.integers(0, len(shape)))])


def expected(saved: Saved, index: tuple[Any, ...]) -> tuple[Shape, bytes]:
    """Slice with nothing but ranges."""
    dots = index.index(...) if ... in index else len(index)
    middle = (slice(None),) * (len(saved.shape) - len(index) + (... in index))
    full = (*index[:dots], *middle, *index[dots + 1 :])
    picks = [range(n)[e] for e, n in zip(full, saved.shape, strict=True)]
    shape = tuple(len(pick) for pick in picks if isinstance(pick, range))
    places = [pick if isinstance(pick, range) else (pick,) for pick in picks]
    strides = row_major_strides(saved.shape)
    numbers = (sum(map(prod, zip(at, strides, strict=True))) for at in itertools.product(*places))
    size = saved.itemsize
    return shape, b"".join(saved.data[n * size : (n + 1) * size] for n in numbers)


LAYOUTS = {
    "whole": random_tensor(SHAPE, one_cell(SHAPE), seed=1),
    "rows": random_tensor(SHAPE, rows(SHAPE, 1, 4), seed=2),
    "flat": random_tensor(SHAPE, Layout(Flat((0, 7, 50, 120)), ((0,), (1,), (2,))), seed=3),
    "bf16": random_tensor(SHAPE, rows(SHAPE, 2), dtype="bfloat16", seed=4),
    "wide": random_tensor((0, 4), one_cell((0, 4))),
    "scalar": random_tensor((), one_cell(()), dtype="complex128", seed=5),
}
SAVED = {f"model.{name}": saved for name, saved in LAYOUTS.items()}
CHECKPOINT = opened(SAVED, 3)


@pytest.fixture(scope="module", autouse=True)
def _closing() -> Iterator[None]:
    with CHECKPOINT:
        yield


@examples()
@given(data=st.data(), name=st.sampled_from(sorted(SAVED)))
def test_a_slice_is_what_plain_python_picks(data: st.DataObject, name: str) -> None:
    saved = SAVED[name]
    index = data.draw(indices(saved.shape))
    got = CHECKPOINT[name][index]  # type: ignore[index]
    assert (got.dtype, got.shape, bytes(got.data)) == (saved.dtype, *expected(saved, index))


def test_a_slice_is_indexed_further_like_an_array() -> None:
    stored = CHECKPOINT["model.whole"]
    array = stored[...].numpy()
    assert np.asarray(stored).tobytes() == array.tobytes(), "not an array without dimensions"
    assert np.array(stored, dtype="float64").tobytes() == array.astype("float64").tobytes()
    assert stored[1:4][1].data == array[1:4][1].tobytes()
    assert stored[0, :, None][2:].data == array[0, :, None][2:].tobytes()
    assert (len(stored), len(stored[1:4])) == (6, 3)
    assert [row.data for row in stored] == [row.tobytes() for row in array]
    assert float(stored[0, 0, 0]) == array[0, 0, 0].item()
    for scalar in (CHECKPOINT["model.scalar"], CHECKPOINT["model.scalar"][...]):
        for use in (len, list):
            with pytest.raises(TypeError, match="without dimensions has no length"):
                use(scalar)


def test_a_slice_without_parentheses_and_all_of_a_tensor() -> None:
    saved = SAVED["model.rows"]
    ck = CHECKPOINT
    assert ck["model.rows"][3].shape == (5, 4)
    assert ck["model.rows"][1:3, ..., 0].shape == (2, 5)
    assert bytes(ck["model.rows"][...].data) == saved.data
    assert ck["model.scalar"][()].data == SAVED["model.scalar"].data


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (6, IndexError, "index 6 is out of bounds for dimension 0 of size 6"),
        ((0, -6), IndexError, "index -6 is out of bounds for dimension 1 of size 5"),
        ((0, 0, 0, 0), IndexError, "4 indices for a tensor of 3 dimensions"),
        (slice(0, 4, 2), ValueError, "a step of 2"),
        (slice(None, None, -1), ValueError, "a step of -1"),
        ((..., ...), ValueError, "one `...` only"),
        ([0, 1], ValueError, r"None here, not list: for lists and masks, read the range, then ind"),
        (np.array([1]), ValueError, "not ndarray: for lists"),
        (torch.tensor([1]), ValueError, "not Tensor: for lists"),
        (np.ones(6, bool), ValueError, "not ndarray: for lists"),
        (True, ValueError, "not bool: for lists"),
        (np.True_, ValueError, "not bool: for lists"),
        (torch.tensor(True), ValueError, "not Tensor: for lists"),
        (1.0, ValueError, "not float: for lists"),
    ],
)
def test_what_is_no_basic_index_is_refused(
    index: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        select_elements(index, SHAPE)  # type: ignore[arg-type]


def test_anything_that_python_takes_as_an_index_is_one() -> None:
    class Three:
        def __index__(self) -> int:
            return 3

    assert select_elements(Three(), SHAPE) == (Region((3, 0, 0), (1, 5, 4)), (5, 4))


def test_only_the_blocks_of_a_slice_are_read() -> None:
    shape = (100, 16)
    tensors = {"model.w": random_tensor(shape, one_cell(shape))}
    counted: list[int] = []

    class Counting(MemoryStorage):
        def open(self, path: str) -> ReadableFile:
            file = super().open(path)
            read_into = file.read_into

            def counting(offset: int, target: memoryview) -> int:
                counted.append(len(target) if offset else 0)
                return read_into(offset, target)

            file.read_into = counting  # type: ignore[method-assign]
            return file

    storage, index = in_memory(tensors)
    with Checkpoint(Counting(storage.tree()), "/ck", Attempt(1, "0123456789abcdef"), index) as ck:
        assert not counted
        assert ck["model.w"].shape == shape
        assert not counted
        assert ck["model.w"][40:43, 2:5].shape == (3, 3)
        assert sum(counted) == 3 * 64


def test_damage_is_found_when_it_is_read_and_not_elsewhere() -> None:
    shape = (100, 16)
    storage, index = in_memory({"model.w": random_tensor(shape, one_cell(shape))})
    tree = storage.tree()
    name = "/ck/a1-0123456789abcdef/model-00000.safetensors"
    data = bytearray(tree[name] or b"")
    data[index.files[0].header_nbytes + 50 * 64] ^= 16
    tree[name] = bytes(data)
    with Checkpoint(MemoryStorage(tree), "/ck", Attempt(1, "0123456789abcdef"), index) as ck:
        assert ck["model.w"][:50].shape == (50, 16)
        with pytest.raises(CorruptError, match=r"model\.w rows 50:51: damaged"):
            ck["model.w"][50, 0]


# --- files -----------------------------------------------------------------------------------


class Watched(MemoryStorage):
    """Counts the files that are open, and how many ever were."""

    num_open = 0
    num_opened = 0

    def open(self, path: str) -> ReadableFile:
        file = super().open(path)
        close = file.close
        self.num_open += 1
        self.num_opened += 1

        def closing() -> None:
            self.num_open -= 1
            close()

        file.close = closing  # type: ignore[method-assign]
        return file


def test_only_so_many_files_stay_open_and_none_after_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "MAX_OPEN_FILES", 2)
    shape = (12, 2)
    saved = random_tensor(shape, rows(shape, *range(2, 12, 2)))
    storage, index = in_memory({"model.w": saved}, 6)
    watched = Watched(storage.tree())
    with Checkpoint(watched, "/ck", Attempt(1, "0123456789abcdef"), index) as ck:
        for row in (*range(12), 3, 11, 0):
            assert bytes(ck["model.w"][row].data) == saved.data[row * 8 : row * 8 + 8]
            assert watched.num_open <= 2
        assert bytes(ck["model.w"][...].data) == saved.data
        assert watched.num_open == 2
    assert watched.num_open == 0
    with pytest.raises(ValueError, match="/ck was closed; open it again"):
        ck["model.w"][0]


def test_the_file_that_was_used_last_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_OPEN_FILES", 2)
    saved = random_tensor((6, 2), rows((6, 2), 2, 4))
    storage, index = in_memory({"model.w": saved}, 3)
    watched = Watched(storage.tree())
    with Checkpoint(watched, "/ck", Attempt(1, "0123456789abcdef"), index) as ck:
        for row in (0, 2, 0, 4, 0, 1):
            ck["model.w"][row]
    assert watched.num_opened == 3


def test_threads_that_share_a_checkpoint_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_OPEN_FILES", 1)
    busy = Lock()
    overlaps: list[str] = []

    class Busy(MemoryStorage):
        def open(self, path: str) -> ReadableFile:
            file = super().open(path)
            read_into = file.read_into

            def reading(offset: int, target: memoryview) -> int:
                if not busy.acquire(blocking=False):
                    overlaps.append(path)
                    return read_into(offset, target)
                try:
                    for _ in range(20):
                        sleep(0)  # lets others come, if they can
                    return read_into(offset, target)
                finally:
                    busy.release()

            file.read_into = reading  # type: ignore[method-assign]
            return file

    saved = SAVED["model.rows"]
    storage, index = in_memory(SAVED, 3)
    ck = Checkpoint(Busy(storage.tree()), "/ck", Attempt(1, "0123456789abcdef"), index)
    with ck, ThreadPoolExecutor(4) as executor:
        rows_read = executor.map(lambda i: ck["model.rows"][i % 6, 0].data, range(60), timeout=60)
        got = [bytes(data) for data in rows_read]
    assert got == [saved.data[i % 6 * 80 : i % 6 * 80 + 16] for i in range(60)]
    assert not overlaps


# --- who forgets to close it -----------------------------------------------------------------


def descriptors() -> set[str]:
    """Return the files of checkpoints that this process has open."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(str(link.readlink()))
    return {name for name in found if name.endswith(".safetensors")}


def test_a_forgotten_checkpoint_goes_with_a_warning_and_its_files(tmp_path: Path) -> None:
    full_checkpoint(tmp_path / "ck")
    with pytest.warns(ResourceWarning, match=r"ck', step=7.*was not closed: call close\(\), or"):
        part = checkpoint.open(tmp_path / "ck")["model.w"][0:3]
    assert part.shape == (3, 2)
    assert not descriptors()


def test_a_tensor_of_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    full_checkpoint(tmp_path / "ck")
    tensor = checkpoint.open(tmp_path / "ck")["model.w"]
    assert tensor[0:3] == tensor[0:3]
    assert len(descriptors()) == 2
    with pytest.warns(ResourceWarning):
        del tensor
    assert not descriptors()


@pytest.mark.filterwarnings("error")
def test_who_closes_or_has_read_nothing_hears_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_checkpoint(tmp_path / "ck")
    ck = checkpoint.open(tmp_path / "ck")
    _ = ck["model.w"][0], ck.objects
    ck.close()
    ck.close()
    del ck
    with checkpoint.open(tmp_path / "ck") as ck:
        _ = ck["model.w"][0]
    del ck
    _ = checkpoint.open(tmp_path / "ck").objects
    monkeypatch.setenv("DIST_CKPT_THREADS", "none")
    with pytest.raises(ValueError, match="DIST_CKPT_THREADS"):
        checkpoint.open(tmp_path / "ck")


def test_neither_the_end_of_a_process_nor_a_fork_makes_a_noise_or_waits(tmp_path: Path) -> None:
    full_checkpoint(tmp_path / "ck")
    script = (
        "import os, sys; from dist_ckpt.core.checkpoint.checkpoint import open; "
        "ck = open(sys.argv[1]); ck['model.w'][1:, 0]; turn = ck._opened._turn\n"
        "turn.acquire(); child = os.fork()\n"
        "if not child: del ck; os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7; turn.release(); "
        "assert len(ck['model.w'][1:, 0].data) == 12"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "ck")]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("idle_s", [0, 4 * IDLE_S], ids=["at once", "when its threads are gone"])
def test_a_process_ends_though_a_checkpoint_is_left_open(tmp_path: Path, idle_s: float) -> None:
    full_checkpoint(tmp_path / "ck")
    script = (
        "import sys, time; from dist_ckpt.core.checkpoint.checkpoint import open; "
        f"ck = open(sys.argv[1]); ck['model.w'][1:, 0]; time.sleep({idle_s})"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "ck")]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


# --- what it says of itself ------------------------------------------------------------------


def full_checkpoint(path: Path) -> Path:
    tensors = {
        "model.w": random_tensor((4, 2), rows((4, 2), 1)),
        "model.b": random_tensor((2,), one_cell((2,)), dtype="bfloat16"),
    }
    catalog = replace(
        catalog_of(tensors, 2),
        mesh=(("dp", 1), ("tp", 2)),
        aliases={"model.tied": "model.w"},
        values={"lr": 0, "late": 1},
        per_rank={"rng": ((0, 0), (1, 1))},
    )
    small = ArrayValue("float32", (2,), bytes(8))
    files = {
        0: {
            "objects.msgpack": ObjectsFile(values={"lr": 0.5}, metadata={"note": ("a", 1)}),
            "objects-00000.msgpack": ObjectsFile(per_rank={"rng": {0: small}}),
        },
        1: {
            "objects-00001.msgpack": ObjectsFile(
                values={"late": DTypeValue("bfloat16")}, per_rank={"rng": {1: "one"}}
            )
        },
    }
    return save(path, tensors, catalog=catalog, objects=files)


def test_a_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    full_checkpoint(tmp_path / "ck")
    with checkpoint.open(tmp_path / "ck") as ck:
        assert (ck.path, ck.step, ck.world_size) == (str(tmp_path / "ck"), 7, 2)
        assert ck.mesh == {"dp": 1, "tp": 2}
        assert ck.metadata == {"note": ("a", 1)}
        assert ck.objects == {"lr": 0.5, "late": DTypeValue("bfloat16")}
        assert ck.per_rank == {"rng": {0: Array("float32", (2,), memoryview(bytes(8))), 1: "one"}}
        assert list(ck) == ["model.w", "model.b", "model.tied"]
        assert len(ck) == 3
        assert "model.w" in ck
        assert "lr" not in ck
        assert repr(ck) == f"Checkpoint({ck.path!r}, step=7, 3 tensors)"
        info = ck.tensors["model.w"]
        assert (info.dtype, info.shape, info.nbytes) == ("float32", (4, 2), 32)
        assert (info.component, info.num_shards, info.alias_of) == ("model", 2, None)
        assert ck.tensors["model.tied"] == replace(info, alias_of="model.w")
        assert ck["model.tied"][2:] == ck["model.w"][2:]
        assert repr(ck["model.b"]) == "StoredTensor('model.b', bfloat16, (2,))"
        assert ck["model.b"].nbytes == 4
        files = [file for file in Path(tmp_path / "ck").glob("a1-*/*") if "json" not in file.name]
        assert ck.nbytes == sum(file.stat().st_size for file in files)


def test_a_name_that_is_no_tensor_says_where_to_look(tmp_path: Path) -> None:
    full_checkpoint(tmp_path / "ck")
    ck = checkpoint.open(tmp_path / "ck")
    with pytest.raises(KeyError, match=r"no tensor 'model\.x'; see `\.tensors`"):
        ck["model.x"]
    with pytest.raises(KeyError, match=r"no tensor 'lr'; it is in `\.objects`"):
        ck["lr"]


@pytest.mark.parametrize(
    ("name", "touch"),
    [
        ("objects.msgpack", lambda ck: ck.objects),
        ("objects.msgpack", lambda ck: ck.metadata),
        ("objects-00001.msgpack", lambda ck: ck.objects),
        ("objects-00000.msgpack", lambda ck: ck.per_rank),
    ],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_objects_file_is_found_when_it_is_needed(
    tmp_path: Path, name: str, touch: Callable[[Checkpoint], object], damage: str
) -> None:
    file = full_checkpoint(tmp_path / "ck") / name
    data = bytearray(file.read_bytes())
    file.unlink()
    data[9] ^= 1
    if damage != "remove":
        file.write_bytes(data[:-1] if damage == "cut" else data)
    ck = checkpoint.open(tmp_path / "ck")
    with pytest.raises(CorruptError, match=f"{name}.*; load an older checkpoint"):
        touch(ck)


def test_values_that_a_file_lacks_are_damage(tmp_path: Path) -> None:
    tensors = {"model.b": random_tensor((2,), one_cell((2,)))}
    catalog = replace(catalog_of(tensors, 1), values={"lr": 0}, per_rank={"rng": ((("dp", 0), 0),)})
    files = {0: {"objects.msgpack": ObjectsFile(), "objects-00000.msgpack": ObjectsFile()}}
    save(tmp_path / "ck", tensors, catalog=catalog, objects=files)
    ck = checkpoint.open(tmp_path / "ck")
    with pytest.raises(CorruptError, match=r"objects\.msgpack lacks lr"):
        _ = ck.objects
    with pytest.raises(CorruptError, match=r"objects-00000\.msgpack lacks rng of \('dp', 0\)"):
        _ = ck.per_rank


def test_there_is_nothing_to_open_where_nothing_was_committed(tmp_path: Path) -> None:
    claim(LocalStorage(), str(tmp_path / "ck"), overwrite=False, by="a test")
    for path in (tmp_path / "ck", tmp_path / "none", tmp_path):
        with pytest.raises(NotFoundError):
            checkpoint.open(path)


def test_a_damaged_index_is_corrupt(tmp_path: Path) -> None:
    index = full_checkpoint(tmp_path / "ck") / "index.json"
    index.write_bytes(index.read_bytes()[:-9])
    with pytest.raises(CorruptError):
        checkpoint.open(tmp_path / "ck")


def test_looking_into_a_checkpoint_needs_no_torch_and_no_numpy(tmp_path: Path) -> None:
    full_checkpoint(tmp_path / "ck")
    script = (
        "import sys; from dist_ckpt.core.checkpoint.checkpoint import open; "
        "from dist_ckpt.core.checkpoint.verify_checkpoint import verify; "
        "ck = open(sys.argv[1]); ck['model.w'][1:, 0]; ck.objects; ck.per_rank; "
        "assert verify(sys.argv[1]).ok; assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "ck")],
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
