"""Whole saves and loads by ranks that are threads, over any storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.saving.save import SaveOptions, save_together
from dist_ckpt.core.storage import Storage
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import LoadReport, SaveReport
from dist_ckpt.testing.thread_channel import TEST_CONFIG, Outcome, try_ranks

PATH = "/runs/ck"

T = TypeVar("T")

StorageOf = Callable[[int], Storage]


def try_save(
    storage_of: StorageOf,
    states: Sequence[Any],
    path: str = PATH,
    each: Any = (),
    **options: Any,
) -> list[Outcome[SaveReport]]:
    """Save `states[rank]` on each rank, and return what each rank's call came to.

    `each` are the options of each rank alone, a mapping a rank.
    """
    return try_ranks(
        len(states),
        lambda rank, channel, bulk: save_together(
            Session(channel, bulk, TEST_CONFIG),
            states[rank],
            path,
            SaveOptions(**options, **(each[rank] if each else {})),
            storage_of(rank),
        ),
    )


def try_load(
    storage_of: StorageOf,
    states: Sequence[Any],
    path: str = PATH,
    hosts: Sequence[str] | None = None,
    **options: Any,
) -> list[Outcome[LoadReport]]:
    """Load into `states[rank]` on each rank, and return what each rank's call came to."""
    return try_ranks(
        len(states),
        lambda rank, channel, bulk: load_together(
            Session(channel, bulk, TEST_CONFIG),
            states[rank],
            path,
            LoadOptions(**options),
            storage_of(rank),
            opener=OPENER,
        ),
        hosts=hosts,
    )


def everywhere(storage: Storage) -> StorageOf:
    """Return what gives every rank the same storage."""
    return lambda _: storage


def save(storage: Storage, states: Sequence[Any], path: str = PATH, **options: Any) -> SaveReport:
    """Save on all ranks; raise the first error."""
    return _first(try_save(everywhere(storage), states, path, **options))


def load(storage: Storage, states: Sequence[Any], path: str = PATH, **options: Any) -> LoadReport:
    """Load on all ranks; raise the first error."""
    return _first(try_load(everywhere(storage), states, path, **options))


def _first(outcomes: Sequence[Outcome[T]]) -> T:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    value = outcomes[0].value
    assert value is not None
    return value


def errors_of(outcomes: Sequence[Outcome[Any]]) -> list[BaseException]:
    """Return the error of each rank; every rank must have one."""
    assert all(outcome.error is not None for outcome in outcomes), outcomes
    return [outcome.error for outcome in outcomes if outcome.error is not None]
