"""What DCP's tests check of trained models on four ranks; where they have FSDP1, here is FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dcp_scenarios_ranks import line
from dcp_ways import Way, meet, rank, same, whole

Trained = tuple[Any, Any]


class Mlp(nn.Module):
    """Layers whose sizes `even` ranks divide, or do not."""

    def __init__(self, seed: int, *, even: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        inner, outer = (16, 8) if even else (10, 7)
        self.net1 = nn.Linear(5, inner)
        self.net2 = nn.Linear(inner, outer)
        self.net3 = nn.Linear(outer, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net3(self.net2(self.net1(x).relu()).relu())


def train(model: Any, optimizer: Any, *, steps: int = 2) -> float:
    loss = torch.zeros(())
    for number in range(steps):
        loss = model(torch.full((4, 5), number + 1.0)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def trained(model: Any, seed: int) -> Trained:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / seed)
    train(model, optimizer)
    return model, optimizer


def sharded(seed: int, mesh: DeviceMesh | None = None, *, even: bool = True) -> Trained:
    model = Mlp(seed, even=even)
    mesh = mesh or line()
    for layer in (model.net1, model.net2, model):
        fully_shard(layer, mesh=mesh)
    return trained(model, seed)


def hybrid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def tensor_parallel(seed: int, mesh: DeviceMesh, *, even: bool = True) -> Any:
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    return parallelize_module(Mlp(seed, even=even), mesh, plan)


def split(seed: int) -> Trained:
    return trained(tensor_parallel(seed, line()), seed)


def sharded_and_split(seed: int) -> Trained:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(seed, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return trained(model, seed)


def replicated(seed: int) -> Trained:
    return trained(DistributedDataParallel(Mlp(seed)), seed)


def alone(seed: int) -> Trained:
    return trained(Mlp(seed), seed)


def state_of(model: Any, optimizer: Any) -> Any:
    return whole(list(get_state_dict(model, optimizer)))


def goes_on(way: Way, path: str, saved: Trained, loaded: Trained) -> None:
    """Save the one, load it into the other, and train both on: they stay the same."""
    expected = state_of(*saved)
    assert not same(state_of(*loaded), expected)
    way.save_trained(*saved, path)
    way.load_trained(*loaded, path)
    assert same(state_of(*loaded), expected)
    losses = [train(*one, steps=1) for one in (saved, loaded)]
    assert abs(losses[0] - losses[1]) <= 1e-4 * abs(losses[0])


# --- e2e/test_e2e_save_and_load.py -------------------------------------------------------------


def trained_under_every_wrapper(way: Way, path: str) -> None:
    makers: dict[str, Callable[[int], Trained]] = {
        "fsdp": sharded,
        "hsdp": lambda seed: sharded(seed, hybrid()),
        "ddp": replicated,
    }
    for name, make in makers.items():
        goes_on(way, f"{path}/{name}", make(1), make(2))


def the_model_alone_of_a_trained_state(way: Way, path: str) -> None:
    model, optimizer = sharded(1)
    way.save_trained(model, optimizer, f"{path}/a")
    other, _ = sharded(2)
    way.load({"model": get_model_state_dict(other)}, f"{path}/a", partial=True)
    assert same(other.state_dict(), model.state_dict())


# --- test_tp_checkpoint.py, test_fsdp_tp_checkpoint_conversion.py, test_hsdp_checkpoint.py -----


def tensor_parallel_layers(way: Way, path: str) -> None:
    goes_on(way, f"{path}/a", split(1), split(2))


def tensor_parallel_layers_without_memory(way: Way, path: str) -> None:
    model = tensor_parallel(1, line(), even=False)
    way.save({"model": model.state_dict()}, f"{path}/a")
    with torch.device("meta"):
        other = tensor_parallel(2, line(), even=False)
    if way.name != "dist_ckpt":
        other.to_empty(device="cpu")
    way.load({"model": other if way.name == "dist_ckpt" else other.state_dict()}, f"{path}/a")
    assert same(other.state_dict(), model.state_dict())


def from_sharded_to_tensor_parallel(way: Way, path: str) -> None:
    goes_on(way, f"{path}/a", sharded(1), split(2))
    goes_on(way, f"{path}/b", split(1), sharded(2))


def sharded_in_groups(way: Way, path: str) -> None:
    for even in (True, False):
        saved, loaded = sharded(1, hybrid(), even=even), sharded(2, hybrid(), even=even)
        goes_on(way, f"{path}/{even}", saved, loaded)


def from_groups_to_all(way: Way, path: str) -> None:
    for even in (True, False):
        saved, loaded = sharded(1, hybrid(), even=even), sharded(2, even=even)
        goes_on(way, f"{path}/{even}", saved, loaded)


# --- test_fsdp_model_state.py, test_fsdp_optim_state.py, test_2d_fsdp_dt_checkpoint.py ---------


def a_sharded_model(way: Way, path: str) -> None:
    (model, _), (other, _) = sharded(1), sharded(2)
    way.save({"model": model.state_dict()}, f"{path}/a")
    way.load({"model": other.state_dict()}, f"{path}/a")
    assert same(other.state_dict(), model.state_dict())


def a_sharded_model_in_another_group(way: Way, path: str) -> None:
    (model, _), (other, _) = sharded(1), sharded(2, hybrid())
    way.save({"model": model.state_dict()}, f"{path}/a")
    way.load({"model": other.state_dict()}, f"{path}/a")
    assert same(other.state_dict(), model.state_dict())


def a_sharded_optimizer(way: Way, path: str) -> None:
    saved, loaded = sharded(1), sharded(2)
    way.save_trained(*saved, f"{path}/a")
    way.load_trained(*loaded, f"{path}/a")
    assert same(whole(loaded[1].state_dict()), whole(saved[1].state_dict()))


def two_dimensions(way: Way, path: str) -> None:
    goes_on(way, f"{path}/a", sharded_and_split(1), sharded_and_split(2))


def two_dimensions_to_others(way: Way, path: str) -> None:
    goes_on(way, f"{path}/a", sharded_and_split(1), sharded(2))
    goes_on(way, f"{path}/b", sharded(1, hybrid()), sharded_and_split(2))


# --- e2e/test_fine_tuning.py, e2e/test_pipeline.py, e2e/test_fsdp_ep.py ------------------------


class Tuned(nn.Module):
    """A frozen base below a layer that is trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.base = Mlp(seed).requires_grad_(requires_grad=False)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.base(x).relu() + 1)


def tuned(seed: int) -> Trained:
    model = Tuned(seed)
    for part in (model.base, model.head, model):
        fully_shard(part, mesh=line())
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.1 / seed)
    train(model, optimizer)
    return model, optimizer


def a_base_and_then_what_was_tuned(way: Way, path: str) -> None:
    base, base_optimizer = sharded(3)
    way.save_trained(base, base_optimizer, f"{path}/base")
    model, optimizer = tuned(1)
    way.load({"model": model.base.state_dict()}, f"{path}/base", partial=True)
    assert same(model.base.state_dict(), base.state_dict())
    options = StateDictOptions(ignore_frozen_params=True)
    train(model, optimizer)
    saved = get_model_state_dict(model, options=options)
    assert set(saved) == {"head.weight", "head.bias"}
    way.save({"model": saved, "optim": get_optimizer_state_dict(model, optimizer)}, f"{path}/tuned")
    other, other_optimizer = tuned(2)
    state: dict[str, Any] = {
        "model": get_model_state_dict(other, options=options),
        "optim": get_optimizer_state_dict(other, other_optimizer),
    }
    way.load(state, f"{path}/tuned")
    set_optimizer_state_dict(other, other_optimizer, state["optim"])
    assert same(other.head.state_dict(), model.head.state_dict())
    assert same(whole(other_optimizer.state_dict()), whole(optimizer.state_dict()))


class Stages(nn.Module):
    """Four layers, of which a rank of a pipeline has one."""

    def __init__(self, seed: int, only: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers = [nn.Linear(6, 6) for _ in range(4)]
        self.layers = nn.ModuleDict(
            {f"{n}": layer for n, layer in enumerate(layers) if only in (None, n)}
        )

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers.values():
            x = layer(x).relu() + 0.1
        return x


def stages(seed: int, only: int | None = None) -> Trained:
    model = Stages(seed, only)
    if only is None:
        fully_shard(model, mesh=line())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * seed)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def states_of(model: Any, optimizer: Any) -> tuple[Any, Any]:
    model_state, optim_state = get_state_dict(model, optimizer)
    return model_state, optim_state


def from_a_pipeline_to_sharded(way: Way, path: str) -> None:
    model, optimizer = stages(1, rank())
    other, other_optimizer = stages(2)
    model_state, optim_state = states_of(model, optimizer)
    way.save({"model": model_state, "state": optim_state["state"]}, f"{path}/a")
    loaded_model, loaded_optim = states_of(other, other_optimizer)
    way.load({"model": loaded_model, "state": loaded_optim["state"]}, f"{path}/a")
    mine = f"layers.{rank()}.weight"
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, (mine, model_state[mine], optim_state["state"][mine]["exp_avg"]))
    for name, weight, average in every:
        assert same(loaded_model[name], weight)
        assert same(loaded_optim["state"][name]["exp_avg"], average)


def experts_of_some_ranks(way: Way, path: str) -> None:
    # A dense layer on all ranks; each of two experts is sharded by the two ranks that have it.
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        mine = rank() % 2
        model: Any = nn.ModuleDict({"dense": nn.Linear(6, 6), f"expert{mine}": nn.Linear(6, 4)})
        with torch.no_grad():
            model[f"expert{mine}"].weight.fill_(seed + mine)
        groups = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        fully_shard(model[f"expert{mine}"], mesh=groups["dp"])
        fully_shard(model["dense"], mesh=line())
        return model

    model, other = make(1), make(5)
    way.save({"model": model.state_dict()}, f"{path}/a")
    state = other.state_dict()
    way.load({"model": state}, f"{path}/a")
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name].to_local(), tensor.to_local()), name


# --- test_format_utils.py, test_torch_save_to_dcp.py, test_state_dict.py -----------------------


def a_file_of_torch_save_into_sharded(way: Way, path: str) -> None:
    if rank() == 0:
        torch.save({"model": Mlp(1).state_dict()}, f"{path}/model.pt")  # noqa: TID251
    meet()
    other, _ = sharded(2)
    state = {"model": get_model_state_dict(other)}
    way.load_file(state, f"{path}/model.pt")
    assert same(whole(state["model"]), dict(Mlp(1).state_dict()))


def a_converted_file_of_torch_save(way: Way, path: str) -> None:
    (model, _), (other, _) = sharded(1), alone(2)
    way.save({"model": model.state_dict()}, f"{path}/a")
    way.load({"model": other.state_dict()}, f"{path}/a")
    assert same(whole(model.state_dict()), whole(other.state_dict()))


def trained_under_ddp(way: Way, path: str) -> None:
    goes_on(way, f"{path}/a", replicated(1), alone(2))
    goes_on(way, f"{path}/b", alone(1), replicated(2))


def trained_under_fsdp2(way: Way, path: str) -> None:
    goes_on(way, f"{path}/a", sharded(1), alone(2))
    goes_on(way, f"{path}/b", alone(1), sharded(2))


def names_behind_checkpoint_wrappers(way: Way, path: str) -> None:
    model: Any = Mlp(1)
    model.net1 = checkpoint_wrapper(model.net1)
    wrapped = DistributedDataParallel(model)
    goes_on(way, f"{path}/a", trained(wrapped, 1), alone(2))


def groups(seed: int, *, empty: bool) -> Trained:
    model = tensor_parallel(seed, line())
    first, rest = [model.net1.weight], [model.net2.weight]
    options: list[Any] = [{"params": first}, {"params": rest, "lr": 0.2 / seed}]
    if empty:
        options = [{"params": first + rest}, {"params": [], "lr": 0.2 / seed}]
    optimizer = torch.optim.AdamW(options, lr=0.1 / seed)
    train(model, optimizer)
    return model, optimizer


def several_groups_of_parameters(way: Way, path: str) -> None:
    for empty in (False, True):
        (model, optimizer), (other, other_optimizer) = (
            groups(1, empty=empty),
            groups(2, empty=empty),
        )
        way.save_trained(model, optimizer, f"{path}/{empty}")
        way.load_trained(other, other_optimizer, f"{path}/{empty}")
        assert same(whole(other_optimizer.state_dict()), whole(optimizer.state_dict()))


def a_flat_state_of_an_optimizer(way: Way, path: str) -> None:
    (model, optimizer), (other, other_optimizer) = sharded(1), sharded(2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    way.save({"o": get_optimizer_state_dict(model, optimizer, options=options)}, f"{path}/a")
    state = {"o": get_optimizer_state_dict(other, other_optimizer, options=options)}
    way.load(state, f"{path}/a")
    set_optimizer_state_dict(other, other_optimizer, state["o"], options=options)
    assert same(whole(other_optimizer.state_dict()), whole(optimizer.state_dict()))


def a_sharded_model_without_memory(way: Way, path: str) -> None:
    (model, _) = sharded(1)
    way.save({"model": model.state_dict()}, f"{path}/a")
    with torch.device("meta"):
        other: Any = Mlp(2)
    for layer in (other.net1, other.net2, other):
        fully_shard(layer, mesh=line())
    if way.name != "dist_ckpt":
        other.to_empty(device="cpu")
    way.load({"model": other if way.name == "dist_ckpt" else other.state_dict()}, f"{path}/a")
    assert same(other.state_dict(), model.state_dict())
