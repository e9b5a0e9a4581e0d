"""Commands that end otherwise than they began: interrupted, without space, without a reader."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.cli import output
from dist_ckpt.errors import NotFoundError
from fork_server import forked_python

Run = Callable[..., tuple[int, str, str]]

# What makes something at {new} of the checkpoint at {path}, or of what it was exported to.
WRITERS = {
    "cp": "cp {path} {new}",
    "reshard": "reshard {path} {new} --world-size 4 --max-memory 64MiB",
    "import": "import --from hf {path}-hf {new} --ranks 4",
    "export hf": "export --format hf {path} {new} --max-shard-size 2MB",
    "export dcp": "export --format dcp {path} {new}",
    "export torch": "export --format torch {path} {new}",
}

# The command line, on a storage from which each read takes a while; it says when it begins.
SLOW = """
import os, sys, time
from dist_ckpt.cli import main
from dist_ckpt.core.storage.local import local_storage as local

read = local._LocalReadableFile.read_into
def slow(self, offset, target):
    if target.nbytes > 100_000:
        os.write(1, b"reading\\n")  # at once: threads print a line in two pieces
        time.sleep(1)
    return read(self, offset, target)
local._LocalReadableFile.read_into = slow
main(sys.argv[1:])
"""


@pytest.fixture
def path(tmp_path: Path, run: Run) -> Path:
    """A checkpoint of 8 MB, and its model as files of Hugging Face."""
    path = tmp_path / "source" / "s1"
    path.parent.mkdir()
    dc.save({"model": {f"w{i}": torch.full((1 << 19,), float(i)) for i in range(4)}}, path, step=1)
    assert run("export", "--format", "hf", path, f"{path}-hf")[0] == 0
    return path


def words(command: str, path: Path, new: Path) -> list[str]:
    return shlex.split(command.format(path=path, new=new))


def check_nothing_looks_complete(new: Path) -> None:
    """See that no tool would take what is left for a checkpoint, or an export."""
    with pytest.raises(NotFoundError):
        dc.open(new)
    there = [one.name for one in new.parent.rglob("*")]
    assert not [name for name in there if name.endswith((".safetensors", ".metadata", ".distcp"))]


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("name", "sent"), [*((name, signal.SIGINT) for name in WRITERS), ("export dcp", signal.SIGTERM)]
)
def test_who_is_interrupted_leaves_nothing_and_says_so(
    name: str, sent: signal.Signals, path: Path, tmp_path: Path
) -> None:
    new = tmp_path / "out" / "new"
    new.parent.mkdir()
    with subprocess.Popen(
        [forked_python(), "-c", SLOW, *words(WRITERS[name], path, new)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"
            assert os.listdir(new.parent), "it has begun to write"
            process.send_signal(sent)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    told = {
        signal.SIGINT: (output.INTERRUPTED, "interrupted"),
        signal.SIGTERM: (output.STOPPED, "stopped by SIGTERM"),
    }
    assert (process.returncode, errors.splitlines()[-1]) == told[sent], errors
    assert "Traceback" not in errors
    check_nothing_looks_complete(new)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 6 MiB: some files of a checkpoint fit, all do not."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], timeout=60, check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_is_full_is_named_and_nothing_is_left(
    name: str, path: Path, small_disk: Path, run: Run
) -> None:
    new = small_disk / "new"
    code, told, errors = run(*words(WRITERS[name], path, new))
    assert (code, told) == (output.IO_ERROR, ""), errors
    assert errors.startswith("dist-ckpt: ")
    assert str(small_disk) in errors
    assert "space" in errors
    assert not [one for one in small_disk.rglob("*") if one.is_file()]
    check_nothing_looks_complete(new)


def test_what_lacks_memory_is_told(path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("dist_ckpt.cli.commands.cp.plan_copy", without_memory)
    code, _, errors = run("cp", path, f"{path}-new")
    assert code == output.IO_ERROR
    assert errors == "dist-ckpt: out of memory: give the process more memory\n"


@pytest.mark.parametrize(
    "command", ["layout {} -g *", "tensors {}", "stats {}", "diff {} {} --values"]
)
def test_what_is_no_terminal_gets_no_escape_codes(command: str, path: Path) -> None:
    given = command.format(path, path).split()
    done = subprocess.run(
        [forked_python(), "-m", "dist_ckpt", *given],
        env={**os.environ, "TERM": "xterm-256color", "FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.multi_process
@pytest.mark.parametrize("plain", [True, False])
def test_a_terminal_gets_a_bar_and_with_no_color_a_colourless_one(
    path: Path, *, plain: bool
) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", **({"NO_COLOR": "1"} if plain else {})}
    with subprocess.Popen(
        [sys.executable, "-m", "dist_ckpt", "verify", str(path)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        shown = b"".join(_read_all(ours))
        assert process.wait(timeout=60) == 0
    assert b"verify" in shown
    assert bool(re.search(rb"\x1b\[[0-9;]*(3[0-9]|38;5)[0-9;]*m", shown)) != plain


def test_a_dumb_terminal_is_told_in_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with output.progress("work") as update:
        update(0, 10)
        now[0] = 10.0
        update(5, 10)
    assert capsys.readouterr().err == "work: 5 B of 10 B, 10 s left\n"


def _read_all(terminal: int) -> Iterator[bytes]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # its last user has closed it
            break
        if not data:
            break
        yield data
    os.close(terminal)


def test_what_is_left_is_told_by_the_pace_since_the_first_byte(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not since the command began, which imports torch before it reads anything."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    log = output._ProgressLog("export")
    now = 60.0
    log.update(0, 100)
    now = 70.0
    log.update(50, 100)
    assert capsys.readouterr().err.splitlines()[-1] == "export: 50 B of 100 B, 10 s left"
