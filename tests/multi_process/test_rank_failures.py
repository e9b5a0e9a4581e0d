"""What becomes of a save or a load when one rank fails, dies, freezes or never comes."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import dist_ckpt as dc
from dist_ckpt import default_opener
from dist_ckpt.core.commit import attempts, commit_protocol, removal
from dist_ckpt.core.saving import save as saver
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from ranks import Options, run_ranks, try_ranks

pytestmark = pytest.mark.multi_process

SILENCE_S = 6
# From the death to the error it takes silence, the age of the last beat and a look. On a busy
# machine it takes longer; what waits for anything else waits longer than this.
NOTICED_S = 150

CALM = {
    "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "1000",
    "DIST_CKPT_JOIN_TIMEOUT_S": "1000",
    "DIST_CKPT_VISIBILITY_TIMEOUT_S": "0.3",
}
FRAIL = {"DIST_CKPT_HEARTBEAT_TIMEOUT_S": str(SILENCE_S), "DIST_CKPT_JOIN_TIMEOUT_S": "1000"}
# A rank that is stopped is late, up to this time.
FROZEN = {**FRAIL, "DIST_CKPT_JOIN_TIMEOUT_S": "10"}
HASTY = {
    "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "1000",
    "DIST_CKPT_JOIN_TIMEOUT_S": "2",
    "DIST_CKPT_JOIN_WARNING_S": "0.2",
}

# Each rank holds so many rows of the state that fails.
ROWS = 3


class Told(NamedTuple):
    """The error that a rank was told."""

    kind: str
    rank: int | None
    message: str
    cause: str
    seconds: float
    touched: tuple[str, ...] = ()


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


def value_at(path: str) -> int:
    """Return what is saved, without loading: that would be collective."""
    with dc.open(path) as checkpoint:
        plain: Any = checkpoint.objects["plain"]
        return int(plain["value"])


def assert_stands(path: str, value: int, *, rows: int = ROWS) -> None:
    """See that there is just one checkpoint, complete, of this value, and nothing else."""
    statuses = attempts.list_statuses(LocalStorage(), path)
    assert [status.state for status in statuses] == ["committed"]
    assert os.listdir(path) == [statuses[0].attempt.name]
    assert_loads(path, value, rows=rows)


def assert_loads(path: str, value: int, *, rows: int = ROWS) -> None:
    found: dict[str, Any] = {}
    dc.load(found, path)
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
        super().__init__()
        self._shared, self._own = shared, own

    def list(self, folder: str, **options: Any) -> Any:
        return super().list(self._at(folder), **options)

    def create(self, path: str, nbytes: int) -> Any:
        return super().create(self._at(path), nbytes)

    def open(self, path: str) -> Any:
        return super().open(self._at(path))

    def make_folder(self, folder: str) -> None:
        super().make_folder(self._at(folder))

    def rename(self, old: str, new: str) -> None:
        super().rename(self._at(old), self._at(new))

    def remove(self, path: str) -> None:
        super().remove(self._at(path))

    def sync(self, folder: str) -> None:
        super().sync(self._at(folder))

    def _at(self, path: str) -> str:
        return path.replace(self._shared, self._own, 1)


@contextlib.contextmanager
def own_storage(module: Any, path: str) -> Any:
    own = f"{path}-elsewhere"
    os.makedirs(own, exist_ok=True)
    theirs = module.open_storage
    module.open_storage = lambda path, **_: (Elsewhere(str(path), own), str(path))
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
        "CheckpointError",
        "rank 1 (host {host}): bad: state_dict of Fails raised RuntimeError (no)",
        "CheckpointError",
    ),
    "a state_dict that raises on rank 0": Case(
        lambda good, path, **o: overwrite({**good, "bad": Fails(RuntimeError("no"))}, path, **o),
        "CheckpointError",
        "rank 0 (host {host}): bad: state_dict of Fails raised RuntimeError (no)",
        "CheckpointError",
        victim=0,
    ),
    "no space": Case(
        save_with_no_space(2000), "StorageError", "rank 1 (host {host}): {path}", "StorageError"
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
        "different path: ranks 0, 2: '{path}'; rank 1: '{path}-2'",
    ),
    "what is no path": Case(
        lambda good, path, **o: overwrite(good, "", **o), "ValueError", "rank 1 (host {host}): path"
    ),
    "another step": Case(
        lambda good, path, **o: overwrite(good, path, **{**o, "step": 8}),
        "ValueError",
        "different step: ranks 0, 2: 7; rank 1: 8",
    ),
    "a step that is no number": Case(
        lambda good, path, **o: overwrite(good, path, **{**o, "step": "8"}),
        "TypeError",
        "rank 1 (host {host}): step='8'",
        "TypeError",
    ),
    "a storage of its own": Case(
        save_from_elsewhere, "StorageError", "rank 1 (host {host}): {path}/a2-", "StorageError"
    ),
    "a storage of its own for the coordinator": Case(
        save_from_elsewhere, "StorageError", "not on storage that all ranks share", "", victim=0
    ),
    "a replica that differs": Case(
        lambda good, path, **o: overwrite({**good, "replica": torch.full((100,), 5)}, path, **o),
        "UnequalReplicasError",
        "replica",
    ),
    "plain data that differs": Case(
        lambda good, path, **o: overwrite({**good, "plain": {"value": 5}}, path, **o),
        "UnequalReplicasError",
        "plain (ranks 0, 2 differs from rank 1)",
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
    error = None
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
        assert error.seconds < NOTICED_S
    for _, (left, elsewhere) in values:
        assert [name.partition("-")[0] for name in left] == ["a1"]
        assert not elsewhere
    assert_stands(path, 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_are_told_the_same_of_one_that_fails_and_they_go_on(name, tmp_path):
    path = str(tmp_path / "ck")
    values = run_ranks(
        fail_then_go_on, name, path, (), world_size=3, store="launcher", environ=CALM
    )
    assert_all_told(name, [(Told(*error), left) for error, left in values], path)


@pytest.mark.parametrize("name", ["a state_dict that raises", "a storage of its own"])
def test_all_ranks_of_a_part_of_the_world_are_told_the_same_and_all_go_on(name, tmp_path):
    path = str(tmp_path / "ck")
    values = run_ranks(fail_then_go_on, name, path, (1, 2, 3), world_size=4, environ=CALM)
    assert values[0][0] is None
    assert_all_told(name, [(error and Told(*error), left) for error, left in values], path)


# --- one rank dies -----------------------------------------------------------------------------


@contextlib.contextmanager
def at(moment: str, act: Callable[[], object]) -> Any:
    """Do something at a moment of a save or load of this rank: once."""
    owner, name, when, number = MOMENTS[moment]
    original = getattr(owner, name)
    counts = {"calls": 0}

    def hooked(*args: Any, **options: Any) -> Any:
        if moment.endswith("commit") and not args[2].endswith("/index.json"):
            return original(*args, **options)
        counts["calls"] += 1
        is_it = counts["calls"] == number
        if is_it and when == "before":
            act()
        value = original(*args, **options)
        if is_it and when == "after":
            act()
        return value

    setattr(owner, name, hooked)
    try:
        yield
    finally:
        setattr(owner, name, original)


# What is called then, before or after which of its calls it is.
MOMENTS: dict[str, tuple[Any, str, str, int]] = {
    "before the claim": (commit_protocol, "claim", "before", 1),
    "in the claim": (LocalStorage, "make_folder", "after", 1),
    "after the claim": (commit_protocol, "claim", "after", 1),
    "while it writes": (os, "pwrite", "after", 2),
    "before it makes its files durable": (os, "fsync", "before", 1),
    "before the commit": (LocalStorage, "rename", "before", 1),
    "after the commit": (LocalStorage, "rename", "after", 1),
    "while it reads": (os, "preadv", "before", 2),
}


def large(rank: int, world_size: int, value: int) -> dict[str, Any]:
    """Return a state of which each rank writes several blocks."""
    part = torch.full((2, 1 << 20), value, dtype=torch.int32)
    part += torch.arange(2, dtype=torch.int32)[:, None]
    return {
        "part": dc.LocalShard(part, (2 * world_size, 1 << 20), (2 * rank, 0)),
        "replica": torch.full((100,), value),
        "plain": {"value": value},
    }


def die(how: int = signal.SIGKILL) -> None:
    # To this thread, which then goes no further; the others follow.
    signal.pthread_kill(threading.get_ident(), how)


def outcome_of(call: Callable[[], dc.SaveReport]) -> Any:
    try:
        report = call()
    except dc.CheckpointError as error:
        return type(error).__name__, error.rank, str(error)
    return "saved", report.attempt, ""


def lose_one(rank: int, victim: int, moment: str, path: str) -> Any:
    """One rank dies in a save; the others go on with a group of their own."""
    dc.save(large(rank, 3, 1), path)
    start = time.monotonic()
    context = at(moment, die) if rank == victim else contextlib.nullcontext()
    with context:
        came_to = outcome_of(lambda: dc.save(large(rank, 3, 2), path, overwrite=True))
    seconds = time.monotonic() - start
    living = sorted({0, 1, 2} - {victim})
    group = dist.new_group(living, use_local_synchronization=True)
    dist.barrier(group)
    found = value_at(path) if rank == living[0] else None
    states = [status.state for status in attempts.list_statuses(LocalStorage(), path)]
    dist.barrier(group)
    dc.save(large(living.index(rank), 2, 3), path, overwrite=True, group=group)
    return came_to, seconds, found, states


def survivors_of(victim: int, moment: str, path: str) -> list[Any]:
    options = Options(store="launcher", environ=FRAIL)
    outcomes = try_ranks(lose_one, victim, moment, path, world_size=3, options=options)
    assert outcomes[victim].signal == signal.SIGKILL
    living = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [outcome.error for outcome in living] == [None, None], living
    for outcome in living:
        assert outcome.value[1] < NOTICED_S
    assert_stands(path, 3, rows=2)
    return [outcome.value for outcome in living]


@pytest.mark.waits
@pytest.mark.parametrize("moment", ["while it writes", "before it makes its files durable"])
def test_of_a_rank_killed_in_a_save_all_are_told_and_nothing_of_the_save_is_left(moment, tmp_path):
    for (kind, who, message), _, _, states in survivors_of(1, moment, str(tmp_path / "ck")):
        assert (kind, who) == ("RankError", 1)
        assert message.startswith("rank 1 (host")
        assert "dead or frozen" in message
        assert "in phase 'write' of save" in message
        assert states == ["committed"]


@pytest.mark.waits
@pytest.mark.parametrize(
    ("moment", "left"),
    [
        ("before the claim", ["committed"]),
        # Nobody else knows of this attempt. The next save removes it.
        ("after the claim", ["committed", "open"]),
        ("while it writes", ["committed", "abandoned"]),
        ("before the commit", ["committed", "abandoned"]),
    ],
)
def test_of_a_coordinator_killed_before_the_commit_all_are_told_and_nothing_can_be_committed(
    moment, left, tmp_path
):
    for (kind, who, message), _, found, states in survivors_of(0, moment, str(tmp_path / "ck")):
        assert (kind, who) == ("NoAnswerError", 0)
        assert "rank 0 (host" in message
        assert "dead or frozen" in message
        assert found in (1, None)
        assert states == left


@pytest.mark.waits
def test_a_save_whose_coordinator_is_killed_after_the_commit_has_succeeded(tmp_path):
    for came_to, _, found, states in survivors_of(0, "after the commit", str(tmp_path / "ck")):
        assert came_to[0] == "saved", came_to
        assert came_to[1].startswith("a2-")
        assert found in (2, None)
        assert states == ["committed", "committed"]


# --- one rank is interrupted -------------------------------------------------------------------


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupt_one(rank: int, victim: int, moment: str, path: str) -> Any:
    dc.save(large(rank, 3, 1), path)
    came_to = None
    if rank == victim:
        with at(moment, interrupt), pytest.raises(KeyboardInterrupt):
            dc.save(large(rank, 3, 2), path, overwrite=True)
    else:
        came_to = outcome_of(lambda: dc.save(large(rank, 3, 2), path, overwrite=True))
    dist.barrier()
    states = [status.state for status in attempts.list_statuses(LocalStorage(), path)]
    found = value_at(path)
    dist.barrier()
    use_own_groups(rank, 3)
    dc.save(large(rank, 3, 3), path, overwrite=True)
    return came_to, states, found


@pytest.mark.parametrize(
    ("victim", "moment"), [(0, "in the claim"), (0, "before the commit"), (1, "while it writes")]
)
def test_an_interrupt_of_one_rank_is_told_to_all_others_and_nothing_is_left(
    victim, moment, tmp_path
):
    path = str(tmp_path / "ck")
    values = run_ranks(interrupt_one, victim, moment, path, world_size=3, environ=CALM)
    for rank, (came_to, states, found) in enumerate(values):
        assert states == ["committed"]
        assert found == 1
        if rank != victim:
            assert came_to[:2] == ("RankError", victim)
            assert "KeyboardInterrupt" in came_to[2]
    assert_stands(path, 3, rows=2)


def test_an_interrupt_after_the_commit_keeps_no_other_rank_from_success(tmp_path):
    path = str(tmp_path / "ck")
    values = run_ranks(interrupt_one, 0, "after the commit", path, world_size=3, environ=CALM)
    for rank, (came_to, states, found) in enumerate(values):
        assert rank == 0 or came_to[0] == "saved"
        assert states == ["committed", "committed"]
        assert found == 2
    assert_stands(path, 3, rows=2)


# --- one rank freezes --------------------------------------------------------------------------


def freeze_one(rank: int, victim: int, moment: str, path: str) -> Any:
    """One rank is frozen in a save, and thawed when the others have left it."""
    dc.save(large(rank, 3, 1), path)
    others = sorted({0, 1, 2} - {victim})
    pair = dist.new_group(others)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    freeze = at(moment, lambda: die(signal.SIGSTOP)) if rank == victim else contextlib.nullcontext()
    with freeze:
        came_to = outcome_of(lambda: dc.save(large(rank, 3, 2), path, overwrite=True))
    if rank != victim:
        dist.barrier(pair)
        if rank == others[0]:
            os.kill(int(pids[victim].item()), signal.SIGCONT)
    dist.barrier()
    states = [status.state for status in attempts.list_statuses(LocalStorage(), path)]
    found = value_at(path) if rank == 0 else None
    use_own_groups(rank, 3)
    dc.save(large(rank, 3, 3), path, overwrite=True)
    return came_to, states, found


@pytest.mark.waits
def test_a_rank_frozen_while_it_writes_is_told_the_same_when_it_thaws_and_all_go_on(tmp_path):
    path = str(tmp_path / "ck")
    values = run_ranks(freeze_one, 1, "while it writes", path, world_size=3, environ=FROZEN)
    for came_to, states, found in values:
        assert came_to == values[0][0]
        kind, who, message = came_to
        assert (kind, who) == ("RankError", 1)
        assert "rank 1 (host" in message
        assert "is stopped, and has not run Python for " in message
        assert states == ["committed"]
        assert found in (1, None)
    assert_stands(path, 3, rows=2)


@pytest.mark.waits
def test_a_coordinator_frozen_before_the_commit_cannot_commit_when_it_thaws(tmp_path):
    path = str(tmp_path / "ck")
    values = run_ranks(freeze_one, 0, "before the commit", path, world_size=3, environ=FROZEN)
    for came_to, states, found in values:
        assert states == ["committed"]
        assert found in (1, None)
        if came_to != values[0][0]:
            assert came_to[:2] == ("NoAnswerError", 0)
            assert "is stopped, and has not run Python for " in came_to[2]
    kind, _, message = values[0][0]
    assert kind == "ConflictError"
    assert "was abandoned by rank " in message
    assert "NoAnswerError: rank 0 (host" in message
    assert_stands(path, 3, rows=2)


@pytest.mark.waits
def test_a_coordinator_frozen_after_the_commit_does_not_keep_the_others_from_success(tmp_path):
    path = str(tmp_path / "ck")
    values = run_ranks(freeze_one, 0, "after the commit", path, world_size=3, environ=FROZEN)
    for came_to, states, found in values:
        assert came_to == values[0][0]
        assert came_to[0] == "saved"
        assert states == ["committed"]
        assert found in (2, None)
    assert_stands(path, 3, rows=2)


# --- one rank never comes ----------------------------------------------------------------------


def save_on_some(rank: int, some: tuple[int, ...], path: str) -> Any:
    dc.save(parts(rank, 1), path)
    error = None
    if rank in some:
        error = tuple(told(lambda: dc.save(parts(rank, 2), path, overwrite=True)))
    dist.barrier()
    left = os.listdir(path)
    use_own_groups(rank, 3)
    dc.save(parts(rank, 3), path, overwrite=True)
    return error, left


@pytest.mark.parametrize(
    ("some", "absent"), [((0,), "ranks 1-2"), ((0, 2), "rank 1"), ((1, 2), "rank 0")]
)
def test_ranks_that_never_call_save_are_named_and_all_go_on(some, absent, tmp_path):
    path = str(tmp_path / "ck")
    for rank, (error, left) in enumerate(
        run_ranks(save_on_some, some, path, world_size=3, environ=HASTY)
    ):
        assert len(left) == 1
        assert (error is not None) == (rank in some)
        if error is not None:
            message = Told(*error).message
            assert absent in message
            assert f"did not call save to {path}" in message
            assert "Every rank of the group must make the same call" in message
            assert "`if rank == 0:`" in message
            assert Told(*error).seconds < NOTICED_S
    assert_stands(path, 3)


# --- the coordinator loses its store -----------------------------------------------------------


def lose_the_store_after_the_claim(rank: int, path: str) -> Any:
    from dist_ckpt.core.comm.key_value import client_thread

    dc.save(parts(rank, 1), path)

    def refuse(*_: object) -> None:
        raise RuntimeError("Broken pipe")

    def cut_off() -> None:
        client_thread.put = refuse  # type: ignore[assignment]

    with at("after the claim", cut_off) if rank == 0 else contextlib.nullcontext():
        error = tuple(told(lambda: dc.save(parts(rank, 2), path, overwrite=True)))
    dist.barrier()
    return error, [status.state for status in attempts.list_statuses(LocalStorage(), path)]


@pytest.mark.waits
def test_a_coordinator_that_cannot_tell_of_its_claim_leaves_no_attempt(tmp_path):
    path = str(tmp_path / "ck")
    values = run_ranks(lose_the_store_after_the_claim, path, world_size=3, environ=FRAIL)
    for error, states in values:
        assert Told(*error).kind == "NoAnswerError"
        assert states == ["committed"]
    assert "key-value store is gone" in Told(*values[0][0]).message
    assert "rank 0 (host" in Told(*values[1][0]).message
    assert "lives, but is cut off from the key-value store" in Told(*values[1][0]).message
    assert_stands(path, 1)


# --- loads -------------------------------------------------------------------------------------


class Loads:
    """An object that notes what it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given.append(state)


def save_well(rank: int, path: str) -> None:
    dc.save({**parts(rank, 1), "object": Loads()}, path)


def no_change(template: dict[str, Any]) -> Any:
    return template


def add_a_tensor(template: dict[str, Any]) -> Any:
    return {**template, "extra": torch.zeros(3)}


def take_another_dtype(template: dict[str, Any]) -> Any:
    return {**template, "replica": torch.zeros(100, dtype=torch.float32)}


def refuse_what_is_loaded(template: dict[str, Any]) -> Any:
    return {**template, "object": Fails(RuntimeError("no"))}


class LoadCase(NamedTuple):
    """How a load goes wrong on rank 1: the template it has, and what all ranks are told."""

    template: Callable[[dict[str, Any]], Any]
    kind: str
    text: str
    # The error comes when tensors have been placed.
    is_late: bool = False


LOADS = {
    "a damaged block of what it reads": LoadCase(
        no_change, "CorruptError", "rank 1 (host {host}): part rows 3:6: damaged", is_late=True
    ),
    "a damaged header of what it reads": LoadCase(
        no_change, "CorruptError", "rank 1 (host {host}): "
    ),
    "a file that is gone": LoadCase(no_change, "CorruptError", "rank 1 (host {host}): "),
    "a storage of its own": LoadCase(
        no_change, "StorageError", "not on storage that all ranks share"
    ),
    "a tensor that was not saved": LoadCase(add_a_tensor, "IncompatibleError", "extra"),
    "another dtype": LoadCase(take_another_dtype, "IncompatibleError", "replica"),
    "an object that refuses": LoadCase(
        refuse_what_is_loaded, "CheckpointError", "rank 1 (host {host}): object: ", is_late=True
    ),
}


def fail_to_load(rank: int, name: str, path: str) -> Any:
    taker = Loads()
    template = {**parts(rank, -1), "object": taker}
    mine = LOADS[name].template(template) if rank == 1 else template
    elsewhere = rank == 1 and name == "a storage of its own"
    with own_storage(default_opener, path) if elsewhere else contextlib.nullcontext():
        error = tuple(told(lambda: dc.load(mine, path)))
    now = {"part": template["part"].tensor, "replica": template["replica"]}
    before = {"part": parts(rank, -1)["part"].tensor, "replica": parts(rank, -1)["replica"]}
    changed = [name for name in now if not torch.equal(now[name], before[name])]
    assert template["plain"] == {"value": -1} or LOADS[name].is_late
    dist.barrier()
    use_own_groups(rank, 3)
    good = {**parts(rank, 2), "object": Loads()}
    dc.save(good, f"{path}-good")
    again = {**parts(rank, -1), "object": Loads()}
    dc.load(again, f"{path}-good")
    assert torch.equal(again["part"].tensor, good["part"].tensor)
    return error, changed, len(taker.given)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOADS)
def test_all_ranks_are_told_the_same_of_one_that_cannot_load(name, tmp_path):
    path, case = str(tmp_path / "ck"), LOADS[name]
    run_ranks(save_well, path, world_size=3, environ=CALM)
    damage(path, name)
    values = run_ranks(fail_to_load, name, path, world_size=3, environ=CALM)
    host = os.uname().nodename
    first = Told(*values[0][0])
    for rank, (error, changed, num_given) in enumerate(values):
        assert Told(*error)[:3] == first[:3]
        assert error[0] == case.kind, error
        assert case.text.format(host=host) in error[2]
        assert not changed or case.is_late
        if case.kind == "CorruptError":
            assert set(changed) <= set(Told(*error).touched)
            # Objects are loaded last, when all else has succeeded on all ranks.
        assert num_given == 0 or (name == "an object that refuses" and rank != 1)


def damage(path: str, name: str) -> None:
    (file,) = Path(path).glob("a1-*/*-00001.safetensors")
    if name == "a file that is gone":
        file.unlink()
    if name.startswith("a damaged"):
        data = bytearray(file.read_bytes())
        data[100 if "header" in name else -1] ^= 1
        file.write_bytes(data)


def die_in_a_load(rank: int, path: str) -> Any:
    template = large(rank, 3, -1)
    with at("while it reads", die) if rank == 1 else contextlib.nullcontext():
        return tuple(told(lambda: dc.load(template, path)))


def save_large(rank: int, path: str) -> None:
    dc.save(large(rank, 3, 1), path)


@pytest.mark.waits
def test_a_rank_killed_in_a_load_is_named_by_all_others(tmp_path):
    path = str(tmp_path / "ck")
    run_ranks(save_large, path, world_size=3, environ=CALM)
    options = Options(store="launcher", environ=FRAIL)
    outcomes = try_ranks(die_in_a_load, path, world_size=3, options=options)
    assert outcomes[1].signal == signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        error = Told(*outcome.value)
        assert (error.kind, error.rank) == ("RankError", 1)
        assert "of load of " in error.message
        assert error.seconds < NOTICED_S


# --- the training group ------------------------------------------------------------------------


def lose_the_training_group(rank: int, folder: str) -> Any:
    """A rank that is late for one collective of a gloo group breaks that group for ever."""
    store = dist.FileStore(f"{folder}/store", 3)
    timeout = timedelta(seconds=0.5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    mesh = DeviceMesh("cpu", [0, 1, 2])
    model = torch.nn.Linear(4, 5, bias=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {
        **parts(rank, 1),
        "model": model,
        "optim": optimizer,
        "sharded": distribute_tensor(torch.arange(7.0), mesh, [Shard(0)], src_data_rank=None),
        "rng": dc.RNG(),
        "own": dc.PerRank(rank),
    }
    time.sleep(1.2 if rank == 1 else 0)
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.zeros(1))
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.zeros(1))
    path = f"{folder}/ck"
    dc.save(state, path)
    template = {**state, **parts(rank, -1), "sharded": torch.zeros_like(state["sharded"])}
    dc.load(template, path)
    error = told(lambda: dc.load({**template, "extra": 1} if rank == 1 else template, path))
    assert torch.equal(template["part"].tensor, parts(rank, 1)["part"].tensor)
    return template["sharded"].to_local().tolist(), error.kind


def test_nothing_of_a_save_or_load_goes_over_the_training_group(tmp_path):
    values = run_ranks(
        lose_the_training_group, str(tmp_path), world_size=3, store=None, environ=CALM
    )
    expected = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0]]
    assert values == [(part, "IncompatibleError") for part in expected]


# --- all ranks die -----------------------------------------------------------------------------

# What the killer waits for at most.
KILLER_S = 20
NUM_ROUNDS = 20


def save_until_killed(rank: int, path: str, first: int, folder: str, kill_after_s: float) -> None:
    """Ranks 0 to 2 overwrite again and again; rank 3 kills them all at once."""
    if rank == 3:
        kill_all(Path(folder), kill_after_s)
        return
    os.environ["DIST_CKPT_HEARTBEAT_TIMEOUT_S"] = "15"
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    value = first
    dc.save(parts(rank, value), path, overwrite=True)
    Path(folder, f"reported-{rank}").write_text(f"{value}\n")
    Path(folder, f"{os.getpid()}.pid").touch()
    with open(f"{folder}/reported-{rank}", "a") as reported:
        while True:
            value += 1
            dc.save(parts(rank, value), path, overwrite=True)
            print(value, file=reported, flush=True)


def kill_all(folder: Path, after_s: float) -> None:
    deadline = time.monotonic() + KILLER_S
    while len(pids := [int(file.stem) for file in folder.glob("*.pid")]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(after_s)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_whatever_moment_all_ranks_are_killed_at_what_was_reported_saved_loads(tmp_path):
    path = str(tmp_path / "ck")
    moments = random.Random(7)
    value, states = 0, set()
    for number in range(NUM_ROUNDS):
        folder = tmp_path / f"round-{number}"
        folder.mkdir()
        arguments = (path, value + 1, str(folder), moments.uniform(0, 0.06))
        outcomes = try_ranks(
            save_until_killed, *arguments, world_size=4, options=Options(store=None)
        )
        assert [outcome.signal for outcome in outcomes[:3]] == [signal.SIGKILL] * 3, outcomes
        reported = max(int(file.read_text().split()[-1]) for file in folder.glob("reported-*"))
        value = value_at(path)
        assert reported <= value <= reported + 1
        assert_loads(path, value)
        states |= {status.state for status in attempts.list_statuses(LocalStorage(), path)}
        if number % 2:
            removal.remove_garbage(LocalStorage(), path, grace_s=0)
            assert_stands(path, value)
    assert {"committed", "open"} <= states
