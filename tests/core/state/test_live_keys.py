"""Text keys that DCP makes of all keys, and the keys that the state has there."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt.core.state.tree.live_keys import is_integer_text, match_keys, with_live_class
from dist_ckpt.errors import IncompatibleError
from in_memory import Stateful, load, save


@pytest.mark.parametrize(
    ("saved", "live", "matched"),
    [
        (["3", "5"], [3, 5], {"3": 3, "5": 5}),
        (["3", "5"], [3, 7], {"3": 3, "5": 5}),  # all keys are integers
        (["3", "x"], [3], {"3": 3}),
        (["3", "5"], [3, "x"], {"3": 3}),
        (["3", "5"], [7], {"3": 3, "5": 5}),  # others, but all are integers
        (["3", "x"], [7], {}),
        (["-1", "0"], [0], {"-1": -1, "0": 0}),
        (["01", "1"], [1], {"1": 1}),
        (["3"], ["3", 3], {}),  # both keys may be meant
        (["3", 3], [3], {}),
        ([3], ["3"], {}),
        (["None", "True", "1.5", "(1, 2)"], [None, True, 1.5, (1, 2)], None),
        (["a"], [], {}),
        ([], [3], {}),
    ],
)
def test_saved_texts_get_the_keys_of_the_state(saved: Any, live: Any, matched: Any) -> None:
    if matched is None:
        matched = {str(key): key for key in live}
    result = match_keys(saved, live)
    assert result == matched
    assert [*map(type, result.values())] == [*map(type, matched.values())]


def test_only_what_str_writes_for_64_bits_is_the_text_of_an_integer() -> None:
    assert all(map(is_integer_text, ["0", "-1", "7", str((1 << 64) - 1), str(-(1 << 63))]))
    others = ["", "-", "-0", "+1", "01", "1_0", " 1", "1.0", "\u0663", str(1 << 64), "9" * 99, 1]
    assert not any(map(is_integer_text, others))


def test_a_dict_becomes_the_class_that_the_state_has_there() -> None:
    live: Any
    for live in (Counter({1: 2}), OrderedDict({1: 0}), defaultdict(list, {1: []})):
        before = live.copy()
        new = with_live_class({3: 4}, live)
        assert live == before
        assert type(new) is type(live)
        assert new == {3: 4}
    assert with_live_class({3: 4}, defaultdict(list)).default_factory is list  # type: ignore[attr-defined]
    for value, live in (([1], (2,)), ({1: 2}, [3]), ({1: 2}, {}), (OrderedDict(), Counter())):
        assert with_live_class(value, live) is value


def flat_save(state: dict[str, Any]) -> Any:
    """Save as DCP's planner does: each value by itself, all keys as text."""
    saved = save(state)
    saved.flatten_keys()
    return saved


def test_a_container_with_tensors_gets_the_keys_of_the_state() -> None:
    state = {"a": {"3": torch.ones(1), "5": 1}, "c": {"x": torch.ones(1)}}
    tensor, x = torch.zeros(1), torch.zeros(1)
    live: dict[str, Any] = {"a": {3: tensor, 5: 0}, "c": {"x": x}}
    binding = load(flat_save(state), live)
    assert live == {"a": {3: tensor, 5: 1}, "c": {"x": x}}
    assert tensor == x == 1
    (text,) = binding.assumed
    assert text.startswith("a: saved with text keys")


def test_a_container_that_dc_save_stored_with_text_keys_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="saved under the key '3', the state has 3"):
        load(save({"a": {"3": torch.ones(1)}}), {"a": {3: torch.ones(1)}})


def test_an_empty_mapping_knows_no_keys_and_the_report_says_so() -> None:
    saved = flat_save({"a": {"3": torch.ones(1)}, "b": {"x": torch.ones(1)}})
    states: list[dict[str, Any]] = [{"a": {}, "b": {}}, {"a": None, "b": None}, {}]
    for state in states:
        binding = load(saved, state)
        assert [*state["a"]] == ["3"]
        (text,) = binding.assumed
        assert text.startswith("a: loaded with text keys such as '3'")
    assert load(save({"a": {"3": torch.ones(1)}}), {"a": {}}).assumed == ()


def test_an_object_gets_the_keys_and_classes_of_its_own_state() -> None:
    tensor, inner = torch.zeros(1), Stateful({0: torch.zeros(1)})
    live = {
        "t": {0: tensor},
        "n": OrderedDict({3: torch.zeros(1)}),
        "o": {1: inner},
        "x": {},
        "same": {"3": torch.zeros(1)},
    }
    state = {
        "t": {"0": torch.ones(1)},
        "n": {"3": torch.ones(1), "5": 2},
        "o": {"1": Stateful({"0": torch.ones(1)})},
        "x": {"3": torch.ones(1)},
        "same": {"3": torch.ones(1)},
    }
    target = Stateful(live)
    binding = load(flat_save({"o": Stateful(state)}), {"o": target})
    loaded = target.loaded
    assert loaded["t"] == {0: tensor}
    assert tensor == 1
    assert loaded["n"] == OrderedDict({3: torch.ones(1), 5: 2})
    assert type(loaded["n"]) is OrderedDict
    assert loaded["o"] == {1: inner}
    assert inner.loaded == {0: torch.ones(1)}
    assert loaded["x"] == {"3": torch.ones(1)}
    assert loaded["same"] == {"3": torch.ones(1)}
    converted, unknown = binding.assumed
    assert "o.t" in converted.partition(":")[0].split(", ")
    assert unknown.startswith("o.x: loaded with text keys")


def test_a_counter_comes_back_as_one_from_a_checkpoint_without_the_mark() -> None:
    saved = save({"o": Stateful({"n": {"3": Stateful(1), "5": Stateful(2)}})})
    saved.forget_objects()
    target = Stateful({"n": Counter({3: 1})})
    load(saved, {"o": target})
    assert target.loaded == {"n": Counter({3: 1, 5: 2})}
    assert type(target.loaded["n"]) is Counter


class WithTables(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter] = {0: parameter.detach() * 2, "seen": {1: {"n": 3}}}


def test_the_state_of_an_optimizer_gets_its_keys() -> None:
    def state(*, is_text: bool) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = WithTables(model.parameters(), lr=0.1)
        optimizer.step()
        key = str if is_text else int
        for parameter in model.parameters():
            entries = optimizer.state[parameter]
            seen = {key(1): {"n": 4, "t": torch.ones(1)}}
            optimizer.state[parameter] = {key(0): entries[0], "seen": seen}
        return {"m": model, "o": optimizer}

    source, target = state(is_text=True), state(is_text=False)
    binding = load(save(source), target)
    entries = target["o"].state[target["m"].weight]
    assert [*entries] == [0, "seen"]
    assert torch.equal(entries[0], source["m"].weight * 2)
    assert entries["seen"] == {1: {"n": 4, "t": torch.ones(1)}}
    assert binding.assumed


def test_integers_stay_integers_if_the_state_has_texts() -> None:
    target = Stateful({"3": 0})
    load(save({"o": Stateful({3: 1})}), {"o": target})
    assert target.loaded == {3: 1}
