"""Nothing is restored from memory that a start of the run has orphaned, and what is not, is."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch")

import dist_ckpt as dc
import recovered_checkpoints as kept
from dist_ckpt.async_save import memory_restore
from dist_ckpt.async_save.snapshots import job_folder
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.core.commit.records.incarnations import Incarnation, begin_incarnation, read_history
from dist_ckpt.core.format.filenames import Attempt, parse_attempt
from dist_ckpt.core.storage.local.local_storage import LocalStorage

ID = "0123456789abcdef"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the checkpoints; shared memory is beside it."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(tmp_path / "shm"))
    return tmp_path / "runs"


@pytest.fixture
def folder(root: Path) -> JobFolder:
    return JobFolder("job")


def begin_from(root: Path, step: int | None, start: int = 0) -> Incarnation:
    """Begin a start that goes on from a step of another one."""
    restored = None if step is None else (step, Attempt(1000 * start + 1, ID))
    made = begin_incarnation(LocalStorage(), str(root), restored=restored, why="", by="a job")
    return Incarnation(str(root), made.number)


def keep(folder: JobFolder, saved: kept.Saved, run: Incarnation | None, **options: Any) -> None:
    """Leave a save of a start in memory."""
    details = options.pop("details", {})
    kept.keep(
        folder, saved, edit=lambda one, _: replace(one, incarnation=run, **details), **options
    )


def lose(saved: kept.Saved) -> None:
    shutil.rmtree(saved.path)


@pytest.mark.parametrize("unclaimed", [(), (0, 1)])
def test_what_was_never_committed_and_is_left_behind_is_not_restored(
    root, folder, caplog, unclaimed
):
    first = begin_from(root, None)
    saved = kept.save(root / "step-7", 2, 7, incarnation=first)
    keep(folder, saved, first, unclaimed=unclaimed)
    lose(saved)
    assert kept.step_in(kept.restore(folder, 2)[1]) == 7
    begin_from(root, 6, 1)
    caplog.set_level(logging.WARNING)
    assert kept.restore(folder, 2)[0] is None
    assert "it is orphaned by incarnation 2 of the run" in caplog.text


@pytest.mark.parametrize("step", [7, 6])
def test_what_was_committed_is_restored_unless_it_is_left_behind(root, folder, step):
    first = begin_from(root, None)
    keep(folder, kept.save(root / "step-7", 2, 7, incarnation=first), first, was_committed=True)
    begin_from(root, step, 1)
    reports, states = kept.restore(folder, 2)
    assert (reports is None) == (step == 6)
    assert kept.step_in(states) == (7 if step == 7 else 0)


def test_an_older_save_is_restored_if_the_newest_is_left_behind(root, folder):
    first = begin_from(root, None)
    for arena, step in enumerate((7, 8)):
        saved = kept.save(root / f"step-{step}", 2, step, incarnation=first)
        keep(folder, saved, first, arena=arena, details={"began_at": 1e12 + step})
    begin_from(root, 7, 1)
    assert kept.step_in(kept.restore(folder, 2)[1]) == 7


def test_a_checkpoint_that_is_left_behind_does_not_count_as_newer(root, folder):
    first = begin_from(root, None)
    kept.save(root / "step-9", 2, 9, incarnation=first)
    second = begin_from(root, 6, 1)
    saved = kept.save(root / "step-7", 2, 7, incarnation=second)
    keep(folder, saved, second)
    lose(saved)
    assert kept.step_in(kept.restore(folder, 2)[1]) == 7
    kept.save(root / "step-8", 2, 8, incarnation=second)
    assert kept.restore(folder, 2)[0] is None


@pytest.mark.parametrize("unclaimed", [(), (0, 1)])
def test_a_checkpoint_that_is_left_behind_at_the_same_path_is_no_obstacle(root, folder, unclaimed):
    first = begin_from(root, None)
    old = kept.save(root / "step-7", 2, 7, incarnation=first)
    aside = root.parent / "aside"
    shutil.copytree(old.path, aside)
    second = begin_from(root, 6, 1)
    saved = kept.save(root / "step-7", 2, 7, incarnation=second)
    keep(folder, saved, second, unclaimed=unclaimed, details={"began_at": 1.0})
    lose(saved)
    shutil.move(aside, old.path)
    reports, states = kept.restore(folder, 2)
    assert kept.step_in(states) == 7
    assert reports is not None
    attempt = parse_attempt(reports[0].attempt)
    assert attempt is not None
    assert attempt.incarnation == 2
    assert dc.open(old.path).step == 7


def test_an_attempt_that_is_made_up_has_a_number_of_its_start(root, folder):
    run = begin_from(root, None)
    saved = kept.save(root / "step-7", 2, 7, incarnation=run)
    keep(folder, saved, run, unclaimed=(0, 1))
    lose(saved)
    reports, _ = kept.restore(folder, 2)
    assert reports is not None
    assert reports[0].attempt.startswith("a1000-")


def test_a_checkpoint_of_a_newer_start_at_the_path_is_never_passed_over(root, folder, caplog):
    first = begin_from(root, None)
    saved = kept.save(root / "step-7", 2, 7, incarnation=first)
    keep(folder, saved, first, unclaimed=(0, 1), details={"overwrite": True, "began_at": 1e12})
    newer = kept.save(root / "step-7", 2, 7, incarnation=begin_from(root, 6, 1))
    begin_from(root, 7, 1)  # somebody goes back to what the second start had orphaned
    caplog.set_level(logging.WARNING)
    assert kept.restore(folder, 2)[0] is None
    assert f"its path already has the checkpoint {newer.attempt}" in caplog.text


def test_without_a_start_nothing_is_left_behind_and_who_records_none_is(root, folder):
    saved = kept.save(root / "step-7", 2, 7)
    keep(folder, saved, None)
    assert kept.step_in(kept.restore(folder, 2)[1]) == 7
    begin_from(root, 7)
    assert kept.step_in(kept.restore(folder, 2)[1]) == 7
    begin_from(root, None)
    assert kept.restore(folder, 2)[0] is None


def test_a_start_that_cannot_be_read_stops_the_restore_on_all_ranks(root, folder):
    run = begin_from(root, None)
    keep(folder, kept.save(root / "step-7", 2, 7, incarnation=run), run)
    (root / ".incarnations" / "1.json").write_bytes(b"{}")
    for found in kept.try_restore(folder, 2)[0]:
        assert isinstance(found.error, dc.CheckpointError)
        assert "1.json" in str(found.error)


def test_a_save_without_a_step_is_left_behind_by_every_later_start(root):
    begin_from(root, None)
    begin_from(root, 6, 1)
    history = read_history(LocalStorage(), str(root))
    assert memory_restore._is_orphaned(history, None, Attempt(1000, ID))
    assert not memory_restore._is_orphaned(history, None, Attempt(2000, ID))
