"""Host memory: copies that release the GIL, scratch buffers, and files of shared memory.

A page of shared memory that the system cannot supply at its first write ends the process (SIGBUS).
So it is reserved before use, and a mapped file is never truncated.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.errors import CorruptError

# Below this, finding the addresses takes as long as the copy.
_MIN_MOVE_NBYTES = 256 << 10

# Room for a read of 8 MiB, or a block, at any alignment; a multiple of a huge page.
BUFFER_NBYTES = 10 << 20

# The first touch of new memory is slow, so buffers are cached, up to this size in total.
MAX_KEPT_NBYTES = 128 << 20


# Unlike `ctypes.memmove`, this keeps the GIL: getting it back takes longer than a small copy.
_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def address_of(view: memoryview) -> int:
    """Return the address of writable memory, which must not be empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes between buffers of equal length; large copies release the GIL."""
    if source.readonly or len(source) < _MIN_MOVE_NBYTES:
        target[:] = source
        return
    assert len(target) == len(source), f"{len(source)} bytes into {len(target)}"
    ctypes.memmove(address_of(target), address_of(source), len(source))


def move(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between addresses without releasing the GIL: for small copies."""
    _memmove(target, source, nbytes)


def allocate_scratch(nbytes: int) -> memoryview:
    """Return new memory that begins on a page. Pages cost nothing before they are used.

    Huge pages take a third of the time to zero and to write directly. A forked child has its own
    copy.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class BufferPool:
    """Scratch buffers of one size, as many as are used together, cached for reuse. Thread-safe."""

    def __init__(self, nbytes: int = BUFFER_NBYTES) -> None:
        self._nbytes = nbytes
        self._max_free = max(1, MAX_KEPT_NBYTES // nbytes)
        self._free: list[memoryview] = []

    def fitting(self, nbytes: int) -> BufferPool:
        """Return a pool with buffers of at least this size: this one, or a new one."""
        return self if nbytes <= self._nbytes else BufferPool(nbytes)

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """Lend a buffer that begins on a page. Its old content is not cleared."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = allocate_scratch(self._nbytes)
        yield buffer
        # Not after an error: a call that hangs may still use the buffer.
        if len(self._free) < self._max_free:
            self._free.append(buffer)

    def clear(self) -> None:
        """Free the buffers that are not in use."""
        self._free.clear()


# --- shared memory ---------------------------------------------------------------------------

# Reserve and touch in steps: a signal makes the kernel restart a step.
_RESERVE_NBYTES = 256 << 20
_TOUCH_NBYTES = 32 << 20

# Each touching call has the lock of the process's memory: other threads, also of a driver, wait
# for it. Eight calls for 32 MiB each stopped a training step for 90 ms.
_MADVISE_NBYTES = 2 << 20

# Several threads touch memory of at least this size: one thread takes 0.4 s for 1 GiB.
_MIN_PARALLEL_NBYTES = 256 << 20
_MAX_THREADS = 8

# Linux 5.14; the mmap module has no name for it.
_MADV_POPULATE_WRITE = 23

# The mmap module has no name for it; the value is the same on all systems that we know.
_MAP_FIXED = 0x10

_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


def is_out_of_space(error: OSError) -> bool:
    """Return True if there is not enough memory of this kind; another kind may have room."""
    return error.errno in _OUT_OF_SPACE


def create_named(path: str, nbytes: int) -> int:
    """Create a file of shared memory, reserve all of it, and return its descriptor.

    The file gets its name when it is complete. A process that has mapped an older file of this name
    keeps the older file. Raises OSError if memory is short.
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
    """Return the descriptor of memory that is freed when no process has it open."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOTSUP, "this system has no anonymous shared memory")
    fd = os.memfd_create("dist_ckpt", os.MFD_CLOEXEC)
    try:
        reserve(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_existing(path: str, *, writable: bool) -> int:
    """Open a file of this user, by its path or in /proc. CorruptError for other files."""
    mode = os.O_RDWR if writable else os.O_RDONLY
    # Entries in /proc are links to files that a process of this user has open.
    follow = 0 if path.startswith("/proc/") else os.O_NOFOLLOW
    try:
        fd = os.open(path, mode | follow | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptError(f"{path} cannot be opened: {error.strerror}") from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise CorruptError(f"{path} is not a file of this user: it stays unchanged")


def reserve(fd: int, nbytes: int) -> None:
    """Grow a file, with memory behind every new byte. An OSError leaves the old size."""
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
    """Map a whole file. After `touch`, the first copy into it is as fast as later ones."""
    memory = mmap.mmap(fd, 0)
    if touch:
        _touch(memory)
    return memory


def _touch(memory: mmap.mmap) -> None:
    """Touch memory. On an older system nothing is touched: the first snapshot is slower."""
    threads = min(_MAX_THREADS, (os.cpu_count() or 1) // 2)
    madvise = ctypes.CDLL(None).madvise  # unlike the method of `mmap`, it releases the GIL
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def populate(first: int) -> None:
        end = min(first + _TOUCH_NBYTES, len(memory))
        for start in range(first, end, _MADVISE_NBYTES):
            nbytes = min(_MADVISE_NBYTES, end - start)
            madvise(address + start, nbytes, _MADV_POPULATE_WRITE)

    steps = range(0, len(memory), _TOUCH_NBYTES)
    if threads <= 1 or len(memory) < _MIN_PARALLEL_NBYTES:
        for start in steps:
            populate(start)
    else:
        parallel_for(populate, steps, threads=threads)


def detach_in_child(memory: mmap.mmap, fd: int) -> None:
    """Replace a shared file and its mapping by nothing. Call it in a forked child.

    Otherwise memory that the parent frees stays as long as the child lives. Nothing is unmapped or
    closed: the address or the descriptor could get another use, which the owner would then end.
    """
    remap = ctypes.CDLL(None).mmap
    remap.restype = ctypes.c_void_p
    remap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    flags = _MAP_FIXED | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    remap(address, len(memory), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    shared = os.fstat(fd)
    devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/dev/fd"):  # a mapping has its own hidden descriptor
        with suppress(OSError):
            if os.path.samestat(os.fstat(int(name)), shared):
                os.dup2(devnull, int(name), inheritable=False)
    os.close(devnull)


def _allocate(fd: int, start: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, nbytes)
    else:
        os.ftruncate(fd, start + nbytes)


def _check_memory(nbytes: int) -> None:
    """Refuse a size that would make the system kill a process."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError):
        return
    if nbytes > available:
        raise OSError(errno.ENOMEM, f"{nbytes:,} bytes are needed, and {available:,} are available")
