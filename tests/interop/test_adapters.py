"""Adapters of peft: their names in live models and in files, in and out, without the library."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dist_ckpt as dc
from dist_ckpt.errors import IncompatibleError, NotFoundError
from dist_ckpt.interop import hf
from dist_ckpt.interop.hf.adapters import file_name, live_name

TOP = "base_model.model"
# Names in a live model with the adapters "default" and "other", and in the files of "default".
NAMES = {
    f"{TOP}.q.lora_A.default.weight": f"{TOP}.q.lora_A.weight",
    f"{TOP}.q.lora_B.default.weight": f"{TOP}.q.lora_B.weight",
    f"{TOP}.q.lora_B.default.bias": f"{TOP}.q.lora_B.bias",
    f"{TOP}.q.lora_magnitude_vector.default.weight": f"{TOP}.q.lora_magnitude_vector",
    f"{TOP}.emb.lora_embedding_A.default": f"{TOP}.emb.lora_embedding_A",
    f"{TOP}.k.ia3_l.default": f"{TOP}.k.ia3_l",
    f"{TOP}.norm.ln_tuning_layers.default.weight": f"{TOP}.norm.ln_tuning_layers.weight",
    f"{TOP}.emb.trainable_tokens_delta.default": f"{TOP}.emb.trainable_tokens_delta",
    f"{TOP}.score.modules_to_save.default.weight": f"{TOP}.score.weight",
    "prompt_encoder.default.embedding.weight": "prompt_embeddings",
}
OTHERS = [
    f"{TOP}.q.base_layer.weight",
    f"{TOP}.q.lora_A.other.weight",
    f"{TOP}.emb.base_layer.weight",
    f"{TOP}.emb.trainable_tokens_original.default",
    f"{TOP}.q.ranknum.default",
    f"{TOP}.emb.lora_embedding_A.other",
    f"{TOP}.score.original_module.weight",
    f"{TOP}.score.modules_to_save.other.weight",
    f"{TOP}.default.weight",
    "prompt_encoder.other.embedding.weight",
]


def live(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(2, 3) for name in [*NAMES, *OTHERS]}


def test_a_name_in_the_model_and_in_the_file_lead_to_each_other() -> None:
    for name, in_file in NAMES.items():
        assert file_name(name, "default") == in_file
        assert live_name(in_file, "default", ("score",)) == name
    assert [name for name in OTHERS if file_name(name, "default") is not None] == []
    for other in ("emb", "prescore"):
        assert live_name(f"{TOP}.{other}.weight", "default", ("score",)) == f"{TOP}.{other}.weight"


def write_config(folder: Path, method: str = "LORA") -> None:
    config = {"peft_type": method, "modules_to_save": ["score"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("component", ["model", "net"])
def test_a_folder_of_an_adapter_fills_it_in_a_live_model(tmp_path: Path, component: str) -> None:
    saved, model = live(0), live(1)
    before = {name: tensor.clone() for name, tensor in model.items()}
    content = {in_file: saved[name] for name, in_file in NAMES.items()}
    save_file(content, tmp_path / "adapter_model.safetensors")
    write_config(tmp_path)
    rename = hf.adapter_rename(tmp_path, component=component)
    report = dc.load({component: model}, tmp_path, rename=rename, strict=False)
    assert {*report.restored} == {f"{component}.{name}" for name in NAMES}
    for name, tensor in model.items():
        assert torch.equal(tensor, (saved if name in NAMES else before)[name]), name


def test_an_export_of_an_adapter_is_the_file_of_peft(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = live(0)
    dc.save({"model": model, "step": 3}, tmp_path / "a")
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        hf.export_folder(tmp_path / "a", tmp_path / "out", adapter="default")
    assert not caplog.records
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["adapter_model.safetensors"]
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == {*NAMES.values()}
    for name, in_file in NAMES.items():
        assert torch.equal(found[in_file], model[name])
    other = live(1)
    write_config(tmp_path / "out")
    rename = hf.adapter_rename(tmp_path / "out")
    dc.load({"model": other}, tmp_path / "out", rename=rename, strict=False)
    assert all(torch.equal(other[name], model[name]) for name in NAMES)
    with pytest.raises(ValueError, match="adapter='else': no name is that of a layer of it"):
        hf.export_folder(tmp_path / "a", tmp_path / "else", adapter="else")


def test_an_adapter_whose_names_would_be_guessed_is_refused(tmp_path: Path) -> None:
    save_file({f"{TOP}.q.vblora_logits_A": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(NotFoundError, match=r"adapter_config\.json"):
        hf.adapter_rename(tmp_path)
    write_config(tmp_path, "VBLORA")
    with pytest.raises(IncompatibleError, match=r"method 'VBLORA'.*load_adapter\(folder"):
        hf.adapter_rename(tmp_path)


def test_an_export_of_an_adapter_lacks_no_trained_bias(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)})
    for name in ("default", "other"):
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1, bias=False)})
        model["q"].register_module(f"lora_{'A' if name == 'default' else 'B'}", layers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name == "norm.bias")
    dc.save({"model": model}, tmp_path / "a")
    with pytest.raises(ValueError, match=r"model\.norm\.bias has no known name"):
        hf.export_folder(tmp_path / "a", tmp_path / "out", adapter="default")
    hf.export_folder(tmp_path / "a", tmp_path / "out", adapter="default", exclude="*.bias")
    assert [*load_file(tmp_path / "out" / "adapter_model.safetensors")] == ["q.lora_A.weight"]


def test_a_live_model_of_peft_is_exported_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dc.save({"model": live(0)}, tmp_path / "a")
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        hf.export_folder(tmp_path / "a", tmp_path / "out")
    (record,) = caplog.records
    assert "--adapter default" in record.getMessage()
    assert "merge_and_unload()" in record.getMessage()
    caplog.clear()
    dc.save({"model": {"w": torch.ones(2)}}, tmp_path / "b")
    hf.export_folder(tmp_path / "b", tmp_path / "plain")
    assert not caplog.records


def test_the_files_of_an_export_have_the_name_of_their_library(tmp_path: Path) -> None:
    content = {"a": torch.ones(4), "b": torch.zeros(4)}
    dc.save({"model": content}, tmp_path / "a")
    name = "diffusion_pytorch_model"
    options: Any = {"name": name, "overwrite": True}
    hf.export_folder(tmp_path / "a", tmp_path / "out", max_shard_size=16, **options)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"{name}-00001-of-00002.safetensors",
        f"{name}-00002-of-00002.safetensors",
        f"{name}.safetensors.index.json",
    }
    state: dict[str, Any] = {}
    dc.load(state, tmp_path / "out")
    assert all(torch.equal(state["model"][key], value) for key, value in content.items())
    hf.export_folder(tmp_path / "a", tmp_path / "out", **options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{name}.safetensors"]
    for bad in ("a/b", "", "a.b", 5):
        with pytest.raises(ValueError, match="name="):
            hf.export_folder(tmp_path / "a", tmp_path / "bad", name=bad)  # type: ignore[arg-type]


def test_an_8_bit_weight_with_a_scale_is_not_converted_by_an_export(tmp_path: Path) -> None:
    weight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    dc.save({"model": {"a.weight": weight, "a.weight_scale": torch.ones(1)}}, tmp_path / "a")
    with pytest.raises(IncompatibleError, match=r"a\.weight is float8_e4m3fn with a scale"):
        hf.export_folder(tmp_path / "a", tmp_path / "out", dtype="bf16")
    hf.export_folder(tmp_path / "a", tmp_path / "out")
    dc.save({"model": {"a.weight": weight}}, tmp_path / "b")
    hf.export_folder(tmp_path / "b", tmp_path / "plain", dtype="bf16")


@pytest.mark.parametrize(
    "unknown",
    [
        f"{TOP}.q.vblora_logits_A.default",
        f"{TOP}.q.vera_A.default",  # peft writes it once, as base_model.vera_A
        f"{TOP}.q.newtuner.default.weight",
        "prompt_encoder.default.mlp_head.0.weight",
    ],
)
def test_an_export_without_a_tensor_of_the_adapter_is_refused(tmp_path: Path, unknown: str) -> None:
    dc.save({"model": {**live(1), unknown: torch.ones(2)}}, tmp_path / "a")
    with pytest.raises(ValueError, match=rf"{re.escape(unknown)} has no known name"):
        hf.export_folder(tmp_path / "a", tmp_path / "out", adapter="default")
    assert not (tmp_path / "out").exists()
    hf.export_folder(tmp_path / "a", tmp_path / "other", adapter="other")
