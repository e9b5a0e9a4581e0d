"""Where the arenas of a job lie on this host, whose they are, and who of the job is alive.

    <root>/dist_ckpt-<user id>/<job>/rank-00003/
        trainer.lock  writer.lock             held as long as the process lives
        arena-0  arena-1                      shared memory
        arena-0.trainer  arena-0.writer       where it is instead, if it is memory without a name
        writer.log                            what the writer has to say

The root is /dev/shm; where that holds no folder, or another user's has this name, it is the folder
for temporary files. What lies in /dev/shm outlives the processes, until somebody removes it or the
host or container ends. In memory without a name (`memfd`) a snapshot lives as long as a process has
it open: the trainer or its writer. The folder of a job, and all in it, belongs to one user;
another's is never opened, and links are never followed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Literal

from dist_ckpt.core.runtime.lock_files import LockFile, LockOwner, owner_of, take
from dist_ckpt.errors import ConflictError, StorageError

_log = logging.getLogger("dist_ckpt")

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - its folder is made private, and checked

Role = Literal["trainer", "writer"]
ROLES: tuple[Role, ...] = ("trainer", "writer")

# A rank stages into one while the other is written.
NUM_ARENAS = 2

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RANK = re.compile(r"rank-([0-9]{5,9})")
_OURS = re.compile(r"writer\.log|arena-[0-9]+(\.new|\.(trainer|writer)(\.[0-9a-f]{16})?)?")
_PLACE = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_MAX_PLACE_NBYTES = 64

_OTHER_JOB = ", or use another root, or another AsyncSaver(job=...)"

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}

# So often may somebody remove a folder just before its lock is taken.
_LOCK_TRIES = 100

# For locks and logs; less is as good as nothing.
_LEAST_NBYTES = 1 << 20

# The root cannot hold a folder: the next one is tried.
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
    """Raise TypeError or ValueError for what cannot name a job."""
    if not isinstance(job, str) or not _JOB.fullmatch(job):
        kind = ValueError if isinstance(job, str) else TypeError
        raise kind(
            f"job={job!r}: it names a folder, so pass a str of 1 to 64 letters, digits, '.', '_' "
            f"or '-', of which the first is a letter or digit"
        )


def check_file(path: str) -> None:
    """Raise StorageError if something else than a file lies where a file of ours belongs."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise StorageError(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, and a file of background "
            f"saves belongs there: it is left as it is; remove it, or use another root, "
            f"or another AsyncSaver(job=...)"
        )


class JobFolder:
    """The folder of one job on this host. Made, or found, by its constructor.

    ValueError or TypeError if the job cannot be a folder's name; StorageError if the folder is not
    this user's or cannot be made. The first of `roots` is shared memory, the others stand in where
    it has no room for a folder: what lies in one of those is no arena, but says where the memory
    is.
    """

    def __init__(self, job: str, *, roots: Sequence[str] | None = None) -> None:
        check_job(job)
        self.job = job
        roots = roots or _roots()
        in_order = _by_life(roots, job)
        for root in in_order:
            try:
                if root != in_order[-1]:
                    _check_room(root, job)
                self.path = _own_folder(f"{_own_base(root)}/{job}", or_pass=_OTHER_JOB)
            except OSError as error:
                if error.errno not in _UNUSABLE or root == in_order[-1]:
                    raise StorageError(
                        f"no folder for the memory of background saves in {root}: "
                        f"{error.strerror}; free space there, make it writable, or let TMPDIR "
                        f"name a folder of your own"
                    ) from error
                _log.warning(
                    "%s cannot hold the snapshots of background saves (%s): they lie in memory "
                    "without a name, and live as long as the trainer or its writer does",
                    *(root, error.strerror),
                )
                continue
            self.is_shared_memory = root == roots[0]
            break

    @classmethod
    def find(cls, job: str, *, roots: Sequence[str] | None = None) -> JobFolder | None:
        """Return the folder that a job of this user has on this host, or None: nothing is made."""
        roots = roots or _roots()
        return next(
            (at for root in _by_life(roots, job) if (at := cls._at(root, roots, job))), None
        )

    @classmethod
    def _at(cls, root: str, roots: Sequence[str], job: str) -> JobFolder | None:
        if not (_is_own_folder(_base(root)) and _is_own_folder(f"{_base(root)}/{job}")):
            return None
        found = cls.__new__(cls)
        found.job, found.path = job, f"{_base(root)}/{job}"
        found.is_shared_memory = root == roots[0]
        return found

    @property
    def lives(self) -> bool:
        """Whether a trainer or a writer of the job is alive, as far as this folder tells."""
        return any(one.owner(role) for one in self.present() for role in ROLES)

    def rank(self, rank: int) -> RankFolder:
        """Return the folder of a rank, which is made if need be."""
        folder = RankFolder(self, rank)
        folder.make()
        return folder

    def present(self) -> list[RankFolder]:
        """Return the folders of the ranks that have one, of this run or an earlier one.

        Nothing is made.
        """
        names: list[str] = []
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:  # else: it was removed
            names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        found = (_RANK.fullmatch(name) for name in names)
        return [
            RankFolder(self, rank) for rank in sorted(int(match[1]) for match in found if match)
        ]

    def discard(self) -> None:
        """Remove the folder if nothing is in it."""
        with suppress(OSError):
            os.rmdir(self.path)


class RankFolder:
    """What one rank of a job has on this host. Any process of the user may look into it."""

    def __init__(self, folder: JobFolder, rank: int) -> None:
        self.job = folder.job
        self.rank = rank
        self.is_shared_memory = folder.is_shared_memory
        self.path = f"{folder.path}/rank-{rank:05d}"

    def lock(self, role: Role) -> LockFile:
        """Become the one trainer, or writer, of this job and rank on this host.

        ConflictError, which names the other, if one is alive.
        """
        for _ in range(_LOCK_TRIES):
            self.make()
            check_file(self.lock_path(role))
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
        raise StorageError(f"{self.path} is removed again and again: look who does that")

    def owner(self, role: Role) -> LockOwner | None:
        """Return the living trainer, or writer, of this rank, or None. Nobody is disturbed."""
        return owner_of(self.lock_path(role))

    def arena_path(self, number: int) -> str:
        """Return where an arena lies that has a name."""
        return f"{self.path}/arena-{number}"

    @property
    def log_path(self) -> str:
        """Where the rank's writer logs to."""
        return f"{self.path}/writer.log"

    @property
    def is_empty(self) -> bool:
        """Whether no arena of this rank is here, or is known to be open elsewhere."""
        return not any(place for number in range(NUM_ARENAS) for place in self.places(number))

    def places(self, number: int) -> Iterator[str]:
        """Yield where an arena of this rank may be found: by its name first."""
        if os.path.lexists(self.arena_path(number)):
            yield self.arena_path(number)
        for role in ROLES:
            with suppress(OSError):
                place = _read_text(f"{self.arena_path(number)}.{role}")
                if _PLACE.fullmatch(place):
                    yield place

    def tell(self, role: Role, number: int, fd: int) -> str:
        """Say that memory without a name is open in this process; return where others find it.

        What the other role says stays: it may have memory open that this process has not.
        """
        place = f"/proc/{os.getpid()}/fd/{fd}"
        path = f"{self.arena_path(number)}.{role}"
        check_file(path)
        temporary = f"{path}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            out = os.open(temporary, flags, 0o600)
            try:
                os.write(out, place.encode())
            finally:
                os.close(out)
            os.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        return place

    def remove(self) -> None:
        """Remove the rank's arenas and its folder. ConflictError if an owner of it lives.

        What has a name that is not ours stays, as does what is no file, and the folder with it.
        """
        with ExitStack() as stack:
            for role in ROLES:
                stack.callback(self.lock(role).release)
            with os.scandir(self.path) as entries:
                found = [one for one in entries if one.is_file(follow_symlinks=False)]
            for one in found:
                if _OURS.fullmatch(one.name):
                    os.unlink(one.path)
            # While they are held: who comes next finds new ones, or no folder, and makes it.
            for role in ROLES:
                os.unlink(self.lock_path(role))
            with suppress(OSError):
                os.rmdir(self.path)

    def make(self) -> None:
        """Make the folder, or find it. StorageError if that is not possible."""
        try:
            # Both: the job's folder is removed by who was the last in it.
            _own_folder(os.path.dirname(self.path), or_pass=_OTHER_JOB)
            _own_folder(self.path, or_pass=_OTHER_JOB)
        except OSError as error:
            raise StorageError(
                f"{self.path}: {error.strerror}; free space there, or make it writable"
            ) from error

    def lock_path(self, role: Role) -> str:
        """Return where the lock of the trainer, or writer, lies."""
        return f"{self.path}/{role}.lock"


def _roots() -> tuple[str, str]:
    return SHARED_MEMORY, tempfile.gettempdir()


def _base(root: str) -> str:
    return f"{root}/dist_ckpt-{os.geteuid()}"


def has_jobs() -> bool:
    """Say whether any job of this user may have a folder on this host; it costs next to nothing."""
    return any(_is_own_folder(_base(root)) for root in _roots())


def _by_life(roots: Sequence[str], job: str) -> list[str]:
    """Return the roots in the order in which they are tried.

    First where processes of the job live: a trainer, its writer and the next run meet there, though
    an earlier root may have become usable meanwhile.
    """

    def is_lifeless(root: str) -> bool:
        found = JobFolder._at(root, roots, job)
        return found is None or not found.lives

    return sorted(roots, key=is_lifeless)


def _check_room(root: str, job: str) -> None:
    """Raise OSError if there is no room for locks: a folder can be made on a full tmpfs as well."""
    if os.path.lexists(f"{_base(root)}/{job}"):
        return  # its arenas may be what takes the room
    volume = os.statvfs(root)
    if volume.f_blocks and volume.f_bavail * volume.f_frsize < _LEAST_NBYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), root)


def _is_own_folder(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return stat.S_ISDIR(status.st_mode) and is_private


def _own_base(root: str) -> str:
    """Make this user's folder in a root, or find it. OSError: not possible, or it is another's."""
    try:
        return _own_folder(_base(root))
    except StorageError as error:
        # Whoever was first there has the name: that must not stop this user's jobs.
        raise PermissionError(errno.EPERM, str(error)) from error


def _own_folder(path: str, *, or_pass: str = "") -> str:
    """Make a private folder, or check that it is one and this user's. OSError: not possible."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        status = os.lstat(path)
    except FileNotFoundError:  # it was there, and its last owner removed it
        os.mkdir(path, 0o700)
        status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise StorageError(f"{path} is no folder: remove it{or_pass}")
    if status.st_uid != os.geteuid():
        raise StorageError(
            f"{path} belongs to the user with id {status.st_uid}, and this is {os.geteuid()}: "
            f"have that user or an administrator remove it"
        )
    if status.st_mode & 0o077:
        raise StorageError(f"{path} is open to other users: look what is in it, then chmod 700 it")
    return path


def _read_text(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(fd, _MAX_PLACE_NBYTES).decode(errors="replace")
    finally:
        os.close(fd)
