"""A checkpoint that is replaced while it is exported: no export takes it for damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Storage
from dist_ckpt.interop.dcp import export as dcp_export
from dist_ckpt.interop.hf import export as hf
from dist_ckpt.interop.torch_save import export as torch_export


@pytest.mark.parametrize(
    "export", [hf.export_folder, dcp_export.export_folder, torch_export.export_file]
)
def test_a_source_that_is_replaced_is_told_from_one_that_is_damaged(
    export: Callable[[Path, Path], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": {"w": torch.ones(5)}, "epoch": [1]}
    dc.save(state, tmp_path / "source")
    real_find = attempts.find_checkpoint

    def find(storage: Storage, path: str) -> tuple[Attempt, Index]:
        found = real_find(storage, path)
        monkeypatch.undo()
        dc.save(state, tmp_path / "source", overwrite=True)
        return found

    monkeypatch.setattr(attempts, "find_checkpoint", find)
    with pytest.raises(dc.NotFoundError, match="was replaced or deleted while it was read"):
        export(tmp_path / "source", tmp_path / "target")
    assert [one.name for one in tmp_path.iterdir()] == ["source"]
    export(tmp_path / "source", tmp_path / "target")
