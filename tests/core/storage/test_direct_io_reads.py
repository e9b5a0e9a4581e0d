"""Whether they come past the page cache or out of it, the bytes are the same."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.runtime.host_memory import allocate_scratch
from dist_ckpt.core.storage import ReadableFile, Storage
from dist_ckpt.core.storage.local import direct_io
from dist_ckpt.core.storage.local.direct_io import MIN_NBYTES, MIN_READ_NBYTES, READ_BUFFER_NBYTES
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import StorageError
from dist_ckpt.testing.storage_contract import StorageContract

PAGE = 4096
NBYTES = 25 * PAGE + 77


@pytest.fixture
def _always(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all reads come directly: small ones, and of what the page cache holds."""
    monkeypatch.setattr(direct_io, "MIN_NBYTES", 1)
    monkeypatch.setattr(direct_io, "MIN_READ_NBYTES", 1)
    monkeypatch.setattr(direct_io, "is_cached", lambda *_: False)


class Calls:
    """The system's reads by descriptors for direct I/O.

    A test sets what `preadv` does there, and with what `opening` the file for them fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct: set[int] = set()
        self.num_reads = 0
        self.most = 0
        self.opening: int | None = None
        self.preadv: Callable[..., int] = os.preadv
        real_open, real_preadv = os.open, os.preadv

        def open_(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_DIRECT and self.opening is not None:
                fail(self.opening)()
            fd = real_open(path, flags, *args, **kwargs)
            (self.direct.add if flags & os.O_DIRECT else self.direct.discard)(fd)
            return fd

        def preadv(fd: int, parts: list[memoryview], offset: int) -> int:
            if fd not in self.direct:
                return real_preadv(fd, parts, offset)
            self.num_reads += 1
            self.most = max(self.most, len(parts[0]))
            return self.preadv(fd, parts, offset)

        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setattr(os, "preadv", preadv)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def fail(code: int) -> Callable[..., int]:
    """Return a call that always fails so."""

    def failing(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return failing


def made(path: str, nbytes: int = NBYTES) -> bytes:
    data = random.Random(nbytes).randbytes(nbytes)
    Path(path).write_bytes(data)
    return data


def reading(path: str) -> ReadableFile:
    return LocalStorage(direct_reads=True).open(path)


def read(file: ReadableFile, offset: int, nbytes: int, remainder: int = 64) -> bytes:
    """Read into memory that begins so many bytes after a page; return what came."""
    around = allocate_scratch(nbytes + 2 * PAGE)
    around[:] = b"\xee" * len(around)
    count = file.read_into(offset, around[remainder : remainder + nbytes])
    untouched = bytes(around[:remainder]) + bytes(around[remainder + count :])
    assert untouched == b"\xee" * len(untouched)
    return bytes(around[remainder : remainder + count])


def cool(path: str) -> None:
    """Have nothing of a file in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def is_cached(path: str, start: int, stop: int) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return direct_io.is_cached(fd, start, stop - start)
    finally:
        os.close(fd)


def cached_pages(path: str) -> int:
    return sum(is_cached(path, at, at + 1) for at in range(0, os.path.getsize(path), PAGE))


@pytest.fixture
def _can_tell(path: str) -> None:
    """Skip where nobody can tell what the page cache holds."""
    del path
    cachestat, no_file = 451, -1
    ctypes.CDLL(None, use_errno=True).syscall(cachestat, no_file, None, None, 0)
    if ctypes.get_errno() != errno.EBADF:
        pytest.skip("this system does not tell what its page cache holds")


# --- the same bytes ----------------------------------------------------------------------------


@pytest.mark.usefixtures("_always")
class TestDirectlyReadingLocalStorage(StorageContract):
    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)

    @pytest.fixture
    def storage(self) -> Storage:
        return LocalStorage(direct_reads=True)


@pytest.mark.usefixtures("_always")
def test_whatever_the_place_length_and_memory_the_bytes_are_those_of_the_file(
    path: str, calls: Calls
) -> None:
    data = made(path)
    edges = [n + d for n in (0, 512, PAGE, 3 * PAGE, NBYTES) for d in (-77, -1, 0, 1, 64, 513)]
    file = reading(path)

    def check(offset: int) -> None:
        for nbytes in (*edges, 9 * PAGE):
            if nbytes > 0:
                found = read(file, offset, nbytes, remainder=(7 * nbytes + offset) % PAGE)
                assert found == data[offset : offset + nbytes], (offset, nbytes)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, [at for at in edges if at >= 0], timeout=60))
    file.close()
    assert calls.num_reads > 500


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize(("nbytes", "num_reads"), [(2 << 20, 2), (21 << 20, 20)])
def test_large_reads_come_in_parts_so_that_each_thread_needs_little_memory(
    path: str, calls: Calls, nbytes: int, num_reads: int
) -> None:
    data = made(path, nbytes + 99)
    assert read(reading(path), 13, nbytes) == data[13 : 13 + nbytes]
    assert calls.num_reads == num_reads
    assert calls.most <= READ_BUFFER_NBYTES <= 2 << 20


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("at_most", [0, 1, 512, 1000, PAGE, PAGE + 512, 3 * PAGE])
def test_a_direct_read_that_falls_short_is_gone_on_with_and_is_no_refusal(
    path: str, calls: Calls, caplog: pytest.LogCaptureFixture, at_most: int
) -> None:
    real, data = calls.preadv, made(path)
    calls.preadv = lambda fd, parts, at: min(real(fd, parts, at), at_most)
    assert read(reading(path), 700, 20 * PAGE) == data[700 : 700 + 20 * PAGE]
    assert not caplog.records


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("left", [0, 5, PAGE, 7 * PAGE + 3])
def test_of_a_file_that_is_cut_off_there_is_what_is_left(path: str, left: int) -> None:
    data = made(path)
    file = reading(path)
    os.truncate(path, left)
    assert read(file, 3, NBYTES - 3) == data[3:left]
    assert read(file, 8 * PAGE, PAGE) == b""


# --- refused, or not possible ------------------------------------------------------------------


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT])
def test_a_file_system_that_refuses_is_read_through_the_page_cache_and_that_is_said_once(
    path: str, calls: Calls, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    calls.preadv = fail(code)
    storage = LocalStorage(direct_reads=True)
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        for name in "ab":
            data = made(path + name)
            file = storage.open(path + name)
            assert read(file, 1, NBYTES) == read(file, 1, NBYTES) == data[1:]
    assert calls.num_reads == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}a takes no direct I/O ({os.strerror(code)}): going through the page cache"
    ]


@pytest.mark.usefixtures("_always")
def test_threads_that_are_refused_at_the_same_time_say_so_once(
    path: str, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    data = made(path)
    file = reading(path)
    both = threading.Barrier(2, timeout=60)

    def refuse(*_: object) -> int:
        both.wait()
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    calls.preadv = refuse
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda at: read(file, at, 9), [1, 2], timeout=60)) == [
            data[1:10],
            data[2:11],
        ]
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ELOOP, errno.ENXIO, errno.EACCES])
def test_a_file_that_cannot_be_opened_once_more_is_one_read_and_no_refusal(
    path: str, calls: Calls, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    data = made(path)
    file = reading(path)
    calls.opening = code
    assert read(file, 5, NBYTES) == data[5:]
    assert calls.num_reads == 0
    calls.opening = None
    assert read(file, 5, NBYTES) == data[5:]
    assert calls.num_reads == 1
    assert not caplog.records


@pytest.mark.usefixtures("_always")
def test_no_descriptor_is_left_where_the_system_does_not_say_which_file_it_is(
    path: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = made(path)
    file = reading(path)
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail(errno.ESTALE))
        assert read(file, 5, NBYTES) == data[5:]
    assert calls.num_reads == 0
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.usefixtures("_always")
def test_a_disk_that_fails_fails_the_read(path: str, calls: Calls) -> None:
    made(path)
    calls.preadv = fail(errno.EIO)
    with pytest.raises(StorageError, match=r"EIO.*check the disk"):
        read(reading(path), 0, NBYTES)


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("instead", ["nothing", "another file", "a pipe"])
def test_a_file_whose_name_has_gone_is_read_all_the_same(
    path: str, caplog: pytest.LogCaptureFixture, instead: str
) -> None:
    data = made(path)
    file = reading(path)
    os.unlink(path)
    if instead == "another file":
        Path(path).write_bytes(bytes(NBYTES))
    elif instead == "a pipe":
        os.mkfifo(path)
    assert read(file, 5, NBYTES) == data[5:]
    file.close()
    assert not caplog.records or instead == "a pipe"  # which takes no direct I/O


@pytest.mark.usefixtures("_always")
def test_a_file_that_is_read_directly_keeps_no_more_descriptors_than_another(path: str) -> None:
    made(path)
    before = os.listdir("/proc/self/fd")
    file = reading(path)
    read(file, 0, NBYTES)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    file.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    with pytest.raises(StorageError, match="closed"):
        read(file, 0, NBYTES)


# --- when it is done ---------------------------------------------------------------------------


@pytest.mark.usefixtures("_can_tell")
def test_what_the_page_cache_does_not_hold_is_read_past_it(path: str, calls: Calls) -> None:
    data = made(path, MIN_NBYTES)
    cool(path)
    for start in range(0, MIN_NBYTES, MIN_READ_NBYTES):
        assert read(reading(path), start, MIN_READ_NBYTES) == data[start:][:MIN_READ_NBYTES]
    assert calls.num_reads == MIN_NBYTES // MIN_READ_NBYTES
    assert cached_pages(path) == 0


@pytest.mark.usefixtures("_can_tell")
def test_what_the_page_cache_holds_does_not_come_from_the_disk_again(
    path: str, calls: Calls
) -> None:
    data = made(path, MIN_NBYTES)
    assert read(reading(path), 1, MIN_NBYTES - 1) == data[1:]
    assert calls.num_reads == 0


@pytest.mark.usefixtures("_can_tell")
def test_of_what_the_page_cache_holds_in_part_it_gets_no_more(path: str, calls: Calls) -> None:
    data = made(path, MIN_NBYTES)
    cool(path)
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # and reads no more than that
        os.pread(file.fileno(), 40 * PAGE, PAGE)
    before = cached_pages(path)
    assert 0 < before < MIN_NBYTES // PAGE
    assert read(reading(path), 0, MIN_NBYTES) == data
    assert calls.num_reads > 0
    assert cached_pages(path) == before


def test_small_reads_and_small_files_are_left_to_the_page_cache(path: str, calls: Calls) -> None:
    for nbytes, asked in ((MIN_NBYTES, MIN_READ_NBYTES - 1), (MIN_NBYTES - 1, MIN_NBYTES - 1)):
        data = made(path, nbytes)
        cool(path)
        assert read(reading(path), 0, asked) == data[:asked]
    assert calls.num_reads == 0


def test_who_did_not_ask_for_direct_reads_gets_none(path: str, calls: Calls) -> None:
    data = made(path, MIN_NBYTES)
    cool(path)
    assert read(LocalStorage().open(path), 0, MIN_NBYTES) == data
    assert calls.num_reads == 0


def test_where_nobody_can_tell_what_it_holds_the_page_cache_is_read(
    path: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_CACHESTAT", 100_000)  # as before Linux 6.5
    data = made(path, MIN_NBYTES)
    cool(path)
    assert read(reading(path), 0, MIN_NBYTES) == data
    assert calls.num_reads == 0


@pytest.mark.usefixtures("_can_tell")
@pytest.mark.parametrize(
    ("read_once", "check_first", "is_direct"),
    [("host", False, True), ("job", False, True), ("off", False, False), ("host", True, False)],
)
def test_a_load_leaves_the_page_cache_alone_unless_it_reads_twice_or_each_rank_for_itself(
    path: str,
    calls: Calls,
    read_once: Literal["host", "job", "off"],
    *,
    check_first: bool,
    is_direct: bool,
) -> None:
    saved = torch.arange(2 << 20, dtype=torch.float32)
    dc.save({"model": {"w": saved}}, f"{path}.ckpt")
    (file,) = Path(f"{path}.ckpt").rglob("*.safetensors")
    cool(str(file))
    into = torch.zeros_like(saved)
    dc.load({"model": {"w": into}}, f"{path}.ckpt", read_once=read_once, check_first=check_first)
    assert torch.equal(into, saved)
    assert bool(calls.num_reads) == is_direct
    assert is_cached(str(file), file.stat().st_size - (4 << 20), file.stat().st_size) != is_direct


@pytest.mark.usefixtures("_can_tell")
def test_verifying_leaves_the_page_cache_alone(path: str, calls: Calls) -> None:
    dc.save({"model": {"w": torch.ones(2 << 20)}}, f"{path}.ckpt")
    (file,) = Path(f"{path}.ckpt").rglob("*.safetensors")
    cool(str(file))
    assert dc.verify(f"{path}.ckpt").ok
    assert calls.num_reads
    assert not is_cached(str(file), file.stat().st_size - (4 << 20), file.stat().st_size)
