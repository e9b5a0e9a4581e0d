"""Optimizers with methods of their own, with hooks, and around others: nothing is lost silently."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from dist_ckpt.core.state.wrappers import Named, PerRank
from dist_ckpt.errors import CheckpointError, IncompatibleError
from in_memory import InMemory, load, save
from wrapped_optimizers import (
    Counting,
    Delegating,
    FP16Optimizer,
    PostLocalSGDOptimizer,
    SlowWeightsWithin,
    TupleKeys,
    TwoStates,
    Untold,
)

Pair = tuple[nn.Module, Any]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        torch.manual_seed(seed + step)
        optimizer.zero_grad()
        model(torch.randn(5, 4, dtype=next(model.parameters()).dtype)).pow(2).sum().backward()
        optimizer.step()


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, **options)


class Averager:
    """A model averager of one rank."""

    step = 0

    def average_parameters(self, params: Any) -> None:
        """Count the steps: of one rank there is nothing to average."""
        self.step += 1


def post_local_sgd(optimizer: Optimizer) -> Any:
    return PostLocalSGDOptimizer(optimizer, Averager())  # type: ignore[arg-type]


def with_skip_count(model: nn.Module) -> Optimizer:
    optimizer = adamw(model)
    optimizer.skipped = 0  # type: ignore[attr-defined]

    def tell(optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["skipped"] = optimizer.skipped

    def take(optimizer: Any, state_dict: dict[str, Any]) -> None:
        optimizer.skipped = state_dict.pop("skipped")

    optimizer.register_state_dict_post_hook(tell)
    optimizer.register_load_state_dict_pre_hook(take)
    return optimizer


def counted(model: nn.Module) -> Any:
    return Counting(model.parameters(), lr=0.1)


def patched(model: nn.Module) -> Any:
    optimizer: Any = adamw(model)
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict
    optimizer.skipped = 0
    optimizer.state_dict = lambda: {**state_dict(), "skipped": optimizer.skipped}

    def take(state: dict[str, Any]) -> None:
        optimizer.skipped = state["skipped"]
        load_state_dict({key: state[key] for key in ("state", "param_groups")})

    optimizer.load_state_dict = take
    return optimizer


BY_THEIR_METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "delegating": lambda model: Delegating(adamw(model)),
    "twice delegating": lambda model: Delegating(Delegating(adamw(model))),
    "slow weights within": lambda model: SlowWeightsWithin(adamw(model)),
    "two states": lambda model: TwoStates(adamw(model)),
    "post-local SGD": lambda model: post_local_sgd(adamw(model)),
    "hooks": with_skip_count,
    "subclass": counted,
    "patched instance": patched,
    "no torch optimizer": lambda model: FP16Optimizer(adamw(model)),
}


def told(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("name", BY_THEIR_METHODS)
def test_what_state_dict_tells_comes_back_through_load_state_dict(
    name: str, steps_before: int
) -> None:
    make = BY_THEIR_METHODS[name]
    model = make_model()
    optimizer = make(model)
    if not isinstance(optimizer, FP16Optimizer):
        train(model, optimizer, 3)
    for attribute, value in (("skipped", 7), ("loss_scale", 3.0)):
        if hasattr(optimizer, attribute):
            setattr(optimizer, attribute, value)
    expected = told(optimizer)
    checkpoint = save({"model": model, "optim": optimizer})
    assert equal(told(optimizer), expected)

    other = make_model()
    fresh = make(other)
    if not isinstance(optimizer, FP16Optimizer):
        train(other, fresh, steps_before, seed=50)
    load(checkpoint, {"model": other, "optim": fresh})
    assert equal(told(fresh), expected)


def test_what_is_told_by_parameter_is_stored_by_name() -> None:
    model = make_model()
    optimizer = Delegating(adamw(model))
    train(model, optimizer, 1)
    checkpoint = save({"model": model, "optim": optimizer})
    assert "optim.state.model.2.weight.exp_avg" in checkpoint.catalog.tensors
    plain = make_model()
    bare = adamw(plain)
    load(checkpoint, {"model": plain, "optim": bare})
    assert equal(told(bare), told(optimizer))
    wrapped = Delegating(adamw(other := make_model()))
    load(save({"model": plain, "optim": bare}), {"model": other, "optim": wrapped})
    assert equal(told(wrapped), told(optimizer))
    assert wrapped.loads == 1


@pytest.mark.parametrize("wrap", [Delegating, Counting])
def test_moments_that_torch_would_cast_come_back_as_they_were(wrap: Any) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = make_model(torch.bfloat16)
        return model, counted(model) if wrap is Counting else wrap(adamw(model))

    model, optimizer = make()
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(p.shape),
            "exp_avg_sq": torch.rand(p.shape),
        }
    checkpoint = save({"model": model, "optim": optimizer})
    other, fresh = make()
    load(checkpoint, {"model": other, "optim": fresh})
    moments = fresh.state[next(other.parameters())]["exp_avg"]
    assert torch.equal(moments, optimizer.state[next(model.parameters())]["exp_avg"])
    assert equal(told(fresh), told(optimizer))


def test_what_hooks_convert_stays_as_they_convert_it() -> None:
    def halved(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {
            number: {key: value.bfloat16() for key, value in entries.items()}
            for number, entries in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def make() -> tuple[nn.Module, Optimizer]:
        model = make_model()
        optimizer = adamw(model)
        optimizer.register_state_dict_post_hook(halved)
        return model, optimizer

    model, optimizer = make()
    train(model, optimizer, 2)
    checkpoint = save({"model": model, "optim": optimizer})
    stored = checkpoint.catalog.tensors["optim.state.model.0.weight.exp_avg"]
    assert stored.dtype == "bfloat16"
    other, fresh = make()
    load(checkpoint, {"model": other, "optim": fresh})
    assert fresh.state[next(other.parameters())]["exp_avg"].dtype == torch.float32
    assert equal(told(fresh), told(optimizer))


def test_all_four_kinds_of_hooks_run() -> None:
    def make(ran: list[str]) -> tuple[nn.Module, Optimizer]:
        model = make_model()
        optimizer = adamw(model)
        optimizer.register_state_dict_pre_hook(lambda _: ran.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda *_: ran.append("after saving"))
        optimizer.register_load_state_dict_pre_hook(lambda *_: ran.append("before loading"))
        optimizer.register_load_state_dict_post_hook(lambda _: ran.append("after loading"))
        return model, optimizer

    saving: list[str] = []
    model, optimizer = make(saving)
    checkpoint = save({"model": model, "optim": optimizer})
    assert saving == ["before saving", "after saving"]
    loading: list[str] = []
    model, optimizer = make(loading)
    load(checkpoint, {"model": model, "optim": optimizer})
    assert [name for name in loading if "loading" in name] == ["before loading", "after loading"]


class Averaging(torch.optim.AdamW):
    """Keeps state for all parameters together, as pytorch_optimizer's EmoNavi does."""

    def step(self, closure: Any = None) -> Any:
        """Step, and average the number of steps."""
        loss = super().step(closure)
        ema = self.state.setdefault("ema", {"fast": torch.zeros(()), "n": 0})  # type: ignore[call-overload]
        ema["fast"].lerp_(torch.ones(()), 0.5)
        ema["n"] += 1
        return loss


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Delegating])
def test_state_under_no_parameter_comes_back(wrap: Any, steps_before: int) -> None:
    def make(steps: int) -> tuple[nn.Module, Any]:
        model = make_model()
        optimizer = wrap(Averaging(model.parameters(), lr=0.1))
        train(model, optimizer, steps)
        return model, optimizer

    model, optimizer = make(3)
    checkpoint = save({"model": model, "optim": optimizer})
    other, mine = make(steps_before)
    load(checkpoint, {"model": other, "optim": mine})
    assert mine.state["ema"]["n"] == 3
    assert equal(told(mine), told(optimizer))
    fresh, untrained = make(0)
    binding = load(save({"model": fresh, "optim": untrained}), {"model": other, "optim": mine})
    assert "optim.state.ema" in binding.dropped
    assert not mine.state


def test_what_is_left_out_of_a_load_stays_as_it_is_told() -> None:
    model = make_model()
    optimizer = counted(model)
    train(model, optimizer, 2)
    optimizer.skipped = 4
    checkpoint = save({"model": model, "optim": optimizer})
    other = make_model()
    mine = Counting(other.parameters(), lr=0.7)
    mine.skipped = 1
    load(
        checkpoint, {"model": other, "optim": mine}, exclude=["optim.param_groups", "optim.skipped"]
    )
    assert (mine.skipped, mine.param_groups[0]["lr"]) == (1, 0.7)
    assert equal(told(mine)["state"], told(optimizer)["state"])
    before = told(mine)
    load(checkpoint, {"model": other, "optim": mine}, exclude="optim")
    assert equal(told(mine), before)


def test_a_checkpoint_without_what_a_class_adds_is_incomplete_for_it() -> None:
    model = make_model()
    checkpoint = save({"model": model, "optim": adamw(model)})
    state = {"model": model, "optim": counted(model)}
    with pytest.raises(IncompatibleError, match=r"the checkpoint lacks optim\.skipped"):
        load(checkpoint, state)
    with pytest.raises(IncompatibleError, match=r"does not have optim\.skipped"):
        load(save(state), {"model": model, "optim": adamw(model)})


def test_a_wrapped_optimizer_of_pipeline_stages_loads_into_one_of_the_whole_model() -> None:
    model = make_model()
    parts = [nn.Sequential(model[0]), nn.Sequential(model[2])]
    states: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        optimizer = Delegating(adamw(part))
        for p in part.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        states.append({"model": {str(2 * number): part[0]}, "optim": optimizer})
    checkpoint = save(*states)
    whole = make_model()
    target = Delegating(adamw(whole))
    load(checkpoint, {"model": whole, "optim": target})
    for new, old in zip(whole.parameters(), model.parameters(), strict=True):
        inner = states[0 if old in states[0]["optim"].state else 1]["optim"]
        assert equal(dict(target.state[new]), dict(inner.state[old]))


# --- what is refused -------------------------------------------------------------------------


def untold(model: nn.Module) -> Untold:
    return Untold(model.parameters(), torch.optim.AdamW, lr=0.1)


def test_an_optimizer_within_of_which_nothing_is_told_is_refused_by_name() -> None:
    model = make_model()
    optimizer = untold(model)
    message = r"optim: Untold keeps a AdamW in `base_optimizer`, .*to the state too"
    for held in (optimizer, PerRank(optimizer)):
        with pytest.raises(ValueError, match=message):
            save({"model": model, "optim": held})
    with pytest.raises(ValueError, match=message):
        load(save({"model": model}), {"model": model, "optim": optimizer})


def test_it_is_kept_once_the_one_within_is_in_the_state_as_well() -> None:
    def state() -> dict[str, Any]:
        model = make_model()
        optimizer = untold(model)
        return {"model": model, "optim": optimizer, "base": optimizer.base_optimizer}

    saved, loaded = state(), state()
    train(saved["model"], saved["optim"], 2)
    load(save(saved), loaded)
    assert equal(told(loaded["base"]), told(saved["base"]))
    assert loaded["base"].param_groups is loaded["optim"].param_groups
    train(loaded["model"], loaded["optim"], 1)


def test_a_shared_state_is_told() -> None:
    model = make_model()
    optimizer = untold(model)
    optimizer.state = optimizer.base_optimizer.state
    train(model, optimizer, 1)
    checkpoint = save({"model": model, "optim": optimizer})
    assert "optim.state.model.0.weight.exp_avg" in checkpoint.catalog.tensors


def test_a_form_that_no_state_can_have_is_refused_with_the_optimizers_class() -> None:
    model = make_model()
    optimizer = TupleKeys(adamw(model))
    train(model, optimizer, 1)
    message = r"optim\.lookahead_state has the key \(0, 0\) .*state_dict\(\) of TupleKeys.*convert"
    with pytest.raises(TypeError, match=message):
        save({"model": model, "optim": optimizer})


def test_a_form_without_names_is_refused_for_sharded_parameters() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = make_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"optim: state_dict\(\) of TwoStates .*DTensors"):
            save({"model": model, "optim": TwoStates(adamw(model))})
        save({"model": model, "optim": Delegating(adamw(model))})
    finally:
        dist.destroy_process_group()


def test_what_state_dict_raises_is_named() -> None:
    model = make_model()
    optimizer: Any = adamw(model)
    optimizer.state_dict = lambda: 1 / 0
    with pytest.raises(CheckpointError, match="optim: state_dict of AdamW raised ZeroDivision"):
        save({"model": model, "optim": optimizer})


# --- other optimizers than saved -------------------------------------------------------------


def saved_by(make: Callable[[Any], Optimizer]) -> InMemory:
    model = make_model()
    optimizer = make(model.parameters())
    train(model, optimizer, 2)
    return save({"model": model, "optim": optimizer})


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


OTHERS: list[tuple[Callable[[Any], Optimizer], Callable[[Any], Optimizer], str]] = [
    (torch.optim.AdamW, sgd, "without momentum, dampening"),
    (sgd, torch.optim.AdamW, "without betas, eps"),
    (torch.optim.Adam, torch.optim.RMSprop, "without momentum, alpha"),
    (torch.optim.RMSprop, sgd, "without dampening"),
    (torch.optim.Adam, torch.optim.NAdam, "without momentum_decay"),
    (torch.optim.Adagrad, torch.optim.Adadelta, "without rho"),
    (torch.optim.Adam, torch.optim.Adamax, "saved with amsgrad, decoupled_weight_decay, which"),
    (torch.optim.NAdam, torch.optim.Adam, "saved with momentum_decay, which"),
    (torch.optim.AdamW, torch.optim.RAdam, "saved with amsgrad, which"),
    (torch.optim.Adam, torch.optim.AdamW, "saved with decoupled_weight_decay=False"),
    (torch.optim.AdamW, lambda p: torch.optim.AdamW(p, amsgrad=True), "saved with amsgrad=False"),
    (torch.optim.RMSprop, lambda p: torch.optim.RMSprop(p, centered=True), "with centered=False"),
]


@pytest.mark.parametrize(("source", "target", "message"), OTHERS)
def test_state_of_another_optimizer_does_not_fit(source: Any, target: Any, message: str) -> None:
    checkpoint = saved_by(source)
    model = make_model()
    optimizer = target(model.parameters())
    groups = copy.deepcopy([{**g, "params": []} for g in optimizer.param_groups])
    with pytest.raises(IncompatibleError, match=rf"optim\.param_groups\.0: .*{message}"):
        load(checkpoint, {"model": model, "optim": optimizer})
    assert equal([{**g, "params": []} for g in optimizer.param_groups], groups)
    with pytest.raises(IncompatibleError, match=r"exclude all of it \('optim'\)"):
        load(checkpoint, {"model": model, "optim": optimizer}, exclude="optim.param_groups")
    load(checkpoint, {"model": model, "optim": optimizer}, strict=False)
    load(checkpoint, {"model": model, "optim": target(model.parameters())}, exclude="optim")


def test_what_does_not_fit_of_an_optimizer_is_told_with_all_other_problems() -> None:
    checkpoint = saved_by(torch.optim.Adagrad)
    model = make_model()
    state = {"model": model, "optim": sgd(model.parameters()), "more": torch.ones(1)}
    with pytest.raises(IncompatibleError, match=r"without momentum[^\n]*\n[^\n]*lacks more"):
        load(checkpoint, state)


def test_optimizers_of_parts_load_into_that_of_the_whole_by_the_rename_of_the_how_to() -> None:
    parts = [nn.ModuleDict({name: nn.Linear(2, 2)}) for name in ("a", "b")]
    optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]
    for part, optimizer in zip(parts, optimizers, strict=True):
        for parameter in part.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
    checkpoint = save({"model": parts, "optim": optimizers})
    whole = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("a", "b")})
    one = torch.optim.AdamW(whole.parameters())
    load(
        checkpoint,
        {"model": whole, "optim": one},
        rename={"optim.{i}.state.*": "optim.state.*"},
        exclude=["optim.param_groups*", "optim.*.param_groups*"],
    )
    theirs = [entries for each in optimizers for entries in each.state.values()]
    for old, new in zip(theirs, one.state.values(), strict=True):
        assert torch.equal(old["exp_avg"], new["exp_avg"])


def test_only_the_groups_of_state_that_is_loaded_have_to_fit() -> None:
    checkpoint = saved_by(lambda p: torch.optim.AdamW([*p], lr=torch.tensor(0.1)))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    load(checkpoint, {"model": model, "optim": optimizer}, exclude="optim.*")
    same = torch.optim.AdamW(model.parameters(), lr=0.2)
    binding = load(checkpoint, {"model": model, "optim": same}, exclude="optim.param_groups")
    assert same.param_groups[0]["lr"] == 0.2
    assert not any("param_groups" in name for name in binding.restored)
    train(model, same, 1)


def test_it_does_not_fit_through_a_wrapper_without_hyperparameters_of_its_own() -> None:
    checkpoint = saved_by(torch.optim.AdamW)
    model = make_model()
    optimizer = post_local_sgd(sgd(model.parameters()))
    with pytest.raises(IncompatibleError, match="without momentum, dampening"):
        load(checkpoint, {"model": model, "optim": optimizer}, exclude="optim.step")


def test_how_a_step_is_computed_and_what_schedulers_add_may_differ() -> None:
    for saver, loader in ((False, True), (True, False)):
        model = make_model()
        optimizer = adamw(model, foreach=saver, amsgrad=saver, maximize=saver)
        if saver:
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
        checkpoint = save({"model": model, "optim": optimizer})
        other = make_model()
        mine = adamw(other, foreach=loader)
        if loader:
            torch.optim.lr_scheduler.OneCycleLR(mine, 1.0, total_steps=10)
        load(checkpoint, {"model": other, "optim": mine})
        assert mine.param_groups[0]["amsgrad"] is saver


def test_a_switch_that_was_not_known_at_the_save_stays_as_it_is() -> None:
    model = make_model()
    optimizer = adamw(model)
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    checkpoint = save({"model": model, "optim": optimizer})
    mine = adamw(model)
    load(checkpoint, {"model": model, "optim": mine})
    assert mine.param_groups[0]["decoupled_weight_decay"] is True


# --- other groups than saved -----------------------------------------------------------------


def in_groups(model: nn.Module, *groups: tuple[list[int], float], lr: Any = 0.5) -> Optimizer:
    """Make an optimizer with the parameters of these numbers, and a weight decay, in each group."""
    params = list(model.parameters())
    return torch.optim.AdamW(
        [{"params": [params[n] for n in ns], "weight_decay": decay} for ns, decay in groups], lr=lr
    )


def regrouped(
    before: tuple[tuple[list[int], float], ...], after: tuple[tuple[list[int], float], ...]
) -> list[tuple[float, float]]:
    model = make_model()
    optimizer = in_groups(model, *before)
    train(model, optimizer, 1)
    checkpoint = save({"model": model, "optim": optimizer})
    other = make_model()
    mine = in_groups(other, *after, lr=0.1)
    load(checkpoint, {"model": other, "optim": mine})
    for new, old in zip(other.parameters(), model.parameters(), strict=True):
        assert equal(dict(mine.state[new]), dict(optimizer.state[old]))
    return [(group["lr"], group["weight_decay"]) for group in mine.param_groups]


def test_one_group_loads_into_two_and_two_that_agree_into_one() -> None:
    assert regrouped((([0, 1, 2], 0.3),), (([0], 0.0), ([2, 1], 0.0))) == [(0.5, 0.3)] * 2
    assert regrouped((([0], 0.3), ([1, 2], 0.3)), (([1, 0, 2], 0.0),)) == [(0.5, 0.3)]
    assert regrouped((([0], 0.2), ([1, 2], 0.3)), (([2, 1], 0.0), ([0], 0.0))) == [
        (0.5, 0.3),
        (0.5, 0.2),
    ]


def test_groups_that_differ_do_not_become_one() -> None:
    message = (
        r"optim\.param_groups\.0: its parameters were saved in optim\.param_groups\.0 and in "
        r"optim\.param_groups\.1, which differ in 'weight_decay' \(0\.2 and 0\.3\)"
    )
    with pytest.raises(IncompatibleError, match=message):
        regrouped((([0], 0.2), ([1, 2], 0.3)), (([0, 1, 2], 0.0),))


def test_hyperparameters_that_are_tensors_are_not_compared() -> None:
    model = make_model()
    optimizer = in_groups(model, ([0], 0.3), ([1, 2], 0.3), lr=torch.tensor(0.5))
    checkpoint = save({"model": model, "optim": optimizer})
    mine = in_groups(model, ([0, 1, 2], 0.3))
    with pytest.raises(IncompatibleError, match=r"optim\.param_groups\.0\.lr is a tensor"):
        load(checkpoint, {"model": model, "optim": mine})
    split = in_groups(model, ([0], 0.3), ([1], 0.3), ([2], 0.3))
    load(checkpoint, {"model": model, "optim": split})
    rates = [group["lr"] for group in split.param_groups]
    assert equal(rates, [torch.tensor(0.5)] * 3)
    rates[1].fill_(0.1)
    assert rates[2] == 0.5


def test_a_group_of_new_parameters_is_missing_and_keeps_its_own() -> None:
    model = make_model()
    first, *rest = model.parameters()
    saved = torch.optim.SGD([{"params": [first], "lr": 1.0}], lr=1.0)
    checkpoint = save({"model": model, "optim": saved})
    mine = torch.optim.SGD([{"params": rest, "lr": 3.0}, {"params": [first], "lr": 4.0}])
    with pytest.raises(IncompatibleError, match=r"lacks optim\.param_groups\.0"):
        load(checkpoint, {"model": model, "optim": mine})
    binding = load(checkpoint, {"model": model, "optim": mine}, strict=False)
    assert binding.missing == ("optim.param_groups.0",)
    assert [group["lr"] for group in mine.param_groups] == [3.0, 1.0]


# --- names -----------------------------------------------------------------------------------


def test_a_checkpoint_loads_once_its_component_holds_another_module() -> None:
    model, more = make_model(), nn.Linear(2, 2)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    checkpoint = save({"model": {"net": model}, "optim": optimizer})
    other = make_model()
    mine = torch.optim.AdamW([*other.parameters(), *more.parameters()])
    state = {"model": {"net": other, "more": more}, "optim": mine}
    binding = load(checkpoint, state, strict=False)
    assert binding.missing == ("model.more.weight", "model.more.bias")
    for new, old in zip(other.parameters(), model.parameters(), strict=True):
        assert equal(dict(mine.state[new]), dict(optimizer.state[old]))


def test_names_as_in_the_module_alone_are_found_unless_two_parameters_share_one() -> None:
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    named = dict(model.named_parameters())
    checkpoint = save({"net": model, "optim": Named(optimizer, named)})
    other = make_model()
    mine = adamw(other)
    load(checkpoint, {"net": other, "optim": mine})
    assert equal(told(mine), told(optimizer))
    twin = make_model()
    both = torch.optim.AdamW([*other.parameters(), *twin.parameters()])
    binding = load(checkpoint, {"net": other, "twin": twin, "optim": both}, strict=False)
    assert not both.state
    assert "optim.state.0.weight.exp_avg" in binding.unrequested
