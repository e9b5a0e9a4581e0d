"""What becomes of saves beside the training: failures, hooks, metrics, pruning."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.checkpointer import maintenance as maintenance_module
from dist_ckpt.checkpointer import run_session
from dist_ckpt.checkpointer.checkpointer_options import RunOptions
from dist_ckpt.checkpointer.maintenance import MaintenanceThread
from dist_ckpt.core.commit.commit_protocol import claim
from dist_ckpt.core.commit.records.incarnations import Incarnation, begin_incarnation
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.storage import Entry, Storage, open_storage
from dist_ckpt.core.storage.local import local_storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import (
    CheckpointError,
    ConflictError,
    ExistsError,
    StorageError,
    UnequalReplicasError,
)
from dist_ckpt.runs.prune import prune as prune_run
from run_training import NUM_ROWS, damage, fresh, keeper_of, steps_at, steps_in, train

pytestmark = pytest.mark.usefixtures("alone")


def checkpointer(root: str | Path, **options: Any) -> dc.Checkpointer:
    return dc.Checkpointer(root, **{"save": dc.every(steps=1), "background": False, **options})


def run(
    root: Path, until: int, body: Callable[[int], object] = lambda _: None, **options: Any
) -> None:
    state = fresh()
    with checkpointer(root, **options) as ck:
        for step in ck.steps(state, until=until):
            train(state, step)
            body(step)


def wait_for(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.01)


class Refusing:
    """A storage that refuses some saves, by their numbers from 1; it stands before `dc.save`."""

    def __init__(self, *numbers: int, kind: type[Exception] = StorageError) -> None:
        self.numbers = numbers
        self.kind = kind
        self.num_calls = 0
        self.tried: list[int | None] = []

    def __call__(self, ranks: Any, state: Any, path: Any, options: Any) -> Any:
        self.num_calls += 1
        self.tried.append(options.step)
        if self.num_calls in self.numbers:
            raise self.kind(f"call {self.num_calls} is refused: free space")
        return save_together(ranks, state, path, options)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Refusing]:
    def plant(*numbers: int, **options: Any) -> Refusing:
        refusing = Refusing(*numbers, **options)
        monkeypatch.setattr(run_session, "save_together", refusing)
        return refusing

    return plant


# --- saves that fail ----------------------------------------------------------------------------


def test_a_save_that_fails_is_tried_again_at_once(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    failures: list[Exception] = []
    refusing = refuse(2)
    run(tmp_path, 3, on_failure=failures.append)
    assert refusing.tried == [1, 2, 2, 3]
    assert steps_at(tmp_path) == [1, 2, 3]
    assert failures == []  # nothing was lost


def test_a_save_that_fails_twice_is_told_once_with_what_is_safe(
    tmp_path: Path, refuse: Callable[..., Refusing], caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Exception] = []
    refusing = refuse(2, 3)
    run(tmp_path, 3, on_failure=failures.append)
    assert refusing.tried == [1, 2, 2, 3]
    assert steps_at(tmp_path) == [1, 3]
    assert [str(one) for one in failures] == ["call 3 is refused: free space"]
    newest = f"step 1, at {tmp_path}/step-00000001"
    line = f"step 2 is not saved: call 3 is refused: free space. Newest durable save: {newest}"
    assert caplog.text.count(line) == 1


def test_on_failure_raise_stops_the_run_at_the_first(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    refuse(2, 3)
    with pytest.raises(StorageError, match="call 3 is refused"):
        run(tmp_path, 5, on_failure="raise")
    assert steps_at(tmp_path) == [1]


@pytest.mark.parametrize("max_failures", [0, 2])
def test_too_many_failures_in_a_row_stop_the_run(
    max_failures: int, tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    refusing = refuse(*range(2, 100))
    with pytest.raises(StorageError, match="is refused"):
        run(tmp_path, 9, max_failures=max_failures)
    assert refusing.tried[-1] == 2 + max_failures
    assert steps_at(tmp_path) == [1]


@pytest.mark.parametrize("kind", [ValueError, TypeError, UnequalReplicasError])
def test_a_state_that_cannot_be_saved_any_more_is_a_failed_save(
    kind: type[Exception],
    tmp_path: Path,
    refuse: Callable[..., Refusing],
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusing = refuse(2, 3, 5, 6, 7, kind=kind)
    with pytest.raises(kind, match="call 7 is refused"):
        run(tmp_path, 9, max_failures=2)
    assert refusing.tried == [1, 2, 3, 4, 5, 6, 7]
    assert steps_at(tmp_path) == [1, 4]
    newest = f"Newest durable save: step 1, at {tmp_path}/step-00000001"
    assert f"step 3 is not saved: call 3 is refused: free space. {newest}" in caplog.text


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_a_state_that_the_first_save_refuses_ends_the_run(
    kind: type[Exception], tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    refusing = refuse(1, kind=kind)
    with pytest.raises(kind, match="call 1 is refused"):
        run(tmp_path, 9)
    assert refusing.tried == [1]


def test_replicas_that_differ_in_the_first_save_are_a_failed_save(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    refuse(1, kind=UnequalReplicasError)
    run(tmp_path, 2)
    assert steps_at(tmp_path) == [2]


def test_a_save_that_succeeds_ends_the_row(tmp_path: Path, refuse: Callable[..., Refusing]) -> None:
    refuse(2, 3, 5, 6, 7, 9, 10)  # of step 5 the first try alone
    run(tmp_path, 7, max_failures=1)
    assert steps_at(tmp_path) == [1, 3, 5, 7]


def test_a_last_save_that_fails_is_tried_until_it_is_an_error(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    refusing = refuse(*range(1, 100))
    said = "the last save, of step 3, has failed twice: call 4 is refused: free space. Older check"
    with pytest.raises(CheckpointError, match=said):
        run(tmp_path, 3, save=dc.at_end)
    assert refusing.tried == [3] * 4


def test_what_failed_before_the_end_is_saved_as_the_step_that_was_done_last(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    """Not as the step that failed: the state is another one by then."""
    refusing = refuse(1, 2)
    run(tmp_path, 5, save=dc.at(3))
    assert refusing.tried == [3, 3, 5]
    assert steps_at(tmp_path) == [5]


def test_a_stop_whose_save_failed_says_that_it_is_not_durable(
    tmp_path: Path, refuse: Callable[..., Refusing], caplog: pytest.LogCaptureFixture
) -> None:
    refuse(*range(1, 100))
    state = fresh()
    with checkpointer(tmp_path, save=dc.on_signal("USR1")) as ck:
        ck.restore(state)
        ck.step(1)
        os.kill(os.getpid(), signal.SIGUSR1)

        def is_stopped() -> bool:
            ck.poll()
            return ck.should_stop

        wait_for(is_stopped)
    assert ck.stopped is not None
    assert not ck.stopped.is_durable
    assert "after step 1, which is failed: older checkpoints are unchanged" in caplog.text


def test_a_background_save_that_fails_is_told_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Exception] = []
    taken = tmp_path / "step-00000002"

    def mend(error: Exception) -> None:
        failures.append(error)
        taken.unlink()

    state = fresh()
    with checkpointer(tmp_path, save=dc.at(1, 2), background=True, on_failure=mend) as ck:
        ck.restore(state)
        taken.write_text("a file where a folder should be")
        for step in (1, 2):
            train(state, step)
            ck.step(step)

        def is_saved() -> bool:
            ck.poll()
            return taken.is_dir()

        wait_for(is_saved)
    assert [type(one) for one in failures] == [ExistsError]
    assert steps_at(tmp_path) == [1, 2]
    safe = f"Newest durable save: step 1, at {tmp_path}/step-00000001"
    assert len([one for one in caplog.messages if "is not saved" in one and safe in one]) == 1


@pytest.mark.parametrize(("on_failure", "max_failures"), [("raise", 3), ("warn", 0)])
def test_a_background_save_that_fails_is_raised_where_that_is_asked_for(
    on_failure: Any, max_failures: int, tmp_path: Path
) -> None:
    options = {"on_failure": on_failure, "max_failures": max_failures, "background": True}
    with pytest.raises(ExistsError, match="Newest durable save: none yet"):
        train_into_a_file(tmp_path, **options)


def train_into_a_file(root: Path, **options: Any) -> None:
    state = fresh()
    with checkpointer(root, save=dc.at(1), **options) as ck:
        ck.restore(state)
        (root / "step-00000001").write_text("a file where a folder should be")
        ck.step(1)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            ck.poll()
            time.sleep(0.01)


def test_a_background_save_that_fails_at_the_end_is_an_error(tmp_path: Path) -> None:
    def body(step: int) -> None:
        (tmp_path / "step-00000001").write_text("a file where a folder should be")

    said = "the last save, of step 1, has failed twice: .*step-00000001.*Older checkpoints are unch"
    with pytest.raises(CheckpointError, match=said):
        run(tmp_path, 1, body, background=True)


# --- hooks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_on_commit_is_called_with_each_checkpoint_beside_the_training(
    background: bool, tmp_path: Path
) -> None:
    seen: list[tuple[int | None, object]] = []
    threads = set()

    def look(checkpoint: dc.Checkpoint) -> None:
        seen.append((checkpoint.step, checkpoint.objects["progress"]))
        threads.add(threading.current_thread())

    run(tmp_path, 3, on_commit=look, background=background)
    assert seen == [(step, {"step": step}) for step in (1, 2, 3)]
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("mine", [KeyError, SystemExit])
def test_a_hook_that_raises_stops_nothing(
    mine: type[BaseException],
    tmp_path: Path,
    refuse: Callable[..., Refusing],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: object) -> None:
        raise mine("mine")

    refuse(2, 3)
    run(tmp_path, 3, on_commit=fail, on_failure=fail, keep=dc.keep.last(1))
    assert steps_at(tmp_path) == [3]
    assert caplog.text.count(f"on_commit of the run in {tmp_path} has failed") == 2
    assert caplog.text.count(f"on_failure of the run in {tmp_path} has failed") == 1


def test_what_fails_beside_the_training_stops_neither_it_nor_what_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_calls = 0

    def prune(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise ValueError("no error of ours")
        return prune_run(*args, **options)

    monkeypatch.setattr(maintenance_module, "prune", prune)
    state = fresh()
    with checkpointer(tmp_path, keep=dc.keep.last(1)) as ck:
        for step in ck.steps(state, until=3):
            train(state, step)
            wait_for(lambda: num_calls == step - 1)  # noqa: B023
    assert "no error of ours" in caplog.text
    assert steps_at(tmp_path) == [3]


# --- metrics ------------------------------------------------------------------------------------


def metrics_at(root: Path) -> dict[int | None, dict[str, float]]:
    return {one.step: dict(one.metrics) for one in dc.checkpoints(root)}


@pytest.mark.parametrize("background", [False, True])
def test_metrics_may_come_before_a_step_is_saved_and_after(
    background: bool, tmp_path: Path
) -> None:
    state = fresh()
    with checkpointer(tmp_path, save=dc.every(steps=2), background=background) as ck:
        for step in ck.steps(state, until=5):
            train(state, step)
            ck.metrics(step, {"before": step, "both": 0})
            if step > 1:
                ck.metrics(step - 1, {"after": -step, "both": 1})
    assert metrics_at(tmp_path) == {
        2: {"before": 2, "both": 1, "after": -3},
        4: {"before": 4, "both": 1, "after": -5},
    }


def test_metrics_may_come_late_for_what_an_earlier_start_has_saved(tmp_path: Path) -> None:
    run(tmp_path, 4)
    state = fresh()
    with checkpointer(tmp_path) as ck:
        ck.restore(state, at="@3")
        for step in (1, 3, 4, 99):
            ck.metrics(step, {"late": step})
    assert metrics_at(tmp_path) == {1: {"late": 1}, 2: {}, 3: {"late": 3}, 4: {}}


def test_a_tensor_is_a_metric_and_nan_is_never_the_best(tmp_path: Path) -> None:
    losses = {1: math.nan, 2: torch.tensor(0.5), 3: 0.25, 4: math.nan, 5: math.inf, 6: 0.75}
    state = fresh()
    keep = dc.keep.best(1, min="loss") | dc.keep.best(1, max="loss")
    with checkpointer(tmp_path, keep=keep) as ck:
        for step in ck.steps(state, until=6):
            train(state, step)
            ck.metrics(step, {"loss": losses[step]})  # type: ignore[dict-item]
    assert steps_at(tmp_path) == [3, 5, 6]  # the newest one is never removed
    assert metrics_at(tmp_path) == {3: {"loss": 0.25}, 5: {"loss": math.inf}, 6: {"loss": 0.75}}


def test_the_best_survives_though_its_metric_comes_late(tmp_path: Path) -> None:
    """As from an evaluation that takes as long as two saves."""
    state = fresh()
    with checkpointer(tmp_path, keep=dc.keep.best(1, min="loss")) as ck:
        for step in ck.steps(state, until=8):
            train(state, step)
            if step > 2:
                ck.metrics(step - 2, {"loss": abs(step - 2 - 3)})
    assert 3 in steps_at(tmp_path)


def test_a_metric_that_nobody_gives_is_told_once_and_costs_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 8, keep=dc.keep.best(2, max="acc"))
    said = "uses the metric 'acc', which no checkpoint has: give it for a step that is saved"
    assert caplog.text.count(said) == 1
    assert steps_at(tmp_path) == [7, 8]


def test_metrics_of_steps_that_are_never_saved_are_forgotten(tmp_path: Path) -> None:
    state = fresh()
    with checkpointer(tmp_path, save=dc.every(steps=50)) as ck:
        for step in ck.steps(state, until=120):
            train(state, step)
            ck.metrics(step, {"loss": step})
        wait_for(lambda: sorted(keeper_of(ck)._metrics) == [*range(101, 121)])
    assert metrics_at(tmp_path) == {50: {"loss": 50}, 100: {"loss": 100}}


def test_metrics_of_a_save_that_failed_are_those_of_no_checkpoint(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    refuse(2, 3)
    state = fresh()
    with checkpointer(tmp_path) as ck:
        for step in ck.steps(state, until=3):
            train(state, step)
            ck.metrics(step, {"loss": step})
    assert metrics_at(tmp_path) == {1: {"loss": 1}, 3: {"loss": 3}}


def test_a_keeper_whose_saves_were_left_ends_by_itself_and_uses_no_time(tmp_path: Path) -> None:
    class Left:
        """A save of a writer that was left."""

        step, is_done, num_looks = 1, False, 0

        def done(self) -> bool:
            self.num_looks += 1
            return self.is_done

        def exception(self) -> None:
            return None

        def result(self) -> None:
            return None

    (tmp_path / "run").mkdir()
    left: Any = Left()
    options = RunOptions(root=tmp_path / "run", save=dc.at_end)
    beside = MaintenanceThread(*root_of(tmp_path / "run"), None, options)
    beside.follow(left)
    beside.close(0.3)
    assert beside._thread.is_alive()
    assert left.num_looks < 10
    left.is_done = True
    beside._thread.join(30)
    assert not beside._thread.is_alive()


def root_of(root: Path) -> tuple[Storage, Incarnation]:
    storage, path = open_storage(root)
    return storage, Incarnation(path, 1)


# --- pruning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_what_no_rule_keeps_is_pruned_after_each_commit(background: bool, tmp_path: Path) -> None:
    keep = dc.keep.last(2) | dc.keep.every(steps=5)
    run(tmp_path, 12, keep=keep, background=background)
    assert steps_at(tmp_path) == [5, 10, 11, 12]


def test_rules_that_are_new_free_a_full_storage(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    run(tmp_path, 5)
    assert steps_at(tmp_path) == [1, 2, 3, 4, 5]
    refuse(*range(1, 100))
    with pytest.raises(CheckpointError):
        run(tmp_path, 6, keep=dc.keep.last(2))
    assert steps_at(tmp_path) == [4, 5]


@pytest.fixture
def with_room_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], None]:
    """Return a function that limits the storage to so many checkpoints."""

    nbytes = sum(tensor.nbytes for tensor in (torch.empty(NUM_ROWS, 4), torch.empty(3)))

    def limit(checkpoints: float) -> None:
        def count_free(*_: object) -> int:
            files = [*tmp_path.rglob("model*.safetensors")]
            return int(nbytes * max(0.0, checkpoints - len(files)))

        monkeypatch.setattr(LocalStorage, "free_nbytes", count_free)

    return limit


def test_a_save_that_cannot_fit_says_what_is_missing_and_is_a_failed_save(
    tmp_path: Path, with_room_for: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 1)
    with_room_for(1.5)
    with pytest.raises(StorageError, match=r"needs 1.93 kB, .* are missing\. ") as caught:
        run(tmp_path, 9, keep=dc.keep.last(1), max_failures=2)
    assert f"{tmp_path} has 1 other checkpoint of " in str(caught.value)
    assert "room for one checkpoint more than you keep: free space" in str(caught.value)
    assert steps_at(tmp_path) == [1]
    assert not (tmp_path / "step-00000002").exists()
    told = [one for one in caplog.messages if "is not saved" in one]
    assert len(told) == 3
    assert all(f"Newest durable save: step 1, at {tmp_path}" in one for one in told)


def test_a_save_that_a_quota_refuses_is_a_failed_save_and_names_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 1)
    allocate = local_storage._allocate

    def allocate_within_quota(fd: int, nbytes: int) -> bool:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return allocate(fd, nbytes)

    monkeypatch.setattr(local_storage, "_allocate", allocate_within_quota)
    with pytest.raises(StorageError, match=r"\(EDQUOT\): free space in this quota"):
        run(tmp_path, 9, max_failures=2)
    assert steps_at(tmp_path) == [1]
    told = [one for one in caplog.messages if "is not saved" in one]
    assert len(told) == 3
    assert all("quota" in one and "Newest durable save: step 1" in one for one in told)


@pytest.mark.parametrize("background", [False, True])
def test_what_is_doomed_makes_room_before_a_save(
    background: bool, tmp_path: Path, with_room_for: Callable[[float], None]
) -> None:
    run(tmp_path, 3)
    storage, incarnation = root_of(tmp_path)
    path = f"{tmp_path}/step-00000009"
    dead = claim(storage, path, overwrite=False, by="a job", incarnation=incarnation)
    (data,) = Path(tmp_path, "step-00000003").glob("a*/model*.safetensors")
    shutil.copy(data, dead.folder)
    with_room_for(3.5)
    run(tmp_path, 4, keep=dc.keep.last(2), max_failures=0, background=background)
    assert steps_at(tmp_path) == [3, 4]
    assert not Path(path, dead.attempt.name).exists()


@pytest.mark.parametrize("verified", [False, True])
def test_free_first_removes_the_oldest_only_if_a_newer_one_is_recorded_as_whole(
    verified: bool, tmp_path: Path, with_room_for: Callable[[float], None]
) -> None:
    run(tmp_path, 1)
    with_room_for(3.5)
    if not verified:
        with pytest.raises(StorageError, match="are missing"):
            run(tmp_path, 9, keep=dc.keep.last(5), max_failures=0, free_first=True)
        assert steps_at(tmp_path) == [1, 2, 3]
        return

    def await_verified(step: int) -> None:
        wait_for(lambda: dc.checkpoints(tmp_path)[-1].is_verified)

    options = {"free_first": True, "on_commit": lambda one: dc.verify(one.path)}
    run(tmp_path, 6, await_verified, keep=dc.keep.last(5), max_failures=0, **options)
    assert steps_at(tmp_path) == [4, 5, 6]


def test_free_first_removes_nothing_while_a_save_is_running(
    tmp_path: Path, with_room_for: Callable[[float], None]
) -> None:
    run(tmp_path, 3)
    assert dc.verify(tmp_path / "step-00000003").ok
    with_room_for(3.0)
    options = RunOptions(root=tmp_path, save=dc.at_end, keep=dc.keep.last(5), free_first=True)
    maintenance = MaintenanceThread(*root_of(tmp_path), None, options)
    maintenance._handles.append(RunningSave())  # type: ignore[arg-type]
    maintenance.make_room(1)
    assert steps_at(tmp_path) == [1, 2, 3]
    maintenance._handles.clear()
    maintenance.make_room(1)
    maintenance.close(30)
    assert steps_at(tmp_path) == [2, 3]


class RunningSave:
    """A background save that is not done."""

    step = 4

    def done(self) -> bool:
        """Return False."""
        return False


def test_a_step_without_permission_stays_and_the_others_are_pruned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, 3)
    trash = tmp_path / "step-00000009" / ".trash-a1-0123456789abcdef"
    trash.mkdir(parents=True)
    forbidden = f"{tmp_path}/step-00000002"
    list_any = LocalStorage.list

    def list_allowed(self: LocalStorage, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        if folder == forbidden:
            raise StorageError(f"{folder}: not for you") from PermissionError(errno.EACCES, "")
        return list_any(self, folder, follow=follow)

    monkeypatch.setattr(LocalStorage, "list", list_allowed)
    options = RunOptions(root=tmp_path, save=dc.at_end, keep=dc.keep.last(1))
    maintenance = MaintenanceThread(*root_of(tmp_path), None, options)
    for _ in range(2):
        maintenance.make_room(10**18)
    maintenance.close(30)
    assert not trash.exists()
    assert [info.state for info in dc.checkpoints(tmp_path)] == ["unreadable", "committed"]
    text = f"{forbidden} is not pruned: it cannot be read: {forbidden}: not for you"
    assert caplog.text.count(text) == 1


def test_an_older_incarnation_prunes_nothing_after_a_newer_one_has_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 3)
    maintenance = MaintenanceThread(
        *root_of(tmp_path), None, RunOptions(root=tmp_path, save=dc.at_end, keep=dc.keep.last(1))
    )
    newest = dc.checkpoints(tmp_path)[-1].where
    begin_incarnation(*open_storage(tmp_path), restored=newest, why="", by="another job")
    maintenance._prune()
    maintenance.close(30)
    assert steps_at(tmp_path) == [1, 2, 3]
    assert "incarnation 2 of this run, another job" in caplog.text


def test_a_newer_start_ends_the_pruning_of_an_older_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = fresh()
    with pytest.raises(ConflictError, match="incarnation 2 of this run, another job"):
        train_until_another(tmp_path, state)
    assert steps_at(tmp_path) == [1, 2]


def train_until_another(root: Path, state: Any) -> None:
    with checkpointer(root, keep=dc.keep.last(2)) as ck:
        for step in ck.steps(state, until=5):
            if step == 3:
                (newest,) = [one.where for one in dc.checkpoints(root) if one.step == 2]
                begin_incarnation(*open_storage(root), restored=newest, why="", by="another job")
            train(state, step)


# The failures of other managers: research of November 2026, section 2, item 10.


def test_of_several_saves_under_way_the_only_durable_one_is_kept(tmp_path: Path) -> None:
    """Megatron-Bridge #4678, KempnerForge #102: retention counted saves that had not ended."""
    writers, state = [], fresh()
    with checkpointer(tmp_path, keep=dc.keep.last(1), background=True) as ck:
        ck.restore(state)
        train(state, 1)
        ck.step(1)
        wait_for(lambda: keeper_of(ck).durable.startswith("step 1,"))
        assert ck._run is not None
        assert ck._run.saver is not None
        assert ck._run.saver._job is not None
        owner = ck._run.saver._job.folder.rank(0).owner("writer")
        assert owner is not None
        os.kill(owner.pid, signal.SIGSTOP)  # it stands still with what comes now
        for step in (2, 3):
            train(state, step)
            ck.step(step)
        keeper_of(ck)._prune()
        writers.append(steps_at(tmp_path))
        os.kill(owner.pid, signal.SIGCONT)
    assert writers == [[1]]
    assert steps_at(tmp_path) == [3]


def test_a_save_that_failed_does_not_cost_the_one_before(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    """Megatron-Bridge #5184: the older one was removed before the newer was there."""
    refuse(*range(2, 100))
    with pytest.raises(CheckpointError):
        run(tmp_path, 4, keep=dc.keep.last(1), max_failures=50)
    assert steps_at(tmp_path) == [1]


def test_a_damaged_newest_one_does_not_cost_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-Bridge #4820: what cannot be loaded was counted as one to keep."""

    def spoil(checkpoint: dc.Checkpoint) -> None:
        if checkpoint.step == 3:
            damage(tmp_path, 3, "objects.msgpack")
            (file,) = tmp_path.glob("step-00000003/a*/model-*")
            file.write_bytes(file.read_bytes()[:-1])

    def follow_pruning(step: int) -> None:
        # A pruning after step 2 that is late sees step 3 before it is spoiled, and keeps that one.
        if step == 3:
            wait_for(lambda: [one.step for one in dc.checkpoints(tmp_path)] == [2])

    run(tmp_path, 3, follow_pruning, keep=dc.keep.last(1), on_commit=spoil)
    assert [one.step for one in dc.checkpoints(tmp_path)] == [2, 3]
    state = fresh()
    with checkpointer(tmp_path) as ck:
        assert ck.restore(state) == 2
    assert steps_in(state) == {2.0}


def test_a_checkpoint_that_somebody_reads_is_not_pruned(tmp_path: Path) -> None:
    """titan #4197, #4152: an evaluation read while its checkpoint was removed."""
    run(tmp_path, 1)
    with dc.Run(tmp_path).lease("@latest", ttl_s=60) as held:
        run(tmp_path, 4, keep=dc.keep.last(1))
        assert held.step == 1
        assert steps_at(tmp_path) == [1, 4]
        assert dc.verify(tmp_path / "step-00000001", level="quick").ok
    run(tmp_path, 5, keep=dc.keep.last(1))
    assert steps_at(tmp_path) == [4, 5]  # 4 was read in full
