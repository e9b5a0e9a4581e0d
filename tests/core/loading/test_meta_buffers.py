"""Tensors that are in no state dict stay on the meta device after a load: they are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import dist_ckpt as dc


class Rope(nn.Module):
    """A layer with frequencies that are computed, not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
        self.angles = torch.arange(4.0)


def model() -> Any:
    return nn.Sequential(nn.Linear(2, 2), Rope())


def on_meta() -> Any:
    with torch.device("meta"):
        return model()


@pytest.mark.parametrize("wrap", [lambda m: m, checkpoint_wrapper])
def test_they_are_in_the_report_and_in_one_warning(
    wrap: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dc.save({"model": (saved := model())}, tmp_path / "step")
    target = on_meta()
    target[1] = wrap(target[1])
    report = dc.load({"model": target}, tmp_path / "step")
    assert report.unfilled == ("model.1.angles", "model.1.inv_freq")
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith("model.1.angles, model.1.inv_freq: still on the meta device")
    assert torch.equal(target[0].weight, saved[0].weight)


def test_a_model_without_them_has_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dc.save({"model": model()}, tmp_path / "step")
    assert dc.load({"model": model()}, tmp_path / "step").unfilled == ()
    with torch.device("meta"):
        target = nn.Sequential(nn.Linear(2, 2))
    assert dc.load({"model": target}, tmp_path / "step", include="model.0").unfilled == ()
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_a_hook_after_the_load_may_compute_them(tmp_path: Path) -> None:
    def fill(module: Any, keys: Any) -> None:
        module[1].inv_freq = module[1].angles = torch.arange(4.0)

    dc.save({"model": model()}, tmp_path / "step", kind="rope", config={})
    target = on_meta()
    target.register_load_state_dict_post_hook(fill)
    assert dc.load({"model": target}, tmp_path / "step").unfilled == ()
    assert torch.equal(target[1].inv_freq, torch.arange(4.0))


def test_build_refuses_them_before_it_reads(tmp_path: Path) -> None:
    dc.save({"model": model()}, tmp_path / "step", kind="rope", config={})
    with pytest.raises(dc.IncompatibleError, match=r"1\.angles, 1\.inv_freq on the meta"):
        dc.build(tmp_path / "step", {"rope": lambda config: on_meta()})
    built: Any = dc.build(tmp_path / "step", {"rope": lambda config: model()})
    assert torch.equal(built[1].inv_freq, torch.arange(4.0))


def test_a_versioned_class_is_built_as_it_was_saved(tmp_path: Path) -> None:
    class Second(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
            if metadata.get("version", 1) < 2:
                state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
            super()._load_from_state_dict(state, prefix, metadata, *args)

    for device in ("cpu", "meta"):
        for cls in (nn.Linear, Second):
            saved: Any = nn.Sequential(cls(2, 2))
            dc.save({"model": saved}, tmp_path / f"{device}{cls.__name__}", kind="m", config={})
            table = {"m": lambda config, device=device: nn.Sequential(Second(2, 2)).to(device)}
            built: Any = dc.build(tmp_path / f"{device}{cls.__name__}", table)
            expected = saved[0].weight if cls is Second else saved[0].weight.t()
            assert torch.equal(built[0].weight, expected)
