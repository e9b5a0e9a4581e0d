"""Buffers from which devices copy: what gets into the tensors, how much memory, and its end."""

from __future__ import annotations

import logging
import random
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from dist_ckpt.core.format.checksums import BLOCK_NBYTES
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.runtime.host_memory import address_of
from dist_ckpt.core.shard_io.memory import pinned_buffers
from dist_ckpt.core.shard_io.memory.cell_memory import UNIT_NBYTES
from dist_ckpt.core.shard_io.memory.pinned_buffers import (
    MAX_PINNED_NBYTES,
    PinnedBuffers,
    find_buffers,
    open_buffers,
)
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorTarget
from dist_ckpt.core.shard_io.read import block_reader
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.open_files import open_files
from dist_ckpt.core.storage.storage_wrappers import CountingStorage
from dist_ckpt.errors import CorruptError
from dist_ckpt.testing.memory_storage import MemoryStorage
from late_devices import CPU, DeviceTarget, LateDevices
from written import Saved, one_cell, plan_of, write

FOLDER = "/ck"
META = torch.device("meta")


class OneTensor:
    """A stored tensor of bytes, and a tensor on a device for it."""

    def __init__(self, nbytes: int, block_nbytes: int) -> None:
        self.data = random.Random(0).randbytes(nbytes)
        self.storage = MemoryStorage({FOLDER: None})
        saved = {"model.w": Saved("uint8", (nbytes,), one_cell((nbytes,)), self.data)}
        self.index = write(self.storage, FOLDER, saved, block_nbytes=block_nbytes)
        whole = Region.whole((nbytes,))
        self.wanted = TensorRequest("model.w", "uint8", (nbytes,), (whole,))
        self.target = DeviceTarget(torch.full((nbytes,), 0xEE, dtype=torch.uint8), whole)

    def load(self, buffers: PinnedBuffers, *, threads: int = 2) -> CountingStorage:
        """Load from the storage through buffers, and return the storage with its counts."""
        storage, plan = CountingStorage(self.storage), plan_of(self.index, [self.wanted])
        files = open_files(storage, FOLDER, self.index, plan, threads=1)
        with closing(files), closing(buffers):
            reader = BlockReader(files, {("model.w", 0): self.target}, verify=True)
            reader.device_buffers = buffers
            storage.reads = type(storage.reads)()
            reader.read_all(threads)
        return storage

    def flip(self, at: int) -> None:
        tree = self.storage.tree()
        (path,) = (path for path in tree if path.endswith(".safetensors"))
        data = bytearray(tree[path] or b"")
        data[at - len(self.data)] ^= 1
        self.storage = MemoryStorage({**tree, path: bytes(data)})


def test_a_large_tensor_is_read_in_units_of_many_blocks() -> None:
    one = OneTensor(2 * UNIT_NBYTES + 5, BLOCK_NBYTES)
    devices = LateDevices()
    storage = one.load(PinnedBuffers(devices, 4, UNIT_NBYTES))
    assert one.target.data == one.data
    assert storage.reads.num == devices.num_calls == 3


def test_a_buffer_is_used_again_when_its_copies_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_reader, "UNIT_NBYTES", 64)
    monkeypatch.setattr("dist_ckpt.core.shard_io.read.read_grouping.WORK_NBYTES", 128)
    one, devices = OneTensor(5000, 16), LateDevices()
    one.load(PinnedBuffers(devices, 4, 64))
    assert one.target.data == one.data
    assert len(devices.pinned) == 4
    assert devices.num_calls == -(-5000 // 64)


def test_a_damaged_block_in_a_unit_is_named_and_no_byte_of_it_reaches_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_reader, "UNIT_NBYTES", 64)
    one, devices = OneTensor(200, 16), LateDevices()
    one.flip(70)
    with pytest.raises(CorruptError, match=r"model\.w rows 64:80: damaged.*older") as caught:
        one.load(PinnedBuffers(devices, 4, 64), threads=1)
    assert caught.value.touched == ("model.w",)
    assert one.target.data[:128] == one.data[:64] + b"\xee" * 64
    assert all(part.is_closed for part in devices.pinned)


def test_memory_that_cannot_be_pinned_is_copied_from_at_once_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_reader, "UNIT_NBYTES", 64)
    one, devices = OneTensor(5000, 16), LateDevices(error=2)
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        one.load(PinnedBuffers(devices, 4, 64))
    assert one.target.data == one.data
    assert devices.num_calls == 0
    (text,) = caplog.messages
    assert text.startswith("64 bytes of memory cannot be pinned (error 2 of the device)")


def test_memory_stays_pinned_if_a_device_does_not_answer() -> None:
    devices = LateDevices(answers=False)
    buffers = PinnedBuffers(devices, 3, 4096)
    with buffers.borrow():
        pass
    buffers.close()
    assert [part.is_closed for part in devices.pinned] == [False]


def test_failed_calls_keep_their_buffers_and_the_others_get_new_ones() -> None:
    devices = LateDevices()
    buffers, lost = PinnedBuffers(devices, 3, 4096), set()

    def fail() -> None:
        with buffers.borrow() as buffer:
            lost.add(address_of(buffer))
            raise KeyError

    for _ in range(5):
        with pytest.raises(KeyError):
            fail()
    for _ in range(5):
        with buffers.borrow() as one, buffers.borrow() as other, buffers.borrow() as third:
            lent = {address_of(one), address_of(other), address_of(third)}
            assert len(lent) == 3
            assert not lent & lost
    buffers.close()
    assert [part.is_closed for part in devices.pinned] == [True] * 8


def test_a_forked_child_has_no_buffers() -> None:
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("this system does not show its mappings")
    with PinnedBuffers(LateDevices(), 3, 2 << 20).borrow() as buffer:
        first = address_of(buffer)
        areas = re.findall(r"^(\w+)-(\w+) [^V]*VmFlags: (.*)$", smaps.read_text(), re.MULTILINE)
        (flags,) = (f for start, stop, f in areas if int(start, 16) <= first < int(stop, 16))
    assert "dc" in flags.split()


@pytest.mark.parametrize(
    ("nbytes", "threads", "block_nbytes", "found"),
    [
        (UNIT_NBYTES, 4, 4 << 20, (6, UNIT_NBYTES)),
        (UNIT_NBYTES - 1, 4, 4 << 20, None),
        (UNIT_NBYTES, 20, 4 << 20, (22, UNIT_NBYTES)),
        (UNIT_NBYTES, 6, 64 << 20, (8, 64 << 20)),
        (UNIT_NBYTES, 7, 64 << 20, None),
    ],
)
def test_a_load_pins_memory_for_its_threads_up_to_a_limit(
    nbytes: int, threads: int, block_nbytes: int, found: tuple[int, int] | None
) -> None:
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=META)
    assert find_buffers([tensor], threads=threads, block_nbytes=block_nbytes) == found
    assert found is None or found[0] * found[1] <= MAX_PINNED_NBYTES


def test_a_load_without_cuda_has_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_buffers, "UNIT_NBYTES", 1)
    with open_buffers([torch.zeros(9)], threads=1, block_nbytes=1) as buffers:
        assert buffers is None


def test_the_buffers_of_a_load_are_closed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = LateDevices()
    monkeypatch.setattr(pinned_buffers, "CurrentStreams", lambda _: devices)
    on_cuda = SimpleNamespace(is_cuda=True, device=CPU, nbytes=UNIT_NBYTES)

    def fail() -> None:
        tensors = cast(list[torch.Tensor], [on_cuda])
        with open_buffers(tensors, threads=1, block_nbytes=1) as buffers:
            assert buffers is not None
            with buffers.borrow():
                pass
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [part.is_closed for part in devices.pinned] == [True]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.complex128, torch.complex64, torch.float64, torch.bfloat16, torch.bool),
        *(torch.float8_e4m3fn, torch.uint8),
    ],
)
def test_bytes_of_any_dtype_are_those_on_the_device(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 3, dtype=dtype)[1:].requires_grad_(dtype.is_floating_point)
    memory = TensorTarget(tensor, Region.whole((3, 3))).device_memory({CPU})
    assert memory is not None
    assert memory.shape == (9 * dtype.itemsize,)
    assert memory.data_ptr() == tensor.data_ptr()


def test_only_row_major_bytes_on_the_devices_are_copied_as_bytes() -> None:
    def has_bytes(tensor: torch.Tensor) -> bool:
        target = TensorTarget(tensor, Region.whole(tuple(tensor.shape)))
        return target.device_memory({CPU}) is not None

    complexes = torch.zeros(3, dtype=torch.complex64)
    others = (torch.zeros(3, 2).t(), complexes.conj(), complexes.conj().imag, complexes.to(META))
    assert [*map(has_bytes, others)] == [False] * 4
    single = torch.zeros(1, 2)[:, 0]
    assert has_bytes(single)
    assert has_bytes(single[:0])


@pytest.mark.parametrize("is_view", [False, True])
def test_a_copy_into_a_tensor_counts_as_a_change_of_it(is_view: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    with torch.no_grad():
        tensor = parameter[:] if is_view else parameter
    buffers = PinnedBuffers(devices := LateDevices(), 3, 4096)
    with buffers.borrow() as buffer:
        buffer[:8] = torch.tensor([3.0, 4.0]).numpy().tobytes()
        assert buffers.copy(TensorTarget(tensor, Region.whole((4,))), 4, buffer[:8])
        buffer[8:16] = bytes(8)
    devices.synchronize()
    assert parameter._version == 1
    assert parameter.tolist() == [0, 3, 4, 0]
