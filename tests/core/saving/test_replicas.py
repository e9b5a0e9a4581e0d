"""`replicas=`: what a save stores of copies that differ between ranks, and how it loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.planning.tensor_views import (
    Mesh,
    MeshPlaced,
    Piece,
    ReplicatedAxis,
    RuleSharded,
    ShardedAxis,
    chunked_view,
)
from dist_ckpt.core.saving import replica_copies
from dist_ckpt.core.saving.replica_copies import mean_of
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.shard_io.memory.torch_tensor import host_memory
from dist_ckpt.core.state.wrappers import PerRank
from dist_ckpt.errors import IncompatibleError, UnequalReplicasError
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.thread_channel import TEST_CONFIG, ThreadChannel, ThreadCollective
from long_mode import examples
from ranks import (
    errors_of,
    load_on_threads,
    run_ranks,
    save_on_threads,
    shared_storage,
    try_load_on_threads,
    try_save_on_threads,
)
from subclass_tensors import Quantized

WORLD = 3


def drifted(world_size: int = WORLD) -> list[dict[str, Any]]:
    """Return states whose norm and counter differ, and whose weight does not."""
    return [
        {"model": {"norm": torch.tensor([1.0, 2.0]) + rank, "w": torch.ones(3)}, "count": rank}
        for rank in range(world_size)
    ]


def empty(world_size: int = WORLD) -> list[dict[str, Any]]:
    return [
        {"model": {"norm": torch.zeros(2), "w": torch.zeros(3)}, "count": -1}
        for _ in range(world_size)
    ]


def loaded(storage: MemoryStorage, world_size: int = WORLD, **options: Any) -> list[dict[str, Any]]:
    states = empty(world_size)
    load_on_threads(storage, states, **options)
    return states


def save_refused(states: Sequence[Any], words: str, **options: Any) -> None:
    storage = MemoryStorage()
    errors = errors_of(try_save_on_threads(shared_storage(storage), states, **options))
    assert {type(error) for error in errors} <= {ValueError, TypeError}, errors
    assert words in str(errors[0])
    assert not storage.tree()  # nothing was written


def test_without_a_rule_the_error_names_the_switch() -> None:
    outcomes = try_save_on_threads(shared_storage(MemoryStorage()), drifted())
    (error, *_) = errors_of(outcomes)
    assert isinstance(error, UnequalReplicasError)
    assert """replicas={'model.norm': "rank0"}""" in str(error)


def test_rank0_stores_the_copy_of_the_lowest_rank() -> None:
    storage = MemoryStorage()
    rules = {"*.norm": "rank0", "count": "rank0"}
    report = save_on_threads(storage, drifted(), replicas=rules)
    assert report.replicas == {"model.norm": "rank0", "count": "rank0"}
    assert "2 names by a rule of replicas=" in str(report)
    for world_size in (1, 3, 4):
        for state in loaded(storage, world_size):
            assert torch.equal(state["model"]["norm"], torch.tensor([1.0, 2.0]))
            assert state["count"] == 0


def test_rank0_is_the_lowest_rank_that_has_the_tensor() -> None:
    states = drifted()
    for state, value in zip(states, (None, 5.0, 7.0), strict=True):
        if value is not None:
            state["model"]["late"] = torch.tensor(value)
    storage = MemoryStorage()
    rules = {"*.late": "rank0", "*.norm": "rank0", "count": "rank0"}
    save_on_threads(storage, states, replicas=rules)
    live: dict[str, Any] = {"model": {"late": torch.tensor(0.0)}}
    load_on_threads(storage, [live], include="model.late")
    assert float(live["model"]["late"]) == 5.0


def test_mean_stores_the_mean_and_leaves_equal_copies_and_the_state_alone() -> None:
    states, storage = drifted(), MemoryStorage()
    nan = torch.tensor([float("nan"), -0.0, 0.1], dtype=torch.float64)
    for state in states:
        state["model"]["w"] = nan.clone()
    report = save_on_threads(storage, states, replicas={"model": "mean", "count": "rank0"})
    assert report.replicas == {"model.norm": "mean", "model.w": "mean", "count": "rank0"}
    assert [state["model"]["norm"][0].item() for state in states] == [1, 2, 3]
    live = empty(2)
    for state in live:
        state["model"]["w"] = torch.zeros(3, dtype=torch.float64)
    load_on_threads(storage, live)
    for state in live:
        assert torch.equal(state["model"]["norm"], torch.tensor([2.0, 3.0]))
        assert torch.equal(state["model"]["w"].view(torch.int64), nan.view(torch.int64))


def test_the_bytes_of_a_mean_are_the_same_each_time() -> None:
    torch.manual_seed(0)
    states = [{"w": torch.randn(100, dtype=torch.bfloat16)} for _ in range(WORLD)]
    total = states[0]["w"].double()
    for state in states[1:]:
        total = total + state["w"].double()
    expected = (total / WORLD).to(torch.bfloat16)
    for _ in range(2):
        storage, live = MemoryStorage(), {"w": torch.zeros(100, dtype=torch.bfloat16)}
        save_on_threads(storage, states, replicas={"w": "mean"})
        load_on_threads(storage, [live])
        assert torch.equal(live["w"], expected)


def test_copies_are_added_from_the_lowest_rank_to_the_highest() -> None:
    for values, mean in (
        ((1e16, -1e16, 1.0), 1 / 3),  # in the reverse order it would be 0
        ((1.0, 1e16, 1.0), 1e16 / 3),  # equal copies, which are sent once, do not come first
    ):
        states = [{"w": torch.tensor([value], dtype=torch.float64)} for value in values]
        storage, live = MemoryStorage(), {"w": torch.zeros(1, dtype=torch.float64)}
        save_on_threads(storage, states, replicas={"w": "mean"})
        load_on_threads(storage, [live])
        assert live["w"].item() == mean


DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])


ROWS = st.lists(st.floats(-100, 100), min_size=3, max_size=3)


@given(DTYPES, st.lists(ROWS, min_size=2, max_size=5))
@examples(50)
def test_a_mean_is_computed_in_float64_in_the_order_of_ranks(
    dtype: torch.dtype, values: list[list[float]]
) -> None:
    copies = [torch.tensor(row, dtype=dtype) for row in values]
    total = np.zeros(3)
    for number, copy in enumerate(copies):
        added = copy.double().numpy()
        total = added if not number else total + added
    expected = torch.from_numpy(total / len(copies)).to(dtype)
    data = mean_of([bytes(host_memory(copy) or b"") for copy in copies], dtype)
    assert data == bytes(host_memory(expected) or b"")


def test_per_rank_keeps_each_copy() -> None:
    storage = MemoryStorage()
    rules = {"*.norm": "per_rank", "count": "per_rank"}
    report = save_on_threads(storage, drifted(), replicas=rules)
    assert report.replicas == {"model.norm": "per_rank", "count": "per_rank"}
    for rank, state in enumerate(loaded(storage)):
        assert torch.equal(state["model"]["norm"], torch.tensor([1.0, 2.0]) + rank)
        assert state["count"] == rank
    states: list[dict[str, Any]] = [{} for _ in range(WORLD)]
    load_on_threads(storage, states)
    assert [state["count"] for state in states] == [0, 1, 2]
    assert [state["model"]["norm"].tolist() for state in states] == [[1, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_own_copies_are_refused_by_name_on_another_number_of_ranks(world_size: int) -> None:
    storage = MemoryStorage()
    rules = {"*.norm": "per_rank", "count": "per_rank"}
    save_on_threads(storage, drifted(), replicas=rules)
    states = empty(world_size)
    errors = errors_of(try_load_on_threads(shared_storage(storage), states))
    assert all(isinstance(error, IncompatibleError) for error in errors)
    assert "model.norm: saved with a copy of each rank" in str(errors[0])
    assert "Load on the same ranks, or exclude it" in str(errors[0])
    for state in states:
        assert not state["model"]["norm"].any()
        assert not state["model"]["w"].any()
    part = loaded(storage, world_size, exclude=["*.norm", "count"])
    assert all(state["model"]["w"].all() for state in part)


def test_own_copies_of_arrays_are_arrays() -> None:
    states = [{"a": np.ones(2) * rank, "w": torch.ones(1)} for rank in range(2)]
    storage = MemoryStorage()
    save_on_threads(storage, states, replicas={"a": "per_rank"})
    opened = OpenCheckpoint.at(storage, "/runs/ck")
    assert opened.objects().numpy == ()  # these are not among the tensors
    opened.close()
    filled: list[dict[str, Any]] = [{"a": np.zeros(2), "w": torch.zeros(1)} for _ in range(2)]
    made: list[dict[str, Any]] = [{} for _ in range(2)]
    for live in (filled, made):
        arrays = [state["a"] for state in live if state]
        load_on_threads(storage, live)
        assert [state["a"].tolist() for state in live] == [[0, 0], [1, 1]]
        assert {type(state["a"]) for state in live} == {np.ndarray}
        assert all(map(lambda a, state: a is state["a"], arrays, live))


def test_own_copies_are_refused_by_name_on_another_mesh() -> None:
    storage = MemoryStorage()
    save_on_threads(storage, cut_states(), sharding=CUT, replicas={"w": "per_rank"})
    live = [{"w": torch.zeros(2, 2)} for _ in range(4)]
    other = ShardingConfig({"dp": 4}, {})
    errors = errors_of(try_load_on_threads(shared_storage(storage), live, sharding=other))
    assert "w: saved with a copy of each rank" in str(errors[0])
    assert "(mesh dp 4): the copy of one rank has no meaning for another" in str(errors[0])


def test_own_copies_of_another_shape_are_refused_by_name() -> None:
    storage = MemoryStorage()
    save_on_threads(storage, drifted(), replicas={"*.norm": "per_rank", "count": "rank0"})
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        states = empty()
        for state in states:
            state["model"]["norm"] = other.clone()
        errors = errors_of(try_load_on_threads(shared_storage(storage), states))
        assert "model.norm: this rank has saved its own copy as torch.float32" in str(errors[0])
        assert not any(state["model"]["w"].any() for state in states)


def test_the_first_pattern_that_matches_decides() -> None:
    states = drifted()
    for state in states:
        state["model"]["n"] = torch.tensor(state["count"])
    rules = {"*.n": "rank0", "model": "mean", "count": "rank0"}
    report = save_on_threads(MemoryStorage(), states, replicas=rules)
    assert report.replicas == {
        "model.norm": "mean",
        "model.w": "mean",
        "model.n": "rank0",
        "count": "rank0",
    }


def test_rules_that_have_no_meaning_are_refused_by_name_and_nothing_is_written() -> None:
    states = drifted()
    save_refused(states, "replicas has 'w': 'max': give", replicas={"w": "max"})
    save_refused(states, "give a mapping from patterns", replicas="rank0")
    save_refused(states, "give a glob on names", replicas={3: "rank0"})
    save_refused(states, "replicas: 'x' matches no name", replicas={"x": "rank0"})
    for state in states:
        state["model"]["n"] = torch.tensor(state["count"])
        state["model"]["z"] = torch.ones(2, dtype=torch.complex64)
    save_refused(states, "model.n: replicas gives it", replicas={"*.n": "mean"})
    save_refused(states, "Only real floating types have a mean", replicas={"*.z": "mean"})
    quantized = [{"q": Quantized.of(torch.ones(2, 2))} for _ in range(2)]
    save_refused(quantized, "q: replicas gives it", replicas={"q": "mean"})


def test_ranks_with_other_rules_are_refused() -> None:
    each = [{"replicas": {"*.norm": "rank0", "count": "rank0"}}, {}, {}]
    outcomes = try_save_on_threads(shared_storage(MemoryStorage()), drifted(), each=each)
    assert all("replicas=" in str(error) for error in errors_of(outcomes))


def test_too_many_bytes_for_a_mean_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_copies, "_MAX_NBYTES", 23)
    rules = {"*.norm": "mean", "count": "rank0"}
    save_refused(drifted(), "give the rule to fewer tensors", replicas=rules)


def test_values_and_other_tensors_are_compared_as_ever() -> None:
    for rules in ({"*.norm": "rank0"}, {"*.norm": "mean", "count": "mean"}):
        outcomes = try_save_on_threads(shared_storage(MemoryStorage()), drifted(), replicas=rules)
        errors = errors_of(outcomes)
        assert all(isinstance(error, UnequalReplicasError) for error in errors)
        assert "count (rank 0 differs" in str(errors[0])
        assert "norm" not in str(errors[0])


def test_one_rank_has_no_copies() -> None:
    for rule in ("rank0", "mean", "per_rank"):
        storage = MemoryStorage()
        report = save_on_threads(storage, drifted(1), replicas={"model": rule})
        assert not report.replicas
        assert loaded(storage, 2)[1]["model"]["norm"].tolist() == [1, 2]


def test_tied_tensors_have_one_rule() -> None:
    states: list[dict[str, Any]] = []
    for rank in range(2):
        weight = torch.ones(2) * rank
        states.append({"a": weight, "b": weight})
    save_refused(states, "give both the same", replicas={"a": "rank0", "b": "mean"})
    for rule, expected in (("rank0", [0, 0]), ("per_rank", [0, 1])):
        storage = MemoryStorage()
        save_on_threads(storage, states, replicas={"a": rule})
        live = [{"a": torch.ones(2), "b": torch.ones(2)} for _ in range(2)]
        load_on_threads(storage, live)
        assert [state[name][0].item() for state in live for name in "ab"] == [
            number for number in expected for _ in "ab"
        ]


# --- modules, optimizers, objects ----------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.norm = nn.BatchNorm1d(3)


def trained(rank: int) -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter) * (rank + 1 if "norm" in name else 1)
    optimizer.step()
    model.norm(torch.randn(4, 3) + rank)
    return {"model": model, "optim": optimizer}


def fresh(rank: int) -> dict[str, Any]:
    del rank
    model = Net()
    return {"model": model, "optim": torch.optim.AdamW(model.parameters())}


def bits(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    model, optimizer = state["model"], state["optim"]
    moments = {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return {**model.state_dict(), **moments}


@pytest.mark.parametrize("is_stepped", [False, True])
def test_each_rank_resumes_with_its_own_norm_and_moments(is_stepped: bool) -> None:
    torch.manual_seed(0)
    states = [trained(rank) for rank in range(2)]
    before = [{name: value.clone() for name, value in bits(state).items()} for state in states]
    storage = MemoryStorage()
    report = save_on_threads(storage, states, replicas={"*.norm": "per_rank"})
    assert "optim.state.model.norm.weight.exp_avg" in report.replicas
    assert "model.norm.num_batches_tracked" in report.replicas
    assert "model.weight" not in report.replicas
    opened = OpenCheckpoint.at(storage, "/runs/ck")
    assert opened.catalog.parameters == {"model.weight": True}
    opened.close()
    live = [(trained if is_stepped else fresh)(5 + rank) for rank in range(2)]
    load_on_threads(storage, live)
    for state, expected in zip(live, before, strict=True):
        assert bits(state).keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(bits(state)[name], value), name
    for parameter in live[0]["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    live[0]["optim"].step()


def test_the_buffers_of_batch_norm_are_averaged_and_its_counter_taken() -> None:
    torch.manual_seed(0)
    states = [trained(rank) for rank in range(WORLD)]
    states[1]["model"].norm.num_batches_tracked += 1
    rules = {"*.num_batches_tracked": "rank0", "*.norm": "mean"}
    storage = MemoryStorage()
    save_on_threads(storage, states, replicas=rules)
    live = fresh(0)
    load_on_threads(storage, [live])
    for name in ("running_mean", "running_var"):
        total = getattr(states[0]["model"].norm, name).double()
        for state in states[1:]:
            total = total + getattr(state["model"].norm, name).double()
        assert torch.equal(getattr(live["model"].norm, name), (total / WORLD).float())
    assert int(live["model"].norm.num_batches_tracked) == 1


def test_a_meta_module_takes_own_copies() -> None:
    states = [{"model": trained(rank)["model"]} for rank in range(2)]
    storage = MemoryStorage()
    save_on_threads(storage, states, replicas={"*.norm": "per_rank"})
    with torch.device("meta"):
        live: list[dict[str, Any]] = [{"model": Net()} for _ in range(2)]
    load_on_threads(storage, live)
    for state, saved in zip(live, states, strict=True):
        for name, value in saved["model"].state_dict().items():
            assert torch.equal(state["model"].state_dict()[name], value)


class Counter:
    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.n = state["n"]


@pytest.mark.parametrize("rule", ["rank0", "per_rank"])
def test_objects_that_differ_take_a_rule(rule: str) -> None:
    storage = MemoryStorage()
    save_on_threads(storage, [{"c": Counter(7 + rank)} for rank in range(2)], replicas={"c": rule})
    live = [{"c": Counter(0)} for _ in range(2)]
    load_on_threads(storage, live)
    assert [state["c"].n for state in live] == ([7, 7] if rule == "rank0" else [7, 8])


def test_values_in_per_rank_need_no_rule() -> None:
    states = [{"a": PerRank(rank), "b": rank} for rank in range(2)]
    storage = MemoryStorage()
    report = save_on_threads(storage, states, replicas={"b": "per_rank"})
    assert report.replicas == {"b": "per_rank"}
    live: list[dict[str, Any]] = [{"a": PerRank(-1), "b": -1} for _ in range(2)]
    load_on_threads(storage, live)
    assert [(state["a"].value, state["b"]) for state in live] == [(0, 0), (1, 1)]


def test_a_group_of_an_optimizer_cannot_differ() -> None:
    states = [fresh(0) for _ in range(2)]
    states[1]["optim"].param_groups[0]["lr"] = 0.5
    save_refused(states, 'group of an optimizer: give it "rank0"', replicas={"optim": "per_rank"})
    storage, live = MemoryStorage(), fresh(0)
    save_on_threads(storage, states, replicas={"optim.param_groups": "rank0"})
    load_on_threads(storage, [live])
    assert live["optim"].param_groups[0]["lr"] == 1e-3


# --- tensors that are cut as well ----------------------------------------------------------------

# Ranks 0 and 2 have one half, ranks 1 and 3 the other one.
CUT = ShardingConfig({"dp": 2, "tp": 2}, {"w": {"tp": 0}})


def cut_states() -> list[dict[str, Any]]:
    return [{"w": torch.arange(4.0).reshape(2, 2) + 10 * rank} for rank in range(4)]


@pytest.mark.parametrize("rule", ["rank0", "mean", "per_rank"])
def test_each_part_of_a_sharded_tensor_has_the_rule(rule: str) -> None:
    states, storage = cut_states(), MemoryStorage()
    save_on_threads(storage, states, sharding=CUT, replicas={"w": rule})
    values = [state["w"] for state in states]
    means = [(values[n % 2] + values[n % 2 + 2]) / 2 for n in range(4)]
    expected = {"rank0": [values[n % 2] for n in range(4)], "mean": means, "per_rank": values}[rule]
    live = [{"w": torch.zeros(2, 2)} for _ in range(4)]
    load_on_threads(storage, live, sharding=CUT)
    for state, value in zip(live, expected, strict=True):
        assert torch.equal(state["w"], value)


def test_parts_of_unequal_shapes_have_no_mean() -> None:
    states = cut_states()
    states[2]["w"] = torch.ones(3, 2)
    options: dict[str, Any] = {"sharding": CUT, "replicas": {"w": "mean"}}
    outcomes = try_save_on_threads(shared_storage(MemoryStorage()), states, **options)
    assert "w: dimension 0 is 2 on rank 0 and 3 on rank 2" in str(errors_of(outcomes)[0])


@pytest.mark.parametrize(("num_replicas", "expected"), [(1, False), (2, True)])
def test_only_a_mesh_axis_with_several_ranks_has_copies(num_replicas: int, expected: bool) -> None:
    mesh = Mesh(("dp", "tp"), (num_replicas, 2), tuple(range(2 * num_replicas)))
    placed = MeshPlaced(mesh, (ReplicatedAxis(), ShardedAxis(0)))
    cut = RuleSharded(mesh, ((1,),))
    fused = RuleSharded(mesh, ((1,),), 0, (Piece(4, (1,)),))
    for view in (placed, cut, chunked_view(fused, (4,))):
        assert replica_copies._is_replica(view) is expected


def test_shards_without_copies_stay_tensors_under_per_rank() -> None:
    all_cut = ShardingConfig({"tp": 2}, {"w": {"tp": 0}})
    storage, states = MemoryStorage(), [{"w": torch.ones(2) * rank} for rank in range(2)]
    report = save_on_threads(storage, states, sharding=all_cut, replicas={"w": "per_rank"})
    assert not report.replicas
    live = {"w": torch.zeros(4)}
    load_on_threads(storage, [live])
    assert live["w"].tolist() == [0, 0, 1, 1]


# --- later saves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rank0", "mean", "per_rank"])
def test_later_saves_of_a_layout_store_the_values_of_their_time(rule: str) -> None:
    storage = MemoryStorage()

    def run(rank: int, channel: ThreadChannel, bulk: ThreadCollective) -> list[int]:
        session = Session(channel, bulk, TEST_CONFIG)
        state, exchanges = {"w": torch.zeros(2), "x": torch.ones(2)}, []
        options = SaveOptions(replicas={"w": rule})  # type: ignore[dict-item]
        for step in range(2):
            state["w"].fill_(10 * step + rank)
            report = save_together(session, state, f"/runs/{step}", options, storage)
            exchanges.append(report.exchanges.num)
        return exchanges

    (first, second), _ = run_ranks(run, world_size=2, harness="threads")
    assert second == first - 1  # the plan is cached
    expected = {"rank0": [10, 10], "mean": [10.5, 10.5], "per_rank": [10, 11]}[rule]
    live = [{"w": torch.zeros(2), "x": torch.zeros(2)} for _ in range(2)]
    load_on_threads(storage, live, "/runs/1")
    assert [state["w"][0].item() for state in live] == expected
