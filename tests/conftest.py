"""What holds for all tests, and fixtures that several packages' tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import long_mode
from dist_ckpt.async_save.snapshots.arena import ArenaPool
from dist_ckpt.async_save.snapshots.job_folder import JobFolder, RankFolder
from rows import Rows


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `scripts/test.sh`: what may be found a day later; all rows at once."""
    parser.addoption("--long", action="store_true", help="run what is marked long, and more often")
    parser.addoption("--rows", action="store_true", help="run several rows of tests at once")


def pytest_configure(config: pytest.Config) -> None:
    """Have signals as in a terminal, however the tests were started: children inherit them.

    A shell ignores SIGINT for what it runs in the background, and tests of interrupts would wait
    for ever there; `nohup` and supervisors ignore or block others.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # No test fails because the machine was busy.
    settings.register_profile("plain", deadline=None)
    settings.load_profile("plain")
    os.environ[long_mode.DAY_VARIABLE] = str(long_mode.DAY)
    if config.getoption("--rows"):
        config.pluginmanager.register(Rows())
    if config.getoption("--long"):
        os.environ[long_mode.VARIABLE] = "1"
        # Who has imported it by now, before any test does, is the program of the tests itself.
        long_mode.IS_LONG = True
        settings.register_profile("long", deadline=None, max_examples=long_mode.MANY_EXAMPLES)
        settings.load_profile("long")


def pytest_report_header() -> str:
    """Say how to run the same sample on another day."""
    return f"sample: {long_mode.DAY_VARIABLE}={long_mode.DAY}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is long, and of all tests what other days sample."""
    if config.getoption("--long"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if config.getoption("--rows"):
        left_out += long_mode.items_of_other_days(items)
    for item in left_out:
        item.add_marker(pytest.mark.skip(reason="long: it runs with --long"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Keep the collector from looking through imports, which stay, again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep the collector from the tests and the libraries, which stay: half a second each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def rank_folder(tmp_path: Path) -> RankFolder:
    """Return the folder of a rank of a job that saves in the background."""
    return JobFolder("job", roots=[str(tmp_path)]).rank(0)


@pytest.fixture
def arenas(rank_folder: RankFolder) -> Iterator[ArenaPool]:
    """Return the arenas of that rank."""
    made = ArenaPool(rank_folder)
    yield made
    made.close()
