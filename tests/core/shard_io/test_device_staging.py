"""Copies of tensors from devices: which are gathered, and the fingerprint of the late ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_ckpt.core.format.geometry import ElementRange
from dist_ckpt.core.shard_io.memory import device_staging
from dist_ckpt.core.shard_io.memory.device_staging import PlacedTensor, fingerprint, plan_copies
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorReader, bytes_of, gather
from sources import read_all

CPU = torch.device("cpu")


def placed(**tensors: torch.Tensor) -> list[PlacedTensor]:
    readers = {name: TensorReader(tensor) for name, tensor in tensors.items()}
    start, found = 4096, []
    for name, reader in readers.items():
        found.append(PlacedTensor(name, reader, start, reader.nbytes))
        start += reader.nbytes
    return found


@pytest.mark.parametrize(
    ("room", "gathered", "held", "late"),
    [
        (1 << 30, "abcd", "", ""),
        (5 << 20, "acd", "", "b"),
        (2 << 20, "acd", "", "b"),
        (2000, "ad", "c", "b"),
        (0, "", "acd", "b"),
    ],
)
def test_what_may_not_be_late_is_gathered_first(
    room: int, gathered: str, held: str, late: str
) -> None:
    large = torch.zeros(1 << 20)  # 4 MiB
    tensors = placed(a=torch.zeros(9), b=large, c=large[: 1 << 18], d=torch.zeros(99))
    plan = plan_copies(tensors, {CPU: room}, lambda: {"a", "b", "d"})
    assert tuple("".join(t.fqn for t in way) for way in plan) == (gathered, held, late)


def test_what_is_not_contiguous_is_never_late() -> None:
    plan = plan_copies(placed(a=torch.zeros(1500, 1500).t()), {}, lambda: {"a"})
    assert [tensor.fqn for tensor in plan.held] == ["a"]


def test_with_room_for_all_no_tensor_is_looked_up() -> None:
    assert len(plan_copies(placed(a=torch.zeros(9)), {CPU: 100}, dict).gathered) == 1


def odd_tensors() -> list[torch.Tensor]:
    nan = torch.tensor([0x7FA1, 0x7F81], dtype=torch.int16).view(torch.bfloat16)
    complexes = torch.randn(50, dtype=torch.complex64)
    return [
        torch.randn(7, 3, dtype=torch.complex128),
        torch.randn(7, 3, dtype=torch.complex128).t(),
        torch.randn(5, dtype=torch.float64),
        torch.randn(5, dtype=torch.float64)[::2],
        complexes.conj(),
        complexes.conj().imag,
        torch.randn(3, 4).t(),
        torch.randn(3).expand(4, 3),
        torch.tensor(3.0),
        torch.empty(0, 3),
        nan,
        nan.to(torch.float16),
        torch.arange(9, dtype=torch.int16),
        torch.randn(9).to(torch.float8_e4m3fn),
        torch.arange(5, dtype=torch.uint8),
        torch.rand(11) > 0.5,
    ]


def test_all_kinds_are_gathered_bit_for_bit() -> None:
    torch.manual_seed(0)
    readers = [TensorReader(tensor) for tensor in odd_tensors()]
    readers.insert(3, TensorReader(torch.randn(9, dtype=torch.float64), ElementRange(2, 5)))
    memory = torch.empty(sum(reader.nbytes for reader in readers), dtype=torch.uint8)
    gather(readers, memory)
    assert bytes(memory.tolist()) == b"".join(read_all(reader, 1 << 10) for reader in readers)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(device_staging, "_ROWS", 4)
    monkeypatch.setattr(device_staging, "_ROW_WORDS", 8)
    monkeypatch.setattr(device_staging, "_PACK_NBYTES", 256)
    return torch.full((256,), 255, dtype=torch.uint8)


def sums(data: bytes) -> list[int]:
    """Return the fingerprint as the page says it, without torch."""
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
    totals = sum(words), sum(number * word for number, word in enumerate(words))
    return [(total + (1 << 63)) % (1 << 64) - (1 << 63) for total in totals]


@pytest.mark.parametrize("sizes", [(256,), (100, 33), (8,), (1,), (255,)])
def test_a_fingerprint_has_the_sums_of_all_words_and_of_their_positions(
    scratch: torch.Tensor, sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    data = b"".join(bytes(piece.tolist()) for piece in pieces)
    found = fingerprint([pieces, pieces[:1]], scratch)
    assert found.tolist() == [sums(data), sums(bytes(pieces[0].tolist()))]


def test_swapped_words_and_rows_and_columns_have_other_fingerprints(scratch: torch.Tensor) -> None:
    words = torch.arange(32)
    found = {tuple(fingerprint([[words.view(torch.uint8)]], scratch)[0].tolist())}
    for one, other in ((0, 1), (0, 8), (5, 31)):
        swapped = words.clone()
        swapped[one], swapped[other] = words[other], words[one]
        found.add(tuple(fingerprint([[swapped.view(torch.uint8)]], scratch)[0].tolist()))
    assert len(found) == 4


class Recorded:
    """Copies that are made when they are queued. It has no room."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def room(self) -> dict[torch.device, int]:
        return {}

    def allocate(self, device: torch.device, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def queue(self, call: Any) -> None:
        if getattr(call.func, "__name__", "") == "send":
            self.sizes.append(len(call.args[2]))
        call()

    def hold_training(self) -> None: ...

    def mark(self) -> Any:
        return self

    def wait(self) -> None: ...

    def hold(self) -> None: ...


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_no_copy_crosses_the_pieces_of_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(device_staging, "PIN_NBYTES", 1000)
    targets: list[int] = []

    def counted(view: memoryview) -> torch.Tensor:
        targets.append(len(view))
        return bytes_of(view)

    monkeypatch.setattr(device_staging, "bytes_of", counted)
    tensors = placed(a=torch.randn(700, dtype=torch.float64), b=torch.randn(30, 20).t())
    memory, copies = memoryview(bytearray(20_000)), Recorded()
    monkeypatch.setattr(copies, "room", lambda: {CPU: room})
    staging = device_staging.DeviceStaging(tensors, memory, copies, dict)
    assert [*staging.follow()][-1:] == ([12096] if room else [])
    assert (targets if room else copies.sizes) == [
        *((904, 1000, 1000, 1000, 1000, 1000, 1000, 1000, 96) if room else ()),
        *(() if room else (904, 1000, 1000, 1000, 1000, 696, 304, 1000, 1000, 96)),
    ]
    expected = b"".join(read_all(tensor.reader, 1 << 10) for tensor in tensors)
    assert bytes(memory[4096:12096]) == expected
