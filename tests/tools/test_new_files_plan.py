"""A plan is checked before it is run; the run checks again what may have changed in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.core.storage import WritableFile, open_storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import StorageError
from dist_ckpt.interop.shrew import files as shrew
from dist_ckpt.tools.new_files import WritePlan
from dist_ckpt.tools.rewrite.copying import plan_backup, plan_copy
from dist_ckpt.tools.rewrite.reshard import even_sharding, plan_rewrite

torch = pytest.importorskip("torch")

from dist_ckpt.interop.dcp import export as dcp  # noqa: E402
from dist_ckpt.interop.hf import export as hf  # noqa: E402
from dist_ckpt.interop.torch_save import export as torch_save  # noqa: E402
from dist_ckpt.tools.average.average import plan_average  # noqa: E402
from dist_ckpt.tools.average.checkpoint_selection import AverageOptions  # noqa: E402

Plan = Callable[[Path], WritePlan[Any]]
CHECKPOINTS: dict[str, Plan] = {
    "reshard": lambda base: plan_rewrite(
        open_storage(base / "run" / "s2"), base / "new", even_sharding(2), overwrite=False
    ),
    "copy": lambda base: plan_copy(base / "run" / "s2", base / "new"),
    "average": lambda base: plan_average(
        base / "run", base / "new", AverageOptions(last=2, include="model.*")
    ),
    "shrew": lambda base: shrew.plan_import_file(base / "a.shrew", base / "new"),
}
EXPORTS: dict[str, Plan] = {
    "hf": lambda base: hf.plan_export(base / "run" / "s2", base / "new"),
    "dcp": lambda base: dcp.plan_export(base / "run" / "s2", base / "new"),
    "torch": lambda base: torch_save.plan_export_file(base / "run" / "s2", base / "new"),
    "to shrew": lambda base: shrew.plan_export_file(base / "run" / "s2", base / "new"),
}
PLANS = {**CHECKPOINTS, **EXPORTS}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with a run of two steps and a .shrew file."""
    for step in (1, 2):
        weights = {"w": torch.full((4, 3), float(step))}
        dc.save({"model": weights}, tmp_path / "run" / f"s{step}", step=step)
    shrew.export_file(tmp_path / "run" / "s2", tmp_path / "a.shrew")
    return tmp_path


@pytest.mark.parametrize("name", PLANS)
def test_a_run_of_a_plan_writes_its_target(name: str, base: Path) -> None:
    plan = PLANS[name](base)
    assert not (base / "new").exists()
    nbytes = sum(plan.list_files().values())
    assert nbytes > 0
    calls: list[tuple[int, int]] = []
    result = plan.run(lambda done, total: calls.append((done, total)))
    assert 0 < calls[-1][0] <= calls[-1][1]
    assert Path(plan.path) == base / "new"
    assert (base / "new").exists()
    assert result.path == str(base / "new") if name in CHECKPOINTS else result >= nbytes


@pytest.mark.parametrize("name", PLANS)
def test_a_target_that_was_taken_after_the_plan_is_refused(name: str, base: Path) -> None:
    plan = PLANS[name](base)
    dc.save({"x": 1}, base / "new")
    with pytest.raises(dc.ExistsError):
        plan.run(None)
    assert list(dc.open(base / "new").objects) == ["x"]


@pytest.mark.parametrize("name", PLANS.keys() - {"shrew"})
def test_a_source_that_was_removed_after_the_plan_is_not_found(name: str, base: Path) -> None:
    plan = PLANS[name](base)
    dc.delete(base / "run" / "s2")
    with pytest.raises(dc.NotFoundError):
        plan.run(None)
    assert not (base / "new").exists()


def test_a_file_that_was_changed_after_the_plan_is_refused(base: Path) -> None:
    plan = CHECKPOINTS["shrew"](base)
    shrew.export_file(base / "run" / "s1", base / "a.shrew", overwrite=True)
    with pytest.raises(dc.CorruptError, match=r"a\.shrew was changed after it was checked"):
        plan.run(None)
    assert not (base / "new").exists()


def test_an_average_reads_the_sources_of_its_plan(base: Path) -> None:
    plan = CHECKPOINTS["average"](base)
    dc.save({"model": {"w": torch.full((4, 3), 9.0)}}, base / "run" / "s3", step=3)
    plan.run(None)
    state = {"model": {"w": torch.zeros(4, 3)}}
    dc.load(state, base / "new")
    assert state["model"]["w"].unique().item() == 1.5
    with dc.open(base / "new") as checkpoint:
        assert checkpoint.index.saved_by["averaged"] == "; ".join(plan.sources)


def test_a_backup_that_was_made_after_the_plan_is_used(base: Path) -> None:
    plan = plan_backup(base / "run" / "s2")
    dc.backup(base / "run" / "s2")
    (before,) = (base / "run" / "backup" / "s2").glob("a*-*")
    assert plan.run(None) == str(base / "run" / "backup" / "s2")
    assert [*(base / "run" / "backup" / "s2").glob("a*-*")] == [before]


# --- the room ------------------------------------------------------------------------------------


@pytest.fixture
def full(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on a storage that has one free byte, with one more checkpoint."""
    dc.save({"model": {"w": torch.ones(4)}, "optim": {"m": torch.ones(3)}}, base / "more" / "s3")
    monkeypatch.setattr(LocalStorage, "free_nbytes", lambda *_: 1)
    return base


LINKS: dict[str, Callable[[Path], object]] = {
    "copy": lambda base: dc.copy(base / "more" / "s3", base / "new", link=True),
    "backup": lambda base: dc.backup(base / "more" / "s3"),
    "strip": lambda base: dc.strip(base / "more" / "s3", "optim"),
}
NO_ROOM = r"No space left on device \(ENOSPC\): .* are free, and .* are missing"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_does_not_fit_is_refused_before_a_file_is_written(
    name: str, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS[name](full)  # as for --dry-run
    monkeypatch.setattr(LocalStorage, "create", _refuse_shards)
    with pytest.raises(StorageError, match=NO_ROOM):
        plan.run(None)
    assert not (full / "new").exists()


@pytest.mark.parametrize("name", LINKS)
def test_files_that_are_linked_need_no_room(name: str, full: Path) -> None:
    LINKS[name](full)


@pytest.mark.parametrize("name", LINKS)
def test_files_that_cannot_be_linked_need_room(
    name: str, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("no links here")

    monkeypatch.setattr(LocalStorage, "link", refuse)
    monkeypatch.setattr(LocalStorage, "create", _refuse_shards)
    before = sorted(path for path in full.rglob("*") if path.is_file())
    with pytest.raises(StorageError, match=NO_ROOM):
        LINKS[name](full)
    assert sorted(path for path in full.rglob("*") if path.is_file()) == before


_create = LocalStorage.create


def _refuse_shards(storage: LocalStorage, path: str, nbytes: int) -> WritableFile:
    assert not path.endswith(".safetensors"), "a file is written"
    return _create(storage, path, nbytes)
