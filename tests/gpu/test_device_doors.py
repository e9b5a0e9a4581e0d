"""From a device out to other systems and back to it, and objects that only a device has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import dist_ckpt as dc
from dist_ckpt.interop import imports
from dist_ckpt.interop.dcp import adapter as our_dcp
from dist_ckpt.interop.dcp import export
from dist_ckpt.interop.hf import export as hf
from dist_ckpt.interop.torch_save import export as torch_export

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    # DCP says so on each call that there is one process.
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

DTYPES = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool)


def trained(seed: int, **options: Any) -> dict[str, Any]:
    """A model with tied weights, and its optimizer, on the device."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda()
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    step({"model": model, "optim": optimizer})
    return {"model": model, "optim": optimizer}


def step(state: dict[str, Any]) -> None:
    torch.cuda.manual_seed(7)
    batch = torch.randn(8, 64, device="cuda")
    state["model"](batch).square().sum().backward()
    state["optim"].step()
    state["optim"].zero_grad()


def state_dict(state: dict[str, Any]) -> dict[str, Any]:
    """What is handed to DCP."""
    model, optimizer = get_state_dict(state["model"], state["optim"])
    return {"model": model, "optim": optimizer}


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    state = state_dict(state)
    found = dict(state["model"])
    for name, entries in state["optim"]["state"].items():
        found |= {f"{name}.{key}": value for key, value in entries.items()}
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_weights(state: Any, saved: Any) -> None:
    weights = saved["model"].state_dict()
    assert state.keys() == weights.keys()
    for name, value in state.items():
        assert value.is_cuda, name
        assert torch.equal(value, weights[name]), name


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    mine, others = tensors_of(one), tensors_of(other)
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        assert others[name].device == value.device, name
        assert torch.equal(others[name], value), name


# --- DCP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_what_dcp_saves_from_the_device_through_us_comes_back_to_it(
    tmp_path: Path, call: str
) -> None:
    saved = trained(1)
    writer = our_dcp.StorageWriter(tmp_path / "a")
    pending = getattr(dcp, call)(state_dict(saved), storage_writer=writer)
    if call == "async_save":
        pending.result()
    assert dc.verify(tmp_path / "a").ok
    other = trained(2)
    dc.load(other, tmp_path / "a")
    assert_same(other, saved)

    state = state_dict(trained(3))
    dcp.load(state, storage_reader=our_dcp.StorageReader(tmp_path / "a"))
    assert_same_weights(state["model"], saved)


def test_a_folder_of_dcp_alone_loads_to_the_device_and_is_imported(tmp_path: Path) -> None:
    saved = trained(1)
    dcp.save(state_dict(saved), checkpoint_id=tmp_path / "theirs")
    other = trained(2)
    our_dcp.load(other, tmp_path / "theirs")
    assert_same(other, saved)
    imports.from_dcp(tmp_path / "theirs", tmp_path / "ours", world_size=3)
    third = trained(3)
    dc.load(third, tmp_path / "ours")
    assert_same(third, saved)


def test_what_was_saved_on_the_device_is_exported_for_dcp(tmp_path: Path) -> None:
    saved = trained(1)
    dc.save(saved, tmp_path / "ours")
    export.export_folder(tmp_path / "ours", tmp_path / "theirs")
    state = state_dict(trained(2))
    dcp.load(state, checkpoint_id=tmp_path / "theirs")
    assert_same_weights(state["model"], saved)


# --- torch.save, Hugging Face --------------------------------------------------------------------


def test_a_file_of_torch_save_from_the_device_is_imported_and_exported(tmp_path: Path) -> None:
    saved = trained(1)
    values = {f"{dtype}": torch.randn(9, 5, device="cuda").to(dtype) for dtype in DTYPES}
    values["view"] = torch.randn(40, 30, device="cuda")[::2, 5:9]
    state = {name: one.state_dict() for name, one in saved.items()}
    state["values"] = {**values, "device": torch.device("cuda")}
    torch.save(state, tmp_path / "theirs.pt")  # noqa: TID251 - it is what users have
    imports.from_torch(tmp_path / "theirs.pt", tmp_path / "ours")
    other = trained(2)
    dc.load({"model": other["model"]}, tmp_path / "ours", include="model")
    assert_same_weights(other["model"].state_dict(), saved)

    torch_export.export_file(tmp_path / "ours", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt")  # noqa: TID251 - as users would
    assert back["values"].pop("device") == torch.device("cuda")
    for name, value in values.items():
        assert torch.equal(bits(back["values"][name]), bits(value).cpu()), name
    other["model"].load_state_dict(back["model"])
    other["optim"].load_state_dict(back["optim"])
    assert_same(other, saved)


def test_files_of_hugging_face_load_to_the_device_and_back(tmp_path: Path) -> None:
    saved = trained(1)
    dc.save(saved, tmp_path / "ours")
    hf.export_folder(tmp_path / "ours", tmp_path / "hf", only="model")
    other = trained(2)
    dc.load({"model": other["model"]}, tmp_path / "hf")
    assert_same_weights(other["model"].state_dict(), saved)
    save_file({"weight": saved["model"][0].weight}, tmp_path / "one.safetensors")
    one = nn.Linear(64, 64, bias=False, device="cuda")
    dc.load({"model": one}, tmp_path / "one.safetensors")
    assert torch.equal(one.weight, saved["model"][0].weight)


# --- what a training on a device has besides ------------------------------------------------------


def saved_in_the_background(state: dict[str, Any], path: Path) -> None:
    with dc.AsyncSaver() as saver:
        saver.save(state, path).result(60)


SAVES: dict[str, Callable[..., object]] = {
    "save": dc.save,
    "in the background": saved_in_the_background,
}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("kind", ["capturable", "fused", "foreach"])
def test_a_resumed_training_takes_the_same_steps(tmp_path: Path, kind: str, save: str) -> None:
    first = {**trained(1, **{kind: True}), "rng": dc.RNG()}
    SAVES[save](first, tmp_path / "a")
    other = {**trained(2, **{kind: True}), "rng": dc.RNG()}
    torch.randn(5, device="cuda")
    drawn = None
    for state in (first, other):
        dc.load(state, tmp_path / "a")
        noise = torch.randn(9, device="cuda")
        assert drawn is None or torch.equal(noise, drawn)
        drawn = noise
        for _ in range(3):
            step(state)
    assert_same(other, first)
    steps = [entries["step"] for entries in other["optim"].state.values()]
    assert {one.is_cuda for one in steps} == {kind != "foreach"}


def test_a_compiled_model_and_a_scaler_are_those_they_wrap(tmp_path: Path) -> None:
    saved = trained(1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    dc.save(
        {**saved, "model": torch.compile(saved["model"], backend="eager"), "scaler": scaler},
        tmp_path / "a",
    )
    other, fresh = trained(2), torch.amp.GradScaler("cuda")
    dc.load({**other, "scaler": fresh}, tmp_path / "a")
    assert_same(other, saved)
    assert fresh.get_scale() == 1024.0


def test_a_model_is_made_on_the_device_out_of_nothing(tmp_path: Path) -> None:
    saved = trained(1)
    dc.save({"model": saved["model"]}, tmp_path / "a")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64))
    model.to_empty(device="cuda")
    model[1].weight = model[0].weight
    dc.load({"model": model}, tmp_path / "a")
    assert_same_weights(model.state_dict(), saved)
