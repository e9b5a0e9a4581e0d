"""The folder of a job is one user's, its owners are known, and what it leaves can be removed."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from arena_processes import program
from dist_ckpt.async_save.snapshots import job_folder
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.core.runtime import lock_files
from dist_ckpt.core.runtime.lock_files import LockFile
from dist_ckpt.errors import ConflictError, StorageError

TRAIN = """
folder = JobFolder("job", roots=[args[0]]).rank(int(args[1]))
lock = folder.lock(args[2])
say("held")
wait()
"""


def base(root: Path) -> Path:
    return root / f"dist_ckpt-{os.geteuid()}"


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder("job", roots=[str(tmp_path)])


# --- the folder ------------------------------------------------------------------------------


def test_folders_are_private_whatever_the_umask_allows(tmp_path):
    before = os.umask(0)
    try:
        rank = JobFolder("job", roots=[str(tmp_path)]).rank(3)
    finally:
        os.umask(before)
    assert rank.path == str(base(tmp_path) / "job" / "rank-00003")
    for path in (base(tmp_path), base(tmp_path) / "job", Path(rank.path)):
        assert path.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("job", ["", ".", "..", "a/b", "-x", "a b", "x" * 65, "a\n", "é"])
def test_a_job_that_is_no_folder_name_is_refused(job, tmp_path):
    with pytest.raises(ValueError, match="1 to 64 letters"):
        JobFolder(job, roots=[str(tmp_path)])


@pytest.mark.parametrize("job", [5, None, b"job", Path("job")])
def test_a_job_that_is_no_text_is_refused(job, tmp_path):
    with pytest.raises(TypeError, match=r"job=.*: it names a folder. Pass a str of 1 to 64"):
        JobFolder(job, roots=[str(tmp_path)])


@pytest.mark.parametrize("level", ["job", "job/rank-00000"])
def test_a_link_in_the_place_of_a_folder_is_refused(level, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    link = base(tmp_path) / level
    for parent in (base(tmp_path), base(tmp_path) / "job")[: level.count("/") + 1]:
        parent.mkdir(mode=0o700)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        StorageError,
        match=r"is not a folder: remove it, or use another root, or another AsyncSaver\(job=",
    ):
        JobFolder("job", roots=[str(tmp_path)]).rank(0)


def take(base: Path, how: str) -> None:
    """Have something else than a private folder of this user at a base."""
    if how == "link":
        base.with_name("elsewhere").mkdir(mode=0o700)
        base.symlink_to(base.with_name("elsewhere"))
    elif how == "file":
        base.touch()
    else:
        base.mkdir(mode=0o700)
        if how == "open":
            base.chmod(0o777)
        else:
            os.chown(base, 12345, -1)


REASONS = {
    "other": "belongs to the user with id 12345, and this is 0: have that user or an administrator",
    "link": "is not a folder: remove it",
    "file": "is not a folder: remove it",
    "open": "is open to other users",
}
TAKEN = [
    pytest.param(
        how,
        marks=pytest.mark.skipif(
            how == "other" and os.geteuid() != 0, reason="only root can give a folder away"
        ),
    )
    for how in REASONS
]


@pytest.mark.parametrize("how", TAKEN)
def test_a_name_that_is_taken_is_gone_around_and_that_is_said(how, tmp_path, caplog):
    roots = [str(tmp_path / name) for name in ("shm", "tmp")]
    for root in roots:
        os.mkdir(root)
    take(base(tmp_path / "shm"), how)
    folder = JobFolder("job", roots=roots)
    assert folder.path == str(base(tmp_path / "tmp") / "job")
    assert not folder.is_shared_memory
    (said,) = caplog.messages
    assert REASONS[how] in said
    assert "live as long as the trainer or its writer" in said
    assert "job=" not in said  # it cannot help
    assert JobFolder("job", roots=roots).path == folder.path  # a writer, and the next run
    found = JobFolder.find("job", roots=roots)
    assert found is not None
    assert found.path == folder.path
    for one in (tmp_path / "shm").iterdir():  # nothing was put there
        assert one.is_file() or os.listdir(one) == []


@pytest.mark.parametrize("how", TAKEN)
def test_if_all_places_are_taken_the_last_one_is_named(how, tmp_path):
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
        take(base(tmp_path / name), how)
    roots = [str(tmp_path / name) for name in ("shm", "tmp")]
    with pytest.raises(StorageError, match=f"/tmp: .*{REASONS[how]}.*set TMPDIR to"):
        JobFolder("job", roots=roots)


def test_processes_of_a_job_meet_where_one_of_them_lives(tmp_path):
    """Though the place before that one has become usable since."""
    roots = [str(tmp_path / name) for name in ("shm", "tmp")]
    os.mkdir(roots[1])
    rank = JobFolder("job", roots=roots).rank(1)
    os.mkdir(roots[0])
    lock = rank.lock("writer")
    for _ in range(2):
        there = JobFolder("job", roots=roots)
        assert there.rank(1).path == rank.path
        assert not there.is_shared_memory
        found = JobFolder.find("job", roots=roots)
        assert found is not None
        assert found.path == there.path
    assert JobFolder("another", roots=roots).is_shared_memory
    lock.release()
    assert JobFolder("job", roots=roots).is_shared_memory  # what it left there ended with it


def test_without_shared_memory_the_folder_lies_elsewhere_and_that_is_said(tmp_path, caplog):
    folder = JobFolder("job", roots=[str(tmp_path / "missing"), str(tmp_path)])
    assert not folder.is_shared_memory
    assert folder.path == str(base(tmp_path) / "job")
    assert "live as long as the trainer or its writer" in caplog.text
    assert JobFolder("job", roots=[str(tmp_path)]).is_shared_memory


def test_without_any_root_the_last_one_is_named(tmp_path):
    roots = [str(tmp_path / "no"), str(tmp_path / "neither")]
    with pytest.raises(StorageError, match="neither: No such file"):
        JobFolder("job", roots=roots)


# --- owners ----------------------------------------------------------------------------------


@pytest.mark.multi_process
def test_a_second_trainer_of_a_job_and_rank_is_a_conflict_that_names_the_first(tmp_path, folder):
    with program(TRAIN, tmp_path, 2, "trainer") as other:
        assert other.hear() == "held"
        with pytest.raises(
            ConflictError, match=rf"rank 2 .* process {other.process.pid} "
        ) as found:
            folder.rank(2).lock("trainer")
        assert found.value.rank == 2
        folder.rank(1).lock("trainer").release()
        folder.rank(2).lock("writer").release()
        JobFolder("job2", roots=[str(tmp_path)]).rank(2).lock("trainer").release()


@pytest.mark.multi_process
def test_who_lives_of_a_rank_can_be_asked(tmp_path, folder):
    rank = folder.rank(0)
    with program(TRAIN, tmp_path, 0, "writer") as writer:
        assert writer.hear() == "held"
        owner = rank.owner("writer")
        assert owner is not None
        assert owner.pid == writer.process.pid
        assert rank.owner("trainer") is None
        writer.kill()
    assert rank.owner("writer") is None


def test_the_ranks_of_earlier_runs_are_listed_and_nothing_else(folder):
    for rank in (12, 0, 3):
        folder.rank(rank)
    (Path(folder.path) / "rank-x").mkdir()
    (Path(folder.path) / "rank-00007").touch()
    (Path(folder.path) / "rank-00008").symlink_to(folder.rank(0).path)
    assert [one.rank for one in folder.rank_folders()] == [0, 3, 12]


def test_a_folder_can_be_looked_for_without_being_made(tmp_path):
    roots = [str(tmp_path / "shm"), str(tmp_path / "tmp")]
    for root in roots:
        os.mkdir(root)
    assert JobFolder.find("job", roots=roots) is None
    assert os.listdir(roots[0]) == os.listdir(roots[1]) == []
    made = JobFolder("job", roots=roots[1:])
    made.rank(5)
    found = JobFolder.find("job", roots=roots)
    assert found is not None
    assert (found.path, found.job, found.is_shared_memory) == (made.path, "job", False)
    assert [rank.rank for rank in found.rank_folders()] == [5]
    assert JobFolder.find("other", roots=roots) is None
    Path(roots[0], f"dist_ckpt-{os.geteuid()}").mkdir(mode=0o700)
    os.symlink(made.path, Path(roots[0], f"dist_ckpt-{os.geteuid()}", "other"))
    assert JobFolder.find("other", roots=roots) is None
    os.chmod(made.path, 0o750)
    assert JobFolder.find("job", roots=roots) is None
    assert JobFolder("job", roots=roots).path.startswith(roots[0])
    shm = JobFolder.find("job", roots=roots)
    assert shm is not None
    assert shm.is_shared_memory


# --- where memory is -------------------------------------------------------------------------


def test_memory_without_a_name_is_found_by_what_its_owners_said(folder):
    rank = folder.rank(0)
    assert list(rank.open_paths(0)) == []
    assert rank.publish("writer", 0, 7) == f"/proc/{os.getpid()}/fd/7"
    rank.publish("trainer", 0, 8)
    rank.publish("trainer", 0, 9)
    proc = f"/proc/{os.getpid()}/fd"
    assert list(rank.open_paths(0)) == [f"{proc}/9", f"{proc}/7"]
    assert list(rank.open_paths(1)) == []
    Path(rank.arena_path(0)).touch()
    assert next(rank.open_paths(0)) == rank.arena_path(0)
    assert len(os.listdir(rank.path)) == 3


@pytest.mark.parametrize(
    "text", [b"", b"/etc/passwd", b"/proc/1/fd/2/../../x", b"\xff", b"/" * 999]
)
def test_a_place_that_is_no_descriptor_is_not_looked_at(folder, text):
    rank = folder.rank(0)
    Path(f"{rank.arena_path(0)}.trainer").write_bytes(text)
    assert list(rank.open_paths(0)) == []


# --- removal ---------------------------------------------------------------------------------


def filled(folder: JobFolder) -> Path:
    rank = folder.rank(0)
    Path(rank.arena_path(0)).write_bytes(b"x")
    Path(rank.arena_path(1) + ".new").write_bytes(b"x")
    rank.publish("trainer", 1, 9)
    return Path(rank.path)


@pytest.mark.multi_process
def test_what_a_dead_run_left_is_removed_whole(tmp_path, folder):
    path = filled(folder)
    with program(TRAIN, tmp_path, 0, "trainer") as other:
        assert other.hear() == "held"
        other.kill()
    folder.rank(0).remove()
    assert not path.exists()
    assert [one.rank for one in folder.rank_folders()] == []


@pytest.mark.multi_process
@pytest.mark.parametrize("role", ["trainer", "writer"])
def test_nothing_is_removed_while_an_owner_lives(tmp_path, folder, role):
    path = filled(folder)
    with program(TRAIN, tmp_path, 0, role) as other:
        assert other.hear() == "held"
        before = set(os.listdir(path))
        with pytest.raises(ConflictError, match=f"living {role}"):
            folder.rank(0).remove()
        assert before <= set(os.listdir(path))
    folder.rank(0).remove()
    assert not path.exists()


def test_a_name_that_is_not_ours_is_left(folder):
    path = filled(folder)
    (path / "notes.txt").touch()
    folder.rank(0).remove()
    assert os.listdir(path) == ["notes.txt"]


def test_a_folder_that_goes_before_the_lock_is_taken_is_made_again(folder, monkeypatch):
    rank = folder.rank(0)

    def take_late(path: str) -> LockFile:
        monkeypatch.undo()
        folder.rank(0).remove()
        return lock_files.take(path)

    monkeypatch.setattr(job_folder, "take", take_late)
    lock = rank.lock("trainer")
    assert rank.owner("trainer") is not None
    lock.release()


@pytest.mark.multi_process
def test_a_folder_that_goes_while_it_is_looked_at_is_made_again(folder, monkeypatch):
    real = os.lstat

    def look_late(looked_at: str) -> os.stat_result:
        if looked_at == path:
            monkeypatch.undo()
            os.rmdir(path)
        return real(looked_at)

    path = folder.rank(0).path
    monkeypatch.setattr(os, "lstat", look_late)
    folder.rank(0)
    assert os.path.isdir(path)


def make_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkdir, "a folder"),
        (os.mkfifo, "a pipe"),
        (lambda path: os.symlink("/dev/null", path), "a link"),
        (make_socket, "a socket"),
    ],
)
def test_what_is_no_file_in_the_place_of_a_lock_is_named_and_left(folder, make, what):
    rank = folder.rank(0)
    path = f"{rank.path}/trainer.lock"
    make(path)
    with pytest.raises(StorageError, match=f"{path} is {what}, .* remove it, or"):
        rank.lock("trainer")
    assert rank.owner("trainer") is None
    assert os.path.lexists(path)


def test_a_lock_that_cannot_be_had_says_why(folder, monkeypatch):
    rank = folder.rank(0)

    def refuse(path: str) -> LockFile:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(job_folder, "take", refuse)
    with pytest.raises(StorageError, match=r"trainer.lock cannot be locked: No locks available"):
        rank.lock("trainer")


def test_whoever_takes_a_lock_while_the_folder_is_removed_over_and_over_has_it(tmp_path, folder):
    code = """
for _ in range(200):
    try:
        JobFolder("job", roots=[args[0]]).rank(0).remove()
    except Exception as error:
        if type(error).__name__ != "ConflictError":
            raise
say("done")
"""
    rank = folder.rank(0)
    taken = 0
    with program(code, tmp_path) as other:
        while taken < 300:
            try:
                lock = rank.lock("trainer")
            except ConflictError:
                continue
            owner = rank.owner("trainer")
            assert owner is not None
            assert owner.pid == os.getpid()
            lock.release()
            taken += 1
        assert other.hear() == "done"


def test_a_root_that_is_full_is_gone_around_but_for_a_job_that_lies_there(
    tmp_path, monkeypatch, caplog
):
    roots = [str(tmp_path / name) for name in ("full", "other")]
    for root in roots:
        os.mkdir(root)
    there = JobFolder("there", roots=roots)
    volume = SimpleNamespace(f_blocks=1 << 20, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: volume)
    # Its own snapshots may be what fills it.
    assert JobFolder("there", roots=roots).path == there.path
    new = JobFolder("new", roots=roots)
    assert new.path.startswith(roots[1])
    assert not new.is_shared_memory
    assert "No space left on device" in caplog.text
    # The last one is all there is.
    assert JobFolder("there", roots=roots[:1]).is_shared_memory
    assert JobFolder("new", roots=roots[:1]).path.startswith(roots[0])
