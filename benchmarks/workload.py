"""What is saved and loaded: states of plain tensors, of sharded ones, and a GPT with AdamW."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

Placement = Literal["row", "column", "replicated"]

# No value of ours looks like this all over; written into memory before each load.
WIPED = 0xA5


@dataclass(frozen=True, slots=True)
class Spec:
    """What a state holds, and how the ranks hold it; the values follow from it.

    `count` tensors of `shape`, in float32; or, where `width` is given, a GPT of `count` blocks of
    that width with its optimizer. `placement` None: a state of one process, without a group.
    """

    count: int
    shape: tuple[int, int] = (0, 0)
    width: int = 0
    placement: Placement | None = None


class Workload:
    """A state in memory. `tensors` are flat; a GPT comes as `model` and `optimizer` instead."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.tensors = tensors
        self.model = model
        self.optimizer = optimizer

    def local_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name, as the memory that this rank holds."""
        for name, tensor in _leaves("", self._everything()):
            if isinstance(tensor, DTensor):
                yield name, tensor.to_local()
            elif isinstance(tensor, Tensor):
                yield name, tensor.detach()

    def local_nbytes(self) -> int:
        """Return the number of bytes that this rank holds."""
        return sum(tensor.nbytes for _, tensor in self.local_tensors())

    def wipe(self) -> None:
        """Overwrite all values, so that nothing left over can pass for loaded."""
        for _, tensor in self.local_tensors():
            _bytes_of(tensor).fill_(WIPED)

    def assign(self, source: Workload) -> None:
        """Copy all tensors of a state made alike."""
        values = dict(source.local_tensors())
        for name, tensor in self.local_tensors():
            tensor.copy_(values[name])

    def difference(self, expected: Workload) -> str | None:
        """Return the first name that is not bit for bit as expected, or None."""
        found, wanted = dict(self.local_tensors()), dict(expected.local_tensors())
        if found.keys() != wanted.keys():
            return f"{sorted(found.keys() ^ wanted.keys())[0]} is missing, or too much"
        for name, tensor in wanted.items():
            other = found[name]
            if other.shape != tensor.shape or other.dtype != tensor.dtype:
                return f"{name} is {other.dtype} {tuple(other.shape)}"
            if not torch.equal(_bytes_of(other), _bytes_of(tensor)):
                return f"{name} has other values"
        mine, theirs = _plain_leaves(self._everything()), _plain_leaves(expected._everything())
        return next(
            (f"{name} is {mine.get(name)!r}" for name in theirs if mine.get(name) != theirs[name]),
            None,
        )

    def _everything(self) -> dict[str, Any]:
        if self.model is None or self.optimizer is None:
            return dict(self.tensors)
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}


def make(spec: Spec, *, seed: int = 0) -> Workload:
    """Make a state, all of its memory touched. Every rank of the default group calls this."""
    if spec.width:
        return _make_gpt(spec, seed)
    tensors = {f"layer.{i:05d}.weight": _values(spec.shape, seed + i) for i in range(spec.count)}
    if spec.placement is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        placed = {"row": Shard(0), "column": Shard(1), "replicated": Replicate()}[spec.placement]
        for name, whole in tensors.items():
            tensors[name] = _place(whole, mesh, placed)
    return Workload(tensors)


def _values(shape: tuple[int, int], seed: int) -> Tensor:
    """Return values that differ from place to place and tensor to tensor, made fast."""
    numbers = torch.arange(shape[0] * shape[1], dtype=torch.int32)
    return numbers.mul_(-1640531535).add_(seed * 7919 + 1).view(torch.float32).view(shape)


def _place(whole: Tensor, mesh: Any, placement: Any) -> DTensor:
    local = whole
    if isinstance(placement, Shard):
        local = whole.chunk(mesh.size(), dim=placement.dim)[mesh.get_local_rank()]
    return DTensor.from_local(local.clone().contiguous(), mesh, [placement], run_check=False)


def _make_gpt(spec: Spec, seed: int) -> Workload:
    """Make the model of the example in launch/, and take a step, so that AdamW has its state."""
    torch.manual_seed(seed)
    model = example().GPT(spec.width, spec.count, heads=spec.width // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(0, 256, (1, 9))
    model(text[:, :-1], text[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Workload({}, model=model, optimizer=optimizer)


def example() -> Any:
    """Return the example in launch/ as a module."""
    folder = str(Path(__file__).parents[1] / "launch")
    if folder not in sys.path:
        sys.path.append(folder)
    import train_gpt  # noqa: PLC0415  (not on the path before)

    return train_gpt


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from _leaves(f"{name}.{key}" if name else str(key), item)
    else:
        yield name, value


def _plain_leaves(state: dict[str, Any]) -> dict[str, object]:
    return {name: value for name, value in _leaves("", state) if not isinstance(value, Tensor)}
