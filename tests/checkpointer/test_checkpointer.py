"""A run of one process: when it saves, how it begins and ends, and what it refuses."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.checkpointer import checkpointer as checkpointer_module
from dist_ckpt.checkpointer.checkpointer_options import RunOptions
from dist_ckpt.checkpointer.run_session import RunSession, open_run_session
from dist_ckpt.checkpointer.save_policy import SavePolicy
from fork_server import forked_python
from run_training import fresh, steps_at, steps_in, train

OFTEN = dc.every(steps=1)


pytestmark = pytest.mark.usefixtures("alone")


def checkpointer(
    root: str | Path | None, save: SavePolicy = OFTEN, **options: Any
) -> dc.Checkpointer:
    return dc.Checkpointer(root, save=save, **{"background": False, **options})


def run(
    root: Path,
    until: int,
    save: SavePolicy = OFTEN,
    body: Callable[[int], object] = lambda step: None,
    **options: Any,
) -> list[int]:
    """Train to a step; return the steps that were done."""
    state, done = fresh(), []
    with checkpointer(root, save, **options) as ck:
        for step in ck.steps(state, until=until):
            assert steps_in(state) == {step - 1 if step > 1 else -1}
            train(state, step)
            body(step)
            done.append(step)
    return done


def raising(error: BaseException, at: int) -> Callable[[int], None]:
    """Return a body that raises an error in a step."""

    def body(step: int) -> None:
        if step == at:
            raise error

    return body


# --- when it saves ------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("save", "expected"),
    [
        (dc.every(steps=3), [3, 6]),
        (dc.at(2, 5), [2, 5]),
        (dc.at_end, [7]),
        (dc.every(steps=4) | dc.at(5) | dc.at_end, [4, 5, 7]),
        (dc.every(steps=7) | dc.at_end, [7]),
        (dc.on_signal("USR1"), []),
    ],
)
def test_a_run_saves_when_its_policies_say_so(
    save: SavePolicy, expected: list[int], background: bool, tmp_path: Path
) -> None:
    run(tmp_path / "run", 7, save, background=background)
    assert (steps_at(tmp_path / "run") if expected else []) == expected


def test_a_run_saves_after_minutes_at_a_boundary(tmp_path: Path) -> None:
    state = fresh()
    saved: list[dc.Checkpoint] = []
    with checkpointer(tmp_path, dc.every(minutes=0.2 / 60), on_commit=saved.append) as ck:
        for step in ck.steps(state, until=10**6):
            train(state, step)
            threading.Event().wait(0.01)
            if len(saved) == 3:
                break
    assert 3 <= len(steps_at(tmp_path)) < step / 4


def is_stopped(ck: dc.Checkpointer) -> bool:
    ck.poll()
    return ck.should_stop


def wait_for(is_so: Callable[[], object]) -> None:
    until = threading.Event()
    for _ in range(2000):
        if is_so():
            return
        until.wait(0.01)
    raise AssertionError("it does not come")


def test_a_clock_that_jumps_by_hours_prunes_nothing_and_saves_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    real, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    state = fresh()
    with checkpointer(tmp_path, keep=dc.keep.within(days=1) | dc.keep.last(1)) as ck:
        for step in ck.steps(state, until=4):
            train(state, step)
            ahead[0] += (5 if step % 2 else -9) * 3600.0
    assert steps_at(tmp_path) == [1, 2, 3, 4]


def test_a_multiple_that_was_passed_after_a_resume_counts(tmp_path: Path) -> None:
    """As after a save by time or signal: exact multiples may never come."""
    state = fresh()
    with checkpointer(tmp_path, dc.every(steps=5)) as ck:
        assert ck.restore(state) is None
        for step in (3, 6, 9, 12):
            train(state, step)
            ck.step(step)
    assert steps_at(tmp_path) == [6, 12]
    with checkpointer(tmp_path, dc.every(steps=5)) as ck:
        assert ck.restore(state) == 12
        for step in (14, 15, 16, 19, 21):
            train(state, step)
            ck.step(step)
    assert steps_at(tmp_path) == [6, 12, 15, 21]


def test_a_signal_saves_the_step_and_ends_the_run_in_time(tmp_path: Path) -> None:
    state, done = fresh(), []
    with checkpointer(tmp_path, dc.on_signal("USR1"), background=True) as ck:
        for step in ck.steps(state, until=1000):
            train(state, step)
            done.append(step)
            if step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
                wait_for(lambda: ck._run.rounds._barrier.at is not None)  # type: ignore[union-attr]
            assert not ck.should_stop
    assert ck.should_stop
    assert ck.stopped is not None
    assert (ck.stopped.step, ck.stopped.is_durable, ck.stopped.exit_code) == (done[-1], True, 75)
    assert "SIGUSR1 on rank 0" in ck.stopped.why
    assert steps_at(tmp_path) == [done[-1]]
    assert run(tmp_path, done[-1] + 1)[0] == done[-1] + 1


def test_a_signal_is_seen_by_poll_in_a_long_evaluation(tmp_path: Path) -> None:
    """goodfire-ai/spd #677: none of six jobs had saved when its time was over."""
    state = fresh()
    with checkpointer(tmp_path, dc.on_signal("USR1")) as ck:
        ck.restore(state)
        train(state, 1)
        ck.step(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: is_stopped(ck))
        assert steps_at(tmp_path) == [1]
        ck.step(2)  # nothing is done any more
        ck.poll()
        ck.save(3)
    assert steps_at(tmp_path) == [1]


def test_a_signal_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    state = fresh()
    with checkpointer(tmp_path / "a", dc.on_signal("USR1") | dc.at_end) as ck:
        os.kill(os.getpid(), signal.SIGUSR1)
        ck.restore(state)
        wait_for(lambda: is_stopped(ck))
    assert ck.stopped is not None
    assert (ck.stopped.step, ck.stopped.is_durable) == (0, True)
    assert dc.checkpoints(tmp_path / "a") == ()


# --- the loop ------------------------------------------------------------------------------------


def test_a_step_that_ends_with_continue_counts_as_done(tmp_path: Path) -> None:
    state = fresh()
    with checkpointer(tmp_path) as ck:
        for step in ck.steps(state, until=3):
            train(state, step)
            continue
    assert steps_at(tmp_path) == [1, 2, 3]


def test_a_loop_that_is_left_by_break_saves_what_it_has_done(tmp_path: Path) -> None:
    state = fresh()
    with checkpointer(tmp_path, dc.at_end) as ck:
        for step in ck.steps(state, until=9):
            train(state, step)
            if step == 4:
                break
    assert steps_at(tmp_path) == [4]


def test_a_loop_that_is_left_by_break_counts_its_step_though_its_iterator_is_still_there(
    tmp_path: Path,
) -> None:
    """As that of a progress bar is, which has a name."""
    state = fresh()
    with checkpointer(tmp_path, dc.at_end) as ck:
        bar = ck.steps(state, until=9)
        for step in bar:
            train(state, step)
            if step == 4:
                break
        with pytest.raises(ValueError, match=r"close\(\) its iterator"):
            next(iter(ck.steps(state, until=9)))
    assert steps_at(tmp_path) == [4]


def test_the_body_may_save_its_step_by_itself(tmp_path: Path) -> None:
    state = fresh()
    with checkpointer(tmp_path, dc.every(steps=3)) as ck:
        for step in ck.steps(state, until=9):
            train(state, step)
            if step in (2, 3, 5):
                ck.save(step)
            if step == 5:
                break
    assert steps_at(tmp_path) == [2, 3, 5]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("error", [KeyError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_of_the_body_saves_nothing_and_says_what_is_safe(
    error: BaseException, background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = raising(error, 4)
    with pytest.raises(type(error)) as raised:
        run(tmp_path, 9, dc.at(2) | dc.at_end, background=background, body=body)
    assert raised.value is error
    assert steps_at(tmp_path) == [2]
    safe = f"Newest durable save: step 2, at {tmp_path}/step-00000002"
    assert f"the run ends with {type(error).__name__}. {safe}" in caplog.text
    caplog.clear()
    with pytest.raises(type(error)):
        run(tmp_path, 9, background=background, body=raising(error, 3))
    assert safe in caplog.text  # also of a run that has saved nothing itself


def test_an_error_of_the_body_is_not_hidden_by_a_save_that_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(step: int) -> None:
        (tmp_path / f"step-{step:08}").write_text("a file where a folder should be")
        raising(KeyError("mine"), 2)(step)

    with pytest.raises(KeyError, match="mine"):
        run(tmp_path, 9, background=True, body=body)
    assert "step-00000001" in caplog.text


def test_a_loop_that_ends_before_the_restored_step_does_nothing(tmp_path: Path) -> None:
    run(tmp_path, 5)
    assert run(tmp_path, 3) == []
    assert run(tmp_path, 5) == []
    assert steps_at(tmp_path) == [1, 2, 3, 4, 5]
    assert run(tmp_path, 6) == [6]


def test_a_loop_in_a_loop_is_an_error(tmp_path: Path) -> None:
    state = fresh()
    with checkpointer(tmp_path) as ck:
        for _ in ck.steps(state, until=1):
            with pytest.raises(ValueError, match="in a loop of its steps"):
                next(iter(ck.steps(state, until=3)))
            train(state, 1)
    assert steps_at(tmp_path) == [1]


def test_a_second_loop_goes_on_where_the_first_has_ended(tmp_path: Path) -> None:
    """As in phases of a training."""
    state, done = fresh(), []
    with checkpointer(tmp_path, dc.every(steps=2)) as ck:
        for until in (3, 5):
            for step in ck.steps(state, until=until):
                train(state, step)
                done.append(step)
    assert done == [1, 2, 3, 4, 5]
    assert steps_at(tmp_path) == [2, 4]


def test_a_state_may_be_made_when_it_is_needed(tmp_path: Path) -> None:
    """As where wrappers come after the checkpointer was made."""
    state, num_made = fresh(), 0

    def make() -> dict[str, Any]:
        nonlocal num_made
        num_made += 1
        return state

    with checkpointer(tmp_path, dc.every(steps=2)) as ck:
        for step in ck.steps(make, until=5):
            train(state, step)
    assert num_made == 4  # to restore, after the first step, and for two saves
    assert steps_at(tmp_path) == [2, 4]
    with checkpointer(tmp_path) as ck:
        assert ck.restore(make) == 4
    assert steps_in(state) == {4.0}


def test_without_a_root_there_are_no_checkpoints_and_nothing_else_changes(tmp_path: Path) -> None:
    state, done = fresh(), []
    with checkpointer(None, keep=dc.keep.last(1)) as ck:
        for step in ck.steps(state, until=3):
            ck.metrics(step, {"loss": 1.0})
            ck.poll(step)
            done.append(step)
        ck.save(4)
        assert ck.restore(state) is None
        assert (ck.should_stop, ck.stopped) == (False, None)
    assert done == [1, 2, 3]
    assert list(tmp_path.iterdir()) == []


# --- an end that nobody asked for -----------------------------------------------------------------


def test_a_forgotten_close_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before, num_threads = signal.getsignal(signal.SIGUSR1), threading.active_count()
    state = fresh()
    ck = checkpointer(tmp_path, OFTEN | dc.on_signal("USR1"))
    for step in ck.steps(state, until=2):
        train(state, step)
    with pytest.warns(ResourceWarning, match="unclosed Checkpointer for"):
        del ck
    assert signal.getsignal(signal.SIGUSR1) == before
    wait_for(lambda: threading.active_count() <= num_threads)
    assert run(tmp_path, 3) == [3]


def test_a_second_one_of_a_process_is_an_error(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "a"):
        with pytest.raises(ValueError, match=r"another Checkpointer .* is open, for .*/a: close"):
            checkpointer(tmp_path / "b")
        checkpointer(None).close()  # it is none
    checkpointer(tmp_path / "b").close()


def cell(root: Path, until: int, **options: Any) -> None:
    """Run the cell of a notebook: the name of the checkpointer is lost after an error."""
    state = fresh()
    ck = checkpointer(root, OFTEN | dc.on_signal("USR1"), **options)
    for step in ck.steps(state, until=until):
        state["model"]["small"].fill_(step)  # the step is half done
        if step == 3:
            raise ZeroDivisionError
        train(state, step)
    ck.close()


@pytest.mark.parametrize("background", [False, True])
def test_what_a_notebook_has_lost_is_closed_in_one_call(
    background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ZeroDivisionError) as kept:  # the traceback keeps all frames
        cell(tmp_path, 5, background=background)
    with pytest.raises(ValueError, match=r"`with`.* name is lost, .* call dc\.close_all\(\)"):
        checkpointer(tmp_path / "other")
    dc.close_all()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert "ends with ClosedEarlyError. Newest durable save: step 2" in caplog.text
    assert steps_at(tmp_path) == [1, 2], "the step that is half done is not saved"
    assert kept.tb is not None
    dc.close_all()
    assert run(tmp_path, 4, background=background) == [3, 4]


def test_a_loop_that_was_left_by_break_is_closed_too(tmp_path: Path) -> None:
    state = fresh()
    out = [checkpointer(tmp_path)]  # the outputs of a notebook
    for step in out[0].steps(state, until=9):
        train(state, step)
        if step == 2:
            break
    dc.close_all()
    with pytest.raises(ValueError, match="is closed: make another one"):
        out[0].step(3)
    assert run(tmp_path, 4) == [2, 3, 4], "a step that was left by break is not saved"


def test_all_that_is_open_is_closed_from_another_thread_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, heard = signal.getsignal(signal.SIGUSR1), []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        ck = checkpointer(tmp_path, OFTEN | dc.on_signal("USR1"))
        thread = threading.Thread(target=dc.close_all)
        thread.start()
        thread.join()
        assert "failed as well" not in caplog.text
        with pytest.raises(ValueError, match="is closed"):
            ck.poll()
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1], "it is passed on"
        checkpointer(tmp_path).close()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_open_saver_is_closed_with_its_saves_durable(tmp_path: Path) -> None:
    def lose() -> None:
        saver = dc.AsyncSaver(tmp_path)
        saver.save(fresh(), tmp_path / "step-1", step=1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:
        lose()
    with pytest.raises(dc.ConflictError, match=r"name is lost, call dc\.close_all\(\)"):
        dc.AsyncSaver(tmp_path)
    dc.close_all()
    assert [info.step for info in dc.checkpoints(tmp_path)] == [1]
    assert kept.tb is not None
    dc.AsyncSaver(tmp_path).close()


def test_of_many_threads_one_has_the_checkpointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads are in the middle of opening one when the first is done."""
    num_threads = 6
    outcomes: list[dc.Checkpointer | ValueError] = []
    opening, refused = threading.Barrier(num_threads), threading.Semaphore(0)

    def open_slowly(options: RunOptions, group: object, claim: Callable[[], None]) -> RunSession:
        opening.wait(60)
        try:
            claim()
        except ValueError:
            refused.release()
            raise
        for _ in range(num_threads - 1):
            assert refused.acquire(timeout=60), "another thread has it as well"
        return open_run_session(options, None, lambda: None)

    def open_one(name: str) -> None:
        try:
            outcomes.append(checkpointer(tmp_path / name, OFTEN))
        except ValueError as error:
            outcomes.append(error)

    monkeypatch.setattr(checkpointer_module, "open_run_session", open_slowly)
    threads = [threading.Thread(target=open_one, args=(f"{n}",)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first,) = [each for each in outcomes if isinstance(each, dc.Checkpointer)]
    errors = [str(each) for each in outcomes if isinstance(each, ValueError)]
    assert len(errors) == num_threads - 1
    assert all("another Checkpointer of this process is open" in text for text in errors)
    first.close()


def test_one_that_could_not_be_opened_does_not_stay_open(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_failures") as kept:
        checkpointer(tmp_path, max_failures=-1)
    checkpointer(tmp_path).close()
    assert kept.tb is not None


def test_a_forked_child_opens_its_own(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "a"):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                dc.close_all()  # closes nothing of the parent
                run(tmp_path / "b", 2)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        with pytest.raises(ValueError, match="another Checkpointer of this process"):
            checkpointer(tmp_path / "b")
    assert steps_at(tmp_path / "b") == [1, 2]


FORGETFUL = """
import sys, dist_ckpt as dc
ck = dc.Checkpointer(sys.argv[1], background=False)
for step in ck.steps({"step": 0}, until=2):
    pass
"""


def test_a_process_that_ends_with_an_open_one_says_so(tmp_path: Path) -> None:
    """A script's global is dropped by nobody, so `at_end` was forgotten without a word."""
    told = subprocess.run(
        [forked_python(), "-c", FORGETFUL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"ends with a Checkpointer for {tmp_path} open: at_end has saved" in told.stderr


def test_one_that_is_dropped_in_a_cycle_is_no_second_one(tmp_path: Path) -> None:
    gc.disable()
    try:
        first = checkpointer(tmp_path)
        cycle: list[object] = [first]
        cycle.append(cycle)
        del first, cycle
        with pytest.warns(ResourceWarning, match="unclosed Checkpointer for"):
            checkpointer(tmp_path).close()
    finally:
        gc.enable()


def test_what_is_closed_is_refused_by_name(tmp_path: Path) -> None:
    state = fresh()
    with checkpointer(tmp_path) as ck:
        ck.restore(state)
    ck.close()
    for call in (
        lambda: ck.step(1),
        ck.poll,
        lambda: ck.save(1),
        lambda: ck.restore(state),
        lambda: ck.metrics(1, {"loss": 1.0}),
        lambda: next(iter(ck.steps(state, until=1))),
    ):
        with pytest.raises(ValueError, match="is closed: make another one"):
            call()


def test_a_forked_process_has_neither_its_handlers_nor_its_saves(tmp_path: Path) -> None:
    """As the workers of a data loader."""
    state = fresh()
    with checkpointer(tmp_path, OFTEN | dc.on_signal("USR1", "TERM")) as ck:
        ck.restore(state)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            found = [signal.getsignal(one) == signal.SIG_DFL for one in (signal.SIGUSR1, 15)]
            try:
                ck.step(1)
            except ValueError as error:
                found.append("was forked" in str(error))
            ck.close()
            del ck
            gc.collect()
            os.write(writer, repr(found).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            assert pipe.read() == "[True, True, True]"
        os.waitpid(pid, 0)
        train(state, 1)
        ck.step(1)
    assert steps_at(tmp_path) == [1]


def test_a_forked_process_may_make_one_of_its_own(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "parent"):
        if (pid := os.fork()) == 0:
            try:
                run(tmp_path / "child", 2)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    assert steps_at(tmp_path / "child") == [1, 2]


# --- what makes no sense --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"save": SavePolicy()}, ValueError, "never fires: give a policy"),
        ({"save": "every(steps=5)"}, TypeError, r"save='every\(steps=5\)': give policies"),
        ({"save": None}, TypeError, "save=None: give policies"),
        ({"keep": "last(3)"}, TypeError, r"keep='last\(3\)': give policies"),
        ({"must_exist": True, "init": "a"}, ValueError, "init= is for a fresh run, and must_exist"),
        (
            {"read_only": True, "keep": dc.keep.last(1)},
            ValueError,
            "read_only=True changes nothing",
        ),
        ({"must_exist": 1}, TypeError, "must_exist=1: give True or False"),
        ({"background": "yes"}, TypeError, "background='yes': give True or False"),
        ({"init": 5}, TypeError, "init: path is a int"),
        ({"init": {}}, ValueError, "init: the sources are an empty mapping"),
        ({"init_strict": 1}, TypeError, "init_strict=1"),
        ({"config": [1]}, TypeError, "config is a list: give a dict"),
        ({"config": {"a": object()}}, TypeError, "config"),
        ({"config_must_match": ("a",)}, ValueError, "give config= too"),
        ({"config_must_match": "a", "config": {}}, TypeError, "give patterns"),
        ({"on_commit": 5}, TypeError, "on_commit=5: give a function"),
        ({"on_failure": "stop"}, TypeError, "on_failure='stop': give \"warn\""),
        ({"max_failures": -1}, ValueError, "max_failures=-1: give a number"),
        ({"stop_within_s": 0}, ValueError, "stop_within_s=0: give a number"),
        ({"stop_within_s": "1"}, TypeError, "stop_within_s='1': give a number"),
        ({"stop_within_s": float("inf")}, ValueError, "stop_within_s=inf: give a number"),
        ({"stop_within_s": 1e300}, ValueError, "stop_within_s=1e.300: give a number"),
        ({"stop_within_s": 10**400}, ValueError, "stop_within_s=1000.*: give a number"),
        ({"root": 5}, TypeError, "root=5"),
        ({"root": ""}, ValueError, "root=''"),
        ({"root": "s3://bucket/run"}, ValueError, "root='s3://bucket/run'"),
    ],
)
def test_an_option_that_makes_no_sense_is_named_with_what_to_give(
    options: dict[str, Any], kind: type[Exception], match: str, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    arguments = {"root": tmp_path, "save": OFTEN | dc.on_signal("TERM"), **options}
    with pytest.raises(kind, match=match):
        dc.Checkpointer(arguments.pop("root"), **arguments)
    assert signal.getsignal(signal.SIGTERM) == before
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_checkpoint_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    dc.save(fresh(), tmp_path / "run" / "mine", step=1)
    with (
        pytest.raises(ValueError, match=r"/mine is a checkpoint: give the folder .*/run$"),
        checkpointer(tmp_path / "run" / "mine") as ck,
    ):
        ck.restore(fresh())
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["mine"]


def test_steps_only_grow_and_each_is_saved_once(tmp_path: Path) -> None:
    state = fresh()
    with checkpointer(tmp_path, dc.at(3)) as ck:
        with pytest.raises(ValueError, match=r"call restore\(state\) first"):
            ck.step(1, state)
        with pytest.raises(ValueError, match=r"call restore\(state\) first"):
            ck.metrics(1, {"loss": 1.0})
        ck.restore(state)
        with pytest.raises(TypeError, match=r"step=1\.5: give a whole number"):
            ck.step(1.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="step 0 is not above the last step, 0"):
            ck.save(0)
        train(state, 2)
        ck.step(2)
        with pytest.raises(
            ValueError, match="step 2 is not above the last step, 2: count optimizer steps"
        ):
            ck.step(2)
        with pytest.raises(ValueError, match="step 1 is not above the last step, 2"):
            ck.save(1)
        ck.save(2)
        with pytest.raises(ValueError, match="step 2 is saved already"):
            ck.save(2)
        train(state, 3)
        ck.step(3)
        ck.save(3)  # a policy has: that is no error
        train(state, 5)
        ck.save(5)
        with pytest.raises(ValueError, match="step 4 is not above the last step, 5"):
            ck.step(4)
    assert steps_at(tmp_path) == [2, 3, 5]


@pytest.mark.parametrize(
    ("values", "kind", "match"),
    [
        ([1], TypeError, "metrics are a list: give"),
        ({"loss": "1"}, TypeError, "metric 'loss' is '1': give a number"),
        ({"loss": None}, TypeError, "metric 'loss' is None: give a number"),
        ({"": 1}, TypeError, "is not the name of a metric"),
        ({3: 1}, TypeError, "3 is not the name of a metric"),
        ({"\ud800": 1}, ValueError, "is not the name of a metric: .*surrogates"),
        ({"loss": 10**400}, ValueError, "metric 'loss': int too large .*: give one number"),
    ],
)
def test_a_metric_that_is_none_is_named(
    values: Any, kind: type[Exception], match: str, tmp_path: Path
) -> None:
    with checkpointer(tmp_path) as ck:
        ck.restore(fresh())
        with pytest.raises(kind, match=match):
            ck.metrics(1, values)
        with pytest.raises(TypeError, match="step='1': give a whole number"):
            ck.metrics("1", {"loss": 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [None, [], lambda: None])
def test_what_is_no_state_is_an_error_before_the_first_step(state: Any, tmp_path: Path) -> None:
    with (
        checkpointer(tmp_path) as ck,
        pytest.raises(TypeError, match=r"the state is a (NoneType|list): give a mapping"),
    ):
        next(ck.steps(state, until=3))


@pytest.mark.parametrize("until", [None, "3", 1.5, True])
def test_the_last_step_is_a_whole_number(until: Any, tmp_path: Path) -> None:
    with (
        checkpointer(tmp_path) as ck,
        pytest.raises(TypeError, match=f"until={until!r}: give a whole number"),
    ):
        next(ck.steps(fresh(), until=until))


def test_a_state_that_cannot_be_saved_is_an_error_at_once(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as ck:
        ck.restore(fresh())
        with pytest.raises(TypeError, match="nothing"):
            ck.step(1, {"nothing": object()})
        ck.step(2, fresh())


def test_the_default_policy_works_outside_the_main_thread_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray actors, notebooks and NeMo's workers train in other threads."""
    errors: list[BaseException] = []

    def train_there() -> None:
        state = fresh()
        with dc.Checkpointer(tmp_path / "run", background=False) as ck:
            for step in ck.steps(state, until=3):
                train(state, step)
        try:
            dc.Checkpointer(tmp_path / "other", save=dc.on_signal("TERM"), background=False)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=train_there)
    thread.start()
    thread.join()
    assert steps_at(tmp_path / "run") == [3]
    (line,) = [line for line in caplog.messages if "on_signal() needs the main thread" in line]
    assert line.startswith("no signal makes this run save and stop")
    assert len(errors) == 1
