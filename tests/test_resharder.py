"""Rewriting checkpoints for other ranks, against what a load makes of them."""

from __future__ import annotations

import pytest

import dist_ckpt as dc
from dist_ckpt.storage.local import LocalStorage

torch = pytest.importorskip("torch")

import rank_threads  # noqa: E402


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_what_was_saved_on_a_mesh_is_resharded_to_fewer_and_to_more_ranks(world_size, tmp_path):
    weight = torch.arange(16.0).reshape(4, 4)
    states = [
        {"model": {"w": weight[rank : rank + 1].clone()}, "loader": dc.PerRank({"position": rank})}
        for rank in range(4)
    ]
    source, target = str(tmp_path / "source"), tmp_path / "target"
    even = dc.ShardingConfig.even(4)
    rank_threads.save(LocalStorage(), states, source, sharding=even)
    dc.reshard(source, target, world_size=world_size)
    assert dc.verify(target).ok
    with dc.open(target) as checkpoint:
        assert (checkpoint.world_size, checkpoint.mesh) == (world_size, {"dp": 4})
        assert torch.equal(checkpoint["model.w"][...].torch(), weight)
        assert checkpoint.per_rank["loader"] == {rank: {"position": rank} for rank in range(4)}
