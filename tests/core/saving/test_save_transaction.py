"""An interrupt of the coordinator in its commit, where the storage does not let it be settled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import pytest

from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import StorageError
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from rank_threads import try_save

_T = TypeVar("_T")


class InterruptedStorage(FaultyStorage):
    """Interrupts the first sync after the index is in place; from then on `fails` tells what does.

    The index is that of a commit: it is renamed once.
    """

    def __init__(
        self, inner: Storage, interrupt: type[BaseException], fails: Callable[[str], bool]
    ) -> None:
        super().__init__(inner)
        self._interrupt, self._fails = interrupt, fails
        self._is_in_place = self._is_interrupted = False

    def call(self, what: str, act: Callable[[], _T]) -> _T:
        if self._is_interrupted and self._fails(what):
            raise StorageError(f"{what}: a planted fault")
        if self._is_in_place and what.startswith("sync") and not self._is_interrupted:
            self._is_interrupted = True
            raise self._interrupt
        made = act()
        self._is_in_place |= what.startswith("rename") and what.endswith("index.json")
        return made


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    ("fails", "verdict"),
    [
        (
            lambda what: what.startswith("sync"),
            "is in place at /runs/ck, but it is unknown",
        ),
        (lambda what: True, "it is unknown whether it is committed at /runs/ck"),
    ],
    ids=["in place", "unknown"],
)
def test_an_interrupt_in_the_commit_is_raised_as_it_is_and_the_others_are_told_the_verdict(
    interrupt: type[BaseException],
    fails: Callable[[str], bool],
    verdict: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "dist_ckpt")
    disk = MemoryStorage()
    own = InterruptedStorage(disk, interrupt, fails)
    coordinator, other = try_save(
        lambda rank: disk if rank else own, [{"step": 1, "m": {}}] * 2, step=1
    )
    assert type(coordinator.error) is interrupt
    assert type(other.error) is StorageError
    told = f"the commit was interrupted: {interrupt.__name__}. "
    assert told in str(other.error)
    assert verdict in str(other.error)
    assert any(told in record.message and verdict in record.message for record in caplog.records)
