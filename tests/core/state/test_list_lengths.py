"""Lists, tuples and deques of another length than saved: empty ones take what was saved."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt.core.state.wrappers import PerRank
from dist_ckpt.errors import IncompatibleError
from in_memory import load, save


def ones(*sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size) for size in sizes]


def refuses(saved: Any, live: Any, *texts: str, **options: Any) -> None:
    state, w = {"x": live, "w": torch.zeros(1)}, torch.zeros(1)
    with pytest.raises(IncompatibleError) as caught:
        load(save({"x": saved, "w": torch.ones(1)}), state, **options)
    for text in texts:
        assert text in str(caught.value)
    assert torch.equal(state["w"], w)


@pytest.mark.parametrize(
    "saved",
    [
        [0.5, 0.25],
        [],
        ones(1, 2),
        [{"loss": torch.ones(1), "n": 1}, {"loss": torch.ones(2), "n": 2}],
        [[torch.ones(1)], [], (1, torch.ones(2))],
        deque([1, (2, "a")], maxlen=5),
        deque([1]),
    ],
)
def test_an_empty_list_or_deque_takes_what_was_saved_in_place(saved: Any) -> None:
    live: Any = deque(maxlen=saved.maxlen) if isinstance(saved, deque) else []
    state = {"x": live, "n": 0}
    binding = load(save({"x": saved, "n": 3}), state)
    assert state["x"] is live
    assert str(live) == str(saved)
    assert state["n"] == 3
    assert not binding.missing


def test_an_empty_tuple_and_an_empty_deque_of_another_length_are_replaced() -> None:
    state: dict[str, Any] = {"x": (), "y": deque(maxlen=1), "z": []}
    load(save({"x": tuple(ones(1, 2)), "y": deque([1, 2], maxlen=9), "z": (1, 2)}), state)
    assert [len(part) for part in state["x"]] == [1, 2]
    assert (state["y"], state["y"].maxlen) == (deque([1, 2]), 9)
    assert state["z"] == (1, 2)


def test_one_empty_list_under_two_names_keeps_what_each_was_saved_with() -> None:
    live: list[Any] = []
    state = {"x": live, "y": live}
    load(save({"x": [1, 2], "y": ones(3)}), state)
    assert state["x"] == [1, 2]
    assert [len(part) for part in state["y"]] == [3]


def test_a_name_that_is_left_out_stays_empty() -> None:
    state: dict[str, Any] = {"x": [], "y": []}
    saved = save({"x": ones(1), "y": [1], "z": {"t": ones(1)}})
    load(saved, state | {"z": []}, exclude=["x", "x.*", "y", "z", "z.*"])
    assert state == {"x": [], "y": []}
    binding = load(save({"x": ones(1)}), state, strict=False)
    assert binding.missing == ("y",)


@pytest.mark.parametrize(("count", "now"), [(2, 1), (2, 3), (0, 1)])
@pytest.mark.parametrize("kind", [list, tuple])
def test_another_length_is_refused_with_both_lengths_and_the_way(
    count: int, now: int, kind: Any
) -> None:
    refuses(
        kind(ones(*[1] * count)),
        kind(ones(*[1] * now)),
        f"x: saved with {count} items, the {kind.__name__} in the state has {now}: create it with "
        f"{count}, give it an empty {kind.__name__} to take what was saved, or exclude 'x'",
    )


def test_a_list_of_plain_values_is_refused_only_if_the_saved_one_has_tensors() -> None:
    refuses(ones(1, 2), [0], "x: saved with 2 items, the list in the state has 1")
    state: dict[str, Any] = {"x": [1, 2, 3]}
    load(save({"x": [5]}), state)
    assert state["x"] == [5]


def test_a_part_of_a_list_can_be_selected() -> None:
    saved = save({"x": ones(1, 1, 1)})
    state = {"x": [torch.zeros(1), torch.zeros(1)]}
    load(saved, state, exclude="x.2")
    assert [int(part) for part in state["x"]] == [1, 1]
    state = {"x": [torch.zeros(1)]}
    assert load(saved, state, strict=False).unrequested == ("x.1", "x.2")
    assert int(state["x"][0]) == 1


@pytest.mark.parametrize(
    ("saved", "kind"),
    [
        ({"a": torch.ones(1)}, "a container with tensors"),
        (torch.ones(1), "a tensor"),
        (PerRank(1), "a per-rank value"),
    ],
)
def test_an_empty_list_takes_nothing_that_is_no_list(saved: Any, kind: str) -> None:
    refuses(saved, [], f"x: saved as {kind}, the state has")


def test_a_deque_does_not_take_a_list_with_tensors() -> None:
    refuses(ones(1), deque(), "x: saved as a container with tensors, the state has an empty deque")


class Counting:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_an_empty_list_takes_no_objects() -> None:
    text = "x.0, x.1: saved by the state_dict of an object, and the state has no object there"
    refuses([Counting(1), Counting(2)], [], text, "give 'x' a list of these objects")
    refuses([Counting(1), Counting(2)], [Counting(0)], "saved with 2 items", "or exclude 'x'")
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    refuses(models, models[:1], "x")
