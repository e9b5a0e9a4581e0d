"""Models of transformers, trained by sharded ranks, out to where they are opened, and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dist_ckpt as dc
from dist_ckpt.interop.hf import export
from ranks import run_ranks

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.multi_process

SIZES: dict[str, Any] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16, "eos_token_id": 1},
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
SIZES["gpt2"]["bos_token_id"] = 1
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6]]


def model_of(kind: str, *, tied: bool, seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=61, tie_word_embeddings=tied, **SIZES[kind]
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh)
    return model


def logits_of(model: Any) -> list[Any]:
    with torch.no_grad():
        found: list[Any] = model(torch.tensor(TOKENS)).logits.tolist()
    return found


def train_and_save(_: int, kind: str, is_tied: Any, path: str) -> None:
    model = sharded(model_of(kind, tied=is_tied, seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.tensor(TOKENS)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    dc.save({"model": model, "optim": optimizer}, path, step=1)


def load_and_save(rank: int, kind: str, is_tied: Any, source: str, target: str) -> None:
    model = sharded(model_of(kind, tied=is_tied, seed=rank))
    dc.load({"model": model}, source)
    dc.save({"model": model}, target)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", [*SIZES])
def test_a_trained_model_is_opened_by_transformers_and_comes_back(
    tmp_path: Path, kind: str, is_tied: Any
) -> None:
    run_ranks(train_and_save, kind, is_tied, f"{tmp_path}/ours", world_size=4)
    whole = model_of(kind, tied=is_tied, seed=1)
    dc.load({"model": whole}, tmp_path / "ours", include="model")
    expected = logits_of(whole)
    assert expected != logits_of(model_of(kind, tied=is_tied, seed=0)), "it was trained"

    ways: list[dict[str, Any]] = [{"max_shard_size": "20KB"}, {"reflink": True}]
    for number, options in enumerate(ways):
        folder = tmp_path / f"hf{number}"
        export.export_folder(tmp_path / "ours", folder, **options)
        assert (folder / "model.safetensors").exists() == (number == 1)
        whole.config.save_pretrained(folder)
        opened, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        assert not any(told.values()), told
        assert logits_of(opened) == expected
        assert opened.lm_head.weight.is_set_to(opened.get_input_embeddings().weight) == is_tied

    # The same names as transformers itself writes.
    whole.save_pretrained(tmp_path / "theirs")
    with dc.open(tmp_path / "theirs") as theirs, dc.open(tmp_path / "hf0") as ours:
        assert set(theirs) == set(ours)
    for source in ("hf0", "theirs"):
        run_ranks(
            load_and_save,
            kind,
            is_tied,
            f"{tmp_path}/{source}",
            f"{tmp_path}/{source}2",
            world_size=2,
        )
        back = model_of(kind, tied=is_tied, seed=2)
        dc.load({"model": back}, tmp_path / f"{source}2")
        assert logits_of(back) == expected


def test_a_model_is_opened_in_half_its_size(tmp_path: Path) -> None:
    whole = model_of("llama", tied=True, seed=0)
    dc.save({"model": whole}, tmp_path / "ours")
    export.export_folder(tmp_path / "ours", tmp_path / "hf", dtype="bf16")
    whole.config.save_pretrained(tmp_path / "hf")
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.bfloat16
    )
    assert logits_of(opened) == logits_of(whole.bfloat16())
    size = os.path.getsize(tmp_path / "hf" / "model.safetensors")
    assert size < 0.7 * 4 * sum(one.numel() for one in whole.parameters())
