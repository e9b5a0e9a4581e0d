"""The transaction: what it commits, what remains after an error, and outcomes that are unknown."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import pytest

from dist_ckpt.core.comm.exchange.channel import (
    Exchange,
    SingleProcessChannel,
    SingleProcessExchange,
)
from dist_ckpt.core.comm.rank_messages import NoAnswerError
from dist_ckpt.core.commit import attempts, commit_protocol
from dist_ckpt.core.commit.transaction import (
    CommitDecision,
    IndexFields,
    RankWriteResult,
    Transaction,
)
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index_json import EncodedCatalog
from dist_ckpt.core.shard_io.write.shard_writer import write_document
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import ExistsError, NotFoundError, StorageError
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from ranks import PATH, save_on_threads, try_save_on_threads

_T = TypeVar("_T")

FIELDS = IndexFields(step=2, metadata={}, saved_by={})


def empty_catalog() -> EncodedCatalog:
    """Return the catalog of a state without tensors."""
    storage = MemoryStorage()
    save_on_threads(storage, [{}])
    return EncodedCatalog(attempts.find_checkpoint(storage, PATH)[1].catalog)


CATALOG = empty_catalog()


def write_to(storage: Storage) -> Callable[[str], RankWriteResult]:
    """Return a function that writes the files of the only rank."""

    def write(folder: str) -> RankWriteResult:
        return RankWriteResult((write_document(storage, folder, "objects.msgpack", b"1"),), (), 1.0)

    return write


def committed(storage: Storage, *, overwrite: bool = False) -> CommitDecision:
    with Transaction(SingleProcessChannel()) as transaction:
        transaction.claim(storage, PATH, overwrite=overwrite)
        decision = transaction.write_and_commit(CATALOG, FIELDS, write_to(storage))
        transaction.remove_superseded()
    return decision


class Interrupt(BaseException):
    pass


def test_a_transaction_commits_an_attempt_and_removes_those_before():
    storage = MemoryStorage()
    first, second = committed(storage), committed(storage, overwrite=True)
    attempt, index = attempts.find_checkpoint(storage, PATH)
    assert first.attempt != second.attempt == attempt.name == index.attempt
    assert index.step == FIELDS.step
    assert index.save == FIELDS.save_id
    assert second == CommitDecision(attempt.name, 1, 1, 0, 1.0)
    assert attempts.list_attempts(storage, PATH) == [attempt]


@pytest.mark.parametrize("error", [RuntimeError("mine"), Interrupt()])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_in_the_block_aborts_the_attempt_and_is_raised_as_it_is(
    error: BaseException, overwrite: bool
):
    storage = MemoryStorage({"/runs": None})
    if overwrite:
        committed(storage)
    before = storage.tree()

    def block() -> None:
        with Transaction(SingleProcessChannel()) as transaction:
            transaction.claim(storage, PATH, overwrite=overwrite)
            write_to(storage)(transaction.folder)
            raise error

    with pytest.raises(type(error)) as raised:
        block()
    assert raised.value is error
    assert storage.tree() == before


def test_a_block_that_ends_without_a_commit_aborts_the_attempt():
    storage = MemoryStorage({"/runs": None})
    with Transaction(SingleProcessChannel()) as transaction:
        transaction.claim(storage, PATH, overwrite=False)
    assert storage.tree() == {"/runs": None}


def test_a_rank_that_has_not_claimed_the_attempt_leaves_it_to_the_coordinator():
    storage = MemoryStorage()
    with Transaction(SingleProcessChannel()) as coordinator:
        attempt = coordinator.claim(storage, PATH, overwrite=False)

        def participant() -> None:
            with Transaction(SingleProcessChannel()) as transaction:
                transaction.set_attempt(storage, PATH, attempt)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            participant()
        coordinator.write_and_commit(CATALOG, FIELDS, write_to(storage))
    assert attempts.find_checkpoint(storage, PATH)[0] == attempt


def test_an_error_after_the_commit_leaves_the_storage_alone():
    storage = FaultyStorage(MemoryStorage())
    calls = 0

    def block() -> None:
        nonlocal calls
        with Transaction(SingleProcessChannel()) as transaction:
            transaction.claim(storage, PATH, overwrite=False)
            transaction.write_and_commit(CATALOG, FIELDS, write_to(storage))
            calls = storage.calls
            raise RuntimeError

    with pytest.raises(RuntimeError):
        block()
    assert storage.calls == calls
    assert attempts.find_checkpoint(storage, PATH)[1].step == FIELDS.step


def test_an_abort_that_fails_is_logged_and_the_first_error_is_raised(
    caplog: pytest.LogCaptureFixture,
):
    disk = MemoryStorage()
    storage = FaultyStorage(disk, fail_at_call=1, sticky=True)

    def block() -> None:
        with Transaction(SingleProcessChannel()) as transaction:
            transaction.set_attempt(storage, PATH, transaction.claim(disk, PATH, overwrite=False))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        block()
    assert "could not be cleaned up" in caplog.text


def test_a_claim_that_is_refused_changes_nothing():
    storage = MemoryStorage()
    committed(storage)
    before = storage.tree()
    with pytest.raises(ExistsError), Transaction(SingleProcessChannel()) as transaction:
        transaction.claim(storage, PATH, overwrite=False)
    assert storage.tree() == before


# --- an index that one process has made ------------------------------------------------------


def test_an_index_is_committed_when_its_files_are_checked_and_the_caller_is_ready():
    storage = MemoryStorage()
    committed(storage)
    _, index = attempts.find_checkpoint(storage, PATH)
    seen: list[list[Attempt]] = []
    with Transaction(SingleProcessChannel(), label="copy") as transaction:
        attempt = transaction.claim(storage, "/runs/copy", overwrite=False)
        copy = replace(index, attempt=attempt.name)

        def before() -> None:
            with suppress(NotFoundError):
                seen.append([attempts.find_checkpoint(storage, "/runs/copy")[0]])
            seen.append([])

        with pytest.raises(StorageError, match=r"objects\.msgpack is missing"):
            transaction.commit_index(copy, before=before)
        assert seen == []
        write_document(storage, transaction.folder, "objects.msgpack", b"1")
        decision = transaction.commit_index(copy, seconds=3.0, before=before)
        assert seen == [[]]
    assert decision == CommitDecision(attempt.name, 1, 1, 0, 3.0)
    assert attempts.find_checkpoint(storage, "/runs/copy") == (attempt, copy)
    assert attempts.describe_claimant(storage, "/runs/copy", attempt).startswith("by copy on")


# --- no answer --------------------------------------------------------------------------------


class SilentChannel(SingleProcessChannel):
    """A rank's channel that gives no answer to the exchange in which it writes."""

    rank = 1

    def exchange(self, phase: str) -> Exchange:
        return SilentExchange(phase)


class SilentExchange(SingleProcessExchange):
    is_coordinator = False

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        raise NoAnswerError("nobody answers") from error


def without_answer(storage: Storage, attempt: Attempt) -> CommitDecision:
    """Commit as a rank that is given no answer."""
    with Transaction(SilentChannel()) as transaction:
        transaction.set_attempt(storage, PATH, attempt)
        return transaction.write_and_commit(CATALOG, FIELDS, lambda _: RankWriteResult((), (), 0.0))


def test_a_rank_without_an_answer_finds_that_the_attempt_is_committed():
    storage = MemoryStorage()
    with Transaction(SingleProcessChannel()) as transaction:
        attempt = transaction.claim(storage, PATH, overwrite=False)
        decision = transaction.write_and_commit(CATALOG, FIELDS, write_to(storage))
        found = without_answer_after_the_claim(storage, attempt)
    assert found == replace_rank(decision, 1)


def without_answer_after_the_claim(storage: Storage, attempt: Attempt) -> CommitDecision:
    """Do so where the rank has seen the claim before the commit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_protocol, "await_claim", lambda *_: None)
        return without_answer(storage, attempt)


def replace_rank(decision: CommitDecision, rank: int) -> CommitDecision:
    return CommitDecision(decision.attempt, decision.nbytes, decision.num_files, rank, 0.0)


def test_a_rank_without_an_answer_aborts_an_attempt_that_is_not_committed():
    storage = MemoryStorage()
    attempt = commit_protocol.claim(storage, PATH, overwrite=False, by="rank 0").attempt
    with pytest.raises(NoAnswerError, match="nobody answers"):
        without_answer(storage, attempt)
    assert [one.state for one in attempts.list_statuses(storage, PATH)] == ["abandoned"]


def test_a_rank_without_an_answer_or_a_storage_says_that_it_does_not_know():
    disk = MemoryStorage()
    attempt = commit_protocol.claim(disk, PATH, overwrite=False, by="rank 0").attempt
    storage = FaultyStorage(disk, fail_at_call=2, sticky=True)
    with pytest.raises(StorageError, match="the outcome of this save is unknown"):
        without_answer(storage, attempt)
    assert [one.state for one in attempts.list_statuses(disk, PATH)] == ["open"]


# --- an interrupt of the commit ----------------------------------------------------------------


class InterruptedStorage(FaultyStorage):
    """Interrupts the first sync after the index is in place; from then on `fails` tells what does.

    The index is that of a commit: it is renamed once.
    """

    def __init__(
        self, inner: Storage, interrupt: type[BaseException], fails: Callable[[str], bool]
    ) -> None:
        super().__init__(inner)
        self._interrupt, self._fails = interrupt, fails
        self._is_in_place = self._is_interrupted = False

    def call(self, what: str, act: Callable[[], _T]) -> _T:
        if self._is_interrupted and self._fails(what):
            raise StorageError(f"{what}: a planted fault")
        if self._is_in_place and what.startswith("sync") and not self._is_interrupted:
            self._is_interrupted = True
            raise self._interrupt
        made = act()
        self._is_in_place |= what.startswith("rename") and what.endswith("index.json")
        return made


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    ("fails", "verdict"),
    [
        (lambda what: what.startswith("sync"), "is in place at /runs/ck, but it is unknown"),
        (lambda what: True, "it is unknown whether it is committed at /runs/ck"),
    ],
    ids=["in place", "unknown"],
)
def test_an_interrupt_in_the_commit_is_raised_as_it_is_and_the_others_are_told_the_verdict(
    interrupt: type[BaseException],
    fails: Callable[[str], bool],
    verdict: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "dist_ckpt")
    disk = MemoryStorage()
    own = InterruptedStorage(disk, interrupt, fails)
    coordinator, other = try_save_on_threads(
        lambda rank: disk if rank else own, [{"step": 1, "m": {}}] * 2, step=1
    )
    assert type(coordinator.error) is interrupt
    assert type(other.error) is StorageError
    told = f"the commit was interrupted: {interrupt.__name__}. "
    assert told in str(other.error)
    assert verdict in str(other.error)
    assert any(told in record.message and verdict in record.message for record in caplog.records)
