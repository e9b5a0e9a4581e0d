from __future__ import annotations

import pytest

from dist_ckpt.comm import heartbeat
from dist_ckpt.comm.heartbeat import Beat, Heart, Pulses


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


def test_a_beat_tells_what_the_heart_was_told():
    heart = Heart("a", number=7, inside=True, told=3)
    assert Beat.decode(heart.beat()) == Beat(1, 7, True, 3, False, "a")
    heart.gone = True
    assert Beat.decode(heart.beat()) == Beat(2, 7, True, 3, True, "a")


def test_no_two_beats_are_equal():
    heart = Heart("a")
    assert len({heart.beat() for _ in range(1000)}) == 1000


def test_a_rank_that_was_never_seen_is_not_silent(clock):
    watch = Pulses(step_s=10)
    watch.see(1, None)
    clock.now = 100
    watch.see(1, None)
    assert watch.beat(1) is None
    assert watch.silent_s(1) == 0


def test_silence_counts_from_the_last_change_that_was_seen(clock):
    watch, heart = Pulses(step_s=10), Heart("a")
    watch.see(1, beat := heart.beat())
    for clock.now in (1, 2, 3):
        watch.see(1, beat)
    assert watch.silent_s(1) == 3
    clock.now = 4
    watch.see(1, heart.beat())
    assert watch.silent_s(1) == 0


def test_a_pause_of_the_observer_is_not_silence_of_the_others(clock):
    watch, heart = Pulses(step_s=5), Heart("a")
    watch.see(1, beat := heart.beat())
    clock.now = 3600
    watch.see(1, beat)
    assert watch.silent_s(1) == 5
