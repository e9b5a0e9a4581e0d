"""The storage of local and mounted file systems: POSIX and its pitfalls, Linux first.

It has renames that never replace a file, and the exchange of two names.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.storage.local.direct_io import Descriptor, DirectFile, DirectIO, system_call
from dist_ckpt.core.storage.storage_protocol import Entry, ReadableFile, WritableFile
from dist_ckpt.errors import CorruptError, ExistsError, StorageError

# One call moves at most 2 GiB on Linux, and fails above that on macOS.
_MAX_CALL_NBYTES = 1 << 30

_REMEDIES = {
    errno.ENOSPC: "free space, or save somewhere else",
    errno.EDQUOT: "free space in this quota, or save somewhere else",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or save to another file system",
    errno.EROFS: "mount the file system writable, or choose another path",
    errno.EACCES: "give this user the permission, or choose another path",
    errno.EPERM: "give this user the permission, or choose another path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOTDIR: "a part of the path is a file; choose another path",
    errno.ENOTEMPTY: "list its contents",
    errno.EXDEV: "choose a path on the same file system",
    errno.EMLINK: "the file has the maximum number of names; copy it",
    errno.ELOOP: "find the links that lead back to themselves, and remove one",
    errno.ESTALE: "check that the server is up, mount it again if needed, then try again",
    errno.ENOTSUP: "choose a file system where a checkpoint can be committed safely",
}
_DEFAULT_REMEDY = "check the disk or the network (the kernel's log may say more), then try again"


class LocalStorage:
    """Implements the `Storage` protocol on a file system. Thread-safe.

    `direct_reads` reads large parts of files directly if the page cache lacks them. The only state
    is which file systems support direct I/O.
    """

    def __init__(self, *, direct_reads: bool = False) -> None:
        self._direct_io = DirectIO()
        self._direct_reads = direct_reads

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        """Return the entries of a folder, sorted by name; links and devices are "other"."""
        with _translate_errors(folder, FileNotFoundError, NotADirectoryError), ExitStack() as stack:
            real = folder if follow else stack.enter_context(_real_folder(folder))
            items = stack.enter_context(os.scandir(real))
            return sorted(entry for item in items if (entry := _read_entry(item)) is not None)

    def make_folder(self, folder: str) -> None:
        """Create one folder, with the permissions of the umask."""
        passed = (FileExistsError, FileNotFoundError, NotADirectoryError)
        with _translate_errors(folder, *passed, needs=os.path.dirname(folder)):
            try:
                os.mkdir(folder)
            except FileExistsError:
                if os.path.islink(folder) and not os.path.lexists(os.path.realpath(folder)):
                    raise ExistsError(
                        f"{folder} is a link to {os.readlink(folder)}, which does not exist: make "
                        f"that folder, or choose another path"
                    ) from None
                raise

    def create(self, path: str, nbytes: int) -> WritableFile:
        """Create a file exclusively and reserve its space; without space the file is removed."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        passed = (FileExistsError, FileNotFoundError)
        with _translate_errors(path, *passed, needs=os.path.dirname(path)):
            fds = [os.open(path, flags, 0o666)]
            try:
                _reserve(fds[0], nbytes)
                direct = self._direct_io.direct_file(path, fds[0], nbytes)
                if direct and (second := direct.open(os.O_WRONLY)) is not None:
                    fds.append(second)
                    # Writes beyond the end are serialised in the kernel; those before it are not.
                    os.ftruncate(fds[0], nbytes)
            except OSError:
                Descriptor(path, *fds).release()
                with suppress(OSError):
                    os.unlink(path)
                raise
        return _LocalWritableFile(path, fds, direct if len(fds) > 1 else None, nbytes)

    def open(self, path: str) -> ReadableFile:
        """Open a regular file; refuse a link or a pipe without waiting for it."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with _translate_errors(path, FileNotFoundError):
            try:
                fd = os.open(path, flags)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO) and _is_irregular(path):
                    raise _irregular_file_error(path) from None
                raise
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise _irregular_file_error(path)
                direct = None
                if self._direct_reads:
                    direct = self._direct_io.direct_file(path, fd, status.st_size)
            except (OSError, CorruptError):
                os.close(fd)
                raise
        return _LocalReadableFile(path, fd, direct, status)

    def rename(self, old: str, new: str) -> None:
        """Rename without replacing: by the system's own call, else by a link for a file."""
        with _translate_errors(new, FileExistsError, FileNotFoundError, needs=old):
            rename_exclusively(old, new)

    def link(self, old: str, new: str) -> None:
        """Link a regular file within real folders, never through a link."""
        passed = (FileExistsError, FileNotFoundError)
        with _translate_errors(new, *passed, needs=old), ExitStack() as stack:
            (old_folder, name), (new_folder, new_name) = os.path.split(old), os.path.split(new)
            old_fd = stack.enter_context(_real_folder(old_folder))
            new_fd = stack.enter_context(_real_folder(new_folder))
            if not stat.S_ISREG(os.lstat(name, dir_fd=old_fd).st_mode):
                raise OSError(errno.EINVAL, f"{old} is not a regular file")
            existed = not _is_gone(new_name, new_fd)
            dir_fds = {"src_dir_fd": old_fd, "dst_dir_fd": new_fd}
            try:
                os.link(name, new_name, **dir_fds, follow_symlinks=False)
            except FileExistsError:
                # NFS repeats a request, and finds the result of its first, unanswered one.
                status = os.lstat(new_name, dir_fd=new_fd)
                if existed or not os.path.samestat(os.lstat(name, dir_fd=old_fd), status):
                    raise

    def remove(self, path: str) -> None:
        """Remove a file (of a link, the link) or an empty folder."""
        with _translate_errors(path, FileNotFoundError, NotADirectoryError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.rmdir(path)
                return
            # Through the folder's descriptor: its path may lead elsewhere by now.
            folder, name = os.path.split(path)
            with _real_folder(folder) as descriptor:
                os.unlink(name, dir_fd=descriptor)

    def sync(self, folder: str) -> None:
        """Fsync the folder."""
        with _translate_errors(folder, FileNotFoundError):
            fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            try:
                _sync(fd)
            except OSError as error:
                # Some network file systems have no fsync of folders: names are as durable as they
                # get when the call that made them returns.
                if error.errno not in UNSUPPORTED:
                    raise
            finally:
                os.close(fd)

    def free_nbytes(self, path: str) -> int | None:
        """Return the free bytes for this user, without a quota; None if the system cannot tell."""
        try:
            volume = os.statvfs(path)
        except FileNotFoundError:
            above = os.path.dirname(path) or "."
            return None if above == path else self.free_nbytes(above)
        except OSError:
            return None
        return volume.f_bavail * volume.f_frsize if volume.f_blocks else None


class _LocalWritableFile:
    """A file; with `direct`, the second descriptor is for direct writes."""

    def __init__(
        self, path: str, fds: Sequence[int], direct: DirectFile | None, nbytes: int
    ) -> None:
        self._descriptor = Descriptor(path, *fds)
        self._direct = direct
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._stop = 0  # the end of all writes

    @property
    def alignment(self) -> int:
        return self._direct.alignment if self._direct else 1

    def write_at(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        with _translate_errors(self._descriptor.path), self._descriptor.lend() as fds:
            done = self._direct.write(fds[1], view, offset) if self._direct else ByteRange(0, 0)
            # These bytes share no page with another thread's direct write, which covers whole
            # pages of its data. One fsync of the file makes both kinds of writes durable.
            pwrite_fully(fds[0], view[: done.start], offset)
            pwrite_fully(fds[0], view[done.stop :], offset + done.stop)
        with self._lock:
            self._stop = max(self._stop, offset + len(view))

    def finish(self) -> int:
        # After a failed fsync the kernel marks the lost pages clean, so that a second fsync
        # succeeds. So the descriptor is gone after any failure, and the file must not be used.
        fd = self._descriptor.take()
        with _translate_errors(self._descriptor.path):
            try:
                if self._direct and self._stop < self._nbytes:
                    os.ftruncate(fd, self._stop)
                _sync(fd)
                nbytes = os.fstat(fd).st_size
            except OSError:
                with suppress(OSError):
                    os.close(fd)
                raise
            os.close(fd)  # NFS may report a failed write here at last
            return nbytes

    def discard(self) -> None:
        self._descriptor.release()


class _LocalReadableFile:
    def __init__(
        self, path: str, fd: int, direct: DirectFile | None, status: os.stat_result
    ) -> None:
        self._descriptor = Descriptor(path, fd)
        self._direct = direct
        self.nbytes = status.st_size
        self.num_links = status.st_nlink

    def read_into(self, offset: int, target: memoryview) -> int:
        view = target.cast("B")
        with _translate_errors(self._descriptor.path), self._descriptor.lend() as (fd,):
            done = self._direct.read(fd, view, offset) if self._direct else 0
            while done < len(view):
                part = view[done : done + _MAX_CALL_NBYTES]
                count = os.preadv(fd, [part], offset + done)
                if not count:
                    break
                done += count
        return done

    def close(self) -> None:
        self._descriptor.release()


def pwrite_fully(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`; a call may write less than it was given (full disk, signal, limit)."""
    done = 0
    while done < len(data):
        count = os.pwrite(fd, data[done : done + _MAX_CALL_NBYTES], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, "the file system accepts no more bytes")
        done += count


@contextmanager
def _translate_errors(path: str, *passed: type[OSError], needs: str = "") -> Iterator[None]:
    """Turn an OSError into a StorageError with a remedy, except for the `passed` types.

    `needs` is the path that a FileNotFoundError is about, if not `path`.
    """
    try:
        yield
    except passed:
        raise
    except OSError as error:
        # An NFS client returns ESTALE for a file that another client removed, but also after a
        # restart of the server. Without this check, existing files could look removed.
        is_stale = error.errno == errno.ESTALE and FileNotFoundError in passed
        if is_stale and _is_gone(needs or path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        raise StorageError(f"{path}: {describe_os_error(error)}") from error


def describe_os_error(error: OSError) -> str:
    """Return the system's text of an error, with a remedy."""
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return f"{error.strerror or error} ({code}): {_REMEDIES.get(error.errno or 0, _DEFAULT_REMEDY)}"


def _is_gone(path: str, folder: int | None = None) -> bool:
    """Return True if certainly nothing has this name."""
    try:
        os.lstat(path, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def _real_folder(folder: str) -> Iterator[int]:
    """Open a folder. Raises NotADirectoryError for a link, even to a folder."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(folder, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # a link, on other systems
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from error
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_entry(item: os.DirEntry[str]) -> Entry | None:
    try:
        status = item.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None  # removed since the folder was read
    if stat.S_ISREG(status.st_mode):
        return Entry(item.name, "file", status.st_size, status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        return Entry(item.name, "folder", 0, status.st_mtime)
    return Entry(item.name, "other", 0, status.st_mtime)


def _is_irregular(path: str) -> bool:
    """Return True if the name itself, not a folder above it, is not a regular file."""
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _irregular_file_error(path: str) -> CorruptError:
    return CorruptError(
        f"{path} is a link, a folder or a device, but dist_ckpt writes a regular file there: "
        f"restore the file, or use another checkpoint"
    )


def _sync(fd: int) -> None:
    if sys.platform == "darwin":  # fsync there leaves the data in the disk's own cache
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    os.fsync(fd)


def _reserve(fd: int, nbytes: int) -> None:
    """Reserve the space of a file now, so that a full disk fails before the data is written."""
    if nbytes == 0 or _allocate(fd, nbytes):
        return
    volume = os.fstatvfs(fd)
    if volume.f_blocks > 0 and volume.f_bavail * volume.f_frsize < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _allocate(fd: int, nbytes: int) -> bool:
    """Allocate blocks; return False if the system or the file system has no call for it.

    `os.posix_fallocate` would write the whole file then. The size stays 0 (mode 1) for `finish`.
    """
    fallocate = system_call("fallocate") if sys.platform == "linux" else None
    while fallocate and fallocate(fd, 1, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code in UNSUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return fallocate is not None


# Errors of a call that the file system does not support.
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def rename_exclusively(old: str, new: str) -> None:
    """Rename a file or folder, by a system call or the nearest substitute.

    Raises FileExistsError if the new name is taken.
    """
    if _rename_by_call(old, new):
        return
    if not stat.S_ISDIR(os.lstat(old).st_mode):
        _rename_by_link(old, new)
        return
    # A plain rename of a folder replaces only an empty folder, and no other caller creates a folder
    # of the new name.
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.rename(old, new)


def exchange_names(first: str, second: str) -> bool:
    """Exchange two names atomically; return False if that is not supported here."""
    if sys.platform != "linux" or (call := system_call("renameat2")) is None:
        return False
    # AT_FDCWD twice, RENAME_EXCHANGE
    failed = call(-100, os.fsencode(first), -100, os.fsencode(second), 2)
    return not failed or _false_if_unsupported(first, second)


def _rename_by_call(old: str, new: str) -> bool:
    """Rename by the call that never replaces; return False if that is not supported here."""
    names = os.fsencode(old), os.fsencode(new)
    is_mac = sys.platform == "darwin"
    if (call := system_call("renamex_np" if is_mac else "renameat2")) is None:
        return False
    # RENAME_EXCL; AT_FDCWD twice, RENAME_NOREPLACE
    failed = call(*names, 4) if is_mac else call(-100, names[0], -100, names[1], 1)
    return not failed or _false_if_unsupported(old, new)


def _false_if_unsupported(old: str, new: str) -> bool:
    """Return False if the failed call is not supported here. Raise any other error of it."""
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), old, None, new)


def _rename_by_link(old: str, new: str) -> None:
    """Rename a file by a link, which never replaces, where no call does so (NFS)."""
    try:
        os.link(old, new, follow_symlinks=False)
    except FileExistsError:
        # A repeated request may find the result of its first, unanswered one. If two callers rename
        # the same file, both pass this check, and one of them fails to unlink.
        if not os.path.samestat(os.lstat(old), os.lstat(new)):
            raise
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EMLINK, *UNSUPPORTED):
            raise OSError(errno.ENOTSUP, "no exclusive rename and no links here") from error
        raise
    os.unlink(old)
