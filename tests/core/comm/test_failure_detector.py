from __future__ import annotations

from typing import Any

import pytest

from dist_ckpt.config import Config
from dist_ckpt.core.comm.exchange import failure_detector
from dist_ckpt.core.comm.exchange.failure_detector import FailureDetector
from dist_ckpt.core.comm.messages import HeartbeatSender

SILENCE_S = 20


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class SaveBarrier:
    """A line to a store in which all keys have one value."""

    def __init__(self) -> None:
        self.beat: bytes | None = None

    def call(self, function: Any, keys: Any) -> list[bytes | None]:
        return [self.beat]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(failure_detector, "time", clock)
    return clock


def watch_of(line: Any) -> FailureDetector:
    return FailureDetector(line, str, Config(heartbeat_timeout_s=SILENCE_S))


def loss_of(watch: FailureDetector) -> str | None:
    watch.read_heartbeats([1])
    return watch.find_loss(1, 0, was_in=False)


def test_a_rank_that_was_never_seen_is_not_silent(clock):
    watch = watch_of(SaveBarrier())
    for clock.now in range(0, 1000, 4):
        assert loss_of(watch) is None
    assert watch.last_heartbeat(1) is None


def test_silence_counts_from_the_last_change_that_was_seen(clock):
    line, heart = SaveBarrier(), HeartbeatSender("a", inside=True)
    watch = watch_of(line)
    for start in (0, 1000):
        line.beat = heart.encode_next()
        for clock.now in range(start, start + SILENCE_S, 4):
            assert loss_of(watch) is None
    clock.now += 4
    assert loss_of(watch) == "is dead or frozen: no heartbeat for 20 s"


def test_a_pause_of_the_observer_is_not_silence_of_the_others(clock):
    line = SaveBarrier()
    watch = watch_of(line)
    line.beat = HeartbeatSender("a", inside=True).encode_next()
    for clock.now in range(0, 4 * 3600, 3600):  # each look counts for a quarter of a silence
        assert loss_of(watch) is None
    clock.now += 3600
    assert loss_of(watch) is not None


def test_a_message_that_is_not_a_heartbeat_is_refused(clock):
    line = SaveBarrier()
    watch = watch_of(line)
    assert not watch.has_invalid_heartbeat(1)
    line.beat = b"nonsense"
    assert loss_of(watch) is None
    assert watch.has_invalid_heartbeat(1)
    assert watch.last_heartbeat(1) is None
