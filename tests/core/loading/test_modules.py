"""Modules and their optimizers in whatever wraps them: what one saved, any other loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import dist_ckpt as dc
from dist_ckpt.testing.memory_storage import MemoryStorage
from ranks import load_on_threads, save_on_threads


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
    return optimizer


def are_alike(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = optimizer.param_groups[0]["params"]
    return [optimizer.state[param][key] for param in params for key in ("step", "exp_avg")]


class Prepared(nn.Module):
    """What Lightning Fabric makes of a module: its state dict is that of the original one."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        compiled: Any = torch.compile(original, backend="eager")
        self._forward_module = nn.DataParallel(compiled)
        self._original_module = original

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward_module(x)

    def state_dict(self, **options: Any) -> Any:
        return self._original_module.state_dict(**options)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self._original_module.load_state_dict(state_dict, strict=strict, assign=assign)


def with_checkpoints(model: nn.Sequential) -> nn.Module:
    model[0] = checkpoint_wrapper(model[0])
    return model


WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "prepared": Prepared,
    "DataParallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "checkpointed": with_checkpoints,
    "all of it": lambda model: nn.DataParallel(Prepared(with_checkpoints(model))),
}


@pytest.mark.parametrize("target", WRAPS)
@pytest.mark.parametrize("source", ["plain", "prepared", "DataParallel"])
def test_what_one_wrapper_saved_loads_into_any(source: str, target: str, tmp_path: Path) -> None:
    inner = net(0)
    model = WRAPS[source](inner)
    optimizer = trained(model)
    dc.save({"model": model, "optim": optimizer}, tmp_path / "step")
    other_inner = net(1)
    other = WRAPS[target](other_inner)
    other_optimizer = trained(other)
    dc.load({"model": other, "optim": other_optimizer}, tmp_path / "step")
    assert are_alike(other_inner, inner)
    pairs = zip(moments(other_optimizer), moments(optimizer), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("wrap", ["prepared", "DataParallel", "checkpointed"])
def test_wrapped_meta_modules_are_materialized(wrap: str, tmp_path: Path) -> None:
    model = net(0)
    dc.save({"model": model}, tmp_path / "step")
    with torch.device("meta"):
        inner = net(1)
    dc.load({"model": WRAPS[wrap](inner)}, tmp_path / "step")
    assert are_alike(inner, model)


# --- a class that loads itself -----------------------------------------------------------------


class Cached(nn.Module):
    """A module that makes something of its weights when they are loaded."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.calls = 0
        self.total = self.weight.sum().item()

    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]  # as people do
        self.calls += 1
        found = super().load_state_dict(state_dict)
        self.total = self.weight.sum().item()
        return found


def test_a_load_state_dict_of_the_users_is_called_with_what_was_loaded(tmp_path: Path) -> None:
    dc.save({"model": Cached(3.0)}, tmp_path / "step")
    model = Cached(1.0)
    weight = model.weight
    dc.load({"model": nn.DataParallel(model)}, tmp_path / "step")
    assert (model.total, model.calls) == (6.0, 1)
    assert model.weight is weight


def test_it_is_left_alone_where_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    dc.save({"model": Cached(3.0), "step": 7}, tmp_path / "step")
    model = Cached(1.0)
    state = {"model": model, "step": 0}
    dc.load(state, tmp_path / "step", include="step")
    assert (state["step"], model.calls) == (7, 0)


def test_hooks_that_follow_a_load_are_called(tmp_path: Path) -> None:
    model: Any = net(1)
    sums: list[Any] = []
    dc.save({"model": net(0)}, tmp_path / "step")
    model[2].register_load_state_dict_post_hook(lambda part, _: sums.append(part.weight.sum()))
    dc.load({"model": model}, tmp_path / "step")
    expected: Any = net(0)[2].weight
    assert sums == [expected.sum()]


# --- hooks and classes that change what is stored ----------------------------------------------


class Transposed(nn.Linear):
    """A module whose state dict has its weight in another form, under the same name."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_state_dict_post_hook(_turn)
        self.register_load_state_dict_pre_hook(_turn)


def _turn(_module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].t()


def test_what_a_hook_makes_of_a_tensor_goes_back_through_its_counterpart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Transposed())
    dc.save({"model": model}, tmp_path / "step")
    with dc.open(tmp_path / "step") as checkpoint:
        stored = bytearray(checkpoint["model.0.weight"][...].data)
    assert torch.equal(
        torch.frombuffer(stored, dtype=torch.float32).view(3, 3), model[0].weight.t()
    )
    other: Any = nn.Sequential(Transposed())
    dc.load({"model": other}, tmp_path / "step")
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_hook_may_add_names_that_no_part_has(tmp_path: Path) -> None:
    # As quantized layers do: `weight` and, beside it, `weight.absmax`.
    def add(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[prefix + "weight.absmax"] = module.weight.detach().abs().max()

    def take(module: Any, state: Any, prefix: str, *_: Any) -> None:
        module.absmax = state.pop(prefix + "weight.absmax")

    def quantized() -> Any:
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].register_state_dict_post_hook(add)
        model[0].register_load_state_dict_pre_hook(take)
        return model

    model, other = quantized(), quantized()
    dc.save({"model": model}, tmp_path / "step")
    dc.load({"model": other}, tmp_path / "step")
    assert torch.equal(other[0].absmax, model[0].weight.abs().max())


class Adapters(nn.Module):
    """A module that stores a part of itself, as adapters over a frozen model do."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.adapter(x)

    def state_dict(self, **options: Any) -> Any:
        return {k: v for k, v in super().state_dict(**options).items() if "adapter" in k}


def test_an_optimizer_may_have_parameters_that_the_state_dict_leaves_out(tmp_path: Path) -> None:
    model = Adapters()
    optimizer = trained(model)
    dc.save({"model": model, "optim": optimizer}, tmp_path / "step")
    with dc.open(tmp_path / "step") as checkpoint:
        assert "model.base.weight" not in checkpoint.tensors
        assert any("base.weight.exp_avg" in name for name in checkpoint.tensors)
    other = Adapters()
    other_optimizer = trained(other)
    dc.load({"model": other, "optim": other_optimizer}, tmp_path / "step")
    assert torch.equal(other.adapter.weight, model.adapter.weight)
    pairs = zip(moments(other_optimizer), moments(optimizer), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("returned", "said"),
    [([1], "something else than a mapping with str keys"), ({3: torch.ones(1)}, "str keys")],
)
def test_a_state_dict_that_is_none_is_refused(returned: Any, said: str, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def state_dict(self) -> Any:  # type: ignore[override]
            return returned

    with pytest.raises(dc.CheckpointError, match=rf"model: state_dict of Odd raised.*{said}"):
        dc.save({"model": Odd()}, tmp_path / "step")


# --- names with a wrapper's prefix -------------------------------------------------------------


def raw(model: nn.Module) -> Any:
    return {key: value.clone() for key, value in model.state_dict().items()}


PREFIXED: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, str]]] = {
    "with it into a module": (
        lambda: {"model": raw(nn.DataParallel(net(0)))},
        lambda: {"model": net(1)},
        {"model.module.*": "model.*"},
    ),
    "a module into names with it": (
        lambda: {"model": net(0)},
        lambda: {"model": raw(nn.DataParallel(net(1)))},
        {"model.*": "model.module.*"},
    ),
    "at the top of the state": (
        lambda: raw(nn.DataParallel(net(0))),
        lambda: raw(net(1)),
        {"module.*": "*"},
    ),
    "without it at the top": (
        lambda: raw(net(0)),
        lambda: raw(nn.DataParallel(net(1))),
        {"*": "module.*"},
    ),
    "of a part": (
        lambda: {"model": raw(nn.Sequential(net(0), nn.DataParallel(net(0))))},
        lambda: {"model": nn.Sequential(net(1), net(1))},
        {"model.1.module.*": "model.1.*"},
    ),
    "of the compiler, beside other names": (
        lambda: {"model": raw(torch.compile(net(0), backend="eager")), "step": 1},  # type: ignore[arg-type]
        lambda: {"model": net(1), "step": 0},
        {"model._orig_mod.*": "model.*"},
    ),
    "of two models": (
        lambda: {"model": raw(nn.DataParallel(net(0))), "ema": raw(nn.DataParallel(net(0)))},
        lambda: {"model": net(1), "ema": net(1)},
        {"model.module.*": "model.*", "ema.module.*": "ema.*"},
    ),
    "of averages with a counter": (
        lambda: {"model": torch.optim.swa_utils.AveragedModel(net(0))},
        lambda: {"model": net(1)},
        {"model.module.*": "model.*"},
    ),
}


@pytest.mark.parametrize("case", PREFIXED)
def test_another_prefix_is_said_once_with_the_rename_that_maps_it(
    case: str, tmp_path: Path
) -> None:
    make, target, rules = PREFIXED[case]
    dc.save(make(), tmp_path / "step")
    with pytest.raises(dc.IncompatibleError) as caught:
        dc.load(target(), tmp_path / "step")
    lines = str(caught.value).splitlines()
    assert "the checkpoint has another prefix for " in lines[1]
    assert lines[1].endswith(f"load with rename={rules!r}")
    assert not any("lacks" in line for line in lines)
    state = target()
    strict = case != "of averages with a counter"
    dc.load(state, tmp_path / "step", rename=rules, strict=strict)
    found = state.get("model", state)
    dicts = found.state_dict() if isinstance(found, nn.Module) else found
    if case != "of a part":
        assert all(
            torch.equal(a, b) for a, b in zip(dicts.values(), raw(net(0)).values(), strict=True)
        )


def test_a_rename_may_put_one_model_of_a_list_into_its_place(tmp_path: Path) -> None:
    dc.save({"model": [net(0), {"lr": torch.ones(1)}]}, tmp_path / "step")
    model = net(1)
    with pytest.raises(dc.IncompatibleError, match=r"rename=\{'model.0.\*': 'model.\*'\}"):
        dc.load({"model": model}, tmp_path / "step")
    dc.load({"model": model}, tmp_path / "step", rename={"model.0.*": "model.*", "model.1": None})
    assert are_alike(model, net(0))
    state: dict[str, Any] = {"model": None}
    dc.load(state, tmp_path / "step", rename={"model.0.*": "model.*"})
    assert {"0.weight", 1} <= state["model"].keys()


def test_names_that_differ_otherwise_are_only_missing(tmp_path: Path) -> None:
    dc.save({"model": {"encoder": net(0)}}, tmp_path / "step")
    with pytest.raises(dc.IncompatibleError, match="lacks 9 names") as caught:
        dc.load({"model": {"decoder": net(1)}}, tmp_path / "step")
    assert "another prefix" not in str(caught.value)


def test_no_rename_is_recommended_that_takes_names_away_from_others(tmp_path: Path) -> None:
    # "model.*" would take model.step along.
    dc.save({"model": {"step": torch.ones(1), **raw(net(0))}}, tmp_path / "step")
    with pytest.raises(dc.IncompatibleError, match="lacks 9 names"):
        dc.load(
            {"model": {"step": torch.ones(1), **raw(nn.DataParallel(net(1)))}}, tmp_path / "step"
        )


def test_no_model_of_several_in_a_list_is_recommended(tmp_path: Path) -> None:
    dc.save({"model": [net(0), net(1)]}, tmp_path / "step")
    with pytest.raises(dc.IncompatibleError, match="lacks 9 names") as caught:
        dc.load({"model": [net(1)]}, tmp_path / "step")
    assert "another prefix" not in str(caught.value)


# --- a model in parts --------------------------------------------------------------------------


def test_a_list_with_numbers_loads_into_one_without_by_the_rename_that_is_said(
    tmp_path: Path,
) -> None:
    # So an older version has saved a list; here a dict is numbered in its place.
    model = net(0)
    optimizer = trained(model)
    dc.save({"ms": {"0": model}, "optim": optimizer}, tmp_path / "step")
    other = net(1)
    state = {"ms": [other], "optim": torch.optim.AdamW(other.parameters())}
    rule = r"rename=\{'ms\.0\.\*': 'ms\.\*'"
    with pytest.raises(dc.IncompatibleError, match=rule) as caught:
        dc.load(state, tmp_path / "step")
    assert "lacks" not in str(caught.value)
    dc.load(state, tmp_path / "step", rename={"ms.0": "ms"})
    assert are_alike(other, model)
    assert len(state["optim"].state) == len(optimizer.state)  # type: ignore[attr-defined]


def test_a_module_that_gets_another_beside_it_is_found_by_the_rename_that_is_said(
    tmp_path: Path,
) -> None:
    dc.save({"ms": [net(0)]}, tmp_path / "step")
    models = [net(1), net(2)]
    with pytest.raises(dc.IncompatibleError, match=r"lacks 9 names: ms\.1\.") as caught:
        dc.load({"ms": models}, tmp_path / "step")
    assert "load with rename={'ms.*': 'ms.0.*'}" in str(caught.value)
    dc.load({"ms": models}, tmp_path / "step", rename={"ms.*": "ms.0.*"}, exclude="ms.1")
    assert are_alike(models[0], net(0))
    assert are_alike(models[1], net(2))


def parts_of(model: nn.Sequential) -> list[nn.ModuleDict]:
    """Return the model as a pipeline has it: each stage a module, which knows its place."""
    return [nn.ModuleDict({"0": model[0], "1": model[1]}), nn.ModuleDict({"2": model[2]})]


class ModelWrapper:
    """What torchtitan puts into its state: the parts' state dicts as one."""

    def __init__(self, parts: list[nn.ModuleDict]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {k: v for part in self.parts for k, v in get_model_state_dict(part).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            options = StateDictOptions(strict=False)
            set_model_state_dict(part, model_state_dict=state, options=options)


FORMS: dict[str, Callable[[nn.Sequential], Any]] = {
    "whole": lambda model: model,
    "a list": parts_of,
    "a tuple": lambda model: tuple(parts_of(model)),
    "a list of one": lambda model: [model],
    "torchtitan's": lambda model: ModelWrapper(parts_of(model)),
    "a list of wrapped": lambda model: [Prepared(parts_of(model)[0]), parts_of(model)[1]],
}


@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("source", FORMS)
def test_a_model_in_parts_loads_into_any_form_of_it(
    source: str, target: str, tmp_path: Path
) -> None:
    model, other = net(0), net(1)
    dc.save({"model": FORMS[source](model)}, tmp_path / "step")
    report = dc.load({"model": FORMS[target](other)}, tmp_path / "step")
    assert are_alike(other, model)
    assert {f"model.{name}" for name in model.state_dict()} == set(report.restored)


def test_an_optimizer_over_several_parts_names_them_as_the_whole_model_does(tmp_path: Path) -> None:
    model, other = net(0), net(1)
    optimizer, other_optimizer = trained(model), trained(other)
    dc.save({"model": parts_of(model), "optim": optimizer}, tmp_path / "step")
    dc.load({"model": other, "optim": other_optimizer}, tmp_path / "step")
    pairs = zip(moments(other_optimizer), moments(optimizer), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_models_that_share_names_keep_their_numbers(tmp_path: Path) -> None:
    dc.save({"ensemble": [net(0), net(1)]}, tmp_path / "step")
    with dc.open(tmp_path / "step") as checkpoint:
        assert {"ensemble.0.0.weight", "ensemble.1.0.weight"} <= set(checkpoint.tensors)
    others = [net(2), net(3)]
    dc.load({"ensemble": others}, tmp_path / "step")
    assert are_alike(others[0], net(0))
    assert are_alike(others[1], net(1))


def test_a_part_alone_does_not_take_the_place_of_the_whole(tmp_path: Path) -> None:
    dc.save({"model": parts_of(net(0))}, tmp_path / "step")
    with pytest.raises(dc.IncompatibleError, match=r"does not have 2 names: model\.2\.weight"):
        dc.load({"model": parts_of(net(1))[:1]}, tmp_path / "step")


class Scaled(nn.Module):
    """A part with a state of its own beside its tensors."""

    def __init__(self, name: str, scale: float) -> None:
        super().__init__()
        self.add_module(name, _Extra(scale))


class _Extra(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.weight = scale, nn.Parameter(torch.full((2,), scale))

    def get_extra_state(self) -> float:
        return self.scale

    def set_extra_state(self, state: float) -> None:
        self.scale = state


def test_every_part_gets_its_own_extra_state_and_meta_parameters(tmp_path: Path) -> None:
    dc.save({"model": [Scaled("a", 1.0), Scaled("b", 2.0)]}, tmp_path / "step")
    with torch.device("meta"):
        first = Scaled("a", 5.0)
    second = Scaled("b", 6.0)
    dc.load({"model": [first, second]}, tmp_path / "step")
    found: list[Any] = [first.a, second.b]
    assert [part.scale for part in found] == [1.0, 2.0]
    assert [part.weight.tolist() for part in found] == [[1.0, 1.0], [2.0, 2.0]]


def stages_of(model: nn.Sequential) -> list[Any]:
    """Return the states of two pipeline ranks, of which the first has two stages."""
    first = [nn.ModuleDict({"0": model[0]}), nn.ModuleDict({"1": model[1]})]
    return [{"model": first}, {"model": [nn.ModuleDict({"2": model[2]})]}]


def test_stages_on_several_ranks_are_one_model(storage: MemoryStorage) -> None:
    model, other, whole = net(0), net(1), net(2)
    save_on_threads(storage, stages_of(model))
    load_on_threads(storage, stages_of(other))
    load_on_threads(storage, [{"model": whole}])
    assert are_alike(other, model)
    assert are_alike(whole, model)
    # And back: each stage is a part of what one rank has saved.
    save_on_threads(storage, [{"model": net(3)}], path="/runs/whole")
    load_on_threads(storage, stages_of(other), path="/runs/whole")
    assert are_alike(other, net(3))


def test_names_of_no_stage_on_any_rank_are_unexpected(storage: MemoryStorage) -> None:
    save_on_threads(storage, [{"model": nn.ModuleList([*net(0), nn.Linear(2, 2)])}])
    with pytest.raises(
        dc.IncompatibleError, match=r"does not have 2 names: model\.3\.weight, model\.3\.b"
    ):
        load_on_threads(storage, stages_of(net(1)))


def test_a_list_that_is_one_model_on_one_rank_and_several_on_another_is_refused(
    storage: MemoryStorage,
) -> None:
    states = [{"model": parts_of(net(0))}, {"model": [net(0), net(1)]}]
    problem = r"model: dict on rank 0, list on rank 1: .*list of modules counts as one dict where"
    with pytest.raises(ValueError, match=problem):
        save_on_threads(storage, states)
    save_on_threads(storage, stages_of(net(0)))
    with pytest.raises(dc.IncompatibleError, match=r"lacks 9 names: model\.1\.0\.weight.*rank 1"):
        load_on_threads(storage, states)


def test_the_remedy_comes_before_a_long_list_of_names(tmp_path):
    """A server loads the weights out of a whole checkpoint, and forgets `include`."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    dc.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    with pytest.raises(dc.IncompatibleError) as caught:
        dc.load({"model": model}, tmp_path / "ck")
    text = str(caught.value)
    assert (
        "does not have 13 names: optim.state.model.0.weight.step and 12 more, which the checkpoint"
        in text
    )
    assert text.index("include=['model']") < text.index("optim.state.model.1.bias.step")
    with pytest.raises(dc.IncompatibleError) as caught:
        dc.load({"model": {f"a_long_name_of_a_tensor.{n}": 1 for n in range(9)}}, tmp_path / "ck")
    text = str(caught.value)
    assert text.index("`exclude` them") < text.index("model.a_long_name_of_a_tensor.8")
