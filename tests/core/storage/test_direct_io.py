"""Direct I/O is only a faster way to the same bytes: refused, cut short or misaligned, they are."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.runtime.host_memory import address_of, allocate_scratch
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local import direct_io
from dist_ckpt.core.storage.local.direct_io import Alignment, alignment_of
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import StorageError
from dist_ckpt.testing.storage_contract import StorageContract

PAGE = 4096


@pytest.fixture(autouse=True)
def _small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "MIN_NBYTES", 1)


class Calls:
    """The system's calls on descriptors for direct I/O; a test sets what `pwrite` does there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct: set[int] = set()
        self.num_writes = 0
        self.pwrite: Callable[..., int] = os.pwrite
        real_open, real_pwrite = os.open, os.pwrite

        def open_(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
            fd = real_open(path, flags, *args, **kwargs)
            (self.direct.add if flags & os.O_DIRECT else self.direct.discard)(fd)
            return fd

        def pwrite(fd: int, data: memoryview, offset: int) -> int:
            if fd not in self.direct:
                return real_pwrite(fd, data, offset)
            self.num_writes += 1
            return self.pwrite(fd, data, offset)

        self.pwrite = real_pwrite
        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def placed(data: bytes, remainder: int) -> memoryview:
    """Return data in memory that begins so many bytes after a page."""
    view = allocate_scratch(len(data) + PAGE)[remainder : remainder + len(data)]
    view[:] = data
    assert address_of(view) % PAGE == remainder % PAGE
    return view


def write(storage: Storage, path: str, data: bytes, cuts: list[int]) -> int:
    """Write data in these parts, each in memory as the file wants it."""
    file = storage.create(path, len(data))
    for start, stop in pairwise([0, *cuts, len(data)]):
        if start < stop:
            file.write_at(start, placed(data[start:stop], start % file.alignment))
    return file.finish()


def some(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


# --- the same bytes ----------------------------------------------------------------------------


@pytest.mark.usefixtures("path")
class TestDirectLocalStorage(StorageContract):
    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)

    @pytest.fixture
    def storage(self) -> Storage:
        return LocalStorage()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_sizes_places_and_memory_the_file_holds_what_was_written(
    path: str, calls: Calls, seed: int
) -> None:
    rng = random.Random(seed)
    data = some(rng.randrange(1, 400_000))
    near = [n + d for n in range(0, len(data), PAGE) for d in (-1, 0, 1, 512)]
    choices = [n for n in near if 0 < n < len(data)] or [0]
    cuts = sorted({*rng.choices(choices, k=6), rng.randrange(len(data))})
    file = LocalStorage().create(path, len(data))
    parts = [(a, b) for a, b in pairwise([0, *cuts, len(data)]) if a < b]
    rng.shuffle(parts)

    def write_part(part: tuple[int, int]) -> None:
        start, stop = part
        remainder = rng.choice([start, start, 0, 512, 1]) % PAGE
        file.write_at(start, placed(data[start:stop], remainder))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_part, parts, timeout=30))
    assert file.finish() == len(data)
    assert Path(path).read_bytes() == data


def test_what_lies_as_the_file_wants_it_goes_directly_but_for_the_ends(
    path: str, calls: Calls
) -> None:
    data = some(10 * PAGE + 77)
    sizes: list[int] = []
    real = calls.pwrite

    def noting(fd, part, offset):
        sizes.append(len(part))
        return real(fd, part, offset)

    calls.pwrite = noting
    write(LocalStorage(), path, data, [100])
    assert Path(path).read_bytes() == data
    assert sizes == [9 * PAGE]


def test_memory_that_cannot_be_written_goes_through_the_page_cache(path: str, calls: Calls) -> None:
    data = some(5 * PAGE)
    file = LocalStorage().create(path, len(data))
    file.write_at(0, data)
    assert file.finish() == len(data)
    assert Path(path).read_bytes() == data
    assert calls.num_writes == 0


@given(
    st.sampled_from([1, 4, 512, 4096]),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
    st.integers(0, 50_000),
)
def test_what_goes_directly_is_all_the_whole_blocks_of_memory_that_lies_right(
    memory: int, address: int, offset: int, nbytes: int
) -> None:
    inner = Alignment(memory, PAGE).inner(address, offset, nbytes)
    blocks = [n for n in range(0, offset + nbytes, PAGE) if offset <= n <= offset + nbytes - PAGE]
    if not blocks or (address - offset) % memory:
        assert inner == ByteRange(0, 0)
    else:
        assert (inner.start, inner.stop) == (blocks[0] - offset, blocks[-1] + PAGE - offset)
        assert (address + inner.start) % memory == 0


def test_a_file_that_was_not_written_to_the_end_is_as_long_as_what_was(path: str) -> None:
    file = LocalStorage().create(path, 9 * PAGE)
    file.write_at(0, placed(some(PAGE + 5), 0))
    assert file.finish() == PAGE + 5
    assert Path(path).read_bytes() == some(PAGE + 5)


@pytest.mark.parametrize("end", ["finish", "discard"])
def test_both_descriptors_are_closed_at_the_end(path: str, end: str) -> None:
    before = os.listdir("/dev/fd")
    file = LocalStorage().create(path, 4 * PAGE)
    assert len(os.listdir("/dev/fd")) == len(before) + 2
    file.write_at(0, placed(some(2 * PAGE), 0))
    getattr(file, end)()
    file.discard()
    assert os.listdir("/dev/fd") == before
    with pytest.raises(StorageError, match="is closed"):
        file.write_at(0, placed(some(2 * PAGE), 0))


# --- refusals ----------------------------------------------------------------------------------


def test_a_file_system_that_refuses_to_open_is_written_through_the_page_cache_and_that_is_said_once(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    storage = LocalStorage()
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        for name in "ab":
            data = some(3 * PAGE)
            assert write(storage, path + name, data, [PAGE + 1]) == len(data)
            assert Path(path + name).read_bytes() == data
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}a takes no direct I/O (Invalid argument): going through the page cache"
    ]


def test_a_file_system_that_refuses_the_first_write_is_written_through_the_page_cache_from_then_on(
    path: str, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    calls.pwrite = refuse
    storage = LocalStorage()
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        for name in "ab":
            data = some(9 * PAGE + 9)
            assert write(storage, path + name, data, [3 * PAGE + 1, 6 * PAGE]) == len(data)
            assert Path(path + name).read_bytes() == data
    assert calls.num_writes == 1
    assert ["takes no direct I/O" in record.getMessage() for record in caplog.records] == [True]
    assert storage.create(f"{path}c", 9 * PAGE).alignment == 1


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ELOOP, errno.ENXIO, errno.EACCES])
def test_a_file_that_cannot_be_opened_twice_is_one_file_and_no_refusal(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    real = os.open

    def fail(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT and path.endswith("a"):
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    storage = LocalStorage()
    data = some(9 * PAGE + 9)
    assert write(storage, f"{path}a", data, []) == len(data)
    assert Path(f"{path}a").read_bytes() == data
    assert not caplog.records
    assert storage.create(f"{path}b", 9 * PAGE).alignment > 1


def test_memory_that_the_disk_cannot_read_is_written_through_the_page_cache(
    path: str, calls: Calls
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    calls.pwrite = refuse
    data = some(9 * PAGE)
    assert write(LocalStorage(), path, data, []) == len(data)
    assert Path(path).read_bytes() == data


@pytest.mark.parametrize("at_most", [1, 512, 1000, PAGE, PAGE + 512, 3 * PAGE])
def test_a_direct_write_that_falls_short_is_gone_on_with_and_is_no_refusal(
    path: str, calls: Calls, caplog: pytest.LogCaptureFixture, at_most: int
) -> None:
    real = calls.pwrite

    def short(fd: int, part: memoryview, offset: int) -> int:
        real(fd, part[: -(-at_most // PAGE) * PAGE], offset)
        return at_most

    calls.pwrite = short
    data = some(20 * PAGE + 3)
    assert write(LocalStorage(), path, data, [7 * PAGE + 5]) == len(data)
    assert Path(path).read_bytes() == data
    assert not caplog.records


def test_a_disk_that_is_full_fails_the_write_and_says_what_to_do(path: str, calls: Calls) -> None:
    real = calls.pwrite

    def full(fd: int, part: memoryview, offset: int) -> int:
        if offset >= 4 * PAGE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, part, offset)

    calls.pwrite = full
    file = LocalStorage().create(path, 8 * PAGE)
    file.write_at(0, placed(some(4 * PAGE), 0))
    with pytest.raises(StorageError, match=r"ENOSPC.*free space"):
        file.write_at(4 * PAGE, placed(some(4 * PAGE), 0))
    file.discard()


def test_another_file_under_the_same_name_is_not_written_directly(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def replace(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            os.unlink(path)
            Path(path).write_bytes(b"another's")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", replace)
    data = some(4 * PAGE)
    assert write(LocalStorage(), path, data, []) == len(data)
    assert Path(path).read_bytes() == b"another's"


# --- where it is a gain ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "kind", "expected"),
    [
        ((512, 512), 0, Alignment(512, PAGE)),
        ((4, 4096), 0, Alignment(4, PAGE)),
        ((0, 0), 0xEF53, None),  # the file system says that this file takes none
        ((512, 1 << 20), 0, None),
        ((512, 3000), 0, None),
        (None, 0xEF53, Alignment(4096, PAGE)),
        (None, 0x6969, None),  # NFS
    ],
)
def test_the_alignment_is_what_the_system_tells_or_what_is_known_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any, kind: int, expected: Any
) -> None:
    monkeypatch.setattr(direct_io, "_reported_alignment", lambda _: told)
    monkeypatch.setattr(direct_io, "_type_of", lambda _: kind)
    monkeypatch.setattr(direct_io, "PAGESIZE", PAGE)
    with open(tmp_path / "f", "wb") as file:
        if os.fstatvfs(file.fileno()).f_frsize > PAGE:
            pytest.skip("the blocks of this file system are larger")
        assert alignment_of(file.fileno()) == expected


def test_a_file_system_that_tells_nothing_is_asked_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_reported_alignment", lambda _: None)
    monkeypatch.setattr(direct_io, "_type_of", lambda _: 0x6969)  # NFS
    monkeypatch.delattr(os, "fstatvfs")
    with open(tmp_path / "f", "wb") as file:
        assert alignment_of(file.fileno()) is None


@pytest.mark.parametrize("told", [(512, 512), None])
def test_a_file_system_is_asked_once_whatever_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(direct_io, "_reported_alignment", lambda _: told)
    monkeypatch.setattr(direct_io, "_type_of", lambda _: 0x6969)  # NFS
    storage = LocalStorage(direct_reads=True)
    first = storage.create(f"{tmp_path}/a", 9 * PAGE)
    monkeypatch.delattr(direct_io, "_reported_alignment")
    second = storage.create(f"{tmp_path}/b", 9 * PAGE)
    assert (first.alignment > 1) == (told is not None)
    assert second.alignment == first.alignment
    storage.open(f"{tmp_path}/b").close()
    first.discard()
    second.discard()


def test_a_file_system_in_memory_gains_nothing() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is none here")
    path = f"/dev/shm/dist_ckpt-test-{os.getpid()}"
    with open(path, "wb") as file:
        os.unlink(path)
        assert alignment_of(file.fileno()) is None


def test_small_files_are_not_worth_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "MIN_NBYTES", 4 << 20)
    assert LocalStorage().create(path, (4 << 20) - 1).alignment == 1
