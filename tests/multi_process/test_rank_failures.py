"""What becomes of a save or a load when one rank fails, dies, freezes or never comes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import Options, Outcome, run_ranks, try_ranks

import dist_ckpt as dc
from dist_ckpt import commit, loader, saver
from dist_ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.multi_process

SILENCE_S = 1.5
# From the death to the error: silence, the age of the last beat, a look, and a busy machine.
NOTICED_S = SILENCE_S + 4

CALM = {"DIST_CKPT_SILENCE_S": "15", "DIST_CKPT_ARRIVE_S": "30", "DIST_CKPT_APPEAR_S": "0.3"}
FRAIL = {"DIST_CKPT_SILENCE_S": str(SILENCE_S), "DIST_CKPT_ARRIVE_S": "30"}
HASTY = {"DIST_CKPT_SILENCE_S": "15", "DIST_CKPT_ARRIVE_S": "0.5", "DIST_CKPT_WARN_S": "0.2"}

# Enough for several blocks and so for several writes of each rank.
ROWS, COLUMNS = 3, 1 << 20


class Told(NamedTuple):
    """The error that a rank was told."""

    kind: str
    rank: int | None
    message: str
    cause: str
    seconds: float
    touched: tuple[str, ...] = ()


def state(rank: int, value: int, *, rows: int = ROWS, columns: int = 64) -> dict[str, Any]:
    part = torch.full((rows, columns), value, dtype=torch.int32)
    part += torch.arange(rows, dtype=torch.int32)[:, None]
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "part": dc.LocalShard(part, (world_size * rows, columns), (rank * rows, 0)),
        "replica": torch.full((100,), value),
        "plain": {"value": value},
    }


def told(call: Callable[[], object]) -> Told:
    """Make a call that must fail, and return its error."""
    start = time.monotonic()
    try:
        call()
    except (dc.CheckpointError, ValueError, TypeError) as error:
        seconds = time.monotonic() - start
        touched = getattr(error, "touched", ())
        cause = type(error.__cause__).__name__
        rank = getattr(error, "rank", None)
        return Told(type(error).__name__, rank, str(error), cause, seconds, touched)
    raise AssertionError("it should have failed")


def use_own_groups(rank: int, world_size: int) -> None:
    """See that the user's process groups work, old and new."""
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert total.item() == sum(range(world_size))
    pair = dist.new_group([0, 1])
    if rank < 2:
        total = torch.tensor([rank])
        dist.all_reduce(total, group=pair)
        assert total.item() == 1


def load_all(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    dc.load(found, path)
    return found


def assert_stands(path: str, value: int, *, rows: int = ROWS) -> None:
    """See that there is just one checkpoint, complete, of this value, and nothing else."""
    statuses = commit.attempts(LocalStorage(), path)
    assert [status.state for status in statuses] == ["committed"]
    assert os.listdir(path) == [statuses[0].attempt.name]
    assert_loads(path, value, rows=rows)


def assert_loads(path: str, value: int, *, rows: int = ROWS) -> None:
    found = load_all(path)
    assert found["plain"] == {"value": value}
    assert found["replica"].eq(value).all()
    expected = value + torch.arange(rows, dtype=torch.int32)[:, None]
    parts = found["part"].view(-1, rows, found["part"].shape[-1])
    assert parts.eq(expected).all()


# --- one rank fails ----------------------------------------------------------------------------


class Fails:
    """An object whose `state_dict` raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        raise self._error

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise self._error


class Elsewhere(LocalStorage):
    """A storage that has this rank's own folder where the others have the shared one."""

    def __init__(self, shared: str, own: str) -> None:
        self._shared, self._own = shared, own

    def list(self, folder: str) -> Any:
        return super().list(self._at(folder))

    def create(self, path: str, nbytes: int) -> Any:
        return super().create(self._at(path), nbytes)

    def open(self, path: str) -> Any:
        return super().open(self._at(path))

    def make_folder(self, folder: str) -> None:
        super().make_folder(self._at(folder))

    def _at(self, path: str) -> str:
        return path.replace(self._shared, self._own, 1)


@contextlib.contextmanager
def own_storage(module: Any, path: str) -> Any:
    own = f"{path}-elsewhere"
    os.makedirs(own, exist_ok=True)
    theirs = module.open_storage
    module.open_storage = lambda path: (Elsewhere(str(path), own), str(path))
    try:
        yield
    finally:
        module.open_storage = theirs


@contextlib.contextmanager
def small_files(nbytes: int) -> Any:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def overwrite(good: Any, path: str, **options: Any) -> None:
    dc.save(good, path, overwrite=True, **options)


def save_from_elsewhere(good: Any, path: str, **options: Any) -> None:
    with own_storage(saver, path):
        overwrite(good, path, **options)


def save_with_no_space(nbytes: int) -> Callable[..., None]:
    def save(good: Any, path: str, **options: Any) -> None:
        with small_files(nbytes):
            overwrite(good, path, **options)

    return save


class Case(NamedTuple):
    """How a save goes wrong on the `victim`: the call it makes, and what all ranks are told."""

    call: Callable[..., None]
    kind: str
    text: str
    # The class that the victim's error comes from: "" if it is the same for all.
    cause: str = ""
    victim: int = 1


CASES = {
    "an object that cannot be saved": Case(
        lambda good, path, **o: overwrite({**good, "bad": object()}, path, **o),
        "TypeError",
        "rank 1 (host {host}): bad",
        "TypeError",
    ),
    "a state_dict that raises": Case(
        lambda good, path, **o: overwrite({**good, "bad": Fails(RuntimeError("no"))}, path, **o),
        "RankError",
        "rank 1 (host {host}): RuntimeError: no",
        "RuntimeError",
    ),
    "a state_dict that raises on rank 0": Case(
        lambda good, path, **o: overwrite({**good, "bad": Fails(RuntimeError("no"))}, path, **o),
        "RankError",
        "rank 0 (host {host}): RuntimeError: no",
        "RuntimeError",
        victim=0,
    ),
    "no space": Case(
        save_with_no_space(2000),
        "StorageError",
        "rank 1 (host {host}): {path}",
        "StorageError",
    ),
    "no space for the coordinator's shards": Case(
        save_with_no_space(2000), "StorageError", "rank 0 (host {host})", "StorageError", victim=0
    ),
    "no space for the claim": Case(
        save_with_no_space(0), "StorageError", "claim", "StorageError", victim=0
    ),
    "another path": Case(
        lambda good, path, **o: overwrite(good, f"{path}-2", **o),
        "ValueError",
        "different path: ranks 0 and 2: '{path}'; rank 1: '{path}-2'",
    ),
    "what is no path": Case(
        lambda good, path, **o: overwrite(good, "", **o), "ValueError", "rank 1 (host {host}): path"
    ),
    "another step": Case(
        lambda good, path, **o: overwrite(good, path, **{**o, "step": 8}),
        "ValueError",
        "different step: ranks 0 and 2: 7; rank 1: 8",
    ),
    "a step that is no number": Case(
        lambda good, path, **o: overwrite(good, path, **{**o, "step": "8"}),
        "TypeError",
        "rank 1 (host {host}): step='8'",
        "TypeError",
    ),
    "a storage of its own": Case(
        save_from_elsewhere,
        "StorageError",
        "rank 1 (host {host}): {path}/a2-",
        "StorageError",
    ),
    "a storage of its own for the coordinator": Case(
        save_from_elsewhere,
        "StorageError",
        "not on storage that all ranks share",
        "",
        victim=0,
    ),
    "a replica that differs": Case(
        lambda good, path, **o: overwrite({**good, "replica": torch.full((100,), 5)}, path, **o),
        "ValueError",
        "replica",
    ),
    "plain data that differs": Case(
        lambda good, path, **o: overwrite({**good, "plain": {"value": 5}}, path, **o),
        "ValueError",
        "plain (ranks 0 and 2 differs from rank 1)",
    ),
    "another shape": Case(
        lambda good, path, **o: overwrite({**good, "replica": torch.zeros(7)}, path, **o),
        "ValueError",
        "replica",
    ),
}


def fail_then_go_on(rank: int, name: str, path: str, part: tuple[int, ...]) -> Any:
    """Save well, then badly, then well again; `part`: the ranks that save, of all."""
    world_size = dist.get_world_size()
    group = dist.new_group(part) if part else None
    inside = part.index(rank) if rank in part else rank
    error, left = None, []
    case = CASES[name]
    if rank in part or not part:
        good = parts(inside, 1)
        dc.save(good, path, group=group, step=1)
        call = case.call if inside == case.victim else overwrite
        error = told(lambda: call(parts(inside, 2), path, group=group, step=7))
    dist.barrier()
    left = os.listdir(path), os.path.exists(f"{path}-2")
    use_own_groups(rank, world_size)
    if rank in part or not part:
        dc.save(parts(inside, 3), path, group=group, step=7, overwrite=True)
    return error and tuple(error), left


def parts(rank: int, value: int) -> dict[str, Any]:
    """Return a state cut over three ranks."""
    part = torch.full((ROWS, 64), value, dtype=torch.int32)
    part += torch.arange(ROWS, dtype=torch.int32)[:, None]
    return {
        "part": dc.LocalShard(part, (3 * ROWS, 64), (rank * ROWS, 0)),
        "replica": torch.full((100,), value),
        "plain": {"value": value},
    }


def assert_all_told(name: str, values: list[Any], path: str) -> None:
    case = CASES[name]
    errors = [error for error, _ in values if error is not None]
    assert len(errors) == 3
    host = os.uname().nodename
    for rank, error in enumerate(errors):
        assert error[:3] == errors[0][:3]
        assert error.kind == case.kind, error
        assert case.text.format(host=host, path=path) in error.message
        assert rank != case.victim or case.cause in ("", error.cause)
        assert error.seconds < 10
    for _, (left, elsewhere) in values:
        assert [name.partition("-")[0] for name in left] == ["a1"]
        assert not elsewhere
    assert_stands(path, 3)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_are_told_the_same_of_one_that_fails_and_they_go_on(name, tmp_path):
    path = str(tmp_path / "ck")
    values = run_ranks(3, fail_then_go_on, name, path, (), environ=CALM)
    assert_all_told(name, [(Told(*error), left) for error, left in values], path)


@pytest.mark.parametrize("name", ["a state_dict that raises", "a storage of its own"])
def test_all_ranks_of_a_part_of_the_world_are_told_the_same_and_all_go_on(name, tmp_path):
    path = str(tmp_path / "ck")
    values = run_ranks(4, fail_then_go_on, name, path, (1, 2, 3), environ=CALM)
    assert values[0][0] is None
    assert_all_told(name, [(error and Told(*error), left) for error, left in values], path)
