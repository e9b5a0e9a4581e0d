"""Renames that never replace a file, and the exchange of two names."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys

from dist_ckpt.core.storage.local.direct_io import system_call

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
