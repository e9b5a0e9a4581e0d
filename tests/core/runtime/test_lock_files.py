"""A lock is held by one process that lives, and by nobody else: no child, no writer, no ghost."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arena_processes import program
from dist_ckpt.core.runtime.lock_files import owner_of, take
from dist_ckpt.errors import ConflictError
from long_mode import IS_LONG

HOLD = """
lock = take(args[0])
say("held")
wait()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "x.lock")


def test_a_free_lock_has_no_owner_and_neither_has_one_that_never_was(path):
    assert owner_of(path) is None
    take(path).release()
    assert owner_of(path) is None


@pytest.mark.multi_process
def test_the_owner_is_named_to_whoever_asks_or_wants_the_lock(path):
    with program(HOLD, path) as other:
        assert other.hear() == "held"
        owner = owner_of(path)
        assert owner is not None
        assert owner.pid == other.process.pid
        with pytest.raises(ConflictError, match=f"held by process {other.process.pid} on "):
            take(path)


@pytest.mark.multi_process
def test_a_lock_ends_with_its_process(path):
    with program(HOLD, path) as other:
        assert other.hear() == "held"
        other.kill()
        assert owner_of(path) is None
        lock = take(path)
    owner = owner_of(path)
    assert owner is not None
    assert owner.pid == os.getpid()
    lock.release()


def test_a_second_lock_in_the_same_process_is_a_conflict(path):
    lock = take(path)
    with pytest.raises(ConflictError, match=f"process {os.getpid()} "):
        take(path)
    lock.release()
    assert not lock.is_locked
    take(path).release()


FORKED = """
lock = take(args[0])
if os.fork() == 0:
    lock.release()  # what a child says does not count
    say("child", lock.is_locked)
    wait()
    os._exit(0)
os.wait()
"""


@pytest.mark.multi_process
def test_a_forked_child_neither_keeps_the_lock_nor_ends_it(path):
    with program(FORKED, path) as parent:
        assert parent.hear() == "child False"
        assert owner_of(path) is not None
        parent.kill()  # the child lives on: it has the other end of our pipes
        assert owner_of(path) is None
        parent.tell()


STARTED = """
import subprocess
lock = take(args[0])
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.readline()"])
say(child.pid)
child.wait()
"""


@pytest.mark.multi_process
def test_a_program_that_the_owner_started_does_not_keep_the_lock(path):
    with program(STARTED, path) as parent:
        child = int(parent.hear())
        parent.kill()
        os.kill(child, 0)  # it lives
        assert owner_of(path) is None
        parent.tell()


@pytest.mark.multi_process
def test_asking_in_a_loop_never_keeps_anybody_from_taking_a_lock(path):
    ask = """
say("asking")
while os.path.exists(args[0]):
    owner_of(args[0])
"""
    take(path).release()
    with program(ask, path) as one, program(ask, path) as two:
        assert one.hear() == two.hear() == "asking"
        for _ in range(300 if IS_LONG else 30):
            take(path).release()
        os.unlink(path)


def test_a_lock_whose_file_was_removed_is_nobodys(path):
    old = take(path)
    os.unlink(path)
    assert owner_of(path) is None
    new = take(path)
    assert owner_of(path) is not None
    old.release()
    assert owner_of(path) is not None
    new.release()


def test_a_lock_whose_file_goes_just_before_it_is_taken_is_taken_again(path, monkeypatch):
    real = fcntl.flock

    def late(fd: int, operation: int) -> None:
        monkeypatch.undo()
        os.unlink(path)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = take(path)
    assert owner_of(path) is not None
    lock.release()


def test_a_link_in_the_place_of_a_lock_is_not_followed(path, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    os.symlink(elsewhere, path)
    with pytest.raises(OSError, match="symbolic links"):
        take(path)
    assert elsewhere.read_text() == "precious"


@pytest.mark.parametrize("said", [b"", b"no number\n", b"\xff" * 2000, b"12 host"])
def test_an_owner_that_has_not_said_its_name_is_an_owner(path, said):
    lock = take(path)
    Path(path).write_bytes(said)
    assert str(owner_of(path)) == "a process that has not written its name yet"
    lock.release()


@pytest.mark.multi_process
def test_the_descriptor_of_a_lock_goes_to_no_program(path):
    lock = take(path)
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not show descriptors")
    code = (
        "import os\n"
        "for n in os.listdir('/proc/self/fd'):\n"
        "    try: print(os.readlink(f'/proc/self/fd/{n}'))\n"
        "    except OSError: pass\n"
    )
    run = [sys.executable, "-c", code]
    shown = subprocess.run(
        run, capture_output=True, text=True, check=True, close_fds=False, timeout=60
    )
    assert path not in shown.stdout
    lock.release()
