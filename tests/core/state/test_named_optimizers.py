from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt.core.state.wrappers import Named
from dist_ckpt.errors import IncompatibleError
from in_memory import load, save


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    parameter = next(model.parameters())
    for step in range(steps):
        torch.manual_seed(seed + step)
        batch = torch.randn(5, 4, dtype=parameter.dtype)

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = model(batch).pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = [p.detach().clone() for p in model.parameters()]
    for group in optimizer.param_groups:
        found += [(k, copy.deepcopy(v)) for k, v in sorted(group.items()) if k != "params"]
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(parameter, {})
        found += [(k, copy.deepcopy(state[k])) for k in sorted(state)]
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.device == other.device
            and torch.equal(one, other)
        )
    if isinstance(one, list | tuple):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(equal(a, b) for a, b in zip(one, other, strict=True))
        )
    return type(one) is type(other) and one == other


def matrices(parameters: Any) -> list[torch.Tensor]:
    return [p for p in parameters if p.ndim == 2]


def sparse(parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer that takes sparse gradients only, and give it such."""
    parameters = list(parameters)
    optimizer = torch.optim.SparseAdam(parameters, lr=0.1)

    def sparsify(*_: Any) -> None:
        for p in parameters:
            p.grad = p.grad.to_sparse() if p.grad is not None and not p.grad.is_sparse else p.grad

    for p in parameters:
        p.register_post_accumulate_grad_hook(sparsify)
    return optimizer


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05)),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "sparse_adam": sparse,
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    OPTIMIZERS["muon"] = lambda p: torch.optim.Muon(matrices(p), lr=0.1)


def test_every_optimizer_of_torch_is_among_those_tested() -> None:
    classes = {cls for cls in vars(torch.optim).values() if isinstance(cls, type)}
    theirs = {cls for cls in classes if issubclass(cls, torch.optim.Optimizer)}
    made = {type(make(make_model().parameters())) for make in OPTIMIZERS.values()}
    assert theirs - {torch.optim.Optimizer} == made


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_an_optimizer_comes_back_bit_for_bit_and_trains_on_as_if_nothing_was(
    name: str, steps_before: int
) -> None:
    make = OPTIMIZERS[name]
    model = make_model()
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    checkpoint = save({"model": model, "optim": optimizer})
    expected = bits(model, optimizer)

    other = make_model()
    other_optimizer = make(other.parameters())
    train(other, other_optimizer, steps_before, seed=50)
    load(checkpoint, {"model": other, "optim": other_optimizer})
    restored = bits(other, other_optimizer)
    assert len(expected) == len(restored)
    for one, two in zip(expected, restored, strict=True):
        assert equal(one, two), (one, two)

    train(model, optimizer, 3, seed=100)
    train(other, other_optimizer, 3, seed=100)
    assert equal(bits(model, optimizer), bits(other, other_optimizer))


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "lbfgs", "nadam", "adafactor"])
def test_a_save_before_the_first_step_changes_nothing_of_the_training(name: str) -> None:
    results = []
    for saves in (False, True):
        model = make_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        model.eval()
        before = torch.get_rng_state()
        if saves:
            save({"model": model, "optim": optimizer})
        assert torch.equal(before, torch.get_rng_state())
        assert not model.training
        assert not optimizer.state
        assert torch.is_grad_enabled()
        train(model, optimizer, 3)
        results.append(bits(model, optimizer))
    assert equal(*results)


def test_moments_of_another_dtype_than_the_weights_keep_theirs() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(p.shape),
            "exp_avg_sq": torch.rand(p.shape),
        }
    checkpoint = save({"model": model, "optim": optimizer})
    other, other_optimizer = make()
    load(checkpoint, {"model": other, "optim": other_optimizer})
    assert other_optimizer.state[other[0].weight]["exp_avg"].dtype == torch.float32  # type: ignore[index]
    assert equal(bits(model, optimizer), bits(other, other_optimizer))


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    first, last = model[0], model[2]  # type: ignore[index]
    groups: list[dict[str, Any]] = [
        {"params": list(first.parameters()), "lr": 1.0, "my_tag": ("a", 1)},
        {"params": list(last.parameters())},
        {"params": [], "lr": 7.0},
    ]
    return torch.optim.AdamW(groups)


def test_frozen_parameters_partial_state_and_empty_groups_come_back() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = grouped(model)
    train(model, optimizer, 2)
    assert len(optimizer.state) == 2
    checkpoint = save({"model": model, "optim": optimizer})
    other = make_model()
    other_optimizer = grouped(other)
    other_optimizer.param_groups[2]["lr"] = 3.0
    load(checkpoint, {"model": other, "optim": other_optimizer})
    assert len(other_optimizer.state) == 2
    assert equal(bits(model, optimizer), bits(other, other_optimizer))


def test_tied_weights_have_their_state_once_under_the_first_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 2)
            self.head = nn.Linear(2, 4, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embed(x))
            return out

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    checkpoint = save({"model": model, "optim": optimizer})
    assert checkpoint.catalog.aliases == {"model.head.weight": "model.embed.weight"}
    assert "optim.state.model.embed.weight.exp_avg" in checkpoint.catalog.tensors
    other = Tied()
    other_optimizer = torch.optim.AdamW(other.parameters())
    load(checkpoint, {"model": other, "optim": other_optimizer})
    assert other.head.weight is other.embed.weight
    assert equal(bits(model, optimizer), bits(other, other_optimizer))


def test_parameters_are_called_as_in_the_checkpoint_however_many_modules_there_are() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    one = torch.optim.AdamW(a.parameters())
    both = torch.optim.SGD([*a.parameters(), *b.parameters()])
    plan = save({"nets": {"a": a, "b": b}, "one": one, "both": both}).plan
    assert [names.names for names in plan.name_lists] == [
        ("nets.a.weight", "nets.a.bias"),
        ("nets.a.weight", "nets.a.bias", "nets.b.weight"),
    ]


def test_names_do_not_have_the_prefixes_of_a_compiled_module() -> None:
    model: Any = torch.compile(make_model(), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    plan = save({"model": model, "optim": optimizer}).plan
    assert plan.name_lists[0].names == ("model.0.weight", "model.0.bias", "model.2.weight")
    assert "model.0.weight" in plan.catalog.tensors


def test_a_parameter_of_no_module_is_refused_with_the_remedy() -> None:
    model = make_model()
    loose = nn.Parameter(torch.ones(5, 7))
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [loose]}])
    with pytest.raises(ValueError, match=r"parameter 0 of group 1, shape \(5, 7\).*dc\.Named"):
        save({"model": model, "optim": optimizer})
    with pytest.raises(ValueError, match=r"dc\.Named"):
        load(save({"a": 1}), {"model": model, "optim": optimizer})


def test_a_parameter_with_two_unrelated_names_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"'model.0.weight' and 'first.weight'.*dc\.Named"):
        save({"model": model, "first": model[0], "optim": optimizer})


RENAMED: list[tuple[tuple[str, ...], tuple[str, ...], dict[str, str | None]]] = [
    (("model", "optim"), ("net", "optim"), {"model": "net"}),
    (("model", "optim"), ("net", "optim"), {"model.*": "net.*"}),
    (("model", "optim"), ("net", "optim"), {"model.{i}.{w}": "net.{i}.{w}"}),
    (("model", "optim"), ("xodel", "optim"), {"m**.weight": "x**.weight", "m*.bias": "x*.bias"}),
    (
        ("model", "optim"),
        ("net", "optim"),
        {"model": "net", "optim.state.model": "optim.state.net"},
    ),
    (("model", "optim"), ("net", "opt"), {"model": "net", "optim": "opt"}),
    (("model", "optim"), ("net", "opt"), {"model": "net", "optim.*": "opt.*"}),
    (("model", "optim"), ("app.model", "optim"), {"model": "app.model"}),
    (("model", "optim"), ("app.model", "app.optim"), {"model": "app.model", "optim": "app.optim"}),
    (("model", "optim"), ("app.model", "app.optim"), {"**": "app.**"}),
    (("app.model", "app.optim"), ("job.model", "job.optim"), {"app": "job"}),
    (("model", "optim"), ("optim", "model"), {"model": "optim", "optim": "model"}),
]


def placed(names: tuple[str, ...], *values: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        above, _, key = name.rpartition(".")
        (state.setdefault(above, {}) if above else state)[key] = value
    return state


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("saved", "names", "rename"), RENAMED)
def test_the_state_of_a_parameter_follows_a_rename_of_it(
    saved: tuple[str, ...], names: tuple[str, ...], rename: dict[str, Any], *, trained: bool
) -> None:
    model = make_model()
    # Groups of their own hyperparameters say whether the lists of parameters were renamed too.
    groups = [{"params": [p], "lr": 0.1 + n} for n, p in enumerate(model.parameters())]
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer, 2 * trained)
    checkpoint = save(placed(saved, model, optimizer))
    other = make_model()
    mine = torch.optim.AdamW([{"params": [p]} for p in reversed([*other.parameters()])])
    load(checkpoint, placed(names, other, mine), rename=rename)
    mine.param_groups.reverse()
    assert equal(bits(other, mine), bits(model, optimizer))


def test_a_rule_for_the_state_itself_counts_more_than_one_for_its_parameter() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    average = make_model()
    checkpoint = save({"model": model, "ema": average, "optim": optimizer})
    other, mine = make_model(), make_model()
    loaded = torch.optim.AdamW(other.parameters())
    stay = {"optim.state.model": "optim.state.model"}
    swap = {"model": "ema", "ema": "model"}
    load(checkpoint, {"model": other, "ema": mine, "optim": loaded}, rename={**swap, **stay})
    assert all(map(torch.equal, other.parameters(), average.parameters()))
    assert equal(bits(model, loaded), bits(model, optimizer))
    # What is dropped leaves its state where it was: the other weights have its name now.
    alone = torch.optim.AdamW(other.parameters())
    load(checkpoint, {"model": other, "optim": alone}, rename={"model": None, "ema": "model"})
    assert equal(bits(model, alone), bits(model, optimizer))


def test_state_that_follows_and_state_with_a_rule_cannot_meet() -> None:
    model, second = make_model(), make_model()
    optimizer = torch.optim.AdamW([*model.parameters(), *second.parameters()])
    checkpoint = save({"model": model, "second": second, "optim": optimizer})
    rules = {"model": "net", "optim.state.second": "optim.state.net"}
    with pytest.raises(IncompatibleError, match=r"would both be 'optim\.state\.net\.0\.weight'"):
        load(checkpoint, {"net": model, "second": second, "optim": optimizer}, rename=rules)


def test_named_gives_the_names() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    checkpoint = save({"optim": Named(optimizer, dict(model.named_parameters()))})
    other = make_model()
    other_optimizer = torch.optim.AdamW(other.parameters())
    load(checkpoint, {"model": other, "optim": other_optimizer}, include="optim")
    assert equal(bits(model, optimizer)[3:], bits(other, other_optimizer)[3:])


def test_state_in_memory_that_was_not_saved_is_missing() -> None:
    model = make_model()
    fresh = torch.optim.AdamW(model[2].parameters())
    checkpoint = save({"model": model, "optim": fresh})
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    with pytest.raises(IncompatibleError, match=r"lacks.*optim\.state\.model\.0\.weight\.step"):
        load(checkpoint, {"model": model, "optim": optimizer})
    kept = bits(model, optimizer)
    binding = load(checkpoint, {"model": model, "optim": optimizer}, strict=False)
    assert "optim.state.model.0.weight.exp_avg" in binding.missing
    first = len([*model.parameters()]) + len(optimizer.param_groups[0]) - 1
    assert equal(bits(model, optimizer)[first : first + 3], kept[first : first + 3])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "lbfgs", "nadam", "adafactor"])
def test_a_checkpoint_from_before_the_first_step_brings_training_back_there(
    name: str, strict: bool
) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    checkpoint = save({"model": model, "optim": optimizer})
    train(model, optimizer, 3)
    expected = bits(model, optimizer)
    named = list(model.named_parameters())
    held = [f"optim.state.model.{n}.{k}" for n, p in named for k in optimizer.state.get(p, {})]
    binding = load(checkpoint, {"model": model, "optim": optimizer}, strict=strict)
    assert not optimizer.state
    assert sorted(binding.dropped) == sorted(held)
    assert binding.missing == ()
    train(model, optimizer, 3)
    assert equal(bits(model, optimizer), expected)


def test_state_that_is_excluded_or_fails_to_load_is_not_dropped() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = save({"model": model, "optim": optimizer, "x": torch.ones(2)})
    train(model, optimizer, 1)
    state = {"model": model, "optim": optimizer, "x": torch.zeros(3)}
    before = bits(model, optimizer)
    with pytest.raises(IncompatibleError, match=r"x: saved with shape"):
        load(checkpoint, state)
    binding = load(checkpoint, state, exclude=["x", "optim.state", "model"])
    assert binding.dropped == ()
    assert equal(bits(model, optimizer), before)


def test_saved_state_of_a_parameter_that_is_gone_is_unrequested() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    checkpoint = save({"model": model, "optim": optimizer})
    part = torch.optim.AdamW(list(model.parameters())[:1])
    binding = checkpoint.bind({"model": model, "optim": part})
    assert not binding.problems
    assert "optim.state.model.2.weight.exp_avg" in binding.unrequested
    assert "optim.state.model.0.weight.exp_avg" not in binding.unrequested


def test_a_group_takes_the_hyperparameters_that_its_parameters_were_saved_with() -> None:
    model = make_model()
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": rest, "lr": 2.0}])
    checkpoint = save({"model": model, "optim": optimizer})
    other = torch.optim.SGD([{"params": rest, "lr": 3.0}, {"params": [first], "lr": 4.0}])
    load(checkpoint, {"model": model, "optim": other}, exclude="optim.param_groups")
    assert [group["lr"] for group in other.param_groups] == [3.0, 4.0]
    load(checkpoint, {"model": model, "optim": other})
    assert [group["lr"] for group in other.param_groups] == [2.0, 1.0]


def test_a_failed_bind_leaves_a_fresh_optimizer_fresh() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    checkpoint = save({"model": model, "optim": optimizer})
    fresh = torch.optim.AdamW(model.parameters(), lr=9.0)
    with pytest.raises(IncompatibleError, match="lacks more"):
        load(checkpoint, {"model": model, "optim": fresh, "more": 1})
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 9.0


def test_existing_state_is_filled_in_place() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    checkpoint = save({"model": model, "optim": optimizer})
    moment = optimizer.state[model[0].weight]["exp_avg"]  # type: ignore[index]
    saved = moment.clone()
    moment.zero_()
    load(checkpoint, {"model": model, "optim": optimizer})
    assert optimizer.state[model[0].weight]["exp_avg"] is moment  # type: ignore[index]
    assert torch.equal(moment, saved)


def test_state_of_another_dtype_is_a_problem_not_a_cast() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    checkpoint = save({"model": model, "optim": optimizer})
    state = optimizer.state[model[0].weight]  # type: ignore[index]
    state["exp_avg"] = state["exp_avg"].bfloat16()
    with pytest.raises(IncompatibleError, match="saved as float32, the state has bfloat16"):
        load(checkpoint, {"model": model, "optim": optimizer})


def test_state_for_something_that_is_no_parameter_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[torch.ones(1)] = {"step": 1}
    with pytest.raises(ValueError, match="not parameters of its groups"):
        save({"model": model, "optim": optimizer})


def helper_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        "state": {names[p]: dict(state) for p, state in optimizer.state.items()},
        "param_groups": [
            {**group, "params": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def test_a_dict_from_torchs_helpers_and_an_optimizer_load_into_each_other() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    train(model, optimizer, 2)
    from_dict = save({"model": model, "optim": helper_dict(model, optimizer)})
    from_optimizer = save({"model": model, "optim": optimizer})

    other = make_model()
    other_optimizer = torch.optim.AdamW(other.parameters())
    load(from_dict, {"model": other, "optim": other_optimizer})
    assert equal(bits(model, optimizer), bits(other, other_optimizer))

    train(other, other_optimizer, 1)
    target: dict[str, Any] = {"model": other, "optim": helper_dict(other, other_optimizer)}
    rename = {"optim.state.model.*": "optim.state.*"}
    load(from_optimizer, target, rename=rename)
    expected = helper_dict(model, optimizer)
    assert target["optim"]["param_groups"] == expected["param_groups"]
    moments = target["optim"]["state"]["0.weight"]["exp_avg"]
    assert torch.equal(moments, expected["state"]["0.weight"]["exp_avg"])


def test_an_open_template_gets_an_optimizer_in_the_form_of_torchs_helpers() -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    train(model, optimizer, 1)
    state: dict[str, Any] = {"optim": None}
    load(save({"model": model, "optim": optimizer}), state, include="optim")
    group = state["optim"]["param_groups"][0]
    assert group["params"] == ["model.0.weight", "model.0.bias", "model.2.weight"]
    assert equal(group["lr"], torch.tensor(0.5))
    assert group["betas"] == (0.9, 0.999)
    expected = optimizer.state[model[0].bias]["exp_avg"]  # type: ignore[index]
    assert equal(state["optim"]["state"]["model.0.bias"]["exp_avg"], expected)


def test_the_names_that_torch_gives_parameters_in_groups_stay_as_they_are() -> None:
    model = make_model()
    checkpoint = save({"model": model, "optim": torch.optim.SGD(model.named_parameters())})
    assert "param_names" not in checkpoint.values["optim.param_groups.0"]
    other = make_model()
    renamed = torch.optim.SGD([("x." + name, p) for name, p in other.named_parameters()])
    load(checkpoint, {"model": other, "optim": renamed})
    assert renamed.param_groups[0]["param_names"] == ["x.0.weight", "x.0.bias", "x.2.weight"]


def test_what_an_open_template_took_of_an_optimizer_loads_into_one_once_saved_again() -> None:
    def pair() -> dict[str, Any]:
        model = make_model()
        return {"m": model, "o": torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))}

    first = pair()
    train(first["m"], first["o"], 2)
    taken: dict[str, Any] = {}
    load(save(first), taken)
    again = pair()
    again["o"].param_groups[0]["lr"].fill_(0.1)
    again["o"].param_groups[0]["betas"] = (0.1, 0.2)
    load(save(taken), again)
    assert equal(bits(again["m"], again["o"]), bits(first["m"], first["o"]))
    assert again["o"].param_groups[0]["params"] == list(again["m"].parameters())


def test_a_value_that_is_no_group_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    saved = save({"m": model, "o": {"param_groups": [5], "state": {"w": torch.ones(1)}}})
    with pytest.raises(IncompatibleError, match=r"o\.param_groups\.0: saved as a int"):
        load(saved, {"m": model, "o": optimizer}, exclude="o.state")
