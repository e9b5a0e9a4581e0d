"""What is pruned, what never is, and that a prune that dies leaves nothing half."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from commit_cases import step_at
from dist_ckpt.core.commit.attempts import list_attempts, make_folders, try_abandon
from dist_ckpt.core.commit.commit_protocol import claim
from dist_ckpt.core.commit.records import protection_protocol
from dist_ckpt.core.commit.records.incarnations import Incarnation, begin_incarnation
from dist_ckpt.core.commit.records.leases import Lease
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef, pin, tag, unpin
from dist_ckpt.core.commit.records.protections import (
    DELETION_INTENT,
    DELETION_INTENT_S,
    CheckpointKey,
)
from dist_ckpt.core.commit.records.record_store import read_annotations
from dist_ckpt.core.commit.records.recorded_checks import put_check
from dist_ckpt.core.commit.removal import (
    list_all_garbage,
    remove,
    remove_all_garbage,
    remove_garbage,
    remove_superseded,
)
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.core.storage.storage_wrappers import ForwardingStorage, T
from dist_ckpt.errors import ConflictError, ExistsError, NotFoundError, StorageError
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.runs.metrics import put_metrics
from dist_ckpt.runs.prune import (
    GONE_S,
    NEWEST,
    NEWEST_CHECKED,
    NEWEST_WHOLE,
    delete_at,
    free_oldest,
    plan_room,
    prune,
    remove_dead_saves,
)
from dist_ckpt.runs.retention_policy import RetentionPolicy, best, last
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from long_mode import sampled_calls
from run_folders import ROOT, committed, put

LAST = last(1)


class Clock:
    """The storage's clock."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(clock: Clock) -> MemoryStorage:
    return MemoryStorage({ROOT: None}, clock=clock)


def subject(storage: Storage, where: CheckpointKey) -> CheckpointRef:
    return CheckpointRef(storage, ROOT, f"{ROOT}/step-{where[0]}", where)


def pruned(
    storage: Storage, policy: RetentionPolicy = LAST, *, dry_run: bool = False
) -> dict[int, str]:
    """Prune; return what keeps each step, "" if it is gone."""
    found = prune(storage, ROOT, policy, is_whole=lambda _: True, dry_run=dry_run)
    return {one.step or 0: "; ".join(told) for one, told in found}


def steps(storage: Storage) -> list[int]:
    names = [e.name for e in storage.list(ROOT) if e.name.startswith("step-")]
    return sorted(int(name.removeprefix("step-")) for name in names)


def test_what_no_rule_keeps_is_removed_with_its_folder_and_facts(storage: MemoryStorage) -> None:
    for step in (1, 2, 3, 4):
        put(storage, committed(storage, step), "metrics", {"loss": abs(step - 2)})
    told = pruned(storage, last(1) | best(1, min="loss"))
    assert (told[1], told[3]) == ("", "")
    assert told[2] == "best(1, min='loss')"
    assert told[4] == f"last(1); {NEWEST}; {NEWEST_WHOLE}"
    assert steps(storage) == [2, 4]
    assert {fact.step for fact in read_annotations(storage, ROOT)} == {2, 4}
    assert [e.name for e in storage.list(f"{ROOT}/.annotations")] == ["2", "4"]


def test_a_dry_run_tells_the_same_and_changes_nothing(storage: MemoryStorage) -> None:
    for step in (1, 2, 3):
        committed(storage, step)
    before = storage.tree()
    dry = pruned(storage, dry_run=True)
    assert storage.tree() == before
    assert pruned(storage) == dry
    assert steps(storage) == [3]


class FullStorage(FaultyStorage):
    """Has no byte free until a file is removed. A folder without a new name needs no byte."""

    def __init__(self, inner: Storage, code: int) -> None:
        super().__init__(inner)
        self._full: OSError | None = OSError(code, os.strerror(code))

    def call(self, what: str, act: Callable[[], T]) -> T:
        if self._full is not None and what.startswith("create "):
            raise StorageError(f"{what}: {self._full}") from self._full
        result = act()
        if what.startswith("remove "):
            self._full = None
        return result


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("how", ["prune", "delete"])
def test_a_full_disk_is_pruned(storage: MemoryStorage, how: str, code: int) -> None:
    for step in (1, 2):
        where = committed(storage, step)
        put(storage, where, "metrics", {"loss": 1.0})
    full = FullStorage(storage, code)
    remove = {
        "prune": lambda: pruned(full),
        "delete": lambda: delete_at(full, f"{ROOT}/step-1", force=False),
    }[how]
    with pytest.raises(StorageError, match="create "):  # no annotation that may be removed
        remove()
    assert steps(storage) == [1, 2]
    put(storage, (1, list_attempts(storage, f"{ROOT}/step-1")[0]), "saved", {"write_s": 1.0})
    remove()
    assert steps(storage) == [2]
    assert {fact.step for fact in read_annotations(storage, ROOT)} == {2}


def test_pins_tags_and_holds_keep_until_they_are_taken_away(storage, clock) -> None:
    wheres = [committed(storage, step) for step in range(1, 6)]
    pin(subject(storage, wheres[0]), "the paper")
    tag(subject(storage, wheres[1]), "release")
    hold = Lease(subject(storage, wheres[2]), 60.0)
    hold.take()
    told = pruned(storage)
    assert (told[1], told[2]) == ("pinned: the paper", "tag 'release'")
    assert told[3].startswith("leased by process")
    assert steps(storage) == [1, 2, 3, 5]
    tag(subject(storage, wheres[4]), "release")
    unpin(subject(storage, wheres[0]))
    clock.now += 61
    assert [told for told in pruned(storage).values() if told][1:] == []
    assert steps(storage) == [5]


def test_the_newest_and_the_newest_that_is_whole_or_checked_are_never_removed(storage) -> None:
    wheres = {step: committed(storage, step) for step in range(1, 6)}
    put(storage, wheres[2], "verified", {"level": "full"})
    policy = best(1, min="loss", unmeasured=0)
    put(storage, wheres[1], "metrics", {"loss": 1})
    found = prune(storage, ROOT, policy, is_whole=lambda one: one.step == 3)
    told = {one.step: reasons for one, reasons in found}
    assert told == {
        1: ("best(1, min='loss', unmeasured=0)",),
        2: (NEWEST_CHECKED,),
        3: (NEWEST_WHOLE,),
        4: (),
        5: (NEWEST,),
    }


def test_what_is_left_behind_is_kept_by_pins_only(storage: MemoryStorage) -> None:
    first = committed(storage, 1, start=1)
    committed(storage, 8, start=1)
    pinned = committed(storage, 9, start=1)
    begin_incarnation(storage, ROOT, restored=None, why="", by="")
    begin_incarnation(storage, ROOT, restored=first, why="", by="")
    committed(storage, 2, start=2)
    pin(subject(storage, pinned), "")
    told = pruned(storage, last(5))
    assert told == {1: "last(5)", 2: f"last(5); {NEWEST}; {NEWEST_WHOLE}", 8: "", 9: "pinned"}


def test_what_was_saved_beside_a_run_is_no_matter_of_its_rules(storage: MemoryStorage) -> None:
    """A save of the final model into the run's folder, for one."""
    begin_incarnation(storage, ROOT, restored=None, why="", by="")
    for step in (1, 2):
        committed(storage, step, start=1)
    committed(storage, 3, name="final")
    found = prune(storage, ROOT, last(1), is_whole=lambda _: True, incarnation=Incarnation(ROOT, 1))
    told = {one.name: reasons for one, reasons in found}
    assert told["final"] == ("no incarnation of the run has saved it: remove it by dist-ckpt rm",)
    assert told["step-1"] == ()
    assert step_at(storage, f"{ROOT}/final") == 3


def test_of_one_step_the_highest_attempt_counts_and_all_are_kept(storage: MemoryStorage) -> None:
    committed(storage, 1)
    committed(storage, 5, start=1)
    committed(storage, 5, name="step-5-of-8")
    found = prune(storage, ROOT, last(1), is_whole=lambda _: True)
    assert [(one.name, bool(told)) for one, told in found] == [
        ("step-1", False),
        ("step-5-of-8", True),
        ("step-5", True),
    ]


def test_what_is_not_committed_or_has_no_step_is_left(storage: MemoryStorage) -> None:
    committed(storage, 7)
    committed(storage, None, name="final")
    committed(storage, 2)
    claim(storage, f"{ROOT}/step-2", overwrite=True, by="a save")
    claim(storage, f"{ROOT}/step-3", overwrite=False, by="a save")
    found = prune(storage, ROOT, last(1), is_whole=lambda _: True)
    told = {one.name: reasons for one, reasons in found}
    assert told["step-3"] == ("it is open: remove it by dist-ckpt gc or rm",)
    assert told["final"] == ("it has no step",)
    assert told["step-2"] == ("a save over it is in progress, or died",)


def test_once_a_newer_start_has_begun_an_older_one_prunes_nothing(storage: MemoryStorage) -> None:
    for step in (1, 2):
        committed(storage, step, start=1)
    own = begin_incarnation(storage, ROOT, restored=(0, Attempt(1, "0" * 16)), why="", by="a")
    begin_incarnation(storage, ROOT, restored=(2, Attempt(1001, "0" * 16)), why="", by="b")
    run = Incarnation(ROOT, own.number)
    before = storage.tree()
    with pytest.raises(ConflictError, match="incarnation 2 of this run, b, has taken over"):
        prune(storage, ROOT, last(1), is_whole=lambda _: True, incarnation=run)
    assert {p: d for p, d in storage.tree().items() if ".annotations" not in p} == before


def test_what_a_start_goes_back_to_during_a_prune_is_not_removed(storage: MemoryStorage) -> None:
    """Else all that is left would be what that start has orphaned."""
    first = committed(storage, 1, start=1)
    committed(storage, 2, start=1)
    begin_incarnation(storage, ROOT, restored=None, why="", by="a")

    def goes_back(_: RunCheckpoint) -> bool:
        begin_incarnation(storage, ROOT, restored=first, why="", by="b")
        return True

    with pytest.raises(
        ConflictError, match="incarnation 2 of this run, b, has begun during the prun"
    ):
        prune(storage, ROOT, last(1), is_whole=goes_back)
    assert steps(storage) == [1, 2]


def test_nothing_is_removed_if_the_newest_goes_during_a_prune(storage: MemoryStorage) -> None:
    """A strip or an overwrite replaces its attempt, and `rm` removes it."""
    for step in (1, 2, 3):
        committed(storage, step)

    def goes(newest: RunCheckpoint) -> bool:
        remove(storage, newest.path, list_attempts(storage, newest.path)[-1])
        return True

    with pytest.raises(NotFoundError, match="step-3 was removed or replaced during the prune"):
        prune(storage, ROOT, last(1), is_whole=goes)
    assert [len(list_attempts(storage, f"{ROOT}/step-{step}")) for step in (1, 2, 3)] == [1, 1, 0]


def test_what_a_newer_start_has_saved_is_left(storage: MemoryStorage) -> None:
    committed(storage, 1, start=2)
    committed(storage, 2, start=1)
    found = prune(storage, ROOT, last(1), is_whole=lambda _: True, incarnation=Incarnation(ROOT, 1))
    assert found[0][1] == ("a newer incarnation saved it",)


def test_dead_saves_of_a_run_are_removed_and_running_ones_are_not(storage: MemoryStorage) -> None:
    for _ in range(2):
        begin_incarnation(storage, ROOT, restored=None, why="", by="")
    committed(storage, 1, start=1)
    old, own = Incarnation(ROOT, 1), Incarnation(ROOT, 2)
    dead = Attempt(1000, "d" * 16), Attempt(2000, "e" * 16), Attempt(1, "f" * 16)
    for attempt in dead:
        make_folders(storage, f"{ROOT}/step-2/{attempt}", [])
    path = f"{ROOT}/step-3"
    given_up = claim(storage, path, overwrite=False, by="a save", incarnation=own)
    try_abandon(storage, path, given_up.attempt, by="a save", reason="it failed")
    with pytest.raises(ConflictError, match="has taken over"):
        remove_dead_saves(storage, ROOT, old)
    remove_dead_saves(storage, ROOT, own)
    assert step_at(storage, f"{ROOT}/step-1") == 1
    assert [*list_attempts(storage, f"{ROOT}/step-2")] == [dead[2], dead[1]]
    assert list_attempts(storage, path) == []


def alive(*infos: str) -> Listing:
    """Return a run of steps from 1 on, each 10 bytes: "v" is verified, "p" pinned, "d" damaged."""
    return Listing(
        ROOT,
        tuple(
            RunCheckpoint(
                f"step-{step}",
                f"{ROOT}/step-{step}",
                "committed",
                step,
                nbytes=10,
                attempt=Attempt(1000, f"{step:016x}").name,
                is_verified="v" in info,
                damage="rot" if "d" in info else None,
                protected_by=("pinned",) if "p" in info else (),
            )
            for step, info in enumerate(infos, start=1)
        ),
        (),
    )


@pytest.mark.parametrize(
    ("infos", "missing", "freed"),
    [
        (("", "", "v", ""), 1, [1]),
        (("", "", "v", ""), 11, [1, 2]),
        (("", "", "v", ""), 21, []),  # it would not help
        (("p", "", "v"), 1, [2]),
        (("p", "v"), 1, []),
        (("d", "", "v"), 1, [2]),  # its good parts may repair another
        (("", "vd"), 1, []),
        (("", "", ""), 1, []),  # none is recorded as whole
        (("v",), 1, []),
        (("v", "", ""), 1, []),  # nothing newer is
        ((), 1, []),
    ],
)
def test_only_what_is_older_than_a_whole_one_makes_room(
    infos: tuple[str, ...], missing: int, freed: list[int]
) -> None:
    assert [info.step for info in plan_room(alive(*infos), missing)] == freed


@pytest.mark.parametrize("whole", [False, True])
def test_nothing_makes_room_if_the_newer_one_is_not_whole_any_more(
    storage: MemoryStorage, whole: bool
) -> None:
    begin_incarnation(storage, ROOT, restored=None, why="", by="")
    wheres = [committed(storage, step, start=1) for step in (1, 2, 3)]
    put(storage, wheres[1], "verified", {"level": "full"})
    run = Incarnation(ROOT, 1)
    free_oldest(storage, ROOT, 1, is_whole=lambda one: whole and one.step == 2, incarnation=run)
    assert steps(storage) == ([2, 3] if whole else [1, 2, 3])


def test_bad_roots_are_refused(storage: MemoryStorage) -> None:
    committed(storage, 1)
    with pytest.raises(ValueError, match="is one checkpoint: give the folder"):
        prune(storage, f"{ROOT}/step-1", last(1), is_whole=lambda _: True)
    with pytest.raises(NotFoundError):
        prune(storage, "/nowhere", last(1), is_whole=lambda _: True)


def test_facts_of_what_is_gone_are_removed_after_a_day(storage, clock) -> None:
    where = committed(storage, 1)
    put(storage, where, "metrics", {"loss": 1})
    put(storage, (9, Attempt(3, "f" * 16)), "metrics", {"loss": 1})
    open_one = claim(storage, f"{ROOT}/step-8", overwrite=False, by="a save").attempt
    put(storage, (8, open_one), "metrics", {"loss": 1})
    pruned(storage)
    assert {fact.step for fact in read_annotations(storage, ROOT)} == {1, 8, 9}
    clock.now += GONE_S + 1
    pruned(storage)
    assert {fact.step for fact in read_annotations(storage, ROOT)} == {1, 8}


class _NfsStorage(ForwardingStorage):
    """Renames each removed shard file, as an NFS client does while a process reads it."""

    def remove(self, path: str) -> None:
        if not path.endswith(".safetensors"):
            super().remove(path)
            return
        self.rename(path, f"{path.rpartition('/')[0]}/.nfs{'0' * 15}1{'0' * 8}")

    def end_reads(self) -> None:
        assert isinstance(self.inner, MemoryStorage)
        for path in self.inner.tree():
            if "/.nfs" in path:
                self.inner.remove(path)


@pytest.mark.parametrize("how", ["prune", "delete", "delete and gc"])
def test_a_folder_that_waits_for_readers_on_nfs_is_removed_later(
    storage: MemoryStorage, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    nfs = _NfsStorage(storage)
    put(storage, committed(storage, 1), "metrics", {"loss": 1})
    committed(storage, 2)
    if how == "prune":
        assert pruned(nfs)[1] == ""
    else:
        delete_at(nfs, f"{ROOT}/step-1", force=False)
    for _ in range(2):
        assert steps(nfs) == [1, 2]
        assert [info.step for info in list_run(nfs, ROOT, now=0).checkpoints] == [2]
        assert {stored.name.kind for stored in read_annotations(nfs, ROOT)} == {DELETION_INTENT}
        pruned(nfs)
    assert "not dist_ckpt's" not in caplog.text
    nfs.end_reads()
    if how == "delete and gc":
        assert len(remove_all_garbage(nfs, ROOT, grace_s=0)) == 1
        assert steps(nfs) == [2]
    pruned(nfs)
    assert steps(nfs) == [2]
    assert read_annotations(nfs, ROOT) == ()


@pytest.mark.parametrize("collector", ["prune", "gc"])
def test_temporary_records_of_killed_commands_are_removed_by_age(storage, clock, collector) -> None:
    where = committed(storage, 1)
    file = put(storage, where, "metrics", {"loss": 1})
    lost, new = (f"{ROOT}/.annotations/{step}/{where[1]}/.record-{'0' * 16}.tmp" for step in (9, 1))
    make_folders(storage, lost.rpartition("/")[0], [])
    storage.create(lost, 0).discard()
    clock.now += GONE_S + 1
    storage.create(new, 0).discard()

    def collected() -> tuple[str, ...]:
        before = storage.tree()
        if collector == "prune":
            pruned(storage)
            return tuple(before.keys() - storage.tree().keys())
        shown = list_all_garbage(storage, ROOT, grace_s=3600, now=clock.now)
        assert storage.tree() == before
        assert remove_all_garbage(storage, ROOT, grace_s=3600) == shown
        return shown

    assert lost in collected()
    assert {e.name for e in storage.list(f"{ROOT}/.annotations")} == {"1"}
    clock.now += 3600
    assert collected() == ()
    clock.now += GONE_S
    assert collected() == (new,)
    assert read_annotations(storage, ROOT)[0].values == {"loss": 1}
    assert storage.open(file).nbytes > 0


def test_an_annotation_whose_temporary_file_was_collected_is_written_again(storage, clock) -> None:
    where = committed(storage, 1)

    class Slow(ForwardingStorage):
        """Is stopped for a long time before its first rename."""

        def rename(self, old: str, new: str) -> None:
            if clock.now == 1e9:
                clock.now += 3601
                assert remove_all_garbage(storage, ROOT, grace_s=3600) == (old,)
            super().rename(old, new)

    put(Slow(storage), where, "metrics", {"loss": 1})
    assert [stored.values for stored in read_annotations(storage, ROOT)] == [{"loss": 1}]


def test_with_a_deleted_checkpoint_its_tag_goes_and_does_not_fall_back(storage) -> None:
    older, newer = committed(storage, 1), committed(storage, 2)
    tag(subject(storage, older), "release")
    tag(subject(storage, newer), "release")
    with pytest.raises(
        ConflictError, match=r"is protected: tag 'release'\. Remove the protection first"
    ):
        delete_at(storage, f"{ROOT}/step-2", force=False)
    delete_at(storage, f"{ROOT}/step-2", force=True)
    assert read_annotations(storage, ROOT) == ()
    assert steps(storage) == [1]


@pytest.mark.parametrize("prunes", [False, True])
def test_what_is_known_of_a_checkpoint_outlives_a_copy_of_it(tmp_path: Path, prunes: bool) -> None:
    """They are of one attempt, and so are the facts."""
    storage, root = LocalStorage(), str(tmp_path)
    where = committed(storage, 1, root=root)
    put_metrics(storage, root, where, {"loss": 0.5})
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-1-copy")
    before = read_annotations(storage, root)
    if prunes:  # the copy is the newest, and no rule keeps the step
        prune(storage, root, best(1, min="accuracy", unmeasured=0), is_whole=lambda _: True)
    else:
        delete_at(storage, f"{root}/step-1-copy", force=False)
    (left,) = list_run(storage, root, now=0.0).checkpoints
    assert left.metrics == {"loss": 0.5}
    assert read_annotations(storage, root) == before
    delete_at(storage, left.path, force=False)
    assert read_annotations(storage, root) == ()


def test_what_is_held_is_not_deleted(storage: MemoryStorage) -> None:
    where = committed(storage, 1)
    Lease(subject(storage, where), 60.0).take()
    with pytest.raises(ConflictError, match="leased by process"):
        delete_at(storage, f"{ROOT}/step-1", force=False)
    assert step_at(storage, f"{ROOT}/step-1") == 1


@pytest.mark.parametrize("kind", ["pin", "tag", "hold"])
def test_what_somebody_keeps_is_not_overwritten(storage: MemoryStorage, kind: str) -> None:
    where = committed(storage, 1)
    fact = put(storage, where, kind, {"pinned": True, "1": 60})
    before = storage.tree()
    with pytest.raises(ExistsError, match=r"is protected: .* Remove the protection first"):
        claim(storage, f"{ROOT}/step-1", overwrite=True, by="a save")
    assert storage.tree() == before
    storage.remove(fact)
    claim(storage, f"{ROOT}/step-1", overwrite=True, by="a save")


def test_what_a_start_replaces_stays_while_it_is_held(storage, clock) -> None:
    old = committed(storage, 1, start=1)
    begin_incarnation(storage, ROOT, restored=None, why="", by="")
    Lease(subject(storage, old), 60.0).take()
    claim(storage, f"{ROOT}/step-1", overwrite=False, by="a save", incarnation=Incarnation(ROOT, 2))
    new = committed(storage, 1, start=2)
    remove_superseded(storage, f"{ROOT}/step-1", new[1])
    remove_garbage(storage, f"{ROOT}/step-1", grace_s=60)
    assert {old[1], new[1]} <= set(list_attempts(storage, f"{ROOT}/step-1"))
    clock.now += 61
    remove_garbage(storage, f"{ROOT}/step-1", grace_s=60)
    assert list_attempts(storage, f"{ROOT}/step-1") == [new[1]]


COLLECTORS: dict[str, Callable[[Storage], object]] = {
    "gc": lambda storage: remove_all_garbage(storage, ROOT, grace_s=60),
    "a run": lambda storage: remove_dead_saves(storage, ROOT, Incarnation(ROOT, 1)),
    "prune --damaged": lambda storage: prune(
        storage, ROOT, LAST, is_whole=lambda _: True, damaged=True
    ),
}


@pytest.mark.parametrize("collector", COLLECTORS)
def test_what_a_damaged_attempt_has_replaced_stays_while_its_damage_is_recorded(
    storage, caplog, collector
) -> None:
    """It was the last good copy of its step, and `gc` removed it."""
    old = committed(storage, 1)
    new = committed(storage, 1, start=1)
    committed(storage, 2, start=1)
    path = f"{ROOT}/step-1"
    put_check(storage, ROOT, new, "full", "a flipped bit")
    assert list_all_garbage(storage, ROOT, grace_s=60, now=0.0) == ()
    COLLECTORS[collector](storage)
    assert list_attempts(storage, path) == [old[1], new[1]]
    assert f"{path}: {old[1]} stays, because {new[1]} is damaged: a flipped bit" in caplog.text
    put_check(storage, ROOT, new, "full")
    assert remove_garbage(storage, path, grace_s=60) == (old[1].name,)


def test_a_damaged_checkpoint_that_is_pinned_is_not_deleted(storage: MemoryStorage) -> None:
    where = committed(storage, 1)
    pin(subject(storage, where), "")
    file = f"{ROOT}/step-1/{where[1]}/index.json"
    storage.remove(file)
    storage.create(file, 2).write_at(0, b"{}")
    with pytest.raises(ConflictError, match="pinned"):
        delete_at(storage, f"{ROOT}/step-1", force=False)
    delete_at(storage, f"{ROOT}/step-1", force=True)
    assert read_annotations(storage, ROOT) == ()


def test_a_hold_on_what_is_gone_or_about_to_go_is_refused(storage, clock) -> None:
    where = committed(storage, 1)
    gone = CheckpointRef(storage, ROOT, f"{ROOT}/step-1", (1, Attempt(9, "f" * 16)))
    with pytest.raises(NotFoundError, match="was removed"):
        Lease(gone, 60.0).take()
    mark = subject(storage, where).put("mark", {"1" * 16: "step-1"})
    with pytest.raises(NotFoundError, match="is about to be removed by process"):
        Lease(subject(storage, where), 60.0).take()
    assert [fact.name for fact in read_annotations(storage, ROOT)] == [mark]
    clock.now += DELETION_INTENT_S + 1
    Lease(subject(storage, where), 60.0).take()


def test_who_stood_still_for_too_long_removes_nothing(storage, monkeypatch) -> None:
    where = committed(storage, 1)
    committed(storage, 2)
    times = iter([0.0, DELETION_INTENT_S])
    monkeypatch.setattr(protection_protocol, "monotonic", lambda: next(times))
    assert "took so long" in pruned(storage)[1]
    assert list_attempts(storage, f"{ROOT}/step-1") == [where[1]]


# --- killed anywhere -------------------------------------------------------------------------


class _KilledError(Exception):
    """The process is gone: whatever it would do about it, all its calls fail."""


def is_whole_or_gone(storage: Storage) -> None:
    """Check that each step is there wholly, or not at all."""
    for step in steps(storage):
        assert step_at(storage, f"{ROOT}/step-{step}") in (step, None)


def begun(storage: Storage) -> None:
    for step in (1, 2, 3):
        put(storage, committed(storage, step), "metrics", {"loss": step})


@pytest.mark.parametrize("done", [False, True])
def test_a_prune_that_is_killed_at_any_call_is_finished_by_the_next(done: bool) -> None:
    for number in sampled_calls(4):
        inner = MemoryStorage({ROOT: None})
        begun(inner)
        storage = FaultyStorage(
            inner, fail_at_call=number, error=_KilledError(), sticky=True, done=done
        )
        try:
            pruned(storage)
        except _KilledError:
            is_whole_or_gone(inner)
        pruned(inner)
        assert steps(inner) == [3], storage.failed
        assert {fact.step for fact in read_annotations(inner, ROOT)} == {3}, storage.failed
        if not storage.failed:
            break
    assert number > 60


@pytest.mark.parametrize("done", [False, True])
def test_a_prune_that_fails_at_any_call_says_so_or_has_worked(done: bool) -> None:
    for number in sampled_calls(4):
        inner = MemoryStorage({ROOT: None})
        begun(inner)
        error = StorageError("planted")
        storage = FaultyStorage(inner, fail_at_call=number, error=error, done=done)
        try:
            pruned(storage)
        except StorageError:
            is_whole_or_gone(inner)
        pruned(inner)
        assert steps(inner) == [3], storage.failed
        assert {fact.step for fact in read_annotations(inner, ROOT)} == {3}, storage.failed
        if not storage.failed:
            break


def test_a_power_cut_at_any_time_leaves_nothing_half() -> None:
    disk = CrashStorage()
    disk.make_folder(ROOT)
    disk.sync("/")
    begun(disk.client("saver"))
    for folder in (ROOT, *(f"{ROOT}/step-{step}" for step in (1, 2, 3))):
        disk.sync(folder)
    disk.mark("saved")
    pruned(disk.client("pruner"))
    disk.mark("pruned")
    count = 0
    for point, left in states(disk.log):
        if "saved" not in point.marks:
            continue
        count += 1
        is_whole_or_gone(left)
        assert step_at(left, f"{ROOT}/step-3") == 3
        pruned(left)
        assert [step for step in steps(left) if step_at(left, f"{ROOT}/step-{step}")] == [3]
    assert count > 20


def test_a_hold_at_any_moment_of_a_prune_is_refused_or_kept() -> None:
    outcomes: list[str] = []
    calls = 1
    while len(outcomes) < calls:
        inner = MemoryStorage({ROOT: None})
        first = committed(inner, 1)
        committed(inner, 2)
        storage = _HoldsBefore(inner, len(outcomes) + 1, Lease(subject(inner, first), 60.0))
        pruned(storage)
        assert (step_at(inner, f"{ROOT}/step-1") == 1) == (storage.outcome == "held")
        outcomes.append(storage.outcome)
        calls = storage.calls
    assert outcomes == sorted(outcomes)  # once it is refused, it stays so
    assert {"held", "refused"} <= set(outcomes)


class _HoldsBefore(FaultyStorage):
    """Takes a hold before its n-th call."""

    def __init__(self, inner: Storage, number: int, hold: Lease) -> None:
        super().__init__(inner)
        self.outcome = ""
        self._number = number
        self._hold = hold

    def call(self, what: str, act: Callable[[], T]) -> T:
        if self.calls + 1 == self._number:
            try:
                self._hold.take()
                self.outcome = "held"
            except NotFoundError:
                self.outcome = "refused"
        return super().call(what, act)
