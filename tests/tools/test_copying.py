"""`copy`: the same checkpoint elsewhere, every byte checked, or none at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.commit.records.leases import Lease
from dist_ckpt.errors import StorageError
from dist_ckpt.tools.rewrite.copying import copy


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {"model": {"w": torch.arange(12.0)}, "epoch": 3, "rank": dc.PerRank({"at": 1})}
    dc.save(state, tmp_path / "run" / "step-7", step=7)
    return tmp_path / "run" / "step-7"


def test_a_copy_is_the_same_save_and_shares_nothing(source: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    target = tmp_path / "far" / "away"
    report = copy(source, target, progress=lambda done, total: told.append((done, total)))
    with dc.open(source) as old, dc.open(target) as new:
        assert new.index.save == old.index.save
        assert new["model.w"][...] == old["model.w"][...]
        assert (new.objects, new.per_rank) == (old.objects, old.per_rank)
    assert dc.verify(target).ok
    assert report.num_linked == 0
    assert all(file.stat().st_nlink == 1 for file in target.glob("a1-*/*"))
    done, total = told[-1]
    assert 0 < done <= total == report.nbytes


def test_links_take_no_space_where_they_can_be_made(source: Path, tmp_path: Path) -> None:
    report = copy(source, tmp_path / "linked", link=True)
    assert report.num_linked == report.num_files
    assert dc.verify(tmp_path / "linked").ok


def test_another_file_system_gets_copies(source: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or os.stat(shared).st_dev == os.stat(source).st_dev:
        pytest.skip("there is no second file system")
    target = shared / f"dist-ckpt-test-copy-{os.getpid()}"
    try:
        assert copy(source, target, link=True).num_linked == 0
        assert dc.verify(target).ok
    finally:
        dc.delete(target)


def test_damage_is_found_on_the_way_and_nothing_is_left(source: Path, tmp_path: Path) -> None:
    (file,) = source.glob("a1-*/model-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(dc.CorruptError, match=r"model\.w"):
        copy(source, tmp_path / "copy")
    assert not list((tmp_path / "copy").glob("a*"))


def test_a_file_of_the_copy_that_goes_away_meanwhile_is_noticed(
    source: Path, tmp_path: Path
) -> None:
    def remove(done: int, total: int) -> None:
        del done, total
        for file in (tmp_path / "copy").glob("a1-*/*.safetensors"):
            file.unlink()

    with pytest.raises(dc.CheckpointError, match=r"model-00000\.safetensors"):
        copy(source, tmp_path / "copy", progress=remove)
    with pytest.raises(dc.NotFoundError):
        dc.open(tmp_path / "copy")


def test_what_is_there_is_replaced_only_if_asked(source: Path, tmp_path: Path) -> None:
    dc.save({"w": torch.ones(1)}, tmp_path / "there")
    with pytest.raises(dc.ExistsError):
        copy(source, tmp_path / "there")
    copy(source, tmp_path / "there", overwrite=True)
    assert dc.open(tmp_path / "there").step == 7


def test_what_cannot_be_leased_is_copied(source: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    """Users copy a checkpoint away from a full disk, or out of the run of another user."""
    dc.Run(source.parent).metrics(7, {"loss": 0.5})

    def refuse(self: Lease) -> None:
        raise StorageError("No space left on device (ENOSPC)")

    monkeypatch.setattr(Lease, "take", refuse)
    copy(source, tmp_path / "elsewhere")
    assert dc.verify(tmp_path / "elsewhere").ok
    assert f"{source} is not leased, so a prune may remove it now: No space" in caplog.text


def test_metrics_go_along_into_a_runs_folder(source: Path, tmp_path: Path) -> None:
    dc.save({"w": torch.ones(1)}, tmp_path / "other" / "step-1", step=1)
    dc.Run(source.parent).metrics(7, {"loss": 0.5})
    dc.Run(tmp_path / "other").metrics(1, {"loss": 1.5})
    copy(source, tmp_path / "other" / "step-7")
    assert {one.step: one.metrics for one in dc.checkpoints(tmp_path / "other")} == {
        1: {"loss": 1.5},
        7: {"loss": 0.5},
    }


def test_a_target_in_or_on_the_source_is_refused(source: Path) -> None:
    for target in (source, source / "copy"):
        with pytest.raises(ValueError, match="another target"):
            copy(source, target, overwrite=True)


def test_files_of_another_system_are_refused_with_what_to_do(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(dc.IncompatibleError, match="dist-ckpt import"):
        copy(tmp_path / "model.safetensors", tmp_path / "copy")
