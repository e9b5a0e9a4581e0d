"""What a save leaves out: by `include` and `exclude`, and with `include_frozen=False`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt as dc
from dist_ckpt.testing.memory_storage import MemoryStorage
from in_memory import Stateful
from ranks import load_on_threads, save_on_threads, shared_storage, try_save_on_threads


def training(*, frozen: bool = False) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model.get_submodule("0").requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer, "step": 3}


def names(path: Path) -> set[str]:
    with dc.open(path) as checkpoint:
        catalog = checkpoint.index.catalog
        return {*catalog.tensors, *catalog.aliases, *catalog.values}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ck"


def test_what_is_left_out_is_not_there_and_all_else_comes_back_alike(path: Path) -> None:
    saved, state = training(), training()
    before = state["model"].get_parameter("0.bias").clone()
    dc.save(saved, path, exclude=["*.bias", "step"])
    assert {name for name in names(path) if name.endswith("bias") or ".bias." in name} == set()
    assert "optim.param_groups.0" in names(path)
    with pytest.raises(dc.IncompatibleError, match="lacks"):
        dc.load(state, path)
    dc.load(state, path, exclude=["*.bias", "step"])
    weights = [one["model"].get_parameter("1.weight") for one in (saved, state)]
    moments = [
        one["optim"].state[w]["exp_avg"] for one, w in zip((saved, state), weights, strict=True)
    ]
    assert torch.equal(*weights)
    assert torch.equal(*moments)
    assert torch.equal(state["model"].get_parameter("0.bias"), before)
    whole: dict[str, Any] = {}
    dc.load(whole, path)
    assert [*whole] == ["model", "optim"]


def test_a_component_that_is_left_out_leaves_no_trace(path: Path) -> None:
    dc.save(training(), path, include="model")
    whole: dict[str, Any] = {}
    dc.load(whole, path)
    assert [*whole] == ["model"]
    assert [*whole["model"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [*path.glob("*/optim*")] == []


def test_frozen_parameters_are_left_out_and_stay_as_they_are(path: Path) -> None:
    saved, state = training(frozen=True), training(frozen=True)
    before = state["model"].get_parameter("0.weight").clone()
    dc.save(saved, path, include_frozen=False)
    assert "model.0.weight" not in names(path)
    left_out = (
        r"lacks 2 names: model\.0\.weight.* which require no gradient: .*include_frozen=False if"
    )
    with pytest.raises(dc.IncompatibleError, match=left_out):
        dc.load(state, path)
    both = {**state, "more": torch.ones(1)}
    with pytest.raises(dc.IncompatibleError, match=r"lacks 3 names: (?!.*frozen)"):
        dc.load(both, path)
    dc.load(state, path, include_frozen=False)
    assert torch.equal(state["model"].get_parameter("0.weight"), before)
    assert torch.equal(*(one["model"].get_parameter("1.weight") for one in (saved, state)))
    # Of a checkpoint that has them they are not taken either.
    dc.save(saved, path, overwrite=True)
    dc.load(state, path, include_frozen=False)
    assert torch.equal(state["model"].get_parameter("0.weight"), before)


def test_a_frozen_parameter_that_stands_alone_is_left_out_too(path: Path) -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    dc.save({"a": frozen, "b": torch.ones(2)}, path, include_frozen=False)
    assert names(path) == {"b"}


def test_a_frozen_name_of_a_trained_parameter_leaves_it_in(path: Path) -> None:
    frozen = nn.Parameter(torch.arange(4.0), requires_grad=False)
    state = {"a": frozen, "b": nn.Parameter(frozen.data)}
    dc.save(state, path)
    assert dc.open(path).num_trainable == 4
    dc.save(state, path, include_frozen=False, overwrite=True)
    assert names(path) == {"b"}


@pytest.mark.parametrize("pattern", ["optim.state", "optim.state.*", "optim.state.model.weight"])
def test_a_state_of_an_optimizer_may_be_left_out_before_there_is_any(
    path: Path, pattern: str
) -> None:
    model = nn.Linear(1, 1)
    state = {"optim": torch.optim.AdamW(model.parameters()), "model": model}
    dc.save(state, path, exclude=pattern)
    assert "optim.param_groups.0" in names(path)
    dc.load(state, path, exclude=pattern)


def test_a_load_without_frozen_parameters_has_to_know_them(path: Path) -> None:
    dc.save({"model": nn.Linear(1, 1)}, path)
    state = {"model": nn.Linear(1, 1).state_dict()}
    with pytest.raises(
        dc.IncompatibleError, match="include_frozen=False: the state has no parameters"
    ):
        dc.load(state, path, include_frozen=False)


def test_what_is_left_out_may_change_from_save_to_save(tmp_path: Path) -> None:
    storage, state = MemoryStorage({"/runs": None}), training()
    for exclude in ("optim", "step", None, "optim"):
        save_on_threads(storage, [state], exclude=exclude, overwrite=True)
        found: dict[str, Any] = {}
        load_on_threads(storage, [found])
        assert [*found] == [key for key in state if key != exclude]


def test_a_tied_tensor_is_stored_under_the_name_that_is_left(path: Path) -> None:
    weight = torch.ones(3)
    dc.save({"a": weight, "b": weight}, path, exclude="a")
    assert names(path) == {"b"}


WRONG: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "a name that is not there": (
        training,
        {"exclude": "modle.*"},
        ValueError,
        "'modle.*' matches no",
    ),
    "one of several": (training, {"include": ["model", "ema"]}, ValueError, "include: 'ema' match"),
    "a part of an object": (
        *(lambda: {"x": Stateful({"n": 1, "m": torch.ones(1)})}, {"exclude": "x.m"}, ValueError),
        "'x.m' matches no name",
    ),
    "an item of a list": (
        *(lambda: {"l": [torch.ones(1), torch.ones(2)]}, {"exclude": "l.0"}, ValueError),
        "l.0: an item of a list cannot be left out",
    ),
    "all": (
        training,
        {"exclude": ["model", "*"]},
        ValueError,
        "nothing of the state is left to save",
    ),
    "what is not known to be frozen": (
        *(
            lambda: {"m": nn.Linear(1, 1).requires_grad_(False).state_dict()},
            {"include_frozen": False},
        ),
        *(ValueError, "include_frozen=False: the state has no parameters, so frozen tensors are"),
    ),
    "a number": (training, {"include": 3}, TypeError, "give names or patterns"),
    "nothing": (training, {"include": []}, ValueError, "selects nothing"),
    "frozen as text": (training, {"include_frozen": "no"}, TypeError, "include_frozen='no'"),
}


@pytest.mark.parametrize(("state", "options", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_makes_no_sense_is_refused_before_anything_is_there(
    path: Path, state: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("*", r"\*")):
        dc.save(state(), path, **options)
    assert not path.exists()


def test_a_pattern_may_match_on_some_ranks_only() -> None:
    storage = MemoryStorage({"/runs": None})
    states = [{"embed": torch.ones(2), "n": 1}, {"head": torch.ones(3), "n": 1}]
    save_on_threads(storage, states, exclude=["head", "n"])
    found: dict[str, Any] = {}
    load_on_threads(storage, [found])
    assert [*found] == ["embed"]
    load_on_threads(storage, [{"embed": torch.ones(2)}, {"tail": 0}], exclude="tail")
    for outcome in try_save_on_threads(
        shared_storage(storage), states, exclude=["heads"], overwrite=True
    ):
        assert "exclude: 'heads' matches no name" in str(outcome.error)
    # With a lenient load a pattern may have come with the next version of the job.
    load_on_threads(storage, [{"embed": torch.ones(2)}], exclude="heads", strict=False)


def test_ranks_must_leave_out_the_same() -> None:
    state = {"a": torch.ones(2), "b": torch.ones(2)}

    storage = MemoryStorage({"/runs": None})
    each = [{"exclude": "b"}, {"exclude": "a"}]
    outcomes = try_save_on_threads(shared_storage(storage), [state, state], each=each)
    assert all(
        "with different selection: rank 0: \"exclude=['b']\"" in str(o.error) for o in outcomes
    )


def test_one_hyperparameter_may_stay_as_it_is(path: Path) -> None:
    saved, state = training(), training()
    saved["optim"].param_groups[0].update(lr=0.5, weight_decay=0.25)
    dc.save(saved, path)
    dc.load(state, path, exclude="*.lr")
    group = state["optim"].param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.001, 0.25)
    with pytest.raises(dc.IncompatibleError, match=r"exclude: '\*.rl' matches no name"):
        dc.load(state, path, exclude="*.rl")


def test_a_background_save_without_frozen_parameters_comes_back(tmp_path: Path) -> None:
    saved, state = training(frozen=True), training(frozen=True)
    before = state["model"].get_parameter("0.weight").clone()
    with dc.AsyncSaver(tmp_path) as saver:
        saver.save(saved, tmp_path / "1", step=1, include_frozen=False).result()
        assert saver.restore(state, include_frozen=False) == 1
    assert torch.equal(state["model"].get_parameter("0.weight"), before)
    assert torch.equal(*(one["model"].get_parameter("1.weight") for one in (saved, state)))


@pytest.mark.parametrize("background", [False, True])
def test_a_run_leaves_out_the_same_when_it_goes_on(tmp_path: Path, background: bool) -> None:
    def run(until: int) -> tuple[Any, int | None]:
        state = training(frozen=True)
        options: Any = {"save": dc.every(steps=1), "exclude": "step", "include_frozen": False}
        with dc.Checkpointer(tmp_path / "run", background=background, **options) as ck:
            restored = ck.restore(state)
            ck.save(until)
        return state, restored

    first, _ = run(1)
    second, restored = run(2)
    assert restored == 1
    assert torch.equal(*(one["model"].get_parameter("1.weight") for one in (first, second)))
    found = names(tmp_path / "run" / "step-00000002")
    assert "step" not in found
    assert "model.0.weight" not in found
