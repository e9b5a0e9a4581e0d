"""The suite passes however it is started."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

import long_mode

ROOT = Path(__file__).parents[2]
# Whoever starts the tests may ignore or block signals, and what it starts inherits that.
STARTER = """
import os, signal, sys
numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
for number in numbers:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
OF_SIGNALS = (
    "tests/core/runtime/test_threads.py",
    "tests/core/storage/test_storage_wrappers_deadline.py",
    "tests/async_save/test_job_orphan_writers.py",
)


@pytest.mark.parametrize("step", [1, 2, 3, 9])
def test_every_case_is_sampled_on_one_of_as_many_days_as_the_step(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_mode, "IS_LONG", False)
    cases, days = range(20), range(739_900, 739_900 + step)
    values: list[int] = []
    params: list[object] = []
    calls: list[int] = []
    for day in days:
        monkeypatch.setattr(long_mode, "DAY", day)
        values += long_mode.sample(cases, step)
        marked = long_mode.sampled_params(cases, step)
        params += [one.values[0] for one in marked if not one.marks]
        calls += [*islice(long_mode.sampled_calls(step), 18 // step)]
    assert sorted(values) == [*cases]
    assert (len(params), {*params}) == (len(cases), {*cases})
    assert sorted(calls) == [*range(1, 19)]


def test_a_sample_is_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_mode, "IS_LONG", False)
    for day in range(9):
        monkeypatch.setattr(long_mode, "DAY", day)
        assert long_mode.sample([0, 1], 9)
        assert [one for one in long_mode.sampled_params([0, 1], 9) if not one.marks]


@pytest.mark.multi_process
def test_tests_of_signals_pass_where_the_starter_ignores_and_blocks_them() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            STARTER,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *OF_SIGNALS,
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
