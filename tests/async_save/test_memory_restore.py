"""A restore takes from memory what was saved, whatever was committed of it, and nothing else."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch")


import dist_ckpt as dc
import recovered_checkpoints as kept
from arena_processes import program
from dist_ckpt.async_save.memory_restore import rebuild_index
from dist_ckpt.async_save.snapshots import job_folder
from dist_ckpt.async_save.snapshots.arena import ArenaPool
from dist_ckpt.async_save.snapshots.arena_layout import Snapshot
from dist_ckpt.async_save.snapshots.job_folder import JobFolder, make_job_name, make_root_id
from dist_ckpt.async_save.snapshots.recovered_snapshots import RecoveredSnapshot, open_saves
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.format.filenames import ROOT_ID, parse_attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.index.index_json import decode
from dist_ckpt.core.storage import open_storage


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the checkpoints; shared memory is beside it."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(tmp_path / "shm"))
    return tmp_path / "runs"


@pytest.fixture
def folder(root: Path) -> JobFolder:
    return JobFolder(make_job_name(str(root), make_root_id(*open_storage(root))))


def folders_of_hosts(tmp_path: Path) -> list[JobFolder]:
    """Return the folders of a job on two hosts."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return [JobFolder("job", roots=[str(tmp_path / name)]) for name in ("a", "b")]


def abandon(saved: kept.Saved) -> None:
    """Make a checkpoint one that was never committed: it was given up."""
    attempt = parse_attempt(saved.attempt)
    assert attempt is not None
    os.unlink(f"{saved.path}/{saved.attempt}/index.json")
    assert attempts.try_abandon(*open_storage(saved.path), attempt, by="a test", reason="to see")


def wipe(saved: kept.Saved) -> None:
    """Make what a checkpoint's shard files hold on disk worthless, but for the index."""
    for name in saved.files:
        Path(f"{saved.path}/{saved.attempt}/{name}").write_bytes(b"\xff" * len(saved.files[name]))


def told(caplog: pytest.LogCaptureFixture, *words: str) -> bool:
    return any(all(word in record.getMessage() for word in words) for record in caplog.records)


# --- committed -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("read_once", ["host", "off"])
def test_a_committed_save_is_restored_from_memory_at_any_world_size(
    root, folder, world_size, read_once
):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved)
    wipe(saved)
    reports, states = kept.restore(folder, world_size, read_once=read_once)
    assert kept.step_in(states) == 7
    assert reports is not None
    for report in reports:
        assert (report.path, report.step, report.attempt) == (saved.path, 7, saved.attempt)
        # The index comes from the storage, to the coordinator.
        assert report.storage_reads.nbytes < 4096
    data = sum(report.nbytes_from_memory for report in reports)
    assert data > kept.whole(7).nbytes
    assert "here from memory" in str(reports[0])


def test_what_a_host_does_not_have_comes_from_the_storage(tmp_path, root):
    saved = kept.save(root / "ck", 2, 7)
    hosts = folders_of_hosts(tmp_path)
    kept.keep(hosts[0], saved, ranks=[0])
    reports, states = kept.restore(hosts, 2)
    assert kept.step_in(states) == 7
    assert reports is not None
    half = kept.whole(7).nbytes // 2
    assert reports[0].nbytes_from_memory > half
    assert reports[0].storage_reads.nbytes < half
    assert reports[1].nbytes_from_memory == 0
    assert reports[1].storage_reads.nbytes > half


def test_a_rank_whose_part_was_not_sealed_is_read_from_the_storage(root, folder):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved, seal=[1])
    reports, states = kept.restore(folder, 2, read_once="off")
    assert kept.step_in(states) == 7
    assert reports is not None
    half = kept.whole(7).nbytes // 2
    assert reports[0].storage_reads.nbytes > half
    assert reports[1].nbytes_from_memory > half


def test_the_newest_save_is_restored(root, folder):
    for arena, step in ((1, 9), (0, 8)):
        kept.keep(folder, kept.save(root / f"ck-{step}", 2, step), arena=arena)
    assert kept.step_in(kept.restore(folder, 2)[1]) == 9


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_byte_in_memory_sends_the_load_to_the_storage(root, folder, caplog, world_size):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved)
    row = kept.whole(7)[14].numpy().tobytes()
    kept.edit_arena(folder, 1, 0, row, row[:-1] + b"?")
    reports, states = kept.restore(folder, world_size)
    assert kept.step_in(states) == 7
    assert reports is not None
    assert all(report.nbytes_from_memory == 0 for report in reports)
    assert told(caplog, "model.w rows", "damaged", "Everything is now read from storage")


def test_damage_in_the_memory_of_one_host_sends_all_ranks_to_the_storage(tmp_path, root):
    saved = kept.save(root / "ck", 2, 7)
    hosts = folders_of_hosts(tmp_path)
    kept.keep(hosts[1], saved, ranks=[1])
    row = kept.whole(7)[14].numpy().tobytes()
    kept.edit_arena(hosts[1], 1, 0, row, row[:-1] + b"?")
    reports, states = kept.restore(hosts, 2)
    assert kept.step_in(states) == 7
    assert reports is not None
    assert [report.nbytes_from_memory for report in reports] == [0, 0]


@pytest.mark.parametrize("what", ["header", "value"])
def test_damage_that_is_seen_before_data_is_read_costs_one_file(root, folder, caplog, what):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved)
    if what == "header":
        (name,) = saved.files_of(1)
        head = saved.files[name][:200]
        kept.edit_arena(folder, 1, 0, head, head[:-1] + b"?")
    else:
        data = saved.files["objects.msgpack"]
        kept.edit_arena(folder, 0, 0, data, data[:-1] + b"?")
    reports, states = kept.restore(folder, 1)
    assert kept.step_in(states) == 7
    assert reports is not None
    assert reports[0].nbytes_from_memory > kept.whole(7).nbytes // 2
    assert told(caplog, "is damaged in memory")


def test_what_is_damaged_in_memory_and_on_storage_is_an_error_on_all_ranks(root, folder):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved)
    row = kept.whole(7)[14].numpy().tobytes()
    kept.edit_arena(folder, 1, 0, row, row[:-1] + b"?")
    wipe(saved)
    for outcome in kept.try_restore(folder, 2)[0]:
        assert isinstance(outcome.error, dc.CorruptError)


# --- never committed -------------------------------------------------------------------------


def remove(saved: kept.Saved) -> None:
    shutil.rmtree(saved.path)


def leave_open(saved: kept.Saved) -> None:
    os.unlink(f"{saved.path}/{saved.attempt}/index.json")


def claim_later(saved: kept.Saved) -> None:
    remove(saved)
    os.makedirs(f"{saved.path}/a2-0123456789abcdef")


@pytest.mark.parametrize("lose", [remove, leave_open, abandon, claim_later])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_save_that_was_never_committed_is_restored_if_all_of_it_is_there(
    root, folder, lose, world_size
):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved)
    lose(saved)
    before = sorted(str(path) for path in root.rglob("*"))
    reports, states = kept.restore(folder, world_size)
    assert kept.step_in(states) == 7
    assert reports is not None
    for report in reports:
        assert (report.step, report.attempt) == (7, saved.attempt)
        assert report.storage_reads.nbytes == 0 or lose is abandon
    assert sorted(str(path) for path in root.rglob("*")) == before


def test_the_index_of_a_save_in_memory_has_its_id(root, folder):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved)
    with open_saves([folder.rank(0), folder.rank(1)]) as (saves, _):
        (save,) = saves.values()
        index = decode(rebuild_index(save, saved.attempt))
    assert isinstance(index, Index)
    assert index.save == save.identity.id


def put_a_file_there(saved: kept.Saved) -> None:
    remove(saved)
    Path(saved.path).write_text("no folder")


def test_the_index_of_a_save_in_memory_has_what_is_attached(root, folder):
    saved = kept.save(root / "ck", 2, 7, attach={"a.json": {"loss": 0.5}})
    kept.keep(folder, saved)
    with open_saves([folder.rank(0), folder.rank(1)]) as (saves, _):
        (save,) = saves.values()
        index = decode(rebuild_index(save, saved.attempt))
    assert isinstance(index, Index)
    assert index.attached == attempts.find_checkpoint(*open_storage(saved.path))[1].attached
    assert [one.name for one in index.attached] == ["a.json"]
    remove(saved)
    _, states = kept.restore(folder, 2)
    assert kept.step_in(states) == 7


@pytest.mark.parametrize("lose", [remove, put_a_file_there, claim_later])
@pytest.mark.parametrize("unclaimed", [(0, 1), (0,), (1,)])
def test_a_save_is_restored_though_writers_knew_of_no_attempt(root, folder, lose, unclaimed):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved, unclaimed=unclaimed)
    lose(saved)
    reports, states = kept.restore(folder, 2)
    assert kept.step_in(states) == 7
    assert reports is not None
    made_up = f"a1-{7:032x}"[:19]
    assert {report.attempt for report in reports} == {
        made_up if unclaimed == (0, 1) else saved.attempt
    }


def test_a_save_that_was_committed_is_restored_though_some_writers_were_not_told(root, folder):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved, unclaimed=[1])
    wipe(saved)
    assert kept.step_in(kept.restore(folder, 2)[1]) == 7


def overwritten(path: Path) -> tuple[kept.Saved, kept.Saved]:
    """Save twice to one path, and make the second one a save that was never committed."""
    first = kept.save(path, 2, 7)
    shutil.copytree(f"{first.path}/{first.attempt}", f"{path}-aside")
    second = kept.save(path, 2, 8, overwrite=True)
    shutil.rmtree(f"{path}/{second.attempt}")
    shutil.move(f"{path}-aside", f"{path}/{first.attempt}")
    return first, second


LATER: dict[str, Any] = {"overwrite": True, "began_at": 1e12}
# Before the one that is there, which somebody else has put there since.
EARLIER = {"overwrite": True}


@pytest.mark.parametrize(
    ("details", "options", "is_first_kept", "step"),
    [
        (LATER, {}, False, 8),
        (LATER, {"unclaimed": (0, 1)}, False, 8),
        (LATER, {}, True, 8),
        (EARLIER, {}, True, 7),
        (EARLIER, {"unclaimed": (0, 1)}, False, 0),
        ({"began_at": 1e12}, {}, True, 7),
        (LATER, {"was_committed": True}, True, 7),
    ],
)
def test_a_save_that_would_have_overwritten_an_older_one_is_restored(
    root, folder, details, options, is_first_kept, step
):
    first, second = overwritten(root / "latest")
    kept.keep(folder, second, arena=1, edit=lambda one, _: replace(one, **details), **options)
    if is_first_kept:
        kept.keep(folder, first, arena=0)
    reports, states = kept.restore(folder, 2)
    assert kept.step_in(states) == step
    if step == 8:
        assert reports is not None
        name = f"a2-{8:032x}"[:19] if "unclaimed" in options else second.attempt
        assert reports[0].attempt == name
        assert dc.open(first.path).step == 7


def test_a_save_that_was_claimed_before_the_checkpoint_there_is_not_restored(root, folder, caplog):
    first = kept.save(root / "latest", 2, 7)
    kept.keep(folder, first, edit=lambda one, _: replace(one, **LATER))
    second = kept.save(root / "latest", 2, 6, overwrite=True)
    assert kept.restore(folder, 2)[0] is None
    assert told(caplog, f"its path already has the checkpoint {second.attempt}")


def test_a_save_that_was_never_committed_and_lacks_a_rank_is_not_restored(root, folder, caplog):
    for arena, step in enumerate((8, 9)):
        saved = kept.save(root / f"ck-{step}", 2, step)
        kept.keep(folder, saved, arena=arena, seal=None if step == 8 else [0])
        remove(saved)
    assert kept.step_in(kept.restore(folder, 2)[1]) == 8
    assert told(caplog, "step 9", "not every host has all of it")


def test_a_save_that_was_never_committed_and_is_not_on_every_host_is_not_restored(tmp_path, root):
    hosts = folders_of_hosts(tmp_path)
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(hosts[0], saved)
    kept.keep(hosts[1], saved, ranks=[1])
    remove(saved)
    reports, states = kept.restore(hosts, 2)
    assert reports is None
    assert kept.step_in(states) == 0
    kept.keep(hosts[1], saved)
    assert kept.step_in(kept.restore(hosts, 2)[1]) == 7


def test_a_save_that_was_never_committed_and_is_damaged_is_passed_over(root, folder, caplog):
    for arena, step in enumerate((8, 9)):
        saved = kept.save(root / f"ck-{step}", 2, step)
        kept.keep(folder, saved, arena=arena)
        remove(saved)
    row = kept.whole(9)[14].numpy().tobytes()
    kept.edit_arena(folder, 1, 1, row, row[:-1] + b"?")
    reports, states = kept.restore(folder, 2)
    assert kept.step_in(states) == 8
    assert reports is not None
    assert reports[0].path.endswith("ck-8")
    assert told(caplog, "ck-9 is not restored from memory", "damaged")


def test_a_save_whose_ranks_held_different_values_is_not_restored(root, folder, caplog):
    saved = kept.save(root / "ck", 2, 7)
    remove(saved)
    kept.keep(folder, saved, edit=lambda one, rank: kept.with_digests(one, ("bias", f"{rank}")))
    assert kept.restore(folder, 2)[0] is None
    assert told(caplog, "different values under the same name")
    kept.keep(folder, saved, edit=lambda one, _: kept.with_digests(one, ("bias", "0")))
    assert kept.step_in(kept.restore(folder, 2)[1]) == 7


def test_a_save_that_another_version_planned_is_not_restored_uncommitted(root, folder, caplog):
    saved = kept.save(root / "ck", 2, 7)
    remove(saved)
    kept.keep(folder, saved, edit=lambda one, _: replace(one, saved_by={"dist_ckpt": "0.0.0"}))
    assert kept.restore(folder, 2)[0] is None
    assert told(caplog, "0.0.0")


# --- what is not used ------------------------------------------------------------------------


def test_a_save_that_another_attempt_has_replaced_is_not_restored(root, folder, caplog):
    older = kept.save(root / "ck-6", 2, 6)
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, older, arena=0)
    kept.keep(folder, saved, arena=1)
    other = kept.save(root / "ck", 2, 6, overwrite=True)
    assert kept.step_in(kept.restore(folder, 2)[1]) == 6
    assert told(caplog, "step 7", f"its path already has the checkpoint {other.attempt}")


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_save_is_not_restored_if_a_later_step_was_committed_since(
    root, folder, caplog, is_committed
):
    saved = kept.save(root / "ck-7", 2, 7)
    kept.keep(folder, saved)
    if not is_committed:
        remove(saved)
    kept.save(root / "ck-9", 2, 9)
    assert kept.restore(folder, 2)[0] is None
    assert told(caplog, "step 7", "ck-9 was committed since")


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_later_step_that_was_moved_counts_if_its_link_is_read(root, folder, caplog, is_dangling):
    kept.keep(folder, kept.save(root / "ck-7", 2, 7))
    kept.save(root.parent / "bulk", 2, 9)
    (root / "step-9").symlink_to(root.parent / ("nowhere" if is_dangling else "bulk"))
    assert (kept.restore(folder, 2)[0] is None) is not is_dangling
    assert told(caplog, "step 7", "step-9 was committed since") is not is_dangling


@pytest.mark.parametrize(("step", "began_at"), [(6, 0.0), (9, 1e12)])
def test_a_save_is_restored_though_there_is_a_later_step_or_a_later_commit(
    root, folder, step, began_at
):
    # The run went back to an older step; or a save that began before this one was slow.
    kept.keep(
        folder, kept.save(root / "ck-7", 2, 7), edit=lambda one, _: replace(one, began_at=began_at)
    )
    kept.save(root / "other", 2, step)
    assert kept.step_in(kept.restore(folder, 2)[1]) == 7


def test_a_save_whose_index_is_damaged_is_not_restored(root, folder, caplog):
    for arena, step in enumerate((8, 9)):
        saved = kept.save(root / f"ck-{step}", 2, step)
        kept.keep(folder, saved, arena=arena)
    index = Path(f"{saved.path}/{saved.attempt}/index.json")
    index.write_bytes(index.read_bytes()[:-9])
    assert kept.step_in(kept.restore(folder, 2)[1]) == 8
    assert told(caplog, "step 9", "index.json")


def test_a_half_staged_newer_snapshot_is_ignored(root, folder):
    kept.keep(folder, kept.save(root / "ck-8", 2, 8), arena=0)
    newer = kept.save(root / "ck-9", 2, 9)
    kept.keep(folder, newer, arena=1, ranks=[0], seal=[])
    arenas = ArenaPool(folder.rank(1))
    arenas.open_fitting(1, 1 << 20).begin(kept.snapshot_of(newer, 1))
    arenas.close()
    remove(newer)
    assert kept.step_in(kept.restore(folder, 2)[1]) == 8


def test_what_was_restored_is_overwritten_last(root, folder):
    older = kept.save(root / "ck-8", 1, 8)
    newer = kept.save(root / "ck-9", 1, 9)
    kept.keep(folder, older, arena=1)
    kept.keep(folder, newer, arena=0)  # complete here, which it need not be on other ranks
    arenas = ArenaPool(folder.rank(0))
    assert (arenas.newest, arenas.newest_at) == (0, 1e9 + 9)
    arenas.overwrite_last(f"{8:032x}")
    assert arenas.find_oldest(()) == 0


def test_nothing_in_memory_restores_nothing(folder):
    reports, states = kept.restore(folder, 2)
    assert reports is None
    assert kept.step_in(states) == 0


def test_what_is_another_jobs_or_versions_is_left_as_it_is(root, folder, caplog):
    kept.keep(folder, kept.save(root / "ck", 1, 7))
    path = Path(folder.rank(0).arena_path(0))
    (root.parent / "other").mkdir()
    theirs = JobFolder("theirs")
    kept.keep(theirs, kept.save(root.parent / "other" / "ck", 1, 9))
    shutil.copy(theirs.rank(0).arena_path(0), folder.rank(0).arena_path(1))
    newer = bytearray(path.read_bytes())
    newer[16] = 200  # the version
    os.makedirs(folder.rank(1).path, exist_ok=True)
    Path(folder.rank(1).arena_path(0)).write_bytes(newer)
    before = {str(one): one.read_bytes() for one in Path(folder.path).rglob("arena-*")}
    assert kept.step_in(kept.restore(folder, 1)[1]) == 7
    assert told(caplog, "belongs to another job")
    assert told(caplog, "has arena version 200")
    assert {str(one): one.read_bytes() for one in Path(folder.path).rglob("arena-*")} == before


TRAIN = """
folder = JobFolder(args[0], roots=[args[1]]).rank(int(args[2]))
lock = folder.lock("trainer")
say("held")
wait()
"""


@pytest.mark.multi_process
def test_the_snapshots_of_a_rank_whose_trainer_lives_beyond_this_run_are_not_used(root, folder):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved)
    remove(saved)
    with program(TRAIN, folder.job, job_folder.SHARED_MEMORY, 1) as trainer:
        assert trainer.hear() == "held"
        assert kept.restore(folder, 1)[0] is None
        assert kept.step_in(kept.restore(folder, 2)[1]) == 7  # there it is of this run
        trainer.kill()
    assert kept.step_in(kept.restore(folder, 1)[1]) == 7


def test_a_storage_that_does_not_tell_what_is_committed_is_an_error(root, folder):
    saved = kept.save(root / "ck", 1, 7)
    kept.keep(folder, saved)
    remove(saved)
    os.symlink("ck", root / "ck")
    (outcome,) = kept.try_restore(folder, 1)[0]
    assert isinstance(outcome.error, dc.StorageError)


# --- overwritten while it is read ------------------------------------------------------------


def overwrite_on_read(monkeypatch: pytest.MonkeyPatch, folder: JobFolder, when: str) -> None:
    """Have a trainer stage something else just before data is first read, or just after."""
    real = RecoveredSnapshot.read_into
    left = ["once"]

    def read_into(self: RecoveredSnapshot, image: int, start: int, target: memoryview) -> None:
        is_time = len(target) > 10_000 and bool(left) and bool(left.pop())
        if is_time and when == "before":
            stage_over(self)
        real(self, image, start, target)
        if is_time and when == "after":
            stage_over(self)

    def stage_over(there: RecoveredSnapshot) -> None:
        rank = there.snapshot.rank
        arenas = ArenaPool(folder.rank(rank))
        what = Snapshot("f" * 32, "/else", 99, rank, 9, there.snapshot.images)
        arena = arenas.open_fitting(0, 1)
        for data in arena.begin(what):
            data[:] = b"\xee" * len(data)
        arena.complete()
        arenas.close()

    monkeypatch.setattr(RecoveredSnapshot, "read_into", read_into)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_committed_save_that_is_overwritten_while_it_is_read_comes_from_the_storage(
    root, folder, monkeypatch, verify, when
):
    kept.keep(folder, kept.save(root / "ck", 1, 7))
    overwrite_on_read(monkeypatch, folder, when)
    reports, states = kept.restore(folder, 1, verify=verify)
    assert kept.step_in(states) == 7
    assert reports is not None
    assert reports[0].storage_reads.nbytes > kept.whole(7).nbytes


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_that_is_overwritten_and_was_never_committed_is_not_restored(
    root, folder, monkeypatch, caplog, verify, when
):
    older = kept.save(root / "ck-6", 1, 6)
    kept.keep(folder, older, arena=1)
    saved = kept.save(root / "ck", 1, 7)
    kept.keep(folder, saved)
    remove(saved)
    overwrite_on_read(monkeypatch, folder, when)
    _, states = kept.restore(folder, 1, verify=verify)
    assert kept.step_in(states) == 6
    assert told(caplog, "was overwritten while it was read")


# --- dc.load ---------------------------------------------------------------------------------


def load(path: Path) -> tuple[dc.LoadReport, dict[str, Any]]:
    state = kept.empty_state_of(0, 1)
    return dc.load(state, path), state


def test_a_load_takes_what_a_dead_job_has_left_of_the_very_checkpoint(root, folder):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved)
    wipe(saved)
    report, state = load(root / "ck")
    assert kept.step_in([state]) == 7
    assert report.nbytes_from_memory > kept.whole(7).nbytes
    assert report.storage_reads.nbytes < 4096


def test_a_load_of_another_attempt_reads_the_storage(root, folder):
    kept.keep(folder, kept.save(root / "ck", 2, 7))
    kept.save(root / "ck", 2, 8, overwrite=True)
    report, state = load(root / "ck")
    assert kept.step_in([state]) == 8
    assert report.nbytes_from_memory == 0


def test_a_load_of_another_attempt_reads_the_storage_though_it_holds_the_same(root, folder):
    kept.keep(folder, kept.save(root / "ck", 2, 7))
    kept.save(root / "ck", 2, 7, overwrite=True)
    assert load(root / "ck")[0].nbytes_from_memory == 0


def test_a_load_reads_the_storage_where_the_memory_is_damaged(root, folder, caplog):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved)
    row = kept.whole(7)[14].numpy().tobytes()
    kept.edit_arena(folder, 1, 0, row, row[:-1] + b"?")
    report, state = load(root / "ck")
    assert kept.step_in([state]) == 7
    assert report.nbytes_from_memory == 0
    assert told(caplog, "Everything is now read from storage")


@pytest.mark.parametrize("content", [None, "no id"])
def test_a_load_from_a_folder_without_its_id_reads_the_storage(root, folder, caplog, content):
    kept.keep(folder, kept.save(root / "ck", 2, 7))
    (root / ROOT_ID).unlink()
    if content is not None:
        (root / ROOT_ID).write_text(content)
    report, state = load(root / "ck")
    assert kept.step_in([state]) == 7
    assert report.nbytes_from_memory == 0
    assert told(caplog, "is not what dist_ckpt writes there") == (content is not None)


def test_a_load_leaves_no_trace_where_no_job_is(root):
    kept.save(root / "ck", 1, 7)
    report, _ = load(root / "ck")
    assert report.nbytes_from_memory == 0
    assert os.listdir(job_folder.SHARED_MEMORY) == []


@pytest.mark.multi_process
def test_a_load_does_not_use_the_memory_of_a_trainer_that_lives_elsewhere(root, folder):
    saved = kept.save(root / "ck", 2, 7)
    kept.keep(folder, saved)
    half = kept.whole(7).nbytes // 2
    with program(TRAIN, folder.job, job_folder.SHARED_MEMORY, 1) as trainer:
        assert trainer.hear() == "held"
        report, state = load(root / "ck")
        assert kept.step_in([state]) == 7
        assert half < report.nbytes_from_memory < 2 * half
        trainer.kill()
    lock = folder.rank(1).lock("trainer")  # it is this very process now
    assert load(root / "ck")[0].nbytes_from_memory > 2 * half
    lock.release()


def test_files_that_are_open_are_closed_after_a_load(root, folder, caplog):
    caplog.set_level(logging.INFO)
    kept.keep(folder, kept.save(root / "ck", 2, 7))
    load(root / "ck")
    before = _open_places()
    load(root / "ck")
    assert _open_places() == before
    assert not any("arena" in place for place in before)


def _open_places() -> Sequence[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return sorted(place for place in found if place.startswith("/"))
