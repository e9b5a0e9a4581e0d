"""The suite passes however it is started."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

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


class Item:
    """What a sample looks at in a collected test."""

    def __init__(self, file: str, *arguments: object) -> None:
        self.path = Path(file)
        self._arguments = arguments

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        """Return the mark, if the test has it."""
        return getattr(pytest.mark, name)(*self._arguments).mark if self._arguments else None


def test_every_marked_test_of_a_file_is_sampled_on_one_of_as_many_days_as_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_files: list[list[Any]] = [[Item(file, 3) for _ in range(6)] for file in ("a", "b")]
    plain: Any = Item("a")
    pages: list[Any] = [Item("c", 3, number // 2) for number in range(6)]
    items = [plain, *of_files[0], *of_files[1], *pages]
    run = []
    for day in range(739_900, 739_903):
        monkeypatch.setattr(long_mode, "DAY", day)
        other = [*long_mode.items_of_other_days(items)]
        assert plain not in other
        assert all(len({*of_file} - {*other}) == 2 for of_file in of_files)
        assert [item in other for item in pages[::2]] == [item in other for item in pages[1::2]]
        run += [item for item in items if item not in other and item is not plain]
    assert len(run) == len({*run}) == 18


@pytest.mark.multi_process
@pytest.mark.sampled(5)
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
