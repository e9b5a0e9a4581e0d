"""FSDP1 (`FullyShardedDataParallel`): saved and loaded as the parts of parameters that it keeps.

What torch itself gathers out of a model and an optimizer is the judge: it must be the same to the
last bit before a save and after a load into any other cut.
"""

from __future__ import annotations

import zlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import dist_ckpt as dc
from dist_ckpt.core.runtime.torch_private import ShardedTensor
from long_mode import sample
from ranks import run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(3)]

CPU = torch.device("cpu")
# How the model is cut: by FSDP1 with a strategy and `use_orig_params`, or otherwise.
FSDP1 = ("FULL_SHARD orig", "FULL_SHARD flat")
OTHERS = ("SHARD_GRAD_OP orig", "NO_SHARD orig", "NO_SHARD flat", "INSIDE flat")


class Counted(nn.Module):
    """A linear layer with extra state, and buffers of which one is in no state dict."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        with torch.no_grad():
            self.mean += y.mean(0)
        self.calls += 1
        return y

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Net(nn.Module):
    """No size divides evenly; two layers are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = Counted()
        self.middle: nn.Module = nn.Linear(7, 11)
        self.last = nn.Linear(11, 3)
        self.tied = nn.Linear(11, 3, bias=False)
        self.tied.weight = self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.middle(self.first(x))
        z: torch.Tensor = self.last(y).add(self.tied(y))
        return z


def wrap(model: nn.Module, cut: str, **options: Any) -> nn.Module:
    if cut == "plain":
        return model
    if cut == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model.first, model.middle):
            fully_shard(part, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh)
        return model
    strategy, kind = cut.split()
    if strategy == "INSIDE":
        model.first = wrap(model.first, f"FULL_SHARD {kind}")  # type: ignore[arg-type]
        return model
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({Counted}))
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=kind == "orig",
        device_id=CPU,
        **options,
    )


def make(
    cut: str, kind: str = "adamw", net: nn.Module | None = None, **options: Any
) -> dict[str, Any]:
    model = wrap(net or Net(), cut, **options)
    optimizer: torch.optim.Optimizer
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return {"model": model, "optim": optimizer}


def train(state: dict[str, Any], steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        state["model"](torch.randn(4, 5)).pow(2).sum().backward()
        state["optim"].step()
        state["optim"].zero_grad()
    state["optim"].param_groups[0]["lr"] = 0.125


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """Return a digest of each tensor, as torch gathers it, and the plain values."""
    options = StateDictOptions(full_state_dict=True)
    optim: Any = get_optimizer_state_dict(state["model"], state["optim"], options=options)
    if isinstance(state["model"], FSDPModule):
        module: Any = state["model"]
        model = get_model_state_dict(module, options=options)
    else:
        model = state["model"].state_dict()
    found: dict[str, Any] = {f"model.{name}": digest(value) for name, value in model.items()}
    for name, entries in optim["state"].items():
        found |= {f"{name}.{key}": digest(value) for key, value in entries.items()}
    found["lr"] = [group["lr"] for group in state["optim"].param_groups]
    return found


def digest(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return str(value.dtype), tuple(value.shape), zlib.crc32(data)


# --- every cut into every other ------------------------------------------------------------------


def save_all(rank: int, folder: str, cuts: list[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    found = {}
    for cut in cuts:
        for kind in ("adamw", "sgd") if cut in FSDP1 or cut == "plain" else ("adamw",):
            state = make(cut, kind)
            train(state)
            dc.save(state, f"{folder}/{cut} {kind}", step=1)
            found[f"{cut} {kind}"] = whole(state)
    return found


def load_all(rank: int, folder: str, pairs: list[tuple[str, str]]) -> dict[Any, Any]:
    torch.manual_seed(1 + rank)
    found = {}
    for cut, name in pairs:
        state = make(cut, name.split()[-1])
        dc.load(state, f"{folder}/{name}")
        found[cut, name] = whole(state)
    return found


def test_every_cut_of_fsdp1_loads_into_every_other_bit_for_bit(tmp_path: Path):
    cuts = [*FSDP1, *OTHERS, "fsdp2"]
    saved = run_ranks(save_all, str(tmp_path), cuts, world_size=2, timeout_s=120)[0]
    saved |= run_ranks(save_all, str(tmp_path), ["plain"], world_size=1, timeout_s=120)[0]
    targets: list[tuple[int, list[str]]] = [
        (3, [*FSDP1, "fsdp2"]),
        (2, [*OTHERS]),
        (1, ["plain", "FULL_SHARD flat"]),
    ]
    for world_size, into in targets:
        pairs = [*sample([*product(into, saved)], 5)]
        loaded = run_ranks(load_all, str(tmp_path), pairs, world_size=world_size, timeout_s=200)
        for rank, found in enumerate(loaded):
            for (cut, name), values in found.items():
                assert values == saved[name], f"{name} into {cut} on rank {rank} of {world_size}"


# --- what else a model may be, and when it may be saved and loaded -------------------------------


def resume_at_all(rank: int, folder: str, cut: str) -> dict[str, list[Any]]:
    moments = ("new", "after a step", "after a forward", "after an evaluation")
    return {when: resume(folder, cut, when) for when in moments}


def resume(folder: str, cut: str, when: str) -> list[Any]:
    """Save at some moment, load into a state at the same moment; then both train on alike."""
    torch.manual_seed(0)
    first, second = make(cut), make(cut)
    if when != "new":
        train(first)
        train(second, steps=1)
        for state in (first, second):
            reach(state["model"], when)
    dc.save(first, f"{folder}/{when}", step=1)
    dc.load(second, f"{folder}/{when}")
    same = [output(state["model"]) for state in (first, second)]
    same += [whole(state) for state in (first, second)]
    for state in (first, second):
        train(state, steps=1)
    return [*same, whole(first), whole(second)]


def reach(model: nn.Module, when: str) -> None:
    if when == "after a forward":
        model(torch.ones(4, 5))
    if when == "after an evaluation":
        with torch.no_grad():
            model.eval()(torch.ones(4, 5))
        model.train()


def output(model: nn.Module) -> Any:
    with torch.no_grad():
        return digest(model(torch.full((4, 5), 2.0)))


@pytest.mark.parametrize("cut", ["SHARD_GRAD_OP orig", "SHARD_GRAD_OP flat"])
def test_fsdp1_is_saved_and_loaded_at_any_moment_between_steps(tmp_path: Path, cut: str):
    for moments in run_ranks(resume_at_all, str(tmp_path), cut, world_size=2):
        for when, found in moments.items():
            for one, other in zip(found[::2], found[1::2], strict=True):
                assert one == other, when


def nest(rank: int, folder: str) -> list[Any]:
    """Put FSDP1 under and over other wrappers; return the names that a plain model has as well."""
    torch.manual_seed(0)
    plain = Net()
    dc.save({"model": plain}, f"{folder}/plain", step=1)
    found = []
    for number, nested in enumerate((checkpointed(), compiled(), inside(), ignoring())):
        dc.load({"model": nested}, f"{folder}/plain")
        dc.save({"model": nested}, f"{folder}/{number}", step=1)
        back = Net()
        dc.load({"model": back}, f"{folder}/{number}")
        same = [
            torch.equal(a, b) for a, b in zip(plain.parameters(), back.parameters(), strict=True)
        ]
        found.append((sorted(dc.open(f"{folder}/{number}").tensors), all(same)))
    return [(sorted(dc.open(f"{folder}/plain").tensors), True), *found]


def checkpointed() -> nn.Module:
    model = Net()
    model.first = checkpoint_wrapper(model.first)
    model.middle = checkpoint_wrapper(wrap(model.middle, "FULL_SHARD flat"))
    return wrap(model, "FULL_SHARD orig", auto_wrap_policy=None)


def compiled() -> nn.Module:
    model: Any = torch.compile(wrap(Net(), "FULL_SHARD flat"), backend="eager")
    return model  # type: ignore[no-any-return]


def inside() -> nn.Module:
    return wrap(Net(), "INSIDE flat")


def ignoring() -> nn.Module:
    model = Net()
    return wrap(model, "FULL_SHARD flat", ignored_states=[model.middle.weight])


def test_fsdp1_among_other_wrappers_has_the_names_of_the_plain_model(tmp_path: Path):
    for found in run_ranks(nest, str(tmp_path), world_size=3):
        names, _ = found[0]
        assert "model.first.linear.weight" in names
        assert found == [(names, True)] * len(found)


def hybrid(rank: int, folder: str) -> list[Any]:
    torch.manual_seed(0)
    state = make("HYBRID_SHARD orig")
    train(state)
    dc.save(state, f"{folder}/hybrid", step=1)
    other = make("HYBRID_SHARD flat")
    dc.load(other, f"{folder}/hybrid")
    return [whole(state), whole(other)]


def test_replicas_of_a_hybrid_strategy_are_stored_once_and_loaded_on_all(tmp_path: Path):
    for one, other in run_ranks(hybrid, str(tmp_path), world_size=4):
        assert one == other


def mix(rank: int, folder: str) -> list[Any]:
    torch.manual_seed(0)
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    state = make("FULL_SHARD orig", mixed_precision=low)
    train(state)
    dc.save(state, f"{folder}/mixed", step=1)
    fresh = make("FULL_SHARD flat", mixed_precision=low)
    dc.load(fresh, f"{folder}/mixed")
    used = make("SHARD_GRAD_OP flat", mixed_precision=low)
    train(used, 1)
    dc.load(used, f"{folder}/mixed")
    tensors = dc.open(f"{folder}/mixed").tensors
    dtypes = sorted({record.dtype for record in tensors.values()})
    states = [whole(one) for one in (state, fresh, used)]
    return [dtypes, output(used["model"]), output(fresh["model"]), *states]


def test_mixed_precision_stores_the_full_precision_of_parameters_and_buffers(tmp_path: Path):
    for dtypes, used, fresh, *states in run_ranks(mix, str(tmp_path), world_size=2):
        assert dtypes == ["float32"]
        assert used == fresh
        assert states == [states[0]] * 3


# --- state dicts instead of objects --------------------------------------------------------------


def as_dicts(rank: int, folder: str) -> list[Any]:
    """Save what torch makes of FSDP1's objects, each kind of it; load it into blank ones."""
    torch.manual_seed(0)
    state = make("FULL_SHARD flat", net=line())
    train(state)
    model, optimizer = state["model"], state["optim"]
    made: dict[str, Any] = {
        "get_state_dict": dict(
            zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)
        )
    }
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            optim = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            made[kind.name] = {"model": model.state_dict(), "optim": optim}
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        made["LOCAL_STATE_DICT"] = {"model": model.state_dict()}
    found = []
    for name, dicts in made.items():
        dc.save(dicts, f"{folder}/{name}", step=1)
        before = {fqn: digest(local(value)) for fqn, value in dicts["model"].items()}
        with torch.no_grad():
            for value in dicts["model"].values():
                local(value).zero_()
        dc.load(dicts, f"{folder}/{name}")
        after = {fqn: digest(local(value)) for fqn, value in dicts["model"].items()}
        found.append((name, before == after))
    objects = make("FULL_SHARD orig", net=line())
    dc.load(objects, f"{folder}/get_state_dict")
    return [*found, ("into objects", whole(objects) == whole(state))]


def line() -> nn.Module:
    # Torch's own functions cannot name extra state in FSDP1.
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 11))


def local(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        return value.local_shards()[0].tensor if value.local_shards() else torch.empty(0)
    return value.to_local() if isinstance(value, DTensor) else value


def test_what_torch_makes_of_fsdp1_comes_back_as_the_dicts_that_it_is(tmp_path: Path):
    for found in run_ranks(as_dicts, str(tmp_path), world_size=2):
        assert all(same for _, same in found), found


# --- what is refused -----------------------------------------------------------------------------


class Own(nn.Linear):
    """A layer that has a say in its state dict."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)


def change(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    state_dict[f"{prefix}more"] = torch.ones(1)


class Averaging(torch.optim.SGD):
    """Tells a tensor for each parameter besides its state, as Lookahead does."""

    def state_dict(self) -> dict[str, Any]:
        slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        return {**super().state_dict(), "slow": slow}


def refuse(rank: int, folder: str) -> dict[str, str]:
    """Return what each call says that cannot be carried out."""
    torch.manual_seed(0)
    said = {}
    orig, flat = make("FULL_SHARD orig"), make("FULL_SHARD flat")
    train(orig)
    train(flat)

    def attempt(what: str, state: dict[str, Any], call: Any = dc.save) -> None:
        try:
            call(state, f"{folder}/{what}")
        except (dc.CheckpointError, TypeError, ValueError) as error:
            said[what] = str(error)

    def save(state: dict[str, Any], path: str) -> None:
        dc.save(state, path, step=1)

    with FullyShardedDataParallel.summon_full_params(orig["model"]):
        attempt("gathered", orig, save)
    attempt("loose", {"model": dict(orig["model"].named_parameters())}, save)
    attempt("without its module", {"optim": orig["optim"]}, save)
    names = [name for name, _ in orig["model"].named_parameters()]
    attempt("named", {"optim": dc.Named(orig["optim"], names)}, save)
    attempt("named flat", {**flat, "optim": dc.Named(flat["optim"], ["a", "b"])}, save)
    attempt("raw orig", {**orig, "optim": orig["optim"].state_dict()}, save)
    attempt("raw flat", {**flat, "optim": flat["optim"].state_dict()}, save)
    attempt("a part", {"model": orig["model"].module.middle}, save)
    attempt("twice", {**orig, "again": orig["model"]}, save)
    orig["optim"].state[orig["model"].middle.weight]["odd"] = torch.ones(2, 2)
    attempt("odd state", orig, save)
    attempt("further", {**orig, "optim": Averaging(orig["model"].parameters())}, save)
    moved = make("FULL_SHARD orig")["model"]
    for parameter in moved.middle.parameters():
        parameter.data = parameter.data.clone()
    attempt("moved", {"model": moved}, save)
    attempt("own state_dict", {"model": wrap(Own(3, 3), "FULL_SHARD orig")}, save)
    hooked = nn.Linear(3, 3)
    hooked.register_state_dict_post_hook(change)
    attempt("hooked", {"model": wrap(hooked, "FULL_SHARD orig")}, save)
    turned = nn.Conv2d(3, 4, 2)
    turned.weight.data = turned.weight.data.to(memory_format=torch.channels_last)
    attempt("not contiguous", {"model": wrap(turned, "FULL_SHARD orig")}, save)
    del flat["model"]._handle
    attempt("another torch", flat, save)
    return said


def test_what_of_fsdp1_cannot_be_told_is_refused_by_name_with_the_remedy(tmp_path: Path):
    says = {
        "gathered": ("model: ", "outside of `summon_full_params`"),
        "loose": ("linear.weight: a flat part", "add that module itself to the state"),
        "without its module": ("optim: ", "add that module itself to the state"),
        "named": ("optim: ", "add that module itself to the state"),
        "named flat": ("optim: dc.Named names a flat parameter", "remove dc.Named"),
        "raw orig": ("optim.state.0.exp_avg", "pass the optimizer itself in the state"),
        "raw flat": ("optim.state.0.exp_avg", "pass the optimizer itself in the state"),
        "a part": ("model.weight: a flat part", "add that module itself to the state"),
        "twice": ("again: ", "add it once"),
        "moved": ("weight of shape (11, 7)", "copy into the parameter instead"),
        "own state_dict": ("Own has its own `state_dict`", "get_state_dict", "fully_shard"),
        "hooked": ("the hook change", "get_state_dict", "fully_shard"),
        "not contiguous": ("weight of ''", "not contiguous", "fully_shard"),
        "further": ("optim.slow: Averaging returns tensors besides its state", "fully_shard"),
        "odd state": ("the state 'odd' of AdamW", "fully_shard"),
        "another torch": ("this version of torch", "_handle", "get_state_dict", "fully_shard"),
    }
    for said in run_ranks(refuse, str(tmp_path), world_size=2):
        assert said.keys() == says.keys()
        for what, parts in says.items():
            assert all(part in said[what] for part in parts), said[what]
            assert "PerRank" not in said[what]


# --- optimizers ----------------------------------------------------------------------------------


def step_apart(rank: int, folder: str, kind: str) -> list[Any]:
    """Load what each parameter has of its own into one that has it for several, and for each."""
    torch.manual_seed(0)
    saved = make("plain")
    if kind == "never":
        train(saved, 1)
        del saved["optim"].state[saved["model"].middle.bias]
    else:
        train(saved)
        saved["optim"].state[saved["model"].middle.bias]["step"] += 1
    dc.save(saved, f"{folder}/{kind}", step=1)
    orig, flat = make("FULL_SHARD orig"), make("FULL_SHARD flat")
    dc.load(orig, f"{folder}/{kind}")
    states = [orig["optim"].state.get(p, {}) for p in orig["model"].middle.parameters()]
    steps = [float(state["step"]) for state in states if state]
    try:
        dc.load(flat, f"{folder}/{kind}")
    except dc.IncompatibleError as error:
        return [steps, str(error)]
    return [steps, ""]


def test_one_state_for_several_parameters_takes_only_what_they_agree_on(tmp_path: Path):
    for steps, said in run_ranks(step_apart, str(tmp_path), "apart", world_size=2):
        assert set(steps) <= {2.0, 3.0}
        assert "saved with another 'step'" in said
        assert "use_orig_params=True" in said
    for steps, said in run_ranks(step_apart, str(tmp_path), "never", world_size=2):
        assert set(steps) <= {1.0}
        assert "one state for model.middle.bias and model.middle.weight" in said
        assert "use_orig_params=True" in said


def go_back(rank: int, folder: str) -> list[int]:
    """Load a checkpoint of before the first step; return how many parameters keep state."""
    torch.manual_seed(0)
    dc.save(make("plain"), f"{folder}/new", step=0)
    left = []
    for cut in FSDP1:
        state = make(cut)
        train(state)
        dc.load(state, f"{folder}/new")
        left.append(len(state["optim"].state))
        train(state, 1)
    return left


def test_a_load_of_before_the_first_step_drops_the_state(tmp_path: Path):
    assert run_ranks(go_back, str(tmp_path), world_size=2) == [[0, 0]] * 2


def in_place(rank: int, folder: str) -> list[bool]:
    """Say whether a load fills the tensors that the optimizer has, and its wrapped parameters."""
    torch.manual_seed(0)
    same = []
    for cut in FSDP1:
        state = make(cut)
        train(state)
        dc.save(state, f"{folder}/{cut}", step=1)
        before = [
            (key, v.data_ptr()) for s in state["optim"].state.values() for key, v in s.items()
        ]
        dc.load(state, f"{folder}/{cut}")
        after = [(key, v.data_ptr()) for s in state["optim"].state.values() for key, v in s.items()]
        same.append(before == after)
    return same


def test_a_load_fills_the_state_that_is_there(tmp_path: Path):
    assert run_ranks(in_place, str(tmp_path), world_size=2) == [[True, True]] * 2


def with_adagrad(rank: int, folder: str) -> list[tuple[float, bool]]:
    """Return the steps of each parameter after a load, and whether its sums came back."""
    torch.manual_seed(0)
    states = []
    for _ in range(2):
        state = make("FULL_SHARD orig")
        state["optim"] = torch.optim.Adagrad(state["model"].parameters(), lr=0.01)
        states.append(state)
    train(states[0])
    dc.save(states[0], folder)
    dc.load(states[1], folder)
    pairs = zip(*(state["optim"].state.values() for state in states), strict=True)
    return [(new["step"].item(), torch.equal(old["sum"], new["sum"])) for old, new in pairs]


def test_state_that_an_optimizer_makes_for_parts_without_elements_is_no_matter(tmp_path: Path):
    # Adagrad makes its state at once, and counts steps only where there are gradients.
    for found in run_ranks(with_adagrad, str(tmp_path / "c"), world_size=3):
        assert found == [(2.0, True)] * len(found)


def in_background(rank: int, folder: str) -> list[Any]:
    torch.manual_seed(0)
    found = []
    with dc.AsyncSaver(folder) as saver:
        for number, cut in enumerate(FSDP1):
            state = make(cut)
            train(state)
            saved = whole(state)
            handle = saver.save(state, f"{folder}/step-{number:08d}", step=number)
            train(state, 1)
            handle.result(60)
            fresh = make("SHARD_GRAD_OP orig")
            dc.load(fresh, f"{folder}/step-{number:08d}")
            found += [saved, whole(fresh)]
    return found


def test_a_background_save_of_fsdp1_has_what_there_was_when_it_was_called(tmp_path: Path):
    for found in run_ranks(in_background, str(tmp_path), world_size=2):
        assert found[::2] == found[1::2]
