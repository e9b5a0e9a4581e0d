"""`rename` with operations: stacked and per-expert weights, transposed and fused, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dist_ckpt as dc
from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.checkpoint.renamed_checkpoint import rename_checkpoint
from dist_ckpt.core.storage import open_storage
from dist_ckpt.testing.memory_storage import MemoryStorage
from long_mode import examples
from ranks import load_on_threads, save_on_threads
from subclass_tensors import Pair

EXPERTS, HIDDEN, INNER = 3, 4, 6
GATE, UP = "model.layers.{n}.experts.{e}.gate", "model.layers.{n}.experts.{e}.up"
GATE_UP, DOWN = "model.layers.{n}.gate_up", "model.layers.{n}.experts.{e}.down"

STACKED = {
    (GATE, UP): [dc.Concatenate(), dc.Transpose(), dc.Stack("e"), GATE_UP],
    DOWN: [dc.Transpose(), dc.Stack("e"), "model.layers.{n}.down"],
}
PER_EXPERT = {
    GATE_UP: [dc.Unstack("e"), dc.Transpose(), dc.Split(), (GATE, UP)],
    "model.layers.{n}.down": [dc.Unstack("e"), dc.Transpose(), DOWN],
}


class Expert(nn.Module):
    """As in most checkpoints of others: three matrices, an expert."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(inner, HIDDEN)) for _ in range(2))
        self.down = nn.Parameter(torch.randn(HIDDEN, inner))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.norm = nn.Parameter(torch.randn(HIDDEN))


class FusedLayer(nn.Module):
    """As in fused kernels: the experts in one tensor, gate and up beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, 2 * INNER))
        self.down = nn.Parameter(torch.zeros(EXPERTS, INNER, HIDDEN))
        self.norm = nn.Parameter(torch.zeros(HIDDEN))


class Net(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))


def trained(layer: type[nn.Module], steps: int = 2, **options: Any) -> tuple[Any, Any]:
    model = Net(layer)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def fused(experts: Sequence[Any], pick: Any = lambda p: p) -> dict[str, Any]:
    """Fuse with torch what a load fuses; `pick` takes the weights, or their moments."""
    both = [torch.cat([pick(e.gate), pick(e.up)]).T for e in experts]
    return {"gate_up": torch.stack(both), "down": torch.stack([pick(e.down).T for e in experts])}


def state_of(optimizer: Any, key: str, parameter: Any) -> Any:
    return optimizer.state[parameter][key]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ck"


def test_experts_are_stacked_and_fused_with_their_moments_and_come_back(path: Path) -> None:
    model, optimizer = trained(Layer)
    dc.save({"model": model, "optim": optimizer}, path)
    stacked, moments = trained(FusedLayer, steps=0)
    report = dc.load({"model": stacked, "optim": moments}, path, rename=STACKED)
    assert not report.unexpected
    assert not report.missing
    assert not report.as_saved
    for old, new in zip(model.layers, stacked.layers, strict=True):
        for name, value in fused(old.experts).items():
            assert torch.equal(getattr(new, name), value)
        assert torch.equal(new.norm, old.norm)
        for key in ("exp_avg", "exp_avg_sq"):
            moment = partial(state_of, optimizer, key)
            for name, value in fused(old.experts, moment).items():
                assert torch.equal(moments.state[getattr(new, name)][key], value)
        assert float(moments.state[new.gate_up]["step"]) == 2
    dc.save({"model": stacked, "optim": moments}, path.parent / "stacked")
    again, optim_again = trained(Layer, steps=0)
    dc.load({"model": again, "optim": optim_again}, path.parent / "stacked", rename=PER_EXPERT)
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(new, old)
        for key, value in optimizer.state[old].items():
            assert torch.equal(optim_again.state[new][key], value)


def test_the_weights_of_conv1d_are_transposed_and_split_into_q_k_and_v(path: Path) -> None:
    saved = {"h.0.attn.c_attn.weight": torch.randn(4, 12), "h.0.attn.c_attn.bias": torch.randn(12)}
    dc.save({"model": saved}, path)
    names = tuple(f"model.l.{{n}}.{name}.weight" for name in "qkv")
    biases = tuple(f"model.l.{{n}}.{name}.bias" for name in "qkv")
    live = {f"l.0.{n}.weight": torch.zeros(4, 4) for n in "qkv"}
    live |= {f"l.0.{n}.bias": torch.zeros(4) for n in "qkv"}
    dc.load(
        {"model": live},
        path,
        rename={
            "model.h.{n}.attn.c_attn.weight": [dc.Transpose(), dc.Split(), names],
            "model.h.{n}.attn.c_attn.bias": [dc.Split(), biases],
        },
    )
    for n, part in zip("qkv", saved["h.0.attn.c_attn.weight"].T.chunk(3), strict=True):
        assert torch.equal(live[f"l.0.{n}.weight"], part)
    for n, part in zip("qkv", saved["h.0.attn.c_attn.bias"].chunk(3), strict=True):
        assert torch.equal(live[f"l.0.{n}.bias"], part)


def test_parts_of_unequal_sizes_are_joined_and_cut_again(path: Path) -> None:
    q, k, v = torch.randn(6, 2), torch.randn(2, 2), torch.randn(2, 2)
    dc.save({"q": q, "k": k, "v": v}, path)
    live = {"qkv": torch.zeros(10, 2)}
    dc.load(live, path, rename={("q", "k", "v"): [dc.Concatenate(), "qkv"]})
    assert torch.equal(live["qkv"], torch.cat([q, k, v]))
    dc.save(live, path.parent / "joined")
    parts = {"q": torch.zeros(6, 2), "k": torch.zeros(2, 2), "v": torch.zeros(2, 2)}
    rule = {"qkv": [dc.Split(sizes=(6, 2, 2)), ("q", "k", "v")]}
    dc.load(parts, path.parent / "joined", rename=rule)
    assert all(torch.equal(parts[n], t) for n, t in {"q": q, "k": k, "v": v}.items())


def test_a_cast_an_empty_state_and_a_source_take_operations_too(path: Path) -> None:
    weight = torch.randn(3, 5)
    dc.save({"model": {"w": weight, "b": torch.ones(2)}}, path)
    rule = {"model.w": [dc.Transpose(), "model.w"]}
    live = {"model": {"w": torch.zeros(5, 3, dtype=torch.bfloat16), "b": torch.zeros(2)}}
    dc.load(live, path, rename=rule, cast=True)
    assert torch.equal(live["model"]["w"], weight.T.to(torch.bfloat16))
    state: dict[str, Any] = {}
    dc.load(state, path, rename=rule)
    assert torch.equal(state["model"]["w"], weight.T)
    assert [*state["model"]] == ["b", "w"]
    two = {"a": {"w": torch.zeros(5, 3)}, "b": {"w": torch.zeros(3, 5)}}
    dc.load(
        two,
        {
            "a": dc.Source(path, include="a.w", rename={"model.w": [dc.Transpose(), "a.w"]}),
            "b": dc.Source(path, include="b.w", rename={"model.w": "b.w"}),
        },
    )
    assert torch.equal(two["a"]["w"], weight.T)
    assert torch.equal(two["b"]["w"], weight)


def test_two_sources_of_one_checkpoint_make_one_name_in_two_ways(path: Path) -> None:
    weight = torch.randn(3, 3)
    dc.save({"w": weight}, path)
    state = {"a": {"w": torch.zeros(3, 3)}, "b": {"w": torch.zeros(3, 3)}}
    turn = {"w": [dc.Transpose(), "a.w"]}
    keep = {"w": [dc.Split(sizes=(3,)), "b.w"]}
    dc.load(state, {"a": dc.Source(path, rename=turn), "b": dc.Source(path, rename=keep)})
    assert torch.equal(state["a"]["w"], weight.T)
    assert torch.equal(state["b"]["w"], weight)


def test_of_two_sources_that_make_one_name_the_first_provides_it(path: Path) -> None:
    weight = torch.randn(3, 3)
    dc.save({"w": weight}, path)
    first = dc.Source(path, rename={"w": [dc.Transpose(), "v"]})
    second = dc.Source(path, rename={"w": [dc.Split(sizes=(3,)), "v"]})
    state = {"v": torch.zeros(3, 3)}
    dc.load(state, [first, second], strict=False)
    assert torch.equal(state["v"], weight.T)


def test_more_than_ten_are_stacked_by_their_numbers(path: Path) -> None:
    dc.save({f"e.{n}": torch.tensor(float(n)) for n in reversed(range(12))}, path)
    live = {"x": torch.zeros(12)}
    dc.load(live, path, rename={"e.{e}": [dc.Stack("e"), "x"]})
    assert live["x"].tolist() == [*range(12)]


def test_a_tied_name_takes_operations(path: Path) -> None:
    weight = torch.randn(2, 3)
    dc.save({"a": weight, "b": weight}, path)
    live = {"a": torch.zeros(2, 3), "turned": torch.zeros(3, 2)}
    dc.load(live, path, rename={"b": [dc.Transpose(), "turned"]})
    assert torch.equal(live["a"], weight)
    assert torch.equal(live["turned"], weight.T)


def test_a_meta_model_is_filled_by_operations(path: Path) -> None:
    model, _ = trained(Layer, steps=0)
    dc.save({"model": model}, path)
    with torch.device("meta"):
        stacked: Any = Net(FusedLayer)
    dc.load({"model": stacked}, path, rename=STACKED)
    for old, new in zip(model.layers, stacked.layers, strict=True):
        assert torch.equal(new.gate_up, fused(old.experts)["gate_up"])


def test_the_bytes_of_a_state_take_operations() -> None:
    weight = torch.randn(2, 3)
    live = {"w": torch.zeros(3, 2)}
    dc.load_bytes(live, dc.to_bytes({"w": weight}), rename={"w": [dc.Transpose(), "w"]})
    assert torch.equal(live["w"], weight.T)


# --- any layout ---------------------------------------------------------------------------------


def shards(tensor: Any, world_size: int, way: str) -> list[Any]:
    """Return the part of each rank."""
    if way == "flat":
        size = -(-tensor.numel() // world_size)
        parts = tensor.flatten().split(size)
        return [dc.FlatShard(p.clone(), tensor.shape, size * n) for n, p in enumerate(parts)]
    dim = int(way)
    chunks = tensor.chunk(world_size, dim)
    parts = [*chunks, *[tensor.narrow(dim, 0, 0)] * (world_size - len(chunks))]
    offset, made = 0, []
    for part in parts:
        at = [0] * tensor.dim()
        at[dim] = offset
        offset += part.shape[dim]
        made.append(dc.LocalShard(part.clone(), tensor.shape, at))
    return made


def ranks_of(tensors: Mapping[str, Any], world_size: int, way: str) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = [{} for _ in range(world_size)]
    for name, tensor in tensors.items():
        for state, shard in zip(states, shards(tensor, world_size, way), strict=False):
            state[name] = shard
    return states


def check_parts(states: Sequence[Mapping[str, Any]], expected: Mapping[str, Any]) -> None:
    for state in states:
        for name, shard in state.items():
            if isinstance(shard, dc.FlatShard):
                stop = shard.start + shard.tensor.numel()
                wanted = expected[name].flatten()[shard.start : stop]
                assert torch.equal(shard.tensor.flatten(), wanted)
            else:
                pairs = zip(shard.offset, shard.tensor.shape, strict=True)
                index = tuple(slice(o, o + n) for o, n in pairs)
                assert torch.equal(shard.tensor, expected[name][index])


WAYS = st.sampled_from(["0", "1", "flat"])


@given(st.sampled_from([1, 2, 4]), WAYS, st.sampled_from([1, 2, 4]), WAYS)
@examples(8)
def test_experts_are_stacked_from_any_layout_into_any_layout(
    saved_by: int, saved_way: str, loaded_by: int, loaded_way: str
) -> None:
    experts = {f"e.{n}.{k}": torch.randn(5, 4) for n in range(3) for k in ("gate", "up")}
    storage = MemoryStorage()
    save_on_threads(storage, ranks_of(experts, saved_by, saved_way))
    both = [torch.cat([experts[f"e.{n}.gate"], experts[f"e.{n}.up"]]).T for n in range(3)]
    expected = {"all": torch.stack(both)}
    empty = {"all": torch.full((3, 4, 10), -1.0)}
    states = ranks_of(empty, loaded_by, loaded_way)
    rule = [dc.Concatenate(), dc.Transpose(), dc.Stack("e"), "all"]
    load_on_threads(storage, states, rename={("e.{e}.gate", "e.{e}.up"): rule})
    check_parts(states, expected)
    stacked = MemoryStorage()
    save_on_threads(stacked, ranks_of(expected, loaded_by, loaded_way))
    back = ranks_of({n: torch.full((5, 4), -1.0) for n in experts}, saved_by, saved_way)
    cut = [dc.Unstack("e"), dc.Transpose(), dc.Split(), ("e.{e}.gate", "e.{e}.up")]
    load_on_threads(stacked, back, rename={"all": cut})
    check_parts(back, experts)


def test_each_rank_takes_its_own_experts() -> None:
    storage, weight = MemoryStorage(), torch.randn(4, 2, 2)
    save_on_threads(storage, [{"w": weight}])
    states = [{f"e.{n}": torch.zeros(2, 2) for n in (2 * rank, 2 * rank + 1)} for rank in range(2)]
    load_on_threads(storage, states, rename={"w": [dc.Unstack("e"), "e.{e}"]})
    for state in states:
        for name, tensor in state.items():
            assert torch.equal(tensor, weight[int(name[2:])])
    del states[1]["e.3"]
    with pytest.raises(dc.IncompatibleError, match=r"the state does not have e\.3, which"):
        load_on_threads(storage, states, rename={"w": [dc.Unstack("e"), "e.{e}"]})
    report = load_on_threads(
        storage, states, rename={"w": [dc.Unstack("e"), "e.{e}"]}, strict=False
    )
    assert report.unexpected == ("e.3",)


# --- what has no meaning is refused by name, before anything is touched -------------------------


def test_a_rule_that_makes_no_sense_is_refused(path: Path) -> None:
    dc.save({"w": torch.zeros(2, 2)}, path)
    for rules, words in [
        ({"w": []}, "a list of operations that ends with the new name"),
        ({"w": [dc.Transpose()]}, "a list of operations that ends with the new name"),
        ({"w": ["transpose", "v"]}, "'transpose' is not an operation: give dc.Stack"),
        ({"w": [dc.Transpose, "v"]}, "is not an operation"),
        ({("w", "x"): "v"}, "a list of operations"),
        ({("w", "x"): [dc.Transpose(), "v"]}, "make 2 tensors, and there are 1 new names"),
        ({("w", "x"): [dc.Split(), ("a", "b")]}, "Split takes one tensor: Concatenate them first"),
        ({"w": [dc.Split(sizes=(1, 1)), ("a",)]}, "make 2 tensors, and there are 1"),
        ({"w": [dc.Split(sizes=()), ("a",)]}, r"sizes=\(\)"),
        ({"w": [dc.Transpose("0"), "a"]}, "dim0='0': give a whole number"),  # type: ignore[arg-type]
        ({"w": [dc.Stack("e"), "a"]}, r"the saved name has no \{e\}"),
        ({"w.{e}": [dc.Stack("e"), "a.{e}"]}, r"each wildcard, but see \{e\}"),
        ({"w.{e}": [dc.Unstack("e"), "a.{e}"]}, r"\{e\} is already in the saved name"),
        ({"w": [dc.Unstack("e"), "a"]}, r"each wildcard, but see \{e\}"),
        ({"w": [dc.Unstack("1"), "a"]}, "over='1': give the word of a wildcard"),
        ({("w.{a}", "x.{b}"): [dc.Concatenate(), "v.{a}"]}, "the same wildcards"),
        ({"*.w": [dc.Transpose(), "v"]}, "each wildcard, but see `*`"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            dc.load({"w": torch.zeros(2, 2)}, path, rename=rules)  # type: ignore[arg-type]


def refused(
    saved: Mapping[str, Any], live: dict[str, Any], rules: Mapping[Any, Any], path: Path, words: str
) -> None:
    """Check that a load names the problem and changes nothing."""
    dc.save(saved, path, overwrite=True)
    before = {name: tensor.clone() for name, tensor in live.items()}
    with pytest.raises(dc.IncompatibleError, match=words):
        dc.load(live, path, rename=rules)
    assert all(torch.equal(live[name], tensor) for name, tensor in before.items())


def test_a_missing_expert_is_named(path: Path) -> None:
    experts = {f"e.{n}.w": torch.randn(2) for n in (0, 1, 3)}
    rule = {"e.{e}.w": [dc.Stack("e"), "all"]}
    refused(experts, {"all": torch.ones(4, 2)}, rule, path, r"'e\.2\.w' is not saved")
    pair = {"e.0.a": torch.ones(2), "e.1.a": torch.ones(2), "e.0.b": torch.ones(2)}
    both = {("e.{e}.a", "e.{e}.b"): [dc.Concatenate(), dc.Stack("e"), "all"]}
    refused(pair, {"all": torch.ones(2, 4)}, both, path, r"'e\.1\.b' is not saved")
    words = {"e.x.w": torch.ones(2)}
    refused(words, {"all": torch.ones(1, 2)}, rule, path, r"\{e\} is 'x', which is not a number")
    last = {f"e.{n}.w": torch.ones(2) for n in range(3)}
    refused(last, {"all": torch.ones(4, 2)}, rule, path, r"all: saved with shape \(3, 2\)")


@pytest.mark.parametrize("last", [5, None, dc.PerRank(torch.ones(2))])
def test_an_expert_that_is_no_tensor_is_named(path: Path, last: Any) -> None:
    """Such as one that `replicas={...: "per_rank"}` saved. Other values are not in the way."""
    dc.save({"e": {"0": torch.ones(2), "1": last, "count": 2}}, path)
    with pytest.raises(dc.IncompatibleError, match=r"'e\.1' is not saved as a tensor"):
        dc.load({}, path, rename={"e.{e}": [dc.Stack("e"), "x"]})
    dc.save({"e": {"0": torch.ones(2), "count": last}}, path, overwrite=True)
    state: dict[str, Any] = {"x": torch.zeros(1, 2)}
    dc.load(state, path, rename={"e.{e}": [dc.Stack("e"), "x"]}, strict=False)
    assert torch.equal(state["x"], torch.ones(1, 2))


def test_state_that_cannot_be_joined_is_in_the_way_only_if_it_is_loaded(path: Path) -> None:
    experts = nn.ParameterList(torch.randn(2, 2) for _ in range(2))
    optimizer = torch.optim.Adam(experts)
    experts[0].sum().backward()  # the other expert gets no gradient, and no state
    optimizer.step()
    dc.save({"model": experts, "optim": optimizer}, path)
    rule: dict[Any, Any] = {"model.{n}": [dc.Stack("n"), "model.w"]}
    live = nn.ParameterDict({"w": torch.zeros(2, 2, 2)})
    both = {"model": live, "optim": torch.optim.Adam(live.values())}
    with pytest.raises(dc.IncompatibleError, match=r"'optim.state.model.1.step' is not saved"):
        dc.load(both, path, rename=rule)
    ways: list[Any] = [
        {"rename": rule, "exclude": "optim"},
        {"rename": {**rule, "optim": None}},
        {"rename": {**rule, "optim.state.*": None, "optim.param_groups": None}},
    ]
    for options in ways:
        state = {"model": nn.ParameterDict({"w": torch.zeros(2, 2, 2)})}
        dc.load(state, path, **options)
        assert torch.equal(state["model"]["w"], torch.stack([*experts]))
    opened = OpenCheckpoint.at(open_storage(path)[0], str(path))
    with pytest.raises(dc.IncompatibleError, match="maps it to None"):
        rename_checkpoint(opened, rule)
    assert "model.w" in rename_checkpoint(opened, {**rule, "optim": None}).catalog.tensors


@pytest.mark.parametrize("what", ["lacking", "unequal"])
def test_state_that_cannot_be_joined_may_come_from_another_source(what: str, path: Path) -> None:
    model, other = plain("a", "b"), plain("ab", shape=(4, 3))
    optimizer, states = (torch.optim.Adam(m.parameters()) for m in (model, other))
    for names in ("a",) if what == "lacking" else ("ab", "a"):
        stepped(model, optimizer, *names)
    stepped(other, states)
    dc.save({"model": model, "optim": optimizer}, path)
    dc.save({"model": other, "optim": states}, other_path := path.parent / "other")
    joined = dc.Source(path, rename=JOIN)
    words = "is not saved" if what == "lacking" else "would be one value"
    with pytest.raises(dc.IncompatibleError, match=words):
        load_from([joined, other_path])
    for sources in (
        [dc.Source(path, rename=JOIN, exclude="optim"), other_path],
        [dc.Source(other_path, exclude="model"), joined],
        {"model": joined, "optim": other_path},
    ):
        live, loaded = load_from(sources)
        assert torch.equal(live.ab, torch.cat([model.a, model.b]))
        moment = loaded.state[live.ab]["exp_avg"]
        assert torch.equal(moment, states.state[other.ab]["exp_avg"])


def load_from(sources: Any) -> tuple[Any, Any]:
    live = plain("ab", shape=(4, 3))
    optimizer = torch.optim.Adam(live.parameters())
    dc.load({"model": live, "optim": optimizer}, sources)
    return live, optimizer


def test_unequal_shapes_and_dtypes_are_named(path: Path) -> None:
    rule = {"e.{e}": [dc.Stack("e"), "all"]}
    live = {"all": torch.ones(2, 2)}
    shapes = {"e.0": torch.ones(2), "e.1": torch.ones(3)}
    refused(shapes, live, rule, path, r"e\.0 has shape \(2,\), and e\.1 has shape \(3,\)")
    dtypes = {"e.0": torch.ones(2), "e.1": torch.ones(2, dtype=torch.float16)}
    refused(dtypes, live, rule, path, "e.0 is float32, and e.1 is float16")
    odd = {"w": torch.ones(5, 2)}
    split = {"w": [dc.Split(), ("a", "b")]}
    refused(odd, {"a": torch.ones(2, 2)}, split, path, "into 2 equal parts: give Split their sizes")


def test_two_sources_of_one_name_are_named(path: Path) -> None:
    saved = {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}
    live = {"b": torch.zeros(2, 2)}
    turn = [dc.Transpose(), "b"]
    refused(
        saved, live, {"a": turn}, path, "'b' would be made by operations, and 'b' has that name"
    )
    refused(saved, live, {"a": turn, "b": turn}, path, "another rule makes 'b' too")
    one = {"a": turn, "{x}": [dc.Transpose(), "{x}"]}
    refused(saved, live, one, path, "'a' is also matched by 'a'")
    plain = {"a": turn, "*": "x.*"}
    refused(saved, live, plain, path, r"'a' is also matched by \['\*'\]")
    gone = {"c": turn}
    refused(saved, live, gone, path, "'c' matches no saved tensor")
    names = {"w.0.1": torch.ones(2, 2), "w.01": torch.ones(2, 2)}
    meet = {"w.{a}.{b}": [dc.Transpose(), "w.{a}{b}"]}
    refused(names, live, meet, path, "'w.01' would be made by operations, and 'w.01' has that name")


def test_a_quantised_tensor_is_named(path: Path) -> None:
    scaled = {"w": torch.ones(2, 3).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1)}
    rule = {"w": [dc.Transpose(), "v"]}
    live = {"v": torch.ones(3, 2)}
    refused(
        scaled, live, rule, path, r"'w' is quantised \(float8_e4m3fn, with the scale 'w_scale_inv'"
    )
    nested = {"a": {"weight": scaled["w"], "weight_quantizer._scale": torch.ones(1)}}
    refused(nested, live, {"a.weight": [dc.Transpose(), "v"]}, path, "'a.weight' is quantised")
    alone = {"w": torch.ones(2, 3).to(torch.float8_e4m3fn)}
    dc.save(alone, path, overwrite=True)
    state = {"v": torch.zeros(3, 2, dtype=torch.float8_e4m3fn)}
    dc.load(state, path, rename=rule)  # no scale: an ordinary tensor
    assert torch.equal(state["v"].float(), torch.ones(3, 2))


def test_a_tensor_subclass_is_named(path: Path) -> None:
    dc.save({"w": Pair(torch.ones(2, 2), torch.ones(2, 2))}, path)
    with pytest.raises(dc.IncompatibleError, match="'w' is a tensor subclass, such as a quantised"):
        dc.load({"v": torch.ones(2, 2)}, path, rename={"w": [dc.Transpose(), "v"]})


# --- optimizers ---------------------------------------------------------------------------------


def plain(*names: str, shape: Sequence[int] = (2, 3)) -> Any:
    return Plain(*names, shape=shape)


class Plain(nn.Module):
    def __init__(self, *names: str, shape: Sequence[int] = (2, 3)) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(tuple(shape))))


def stepped(model: nn.Module, optimizer: Any, *names: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter) if name in names or not names else None
    optimizer.step()


JOIN: dict[Any, Any] = {("model.a", "model.b"): [dc.Concatenate(), "model.ab"]}


def load_joined(path: Path, cls: Any = torch.optim.Adam, **options: Any) -> Any:
    live = plain("ab", shape=(4, 3))
    optimizer = cls(live.parameters(), **options)
    dc.load({"model": live, "optim": optimizer}, path, rename=JOIN)
    return optimizer.state[live.ab]


def test_steps_that_differ_are_refused_by_name_before_anything_is_touched(path: Path) -> None:
    model = plain("a", "b")
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    stepped(model, optimizer, "a")
    dc.save({"model": model, "optim": optimizer}, path)
    live = plain("ab", shape=(4, 3))
    before = live.ab.detach().clone()
    state = {"model": live, "optim": torch.optim.Adam(live.parameters())}
    with pytest.raises(dc.IncompatibleError, match=r"'optim\.state\.model\.ab\.step' would be one"):
        dc.load(state, path, rename=JOIN)
    assert torch.equal(live.ab, before)
    dc.load({"model": live}, path, rename=JOIN, include="model")
    assert torch.equal(live.ab, torch.cat([model.a, model.b]))


def test_steps_that_are_plain_numbers_are_compared_too(path: Path) -> None:
    model = plain("a", "b")
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    for steps, words in (((3, 3), None), ((3, 4), "would be one value")):
        for parameter, number in zip(model.parameters(), steps, strict=True):
            optimizer.state[parameter]["step"] = number
        dc.save({"model": model, "optim": optimizer}, path, overwrite=True)
        if words is None:
            assert int(load_joined(path)["step"]) == 3
        else:
            with pytest.raises(dc.IncompatibleError, match=words):
                load_joined(path)


def test_state_that_only_some_parts_have_is_refused(path: Path) -> None:
    model = plain("a", "b")
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer, "a")
    dc.save({"model": model, "optim": optimizer}, path)
    with pytest.raises(
        dc.IncompatibleError, match=r"'optim\.state\.model\.b\.exp_avg' is not saved"
    ):
        load_joined(path)


def test_parts_in_several_groups_are_refused(path: Path) -> None:
    model = plain("a", "b")
    groups: list[Any] = [{"params": [model.a]}, {"params": [model.b], "lr": 0.5}]
    optimizer = torch.optim.Adam(groups)
    stepped(model, optimizer)
    dc.save({"model": model, "optim": optimizer}, path)
    with pytest.raises(dc.IncompatibleError, match=r"model\.ab' are in several parameter groups"):
        load_joined(path)


def test_moments_of_several_dtypes_are_refused(path: Path) -> None:
    model = plain("a", "b")
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    optimizer.state[model.b]["exp_avg"] = torch.ones(2, 3, dtype=torch.bfloat16)
    dc.save({"model": model, "optim": optimizer}, path)
    with pytest.raises(dc.IncompatibleError, match=r"ab\.exp_avg' would have parts of several dty"):
        load_joined(path)


def test_the_steps_of_stacked_numbers_are_one_step(path: Path) -> None:
    model = nn.ParameterList([torch.ones(()), torch.ones(())])
    optimizer = torch.optim.Adam(model)
    stepped(model, optimizer)
    dc.save({"model": model, "optim": optimizer}, path)
    live = nn.ParameterDict({"w": torch.zeros(2)})
    new = torch.optim.Adam(live.values())
    dc.load({"model": live, "optim": new}, path, rename={"model.{n}": [dc.Stack("n"), "model.w"]})
    assert new.state[live["w"]]["step"].shape == ()


def test_state_of_another_shape_is_refused(path: Path) -> None:
    model = plain("a", "b")
    optimizer = torch.optim.Adafactor(model.parameters())
    stepped(model, optimizer)
    dc.save({"model": model, "optim": optimizer}, path)
    with pytest.raises(dc.IncompatibleError, match="does not follow the elements of its parameter"):
        load_joined(path, torch.optim.Adafactor)


def test_state_that_only_looks_like_its_square_parameter_is_refused(path: Path) -> None:
    model = plain("a", "b", shape=(3, 3))
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["preconditioner"] = torch.eye(3)
        optimizer.state[parameter]["exp_avg_slow"] = torch.full((3, 3), float(number))
    dc.save({"model": model, "optim": optimizer}, path)
    rule = {("model.a", "model.b"): [dc.Concatenate(), "model.ab"]}
    live = plain("ab", shape=(6, 3))
    state = {"model": live, "optim": torch.optim.Adam(live.parameters())}
    with pytest.raises(dc.IncompatibleError, match="preconditioner' has shape"):
        dc.load(state, path, rename=rule)
    for parameter in model.parameters():
        del optimizer.state[parameter]["preconditioner"]
    dc.save({"model": model, "optim": optimizer}, path, overwrite=True)
    dc.load(state, path, rename=rule)
    expected = torch.arange(2.0).repeat_interleave(3)[:, None].expand(6, 3)
    assert torch.equal(state["optim"].state[live.ab]["exp_avg_slow"], expected)  # a known key


def test_an_optimizer_that_is_renamed_takes_its_state_along(path: Path) -> None:
    model = plain("a", "b")
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    stepped(model, optimizer)
    dc.save({"model": model, "old": optimizer}, path)
    live = plain("ab", shape=(4, 3))
    new = torch.optim.SGD(live.parameters(), momentum=0.5)
    dc.load({"model": live, "optim": new}, path, rename={**JOIN, "old": "optim"})
    buffers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert torch.equal(new.state[live.ab]["momentum_buffer"], torch.cat(buffers))


def test_parameters_without_state_are_joined_without_state(path: Path) -> None:
    model = plain("a", "b")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    dc.save({"model": model, "optim": optimizer}, path)
    live = plain("ab", shape=(4, 3))
    new = torch.optim.Adam(live.parameters())
    stepped(live, new)
    dc.load({"model": live, "optim": new}, path, rename=JOIN)
    assert not new.state[live.ab]
    assert new.param_groups[0]["lr"] == 0.25
