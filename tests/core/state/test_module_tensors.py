"""The names of what a module holds, whatever is around it, and the tensors behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dist_ckpt.core.state.module_tensors import merge_states, module_state

NAMES = ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2)))


def with_inner(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    model = net()
    model[1] = wrap(model[1])
    return model


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "DDP": lambda: parallel(net()),
    "compiled": lambda: compiled(net()),
    "compiled DDP": lambda: compiled(parallel(net())),
    "DDP of compiled": lambda: parallel(compiled(net())),
    "checkpointed": lambda: checkpoint_wrapper(net()),
    "a part checkpointed": lambda: with_inner(checkpoint_wrapper),
    "a part compiled": lambda: with_inner(compiled),
    "a part in DDP": lambda: with_inner(parallel),
    "FSDP2": lambda: sharded(net()),
    "FSDP2 over checkpointed and compiled parts": lambda: sharded(
        with_inner(lambda part: compiled(checkpoint_wrapper(part)))
    ),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", WRAPPED)
def test_names_are_those_of_torch_and_every_tensor_is_found(kind: str) -> None:
    model = WRAPPED[kind]()
    state = module_state(model)
    assert [*state.entries] == [*state.live] == NAMES
    assert set(get_model_state_dict(model)) == set(NAMES)
    assert state.names_of_parameters() == {
        id(tensor): name for name, tensor in zip(NAMES, model.parameters(), strict=True)
    }


def test_data_parallel_has_no_part_in_the_names() -> None:
    for model in (nn.DataParallel(net()), with_inner(nn.DataParallel)):
        state = module_state(model)
        assert [*state.entries] == [*state.live] == NAMES


# --- classes and hooks with names of their own -------------------------------------------------


class Prepared(nn.Module):
    """What Lightning Fabric makes of a module: its names are those of the original one."""

    def __init__(self, original: nn.Module, forward: nn.Module | None = None) -> None:
        super().__init__()
        self._forward_module = forward or original
        self._original_module = original

    def state_dict(self, **options: Any) -> Any:
        return self._original_module.state_dict(**options)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self._original_module.load_state_dict(state_dict, strict=strict, assign=assign)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("forward", [None, parallel, compiled, nn.DataParallel])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_of_a_class_that_overrides_state_dict_are_found(forward: Any, device: str) -> None:
    if forward is parallel and device == "meta":
        pytest.skip("DDP takes no meta module")
    with torch.device(device):
        model = net()
    state = module_state(Prepared(model, forward and forward(model)))
    assert [*state.entries] == [*state.live] == NAMES
    assert not state.left_out
    assert {*state.names_of_parameters()} == {id(tensor) for tensor in model.parameters()}


@pytest.mark.usefixtures("group")
def test_sharded_tensors_of_a_class_that_overrides_state_dict_are_found() -> None:
    state = module_state(Prepared(sharded(net())))
    assert [*state.live] == NAMES


def test_what_a_hook_renames_is_found_and_what_it_changes_is_not_taken_for_the_tensor() -> None:
    def export(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight").t()
        state[prefix + "shift"] = state.pop(prefix + "bias")
        state[prefix + "extent"] = state.pop(prefix + "scale") * 2

    model = nn.Linear(3, 3)
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    model.register_state_dict_post_hook(export)
    state = module_state(model)
    assert [*state.entries] == ["kernel", "shift", "extent"]
    assert {name: id(tensor) for name, tensor in state.live.items()} == {"shift": id(model.bias)}
    # An optimizer's names must be had all the same.
    names = state.names_of_parameters()
    assert sorted(names.values()) == ["scale", "shift", "weight"]


def test_what_a_hook_changes_under_its_own_name_is_not_taken_for_the_tensor() -> None:
    model = nn.Linear(3, 3)
    model.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update(weight=state["weight"].t())
    )
    assert [*module_state(model).live] == ["bias"]


def test_tied_parameters_keep_all_their_names() -> None:
    model: Any = net()
    model[1][0].weight = nn.Parameter(torch.ones(3, 2))
    model[0].weight = model[1][0].weight
    state = module_state(model)
    assert [*state.live] == NAMES
    assert state.live["0.weight"] is state.live["1.0.weight"]
    assert state.names_of_parameters()[id(model[0].weight)] == "0.weight"


def test_empty_tensors_are_not_taken_for_each_other() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(0))
            self.b = nn.Parameter(torch.ones(0))

        def state_dict(self, **_: Any) -> Any:
            return {"second": self.b.detach(), "first": self.a.detach()}

    model = Odd()
    live = module_state(model).live
    assert live["first"] is model.a
    assert live["second"] is model.b


def test_one_name_with_and_without_a_wrapper_is_refused() -> None:
    model = with_inner(nn.DataParallel)
    model.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({"1.0.weight": torch.ones(1)})
    )
    with pytest.raises(ValueError, match=r"'1\.module\.0\.weight' once with and once without"):
        module_state(model)


# --- a model in parts --------------------------------------------------------------------------


def test_parts_that_share_no_name_are_one_model() -> None:
    whole = net()
    parts = nn.ModuleDict({"0": whole[0]}), nn.ModuleDict({"1": whole[1]})
    state = merge_states([module_state(part) for part in parts])
    assert state is not None
    assert [*state.entries] == [*state.live] == NAMES
    assert [part.module for part in state.parts] == [*parts]


def test_parts_may_share_a_tensor_but_no_name() -> None:
    shared = nn.Linear(2, 2)
    one, other = nn.ModuleDict({"a": shared}), nn.ModuleDict({"a": shared, "b": nn.Linear(2, 2)})
    state = merge_states([module_state(one), module_state(other)])
    assert state is not None
    assert [*state.live] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert merge_states([module_state(net()), module_state(net())]) is None
