"""Adapters of peft itself: what it saves fills a live model, and what is exported it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.interop import hf

peft = pytest.importorskip("peft")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        self.emb = torch.nn.Embedding(10, 8)
        self.q_proj = torch.nn.Linear(8, 8)
        self.score = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.score(self.q_proj(self.emb(x)))


CONFIGS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"target_modules": ["q_proj", "emb"], "modules_to_save": ["score"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "IA3Config": {"target_modules": ["q_proj"], "feedforward_modules": []},
    "LoHaConfig": {"target_modules": ["q_proj"]},
    "LoKrConfig": {"target_modules": ["q_proj"]},
}


def model(kind: str, seed: int, adapter: str) -> Any:
    torch.manual_seed(seed)
    config = getattr(peft, "LoraConfig" if kind == "dora" else kind)(**CONFIGS[kind])
    made = peft.get_peft_model(Net(), config, adapter_name=adapter)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("adapter", ["default", "mine"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_an_adapter_goes_in_and_out_as_peft_does_it(
    tmp_path: Path, kind: str, adapter: str
) -> None:
    saved, live = model(kind, 0, adapter), model(kind, 1, adapter)
    saved.save_pretrained(tmp_path / "theirs")
    folder = tmp_path / "theirs" / ("" if adapter == "default" else adapter)
    expected = peft.get_peft_model_state_dict(saved, adapter_name=adapter)

    rename = hf.adapter_rename(folder, adapter)
    dc.load({"model": live}, folder, rename=rename, strict=False)
    found = peft.get_peft_model_state_dict(live, adapter_name=adapter)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())

    dc.save({"model": saved}, tmp_path / "ours")
    hf.export_folder(tmp_path / "ours", tmp_path / "out", adapter=adapter)
    saved.peft_config[adapter].save_pretrained(tmp_path / "out")
    torch.manual_seed(2)
    again = peft.PeftModel.from_pretrained(Net(), tmp_path / "out")
    found = peft.get_peft_model_state_dict(again)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
