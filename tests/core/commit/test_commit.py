"""Claim, commit, abandon, find, remove, collect, delete: what each promises, call by call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pytest

from commit_cases import (
    PATH,
    index_of,
    names_in,
    read,
    save,
    sizes_of,
    step_at,
    with_root,
    write_rank,
)
from dist_ckpt.core.commit import attempts, commit_protocol, removal
from dist_ckpt.core.commit.commit_protocol import Claim
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Abandoned
from dist_ckpt.core.format.index.index_json import EncodedCatalog
from dist_ckpt.core.storage import Storage, WritableFile
from dist_ckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    ExistsError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.storage_contract import write

HIGHEST = Attempt(9, "f" * 16)


def claimed(storage: Storage, step: int = 1, *, overwrite: bool = False) -> Claim:
    """Claim, and write the files of a step."""
    claim = commit_protocol.claim(storage, PATH, overwrite=overwrite, by=f"the saver of {step}")
    write_rank(storage, claim.folder, step, 0)
    return claim


def put(storage: Storage, attempt: Attempt, data: bytes, name: str = filenames.INDEX) -> None:
    """Put a file into an attempt's folder, as an odd program or a fault would."""
    with suppress(FileExistsError):
        storage.make_folder(f"{PATH}/{attempt}")
    write(storage, f"{PATH}/{attempt}/{name}", data)


# --- claim -----------------------------------------------------------------------------------


def test_a_claim_makes_the_folders_that_are_missing_and_says_which():
    storage = with_root()
    claim = commit_protocol.claim(storage, PATH + "/a/b", overwrite=False, by="me")
    assert claim.new_folders == (PATH, PATH + "/a", PATH + "/a/b")
    assert claim.folder == f"{PATH}/a/b/{claim.attempt}"
    assert claim.attempt.number == 1
    assert names_in(storage, claim.folder) == [filenames.CLAIM]


def test_a_claim_file_says_who_claimed_and_is_an_index_that_says_abandoned():
    storage = MemoryStorage()
    claim = commit_protocol.claim(storage, PATH, overwrite=False, by="rank 0 on host a")
    document = index_json.decode(read(storage, f"{claim.folder}/{filenames.CLAIM}"))
    assert isinstance(document, Abandoned)
    assert (document.attempt, document.by) == (claim.attempt.name, "rank 0 on host a")


def test_a_claim_is_numbered_above_all_that_was_seen_also_in_the_trash():
    storage = with_root()
    storage.make_folder(PATH)
    storage.make_folder(f"{PATH}/{filenames.trash_name(Attempt(7, '0' * 16))}")
    storage.make_folder(f"{PATH}/{Attempt(3, '0' * 16)}")
    assert commit_protocol.claim(storage, PATH, overwrite=False, by="me").attempt.number == 8


def test_a_checkpoint_is_not_overwritten_unless_that_was_asked_for():
    storage = MemoryStorage()
    save(storage, 1)
    before = storage.tree()
    with pytest.raises(ExistsError, match=r"a checkpoint of step 1 is here.*overwrite=True"):
        commit_protocol.claim(storage, PATH, overwrite=False, by="me")
    assert storage.tree() == before
    assert commit_protocol.claim(storage, PATH, overwrite=True, by="me").attempt.number == 2


def test_a_damaged_checkpoint_is_not_overwritten_unless_that_was_asked_for():
    storage = with_root()
    storage.make_folder(PATH)
    put(storage, Attempt(1, "0" * 16), b"torn")
    with pytest.raises(ExistsError, match=r"cannot be read.*overwrite=True"):
        commit_protocol.claim(storage, PATH, overwrite=False, by="me")
    save(storage, 2, overwrite=True)
    assert step_at(storage) == 2
    assert len(names_in(storage)) == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("run@latest", r"@latest selects a checkpoint in /run, and cannot name"),
        ("run@max:a/b", "@max:a/b selects"),
        ("run/a1-0123456789abcdef", "is never a checkpoint's name here"),
        ("run/.trash-a1-0123456789abcdef", "is never a checkpoint's name here"),
        ("run/.annotations", "is never a checkpoint's name here"),
    ],
)
def test_a_name_that_means_something_else_is_no_new_checkpoints(name, told):
    storage = MemoryStorage({"/run": None, "/run/s1": None})
    before = storage.tree()
    with pytest.raises(ValueError, match=told):
        commit_protocol.claim(storage, f"/{name}", overwrite=True, by="a test")
    assert storage.tree() == before
    commit_protocol.claim(storage, "/other@latest", overwrite=False, by="a test")  # in no folder


@pytest.mark.parametrize("overwrite", [False, True])
def test_somebody_elses_folder_and_file_are_never_touched(overwrite):
    storage = with_root()
    storage.make_folder(PATH)
    write(storage, f"{PATH}/notes.txt", b"precious")
    before = storage.tree()
    for path, told in (
        (PATH, "did not write.*notes.txt"),
        (f"{PATH}/notes.txt", "is a file"),
        (f"{PATH}/notes.txt/ck", "is a file, or below one"),
    ):
        with pytest.raises(ExistsError, match=told):
            commit_protocol.claim(storage, path, overwrite=overwrite, by="me")
    assert storage.tree() == before


def test_a_folder_named_like_an_attempt_but_not_one_is_somebody_elses():
    storage = with_root()
    storage.make_folder(PATH)
    write(storage, f"{PATH}/{HIGHEST}", b"a file")
    with pytest.raises(ExistsError):
        commit_protocol.claim(storage, PATH, overwrite=True, by="me")


def test_the_notes_that_somebody_put_beside_a_checkpoint_stay():
    storage = MemoryStorage()
    save(storage, 1)
    write(storage, f"{PATH}/notes.txt", b"precious")
    save(storage, 2, overwrite=True)
    removal.delete(storage, PATH)
    assert names_in(storage) == ["notes.txt"]


def test_an_open_attempt_is_fenced_by_the_next_claim_and_its_saver_told_by_whom():
    storage = MemoryStorage()
    first = claimed(storage, 1)
    second = claimed(storage, 2)
    with pytest.raises(ConflictError, match=rf"{second.attempt} claimed by the saver of 2"):
        commit_protocol.commit(storage, first, index_of(first.attempt, 1, 1))
    commit_protocol.commit(storage, second, index_of(second.attempt, 2, 1))
    assert step_at(storage) == 2
    assert names_in(storage) == [second.attempt.name]


class _Rival(MemoryStorage):
    """Somebody claims a higher attempt just before ours is made."""

    def make_folder(self, folder: str) -> None:
        if folder.startswith(f"{PATH}/a"):
            super().make_folder(f"{PATH}/{HIGHEST}")
        super().make_folder(folder)


def test_of_two_claims_at_once_the_lower_gives_way_and_leaves_nothing():
    storage = _Rival({"/runs": None})
    with pytest.raises(ConflictError, match=rf"{HIGHEST} was claimed by an unknown job"):
        commit_protocol.claim(storage, PATH, overwrite=False, by="me")
    assert names_in(storage) == [HIGHEST.name]


class _Deleter(MemoryStorage):
    """Somebody deletes what is there, with the folder, between our look and our step."""

    deletes = 2

    def make_folder(self, folder: str) -> None:
        if folder.startswith(f"{PATH}/a") and self.deletes:
            self.deletes -= 1
            self.remove(PATH)
        super().make_folder(folder)


def test_a_claim_makes_a_folder_again_that_a_delete_took():
    storage = _Deleter({"/runs": None, PATH: None})
    claim = commit_protocol.claim(storage, PATH, overwrite=False, by="me")
    assert claim.new_folders == (PATH, PATH)
    assert names_in(storage) == [claim.attempt.name]


def test_a_claim_does_not_fight_a_delete_for_ever():
    storage = _Deleter({"/runs": None})
    storage.deletes = 1000
    with pytest.raises(StorageError, match="again and again"):
        commit_protocol.claim(storage, PATH, overwrite=False, by="me")
    assert storage.tree() == {"/runs": None}


def _num_calls(act: Callable[[Storage], object], begin: MemoryStorage) -> int:
    counting = FaultyStorage(MemoryStorage(begin.tree()))
    act(counting)
    return counting.calls


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_a_claim_that_fails_at_any_call_leaves_nothing_behind(done, older):
    begin = with_root()
    if older:
        save(begin, 1)

    def act(storage: Storage) -> None:
        commit_protocol.claim(storage, PATH, overwrite=older, by="me")

    for n in range(1, _num_calls(act, begin) + 1):
        disk = MemoryStorage(begin.tree())
        storage = FaultyStorage(disk, fail_at_call=n, done=done)
        with pytest.raises(CheckpointError):
            act(storage)
        assert disk.tree() == begin.tree(), storage.failed


def test_a_fault_while_a_dead_save_is_swept_does_not_fail_the_claim_for_nothing():
    begin = MemoryStorage()
    claimed(begin)

    def act(storage: Storage) -> None:
        commit_protocol.claim(storage, PATH, overwrite=False, by="me")

    for n in range(1, _num_calls(act, begin) + 1):
        storage = FaultyStorage(MemoryStorage(begin.tree()), fail_at_call=n)
        try:
            act(storage)
        except CheckpointError:
            assert step_at(storage.inner) is None
        save(storage.inner, 2)
        assert step_at(storage.inner) == 2, storage.failed


# --- the whole save --------------------------------------------------------------------------


def careful_save(storage: Storage, step: int) -> None:
    """Save over what is there, as the coordinator does: on failure abandon it, then raise."""
    claim = commit_protocol.claim(storage, PATH, overwrite=True, by="me")
    try:
        write_rank(storage, claim.folder, step, 0)
        commit_protocol.check_files(storage, claim.folder, sizes_of(step, 1))
        commit_protocol.commit(storage, claim, index_of(claim.attempt, step, 1))
    except (CheckpointError, FileNotFoundError):
        if attempts.try_abandon(storage, PATH, claim.attempt, by="me", reason="it failed"):
            commit_protocol.remove_claimed(storage, claim)
        raise
    removal.remove_superseded(storage, PATH, claim.attempt)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("older", [None, 1])
def test_a_fault_at_any_call_of_a_save_leaves_a_whole_checkpoint_or_none(older, sticky, done):
    begin = with_root()
    if older:
        save(begin, older)
    for n in range(1, _num_calls(lambda storage: careful_save(storage, 2), begin) + 1):
        inner = MemoryStorage(begin.tree())
        storage = FaultyStorage(inner, fail_at_call=n, sticky=sticky, done=done)
        try:
            careful_save(storage, 2)
        except CheckpointError:
            assert step_at(inner) in (older, 2), storage.failed
        else:
            assert step_at(inner) == 2, storage.failed
        removal.remove_garbage(inner, PATH, grace_s=-1)
        assert len(names_in(inner) if PATH in inner.tree() else []) <= 1, storage.failed
        save(inner, 3, overwrite=True)
        assert step_at(inner) == 3


def test_one_fault_in_a_save_that_fails_leaves_nothing_of_it():
    begin = with_root()
    save(begin, 1)
    for n in range(1, _num_calls(lambda storage: careful_save(storage, 2), begin) + 1):
        inner = MemoryStorage(begin.tree())
        storage = FaultyStorage(inner, fail_at_call=n)
        try:
            careful_save(storage, 2)
        except CheckpointError:
            if step_at(inner) == 1:
                assert inner.tree() == begin.tree(), storage.failed
        else:  # the fault met what removes the older one: the save has succeeded
            assert step_at(inner) == 2, storage.failed


# --- commit ----------------------------------------------------------------------------------


def test_a_commit_after_an_abandonment_is_a_conflict_that_names_who_and_why():
    storage = MemoryStorage()
    claim = claimed(storage)
    assert attempts.try_abandon(storage, PATH, claim.attempt, by="rank 3 on b", reason="no verdict")
    with pytest.raises(ConflictError, match="abandoned by rank 3 on b: no verdict"):
        commit_protocol.commit(storage, claim, index_of(claim.attempt, 1, 1))
    assert step_at(storage) is None


def test_a_commit_into_an_attempt_that_is_gone_is_a_conflict():
    storage = MemoryStorage()
    claim = claimed(storage)
    removal.remove(storage, PATH, claim.attempt)
    with pytest.raises(ConflictError, match="removed by `gc` or a delete"):
        commit_protocol.commit(storage, claim, index_of(claim.attempt, 1, 1))


def test_a_commit_whose_reply_is_lost_anywhere_has_an_outcome_after_abandon():
    begin = MemoryStorage()
    claim = claimed(begin)

    def act(storage: Storage) -> None:
        commit_protocol.commit(storage, claim, index_of(claim.attempt, 1, 1))

    renames = 0
    for n in range(1, _num_calls(act, begin) + 1):
        inner = MemoryStorage(begin.tree())
        storage = FaultyStorage(inner, fail_at_call=n, done=True)
        try:
            act(storage)
        except StorageError:
            abandoned = attempts.try_abandon(
                inner, PATH, claim.attempt, by="me", reason="it failed"
            )
            assert step_at(inner) == (None if abandoned else 1), storage.failed
        else:
            renames += storage.failed.startswith("rename")
            assert step_at(inner) == 1
    assert renames == 1  # a lost reply of the rename itself is found out by reading


class _Flipping(MemoryStorage):
    """Stores one wrong bit in every index."""

    def create(self, path: str, nbytes: int) -> WritableFile:
        file: Any = super().create(path, nbytes)
        if ".index-" in path:
            write_at = file.write_at
            file.write_at = lambda offset, data: write_at(offset, bytes([data[0] ^ 1]) + data[1:])
        return cast("WritableFile", file)


def test_an_index_that_reads_back_as_something_else_is_not_committed():
    storage = _Flipping()
    claim = claimed(storage)
    with pytest.raises(StorageError, match="reads back with other content"):
        commit_protocol.commit(storage, claim, index_of(claim.attempt, 1, 1))
    assert step_at(storage) is None


def test_an_index_that_we_would_refuse_to_load_is_not_committed():
    storage = MemoryStorage()
    claim = claimed(storage)
    with pytest.raises(CheckpointError, match=r"bug of dist_ckpt, report it \(.*step") as caught:
        commit_protocol.commit(storage, claim, index_of(claim.attempt, -1, 1))
    assert type(caught.value) is CheckpointError
    assert "restore it from a copy" not in str(caught.value)
    assert step_at(storage) is None


def test_what_is_new_in_the_index_of_a_catalog_that_was_read_before_is_read_again():
    storage = MemoryStorage()
    claim = claimed(storage)
    index = index_of(claim.attempt, 1, 1)
    text = EncodedCatalog(index.catalog)
    commit_protocol.commit(storage, claim, index, text)
    assert text.was_read
    again = claimed(storage, overwrite=True)
    with pytest.raises(CheckpointError, match="bug of dist_ckpt"):
        commit_protocol.commit(
            storage, again, replace(index, attempt=again.attempt.name, step=-1), text
        )


class _Lossy(MemoryStorage):
    """Swallows what is written into every index, and says that all is well."""

    def create(self, path: str, nbytes: int) -> WritableFile:
        file: Any = super().create(path, nbytes)
        if ".index-" in path:
            file.write_at = lambda offset, data: None
        return cast("WritableFile", file)


def test_a_write_that_was_swallowed_is_noticed():
    storage = _Lossy()
    claim = claimed(storage)
    with pytest.raises(StorageError, match="has 0 bytes after writing"):
        commit_protocol.commit(storage, claim, index_of(claim.attempt, 1, 1))


# --- check_files -----------------------------------------------------------------------------


def test_a_folder_that_holds_what_was_written_passes():
    storage = MemoryStorage()
    claim = claimed(storage)
    temporary = filenames.temporary_name("index", "0" * 16)
    put(storage, claim.attempt, b"", temporary)  # a rank that gives up
    commit_protocol.check_files(storage, claim.folder, sizes_of(1, 1))


def test_what_is_missing_odd_or_of_a_wrong_size_is_named():
    storage = MemoryStorage()
    claim = claimed(storage)
    put(storage, claim.attempt, b"", "stray.bin")
    storage.remove(f"{claim.folder}/{filenames.OBJECTS}")
    storage.make_folder(f"{claim.folder}/{filenames.OBJECTS}")
    expected = {**sizes_of(1, 1), "model-00001.safetensors": 5, "model-00000.safetensors": 3}
    with pytest.raises(StorageError) as caught:
        commit_protocol.check_files(storage, claim.folder, expected)
    for told in (
        "model-00001.safetensors is missing",
        "stray.bin is unexpected",
        "model-00000.safetensors has 4112 bytes, not 3",
        "objects.msgpack is not a regular file",
        "all ranks share the storage",
    ):
        assert told in str(caught.value)


def test_a_long_list_of_missing_files_is_cut():
    storage = MemoryStorage()
    claim = claimed(storage)
    with pytest.raises(StorageError, match=r"model-00005\S* is missing and 94 more"):
        commit_protocol.check_files(storage, claim.folder, sizes_of(1, 100))


def test_a_folder_that_is_gone_is_a_conflict():
    storage = MemoryStorage()
    claim = claimed(storage)
    removal.remove(storage, PATH, claim.attempt)
    with pytest.raises(ConflictError, match="was removed"):
        commit_protocol.check_files(storage, claim.folder, {})


class _Slow(MemoryStorage):
    """Shows a file of another host only when it is asked for the third time."""

    asked = 0

    def list(self, folder, **options):
        self.asked += 1
        return [
            e for e in super().list(folder, **options) if self.asked > 2 or "00000" not in e.name
        ]


def test_files_of_other_hosts_may_take_a_while_to_appear(monkeypatch):
    monkeypatch.setattr(commit_protocol, "_POLL_S", 0)
    storage = _Slow()
    claim = claimed(storage)
    storage.asked = 0
    commit_protocol.check_files(storage, claim.folder, sizes_of(1, 1), timeout_s=60)
    assert storage.asked == 3


# --- await_claim -----------------------------------------------------------------------------


def test_a_rank_that_sees_the_claim_goes_on():
    storage = MemoryStorage()
    claim = commit_protocol.claim(storage, PATH, overwrite=False, by="me")
    commit_protocol.await_claim(storage, PATH, claim.attempt, 0)


def test_a_rank_that_does_not_see_the_claim_says_that_the_storage_is_not_shared():
    for storage in (MemoryStorage(), MemoryStorage({"/runs": None, PATH: None})):
        before = storage.tree()
        with pytest.raises(StorageError, match="not on storage that all ranks share"):
            commit_protocol.await_claim(storage, PATH, HIGHEST, 0.001)
        assert storage.tree() == before


def test_a_rank_that_finds_its_attempt_abandoned_says_by_whom():
    storage = MemoryStorage()
    claim = claimed(storage)
    attempts.try_abandon(storage, PATH, claim.attempt, by="rank 3", reason="no verdict")
    with pytest.raises(ConflictError, match="abandoned by rank 3"):
        commit_protocol.await_claim(storage, PATH, claim.attempt, 60)


def test_a_rank_whose_attempt_was_removed_does_not_wait_for_it():
    for later in (False, True):
        storage = MemoryStorage()
        claim = claimed(storage)
        if later:
            save(storage, 2, overwrite=True)
        else:
            storage.rename(claim.folder, f"{PATH}/{filenames.trash_name(claim.attempt)}")
        with pytest.raises(ConflictError, match="was removed"):
            commit_protocol.await_claim(storage, PATH, claim.attempt, 0)


def test_a_rank_that_sees_only_earlier_attempts_goes_on_waiting():
    storage = MemoryStorage()
    claim = claimed(storage)
    storage.rename(claim.folder, f"{PATH}/{filenames.trash_name(claim.attempt)}")
    save(storage, 2)
    with pytest.raises(StorageError, match="not on storage that all ranks share"):
        commit_protocol.await_claim(storage, PATH, HIGHEST, 0)


# --- abandon ---------------------------------------------------------------------------------


def test_abandon_makes_it_certain_that_nothing_is_committed():
    storage = MemoryStorage()
    claim = claimed(storage)
    assert attempts.try_abandon(storage, PATH, claim.attempt, by="a", reason="first")
    assert attempts.try_abandon(storage, PATH, claim.attempt, by="b", reason="second")
    document = attempts.read_index(storage, PATH, claim.attempt)
    assert document == Abandoned(claim.attempt.name, "a", "first")
    removal.remove(storage, PATH, claim.attempt)
    assert attempts.try_abandon(storage, PATH, claim.attempt, by="c", reason="it is gone")


def test_abandon_of_a_committed_attempt_finds_that_out_and_changes_nothing():
    storage = MemoryStorage()
    attempt = save(storage, 1)
    before = storage.tree()
    assert not attempts.try_abandon(storage, PATH, attempt, by="a", reason="late")
    assert storage.tree() == before


class _CommittedMeanwhile(MemoryStorage):
    """The coordinator commits while a rank is about to abandon."""

    claim: Claim | None = None

    def rename(self, old: str, new: str) -> None:
        if (claim := self.claim) is not None:
            self.claim = None
            commit_protocol.commit(self, claim, index_of(claim.attempt, 1, 1))
        super().rename(old, new)


def test_abandon_that_loses_the_race_leaves_nothing_of_its_own():
    storage = _CommittedMeanwhile()
    storage.claim = claim = claimed(storage)
    storage.claim = claim
    assert not attempts.try_abandon(storage, PATH, claim.attempt, by="a", reason="late")
    assert step_at(storage) == 1
    names = {filenames.CLAIM, filenames.INDEX, *sizes_of(1, 1)}
    assert set(names_in(storage, claim.folder)) == names


def test_abandon_keeps_the_start_of_a_long_reason_and_what_json_cannot_hold():
    storage = MemoryStorage()
    claim = claimed(storage)
    attempts.try_abandon(storage, PATH, claim.attempt, by="\ud800", reason="x" * 10_000_000)
    document = attempts.read_index(storage, PATH, claim.attempt)
    assert document == Abandoned(claim.attempt.name, "?", "x" * 2000)


def test_abandon_with_no_space_puts_the_claim_in_place_of_an_index():
    inner = MemoryStorage()
    claim = claimed(inner)
    create = _num_calls(lambda s: s.list(PATH) and attempts.is_decided(s, PATH, HIGHEST), inner)
    storage = FaultyStorage(inner, fail_at_call=create)  # reads the index first, then creates
    assert attempts.try_abandon(storage, PATH, claim.attempt, by="a rank", reason="no space")
    assert storage.failed.startswith("create")
    with pytest.raises(ConflictError, match="abandoned by the saver of 1: given up"):
        commit_protocol.commit(inner, claim, index_of(claim.attempt, 1, 1))


def test_abandon_of_a_damaged_attempt_says_so():
    storage = MemoryStorage()
    claim = claimed(storage)
    put(storage, claim.attempt, b"torn")
    with pytest.raises(CorruptError):
        attempts.try_abandon(storage, PATH, claim.attempt, by="a", reason="late")


# --- find ------------------------------------------------------------------------------------


def test_the_highest_committed_attempt_is_the_checkpoint():
    storage = MemoryStorage()
    for step in (1, 2):
        claim = claimed(storage, step, overwrite=True)
        commit_protocol.commit(storage, claim, index_of(claim.attempt, step, 1))
    claimed(storage, 3, overwrite=True)
    attempt, index = attempts.find_checkpoint(storage, PATH)
    assert (attempt.number, index.step) == (2, 2)


def test_of_one_number_the_higher_id_is_the_checkpoint():
    storage = with_root()
    storage.make_folder(PATH)
    for step, digit in ((1, "2"), (2, "1")):
        attempt = Attempt(5, digit * 16)
        put(storage, attempt, index_json.encode(index_of(attempt, step, 1)))
    assert attempts.find_checkpoint(storage, PATH)[1].step == 1


def test_a_damaged_index_above_is_never_skipped():
    storage = MemoryStorage()
    save(storage, 1)
    put(storage, HIGHEST, b"torn")
    with pytest.raises(CorruptError, match=rf"{HIGHEST}/index\.json"):
        attempts.find_checkpoint(storage, PATH)


def test_an_abandoned_and_an_open_attempt_above_are_skipped():
    storage = MemoryStorage()
    save(storage, 1)
    put(storage, HIGHEST, index_json.encode(Abandoned(HIGHEST.name, "a", "b")))
    storage.make_folder(f"{PATH}/{Attempt(10, '0' * 16)}")
    assert step_at(storage) == 1


def test_a_newer_format_above_is_never_skipped():
    storage = MemoryStorage()
    save(storage, 1)
    put(storage, HIGHEST, b'{"format":{"version":2,"requires":[]}}')
    with pytest.raises(IncompatibleError, match=r"index\.json.*upgrade"):
        attempts.find_checkpoint(storage, PATH)


def test_an_index_in_the_folder_of_another_attempt_is_damage():
    storage = with_root()
    storage.make_folder(PATH)
    other = Attempt(1, "0" * 16)
    put(storage, HIGHEST, index_json.encode(index_of(other, 1, 1)))
    with pytest.raises(CorruptError, match=f"is the index of {other}"):
        attempts.find_checkpoint(storage, PATH)


def test_an_index_that_is_a_folder_is_damage():
    storage = MemoryStorage()
    claim = claimed(storage)
    storage.make_folder(f"{claim.folder}/{filenames.INDEX}")
    with pytest.raises(CorruptError):
        attempts.find_checkpoint(storage, PATH)


def test_the_folder_of_a_run_is_told_from_a_checkpoint_and_the_error_names_its_newest():
    storage = MemoryStorage()
    save(storage, 1)
    with pytest.raises(NotFoundError, match=r"of a run.*such as /runs@latest"):
        attempts.find_checkpoint(storage, "/runs")


def test_where_nothing_is_found_the_error_says_what_is_there():
    storage = MemoryStorage()
    with pytest.raises(NotFoundError, match="no such folder"):
        attempts.find_checkpoint(storage, PATH)
    storage.make_folder("/runs")
    write(storage, "/runs/file", b"")
    with pytest.raises(NotFoundError, match="it is a file"):
        attempts.find_checkpoint(storage, "/runs/file")
    with pytest.raises(NotFoundError, match=r"holds file\. Pass the folder"):
        attempts.find_checkpoint(storage, "/runs")
    storage.make_folder(PATH)
    with pytest.raises(NotFoundError, match=r"holds ck, file\. Pass the folder"):
        attempts.find_checkpoint(storage, "/runs")
    with pytest.raises(NotFoundError, match="folder is empty"):
        attempts.find_checkpoint(storage, PATH)
    storage.make_folder(f"{PATH}/{Attempt(1, '0' * 16)}")
    put(storage, HIGHEST, index_json.encode(Abandoned(HIGHEST.name, "a", "b")))
    storage.make_folder(f"{PATH}/{filenames.trash_name(HIGHEST)}")
    with pytest.raises(NotFoundError, match=r"1 unfinished.*1 abandoned, 1 being removed"):
        attempts.find_checkpoint(storage, PATH)


class _Restless(MemoryStorage):
    """Every look finds another set of attempts."""

    def list(self, folder, **options):
        if folder == PATH:
            for entry in super().list(PATH):
                super().remove(f"{PATH}/{entry.name}")
            super().make_folder(f"{PATH}/{Attempt(1, attempts.new_id())}")
        return super().list(folder, **options)


def test_a_search_ends_though_the_attempts_change_all_the_time():
    with pytest.raises(StorageError, match="change faster"):
        attempts.find_checkpoint(_Restless({"/runs": None, PATH: None}), PATH)


# --- attempts --------------------------------------------------------------------------------


def test_every_attempt_is_told_with_its_state_age_and_size():
    times = iter(range(10_000))
    storage = MemoryStorage({"/runs": None}, clock=lambda: next(times))
    save(storage, 1)
    put(storage, Attempt(3, "0" * 16), b"torn")
    put(storage, Attempt(4, "0" * 16), index_json.encode(Abandoned(f"a4-{'0' * 16}", "a", "b")))
    put(storage, Attempt(5, "0" * 16), b'{"format":{"version":2,"requires":[]}}')
    storage.make_folder(f"{PATH}/{HIGHEST}")
    found = attempts.list_statuses(storage, PATH)
    states = ["committed", "damaged", "abandoned", "incompatible", "open"]
    assert [status.state for status in found] == states
    assert [status.attempt.number for status in found] == [1, 3, 4, 5, 9]
    folder = f"{PATH}/{found[0].attempt}"
    assert found[0].nbytes == sum(entry.nbytes for entry in storage.list(folder))
    ages = [status.modified_at for status in found]
    assert ages == sorted(ages)
    assert attempts.list_statuses(storage, "/nowhere") == ()


# --- removing --------------------------------------------------------------------------------


def test_a_removed_attempt_is_gone_and_may_be_removed_again():
    storage = MemoryStorage()
    attempt = save(storage, 1)
    for _ in range(2):
        removal.remove(storage, PATH, attempt)
        assert names_in(storage) == []
    removal.remove(storage, "/nowhere", attempt)


def test_a_foreign_name_in_an_attempt_is_left_and_reported(caplog):
    storage = MemoryStorage()
    attempt = save(storage, 1)
    put(storage, attempt, b"precious", "notes.txt")
    storage.make_folder(f"{PATH}/{attempt}/objects-00001.msgpack")  # not a file: not ours
    with caplog.at_level(logging.WARNING):
        removal.delete(storage, PATH)
    trash = f"{PATH}/{filenames.trash_name(attempt)}"
    assert names_in(storage, trash) == ["notes.txt", "objects-00001.msgpack"]
    assert "left notes.txt, objects-00001.msgpack" in caplog.text
    assert step_at(storage) is None


def test_to_supersede_removes_all_below_and_nothing_above():
    storage = MemoryStorage()
    save(storage, 1)
    dead = Attempt(1, "f" * 16)
    storage.make_folder(f"{PATH}/{dead}")
    storage.make_folder(f"{PATH}/{filenames.trash_name(Attempt(1, 'e' * 16))}")
    claim = claimed(storage, 2, overwrite=True)
    storage.make_folder(f"{PATH}/{HIGHEST}")
    commit_protocol.commit(storage, claim, index_of(claim.attempt, 2, 1))
    removal.remove_superseded(storage, PATH, claim.attempt)
    assert names_in(storage) == [claim.attempt.name, HIGHEST.name]


def test_what_cannot_be_superseded_is_logged_for_the_new_one_is_committed(caplog):
    begin = with_root()
    save(begin, 1)
    claim = claimed(begin, 2, overwrite=True)
    commit_protocol.commit(begin, claim, index_of(claim.attempt, 2, 1))
    calls = _num_calls(
        lambda storage: removal.remove_superseded(storage, PATH, claim.attempt), begin
    )
    for n in range(1, calls + 1):
        caplog.clear()
        storage = FaultyStorage(MemoryStorage(begin.tree()), fail_at_call=n)
        removal.remove_superseded(storage, PATH, claim.attempt)
        assert "an older attempt could not be removed yet" in caplog.text, storage.failed
        assert step_at(storage.inner) == 2
        removal.remove_superseded(storage.inner, PATH, claim.attempt)
        assert names_in(storage.inner) == [claim.attempt.name]


def test_to_give_up_removes_the_attempt_and_the_folders_made_for_it():
    storage = with_root()
    commit_protocol.remove_claimed(storage, claimed(storage))
    assert storage.tree() == {"/runs": None}


def test_to_give_up_leaves_folders_that_somebody_else_uses_by_now():
    storage = with_root()
    claim = claimed(storage)
    storage.make_folder(f"{PATH}/{HIGHEST}")
    commit_protocol.remove_claimed(storage, claim)
    assert names_in(storage) == [HIGHEST.name]


# --- collect ---------------------------------------------------------------------------------


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_collector_removes_trash_abandoned_superseded_and_dead_attempts_only():
    clock = _Clock()
    storage = MemoryStorage(clock=clock)
    dead = claimed(storage, 1)
    old = Attempt(2, "0" * 16)
    put(storage, old, index_json.encode(index_of(old, 2, 1)))
    kept = Attempt(3, "0" * 16)
    put(storage, kept, index_json.encode(index_of(kept, 3, 1)))
    abandoned = Attempt(4, "0" * 16)
    put(storage, abandoned, index_json.encode(Abandoned(abandoned.name, "a", "b")))
    trash = filenames.trash_name(abandoned)
    storage.make_folder(f"{PATH}/{trash}")
    write(storage, f"{PATH}/notes.txt", b"")
    clock.now += 3601
    alive = Attempt(5, "0" * 16)
    put(storage, alive, b"", "model-00000.safetensors")
    removed = removal.remove_garbage(storage, PATH, grace_s=3600)
    assert removed == (trash, dead.attempt.name, old.name, abandoned.name)
    assert names_in(storage) == [kept.name, alive.name, "notes.txt"]


def test_a_collector_does_not_believe_its_own_clock():
    clock = _Clock()
    storage = MemoryStorage(clock=clock)  # years behind ours
    claimed(storage)
    clock.now += 100
    assert removal.remove_garbage(storage, PATH, grace_s=3600) == ()


def test_a_collector_leaves_older_checkpoints_while_one_is_damaged():
    storage = MemoryStorage()
    save(storage, 1)
    second = claimed(storage, 2, overwrite=True)
    commit_protocol.commit(storage, second, index_of(second.attempt, 2, 1))
    put(storage, HIGHEST, b"torn")
    before = storage.tree()
    assert removal.remove_garbage(storage, PATH, grace_s=-1) == ()
    assert storage.tree() == before


def test_a_collector_removes_ids_of_the_folder_that_were_long_not_renamed_into_place():
    clock = _Clock()
    storage = MemoryStorage(clock=clock)
    storage.make_folder("/runs")
    storage.make_folder(PATH)
    lost, new = (f"DIST_CKPT_ROOT.{digit * 16}" for digit in "01")
    foreign = ["DIST_CKPT_ROOT", f"{lost}0", "DIST_CKPT_ROOT.mine"]
    for name in (lost, *foreign):
        write(storage, f"{PATH}/{name}", b"0" * 32 + b"\n")
    storage.make_folder(f"{PATH}/DIST_CKPT_ROOT.{'2' * 16}")
    clock.now += 3601
    write(storage, f"{PATH}/{new}", b"")
    assert removal.remove_garbage(storage, PATH, grace_s=3600) == (lost,)
    assert names_in(storage) == sorted([*foreign, new, f"DIST_CKPT_ROOT.{'2' * 16}"])


def test_a_collector_finds_nothing_where_nothing_is():
    assert removal.remove_garbage(MemoryStorage(), PATH, grace_s=0) == ()


def test_a_fault_at_any_call_of_a_collector_does_no_harm():
    begin = MemoryStorage()
    save(begin, 1)
    claimed(begin, 2, overwrite=True)

    def act(storage: Storage) -> object:
        return removal.remove_garbage(storage, PATH, grace_s=-1)

    for done in (False, True):
        for n in range(1, _num_calls(act, begin) + 1):
            inner = MemoryStorage(begin.tree())
            with suppress(StorageError):
                act(FaultyStorage(inner, fail_at_call=n, done=done))
            assert step_at(inner) == 1
            act(inner)
            assert len(names_in(inner)) == 1


# --- delete ----------------------------------------------------------------------------------


def test_to_delete_removes_everything_and_the_folder():
    storage = with_root()
    save(storage, 1)
    second = claimed(storage, 2, overwrite=True)
    commit_protocol.commit(storage, second, index_of(second.attempt, 2, 1))
    storage.make_folder(f"{PATH}/{filenames.trash_name(HIGHEST)}")
    removal.delete(storage, PATH)
    assert storage.tree() == {"/runs": None}


def test_what_was_claimed_before_a_delete_is_never_committed_after_it():
    storage = MemoryStorage()
    save(storage, 1)
    claim = claimed(storage, 2, overwrite=True)
    removal.delete(storage, PATH)
    with pytest.raises(ConflictError):
        commit_protocol.commit(storage, claim, index_of(claim.attempt, 2, 1))
    assert step_at(storage) is None


def test_a_damaged_checkpoint_can_be_deleted():
    storage = MemoryStorage()
    save(storage, 1)
    put(storage, HIGHEST, b"torn")
    removal.delete(storage, PATH)
    assert step_at(storage) is None


def test_where_no_checkpoint_is_there_is_nothing_to_delete():
    storage = MemoryStorage()
    claim = claimed(storage)
    before = storage.tree()
    with pytest.raises(NotFoundError, match="1 unfinished"):
        removal.delete(storage, PATH)
    assert storage.tree() == before
    commit_protocol.commit(storage, claim, index_of(claim.attempt, 1, 1))
    with pytest.raises(NotFoundError, match="no such folder"):
        removal.delete(storage, "/nowhere")


def test_a_fault_at_any_call_of_a_delete_leaves_the_newest_or_nothing():
    begin = MemoryStorage()
    save(begin, 1)
    second = claimed(begin, 2, overwrite=True)
    commit_protocol.commit(begin, second, index_of(second.attempt, 2, 1))

    def act(storage: Storage) -> None:
        removal.delete(storage, PATH)

    for done in (False, True):
        for n in range(1, _num_calls(act, begin) + 1):
            inner = MemoryStorage(begin.tree())
            storage = FaultyStorage(inner, fail_at_call=n, done=done)
            try:
                act(storage)
            except StorageError:
                assert step_at(inner) in (2, None), storage.failed
            else:
                assert step_at(inner) is None
