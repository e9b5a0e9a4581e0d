"""`resize`: a vocabulary with another padding is loaded by its rows, and the moments follow."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.testing.memory_storage import MemoryStorage

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn

from ranks import load_on_threads, save_on_threads
from subclass_tensors import Quantized

WORDS, HIDDEN, SAVED = 50, 3, 64
RESIZE = {"*.embed.weight": WORDS, "*.bias": WORDS}


class Language(nn.Module):
    """A model with a tied head, and a bias for each word."""

    def __init__(self, rows: int, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, HIDDEN)
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, rows)
        if tied:
            self.head.weight = self.embed.weight


def trained(rows: int, seed: int = 0, **options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Language(rows, **options)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model.head(model.body(model.embed(torch.arange(7)))).square().sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def fresh(rows: int, **options: Any) -> dict[str, Any]:
    torch.manual_seed(9)
    model = Language(rows, **options)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), amsgrad=True)}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    dc.save(trained(SAVED), tmp_path / "ck")
    return str(tmp_path / "ck")


def assert_resized(found: dict[str, Any], before: dict[str, torch.Tensor], rest: Any) -> None:
    """Compare parameters and moments with the saved ones, by rows; `rest` are the other moments."""
    expected, model = trained(SAVED), found["model"]
    for name, parameter in model.named_parameters():
        theirs = expected["model"].get_parameter(name)
        rows = WORDS if theirs.shape[0] == SAVED else len(theirs)
        assert torch.equal(parameter[:rows], theirs[:rows]), name
        assert torch.equal(parameter[rows:], before[name][rows:]), name
        moments, wanted = found["optim"].state[parameter], expected["optim"].state[theirs]
        assert moments.keys() == wanted.keys()
        for key, value in wanted.items():
            if not value.ndim:
                assert torch.equal(moments[key], value)
                continue
            assert moments[key].shape == parameter.shape, (name, key)
            assert torch.equal(moments[key][:rows], value[:rows]), (name, key)
            assert torch.equal(moments[key][rows:], torch.full_like(moments[key][rows:], rest))


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rows", [50, 56, 80])
def test_a_smaller_and_a_larger_vocabulary_take_the_rows_that_count(rows: int, saved: str) -> None:
    state = fresh(rows)
    before = parameters_of(state["model"])
    report = dc.load(state, saved, resize=RESIZE)
    assert_resized(state, before, rest=0)
    assert state["model"].head.weight is state["model"].embed.weight
    first = report.resized[0]
    assert first.startswith("model.embed.weight: 0:50 along dimension 0 are loaded; 50:64 are cut")
    assert first.endswith("keep the values of the state") == (rows > WORDS)
    moments = [text for text in report.resized if "exp_avg:" in text]
    assert len(moments) == 2
    assert all(text.endswith(f"; 50:{rows} are zeros") == (rows > WORDS) for text in moments)
    state["model"].head(state["model"].embed(torch.arange(7))).sum().backward()
    state["optim"].step()


def test_an_optimizer_that_has_stepped_keeps_its_values_in_the_other_rows(saved: str) -> None:
    state = trained(80, seed=5)
    for moments in state["optim"].state.values():
        for value in moments.values():
            value.fill_(7)
    before = parameters_of(state["model"])
    report = dc.load(state, saved, resize=RESIZE)
    assert_resized(state, before, rest=7)
    assert all(text.endswith("keep the values of the state") for text in report.resized)


def test_equal_shapes_are_loaded_whole(saved: str) -> None:
    state, expected = fresh(SAVED), trained(SAVED)
    report = dc.load(state, saved, resize=RESIZE)
    assert report.resized == ()
    assert torch.equal(state["model"].embed.weight, expected["model"].embed.weight)


def test_without_the_option_the_error_has_the_line_to_write(saved: str) -> None:
    state = fresh(56)
    before = parameters_of(state["model"])
    with pytest.raises(dc.IncompatibleError) as caught:
        dc.load(state, saved)
    text = str(caught.value)
    assert "resize={'model.embed.weight': N}: the first N count, at most 56" in text
    for name, parameter in state["model"].named_parameters():
        assert torch.equal(parameter, before[name])
    state = {"w": torch.zeros(3, 4)}
    dc.save({"w": torch.zeros(2, 5)}, f"{saved}-other")
    with pytest.raises(dc.IncompatibleError) as caught:
        dc.load(state, f"{saved}-other")
    assert "resize" not in str(caught.value)


def test_names_of_a_tie_follow_whichever_is_given(saved: str, tmp_path: Path) -> None:
    for pattern in ("model.embed.weight", "model.head.weight", "model"):
        state = fresh(56)
        before = parameters_of(state["model"])
        dc.load(state, saved, resize={pattern: WORDS, "model.head.bias": WORDS})
        assert_resized(state, before, rest=0)
    untied = fresh(56, tied=False)["model"]  # tied only in the checkpoint
    dc.load({"model": untied}, saved, include="model.*", resize={"model.head.*": WORDS})
    expected = trained(SAVED)["model"].embed.weight[:WORDS]
    assert torch.equal(untied.embed.weight[:WORDS], expected)
    assert torch.equal(untied.head.weight[:WORDS], expected)
    dc.save(trained(SAVED, tied=False), tmp_path / "untied")
    model = fresh(56)["model"]  # tied only in the state: the saved rows differ
    resize = {"model.*": WORDS}
    with pytest.raises(dc.IncompatibleError, match="share memory in the state"):
        dc.load({"model": model}, tmp_path / "untied", include="model.*", resize=resize)


# --- layouts ---------------------------------------------------------------------------------


def rules(count: int) -> dc.ShardingConfig:
    rule = {"tp": 0}
    return dc.ShardingConfig({"tp": count}, {"embed.weight": rule, "head.*": rule})


def on_rank(state: dict[str, Any], rank: int, count: int) -> dict[str, Any]:
    """Return a rank's rows of a vocabulary that tensor parallelism cuts."""
    model, whole = Language(1), state["model"]
    for name, parameter in model.named_parameters():
        value = whole.get_parameter(name).detach()
        is_cut = name.startswith(("embed", "head"))
        parameter.data = (value.chunk(count)[rank] if is_cut else value).clone()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for name, parameter in model.named_parameters():
        for key, value in state["optim"].state.get(whole.get_parameter(name), {}).items():
            is_cut = name.startswith(("embed", "head")) and value.ndim > 0
            part = value.chunk(count)[rank] if is_cut else value
            optimizer.state[parameter][key] = part.clone()
    return {"model": model, "optim": optimizer}


@pytest.mark.parametrize(("before", "after", "rows"), [(4, 2, 56), (2, 4, 80), (1, 4, 52)])
def test_ranks_of_tensor_parallelism_take_their_rows(before: int, after: int, rows: int) -> None:
    storage, whole = MemoryStorage(), trained(SAVED)
    states = [on_rank(whole, rank, before) for rank in range(before)]
    save_on_threads(storage, states, sharding=rules(before))
    old = trained(rows, seed=5)
    states = [on_rank(old, rank, after) for rank in range(after)]
    options: dict[str, Any] = {"sharding": rules(after), "resize": RESIZE}
    report = load_on_threads(storage, states, **options)
    assert f"50:{rows} keep the values of the state" in report.resized[0]
    alone = trained(rows, seed=5)
    for name, parameter in alone["model"].named_parameters():
        theirs = whole["model"].get_parameter(name)
        count = min(WORDS, len(theirs))
        parameter.data[:count] = theirs[:count]
        for key, value in alone["optim"].state[parameter].items():
            saved = whole["optim"].state[theirs][key]
            value.copy_(saved) if not value.ndim else value[:count].copy_(saved[:count])
    for rank, state in enumerate(states):
        expected = on_rank(alone, rank, after)
        for name, parameter in state["model"].named_parameters():
            other = expected["model"].get_parameter(name)
            assert torch.equal(parameter, other), name
            for key, value in state["optim"].state[parameter].items():
                assert torch.equal(value, expected["optim"].state[other][key]), (name, key)


def test_ranks_with_uneven_rows_are_refused() -> None:
    storage = MemoryStorage()
    save_on_threads(storage, [{"m": {"embed.weight": torch.ones(SAVED, 2)}}])
    states = [{"m": {"embed.weight": torch.zeros(rows, 2)}} for rows in (28, 26)]
    config = dc.ShardingConfig({"tp": 2}, {"embed.weight": {"tp": 0}})
    problem = r"m\.embed\.weight: resize keeps 50 of 56 on rank 0, 50 of 52 on rank 1: .* evenly"
    with pytest.raises(dc.IncompatibleError, match=problem):
        load_on_threads(storage, states, sharding=config, resize={"*.weight": WORDS})
    assert not any(state["m"]["embed.weight"].any() for state in states)
    states = [{"m": {"embed.weight": torch.zeros(56, 2)}} for _ in range(2)]
    load_on_threads(storage, states, resize={"*.weight": WORDS})  # whole on each rank


def test_flat_shards_and_boxes_take_their_elements() -> None:
    storage, whole = MemoryStorage(), torch.arange(SAVED * 2.0).reshape(SAVED, 2)
    save_on_threads(storage, [{"w": whole}])

    def flat(rank: int) -> dc.FlatShard:
        return dc.FlatShard(torch.full((56,), -1.0), global_shape=(56, 2), start=56 * rank)

    def box(rank: int) -> dc.LocalShard:
        return dc.LocalShard(torch.full((28, 2), -1.0), (56, 2), (28 * rank, 0))

    expected = torch.full((56, 2), -1.0)
    expected[:WORDS] = whole[:WORDS]
    for kind in (flat, box):
        states = [{"w": kind(rank)} for rank in range(2)]
        load_on_threads(storage, states, resize={"w": WORDS})
        found = torch.cat([state["w"].tensor.view(-1) for state in states])
        assert torch.equal(found.view(56, 2), expected)
    column = dc.FlatShard(torch.zeros(SAVED * 3), global_shape=(SAVED, 3), start=0)
    with pytest.raises(dc.IncompatibleError, match="cannot be resized along dimension 1"):
        load_on_threads(storage, [{"w": column}], resize={"w": 2})


def test_zero_takes_its_elements(tmp_path: Path) -> None:
    whole = trained(SAVED)
    path = str(tmp_path / "ck")
    dc.save(whole, path)
    states = [fresh(56) for _ in range(2)]
    config = dc.ShardingConfig.zero(2, 1, flat=True)
    load_on_threads(LocalStorage(), states, path, sharding=config, resize=RESIZE)
    for key in ("exp_avg", "exp_avg_sq"):
        parts = [s["optim"].state[s["model"].embed.weight][key] for s in states]
        moments = torch.cat(parts).view(56, HIDDEN)
        expected = whole["optim"].state[whole["model"].embed.weight][key]
        assert torch.equal(moments[:WORDS], expected[:WORDS])
        assert not moments[WORDS:].any()


# --- other ways in ---------------------------------------------------------------------------


def test_a_rename_and_a_cast_go_with_it(saved: str) -> None:
    model = Language(56).bfloat16()
    options: dict[str, Any] = {"rename": {"model.*": "net.*"}, "cast": True, "include": "net.*"}
    report = dc.load({"net": model}, saved, resize={"net.*": WORDS}, **options)
    expected = trained(SAVED)["model"].embed.weight[:WORDS].bfloat16()
    assert torch.equal(model.embed.weight[:WORDS], expected)
    assert report.resized[0].startswith("net.embed.weight: 0:50")


def test_columns_and_arrays_and_plain_tensors(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(2, SAVED), "a": np.ones((SAVED,))}, tmp_path / "ck")
    state: dict[str, Any] = {"w": torch.zeros(2, 56), "a": np.zeros((80,))}
    dc.load(state, tmp_path / "ck", resize={"*": WORDS})
    for value in (state["w"][0].numpy(), state["a"]):
        assert value.tolist() == [1] * WORDS + [0] * (len(value) - WORDS)


def test_bytes_and_objects_take_it(tmp_path: Path) -> None:
    class Averages:
        def __init__(self, rows: int) -> None:
            self.shadow = torch.full((rows, 2), float(rows))

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state["shadow"]

    data = dc.to_bytes({"ema": Averages(SAVED)})
    ema = Averages(56)
    dc.load_bytes({"ema": ema}, data, resize={"ema.shadow": WORDS})
    assert ema.shadow[:, 0].tolist() == [SAVED] * WORDS + [56] * 6


def test_a_run_resumes_with_another_padding(tmp_path: Path) -> None:
    with dc.Checkpointer(tmp_path, save=dc.every(steps=1), background=False) as run:
        state = trained(SAVED)
        run.restore(state)
        run.step(1)
    state = fresh(56)
    before = parameters_of(state["model"])
    options: dict[str, Any] = {"save": dc.every(steps=1), "background": False}
    with (
        dc.Checkpointer(tmp_path, **options) as run,
        pytest.raises(dc.IncompatibleError, match="resize="),
    ):
        run.restore(fresh(56))
    with dc.Checkpointer(tmp_path, **options, resize=RESIZE) as run:
        assert run.restore(state) == 1
    assert_resized(state, before, rest=0)


class Factored(torch.optim.Optimizer):
    """Keeps a factor of the rows and one of the columns, as Adafactor does, and a plain count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def fill(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            rows, columns = parameter.shape
            self.state[parameter] = {
                "row": torch.arange(float(rows)),
                "col": torch.arange(float(columns)),
                "kept": torch.arange(float(rows)).reshape(rows, 1),
                "flat": torch.arange(float(columns)).reshape(1, columns),
                "step": torch.tensor(3.0),
            }


@pytest.mark.parametrize("is_fresh", [True, False])
def test_factors_follow_in_the_dimension_that_is_clear(is_fresh: bool, tmp_path: Path) -> None:
    def state(rows: int, columns: int, *, stepped: bool) -> dict[str, Any]:
        model = nn.Embedding(rows, columns)
        optimizer = Factored(model.parameters())
        if stepped:
            optimizer.fill()
        return {"model": model, "optim": optimizer}

    dc.save(state(SAVED, 5, stepped=True), tmp_path / "ck")
    taken = state(80, 5, stepped=not is_fresh)
    dc.load(taken, tmp_path / "ck", resize={"model.weight": WORDS})
    factors = taken["optim"].state[taken["model"].weight]
    rest = [0.0] * 30 if is_fresh else [float(n) for n in range(50, 80)]
    expected = [*map(float, range(50)), *rest]
    assert factors["row"].tolist() == factors["kept"].flatten().tolist() == expected
    assert factors["col"].tolist() == factors["flat"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert factors["step"] == 3
    # As many columns as rows: the factors look alike.
    dc.save(state(SAVED, SAVED, stepped=True), tmp_path / "square")
    taken = state(80, SAVED, stepped=False)
    with pytest.raises(dc.IncompatibleError, match=r"optim.*\.row: .*is not clear: exclude"):
        dc.load(taken, tmp_path / "square", resize={"model.weight": WORDS})
    # Those with a dimension of size 1 do not.
    options: dict[str, Any] = {"exclude": ["*.row", "*.col"], "resize": {"model.weight": WORDS}}
    dc.load(taken, tmp_path / "square", **options)
    factors = taken["optim"].state[taken["model"].weight]
    assert (factors["kept"].shape, factors["flat"].shape) == ((80, 1), (1, SAVED))


# --- what is refused -------------------------------------------------------------------------


def test_more_rows_than_either_side_has_are_refused(saved: str) -> None:
    state = fresh(56)
    before = parameters_of(state["model"])
    problem = r"model\.embed\.weight: resize keeps 60 along dimension 0, but .*64.* 56: .* most 56"
    with pytest.raises(dc.IncompatibleError, match=problem):
        dc.load(state, saved, resize={"model.*": 60})
    with pytest.raises(dc.IncompatibleError, match="give at most 64"):
        dc.load(fresh(80), saved, resize={"model.*": 70})
    for name, parameter in state["model"].named_parameters():
        assert torch.equal(parameter, before[name])
    assert not state["optim"].state


def test_patterns_that_differ_or_match_nothing_are_refused(
    saved: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        dc.IncompatibleError, match=r"\['\*\.weight', 'model\.\*'\] of resize match"
    ):
        dc.load(fresh(56), saved, resize={"model.*": 50, "*.weight": 49})
    with pytest.raises(dc.IncompatibleError, match=r"resize: '\*\.nothing' matches no name"):
        dc.load(fresh(SAVED), saved, resize={"*.nothing": 50})
    with caplog.at_level(logging.WARNING):
        dc.load(fresh(SAVED), saved, resize={"*.nothing": 50}, strict=False)
    assert "'*.nothing' matches no name" in caplog.text


def test_a_meta_tensor_has_no_values_for_the_other_rows(saved: str) -> None:
    with torch.device("meta"):
        larger, smaller = Language(56), Language(WORDS)
    options: dict[str, Any] = {"include": "model.*", "resize": {"model.*": WORDS}}
    with pytest.raises(dc.IncompatibleError, match=r"embed\.weight: on the meta .* 50:56"):
        dc.load({"model": larger}, saved, **options)
    dc.load({"model": smaller}, saved, **options)
    assert torch.equal(smaller.embed.weight, trained(SAVED)["model"].embed.weight[:WORDS])


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    dc.save({"w": Quantized.of(torch.ones(SAVED, 2))}, tmp_path / "ck")
    with pytest.raises(dc.IncompatibleError, match="w"):
        dc.load({"w": Quantized.of(torch.ones(56, 2))}, tmp_path / "ck", resize={"w": WORDS})


@pytest.mark.parametrize(
    ("resize", "error"),
    [
        ("*.embed.weight", TypeError),
        ({"*.embed.weight": "50"}, TypeError),
        ({"*.embed.weight": True}, TypeError),
        ({3: 50}, TypeError),
        ({"": 50}, ValueError),
        ({"w": -1}, ValueError),
    ],
)
def test_what_is_no_resize_is_refused(saved: str, resize: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="resize"):
        dc.load(fresh(SAVED), saved, resize=resize)


def test_a_load_that_cuts_rows_does_not_count_as_a_check_of_the_whole(tmp_path: Path) -> None:
    with dc.Checkpointer(tmp_path, save=dc.every(steps=1), background=False) as run:
        run.restore(trained(SAVED))
        run.step(1)
    (found,) = dc.checkpoints(tmp_path)
    for rows in (56, SAVED):
        dc.load(fresh(rows), found.path, resize=RESIZE)
        assert dc.checkpoints(tmp_path)[0].is_verified == (rows == SAVED)


FUSED = "fused of the pieces [6, 6], and resize cannot say"


@pytest.mark.parametrize(
    ("world", "pieces", "shape", "words"),
    [
        (1, [6, 6], (12, 3), FUSED),  # another dimension
        (2, [6, 6], (6, 3), FUSED),
        (2, [8, 8], (8, 2), "the pieces [8, 8] in the rule are 16 together"),
        (1, None, (16, 2), FUSED),
    ],
)
def test_a_fused_tensor_is_not_resized(
    world: int, pieces: list[int] | None, shape: tuple[int, ...], words: str
) -> None:
    def rules(count: int, sizes: list[int]) -> dc.ShardingConfig:
        return dc.ShardingConfig({"tp": count}, {"w": {"tp": 0, "pieces": sizes}})

    storage, whole = MemoryStorage(), torch.arange(24.0).view(12, 2)
    save_on_threads(storage, [{"w": whole}], sharding=rules(1, [6, 6]))
    states = [{"w": torch.full(shape, -1.0)} for _ in range(world)]
    sharding = None if pieces is None else rules(world, pieces)
    with pytest.raises(dc.IncompatibleError) as caught:
        load_on_threads(storage, states, sharding=sharding, resize={"w": 2})
    assert words in str(caught.value)
    parts = {"q": torch.full((8, 2), -1.0), "k": torch.full((8, 2), -1.0)}
    split = {"w": [dc.Split(), ("q", "k")]}
    load_on_threads(storage, [parts], rename=split, resize={"q": 5, "k": 5})
    assert torch.equal(
        torch.cat([parts["q"][:5], parts["k"][:5]]), whole[[*range(5), *range(6, 11)]]
    )
