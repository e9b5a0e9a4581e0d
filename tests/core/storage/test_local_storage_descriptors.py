"""A call that hangs in the kernel never goes on in another file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.core.commit.attempts import write_small_file
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import StorageError

DEADLINE_S = 10


class Kernel:
    """A system call that hangs, then goes on with the descriptor number that it was given."""

    def __init__(self, call: Callable[..., int]) -> None:
        self.entered = threading.Event()
        self.resume = threading.Event()
        self._call = call

    def __call__(self, fd: int, *args: Any) -> int:
        self.entered.set()
        assert self.resume.wait(DEADLINE_S)
        return self._call(fd, *args)


@contextmanager
def stuck(kernel: Kernel, call: Callable[[], object]) -> Iterator[list[object]]:
    """Have a thread stuck in a call; at the end let it go on. Yields what the call comes to."""
    came_to: list[object] = []

    def run() -> None:
        try:
            came_to.append(call())
        except StorageError as error:
            came_to.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert kernel.entered.wait(DEADLINE_S)
    yield came_to
    kernel.resume.set()
    thread.join(DEADLINE_S)


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(getattr(os, request.param))
    monkeypatch.setattr(os, request.param, kernel)
    return kernel


def open_fds() -> set[str]:
    return set(os.listdir("/dev/fd"))


@pytest.mark.parametrize("kernel", ["pwrite"], indirect=True)
def test_a_write_that_hangs_goes_on_in_its_own_file_though_that_was_discarded(
    kernel: Kernel, tmp_path: Path
) -> None:
    before = open_fds()
    file = LocalStorage().create(f"{tmp_path}/stalled", 4)
    with stuck(kernel, lambda: file.write_at(0, b"late")) as came_to:
        file.discard()
        # Gets the lowest number that is free: the stalled file's, had that been closed.
        other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    assert came_to == [None]
    assert (tmp_path / "other").read_bytes() == b""
    assert (tmp_path / "stalled").read_bytes() == b"late"
    os.close(other)
    assert open_fds() == before


@pytest.mark.parametrize("kernel", ["preadv"], indirect=True)
def test_a_read_that_hangs_goes_on_in_its_own_file_though_that_was_closed(
    kernel: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "stalled").write_bytes(b"mine")
    (tmp_path / "other").write_bytes(b"else")
    before = open_fds()
    file = LocalStorage().open(f"{tmp_path}/stalled")
    target = bytearray(4)
    with stuck(kernel, lambda: file.read_into(0, memoryview(target))):
        file.close()
        other = os.open(tmp_path / "other", os.O_RDONLY)
    assert target == b"mine"
    os.close(other)
    assert open_fds() == before


def test_a_file_that_was_discarded_takes_nothing_more(tmp_path: Path) -> None:
    file = LocalStorage().create(f"{tmp_path}/given up", 4)
    file.discard()
    file.discard()
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    with pytest.raises(StorageError, match="is closed"):
        file.write_at(0, b"late")
    with pytest.raises(StorageError, match="is closed"):
        file.finish()
    os.close(other)
    assert (tmp_path / "other").read_bytes() == b""


def test_a_finished_file_cannot_be_closed_twice(tmp_path: Path) -> None:
    file = LocalStorage().create(f"{tmp_path}/done", 4)
    file.write_at(0, b"data")
    assert file.finish() == 4
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    file.discard()
    assert os.write(other, b"still open") == 10
    os.close(other)


def test_an_interrupted_document_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupted)
    before = os.listdir("/dev/fd")
    with pytest.raises(KeyboardInterrupt):
        write_small_file(LocalStorage(), f"{tmp_path}/claim.json", b"{}")
    assert os.listdir("/dev/fd") == before
