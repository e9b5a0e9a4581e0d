"""The whole of `dc.save`, overwrite and delete, crashed everywhere, on one to three ranks.

`tests/core/commit/test_crash_states.py` proves the commit order on small files; here the real save,
planner and shard writer run, so that no fsync is missing between them either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dist_ckpt import LocalShard
from dist_ckpt.core.commit import removal
from dist_ckpt.core.commit.attempts import find_checkpoint
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, NotFoundError
from dist_ckpt.testing.crash_storage import CrashPoint, CrashStorage, Operation, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from long_mode import sample, sampled_calls

pytest.importorskip("torch")

import torch

from ranks import PATH, load_on_threads, save_on_threads, shared_storage, try_save_on_threads

# Of the states at one point; more ranks have more unsynced files at once than can all be tried.
LIMIT = 60


def state(step: int, rank: int, ranks: int) -> dict[str, object]:
    """Return a rank's state: a part of a tensor, a value that all hold, one that is its own."""
    mine = torch.full((2, 3), float(10 * step + rank))
    return {
        "model": {"w": LocalShard(mine, (2 * ranks, 3), (2 * rank, 0))},
        "step": step,
        f"only on {rank}": step,
    }


def rows(step: int, ranks: int) -> torch.Tensor:
    return torch.cat([torch.full((2, 3), float(10 * step + rank)) for rank in range(ranks)])


def save(disk: CrashStorage, step: int, ranks: int, *, overwrite: bool = False) -> None:
    disk.mark(f"saving {step}")
    outcomes = try_save_on_threads(
        lambda rank: disk.client(f"rank {rank}"),
        [state(step, rank, ranks) for rank in range(ranks)],
        step=step,
        overwrite=overwrite,
    )
    assert [outcome.error for outcome in outcomes] == [None] * ranks
    disk.mark(f"saved {step}")


def save_overwrite_delete(disk: CrashStorage, ranks: int) -> None:
    disk.make_folder("/runs")
    disk.sync("/")
    save(disk, 1, ranks)
    save(disk, 2, ranks, overwrite=True)
    disk.mark("deleting")
    removal.delete(disk.client("rank 0"), PATH)
    disk.mark("deleted")


def allowed(marks: tuple[str, ...]) -> set[int | None]:
    steps: set[int | None] = {None}
    for mark in marks:
        word, _, step = mark.partition(" ")
        if word == "saving":
            steps.add(int(step))
        elif word == "saved":
            steps = {int(step)}
        else:
            steps = {None} if word == "deleted" else steps | {None}
    return steps


def wrong(point: CrashPoint, storage: Storage, ranks: int) -> str | None:
    """Return what is wrong after a crash, or None: what shows must be allowed, and load whole."""
    try:
        _, index = find_checkpoint(storage, PATH)
    except NotFoundError:
        return None if None in allowed(point.marks) else f"{point}: nothing shows"
    except CheckpointError as error:
        return f"{point}: {error!r}"
    if index.step not in allowed(point.marks):
        return f"{point}: step {index.step} shows"
    loaded: dict[str, Any] = {}
    try:
        load_on_threads(storage, [loaded])
    except CheckpointError as error:
        return f"{point}: step {index.step} does not load: {error}"
    assert index.step is not None
    whole = torch.equal(loaded["model"]["w"], rows(index.step, ranks))
    values = {name: value for name, value in loaded.items() if name != "model"}
    expected = {f"only on {rank}": index.step for rank in range(ranks)} | {"step": index.step}
    return None if whole and values == expected else f"{point}: {loaded} is not step {index.step}"


def violations(disk: CrashStorage, ranks: int, *, limit: int = LIMIT) -> Iterator[str]:
    save_overwrite_delete(disk, ranks)
    # Ranks are clients of their own: a sync covers the names that its client changed.
    for point, storage in states(disk.log, own_syncs=ranks > 1, limit=limit):
        if (found := wrong(point, storage, ranks)) is not None:
            yield found


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_after_any_crash_what_was_reported_saved_loads_and_nothing_else_shows(ranks):
    assert list(violations(CrashStorage(), ranks)) == []


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_taking_away_any_one_fsync_of_a_save_is_found(ranks):
    whole = CrashStorage()
    save_overwrite_delete(whole, ranks)
    unharmed = []
    for number in sample(range(1, whole.num_syncs + 1), 3):
        dropped: list[str] = []

        def forget(
            n: int, operation: Operation, number: int = number, dropped: list[str] = dropped
        ) -> bool:
            if n == number:
                dropped.append(str(operation))
            return n == number

        if not any(violations(CrashStorage(forget=forget), ranks, limit=20)):
            unharmed += dropped
    # The claim's bytes matter on a full disk only: see `tests/core/commit/test_crash_states.py`.
    assert [what for what in unharmed if ".claim-" not in what] == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("done", [False, True], ids=["not done", "done, but reported as failed"])
def test_an_error_at_any_storage_call_of_an_overwrite_loses_nothing(ranks, done):
    for number in sampled_calls(4):
        storage = MemoryStorage({"/runs": None})
        save_on_threads(storage, [state(1, rank, ranks) for rank in range(ranks)], step=1)
        faulty = FaultyStorage(storage, fail_at_call=number, done=done)
        outcomes = try_save_on_threads(
            shared_storage(faulty),
            [state(2, rank, ranks) for rank in range(ranks)],
            step=2,
            overwrite=True,
        )
        errors = [outcome.error for outcome in outcomes]
        assert len({type(error) for error in errors}) == 1, (faulty.failed, errors)
        _, index = find_checkpoint(storage, PATH)
        if errors[0] is None:
            assert index.step == 2
        elif index.step == 2:
            # It came to be all the same; the error must not say that it did not.
            assert "durab" in str(errors[0]) or "unknown" in str(errors[0]), errors[0]
        point = CrashPoint(number, Operation("mark", faulty.failed), (f"saved {index.step}",))
        assert wrong(point, storage, ranks) is None
        if faulty.calls < number:
            break
