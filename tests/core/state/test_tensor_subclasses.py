"""Tensors that are made of others: saved by their parts, filled in place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt as dc
from dist_ckpt.core.state.binding.new_subclasses import subclass_types
from dist_ckpt.core.state.inventory_builder import build_inventory
from dist_ckpt.core.state.tensors.tensor_subclasses import difference
from dist_ckpt.errors import IncompatibleError
from in_memory import InMemory, load, save
from subclass_tensors import CodedSGD, Codes, GatheredLow, Kernel, Pair, Quantized, Rounding
from wrapped_optimizers import Delegating


def weights(seed: int = 0, rows: int = 4, columns: int = 8) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def model_of(weight: torch.Tensor) -> Any:
    model: Any = nn.Linear(weight.shape[1], weight.shape[0])
    nn.init.zeros_(model.bias)
    model.weight = nn.Parameter(weight, requires_grad=False)
    return model


def problems_of(written: InMemory, state: Any, **options: Any) -> str:
    with pytest.raises(IncompatibleError) as caught:
        load(written, state, **options)
    return str(caught.value)


# --- weights ---------------------------------------------------------------------------------


def test_a_module_of_quantized_weights_is_filled_in_place() -> None:
    saved, live = model_of(Quantized.of(weights(0))), model_of(Quantized.of(weights(1)))
    memory = live.weight.qdata.data_ptr(), live.weight.scale.data_ptr()
    load(save({"model": saved}), {"model": live})
    assert type(live.weight) is Quantized
    assert (live.weight.qdata.data_ptr(), live.weight.scale.data_ptr()) == memory
    assert torch.equal(live.weight.qdata, saved.weight.qdata)
    assert torch.equal(live(torch.ones(1, 8)), saved(torch.ones(1, 8)))


def test_each_part_has_a_name_and_the_class_is_a_value() -> None:
    kernel = Kernel(fast=True, tile=8)
    taken = build_inventory(
        {"model": {"w": Quantized.of(weights(), block=8, kernel=kernel)}},
        sharding=None,
        rank=0,
        world_size=1,
        group_ranks=(0,),
    )
    assert [entry.fqn for entry in taken.inventory.tensors] == ["model.w.qdata", "model.w.scale"]
    assert taken.values["model.w.__class__"] == {
        "class": "subclass_tensors.Quantized",
        "dtype": torch.float32,
        "shape": (4, 8),
        "context": {
            "block": 8,
            "rounding": "subclass_tensors.Rounding.NEAREST",
            "kernel": {"class": "subclass_tensors.Kernel", "fast": True, "tile": 8},
        },
        "exact": False,
    }


def test_tensors_in_tensors_are_taken_apart_to_the_last() -> None:
    saved = Pair(Quantized.of(weights(0)), weights(1))
    live = Pair(Quantized.of(weights(2)), weights(3))
    load(save({"loose": saved, "in": {"a": [saved]}}), {"loose": live, "in": {"a": [live]}})
    assert torch.equal(live.dequantize(), saved.dequantize())


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"block": 2}, "saved with context.block 2, the state has 1"),
        ({"rounding": Rounding.STOCHASTIC}, "saved with .*STOCHASTIC', the state has .*NEAREST'"),
        ({"kernel": Kernel(True, 8)}, "saved with .*kernel .*'tile': 8.*, the state has None"),
    ],
)
def test_a_context_that_differs_is_named(context: Any, message: str) -> None:
    live = Quantized.of(weights(1))
    before = live.qdata.clone()
    written = save({"model": {"w": Quantized.of(weights(), **context)}})
    with pytest.raises(IncompatibleError, match=f"model.w: a .*Quantized {message}"):
        load(written, {"model": {"w": live}})
    assert torch.equal(live.qdata, before)


def test_tensors_of_another_make_are_refused_with_the_remedy() -> None:
    quantized, plain = {"m": {"w": Quantized.of(weights())}}, {"m": {"w": weights()}}
    message = problems_of(save(plain), quantized)
    assert "m.w: saved as a tensor, the state has a subclass_tensors.Quantized" in message
    assert "load into a plain tensor, then convert that" in message
    message = problems_of(save(quantized), plain)
    assert "m.w: saved as the parts of a subclass_tensors.Quantized, the state has a ten" in message
    message = problems_of(save(quantized), {"m": {"w": Pair(weights(), weights())}})
    assert "lacks" in message
    assert "m.w.high" in message


def test_a_class_that_no_state_has_is_taken_as_its_parts() -> None:
    saved = Quantized.of(weights())
    written = save({"m": {"w": saved}})
    state: dict[str, Any] = {"m": None}
    load(written, state)
    assert torch.equal(state["m"]["w"]["qdata"], saved.qdata)
    assert state["m"]["w"]["__class__"]["class"] == "subclass_tensors.Quantized"
    parts = {"qdata": torch.zeros_like(saved.qdata), "scale": torch.zeros_like(saved.scale)}
    load(written, {"m": {"w": parts}}, exclude=["*.__class__"])
    assert torch.equal(parts["scale"], saved.scale)


def test_one_that_stands_for_a_plain_tensor_is_stored_as_that() -> None:
    saved = model_of(GatheredLow(weights(0), scale=torch.ones(())))
    plain, live = model_of(weights(1)), model_of(GatheredLow(weights(2)))
    written = save({"model": saved})
    assert "model.weight" in written.catalog.tensors
    load(written, {"model": plain})
    load(save({"model": plain}), {"model": live})
    assert type(live.weight) is GatheredLow
    assert torch.equal(live.weight.whole, saved.weight.whole)


def test_a_compound_tensor_without_data_is_refused_with_the_remedy() -> None:
    written = save({"m": {"w": Quantized.of(weights())}})
    inner = torch.empty(4, 8, dtype=torch.int8, device="meta"), torch.empty(4, 1, device="meta")
    live = Quantized(*inner)
    assert "m.w: a subclass_tensors.Quantized on the meta device" in problems_of(
        written, {"m": {"w": live}}
    )
    stands_for = model_of(GatheredLow(weights().to("meta")))
    assert "has no memory" in problems_of(
        save({"model": model_of(weights())}), {"model": stands_for}
    )


def test_what_a_class_says_wrongly_or_cannot_compare_is_refused_by_name() -> None:
    broken: Any = Quantized.of(weights())
    broken.scale = 3
    with pytest.raises(TypeError, match=r"m.w: .*Quantized names 'scale'.* builtins.int"):
        save({"m": {"w": broken}})
    with pytest.raises(TypeError, match=r"m.w: the context of .*Quantized has a builtins.object"):
        save({"m": {"w": Quantized.of(weights(), kernel=object())}})


def test_tied_compound_tensors_stay_tied() -> None:
    saved, live = Quantized.of(weights(0)), Quantized.of(weights(1))
    written = save({"m": {"a": saved, "b": saved}})
    assert written.catalog.aliases == {"m.b.qdata": "m.a.qdata", "m.b.scale": "m.a.scale"}
    load(written, {"m": {"a": live, "b": live}})
    assert torch.equal(live.dequantize(), saved.dequantize())


class Loaded:
    """An object whose state dict holds a compound tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value: Any = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def test_an_object_gets_compound_tensors_as_it_gave_them() -> None:
    saved, live = Loaded(Quantized.of(weights(0))), Loaded(Quantized.of(weights(1)))
    load(save({"o": saved}), {"o": live})
    assert type(live.value) is Quantized
    assert torch.equal(live.value.dequantize(), saved.value.dequantize())


def test_a_sharding_config_that_cuts_one_is_refused_by_name() -> None:
    config = dc.ShardingConfig(mesh={"tp": 1}, rules={"w": {"tp": 0}})
    plain = {"m": {"w": weights(), "b": Quantized.of(weights())}}
    load(save(plain, sharding=config), plain, sharding=config)
    with pytest.raises(TypeError, match=r"m.w: the ShardingConfig cuts a .*Quantized, .*LocalSh"):
        save({"m": {"w": Quantized.of(weights())}}, sharding=config)


# --- optimizers ------------------------------------------------------------------------------


def trained(seed: int, steps: int) -> tuple[Any, CodedSGD]:
    torch.manual_seed(seed)
    model = nn.Linear(8, 4, bias=False)
    optimizer = CodedSGD(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def train(model: Any, optimizer: CodedSGD, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
def test_an_optimizer_of_8_bits_trains_on_as_if_nothing_was(steps: int) -> None:
    model, optimizer = trained(0, 3)
    written = save({"model": model, "optim": optimizer})
    other, resumed = trained(1, steps)
    load(written, {"model": other, "optim": resumed})
    assert type(resumed.state[other.weight]["momentum"]) is Codes
    train(model, optimizer, 2)
    train(other, resumed, 2)
    assert torch.equal(other.weight, model.weight)
    one, two = (o.state[m.weight]["momentum"] for o, m in ((optimizer, model), (resumed, other)))
    assert torch.equal(one.codes, two.codes)
    assert (one.signed, two.signed) == (False, False)


def test_a_class_that_the_optimizer_does_not_show_is_not_looked_up() -> None:
    model, optimizer = trained(0, 1)
    written = save({"model": model, "optim": optimizer})
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    message = problems_of(written, {"model": model, "optim": sgd})
    assert (
        "optim.state.model.weight.momentum: saved as the parts of a subclass_tensors.Codes"
        in message
    )
    assert "let the optimizer create its state before the load" in message
    assert not sgd.state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": [1, 2, 3]}, "__tensor_unflatten__ of Codes raised TypeError"),
        ({"context": None}, "__tensor_unflatten__ of Codes raised TypeError"),
        ({"context": [5]}, None),
        ({"shape": (8, 4)}, r"saved with shape \(8, 4\), the state has \(4, 8\)"),
        ({"shape": (-1,)}, "not a valid record"),
        ({"shape": "x"}, "not a valid record"),
        ({"dtype": torch.int8}, "saved with dtype"),
        ({"exact": False}, "the state has none to fill"),
        ({"exact": 1}, "not a valid record"),
        ({"dtype": "x"}, "not a valid record"),
        ({"more": 1}, "not a valid record"),
        ({"shape": (1 << 70,)}, "__tensor_unflatten__ of Codes raised|shape|not what"),
        ({"class": "subclass_tensors.Pair"}, "the state has none to fill|raised KeyError"),
        ({"class": "os.system"}, "the state has none to fill"),
        ({"class": ["x"]}, "not a valid record"),
    ],
    ids=str,
)
def test_what_its_class_cannot_be_made_of_is_a_problem_before_anything_is_read(
    change: Any, message: str | None
) -> None:
    model, optimizer = trained(0, 1)
    written = save({"model": model, "optim": optimizer})
    name = "optim.state.model.weight.momentum.__class__"
    written.change(name, {**written.values[name], **change})
    other, resumed = trained(1, 0)
    problems = written.bind({"model": other, "optim": resumed}).problems
    assert not resumed.state
    if message is None:
        assert problems == ()
    else:
        (problem,) = problems
        assert problem.startswith("optim.state.model.weight.momentum: ")
        assert re.search(message, problem)


MOMENTUM = "optim.state.model.weight.momentum"


def test_state_is_made_by_what_another_rank_has_written_of_it() -> None:
    """As where a stage of a pipeline has the optimizer: rank 0's objects file lacks the record."""
    model, optimizer = trained(0, 1)
    written = save({"config": {"a": 1}}, {"model": model, "optim": optimizer})
    other, resumed = trained(1, 0)
    assert load(written, {"model": other, "optim": resumed}, exclude="config").problems == ()
    assert written.read == [1]
    mine, saved = resumed.state[other.weight]["momentum"], optimizer.state[model.weight]["momentum"]
    assert torch.equal(mine.codes, saved.codes)
    assert torch.equal(mine.scale, saved.scale)


def fresh_problems(written: InMemory) -> list[str]:
    other, resumed = trained(1, 0)
    return list(written.bind({"model": other, "optim": resumed}).problems)


def saved_with(**change: Any) -> InMemory:
    """Save an optimizer's state as a dict that only looks like the parts of a tensor."""
    model, optimizer = trained(0, 1)
    momentum = optimizer.state[model.weight]["momentum"]
    parts = {name: getattr(momentum, name) for name in Codes.names}
    record = {
        "class": "subclass_tensors.Codes",
        "dtype": torch.float32,
        "shape": (4, 8),
        "context": [False],
        "exact": True,
    }
    parts = {**parts, "__class__": record, **change}
    group = {"lr": 0.1, "params": ["model.weight"]}
    state = {"model.weight": {"step": torch.tensor(1.0), "momentum": parts}}
    return save({"model": model, "optim": {"state": state, "param_groups": [group]}})


def test_parts_that_a_dict_has_are_taken_as_those_of_a_tensor() -> None:
    assert fresh_problems(saved_with()) == []


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("text", "a value without tensors"),
        ({"a": torch.ones(1)}, "a container with tensors"),
        (dc.PerRank(1), "a per-rank value"),
    ],
    ids=["value", "container", "per rank"],
)
def test_a_part_that_is_no_tensor_is_a_problem_by_name(part: Any, kind: str) -> None:
    (problem,) = fresh_problems(saved_with(scale=part))
    assert problem.startswith(f"{MOMENTUM}.scale: saved as {kind}, where a part of a ")


@pytest.mark.parametrize("missing", ["class", "dtype", "shape", "context", "exact"])
def test_a_record_that_lacks_something_is_a_problem(missing: str) -> None:
    written = saved_with()
    name = f"{MOMENTUM}.__class__"
    record: Any = written.values[name]
    written.change(name, {key: value for key, value in record.items() if key != missing})
    (problem,) = fresh_problems(written)
    assert f"{MOMENTUM}: the saved '__class__' is not a valid rec" in problem


@pytest.mark.parametrize(
    "record", [5, None, ["class"], torch.ones(1), dc.PerRank(1)], ids=lambda one: type(one).__name__
)
def test_a_record_that_is_no_mapping_is_said_to_be_none(record: Any) -> None:
    (problem,) = fresh_problems(saved_with(__class__=record))
    assert f"{MOMENTUM}: the saved '__class__' is not a valid rec" in problem


class Importing(torch.optim.SGD):
    """An optimizer whose module imports compound classes of another package, as this one does."""


class Derived(CodedSGD):
    """An optimizer of a user's, which keeps the state of one in a library."""


def test_a_class_that_the_optimizers_module_only_imports_is_not_in_the_table() -> None:
    model: Any = nn.Linear(8, 4, bias=False)
    assert subclass_types(Importing(model.parameters(), lr=0.1)) == {}
    assert "subclass_tensors.Codes" in subclass_types(CodedSGD(model.parameters()))
    assert "subclass_tensors.Codes" in subclass_types(Derived(model.parameters()))
    quantized = model_of(Quantized.of(weights()))
    table = subclass_types(Importing([quantized.weight], lr=0.1))
    assert table == {"subclass_tensors.Quantized": Quantized}


@pytest.mark.parametrize("depth", [1, 2])
def test_an_optimizer_of_8_bits_inside_wrappers_resumes_in_a_fresh_one(depth: int) -> None:
    """Such as torchao's inside accelerate's AcceleratedOptimizer."""
    model, optimizer = trained(0, 3)
    other, resumed = trained(1, 0)
    outer, fresh = optimizer, resumed
    for _ in range(depth):
        outer, fresh = Delegating(outer), Delegating(fresh)  # type: ignore[assignment]
    load(save({"model": model, "optim": outer}), {"model": other, "optim": fresh})
    momentum = resumed.state[other.weight]["momentum"]
    assert type(momentum) is Codes
    assert torch.equal(momentum.codes, optimizer.state[model.weight]["momentum"].codes)


class Packed(nn.Parameter):
    """A parameter that is less than its value, as Params4bit of bitsandbytes is."""

    def __new__(cls, data: torch.Tensor, *, table: object) -> Packed:
        made: Any = torch.Tensor._make_subclass(cls, data, False)
        made.table = table
        return made  # type: ignore[no-any-return]


def test_a_packed_parameter_is_refused_at_the_save() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight = Packed(torch.zeros(8, 1, dtype=torch.uint8), table={"scales": torch.ones(2)})
    assert type(model.state_dict()["0.weight"]) is torch.Tensor
    with pytest.raises(
        TypeError, match=r"model\.0\.weight: .*Packed cannot .* include_frozen=False"
    ):
        save({"model": model})
    model[0].weight = Packed(torch.zeros(8, 1, dtype=torch.uint8), table=None)
    save({"model": model})


class Scaled(nn.Parameter):
    """A parameter such as bitsandbytes' Int8Params: a forward moves its scales to its module."""

    def __new__(cls, data: torch.Tensor, scales: torch.Tensor | None) -> Scaled:
        made: Any = torch.Tensor._make_subclass(cls, data, False)
        made.CB, made.SCB, made.has_fp16_weights = None, scales, False
        return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("scales", [torch.ones(4), None])
def test_an_8_bit_weight_is_refused_at_the_save_before_and_after_a_forward(scales: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight = Scaled(torch.zeros(4, 4, dtype=torch.int8), scales)
    with pytest.raises(TypeError, match=r"model\.0\.weight: .*Scaled .* before it is quant"):
        save({"model": model})
    model[0].weight = Scaled(torch.zeros(4, 4), None)
    assert load(save({"model": model}), {"model": model}).problems == ()


NAN = float("nan")


@pytest.mark.parametrize("block", [NAN, [NAN], {"a": (1, NAN)}, [{"a": [NAN]}]], ids=str)
def test_a_nan_in_a_context_is_like_another(block: Any) -> None:
    # Of other objects, as they come out of a file: a list thinks one NaN object equal to itself.
    saved, live = (Quantized.of(weights(i), block=renewed(block)) for i in range(2))
    load(save({"m": {"w": saved}}), {"m": {"w": live}})
    assert torch.equal(live.qdata, saved.qdata)


def renewed(value: Any) -> Any:
    if isinstance(value, float):
        return float("nan")
    if isinstance(value, dict):
        return {key: renewed(item) for key, item in value.items()}
    return type(value)(map(renewed, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (NAN, 1.0),
        (1.0, NAN),
        ([NAN], (NAN,)),
        ([1], (1,)),
        ([NAN, 1], [NAN]),
        ([{"a": NAN}], [{"b": NAN}]),
        ([[1], 2], [[1], 3]),
    ],
    ids=str,
)
def test_contexts_that_differ_beside_a_nan_are_told_apart(saved: Any, own: Any) -> None:
    found = difference({"context": saved}, {"context": own})
    assert found is not None
    assert found.startswith("saved with context")
