"""The suite passes however it is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    "tests/core/storage/test_forwarding_deadline.py",
    "tests/async_save/test_job_orphan_writers.py",
)


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
