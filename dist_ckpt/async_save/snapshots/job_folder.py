"""The folder of a job on this host: its arenas, and the locks of its living processes.

    <root>/dist_ckpt-<user id>/<job>/rank-00003/
        trainer.lock  writer.lock             locked while the process lives
        arena-0  arena-1                      shared memory
        arena-0.trainer  arena-0.writer       the path of anonymous memory instead
        writer.log                            the log of the writer

The root here is /dev/shm. If no folder can be made there, it is the folder for temporary files.
Files in /dev/shm outlive the processes, until they are removed or the host or container ends.
Anonymous memory (`memfd`) lives as long as the trainer or its writer has it open. The folder of a
job belongs to one user. Folders of other users are never opened, and links are never followed.
The name of a job is given, or `make_job_name` computes it from the id of the folder of checkpoints.
The id is in the file `DIST_CKPT_ROOT` of that folder.

That file is not hidden, so `rm -rf root/*` removes it too. Inode numbers and birth times are not
enough: ext4 reuses a number immediately, FUSE may change it, and many file systems have no birth
time.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import posixpath
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Literal

from dist_ckpt.core.commit.attempts import MAX_TRIES, make_folders, new_id, write_small_file
from dist_ckpt.core.commit.records.record_store import check_upgraded
from dist_ckpt.core.format.filenames import ROOT_ID, temporary_root_id
from dist_ckpt.core.runtime.lock_files import LockFile, LockOwner, owner_of, take
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import ConflictError, CorruptError, StorageError

_log = logging.getLogger("dist_ckpt")

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - its folder is made private, and checked

Role = Literal["trainer", "writer"]
ROLES: tuple[Role, ...] = ("trainer", "writer")

# A rank stages into one arena while the other is written.
NUM_ARENAS = 2

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RANK = re.compile(r"rank-([0-9]{5,9})")
_RANK_FILE = re.compile(r"writer\.log|arena-[0-9]+(\.new|\.(trainer|writer)(\.[0-9a-f]{16})?)?")
_FD_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_MAX_FD_PATH_NBYTES = 64

_ROOT_ID_CONTENT = re.compile(rb"([0-9a-f]{32})\n")
_ROOT_ID_NBYTES = 33

_OTHER_JOB = ", or use another root, or another AsyncSaver(job=...)"

_KIND_NAMES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}

# Another process may remove a folder just before it is locked, up to this often.
_LOCK_TRIES = 100

# The least free space of a root, for locks and logs.
_MIN_FREE_NBYTES = 1 << 20

# With these errors of a root, the next root is tried.
_UNUSABLE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
)


def check_job(job: object) -> None:
    """Raise TypeError or ValueError for an invalid job name."""
    if not isinstance(job, str) or not _JOB.fullmatch(job):
        kind = ValueError if isinstance(job, str) else TypeError
        raise kind(
            f"job={job!r}: it names a folder. Pass a str of 1 to 64 letters, digits, '.', '_' "
            f"or '-' that begins with a letter or digit"
        )


def check_regular_file(path: str) -> None:
    """Raise StorageError if `path` exists and is not a regular file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise StorageError(
            f"{path} is {_KIND_NAMES.get(stat.S_IFMT(mode), 'a device')}, and background saves "
            f"need a file with this name: remove it{_OTHER_JOB}"
        )


class JobFolder:
    """The folder of one job on this host. The constructor creates it if needed.

    ValueError or TypeError for an invalid job name. StorageError if the folder belongs to another
    user or cannot be made. The first of `roots` is shared memory. The next root is used if a root
    has no space for a folder: then arenas are anonymous memory.
    """

    def __init__(self, job: str, *, roots: Sequence[str] | None = None) -> None:
        check_job(job)
        self.job = job
        roots = roots or _roots()
        ordered = _sort_living_first(roots, job)
        for root in ordered:
            try:
                self.path = _ensure_job_folder(root, job, needs_space=root != ordered[-1])
            except OSError as error:
                if error.errno not in _UNUSABLE or root == ordered[-1]:
                    raise StorageError(
                        f"no folder for the memory of background saves in {root}: "
                        f"{error.strerror}. Free space there, make it writable, or set TMPDIR "
                        f"to another folder"
                    ) from error
                _log.warning(
                    "%s cannot hold the snapshots of background saves (%s): they are in memory "
                    "without a name, and live as long as the trainer or its writer does",
                    *(root, error.strerror),
                )
                continue
            self.is_shared_memory = root == roots[0]
            break

    @classmethod
    def find(cls, job: str, *, roots: Sequence[str] | None = None) -> JobFolder | None:
        """Return the existing folder of a job of this user, or None."""
        roots = roots or _roots()
        folders = (cls._find_in(root, roots, job) for root in _sort_living_first(roots, job))
        return next(filter(None, folders), None)

    @classmethod
    def _find_in(cls, root: str, roots: Sequence[str], job: str) -> JobFolder | None:
        if not (
            _is_own_folder(_user_folder(root)) and _is_own_folder(f"{_user_folder(root)}/{job}")
        ):
            return None
        folder = cls.__new__(cls)
        folder.job, folder.path = job, f"{_user_folder(root)}/{job}"
        folder.is_shared_memory = root == roots[0]
        return folder

    def rank(self, rank: int) -> RankFolder:
        """Return the folder of a rank. Create it if needed."""
        folder = RankFolder(self, rank)
        folder.make()
        return folder

    def rank_folders(self) -> list[RankFolder]:
        """Return the existing folders of ranks, of this run or an earlier one."""
        names: list[str] = []
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:  # it may be removed
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        matches = map(_RANK.fullmatch, names)
        return [RankFolder(self, rank) for rank in sorted(int(m[1]) for m in matches if m)]

    def remove_if_empty(self) -> None:
        """Remove the folder if it is empty."""
        with suppress(OSError):
            os.rmdir(self.path)


class RankFolder:
    """The folder of one rank of a job on this host. Any process of the user may read it."""

    def __init__(self, folder: JobFolder, rank: int) -> None:
        self.job = folder.job
        self.rank = rank
        self.is_shared_memory = folder.is_shared_memory
        self.path = f"{folder.path}/rank-{rank:05d}"

    def lock(self, role: Role) -> LockFile:
        """Lock this rank as its only trainer or writer on this host.

        ConflictError if the rank has a living one, StorageError if the file cannot be locked.
        """
        for _ in range(_LOCK_TRIES):
            self.make()
            check_regular_file(self.lock_path(role))
            try:
                return take(self.lock_path(role))
            except FileNotFoundError:
                continue  # its last owner removed the folder in between
            except OSError as error:
                raise StorageError(
                    f"{self.lock_path(role)} cannot be locked: {error.strerror}"
                ) from error
            except ConflictError as error:
                raise ConflictError(
                    f"job {self.job!r} has a living {role} of rank {self.rank} on this host: "
                    f"{error}. Stop it, or use another root, or another AsyncSaver(job=...)",
                    rank=self.rank,
                ) from None
        raise StorageError(f"{self.path} is removed again and again: find out what removes it")

    def owner(self, role: Role) -> LockOwner | None:
        """Return the living trainer or writer of this rank, or None."""
        return owner_of(self.lock_path(role))

    def arena_path(self, number: int) -> str:
        """Return the path of a named arena."""
        return f"{self.path}/arena-{number}"

    @property
    def log_path(self) -> str:
        """The path of the writer's log."""
        return f"{self.path}/writer.log"

    @property
    def is_empty(self) -> bool:
        """True if this rank has no named arena, and no published one."""
        return not any(path for number in range(NUM_ARENAS) for path in self.open_paths(number))

    def open_paths(self, number: int) -> Iterator[str]:
        """Yield the paths by which an arena may be opened: its name first."""
        if os.path.lexists(self.arena_path(number)):
            yield self.arena_path(number)
        for role in ROLES:
            with suppress(OSError):
                fd_path = _read_text(f"{self.arena_path(number)}.{role}")
                if _FD_PATH.fullmatch(fd_path):
                    yield fd_path

    def publish(self, role: Role, number: int, fd: int) -> str:
        """Store the path of anonymous memory that this process has open, and return the path.

        Other processes open the memory by it. The file of the other role stays: its path may lead
        to other memory.
        """
        fd_path = f"/proc/{os.getpid()}/fd/{fd}"
        path = f"{self.arena_path(number)}.{role}"
        check_regular_file(path)
        temporary = f"{path}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(fd_path.encode())
            os.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        return fd_path

    def remove(self) -> None:
        """Remove the rank's arenas and its folder. ConflictError if a trainer or writer lives.

        Only the files of the list above are removed. If there is anything else, the folder stays.
        """
        with ExitStack() as stack:
            for role in ROLES:
                stack.callback(self.lock(role).release)
            with os.scandir(self.path) as entries:
                files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            for file in files:
                if _RANK_FILE.fullmatch(file.name):
                    os.unlink(file.path)
            # Both are still locked: the next process creates new lock files, or the folder.
            for role in ROLES:
                os.unlink(self.lock_path(role))
            with suppress(OSError):
                os.rmdir(self.path)

    def make(self) -> None:
        """Create the folder if needed. StorageError if that fails."""
        try:
            # Also the job's folder: the last process in it removes it.
            _ensure_folder(os.path.dirname(self.path), remedy=_OTHER_JOB)
            _ensure_folder(self.path, remedy=_OTHER_JOB)
        except OSError as error:
            raise StorageError(
                f"{self.path}: {error.strerror}; free space there, or make it writable"
            ) from error

    def lock_path(self, role: Role) -> str:
        """Return the path of the lock of the trainer or writer."""
        return f"{self.path}/{role}.lock"


def _roots() -> tuple[str, str]:
    return SHARED_MEMORY, tempfile.gettempdir()


def _user_folder(root: str) -> str:
    return f"{root}/dist_ckpt-{os.geteuid()}"


def has_jobs() -> bool:
    """Return True if any job of this user may have a folder on this host. It is a cheap check."""
    return any(_is_own_folder(_user_folder(root)) for root in _roots())


def _sort_living_first(roots: Sequence[str], job: str) -> list[str]:
    """Return the roots, first those where processes of the job live.

    A trainer, its writer and the next run must meet in one root, even if an earlier root becomes
    usable meanwhile.
    """

    def has_no_process(root: str) -> bool:
        folder = JobFolder._find_in(root, roots, job)
        folders = () if folder is None else folder.rank_folders()
        return not any(rank_folder.owner(role) for rank_folder in folders for role in ROLES)

    return sorted(roots, key=has_no_process)


def _ensure_job_folder(root: str, job: str, *, needs_space: bool) -> str:
    """Create the folder of a job in a root if needed. OSError if the root is unusable."""
    path = f"{_user_folder(root)}/{job}"
    if needs_space and not os.path.lexists(path):  # else its arenas may use the space
        volume = os.statvfs(root)
        # For locks: a full tmpfs still has room for a folder.
        if volume.f_blocks and volume.f_bavail * volume.f_frsize < _MIN_FREE_NBYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), root)
    try:
        _ensure_folder(_user_folder(root))
    except StorageError as error:
        # Another user may have used the name. This user's jobs must still work.
        raise PermissionError(errno.EPERM, str(error)) from error
    return _ensure_folder(path, remedy=_OTHER_JOB)


def _is_own_folder(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return stat.S_ISDIR(status.st_mode) and is_private


def _ensure_folder(path: str, *, remedy: str = "") -> str:
    """Create a private folder if needed. StorageError if it is not private, OSError otherwise."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        status = os.lstat(path)
    except FileNotFoundError:  # its last owner has removed it
        os.mkdir(path, 0o700)
        status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise StorageError(f"{path} is not a folder: remove it{remedy}")
    if status.st_uid != os.geteuid():
        raise StorageError(
            f"{path} belongs to the user with id {status.st_uid}, and this is {os.geteuid()}: "
            f"have that user or an administrator remove it"
        )
    if status.st_mode & 0o077:
        raise StorageError(f"{path} is open to other users: check its content, then chmod 700 it")
    return path


def _read_text(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(fd, _MAX_FD_PATH_NBYTES).decode(errors="replace")
    finally:
        os.close(fd)


def make_job_name(root: str, root_id: str) -> str:
    """Return the default name of the job that saves into a folder of checkpoints.

    The name is a hash of the user, the folder's id, its real path, and its device. So all runs on
    this host that save into the folder get the same name. The id alone is not enough: a copy of the
    folder has it too.
    """
    real = os.path.realpath(root)
    words = f"{os.geteuid()}\0{_find_device(real)}\0{root_id}\0{real}"
    return hashlib.blake2b(words.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def find_root_id(storage: Storage, root: str) -> str | None:
    """Return the id of a folder; None if it has no id or does not exist.

    CorruptError if the file is not regular or has other content. StorageError if it cannot be read.
    """
    file = posixpath.join(root, ROOT_ID)
    try:
        reader = storage.open(file)
    except FileNotFoundError:
        return None
    except CorruptError as error:
        raise CorruptError(
            f"{file} is not a regular file: remove it, or use another root, or AsyncSaver(job=...)"
        ) from error
    data = bytearray(_ROOT_ID_NBYTES + 1)
    with closing(reader):
        count = reader.read_into(0, memoryview(data))
    if (content := _ROOT_ID_CONTENT.fullmatch(data[:count])) is None:
        raise CorruptError(
            f"{file} is not what dist_ckpt writes there: remove it, or use another root, or "
            f"AsyncSaver(job=...). If you remove it, snapshots of this folder in memory are not "
            f"found again"
        )
    return content[1].decode()


def make_root_id(storage: Storage, root: str) -> str:
    """Return the id of a folder. Create the folder and the id, durably, if they do not exist.

    Concurrent callers get the same id. StorageError or ExistsError if no id can be made,
    IncompatibleError if the folder needs an upgrade.
    """
    check_upgraded(storage, root)
    for _ in range(MAX_TRIES):
        if (root_id := find_root_id(storage, root)) is not None:
            return root_id
        with suppress(FileExistsError, FileNotFoundError):  # another process was first
            _write_root_id(storage, root)
    raise StorageError(f"{root} is removed again and again: find out what removes it")


def _write_root_id(storage: Storage, root: str) -> None:
    file = posixpath.join(root, ROOT_ID)
    temporary = posixpath.join(root, temporary_root_id(new_id()))
    try:
        _make_folders_durably(storage, root)
        write_small_file(storage, temporary, f"{secrets.token_hex(16)}\n".encode())
        try:
            storage.rename(temporary, file)
        except BaseException:
            with suppress(StorageError, OSError):
                storage.remove(temporary)
            raise
        storage.sync(root)
    except StorageError as error:
        raise StorageError(
            f"{root}: the file that identifies this folder cannot be written ({error}): "
            f"make it writable, or use another root, or AsyncSaver(job=...)"
        ) from error


def _make_folders_durably(storage: Storage, root: str) -> None:
    """Make the folder and its missing parents durably, or leave none of them.

    A save that finds a folder assumes that its name is durable.
    """
    created: list[str] = []
    try:
        make_folders(storage, root, created)
        for folder in created:
            storage.sync(posixpath.dirname(folder))
    except BaseException:
        for folder in reversed(created):
            with suppress(StorageError, OSError):
                storage.remove(folder)
        raise


def _find_device(path: str) -> int:
    """Return the device of a folder, or of the nearest one above it that exists."""
    while True:
        try:
            return os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path)
