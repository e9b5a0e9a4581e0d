"""A backup is a checkpoint of its own that no rule removes, whole or not there at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import dist_ckpt as dc
from dist_ckpt.core.commit.attempts import find_checkpoint
from dist_ckpt.core.commit.records.record_store import read_annotations
from dist_ckpt.core.commit.removal import remove_all_garbage, remove_garbage
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.core.storage.storage_wrappers import T
from dist_ckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    ExistsError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.runs.metrics import put_metrics
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.tools.rewrite.copying import plan_backup_at
from linking import PATH, ROOT, NoLinks, inodes, number_at, save, state
from long_mode import IS_LONG, sampled_calls

torch = pytest.importorskip("torch")

BACKUP = f"{ROOT}/backup/s1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a run of three steps, the first the best."""
    for step in (1, 2, 3):
        dc.save(state(step), tmp_path / "run" / f"s{step}", step=step)
        dc.Run(tmp_path / "run").metrics(step, {"loss": float(step)})
    return tmp_path / "run"


def kept(storage: Storage, *, overwrite: bool = False) -> str:
    return plan_backup_at(storage, PATH, overwrite=overwrite).run(None)


# --- what it is ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize(
    ("link", "linked"),
    [
        (lambda root: dc.backup(root / "s1"), "backup/s1"),
        (lambda root: dc.copy(root / "s1", root / "copy", link=True), "copy"),
        (lambda root: dc.strip(root / "s1", "optim"), "s1"),
    ],
)
def test_a_linked_file_gets_new_times_where_the_system_allows_it(
    tmp_path: Path,
    link: Callable[[Path], object],
    linked: str,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dc.save({**state(1), "optim": {"x": torch.ones(3)}}, tmp_path / "s1", step=1)
    (before,) = (tmp_path / "s1").glob("a*/model*.safetensors")
    os.utime(before, (1e9, 1e9))
    inode = before.stat().st_ino

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    if is_refused:
        monkeypatch.setattr("os.utime", refuse)
    link(tmp_path)
    (after,) = (tmp_path / linked).glob("a*/model*.safetensors")
    assert after.stat().st_ino == inode
    assert (after.stat().st_mtime == 1e9) is is_refused
    assert is_refused or after.stat().st_atime > 1e9  # a check of the header may renew it too


def test_a_backup_shares_the_files_and_stays_when_the_checkpoint_goes(root: Path) -> None:
    assert dc.backup(f"{root}@1") == f"{root}/backup/s1"
    assert inodes(root / "s1") == inodes(root / "backup" / "s1")
    dc.Run(root).prune(dc.keep.last(1))
    assert [one.step for one in dc.checkpoints(root)] == [3]
    assert [(one.step, one.metrics) for one in dc.checkpoints(root / "backup")] == [
        (1, {"loss": 1.0})
    ]
    assert dc.verify(root / "backup" / "s1").ok
    assert number_at(LocalStorage(), f"{root}/backup/s1") == 1
    with dc.open(f"{root}/backup@min:loss") as checkpoint:
        assert checkpoint.step == 1


def test_no_collector_and_no_prune_of_the_run_touches_it(root: Path) -> None:
    dc.backup(f"{root}/s1")
    before = sorted(root.joinpath("backup").rglob("*"))
    dc.Run(root).prune(dc.keep.last(1))
    remove_all_garbage(LocalStorage(), str(root), grace_s=-1)
    assert sorted(root.joinpath("backup").rglob("*")) == before


def test_the_same_save_is_kept_once_and_what_is_measured_later_is_added(root: Path) -> None:
    first = dc.backup(f"{root}/s1")
    before = inodes(first), os.listdir(first)
    dc.Run(root).metrics(1, {"late": 2.0})
    assert dc.backup(f"{root}/s1") == first
    assert (inodes(first), os.listdir(first)) == before
    assert dc.checkpoints(first)[0].metrics == {"loss": 1.0, "late": 2.0}
    num_facts = len(read_annotations(LocalStorage(), f"{root}/backup"))
    dc.backup(f"{root}/s1")
    assert len(read_annotations(LocalStorage(), f"{root}/backup")) == num_facts


def test_another_save_of_the_step_is_not_replaced_unless_that_is_asked_for(root: Path) -> None:
    dc.backup(f"{root}/s1")
    dc.save(state(7), root / "s1", step=1, overwrite=True)
    with pytest.raises(ExistsError, match="overwrite=True"):
        dc.backup(f"{root}/s1")
    assert number_at(LocalStorage(), f"{root}/backup/s1") == 1
    dc.backup(f"{root}/s1", overwrite=True)
    assert number_at(LocalStorage(), f"{root}/backup/s1") == 7


def test_a_checkpoint_without_a_step_and_outside_a_run_is_kept_too(tmp_path: Path) -> None:
    dc.save(state(4), tmp_path / "final")
    assert dc.backup(tmp_path / "final") == f"{tmp_path}/backup/final"
    assert number_at(LocalStorage(), f"{tmp_path}/backup/final") == 4
    assert sorted(os.listdir(tmp_path)) == ["backup", "final"]


def test_what_lies_at_the_top_of_a_storage_is_kept_too() -> None:
    storage = MemoryStorage()
    save(storage, 1, "/s1")
    assert plan_backup_at(storage, "/s1", overwrite=False).run(None) == "/backup/s1"
    assert number_at(storage, "/backup/s1") == 1


def test_a_root_that_is_a_symbolic_link_is_followed_once(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert dc.backup(f"{tmp_path}/link@1") == f"{root}/backup/s1"
    assert inodes(root / "s1") == inodes(root / "backup" / "s1")


def test_what_cannot_be_kept_is_refused_by_name(root: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint of step 9"):
        dc.backup(f"{root}@9")
    with pytest.raises(NotFoundError):
        dc.backup(root / "none")
    dc.backup(f"{root}/s1")
    with pytest.raises(ValueError, match="is a backup itself"):
        dc.backup(f"{root}/backup/s1")
    with pytest.raises(TypeError, match="overwrite"):
        dc.backup(f"{root}/s1", overwrite="yes")  # type: ignore[arg-type]
    dc.save(state(1), root.parent / "odd" / "backup")
    dc.save(state(1), root.parent / "odd" / "s1")
    with pytest.raises(ExistsError, match="is a checkpoint, so it cannot hold backups"):
        dc.backup(root.parent / "odd" / "s1")


def test_the_source_cannot_be_deleted_while_it_is_kept(root: Path) -> None:
    class Deleting(LocalStorage):
        def link(self, old: str, new: str) -> None:
            with pytest.raises(ConflictError, match="leased by"):
                dc.delete(root / "s1")
            super().link(old, new)

    plan_backup_at(Deleting(), f"{root}/s1", overwrite=False).run(None)
    assert dc.checkpoints(root)[0].leases == ()
    assert number_at(LocalStorage(), f"{root}/backup/s1") == 1


# --- copies ----------------------------------------------------------------------------------


def test_where_there_are_no_links_every_byte_is_copied(root: Path) -> None:
    whole = torch.arange(3 << 19, dtype=torch.float32)  # of two blocks
    dc.save({"model": {"w": whole, "b": whole[:5]}}, root / "s4", step=4)
    plan_backup_at(NoLinks(LocalStorage()), f"{root}/s4", overwrite=False).run(None)
    mine, theirs = inodes(root / "s4"), inodes(root / "backup" / "s4")
    assert mine.keys() == theirs.keys()
    assert not {*mine.values()} & {*theirs.values()}
    assert dc.verify(root / "backup" / "s4").ok


@pytest.mark.parametrize("name", ["model-00000.safetensors", "objects.msgpack"])
@pytest.mark.parametrize("at", [20, -1])
def test_a_damaged_file_is_not_copied(name: str, at: int) -> None:
    storage = MemoryStorage({ROOT: None})
    attempt = save(storage, 1).attempt
    tree = dict(storage.tree())
    data = bytearray(tree[f"{PATH}/{attempt}/{name}"] or b"")
    data[at] ^= 1
    storage = MemoryStorage({**tree, f"{PATH}/{attempt}/{name}": bytes(data)})
    with pytest.raises(CorruptError, match=name):
        kept(NoLinks(storage))
    assert [entry.name for entry in storage.list(ROOT)] == ["s1"]


def test_no_file_of_a_checkpoint_that_is_recorded_as_damaged_is_linked(root: Path) -> None:
    dc.save({"model": {"w": torch.ones(64)}}, root / "s4", step=4)
    (file,) = root.glob("s4/a*/model-00000.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert not dc.verify(root / "s4").ok
    with pytest.raises(CorruptError):
        dc.copy(root / "s4", root / "copy", link=True)
    with pytest.raises(CorruptError):
        dc.backup(root / "s4")
    file.write_bytes(data)
    assert dc.verify(dc.backup(root / "s4")).ok


def test_a_cut_off_or_missing_file_is_not_copied() -> None:
    storage = MemoryStorage({ROOT: None})
    attempt = save(storage, 1).attempt
    for name in ("model-00000.safetensors", "objects.msgpack"):
        file = f"{PATH}/{attempt}/{name}"
        tree = dict(storage.tree())
        data = tree.pop(file) or b""
        for left in ({}, {file: data[:-1]}, {file: data + b"1"}):
            with pytest.raises(CorruptError, match=name):
                kept(NoLinks(MemoryStorage({**tree, **left})))


# --- crashes and faults ----------------------------------------------------------------------


def backed_up(disk: CrashStorage, storage: Storage) -> None:
    disk.make_folder(ROOT)
    disk.sync("/")
    index = save(disk, 1)
    put_metrics(disk, ROOT, (1, find_checkpoint(disk, PATH)[0]), {"loss": 0.5})
    assert index.step == 1
    disk.mark("saved")
    kept(storage)
    disk.mark("kept")


@pytest.mark.parametrize("wrap", [lambda disk: disk, NoLinks], ids=["linked", "copied"])
def test_after_any_crash_the_checkpoint_is_there_and_the_backup_whole_or_not(wrap) -> None:
    disk = CrashStorage()
    backed_up(disk, wrap(disk))
    tried = 0
    for point, storage in states(disk.log, since="saved", limit=20):
        tried += 1
        assert number_at(storage, PATH) == 1, point
        there = number_at(storage, BACKUP)
        assert there == 1 if "kept" in point.marks else there in (None, 1), point
    assert tried > 20


def test_after_any_crash_a_collector_and_another_backup_find_their_way() -> None:
    disk = CrashStorage()
    backed_up(disk, disk)
    for point, storage in states(disk.log, since="saved", limit=3):
        remove_garbage(storage, BACKUP, grace_s=-1)
        kept(storage)
        assert number_at(storage, BACKUP) == 1, point
        assert len(storage.list(BACKUP)) == 1, point


@pytest.mark.parametrize(
    ("wrap", "done"),
    [(lambda disk: disk, False), (lambda disk: disk, True), (NoLinks, False)],
    ids=["linked, not done", "linked, done but reported as failed", "copied, not done"],
)
def test_an_error_at_any_storage_call_leaves_nothing_that_counts_or_all(wrap, done) -> None:
    num_linked = 0
    for number in sampled_calls(6):
        storage = MemoryStorage({ROOT: None})
        save(storage, 1)
        faulty = FaultyStorage(wrap(storage), fail_at_call=number, done=done)
        error: CheckpointError | None = None
        try:
            kept(faulty)
        except CheckpointError as caught:
            error = caught
        assert number_at(storage, PATH) == 1, faulty.failed
        there = number_at(storage, BACKUP)
        if error is None:
            assert there == 1, faulty.failed
            num_linked += faulty.failed.startswith("link")
        elif there is not None:  # it is there, but the names may not be durable, or metrics lack
            assert (
                "power cut" in str(error)
                or "sync" in faulty.failed
                or ".annotations" in faulty.failed
            )
        kept(storage, overwrite=True)
        assert number_at(storage, BACKUP) == 1, faulty.failed
        if faulty.calls < number:
            break
    # A link that fails is a copy.
    assert num_linked == 3 or not IS_LONG


def test_a_source_that_is_deleted_under_a_backup_is_told_so() -> None:
    storage = MemoryStorage({ROOT: None})
    save(storage, 1, step=None)

    class Deleted(NoLinks):
        def link(self, old: str, new: str) -> None:
            for path in storage.tree():
                if path.startswith(f"{PATH}/a"):
                    storage.rename(path, f"{PATH}/.trash-{path.rpartition('/')[2]}")
                    break
            super().link(old, new)

    with pytest.raises(NotFoundError, match="replaced or deleted"):
        kept(Deleted(storage))
    assert number_at(storage, BACKUP) is None


def test_of_two_backups_at_once_one_is_told_of_the_other_and_one_is_there() -> None:
    storage = MemoryStorage({ROOT: None})
    save(storage, 1)

    class Meeting(FaultyStorage):
        def call(self, what: str, act: object) -> T:  # type: ignore[type-var]
            if what.startswith("link") and not self.failed:
                self.failed = "met"
                kept(storage)
            return act()  # type: ignore[operator,no-any-return]

    with pytest.raises((ConflictError, StorageError)):
        kept(Meeting(storage))
    assert number_at(storage, BACKUP) == 1


def test_a_backup_after_one_that_died_anywhere_outlives_a_power_cut() -> None:
    whole = MemoryStorage({ROOT: None})
    save(whole, 1, step=None)
    counting = FaultyStorage(whole)
    kept(counting)
    for number in range(1, counting.calls + 1):
        disk = CrashStorage()
        disk.make_folder(ROOT)
        disk.sync("/")
        save(disk, 1, step=None)
        dying = FaultyStorage(disk, fail_at_call=number, sticky=True)
        with suppress(CheckpointError):
            kept(dying)
        if not (IS_LONG or dying.failed.startswith("sync")):
            continue
        kept(disk)
        disk.mark("kept")
        for point, storage in states(disk.log, since="kept", limit=5):
            assert number_at(storage, BACKUP) == 1, (point, dying.failed)
