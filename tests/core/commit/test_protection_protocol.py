"""Leases, pins and tags are refused while the outcome of a removal is unknown."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dist_ckpt.core.commit import removal
from dist_ckpt.core.commit.attempts import list_attempts
from dist_ckpt.core.commit.records import protection_protocol
from dist_ckpt.core.commit.records.leases import Lease
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef, remove_if_unprotected
from dist_ckpt.core.commit.records.protections import DELETION_INTENT_S, CheckpointKey
from dist_ckpt.core.storage import Storage, storage_wrappers
from dist_ckpt.core.storage.storage_wrappers import DeadlineStorage
from dist_ckpt.errors import NotFoundError, StorageError
from dist_ckpt.runs.prune import delete_at, finish_removals
from dist_ckpt.testing.memory_storage import MemoryStorage
from run_folders import ROOT, committed, put

# What only a hang meets.
HANG_S = 60.0


class Mount(MemoryStorage):
    """A network mount: the rename of a checkpoint does what `answer` does, before it is done."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__({ROOT: None}, clock=clock)
        self.answer: Callable[[], None] = lambda: None
        self.is_renaming, self.intents = threading.Event(), threading.Semaphore(0)

    def rename(self, source: str, target: str) -> None:
        if ".trash-" in target:
            self.is_renaming.set()
            self.answer()
        super().rename(source, target)
        if "/mark-" in target:
            self.intents.release()


class Impatient(DeadlineStorage):
    """Waits for the rename of a checkpoint for a moment, and for all else as long as it takes."""

    def make_call(self, label: str, *args: Any, **options: Any) -> Any:
        self._stall_s = 0.05 if label.startswith(f"rename {ROOT}/step-1/") else HANG_S
        return super().make_call(label, *args, **options)


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def mount(clock: Clock) -> Mount:
    return Mount(clock)


@pytest.fixture
def where(mount: Mount) -> CheckpointKey:
    where = committed(mount, 1)
    put(mount, where, "metrics", {"loss": 0.5})  # a root without annotations has no intents
    return where


@pytest.fixture
def thawed() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def subject(storage: Storage, where: CheckpointKey) -> CheckpointRef:
    return CheckpointRef(storage, ROOT, f"{ROOT}/step-1", where)


def remove_on(storage: Storage, where: CheckpointKey) -> None:
    one = subject(storage, where)
    remove_if_unprotected(one, lambda: removal.remove(storage, one.path, where[1]))


def delete_on(storage: Storage, _: CheckpointKey) -> None:
    delete_at(storage, f"{ROOT}/step-1", force=False)


def answer_late(thawed: threading.Event, error: BaseException | None = None) -> None:
    assert thawed.wait(HANG_S)
    if error is not None:
        raise error


def join_the_removal() -> None:
    for thread in threading.enumerate():
        if thread.name == "dist_ckpt removal":
            thread.join(HANG_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("act", [remove_on, delete_on])
def test_what_a_late_rename_may_still_remove_is_not_leased(
    act: Callable[[Storage, CheckpointKey], None],
    mount: Mount,
    where: CheckpointKey,
    thawed: threading.Event,
) -> None:
    mount.answer = partial(answer_late, thawed)
    with pytest.raises(StorageError, match="did not answer"):
        act(Impatient(mount), where)
    with pytest.raises(NotFoundError, match="is about to be removed by process"):
        Lease(subject(mount, where), 60.0).take()
    thawed.set()
    join_the_removal()
    assert list_attempts(mount, f"{ROOT}/step-1") == []
    with pytest.raises(NotFoundError, match=r"is about to be removed|was removed"):
        Lease(subject(mount, where), 60.0).take()
    finish_removals(mount, ROOT, subject(mount, where).annotations())
    assert subject(mount, where).annotations() == ()


def test_what_a_late_rename_did_not_remove_can_be_leased_again(
    mount: Mount, where: CheckpointKey, thawed: threading.Event
) -> None:
    mount.answer = partial(answer_late, thawed, StorageError("permission denied"))
    with pytest.raises(StorageError, match="did not answer"):
        remove_on(Impatient(mount), where)
    thawed.set()
    join_the_removal()
    Lease(subject(mount, where), 60.0).take()


def test_an_intent_does_not_expire_while_its_rename_has_no_answer(
    mount: Mount,
    where: CheckpointKey,
    thawed: threading.Event,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protection_protocol, "monotonic", lambda: 0.0)
    monkeypatch.setattr(protection_protocol, "DELETION_INTENT_S", 0.04)
    mount.answer = partial(answer_late, thawed)
    with pytest.raises(StorageError, match="did not answer"):
        remove_on(Impatient(mount), where)
    clock.now += DELETION_INTENT_S + 1
    # The next intent may have been written before the clock was moved; the one after it was not.
    for _ in range(mount.intents._value + 2):
        assert mount.intents.acquire(timeout=HANG_S)
    with pytest.raises(NotFoundError, match="is about to be removed by process"):
        Lease(subject(mount, where), 60.0).take()
    thawed.set()
    join_the_removal()


def os_error(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise StorageError("the storage says no") from OSError(code, "no")

    return fail


@pytest.mark.parametrize(
    ("code", "is_known"),
    [(errno.EACCES, True), (errno.ENOSPC, True), (errno.EIO, False), (errno.ETIMEDOUT, False)],
)
def test_an_intent_is_withdrawn_only_after_an_answer(
    code: int, is_known: bool, mount: Mount, where: CheckpointKey, clock: Clock
) -> None:
    mount.answer = os_error(code)
    with pytest.raises(StorageError, match="says no"):
        remove_on(mount, where)
    lease = Lease(subject(mount, where), 60.0)
    if not is_known:
        with pytest.raises(NotFoundError, match="is about to be removed"):
            lease.take()
        clock.now += DELETION_INTENT_S + 1
    lease.take()


def test_an_error_of_a_storage_without_a_cause_is_no_answer(
    mount: Mount, where: CheckpointKey
) -> None:
    mount.answer = partial(answer_late, (event := threading.Event()), StorageError("no connection"))
    event.set()
    with pytest.raises(StorageError, match="no connection"):
        remove_on(mount, where)
    with pytest.raises(NotFoundError, match="is about to be removed"):
        Lease(subject(mount, where), 60.0).take()


@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupted_removal_leaves_its_intent_while_its_rename_has_no_answer(
    is_late: bool,
    mount: Mount,
    where: CheckpointKey,
    thawed: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_wrappers, "GRACE_S", 0.05 if is_late else HANG_S)

    is_interrupted = threading.Event()

    def interrupt() -> None:
        assert mount.is_renaming.wait(HANG_S)
        while not is_interrupted.wait(0.1):  # a signal before a wait begins does not end it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def be_interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        is_interrupted.set()
        raise KeyboardInterrupt

    def answer() -> None:
        if is_late:
            answer_late(thawed)
        else:
            interrupted.join(HANG_S)
            raise PermissionError("not yours")

    mount.answer = answer
    interrupted = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, be_interrupted)
    try:
        interrupted.start()
        with pytest.raises(KeyboardInterrupt):
            remove_on(DeadlineStorage(mount), where)
    finally:
        signal.signal(signal.SIGINT, before)
    lease = Lease(subject(mount, where), 60.0)
    if not is_late:
        lease.take()
        return
    with pytest.raises(NotFoundError, match="is about to be removed"):
        lease.take()
    thawed.set()
    join_the_removal()
    assert list_attempts(mount, f"{ROOT}/step-1") == []
