"""The collector of garbage, a clock without stops, and what is seen of other processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from io import StringIO
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from dist_ckpt.core.runtime import processes
from dist_ckpt.core.runtime.processes import (
    MAX_CLOCK_GAP_S,
    find_process,
    find_state,
    paused_collector,
    running_time,
    show_cut_off,
)
from dist_ckpt.core.runtime.threads import has_outcome

HANG_S = 60


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_paused_and_then_as_it_was(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(ValueError, match="paused"), paused_collector():
            raise ValueError("paused" * (not gc.isenabled()))
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_the_running_clock_counts_steps_and_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = processes._RunningClock()
    now = time.monotonic()
    steps = [0.25, 0.125, 3600.0, 0.25]
    for step in steps:
        now += step
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda now=now: now))
        total = clock.read()
    assert total == pytest.approx(0.625 + MAX_CLOCK_GAP_S, abs=0.25)


def test_the_running_clock_goes_on_in_a_forked_child() -> None:
    before = running_time()
    if (pid := os.fork()) == 0:
        os._exit(0 if running_time() >= before else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "1000"])
    yield child
    child.kill()
    child.wait()


def test_a_proc_of_another_namespace_gives_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `unshare --pid` without `--mount-proc`: there a pid means another process."""
    monkeypatch.setattr(os, "readlink", lambda _: "1")
    assert find_process(os.getpid()) is None


def await_state(pid: int, started: int, expected: str) -> None:
    until = time.monotonic() + HANG_S
    while find_state(pid, started) != expected:
        assert time.monotonic() < until, find_state(pid, started)
        time.sleep(0.001)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_the_state_of_a_process_is_seen_from_outside(sleeper: subprocess.Popen[bytes]) -> None:
    found, own = find_process(sleeper.pid), find_process(os.getpid())
    assert found is not None
    assert own is not None
    assert found.machine == own.machine
    await_state(found.pid, found.started, "running")
    sleeper.send_signal(signal.SIGSTOP)
    await_state(found.pid, found.started, "stopped")
    sleeper.send_signal(signal.SIGCONT)
    await_state(found.pid, found.started, "running")
    assert find_state(found.pid, found.started - 1) == "ended"  # its pid belongs to another process
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert find_state(found.pid, found.started) == "ended"  # a zombie
    sleeper.wait()
    assert find_state(found.pid, found.started) == "ended"
    assert find_process(sleeper.pid) is None


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_thread_that_shows_it_is_cut_off_or_has_ended_is_seen_from_outside() -> None:
    own, threads, steps = find_process(os.getpid()), SimpleQueue[int](), SimpleQueue[bool | None]()
    assert own is not None

    def work() -> None:
        threads.put(threading.get_native_id())
        while (is_cut_off := steps.get(timeout=HANG_S)) is not None:
            show_cut_off(is_cut_off=is_cut_off)
            threads.put(threading.get_native_id())

    worker = threading.Thread(target=work)
    worker.start()
    for shown, state in ((None, "running"), (True, "cut off"), (False, "running")):
        if shown is not None:
            steps.put(shown)
        assert find_state(own.pid, own.started, threads.get(timeout=HANG_S)) == state
    steps.put(None)
    worker.join()
    assert find_state(own.pid, own.started) == "running"
    until = time.monotonic() + HANG_S
    while find_state(own.pid, own.started, worker.native_id or 0) != "cut off":
        assert time.monotonic() < until  # the kernel removes it a moment after the join


@pytest.mark.parametrize(
    ("state", "flags", "pending", "expected"),
    [
        ("S", 0, 0, "running"),
        ("R", 0x400000, 0, "running"),
        ("D", 0, 0, "blocked"),
        ("D", 0, 1 << 8, "ending"),  # killed, and in a call of the kernel that does not end
        ("D", 0x200, 0, "ending"),  # it dumps core
        ("S", 0x400, 0, "ending"),  # a signal has ended it
        ("R", 0x4, 0, "ending"),
        ("t", 0, 0, "stopped"),
        ("Z", 0x4, 0, "ended"),
    ],
)
def test_a_process_that_ends_or_dumps_core_is_ending(
    state: str,
    flags: int,
    pending: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = [state, "1", "2", "3", "4", "5", str(flags), *["0"] * 12, "77"]
    (tmp_path / "stat").write_text(f"5 (a) name (S) {' '.join(fields)} 0 0\n")
    (tmp_path / "status").write_text(f"Name:\ta\nSigPnd:\t{0:016x}\nShdPnd:\t{pending:016x}\n")
    monkeypatch.setattr(
        processes,
        "open",
        lambda path, **_: StringIO((tmp_path / Path(path).name).read_text()),
        raising=False,
    )
    assert find_state(5, 77) == expected


def test_a_process_that_proc_hides_has_not_ended(
    monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    """As one of another user, where /proc is mounted with `hidepid`."""

    def hide(path: str, **_: object) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(processes, "open", hide, raising=False)
    assert find_state(sleeper.pid, 1) == "unknown"
    assert find_state(2**62, 1) == "ended"
    sleeper.kill()
    sleeper.wait()
    assert find_state(sleeper.pid, 1) == "ended"

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(pid, number)

    monkeypatch.setattr(os, "kill", refuse)
    assert find_state(5, 1) == "unknown"


def test_a_wait_does_not_count_a_stop_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `scontrol suspend` for an hour: the outcome comes a moment after the job goes on."""
    real, stopped_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + stopped_s[0])
    future = Future[int]()

    def stop() -> None:
        stopped_s[0] = 3600.0
        running_time()  # another thread of the process goes on first
        threading.Timer(0.3, future.set_result, (7,)).start()

    threading.Timer(0.3, stop).start()
    assert has_outcome(future, HANG_S)
    assert not has_outcome(Future[int](), 0.01)
