"""Where shared memory is short or missing, snapshots lie elsewhere, and that is said once."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from arena_processes import START, program
from dist_ckpt.async_save.snapshots.arena import Arena, ArenaPool, ArenaReader
from dist_ckpt.async_save.snapshots.arena_layout import Image, Seal, Snapshot, arena_nbytes
from dist_ckpt.async_save.snapshots.job_folder import JobFolder, RankFolder
from dist_ckpt.core.runtime import host_memory
from dist_ckpt.errors import StorageError
from recovered_arenas import kept_in

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no memory without a name"
)

SNAPSHOT = Snapshot("0" * 32, "/run/step-7", 7, 0, 1, (Image("a", 3 << 20),))


@pytest.fixture
def elsewhere(tmp_path: Path) -> RankFolder:
    """Return a folder that is not in shared memory, as there is none."""
    return JobFolder("job", roots=[str(tmp_path / "none"), str(tmp_path)]).rank(0)


def with_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    volume = SimpleNamespace(f_blocks=1 << 20, f_bavail=nbytes, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: volume)


def stage(arena: Arena) -> None:
    (image,) = arena.begin(SNAPSHOT)
    image[:] = b"s" * len(image)
    arena.complete()


def kept_steps(rank_folder: RankFolder) -> list[int | None]:
    with kept_in(rank_folder) as (found, problems):
        assert problems == []
        assert all(kept.is_complete for kept in found)
        return [kept.snapshot.step for kept in found]


def test_small_shared_memory_is_gone_around_and_that_is_said_once(
    arenas, rank_folder, monkeypatch, caplog
):
    with_free(monkeypatch, 64 << 10)
    stage(arenas.open_fitting(0, arena_nbytes(SNAPSHOT)))
    stage(arenas.open_fitting(1, arena_nbytes(SNAPSHOT)))
    assert len(caplog.records) == 1
    assert "enlarge /dev/shm (docker run --shm-size)" in caplog.text
    assert rank_folder.path in caplog.text
    assert sorted(os.listdir(rank_folder.path)) == ["arena-0.trainer", "arena-1.trainer"]
    assert kept_steps(rank_folder) == [7, 7]
    arenas.close()
    assert kept_steps(rank_folder) == []


def test_what_has_a_name_does_not_hide_the_memory_that_has_none(arenas, rank_folder, monkeypatch):
    Path(rank_folder.arena_path(0)).write_bytes(b"of another version")
    with_free(monkeypatch, 100)
    arena = arenas.open_fitting(0, 8192)
    assert list(rank_folder.open_paths(0)) == [arena.path]


def test_an_arena_that_outgrows_shared_memory_moves(arenas, rank_folder, monkeypatch):
    small = arenas.open_fitting(0, 8192)
    assert small.path == rank_folder.arena_path(0)

    def full(fd: int, start: int, nbytes: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(rank_folder.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, start + nbytes)

    monkeypatch.setattr(host_memory, "_allocate", full)
    large = arenas.open_fitting(0, arena_nbytes(SNAPSHOT))
    assert large.path.startswith("/proc/")
    assert os.listdir(rank_folder.path) == ["arena-0.trainer"]
    stage(large)
    assert kept_steps(rank_folder) == [7]
    assert arenas.open_fitting(0, 100) is large


def test_where_there_is_no_shared_memory_the_folder_says_where_the_memory_is(elsewhere, caplog):
    caplog.clear()
    arenas = ArenaPool(elsewhere)
    arena = arenas.open_fitting(0, arena_nbytes(SNAPSHOT))
    assert caplog.records == []  # the folder has said it
    assert list(elsewhere.open_paths(0)) == [arena.path]
    stage(arena)
    assert kept_steps(elsewhere) == [7]
    arenas.close()


TRAIN = """
rank = JobFolder("job", roots=[args[0] + "/none", args[0]]).rank(0)
lock = rank.lock("trainer")
what = Snapshot("0" * 32, "/run/step-7", 7, 0, 1, (Image("a", 3 << 20),))
arena = ArenaPool(rank).open_fitting(0, arena_nbytes(what))
for image in arena.begin(what):
    image[:] = b"s" * len(image)
arena.complete()
say(arena.path)
wait()
"""


@pytest.mark.multi_process
def test_memory_without_a_name_lives_as_long_as_its_writer(tmp_path, elsewhere):
    with program(TRAIN, tmp_path) as trainer:
        writer = ArenaReader(trainer.hear(), "job")
        elsewhere.publish("writer", 0, writer.fd)
        trainer.kill()
    assert kept_steps(elsewhere) == [7]
    writer.follow(SNAPSHOT.id).seal(Seal("a1", ()))

    later = ArenaPool(elsewhere)
    arena = later.open_fitting(0, 100)  # a later trainer takes it over
    assert arena.nbytes == arena_nbytes(SNAPSHOT)
    writer.close()
    assert kept_steps(elsewhere) == [7]
    later.close()
    assert kept_steps(elsewhere) == []


def test_no_memory_anywhere_says_how_much_was_needed(arenas, rank_folder, monkeypatch):
    arenas.open_fitting(0, 8192)

    def full(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(host_memory, "_allocate", full)
    with pytest.raises(
        StorageError, match=r"no memory for a snapshot of 1,048,576 bytes: No space"
    ):
        arenas.open_fitting(1, 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(rank_folder.path) == ["arena-0"]


def test_memory_that_the_host_has_not_is_refused_before_a_process_is_ended_for_it(
    arenas, monkeypatch
):
    monkeypatch.delattr(host_memory, "_allocate")  # nobody gets as far as that
    with pytest.raises(StorageError, match=r"bytes are needed, and .* are available"):
        arenas.open_fitting(0, 1 << 50)


def test_a_limit_that_stops_an_arena_from_growing_leaves_it_as_it_was(tmp_path, monkeypatch):
    fd = host_memory.create_named(str(tmp_path / "arena"), 1 << 20)
    monkeypatch.setattr(host_memory, "_RESERVE_NBYTES", 1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as found:
            host_memory.reserve(fd, 3 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert host_memory.is_out_of_space(found.value)
    assert os.fstat(fd).st_size == 1 << 20
    os.close(fd)


def test_memory_that_could_not_be_reserved_is_given_back(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            host_memory.create_named(str(tmp_path / "arena"), 8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


IN_A_SMALL_MOUNT = """
rank = JobFolder("job", roots=[args[0]]).rank(0)
arenas = ArenaPool(rank)
what = Snapshot("0" * 32, "/run", 7, 0, 1, (Image("a", 1 << 20),))
for number in (0, 1):  # two do not fit
    arena = arenas.open_fitting(number, arena_nbytes(what))
    for image in arena.begin(what):
        image[:] = b"s" * len(image)
    arena.complete()
    say(arena.path.split("/")[1])
say(arenas.open_fitting(0, 3 << 20).path.split("/")[1])
say(*sorted(os.listdir(rank.path)))
"""


@pytest.mark.multi_process
def test_a_really_small_shared_memory_ends_nobody(tmp_path):
    unshare = shutil.which("unshare")
    mount = ["-m", "sh", "-c"] if os.geteuid() == 0 else ["-rm", "sh", "-c"]
    mounted = f"mount -t tmpfs -o size=1900k,mode=700 tmpfs {tmp_path} && "
    test = [unshare or "", *mount, mounted + "true"]
    if not unshare or subprocess.run(test, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("this user cannot mount anything")
    shell = mounted + 'exec "$0" "$@"'
    run = [unshare, *mount, shell, sys.executable, "-c", START + IN_A_SMALL_MOUNT, str(tmp_path)]
    done = subprocess.run(
        run, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    named = str(tmp_path).split("/")[1]
    assert done.stdout.split("\n")[:4] == [
        *(named, "proc", "proc"),
        "arena-0.trainer arena-1.trainer",
    ]
    assert done.stderr.count("docker run --shm-size") == 1


# --- what is not ours ------------------------------------------------------------------------


def make_folder(path: str) -> None:
    os.mkdir(path)


def make_pipe(path: str) -> None:
    os.mkfifo(path)


def make_link(path: str) -> None:
    os.symlink("/dev/null", path)


@pytest.mark.parametrize(
    ("make", "what"), [(make_folder, "a folder"), (make_pipe, "a pipe"), (make_link, "a link")]
)
@pytest.mark.parametrize("name", ["arena-0", "arena-0.new"])
def test_what_is_no_file_in_the_place_of_an_arena_is_named_and_left(
    arenas, rank_folder, name, make, what
):
    path = f"{rank_folder.path}/{name}"
    make(path)
    with pytest.raises(StorageError, match=f"{path} is {what}, .* remove it, or"):
        arenas.open_fitting(0, 4096)
    rank_folder.remove()
    assert os.listdir(rank_folder.path) == [name]


def test_a_folder_where_the_place_of_memory_is_told_is_named_and_left(elsewhere):
    path = f"{elsewhere.arena_path(0)}.trainer"
    os.mkdir(path)
    with pytest.raises(StorageError, match=f"{path} is a folder, .* remove it, or"):
        ArenaPool(elsewhere).open_fitting(0, 4096)
    assert os.path.isdir(path)
