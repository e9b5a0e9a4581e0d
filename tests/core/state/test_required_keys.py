"""What an object will refuse by its keys is known before anything is touched."""

from __future__ import annotations

import contextlib
from copy import copy
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from dist_ckpt.core.state.binding.required_keys import find_missing_keys, read_keys
from dist_ckpt.core.state.wrappers import PerRank
from dist_ckpt.errors import IncompatibleError
from in_memory import load, save


class Plain:
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it."""
        self.a = state["a"]
        self.b: int = 1 + len(state["b"])
        state.pop("c")
        state.pop("optional", None)
        self.d, self.e = copy(state["d"]), [x + 1 for x in state["e"]]
        self.rest = state.get("rest")


class Modes:
    is_on = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.is_on:
            return
        if len(state_dict) == 0:
            raise RuntimeError("empty")
        if self.is_on:
            self.a = state_dict["a"]
        with torch.no_grad():
            self.b = state_dict["b"]
        for key in ("c", "d"):
            setattr(self, key, state_dict[key])


class Lenient:
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.needed = state["needed"]
        if "a" in state:
            self.a = state["a"]
        else:
            self.a = state["old_a"]
        self.b = state["b"] + 1 if "b" in state else 0
        self.c = "c" in state and state["c"]
        try:
            self.d = state["d"]
        except KeyError:
            self.d = 0
        with contextlib.suppress(KeyError):
            self.e = state["e"]
        state.setdefault("f", 0)
        self.f = state["f"]
        for group in range(3):
            self.g = state["g"] if group else 0
        self.h = lambda: state["h"]
        self.i = [state["i"] for _ in range(3)]
        if "version" not in state:
            return
        self.z = state["z"]


class Converting:
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["first"]
        state = {"a": 0, **state}
        self.a = state["a"]


class Copying:
    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        other = state.copy()
        other["given"] = 0
        self.a, self.given = other.pop("a"), other["given"]
        other.update(b=1)
        self.b = other["b"]


class Parent:
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parent = state["parent"]


class Child(Parent):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.child = state["child"]
        super().load_state_dict(state)


class Replacing(Parent):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"parent": 0})


class Helping:
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._upgrade(state)
        self._load(dict(state), strict=True)
        self.given = state["given"]
        try:
            self._load_more(state)
        except KeyError:
            self.more = 0

    def _upgrade(self, state: dict[str, Any]) -> None:
        state.setdefault("given", 0)

    def _load(self, state: dict[str, Any], *, strict: bool) -> None:
        self.a = state["a"]
        self._load(state, strict=strict)

    def _load_more(self, state: dict[str, Any]) -> None:
        self.more = state["more"]


@pytest.mark.parametrize(
    ("cls", "keys"),
    [
        (Plain, {"a", "b", "c", "d", "e"}),
        (Modes, {"a", "b", "c", "d"}),
        (Lenient, {"needed"}),
        (Converting, {"first"}),
        (Copying, {"a"}),
        (Child, {"child", "parent"}),
        (Replacing, set()),
        (Helping, {"a"}),
        (dict, set()),
        (lr_scheduler.SequentialLR, {"_schedulers"}),
        (lr_scheduler.LambdaLR, {"lr_lambdas"}),
        (lr_scheduler.StepLR, set()),
    ],
)
def test_only_keys_that_are_read_without_a_test_are_required(cls: type, keys: set[str]) -> None:
    assert read_keys(cls) == keys


def test_a_class_without_source_requires_nothing() -> None:
    names: dict[str, Any] = {}
    exec("class Shell:\n def load_state_dict(self, state): self.a = state['a']", names)
    assert read_keys(names["Shell"]) == set()


def test_only_keys_of_the_live_state_are_missing() -> None:
    assert find_missing_keys(Plain(), ["a", "b", "rest", 3], {"b": 1}) == ("a",)
    assert find_missing_keys(Plain(), [], {}) == ()


class Average:
    """An average of weights that can be off, such as that of a trainer."""

    def __init__(self, weight: torch.Tensor | None) -> None:
        self.weight = weight

    def state_dict(self) -> dict[str, Any]:
        return {} if self.weight is None else {"weight": self.weight, "decay": 0.5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.weight is not None:
            self.weight.copy_(state["weight"])
            self.decay = state["decay"]


def scaler(*, enabled: bool) -> Any:
    return torch.amp.GradScaler("cpu", enabled=enabled)


class Holder:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner, "n": torch.ones(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner = state["inner"]


@pytest.mark.parametrize("wrap", [lambda inner: inner, PerRank, Holder])
@pytest.mark.parametrize("strict", [True, False])
def test_an_object_that_was_off_is_refused_before_anything_is_touched(
    wrap: Any, strict: bool
) -> None:
    saved = save({"w": torch.ones(2), "o": wrap(scaler(enabled=False))})
    w = torch.zeros(2)
    with pytest.raises(IncompatibleError) as caught:
        load(saved, {"w": w, "o": wrap(scaler(enabled=True))}, strict=strict)
    name = "o.inner" if wrap is Holder else "o"
    assert str(caught.value) == (
        f"{name}: load_state_dict of GradScaler needs scale, growth_factor, backoff_factor, "
        "growth_interval, _growth_tracker, which were not saved (it was saved with an empty state, "
        f"as if disabled): create the GradScaler as it was saved, or exclude '{name}' to start it "
        "anew"
    )
    assert w.tolist() == [0, 0]
    if wrap is not Holder:
        load(saved, {"w": w, "o": wrap(scaler(enabled=True))}, exclude="o")
        assert w.tolist() == [1, 1]


def test_an_object_that_was_on_loads_into_one_that_is_off_as_in_torch() -> None:
    source = scaler(enabled=True)
    source.load_state_dict({**source.state_dict(), "scale": 8.0})
    for enabled in (True, False):
        target, expected = scaler(enabled=enabled), scaler(enabled=enabled)
        expected.load_state_dict(source.state_dict())
        load(save({"o": source}), {"o": target})
        assert target.state_dict() == expected.state_dict()


def test_a_part_that_was_not_saved_is_named() -> None:
    class Older(Average):
        def state_dict(self) -> dict[str, Any]:
            return {"weight": self.weight}

    w = torch.zeros(1)
    with pytest.raises(IncompatibleError, match="of Average needs decay, which was not saved: cre"):
        load(save({"o": Older(torch.ones(1))}), {"o": Average(w)})
    assert w == 0
    load(save({"o": Average(torch.ones(1))}), {"o": Average(w)})
    assert w == 1
    load(save({"o": Average(torch.ones(1))}), {"o": Average(None)})
