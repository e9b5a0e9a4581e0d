"""What simulated ranks say is what real states say, and the coordinator takes it for that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import dist_ckpt as dc
from benchmarks import simulated_ranks as simulated
from benchmarks.simulated_ranks import Job, SimulatedSave
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.planning.plan import Inventory
from dist_ckpt.core.planning.save.save_planner import (
    find_replica_groups,
    plan_all_files,
    plan_rank_files,
)
from dist_ckpt.core.planning.tensor_views import MeshPlaced, ShardedAxis
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.state.inventory_builder import build_inventory

JOBS: dict[str, Callable[[], Job]] = {
    "fsdp": lambda: simulated.fsdp(32, 12),
    "hsdp": lambda: simulated.hsdp(32, 12),
    "fsdp x tp": lambda: simulated.fsdp_tp(32, 12, tp=4),
    "stages": lambda: simulated.pipeline(32, 12, stages=4),
    "replicated": lambda: simulated.replicated(32, 12),
    "zero": lambda: simulated.zero(32, 12),
    "regions": lambda: simulated.parts(32, 12, flat=False),
    "flat": lambda: simulated.parts(32, 12, flat=True),
}


@contextmanager
def ranks_that_do_nothing(world_size: int):
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_simulated_inventory_is_that_of_a_real_state() -> None:
    with ranks_that_do_nothing(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 8))
        for module in model:
            for name, parameter in list(module.named_parameters(recurse=False)):
                cut = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
                setattr(module, name, torch.nn.Parameter(cut))
        optim = torch.optim.AdamW(model.parameters(), foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optim.step()
        state = {"model": model, "optim": optim, "rng": dc.RNG(), "step": 1}
        real = build_inventory(
            state, sharding=None, rank=0, world_size=4, group_ranks=range(4)
        ).inventory
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    view = MeshPlaced(simulated.on_mesh("dp", (4,)), (ShardedAxis(0),))
    assert simulated.training_state(shapes, lambda *_: view) == real


@pytest.mark.parametrize("job", JOBS)
def test_the_coordinator_commits_what_simulated_ranks_save(job: str) -> None:
    save = SimulatedSave(JOBS[job]())
    plan = save.run()
    index = index_json.decode(save.index())
    assert isinstance(index, Index)
    assert index.catalog == plan.catalog
    stored = sum(file.nbytes - file.header_nbytes for file in index.files)
    assert stored == sum(4 * prod(tensor.shape) for tensor in plan.catalog.tensors.values())


@pytest.mark.parametrize("job", JOBS)
def test_the_files_of_all_ranks_are_those_that_each_rank_derives(job: str) -> None:
    plan = SimulatedSave(JOBS[job]()).run()
    assert list(plan_all_files(plan.catalog)) == [plan_rank_files(plan, rank) for rank in range(32)]


def test_a_save_with_the_same_layout_takes_two_exchanges_and_no_collective() -> None:
    save = SimulatedSave(simulated.fsdp(256, 40))
    save.run()
    assert (save.session.exchanges.num, save.session.collective_calls.num) == (3, 1)
    save.run()
    assert (save.session.exchanges.num, save.session.collective_calls.num) == (2, 0)
    assert save.channel.nbytes["agree"] < 1024


def test_what_ranks_send_does_not_grow_with_their_tensors_or_number() -> None:
    def largest(world_size: int, count: int) -> dict[str, int]:
        save = SimulatedSave(simulated.fsdp(world_size, count))
        save.run()
        save.run()
        return save.channel.nbytes

    small = largest(16, 10)
    for more in (largest(16, 100), largest(256, 10)):
        assert all(more[phase] < small[phase] + 64 for phase in ("agree", "write"))


def test_the_inventory_and_the_index_of_regular_layouts_name_no_chunks() -> None:
    """A hundred times as many chunks, but the same number of ranks or of tensors."""

    def nbytes(world_size: int, count: int) -> tuple[int, int]:
        save = SimulatedSave(simulated.fsdp(world_size, count))
        save.run()
        return len(simulated.fsdp(world_size, count).inventories[0][0]), len(save.index())

    few, ranks, tensors, both = (nbytes(*n) for n in ((16, 10), (256, 10), (16, 160), (256, 160)))
    for one, more, other, all_more in zip(few, ranks, tensors, both, strict=True):
        assert all_more < more + other + one


def test_small_replicas_beside_large_shards_are_read_from_few_files() -> None:
    plan = SimulatedSave(simulated.fsdp(64, 200)).run()
    steps = {fqn for fqn in plan.catalog.tensors if fqn.endswith(".step")}
    assert len(steps) == 200
    holders = {
        file.name
        for files in plan_all_files(plan.catalog)
        for file in files
        for item in file.items
        if item.fqn in steps
    }
    assert len(holders) == 1


def test_ranks_that_hold_the_same_get_the_same_groups() -> None:
    plan = SimulatedSave(simulated.hsdp(32, 12)).run()
    groups = {rank: find_replica_groups(plan, rank) for rank in range(32)}
    for mine in groups.values():
        assert all(group in groups[other] for group in mine for other in group.ranks)


def test_a_job_of_ranks_that_differ_names_each_body_once() -> None:
    job = simulated.parts(8, 10, flat=False)
    assert sorted(rank for _, ranks in job.inventories for rank in ranks) == list(range(8))
    assert len({body for body, _ in job.inventories}) == len(job.inventories) == 8
    assert all(
        isinstance(typed_msgpack.decode(body, Inventory), Inventory) for body, _ in job.inventories
    )
