"""A storage that is paced is written to no faster than it may, by all threads together."""

from __future__ import annotations

import pytest

from dist_ckpt.core.storage.storage_protocol import Storage
from dist_ckpt.core.storage.storage_wrappers import STEP_S, RateLimit, RateLimitedStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.storage_contract import StorageContract


class TestPacedStorage(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return RateLimitedStorage(MemoryStorage({"/root": None}), RateLimit(1e12))

    @pytest.fixture
    def root(self) -> str:
        return "/root"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_so_many_bytes_take_so_long():
    clock = Clock()
    allowance = RateLimit(1000, clock=lambda: clock.now, sleep=clock.sleep)
    storage = RateLimitedStorage(MemoryStorage(), allowance)
    storage.make_folder("/f")
    file = storage.create("/f/a", 4000)
    for offset in range(0, 4000, 500):
        file.write_at(offset, b"x" * 500)
    # The first begins at once, and the last has begun when the others have had their time.
    assert clock.now == pytest.approx(100 + 3.5)
    assert max(clock.slept) <= STEP_S
    assert file.finish() == 4000


def test_what_is_not_used_in_time_is_lost():
    clock = Clock()
    allowance = RateLimit(1000, clock=lambda: clock.now, sleep=clock.sleep)
    allowance.take(1000)
    clock.now += 50
    for _ in range(3):
        allowance.take(1000)
    assert clock.now == pytest.approx(100 + 50 + 2)


def test_a_wait_ends_when_there_is_nothing_to_wait_for():
    clock = Clock()

    def check() -> None:
        if clock.now > 102:
            raise InterruptedError

    allowance = RateLimit(1, check, clock=lambda: clock.now, sleep=clock.sleep)
    allowance.take(1 << 30)
    with pytest.raises(InterruptedError):
        allowance.take(1)
    assert clock.now < 102 + 2 * STEP_S


@pytest.mark.parametrize("speed", [0, -1, float("inf"), float("nan")])
def test_a_speed_that_makes_no_sense_is_refused(speed):
    with pytest.raises(ValueError, match="max_bytes_per_s"):
        RateLimit(speed)
