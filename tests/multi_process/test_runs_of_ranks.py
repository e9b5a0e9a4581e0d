"""Runs of real ranks: they save at the same steps, and what one of them does no other waits for."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import JobFolder, find_root_id, make_job_name
from dist_ckpt.checkpointer import run_session
from dist_ckpt.checkpointer.barrier_rounds import Boundary
from dist_ckpt.core.runtime.lock_files import LockOwner
from dist_ckpt.core.storage import open_storage
from ranks import Options, Outcome, run_ranks, try_ranks
from run_training import Told, clear_memory, fresh, keeper_of, steps_at, steps_in, train
from tests.multi_process.test_background_saves import CALM

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(2)]

# What a rank that does otherwise costs the others; a hang would take `CALM`'s silence and more.
# Before any of PATIENT is over; the ranks hang if it is not met.
SOON_S = 150.0
PATIENT = {**CALM, "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "1000", "DIST_CKPT_JOIN_TIMEOUT_S": "1000"}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A root; whatever is left of it in memory is removed."""
    yield tmp_path / "run"
    clear_memory(tmp_path)


def job_of(root: str | Path) -> str:
    return make_job_name(str(root), find_root_id(*open_storage(root)) or "")


def checkpointer(root: str, **options: Any) -> dc.Checkpointer:
    return dc.Checkpointer(root, **{"save": dc.every(steps=1), "background": False, **options})


def state_of_rank() -> dict[str, Any]:
    return fresh(dist.get_rank(), dist.get_world_size())


def wait_for(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.005)


def poll_until_stopped(ck: dc.Checkpointer) -> None:
    until = time.monotonic() + 30
    while not ck.should_stop:
        assert time.monotonic() < until, "it does not stop"
        ck.poll()
        time.sleep(0.01)


def tried(world_size: int, function: Callable[..., Any], *args: Any) -> list[Outcome]:
    return try_ranks(function, *args, world_size=world_size, options=Options(environ=CALM))


# --- when they save, and what they go on from -----------------------------------------------------


def go_on(rank: int, root: str, until: int, background: bool) -> tuple[int, set[float]]:
    """Train to a step; return the step that this start went on from, and what was restored."""
    save = dc.every(steps=3) | dc.at(5) | dc.at_end
    state = state_of_rank()
    with checkpointer(root, save=save, keep=dc.keep.last(3), background=background) as ck:
        first = ck.restore(state) or 0
        found = steps_in(state)
        for step in ck.steps(state, until=until):
            train(state, step)
            ck.metrics(step, {"loss": step + 100 * rank})  # rank 0's count
    return first, found


@pytest.mark.parametrize("background", [False, True])
def test_all_ranks_save_alike_and_any_number_of_them_goes_on(background: bool, root: Path) -> None:
    assert (
        run_ranks(go_on, str(root), 7, background, world_size=2, environ=CALM) == [(0, {-1.0})] * 2
    )
    assert steps_at(root) == [5, 6, 7]
    assert [one.metrics for one in dc.checkpoints(root)] == [{"loss": n} for n in (5, 6, 7)]
    for world_size, step in ((3, 8), (1, 9)):
        found = run_ranks(go_on, str(root), step, background, world_size=world_size, environ=CALM)
        assert found == [(step - 1, {float(step - 1)})] * world_size
    assert steps_at(root)[-3:] == [7, 8, 9]


def save_components(rank: int, root: str, background: bool) -> float:
    """As the actors and the critics of a training by reinforcement."""
    name = ("actor", "critic", "critic")[rank]
    state = {name: {"w": torch.zeros(8)}}
    with checkpointer(root, save=dc.every(steps=2), background=background) as ck:
        for step in ck.steps(state, until=4):
            state[name]["w"].fill_(10 * step + (rank > 0))
    state[name]["w"].zero_()
    with checkpointer(root, background=background) as ck:
        assert ck.restore(state) == 4
    return float(state[name]["w"][0])


def test_ranks_may_hold_different_components(root: Path) -> None:
    found = run_ranks(save_components, str(root), True, world_size=3, environ=CALM)
    assert found == [40.0, 41.0, 41.0]


def save_in_a_group(rank: int, root: str) -> str:
    group = dist.new_group([1, 2])
    if rank == 0:
        try:
            checkpointer(root, group=group)
        except ValueError as error:
            return str(error)
    state = fresh(rank - 1, 2)
    with checkpointer(root, group=group, background=True) as ck:
        for step in ck.steps(state, until=2):
            train(state, step)
    return f"{steps_at(root)}"


def test_some_of_the_ranks_may_make_a_run(root: Path) -> None:
    outside, *inside = run_ranks(save_in_a_group, str(root), world_size=3, environ=CALM)
    assert "rank 0 is not in this group" in outside
    assert inside == ["[1, 2]"] * 2


# --- signals, time, and ranks that are far apart --------------------------------------------------


def stop_on_a_signal(rank: int, root: str, collective: bool) -> tuple[int, bool]:
    """Train with ranks far apart, and stop when the last one gets a signal."""
    state = state_of_rank()
    save = dc.on_signal("USR1") | dc.at_end
    with checkpointer(root, save=save, background=True) as ck:
        for step in ck.steps(state, until=10**6):
            train(state, step)
            time.sleep(0.001 + 0.004 * rank)
            if collective:
                dist.all_reduce(torch.ones(1))
            if rank == 1 and step == 50:
                os.kill(os.getpid(), signal.SIGUSR1)
    assert ck.stopped is not None
    assert ck.stopped.why == "SIGUSR1 on rank 1"
    return ck.stopped.step, ck.stopped.is_durable


@pytest.mark.parametrize("collective", [False, True])
def test_a_signal_on_one_rank_stops_all_at_the_same_step(collective: bool, root: Path) -> None:
    """Also if one is a hundred steps behind, and if all meet in each step.

    titan #871: ranks that decide by themselves deadlock in it.
    """
    found = run_ranks(stop_on_a_signal, str(root), collective, world_size=2, environ=CALM)
    (one, other) = found
    assert one == other
    step, is_durable = one
    assert is_durable
    assert steps_at(root) == [step]
    assert (
        run_ranks(go_on, str(root), 1, False, world_size=2, environ=CALM)
        == [(step, {float(step)})] * 2
    )


def save_by_time(rank: int, root: str) -> list[int]:
    """Train until two steps were saved; return them."""
    state, saved = state_of_rank(), [0]
    with checkpointer(root, save=dc.every(minutes=0.1 / 60)) as ck:
        for step in ck.steps(state, until=10**6):
            train(state, step)
            time.sleep(0.005 * (1 + rank))
            assert ck._run is not None
            assert ck._run.saves is not None
            if ck._run.saves.last != saved[-1]:
                saved.append(ck._run.saves.last)
            if len(saved) == 3:  # alike on all ranks, if they save alike
                break
    return saved[1:]


def test_all_ranks_save_by_the_time_of_rank_0(root: Path) -> None:
    saved = run_ranks(save_by_time, str(root), world_size=2, environ=CALM)
    assert saved[0] == saved[1] == steps_at(root)


def save_first(ck: dc.Checkpointer, state: dict[str, Any], root: str) -> LockOwner:
    """Make step 1 durable; return this rank's writer."""
    train(state, 1)
    ck.step(1)
    wait_until_durable(root, 1)
    assert ck._run is not None
    assert ck._run.saver is not None
    ck._run.saver.wait(60)
    dist.barrier()
    writer = JobFolder(job_of(root)).rank(dist.get_rank()).owner("writer")
    assert writer is not None
    return writer


def raise_after_a_signal(rank: int, root: str) -> bool:
    """Return True if the run ends while its only save is written: the storage is slow."""
    slow = functools.partial(dc.AsyncSaver, max_bytes_per_s=20_000)
    pytest.MonkeyPatch().setattr(run_session, "AsyncSaver", slow)
    state: dict[str, Any] = {"model": {f"w{rank}": torch.ones(25_000)}}
    save = dc.at(1) | dc.on_signal("USR1")
    with (
        contextlib.suppress(ZeroDivisionError),
        checkpointer(root, save=save, background=True, stop_within_s=1.5) as ck,
    ):
        ck.restore(state)
        ck.step(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        raise ZeroDivisionError
    assert ck._run is not None
    assert ck._run.saver is not None
    assert ck._run.saver._job is not None
    return bool(ck._run.saver._job.writer.unsettled)


def test_an_error_after_a_signal_does_not_outlast_the_time_to_stop(root: Path) -> None:
    """A worker of a data loader gets the signal too, and the training raises."""
    assert run_ranks(raise_after_a_signal, str(root), world_size=1, environ=CALM) == [True]
    assert run_ranks(restored, str(root), world_size=1, environ=CALM) == [(1, 1.0)]


def stop_with_a_slow_writer(rank: int, root: str) -> tuple[bool, list[str]]:
    told, state = Told(), state_of_rank()
    save = dc.at(1) | dc.on_signal("USR1")
    with checkpointer(root, save=save, background=True, stop_within_s=2.0) as ck:
        ck.restore(state)
        writer = save_first(ck, state, root)
        if rank == 0:
            os.kill(writer.pid, signal.SIGSTOP)
        train(state, 2)
        ck.step(2)
        os.kill(os.getpid(), signal.SIGUSR1)
        began = time.monotonic()
        while not ck.should_stop:
            ck.poll()
            time.sleep(0.01)
    assert ck.stopped is not None
    assert time.monotonic() - began < SOON_S
    return ck.stopped.is_durable, told.of("it stays in memory")


def test_what_is_not_durable_in_time_is_left_in_memory_and_said_so(root: Path) -> None:
    found = run_ranks(stop_with_a_slow_writer, str(root), world_size=2, environ=CALM)
    assert [is_durable for is_durable, _ in found] == [False, False]
    assert [len(told) for _, told in found] == [1, 0]
    writer = JobFolder(job_of(root)).rank(0).owner("writer")
    assert writer is not None
    os.kill(writer.pid, signal.SIGCONT)
    assert run_ranks(go_on, str(root), 1, True, world_size=2, environ=CALM) == [(2, {2.0})] * 2


def stop_while_both_arenas_are_written(rank: int, root: str, then: str) -> tuple[bool, float]:
    """Have a storage so slow that a third save would wait for the first; then rank 0 is to stop."""
    slow = functools.partial(dc.AsyncSaver, max_bytes_per_s=20_000)
    pytest.MonkeyPatch().setattr(run_session, "AsyncSaver", slow)
    state: dict[str, Any] = {"model": {f"w{rank}": torch.zeros(25_000)}}
    save = dc.at(1, 2, *[3] * (then == "save")) | dc.on_signal("USR1")
    with checkpointer(root, save=save, background=True, stop_within_s=1.5) as ck:
        ck.restore(state)
        for step in (1, 2):
            state["model"][f"w{rank}"].fill_(step)
            ck.step(step)
        if rank == 0 or then == "save":
            os.kill(os.getpid(), signal.SIGUSR1)
        began = time.monotonic()
        state["model"][f"w{rank}"].fill_(3)
        ck.step(3)
        poll_until_stopped(ck)
        seconds = time.monotonic() - began
    assert ck.stopped is not None
    return ck.stopped.is_durable, seconds


def restored(rank: int, root: str) -> tuple[int | None, float]:
    state: dict[str, Any] = {"model": {f"w{rank}": torch.zeros(25_000)}}
    with checkpointer(root, save=dc.at(10**6), background=True) as ck:
        return ck.restore(state), float(state["model"][f"w{rank}"][0])


@pytest.mark.parametrize("then", ["stop", "save"])
def test_a_stop_waits_for_no_older_save_and_leaves_the_newest_in_memory(
    then: str, root: Path
) -> None:
    """Also if the signals come when a save that a policy asks for would wait."""
    found = run_ranks(
        stop_while_both_arenas_are_written, str(root), then, world_size=2, environ=CALM
    )
    assert [is_durable for is_durable, _ in found] == [False, False]
    assert max(seconds for _, seconds in found) < 4  # one save takes 5
    assert run_ranks(restored, str(root), world_size=2, environ=CALM) == [(3, 3.0)] * 2


def stop_with_clocks_apart(rank: int, root: str) -> tuple[bool, str]:
    """Have a save fail when the time to stop is over for rank 1, and for rank 0 not yet."""
    state, told = state_of_rank(), Told()
    save = dc.on_signal("USR1")
    with checkpointer(root, save=save, stop_within_s=20.0, max_failures=100) as ck:
        ck.restore(state)
        assert ck._run is not None
        arrive = ck._run.rounds.arrive

        def late(*args: Any, **options: Any) -> Boundary | None:
            turn = arrive(*args, **options)
            return turn and replace(turn, requested_at=turn.requested_at - 100 * rank)

        ck._run.rounds.arrive = late  # type: ignore[method-assign]
        if rank == 0:
            Path(root, "step-00000001").write_text("a file where a folder should be")
            os.kill(os.getpid(), signal.SIGUSR1)
        dist.barrier()
        train(state, 1)
        ck.step(1)
        poll_until_stopped(ck)
    assert ck.stopped is not None
    return ck.stopped.is_durable, "".join(told.of("stopped by"))


def test_ranks_agree_whether_there_is_time_for_another_try(root: Path) -> None:
    found = run_ranks(stop_with_clocks_apart, str(root), world_size=2, environ=CALM)
    assert [is_durable for is_durable, _ in found] == [False, False]
    assert "after step 1, which is failed: older" in found[0][1]


# --- memory --------------------------------------------------------------------------------------


def stage_and_die(rank: int, root: str) -> None:
    """Make step 1 durable; have memory hold step 2, which the storage refuses; die."""
    state = state_of_rank()
    ck = checkpointer(root, background=True, max_failures=100)
    ck.restore(state)
    train(state, 1)
    ck.step(1)
    assert ck._run is not None
    assert ck._run.saver is not None
    ck._run.saver.wait(60)
    dist.barrier()
    if rank == 0:
        Path(root, "step-00000002").write_text("a file where a folder should be")
    dist.barrier()
    train(state, 2)
    ck.step(2)
    writer = ck._run.saver._job.writer  # type: ignore[union-attr]
    writer.wait_for(lambda: not writer.unsettled, 60)
    dist.barrier()
    if rank == 0:
        os.unlink(f"{root}/step-00000002")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def restore_as_asked(rank: int, root: str, at: str | None) -> tuple[int | None, set[float]]:
    state = state_of_rank()
    with checkpointer(root, save=dc.at(10**6), background=True) as ck:
        return ck.restore(state, at), steps_in(state)


def test_what_a_killed_job_has_left_in_memory_is_gone_on_from(root: Path) -> None:
    ended = tried(2, stage_and_die, str(root))
    assert [one.signal for one in ended] == [signal.SIGKILL] * 2, ended
    assert steps_at(root) == [1]
    found = run_ranks(restore_as_asked, str(root), None, world_size=2, environ=CALM)
    assert found == [(2, {2.0})] * 2
    # It is durable nowhere: it stays there.
    found = run_ranks(restore_as_asked, str(root), None, world_size=2, environ=CALM)
    assert found == [(2, {2.0})] * 2


def end_at_once(rank: int, root: str, how: str) -> bool | None:
    """Go on from memory, and come to the end, or to a stop, before the first step."""
    state = state_of_rank()
    with checkpointer(root, save=dc.at_end | dc.on_signal("USR1"), background=True) as ck:
        assert ck.restore(state) == 2
        if how == "stop":
            os.kill(os.getpid(), signal.SIGUSR1)
            poll_until_stopped(ck)
    return None if ck.stopped is None else ck.stopped.is_durable


@pytest.mark.parametrize("how", ["end", "stop"])
def test_what_was_in_memory_alone_is_saved_by_a_run_that_ends_before_its_first_step(
    how: str, root: Path
) -> None:
    tried(2, stage_and_die, str(root))
    found = run_ranks(end_at_once, str(root), how, world_size=2, environ=CALM)
    assert found == [True if how == "stop" else None] * 2
    assert steps_at(root) == [1, 2]


def test_what_is_left_behind_is_not_taken_from_memory(root: Path) -> None:
    tried(2, stage_and_die, str(root))
    found = run_ranks(restore_as_asked, str(root), "@1", world_size=2, environ=CALM)
    assert found == [(1, {1.0})] * 2
    found = run_ranks(restore_as_asked, str(root), None, world_size=2, environ=CALM)
    assert found == [(1, {1.0})] * 2


def test_what_is_in_memory_alone_is_enough_for_must_exist(root: Path) -> None:
    tried(1, stage_first_and_die, str(root))
    assert run_ranks(restore_what_must_exist, str(root), world_size=1, environ=CALM) == [1]


def stage_first_and_die(rank: int, root: str) -> None:
    state = fresh()
    ck = checkpointer(root, background=True, max_failures=100)
    ck.restore(state)
    Path(root, "step-00000001").write_text("a file where a folder should be")
    train(state, 1)
    ck.step(1)
    writer = ck._run.saver._job.writer  # type: ignore[union-attr]
    writer.wait_for(lambda: not writer.unsettled, 60)
    os.unlink(f"{root}/step-00000001")
    os.kill(os.getpid(), signal.SIGKILL)


def restore_what_must_exist(rank: int, root: str) -> int | None:
    with checkpointer(root, must_exist=True, background=True, save=dc.at(10**6)) as ck:
        return ck.restore(fresh())


# --- who does otherwise --------------------------------------------------------------------------


def leave_early(
    rank: int, root: str, who: list[int], save_every: int
) -> tuple[str, float, list[str]]:
    """Leave the loop by `break` on some ranks."""
    told, began = Told(), time.monotonic()
    state, text = state_of_rank(), ""
    try:
        with checkpointer(root, save=dc.every(steps=save_every) | dc.at_end) as ck:
            for step in ck.steps(state, until=60):
                train(state, step)
                time.sleep(0.02)
                if step == 3 and rank in who:
                    break
    except (dc.RankError, ValueError) as error:
        text = str(error)
    return text, time.monotonic() - began, told.of("nothing was saved at the end")


def test_a_break_on_all_ranks_saves_the_step(root: Path) -> None:
    found = run_ranks(leave_early, str(root), [0, 1], 10**6, world_size=2, environ=CALM)
    assert [text for text, _, _ in found] == ["", ""]
    assert steps_at(root) == [3]


@pytest.mark.parametrize("who", [0, 1])
def test_a_break_on_one_rank_only_is_said_and_nobody_hangs(who: int, root: Path) -> None:
    found = run_ranks(leave_early, str(root), [who], 10**6, world_size=2, environ=PATIENT)
    assert max(seconds for _, seconds, _ in found) < SOON_S + 60 * 0.02
    assert found[who][0] == ""
    assert len(found[who][2]) == 1
    assert f"rank {who} is at its boundary" in found[who][2][0]
    # The other goes on to its end, and is told there.
    assert found[1 - who][0] or found[1 - who][2]
    assert not root.exists() or steps_at(root) == []


def test_after_a_break_on_one_rank_the_next_save_of_the_others_says_so(root: Path) -> None:
    found = run_ranks(leave_early, str(root), [1], 5, world_size=2, environ=PATIENT)
    assert max(seconds for _, seconds, _ in found) < SOON_S
    assert "the ranks call save with different step: rank 0: 5; rank 1: 3." in found[0][0]
    assert not root.exists() or steps_at(root) == []


def fail_on_one(rank: int, root: str, kind: str) -> tuple[str, str, float, list[str]]:
    told, state = Told(), state_of_rank()
    error: BaseException = {"KeyError": KeyError("mine"), "SystemExit": SystemExit(3)}[kind]
    began, caught = 0.0, ""
    name = ""
    try:
        with checkpointer(root, save=dc.every(steps=2) | dc.at_end, background=True) as ck:
            for step in ck.steps(state, until=4):
                train(state, step)
                began = time.monotonic()
                if step == 3 and rank == 1:
                    wait_until_durable(root, 2)
                    raise error
    except BaseException as failure:  # noqa: BLE001 - what became of this rank
        name, caught = type(failure).__name__, str(failure)
    return name, caught, time.monotonic() - began, told.of("Newest durable save: ")


def wait_until_durable(root: str, step: int) -> None:
    wait_for(lambda: any(one.step == step for one in dc.checkpoints(root)))


@pytest.mark.parametrize("kind", ["KeyError", "SystemExit"])
def test_an_error_of_one_rank_waits_for_nobody_and_the_others_are_told(
    kind: str, root: Path
) -> None:
    (other, text, _, told), (name, _, seconds, _) = run_ranks(
        fail_on_one, str(root), kind, world_size=2, environ=PATIENT
    )
    assert name == kind
    assert seconds < SOON_S
    assert other == "RankError"
    assert "rank 1" in text
    assert any("Newest durable save: step 2, at" in line for line in told)
    assert steps_at(root) == [2]


def fail_to_make_the_state(rank: int, root: str) -> tuple[str, float]:
    """Have rank 1 raise in its `state`, before the save, and live on."""
    state, text, began = state_of_rank(), "", 0.0

    def make() -> dict[str, Any]:
        if rank == 1 and state["progress"]["step"] == 2:
            raise KeyError("no such wrapper")
        return state

    try:
        with checkpointer(root, save=dc.every(steps=2)) as ck:
            for step in ck.steps(make, until=4):
                train(state, step)
                began = time.monotonic()
    except (KeyError, dc.RankError) as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    dist.barrier()
    return text, seconds


def test_who_has_left_with_an_error_and_lives_on_is_waited_for_no_more(root: Path) -> None:
    (lone, seconds), (own, _) = run_ranks(
        fail_to_make_the_state, str(root), world_size=2, environ=PATIENT
    )
    assert own == "KeyError: 'no such wrapper'"
    assert "rank 1 has left the run, by an error or by `break`" in lone
    assert seconds < SOON_S


def save_single_process(rank: int, root: str, what: str) -> tuple[str, str, float]:
    state = state_of_rank()
    name, text, began = "", "", 0.0
    try:
        save = dc.every(steps=10**6 if what == "save" else 4)
        with checkpointer(root, save=save, background=True) as ck:
            for step in ck.steps(state, until=3 if what == "end" and rank else 20):
                train(state, step)
                began = time.monotonic()
                time.sleep(0.1)
                if what == "save" and rank == 0 and step == 2:
                    ck.save(step)
                if what == "steps" and rank == 0 and step == 3:
                    train(state, 4)
                    ck.step(4)
    except Exception as error:  # noqa: BLE001 - what became of this rank
        name, text = type(error).__name__, str(error)
    return name, text, time.monotonic() - began


def test_a_rank_that_saves_alone_is_told_at_once_and_by_name(root: Path) -> None:
    """`if rank == 0: ck.save(...)`."""
    name, text, seconds = run_ranks(
        save_single_process, str(root), "save", world_size=2, environ=PATIENT
    )[0]
    assert name == "RankError"
    assert "rank 0 is at its boundary" in text
    assert "save (step 2)" in text
    assert "if rank == 0:" in text
    assert seconds < SOON_S


def test_a_rank_that_ends_alone_is_told_by_what_it_does(root: Path) -> None:
    """`stop` would be read as a signal, and there was none."""
    found = run_ranks(save_single_process, str(root), "end", world_size=2, environ=CALM)
    assert [name for name, _, _ in found] == ["RankError"] * 2
    assert all(
        "rank 1 (host" in text and "): end of the run, phase" in text for _, text, _ in found
    )


def test_steps_that_differ_between_ranks_are_an_error(root: Path) -> None:
    found = run_ranks(save_single_process, str(root), "steps", world_size=2, environ=CALM)
    assert [name for name, _, _ in found] == ["ValueError"] * 2
    assert "with different boundary: rank 0: 3; rank 1: 4." in found[0][1]
    assert max(seconds for _, _, seconds in found) < SOON_S
    assert not root.exists() or steps_at(root) == []


def open_with(rank: int, root: str, name: str) -> tuple[str, str]:
    other: dict[str, dict[str, Any]] = {
        "save": {"save": dc.every(steps=2 + rank)},
        "keep": {"keep": dc.keep.last(1 + rank)},
        "root": {"root": f"{root}-{rank}"},
        "read_only": {"read_only": rank == 1},
        "background": {"background": rank == 1},
        "max_failures": {"max_failures": rank},
        "free_first": {"free_first": rank == 1},
        "check_replicas": {"check_replicas": ("all", "sample")[rank]},
        "stop_within_s": {"stop_within_s": 5.0 + rank},
        "on_failure": {"on_failure": ("warn", "raise")[rank]},
        "init": {"init": f"{root}-{rank}"},
        "bad": {"max_failures": -1} if rank == 1 else {},
    }
    options = {"root": root, **other[name]}
    try:
        checkpointer(options.pop("root"), **options)
    except Exception as error:  # noqa: BLE001 - what became of this rank
        # A handler is as it was, and another one can be made.
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        checkpointer(root).close()
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    "name",
    [
        *("save", "keep", "root", "read_only", "background", "max_failures", "stop_within_s"),
        *("on_failure", "init", "free_first", "check_replicas", "bad"),
    ],
)
def test_options_that_differ_between_ranks_are_an_error_on_all(name: str, root: Path) -> None:
    found = run_ranks(open_with, str(root), name, world_size=2, environ=CALM)
    shown = "max_failures" if name == "bad" else name
    assert all(kind == "ValueError" and shown in text for kind, text in found), found


def restore_apart(rank: int, root: str) -> tuple[str, str]:
    state = state_of_rank()
    with checkpointer(root) as ck:
        try:
            ck.restore(state, at=None if rank else "@1")
        except Exception as error:  # noqa: BLE001 - what became of this rank
            return type(error).__name__, str(error)
    return "", ""


def test_ranks_that_ask_for_different_steps_are_told(root: Path) -> None:
    run_ranks(go_on, str(root), 5, False, world_size=2, environ=CALM)
    found = run_ranks(restore_apart, str(root), world_size=2, environ=CALM)
    assert all(kind == "ValueError" and "at=" in text for kind, text in found), found


def die_in_training(rank: int, root: str, background: bool) -> tuple[str, str]:
    state = state_of_rank()
    try:
        with checkpointer(root, save=dc.every(steps=2), background=background) as ck:
            for step in ck.steps(state, until=8):
                train(state, step)
                if step == 4 and rank == 1:
                    wait_until_durable(root, 2)
                    os.kill(os.getpid(), signal.SIGKILL)
    except Exception as error:  # noqa: BLE001 - what became of this rank
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_dies_is_named_and_the_next_start_goes_on(background: bool, root: Path) -> None:
    frail = {**CALM, "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "3"}
    args = (str(root), background)
    first, _ = try_ranks(die_in_training, *args, world_size=2, options=Options(environ=frail))
    assert first.value[0] == "RankError", first
    assert "rank 1" in first.value[1]
    found = run_ranks(go_on, str(root), 2, background, world_size=2, environ=CALM)
    assert found == [(2, {2.0})] * 2


def interrupted(rank: int, root: str) -> tuple[str, str]:
    """Have one rank interrupted in its `step`, as it waits there for the others."""
    state = state_of_rank()
    try:
        with checkpointer(root, save=dc.every(steps=2)) as ck:
            for step in ck.steps(state, until=4):
                train(state, step)
                if step == 4 and rank == 0:
                    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                if step == 4 and rank == 1:
                    time.sleep(2.0)
    except BaseException as error:  # noqa: BLE001 - what became of this rank
        return type(error).__name__, str(error)
    return "", ""


def test_an_interrupt_in_a_save_ends_that_rank_and_the_others_are_told(root: Path) -> None:
    (name, _), (other, text) = run_ranks(interrupted, str(root), world_size=2, environ=CALM)
    assert name == "KeyboardInterrupt"
    assert other == "RankError"
    assert "rank 0" in text
    assert steps_at(root) == [2]
    assert run_ranks(go_on, str(root), 2, False, world_size=2, environ=CALM) == [(2, {2.0})] * 2


def fail_at_the_end(rank: int, root: str) -> tuple[str, str]:
    state = state_of_rank()
    try:
        with checkpointer(root, save=dc.at_end, background=True) as ck:
            for step in ck.steps(state, until=2):
                train(state, step)
                if rank == 0:
                    Path(root, "step-00000002").write_text("a file where a folder should be")
    except Exception as error:  # noqa: BLE001 - what became of this rank
        return type(error).__name__, str(error)
    return "", ""


def test_a_last_save_that_fails_is_an_error_on_all_ranks(root: Path) -> None:
    found = run_ranks(fail_at_the_end, str(root), world_size=2, environ=CALM)
    assert all("the last save, of step 2, has failed twice" in text for _, text in found), found


def begin_with_a_bad_state(rank: int, root: str, when: str) -> tuple[str, str]:
    state: dict[str, Any] = {**state_of_rank(), "extra": {}}
    try:
        with checkpointer(root, save=dc.at(1000)) as ck:
            if rank == 1 and when == "start":
                state["extra"]["lock"] = threading.Lock()
            ck.restore(state)
            if rank == 1:
                state["extra"]["lock"] = threading.Lock()
            ck.step(1)
            poll_until_stopped(ck)
    except Exception as error:  # noqa: BLE001 - what became of this rank
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("when", ["start", "first step"])
def test_a_state_that_one_rank_cannot_save_is_an_error_on_all_before_a_save(
    when: str, root: Path
) -> None:
    found = run_ranks(begin_with_a_bad_state, str(root), when, world_size=2, environ=CALM)
    assert found[0] == found[1]
    assert found[0][0] == "TypeError"
    assert "rank 1" in found[0][1]
    assert "extra['lock']" in found[0][1]


def differ_at_step_2(rank: int, root: str, background: bool) -> list[str]:
    state: dict[str, Any] = {**state_of_rank(), "scale": torch.zeros(3)}
    failures: list[Exception] = []
    options = {"background": background, "on_failure": failures.append}
    with checkpointer(root, save=dc.at(1, 2, 3), **options) as ck:
        for step in ck.steps(state, until=3):
            train(state, step)
            state["scale"].fill_(rank if step == 2 else step)
    return [f"{type(error).__name__}: {error}" for error in failures]


@pytest.mark.parametrize("background", [False, True])
def test_replicas_that_differ_are_a_failed_save_and_do_not_end_the_run(
    background: bool, root: Path
) -> None:
    failures = run_ranks(differ_at_step_2, str(root), background, world_size=2, environ=CALM)
    assert [len(texts) for texts in failures] == [1, 0], failures
    assert "UnequalReplicasError" in failures[0][0]
    assert "scale" in failures[0][0]
    assert steps_at(root) == [1, 3]


def fail_after_step_1(rank: int, root: str) -> tuple[int, str, str]:
    if rank == 0:
        for step in range(2, 9):
            Path(root, f"step-{step:08}").write_text("a file where a folder should be")
    state, done = state_of_rank(), 0
    options = {"background": False, "max_failures": 1}
    try:
        with checkpointer(root, save=dc.every(steps=1), **options) as ck:
            for done in ck.steps(state, until=8):
                train(state, done)
    except dc.CheckpointError as error:
        return done, type(error).__name__, str(error)
    return done, "", ""


def test_failed_saves_are_counted_alike_on_all_ranks(root: Path) -> None:
    root.mkdir(exist_ok=True)
    found = run_ranks(fail_after_step_1, str(root), world_size=2, environ=CALM)
    assert [(step, kind) for step, kind, _ in found] == [(3, "ExistsError")] * 2, found
    assert all("step-00000003 is a file" in text for _, _, text in found), found


def fail_in_between(rank: int, root: str) -> list[str]:
    """Have a save fail after the next one was staged, and end the run."""
    told, state = Told(), state_of_rank()
    with checkpointer(root, save=dc.at(1, 2, 3), background=True) as ck:
        ck.restore(state)
        writer = save_first(ck, state, root)
        if rank == 0:
            Path(root, "step-00000002").write_text("a file where a folder should be")
        dist.barrier()
        os.kill(writer.pid, signal.SIGSTOP)
        for step in (2, 3):
            train(state, step)
            ck.step(step)
        dist.barrier()
        os.kill(writer.pid, signal.SIGCONT)
    return told.of("is not saved")


def test_what_failed_before_the_last_save_is_told_and_no_error_of_the_end(root: Path) -> None:
    found = run_ranks(fail_in_between, str(root), world_size=2, environ=CALM)
    assert [len(told) for told in found] == [1, 0], found
    assert steps_at(root) == [1, 3]


def train_to(rank: int, root: str, until: int) -> int:
    state, done = state_of_rank(), 0
    with checkpointer(root) as ck:
        for done in ck.steps(state, until=until):
            train(state, done)
    return done


def refused(root: Path, *, background: bool) -> None:
    """Train on, while another job has begun."""
    state = fresh()
    failures: list[Exception] = []
    options = {"background": background, "on_failure": failures.append}
    with checkpointer(str(root), keep=dc.keep.last(1), **options) as ck:
        assert ck.restore(state) == 2
        assert run_ranks(train_to, str(root), 4, world_size=1, environ=CALM) == [4]
        for step in range(3, 1000):
            train(state, step)
            ck.step(step)
            ck.poll()
            assert len(failures) <= 1  # no other try mends it
            time.sleep(0.05)


@pytest.mark.parametrize("background", [False, True])
def test_the_older_of_two_starts_is_refused_by_name_and_the_newer_loses_nothing(
    background: bool, root: Path
) -> None:
    run_ranks(train_to, str(root), 2, world_size=1, environ=CALM)
    with pytest.raises(dc.ConflictError, match=r"incarnation 3 of this run, .* has taken over"):
        refused(root, background=background)
    assert {one.step: (one.attempt or "")[:6] for one in dc.checkpoints(root)} == {
        1: "a1000-",
        2: "a1000-",
        3: "a3000-",
        4: "a3000-",
    }
    assert steps_at(root) == [1, 2, 3, 4]


def forget_to_close(rank: int, root: str) -> tuple[list[str], list[str]]:
    told, state = Told(), fresh()
    ck = checkpointer(root, save=dc.every(steps=1) | dc.on_signal("USR1"), background=True)
    ck.restore(state)
    writer = JobFolder(job_of(root)).rank(0).owner("writer")
    assert writer is not None
    os.kill(writer.pid, signal.SIGSTOP)
    train(state, 1)
    ck.step(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del ck
        gc.collect()
    os.kill(writer.pid, signal.SIGCONT)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    wait_until_durable(root, 1)
    return [str(one.message) for one in caught], told.of("was dropped without close()")


def test_a_forgotten_close_says_what_becomes_of_saves_under_way(root: Path) -> None:
    ((caught, told),) = run_ranks(forget_to_close, str(root), world_size=1, environ=CALM)
    assert any("unclosed Checkpointer" in text for text in caught)
    assert any("unclosed AsyncSaver" in text for text in caught)
    assert any("continues with 1 unsettled saves" in line for line in told), told
    assert len(told) == 2


def keep_one(rank: int, root: str) -> list[int | None]:
    """Prune on rank 0 while the other ranks are far ahead of it."""
    state = state_of_rank()
    with checkpointer(root, keep=dc.keep.last(1), background=True) as ck:
        for step in ck.steps(state, until=6):
            train(state, step)
            time.sleep(0.05 * (rank == 0))
        if rank == 0:
            wait_for(lambda: keeper_of(ck).durable.startswith("step 6"))
    return [one.step for one in dc.checkpoints(root) if one.where]


def test_of_background_saves_of_several_ranks_the_newest_stays(root: Path) -> None:
    assert 6 in run_ranks(keep_one, str(root), world_size=2, environ=CALM)[0]
    assert steps_at(root) == [6]
