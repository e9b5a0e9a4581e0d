"""State that has its parameter's shape under rules, but a meaning on its own rank only."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt as dc
from dist_ckpt.core.state.tree.elementwise_keys import elementwise_keys
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.interop import dcp, torch_save
from in_memory import InMemory, save
from ranks import load_on_threads, save_on_threads

Rules = dict[str, dict[str, int]]
CUT: Rules = {"*weight": {"tp": 0}}
NAMED = CUT | {"*.own_mean": {"tp": 0}}


def make_state(shapes: Mapping[str, tuple[int, ...]], keys: Any, rank: int) -> dict[str, Any]:
    """Return a model, and an optimizer whose state has these keys: with values if `rank` >= 0."""
    model = nn.ParameterDict(
        {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters() if rank >= 0 else ():
        for key, make in keys.items():
            if (value := make(parameter)) is not None:
                optimizer.state[parameter][key] = value + rank
    return {"model": model, "optim": optimizer}


def like(parameter: torch.Tensor) -> torch.Tensor:
    return torch.arange(float(parameter.numel())).reshape(parameter.shape)


def matrix(parameter: torch.Tensor) -> torch.Tensor | None:
    if parameter.ndim != 2:
        return None
    return torch.arange(float(parameter.shape[0] ** 2)).reshape(parameter.shape[0], -1)


def load(checkpoint: InMemory, state: Any, rank: int, world_size: int, rules: Any = CUT) -> Any:
    sharding = dc.ShardingConfig({"tp": world_size}, rules)
    binding = checkpoint.bind(state, rank=rank, world_size=world_size, sharding=sharding)
    if binding.problems:
        raise IncompatibleError("\n".join(binding.problems))
    checkpoint.finish(binding)
    return state["optim"].state[state["model"]["weight"]]


def save_on_two(shapes: Any, keys: Any, rules: Rules = CUT) -> InMemory:
    states = [make_state(shapes, keys, rank) for rank in range(2)]
    return save(*states, sharding=dc.ShardingConfig({"tp": 2}, rules))


SQUARE_PARTS = {"weight": (4, 4)}


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("more", [{}, {"bias": (3,)}, {"other_weight": (2, 4)}])
def test_matrices_of_ranks_come_back_on_as_many_ranks(more: Any, has_state: bool) -> None:
    checkpoint = save_on_two(SQUARE_PARTS | more, {"L": matrix, "exp_avg": like})
    for rank in range(2):
        mine = make_state(SQUARE_PARTS | more, {"L": matrix}, 9 if has_state else -1)
        if has_state:
            for parameter, entries in mine["optim"].state.items():
                entries["exp_avg"] = torch.zeros_like(parameter)
        loaded = load(checkpoint, mine, rank, 2)
        assert torch.equal(loaded["L"], torch.arange(16.0).reshape(4, 4) + rank)


@pytest.mark.parametrize("more", [{}, {"bias": (3,)}, {"other_weight": (2, 4)}])
@pytest.mark.parametrize("world_size", [1, 4])
def test_matrices_of_ranks_are_refused_on_another_number(world_size: int, more: Any) -> None:
    checkpoint = save_on_two(SQUARE_PARTS | more, {"L": matrix, "exp_avg": like})
    shapes = {"weight": (8 // world_size, 4)}
    mine = make_state(shapes, {}, -1)
    with pytest.raises(
        IncompatibleError, match=r"optim\.state\.model\.weight\.L: it has the shape"
    ):
        load(checkpoint, mine, 0, world_size)
    assert not mine["optim"].state
    state: dict[str, Any] = {}
    assert any("weight.L: it has" in text for text in checkpoint.bind(state).problems)
    assert not checkpoint.bind(state, exclude="*.L").problems


@pytest.mark.parametrize(
    ("shapes", "keys", "saved_by", "rules"),
    [
        (SQUARE_PARTS, {"exp_avg": like}, CUT, CUT),
        (SQUARE_PARTS | {"bias": (3,)}, {"own_mean": like}, CUT, CUT),
        (SQUARE_PARTS, {"own_mean": like}, NAMED, NAMED),
        (SQUARE_PARTS, {"own_mean": like}, NAMED, CUT),
        ({"weight": (4, 6)}, {"own_mean": like}, CUT, CUT),
        ({"weight": (2, 4)}, {"own_mean": like}, CUT, CUT),
    ],
    ids=["known", "other parameters", "a rule", "a rule of the save", "not square", "square whole"],
)
def test_elementwise_state_loads_on_any_number_of_ranks(
    shapes: Any, keys: Any, saved_by: Rules, rules: Rules
) -> None:
    checkpoint = save_on_two(shapes, keys, saved_by)
    (key,) = keys
    rows, columns = shapes["weight"]
    for world_size in (1, 4):
        for rank in range(world_size):
            part = {**shapes, "weight": (2 * rows // world_size, columns)}
            loaded = load(checkpoint, make_state(part, {}, -1), rank, world_size, rules)
            first = like(torch.empty(rows, columns))
            joined = torch.cat([first, first + 1])
            assert torch.equal(loaded[key], joined.chunk(world_size)[rank])


def test_a_matrix_is_not_cut_into_flat_parts() -> None:
    checkpoint = save(make_state({"weight": (4, 4)}, {"L": matrix}, 0))
    live = make_state({"weight": (4, 4)}, {}, -1)
    sharding = dc.ShardingConfig.zero(2, 1, flat=True)
    checkpoint.finish(checkpoint.bind(live, world_size=2, sharding=sharding))
    (loaded,) = live["optim"].state.values()
    assert torch.equal(loaded["L"], torch.arange(16.0).reshape(4, 4))


def test_matrices_of_ranks_are_not_cut_anew_by_operations() -> None:
    checkpoint = save_on_two(SQUARE_PARTS, {"L": matrix})
    rules = {"model.weight": [dc.Transpose(), "model.new"]}
    problems = checkpoint.bind({}, rename=rules).problems
    assert any(
        "'optim.state.model.weight.L' has shape (8, 4), which does not" in p for p in problems
    )


def test_matrices_of_ranks_are_refused_by_reshards_and_exports(tmp_path: Path) -> None:
    states = [make_state(SQUARE_PARTS, {"L": matrix}, rank) for rank in range(2)]
    old, new = tmp_path / "old", tmp_path / "new"
    two, four = (dc.ShardingConfig({"tp": n}, CUT) for n in (2, 4))
    save_on_threads(LocalStorage(), states, str(old), sharding=two)
    for write in (
        lambda **kw: dc.reshard(old, new, sharding=four, **kw),
        lambda **kw: torch_save.export_file(old, new, **kw),
        lambda **kw: torch_save.export_file(old, new, rename={"model.*": "m.*"}, **kw),
        lambda **kw: dcp.export_folder(old, new, **kw),
    ):
        with pytest.raises(IncompatibleError, match=r"weight\.L.* part.*exclude='"):
            write()
        assert not new.exists()
        write(exclude="*.L")
        shutil.rmtree(new) if new.is_dir() else new.unlink()
    dc.reshard(old, new, sharding=two)  # as it was cut
    named = dc.ShardingConfig({"tp": 4}, CUT | {"*.L": {"tp": 0}})
    dc.reshard(old, new, sharding=named, overwrite=True)


def test_of_two_sources_only_the_one_that_provides_state_counts(tmp_path: Path) -> None:
    parts, whole = str(tmp_path / "parts"), str(tmp_path / "whole")
    sharding, keys = dc.ShardingConfig({"tp": 2}, CUT), {"own_mean": like}
    states = [make_state(SQUARE_PARTS, keys, rank) for rank in range(2)]
    save_on_threads(LocalStorage(), states, parts, sharding=sharding)
    dc.save(make_state({"weight": (8, 4)}, keys, 0), whole)
    mine = [make_state(SQUARE_PARTS, {}, -1) for _ in range(2)]
    sources: Any = [whole, parts]
    load_on_threads(LocalStorage(), mine, sources, sharding=sharding)
    loaded = [state["optim"].state[state["model"]["weight"]]["own_mean"] for state in mine]
    assert torch.equal(torch.cat(loaded), like(torch.empty(8, 4)))


def test_a_rule_for_state_says_how_it_is_cut() -> None:
    """Without the rule both are cut along dimension 0, as their parameter is."""
    rules = CUT | {"*.column_mean": {"tp": 1}, "*.same": {}}
    keys = {"column_mean": like, "same": lambda p: torch.ones(p.shape)}
    states = [make_state(SQUARE_PARTS, keys, 0) for _ in range(2)]
    checkpoint = save(*states, sharding=dc.ShardingConfig({"tp": 2}, rules))
    shapes = {name.rpartition(".")[2]: t.shape for name, t in checkpoint.catalog.tensors.items()}
    assert shapes == {"weight": (8, 4), "column_mean": (4, 8), "same": (4, 4)}


def test_keys_are_elementwise_if_a_parameter_that_is_not_square_shows_it() -> None:
    outcomes = elementwise_keys(
        [
            *(("a", shape, shape) for shape in [(3, 3), (3, 4)]),
            *(("b", shape, shape) for shape in [(3, 3), (1, 1)]),
            ("c", (3, 4), (3, 4)),
            ("c", (3, 3), (3, 2)),
            ("c", (2, 4), (2, 4)),
            ("d", (3,), (3,)),
            ("e", (3, 3), ()),
            ("exp_avg", (3, 4), (2, 4)),
        ]
    )
    assert {key: outcomes.get(key) for key in "abcde"} == {
        "a": True,
        "b": None,
        "c": False,
        "d": True,
        "e": None,
    }
    assert outcomes["exp_avg"] is True
