"""What a run's folder is told to hold: checkpoints by step, with the facts about them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import dist_ckpt as dc
from dist_ckpt.core.commit.commit_protocol import claim
from dist_ckpt.core.commit.records.incarnations import begin_incarnation
from dist_ckpt.core.storage import Entry
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CorruptError, NotFoundError, StorageError
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.testing.memory_storage import MemoryStorage
from run_folders import ROOT, committed, put
from written import one_cell, random_tensor, save

NOW = 1000.0


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage({ROOT: None}, clock=lambda: NOW)


def listed(storage: MemoryStorage, *, now: float = NOW, folder: str = ROOT) -> Listing:
    return list_run(storage, folder, now=now)


def by_step(storage: MemoryStorage, *, now: float = NOW) -> dict[int | None, RunCheckpoint]:
    return {one.step: one for one in listed(storage, now=now).checkpoints}


def small(path: Path) -> Path:
    return save(path, {"model.w": random_tensor((4, 2), one_cell((4, 2)))})


def test_a_folder_lists_its_checkpoints_and_what_became_of_the_others(tmp_path: Path) -> None:
    attempt = small(tmp_path / "step-2")
    damaged = small(tmp_path / "step-1") / "index.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"model", b"modem", 1))
    claim(LocalStorage(), str(tmp_path / "step-3"), overwrite=False, by="a test")
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    first, second, third = dc.checkpoints(tmp_path)
    assert (first.name, first.state, first.step) == ("step-1", "damaged", None)
    assert "digest" in (first.problem or "")
    assert (second.name, second.state) == ("step-3", "open")
    assert "no checkpoint is here" in (second.problem or "")
    assert third == RunCheckpoint(
        name="step-2",
        path=str(tmp_path / "step-2"),
        state="committed",
        step=7,
        world_size=1,
        num_tensors=1,
        nbytes=dc.open(tmp_path / "step-2").nbytes,
        saved_at=1.0,
        metadata={},
        attempt=attempt.name,
    )
    assert dc.checkpoints(tmp_path / "step-2") == (third,)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none", "none does not exist: check its spelling, or list /"),
        ("file", "file is not a folder: give the folder of a run or a checkpoint"),
    ],
)
def test_what_is_no_folder_has_no_checkpoints(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotFoundError, match=problem):
        dc.checkpoints(tmp_path / name)


def test_they_are_listed_by_step_and_what_has_none_comes_first(storage: MemoryStorage) -> None:
    for step, name in ((10, "a"), (9, "z"), (None, "last"), (None, "first"), (0, "b")):
        committed(storage, step, name=name)
    committed(storage, 9, name="y", start=1)
    names = [one.name for one in listed(storage).checkpoints]
    assert names == ["first", "last", "b", "z", "y", "a"]


def test_the_newest_value_of_a_metric_counts(storage: MemoryStorage) -> None:
    where = committed(storage, 5)
    put(storage, where, "metrics", {"val/loss": 0.5, "acc": 1, "gone": 3, "bad": "nan"})
    put(storage, where, "metrics", {"val/loss": 0.25, "gone": None, "top": "-inf", "odd": "x"})
    metrics = by_step(storage)[5].metrics
    assert math.isnan(metrics["bad"])
    rest = {name: value for name, value in metrics.items() if name != "bad"}
    assert rest == {"val/loss": 0.25, "acc": 1.0, "top": -math.inf}


def test_a_tag_moves_by_a_newer_fact(storage: MemoryStorage) -> None:
    older, newer = committed(storage, 5), committed(storage, 6)
    put(storage, newer, "tag", {"release": True, "good": True})
    put(storage, older, "tag", {"release": True}, above=1)
    found = by_step(storage)
    assert (found[5].tags, found[6].tags) == (("release",), ("good",))
    put(storage, older, "tag", {"release": False}, above=2)
    assert (by_step(storage)[5].tags, by_step(storage)[6].tags) == ((), ("good",))


def test_pins_holds_and_checks_are_told(storage: MemoryStorage) -> None:
    where = committed(storage, 5)
    put(storage, where, "pin", {"pinned": True, "why": "the paper"})
    put(storage, where, "hold", {"1" * 16: 60})
    put(storage, where, "verified", {"level": "full"})
    one = by_step(storage)[5]
    assert (one.is_pinned, one.pin, one.is_verified, len(one.leases)) == (
        True,
        "the paper",
        True,
        1,
    )
    assert "process" in one.leases[0]
    assert by_step(storage, now=NOW + 61)[5].leases == ()
    put(storage, where, "pin", {"pinned": False, "why": ""})
    put(storage, where, "hold", {"1" * 16: 0})
    one = by_step(storage)[5]
    assert (one.is_pinned, one.leases, one.protected_by) == (False, (), ())


@pytest.mark.parametrize("kind", ["pin", "tag", "hold"])
def test_a_damaged_fact_that_may_keep_a_checkpoint_keeps_it(storage, kind):
    file = put(storage, committed(storage, 5), kind, {"release": True})
    data = storage.tree()[file]
    storage.remove(file)
    storage.create(file, len(data)).write_at(0, data[:-9])
    (told,) = by_step(storage)[5].protected_by
    assert told.startswith(f"an annotation cannot be read: {file}")
    assert listed(storage).problems == (told.removeprefix("an annotation cannot be read: "),)


def test_a_hold_whose_life_is_no_number_has_no_end(storage: MemoryStorage) -> None:
    put(storage, committed(storage, 5), "hold", {"1" * 16: "soon"})
    assert len(by_step(storage, now=1e12)[5].leases) == 1


def test_what_a_later_start_has_gone_back_behind_is_told(storage: MemoryStorage) -> None:
    first = committed(storage, 5, start=1)
    committed(storage, 9, start=1)
    begin_incarnation(storage, ROOT, restored=None, why="", by="")
    begin_incarnation(storage, ROOT, restored=first, why="", by="")
    assert {step: one.is_orphaned for step, one in by_step(storage).items()} == {5: False, 9: True}
    assert [one.step for one in listed(storage).not_orphaned] == [5]


def test_a_start_that_cannot_be_read_is_told_and_nothing_counts_as_alive(storage) -> None:
    committed(storage, 5)
    begin_incarnation(storage, ROOT, restored=None, why="", by="")
    storage.create(f"{ROOT}/.incarnations/2.json", 2).write_at(0, b"{}")
    listing = listed(storage)
    assert [one.step for one in listing.checkpoints] == [5]
    assert "2.json" in listing.history_problem
    with pytest.raises(CorruptError, match=r"2\.json"):
        _ = listing.not_orphaned


def test_one_checkpoint_is_listed_with_the_facts_of_its_root(storage: MemoryStorage) -> None:
    put(storage, committed(storage, 5), "tag", {"release": True})
    committed(storage, 6)
    listing = listed(storage, folder=f"{ROOT}/step-5")
    assert [(one.step, one.tags) for one in listing.checkpoints] == [(5, ("release",))]
    assert listing.root == ROOT


def test_a_save_over_a_checkpoint_is_told(storage: MemoryStorage) -> None:
    committed(storage, 5)
    claim(storage, f"{ROOT}/step-5", overwrite=True, by="a test")
    assert by_step(storage)[5].is_being_replaced


def test_the_lost_and_found_of_a_file_system_is_no_checkpoint() -> None:
    class Mounted(MemoryStorage):
        def list(self, folder: str, *, follow: bool = True) -> list[Entry]:
            if folder.endswith("lost+found"):
                raise StorageError("permission denied")
            return [*super().list(folder, follow=follow)]

    storage = Mounted({ROOT: None, f"{ROOT}/lost+found": None})
    committed(storage, 1)
    assert [one.step for one in list_run(storage, ROOT, now=0.0).checkpoints] == [1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("holds", "leases"),
        ("guards", "protected_by"),
        ("is_left_behind", "is_orphaned"),
        ("save", "save_id"),
    ],
)
def test_old_names_of_fields_are_refused_with_the_new_one(old, new):
    info = RunCheckpoint("step-1", "/runs/step-1", "committed")
    with pytest.raises(AttributeError, match=f"RunCheckpoint.{old} is called {new} since"):
        getattr(info, old)
    assert hasattr(info, new)
