"""Fused weights under a tensor-parallel rule with pieces: right on every number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dist_ckpt as dc
from dist_ckpt.testing.memory_storage import MemoryStorage

pytest.importorskip("torch")

import torch

from ranks import load_on_threads, save_on_threads

WORLDS = (1, 2, 3, 4, 8)


def part_of(whole: torch.Tensor, sizes: list[int], dim: int, rank: int, count: int) -> torch.Tensor:
    """Return what a rank holds: the plain concatenation of its chunk of each piece."""
    chunks = []
    for piece in whole.split(sizes, dim):
        parts = piece.chunk(count, dim)
        chunks.append(parts[rank] if rank < len(parts) else piece.narrow(dim, 0, 0))
    return torch.cat(chunks, dim).clone()


def fused(world_size: int, sizes: list[int], dim: int) -> dc.ShardingConfig:
    return dc.ShardingConfig({"tp": world_size}, {"fc1.*": {"tp": dim, "pieces": sizes}})


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dim=st.integers(0, 1),
    saved=st.sampled_from(WORLDS),
    loaded=st.sampled_from(WORLDS),
)
def test_any_pieces_saved_on_any_ranks_load_on_any_other(
    sizes: list[int], dim: int, saved: int, loaded: int
) -> None:
    total = sum(sizes)
    whole = torch.arange(3.0 * total).reshape((total, 3) if dim == 0 else (3, total))
    storage = MemoryStorage()
    states = [
        {"model": {"fc1": {"weight": part_of(whole, sizes, dim, rank, saved)}}}
        for rank in range(saved)
    ]
    save_on_threads(storage, states, sharding=fused(saved, sizes, dim))
    targets = [
        {"model": {"fc1": {"weight": torch.zeros_like(part_of(whole, sizes, dim, rank, loaded))}}}
        for rank in range(loaded)
    ]
    load_on_threads(storage, targets, sharding=fused(loaded, sizes, dim))
    for rank, target in enumerate(targets):
        expected = part_of(whole, sizes, dim, rank, loaded)
        assert torch.equal(target["model"]["fc1"]["weight"], expected)
    alone: dict[str, Any] = {}
    load_on_threads(storage, [alone])
    assert torch.equal(alone["model"]["fc1"]["weight"], whole)
