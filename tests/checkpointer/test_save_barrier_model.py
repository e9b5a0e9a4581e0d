"""Ranks that agree by a line never split and never stop: all that can happen in small worlds.

The larger ones take minutes, and are `long`.
"""

from __future__ import annotations

import pytest

from dist_ckpt.checkpointer.barrier_rounds import SaveBarrier
from long_mode import sampled_params
from save_barrier_model import FAULTS, World, explore, with_fault

SMALL = (
    World(),
    World(ahead=None),
    World(asks=(1, 1)),
    World(ahead=2, asks=(1, 1), lookahead=(0, 1)),
    World(ahead=None, lookahead=(1, 0)),
    World(deaths=1),
    World(ahead=None, boundaries=2, deaths=2),
    World(blocked=frozenset({1})),
    World(blocked=frozenset({0, 1})),
    World(boundaries=2, most_rounds=3, asks=(2, 0)),
)

LARGE = (
    World(boundaries=4, ahead=None, asks=(1, 1), lookahead=(0, 2), deaths=2),
    World(ranks=3, boundaries=2, asks=(1, 0, 1)),
    World(ranks=3, boundaries=2, deaths=2),
    World(ranks=3, boundaries=2, ahead=None, lookahead=(1, 0, 0)),
)


@pytest.mark.parametrize(
    "world",
    [*sampled_params(SMALL, 3), *(pytest.param(world, marks=pytest.mark.long) for world in LARGE)],
    ids=str,
)
def test_no_order_of_events_splits_the_ranks_or_stops_them(world: World) -> None:
    found = explore(world)
    assert found.wrong == {}
    assert found.served
    assert found.states > 1000


@pytest.mark.parametrize("fault", FAULTS)
def test_each_change_of_the_protocol_is_found(fault: str) -> None:
    worlds = World(), World(deaths=1), World(blocked=frozenset({0}))
    assert any(explore(with_fault(world, fault)).wrong for world in worlds)


def test_a_barrier_far_ahead_stops_nobody_before_it() -> None:
    barrier = SaveBarrier()
    assert barrier.set_ahead(2) == 3
    assert [barrier.arrive() for _ in range(4)] == ["pass", "pass", "wait", "wait"]
    barrier.learn(5)
    assert [barrier.arrive() for _ in range(4)] == ["pass", "pass", "save", "pass"]
    assert (barrier.passed, barrier.round, barrier.at) == (6, 2, None)


def test_a_barrier_is_set_once_in_a_round() -> None:
    barrier = SaveBarrier()
    assert barrier.set_ahead(1) == 2
    barrier.arrive()
    assert barrier.set_ahead(0) == 2
    barrier.learn(None)
    assert barrier.set_ahead(0) == 2
    assert barrier.round == 2


def test_a_decision_that_no_answer_led_to_is_refused() -> None:
    barrier = SaveBarrier()
    with pytest.raises(AssertionError, match="the decision is 3, and the answer was None"):
        barrier.learn(3)
    barrier.set_ahead(4)
    with pytest.raises(AssertionError, match="the decision is 3, and the answer was 5"):
        barrier.learn(3)
