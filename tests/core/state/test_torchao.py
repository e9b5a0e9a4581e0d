"""torchao's quantized weights and 8-bit optimizers, as they come."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt as dc
from in_memory import load, save

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    optim: Any = pytest.importorskip("torchao.optim")
    quantization: Any = pytest.importorskip("torchao.quantization")
    fsdp_utils: Any = pytest.importorskip("torchao.float8.fsdp_utils")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Its optimizers compile their step, which takes a compiler and half a minute."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 64, dtype=dtype), nn.Linear(64, 8, dtype=dtype))


def parts(tensor: Any) -> list[torch.Tensor]:
    """Return the plain tensors in a tensor."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return [tensor]
    return [part for n in tensor.__tensor_flatten__()[0] for part in parts(getattr(tensor, n))]


def alike(one: Any, other: Any) -> bool:
    return type(one) is type(other) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(map(bits, parts(one)), map(bits, parts(other)), strict=True)
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


@pytest.mark.parametrize(
    "name",
    [
        "Int8WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Float8WeightOnlyConfig",
        "IntxWeightOnlyConfig",
    ],
)
def test_quantized_weights_come_back(name: str) -> None:
    saved, live = model_of(0, torch.bfloat16), model_of(1, torch.bfloat16)
    for model in (saved, live):
        quantization.quantize_(model, getattr(quantization, name)())
    assert not alike(saved[0].weight, live[0].weight)
    load(save({"model": saved}), {"model": live})
    assert alike(saved[0].weight, live[0].weight)
    batch = torch.ones(2, 128, dtype=torch.bfloat16)
    assert torch.equal(saved(batch), live(batch))


def test_another_way_to_quantize_is_refused_by_name() -> None:
    saved, live = model_of(0, torch.bfloat16), model_of(1, torch.bfloat16)
    quantization.quantize_(saved, quantization.Int8WeightOnlyConfig())
    quantization.quantize_(live, quantization.Float8WeightOnlyConfig())
    said = "saved with class .*Int8Tensor.*, the state has .*Float8Tensor"
    with pytest.raises(dc.IncompatibleError, match=said):
        load(save({"model": saved}), {"model": live})


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"])
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
def test_optimizers_of_few_bits_train_on_as_if_nothing_was(name: str, steps: int) -> None:
    def trained(seed: int, steps: int) -> Any:
        model = model_of(seed)
        optimizer = getattr(optim, name)(model.parameters(), lr=0.01)
        train(model, optimizer, steps)
        return model, optimizer

    def train(model: Any, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 128)).pow(2).sum().backward()
            optimizer.step()

    model, optimizer = trained(0, 2)
    other, resumed = trained(1, steps)
    load(save({"model": model, "optim": optimizer}), {"model": other, "optim": resumed})
    train(model, optimizer, 2)
    train(other, resumed, 2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        for key, value in optimizer.state[one].items():
            assert alike(value, resumed.state[two][key]), key


def test_float8_all_gather_is_stored_as_the_weights_it_holds() -> None:
    def gathered(model: Any) -> Any:
        mm_config = fsdp_utils.LinearMMConfig(*[None] * 3)
        model[0].weight = nn.Parameter(
            fsdp_utils.WeightWithDynamicFloat8CastTensor(
                model[0].weight.data, mm_config, torch.float8_e4m3fn
            )
        )
        return model

    saved, plain, live = gathered(model_of(0)), model_of(1), gathered(model_of(2))
    written = save({"model": saved})
    load(written, {"model": plain})
    load(written, {"model": live})
    assert torch.equal(plain[0].weight, saved[0].weight._tensor)
    assert torch.equal(live[0].weight._tensor, saved[0].weight._tensor)
    load(save({"model": plain}), {"model": live})
