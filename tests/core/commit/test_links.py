"""Nothing is listed or removed through a link, whatever it is called and whenever it comes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.commit import attempts, removal
from dist_ckpt.core.format.filenames import Attempt, trash_name
from dist_ckpt.core.storage import Entry, ReadableFile, WritableFile
from dist_ckpt.core.storage.local.local_storage import LocalStorage

STATE = {"model": {"w": torch.arange(8.0)}}
TRASH = trash_name(Attempt(1, "0123456789abcdef"))


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    dc.save(STATE, tmp_path / "ck", step=1)
    return tmp_path / "ck"


@pytest.fixture(params=["a checkpoint", "an attempt", "a stranger's folder"])
def victim(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder with files of names that are in attempts too."""
    if request.param == "a stranger's folder":
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "index.json").write_text("{}")
        (tmp_path / "site" / "model-00000.safetensors").write_text("theirs")
        return tmp_path / "site"
    dc.save(STATE, tmp_path / "other", step=2)
    (attempt,) = (tmp_path / "other").iterdir()
    return attempt if request.param == "an attempt" else tmp_path / "other"


def overwrite(path: Path) -> None:
    dc.save(STATE, path, step=3, overwrite=True)


def gc(path: Path) -> None:
    removal.remove_all_garbage(LocalStorage(), str(path.parent), grace_s=0)


@pytest.mark.parametrize("call", [overwrite, gc, dc.delete])
def test_a_link_that_is_named_like_trash_is_left_and_so_is_what_it_leads_to(
    call: Callable[[Path], None], path: Path, victim: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = listing(victim)
    (path / TRASH).symlink_to(victim, target_is_directory=True)
    call(path)
    assert listing(victim) == before
    assert (path / TRASH).is_symlink()
    assert f"{path / TRASH} is not a folder, so not dist_ckpt's: remove it by hand" in caplog.text


def test_a_path_that_is_a_link_works_as_before(path: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(path, target_is_directory=True)
    overwrite(tmp_path / "latest")
    dc.save(STATE, path, step=4, overwrite=True)
    assert [entry.is_symlink() for entry in path.iterdir()] == [False]
    gc(tmp_path / "latest")
    dc.delete(tmp_path / "latest")
    assert not path.exists()


class Swapping:
    """A storage beside which somebody swaps a trash folder for a link before the n-th call."""

    def __init__(self, victim: Path, at: int) -> None:
        self.inner = LocalStorage()
        self.calls = 0
        self.kept: Path | None = None
        self._victim, self._at = victim, at

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        self._before(folder)
        return self.inner.list(folder, follow=follow)

    def remove(self, path: str) -> None:
        self._before(path)
        self.inner.remove(path)

    def rename(self, old: str, new: str) -> None:
        self.inner.rename(old, new)

    def link(self, old: str, new: str) -> None:
        self.inner.link(old, new)

    def sync(self, folder: str) -> None:
        self.inner.sync(folder)

    def make_folder(self, folder: str) -> None:
        self.inner.make_folder(folder)

    def create(self, path: str, nbytes: int) -> WritableFile:
        return self.inner.create(path, nbytes)

    def open(self, path: str) -> ReadableFile:
        return self.inner.open(path)

    def _before(self, path: str) -> None:
        trash = next(
            (p for p in (Path(path), Path(path).parent) if "/.trash-" in f"/{p.name}"), None
        )
        if trash is None:
            return
        self.calls += 1
        if self.calls == self._at:
            self.kept = trash.with_name("moved")
            os.rename(trash, self.kept)
            trash.symlink_to(self._victim, target_is_directory=True)


@pytest.mark.parametrize("at", range(1, 7))
def test_a_trash_folder_that_is_swapped_for_a_link_leads_nowhere(
    at: int, path: Path, victim: Path
) -> None:
    before = listing(victim)
    (attempt,) = attempts.list_statuses(LocalStorage(), str(path))
    storage = Swapping(victim, at)
    removal.remove(storage, str(path), attempt.attempt)
    assert listing(victim) == before
    # list, then index, claim, shard file and objects, then the folder: each time it came too late.
    assert storage.calls >= at
    assert storage.kept is not None
    assert storage.kept.is_dir()


def test_an_attempt_that_is_swapped_for_a_link_is_not_looked_into(path: Path, victim: Path) -> None:
    (attempt,) = path.iterdir()
    shutil.rmtree(attempt)
    (victim / "index.json").touch()
    attempt.symlink_to(victim, target_is_directory=True)
    assert attempts.list_statuses(LocalStorage(), str(path)) == ()
    with pytest.raises(NotADirectoryError):
        LocalStorage().list(str(attempt), follow=False)
    with pytest.raises(NotADirectoryError):
        LocalStorage().remove(f"{attempt}/index.json")
