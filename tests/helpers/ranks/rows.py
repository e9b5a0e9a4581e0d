"""The rows of `scripts/test.sh`: processes that run all tests at once, forked after one collection.

To collect takes ten seconds of a core, most of it imports, and a fork server three: the rows share
both. Most tests wait, for a disk, a silence or each other. Three rows compute, about as long: what
is `APART`, then what starts processes and what does not. With more that work at once a background
writer, whose priority is the lowest, might be taken for dead.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.config import create_terminal_writer

from fork_server import forked_python

APART = (
    *("tests/benchmarks/", "tests/repository/", "tests/core/checkpoint/", "tests/core/commit/"),
    *("tests/core/loading/", "tests/core/saving/", "tests/runs/", "tests/tools/"),
)

WAITS_IN_PROCESSES = "waits in processes"


def row_of(item: pytest.Item) -> str:
    """Return the name of the row that runs a test."""
    if item.get_closest_marker("waits"):
        return WAITS_IN_PROCESSES if item.get_closest_marker("multi_process") else "waits"
    if item.nodeid.startswith(APART):
        return "apart"
    return "processes" if item.get_closest_marker("multi_process") else "computes"


class Rows:
    """Runs each row of the collected tests in a child, and ends as the worst of them."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Fork the rows; return None in a child, which runs its tests, and True when all ended."""
        if session.testsfailed:
            return None  # to collect: pytest says so, and ends
        rows: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            rows.setdefault(row_of(item), []).append(item)
        # It would be the longest row, and takes the least of a core.
        if len(waiting := rows.get(WAITS_IN_PROCESSES, [])) > 1:
            rows[WAITS_IN_PROCESSES], rows["more waits in processes"] = waiting[::2], waiting[1::2]
        forked_python()
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("importing the tests starts threads, which no fork would have")
        folder = Path(tempfile.mkdtemp(prefix="rows-"))
        children: dict[str, int] = {}
        for name, items in rows.items():
            sys.stdout.flush()
            children[name] = os.fork()
            if children[name] == 0:
                _become(session, items, folder / name)
                return None
        try:
            session.testsfailed = sum(
                _has_failed(pid, folder / name) for name, pid in children.items()
            )
        except BaseException:
            for pid in children.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            raise
        finally:
            shutil.rmtree(folder)
        return True


def _become(session: pytest.Session, items: list[pytest.Item], log: Path) -> None:
    """Make of this process one that runs some tests and reports in a file."""
    session.items[:] = items
    session.testscollected = len(items)
    file = log.open("w", buffering=1)
    session.config.add_cleanup(file.close)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    reporter._tw = create_terminal_writer(session.config, file)


def _has_failed(pid: int, log: Path) -> bool:
    """Wait for a row, and show its report."""
    _, status = os.waitpid(pid, 0)
    print(f"\n--- {log.name}: exit code {os.waitstatus_to_exitcode(status)}\n{log.read_text()}")
    return status != 0
