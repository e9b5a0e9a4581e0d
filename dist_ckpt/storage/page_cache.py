"""What of a file the system's page cache holds."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from mmap import PAGESIZE

# cachestat(2), of Linux 6.5; the number is the same on all processors but alpha. It only looks:
# a read with RWF_NOWAIT would begin to read ahead, and mincore takes twenty times as long.
_CACHESTAT = 451


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Found(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("num_cached", "num_dirty", "num_written", "num_evicted", "num_evicted_lately")
    )


def holds_all(fd: int, offset: int, nbytes: int) -> bool:
    """Say whether the page cache holds all of some bytes of a file, one at least.

    True as well where nobody can tell: on other systems, and about files of other users.
    """
    asked, found = _Range(offset, nbytes), _Found()
    if sys.platform != "linux" or _c_library().syscall(
        ctypes.c_long(_CACHESTAT), fd, ctypes.byref(asked), ctypes.byref(found), 0
    ):
        return True
    return bool(found.num_cached >= (offset + nbytes - 1) // PAGESIZE - offset // PAGESIZE + 1)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
