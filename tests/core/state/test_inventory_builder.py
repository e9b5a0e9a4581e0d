from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.index import Node
from dist_ckpt.core.format.objects.plain_types import ArrayValue
from dist_ckpt.core.planning import tensor_views
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.state.inventory_builder import LocalState, build_inventory
from dist_ckpt.core.state.wrappers import RNG, LocalShard, Named, PerRank
from in_memory import Stateful


def taken(state: Any, **options: Any) -> LocalState:
    defaults = {"sharding": None, "rank": 0, "world_size": 1, "group_ranks": (0,)}
    return build_inventory(state, **{**defaults, **options})


def names(local: LocalState) -> list[str]:
    return [entry.fqn for entry in local.inventory.tensors]


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def test_tensors_are_entries_and_everything_else_the_largest_values_without_tensors() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    local = taken({"a": {"x": [tensor, 1], "y": {"p": (1, 2)}}, "step": 3, "c": Counter("ab")})
    assert names(local) == ["a.x.0"]
    assert local.values == {"a.x.1": 1, "a.y": {"p": (1, 2)}, "step": 3, "c": Counter("ab")}
    assert local.inventory.tree == (
        Node("", "dict", ("a", "step", "c")),
        Node("a", "dict", ("x", "y")),
        Node("a.x", "list", (0, 1)),
    )
    source = local.reader("a.x.0", 0)
    assert bytes(source.read(0, 24, memoryview(bytearray(24)))) == tensor.numpy().tobytes()


def test_the_kinds_and_keys_of_containers_are_kept() -> None:
    t = torch.ones(1)
    state = OrderedDict(d=defaultdict[int, Any](list, {1: t}), t=(t.clone(), None), e={})
    local = taken(state)
    assert local.inventory.tree == (
        Node("", "OrderedDict", ("d", "t", "e")),
        Node("d", "defaultdict:list", (1,)),
        Node("t", "tuple", (0, 1)),
    )
    assert local.values == {"t.1": None, "e": {}}


def test_an_empty_state_is_an_empty_inventory() -> None:
    local = taken({})
    assert local.inventory.tensors == ()
    assert local.inventory.tree == (Node("", "dict", ()),)


def test_components_are_the_top_level_keys_that_hold_tensors() -> None:
    t = torch.ones(2)
    local = taken({"m": {"w": t}, "loose": t + 1, "alone": t + 2, "n": 5, 7: [t + 3]})
    inventory = local.inventory
    assert inventory.components == ("m", "state", "7")
    assert [inventory.components[e.component] for e in inventory.tensors] == [
        "m",
        "state",
        "state",
        "7",
    ]


def test_tied_tensors_are_aliases_of_the_first_and_keep_their_sources() -> None:
    t = torch.ones(4)
    local = taken({"a": {"x": t, "y": t.view(4), "z": t[:2], "c": t.clone()}})
    assert local.inventory.aliases == (("a.y", "a.x"),)
    assert names(local) == ["a.x", "a.z", "a.c"]
    assert set(local.parts) == {"a.x", "a.y", "a.z", "a.c"}


def square() -> torch.Tensor:
    return torch.arange(4.0).view(2, 2)


def test_of_tensors_that_are_alike_each_is_stored_with_its_own_bytes() -> None:
    tensors = {
        "first": square(),
        "second": square() + 4,
        "turned": square().t(),
        "parameter": nn.Parameter(square() + 8),
        "negated": torch.view_as_complex(torch.stack((square(), square()), -1)).conj().imag,
        "array": square().numpy(),
        "inner": torch.arange(6.0)[2:].view(2, 2),
    }
    local = taken(tensors)
    for name, tensor in tensors.items():
        source = local.reader(name, 0)
        expected = torch.as_tensor(tensor).detach().clone().contiguous().resolve_neg()
        read = source.read(0, 16, memoryview(bytearray(16)))
        assert bytes(read) == expected.numpy().tobytes(), name
    assert [entry.shape for entry in local.inventory.tensors] == [(2, 2)] * 7
    assert local.inventory.numpy == ("array",)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_tensor_whose_memory_is_gone_is_refused_wherever_it_stands(place: int) -> None:
    tensors = {f"t{n}": square() for n in range(3)}
    tensors[f"t{place}"].untyped_storage().resize_(8)
    with pytest.raises(ValueError, match=f"t{place}: the memory"):
        taken(tensors)
    tensors[f"t{place}"] = torch.empty(2, 2, device="meta")
    with pytest.raises(ValueError, match=f"t{place}: a meta tensor"):
        taken(tensors)


def test_of_tensors_that_are_alike_only_those_of_the_same_memory_are_tied() -> None:
    base = torch.arange(16.0)
    parts = {name: base[start : start + 4] for name, start in zip("abc", (0, 4, 8), strict=True)}
    local = taken({**parts, "again": base[4:8], "longer": base[4:12], "shaped": square()})
    assert local.inventory.aliases == (("again", "b"),)
    assert names(local) == ["a", "b", "c", "longer", "shaped"]


def test_an_inventory_like_the_last_one_is_equal_to_it_and_shares_its_entries() -> None:
    def state(dtype: torch.dtype = torch.float32, size: int = 2) -> Any:
        return {"a": {"x": torch.ones(size), "y": torch.ones(3, dtype=dtype)}, "z": torch.ones(3)}

    last = taken(state()).inventory
    again = taken(state(), last=last).inventory
    assert again == last
    shared = zip(again.tensors, last.tensors, strict=True)
    assert all(entry is before for entry, before in shared)
    others = [
        state(size=4),
        state(dtype=torch.float64),
        {"b": state()["a"], "z": torch.ones(3)},
        {"z": torch.ones(3), "a": state()["a"]},
        {"a": {**state()["a"], "z": torch.ones(3)}, "z": torch.ones(3)},
        {"a": state()["a"]},
    ]
    for other in others:
        inventory = taken(other, last=last).inventory
        assert inventory != last
        assert inventory == taken(other).inventory
    loose = {"first": torch.ones(2), "a": {"x": torch.ones(2)}}
    joined = {"first": torch.ones(2), "a.x": torch.ones(2)}
    assert taken(joined, last=taken(loose).inventory).inventory == taken(joined).inventory


def test_a_module_is_stored_as_its_state_dict() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("kept", torch.ones(1))
            self.register_buffer("not_kept", torch.ones(1), persistent=False)
            self.calls = 0

        def get_extra_state(self) -> Any:
            self.calls += 1
            return {"scale": 1.5, "history": torch.ones(3)}

    part = Part()
    local = taken({"model": nn.ModuleDict({"part": part})})
    assert names(local) == ["model.part.w", "model.part.kept", "model.part._extra_state.history"]
    assert local.values == {"model.part._extra_state.scale": 1.5}
    assert part.calls == 1


def test_parameters_are_known_and_whether_they_are_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    model.get_submodule("2").register_parameter("weight", model.get_parameter("0.weight"))
    state = {"loose": nn.Parameter(torch.ones(2)), "model": model, "plain": model.state_dict()}
    inventory = taken(state).inventory
    assert [e.fqn for e in inventory.tensors[:6]] == [
        *("loose", "model.0.weight", "model.0.bias"),
        *("model.1.weight", "model.1.bias", "model.1.running_mean"),
    ]
    assert inventory.parameters == ((0, 1, True), (1, 2, False), (3, 2, True))
    # Of a tied tensor, whatever name it is stored under.
    assert taken(
        {"a": {"w": model.get_parameter("1.weight").detach()}, "m": model}
    ).inventory.parameters == (*((0, 1, True), (1, 2, False), (3, 1, True)),)
    model[0].requires_grad_(True)
    assert taken(state).inventory != inventory


def test_prefixes_of_wrappers_are_stripped(mesh: Any) -> None:
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    assert names(taken({"m": model})) == ["m.weight", "m.bias"]
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert names(taken({"m": parallel}, group_ranks=range(4))) == ["m.weight", "m.bias"]


def test_a_hook_of_a_module_may_add_names_that_no_part_of_it_has() -> None:
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({prefix + "weight.absmax": torch.ones(1)})
    )
    assert names(taken({"m": model})) == ["m.weight", "m.bias", "m.weight.absmax"]


def test_an_objects_state_dict_is_called_once() -> None:
    plain, holding = Stateful({"a": 1}), Stateful({"t": torch.ones(1), "n": 2})
    local = taken({"plain": plain, "holding": holding})
    assert local.values == {"plain": {"a": 1}, "holding.n": 2}
    assert names(local) == ["holding.t"]
    assert plain.calls == holding.calls == 1


def test_numpy_arrays_are_tensors_of_kind_numpy() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3).T
    local = taken({"a": array, "s": np.float32(2)})
    (entry,) = local.inventory.tensors
    assert (entry.fqn, entry.dtype, entry.shape) == ("a", "int16", (3, 2))
    assert local.inventory.numpy == ("a",)
    assert local.values == {"s": np.float32(2)}
    source = local.reader("a", 0)
    assert bytes(source.read(0, 12, memoryview(bytearray(12)))) == array.tobytes()


def test_per_rank_values_have_a_key_and_no_tensors() -> None:
    t = torch.arange(2, dtype=torch.int16)
    local = taken(
        {
            "a": PerRank({"x": (t, 1)}),
            "b": PerRank(Stateful([np.ones(1)]), key=("dp", 2)),
            "r": RNG(),
        },
        rank=3,
        world_size=4,
    )
    array = ArrayValue("int16", (2,), b"\0\0\1\0")
    assert local.per_rank["a"] == (3, {"x": (array, 1)})
    one = np.ones(1).tobytes()
    assert local.per_rank["b"] == (("dp", 2), [ArrayValue("float64", (1,), one, "numpy")])
    assert local.per_rank["r"][0] == 3
    assert local.inventory.per_rank == (("a", None), ("b", ("dp", 2)), ("r", None))


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ValueError, "a.b: two paths"),
        ({1: 2, "1": 3}, ValueError, "1: two paths"),
        ({"a": {"": torch.ones(1)}}, ValueError, "a has an empty key"),
        ({"a": {(1, 2): torch.ones(1)}}, TypeError, r"a has the key \(1, 2\) of class tuple"),
        ({True: torch.ones(1)}, TypeError, "the state has the key True of class bool"),
        ({"a": {"\ud800": torch.ones(1)}}, ValueError, "not valid text"),
        ({"a": {"b": [object()]}}, TypeError, r"a\['b'\]\[0\] is a builtins.object"),
        ({"a": {"t": torch.ones(1), "f": len}}, TypeError, "a.f is a builtins.builtin_function"),
        ({"a": np.array(["x"])}, TypeError, "a: a numpy array of dtype <U1"),
        ({"a": np.array([None])}, TypeError, "a: a numpy array of dtype object"),
        ({"a": torch.ones(1, device="meta")}, ValueError, "a: a meta tensor has no data"),
        ({"a": torch.ones(2).to_sparse()}, TypeError, "a: .*to_dense"),
        ({"a": defaultdict[str, Any](lambda: 1, t=torch.ones(1))}, TypeError, "a is a defaultdict"),
        ({"a": nn.Linear}, TypeError, "a is a builtins.type"),
        ({"a": PerRank(len)}, TypeError, "a is a builtins.builtin_function"),
        (nn.Linear(1, 1), TypeError, "the state is a Linear: give a mapping"),
        ([torch.ones(1)], TypeError, "the state is a list"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_place(
    state: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        taken(state)


def test_a_cycle_is_refused() -> None:
    state: dict[str, Any] = {"a": {"t": torch.ones(1)}}
    state["a"]["b"] = [state["a"]]
    with pytest.raises(ValueError, match=r"a\.b\.0: the state contains itself"):
        taken(state)
    endless = Stateful(None)
    endless.state = {"again": endless}
    with pytest.raises(ValueError, match="contains itself"):
        taken({"a": endless})


def test_a_dtensor_describes_its_mesh_and_a_fully_sharded_module_its_optimizer(mesh: Any) -> None:
    model = nn.Linear(4, 6, bias=False)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    local = taken({"model": model, "optim": optimizer}, rank=1, world_size=4, group_ranks=range(4))
    views = {e.fqn: local.inventory.views[e.view] for e in local.inventory.tensors}
    assert isinstance(views["model.weight"], tensor_views.MeshPlaced)
    assert views["optim.state.model.weight.exp_avg"] == views["model.weight"]
    assert views["optim.state.model.weight.step"] == tensor_views.Whole()
    assert local.inventory.mesh == (("dp", 2),)


def test_the_mesh_of_the_job_is_the_largest(mesh: Any) -> None:
    state = {
        "a": distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]),
        "b": DTensor.from_local(torch.ones(2), mesh, [Shard(0), Shard(0)], run_check=False),
    }
    local = taken(state, rank=1, world_size=4, group_ranks=range(4))
    assert local.inventory.mesh == (("dp", 2), ("tp", 2))


TP = ShardingConfig({"dp": 2, "tp": 2}, {"*wq.weight": {"tp": 0}})


def test_a_rule_holds_for_a_parameter_and_for_what_is_stored_under_it() -> None:
    model = nn.ModuleDict({"wq": nn.Linear(4, 2), "wo": nn.Linear(4, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    named = ("wq.weight", "model.wq.weight")
    by_helpers = {
        "state": {name: {"exp_avg": torch.ones(2, 4), "step": torch.ones(())} for name in named}
    }
    local = taken(
        {"model": model, "nested": {"optim": optimizer}, "more": by_helpers},
        sharding=TP,
        rank=1,
        world_size=4,
        group_ranks=range(4),
    )
    views = {e.fqn: local.inventory.views[e.view] for e in local.inventory.tensors}
    ruled = {fqn for fqn, view in views.items() if isinstance(view, tensor_views.RuleSharded)}
    assert ruled == {
        "model.wq.weight",
        "nested.optim.state.model.wq.weight.exp_avg",
        "nested.optim.state.model.wq.weight.exp_avg_sq",
        "more.state.wq.weight.exp_avg",
        "more.state.model.wq.weight.exp_avg",
    }
    assert local.inventory.mesh == (("dp", 2), ("tp", 2))


def test_a_config_of_another_world_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh .* has 4 ranks, the group has 2"):
        taken({"a": torch.ones(1)}, sharding=TP, world_size=2, group_ranks=range(2))


def test_flat_parts_of_zero_have_the_shape_of_their_parameter() -> None:
    config = ShardingConfig.zero(2, 1, flat=True)
    state = {
        "model": {"w": torch.ones(3, 3)},
        "optim": {"state": {"w": {"exp_avg": torch.ones(5), "step": torch.ones(())}}},
    }
    local = taken(state, sharding=config, world_size=2, group_ranks=range(2))
    entries = {e.fqn: (e.shape, local.inventory.views[e.view]) for e in local.inventory.tensors}
    assert entries["optim.state.w.exp_avg"] == ((3, 3), tensor_views.Flattened(config.ranks()))
    assert entries["model.w"] == ((3, 3), tensor_views.Whole())
    assert entries["optim.state.w.step"] == ((), tensor_views.Whole())


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(3))


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"model": Biased()}, "'bias'"),
        ({"model": {"w": torch.zeros(2)}}, "'w'"),
        ({"optim": {"state": {"bias": {"v": torch.zeros(2)}}}}, "'state.bias.v'"),
    ],
)
def test_flat_parts_of_zero_3_need_the_shapes_of_their_parameters(state: Any, name: str) -> None:
    config = ShardingConfig.zero(2, 3, flat=True)
    with pytest.raises(ValueError, match=rf"zero_stage=3.* shapes=\{{{name}: \.\.\., .*own"):
        taken(state, sharding=config, world_size=2, group_ranks=range(2))


def test_optimizer_state_under_flat_parts_of_zero_3_needs_their_shapes() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(ValueError, match=r"optim\.state\.w\.momentum_buffer: .*shapes=\{'w'"):
        taken(
            {"optim": Named(optimizer, ["w"])},
            sharding=ShardingConfig.zero(2, 3, flat=True),
            world_size=2,
            group_ranks=range(2),
        )


def test_buffers_and_tensors_with_their_own_shape_are_replicas_beside_flat_parts() -> None:
    config = ShardingConfig.zero(2, 3, flat=True, shapes={"bias": (4,), "mask": (2,)})
    state = {
        "model": Biased(),
        "mask": torch.zeros(2),
        "scalar": torch.zeros(()),
        "array": np.zeros(2),
    }
    local = taken(state, sharding=config, world_size=2, group_ranks=range(2))
    entries = {e.fqn: (e.shape, local.inventory.views[e.view]) for e in local.inventory.tensors}
    assert entries["model.bias"] == ((4,), tensor_views.Flattened(config.ranks()))
    assert entries["model.mean"] == ((3,), tensor_views.Whole())
    assert entries["mask"] == ((2,), tensor_views.Whole())
    assert entries["array"] == ((2,), tensor_views.Whole())


def test_flat_parts_of_other_shapes_are_not_one_tensor_though_they_share_memory() -> None:
    config = ShardingConfig.zero(2, 3, flat=True, shapes={"a": (4, 3), "b": (3, 4), "c": (4, 3)})
    part = torch.zeros(6)
    state = {"model": {"a": part, "b": part, "c": part}}
    local = taken(state, sharding=config, world_size=2, group_ranks=range(2))
    assert {e.fqn: e.shape for e in local.inventory.tensors} == {
        "model.a": (4, 3),
        "model.b": (3, 4),
    }
    assert [tuple(alias) for alias in local.inventory.aliases] == [("model.c", "model.a")]


def test_local_shards_are_parts() -> None:
    local = taken({"m": {"w": LocalShard(torch.ones(2, 3), (4, 3), (2, 0))}})
    (entry,) = local.inventory.tensors
    (view,) = local.inventory.views
    assert entry.shape == (4, 3)
    assert view == tensor_views.Parts((Region((2, 0), (2, 3)),))


def test_the_mapping_may_be_any_mapping() -> None:
    class Other(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return torch.ones(1)

        def __iter__(self) -> Iterator[str]:
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    assert names(taken(Other())) == ["a"]


def test_schedulers_and_scalers_are_values() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    local = taken({"sched": scheduler, "scaler": scaler})
    assert isinstance(local.values["sched"]["milestones"], Counter)  # type: ignore[index]
    assert local.values["scaler"] == {}


def test_per_rank_values_without_data_or_end_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match=r"^r\.0\.0.* contains itself: flatten it"):
        taken({"r": PerRank(endless)})
    with pytest.raises(ValueError, match=r"^r\.t: a meta tensor has no data"):
        taken({"r": PerRank({"t": torch.ones(2, device="meta")})})


def test_pieces_are_not_for_a_dtensor_that_an_axis_of_the_rule_cuts(mesh: Any) -> None:
    options = {"rank": 1, "world_size": 4, "group_ranks": range(4)}
    rules, local = {"fc1": {"tp": 0, "pieces": [4, 4]}}, torch.zeros(4, 2)
    options["sharding"] = ShardingConfig({"dp": 2, "tp": 2}, rules)
    by_tp: list[tuple[Placement, Placement]] = [(Replicate(), Shard(0)), (Shard(0), Shard(0))]
    for placements in by_tp:
        state = {"m": {"fc1": DTensor.from_local(local, mesh, placements, run_check=False)}}
        with pytest.raises(ValueError, match=r"m\.fc1: .*DTensor that 'tp' cuts .*to_local"):
            taken(state, **options)
    others: list[tuple[Placement, Placement]] = [(Shard(0), Replicate()), (Replicate(), Shard(1))]
    for placements in others:
        taken(
            {"m": {"fc1": DTensor.from_local(local, mesh, placements, run_check=False)}}, **options
        )


def test_plain_state_of_a_dtensor_is_whole(mesh: Any) -> None:
    placements: tuple[Placement, ...] = (Replicate(), Shard(0))
    local = DTensor.from_local(torch.zeros(4, 2), mesh, placements, run_check=False)
    optimizer = torch.optim.SGD([parameter := nn.Parameter(local)], lr=0.1)
    optimizer.state[parameter] = {"L": torch.ones(8, 8), "moment": local, "step": torch.ones(())}
    state = {"m": {"w": parameter}, "optim": optimizer}
    inventory = taken(state, rank=1, world_size=4, group_ranks=range(4)).inventory
    assert dict(inventory.uncut) == {"optim.state.m.w.L": "whole"}
