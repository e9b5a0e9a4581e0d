"""A state with more tensors than a checkpoint can name is refused before the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.format import shard_file
from dist_ckpt.core.format.index.index_json import MIN_TENSOR_VALUES
from dist_ckpt.core.format.shard_file import MIN_TENSOR_NBYTES
from dist_ckpt.core.planning.save import save_planner

SMALLEST = [torch.tensor(True), torch.zeros(1), torch.zeros(1, 1, dtype=torch.uint8)]


@pytest.mark.parametrize("tensor", SMALLEST, ids=str)
def test_the_bounds_refuse_no_state_that_fits(tensor: torch.Tensor, tmp_path: Path) -> None:
    state = {"m": {f"{n:03d}": tensor.clone() for n in range(500)}}
    dc.save(state, tmp_path / "ck")
    (attempt,) = (tmp_path / "ck").glob("a*")
    data = (attempt / "m-00000.safetensors").read_bytes()
    header = data[8 : 8 + int.from_bytes(data[:8], "little")].rstrip(b" ")
    assert len(header) > 500 * (MIN_TENSOR_NBYTES + len("m.000"))
    index = (attempt / "index.json").read_bytes()
    assert sum(map(index.count, (b",", b"[", b"{"))) > 500 * MIN_TENSOR_VALUES


def test_too_many_tensors_are_refused_in_words_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"m": {f"w{n}": torch.zeros(1) for n in range(500)}, "more": torch.zeros(1)}
    monkeypatch.setattr(save_planner, "MAX_HEADER_NBYTES", 40_000)
    with pytest.raises(ValueError, match=r"has 500 tensors in 'm', .* fewer than 4\d\d: stack"):
        dc.save(state, tmp_path / "ck")
    monkeypatch.undo()
    monkeypatch.setattr(save_planner, "MAX_VALUES", 2_000)
    with pytest.raises(ValueError, match=r"has 501 tensors, .* fewer than 285: stack"):
        dc.save(state, tmp_path / "ck")
    assert not [*tmp_path.rglob("*")]
    monkeypatch.undo()
    dc.save(state, tmp_path / "ck")
    dc.save({"m": {f"w{n}": torch.zeros(0) for n in range(500)}}, tmp_path / "empty")


def test_a_header_between_the_bound_and_the_limit_is_refused_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"m": {f"w{n}": torch.zeros(1) for n in range(500)}}
    monkeypatch.setattr(shard_file, "MAX_HEADER_NBYTES", 40_000)
    with pytest.raises(ValueError, match=r"500 tensors of 'm' on rank 0 .* 40000: stack small"):
        dc.save(state, tmp_path / "ck")
    monkeypatch.undo()

    def refuse(*_: object) -> bytes:
        raise ValueError("up to 9 values")

    monkeypatch.setattr(shard_file, "_header_json", refuse)
    with pytest.raises(ValueError, match=r"500 tensors of 'm' .* \(up to 9 values\): stack small"):
        dc.save(state, tmp_path / "ck")


def test_a_reshard_has_the_same_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dc.save({"m": {f"w{n}": torch.zeros(2) for n in range(500)}}, tmp_path / "ck")
    monkeypatch.setattr(save_planner, "MAX_HEADER_NBYTES", 10_000)
    with pytest.raises(ValueError, match="has 500 tensors in 'm'"):
        dc.reshard(tmp_path / "ck", tmp_path / "other", sharding=dc.ShardingConfig.even(2))
    assert not (tmp_path / "other").exists()
