"""Local storage keeps the contract, with and without the newest calls, and reports real faults."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from commit_cases import save, step_at, write_rank
from dist_ckpt.core.commit import attempts, commit_protocol, removal
from dist_ckpt.core.format.index.index import Abandoned
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.local import local_storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage, pwrite_fully
from dist_ckpt.errors import CorruptError, ExistsError, NotFoundError, StorageError
from dist_ckpt.testing.storage_contract import StorageContract, read, write


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def storage() -> Storage:
    return LocalStorage()


@pytest.fixture
def no_exclusive_rename(monkeypatch) -> None:
    """Make the system what NFS and old kernels are: without an exclusive rename."""
    monkeypatch.setattr(local_storage, "_rename_by_call", lambda *_: False)


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)

    @pytest.fixture
    def storage(self) -> Storage:
        return LocalStorage()


@pytest.mark.usefixtures("no_exclusive_rename")
class TestLocalStorageWithoutExclusiveRename(TestLocalStorage):
    pass


# --- paths -----------------------------------------------------------------------------------


def test_a_relative_path_means_what_it_meant_when_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, path = open_storage("runs//ck/")
    assert path == f"{tmp_path}/runs/ck"
    assert open_storage(Path("/a/../b"))[1] == "/b"


def test_a_relative_path_in_a_folder_that_was_removed_says_so(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(NotFoundError, match=r"path is 'ck', and the current folder .* was removed"):
        open_storage("ck")
    assert open_storage("/ck")[1] == "/ck"


@pytest.mark.parametrize("path", ["s3://bucket/ck", "file:///ck", "gs://b", "http://u:pw@h/x"])
def test_an_address_is_refused_without_repeating_what_may_be_secret(path):
    with pytest.raises(ValueError, match="only file systems are supported") as caught:
        open_storage(path)
    assert "pw" not in str(caught.value)


def test_what_is_no_path_is_refused():
    with pytest.raises(ValueError, match="pass the path of a folder"):
        open_storage("")
    with pytest.raises(ValueError, match="pass the path of a folder"):
        open_storage("a\0b")
    with pytest.raises(TypeError, match="pass a str"):
        open_storage(b"/ck")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        open_storage(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/ck/\udcff", Path("\udcff"), "\ud800"])
def test_a_path_that_is_no_text_is_refused_by_name(path):
    with pytest.raises(ValueError, match=r"\\ud.* is not valid UTF-8 .*rename the folder"):
        open_storage(path)


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/etc/passwd", path)])
def test_a_pipe_or_a_link_is_listed_as_odd_and_never_opened(make, storage, root):
    make(f"{root}/f")
    assert [entry.kind for entry in storage.list(root)] == ["other"]
    with pytest.raises(CorruptError, match="a link, a folder or a device"):
        storage.open(f"{root}/f")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_closed_again(make, storage, root):
    make(f"{root}/f")
    before = os.listdir("/dev/fd")
    with pytest.raises(CorruptError):
        storage.open(f"{root}/f")
    assert os.listdir("/dev/fd") == before


def test_a_link_is_never_written_through(storage, root):
    os.symlink(f"{root}/elsewhere", f"{root}/f")
    with pytest.raises(FileExistsError):
        storage.create(f"{root}/f", 1)
    storage.remove(f"{root}/f")
    assert os.listdir(root) == []


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/etc/hosts", path)])
def test_a_pipe_or_a_symbolic_link_is_not_linked(make, storage, root):
    make(f"{root}/f")
    with pytest.raises(StorageError, match="not a regular file"):
        storage.link(f"{root}/f", f"{root}/g")
    assert os.listdir(root) == ["f"]


def test_nothing_is_linked_through_a_folder_that_is_a_symbolic_link(storage, root):
    os.mkdir(f"{root}/d")
    os.symlink("d", f"{root}/s")
    write(storage, f"{root}/d/f", b"1")
    for old, new in (("s/f", "d/g"), ("d/f", "s/g")):
        with pytest.raises(StorageError, match="ENOTDIR"):
            storage.link(f"{root}/{old}", f"{root}/{new}")
    assert os.listdir(f"{root}/d") == ["f"]


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOTSUP])
def test_a_file_system_that_takes_no_link_says_so_with_a_remedy(code, storage, root, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    write(storage, f"{root}/f", b"1")
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
        storage.link(f"{root}/f", f"{root}/g")
    assert "check the disk or the network" not in str(caught.value)


def test_between_file_systems_nothing_is_linked(storage, root):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == os.stat(root).st_dev:
            pytest.skip("one file system")
        write(storage, f"{root}/f", b"1")
        with pytest.raises(StorageError, match="EXDEV"):
            storage.link(f"{root}/f", f"{other}/g")
        assert os.listdir(other) == []


def test_files_and_folders_get_the_permissions_of_the_umask(storage, root):
    before = os.umask(0o027)
    try:
        storage.make_folder(f"{root}/d")
        write(storage, f"{root}/d/f", b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(f"{root}/d").st_mode) == 0o750
    assert stat.S_IMODE(os.stat(f"{root}/d/f").st_mode) == 0o640


def test_the_space_of_a_file_is_reserved_when_it_is_created(storage, root):
    file = storage.create(f"{root}/f", 1 << 20)
    status = os.stat(f"{root}/f")
    file.discard()
    with open(f"{root}/g", "wb") as probe:
        if not local_storage._allocate(probe.fileno(), 1 << 20):
            pytest.skip("this file system cannot reserve space")
    assert status.st_blocks * 512 >= 1 << 20
    assert status.st_size == 0


def test_a_file_larger_than_the_disk_is_refused_at_once_and_leaves_nothing(storage, root):
    with pytest.raises(StorageError, match=r"ENOSPC|EFBIG"):
        storage.create(f"{root}/f", 1 << 55)
    assert os.listdir(root) == []


def test_where_nothing_can_be_reserved_the_free_space_is_checked(storage, root, monkeypatch):
    monkeypatch.setattr(local_storage, "_allocate", lambda *_: False)
    with pytest.raises(StorageError, match=r"ENOSPC.*free space"):
        storage.create(f"{root}/f", 1 << 55)
    assert os.listdir(root) == []
    assert write(storage, f"{root}/f", b"1") == 1


@pytest.mark.parametrize("path", ["", "nowhere", "nowhere/at/all", "/nowhere/at/all", "/"])
def test_the_free_space_is_that_of_the_nearest_folder_that_exists(storage, path):
    assert LocalStorage().free_nbytes(path) is not None


def test_a_write_goes_on_where_the_last_call_stopped(monkeypatch):
    file = bytearray(10)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        file[offset : offset + 3] = bytes(data[:3]) + file[offset + len(data[:3]) : offset + 3]
        return min(3, len(data))

    monkeypatch.setattr(os, "pwrite", pwrite)
    pwrite_fully(0, memoryview(b"abcdefgh"), 1)
    assert file == b"\0abcdefgh\0"


def test_a_write_that_gets_nowhere_is_an_error(monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="accepts no more"):
        pwrite_fully(0, memoryview(b"abc"), 0)


def test_a_file_whose_sync_failed_is_burnt(storage, root, monkeypatch):
    """The kernel calls the lost pages clean: a second fsync would succeed, with the data gone."""
    file = storage.create(f"{root}/f", 1)
    file.write_at(0, b"1")
    num_open = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    def fsync(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StorageError, match=r"EIO.*check the disk"):
            file.finish()
    with pytest.raises(StorageError):
        file.finish()
    with pytest.raises(StorageError):
        file.write_at(0, b"1")
    if num_open:
        assert len(os.listdir("/proc/self/fd")) == num_open - 1


def test_an_error_that_comes_as_late_as_the_close_is_reported(storage, root, monkeypatch):
    file = storage.create(f"{root}/f", 1)
    close = os.close

    def close_and_fail(fd: int) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", close_and_fail)
    with pytest.raises(StorageError, match=r"EDQUOT.*quota"):
        file.finish()


@pytest.mark.parametrize(("code", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_sync_fails_unless_the_file_system_has_none(
    code, fails, storage, root, monkeypatch
):
    def fsync(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    if not fails:
        storage.sync(root)
        return
    with pytest.raises(StorageError, match="EIO"):
        storage.sync(root)


@pytest.mark.parametrize("is_gone", [False, True])
def test_stale_means_gone_only_of_what_is_gone(is_gone, storage, root, monkeypatch):
    """A server that has started anew calls everything stale."""

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def calls() -> Iterator[Callable[[], object]]:
        yield lambda: storage.list(f"{root}/folder")
        yield lambda: storage.open(f"{root}/folder/file")
        yield lambda: storage.create(f"{root}/folder/new", 0)
        yield lambda: storage.make_folder(f"{root}/folder/new")
        yield lambda: storage.rename(f"{root}/folder/file", f"{root}/folder/new")
        yield lambda: storage.sync(f"{root}/folder")

    if not is_gone:
        storage.make_folder(f"{root}/folder")
        write(storage, f"{root}/folder/file", b"1")
    for name in ("scandir", "open", "mkdir", "link"):
        monkeypatch.setattr(os, name, stale)
    monkeypatch.setattr(local_storage, "_rename_by_call", stale)
    for call in calls():
        with pytest.raises(FileNotFoundError if is_gone else StorageError):
            call()


def test_where_the_system_has_no_exclusive_rename_at_all_a_link_does_it(storage, root, monkeypatch):
    monkeypatch.setattr(local_storage, "system_call", lambda _: None)
    write(storage, f"{root}/old", b"1")
    storage.rename(f"{root}/old", f"{root}/new")
    assert os.listdir(root) == ["new"]


def test_a_link_that_was_made_but_asked_for_again_is_made(storage, root, monkeypatch):
    """NFS does so if the answer is lost; what another has put there is none of ours."""
    real = os.link

    def twice(*names: str, **options: Any) -> None:
        real(*names, **options)
        real(*names, **options)

    write(storage, f"{root}/f", b"1")
    monkeypatch.setattr(os, "link", twice)
    storage.link(f"{root}/f", f"{root}/g")
    assert os.path.samefile(f"{root}/f", f"{root}/g")
    with pytest.raises(FileExistsError):
        storage.link(f"{root}/f", f"{root}/g")

    def too_late(old: str, new: str, **options: Any) -> None:
        os.close(os.open(new, os.O_CREAT | os.O_EXCL, dir_fd=options["dst_dir_fd"]))
        real(old, new, **options)

    monkeypatch.setattr(os, "link", too_late)
    with pytest.raises(FileExistsError):
        storage.link(f"{root}/f", f"{root}/h")


# --- renaming without the newest calls -------------------------------------------------------


@pytest.mark.usefixtures("no_exclusive_rename")
def test_a_link_whose_reply_was_lost_counts_as_done(storage, root):
    write(storage, f"{root}/old", b"1")
    os.link(f"{root}/old", f"{root}/new")
    storage.rename(f"{root}/old", f"{root}/new")
    assert os.listdir(root) == ["new"]


@pytest.mark.usefixtures("no_exclusive_rename")
def test_a_file_system_without_links_either_is_refused_at_the_claim(storage, root, monkeypatch):
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="choose a file system where"):
        commit_protocol.claim(storage, f"{root}/a/ck", overwrite=False, by="me")
    assert os.listdir(root) == []


def test_a_file_system_whose_rename_replaces_is_refused_at_the_claim(storage, root, monkeypatch):
    def rename(old: str, new: str) -> bool:
        os.rename(old, new)
        return True

    monkeypatch.setattr(local_storage, "_rename_by_call", rename)
    with pytest.raises(StorageError, match="a rename here replaces"):
        commit_protocol.claim(storage, f"{root}/ck", overwrite=False, by="me")
    assert os.listdir(root) == []


# --- checkpoints on a real file system -------------------------------------------------------


@pytest.mark.parametrize("rename", ["exclusive", "by link"])
def test_save_overwrite_and_delete(rename, storage, root, monkeypatch):
    if rename == "by link":
        monkeypatch.setattr(local_storage, "_rename_by_call", lambda *_: False)
    path = f"{root}/runs/ck"
    save(storage, 1, path=path, ranks=2)
    with pytest.raises(ExistsError):
        save(storage, 2, path=path)
    assert step_at(storage, path) == 1
    save(storage, 2, path=path, overwrite=True)
    assert step_at(storage, path) == 2
    assert len(os.listdir(path)) == 1
    removal.delete(storage, path)
    assert os.listdir(f"{root}/runs") == []


@pytest.mark.parametrize("below", ["", "/run/ck"])
def test_a_link_that_leads_nowhere_is_named_and_left_alone(below, storage, root):
    os.symlink(f"{root}/gone", f"{root}/link")
    with pytest.raises(ExistsError, match=rf"{root}/link is a link to {root}/gone, .*: make that"):
        commit_protocol.claim(storage, f"{root}/link{below}", overwrite=True, by="me")
    assert os.listdir(root) == ["link"]
    os.mkdir(f"{root}/gone")
    commit_protocol.claim(storage, f"{root}/link{below}", overwrite=True, by="me")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_file_system_that_takes_no_folders_is_named():
    with pytest.raises(
        StorageError, match=r"/proc/ck does not exist .*cannot have new folders.*choose another"
    ):
        commit_protocol.claim(LocalStorage(), "/proc/ck", overwrite=False, by="me")


def test_a_file_at_the_path_is_left_alone(storage, root):
    Path(root, "ck").write_text("precious")
    for path in (f"{root}/ck", f"{root}/ck/below"):
        with pytest.raises(ExistsError, match="file"):
            commit_protocol.claim(storage, path, overwrite=True, by="me")
    assert Path(root, "ck").read_text() == "precious"


def test_the_grace_of_a_collector_is_measured_by_the_clock_of_the_storage(storage, root):
    path = f"{root}/ck"
    claims = [commit_protocol.claim(storage, path, overwrite=False, by="me")]
    assert removal.remove_garbage(storage, path, grace_s=60) == ()
    folder = Path(claims[0].folder)
    for name in [folder, *folder.iterdir()]:
        os.utime(name, (0, os.stat(root).st_mtime - 100))
    assert removal.remove_garbage(storage, path, grace_s=60) == (claims[0].attempt.name,)
    assert os.listdir(path) == []


def test_an_unreadable_index_is_damage_and_a_link_in_its_place_too(storage, root):
    path = f"{root}/ck"
    attempt = save(storage, 1, path=path)
    index = Path(path, attempt.name, "index.json")
    whole = index.read_bytes()
    index.write_bytes(whole[:-1])
    with pytest.raises(CorruptError, match=r"index\.json"):
        attempts.find_checkpoint(storage, path)
    index.unlink()
    index.symlink_to("/etc/passwd")
    with pytest.raises(CorruptError, match="a link"):
        attempts.find_checkpoint(storage, path)
    index.unlink()
    with index.open("wb") as file:
        file.truncate(1 << 40)  # sparse: nothing of this size may be allocated
    with pytest.raises(CorruptError, match="the limit is"):
        attempts.find_checkpoint(storage, path)


# --- real faults -----------------------------------------------------------------------------

_IN_CHILD = """
import resource, sys
sys.path[:0] = {path}
from commit_cases import save, step_at
from dist_ckpt.errors import StorageError
from dist_ckpt.core.storage.local.local_storage import LocalStorage
storage, path = LocalStorage(), sys.argv[1]
resource.setrlimit({limit})
try:
    {act}
except StorageError as error:
    print(error)
"""


def in_child(limit: str, act: str, path: str) -> str:
    """Run `act` in a process of its own under a resource limit; return the error it reports."""
    code = _IN_CHILD.format(path=sys.path, limit=limit, act=act)
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.multi_process
def test_a_limit_of_file_sizes_fails_the_save_and_leaves_the_older_one(storage, root):
    path = f"{root}/ck"
    save(storage, 1, path=path)
    told = in_child(
        "resource.RLIMIT_FSIZE, (4100, 4100)", "save(storage, 2, path=path, overwrite=True)", path
    )
    assert "EFBIG" in told
    assert "ulimit -f" in told
    assert step_at(storage, path) == 1


@pytest.mark.multi_process
def test_a_limit_of_open_files_is_named(root):
    told = in_child(
        "resource.RLIMIT_NOFILE, (8, 8)",
        "files = [storage.create(f'{path}/{i}', 1) for i in range(9)]",
        root,
    )
    assert "ulimit -n" in told


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], timeout=60, check=True)


def test_a_full_disk_fails_the_save_early_and_leaves_the_older_one(storage, small_disk):
    path = f"{small_disk}/ck"
    save(storage, 1, path=path)
    claim = commit_protocol.claim(storage, path, overwrite=True, by="me")
    with pytest.raises(StorageError, match=r"ENOSPC.*free space"):
        storage.create(f"{claim.folder}/model-00000.safetensors", 2 << 20)
    commit_protocol.remove_claimed(storage, claim)
    assert step_at(storage, path) == 1
    assert len(os.listdir(path)) == 1


def test_on_a_full_disk_an_attempt_is_given_up_all_the_same(storage, small_disk):
    """Or a dead save would fill the disk for ever: to remove it, it must be abandoned first."""
    path = f"{small_disk}/ck"
    claim = commit_protocol.claim(storage, path, overwrite=False, by="a dead saver")
    write_rank(storage, claim.folder, 1, 0)
    _fill(small_disk)
    with pytest.raises(StorageError, match="ENOSPC"):
        write(storage, f"{path}/full", b"1" * 4096)
    assert attempts.try_abandon(storage, path, claim.attempt, by="a rank", reason="no space")
    document = attempts.read_index(storage, path, claim.attempt)
    assert isinstance(document, Abandoned)
    assert document == Abandoned(claim.attempt.name, "a dead saver", document.reason)
    assert removal.remove_garbage(storage, path, grace_s=3600) == (claim.attempt.name,)


def test_a_save_onto_a_disk_that_a_dead_save_filled_makes_room(storage, small_disk):
    path = f"{small_disk}/ck"
    claim = commit_protocol.claim(storage, path, overwrite=False, by="a dead saver")
    write(storage, f"{claim.folder}/model-00000.safetensors", b"1" * (900 << 10))
    save(storage, 2, path=path, ranks=40)
    assert step_at(storage, path) == 2


def _fill(folder: Path) -> None:
    for size in (4096, 1):
        with suppress(OSError), (folder / f"filling {size}").open("wb", buffering=0) as file:
            while True:
                file.write(b"1" * size)


def test_a_read_only_disk_is_read_and_not_written(storage, small_disk):
    path = f"{small_disk}/ck"
    save(storage, 1, path=path)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], timeout=60, check=True)
    assert step_at(storage, path) == 1
    assert [status.state for status in attempts.list_statuses(storage, path)] == ["committed"]
    for where in (path, f"{small_disk}/new/ck"):
        with pytest.raises(StorageError, match=r"EROFS.*mount the file system writable"):
            commit_protocol.claim(storage, where, overwrite=True, by="me")
    with pytest.raises(StorageError, match="EROFS"):
        removal.delete(storage, path)
    assert step_at(storage, path) == 1


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """Give a folder that others may enter, and be one of them: root may do everything."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        os.mkdir(f"{folder}/ck", 0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)


def test_a_folder_without_permission_is_named(storage, as_nobody):
    with pytest.raises(StorageError, match=r"ck/a1-.*EACCES.*permission"):
        commit_protocol.claim(storage, f"{as_nobody}/ck", overwrite=False, by="me")
    with pytest.raises(StorageError, match=r"ck/new: .*EACCES.*permission"):
        commit_protocol.claim(storage, f"{as_nobody}/ck/new", overwrite=False, by="me")


def test_read_and_write_are_whole(storage, root):
    data = os.urandom(3 << 20)
    assert write(storage, f"{root}/f", data) == len(data)
    assert read(storage, f"{root}/f") == data
