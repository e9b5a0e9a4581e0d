"""The private names of torch: where they are, and that they still do what we use them for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Replicate, Shard

from dist_ckpt.core.runtime import torch_private


def test_every_private_name_is_where_we_look_for_it():
    assert all(hasattr(torch_private, name) for name in torch_private.__all__)


def test_every_private_name_is_in_the_table():
    table = [line.split("`")[1] for line in torch_private.__doc__.splitlines() if line[:3] == "| `"]
    assert sorted(table) == sorted(torch_private.__all__)


def test_a_strided_shard_has_a_dimension_and_a_split_factor():
    placement = torch_private.StridedShard(1, split_factor=4)
    assert (placement.dim, int(placement.split_factor)) == (1, 4)
    assert not isinstance(Shard(1), torch_private.StridedShard)
    assert not isinstance(Replicate(), torch_private.StridedShard)


def test_a_tensor_on_its_way_can_be_waited_for():
    waiting = torch_private.AsyncCollectiveTensor(torch.ones(2))
    assert type(waiting.wait()) is torch.Tensor


def test_sharded_tensors_say_what_they_hold():
    assert issubclass(torch_private.ShardedTensor, torch.Tensor)
    assert callable(torch_private.ShardedTensor.local_shards)
    assert callable(torch_private.ShardedTensor.metadata)


def test_names_of_a_module_lose_the_prefix_of_its_wrapper():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert torch_private.module_fqns(model, "0.weight") == {"0.weight"}


def test_an_optimizers_hooks_are_where_we_look_for_them():
    weight = torch.nn.Parameter(torch.ones(1))
    registrations = [
        "register_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ]
    hooks = (*torch_private.SAVE_HOOKS, *torch_private.LOAD_HOOKS)
    for register, name in zip(registrations, hooks, strict=True):
        optimizer = torch.optim.SGD([weight])
        assert not any(getattr(optimizer, other) for other in hooks)
        getattr(optimizer, register)(print)
        assert list(getattr(optimizer, name).values()) == [print]


def test_the_default_store_is_that_of_the_job():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        torch_private.default_store().set("dist_ckpt", "here")
        assert torch_private.default_store().get("dist_ckpt") == b"here"
    finally:
        dist.destroy_process_group()


def test_wrappers_have_their_module_where_we_look_for_it():
    part = torch.nn.Linear(1, 1)
    compiled: Any = torch.compile(part, backend="eager")
    for wrapper in (torch.nn.DataParallel(part), compiled, checkpoint_wrapper(part)):
        child = torch_private.wrapped_child(wrapper)
        assert child is not None
        assert getattr(wrapper, child) is part
    assert torch_private.wrapped_child(part) is None
    assert torch_private.wrapped_child(torch.nn.ModuleDict({"module": part})) is None


def test_hooks_that_follow_a_load_are_seen():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].register_load_state_dict_post_hook(lambda *_: None)
    assert [torch_private.has_load_hooks(module) for module in (model, model[0])] == [False, True]
    torch_private.drop_load_hooks(model)
    assert not torch_private.has_load_hooks(model[0])


def test_tensors_on_one_memory_have_one_storage_meta_ones_too():
    for device in ("cpu", "meta"):
        tensor, other = torch.ones(3, device=device), torch.ones(3, device=device)
        assert torch_private.storage_id(tensor) == torch_private.storage_id(tensor.detach()[1:])
        assert torch_private.storage_id(tensor) != torch_private.storage_id(other)
