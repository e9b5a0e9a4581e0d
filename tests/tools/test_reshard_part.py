"""A reshard of a part of a checkpoint, by names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt as dc
from subclass_tensors import Quantized


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weight = torch.ones(3)
    state = {
        "model": model,
        "optim": optimizer,
        "step": 3,
        "tied": {"a": weight, "b": weight},
        "list": [torch.ones(1), torch.ones(2)],
        "mine": dc.PerRank({"n": 1}),
    }
    dc.save(state, tmp_path / "source", step=3, metadata={"run": "a"})
    return tmp_path / "source"


def part(source: Path, **options: Any) -> dict[str, Any]:
    target = source.with_name("target")
    dc.reshard(source, target, world_size=2, **options)
    assert dc.verify(target).ok
    with dc.open(source) as old, dc.open(target) as new:
        assert new.index.save != old.index.save
        assert new.metadata == {"run": "a"}
    found: dict[str, Any] = {}
    dc.load(found, target, exclude="mine" if "mine" not in str(options) else None, strict=False)
    return found


def test_only_what_is_selected_is_written(source: Path) -> None:
    found = part(source, include=["model", "step"])
    assert [*found] == ["model", "step"]
    assert [*found["model"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with dc.open(source) as old:
        assert found["model"]["0.weight"].tolist() == old["model.0.weight"][:].numpy().tolist()
    assert [*source.with_name("target").glob("*/optim*")] == []


def test_what_is_excluded_is_not(source: Path) -> None:
    found = part(source, exclude=["optim", "*.bias", "mine", "tied.b"])
    assert [*found] == ["model", "step", "tied", "list"]
    assert [*found["model"]] == ["0.weight", "1.weight"]
    assert [*found["tied"]] == ["a"]


def test_an_optimizer_of_which_a_part_is_left_out_still_loads(source: Path) -> None:
    part(source, exclude=["*.bias", "mine"])
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}
    dc.load(state, source.with_name("target"), include=["model", "optim"], exclude="*.bias")
    assert len(optimizer.state) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": "modle"}, "exclude: 'modle' matches no name"),
        ({"include": ["model", "ema"]}, "include: 'ema' matches no name"),
        ({"exclude": "*"}, "leaves nothing"),
        ({"exclude": "tied.a"}, r"tied tensors would lose their data: tied\.b \(of tied\.a\)"),
        ({"exclude": "list.0"}, r"list\.0: an item of a list cannot be left out"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_there(
    source: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dc.reshard(source, source.with_name("target"), world_size=1, **options)
    assert not source.with_name("target").exists()


def test_a_tensor_that_is_made_of_others_is_left_out_as_a_whole(tmp_path: Path) -> None:
    quantized = Quantized.of(torch.ones(4, 2))
    dc.save({"w": quantized, "scale": torch.ones(1)}, tmp_path / "a")
    dc.reshard(tmp_path / "a", tmp_path / "b", world_size=1, exclude="*scale")
    with dc.open(tmp_path / "a") as whole, dc.open(tmp_path / "b") as part:
        assert {*part.tensors} == {name for name in whole.tensors if name.startswith("w.")}
    dc.reshard(tmp_path / "a", tmp_path / "c", world_size=1, exclude="w")
    with dc.open(tmp_path / "c") as part:
        assert [*part.tensors] == ["scale"]
