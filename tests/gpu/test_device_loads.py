"""Loads into a device through pinned memory: bit for bit, in order, and nothing stays pinned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.shard_io.memory import cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def state(seed: int, device: str = "cuda") -> dict[str, Any]:
    """Return 90 MiB of tensors: large, small, odd, strided, and two that share memory."""
    generator = torch.Generator().manual_seed(seed)

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 30), 1 << 30, shape, dtype=torch.int32, generator=generator)

    host = {
        "large": bits(20 << 20)[3:],
        "odd": bits(700_001).view(torch.int8)[1:-2].clone(),
        "half": bits(300_000).view(torch.bfloat16),
        "complex": torch.view_as_complex(bits(4000, 2).double()),
        "scalar": bits(1)[0],
        "empty": bits(0, 3),
        **{f"small{number}": bits(500) for number in range(40)},
    }
    tensors = {name: tensor.to(device) for name, tensor in host.items()}
    tensors["strided"] = bits(500, 800).to(device).t()
    tensors["tied"] = tensors["half"]
    return tensors


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    pair = (x.contiguous().reshape(-1).view(torch.uint8).cpu() for x in (a, b))
    return torch.equal(*pair)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[cuda.PinnedMemory]:
    """Note the memory that is pinned."""
    made: list[cuda.PinnedMemory] = []

    class Noted(cuda.PinnedMemory):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(cuda, "PinnedMemory", Noted)
    return made


@pytest.mark.parametrize("saved_on", ["cuda", "cpu"])
def test_a_load_fills_the_device_from_pinned_memory(
    tmp_path: Path, saved_on: str, pinned: list[cuda.PinnedMemory]
) -> None:
    saved, other = state(1, saved_on), state(2)
    dc.save({"m": saved}, tmp_path / "a")
    for _ in range(3):
        for tensor in other.values():
            tensor.zero_()  # queued, and not waited for
        dc.load({"m": other}, tmp_path / "a")
        for name, tensor in saved.items():
            assert equal(tensor, other[name]), name
    assert pinned
    assert not any(memory.error or memory._addresses for memory in pinned)


def test_work_of_other_streams_before_and_after_a_load_is_in_order(tmp_path: Path) -> None:
    ones, large = torch.ones(8 << 20), torch.zeros(8 << 20, device="cuda")
    dc.save({"m": {"w": ones}}, tmp_path / "a")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(200):
            large.add_(1)
        dc.load({"m": {"w": large}}, tmp_path / "a")
        assert bool((large == 1).all())
        large.add_(1)
    torch.cuda.synchronize()
    assert bool((large == 2).all())


def test_damage_leaves_nothing_pinned_and_the_device_usable(
    tmp_path: Path, pinned: list[cuda.PinnedMemory]
) -> None:
    dc.save({"m": state(1)}, tmp_path / "a")
    (file,) = tmp_path.rglob("*.safetensors")
    with file.open("r+b") as damaged:
        damaged.seek(file.stat().st_size // 2)
        damaged.write(b"damage")
    other = state(2)
    with pytest.raises(dc.CorruptError, match=r"m\.large rows"):
        dc.load({"m": other}, tmp_path / "a")
    assert pinned
    assert not any(memory._addresses for memory in pinned)
    assert float(other["large"].float().sum()) == float(other["large"].float().sum())


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved, other = state(1), state(2)
    dc.save({"m": saved}, tmp_path / "a")
    monkeypatch.setattr(cuda, "_PORTABLE", 1 << 20)  # CUDA refuses unknown flags
    dc.load({"m": other}, tmp_path / "a")
    assert [text for text in caplog.messages if "cannot be pinned" in text]
    torch.ones(1, device="cuda")  # a kernel in this thread
    assert all(equal(tensor, other[name]) for name, tensor in saved.items())
