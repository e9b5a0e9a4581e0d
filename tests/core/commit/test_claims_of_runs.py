"""A start of a run claims by its own numbers, replaces what is orphaned, and gives way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest

from commit_cases import PATH, index_of, save, sizes_of, step_at, with_root, write_rank
from dist_ckpt.core.commit import attempts, commit_protocol, removal
from dist_ckpt.core.commit.records.incarnations import (
    Incarnation,
    begin_incarnation,
    read_history,
    secure_incarnation,
)
from dist_ckpt.core.format.filenames import Attempt, trash_name
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.core.storage.storage_wrappers import ForwardingStorage
from dist_ckpt.errors import CheckpointError, ConflictError, ExistsError, StorageError
from long_mode import sampled_params

T = TypeVar("T")
ROOT = "/runs"
ID = "0123456789abcdef"


def started(storage: Storage, root: str = ROOT, step: int = 0) -> Incarnation:
    """Begin a start that goes on from a step of the one before."""
    newest = read_history(storage, root).newest
    restored = (step, Attempt(1000 * newest or 1, ID))
    return Incarnation(
        root, begin_incarnation(storage, root, restored=restored, why="", by="a job").number
    )


def claimed(
    storage: Storage, run: Incarnation | None, path: str = PATH, *, overwrite: bool = False
) -> commit_protocol.Claim:
    return commit_protocol.claim(storage, path, overwrite=overwrite, by="a test", incarnation=run)


def finish(storage: Storage, claim: commit_protocol.Claim, step: int) -> Attempt:
    """Write, commit and supersede what was claimed."""
    write_rank(storage, claim.folder, step, 0)
    commit_protocol.check_files(storage, claim.folder, sizes_of(step, 1))
    commit_protocol.commit(storage, claim, index_of(claim.attempt, step, 1))
    removal.remove_superseded(storage, claim.path, claim.attempt, claim.incarnation)
    return claim.attempt


def test_attempts_are_numbered_by_start_and_what_is_left_behind_is_replaced() -> None:
    storage = with_root()
    assert save(storage, 1).number == 1
    first = started(storage)
    assert finish(storage, claimed(storage, first), 2).number == 1000
    with pytest.raises(ExistsError, match="a checkpoint of step 2 is here"):
        claimed(storage, first)
    assert finish(storage, claimed(storage, first, overwrite=True), 3).number == 1001
    second = started(storage)
    assert finish(storage, claimed(storage, second), 4).number == 2000
    assert attempts.list_attempts(storage, PATH) == [attempts.find_checkpoint(storage, PATH)[0]]
    with pytest.raises(ExistsError):
        save(storage, 5)
    assert save(storage, 5, overwrite=True).number == 2001


def test_what_is_left_behind_stays_until_its_replacement_is_committed() -> None:
    storage = with_root()
    save(storage, 1)
    claim = claimed(storage, started(storage))
    assert step_at(storage) == 1
    assert attempts.try_abandon(storage, PATH, claim.attempt, by="a test", reason="to see")
    commit_protocol.remove_claimed(storage, claim)
    assert step_at(storage) == 1


@pytest.mark.parametrize("name", [f"a2000-{ID}", trash_name(Attempt(2000, ID))])
def test_what_a_newer_start_has_at_the_path_refuses_a_claim(name: str) -> None:
    storage = with_root()
    run = started(storage)
    storage.make_folder(PATH)
    storage.make_folder(f"{PATH}/{name}")
    with pytest.raises(
        ConflictError,
        match=r"incarnation 2 of this run saves here\. Incarnation 1, this job, saves",
    ):
        claimed(storage, run, overwrite=True)
    assert [entry.name for entry in storage.list(PATH)] == [name]


def test_a_start_has_a_thousand_attempts_at_a_path() -> None:
    storage = with_root()
    run = started(storage)
    storage.make_folder(PATH)
    storage.make_folder(f"{PATH}/{trash_name(Attempt(1998, ID))}")
    claim = claimed(storage, run)
    assert claim.attempt.number == 1999
    assert attempts.try_abandon(storage, PATH, claim.attempt, by="a test", reason="to see")
    with pytest.raises(StorageError, match="incarnation 1 of this run has made 1000 attempts"):
        claimed(storage, run)
    assert claimed(storage, None).attempt.number == 2000  # who records no start goes on


def test_an_older_start_claims_and_commits_nothing() -> None:
    storage = with_root()
    older = started(storage)
    claim = claimed(storage, older)
    write_rank(storage, claim.folder, 1, 0)
    started(storage)
    with pytest.raises(ConflictError, match="incarnation 2 of this run, a job, has taken over"):
        commit_protocol.commit(storage, claim, index_of(claim.attempt, 1, 1))
    assert attempts.try_abandon(storage, PATH, claim.attempt, by="a test", reason="refused")
    before = storage.tree()
    with pytest.raises(ConflictError, match="incarnation 2 of this run, a job, has taken over"):
        claimed(storage, older, f"{ROOT}/another")
    assert storage.tree() == before


def test_an_older_start_leaves_what_its_save_replaces(caplog: pytest.LogCaptureFixture) -> None:
    storage = with_root()
    older = started(storage)
    finish(storage, claimed(storage, older), 1)
    claim = claimed(storage, older, overwrite=True)
    write_rank(storage, claim.folder, 2, 0)
    commit_protocol.commit(storage, claim, index_of(claim.attempt, 2, 1))
    started(storage)
    with caplog.at_level(logging.WARNING):
        removal.remove_superseded(storage, PATH, claim.attempt, older)
    assert len(attempts.list_attempts(storage, PATH)) == 2
    assert "could not be removed yet" in caplog.text
    assert "incarnation 2 of this run, a job, has taken over" in caplog.text


def test_who_cannot_read_the_newest_start_commits_nothing() -> None:
    storage = with_root()
    claim = claimed(storage, started(storage))
    write_rank(storage, claim.folder, 1, 0)
    storage.create(f"{ROOT}/.incarnations/2.json", 0).finish()
    with pytest.raises(CheckpointError, match=r"2\.json"):
        commit_protocol.commit(storage, claim, index_of(claim.attempt, 1, 1))
    assert step_at(storage) is None


def test_what_a_start_went_back_to_is_not_replaced_by_a_late_save() -> None:
    storage = with_root()
    restored = save(storage, 1)
    late = claimed(storage, started(storage))
    write_rank(storage, late.folder, 1, 0)
    run = started(storage)
    secure_incarnation(storage, PATH, restored, run, by="a job")
    with pytest.raises(
        ConflictError, match=f"abandoned by a job: incarnation 2 resumed from {restored}"
    ):
        commit_protocol.commit(
            storage,
            commit_protocol.Claim(PATH, late.attempt, late.folder, "", ()),
            index_of(late.attempt, 1, 1),
        )
    assert attempts.find_checkpoint(storage, PATH)[0] == restored


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_start_is_told_that_what_it_went_back_to_is_replaced(is_gone: bool) -> None:
    storage = with_root()
    restored = save(storage, 1)
    if is_gone:
        removal.delete(storage, PATH)
        found = "nothing"
    else:
        found = finish(storage, claimed(storage, started(storage)), 1).name
    with pytest.raises(ConflictError, match=f"restored, and {found} is the checkpoint there now"):
        secure_incarnation(storage, PATH, restored, started(storage), by="a job")


def test_a_later_save_of_the_same_start_is_as_good_as_the_one_that_was_restored() -> None:
    storage = with_root()
    first = started(storage)
    restored = finish(storage, claimed(storage, first), 1)
    finish(storage, claimed(storage, first, overwrite=True), 1)
    secure_incarnation(storage, PATH, restored, started(storage), by="a job")


# --- a late writer, on real files ------------------------------------------------------------


class Stopping(ForwardingStorage):
    """Calls `stop` before its call of a number."""

    def __init__(self, inner: Storage, number: int, stop: Callable[[], None]) -> None:
        super().__init__(inner)
        self._number, self._stop, self._count = number, stop, count(1)

    def make_call(self, label: str, act: Callable[[], T], **options: object) -> T:
        del label, options
        if next(self._count) == self._number:
            self._stop()
        return act()


class LateWriter(threading.Thread):
    """Saves for a start; stops before its call of a number until it is let go."""

    def __init__(self, run: Incarnation, path: str, number: int) -> None:
        super().__init__(daemon=True)
        self._run, self._path = run, path
        self.stopped, self._goes_on = threading.Event(), threading.Event()
        self._storage = Stopping(LocalStorage(), number, self._wait)
        self.told = "nothing"

    def _wait(self) -> None:
        self.stopped.set()
        assert self._goes_on.wait(60)

    def run(self) -> None:
        try:
            claim = claimed(self._storage, self._run, self._path, overwrite=True)
            try:
                finish(self._storage, claim, 100)
            except CheckpointError:
                attempts.try_abandon(
                    self._storage, self._path, claim.attempt, by="it", reason="late"
                )
                raise
            self.told = "saved"
        except (CheckpointError, FileNotFoundError) as error:
            self.told = str(error)
        finally:
            self.stopped.set()

    def let_go(self) -> None:
        self._goes_on.set()
        self.join(60)
        assert not self.is_alive()


# Where an old writer stops: before it looks for newer starts (1, 31), lists (4, 7, 25, 36), makes
# folders (5, 6) and files (9, 12, 17), commits (34), syncs (35); and behind its last call.
OLD_CALLS = (1, 4, 5, 6, 7, 9, 12, 17, 25, 31, 34, 35, 36, 99)


@pytest.mark.parametrize("number", sampled_params(OLD_CALLS, 7))
def test_a_late_writer_that_wakes_up_at_any_call_of_the_new_start_changes_nothing(
    tmp_path: Path, number: int
) -> None:
    """`number` is the call before which it stops; it goes on at each call of the new start."""
    done = False
    for call in count(1):
        root = tmp_path / str(call)
        root.mkdir()
        path = f"{root}/step-100"
        old = started(LocalStorage(), str(root))
        finish(LocalStorage(), claimed(LocalStorage(), old, f"{root}/step-50"), 50)
        late = LateWriter(old, path, number)
        late.start()
        assert late.stopped.wait(60)
        storage = Stopping(LocalStorage(), call, late.let_go)
        new = started(storage, str(root), 50)
        attempt = finish(storage, claimed(storage, new, path), 100)
        done = late.is_alive()
        late.let_go()
        assert attempts.find_checkpoint(LocalStorage(), path)[0] == attempt
        assert step_at(LocalStorage(), path) == 100
        assert step_at(LocalStorage(), f"{root}/step-50") == 50
        if done or number == OLD_CALLS[-1]:
            break
    assert call > 30 or number == OLD_CALLS[-1]
