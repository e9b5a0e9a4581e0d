"""`layout`: who holds what, as the shard files themselves say it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import dist_ckpt as dc
from dist_ckpt.tools.inspect.describe import layout


def test_it_is_what_lies_in_the_files(tmp_path: Path) -> None:
    dc.save({"model": {"w": torch.ones(10, 4), "b": torch.ones(3)}}, tmp_path / "ck")
    dc.reshard(tmp_path / "ck", tmp_path / "wide", world_size=3)
    found = layout(tmp_path / "wide", include="*")
    for file in found.files:
        (there,) = (tmp_path / "wide").glob(f"a1-*/{file.name}")
        assert there.stat().st_size == file.nbytes
        with safe_open(there, "pt") as opened:
            shapes = sorted(tuple(opened.get_tensor(name).shape) for name in opened.keys())  # noqa: SIM118
        assert shapes == sorted(one.cell.shape for one in file.shards)  # type: ignore[union-attr]
        assert len(shapes) == file.num_shards
    total = sum(one.nbytes for file in found.files for one in file.shards)
    assert total == 4 * 43
    assert sum(found.nbytes_by_rank) == sum(file.nbytes for file in found.files)
    assert found.imbalance >= 1.0


def test_shards_are_listed_if_they_are_asked_for(tmp_path: Path) -> None:
    dc.save({"model": {"w": torch.ones(10), "b": torch.ones(3)}}, tmp_path / "ck")
    (file,) = layout(tmp_path / "ck").files
    assert (file.num_shards, file.shards) == (2, ())
    (file,) = layout(tmp_path / "ck", include="*.b").files
    assert [one.tensor for one in file.shards] == ["model.b"]
    with pytest.raises(ValueError, match="matches no name"):
        layout(tmp_path / "ck", include="x")
