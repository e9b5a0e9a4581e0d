"""A load of what a selector names: rank 0 finds it and holds it, the others take its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef
from dist_ckpt.core.commit.records.record_store import read_annotations
from dist_ckpt.core.loading import load as loading
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import NotFoundError
from dist_ckpt.testing.memory_storage import MemoryStorage
from ranks import load_on_threads, save_on_threads


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        dc.save({"x": step}, tmp_path / "run" / f"s{step}", step=step)
    return tmp_path / "run"


def test_the_latest_is_loaded_and_reported_by_its_path(root: Path) -> None:
    state: dict[str, Any] = {"x": 0}
    report = dc.load(state, f"{root}@latest")
    assert (state, report.path, report.step) == ({"x": 2}, str(root / "s2"), 2)
    assert not (root / ".annotations").exists()
    with pytest.raises(NotFoundError, match="there are no metrics"):
        dc.load(state, f"{root}@min:loss")


def test_all_ranks_take_what_rank_0_has_found() -> None:
    storage = MemoryStorage({"/runs": None})
    for step in (1, 2):
        states = [{"x": step}, {"x": step}, {"x": step}]
        save_on_threads(storage, states, f"/runs/s{step}", step=step)
    fresh = [{"x": 0}, {"x": 0}, {"x": 0}]
    report = load_on_threads(storage, fresh, "/runs@latest")
    assert (fresh, report.path) == ([{"x": 2}] * 3, "/runs/s2")


def test_where_a_run_keeps_records_it_is_held_and_noted(root: Path, monkeypatch) -> None:
    run = dc.Run(root)
    run.metrics(1, {"loss": 1.0})
    seen: list[str] = []

    def fill(*arguments: Any) -> Any:
        seen.extend(run.find(1).leases)
        return real(*arguments)

    real = loading._read_and_place
    monkeypatch.setattr(loading, "_read_and_place", fill)
    dc.load({"x": 0}, f"{root}@min:loss")
    assert len(seen) == 1
    assert (run.find(1).leases, run.find(1).is_verified) == ((), True)


def test_a_load_of_a_part_is_no_check(root: Path) -> None:
    run = dc.Run(root)
    run.metrics(1, {"loss": 1.0})
    dc.load({"x": 0}, root / "s1", verify=False)
    dc.load({"x": 0}, root / "s1", include="x")
    dc.load({"y": 0}, root / "s1", strict=False)
    assert not run.find(1).is_verified
    dc.load({"x": 0}, root / "s1")
    assert run.find(1).is_verified


def test_a_full_check_is_noted_where_a_run_keeps_records(root: Path) -> None:
    assert dc.verify(f"{root}@latest").ok
    assert not (root / ".annotations").exists()
    dc.Run(root).pin(2)
    dc.verify(f"{root}@latest", level="quick")
    assert not dc.Run(root).find(2).is_verified
    assert dc.verify(f"{root}@latest").path == str(root / "s2")
    assert dc.Run(root).find(2).is_verified


def test_what_is_pruned_as_it_is_chosen_is_chosen_anew(root: Path, monkeypatch) -> None:
    dc.Run(root).metrics(1, {"loss": 1.0})
    put = CheckpointRef.put

    def put_late(self: CheckpointRef, *arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        dc.delete(self.path)
        return put(self, *arguments, **options)

    monkeypatch.setattr(CheckpointRef, "put", put_late)
    state: dict[str, Any] = {"x": 0}
    assert dc.load(state, f"{root}@latest").step == 1
    assert state == {"x": 1}
    assert [fact for fact in read_annotations(LocalStorage(), str(root)) if fact.step == 2] == []


def test_where_the_root_cannot_be_written_a_load_goes_on(root: Path, monkeypatch) -> None:
    dc.Run(root).metrics(1, {"loss": 1.0})

    def refuse(*_: Any, **__: Any) -> Any:
        raise dc.StorageError("read-only")

    monkeypatch.setattr(CheckpointRef, "put", refuse)
    monkeypatch.setattr("dist_ckpt.core.commit.records.record_store.put_annotation", refuse)
    assert dc.load({"x": 0}, f"{root}@latest").step == 2


def test_a_reshard_takes_what_a_selector_names(root: Path, tmp_path: Path) -> None:
    assert dc.reshard(f"{root}@1", tmp_path / "new", world_size=2).step == 1
    with dc.open(f"{root}@1") as checkpoint:
        assert checkpoint.path == str(root / "s1")
