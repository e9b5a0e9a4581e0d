from __future__ import annotations

import gc
import random
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.index import Node
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.state.binding.bind import build_saved_tree, read_template, unexpected_problem
from dist_ckpt.core.state.wrappers import RNG, FlatShard, LocalShard, PerRank
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError
from in_memory import Stateful, load, save


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def refuses(state: Any, saved: Any, message: str, **options: Any) -> None:
    with pytest.raises(IncompatibleError, match=message):
        load(saved, state, **options)


# --- mappings --------------------------------------------------------------------------------


def test_tensors_are_filled_in_place_and_values_replaced() -> None:
    t = torch.arange(6.0).reshape(2, 3)
    saved = save({"a": {"x": [t, 1], "y": {"p": (1, 2)}}, "step": 3, "none": None})
    target = torch.zeros(2, 3)
    state: dict[str, Any] = {"a": {"x": [target, 0], "y": {"q": 5}}, "step": 0, "none": 0}
    inner, values = state["a"], state["a"]["x"]
    binding = load(saved, state)
    assert state == {"a": {"x": [target, 1], "y": {"p": (1, 2)}}, "step": 3, "none": None}
    assert state["a"] is inner
    assert inner["x"] is values
    assert torch.equal(target, t)
    assert sorted(binding.restored) == ["a.x.0", "a.x.1", "a.y", "none", "step"]
    assert binding.resharded == ()


def test_tuples_in_the_state_are_made_anew() -> None:
    saved = save({"a": (torch.ones(2), [(torch.ones(1), 7)])})
    target = torch.zeros(2)
    state = {"a": (target, [(torch.zeros(1), 0)])}
    load(saved, state)
    assert state["a"][0] is target
    assert torch.equal(target, torch.ones(2))
    assert state["a"][1][0][1] == 7


def test_every_problem_of_names_and_kinds_is_listed_at_once() -> None:
    saved = save(
        {
            "m": {"w": torch.ones(2), "b": torch.ones(3), "d": torch.ones(1)},
            "step": 1,
            "gone": 2,
            "own": PerRank(1),
        }
    )
    state = {
        "m": {"w": torch.ones(3), "b": torch.ones(3).double(), "d": 5, "new": torch.ones(1)},
        "step": torch.ones(1),
        "own": 3,
    }
    binding = saved.bind(state)
    text = "\n".join(binding.problems)
    assert len(binding.problems) == 6
    assert "m.w: saved with shape (2,), the state has (3,)" in text
    assert "m.b: saved as float32, the state has float64" in text
    assert "m.d: saved as a tensor, the state has a value without tensors" in text
    assert "step: saved as a value without tensors, the state has a tensor" in text
    assert "own: saved as a per-rank value, the state has a value" in text
    assert "the checkpoint lacks m.new" in text
    assert binding.unrequested == ("gone",)
    assert binding.missing == ("m.new",)


def test_without_strict_names_may_be_missing_but_shapes_must_fit() -> None:
    saved = save({"a": torch.ones(2), "b": 1})
    state = {"a": torch.zeros(2), "c": 5}
    binding = load(saved, state, strict=False)
    assert state["c"] == 5
    assert binding.missing == ("c",)
    assert binding.unrequested == ("b",)
    refuses({"a": torch.zeros(3)}, saved, "shape", strict=False)


def test_nothing_is_touched_when_there_is_a_problem() -> None:
    saved = save({"a": torch.ones(2), "b": 1, "c": torch.ones(1)})
    state: dict[str, Any] = {"a": torch.zeros(2), "b": 0, "c": torch.zeros(2), "d": {}}
    refuses(state, saved, "shape")
    assert state["b"] == 0
    assert not state["a"].any()


def test_names_are_matched_whatever_the_class_of_the_keys() -> None:
    saved = save({"a": {0: torch.ones(1), 1: torch.ones(1)}})
    state = {"a": [torch.zeros(1), torch.zeros(1)]}
    load(saved, state)
    assert state["a"][1] == 1


def test_a_template_with_more_or_fewer_tensors_than_saved_still_finds_the_values() -> None:
    with_tensor = save({"train": {"step": 5, "loss": torch.ones(1)}})
    state: dict[str, Any] = {"train": {"step": 0}}
    binding = with_tensor.bind(state)
    assert binding.problems == ()
    assert binding.unrequested == ("train.loss",)

    without = save({"train": {"step": 5, "loss": None}})
    state = {"train": {"step": 0, "loss": torch.zeros(1)}}
    refuses(state, without, "train.loss: saved as a value")
    state = {"train": {"step": 0, "loss": torch.zeros(1)}}
    load(without, state, exclude="train.loss")
    assert state["train"]["step"] == 5


def test_a_read_only_state_is_refused() -> None:
    with pytest.raises(TypeError, match="mappingproxy, which is read-only"):
        read_template(MappingProxyType({}), sharding=None, rank=0, world_size=1, group_ranks=(0,))


def test_two_paths_with_one_name_are_refused() -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    with pytest.raises(ValueError, match=r"a\.b: two paths"):
        read_template(state, sharding=None, rank=0, world_size=1, group_ranks=(0,))


def test_numpy_arrays_are_filled_in_place_and_read_only_ones_replaced() -> None:
    saved = save({"a": np.arange(3), "b": np.arange(3), "t": torch.ones(2)})
    fixed = np.zeros(3, np.int64)
    fixed.flags.writeable = False
    live = np.zeros(3, np.int64)
    state: dict[str, Any] = {"a": live, "b": fixed, "t": np.zeros(2, np.float32)}
    load(saved, state)
    assert state["a"] is live
    assert live.tolist() == [0, 1, 2]
    assert state["b"] is not fixed
    assert state["b"].tolist() == [0, 1, 2]
    assert state["t"].tolist() == [1, 1]


# --- open templates --------------------------------------------------------------------------


def test_an_empty_state_takes_everything_with_its_types() -> None:
    t = torch.arange(3, dtype=torch.bfloat16)
    source = OrderedDict(
        m=OrderedDict(w=t, n=np.arange(2)),
        d=defaultdict(list, {1: [t.clone(), (None, 2.5)]}),
        c=Counter("aab"),
        e={},
        s=torch.Size([2]),
        k=np.float32(1),
        own=PerRank({"x": torch.ones(1), "y": np.ones(2)}),
        model=nn.Linear(2, 1),
    )
    state: dict[Any, Any] = {}
    load(save(source), state)
    assert list(state) == ["m", "d", "c", "e", "s", "k", "own", "model"]
    assert type(state["m"]) is OrderedDict
    assert torch.equal(state["m"]["w"], t)
    assert type(state["m"]["n"]) is np.ndarray
    assert type(state["d"]) is defaultdict
    assert state["d"].default_factory is list
    assert list(state["d"]) == [1]
    assert state["d"][1][1] == (None, 2.5)
    assert (type(state["c"]), state["c"]) == (Counter, Counter("aab"))
    assert state["e"] == {}
    assert type(state["s"]) is torch.Size
    assert type(state["k"]) is np.float32
    assert type(state["own"]) is PerRank
    own: Any = state["own"].value
    assert torch.equal(own["x"], torch.ones(1))
    assert type(own["y"]) is np.ndarray
    assert list(state["model"]) == ["weight", "bias"]


def test_none_and_an_empty_mapping_in_the_state_take_what_was_saved_there() -> None:
    saved = save({"a": {"t": torch.ones(1)}, "b": {"t": torch.ones(1)}, "c": 3, "d": {"x": 1}})
    empty: dict[str, Any] = {}
    values: dict[str, Any] = {}
    state: dict[str, Any] = {"a": empty, "b": None, "c": None, "d": values}
    load(saved, state)
    assert state["a"] is empty
    assert empty["t"] == 1
    assert state["b"]["t"] == 1
    assert state["c"] == 3
    assert state["d"] is values
    assert values == {"x": 1}


def test_an_open_template_of_nothing_is_missing() -> None:
    refuses({"a": {}}, save({"b": 1}), "lacks a", exclude="b")


def test_tied_tensors_come_back_as_one() -> None:
    t = torch.ones(2)
    state: dict[str, Any] = {}
    load(save({"a": t, "b": t}), state)
    assert state["a"] is state["b"]


def test_tied_tensors_are_read_once() -> None:
    t, target = torch.ones(2), torch.zeros(2)
    binding = load(save({"a": t, "b": t}), {"a": target, "b": target})
    assert [wanted.cells for wanted in binding.wanted] == [(Region((0,), (2,)),)]
    assert sorted(binding.restored) == ["a", "b"]


def test_a_tensor_that_was_a_part_comes_whole() -> None:
    saved = save(
        {"m": {"w": LocalShard(torch.zeros(1, 2), (2, 2), (0, 0))}},
        {"m": {"w": LocalShard(torch.ones(1, 2), (2, 2), (1, 0))}},
    )
    state: dict[str, Any] = {}
    binding = load(saved, state)
    assert state["m"]["w"].tolist() == [[0, 0], [1, 1]]
    assert binding.resharded == ("m.w",)


# --- modules ---------------------------------------------------------------------------------


def test_a_module_is_filled_in_place_and_extra_state_set() -> None:
    class Part(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((2,), scale))
            self.extra: Any = {"scale": scale, "history": torch.full((2,), scale)}

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    saved = save({"model": nn.ModuleDict({"part": Part(2.0)})})
    part = Part(0.0)
    w = part.w
    load(saved, {"model": nn.ModuleDict({"part": part})})
    assert part.w is w
    assert w.tolist() == [2, 2]
    assert part.extra["scale"] == 2.0
    assert part.extra["history"].tolist() == [2, 2]


def test_what_a_state_dict_copies_is_still_loaded_into_the_module() -> None:
    def model() -> nn.Module:
        module = nn.Linear(1, 1, bias=False)
        module.register_state_dict_post_hook(
            lambda _, state, prefix, __: state.update(
                {prefix + "weight": state[prefix + "weight"].clone()}
            )
        )
        return module

    source, target = model(), model()
    load(save({"m": source}), {"m": target})
    assert torch.equal(source.weight, target.weight)  # type: ignore[arg-type]


def test_a_meta_module_is_materialized_and_keeps_tied_parameters_tied() -> None:
    def model() -> nn.Module:
        first = nn.Linear(2, 2, bias=False)
        second = nn.Linear(2, 2, bias=False)
        second.weight = first.weight
        return nn.Sequential(first, second, nn.BatchNorm1d(2))

    source = model()
    with torch.device("meta"):
        target = model()
    load(save({"m": torch.compile(source, backend="eager")}), {"m": target})
    assert target[0].weight is target[1].weight  # type: ignore[index]
    assert isinstance(target[0].weight, nn.Parameter)  # type: ignore[index]
    for name, value in source.state_dict().items():
        assert torch.equal(value, target.state_dict()[name])


class LoadsItself(nn.Linear):
    """A module with a way to load of its own, such as one that talks to other ranks."""

    called: list[str]

    def __init__(self, name: str, *, fails: bool = False) -> None:
        super().__init__(2, 2, device="meta")
        self.name, self.fails = name, fails

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.called.append(self.name)
        if self.fails:
            raise OSError("no")
        return super().load_state_dict(*args, **kwargs)


def test_meta_modules_with_a_way_to_load_of_their_own_are_assigned_in_the_order_of_names() -> None:
    saved = save({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    orders = []
    for names in ("ab", "ba"):
        LoadsItself.called = []
        load(saved, {name: LoadsItself(name) for name in names})
        orders.append(LoadsItself.called)
    # To assign, and then because the class may do more than that.
    assert orders == [["a", "b", "a", "b"]] * 2


def test_an_error_of_a_meta_modules_own_way_to_load_says_where_it_was() -> None:
    LoadsItself.called = []
    with pytest.raises(CheckpointError, match=r"m: load_state_dict of LoadsItself raised OSError"):
        load(save({"m": nn.Linear(2, 2)}), {"m": LoadsItself("m", fails=True)})


def test_an_optimizer_over_meta_parameters_is_a_problem() -> None:
    def pair(device: str) -> dict[str, Any]:
        model = nn.Linear(2, 2, device=device)
        return {"m": model, "o": torch.optim.SGD(model.parameters(), momentum=0.9)}

    source = pair("cpu")
    source["m"](torch.ones(1, 2)).sum().backward()
    source["o"].step()
    refuses(pair("meta"), save(source), "has meta parameters")


def test_a_meta_tensor_in_a_mapping_is_replaced() -> None:
    state = {"a": {"t": torch.empty(2, device="meta")}}
    load(save({"a": {"t": torch.ones(2)}}), state)
    assert state["a"]["t"].tolist() == [1, 1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_tied_here_must_have_been_equal_there(device: str) -> None:
    def tied() -> nn.Sequential:
        pair = (nn.Linear(2, 2, bias=False, device=name) for name in (device, "cpu"))
        model = nn.Sequential(*pair)
        model[1].weight = model[0].weight
        return model

    source = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with pytest.raises(IncompatibleError, match=r"^m.* and m.* share.*untie them"):
        load(save({"m": source}), {"m": tied()})
    source[1].load_state_dict(source[0].state_dict())
    load(save({"m": source}), {"m": (target := tied())})
    assert target[0].weight is target[1].weight
    assert torch.equal(target.state_dict()["1.weight"], source.state_dict()["1.weight"])


def test_a_sharded_module_and_its_fresh_optimizer_are_restored(mesh: Any) -> None:
    def pair(device: str = "cpu") -> dict[str, Any]:
        model = nn.Linear(4, 3, device=device)
        fully_shard(model, mesh=mesh)
        return {"model": model, "optim": torch.optim.AdamW(model.parameters())}

    source = pair()
    for p in source["model"].parameters():
        p.grad = torch.ones_like(p)
    source["optim"].step()
    saved = save(source)
    target = pair()
    load(saved, target)
    state = target["optim"].state[target["model"].weight]
    assert isinstance(state["exp_avg"], DTensor)
    expected = source["optim"].state[source["model"].weight]
    assert torch.equal(state["exp_avg"].full_tensor(), expected["exp_avg"].full_tensor())
    assert not isinstance(state["step"], DTensor)
    assert torch.equal(target["model"].weight.full_tensor(), source["model"].weight.full_tensor())

    meta = pair("meta")
    load(saved, {"model": meta["model"]}, include="model")
    assert torch.equal(meta["model"].weight.full_tensor(), source["model"].weight.full_tensor())


def test_the_step_of_a_parameter_without_dimensions_stays_a_plain_tensor(mesh: Any) -> None:
    def pair() -> dict[str, Any]:
        scale = nn.Parameter(distribute_tensor(torch.tensor(1.0), mesh, [Replicate()]))
        model = nn.ParameterDict({"scale": scale})
        return {"model": model, "optim": torch.optim.AdamW(model.parameters())}

    source, target = pair(), pair()
    source["model"]["scale"].grad = torch.ones_like(source["model"]["scale"])
    source["optim"].step()
    load(save(source), target)
    state = target["optim"].state[target["model"]["scale"]]
    assert type(state["step"]) is torch.Tensor
    assert type(state["exp_avg"]) is DTensor


def test_meta_dtensors_come_on_the_device_of_their_mesh(mesh: Any) -> None:
    saved = save({"a": torch.arange(4.0)})
    state = {"a": distribute_tensor(torch.empty(4, device="meta"), mesh, [Shard(0)])}
    load(saved, state)
    assert state["a"].full_tensor().tolist() == [0, 1, 2, 3]


# --- parts -----------------------------------------------------------------------------------


def test_parts_load_into_other_parts() -> None:
    t = torch.arange(12.0).reshape(4, 3)
    saved = save({"w": t})
    box, flat = torch.zeros(2, 2), torch.zeros(5)
    binding = load(saved, {"w": LocalShard(box, (4, 3), (1, 1))})
    assert torch.equal(box, t[1:3, 1:])
    assert binding.resharded == ("w",)
    load(saved, {"w": FlatShard(flat, (4, 3), 4)})
    assert flat.tolist() == [4, 5, 6, 7, 8]
    refuses(
        {"w": LocalShard(box, (5, 3), (1, 1))}, saved, r"shape \(4, 3\), the state has \(5, 3\)"
    )


TP = ShardingConfig({"tp": 2}, {"*w": {"tp": 0}})


def tp_state(rows: int, fill: float = 0.0) -> dict[str, Any]:
    model = nn.ParameterDict({"w": nn.Parameter(torch.full((rows, 2), fill))})
    return {"model": model, "optim": torch.optim.Adagrad(model.parameters())}


def test_a_config_cuts_uneven_on_save_and_as_chunk_does_on_load() -> None:
    first, second = tp_state(1, 1.0), tp_state(4, 2.0)
    first["optim"].state[first["model"]["w"]]["sum"].fill_(5)
    second["optim"].state[second["model"]["w"]]["sum"].fill_(6)
    saved = save(first, second, sharding=TP)
    assert saved.catalog.tensors["optim.state.model.w.sum"].shape == (5, 2)
    target = tp_state(3)
    target["optim"].state.clear()
    load(saved, target, rank=0, world_size=2, sharding=TP)
    assert target["model"]["w"].tolist() == [[1, 1], [2, 2], [2, 2]]
    assert target["optim"].state[target["model"]["w"]]["sum"].tolist() == [[5, 5], [6, 6], [6, 6]]
    target = tp_state(2)
    load(saved, target, rank=1, world_size=2, sharding=TP)
    assert target["optim"].state[target["model"]["w"]]["sum"].tolist() == [[6, 6], [6, 6]]
    refuses(tp_state(3), saved, "this rank has another part", rank=1, world_size=2, sharding=TP)


# --- objects ---------------------------------------------------------------------------------


def test_an_object_gets_what_was_saved_with_its_own_tensors_filled() -> None:
    source = Stateful({"t": torch.ones(2), "n": {1: "x"}, "grown": [torch.ones(3)]})
    own = torch.zeros(2)
    target = Stateful({"t": own, "grown": []})
    load(save({"o": source}), {"o": target})
    assert target.loaded["t"] is own
    assert own.tolist() == [1, 1]
    assert target.loaded["n"] == {1: "x"}
    assert target.loaded["grown"][0].tolist() == [1, 1, 1]


def test_an_object_without_state_at_the_load_still_gets_it() -> None:
    target = Stateful({})
    load(save({"o": Stateful({"t": torch.ones(1)}), "p": Stateful({})}), {"o": target, "p": target})
    assert target.loaded == {}


def test_an_object_is_loaded_as_a_whole() -> None:
    saved = save({"o": Stateful({"t": torch.ones(1), "n": 1})})
    refuses({"o": Stateful({})}, saved, "'o.n' is left out", exclude="o.n")
    target = Stateful({})
    load(saved, {"o": target}, exclude="o")
    assert target.loaded is None


def test_schedulers_come_back() -> None:
    def pair() -> dict[str, Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
        return {"m": model, "o": optimizer, "s": scheduler}

    source, target = pair(), pair()
    for _ in range(3):
        source["o"].step()
        source["s"].step()
    load(save(source), target)
    assert target["s"].state_dict() == source["s"].state_dict()
    assert type(target["s"].milestones) is Counter
    assert target["o"].param_groups[0]["lr"] == source["o"].param_groups[0]["lr"]


# --- per-rank values -------------------------------------------------------------------------


def test_a_per_rank_value_comes_back_by_its_key() -> None:
    saved = save(
        {"p": PerRank(10), "o": PerRank(Stateful("a"))},
        {"p": PerRank(11), "o": PerRank(Stateful("b"))},
    )
    target = Stateful(None)
    wrapper = PerRank(0)
    state = {"p": wrapper, "o": PerRank(target)}
    load(saved, state, rank=1, world_size=2, keys={"p": (0, 1), "o": (0, 1)})
    assert state["p"] is wrapper
    assert wrapper.value == 11
    assert target.loaded == "b"
    assert saved.read == [1]


def test_other_keys_than_saved_follow_the_policy_of_the_template() -> None:
    saved = save(*({"p": PerRank(r, key=("dp", r))} for r in range(3)))
    keys = {"p": (("dp", 0), ("dp", 1))}

    def state(policy: Any) -> dict[str, Any]:
        return {"p": PerRank(-1, key=("dp", 0), on_reshard=policy)}

    refuses(state("error"), saved, "an argument of its dc.PerRank", world_size=2, keys=keys)
    kept = state("drop")
    binding = load(saved, kept, world_size=2, keys=keys)
    assert kept["p"].value == -1
    assert binding.dropped == ("p",)
    assert binding.unrequested == ()
    merged = state(lambda values, key: (sum(values.values()), key))
    load(saved, merged, world_size=2, keys=keys)
    assert merged["p"].value == (3, ("dp", 0))


def test_a_policy_that_is_a_function_is_called_once_and_not_for_a_load_that_is_refused() -> None:
    saved = save({"p": PerRank(1, key="a"), "r": RNG(key="a")})
    called: list[Any] = []

    def policy(values: Any, key: Any) -> Any:
        called.append(values)
        return values["a"]

    state: dict[str, Any] = {
        "p": PerRank(-1, key="b", on_reshard=policy),
        "r": RNG(key="b", on_reshard=policy),
    }
    keys = {"p": ("b",), "r": ("b",)}
    refuses({**state, "new": 1}, saved, "the checkpoint lacks new", keys=keys)
    assert called == []
    load(saved, state, keys=keys)
    assert state["p"].value == 1
    assert {"a": 1} in called
    assert len(called) == 2


def test_what_is_no_state_of_generators_is_told_with_its_name() -> None:
    saved = save({"r": PerRank({"dice": 1})})
    refuses({"r": RNG()}, saved, r"^r: the saved value is not a state of random")


def test_what_was_loaded_into_is_let_go_of_with_its_last_reference() -> None:
    def state() -> dict[str, Any]:
        model = nn.Linear(2, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"m": model, "o": optimizer, "s": {"x": torch.ones(2), "y": 1}}

    saved = save(state())
    load(saved, state())  # what torch keeps of a first step
    gc.collect()
    gc.disable()
    try:
        held = state()
        seen = [weakref.ref(held["m"]), weakref.ref(held["o"])]
        load(saved, held)
        del held
        assert [one() for one in seen] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("now", "same"),
    [
        ({"x": 1, "dp": 4, "tp": 2}, True),
        ({"dp": 2, "tp": 4}, False),
        ({"dp": 8}, False),
        ({"a": 4, "b": 2}, False),
    ],
)
def test_meshes_are_the_same_if_their_axes_are(now: dict[str, int], same: bool) -> None:
    config = ShardingConfig({"dp": 4, "tp": 2})
    saved = save(*({"p": PerRank(r)} for r in range(8)), sharding=config)
    state = {"p": PerRank(-1)}
    options = {"world_size": 8, "keys": {"p": range(8)}, "sharding": ShardingConfig(now)}
    if same:
        load(saved, state, **options)
    else:
        refuses(state, saved, "no meaning", **options)


def test_a_rank_means_another_thing_on_another_mesh() -> None:
    def config(dp: int, tp: int) -> ShardingConfig:
        return ShardingConfig({"dp": dp, "tp": tp})

    saved = save(
        *({"p": PerRank(r), "q": PerRank(0, key="all")} for r in range(4)), sharding=config(2, 2)
    )
    keys = {"p": (0, 1, 2, 3), "q": ("all",)}

    def state() -> dict[str, Any]:
        return {"p": PerRank(-1), "q": PerRank(-1, key="all")}

    refuses(
        state(), saved, "dp 2 x tp 2.*dp 1 x tp 4", world_size=4, keys=keys, sharding=config(1, 4)
    )
    same = state()
    load(saved, same, rank=2, world_size=4, keys=keys, sharding=config(2, 2))
    assert (same["p"].value, same["q"].value) == (2, 0)


def test_an_open_template_takes_per_rank_values_only_where_ranks_are_the_same() -> None:
    saved = save({"p": PerRank(5), "q": PerRank(6, key="x"), "n": 1})
    state: dict[str, Any] = {}
    binding = load(saved, state)
    assert state["p"].value == 5
    assert "q" not in state
    assert binding.dropped == ("q",)
    two = save({"p": PerRank(5)}, {"p": PerRank(6)})
    state = {}
    assert load(two, state).dropped == ("p",)
    assert state == {}


def test_generators_are_restored_last() -> None:
    drawn = []

    class Draws(Stateful):
        def load_state_dict(self, state: Any) -> None:
            drawn.append(random.random())

    random.seed(5)
    torch.manual_seed(5)
    saved = save({"rng": RNG(), "o": Stateful(1)})
    expected = random.random(), torch.rand(1)
    load(saved, {"rng": RNG(), "o": Draws(1)})
    assert drawn
    assert (random.random(), torch.rand(1)) == expected


# --- include, exclude, rename ----------------------------------------------------------------


def test_include_and_exclude_cut_both_sides() -> None:
    saved = save({"m": {"a": torch.ones(1), "b": torch.ones(1)}, "n": 1})
    state = {"m": {"a": torch.zeros(1), "b": torch.zeros(2), "c": torch.zeros(1)}, "other": 5}
    binding = load(saved, state, include="m", exclude=["m.b", "m.c"])
    assert state["m"]["a"] == 1  # type: ignore[index]
    assert (binding.missing, binding.unrequested) == ((), ())
    opened: dict[str, Any] = {}
    load(saved, opened, include="m.a")
    assert opened == {"m": {"a": torch.ones(1)}}


def test_renamed_names_go_where_the_state_has_them() -> None:
    layer, target_layer = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model = nn.Sequential(layer)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    saved = save({"encoder": model, "optim": optimizer, "step": 3, "old": 1})
    target = nn.ModuleDict({"backbone": nn.Sequential(target_layer)})
    other = torch.optim.Adagrad(target.parameters())
    other.state.clear()
    state = {"model": target, "opt": other, "n": {"step": 0, "t": torch.ones(1)}}
    rename = {
        "encoder.*": "model.backbone.*",
        "optim.state.encoder.*": "opt.state.model.backbone.*",
        "optim.param_groups.*": "opt.param_groups.*",
        "step": "n.step",
        "old": None,
    }
    binding = load(saved, state, rename=rename, exclude="n.t")
    assert torch.equal(target_layer.weight, layer.weight)
    assert "sum" in other.state[target_layer.weight]
    assert other.param_groups[0]["lr"] == 0.5
    assert state["n"]["step"] == 3  # type: ignore[index]
    assert binding.dropped == ("old",)


def test_an_open_template_keeps_the_structure_of_what_was_moved() -> None:
    saved = save({"ema": {"shadow": [torch.ones(1), 2]}, "x": {"w": torch.ones(1), "v": 1}})
    state: dict[str, Any] = {}
    load(saved, state, rename={"ema.*": "average.*", "x.w": "x.weight"})
    assert list(state) == ["x", "average"]
    assert state["average"]["shadow"][1] == 2
    assert list(state["x"]) == ["v", "weight"]


def test_a_rename_that_does_not_fit_the_checkpoint_is_a_problem() -> None:
    saved = save({"a": {"w": torch.ones(1)}})
    refuses({"a": {"w": torch.ones(1)}}, saved, "matches no saved name", rename={"b.*": "c.*"})


def test_what_a_rename_leaves_without_a_place_is_unrequested() -> None:
    saved = save({"a": {"w": torch.ones(1)}})
    binding = saved.bind({"a": {"w": torch.ones(1)}}, rename={"a": "b"})
    assert binding.missing == ("a.w",)
    assert binding.unrequested == ("a.w",)


def test_a_key_of_another_class_than_saved_is_a_problem() -> None:
    saved = save({"a": {"0": torch.ones(1)}})
    refuses({"a": {0: torch.ones(1)}}, saved, "a.0: saved under the key '0', the state has 0")


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_saved_or_here_is_told(option: Any) -> None:
    options: dict[str, Any] = {option: ["modle", "model", "new"]}
    pattern_problems = save({"model": 1}).bind({"model": 1, "new": 2}, **options).pattern_problems
    assert pattern_problems == (f"{option}: 'modle' matches no name: correct or remove it",)


def test_many_unexpected_names_are_counted_by_component() -> None:
    few = unexpected_problem(["a.x", "b"])
    assert "2 names: a.x, b, which" in few
    many = unexpected_problem(["optim.state", *(f"m.{n}" for n in range(30)), "b"])
    assert "32 names: optim.state, m.0 and 29 more in 'm', b, which" in many


# --- damaged trees ---------------------------------------------------------------------------


def with_tree(*nodes: Node) -> Any:
    saved = save({"a": {"w": torch.ones(1)}, "v": 1, "p": PerRank(2)})
    main = ObjectsFile(tree=nodes, values={"v": 1})
    return lambda: build_saved_tree(saved.catalog, main, lambda _: ObjectsFile())


def test_trees_that_no_state_has_made_are_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"kind 'os\.system' is unknown"):
        with_tree(Node("", "os.system", ("a",)))()
    chain = [Node("", "dict", ("x",))]
    chain += [Node("x" + ".x" * n, "dict", ("x",)) for n in range(200)]
    with pytest.raises(CorruptError, match="nested deeper"):
        with_tree(*chain)()
    for root, key in (
        (Node("", "list", ()), "not a mapping"),
        (Node("", "dict", ("a",)), "with keys"),
    ):
        with pytest.raises(CorruptError, match=key):
            with_tree(root, Node("a", "list", ("w",)))()
    with pytest.raises(CorruptError, match=r"a\.w: saved as a container and as a tensor"):
        with_tree(Node("", "dict", ("a",)), Node("a", "dict", ("w",)), Node("a.w", "dict", ()))()
    own_child = with_tree(Node("", "dict", ("", "a")), Node("a", "dict", ("w",)))()
    assert [key for key, _ in own_child.children("")][:1] == ["a"]


def test_a_value_that_no_file_has_is_found_before_anything_is_touched() -> None:
    saved = save({"v": 1, "p": PerRank(2)})
    saved.lose_values()
    for state in ({"a": 0, "v": 0}, {"a": 0, "p": PerRank(0)}):
        with pytest.raises(CorruptError, match="no objects file has it"):
            saved.bind(state, include=["v", "p"])
        assert state["a"] == 0


# --- names that begin alike ------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        {"cfg.lr": 0.1, "cfg": "x", "t": 1},
        {"a": {}, "a.b": {}},
        {"a": 5, "a.b": {"c": 1}},
        {"a": {"b": 1}, "a.c": [2], "a.c.d": None},
    ],
)
@pytest.mark.parametrize("template", ["empty", "none", "mapping"])
def test_a_name_that_begins_like_another_is_not_inside_it(state: Any, template: str) -> None:
    state = {"inner": {**state, "w": torch.ones(1)}}
    saved = save(state)
    mine: dict[str, Any] = {}
    if template != "empty":
        mine = {"inner": {key: None if template == "none" else {} for key in state["inner"]}}
    binding = load(saved, mine)
    mine["inner"].pop("w")
    state["inner"].pop("w")
    assert mine == state
    assert binding.unrequested == ()


def test_a_tensor_and_what_begins_with_its_name_both_come_back() -> None:
    saved = save({"model": {"a.b": torch.zeros(2), "a": torch.ones(2)}})
    state: dict[str, Any] = {}
    load(saved, state)
    assert list(state["model"]) == ["a.b", "a"]
    assert torch.equal(state["model"]["a"], torch.ones(2))
    assert torch.equal(state["model"]["a.b"], torch.zeros(2))


def test_an_object_gets_a_tensor_and_what_begins_with_its_name() -> None:
    saved = save({"ema": Stateful({"ema": torch.ones(2), "ema.step": 3})})
    target = Stateful({"ema": torch.zeros(2), "ema.step": 0})
    load(saved, {"ema": target})
    assert target.loaded["ema.step"] == 3
    assert torch.equal(target.loaded["ema"], torch.ones(2))


# --- memory that is shared -------------------------------------------------------------------


def overlapping() -> list[Any]:
    t, n, c = torch.zeros(6), np.zeros(6, "f4"), torch.zeros(6, dtype=torch.complex64)
    u = torch.zeros(6, dtype=torch.uint8)
    return [
        ({"a": torch.ones(4), "b": torch.zeros(4)}, {"a": t[:4], "b": t[2:]}),
        ({"a": torch.ones(6), "b": torch.ones(6).int()}, {"a": t, "b": t.view(torch.int32)}),
        ({"a": np.ones(4, "f4"), "b": np.zeros(4, "f4")}, {"a": n[:4], "b": n[2:]}),
        ({"a": torch.ones(6), "b": torch.zeros(2)}, {"a": t, "b": t[::4]}),
        ({"a": torch.tensor([1j] * 6), "b": torch.tensor([1j])}, {"a": c, "b": c[3:4].conj()}),
        ({"a": torch.ones(6).byte(), "b": torch.zeros(()).byte()}, {"a": u, "b": u[5]}),
    ]


@pytest.mark.parametrize("number", range(len(overlapping())))
def test_tensors_that_share_memory_must_agree_in_what_was_saved(number: int) -> None:
    state, target = overlapping()[number]
    state["c"] = target["c"] = torch.zeros(3)
    with pytest.raises(IncompatibleError, match=r"^[ab] and [ab] share memory .*clone"):
        load(save(state), target)


def test_what_shared_memory_at_the_save_as_well_comes_back() -> None:
    def pair(whole: torch.Tensor) -> dict[str, Any]:
        words = whole.view(torch.int32)
        return {"a": whole[:4], "b": whole[2:], "words": words, "n": torch._neg_view(whole)}

    target = torch.zeros(6)
    load(save(pair(torch.arange(6.0))), state := pair(target))
    assert torch.equal(target, torch.arange(6.0))
    assert torch.equal(state["n"], -torch.arange(6.0))


def test_views_that_interleave_share_nothing() -> None:
    saved = save({"a": torch.arange(4.0), "b": -torch.arange(4.0), "c": torch.ones(2, 3)})
    t, m = torch.zeros(8), torch.zeros(2, 6)
    load(saved, {"a": t[::2], "b": t[1::2], "c": m[:, :3]})
    assert torch.equal(t, torch.stack([torch.arange(4.0), -torch.arange(4.0)], 1).flatten())
    assert torch.equal(m[:, 3:], torch.zeros(2, 3))


def test_each_of_many_tensors_of_one_kind_is_looked_at() -> None:
    names = [f"w{number}" for number in range(9)]
    saved = save({name: torch.full((4,), float(name[1:])) for name in names})
    state: dict[str, Any] = {name: torch.zeros(4) for name in names}
    load(saved, state)
    assert [state[name][0].item() for name in names] == list(range(9))
    state["w1"] = torch.zeros(1).expand(4)
    state["w2"] = torch.zeros(4, dtype=torch.float64)
    state["w3"] = torch.zeros(2, 2)
    state["w4"] = torch.zeros(4)
    state["w4"].untyped_storage().resize_(8)
    state["w5"] = torch.zeros(4).to_sparse()
    with pytest.raises(IncompatibleError, match="w1: ") as error:
        load(saved, state)
    for number, what in enumerate(("overlaps itself", "float64", "shape", "freed", "sparse"), 1):
        assert any(f"w{number}" in line and what in line for line in str(error.value).splitlines())
    state = {name: torch.zeros(4) for name in names}
    for one in (state["w0"], state["w0"].view(4)):
        with pytest.raises(IncompatibleError, match=r"w[06] and w[06] share memory"):
            load(saved, state | {"w6": one})


def test_a_container_and_a_tensor_do_not_have_one_name() -> None:
    state = {"a": {"b": {"x": torch.ones(1)}}, "a.b": torch.ones(2)}
    with pytest.raises(ValueError, match=r"a\.b: two paths"):
        save(state)
    saved = save({"a": {"w": torch.ones(1)}, "b": torch.ones(2)})
    refuses({}, saved, "rename: 'a' would be a container and 'b'", rename={"b": "a"})
    with pytest.raises(ValueError, match=r"a\.b: two paths"):
        load(saved, state)


# --- code of the user's ----------------------------------------------------------------------


class Broken(Stateful):
    def load_state_dict(self, state: Any) -> None:
        raise KeyError("gone")


class Mute(Stateful):
    def state_dict(self) -> Any:
        raise ZeroDivisionError("by zero")


def test_what_the_users_code_raises_is_told_with_its_name() -> None:
    with pytest.raises(CheckpointError, match=r"^x\.y: state_dict of Mute raised ZeroDiv") as told:
        save({"x": {"y": Mute(None)}})
    assert isinstance(told.value.__cause__, ZeroDivisionError)
    with pytest.raises(CheckpointError, match=r"^x: state_dict of Mute raised"):
        save({"x": PerRank(Mute(None))})
    saved = save({"x": Stateful({"a": 1}), "y": PerRank(1, key="old")})
    states: list[tuple[Any, str]] = [
        (
            {"x": Broken({}), "y": PerRank(0, key="old")},
            r"^x: load_state_dict of Broken raised Key",
        ),
        (
            {"x": 0, "y": PerRank(0, key="new", on_reshard=lambda values, key: values[key])},
            r"^y: on_reshard of function raised KeyError",
        ),
    ]
    for state, message in states:
        with pytest.raises(CheckpointError, match=message):
            load(saved, state)
