"""Files of shared memory: with a name or without, reserved, grown, mapped and touched.

A page that the system cannot give when it is first written ends the process (SIGBUS). So memory is
reserved before it is used, and what is mapped is never cut short.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from contextlib import suppress

from dist_ckpt.errors import CorruptError

# Reserving and touching go in steps: a signal makes the kernel begin a step again, and to touch
# one holds the interpreter's lock (0.2 s for 1 GiB), which this rank's heartbeat needs too.
_RESERVE_NBYTES = 256 << 20
_TOUCH_NBYTES = 16 << 20

# Linux 5.14; the module mmap has no name for it.
_MADV_POPULATE_WRITE = 23

# The module mmap has no name for it; it is the same on all systems that we know.
_MAP_FIXED = 0x10

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


def is_out_of_space(error: OSError) -> bool:
    """Say whether memory of that size cannot be had here, but perhaps elsewhere."""
    return error.errno in _NO_ROOM


def create_named(path: str, nbytes: int) -> int:
    """Return the descriptor of a new file of shared memory, all of it reserved.

    It comes under its name when it is complete; what was there is replaced, and stays with those
    who have it mapped. OSError if there is no room: asked first, and found while it is reserved.
    """
    volume = os.statvfs(os.path.dirname(path))
    if volume.f_blocks and volume.f_bavail * volume.f_frsize < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    temporary = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600)
    try:
        reserve(fd, nbytes)
        os.rename(temporary, path)
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return fd


def create_anonymous(nbytes: int) -> int:
    """Return the descriptor of memory that goes when no process has it open any more."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOTSUP, "this system has no shared memory without a name")
    fd = os.memfd_create("dist_ckpt", os.MFD_CLOEXEC)
    try:
        reserve(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_existing(place: str, *, writable: bool) -> int:
    """Open a file of this user, by its name or by that of another process's descriptor.

    FileNotFoundError if it is gone, CorruptError if it is something else than such a file.
    """
    mode = os.O_RDWR if writable else os.O_RDONLY
    # What /proc shows are links; they lead to a file that a process of this user has open.
    follow = 0 if place.startswith("/proc/") else os.O_NOFOLLOW
    try:
        fd = os.open(place, mode | follow | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptError(f"{place} cannot be opened: {error.strerror}") from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise CorruptError(f"{place} is no file of this user's: it is left as it is")


def reserve(fd: int, nbytes: int) -> None:
    """Make a file as large as this, at least, with memory behind every new byte.

    OSError if the system has not so much; then the file is as it was, and no memory is kept.
    """
    before = os.fstat(fd).st_size
    if nbytes > before:
        _check_memory(nbytes - before)
    try:
        for start in range(before, nbytes, _RESERVE_NBYTES):
            _allocate(fd, start, min(_RESERVE_NBYTES, nbytes - start))
    except BaseException:
        os.ftruncate(fd, before)
        raise


def map_writable(fd: int, *, touch: bool) -> mmap.mmap:
    """Map a whole file; touched, a copy into it costs no more than into memory used before."""
    memory = mmap.mmap(fd, 0)
    if touch:
        with suppress(OSError):  # an older system: the first snapshot pays for it
            for start in range(0, len(memory), _TOUCH_NBYTES):
                step = min(_TOUCH_NBYTES, len(memory) - start)
                memory.madvise(_MADV_POPULATE_WRITE, start, step)
    return memory


def detach_in_child(memory: mmap.mmap, fd: int) -> None:
    """In a forked child: have nothing in the place of a file, and of its mapping, that it shares.

    Else what the parent gives back stays as long as the child lives. Neither unmapped nor closed:
    what comes to lie there instead would go when the objects that have it end.
    """
    remap = ctypes.CDLL(None).mmap
    remap.restype = ctypes.c_void_p
    remap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    flags = _MAP_FIXED | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    remap(address, len(memory), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    shared = os.fstat(fd)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/dev/fd"):  # a mapping has a descriptor of its own, which it hides
        with suppress(OSError):
            if os.path.samestat(os.fstat(int(name)), shared):
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


def _allocate(fd: int, start: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, nbytes)
    else:
        os.ftruncate(fd, start + nbytes)


def _check_memory(nbytes: int) -> None:
    """Refuse what would have the system end a process for the want of memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(one.split()[1]) << 10 for one in lines if "MemAvailable" in one)
    except (OSError, StopIteration, ValueError):
        return
    if nbytes > available:
        raise OSError(errno.ENOMEM, f"{nbytes:,} bytes are needed, and {available:,} are available")
