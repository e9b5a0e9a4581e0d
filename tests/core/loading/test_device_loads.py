"""`dc.load` into devices that copy late: all is there when it returns, also after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.shard_io.memory.pinned_buffers import PinnedBuffers
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorTarget
from dist_ckpt.core.state.binding import targets
from late_devices import LateDevices


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> LateDevices:
    """Let all tensors of the host count as on devices."""
    devices = LateDevices()

    @contextmanager
    def open_buffers(_: object, *, threads: int, block_nbytes: int) -> Iterator[PinnedBuffers]:
        with closing(PinnedBuffers(devices, threads + 2, max(16 << 20, block_nbytes))) as buffers:
            yield buffers

    monkeypatch.setattr(targets, "open_buffers", open_buffers)
    monkeypatch.setattr(TensorTarget, "memory", lambda _: None)
    return devices


def state(value: float) -> dict[str, torch.Tensor]:
    small = {f"s{number}": torch.full((50,), value) for number in range(40)}
    return {
        **small,
        "large": torch.full((400_000,), value),
        "strided": torch.full((4, 3), value).t(),
    }


def test_a_load_returns_when_the_devices_have_all(tmp_path: Path, devices: LateDevices) -> None:
    dc.save({"m": state(1)}, tmp_path / "a")
    loaded = state(0)
    dc.load({"m": loaded}, tmp_path / "a")
    assert devices.num_calls == 41
    for name, tensor in loaded.items():
        assert bool((tensor == 1).all()), name
    assert all(part.is_closed for part in devices.pinned)


def test_damage_is_named_and_nothing_stays_pinned(tmp_path: Path, devices: LateDevices) -> None:
    dc.save({"m": state(1)}, tmp_path / "a")
    (file,) = tmp_path.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(dc.CorruptError, match=r"m\.large rows 0:400000: damaged") as caught:
        dc.load({"m": state(0)}, tmp_path / "a")
    assert "m.large" not in caught.value.touched
    assert devices.pinned
    assert all(part.is_closed for part in devices.pinned)
