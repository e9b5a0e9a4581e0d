"""Tensors made of boxes of saved ones have the values that torch's operations give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.geometry import Cell, ElementRange, Region, row_major_strides
from dist_ckpt.core.planning.tensor_operations import DerivedTensor, concatenate, stack
from dist_ckpt.core.shard_io.memory.cell_memory import BoxTarget
from dist_ckpt.core.shard_io.memory.host_array import ArrayTarget
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorTarget, host_memory
from long_mode import examples


@dataclass
class Pair:
    """A derived tensor, and the plain tensor that it stands for."""

    derived: DerivedTensor
    plain: Any


def saved(name: str, shape: Sequence[int], first: int) -> Pair:
    plain = torch.arange(first, first + prod(shape), dtype=torch.int32).reshape(tuple(shape))
    return Pair(DerivedTensor.of(name, "int32", tuple(shape)), plain)


def read(
    derived: DerivedTensor,
    sources: dict[str, Any],
    cell: Cell,
    target: Callable[[Any, Cell], Any] = TensorTarget,
) -> Any:
    """Read a cell as a load does: box by box, straight into its memory."""
    shape = cell.shape if isinstance(cell, Region) else (cell.numel,)
    memory = torch.full(shape, -1, dtype=torch.int32)
    for piece, part, box in derived.requests(cell):
        index = tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))
        data = host_memory(sources[piece.source][index].contiguous())
        assert data is not None
        placed = BoxTarget(piece, part, target(memory, cell))
        assert placed.memory() is None
        placed.place(part, box, data, row_major_strides(box.shape))
    return memory


def in_array(memory: Any, cell: Cell) -> ArrayTarget:
    data = host_memory(memory)
    assert data is not None
    return ArrayTarget(data, 4)


@st.composite
def operated(draw: Any) -> tuple[Pair, dict[str, Any]]:
    """Draw some tensors of one shape, and operations on them until one is left."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = draw(st.integers(1, 3))
    tensors = [saved(f"t{n}", shape, 1000 * n) for n in range(count)]
    sources = {f"t{n}": pair.plain for n, pair in enumerate(tensors)}
    for _ in range(draw(st.integers(1, 5))):
        tensors = _operate(draw, tensors)
    return draw(st.sampled_from(tensors)), sources


def _operate(draw: Any, tensors: list[Pair]) -> list[Pair]:
    ndim = tensors[0].plain.dim()
    made, plain = [pair.derived for pair in tensors], [pair.plain for pair in tensors]
    kinds = ["stack", *(["transpose", "concatenate", "split", "unstack"] if ndim else [])]
    kind = draw(st.sampled_from(kinds))
    dim = draw(st.integers(-ndim, ndim - 1)) if ndim else 0
    if kind == "stack" and ndim < 5:
        dim = draw(st.integers(-ndim - 1, ndim))
        return [Pair(stack(made, dim), torch.stack(plain, dim))]
    if kind == "concatenate":
        return [Pair(concatenate(made, dim), torch.cat(plain, dim))]
    if kind == "transpose":
        other = draw(st.integers(-ndim, ndim - 1))
        return [
            Pair(p.derived.transpose(dim, other), p.plain.transpose(dim, other)) for p in tensors
        ]
    if kind == "split":
        size = plain[0].shape[dim]
        cut = draw(st.integers(0, size))
        sizes = [n for n in (cut, size - cut) if n]
        parts = zip(made[0].split(dim, sizes), plain[0].split(sizes, dim), strict=True)
        return [Pair(*draw(st.sampled_from([*parts])))]
    if kind == "unstack":
        parts = zip(made[0].unstack(dim), plain[0].unbind(dim), strict=True)
        return [Pair(*draw(st.sampled_from([*parts])))]
    return tensors


@given(operated(), st.data())
@examples(150)
def test_every_part_of_a_result_has_the_values_of_torch(
    case: tuple[Pair, dict[str, Any]], data: Any
) -> None:
    pair, sources = case
    expected = pair.plain
    assert pair.derived.shape == tuple(expected.shape)
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in expected.shape]
    box = Region(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
    wanted = expected[tuple(slice(a, b) for a, b in bounds)]
    assert torch.equal(read(pair.derived, sources, box), wanted)
    if box.numel:
        assert torch.equal(read(pair.derived, sources, box, in_array), wanted)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, expected.numel())] * 2)))
    flat = read(pair.derived, sources, ElementRange(start, stop))
    assert torch.equal(flat, expected.flatten()[start:stop])


def test_equal_parts_are_the_default_of_a_split() -> None:
    pair = saved("w", (6, 2), 0)
    parts = pair.derived.split_evenly(0, 3)
    for part, plain in zip(parts, pair.plain.chunk(3), strict=True):
        assert torch.equal(read(part, {"w": pair.plain}, Region.whole(part.shape)), plain)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda a, b: a.split(0, [2, 3]), "cannot be split into sizes"),
        (lambda a, b: a.split_evenly(0, 3), "into 3 equal parts: give Split their sizes"),
        (lambda a, b: a.transpose(0, 2), "has no dimension 2"),
        (lambda a, b: a.unstack(-3), "has no dimension -3"),
        (lambda a, b: stack([a, b], 0), r"a has shape \(4, 2\), and b has shape \(4, 3\)"),
        (lambda a, b: stack([a, a], 4), "cannot be stacked along dimension 4"),
        (lambda a, b: concatenate([a, b], 0), r"a has shape \(4, 2\), and b has shape \(4, 3\)"),
        (lambda a, b: concatenate([a, DerivedTensor.of("c", "int8", (4, 2))], 0), "c is int8"),
        (lambda a, b: concatenate([a, DerivedTensor.of("c", "int32", (4,))], 1), "c has shape"),
    ],
)
def test_operations_that_do_not_fit_are_refused(make: Callable[..., Any], words: str) -> None:
    a, b = DerivedTensor.of("a", "int32", (4, 2)), DerivedTensor.of("b", "int32", (4, 3))
    with pytest.raises(ValueError, match=words):
        make(a, b)
