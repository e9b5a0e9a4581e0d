"""A load converts what torch converts in `load_state_dict`: compared with it bit for bit."""

from __future__ import annotations

import copy
import cProfile
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import Optimizer

from dist_ckpt.core.state.optimizer_state import find_lost_counters
from dist_ckpt.errors import CheckpointError, IncompatibleError
from in_memory import load, save
from wrapped_optimizers import Delegating, SlowWeightsWithin, ZeroRedundancyOptimizer

SWITCHES = (
    "amsgrad",
    "capturable",
    "centered",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "maximize",
    "nesterov",
)
COUNTERS = ("step", "eta", "mu", "mu_product")
CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
]


class Sparse(nn.Module):
    """A model whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, sparse=True)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.embed(torch.tensor([0, 3]))
        return rows


def make_model(cls: type[Optimizer], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if cls.__name__ == "SparseAdam":
        return Sparse()
    bias = cls.__name__ != "Muon"
    return nn.Sequential(nn.Linear(4, 3, bias=bias), nn.Tanh(), nn.Linear(3, 2, bias=False))


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        torch.manual_seed(seed + step)
        inputs = torch.randn(5, 4, dtype=next(model.parameters()).dtype)

        def loss(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = model(inputs).pow(2).sum()
            value.backward()
            return value

        optimizer.step(loss)


def variants() -> Iterator[Any]:
    for cls in CLASSES:
        takes = inspect.signature(cls).parameters
        for name in ("", *(name for name in SWITCHES if name in takes)):
            options: dict[str, Any] = {name: True} if name else {}
            if cls is torch.optim.LBFGS:
                options["max_iter"] = 2
            if name == "nesterov" or (not name and cls is torch.optim.SGD):
                options["momentum"] = 0.9
            yield pytest.param(cls, options, id=f"{cls.__name__}-{name or 'plain'}")


def trained(cls: Any, options: dict[str, Any]) -> tuple[nn.Module, Any, bool]:
    """Return a model, its optimizer with state, and True if the optimizer can step on a CPU."""
    model = make_model(cls)
    optimizer = cls(model.parameters(), lr=0.01, **options)
    try:
        train(model, optimizer, 3)
    except (RuntimeError, AssertionError):  # of capturable and differentiable steps
        plain = cls(model.parameters(), lr=0.01)
        train(model, plain, 3)
        optimizer.state.update(plain.state)
        return model, optimizer, False
    return model, optimizer, True


def with_numbers(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose counters are numbers, as torch before 1.12 has written them."""
    result = copy.deepcopy(state_dict)
    for entries in result["state"].values():
        for key in COUNTERS:
            if key in entries:
                number = float(entries[key])
                entries[key] = int(number) if key == "step" else number
    return result


def without_switches(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict without options that a torch before 1.12 did not have."""
    result = with_numbers(state_dict)
    for group in result["param_groups"]:
        for name in SWITCHES:
            group.pop(name, None)
    return result


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        return alike and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def equal_where_torch_sets(ours: Any, torchs: Any) -> bool:
    """Compare state dicts. An option that torch would lack keeps its current value here."""
    for group, reference in zip(ours["param_groups"], torchs["param_groups"], strict=True):
        assert group.keys() >= reference.keys()
        if not equal({key: group[key] for key in reference}, reference):
            return False
    return equal(ours["state"], torchs["state"])


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("cls", "options"), [*variants()])
def test_a_torch_state_dict_loads_as_torch_loads_it(cls: Any, options: dict[str, Any]) -> None:
    model, optimizer, can_step = trained(cls, options)
    unstepped = cls(model.parameters(), lr=0.01, **options)
    for source in (optimizer, unstepped):
        for convert in (copy.deepcopy, with_numbers, without_switches):
            for steps_before in (0, 2) if can_step else (0,):
                state_dict = convert(source.state_dict())
                compare(cls, options, model, state_dict, steps_before, can_step=can_step)


def compare(
    cls: Any,
    options: dict[str, Any],
    model: nn.Module,
    state_dict: dict[str, Any],
    steps_before: int,
    *,
    can_step: bool,
) -> None:
    """Load a state dict here and by torch, and compare the optimizers and their next steps."""
    checkpoint = save({"model": model.state_dict(), "optim": copy.deepcopy(state_dict)})

    pairs = []
    for _ in range(2):
        other = make_model(cls, seed=1)
        mine = cls(other.parameters(), lr=0.5, **options)
        train(other, mine, steps_before, seed=50)
        pairs.append((other, mine))
    (other, mine), (reference, torchs) = pairs
    reference.load_state_dict(model.state_dict())
    torchs.load_state_dict(state_dict)
    load(checkpoint, {"model": other, "optim": mine})
    assert equal_where_torch_sets(mine.state_dict(), torchs.state_dict())

    is_complete = all(
        mine_group.keys() == group.keys()
        for mine_group, group in zip(mine.param_groups, torchs.param_groups, strict=True)
    )
    if is_complete and can_step:
        train(other, mine, 2, seed=100)
        train(reference, torchs, 2, seed=100)
        assert equal(other.state_dict(), reference.state_dict())
        assert equal(mine.state_dict(), torchs.state_dict())


def old_checkpoint(cls: Any = torch.optim.AdamW) -> tuple[Any, dict[str, Any]]:
    model = make_model(cls)
    optimizer = cls(model.parameters(), lr=0.01)
    train(model, optimizer, 3)
    state_dict = with_numbers(optimizer.state_dict())
    return save({"model": model.state_dict(), "optim": copy.deepcopy(state_dict)}), state_dict


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.ASGD, torch.optim.NAdam])
def test_numbers_become_tensors_of_the_default_dtype(cls: Any) -> None:
    checkpoint, state_dict = old_checkpoint(cls)
    torch.set_default_dtype(torch.float64)
    try:
        model = make_model(cls).float()
        mine, torchs = (cls(model.parameters(), lr=0.1) for _ in range(2))
        load(checkpoint, {"model": model, "optim": mine})
        torchs.load_state_dict(state_dict)
    finally:
        torch.set_default_dtype(torch.float32)
    assert mine.state[next(model.parameters())]["step"].dtype == torch.float64
    assert equal(mine.state_dict(), torchs.state_dict())


@pytest.mark.parametrize("switch", ["fused", "capturable"])
@pytest.mark.parametrize("step", [torch.tensor(3.0, dtype=torch.float64), torch.tensor(3)])
def test_a_step_that_is_computed_on_the_device_is_float32_there(
    switch: str, step: torch.Tensor
) -> None:
    cls: Any = torch.optim.Adam
    model = make_model(cls)
    optimizer = cls(model.parameters(), **{switch: True})
    state = {key: torch.ones(3, 4) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[next(model.parameters())] = {"step": step, **state}
    state_dict = copy.deepcopy(optimizer.state_dict())
    checkpoint = save({"model": model, "optim": optimizer})
    other = make_model(cls)
    mine, torchs = (cls(other.parameters(), **{switch: True}) for _ in range(2))
    load(checkpoint, {"model": other, "optim": mine})
    torchs.load_state_dict(state_dict)
    assert mine.state[next(other.parameters())]["step"].dtype == torch.float32
    assert equal(mine.state_dict(), torchs.state_dict())


@pytest.mark.parametrize("wrap", [Delegating, SlowWeightsWithin])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_wrapped_optimizer_converts_by_its_own_method(wrap: Any, steps_before: int) -> None:
    model = make_model(torch.optim.AdamW)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
    train(model, optimizer, 3)
    state_dict = with_numbers(optimizer.state_dict())
    checkpoint = save({"model": model.state_dict(), "optim": copy.deepcopy(state_dict)})
    pairs = []
    for _ in range(2):
        other = make_model(torch.optim.AdamW, seed=1)
        mine = wrap(torch.optim.AdamW(other.parameters(), lr=0.1))
        train(other, mine, steps_before)
        pairs.append((other, mine))
    (other, mine), (_, torchs) = pairs
    load(checkpoint, {"model": other, "optim": mine})
    torchs.load_state_dict(state_dict)
    assert torch.is_tensor(mine.state_dict()["state"][0]["step"])
    assert equal(mine.state_dict(), torchs.state_dict())


class CallCounter(torch.optim.AdamW):
    """Counts the calls of `__setstate__`, and keeps what it has got."""

    calls: ClassVar[list[Any]] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.calls.append({**state, "names": [len(entries) for entries in state["state"].values()]})
        super().__setstate__(state)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_the_class_converts_once_and_when_its_state_is_complete(steps_before: int) -> None:
    model = make_model(CallCounter)
    optimizer = CallCounter(model.parameters())
    train(model, optimizer, 3)
    checkpoint = save({"model": model, "optim": optimizer, "epoch": 1})
    train(model, optimizer, steps_before)
    mine = CallCounter(model.parameters(), lr=0.5)
    CallCounter.calls = []
    load(checkpoint, {"model": model, "optim": mine, "epoch": 0})
    assert [(call.keys(), call["names"]) for call in CallCounter.calls] == [
        ({"state", "param_groups", "names"}, [3, 3, 3])
    ]
    assert CallCounter.calls[0]["param_groups"][0]["lr"] == 0.001
    CallCounter.calls = []
    load(checkpoint, {"model": model, "epoch": 0}, exclude="optim")
    binding = load(checkpoint, {"model": model, "optim": mine, "epoch": 0}, exclude="optim")
    assert not CallCounter.calls
    assert "optim.param_groups.0" not in binding.restored


def test_state_that_a_pattern_cuts_is_not_converted() -> None:
    checkpoint, _ = old_checkpoint()
    model = make_model(torch.optim.AdamW)
    optimizer = torch.optim.AdamW(model.parameters())
    load(checkpoint, {"model": model, "optim": optimizer}, exclude="optim.state.*.step")
    assert all(entries.keys() == {"exp_avg", "exp_avg_sq"} for entries in optimizer.state.values())


def test_state_of_another_class_may_lack_what_the_class_converts() -> None:
    model = make_model(torch.optim.SGD)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    train(model, sgd, 1)
    checkpoint = save({"model": model, "optim": sgd})
    adam = torch.optim.Adam(model.parameters())
    load(checkpoint, {"model": model, "optim": adam}, strict=False)
    buffers = [{"momentum_buffer": entries["momentum_buffer"]} for entries in sgd.state.values()]
    assert equal([*adam.state.values()], buffers)


class Strict(torch.optim.AdamW):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        raise ValueError("no")


def test_an_error_of_the_class_is_named() -> None:
    model = make_model(Strict)
    optimizer = Strict(model.parameters())
    checkpoint = save({"model": model, "optim": optimizer})
    with pytest.raises(CheckpointError, match=r"optim: __setstate__ of Strict raised ValueError"):
        load(checkpoint, {"model": model, "optim": optimizer})


def test_a_switch_that_was_not_saved_takes_the_default_of_the_class() -> None:
    model = make_model(torch.optim.AdamW)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    state_dict = without_switches(optimizer.state_dict())
    checkpoint = save({"model": model.state_dict(), "optim": copy.deepcopy(state_dict)})
    other = make_model(torch.optim.AdamW)
    mine = torch.optim.AdamW(other.parameters(), amsgrad=True)
    load(checkpoint, {"model": other, "optim": mine})
    assert mine.param_groups[0]["amsgrad"] is False
    assert mine.param_groups[0]["decoupled_weight_decay"] is True
    train(other, mine, 1)
    kept = torch.optim.AdamW(other.parameters(), maximize=True)
    load(checkpoint, {"model": other, "optim": kept}, exclude="optim.param_groups.*.maximize")
    assert kept.param_groups[0]["maximize"] is True


def test_state_saved_as_none_replaces_a_tensor() -> None:
    """Torch before 2 saved None as the momentum of an SGD without momentum."""
    model = make_model(torch.optim.SGD)
    saved = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state_dict = copy.deepcopy(saved.state_dict())
    state_dict["state"] = {number: {"momentum_buffer": None} for number in range(3)}
    checkpoint = save({"model": model.state_dict(), "optim": copy.deepcopy(state_dict)})
    for steps_before in (0, 2):
        mine, torchs = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in "12")
        train(model, mine, steps_before)
        load(checkpoint, {"model": model, "optim": mine})
        torchs.load_state_dict(state_dict)
        assert equal(mine.state_dict(), torchs.state_dict())


class Counting(Optimizer):
    """Counts steps as Python numbers, as some forks of torch's classes do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1


def test_a_counter_loads_as_it_was_saved_into_a_class_that_does_not_convert() -> None:
    model = make_model(Counting)
    for step in (torch.tensor(4.0), 4):
        optimizer = Counting(model.parameters())
        for parameter in model.parameters():
            optimizer.state[parameter]["step"] = step
        state_dict = copy.deepcopy(optimizer.state_dict())
        checkpoint = save({"model": model, "optim": optimizer})
        for before in (None, 7, torch.tensor(7.0)):
            mine, torchs = Counting(model.parameters()), Counting(model.parameters())
            for parameter in model.parameters() if before is not None else ():
                mine.state[parameter]["step"] = copy.deepcopy(before)
            load(checkpoint, {"model": model, "optim": mine})
            torchs.load_state_dict(state_dict)
            assert equal(mine.state_dict(), torchs.state_dict())


def test_a_matrix_is_not_replaced_by_a_number() -> None:
    model = make_model(Counting)
    optimizer = Counting(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter]["step"] = 3
    checkpoint = save({"model": model, "optim": optimizer})
    for parameter in model.parameters():
        optimizer.state[parameter]["step"] = torch.ones(2)
    with pytest.raises(IncompatibleError, match=r"0\.weight\.step: saved as a value"):
        load(checkpoint, {"model": model, "optim": optimizer})


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3.0)])
@pytest.mark.parametrize("fused", [False, True])
def test_state_over_dtensors_is_converted(step: Any, fused: bool) -> None:
    model = make_model(torch.optim.AdamW)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    train(model, optimizer, 2)
    for entries in optimizer.state.values():
        entries["step"] = step
    state_dict = copy.deepcopy(optimizer.state_dict())
    checkpoint = save({"model": model, "optim": optimizer})
    for steps_before in (0, 1):
        mine, torchs = (torch.optim.AdamW(model.parameters(), fused=fused) for _ in range(2))
        train(model, mine, steps_before)
        load(checkpoint, {"model": model, "optim": mine})
        torchs.load_state_dict(state_dict)
        for ours, theirs in zip(mine.state.values(), torchs.state.values(), strict=True):
            assert equal(ours["step"], theirs["step"])
            assert torch.equal(ours["exp_avg"].full_tensor(), theirs["exp_avg"].full_tensor())
        train(model, mine, 1)


@pytest.mark.usefixtures("one_rank")
def test_the_inner_optimizer_of_a_partition_converts() -> None:
    checkpoint, state_dict = old_checkpoint()
    model = make_model(torch.optim.AdamW)
    zero: Any = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.5
    )
    load(checkpoint, {"model": model, "optim": zero})
    torchs = torch.optim.AdamW(model.parameters())
    torchs.load_state_dict(state_dict)
    assert equal([*zero.optim.state.values()], [*torchs.state.values()])
    assert [zero.param_groups[0]["lr"], zero.optim.param_groups[0]["lr"]] == [0.01] * 2
    train(model, zero, 1)
    # A switch that was not saved takes the default of the class, in the outer groups too.
    checkpoint = save({"model": model.state_dict(), "optim": without_switches(state_dict)})
    for groups in (zero.param_groups, zero.optim.param_groups):
        groups[0]["amsgrad"] = True
    load(checkpoint, {"model": model, "optim": zero})
    assert zero.param_groups[0]["amsgrad"] is zero.optim.param_groups[0]["amsgrad"] is False


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_an_optimizer_over_flat_parameters_is_converted(use_orig_params: bool) -> None:
    model = make_model(torch.optim.AdamW)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 3)
    for entries in optimizer.state.values():
        entries["step"] = 3
    checkpoint = save({"model": model, "optim": optimizer})
    wrapped = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    mine = torch.optim.AdamW(wrapped.parameters(), lr=0.5)
    load(checkpoint, {"model": wrapped, "optim": mine})
    assert all(equal(entries["step"], torch.tensor(3.0)) for entries in mine.state.values())
    assert mine.state
    train(wrapped, mine, 1)


def count_calls(num_groups: int) -> int:
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(num_groups)])
    groups = [{"params": [parameter]} for parameter in model]
    optimizer = torch.optim.AdamW(groups)
    for parameter in model:
        moments = {key: torch.ones(2) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    checkpoint = save({"model": model.state_dict(), "optim": optimizer.state_dict()})
    mine = torch.optim.AdamW([{"params": [parameter]} for parameter in model])
    profile = cProfile.Profile()
    profile.enable()
    checkpoint.bind({"model": model, "optim": mine})
    profile.disable()
    assert not checkpoint.bind({"model": model, "optim": mine}).problems
    return sum(entry.callcount for entry in profile.getstats())


def test_a_group_for_each_parameter_costs_the_same_for_each() -> None:
    count_calls(1)  # what is cached
    assert count_calls(400) < 11 * count_calls(40)


# --- counters in groups, master weights, and weights that were tied --------------------------


class ScheduleFree(Optimizer):
    """Keeps counters in its groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"]
            for parameter in group["params"]:
                self.state[parameter]["z"] = parameter.detach().clone()


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Delegating])
def test_counters_in_groups_that_a_load_leaves_out_are_a_warning(wrap: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = wrap(ScheduleFree(model.parameters()))
    train_step(optimizer)
    checkpoint = save({"model": model, "optim": optimizer})
    mine = wrap(ScheduleFree(model.parameters(), lr=0.5))
    binding = load(checkpoint, {"model": model, "optim": mine}, exclude="optim.param_groups")
    (warning,) = binding.warnings
    assert "are k, weight_sum, which ScheduleFree keeps there" in warning
    binding = load(checkpoint, {"model": model, "optim": mine}, exclude="optim.param_groups.*.lr")
    assert not binding.warnings
    (group,) = mine.param_groups
    assert (group["lr"], group["k"], group["weight_sum"]) == (0.5, 1, 0.1)


def train_step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    getattr(optimizer, "optimizer", optimizer).step()


def test_only_numbers_in_groups_are_counters() -> None:
    optimizer = ScheduleFree([torch.ones(2)])
    saved = {"k": 3, "order": [1.0, 2.0], "lr": 0.5}
    text = find_lost_counters(optimizer, saved, {"k": 0, "order": torch.ones(2), "lr": 0.1})
    assert text is not None
    assert text.startswith("k, which ScheduleFree keeps there")


def test_options_that_a_load_leaves_out_are_no_warning() -> None:
    model = make_model(torch.optim.AdamW)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
    train(model, optimizer, 2)
    checkpoint = save({"model": model, "optim": optimizer})
    mine = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.3)
    torch.optim.lr_scheduler.OneCycleLR(mine, 2.0, total_steps=10)
    binding = load(checkpoint, {"model": model, "optim": mine}, exclude="optim.param_groups")
    assert not binding.warnings


@pytest.mark.parametrize("kind", [dict, list])
def test_master_weights_in_a_container_name_the_state_of_their_optimizer(kind: Any) -> None:
    def make(value: float) -> Any:
        model = nn.Linear(3, 2).bfloat16()
        named = {
            name: p.detach().float().fill_(value).requires_grad_()
            for name, p in model.named_parameters()
        }
        masters = named if kind is dict else [*named.values()]
        optimizer = torch.optim.AdamW(named.values())
        return {"model": model, "masters": masters, "optim": optimizer}

    state, other = make(1.0), make(2.0)
    train_step(state["optim"])
    checkpoint = save(state)
    name = "weight" if kind is dict else "0"
    assert f"optim.state.masters.{name}.exp_avg" in checkpoint.catalog.tensors
    load(checkpoint, other)
    key = "weight" if kind is dict else 0
    for one, two in ((state, other),):
        first, second = one["masters"][key], two["masters"][key]
        assert equal(dict(one["optim"].state[first]), dict(two["optim"].state[second]))
        assert torch.equal(first, second)


def test_a_tied_parameter_with_state_is_no_assumption() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_step(optimizer)
    checkpoint = save({"first": {"w": model.weight}, "model": model, "optim": optimizer})
    live = nn.Linear(2, 2)
    mine = torch.optim.SGD(live.parameters(), lr=0.1, momentum=0.9)
    state = {"first": {"w": torch.zeros(2, 2)}, "model": live, "optim": mine}
    assert not load(checkpoint, state).assumed
    assert equal([*mine.state.values()], [*optimizer.state.values()])


def test_a_parameter_that_was_tied_is_said_to_have_no_state() -> None:
    def make(*, tied: bool) -> Any:
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        if tied:
            model["b"].weight = model["a"].weight
        return {"model": model, "optim": torch.optim.AdamW(model.parameters())}

    state = make(tied=True)
    train_step(state["optim"])
    checkpoint = save(state)
    binding = load(checkpoint, make(tied=False))
    assert any("model.b.weight was tied to model.a.weight" in text for text in binding.assumed)
    assert not any("was tied" in text for text in load(checkpoint, make(tied=True)).assumed)


class WithMode(torch.optim.SGD):
    """Keeps a mode in its groups, as schedule-free optimizers do: no argument, but state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in (self.defaults, *self.param_groups):
            group["train_mode"] = False

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True


class AnyOptions(Optimizer):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)


def test_a_mode_that_a_class_keeps_in_its_groups_may_be_off_in_the_checkpoint() -> None:
    # Schedule-free optimizers are saved after `eval()`, and loaded also after `train()`.
    model, live = make_model(WithMode), make_model(WithMode, 1)
    saved, optimizer = WithMode(model.parameters()), WithMode(live.parameters())
    optimizer.train()

    load(save({"m": model, "o": saved}), {"m": live, "o": optimizer})

    assert optimizer.param_groups[0]["train_mode"] is False
    assert optimizer.state_dict() == saved.state_dict()


def test_a_switch_of_a_class_that_takes_any_options_is_compared() -> None:
    model = make_model(AnyOptions)
    content = save({"m": model, "o": AnyOptions(model.parameters(), lr=0.1, has_ema=False)})
    optimizer = AnyOptions(model.parameters(), lr=0.1, has_ema=True)

    with pytest.raises(IncompatibleError, match="saved with has_ema=False"):
        load(content, {"m": model, "o": optimizer})
