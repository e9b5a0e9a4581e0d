"""Parameters whose value is elsewhere are refused by the marks of their libraries."""

from __future__ import annotations

from copy import deepcopy
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt as dc


class ZeroParamStatus(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def model() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def partition(module: nn.Module, status: Any = ZeroParamStatus.NOT_AVAILABLE) -> None:
    """Mark the parameters as DeepSpeed does, and leave them empty."""
    for number, parameter in enumerate(module.parameters()):
        parameter.ds_id = number  # type: ignore[attr-defined]
        parameter.ds_status = status  # type: ignore[attr-defined]
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        if status is not ZeroParamStatus.AVAILABLE:
            parameter.data = torch.empty(0)


class Hook:
    """What accelerate keeps at a module whose weights it has offloaded."""

    def __init__(self, module: nn.Module, place_submodules: bool = False) -> None:
        self.offload, self.place_submodules = True, place_submodules
        self.weights_map = {n: t.clone() for n, t in module.state_dict().items()}
        module.to("meta")
        module._hf_hook = self  # type: ignore[assignment]


class SequentialHook:
    def __init__(self, *hooks: Any) -> None:
        self.hooks = hooks


def hollow_models() -> dict[str, tuple[Any, str]]:
    models: dict[str, tuple[Any, str]] = {}
    for status in (ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.INFLIGHT, 2):
        partition((made := model())[1], status)
        models[f"partitioned, {status}"] = made, "GatheredParameters"
    Hook((made := model())[1])
    models["offloaded"] = made, "get_state_dict_offloaded_model"
    made = model()
    Hook(made[1], place_submodules=True)
    made[1]._hf_hook = SequentialHook(object(), made[1]._hf_hook)
    models["offloaded by several hooks"] = made, "get_state_dict_offloaded_model"
    made = model()
    Hook(made, place_submodules=True)
    made[0] = nn.Linear(2, 2)
    models["offloaded by a hook above"] = made, "get_state_dict_offloaded_model"
    return models


@pytest.mark.parametrize("name", hollow_models())
def test_they_are_refused_at_a_save_and_a_load(name: str, tmp_path: Path) -> None:
    made, way = hollow_models()[name]
    with pytest.raises(ValueError, match=rf"model\.1\.weight: it .*{way}"):
        dc.save({"model": made}, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    dc.save({"model": (saved := model())}, tmp_path / "b")
    before = deepcopy(made[0])
    with pytest.raises(dc.IncompatibleError, match=rf"nothing was changed(.|\n)*{way}") as caught:
        dc.load({"model": made}, tmp_path / "b")
    assert "does not have" not in str(caught.value)
    assert torch.equal(made[0].weight, before.weight)
    # Other names of the model are saved and loaded.
    dc.load({"model": made}, tmp_path / "b", exclude="model.1")
    assert torch.equal(made[0].weight, saved[0].weight)
    dc.save({"model": made}, tmp_path / "c", include="model.0")


def test_a_hollow_part_of_several_modules_is_refused(tmp_path: Path) -> None:
    partition(hollow := nn.ModuleDict({"b": nn.Linear(2, 2)}))
    with pytest.raises(ValueError, match=r"model\.b\.weight: it is empty here"):
        dc.save({"model": [nn.ModuleDict({"a": nn.Linear(2, 2)}), hollow]}, tmp_path / "a")


def test_a_partitioned_parameter_in_a_dict_is_refused(tmp_path: Path) -> None:
    partition(made := model())
    state = dict(made.named_parameters())
    with pytest.raises(ValueError, match=r"model\.0\.weight: it is empty here"):
        dc.save({"model": state}, tmp_path / "a")
    dc.save({"model": {name: torch.empty(0) for name in state}}, tmp_path / "b")
    with pytest.raises(dc.IncompatibleError, match=r"model\.0\.weight: it is empty here"):
        dc.load({"model": state}, tmp_path / "b")


@pytest.mark.parametrize("status", [ZeroParamStatus.AVAILABLE, 1])
def test_gathered_and_truly_empty_parameters_are_stored(status: Any, tmp_path: Path) -> None:
    partition(made := model(), ZeroParamStatus.AVAILABLE)
    made.empty = nn.Parameter(torch.empty(0))
    made.kept = nn.Parameter(torch.empty(0, 3))
    made.list = nn.ParameterList([torch.empty(0)])
    partition(made.list, ZeroParamStatus.AVAILABLE)
    for parameter in made.parameters():
        parameter.ds_status = status
    dc.save({"model": made}, tmp_path / "a")
    expected = made[0].weight.detach().clone()
    nn.init.zeros_(made[0].weight)
    dc.load({"model": made}, tmp_path / "a")
    assert torch.equal(made[0].weight, expected)


def test_a_model_on_meta_without_a_hook_is_loaded(tmp_path: Path) -> None:
    dc.save({"model": (saved := model())}, tmp_path / "a")
    dc.load({"model": (made := model().to("meta"))}, tmp_path / "a")
    assert torch.equal(made[1].weight, saved[1].weight)
