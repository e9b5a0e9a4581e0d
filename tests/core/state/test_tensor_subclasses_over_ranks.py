"""Compound tensors that are cut over ranks. Fake process groups make this process each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.planning.save.save_planner import plan_save
from dist_ckpt.core.state.inventory_builder import build_inventory
from dist_ckpt.core.state.tensors.tensor_subclasses import LocalBox, find_inner_box
from in_memory import InMemory
from subclass_tensors import CodedSGD, Codes, GatheredLow, Quantized

Make = Callable[[Any], Any]


def ranks_of(world_size: int) -> Iterator[int]:
    """Be each rank of a world in turn."""
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield rank
        finally:
            dist.destroy_process_group()


def saved(make: Make, mesh: Sequence[int], placements: Any) -> InMemory:
    """Save what every rank makes of its part."""
    taken = []
    world_size = torch.Size(mesh).numel()
    for rank in ranks_of(world_size):
        state = make(PartOf(mesh, placements))
        taken.append(
            build_inventory(
                state,
                sharding=None,
                rank=rank,
                world_size=world_size,
                group_ranks=range(world_size),
            )
        )
    plan = plan_save([(local.inventory, (r,)) for r, local in enumerate(taken)], world_size)
    return InMemory(plan, taken)


def loaded(written: InMemory, make: Make, mesh: Sequence[int], placements: Any) -> Any:
    """Load on each rank; yield the state and how its part is cut out of a whole tensor."""
    world_size = torch.Size(mesh).numel()
    for rank in ranks_of(world_size):
        part = PartOf(mesh, placements)
        state = make(part)
        binding = written.bind(state, rank=rank, world_size=world_size)
        assert binding.problems == ()
        assert binding.unrequested == ()
        written.finish(binding)
        yield state, part


def problems(written: InMemory, make: Make, mesh: Sequence[int], placements: Any) -> list[str]:
    world_size = torch.Size(mesh).numel()
    found: list[str] = []
    for rank in ranks_of(world_size):
        state = make(PartOf(mesh, placements))
        binding = written.bind(state, rank=rank, world_size=world_size)
        found += binding.problems
    return found


class PartOf:
    """Cuts a tensor over a mesh, as torch does, and makes a DTensor of a local one."""

    def __init__(self, mesh: Sequence[int], placements: Any) -> None:
        names = tuple(f"axis{number}" for number in range(len(mesh)))
        self.mesh = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names)
        self.placements = placements

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        return dist.tensor.distribute_tensor(
            whole, self.mesh, self.placements, src_data_rank=None
        ).to_local()

    def sharded(self, local: torch.Tensor, whole: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )


def whole(seed: int, rows: int = 12, columns: int = 8) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def weights(make: Callable[[torch.Tensor], torch.Tensor], seed: int) -> Make:
    def state(part: Any) -> Any:
        value = whole(seed)
        return {"m": {"w": part.sharded(make(part.local(value)), value)}}

    return state


MESHES = [
    ((1,), [Shard(0)]),
    ((2,), [Shard(0)]),
    ((4,), [Shard(0)]),
    ((5,), [Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 3), [Shard(0), Shard(0)]),
    ((3,), [Replicate()]),
]


@pytest.mark.parametrize("target", MESHES, ids=str)
@pytest.mark.parametrize("source", MESHES[1:6:2], ids=str)
def test_scales_of_rows_are_cut_with_the_rows(source: Any, target: Any) -> None:
    written = saved(weights(Quantized.of, 0), *source)
    assert written.catalog.tensors["m.w.qdata"].shape == (12, 8)
    assert written.catalog.tensors["m.w.scale"].shape == (12, 1)
    for state, part in loaded(written, weights(Quantized.of, 1), *target):
        local = state["m"]["w"].to_local()
        assert type(local) is Quantized
        expected = Quantized.of(part.local(whole(0)))
        assert torch.equal(local.qdata, expected.qdata)
        assert torch.equal(local.scale, expected.scale)


def test_a_whole_one_loads_into_parts_and_back() -> None:
    written = saved(weights(Quantized.of, 0), (4,), [Shard(0)])
    alone = {"m": {"w": Quantized.of(whole(1))}}
    binding = written.bind(alone)
    assert binding.problems == ()
    written.finish(binding)
    assert torch.equal(alone["m"]["w"].qdata, Quantized.of(whole(0)).qdata)


def test_scales_that_are_of_one_shard_come_back_to_that_shard_only() -> None:
    columns = (4,), [Shard(1)]
    written = saved(weights(Quantized.of, 0), *columns)
    assert written.catalog.tensors["m.w.scale"].shape == (4, 12, 1)
    for state, part in loaded(written, weights(Quantized.of, 1), *columns):
        local = state["m"]["w"].to_local()
        assert torch.equal(local.scale, Quantized.of(part.local(whole(0))).scale)
    (problem, *_) = problems(written, weights(Quantized.of, 1), (2,), [Shard(1)])
    assert "m.w.scale: saved with shape (4, 12, 1), the state has (2, 12, 1)" in problem


def test_what_stands_for_a_plain_tensor_is_cut_as_that() -> None:
    written = saved(weights(GatheredLow, 0), (4,), [Shard(0)])
    assert list(written.catalog.tensors) == ["m.w"]
    for state, part in loaded(written, weights(GatheredLow, 1), (3,), [Shard(1)]):
        assert torch.equal(state["m"]["w"].to_local().whole, part.local(whole(0)))
    for state, part in loaded(written, weights(torch.clone, 1), (3,), [Shard(1)]):
        assert torch.equal(state["m"]["w"].to_local(), part.local(whole(0)))


# --- optimizers ------------------------------------------------------------------------------


def codes_of(whole: torch.Tensor) -> Any:
    """Return state whose every number says where in the whole it is."""
    made = Codes.zeros(whole.shape, signed=True)
    made.codes.copy_((whole * 40).to(torch.uint8))
    made.scale.copy_(whole.reshape(-1, 4)[:, 0])
    return made


def optimizers(seed: int, *, stepped: bool) -> Make:
    def state(part: Any) -> Any:
        value = whole(seed)
        parameter = torch.nn.Parameter(part.sharded(part.local(value).clone(), value))
        model = torch.nn.Module()
        model.w = parameter
        optimizer = CodedSGD([parameter])
        if stepped:
            local = codes_of(part.local(value))
            optimizer.state[parameter] = {
                "step": torch.tensor(float(seed)),
                "momentum": part.sharded(local, value),
            }
        return {"model": model, "optim": optimizer}

    return state


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("target", [MESHES[n] for n in (0, 1, 2, 4)], ids=str)
@pytest.mark.parametrize("source", [MESHES[n] for n in (1, 2, 4)], ids=str)
def test_state_in_blocks_is_cut_anew_and_its_table_is_everybodys(
    source: Any, target: Any, stepped: bool
) -> None:
    written = saved(optimizers(3, stepped=True), *source)
    shapes = {
        name.removeprefix("optim.state.model.w."): record.shape
        for name, record in written.catalog.tensors.items()
    }
    assert shapes["momentum.codes"] == (12, 8)
    assert shapes["momentum.scale"] == (24,)
    assert shapes["momentum.table"] == (8,)
    for state, part in loaded(written, optimizers(4, stepped=stepped), *target):
        momentum = state["optim"].state[state["model"].w]["momentum"]
        assert isinstance(momentum, DTensor)
        assert momentum.placements == tuple(part.placements)
        local, expected = momentum.to_local(), codes_of(part.local(whole(3)))
        assert type(local) is Codes
        assert local.signed
        for name in Codes.names:
            assert torch.equal(getattr(local, name), getattr(expected, name)), name


def test_a_cut_within_a_block_is_refused_by_name() -> None:
    def misplaced(part: Any) -> Any:
        value = torch.arange(24.0).reshape(12, 2)
        parameter = torch.nn.Parameter(part.sharded(part.local(value).clone(), value))
        model = torch.nn.Module()
        model.w = parameter
        optimizer = CodedSGD([parameter])
        if part.mesh.size() == 2:
            momentum = part.sharded(codes_of(part.local(value)), value)
            optimizer.state[parameter] = {"momentum": momentum}
        return {"model": model, "optim": optimizer}

    written = saved(misplaced, (2,), [Shard(0)])
    found = problems(written, misplaced, (4,), [Shard(0)])
    assert found
    assert all(
        "optim.state.model.w.momentum: narrow(0, ...) of Codes raised" in text for text in found
    )


@pytest.mark.parametrize(
    ("shape", "is_table", "expected"),
    [
        ((4, 8), None, ((12, 8), (4, 0))),
        ((4, 1), None, ((12, 1), (4, 0))),
        ((4, 2), None, ((12, 2), (4, 0))),
        ((2, 8), None, ((6, 8), (2, 0))),
        ((3, 8), None, None),
        ((1, 8), None, None),
        ((1, 1), None, None),
        ((), None, None),
        ((8,), None, None),
        ((8,), True, ((8,), (0,))),
        ((8,), False, ((24,), (8,))),
        ((5,), False, None),
    ],
)
def test_how_an_inner_tensor_is_cut_follows_from_its_shape(
    shape: Any, is_table: Any, expected: Any
) -> None:
    cut = LocalBox((12, 8), Region((4, 0), (4, 8)))
    found = find_inner_box(cut, shape, is_table=is_table)
    assert (found and (found.shape, found.box.offset)) == expected
