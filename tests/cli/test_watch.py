"""`dist-ckpt watch` on a terminal, in a pipe, and once."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dist_ckpt as dc
from dist_ckpt.cli.commands import watch as watch_module
from dist_ckpt.cli.commands.watch import _observe, describe_run
from dist_ckpt.core.commit.records.incarnations import LivenessFile, begin_incarnation
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import StorageError
from dist_ckpt.runs.watch_changes import RunObservation, observe_run

Result = tuple[int, str, str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    for step in (1, 2, 3):
        dc.save({"x": step}, root / f"s{step}", step=step)
    dc.Run(root).metrics(1, {"loss": 0.5})
    return root


def start(root: Path) -> None:
    """Begin to write into a root, and go on from the newest."""
    there = dc.checkpoints(root) if root.exists() else ()
    restored = there[-1].where if there else None
    begin_incarnation(LocalStorage(), str(root), restored=restored, why="a test", by="job 7")


@contextmanager
def watching(root: Path, stdout: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "dist_ckpt", "watch", str(root), "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen([*command, *options], stdout=stdout, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


class Shown:
    """What has come out of a file descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.text = ""

    def until(self, *wanted: str) -> None:
        """Read until all of these were shown, in any order."""
        deadline = time.monotonic() + 30
        while not all(text in self.text for text in wanted):
            assert select.select([self.fd], [], [], deadline - time.monotonic())[0], self.text
            data = os.read(self.fd, 1 << 16)
            assert data, self.text
            self.text += data.decode()


def interrupted(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    return process.wait(30)


def test_in_a_pipe_each_change_is_a_line(root: Path) -> None:
    with watching(root, subprocess.PIPE, "--keep", "last(2)") as process:
        assert process.stdout is not None
        shown = Shown(process.stdout.fileno())
        shown.until("3 checkpoints: the newest is of step 3\n")
        dc.save({"x": 4}, root / "s4", step=4)
        shown.until("step 4 is durable: ")
        dc.Run(root).metrics(4, {"loss": 0.25})
        shown.until("step 4: loss=0.25\n")
        dc.delete(root / "s1")
        shown.until("step 1 is gone: no rule keeps it")
        start(root)
        shown.until("incarnation 1, job 7, resumes from step 4: a test\n")
        assert interrupted(process) == 0
    assert "\x1b" not in shown.text
    assert all(re.match(r"\d\d:\d\d:\d\d  \S", line) for line in shown.text.splitlines())


def test_on_a_terminal_the_run_is_shown_as_it_is(root: Path) -> None:
    control, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 16, 100, 0, 0))
    with watching(root, terminal) as process:
        os.close(terminal)
        shown = Shown(control)
        shown.until("newest: step 3, saved ", "loss=0.5", "the newest", "3 checkpoints")
        dc.save({"x": 4}, root / "s4", step=4)
        shown.until("newest: step 4, saved ", "step 4 is durable: ")
        for step in range(5, 9):
            dc.save({"x": step}, root / f"s{step}", step=step)
        shown.until("newest: step 8, saved ", " before these")  # there are only 16 lines
        assert interrupted(process) == 0
        shown.until("\x1b[?25h")  # the cursor is there again
    os.close(control)


def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    root = tmp_path / "later"
    with watching(root, subprocess.PIPE) as process:
        assert process.stdout is not None
        shown = Shown(process.stdout.fileno())
        shown.until(f"{root} does not exist yet\n")
        dc.save({"x": 1}, root / "s1", step=1)
        shown.until("step 1")
        assert interrupted(process) == 0
    assert shown.text.count("does not exist yet") == 1


def test_who_reads_no_more_ends_it(root: Path) -> None:
    with watching(root, subprocess.PIPE) as process:
        assert process.stdout is not None
        Shown(process.stdout.fileno()).until("3 checkpoints")
        process.stdout.close()
        dc.save({"x": 4}, root / "s4", step=4)
        assert process.wait(30) == 0


def test_once_prints_what_there_is(run: Callable[..., Result], root: Path) -> None:
    start(root)
    code, out, _ = run(
        "watch", root, "--once", "--keep", "last(1) | best(1, min='loss', unmeasured=0)"
    )
    assert code == 0
    head, begun, alive, newest, heads, *rows = out.splitlines()
    assert head == str(root)
    assert begun.startswith("incarnation 1, job 7, resumes from step 3: a test (")
    assert alive == "no heartbeat: it has ended, or has only just begun"
    assert newest.startswith("newest: step 3, saved ")
    assert heads.split() == ["STEP", "STATE", "SIZE", "AGE", "METRICS", "KEPT", "BY"]
    assert [row.split()[:2] for row in rows] == [[n, "committed"] for n in ("1", "2", "3")]
    assert rows[0].endswith("loss=0.5  best(1, min='loss', unmeasured=0)")
    assert rows[2].endswith("last(1); the newest")
    LivenessFile(LocalStorage(), str(root), 1).renew()
    assert re.search(r"(?m)^last seen \d s ago$", run("watch", root, "--once")[1])
    assert run("watch", root / "s1", "--once")[0] == 2
    assert run("watch", root / "nowhere", "--once")[0] == 3
    assert run("watch", root, "--once", "--keep", "latest(3)")[0] == 2
    for interval in ("0", "nan", "1e300"):
        assert run("watch", root, "--interval", interval)[0] == 2


def test_an_empty_folder_is_shown_and_text_of_others_cannot_steer_the_terminal(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    assert run("watch", tmp_path, "--once")[1] == f"{tmp_path}\nno checkpoints\n"
    begin_incarnation(LocalStorage(), str(tmp_path), restored=None, why="\x1b[2J", by="\x1b]0;x")
    assert "\x1b" not in run("watch", tmp_path, "--once")[1]


def test_of_many_the_newest_are_shown(root: Path) -> None:
    look = observe_run(LocalStorage(), str(root))
    shown = describe_run(look, None, height=6)
    assert shown[-3] == "... and 1 before these"
    assert [line.split()[0] for line in shown[-2:]] == ["2", "3"]


def test_a_storage_that_refuses_is_told_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = _observe(LocalStorage(), str(root), 0.0, None)
    first, told = next(looks)
    assert len(told) == 1

    def refuse(*_: object) -> RunObservation:
        raise StorageError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(watch_module, "observe_run", refuse)
        look, told = next(looks)
        assert look is first  # what was seen last stays on the terminal
        assert told[0].endswith("run cannot be read now: planted")
        assert next(looks)[1] == []
    dc.save({"x": 4}, root / "s4", step=4)
    assert "step 4 is durable" in next(looks)[1][0]
