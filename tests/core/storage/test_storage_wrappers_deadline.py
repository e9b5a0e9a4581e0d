"""Storage that hangs is an error after a while, whichever call hangs, and keeps nobody waiting."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from dist_ckpt import settings
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.storage_wrappers import DeadlineStorage
from dist_ckpt.errors import StorageError
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.storage_contract import StorageContract, write

HASTY_S = 0.05


class TestDeadlineStorage(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return DeadlineStorage(MemoryStorage({"/root": None}), stall_s=30)

    @pytest.fixture
    def root(self) -> str:
        return "/root"


class Hanging:
    """Stands before a storage or a file: the call named `hung` ends when `thawed` is set.

    Of what it hands out the calls `released` are recorded.
    """

    def __init__(self, inner: Any, hung: str, thawed: threading.Event) -> None:
        self.inner = inner
        self.hung = hung
        self.thawed = thawed
        self.released: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            if name in ("discard", "close"):
                self.released.append(name)
            if name == self.hung:
                assert self.thawed.wait(10)
            value = found(*args, **options)
            if name in ("create", "open"):
                value = Hanging(value, self.hung, self.thawed)
                value.released = self.released
            return value

        return call


@pytest.fixture
def thawed() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def hanging(hung: str, thawed: threading.Event) -> tuple[DeadlineStorage, Hanging]:
    inner = Hanging(MemoryStorage({"/d": None, "/d/f": b"abc"}), hung, thawed)
    return DeadlineStorage(inner, HASTY_S), inner


CALLS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "list": ("list /d", lambda storage: storage.list("/d")),
    "make_folder": ("make_folder /d/e", lambda storage: storage.make_folder("/d/e")),
    "create": ("create /d/g", lambda storage: storage.create("/d/g", 1)),
    "open": ("open /d/f", lambda storage: storage.open("/d/f")),
    "rename": ("rename /d/f to /d/g", lambda storage: storage.rename("/d/f", "/d/g")),
    "remove": ("remove /d/f", lambda storage: storage.remove("/d/f")),
    "sync": ("sync /d", lambda storage: storage.sync("/d")),
    "write_at": ("write_at /d/g", lambda storage: storage.create("/d/g", 1).write_at(0, b"1")),
    "finish": ("finish /d/g", lambda storage: storage.create("/d/g", 0).finish()),
    "read_into": (
        "read_into /d/f",
        lambda storage: storage.open("/d/f").read_into(0, memoryview(bytearray(1))),
    ),
}


@pytest.mark.parametrize("hung", CALLS)
def test_whichever_call_hangs_is_told_with_its_path(hung, thawed):
    what, call = CALLS[hung]
    with pytest.raises(StorageError, match=rf"^{what}: the storage did not answer for 0\.05"):
        call(hanging(hung, thawed)[0])


def test_the_error_of_a_call_that_hangs_goes_to_another_process(thawed):
    with pytest.raises(StorageError) as caught:
        CALLS["list"][1](hanging("list", thawed)[0])
    caught.value.rank = 2
    copied = copy.deepcopy(caught.value)  # as pickle makes it
    assert (type(copied), str(copied), copied.rank) == (StorageError, str(caught.value), 2)


@pytest.mark.parametrize(("hung", "closing"), [("create", "discard"), ("open", "close")])
def test_a_file_that_comes_too_late_is_released(hung, closing, thawed):
    storage, inner = hanging(hung, thawed)
    with pytest.raises(StorageError, match="did not answer"):
        CALLS[hung][1](storage)
    assert inner.released == []
    thawed.set()
    wait_until(lambda: inner.released == [closing])


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never came")


@pytest.mark.parametrize("hung", ["discard", "close"])
def test_nobody_waits_long_for_a_file_to_close(hung, thawed):
    storage, inner = hanging(hung, thawed)
    file: Any = storage.create("/d/g", 0) if hung == "discard" else storage.open("/d/f")
    getattr(file, hung)()
    assert inner.released == [hung]


def test_bytes_that_are_to_be_moved_get_more_time():
    assert settings.stall_timeout_s(0) == settings.STALL_TIMEOUT_S
    assert (
        settings.stall_timeout_s(600 * settings.SLOWEST_NBYTES_PER_S)
        == settings.STALL_TIMEOUT_S + 600
    )


def test_a_finish_gets_more_time_for_all_that_was_written(thawed):
    storage, _ = hanging("finish", thawed)
    storage.create("/d/large", 30 * settings.SLOWEST_NBYTES_PER_S)
    file = storage.create("/d/small", 0)
    threading.Timer(4 * HASTY_S, thawed.set).start()
    assert file.finish() == 0


def test_an_error_of_the_storages_own_comes_through():
    class Late(MemoryStorage):
        def sync(self, folder: str) -> None:
            raise TimeoutError(folder)

    storage = DeadlineStorage(Late(), HASTY_S)
    with pytest.raises(FileNotFoundError):
        storage.open("/f")
    with pytest.raises(TimeoutError, match="/d"):
        storage.sync("/d")


def test_an_error_keeps_nothing_alive_that_its_callers_have():
    class State:
        pass

    storage = DeadlineStorage(MemoryStorage({"/root": None}))

    def look() -> weakref.ref[State]:
        state = State()
        with suppress(FileNotFoundError):
            storage.open("/root/none")
        return weakref.ref(state)

    gc.collect()
    gc.disable()
    try:
        seen = [look() for _ in range(3)]
        assert seen[0]() is None
        assert seen[1]() is None
    finally:
        gc.enable()


def test_an_interrupt_is_raised_once_the_call_that_it_has_met_has_ended():
    ended: list[str] = []

    class Interrupting(MemoryStorage):
        def sync(self, folder: str) -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            threading.Event().wait(0.2)  # long enough for the interrupt to arrive
            ended.append(folder)

    with pytest.raises(KeyboardInterrupt):
        DeadlineStorage(Interrupting(), 30).sync("/d")
    assert ended == ["/d"]


def test_calls_share_a_few_threads_and_those_that_hang_end_in_number(monkeypatch, thawed):
    monkeypatch.setattr("dist_ckpt.core.storage.storage_wrappers.MAX_CALLS", 2)
    seen = set()

    class Noting(MemoryStorage):
        def list(self, folder: str, **options: Any) -> Any:
            seen.add(threading.get_ident())
            return super().list(folder, **options)

        def sync(self, folder: str) -> None:
            assert thawed.wait(10)

    storage = DeadlineStorage(Noting(), HASTY_S)
    for _ in range(100):
        storage.list("/")
    assert len(seen) < 20
    for call in (storage.sync, storage.sync, storage.list):
        with pytest.raises(StorageError, match="did not answer"):
            call("/")
    thawed.set()
    wait_until(lambda: storage.list("/") == [])


def test_the_storage_that_a_path_lies_on_has_deadlines(tmp_path):
    storage, path = open_storage(tmp_path)
    assert isinstance(storage, DeadlineStorage)
    write(storage, f"{path}/f", b"1")
    assert (tmp_path / "f").read_bytes() == b"1"


STUCK = """
import sys, threading
from dist_ckpt.errors import StorageError
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.storage.storage_wrappers import DeadlineStorage
from dist_ckpt.testing.memory_storage import MemoryStorage

class Dead(MemoryStorage):
    def sync(self, folder):
        threading.Event().wait(300)

call = {
    "storage": lambda: DeadlineStorage(Dead(), 0.05).sync("/d"),
    "each": lambda: parallel_for(Dead().sync, ["/d"], threads=1, stall_s=0.05),
}[sys.argv[1]]
try:
    call()
except StorageError as error:
    print("told")
"""


def run_python(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], timeout=60, check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.mark.multi_process
@pytest.mark.parametrize("who", ["storage", "each"])
def test_a_call_that_hangs_keeps_no_process_from_exiting(who):
    assert run_python(STUCK, who) == "told\n"


FORKING = """
import os
from dist_ckpt.core.storage.storage_wrappers import DeadlineStorage
from dist_ckpt.testing.memory_storage import MemoryStorage

storage = DeadlineStorage(MemoryStorage({"/d": None}), 10)
storage.list("/d")
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
storage.list("/d")
"""


@pytest.mark.multi_process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own():
    run_python(FORKING)


@pytest.mark.parametrize("hung", CALLS)
def test_a_call_in_a_watched_thread_is_made_there_and_told_all_the_same(hung, thawed):
    what, call = CALLS[hung]
    storage, _ = hanging(hung, thawed)
    with pytest.raises(StorageError, match=rf"^{what}: the storage did not answer for 0\.05"):
        parallel_for(lambda _: call(storage), range(1), threads=1)


def test_a_watched_thread_makes_its_calls_itself():
    threads = set()

    class Noting(MemoryStorage):
        def list(self, folder: str, **options: Any) -> Any:
            threads.add(threading.get_ident())
            return super().list(folder, **options)

    storage = DeadlineStorage(Noting(), 30)

    def work(_: int) -> int:
        storage.list("/")
        return threading.get_ident()

    assert threads == set()
    assert set(parallel_for(work, range(8), threads=2)) == threads


@pytest.mark.parametrize(("hung", "closing"), [("create", "discard"), ("open", "close")])
def test_a_file_that_comes_too_late_to_a_watched_thread_is_released(hung, closing, thawed):
    storage, inner = hanging(hung, thawed)
    went_on = threading.Event()

    def work(_: int) -> None:
        CALLS[hung][1](storage)
        went_on.set()

    with pytest.raises(StorageError, match="did not answer"):
        parallel_for(work, range(1), threads=1)
    assert inner.released == []
    thawed.set()
    wait_until(lambda: inner.released == [closing])
    assert not went_on.is_set()


def test_of_several_calls_that_hang_each_is_left_after_its_deadline(thawed):
    storage, _ = hanging("list", thawed)
    with pytest.raises(StorageError, match=r"^list /d: the storage did not answer"):
        parallel_for(lambda _: storage.list("/d"), range(9), threads=3)
