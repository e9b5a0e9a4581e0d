"""A fused weight that ranks saved in pieces is exported as the plain concatenation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as dcp

import dist_ckpt as dc
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.interop.dcp.export import export_folder as export_for_dcp
from dist_ckpt.interop.hf.export import export_folder
from dist_ckpt.interop.torch_save.export import export_file
from ranks import save_on_threads


@pytest.fixture
def whole() -> torch.Tensor:
    return torch.arange(48.0).reshape(16, 3)


@pytest.fixture
def saved(tmp_path: Path, whole: torch.Tensor) -> Path:
    """Return a checkpoint of gate and up, of which each of four ranks saved its part."""
    gate, up = whole.chunk(2)
    states = [
        {"model": {"fc1": {"weight": torch.cat([gate.chunk(4)[rank], up.chunk(4)[rank]])}}}
        for rank in range(4)
    ]
    config = dc.ShardingConfig({"tp": 4}, {"fc1.*": {"tp": 0, "pieces": [8, 8]}})
    save_on_threads(LocalStorage(), states, str(tmp_path / "ck"), sharding=config)
    return tmp_path / "ck"


def test_for_hugging_face(saved: Path, whole: torch.Tensor, tmp_path: Path) -> None:
    export_folder(saved, tmp_path / "hf")
    found: dict[str, Any] = {}
    dc.load(found, tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["model"]["fc1.weight"], whole)


def test_for_torch(saved: Path, whole: torch.Tensor, tmp_path: Path) -> None:
    export_file(saved, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(found["model"]["fc1"]["weight"], whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_for_dcp(saved: Path, whole: torch.Tensor, tmp_path: Path) -> None:
    export_for_dcp(saved, tmp_path / "dcp")
    found = {"model": {"fc1": {"weight": torch.zeros(16, 3)}}}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(found["model"]["fc1"]["weight"], whole)
