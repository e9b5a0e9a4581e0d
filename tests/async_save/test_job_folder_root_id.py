"""A folder of checkpoints is told from any other that has, or had, its path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import (
    JobFolder,
    find_root_id,
    make_job_name,
    make_root_id,
)
from dist_ckpt.core.commit.attempts import has_folder
from dist_ckpt.core.commit.commit_protocol import claim
from dist_ckpt.core.commit.removal import remove_garbage
from dist_ckpt.core.format.filenames import ROOT_ID
from dist_ckpt.core.storage import open_storage
from dist_ckpt.errors import CorruptError, ExistsError, StorageError
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage


def made(root: Path) -> str:
    return make_root_id(*open_storage(root))


def found(root: Path) -> str | None:
    return find_root_id(*open_storage(root))


def job_of(root: Path) -> str:
    return make_job_name(str(root), made(root))


# --- the id ----------------------------------------------------------------------------------


def test_a_folder_gets_an_id_once_and_is_made_for_it(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    assert found(root) is None
    assert os.listdir(tmp_path) == []
    first = made(root)
    assert len(first) == 32
    assert made(root) == found(root) == first
    assert os.listdir(root) == [ROOT_ID]
    shutil.rmtree(root)
    assert made(root) != first


def test_who_makes_an_id_at_once_gets_the_same_one(tmp_path: Path) -> None:
    got: list[str] = []
    together = threading.Barrier(16)

    def make(root: Path) -> None:
        together.wait(60)
        got.append(made(root))

    for number in range(20):
        got.clear()
        root = tmp_path / str(number) / "runs"
        makers = [threading.Thread(target=make, args=[root]) for _ in range(16)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join(60)
        assert len(got) == 16
        assert set(got) == {found(root)}
        assert os.listdir(root) == [ROOT_ID]  # what the slower ones wrote is gone


def link(file: Path) -> None:
    file.with_name("elsewhere").write_text("0" * 32 + "\n")
    file.symlink_to("elsewhere")


def huge(file: Path) -> None:
    with file.open("wb") as out:
        out.truncate(1 << 40)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "short": lambda file: file.write_text("0" * 31 + "\n"),
    "long": lambda file: file.write_text("0" * 32 + "\n\n"),
    "no line feed": lambda file: file.write_text("0" * 32),
    "no digits": lambda file: file.write_text("/" * 32 + "\n"),
    "upper case": lambda file: file.write_text("A" * 32 + "\n"),
    "huge": huge,
    "folder": lambda file: file.mkdir(),
    "pipe": os.mkfifo,
    "link": link,
    "dangling link": lambda file: file.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_id_is_refused_and_left(kind: str, tmp_path: Path) -> None:
    HOSTILE[kind](tmp_path / ROOT_ID)
    before = sorted(os.listdir(tmp_path))
    for look in (made, found):
        with pytest.raises(CorruptError, match=f"{ROOT_ID} is n.* remove it.*job="):
            look(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before


def test_what_a_maker_that_dies_leaves_is_collected() -> None:
    disk = MemoryStorage()

    class Dead(FaultyStorage):
        def rename(self, old: str, new: str) -> None:
            raise KeyboardInterrupt

        def remove(self, path: str) -> None:
            raise StorageError("dead")

    with pytest.raises(KeyboardInterrupt):
        make_root_id(Dead(disk), "/runs")
    (left,) = disk.list("/runs")
    assert left.name.startswith(f"{ROOT_ID}.")
    first = make_root_id(disk, "/runs")
    assert remove_garbage(disk, "/runs", grace_s=3600) == ()
    assert remove_garbage(disk, "/runs", grace_s=-1) == (left.name,)
    assert [entry.name for entry in disk.list("/runs")] == [ROOT_ID]
    assert find_root_id(disk, "/runs") == first


@pytest.mark.parametrize("done", [False, True])
def test_whichever_call_fails_nothing_is_left_that_the_next_one_trips_over(done: bool) -> None:
    counted = FaultyStorage(MemoryStorage())
    make_root_id(counted, "/a/runs")
    assert counted.calls > 8
    for number in range(1, counted.calls + 1):
        disk = CrashStorage()
        storage = FaultyStorage(disk, fail_at_call=number, done=done)
        with pytest.raises(StorageError):
            make_root_id(storage, "/a/runs")
        if find_root_id(disk, "/a/runs") is None and not done:
            names = [entry.name for entry in disk.list("/")]
            assert names == [] or disk.list("/a/runs") == [], storage.failed
        make_root_id(disk, "/a/runs")
        assert not claims_that_a_power_cut_forgets(disk, "/a/runs"), storage.failed


def test_a_folder_that_takes_no_id_is_named_with_what_to_do() -> None:
    storage = FaultyStorage(MemoryStorage(), fail_at_call=4, sticky=True)
    with pytest.raises(StorageError, match=r"^/runs: .* cannot be written .*make it writable"):
        make_root_id(storage, "/runs")


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises((ExistsError, StorageError), match="runs"):
        made(tmp_path / "runs")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_keeps_the_id_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="make it writable"):
        made(tmp_path / "new")
    first = made(tmp_path)
    tmp_path.chmod(0o500)
    assert made(tmp_path) == first
    tmp_path.chmod(0o700)


def claims_that_a_power_cut_forgets(disk: CrashStorage, root: str) -> list[str]:
    """Claim in a root; return the crashes after it that leave no folder of that claim."""
    claimed = claim(disk, f"{root}/ck", overwrite=False, by="a test")
    disk.mark("claimed")
    after = [(str(point), left) for point, left in states(disk.log, since="claimed")]
    assert after
    return [point for point, left in after if not has_folder(left, claimed.path, claimed.attempt)]


def test_after_a_power_cut_the_folders_of_a_claim_are_there() -> None:
    """A claim takes for durable what it finds; so whoever makes a root must have seen to that."""
    disk = CrashStorage()
    make_root_id(disk, "/a/runs")
    assert claims_that_a_power_cut_forgets(disk, "/a/runs") == []


# --- the job ---------------------------------------------------------------------------------


def test_a_job_is_the_folder_that_its_checkpoints_lie_in(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    job = job_of(root)
    assert job_of(root) == job
    assert job_of(tmp_path / "other") != job
    JobFolder(job, roots=[str(tmp_path)])
    (tmp_path / "link").symlink_to(root)
    assert job_of(tmp_path / "link") == job


def test_a_copy_of_a_folder_is_another_job(tmp_path: Path) -> None:
    job = job_of(tmp_path / "runs")
    shutil.copytree(tmp_path / "runs", tmp_path / "copy")
    assert found(tmp_path / "copy") == found(tmp_path / "runs")
    assert job_of(tmp_path / "copy") != job


def test_a_folder_that_was_made_anew_is_another_job_whatever_its_number_is(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    jobs = {job_of(root)}
    for _ in range(5):
        shutil.rmtree(root)
        root.mkdir()
        jobs.add(job_of(root))
    assert len(jobs) == 6


@pytest.mark.multi_process
def test_a_job_is_the_same_in_another_process(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    code = (
        "from dist_ckpt.async_save.snapshots.job_folder import *; "
        "from dist_ckpt.core.storage import open_storage; "
        f"print(make_job_name('{tmp_path}', make_root_id(*open_storage('{tmp_path}'))), end='')"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == job


def test_a_job_differs_between_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = job_of(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert job_of(tmp_path) != mine


# --- what else looks at the folder -----------------------------------------------------------


def test_the_id_of_a_folder_is_in_nobody_s_way(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root_id = made(root)
    dc.save({"step": 1}, root / "ck", step=1)
    assert [one.name for one in dc.checkpoints(root)] == ["ck"]
    dc.save({"step": 2}, root / "ck", step=2, overwrite=True)
    dc.delete(root / "ck")
    assert os.listdir(root) == [ROOT_ID]
    assert found(root) == root_id


def test_a_root_may_be_the_checkpoint_s_own_folder(tmp_path: Path) -> None:
    root = tmp_path / "newest"
    made(root)
    dc.save({"step": 1}, root, step=1)
    dc.save({"step": 2}, root, step=2, overwrite=True)
    assert dc.verify(root).ok
    dc.delete(root)
    assert os.listdir(root) == [ROOT_ID]
